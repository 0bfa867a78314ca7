// Package egress decides which endpoints Rolter itself may contact: event streams, cache controllers and the replicas.
//
// A configuration is often written by other people than those who run the gateway, and a gateway stands where the metadata
// service of a cloud can be reached. So link-local addresses and the known metadata addresses are denied unless allowed by name.
package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/idna"
)

// ErrDenied is wrapped by every refusal.
var ErrDenied = errors.New("denied by the egress policy")

// Policy says what may be contacted. The zero value allows everything; see [Default].
type Policy struct {
	BlockLinkLocal bool // 169.254.0.0/16 and fe80::/10
	BlockMetadata  bool // metadata services of clouds outside the link-local range
	BlockPrivate   bool // RFC 1918 and fc00::/7
	BlockLoopback  bool // 127.0.0.0/8 and ::1, and the unspecified address, which connects to loopback

	// AllowHosts are exempt: exact host names or addresses, in any spelling.
	AllowHosts []string
}

// Default denies link-local and metadata addresses. Loopback and private networks are where replicas live.
func Default() Policy { return Policy{BlockLinkLocal: true, BlockMetadata: true} }

// metadata are the metadata services that are not on a link-local address: AWS over IPv6, Azure's wire server, Alibaba Cloud, Oracle Cloud.
var metadata = []netip.Addr{
	netip.MustParseAddr("fd00:ec2::254"),
	netip.MustParseAddr("168.63.129.16"),
	netip.MustParseAddr("100.100.100.200"),
	netip.MustParseAddr("192.0.0.192"),
}

// Prefixes of IPv6 addresses that lead to an IPv4 address which is part of them.
var (
	compatible = netip.MustParsePrefix("::/96")          // RFC 4291, section 2.5.5.1; obsolete
	nat64      = netip.MustParsePrefix("64:ff9b::/96")   // RFC 6052
	localNAT64 = netip.MustParsePrefix("64:ff9b:1::/48") // RFC 8215
	sixToFour  = netip.MustParsePrefix("2002::/16")      // RFC 3056
	teredo     = netip.MustParsePrefix("2001::/32")      // RFC 4380
)

// CheckHost vets the host of an endpoint: a literal address, in every spelling that a resolver would take, is vetted at once; a name is
// not resolved and passes.
func (p Policy) CheckHost(host string) error {
	addr, ok := ParseAddr(host)
	if !ok || p.exempts(host) {
		return nil
	}
	return p.CheckAddr(addr)
}

// exempts says whether the host is among AllowHosts.
func (p Policy) exempts(host string) bool {
	name := normalHost(host)
	addr, literal := ParseAddr(host)
	return slices.ContainsFunc(p.AllowHosts, func(allowed string) bool {
		if normalHost(allowed) == name {
			return true
		}
		a, ok := ParseAddr(allowed)
		return literal && ok && a == addr
	})
}

// CheckAddr vets an address that is about to be contacted, and the IPv4 addresses that it may lead to.
func (p Policy) CheckAddr(addr netip.Addr) error {
	addr = canonical(addr)
	if err := p.check(addr); err != nil {
		return err
	}
	for _, inner := range embedded(addr) {
		if err := p.check(inner); err != nil {
			return err
		}
	}
	return nil
}

func (p Policy) check(addr netip.Addr) error {
	switch {
	case p.BlockMetadata && slices.Contains(metadata, addr):
		return fmt.Errorf("metadata service address %w", ErrDenied)
	case p.BlockLinkLocal && addr.IsLinkLocalUnicast():
		return fmt.Errorf("link-local address %w", ErrDenied)
	case p.BlockLoopback && (addr.IsLoopback() || addr.IsUnspecified()):
		return fmt.Errorf("loopback address %w", ErrDenied)
	case p.BlockPrivate && addr.IsPrivate():
		return fmt.Errorf("private address %w", ErrDenied)
	}
	return nil
}

// ParseAddr reads a literal address: IPv4 and IPv6 in the usual forms, IPv4 in the forms of inet_aton(3) (fewer than four parts, hexadecimal,
// octal), brackets, a trailing dot and a zone. The result is canonical: an IPv4 address that is written as an IPv6 one is taken out.
func ParseAddr(host string) (netip.Addr, bool) {
	host = normalHost(host)
	if addr, err := netip.ParseAddr(host); err == nil {
		return canonical(addr), true
	}
	parts := strings.Split(host, ".")
	if len(parts) > 4 {
		return netip.Addr{}, false
	}
	var v4 uint64
	for i, part := range parts {
		// Base 0 reads 0x and a leading 0 as inet_aton does; what else it would read is excluded.
		if part == "" || strings.ContainsAny(part, "_oObB+-") && !strings.HasPrefix(part, "0x") || strings.ContainsAny(part, "_+-") {
			return netip.Addr{}, false
		}
		n, err := strconv.ParseUint(part, 0, 32)
		if err != nil {
			return netip.Addr{}, false
		}
		if i < len(parts)-1 {
			if n > 255 {
				return netip.Addr{}, false
			}
			v4 |= n << (24 - 8*i)
			continue
		}
		if n >= 1<<(32-8*i) { // the last part fills all bytes that are left
			return netip.Addr{}, false
		}
		v4 |= n
	}
	return netip.AddrFrom4([4]byte{byte(v4 >> 24), byte(v4 >> 16), byte(v4 >> 8), byte(v4)}), true
}

// canonical takes an IPv4 address out of an IPv6 one that is only another way to write it, and drops the zone.
func canonical(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if nat64.Contains(addr) || compatible.Contains(addr) && !addr.IsUnspecified() && !addr.IsLoopback() {
		return v4At(addr, 12, 13, 14, 15)
	}
	return addr
}

// embedded are the IPv4 addresses to which a tunnel or a translator may take what is sent to the address.
func embedded(addr netip.Addr) []netip.Addr {
	switch {
	case sixToFour.Contains(addr):
		return []netip.Addr{v4At(addr, 2, 3, 4, 5)}
	case teredo.Contains(addr):
		client := v4At(addr, 12, 13, 14, 15).As4()
		for i := range client {
			client[i] = ^client[i]
		}
		return []netip.Addr{v4At(addr, 4, 5, 6, 7), netip.AddrFrom4(client)}
	case localNAT64.Contains(addr):
		// The operator chooses the length of the prefix: /48, /56, /64 or /96. Byte 8 is never part of the address.
		return []netip.Addr{v4At(addr, 6, 7, 9, 10), v4At(addr, 7, 9, 10, 11), v4At(addr, 9, 10, 11, 12), v4At(addr, 12, 13, 14, 15)}
	}
	return nil
}

// v4At is the IPv4 address in four bytes of an IPv6 one.
func v4At(addr netip.Addr, a, b, c, d int) netip.Addr {
	bytes := addr.As16()
	return netip.AddrFrom4([4]byte{bytes[a], bytes[b], bytes[c], bytes[d]})
}

// normalHost is the host in lower case, without brackets and trailing dot. Digits and dots of other scripts are what an HTTP client makes of them.
func normalHost(host string) string {
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if strings.ContainsFunc(host, func(c rune) bool { return c >= 0x80 }) {
		if ascii, err := idna.Lookup.ToASCII(host); err == nil {
			host = ascii
		}
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}
