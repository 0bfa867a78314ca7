package egress

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// network is a resolver and a dialler that remember what they were asked.
type network struct {
	answers [][]netip.Addr // one after the other; the last is repeated
	refuses []string

	asked  []string
	dialed []string
}

func (n *network) dialer(p Policy) *Dialer {
	return &Dialer{
		Policy: p,
		Resolve: func(_ context.Context, name string) ([]netip.Addr, error) {
			n.asked = append(n.asked, name)
			if len(n.answers) == 0 {
				return nil, nil
			}
			answer := n.answers[0]
			if len(n.answers) > 1 {
				n.answers = n.answers[1:]
			}
			return answer, nil
		},
		Dial: func(_ context.Context, _, address string) (net.Conn, error) {
			n.dialed = append(n.dialed, address)
			if slices.Contains(n.refuses, address) {
				return nil, errors.New("refused")
			}
			conn, _ := net.Pipe()
			return conn, nil
		},
	}
}

func addrs(all ...string) (parsed []netip.Addr) {
	for _, a := range all {
		parsed = append(parsed, netip.MustParseAddr(a))
	}
	return parsed
}

func TestDialsWhatWasVetted(t *testing.T) {
	blocking := Policy{BlockLinkLocal: true, BlockMetadata: true, BlockLoopback: true}
	for _, tc := range []struct {
		name    string
		policy  Policy
		address string
		answer  []netip.Addr
		refuses []string
		dialed  []string
		denied  bool
		fails   bool
	}{
		{name: "a name is dialled by its address", policy: Default(), address: "vllm-1:8000", answer: addrs("10.0.0.1"), dialed: []string{"10.0.0.1:8000"}},
		{name: "IPv6", policy: Default(), address: "vllm-1:8000", answer: addrs("fd00::1"), dialed: []string{"[fd00::1]:8000"}},
		{name: "the next one when one refuses", policy: Default(), address: "vllm-1:8000", answer: addrs("fd00::1", "10.0.0.1"),
			refuses: []string{"[fd00::1]:8000"}, dialed: []string{"[fd00::1]:8000", "10.0.0.1:8000"}},
		{name: "all refuse", policy: Default(), address: "vllm-1:8000", answer: addrs("10.0.0.1"), refuses: []string{"10.0.0.1:8000"},
			dialed: []string{"10.0.0.1:8000"}, fails: true},
		{name: "a literal", policy: Default(), address: "[fd00::1]:8000", dialed: []string{"[fd00::1]:8000"}},
		{name: "a literal in another spelling", policy: Default(), address: "0x0a000001:8000", dialed: []string{"10.0.0.1:8000"}},
		{name: "a denied literal", policy: Default(), address: "169.254.169.254:80", denied: true},
		{name: "a denied literal with a zone", policy: Default(), address: "[fe80::1%eth0]:80", denied: true},
		{name: "a denied literal in another spelling", policy: Default(), address: "2852039166:80", denied: true},
		{name: "a name that leads to a denied address", policy: Default(), address: "meta:80", answer: addrs("169.254.169.254"), denied: true},
		{name: "one of several is denied", policy: Default(), address: "meta:80", answer: addrs("10.0.0.1", "::ffff:169.254.169.254"), denied: true},
		{name: "a name that leads there through a tunnel", policy: Default(), address: "meta:80", answer: addrs("2002:a9fe:a9fe::1"), denied: true},
		{name: "loopback", policy: blocking, address: "localhost:80", answer: addrs("::1", "127.0.0.1"), denied: true},
		{name: "an allowed name", policy: Policy{BlockLoopback: true, AllowHosts: []string{"LocalHost."}}, address: "localhost:80",
			answer: addrs("127.0.0.1"), dialed: []string{"127.0.0.1:80"}},
		{name: "an allowed address", policy: Policy{BlockLinkLocal: true, AllowHosts: []string{"0xa9fea9fe"}}, address: "169.254.169.254:80",
			dialed: []string{"169.254.169.254:80"}},
		{name: "a name is not allowed because its address is", policy: Policy{BlockLinkLocal: true, AllowHosts: []string{"169.254.169.254"}},
			address: "meta:80", answer: addrs("169.254.169.254"), denied: true},
		{name: "no addresses", policy: Default(), address: "vllm-1:80", fails: true},
		{name: "no port", policy: Default(), address: "vllm-1", fails: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := &network{answers: [][]netip.Addr{tc.answer}, refuses: tc.refuses}
			d, refused := n.dialer(tc.policy), 0
			d.Refused = func(error) { refused++ }
			conn, err := d.DialContext(t.Context(), "tcp", tc.address)
			if conn != nil {
				defer conn.Close()
			}
			if (err != nil) != (tc.denied || tc.fails) || errors.Is(err, ErrDenied) != tc.denied {
				t.Errorf("error %v, want denied %v, failed %v", err, tc.denied, tc.fails)
			}
			if (refused == 1) != tc.denied {
				t.Errorf("%d refusals were reported, denied %v", refused, tc.denied)
			}
			if !slices.Equal(n.dialed, tc.dialed) {
				t.Errorf("dialled %v, want %v", n.dialed, tc.dialed)
			}
			if len(n.asked) > 1 {
				t.Errorf("asked the resolver for %v", n.asked)
			}
		})
	}
}

// A name that is rebound between two connections is refused, and what it leads to then is not contacted.
func TestANameThatTurnsBadIsNotContacted(t *testing.T) {
	replica, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer replica.Close()
	connections := make(chan net.Conn, 10)
	go func() {
		for {
			conn, err := replica.Accept()
			if err != nil {
				close(connections)
				return
			}
			connections <- conn
		}
	}()
	_, port, _ := net.SplitHostPort(replica.Addr().String())

	// Everything listens on loopback here: what is bad is another address of it.
	n := &network{answers: [][]netip.Addr{addrs("127.0.0.1"), addrs("fe80::1"), addrs("127.0.0.1", "169.254.169.254"), addrs("127.0.0.1")}}
	d := n.dialer(Default())
	d.Dial = nil
	for i, denied := range []bool{false, true, true, false} {
		conn, err := d.DialContext(t.Context(), "tcp", net.JoinHostPort("replica.example", port))
		if errors.Is(err, ErrDenied) != denied || (err != nil) != denied {
			t.Fatalf("connection %d: %v, want denied %v", i, err, denied)
		}
		if conn != nil {
			_ = (<-connections).Close()
			_ = conn.Close()
		}
	}
	_ = replica.Close()
	for conn := range connections {
		_ = conn.Close()
		t.Error("the replica was contacted when its name led elsewhere")
	}
}

// An address that does not answer leaves time for the next.
func TestAddressesShareTheTime(t *testing.T) {
	d := &Dialer{
		Resolve: func(context.Context, string) ([]netip.Addr, error) { return addrs("fd00::1", "10.0.0.1"), nil },
		Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
			if address == "10.0.0.1:80" {
				conn, _ := net.Pipe()
				return conn, nil
			}
			<-ctx.Done()
			return nil, ctx.Err()
		},
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	conn, err := d.DialContext(ctx, "tcp", "vllm-1:80")
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	cancel()
	if _, err := d.DialContext(ctx, "tcp", "vllm-1:80"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want canceled", err)
	}
}

func TestResolvesWithTheSystem(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	conn, err := (&Dialer{Policy: Default()}).DialContext(t.Context(), "tcp", "localhost:"+port)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	if _, err := (&Dialer{Policy: Policy{BlockLoopback: true}}).DialContext(t.Context(), "tcp", "localhost:"+port); !errors.Is(err, ErrDenied) {
		t.Errorf("%v, want denied", err)
	}
}
