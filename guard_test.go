package rolter

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/rolter-ai/caddy-rolter/egress"
)

// nameServer answers every question for an IPv4 address with the addresses that it has at the time, and others with none.
type nameServer struct {
	addr string

	mu    sync.Mutex
	addrs []netip.Addr
	asked int
}

func startNameServer(t *testing.T) *nameServer {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	s := &nameServer{addr: conn.LocalAddr().String()}
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			m.Response, m.Additionals = true, nil
			s.mu.Lock()
			if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
				s.asked++
				for _, a := range s.addrs {
					m.Answers = append(m.Answers, dnsmessage.Resource{
						Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class}, Body: &dnsmessage.AResource{A: a.As4()},
					})
				}
			}
			s.mu.Unlock()
			if packed, err := m.Pack(); err == nil {
				_, _ = conn.WriteTo(packed, from)
			}
		}
	}()
	return s
}

func (s *nameServer) answers(addrs ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addrs, s.asked = nil, 0
	for _, a := range addrs {
		s.addrs = append(s.addrs, netip.MustParseAddr(a))
	}
}

// listener counts who connects.
type listener struct {
	net.Listener
	port        string
	connections chan net.Conn
}

func listen(t *testing.T) *listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	counting := &listener{l, port, make(chan net.Conn, 100)}
	go func() {
		defer close(counting.connections)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			counting.connections <- conn
		}
	}()
	t.Cleanup(func() { _ = l.Close() })
	return counting
}

// rest closes the listener and returns how many connected that were not taken.
func (l *listener) rest() (n int) {
	_ = l.Close()
	for conn := range l.connections {
		_ = conn.Close()
		n++
	}
	return n
}

// guardedTransport is a transport that asks the name server, held to the policy.
func guardedTransport(t *testing.T, s *nameServer, policy egress.Policy) *reverseproxy.HTTPTransport {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	transport := &reverseproxy.HTTPTransport{Resolver: &reverseproxy.UpstreamResolver{Addresses: []string{s.addr}}, DialTimeout: caddy.Duration(10 * time.Second)}
	if err := transport.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	guardTransport(transport, policy)
	return transport
}

// denied says whether the policy refused. A [reverseproxy.DialError] does not unwrap.
func denied(err error) bool {
	return err != nil && strings.Contains(err.Error(), egress.ErrDenied.Error())
}

// A replica's name that is rebound is refused, and what it leads to then is not contacted.
func TestAReplicaWhoseNameTurnsBadIsNotContacted(t *testing.T) {
	names, replica := startNameServer(t), listen(t)
	transport := guardedTransport(t, names, egress.Default())
	ctx := context.WithValue(t.Context(), caddyhttp.VarsCtxKey, make(map[string]any))
	for i, step := range []struct {
		leads  []string
		denied bool
	}{
		{[]string{"127.0.0.1"}, false},
		{[]string{"169.254.169.254"}, true},
		{[]string{"127.0.0.1", "169.254.169.254"}, true},
		{[]string{"127.0.0.1"}, false},
	} {
		names.answers(step.leads...)
		conn, err := transport.Transport.DialContext(ctx, "tcp", "replica.test:"+replica.port)
		if denied(err) != step.denied || (err != nil) != step.denied {
			t.Fatalf("connection %d: %v, denied %v", i, err, step.denied)
		}
		if _, ok := errors.AsType[reverseproxy.DialError](err); ok != step.denied {
			t.Errorf("%v would not be tried on another target", err)
		}
		if conn != nil {
			_ = (<-replica.connections).Close()
			_ = conn.Close()
		}
		names.mu.Lock()
		if names.asked != 1 {
			t.Errorf("the name was resolved %d times for one connection", names.asked)
		}
		names.mu.Unlock()
	}
	if n := replica.rest(); n != 0 {
		t.Errorf("%d connections to what was denied", n)
	}
}

func TestTheGuardLeavesTheTransportItsWay(t *testing.T) {
	names, replica := startNameServer(t), listen(t)
	names.answers("127.0.0.1")
	vars := make(map[string]any)
	ctx := context.WithValue(t.Context(), caddyhttp.VarsCtxKey, vars)
	blocking := egress.Policy{BlockLoopback: true}

	if _, err := guardedTransport(t, names, blocking).Transport.DialContext(ctx, "tcp", "127.1:"+replica.port); !denied(err) {
		t.Errorf("a literal: %v, want denied", err)
	}
	allowed := egress.Policy{BlockLoopback: true, AllowHosts: []string{"replica.test"}}
	conn, err := guardedTransport(t, names, allowed).Transport.DialContext(ctx, "tcp", "replica.test:"+replica.port)
	if err != nil {
		t.Fatalf("an allowed name: %v", err)
	}
	_ = conn.Close()
	_ = (<-replica.connections).Close()

	// To a forward proxy the policy does not apply.
	vars[forwardProxyVar] = "http://proxy.test"
	conn, err = guardedTransport(t, names, blocking).Transport.DialContext(ctx, "tcp", "127.0.0.1:"+replica.port)
	if err != nil {
		t.Fatalf("a forward proxy: %v", err)
	}
	_ = conn.Close()
	_ = (<-replica.connections).Close()
	if n := replica.rest(); n != 0 {
		t.Errorf("%d connections too many", n)
	}
}
