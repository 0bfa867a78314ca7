package integration

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// contract is what an adapter tells of an LMCache.
func contract(occupancy float64, available bool) stubAnswer {
	return says(http.StatusOK, fmt.Sprintf(`{"occupancy":%v,"cache_available":%v}`, occupancy, available))
}

// cacheSite is a rolter block in front of replicas with a controller each; more is put into the route.
func cacheSite(replicas, controllers []*stub, more string) string {
	var b strings.Builder
	b.WriteString("rolter {\n")
	for i, s := range replicas {
		fmt.Fprintf(&b, "provider %s http://%s {\nlmcache http://%s/cache {\nkind json\nrefresh 100ms\nstale 500ms\n}\n}\n", s.name, s.addr, controllers[i].addr)
	}
	b.WriteString("route m {\n" + more + "\n")
	for _, s := range replicas {
		fmt.Fprintf(&b, "target %s\n", s.name)
	}
	b.WriteString("}\n}")
	return b.String()
}

// cacheState is what GET /rolter/state tells of the LMCaches, by provider: occupancy, "down" or "unknown".
func (g *gateway) cacheState() map[string]string {
	g.t.Helper()
	var state struct {
		Caches []struct {
			Provider  string
			Available *bool
			Occupancy *float64
		} `json:"lmcache"`
	}
	g.readState(&state)
	told := make(map[string]string)
	for _, c := range state.Caches {
		switch {
		case c.Occupancy != nil:
			told[c.Provider] = fmt.Sprint(*c.Occupancy)
		case c.Available != nil && !*c.Available:
			told[c.Provider] = "down"
		default:
			told[c.Provider] = "unknown"
		}
	}
	return told
}

func (g *gateway) awaitCaches(want ...string) {
	g.t.Helper()
	g.waitFor(fmt.Sprint("the caches to be ", want), func() bool {
		told := g.cacheState()
		for i, w := range want {
			if told[string(rune('a'+i))] != w {
				return false
			}
		}
		return true
	})
}

// sends has n requests served one after another and returns how many each replica got, and the reason of the last.
func (g *gateway) sends(n int, replicas []*stub) (served []int, reason string) {
	g.t.Helper()
	before := counts(replicas)
	for i := range n {
		reason = g.served("/v1/chat/completions", fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"%d"}]}`, i)).reason
	}
	served = counts(replicas)
	for i := range served {
		served[i] -= before[i]
	}
	return served, reason
}

func TestLMCacheAwarePrefersTheEmptier(t *testing.T) {
	replicas, controllers := newStubs(t, 3, nil), newStubs(t, 3, contract(0.9, true))
	controllers[1].answers(contract(0.2, true))
	controllers[2].answers(contract(0, false)) // empty, but down
	g := startGateway(t, cacheSite(replicas, controllers, "strategy lmcache_aware"))
	g.awaitCaches("0.9", "0.2", "down")
	if served, reason := g.sends(6, replicas); fmt.Sprint(served) != "[0 6 0]" || reason != "pipeline" {
		t.Errorf("served %v for %s", served, reason)
	}
	controllers[1].answers(contract(0, false))
	g.awaitCaches("0.9", "down", "down")
	if served, _ := g.sends(6, replicas); fmt.Sprint(served) != "[6 0 0]" {
		t.Errorf("served %v, want the one that is full and works", served)
	}

	// A reload keeps what is known, even while no controller answers.
	for _, c := range controllers {
		c.answers(says(http.StatusInternalServerError, "{}"))
	}
	site := strings.ReplaceAll(cacheSite(replicas, controllers, "strategy lmcache_aware"), "stale 500ms", "stale 1h")
	for i, c := range controllers {
		c.answers(contract(0.1*float64(i), true))
	}
	if err := g.load(site); err != nil {
		t.Fatal(err)
	}
	g.awaitCaches("0", "0.1", "0.2")
	for _, c := range controllers {
		c.answers(says(http.StatusInternalServerError, "{}"))
	}
	if err := g.load(strings.Replace(site, "strategy lmcache_aware", "strategy lmcache_aware\nmax_nodes 5", 1)); err != nil {
		t.Fatal(err)
	}
	if served, _ := g.sends(6, replicas); fmt.Sprint(served) != "[6 0 0]" {
		t.Errorf("served %v after the reload", served)
	}
	metrics, err := g.admin(http.MethodGet, "/metrics", "", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		fmt.Sprintf(`caddy_rolter_lmcache_occupancy{endpoint="http://%s/cache",instance="",provider="b"} 0.1`, controllers[1].addr),
		fmt.Sprintf(`caddy_rolter_lmcache_available{endpoint="http://%s/cache",instance="",provider="b"} 1`, controllers[1].addr),
		fmt.Sprintf(`caddy_rolter_lmcache_failures_total{cause="status",endpoint="http://%s/cache"}`, controllers[1].addr),
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("%s is not among the metrics", want)
		}
	}
}

// A controller that fails neither draws requests to its replica nor keeps them away.
func TestAFailedControllerNeitherAttractsNorRepels(t *testing.T) {
	replicas, controllers := newStubs(t, 3, nil), newStubs(t, 3, contract(0.2, true))
	controllers[2].answers(contract(0.8, true))
	g := startGateway(t, cacheSite(replicas, controllers, "strategy lmcache_aware"))
	g.awaitCaches("0.2", "0.2", "0.8")

	controllers[1].answers(says(http.StatusOK, "{}")) // the mean of the others is 0.5
	g.awaitCaches("0.2", "unknown", "0.8")
	if served, _ := g.sends(6, replicas); fmt.Sprint(served) != "[6 0 0]" {
		t.Errorf("served %v, want the best of those that are known", served)
	}
	controllers[2].answers(contract(0.2, true)) // the mean of the others is what both have
	g.awaitCaches("0.2", "unknown", "0.2")
	if served, _ := g.sends(9, replicas); fmt.Sprint(served) != "[3 3 3]" {
		t.Errorf("served %v, want an equal share", served)
	}
	for _, c := range controllers {
		c.refuse()
	}
	g.awaitCaches("unknown", "unknown", "unknown")
	if served, reason := g.sends(9, replicas); fmt.Sprint(served) != "[3 3 3]" || reason != "no_signal" {
		t.Errorf("served %v for %s, want the least loaded for no_signal", served, reason)
	}
}

// In other strategies only a tie is decided, and never against the holder of a prefix.
func TestACacheThatIsDownLosesTies(t *testing.T) {
	replicas, controllers := newStubs(t, 2, nil), newStubs(t, 2, contract(0, true))
	g := startGateway(t, cacheSite(replicas, controllers, "strategy cache_aware"))
	g.awaitCaches("0", "0")
	const chat = `{"model":"m","messages":[{"role":"user","content":"a prompt that is asked twice"}]}`
	home := g.served("/v1/chat/completions", chat).target
	warm, cold := 0, 1
	if home == "b" {
		warm, cold = 1, 0
	}
	controllers[warm].answers(contract(0, false))
	want := []string{"0", "0"}
	want[warm] = "down"
	g.awaitCaches(want...)
	if r := g.served("/v1/chat/completions", chat); r.target != home || r.reason != "cache" {
		t.Errorf("%s for %s, want %s, which holds the prompt", r.target, r.reason, home)
	}
	if served, _ := g.sends(4, replicas); served[warm] != 0 || served[cold] != 4 {
		t.Errorf("served %v: the cache of %s is down", served, home)
	}
}

// An endpoint that is denied fails the load, and nobody is contacted.
func TestADeniedEndpointFailsTheLoad(t *testing.T) {
	replicas, controllers := newStubs(t, 1, nil), newStubs(t, 1, contract(0.5, true))
	site := cacheSite(replicas, controllers, "strategy lmcache_aware")
	g := startGateway(t, strings.Replace(site, "lmcache http://"+controllers[0].addr, "lmcache http://127.0.0.1:1", 1))
	for endpoint, want := range map[string]string{
		"http://169.254.169.254/":      `provider \"a\": lmcache.endpoint \"http://169.254.169.254/\": link-local address denied by the egress policy (allow it with egress allow_hosts)`,
		"http://0xa9fea9fe/":           `lmcache.endpoint \"http://0xa9fea9fe/\": link-local address denied by the egress policy`,
		"http://[64:ff9b::a9fe:a9fe]/": `link-local address denied by the egress policy`,
		"http://[2002:a9fe:a9fe::]/":   `link-local address denied by the egress policy`,
		"http://[fd00:ec2::254]/":      `metadata service address denied by the egress policy`,
	} {
		err := g.load(strings.Replace(site, "http://"+controllers[0].addr+"/cache", endpoint, 1))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", endpoint, err, want)
		}
	}
	// Here everything is on loopback: what is denied can be watched.
	denied := strings.Replace(site, "rolter {", "rolter {\negress {\nblock_loopback on\nallow_hosts "+strings.Split(replicas[0].addr, ":")[0]+"\n}", 1)
	denied = strings.Replace(denied, "http://"+controllers[0].addr+"/cache", "http://localhost:"+strings.Split(controllers[0].addr, ":")[1]+"/cache", 1)
	if err := g.load(denied); err != nil { // a name needs no DNS at load
		t.Fatal(err)
	}
	g.waitFor("refusals", func() bool {
		metrics, err := g.admin(http.MethodGet, "/metrics", "", "")
		return err == nil && strings.Contains(metrics, `caddy_rolter_egress_refused_total{purpose="lmcache"}`) && strings.Contains(metrics, `cause="denied"`)
	})
	time.Sleep(300 * time.Millisecond) // for what must not happen
	if n := controllers[0].count(); n != 0 {
		t.Errorf("%d requests to what is denied", n)
	}
	if n := strings.Count(g.log.String(), `"cause":"denied"`); n != 1 {
		t.Errorf("the refusal was logged %d times, want once", n)
	}
	if served, reason := g.sends(1, replicas); served[0] != 1 || reason != "only_candidate" {
		t.Errorf("served %v for %s", served, reason)
	}
}

// A replica behind a name that leads where it must not is not contacted, and its requests go elsewhere.
func TestAReplicaThatIsDeniedIsNotContacted(t *testing.T) {
	replicas := newStubs(t, 2, nil)
	port := strings.Split(replicas[0].addr, ":")[1]
	g := startGateway(t, fmt.Sprintf(`rolter {
		egress {
			block_loopback on
			allow_hosts 127.0.0.1
		}
		provider a http://localhost:%s
		provider b http://%s
		route m {
			target a
			target b
		}
	}`, port, replicas[1].addr))
	if served, _ := g.sends(6, replicas); fmt.Sprint(served) != "[0 6]" {
		t.Errorf("served %v", served)
	}
	if !strings.Contains(g.log.String(), "loopback address denied by the egress policy") {
		t.Error("the log does not say why")
	}
}
