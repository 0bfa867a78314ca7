package integration

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

// How a request ends is the client's wish: the header X-End tells the stand-in what to do.
func endsAsAsked(w http.ResponseWriter, r *http.Request, body []byte) {
	switch r.Header.Get("X-End") {
	case "hang": // until the client has gone
		<-r.Context().Done()
	case "hang in the stream":
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {\"choices\":[]}\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	case "pour": // more than all buffers on the way hold
		w.Header().Set("Content-Type", "text/event-stream")
		event := "data: " + strings.Repeat("x", 64<<10) + "\n\n"
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, event); err != nil {
				return
			}
		}
	case "die":
		events(func(i int) bool { return i < 2 }, "data: 1\n\n", "data: 2\n\n", "data: 3\n\n")(w, r, body)
	case "stream":
		events(nil, "data: {\"choices\":[]}\n\n", "data: [DONE]\n\n")(w, r, body)
	case "late error":
		events(nil, "data: {\"error\":{\"message\":\"full\",\"code\":503}}\n\n", "data: [DONE]\n\n")(w, r, body)
	case "reset":
		resets(w, r, body)
	case "":
		completion(w, r, body)
	default:
		status, err := strconv.Atoi(r.Header.Get("X-End"))
		if err != nil {
			panic(err)
		}
		says(status, `{"error":{"message":"no"}}`)(w, r, body)
	}
}

// Whichever way a request ends, its reservation is given back, and its prompt stays recorded only if an answer began.
func TestReservationAndRecordOfEveryEnd(t *testing.T) {
	const prompt = "What becomes of this request?"
	ask := func(ctx context.Context, g *gateway, model, end string) (*http.Response, error) {
		return testClient.Do(newRequest(ctx, http.MethodPost, g.URL+chatPath, strings.NewReader(asks(model, prompt)), "X-End", end))
	}
	// whole reads the answer to its end, in whichever way it ends.
	whole := func(end string) func(*testing.T, *gateway, string, *stub) {
		return func(t *testing.T, g *gateway, model string, _ *stub) {
			resp, err := ask(t.Context(), g, model, end)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
	}
	cases := []struct {
		name    string
		play    func(t *testing.T, g *gateway, model string, s *stub)
		prompts int
	}{
		{"success", whole(""), 1},
		{"stream to its end", whole("stream"), 1},
		{"500", whole("500"), 0},
		{"503", whole("503"), 0},
		{"400", whole("400"), 0},
		{"429", whole("429"), 0},
		{"301", whole("301"), 1},
		{"reset before the answer", whole("reset"), 0},
		{"death in the stream", whole("die"), 1},
		{"200 whose first event is an error", whole("late error"), 0},
		{"client goes before the headers", func(t *testing.T, g *gateway, model string, s *stub) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				if resp, err := ask(ctx, g, model, "hang"); err == nil {
					_ = resp.Body.Close()
				}
			}()
			g.waitFor("the request to arrive", func() bool { return s.active.Load() == 1 })
			if n := g.state().load(s.addr); n != 1 {
				t.Errorf("%d requests in flight, want 1", n)
			}
			cancel()
			<-gone
		}, 0},
		{"client goes in the stream", func(t *testing.T, g *gateway, model string, s *stub) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			resp, err := ask(ctx, g, model, "hang in the stream")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			if n := g.state().load(s.addr); n != 1 {
				t.Errorf("%d requests in flight, want 1", n)
			}
			cancel()
		}, 1},
		{"client never reads, then goes", func(t *testing.T, g *gateway, model string, s *stub) {
			conn, err := net.Dial("tcp", g.Addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			body := asks(model, prompt)
			_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nX-End: pour\r\nContent-Length: %d\r\n\r\n%s", chatPath, g.Addr, len(body), body)
			g.waitFor("the answer to begin", func() bool { return s.active.Load() == 1 && g.state().promptsOf(model, s.addr) == 1 })
			if n := g.state().load(s.addr); n != 1 {
				t.Errorf("%d requests in flight, want 1", n)
			}
		}, 1},
		{"client sends half of its body, then goes", func(t *testing.T, g *gateway, model string, s *stub) {
			conn, err := net.Dial("tcp", g.Addr)
			if err != nil {
				t.Fatal(err)
			}
			body := asks(model, prompt)
			_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", chatPath, g.Addr, len(body), body[:len(body)/2])
			_ = conn.Close()
		}, 0},
	}
	s := newStub(t, "a", endsAsAsked)
	var routes []string
	for i := range cases {
		routes = append(routes, route(fmt.Sprintf("m%d", i), "", s))
	}
	g := startGateway(t, rolterFor([]*stub{s}, routes...))
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			model := fmt.Sprintf("m%d", i)
			c.play(t, g, model, s)
			g.idle()
			g.waitFor("the engine to be told", func() bool { return s.active.Load() == 0 })
			if n := g.state().promptsOf(model, s.addr); n != c.prompts {
				t.Errorf("%d prompts are recorded, want %d", n, c.prompts)
			}
		})
	}
}

// An engine that is full may say so in the first event of a stream that it has begun with 200. What it says comes to the client as it is, and the prompt is not cached there.
func TestFirstEventThatIsAnError(t *testing.T) {
	cases := []struct {
		name    string
		pieces  []string
		prompts int
	}{
		{"vLLM's", []string{"data: {\"error\":{\"message\":\"full\",\"type\":\"Service Unavailable\",\"param\":null,\"code\":503}}\n\n", "data: [DONE]\n\n"}, 0},
		{"in pieces", []string{"da", "ta: {\"err", "or\":{\"message\":\"full\",\"code\":503}", "}\n", "\n", "data: [DONE]\n\n"}, 0},
		{"behind comments", []string{": ping\n\n", ":\n\n", "id: 1\nretry: 5\ndata: {\"error\":{\"code\":500}}\n\n"}, 0},
		{"carriage returns", []string{"data: {\"error\":{\"message\":\"full\",\"code\":503}}\r\n\r\n"}, 0},
		{"no blank behind the colon", []string{"data:{\"error\":{\"message\":\"full\",\"code\":503}}\n\n"}, 0},
		{"white space in the JSON", []string{"data: { \"error\" : { \"message\" : \"full\", \"code\" : 503 } }\n\n"}, 0},
		{"the error is not the first field", []string{"data: {\"object\":\"error\",\"error\":{\"message\":\"full\",\"code\":503}}\n\n"}, 0},
		{"Anthropic's", []string{"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"full\"}}\n\n"}, 0},
		{"one that ends the stream without a blank line", []string{"data: {\"error\":{\"message\":\"full\",\"code\":503}}\n"}, 0},
		{"an answer that mentions an error", []string{"data: {\"choices\":[{\"delta\":{\"content\":\"{\\\"error\\\":{\\\"code\\\":503}}\"}}]}\n\n", "data: [DONE]\n\n"}, 1},
		{"no error", []string{"data: {\"error\":null,\"choices\":[]}\n\n"}, 1},
		{"an error in the second event", []string{"data: {\"choices\":[]}\n\n", "data: {\"error\":{\"code\":500}}\n\n"}, 1},
	}
	s := newStub(t, "a", nil)
	var routes []string
	for i := range cases {
		routes = append(routes, route(fmt.Sprintf("m%d", i), "", s))
	}
	g := startGateway(t, rolterFor([]*stub{s}, routes...))
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			model := fmt.Sprintf("m%d", i)
			s.answers(events(nil, c.pieces...))
			answer := g.served(chatPath, asks(model, "Are you full?"))
			if want := strings.Join(c.pieces, ""); answer.body != want {
				t.Errorf("received %q, want %q", answer.body, want)
			}
			g.idle()
			if n := g.state().promptsOf(model, s.addr); n != c.prompts {
				t.Errorf("%d prompts are recorded, want %d", n, c.prompts)
			}
		})
	}
}

// A prompt is recorded with the pick, so that its siblings find it before it is answered; how its own request ends decides about its own record alone.
func TestRecordBeforeTheAnswer(t *testing.T) {
	for _, c := range []struct {
		name          string
		first, second int // statuses
		prompts       int // in the end
		reason        string
	}{
		{"both are answered", 200, 200, 1, "cache"},
		{"the first fails", 500, 200, 1, "cache"},
		{"the second fails", 200, 500, 1, "cache"},
		{"both fail", 500, 500, 0, "cold"},
	} {
		t.Run(c.name, func(t *testing.T) {
			release := make(chan struct{})
			stubs := newStubs(t, 3, func(w http.ResponseWriter, r *http.Request, body []byte) {
				if r.Header.Get("X-First") != "" {
					<-release
				}
				endsAsAsked(w, r, body)
			})
			g := startGateway(t, rolterFor(stubs, route("m", "", stubs...)))
			body := asks("m", "Is this known before it is answered?")
			first := make(chan reply)
			go func() {
				answer, _ := g.try(chatPath, body, "X-First", "yes", "X-End", strconv.Itoa(c.first))
				first <- answer
			}()
			g.waitFor("the first to arrive", func() bool { return total(counts(stubs)) == 1 })
			home := stubs[slices.Index(counts(stubs), 1)]
			second := g.post(chatPath, body, "X-End", strconv.Itoa(c.second))
			if second.status != c.second || second.target != home.name || second.reason != "cache" {
				t.Errorf("the second: status %d from %q because of %q, want %d from %q because of cache", second.status, second.target, second.reason, c.second, home.name)
			}
			close(release)
			if answer := <-first; answer.status != c.first {
				t.Errorf("the first: status %d, want %d", answer.status, c.first)
			}
			g.idle()
			if n := g.state().promptsOf("m", home.addr); n != c.prompts {
				t.Errorf("%d prompts are recorded, want %d", n, c.prompts)
			}
			if third := g.served(chatPath, body); third.reason != c.reason {
				t.Errorf("the third went because of %q, want %q", third.reason, c.reason)
			}
		})
	}
}

// The failures of a real engine, as the simulated one plays them.
func TestFaultsOfAReplica(t *testing.T) {
	r := replica.New(replica.Config{Model: "m", AnswerTokens: 8, TimeScale: 100})
	if err := r.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	g := startGateway(t, fmt.Sprintf("rolter {\nprovider a %s\nroute m {\ntarget a\n}\n}", r.URL()))
	for _, c := range []struct {
		name   string
		fault  replica.Fault
		stream bool
		status int
		adds   int // prompts
	}{
		{"none", replica.Fault{}, false, 200, 1},
		{"none, stream", replica.Fault{}, true, 200, 1},
		{"503", replica.Fault{Kind: replica.Status503}, false, 503, 0},
		{"500", replica.Fault{Kind: replica.Status500}, true, 500, 0},
		{"error in the stream", replica.Fault{Kind: replica.StreamError}, true, 200, 0},
		{"reset", replica.Fault{Kind: replica.Reset}, false, 502, 0},
		{"death in the stream", replica.Fault{Kind: replica.Die}, true, 200, 1},
		{"refused", replica.Fault{Kind: replica.Refuse}, false, 502, 0},
		{"hang", replica.Fault{Kind: replica.Hang}, false, 0, 0},
		{"none again", replica.Fault{}, true, 200, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := r.SetFault(c.fault); err != nil {
				t.Fatal(err)
			}
			before := g.state().promptsOf("m", r.Addr())
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			body := fmt.Sprintf(`{"model":"m","stream":%v,"messages":[{"role":"user","content":"%s"}]}`, c.stream, c.name)
			asked := r.Stats().Requests
			var (
				answer reply
				err    error
				done   = make(chan struct{})
			)
			go func() {
				defer close(done)
				answer, err = do(testClient, newRequest(ctx, http.MethodPost, g.URL+chatPath, strings.NewReader(body)))
			}()
			if c.status == 0 { // no answer will come
				g.waitFor("the replica to hang", func() bool { return r.Stats().Requests > asked })
				cancel()
			}
			<-done
			if answer.status != c.status {
				t.Errorf("status %d, %v, want %d: %s", answer.status, err, c.status, answer.body)
			}
			g.idle()
			if n := g.state().promptsOf("m", r.Addr()) - before; n != c.adds {
				t.Errorf("%d prompts are recorded, want %d", n, c.adds)
			}
		})
	}
}

// An engine computes until it is told that nobody waits any more.
func TestCancelReachesTheReplica(t *testing.T) {
	const slack = 2 * time.Second // what is wanted is 100 ms, on a machine that has nothing else to do
	told := make(chan time.Time, 1)
	s := newStub(t, "a", func(w http.ResponseWriter, r *http.Request, _ []byte) {
		if r.Header.Get("X-End") == "stream" {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, "data: 1\n\n")
			_ = http.NewResponseController(w).Flush()
		}
		<-r.Context().Done()
		told <- time.Now()
	})
	g := startGateway(t, fmt.Sprintf(`
		handle /policy/* {
			reverse_proxy %s {
				lb_policy rolter cache_aware
			}
		}
		handle {
			%s
		}`, s.addr, rolterFor([]*stub{s}, route("m", "", s))))
	for _, prefix := range []string{"", "/policy"} {
		for _, end := range []string{"silence", "stream"} {
			t.Run(prefix+" "+end, func(t *testing.T) {
				var took []time.Duration
				for range 5 {
					ctx, cancel := context.WithCancel(t.Context())
					gone := make(chan struct{})
					began := make(chan struct{})
					go func() {
						defer close(gone)
						resp, err := testClient.Do(newRequest(ctx, http.MethodPost, g.URL+prefix+chatPath, strings.NewReader(asks("m", "hi")), "X-End", end))
						if err == nil {
							_, _ = resp.Body.Read(make([]byte, 1))
							close(began)
							_, _ = io.Copy(io.Discard, resp.Body)
							_ = resp.Body.Close()
						}
					}()
					if end == "stream" {
						<-began
					} else {
						g.waitFor("the request to arrive", func() bool { return s.active.Load() == 1 })
					}
					start := time.Now()
					cancel()
					took = append(took, (<-told).Sub(start))
					<-gone
					g.waitFor("the stand-in to end", func() bool { return s.active.Load() == 0 })
				}
				slices.Sort(took)
				t.Logf("the replica is told %v after the client went (median), %v at most", took[len(took)/2], took[len(took)-1])
				if took[len(took)/2] > slack {
					t.Errorf("the replica is told %v after the client went", took[len(took)/2])
				}
				g.idle()
			})
		}
	}
}

func TestManyRequestsOfEveryEnd(t *testing.T) {
	const (
		requests, workers = 300, 12
		brief             = "transport http {\nkeepalive 300ms\n}" // idle connections have goroutines, too
	)
	stubs := newStubs(t, 3, endsAsAsked)
	down := newStub(t, "down", nil)
	down.refuse()
	all := append(slices.Clone(stubs), down)
	g := startGateway(t, fmt.Sprintf(`
		handle /policy/* {
			reverse_proxy %[1]s %[2]s %[3]s %[4]s {
				lb_policy rolter cache_aware
				lb_retries 3
				%[5]s
			}
		}
		handle {
			%[6]s
		}`, stubs[0].addr, stubs[1].addr, stubs[2].addr, down.addr, brief, rolterFor(all,
		route("m", "reverse_proxy {\n"+brief+"\n}", all...),
		route("spread", "strategy random\nreverse_proxy {\n"+brief+"\n}", all...))))
	// One of each first, so that what is started once is there.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
	ends := []string{"", "", "stream", "400", "500", "503", "reset", "die", "late error", "hang", "hang in the stream", "pour"}
	play := func(rng *rand.Rand, end, path, model string) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		body := asks(model, prose(rng, 1+rng.IntN(3000)))
		if end == "hang" {
			time.AfterFunc(time.Duration(rng.IntN(40))*time.Millisecond, cancel) // the client's patience
		}
		resp, err := client.Do(newRequest(ctx, http.MethodPost, g.URL+path, strings.NewReader(body), "X-End", end))
		if err != nil {
			return
		}
		defer resp.Body.Close()
		if end == "hang in the stream" || end == "pour" {
			_, _ = io.ReadFull(resp.Body, make([]byte, 10))
			return
		}
		_, _ = io.Copy(io.Discard, resp.Body)
	}
	somewhere := func(rng *rand.Rand) (path, model string) {
		switch rng.IntN(3) {
		case 0:
			return "/policy" + chatPath, "m"
		case 1:
			return chatPath, "spread"
		}
		return chatPath, "m"
	}
	for i, end := range ends {
		play(newRand(uint64(i)), end, chatPath, "m")
	}
	g.idle()
	before := 0
	g.waitFor("idle connections to go", func() bool {
		before = g.goroutines()
		return !strings.Contains(g.profile(), "persistConn")
	})

	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			rng := newRand(1000 + uint64(worker))
			for range requests / workers {
				path, model := somewhere(rng)
				play(rng, ends[rng.IntN(len(ends))], path, model)
			}
		})
	}
	wg.Wait()
	g.idle()
	g.waitFor("goroutines to end", func() bool { return g.goroutines() <= before+3 }) // the admin endpoint's own come and go
	t.Logf("goroutines: %d before, %d after", before, g.goroutines())
	for _, s := range stubs {
		g.waitFor("the stand-ins to be told", func() bool { return s.active.Load() == 0 })
	}
}

// profile is where all goroutines are.
func (g *gateway) profile() string {
	g.t.Helper()
	profile, err := g.admin(http.MethodGet, "/debug/pprof/goroutine?debug=1", "", "")
	if err != nil {
		g.t.Fatal(err)
	}
	return profile
}
