package integration

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// failures are the ways to fail before an answer that are tried again elsewhere.
var failures = []struct {
	name string
	fail func(*stub)
	mend func(*stub)
}{
	{"refused", (*stub).refuse, (*stub).listen},
	{"reset", func(s *stub) { s.answers(resets) }, func(*stub) {}},
	{"closed", func(s *stub) { s.answers(raw("")) }, func(*stub) {}},
	{"503", func(s *stub) { s.answers(says(503, `{"error":"full"}`)) }, func(*stub) {}},
}

func TestFailuresAreTriedOnEachOtherTarget(t *testing.T) {
	stubs := newStubs(t, 3, nil)
	bad, good := stubs[:2], stubs[2]
	g := startGateway(t, "header >X-Attempt {http.rolter.attempt}\n"+rolterFor(stubs,
		route("m", "reverse_proxy {\nfail_duration 20ms\n}", stubs...), soleRoutes(stubs...))) // a short rest makes a short test
	long := strings.Repeat("word ", 400_000) // 2 MB

	for _, f := range failures {
		for _, c := range []struct {
			name    string
			chunked bool
			body    string
		}{
			{"short", false, asks("m", f.name+" and short")},
			{"2 MB", false, asks("m", f.name+long)},
			{"2 MB chunked", true, asks("m", "chunked "+f.name+long)},
		} {
			t.Run(f.name+" "+c.name, func(t *testing.T) {
				g.waitFor("no target to rest", g.noFails)
				free := g.occupy(good, 1) // so that the others come first
				defer free()
				for _, s := range bad {
					f.fail(s)
				}
				before, recorded := counts(stubs), g.state()

				var body io.Reader = strings.NewReader(c.body)
				if c.chunked {
					body = io.MultiReader(body)
				}
				answer, err := do(testClient, newRequest(context.Background(), http.MethodPost, g.URL+chatPath, body))
				if err != nil {
					t.Fatal(err)
				}
				if answer.status != http.StatusOK || answer.body != completionBody || answer.target != good.name {
					t.Fatalf("status %d from %q: %s", answer.status, answer.target, answer.body)
				}
				if got := answer.header.Get("X-Attempt"); got != "3" {
					t.Errorf("served at attempt %s, want 3", got)
				}
				for i, s := range stubs {
					want := 1
					if f.name == "refused" && s != good {
						want = 0
					}
					all := s.received()[before[i]:]
					if len(all) != want {
						t.Errorf("%s received %d requests, want %d", s.name, len(all), want)
					}
					for _, got := range all {
						if got.body != c.body {
							t.Errorf("%s received a body of %d bytes that is not the client's (%d bytes)", s.name, len(got.body), len(c.body))
						}
					}
				}

				// Only the one that answered is warm.
				now := g.state()
				for _, s := range stubs {
					want := recorded.promptsOf("m", s.addr)
					if s == good {
						want++
					}
					if got := now.promptsOf("m", s.addr); got != want {
						t.Errorf("%d prompts are recorded for %s, want %d", got, s.name, want)
					}
				}
				g.waitFor("no target to rest", g.noFails)
				for _, s := range bad {
					f.mend(s)
					s.answers(completion)
				}
				answer = g.served(chatPath, c.body)
				if answer.target != good.name || answer.reason != "cache" || answer.header.Get("X-Attempt") != "1" {
					t.Errorf("the same prompt again: %q because of %q at attempt %s, want %q because of cache at attempt 1", answer.target, answer.reason, answer.header.Get("X-Attempt"), good.name)
				}
			})
		}
	}
}

// A request that makes one engine fail must not visit them all, and what is the client's fault is not better elsewhere.
func TestOtherStatusesAreNotTriedAgain(t *testing.T) {
	stubs := newStubs(t, 3, nil)
	g := startGateway(t, rolterFor(stubs, route("m", "", stubs...)))
	for _, status := range []int{400, 401, 404, 408, 413, 422, 429, 500, 502, 504} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			want := fmt.Sprintf(`{"error":{"code":%d}}`, status)
			for _, s := range stubs {
				s.answers(says(status, want))
			}
			before := total(counts(stubs))
			answer := g.post(chatPath, asks("m", "status "+strconv.Itoa(status)))
			if answer.status != status || answer.body != want {
				t.Errorf("%d %q, want %d %q", answer.status, answer.body, status, want)
			}
			if n := total(counts(stubs)) - before; n != 1 {
				t.Errorf("%d targets were tried, want 1", n)
			}
		})
	}
	for addr, n := range g.state().prompts() {
		if n != 0 {
			t.Errorf("%d prompts are recorded for %s, want none: nobody answered below 400", n, addr)
		}
	}
}

func TestNobodyCanTakeTheRequest(t *testing.T) {
	stubs := newStubs(t, 3, nil)
	g := startGateway(t, rolterFor(stubs, route("m", "", stubs...)))
	for _, s := range stubs {
		s.answers(says(503, `{"error":"full"}`))
	}
	answer := g.post(chatPath, asks("m", "hi"))
	wantOpenAIError(t, answer, http.StatusServiceUnavailable)
	if got := counts(stubs); !slices.Equal(got, []int{1, 1, 1}) {
		t.Errorf("targets received %v requests, want one each", got)
	}

	// A status makes nobody rest: the very next request is served.
	for _, s := range stubs {
		s.answers(completion)
	}
	g.served(chatPath, asks("m", "hi"))

	for _, s := range stubs {
		s.answers(resets)
	}
	answer = g.post(chatPath, asks("m", "hi again"))
	wantOpenAIError(t, answer, http.StatusBadGateway)
	for _, s := range stubs {
		if strings.Contains(answer.body, s.addr) {
			t.Errorf("the error tells an address: %s", answer.body)
		}
	}
	// All rest now. It is better to try one of them than to say that there is nobody.
	for _, s := range stubs {
		s.answers(completion)
	}
	g.served(chatPath, asks("m", "hi"))

	for _, s := range stubs {
		s.refuse()
	}
	wantOpenAIError(t, g.post(chatPath, asks("m", "refused")), http.StatusBadGateway)
	g.idle()
}

// The operator may ask for more attempts than there are targets.
func TestMoreAttemptsThanTargets(t *testing.T) {
	stubs := newStubs(t, 2, nil)
	g := startGateway(t, "header >X-Attempt {http.rolter.attempt}\n"+rolterFor(stubs, route("m", "reverse_proxy {\nlb_retries 5\nfail_duration 10ms\n}", stubs...)))
	var asked atomic.Int32
	for _, s := range stubs {
		s.answers(func(w http.ResponseWriter, r *http.Request, body []byte) {
			if asked.Add(1) <= 4 {
				says(503, "{}")(w, r, body)
				return
			}
			completion(w, r, body)
		})
	}
	body := asks("m", strings.Repeat("Once more? ", 1000))
	answer := g.served(chatPath, body)
	if got := answer.header.Get("X-Attempt"); got != "5" {
		t.Errorf("served at attempt %s, want 5", got)
	}
	if got := counts(stubs); slices.Max(got) != 3 || total(got) != 5 {
		t.Errorf("targets received %v requests, want 3 and 2", got)
	}
	for _, s := range stubs {
		for _, got := range s.received() {
			if got.body != body {
				t.Errorf("%s received a body of %d bytes that is not the client's", s.name, len(got.body))
			}
		}
	}
	g.idle()
	if got := total([]int{g.state().promptsOf("m", stubs[0].addr), g.state().promptsOf("m", stubs[1].addr)}); got != 1 {
		t.Errorf("%d prompts are recorded, want 1", got)
	}
}

// What the operator says of retries replaces ours.
func TestRetryMatchOfTheOperator(t *testing.T) {
	stubs := newStubs(t, 2, nil)
	g := startGateway(t, rolterFor(stubs, route("m", "reverse_proxy {\nlb_retry_match {\nexpression `{http.reverse_proxy.status_code} == 500`\n}\n}", stubs...)))
	for status, attempts := range map[int]int{500: 2, 503: 1} {
		for _, s := range stubs {
			s.answers(says(status, "{}"))
		}
		before := total(counts(stubs))
		if answer := g.post(chatPath, asks("m", fmt.Sprint(status))); answer.status != status {
			t.Errorf("status %d, want %d", answer.status, status)
		}
		if n := total(counts(stubs)) - before; n != attempts {
			t.Errorf("%d: %d attempts, want %d", status, n, attempts)
		}
	}
}

func TestTargetThatRefusedRests(t *testing.T) {
	stubs := newStubs(t, 2, nil)
	down, up := stubs[0], stubs[1]
	g := startGateway(t, "header >X-Attempt {http.rolter.attempt}\n"+rolterFor(stubs, route("m", "", stubs...), soleRoutes(stubs...)))
	down.refuse()
	free := g.occupy(up, 1)
	defer free()

	start := time.Now()
	answer := g.served(chatPath, asks("m", "first"))
	if answer.target != up.name || answer.header.Get("X-Attempt") != "2" {
		t.Fatalf("served by %q at attempt %s, want %q at attempt 2", answer.target, answer.header.Get("X-Attempt"), up.name)
	}
	failed := time.Now()
	// It would be next, as the less loaded and less warmed one, but for its rest.
	answer = g.served(chatPath, asks("m", "1st"))
	if attempt := answer.header.Get("X-Attempt"); time.Since(start) < 900*time.Millisecond && (answer.target != up.name || attempt != "1") {
		t.Errorf("after the failure: %q at attempt %s, want %q at attempt 1", answer.target, attempt, up.name)
	}
	down.listen()
	for n := 0; ; n++ {
		answer = g.served(chatPath, asks("m", fmt.Sprintf("%d. question", n)))
		if answer.target == down.name {
			break
		}
		if time.Since(failed) > 2*time.Second {
			t.Fatalf("%s is not used again 2 s after it refused", down.name)
		}
	}
	t.Logf("used again %v after it refused", time.Since(failed).Round(10*time.Millisecond))
}

func TestTargetThatIsAwayUnderLoad(t *testing.T) {
	const away = 3 * time.Second
	stubs := newStubs(t, 3, nil)
	g := startGateway(t, rolterFor(stubs, route("m", "", stubs...)))
	var (
		wg     sync.WaitGroup
		served atomic.Int64
		stop   = make(chan struct{})
	)
	for worker := range 8 {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				answer, err := g.try(chatPath, asks("m", fmt.Sprintf("%d of %d asks", n, worker)))
				if err != nil || answer.status != http.StatusOK {
					t.Errorf("request %d of %d: status %d, %v: %s", n, worker, answer.status, err, answer.body)
					return
				}
				served.Add(1)
			}
		})
	}
	flowing := func() {
		n := served.Load()
		g.waitFor("requests to flow", func() bool { return served.Load() > n+20 || t.Failed() })
	}
	flowing()
	down := stubs[1]
	down.refuse()
	gone := served.Load()
	time.Sleep(away) // the outage itself
	flowing()
	before := down.count()
	down.listen()
	back := time.Now()
	g.waitFor("the target to be used again", func() bool { return down.count() > before || t.Failed() })
	again := time.Since(back)
	close(stop)
	wg.Wait()
	if again > 2*time.Second {
		t.Errorf("used again %v after it came back, want 2 s at most", again)
	}
	t.Logf("%d requests served, %d of them while the target was away; used again after %v", served.Load(), served.Load()-gone, again.Round(10*time.Millisecond))
	g.idle()
}
