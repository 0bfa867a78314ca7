package egress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// Dialer connects to what a policy allows. A name is resolved once and what it resolves to is vetted and dialled, not the name: the answer to
// a second question could be another.
type Dialer struct {
	Policy Policy

	// Resolve looks up the addresses of a name; nil is the system's resolver.
	Resolve func(ctx context.Context, name string) ([]netip.Addr, error)

	// Dial connects to a vetted address; nil is the system's.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// Refused, where it is set, is called with every refusal.
	Refused func(error)
}

// DialContext connects to host:port. Where the policy denies any of the host's addresses, nobody is contacted and the error wraps [ErrDenied].
// Otherwise the addresses are tried in the resolver's order; each has an equal part of the time that is left.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	addrs, err := d.addresses(ctx, host)
	if err != nil {
		return nil, err
	}
	if !d.Policy.exempts(host) {
		for _, addr := range addrs {
			if err := d.Policy.CheckAddr(addr); err != nil {
				err = fmt.Errorf("%s: %w", host, err)
				if d.Refused != nil {
					d.Refused(err)
				}
				return nil, err
			}
		}
	}
	var conn net.Conn
	for i, addr := range addrs {
		conn, err = d.try(ctx, len(addrs)-i, network, net.JoinHostPort(addr.String(), port))
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	return conn, err
}

// addresses are those of a literal, or of a name; at least one.
func (d *Dialer) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if addr, err := netip.ParseAddr(normalHost(host)); err == nil {
		return []netip.Addr{addr}, nil // with its zone, without which a link-local address cannot be reached
	}
	if addr, ok := ParseAddr(host); ok {
		return []netip.Addr{addr}, nil
	}
	resolve := d.Resolve
	if resolve == nil {
		resolve = func(ctx context.Context, name string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", name)
		}
	}
	addrs, err := resolve(ctx, host)
	if err == nil && len(addrs) == 0 {
		err = fmt.Errorf("%s: no addresses", host)
	}
	return addrs, err
}

// try dials one of so many addresses that are left.
func (d *Dialer) try(ctx context.Context, left int, network, address string) (net.Conn, error) {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(deadline)/time.Duration(left))
		defer cancel()
	}
	dial := d.Dial
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	return dial(ctx, network, address)
}
