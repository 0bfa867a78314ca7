package integration

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// explained has the gateway tell an attempt's number and reason in headers of the test's own.
const explained = "header >X-Attempt {http.rolter.attempt}\nheader >X-Why {http.rolter.reason}\n"

// policySite is a reverse_proxy to the stand-ins with further lines in its block.
func policySite(lines string, stubs ...*stub) string {
	var b strings.Builder
	b.WriteString("reverse_proxy ")
	for _, s := range stubs {
		b.WriteString(s.addr + " ")
	}
	b.WriteString("{\n" + lines + "\n}\n")
	return b.String()
}

// affinity checks that a conversation stays where it began while strangers are spread.
func affinity(t *testing.T, g *gateway, path string, stubs []*stub) {
	t.Helper()
	rng := newRand(3)
	served := func(body string) (by int, answer reply) {
		t.Helper()
		before := counts(stubs)
		answer = g.served(path, body)
		g.idle() // without the handler, the record stands when the request has ended
		by = -1
		for i, n := range counts(stubs) {
			if n != before[i] {
				by = i
			}
		}
		return by, answer
	}
	used := make(map[int]bool)
	for n := range 3 {
		turns := []said{{"system", prose(rng, 300)}, {"user", "first"}}
		home, answer := served(chatBody("m", turns...))
		used[home] = true
		if why := answer.header.Get("X-Why"); why != "cold" {
			t.Errorf("conversation %d began because of %q, want cold", n, why)
		}
		for turn := range 3 {
			turns = append(turns, said{"assistant", prose(rng, 1000)}, said{"user", fmt.Sprintf("question %d", turn)})
			by, answer := served(chatBody("m", turns...))
			if by != home {
				t.Errorf("conversation %d went to %d at turn %d because of %q, want %d", n, by, turn+2, answer.header.Get("X-Why"), home)
			}
		}
	}
	if len(used) != len(stubs) {
		t.Errorf("three conversations are on %d of %d targets", len(used), len(stubs))
	}
}

func TestPolicyInAReverseProxy(t *testing.T) {
	cases := []struct {
		name   string
		lines  string // with all the upstreams for %s
		silent bool   // the policy gets no response to put headers on
	}{
		{name: "static upstreams", lines: "to %s\nlb_policy rolter cache_aware"},
		{name: "the default strategy", lines: "to %s\nlb_policy rolter"},
		{name: "fallback of header", lines: "to %s\nlb_policy header X-Pin {\nfallback rolter cache_aware\n}", silent: true},
		{name: "fallback of query", lines: "to %s\nlb_policy query pin {\nfallback rolter cache_aware\n}", silent: true},
		{name: "fallback of cookie", lines: "to %s\nlb_policy cookie pin {\nfallback rolter cache_aware\n}"},
		{name: "dynamic multi", lines: "lb_policy rolter\ndynamic multi {\n%s}"},
	}
	var (
		site strings.Builder
		all  [][]*stub
	)
	site.WriteString(explained)
	for i, c := range cases {
		stubs := newStubs(t, 3, nil)
		all = append(all, stubs)
		upstreams := stubs[0].addr + " " + stubs[1].addr + " " + stubs[2].addr
		if strings.Contains(c.lines, "dynamic") {
			upstreams = dynamicA(stubs)
		}
		fmt.Fprintf(&site, "handle /%d/* {\nreverse_proxy {\n%s\n}\n}\n", i, fmt.Sprintf(c.lines, upstreams))
	}
	g := startGateway(t, site.String())
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			stubs, path := all[i], fmt.Sprintf("/%d%s", i, chatPath)
			affinity(t, g, path, stubs)
			answer := g.served(path, asks("m", "Who serves?"))
			if (answer.target == "") != c.silent || (answer.reason == "") != c.silent {
				t.Errorf("decision headers say %q and %q", answer.target, answer.reason)
			}
			g.idle()
			recorded := 0
			for _, s := range stubs {
				recorded += g.state().promptsOf("", s.addr)
			}
			if recorded == 0 {
				t.Error("no prompts are recorded")
			}
		})
	}
}

// dynamicA is a dynamic upstream for each stand-in. An address resolves to itself.
func dynamicA(stubs []*stub) string {
	var b strings.Builder
	for _, s := range stubs {
		host, port, _ := strings.Cut(s.addr, ":")
		fmt.Fprintf(&b, "a %s %s\n", host, port)
	}
	return b.String()
}

const retryAll = "lb_retries 3\nlb_retry_match {\nexpression `{http.reverse_proxy.status_code} == 503 || {http.reverse_proxy.is_transport_error} == true`\n}\nfail_duration 20ms\n"

func TestPolicyRetriesWithTheWholeBody(t *testing.T) {
	long := strings.Repeat("word ", 400_000)
	for _, dynamic := range []bool{false, true} {
		t.Run(fmt.Sprintf("dynamic %v", dynamic), func(t *testing.T) {
			stubs := newStubs(t, 3, nil)
			bad, good := stubs[:2], stubs[2]
			var site string
			if dynamic {
				site = policySite("lb_policy rolter\n" + retryAll + "dynamic multi {\n" + dynamicA(stubs) + "}")
			} else {
				site = policySite("lb_policy rolter\n"+retryAll, stubs...)
			}
			// The load that another site puts on a target counts here, too.
			g := startGateway(t, explained+"handle_path /sole/* {\n"+rolterFor(stubs, soleRoutes(good))+"}\nhandle {\n"+site+"}\n")
			for _, f := range failures {
				for _, chunked := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s chunked %v", f.name, chunked), func(t *testing.T) {
						g.waitFor("no target to rest", g.noFails)
						free := occupyBehind(g, "/sole", good)
						defer free()
						for _, s := range bad {
							f.fail(s)
						}
						before, recorded := counts(stubs), g.state()
						sent := asks("m", fmt.Sprintf("%s %v %s", f.name, chunked, long))
						var body io.Reader = strings.NewReader(sent)
						if chunked {
							body = io.MultiReader(body)
						}
						answer, err := do(testClient, newRequest(t.Context(), http.MethodPost, g.URL+chatPath, body))
						for _, s := range bad {
							f.mend(s)
							s.answers(completion)
						}
						if err != nil {
							t.Fatal(err)
						}
						if answer.status != http.StatusOK || answer.target != good.addr || answer.header.Get("X-Attempt") != "3" {
							t.Errorf("status %d from %q at attempt %s, want 200 from %q at attempt 3", answer.status, answer.target, answer.header.Get("X-Attempt"), good.addr)
						}
						for i, s := range stubs {
							for _, got := range s.received()[before[i]:] {
								if got.header.Get("X-Occupy") == "" && got.body != sent {
									t.Errorf("%s received a body of %d bytes that is not the client's (%d bytes)", s.name, len(got.body), len(sent))
								}
							}
						}
						g.waitFor("the record", func() bool { return g.state().promptsOf("", good.addr) == recorded.promptsOf("", good.addr)+1 })
						for _, s := range bad {
							if got, want := g.state().promptsOf("", s.addr), recorded.promptsOf("", s.addr); got != want {
								t.Errorf("%d prompts are recorded for %s, want %d", got, s.name, want)
							}
						}
					})
				}
			}
			g.idle()
		})
	}
}

// occupyBehind puts a request in flight at a stand-in through a handler behind a path prefix.
func occupyBehind(g *gateway, prefix string, s *stub) (free func()) {
	g.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	before := s.active.Load()
	go func() {
		defer close(done)
		_, _ = do(testClient, newRequest(ctx, http.MethodPost, g.URL+prefix+chatPath, strings.NewReader(asks("only-"+s.name, "stay")), "X-Occupy", "yes"))
	}()
	g.waitFor("a request to occupy "+s.name, func() bool { return s.active.Load() > before })
	return func() {
		cancel()
		<-done
		g.waitFor(s.name+" to be free", func() bool { return s.active.Load() <= before })
	}
}

// Without the handler only the proxy sees the answer, and only the request's context tells that it has ended.
func TestPolicyReservationAndRecord(t *testing.T) {
	cases := []struct {
		name    string
		end     string
		cancel  string // "", "headers" or "stream": when the client goes
		prompts int
	}{
		{"success", "", "", 1},
		{"stream", "stream", "", 1},
		{"400", "400", "", 0},
		{"500", "500", "", 0},
		{"reset before the answer", "reset", "", 0},
		{"death in the stream", "die", "", 1},
		{"client goes before the headers", "hang", "headers", 0},
		{"client goes in the stream", "hang in the stream", "stream", 1},
		{"client that does not read goes", "pour", "stream", 1},
	}
	var (
		site  strings.Builder
		stubs []*stub
	)
	for i := range cases {
		s := newStub(t, "a", endsAsAsked)
		stubs = append(stubs, s)
		fmt.Fprintf(&site, "handle /%d/* {\n%s}\n", i, policySite("lb_policy rolter", s))
	}
	g := startGateway(t, site.String())
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := stubs[i]
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			url := fmt.Sprintf("%s/%d%s", g.URL, i, chatPath)
			r := newRequest(ctx, http.MethodPost, url, strings.NewReader(asks("m", "hi")), "X-End", c.end)
			if c.cancel == "headers" {
				gone := make(chan struct{})
				go func() {
					defer close(gone)
					_, _ = do(testClient, r)
				}()
				g.waitFor("the request to arrive", func() bool { return s.active.Load() == 1 && g.state().load(s.addr) == 1 })
				cancel()
				<-gone
			} else if resp, err := testClient.Do(r); err == nil {
				if c.cancel == "stream" {
					_, _ = io.ReadFull(resp.Body, make([]byte, 10))
					if n := g.state().load(s.addr); n != 1 {
						t.Errorf("%d requests in flight, want 1", n)
					}
				} else {
					_, _ = io.Copy(io.Discard, resp.Body)
				}
				_ = resp.Body.Close()
			}
			g.idle()
			g.waitFor("the engine to be told", func() bool { return s.active.Load() == 0 })
			if n := g.state().promptsOf("", s.addr); n != c.prompts {
				t.Errorf("%d prompts are recorded, want %d", n, c.prompts)
			}
		})
	}
}

// What the policy does not look at it lets through as it comes.
func TestPolicyLetsThroughWhatItDoesNotRead(t *testing.T) {
	stubs := newStubs(t, 2, nil)
	begun := make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadFull(r.Body, make([]byte, 1000))
		close(begun)
		n, _ := io.Copy(io.Discard, r.Body)
		_, _ = fmt.Fprint(w, 1000+n)
	}))
	defer engine.Close()
	const limited = "lb_policy rolter {\nmax_body 10KB\n}\n"
	g := startGateway(t, explained+
		"handle /streaming/* {\nreverse_proxy "+engine.URL+" {\n"+limited+"}\n}\n"+
		"handle /empty/* {\nreverse_proxy {\nlb_policy rolter\ndynamic multi {\n}\n}\n}\n"+
		"handle {\n"+policySite(limited, stubs...)+"}\n")
	last := func() stubRequest {
		t.Helper()
		var all []stubRequest
		for _, s := range stubs {
			all = append(all, s.received()...)
			s.mu.Lock()
			s.requests = nil
			s.mu.Unlock()
		}
		if len(all) != 1 {
			t.Fatalf("%d requests arrived, want 1", len(all))
		}
		return all[0]
	}
	big := asks("m", strings.Repeat("b", 3<<20))
	for _, c := range []struct {
		name, method, path, body string
		chunked                  bool
		why                      string
	}{
		{"GET", http.MethodGet, "/v1/models", "", false, "fallback"},
		{"GET of the API", http.MethodGet, chatPath, "", false, "fallback"},
		{"POST of something else", http.MethodPost, "/upload", "not JSON", false, "fallback"},
		{"too large", http.MethodPost, chatPath, big, false, "fallback"},
		{"too large, chunked", http.MethodPost, chatPath, big, true, "fallback"},
		{"just small enough", http.MethodPost, textPath, textBody("m", strings.Repeat("c", 10_000-len(textBody("m", "")))), false, "cold"},
		{"not JSON", http.MethodPost, chatPath, "{\"model\":", false, "fallback"},
		{"empty", http.MethodPost, chatPath, "", false, "fallback"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var body io.Reader
			if c.body != "" {
				body = bytes.NewReader([]byte(c.body))
			}
			if c.chunked {
				body = io.MultiReader(body)
			}
			answer, err := do(testClient, newRequest(t.Context(), c.method, g.URL+c.path, body))
			if err != nil || answer.status != http.StatusOK {
				t.Fatalf("status %d, %v", answer.status, err)
			}
			got := last()
			if got.method != c.method || got.uri != c.path || got.body != c.body {
				t.Errorf("%s %s with %d bytes arrived, want %s %s with %d", got.method, got.uri, len(got.body), c.method, c.path, len(c.body))
			}
			why := answer.header.Get("X-Why")
			if c.why == "cold" && why != "cold" || c.why != "cold" && why != "fallback" && why != "no_prompt" {
				t.Errorf("reason %q, want %q", why, c.why)
			}
			g.idle()
		})
	}

	// A large body is streamed on: the engine has its beginning before the client has sent its end.
	t.Run("not held back", func(t *testing.T) {
		in, out := io.Pipe()
		go func() {
			_, _ = io.WriteString(out, big[:1<<20])
			select {
			case <-begun:
				_, _ = io.WriteString(out, big[1<<20:])
				_ = out.Close()
			case <-t.Context().Done():
				_ = out.CloseWithError(context.Canceled)
			}
		}()
		answer, err := do(testClient, newRequest(t.Context(), http.MethodPost, g.URL+"/streaming"+chatPath, in))
		if err != nil || answer.body != fmt.Sprint(len(big)) {
			t.Errorf("the engine received %s bytes, %v; want %d", answer.body, err, len(big))
		}
	})

	t.Run("an empty pool", func(t *testing.T) {
		for _, body := range []string{asks("m", "hi"), ""} {
			if answer := g.post("/empty"+chatPath, body); answer.status != http.StatusServiceUnavailable {
				t.Errorf("status %d, want 503", answer.status)
			}
		}
		g.idle()
	})
}
