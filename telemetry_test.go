package rolter

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/rolter-ai/caddy-rolter/egress"
	"github.com/rolter-ai/caddy-rolter/selection"
)

func TestMain(m *testing.M) {
	scrapeInterval = 10 * time.Millisecond
	os.Exit(m.Run())
}

// vllmMetrics is an answer of vLLM 0.32.0, with fewer metrics.
func vllmMetrics(t testing.TB) string {
	t.Helper()
	text, err := os.ReadFile("testdata/metrics/vllm-0.32.0.txt")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestParseMetrics(t *testing.T) {
	real := vllmMetrics(t)
	config := func(labels string) string { return "vllm:cache_config_info{" + labels + "} 1.0\n" }
	for _, tc := range []struct {
		name, text string
		want       figures
	}{
		{"vLLM 0.32.0", real, figures{0, 131072, 1.79596701596e9, 32}},
		{"busy", strings.ReplaceAll(strings.ReplaceAll(real, `running{engine="0",model_name="tiny"} 0.0`, `running{engine="0",model_name="tiny"} 7.0`),
			`waiting{engine="0",model_name="tiny"} 0.0`, `waiting{engine="0",model_name="tiny"} 3.0`), figures{10, 131072, 1.79596701596e9, 32}},
		{"with line breaks of DOS", strings.ReplaceAll(real, "\n", "\r\n"), figures{0, 131072, 1.79596701596e9, 32}},
		{"without a newline at the end", "vllm:num_requests_running 3", figures{requests: 3}},
		{"two ranks", `vllm:num_requests_running{engine="0"} 3` + "\n" + `vllm:num_requests_running{engine="1"} 4` + "\n" +
			config(`engine="0",kv_cache_size_tokens="100"`) + config(`engine="1",kv_cache_size_tokens="50"`), figures{7, 150, 0, 0}},
		{"said twice", `vllm:num_requests_running{engine="0"} 3` + "\n" + `vllm:num_requests_running{engine="0"} 4` + "\n" +
			config(`engine="0",kv_cache_size_tokens="100"`) + config(`engine="0",kv_cache_size_tokens="100"`), figures{4, 100, 0, 0}},
		{"blocks only", config(`block_size="16",num_gpu_blocks="1000"`), figures{-1, 16000, 0, 16}},
		{"tokens rather than blocks", config(`block_size="16",kv_cache_size_tokens="12000",num_gpu_blocks="1000"`), figures{-1, 12000, 0, 16}},
		{"tokens that are not known", config(`block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="1000"`), figures{-1, 16000, 0, 16}},
		{"nothing known", config(`block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="None"`), figures{-1, 0, 0, 16}},
		{"absurd capacities", config(`engine="0",kv_cache_size_tokens="1e300"`) + config(`engine="1",kv_cache_size_tokens="-5"`) +
			config(`engine="2",kv_cache_size_tokens="NaN"`) + config(`engine="3",block_size="1000000000",num_gpu_blocks="1000000000"`), figures{-1, 1e9, 0, 1e9}},
		{"absurd loads", "vllm:num_requests_running{engine=\"0\"} NaN\nvllm:num_requests_running{engine=\"1\"} 1e300\nvllm:num_requests_running{engine=\"2\"} -7\n" +
			"vllm:num_requests_waiting +Inf\n", figures{-1, 0, 0, 0}},
		{"absurd start times", "process_start_time_seconds NaN\nprocess_start_time_seconds -1\nprocess_start_time_seconds 1e300\nvllm:num_requests_running 0\n", figures{0, 0, 0, 0}},
		{"other names that begin alike", "vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 9\nvllm:num_requests_waiting 2\n", figures{2, 0, 0, 0}},
		{"nonsense in lines that are not read", "}{ \x00\xff\nvllm:num_requests_waiting 2\nfoo{bar=\n", figures{2, 0, 0, 0}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got, err := parseMetrics([]byte(tc.text)); err != nil || got != tc.want {
				t.Errorf("%+v, %v, want %+v", got, err, tc.want)
			}
		})
	}
	for name, text := range map[string]string{
		"empty":          "",
		"another engine": "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 1\n",
		"half a line":    `vllm:num_requests_running{engine="0`,
		"no value":       "vllm:num_requests_running \n",
		"not UTF-8":      "vllm:num_requests_running{engine=\"\xff\"} 1\n",
		"too many lines": strings.Repeat("vllm:num_requests_running 1\n", maxFigures/20),
	} {
		if f, err := parseMetrics([]byte(text)); err == nil {
			t.Errorf("%s: %+v, want an error", name, f)
		}
	}
}

func FuzzParseMetrics(f *testing.F) {
	f.Add([]byte(vllmMetrics(f)))
	f.Add([]byte("vllm:cache_config_info{engine=\"0\",num_gpu_blocks=\"9\",block_size=\"16\"} 1\nvllm:num_requests_running NaN 5\nprocess_start_time_seconds 1e9"))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := parseMetrics(text)
		if err == nil && (got.requests < -1 || got.capacity < 0 || !(got.started >= 0)) {
			t.Errorf("%+v", got)
		}
	})
}

func BenchmarkParseMetrics(b *testing.B) {
	text := []byte(vllmMetrics(b))
	text = append(text, strings.Repeat("vllm:other_metric_bucket{engine=\"0\",le=\"0.5\",model_name=\"tiny\"} 1.0\n", 900)...)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parseMetrics(text); err != nil {
			b.Fatal(err)
		}
	}
}

// fakeEngine answers /metrics.
type fakeEngine struct {
	*httptest.Server
	requests, tokens, started atomic.Int64
	scrapes                   atomic.Int64
	broken                    atomic.Bool
	authorization             atomic.Value
}

func startEngine(t *testing.T) *fakeEngine {
	e := new(fakeEngine)
	e.started.Store(1_790_000_000)
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.authorization.Store(r.Header.Get("Authorization"))
		defer e.scrapes.Add(1)
		switch {
		case r.URL.Path != "/metrics" && r.URL.Path != "/gpu/0/metrics":
			http.NotFound(w, r)
		case e.broken.Load():
			http.Error(w, "broken", http.StatusInternalServerError)
		default:
			fmt.Fprintf(w, "process_start_time_seconds %d\nvllm:num_requests_running{engine=\"0\"} %d\nvllm:num_requests_waiting{engine=\"0\"} 0\n"+
				"vllm:cache_config_info{engine=\"0\",kv_cache_size_tokens=\"%d\"} 1\n", e.started.Load(), e.requests.Load(), e.tokens.Load())
		}
	}))
	t.Cleanup(e.Close)
	return e
}

// nextScrapes waits until the engine has been read, wholly, at least once from now on.
func (e *fakeEngine) nextScrapes(t *testing.T) {
	t.Helper()
	seen := e.scrapes.Load()
	// What one scrape told has been passed on when the next one but one is answered.
	waitFor(t, "a scrape", func() bool { return e.scrapes.Load() >= seen+3 })
}

func waitFor(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited 20 s for %s", what)
		}
	}
}

// provider is the engine as a configuration has it, provisioned.
func (e *fakeEngine) provider(t *testing.T, path string) *Provider {
	t.Helper()
	p := &Provider{Name: "vllm-1", APIBase: e.URL + path, Metrics: metricsAuto}
	if err := p.provision(egress.Default()); err != nil {
		t.Fatal(err)
	}
	return p
}

// startApp is a configuration with these providers, started.
func startApp(t *testing.T, logger *zap.Logger, providers ...*Provider) *App {
	t.Helper()
	app := new(App)
	for _, p := range providers {
		app.sources = append(app.sources, newSource(p, egress.Default(), logger))
	}
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = app.Stop() })
	return app
}

// fill records so many prompts of 1,000 bytes for a member of the group, and returns how many are left of them.
func (g *group) fill(t *testing.T, m *member, prompts int) int {
	t.Helper()
	s := selection.CacheAware{Loads: loads, Prefixes: g.prefixes.Prefixes, Threshold: 0.5, OverloadMargin: 2, OverloadRatio: 1.5}
	for i := range prompts {
		text := fmt.Appendf(nil, "%08d", i*7919)
		for len(text) < 1000 {
			text = append(text, 'x')
		}
		var lease selection.Lease
		if _, ok := s.Pick(&selection.Request{Text: text}, []selection.Candidate{{Load: m.load, Member: m.recorded}}, &lease); !ok {
			t.Fatal("not picked")
		}
		lease.Answered(true)
		lease.Release()
	}
	return g.prefixes.Prompts()[m.key]
}

func openGroup(t *testing.T, name string) *group {
	t.Helper()
	g, err := newGroup(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.close)
	return g
}

// holds says whether so many prompts are what there is room for in whole: of one more the beginning may be left.
func holds(prompts, room int) bool { return prompts == room || prompts == room+1 }

func TestTheRecordMirrorsTheEngine(t *testing.T) {
	e := startEngine(t)
	e.tokens.Store(5000) // 20,000 bytes
	p := e.provider(t, "")
	one, two := openGroup(t, "telemetry one"), openGroup(t, "telemetry two")
	m, lora, other := one.get(identity{address: p.identity()}), two.get(identity{address: p.identity(), model: "lora"}), one.get(identity{address: "other.test:1"})
	one.limit(new(Tuning))
	two.limit(&Tuning{MaxTokens: 2500})
	if n := one.fill(t, m, 50); n != 50 {
		t.Errorf("%d prompts are recorded before anything is known, want all", n)
	}
	one.fill(t, other, 50)
	if n := two.fill(t, lora, 50); !holds(n, 10) {
		t.Errorf("%d prompts are recorded, want the 10 that max_tokens leaves", n)
	}

	app := startApp(t, zap.NewNop(), p)
	waitFor(t, "the capacity", func() bool { return holds(one.prefixes.Prompts()[m.key], 20) })
	if n := one.fill(t, m, 50); !holds(n, 20) {
		t.Errorf("%d prompts are recorded, want the 20 that there is room for", n)
	}
	if n := two.prefixes.Prompts()[lora.key]; !holds(n, 10) {
		t.Errorf("%d prompts are recorded, want the 10 that max_tokens leaves", n)
	}
	if late := one.get(identity{address: p.identity(), model: "late"}); !holds(one.fill(t, late, 50), 20) {
		t.Error("the bound is not there for a member that joins later")
	}
	if n := one.prefixes.Prompts()[other.key]; n != 50 {
		t.Errorf("%d prompts are recorded for another replica, want all", n)
	}

	e.started.Add(1)
	waitFor(t, "the restart", func() bool { return one.prefixes.Prompts()[m.key]+two.prefixes.Prompts()[lora.key] == 0 })
	if n := one.prefixes.Prompts()[other.key]; n != 50 {
		t.Errorf("%d prompts are left for a replica that has not restarted, want all", n)
	}
	one.fill(t, m, 5)
	e.nextScrapes(t)
	if n := one.prefixes.Prompts()[m.key]; n != 5 {
		t.Errorf("%d prompts, want 5: a restart was seen twice", n)
	}
	if n := one.fill(t, m, 50); !holds(n, 20) {
		t.Errorf("%d prompts are recorded after the restart, want 20", n)
	}

	if err := app.Stop(); err != nil {
		t.Fatal(err)
	}
	if n := one.fill(t, m, 50); !holds(n, 50) {
		t.Errorf("%d prompts are recorded when the metrics are not read any more, want all", n)
	}
}

// Processes that share an address answer in turns.
func TestStartTimesThatAlternateAreNoRestart(t *testing.T) {
	var e engine
	for i, step := range []struct {
		at   float64
		want bool
	}{{0, false}, {1e9, false}, {1e9 + 0.0005, false}, {1e9 + 1, true}, {1e9, false}, {1e9 + 1, false}, {0, false}, {1e9 - 5, true}} {
		if got := e.restarted(step.at); got != step.want {
			t.Errorf("step %d: %v, want %v", i, got, step.want)
		}
	}
	for i := range 100 {
		if !e.restarted(float64(i + 1)) {
			t.Errorf("restart %d was not seen", i)
		}
	}
	if len(e.starts) > 16 {
		t.Errorf("%d start times are kept", len(e.starts))
	}
}

func TestForeignLoad(t *testing.T) {
	e := startEngine(t)
	p := e.provider(t, "")
	g := openGroup(t, "telemetry foreign")
	m := g.get(identity{address: p.identity()})
	others := func() (n int) {
		for _, l := range loads.Snapshot() {
			if l.Address == m.identity.address {
				n += l.Others
			}
		}
		return n
	}
	var leases [3]selection.Lease
	for i := range leases {
		if _, ok := (selection.LeastLoad{Loads: loads}).Pick(nil, []selection.Candidate{{Load: m.load}}, &leases[i]); !ok {
			t.Fatal("not picked")
		}
	}
	e.requests.Store(8)
	app := startApp(t, zap.NewNop(), p)
	waitFor(t, "the 5 requests of others", func() bool { return others() == 5 })
	e.requests.Store(2) // fewer than ours: some have not arrived yet
	waitFor(t, "no requests of others", func() bool { return others() == 0 })
	e.requests.Store(8)
	waitFor(t, "the 5 requests of others again", func() bool { return others() == 5 })
	e.broken.Store(true)
	e.nextScrapes(t)
	if others() != 5 {
		t.Error("the last figure went with the first failure")
	}
	for i := range leases {
		leases[i].Release()
	}
	_ = app.Stop()
	if others() != 0 {
		t.Error("foreign load stays when the metrics are not read any more")
	}
}

// A reload goes on with an engine that is in both configurations: with what is known, with the latest key and logger, and without a second reader.
func TestAReloadReadsOn(t *testing.T) {
	before := runtime.NumGoroutine()
	e := startEngine(t)
	e.tokens.Store(1000)
	oldLogs, oldLog := observe()
	newLogs, newLog := observe()
	p := e.provider(t, "/gpu/0/v1")
	first := startApp(t, oldLog, p)
	waitFor(t, "the capacity", func() bool { return engines.capacity(p.identity()) == 1000 })
	reader := engines.byIdentity[p.identity()]

	changed := e.provider(t, "/gpu/0/v1")
	changed.APIKey = "secret"
	second := startApp(t, newLog, changed, changed)
	_ = first.Stop()
	_ = first.Stop()
	if engines.byIdentity[p.identity()] != reader || engines.capacity(p.identity()) != 1000 {
		t.Error("the reload began anew")
	}
	e.nextScrapes(t)
	if got := e.authorization.Load(); got != "Bearer secret" {
		t.Errorf("the engine was asked with %q", got)
	}

	// A reload that fails when it is started is taken back.
	failed := startApp(t, oldLog, p)
	_ = failed.Stop()
	e.nextScrapes(t)
	if got := e.authorization.Load(); got != "Bearer secret" {
		t.Errorf("the engine was asked with %q after a failed reload", got)
	}

	for range 2 {
		e.broken.Store(true)
		e.nextScrapes(t)
		e.broken.Store(false)
		e.nextScrapes(t)
	}
	if oldLogs.Len() != 0 || newLogs.FilterLevelExact(zapcore.WarnLevel).Len() != 2 || newLogs.FilterLevelExact(zapcore.InfoLevel).Len() != 2 {
		t.Errorf("logged %v, and to the old configuration %v", newLogs.All(), oldLogs.All())
	}

	_ = second.Stop()
	last := e.scrapes.Load()
	if engines.capacity(p.identity()) != 0 || len(engines.byIdentity) != 0 {
		t.Error("the engine is still known")
	}
	time.Sleep(5 * scrapeInterval) // for what must not happen
	if n := e.scrapes.Load(); n != last {
		t.Errorf("%d scrapes after the end", n-last)
	}
	e.Close()
	waitFor(t, "all goroutines to end", func() bool { return runtime.NumGoroutine() <= before })
	for _, l := range loads.Snapshot() {
		if l.Address == p.identity() {
			t.Errorf("%s is still known", l.Address)
		}
	}
}

func observe() (*observer.ObservedLogs, *zap.Logger) {
	core, logs := observer.New(zapcore.DebugLevel)
	return logs, zap.New(core)
}

// To stop must not wait for an engine that does not answer.
func TestStopDoesNotWait(t *testing.T) {
	asked := make(chan struct{}, 100)
	hangs := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-r.Context().Done()
	}))
	defer hangs.Close()
	e := &fakeEngine{Server: hangs}
	app := startApp(t, zap.NewNop(), e.provider(t, ""))
	<-asked
	start := time.Now()
	_ = app.Stop()
	if took := time.Since(start); took > scrapeTimeout/2 {
		t.Errorf("took %v", took)
	}
}

// Whatever an engine answers, a scrape ends in time and says what was wrong.
func TestHostileAnswers(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a redirect was followed") }))
	defer elsewhere.Close()
	for _, tc := range []struct {
		name  string
		serve http.HandlerFunc
		want  string
	}{
		{"status", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, "status 401"},
		{"redirect", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, elsewhere.URL, http.StatusFound) }, "status 302"},
		{"10 MB", func(w http.ResponseWriter, _ *http.Request) {
			for range 10 << 10 {
				if _, err := fmt.Fprintf(w, "vllm:num_requests_running 1%01000d\n", 0); err != nil {
					return
				}
			}
		}, "more than"},
		{"one long line", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 3<<20)) }, "none of vLLM's metrics"},
		{"slow drip", func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				_, _ = w.Write([]byte("vllm:num_requests_running 1\n"))
				w.(http.Flusher).Flush()
				time.Sleep(50 * time.Millisecond)
			}
		}, "deadline exceeded"},
		{"breaks off", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = w.Write([]byte("vllm:num_requests_running 1\n"))
		}, "unexpected EOF"},
		{"panics", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(tc.serve)
			defer server.Close()
			s := &source{url: server.URL + "/metrics", policy: egress.Default()}
			start := time.Now()
			f, err := s.scrape(context.Background())
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%+v, %v, want an error with %q", f, err, tc.want)
			}
			if took := time.Since(start); took > 3*scrapeTimeout {
				t.Errorf("took %v", took)
			}
		})
	}
}

// The policy is asked at every scrape.
func TestAScrapeKeepsToTheEgressPolicy(t *testing.T) {
	e := startEngine(t)
	s := newSource(e.provider(t, ""), egress.Policy{BlockLoopback: true}, zap.NewNop())
	if _, err := s.scrape(t.Context()); err == nil || !strings.Contains(err.Error(), egress.ErrDenied.Error()) || e.scrapes.Load() != 0 {
		t.Errorf("%v after %d scrapes, want denied", err, e.scrapes.Load())
	}
	s.policy.AllowHosts = []string{"127.0.0.1"}
	if _, err := s.scrape(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestMetricsSettings(t *testing.T) {
	for name, tc := range map[string]struct {
		json, block string
		want        []string
	}{
		"metrics":             {withProviderField(`"metrics":"on"`), inProviderBlock("metrics on"), []string{`provider "vllm-1"`, `metrics "on"`, `"auto"`, `"off"`}},
		"max_tokens 0":        {withRouteField(`"max_tokens":0`), inRouteBlock("max_tokens 0"), []string{"max_tokens", "0", "auto"}},
		"max_tokens negative": {withRouteField(`"max_tokens":-1`), inRouteBlock("max_tokens -1"), []string{"max_tokens", "-1", "auto"}},
		"max_tokens fraction": {withRouteField(`"max_tokens":1.5`), inRouteBlock("max_tokens 1.5"), []string{"max_tokens", "1.5", "auto"}},
		"max_tokens all":      {withRouteField(`"max_tokens":"all"`), inRouteBlock("max_tokens all"), []string{"max_tokens", "all", "auto"}},
	} {
		t.Run(name, func(t *testing.T) {
			checkMistake(t, validateConfig(serverJSON(tc.json)), tc.want)
			checkMistake(t, loadBlock(t, tc.block), tc.want)
		})
	}
	for name, handler := range map[string]string{
		"auto":   strings.Replace(withRouteField(`"max_tokens":"auto"`), `8000"`, `8000","metrics":"auto"`, 1),
		"number": strings.Replace(withRouteField(`"max_tokens":1000`), `8000"`, `8000","metrics":"off"`, 1),
	} {
		if err := validateConfig(serverJSON(handler)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		checkNothingLeft(t)
	}
}

// To check a configuration contacts nobody; to run it does, and to run the next one does not begin anew.
func TestAConfigurationReadsItsEngines(t *testing.T) {
	e := startEngine(t)
	config := func(more string) []byte {
		handler := fmt.Sprintf(`{"handler":"rolter","providers":[{"name":"vllm-1","api_base":%q,"metrics":"auto"}],"routes":[{"model":"telemetry"%s,"targets":[{"provider":"vllm-1"}]}]}`, e.URL, more)
		return []byte(strings.Replace(strings.Replace(string(serverJSON(handler)), "127.0.0.1:8080", "127.0.0.1:0", 1), `{"apps"`, `{"admin":{"disabled":true},"apps"`, 1))
	}
	if err := validateConfig(config("")); err != nil {
		t.Fatal(err)
	}
	if n := e.scrapes.Load(); n != 0 {
		t.Errorf("%d scrapes while the configuration was checked", n)
	}
	end := sync.OnceFunc(func() { _ = caddy.Stop() })
	defer end()
	if err := caddy.Load(config(""), true); err != nil {
		t.Fatal(err)
	}
	e.nextScrapes(t)
	identity := strings.TrimPrefix(e.URL, "http://")
	reader := engines.byIdentity[identity]
	if err := caddy.Load(config(`,"threshold":0.4`), true); err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(config(`,"threshold":4`), true); err == nil {
		t.Fatal("a bad configuration was loaded")
	}
	e.nextScrapes(t)
	if engines.byIdentity[identity] != reader || reader == nil {
		t.Error("the reload began anew")
	}
	end()
	if len(engines.byIdentity) != 0 {
		t.Error("the engine is still known")
	}
}
