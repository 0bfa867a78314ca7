package rolter

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/rolter-ai/caddy-rolter/egress"
)

// What Rolter contacts is held to the egress policy at every connection. Requests to replicas are Caddy's: its HTTP transport resolves and dials them. So that
// a name which turns bad is not contacted, the name is resolved here, and the transport is given an address that was vetted. Beyond reach are connections over
// HTTP/3, those of transports that are not Caddy's own, and what a forward proxy resolves.

// What refusals are counted by.
const (
	purposeProxy    = "api_base"
	purposeEngine   = "engine" // its metrics, and where it publishes its events
	purposeEvents   = "kv_events"
	purposeTokenize = "tokenize"
	purposeLMCache  = "lmcache"
)

// dialerFor is the dialler for one purpose.
func dialerFor(policy egress.Policy, purpose string) *egress.Dialer {
	return &egress.Dialer{Policy: policy, Refused: func(error) { countRefused(purpose) }}
}

// loadTransport loads the proxy's transport, as the proxy itself would later, and holds it to the egress policy. It must be done before the proxy is
// provisioned, which begins with health checks.
func loadTransport(ctx caddy.Context, rp *reverseproxy.Handler, policy egress.Policy) error {
	if transportProtocol(rp.TransportRaw) != "http" {
		return nil
	}
	module, err := ctx.LoadModule(rp, "TransportRaw")
	if err != nil {
		return fmt.Errorf("loading transport: %w", err)
	}
	transport := module.(*reverseproxy.HTTPTransport)
	rp.Transport = transport
	guardTransport(transport, policy)
	return nil
}

func transportProtocol(raw json.RawMessage) string {
	var transport struct {
		Protocol string `json:"protocol"`
	}
	_ = json.Unmarshal(raw, &transport) // the proxy will say what is wrong
	return transport.Protocol
}

type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

// guardTransport has the transport dial only what the policy allows. The addresses of a name are tried one after the other.
func guardTransport(t *reverseproxy.HTTPTransport, policy egress.Policy) {
	dialer := *dialerFor(policy, purposeProxy)
	timeout := time.Duration(t.DialTimeout)
	if t.Resolver != nil && len(t.Resolver.Addresses) > 0 {
		dialer.Resolve = resolveAt(t.Resolver.Addresses, timeout)
	}
	// As for the transport, the timeout is for all addresses of a name together.
	t.Transport.DialContext = guarded(dialer, func(ctx context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, timeout)
	}, t.Transport.DialContext)
	if t.Transport.DialTLSContext != nil {
		// It has the TLS handshake in it, for which there is another timeout.
		t.Transport.DialTLSContext = guarded(dialer, context.WithCancel, t.Transport.DialTLSContext)
	}
}

func guarded(dialer egress.Dialer, limit func(context.Context) (context.Context, context.CancelFunc), dial dialFunc) dialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if info, ok := reverseproxy.GetDialInfo(ctx); ok {
			network, address = info.Network, info.Address
		}
		// A socket has no address, and a forward proxy was chosen by the operator.
		if strings.HasPrefix(network, "unix") || caddyhttp.GetVar(ctx, forwardProxyVar) != nil {
			return dial(ctx, network, address)
		}
		d, tried := dialer, false
		d.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			tried = true
			return dial(withoutDialInfo{ctx}, network, address)
		}
		ctx, cancel := limit(ctx)
		defer cancel()
		conn, err := d.DialContext(ctx, network, address)
		if err != nil && !tried {
			err = reverseproxy.NewDialError(err) // so that another target may be
		}
		return conn, err
	}
}

// resolveAt looks names up at the servers that the transport's configuration names, as the transport would.
func resolveAt(servers []string, timeout time.Duration) func(ctx context.Context, name string) ([]netip.Addr, error) {
	dialer := net.Dialer{Timeout: timeout}
	resolver := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		server, err := caddy.ParseNetworkAddressWithDefaults(servers[rand.IntN(len(servers))], "udp", 53)
		if err != nil {
			return nil, err
		}
		return dialer.DialContext(ctx, server.Network, server.JoinHostPort(0))
	}}
	return func(ctx context.Context, name string) ([]netip.Addr, error) {
		return resolver.LookupNetIP(ctx, "ip", name)
	}
}

// forwardProxyVar is the variable by which the transport knows that it goes through a forward proxy (reverseproxy.proxyVarKey).
const forwardProxyVar = "reverse_proxy.proxy"

// withoutDialInfo is a context that hides where the proxy wants to go, which the transport would prefer to the address that it is given.
type withoutDialInfo struct{ context.Context }

// Value implements [context.Context].
func (c withoutDialInfo) Value(key any) any {
	v := c.Context.Value(key)
	if _, ok := v.(reverseproxy.DialInfo); ok {
		return nil
	}
	return v
}
