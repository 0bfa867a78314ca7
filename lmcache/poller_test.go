package lmcache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// source is a stand-in for LMCache that answers as the test wants, and counts.
type source struct {
	*httptest.Server
	serve       atomic.Pointer[http.HandlerFunc]
	connections atomic.Int64
	requests    atomic.Int64

	mu    sync.Mutex
	paths map[string]int
}

func newSource(t *testing.T, serve http.HandlerFunc) *source {
	s := &source{paths: make(map[string]int)}
	s.serves(serve)
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer s.requests.Add(1)
		s.mu.Lock()
		s.paths[r.Method+" "+r.URL.RequestURI()]++
		s.mu.Unlock()
		(*s.serve.Load())(w, r)
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			s.connections.Add(1)
		}
	}
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Start()
	t.Cleanup(s.Close)
	return s
}

func (s *source) serves(serve http.HandlerFunc) { s.serve.Store(&serve) }

func (s *source) asked(path string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.paths[path]
}

// next waits for so many requests that begin from now on, and end.
func (s *source) next(t *testing.T, n int64) {
	t.Helper()
	seen := s.requests.Load()
	waitFor(t, "requests", func() bool { return s.requests.Load() >= seen+n+1 })
}

func waitFor(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited 20 s for %s", what)
		}
	}
}

func says(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) }
}

// only serves some paths, as FastAPI does.
func only(paths map[string]http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		serve := paths[r.Method+" "+r.URL.RequestURI()]
		if serve == nil {
			w.WriteHeader(http.StatusNotFound)
			serve = says(`{"detail":"Not Found"}`)
		}
		serve(w, r)
	}
}

const soon = 20 * time.Millisecond

// start polls a source often.
func start(t *testing.T, cfg Config) *Poller {
	t.Helper()
	if cfg.Refresh == 0 {
		cfg.Refresh = soon
	}
	if cfg.Stale == 0 {
		cfg.Stale = time.Minute
	}
	p, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Timeout == 0 {
		p.client.timeout = 20 * time.Second // whatever else the machine does
	}
	t.Cleanup(p.Close)
	return p
}

// state is what is known, as text.
func state(w *Watch) string {
	known, available, occupancy := w.State()
	switch {
	case !known && available:
		return "works"
	case !known:
		return "unknown"
	case !available:
		return "down"
	}
	return fmt.Sprintf("%.4g", occupancy)
}

func becomes(t *testing.T, w *Watch, want string) {
	t.Helper()
	waitFor(t, want, func() bool { return state(w) == want })
}

func (p *Poller) failed(cause Cause) uint64 {
	_, failures := p.Stats()
	return failures[cause]
}

// What is found at a URL, and what it tells; each by its kind, and by a look at everything.
func TestKinds(t *testing.T) {
	read := func(name string) http.HandlerFunc { return says(string(recorded(t, name))) }
	health := func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if string(body) != `{"instance_id":"inst-1"}` {
			_, _ = io.WriteString(w, `{"event_id":"health1","error_codes":{}}`)
			return
		}
		_, _ = io.WriteString(w, `{"event_id":"health1","error_codes":{"0":0}}`)
	}
	const usage = `{"instances":[{"instance_id":"inst-1","registered":true,"modules":[{"tier":"l1","used_bytes":30,"capacity_bytes":40}]}],"shared_modules":[]}`
	for name, tc := range map[string]struct {
		kind     Kind
		at       string
		capacity int64
		serves   map[string]http.HandlerFunc
		want     string
	}{
		"the contract":                         {kind: JSON, at: "/cache?replica=1", serves: map[string]http.HandlerFunc{"GET /cache?replica=1": says(`{"occupancy":0.25}`)}, want: "0.25"},
		"the contract, at /status":             {kind: JSON, at: "/status", serves: map[string]http.HandlerFunc{"GET /status": says(`{"occupancy":0.25,"cache_available":false}`)}, want: "down"},
		"multiprocess server":                  {kind: MP, serves: map[string]http.HandlerFunc{"GET /": says(`{"status":"ok"}`), "GET /status": read("mp-status-filled.json")}, want: "0.00354"},
		"multiprocess server, by its endpoint": {kind: MP, at: "/lmc/status", serves: map[string]http.HandlerFunc{"GET /lmc/status": read("mp-status-filled.json")}, want: "0.00354"},
		"memory pressure":                      {kind: MP, serves: map[string]http.HandlerFunc{"GET /status/memory-pressure": says(`{"tiers":[{"tier":"l1","used_bytes":1,"capacity_bytes":2,"health":"ok"}]}`)}, want: "0.5"},
		"a multiprocess server that starts": {kind: MP, serves: map[string]http.HandlerFunc{"GET /healthcheck": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `{"status":"unhealthy","reason":"engine not initialized"}`)
		}}, want: "down"},
		"metrics of a multiprocess server": {kind: Prometheus, at: "/metrics", serves: map[string]http.HandlerFunc{"GET /metrics": read("mp-metrics-filled.txt")}, want: "0.00354"},
		"metrics of an engine": {kind: Prometheus, serves: map[string]http.HandlerFunc{"GET /metrics": says("lmcache:local_cache_usage 134217728\n"),
			"GET /conf?names=max_local_cpu_size": read("conf.json")}, want: "0.5"},
		"metrics of an engine, with its capacity": {kind: Prometheus, capacity: 536870912, serves: map[string]http.HandlerFunc{"GET /metrics": says("lmcache:local_cache_usage 134217728\n")}, want: "0.25"},
		"coordinator": {kind: Coordinator, serves: map[string]http.HandlerFunc{"GET /instances/usage": says(usage)}, want: "0.75"},
		"controller":  {kind: Controller, serves: map[string]http.HandlerFunc{"POST /health": health}, want: "works"},
	} {
		for _, kind := range []Kind{tc.kind, Auto} {
			t.Run(name+" "+string(kind), func(t *testing.T) {
				t.Parallel()
				core, logs := observer.New(zap.DebugLevel)
				s := newSource(t, only(tc.serves))
				p := start(t, Config{URL: s.URL + tc.at, Kind: kind, Capacity: tc.capacity, Logger: func() *zap.Logger { return zap.New(core) }})
				w := p.Watch("inst-1")
				becomes(t, w, tc.want)
				if tc.want == "down" && tc.kind == MP {
					return // it is asked on until there is more
				}
				if p.Kind() != tc.kind {
					t.Errorf("found %q, want %q", p.Kind(), tc.kind)
				}
				asked := s.asked("GET /status")
				s.next(t, 3)
				if tc.kind != JSON && tc.kind != MP && s.asked("GET /status") > asked {
					t.Error("it is still asked for what it is not")
				}
				found := logs.FilterMessage("found LMCache").All()
				if len(found) != 1 || found[0].ContextMap()["kind"] != string(tc.kind) {
					t.Errorf("logged %v, want that %s was found, once", found, tc.kind)
				}
			})
		}
	}
}

// An answer that is no answer leaves what was known until it is stale.
func TestFaults(t *testing.T) {
	elsewhere := newSource(t, says(`{"occupancy":0.1}`))
	for name, tc := range map[string]struct {
		fault http.HandlerFunc
		cause Cause
		then  string // right after the fault
	}{
		"hangs":        {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, Timeout, "0.5"},
		"500":          {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, `{"occupancy":0.1}`, 500) }, BadStatus, "0.5"},
		"redirect":     {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, elsewhere.URL, http.StatusFound) }, BadStatus, "0.5"},
		"no content":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }, BadStatus, "0.5"},
		"NaN":          {says(`{"occupancy":NaN}`), Malformed, "0.5"},
		"1.4":          {says(`{"occupancy":1.4}`), "", "1"},
		"negative":     {says(`{"occupancy":-3}`), "", "0"},
		"not JSON":     {says("<html>it works!</html>"), Malformed, "0.5"},
		"empty":        {says(""), Malformed, "0.5"},
		"empty object": {says("{}"), Malformed, "0.5"},
		"10 MB": {func(w http.ResponseWriter, _ *http.Request) {
			for range 10 << 10 {
				if _, err := w.Write(make([]byte, 1<<10)); err != nil {
					return
				}
			}
		}, TooLarge, "0.5"},
		"endless headers": {func(w http.ResponseWriter, _ *http.Request) {
			for i := range 1000 {
				w.Header().Set(fmt.Sprint("X-", i), strings.Repeat("x", 1000))
			}
		}, Unreachable, "0.5"},
		"drips": {func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				_, _ = io.WriteString(w, " ")
				w.(http.Flusher).Flush()
				time.Sleep(time.Millisecond)
			}
		}, Timeout, "0.5"},
		"half-closed": {func(w http.ResponseWriter, r *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				panic(err)
			}
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"occupancy\":0.1}")
			_ = conn.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}, Unreachable, "0.5"},
		"breaks off": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, Unreachable, "0.5"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			core, logs := observer.New(zap.DebugLevel)
			s := newSource(t, says(`{"occupancy":0.5}`))
			cfg := Config{URL: s.URL, Kind: JSON, Logger: func() *zap.Logger { return zap.New(core) }}
			if tc.cause == Timeout {
				cfg.Refresh, cfg.Timeout = 500*time.Millisecond, 490*time.Millisecond
			}
			p := start(t, cfg)
			w := p.Watch("")
			becomes(t, w, "0.5")
			for range 2 { // flapping
				s.serves(tc.fault)
				if tc.cause == "" {
					becomes(t, w, tc.then)
				} else {
					before := p.failed(tc.cause)
					waitFor(t, "failures", func() bool { return p.failed(tc.cause) >= before+3 })
				}
				if got := state(w); got != tc.then {
					t.Errorf("%s after the fault, want %s", got, tc.then)
				}
				s.serves(says(`{"occupancy":0.7}`))
				becomes(t, w, "0.7")
				s.serves(says(`{"occupancy":0.5}`))
				becomes(t, w, "0.5")
			}
			for _, cause := range Causes {
				if n := p.failed(cause); (n > 0) != (cause == tc.cause) {
					t.Errorf("%d failures for %s", n, cause)
				}
			}
			warnings, recoveries := logs.FilterLevelExact(zap.WarnLevel).Len(), logs.FilterMessage("the state of LMCache is known again").Len()
			if want := min(2, 2*len(tc.cause)); warnings != want || recoveries != want {
				t.Errorf("%d warnings and %d recoveries, want %d of each: %v", warnings, recoveries, want, logs.All())
			}
		})
	}
	if n := elsewhere.requests.Load(); n != 0 {
		t.Errorf("%d redirects were followed", n)
	}
}

func TestAStaleValueIsUnknown(t *testing.T) {
	s := newSource(t, says(`{"occupancy":0.5}`))
	p := start(t, Config{URL: s.URL, Kind: JSON, Stale: 200 * time.Millisecond})
	w := p.Watch("")
	becomes(t, w, "0.5")
	s.serves(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
	becomes(t, w, "unknown")
	s.serves(says(`{"occupancy":0.5}`))
	becomes(t, w, "0.5")
	s.Close()
	waitFor(t, "refused connections", func() bool { return p.failed(Unreachable) > 0 })
	becomes(t, w, "unknown")
}

// Whoever says that it does not know is believed at once.
func TestAnUnknownInstanceIsUnknown(t *testing.T) {
	s := newSource(t, says(`{"event_id":"h","error_codes":{"0":0}}`))
	p := start(t, Config{URL: s.URL, Kind: Controller})
	w := p.Watch("inst-1")
	becomes(t, w, "works")
	s.serves(says(`{}`))
	becomes(t, w, "unknown")
	s.serves(says(`{"event_id":"h","error_codes":{"0":1}}`))
	becomes(t, w, "down")
	s.serves(says(string(recorded(t, "controller-health-unknown.json"))))
	becomes(t, w, "unknown")
	if n := p.failed(UnknownInstance); n == 0 {
		t.Error("not counted")
	}
}

// One poll of a coordinator serves all instances.
func TestInstancesShareAPoll(t *testing.T) {
	const instance = `{"instance_id":"inst-%d","registered":%v,"modules":[{"tier":"l1","used_bytes":%d,"capacity_bytes":100}]},`
	list := ""
	for i := range 200 {
		list += fmt.Sprintf(instance, i, i != 7, i%100)
	}
	s := newSource(t, says(`{"instances":[`+strings.TrimSuffix(list, ",")+`]}`))
	p := start(t, Config{URL: s.URL, Kind: Coordinator, Refresh: 100 * time.Millisecond})
	watches := make(map[int]*Watch)
	for i := range 200 {
		watches[i] = p.Watch(fmt.Sprintf("inst-%d", i))
	}
	stranger, unnamed := p.Watch("inst-200"), p.Watch("")
	for i, w := range watches {
		if want := fmt.Sprintf("%.4g", float64(i%100)/100); i != 7 {
			becomes(t, w, want)
		}
	}
	if got := state(watches[7]) + state(stranger) + state(unnamed); got != "unknownunknownunknown" {
		t.Errorf("%s, want all unknown", got)
	}
	if n := s.requests.Load(); n > 20 {
		t.Errorf("%d requests for a few polls", n)
	}
	// Another watch of the same instance knows at once, and outlives the first.
	again := p.Watch("inst-1")
	watches[1].Close()
	watches[1].Close()
	if got := state(again); got != "0.01" {
		t.Errorf("%s, want 0.01", got)
	}
	again.Close()
	if got := state(again); got != "unknown" {
		t.Errorf("%s after the last watch was closed", got)
	}
}

func TestAControllerIsAskedForEachInstance(t *testing.T) {
	s := newSource(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		switch {
		case strings.Contains(string(body), "ill"):
			_, _ = io.WriteString(w, `{"event_id":"h","error_codes":{"0":1}}`)
		case strings.Contains(string(body), "broken"):
			w.WriteHeader(http.StatusInternalServerError)
		default:
			_, _ = io.WriteString(w, `{"event_id":"h","error_codes":{"0":0}}`)
		}
	})
	p := start(t, Config{URL: s.URL, Kind: Controller})
	ill, broken, well, unnamed := p.Watch("ill"), p.Watch("broken"), p.Watch("well"), p.Watch("")
	becomes(t, ill, "down")
	becomes(t, well, "works")
	if got := state(broken) + state(unnamed); got != "unknownunknown" {
		t.Errorf("%s, want both unknown", got)
	}
	for _, cause := range []Cause{BadStatus, UnknownInstance} {
		if p.failed(cause) == 0 {
			t.Errorf("no failure for %s", cause)
		}
	}
}

// After a long failure it may be another kind that answers.
func TestAnotherKindIsFoundAfterALongFailure(t *testing.T) {
	defer func(was time.Duration) { reprobeAfter = was }(reprobeAfter)
	reprobeAfter = 100 * time.Millisecond
	s := newSource(t, only(map[string]http.HandlerFunc{"GET /status": says(string(recorded(t, "mp-status-filled.json")))}))
	p := start(t, Config{URL: s.URL, Stale: 50 * time.Millisecond})
	w := p.Watch("")
	waitFor(t, "mp", func() bool { return p.Kind() == MP })
	s.serves(only(map[string]http.HandlerFunc{"GET /": says(`{"occupancy":0.5}`)}))
	becomes(t, w, "0.5")
	if p.Kind() != JSON {
		t.Errorf("found %s", p.Kind())
	}
	p.Close()
}

var errRefused = errors.New("refused by the test")

// What is no LMCache is asked for everything that it could be, but not often, and nothing is settled for.
func TestAnotherServiceIsNoLMCache(t *testing.T) {
	for name, serve := range map[string]http.HandlerFunc{
		"nothing there": only(nil),
		"a web site":    says("<html>it works!</html>"),
		"an engine":     says("vllm:num_requests_running 1\n"),
		"broken":        func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSource(t, serve)
			p := start(t, Config{URL: s.URL})
			w := p.Watch("inst-1")
			waitFor(t, "polls", func() bool { polls, _ := p.Stats(); return polls > 2 })
			if p.Kind() != "" || state(w) != "unknown" {
				t.Errorf("found %q, %s", p.Kind(), state(w))
			}
			if n, polls := s.asked("POST /health"), p.failed(Malformed)+p.failed(BadStatus); n == 0 || polls == 0 {
				t.Errorf("%d health checks, %d failures", n, polls)
			}
			s.serves(says(`{"occupancy":0.5}`))
			becomes(t, w, "0.5")
		})
	}
}

// What the dialler refuses is not contacted, and counted.
func TestARefusalIsCounted(t *testing.T) {
	s := newSource(t, says(`{"occupancy":0.5}`))
	var refuses atomic.Bool
	refuses.Store(true)
	p := start(t, Config{URL: s.URL, Refusal: errRefused, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		if refuses.Load() {
			return nil, fmt.Errorf("%s: %w", address, errRefused)
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}})
	w := p.Watch("")
	waitFor(t, "refusals", func() bool { return p.failed(Denied) >= 3 })
	if n := s.connections.Load(); n != 0 || state(w) != "unknown" {
		t.Errorf("%d connections, %s", n, state(w))
	}
	refuses.Store(false) // the policy was changed
	becomes(t, w, "0.5")
}

// An answer that comes after the end changes nothing, and the end does not wait for it.
func TestAnAnswerAfterTheEndIsDropped(t *testing.T) {
	asked, release := make(chan struct{}, 10), make(chan struct{})
	s := newSource(t, func(w http.ResponseWriter, _ *http.Request) {
		asked <- struct{}{}
		<-release
		_, _ = io.WriteString(w, `{"occupancy":0.5}`)
	})
	p := start(t, Config{URL: s.URL, Kind: JSON, Refresh: 40 * time.Second, Timeout: 30 * time.Second})
	w := p.Watch("")
	<-asked
	begin := time.Now()
	p.Close()
	if took := time.Since(begin); took > 15*time.Second {
		t.Errorf("took %v", took)
	}
	close(release)
	s.Close() // which waits for the answer
	if got := state(w); got != "unknown" {
		t.Errorf("%s after the end", got)
	}
}

// One that does not answer holds up nobody else, and nothing is left of 200 of them.
func TestOneSlowControllerAmong200(t *testing.T) {
	before := runtime.NumGoroutine()
	slow := newSource(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	fast := newSource(t, says(`{"occupancy":0.5}`))
	pollers := make([]*Poller, 200)
	watches := make([]*Watch, len(pollers))
	for i := range pollers {
		at := fast.URL
		if i == 0 {
			at = slow.URL
		}
		pollers[i] = start(t, Config{URL: at, Kind: JSON, Refresh: 500 * time.Millisecond, Timeout: 450 * time.Millisecond})
		watches[i] = pollers[i].Watch("")
	}
	waitFor(t, "the slow one to fail twice", func() bool { return pollers[0].failed(Timeout) >= 2 })
	slowly, _ := pollers[0].Stats()
	for i := 1; i < len(pollers); i++ {
		becomes(t, watches[i], "0.5")
		if polls, failures := pollers[i].Stats(); polls < slowly-1 {
			t.Errorf("poller %d polled %d times where the slow one polled %d times; failures %v", i, polls, slowly, failures)
		}
	}
	var all sync.WaitGroup
	for _, p := range pollers {
		all.Go(p.Close)
	}
	all.Wait()
	slow.CloseClientConnections()
	slow.Close()
	fast.Close()
	waitFor(t, "all goroutines to end", func() bool { return runtime.NumGoroutine() <= before })
}

func TestWrongURLs(t *testing.T) {
	for _, bad := range []string{"", "localhost:9000", "ftp://localhost", "http://", "http://169.254.169%2e254/", "http://[::1", "http://:80"} {
		if p, err := Start(Config{URL: bad}); err == nil {
			p.Close()
			t.Errorf("%q was taken", bad)
		}
	}
}

func BenchmarkState(b *testing.B) {
	w := &Watch{poller: &Poller{cfg: Config{Stale: time.Minute}}, cell: new(cell)}
	w.cell.latest.Store(&reading{true, 0.5, true, time.Now()})
	b.ReportAllocs()
	for b.Loop() {
		if known, _, _ := w.State(); !known {
			b.Fatal("unknown")
		}
	}
}
