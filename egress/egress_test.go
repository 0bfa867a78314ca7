package egress

import (
	"errors"
	"net/netip"
	"testing"
)

func TestLiteralsInEverySpelling(t *testing.T) {
	for _, host := range []string{
		"169.254.169.254", "169.254.169.254.", "2852039166", "0xa9fea9fe", "0xA9FEA9FE", "0251.0376.0251.0376", "0xa9.0xfe.0xa9.0xfe",
		"169.254.43518", "169.16689662", "::ffff:169.254.169.254", "[::ffff:a9fe:a9fe]", "64:ff9b::169.254.169.254", "64:ff9b::a9fe:a9fe",
		"fe80::1", "fe80::1%eth0", "[fe80::1%25eth0]", "FE80::1",
		"::169.254.169.254", "::a9fe:a9fe", "2002:a9fe:a9fe::1", "64:ff9b:1::169.254.169.254", "64:ff9b:1:a9fe:a9:fe00::", "64:ff9b:1:a9:fe:a9fe::",
		"2001:0:a9fe:a9fe::1", "2001:0:808:808::5601:5601", "1６9.254.169.254", "169。254。169。254", "[FE80::1%25ETH0]",
		"fd00:ec2::254", "168.63.129.16", "100.100.100.200", "192.0.0.192", "::ffff:100.100.100.200",
	} {
		if err := Default().CheckHost(host); !errors.Is(err, ErrDenied) {
			t.Errorf("%s: %v, want denied", host, err)
		}
	}
}

func TestAllowedByDefault(t *testing.T) {
	for _, host := range []string{
		"localhost", "127.0.0.1", "::1", "10.0.0.7", "192.168.1.1", "fd00::1", "8.8.8.8", "vllm-1", "vllm-1.svc.cluster.local.", "169.254.example.org",
		"2002:a00:1::1", "2001:0:808:808::1", "64:ff9b::808:808", "::8.8.8.8", "münchen.example",
		"1.2.3.4.5", "0x1g", "4294967296", "1.2.3.256", "", "0b11.1",
	} {
		if err := Default().CheckHost(host); err != nil {
			t.Errorf("%q: %v, want allowed", host, err)
		}
	}
}

func TestAllowHosts(t *testing.T) {
	p := Default()
	p.AllowHosts = []string{"169.254.169.254", "Meta.Internal"}
	for _, host := range []string{"169.254.169.254", "0xa9fea9fe", "[::ffff:169.254.169.254]", "meta.internal."} {
		if err := p.CheckHost(host); err != nil {
			t.Errorf("%s: %v, want allowed", host, err)
		}
	}
	if err := p.CheckHost("169.254.169.253"); err == nil {
		t.Error("an address that is not listed was allowed")
	}
}

func TestBlockPrivateAndLoopback(t *testing.T) {
	p := Policy{BlockPrivate: true, BlockLoopback: true}
	for addr, denied := range map[string]bool{
		"10.1.2.3": true, "172.16.0.1": true, "172.32.0.1": false, "192.168.0.1": true, "fc00::1": true,
		"2002:a01:203::1": true, "2002:7f00:1::": true, "::7f00:1": true, "64:ff9b::10.0.0.1": true, "::2": false,
		"127.8.8.8": true, "::1": true, "0.0.0.0": true, "::": true, "9.9.9.9": false, "169.254.0.1": false,
	} {
		if err := p.CheckAddr(netip.MustParseAddr(addr)); (err != nil) != denied {
			t.Errorf("%s: %v, denied %v", addr, err, denied)
		}
	}
}

func FuzzParseAddr(f *testing.F) {
	for _, s := range []string{"1.2.3.4", "0x7f.1", "::ffff:1.2.3.4", "[fe80::1%eth0]", "4294967295"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		addr, ok := ParseAddr(s)
		if !ok {
			return
		}
		if again, ok := ParseAddr(addr.String()); !ok || again != addr {
			t.Errorf("%q is %v, which reads as %v", s, addr, again)
		}
	})
}
