package integration

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
)

// Caddy does the transport to the client; what is decided, sent on and given back is the same over each.
func TestTransportsOfTheClient(t *testing.T) {
	stubs := newStubs(t, 3, nil)
	g := startGateway(t, "respond ok")
	secure := freeAddr(t)
	_, port, _ := net.SplitHostPort(secure)
	site := rolterFor(stubs, route("m", "", stubs...), soleRoutes(stubs...))
	config := fmt.Sprintf(`{
		admin %s
		persist_config off
		auto_https disable_redirects
		skip_install_trust
		local_certs
		http_port %s
		servers %s {
			protocols h1 h2c
		}
		servers %s {
			protocols h1 h2 h3
		}
	}
	http://%s {
		%s
	}
	https://localhost:%s {
		bind 127.0.0.1
		tls internal
		%s
	}`, strings.TrimPrefix(g.Admin, "http://"), mustPort(t, g.Addr), ":"+mustPort(t, g.Addr), "127.0.0.1:"+port, g.Addr, site, port, site)
	if _, err := g.admin(http.MethodPost, "/load", "text/caddyfile", config); err != nil {
		t.Fatal(err)
	}

	insecure := &tls.Config{InsecureSkipVerify: true, ServerName: "localhost"} // the certificate is of an authority that lives as long as the test
	h2c, h1, h2 := new(http.Protocols), new(http.Protocols), new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	h1.SetHTTP1(true)
	h2.SetHTTP2(true)
	h3 := &http3.Transport{TLSClientConfig: insecure.Clone()}
	t.Cleanup(func() { _ = h3.Close() })
	// The name is for the certificate; where it is, is known.
	dial := func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, secure)
	}
	for _, c := range []struct {
		name, url, proto string
		transport        http.RoundTripper
	}{
		{"HTTP/1.1", g.URL, "HTTP/1.1", &http.Transport{Protocols: h1}},
		{"h2c", g.URL, "HTTP/2.0", &http.Transport{Protocols: h2c}},
		{"HTTP/1.1 over TLS", "https://localhost:" + port, "HTTP/1.1", &http.Transport{Protocols: h1, DialContext: dial, TLSClientConfig: insecure.Clone()}},
		{"HTTP/2", "https://localhost:" + port, "HTTP/2.0", &http.Transport{Protocols: h2, DialContext: dial, TLSClientConfig: insecure.Clone()}},
		{"HTTP/3", "https://127.0.0.1:" + port, "HTTP/3.0", h3},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := &http.Client{Transport: c.transport, Timeout: 30 * time.Second}
			post := func(ctx context.Context, body io.Reader, header ...string) *http.Request {
				r := newRequest(ctx, http.MethodPost, c.url+chatPath, body, header...)
				r.Host = strings.Replace(strings.TrimPrefix(r.URL.Host, "//"), "127.0.0.1:"+port, "localhost:"+port, 1)
				return r
			}
			g.waitFor("the certificate", func() bool {
				resp, err := client.Do(newRequest(t.Context(), http.MethodGet, c.url+"/v1/models", nil))
				if err != nil {
					return false
				}
				_ = resp.Body.Close()
				return true
			})

			for _, s := range stubs {
				s.answers(completion)
			}
			body := asks("m", c.name+" "+strings.Repeat(c.name, 20_000))
			resp, err := client.Do(post(t.Context(), strings.NewReader(body)))
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if err != nil || resp.StatusCode != http.StatusOK || string(got) != completionBody {
				t.Fatalf("status %d, %v: %s", resp.StatusCode, err, got)
			}
			if resp.Proto != c.proto {
				t.Errorf("spoken is %s, want %s", resp.Proto, c.proto)
			}
			home := by(stubs, resp.Header.Get("X-Rolter-Target"))
			if home == nil {
				t.Fatalf("target %q", resp.Header.Get("X-Rolter-Target"))
			}
			if all := home.received(); all[len(all)-1].body != body {
				t.Errorf("the engine received %d bytes that are not the client's %d", len(all[len(all)-1].body), len(body))
			}

			// A retry, of a body without a length, while whoever is warm says that it is full.
			home.answers(says(503, "{}"))
			answer, err := do(client, post(t.Context(), io.MultiReader(strings.NewReader(body))))
			if err != nil || answer.status != http.StatusOK || answer.target == home.name {
				t.Fatalf("status %d from %q, %v", answer.status, answer.target, err)
			}
			if all := by(stubs, answer.target).received(); all[len(all)-1].body != body {
				t.Error("the retry's body is not the client's")
			}

			// A stream that arrives piece by piece, and the client that goes in its midst.
			confirmed, told := make(chan bool, 1), make(chan bool, 1)
			for _, s := range stubs {
				s.answers(func(w http.ResponseWriter, r *http.Request, _ []byte) {
					w.Header().Set("Content-Type", "text/event-stream")
					for i := 0; ; i++ {
						_, _ = fmt.Fprintf(w, "data: %d\n\n", i)
						_ = http.NewResponseController(w).Flush()
						select {
						case <-confirmed:
						case <-r.Context().Done():
							told <- true
							return
						}
					}
				})
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			resp, err = client.Do(post(ctx, strings.NewReader(body)))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			for i := range 4 {
				want := fmt.Sprintf("data: %d\n\n", i)
				piece := make([]byte, len(want))
				if _, err := io.ReadFull(resp.Body, piece); err != nil || string(piece) != want {
					t.Fatalf("piece %d: %q, %v", i, piece, err)
				}
				if i < 3 {
					confirmed <- true
				}
			}
			cancel()
			select {
			case <-told:
			case <-time.After(30 * time.Second):
				t.Fatal("the engine is not told that the client has gone")
			}
			g.idle()
		})
	}
}

func mustPort(t testing.TB, addr string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	return port
}
