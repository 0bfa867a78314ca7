package rolter

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/rolter-ai/caddy-rolter/egress"
	"github.com/rolter-ai/caddy-rolter/selection"
)

// fakeCache answers as LMCache, with a body that can be changed.
type fakeCache struct {
	*httptest.Server
	body  atomic.Value
	polls atomic.Int64
}

func startCache(t *testing.T, body string) *fakeCache {
	c := new(fakeCache)
	c.body.Store(body)
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		defer c.polls.Add(1)
		_, _ = io.WriteString(w, c.body.Load().(string))
	}))
	t.Cleanup(c.Close)
	return c
}

// outersApp is a configuration with these caches, started.
func outersApp(t *testing.T, policy egress.Policy, logger *zap.Logger, caches ...*LMCache) *App {
	t.Helper()
	app := new(App)
	for i, l := range caches {
		app.outers = append(app.outers, newOuterSource(&Provider{Name: fmt.Sprintf("vllm-%d", i+1), LMCache: l}, policy, logger))
	}
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = app.Stop() })
	return app
}

func occupied(share float64) selection.Outer {
	return selection.Outer{Known: true, Available: true, Occupancy: share}
}

func awaitOuter(t *testing.T, s *outerSource, want selection.Outer) {
	t.Helper()
	waitFor(t, fmt.Sprintf("%+v", want), func() bool { return s.state() == want })
}

const frequent = caddy.Duration(minRefresh)

// A reload goes on with a poller that is in both configurations: with what is known, and with the latest policy.
func TestAReloadPollsOn(t *testing.T) {
	before := runtime.NumGoroutine()
	c := startCache(t, `{"occupancy":0.25}`)
	settings := &LMCache{Endpoint: c.URL, Kind: "json", Refresh: frequent}
	first := outersApp(t, egress.Default(), zap.NewNop(), settings)
	if got := (*outerSource)(nil).state(); got != (selection.Outer{}) {
		t.Errorf("a provider without one has %+v", got)
	}
	awaitOuter(t, first.outers[0], occupied(0.25))
	poller := outers.bySettings[first.outers[0].settings].poller

	second := outersApp(t, egress.Policy{BlockLoopback: true}, zap.NewNop(), settings)
	_ = first.Stop()
	_ = first.Stop()
	if got := second.outers[0].state(); got != occupied(0.25) {
		t.Errorf("%+v after the reload", got)
	}
	if got := first.outers[0].state(); got != (selection.Outer{}) {
		t.Errorf("%+v for a configuration that is gone", got)
	}
	if outers.bySettings[second.outers[0].settings].poller != poller {
		t.Error("the poller was begun anew")
	}
	// The policy of the second applies at the next poll.
	waitFor(t, "a refusal", func() bool {
		_, failures := poller.Stats()
		return failures["denied"] > 0
	})
	asked := c.polls.Load()
	waitFor(t, "more refusals", func() bool {
		_, failures := poller.Stats()
		return failures["denied"] > 3
	})
	if n := c.polls.Load(); n != asked {
		t.Errorf("%d polls of what is denied", n-asked)
	}
	third := outersApp(t, egress.Default(), zap.NewNop(), settings)
	_ = second.Stop()
	c.body.Store(`{"occupancy":0.5,"cache_available":false}`)
	awaitOuter(t, third.outers[0], selection.Outer{Known: true, Occupancy: 0.5})

	_ = third.Stop()
	if len(outers.bySettings) != 0 {
		t.Error("the cache is still known")
	}
	c.Close()
	waitFor(t, "all goroutines to end", func() bool { return runtime.NumGoroutine() <= before })
}

// Providers that name the same coordinator share its polls.
func TestProvidersShareACoordinator(t *testing.T) {
	c := startCache(t, `{"instances":[{"instance_id":"a","registered":true,"modules":[{"tier":"l1","used_bytes":1,"capacity_bytes":4}]},`+
		`{"instance_id":"b","registered":true,"modules":[{"tier":"l1","used_bytes":3,"capacity_bytes":4}]}]}`)
	at := func(instance string) *LMCache {
		return &LMCache{Endpoint: c.URL, Kind: "coordinator", Refresh: frequent, Instance: instance}
	}
	app := outersApp(t, egress.Default(), zap.NewNop(), at("a"), at("b"), at("c"))
	awaitOuter(t, app.outers[0], occupied(0.25))
	awaitOuter(t, app.outers[1], occupied(0.75))
	if got := app.outers[2].state(); got.Known || len(outers.bySettings) != 1 {
		t.Errorf("%+v for a stranger, %d pollers", got, len(outers.bySettings))
	}
	providers, endpoints := outers.states()
	if len(providers) != 3 || *providers[1].Occupancy != 0.75 || providers[1].Instance != "b" || providers[2].Available != nil || providers[0].Kind != "coordinator" {
		t.Errorf("%+v", providers)
	}
	if len(endpoints) != 1 || endpoints[0].failures["unknown_instance"] == 0 {
		t.Errorf("%+v", endpoints)
	}
}

// To check a configuration contacts nobody; to run it does, and to run the next one does not begin anew.
func TestAConfigurationPollsItsCaches(t *testing.T) {
	c := startCache(t, `{"occupancy":0.25}`)
	config := func(more string) []byte {
		handler := fmt.Sprintf(`{"handler":"rolter","providers":[{"name":"vllm-1","api_base":"http://127.0.0.1:9","lmcache":{"endpoint":%q,"refresh":"100ms"}}],`+
			`"routes":[{"model":"caches","strategy":"lmcache_aware"%s,"targets":[{"provider":"vllm-1"}]}]}`, c.URL, more)
		return []byte(strings.Replace(strings.Replace(string(serverJSON(handler)), "127.0.0.1:8080", "127.0.0.1:0", 1), `{"apps"`, `{"admin":{"disabled":true},"apps"`, 1))
	}
	if err := validateConfig(config("")); err != nil {
		t.Fatal(err)
	}
	if n := c.polls.Load(); n != 0 {
		t.Errorf("%d polls while the configuration was checked", n)
	}
	end := sync.OnceFunc(func() { _ = caddy.Stop() })
	defer end()
	if err := caddy.Load(config(""), true); err != nil {
		t.Fatal(err)
	}
	known := func() bool {
		providers, _ := outers.states()
		return len(providers) == 1 && providers[0].Occupancy != nil
	}
	waitFor(t, "the occupancy", known)
	if err := caddy.Load(config(`,"max_nodes":5`), true); err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(config(`,"threshold":4`), true); err == nil {
		t.Fatal("a bad configuration was loaded")
	}
	if !known() {
		t.Error("the reload began anew")
	}
	end()
	if providers, _ := outers.states(); len(providers) != 0 {
		t.Errorf("%+v at the end", providers)
	}
}
