package integration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
)

// What LMCaches hold of a prompt is asked where it is known, and nobody waits for a controller that fails.
func TestLookUpsInLMCache(t *testing.T) {
	var lookups, fails atomic.Int64
	controller := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/lookup" {
			fmt.Fprint(w, `{"event_id":"e","error_codes":{"0":0}}`)
			return
		}
		lookups.Add(1)
		var question struct {
			Tokens []uint32 `json:"tokens"`
		}
		if err := json.NewDecoder(r.Body).Decode(&question); err != nil || fails.Load() > 0 {
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		instance := fmt.Sprintf("i%d", question.Tokens[0])
		fmt.Fprintf(w, `{"event_id":"e","layout_info":{%q:["LocalCPUBackend",%d]}}`, instance, len(question.Tokens))
	}))
	defer controller.Close()
	stubs := newStubs(t, 3, completion)
	site := "rolter {\n"
	for i, s := range stubs {
		site += fmt.Sprintf("provider p%d http://%s {\nlmcache %s {\nkind controller\ninstance i%d\nlookup on\n}\n}\n", i, s.addr, controller.URL, i)
	}
	g := startGateway(t, site+"route m {\nstrategy least_prefill\ntarget p0\ntarget p1\ntarget p2\n}\n}")
	ask := func(instance, n int) string {
		return g.served(textPath, fmt.Sprintf(`{"model":"m","prompt":[%d,%d,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20]}`, instance, n)).target
	}
	for i := range 9 {
		if to, want := ask(i%3, 100+i), fmt.Sprintf("p%d", i%3); to != want {
			t.Errorf("went to %s, %s holds it", to, want)
		}
		g.idle()
	}
	if n := lookups.Load(); n != 9 {
		t.Errorf("%d look-ups for 9 requests", n)
	}
	fails.Store(1)
	for i := range 20 {
		ask(0, 200+i)
	}
	if n := lookups.Load(); n > 9+3+1 {
		t.Errorf("%d look-ups at a controller that fails", n-9)
	}
	if n := g.metrics()["caddy_rolter_lmcache_lookup_failures_total"]; n != 20 {
		t.Errorf("%v failures counted, want 20", n)
	}
}
