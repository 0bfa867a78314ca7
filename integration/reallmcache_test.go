package integration

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
)

// outerCache is what GET /rolter/state tells of the LMCache of a provider.
type outerCache struct {
	Provider  string   `json:"provider"`
	Kind      string   `json:"kind"`
	Available bool     `json:"available"`
	Occupancy *float64 `json:"occupancy"` // nil is unknown
}

// A real LMCache behind each engine of ROLTER_VLLM, at the URLs in ROLTER_LMCACHE in the same order: the one that is filled, past the gateway, gets less
// from then on.
func TestRealLMCaches(t *testing.T) {
	urls, model := realEngines(t)
	caches := strings.Split(os.Getenv("ROLTER_LMCACHE"), ",")
	if len(caches) != len(urls) {
		t.Skip("set ROLTER_LMCACHE=http://…,http://… to the LMCaches of the engines in ROLTER_VLLM")
	}
	site := realSite(urls, model, "lmcache_aware")
	for i, url := range urls {
		site = strings.Replace(site, url+"\n", url+" {\nlmcache "+caches[i]+" {\nrefresh 200ms\n}\n}\n", 1)
	}
	g := startGateway(t, site)
	state := func() (all []outerCache) {
		t.Helper()
		var s struct {
			Caches []outerCache `json:"lmcache"`
		}
		g.readState(&s)
		return s.Caches
	}
	occupancies := func() (all []string) {
		for _, c := range state() {
			all = append(all, fmt.Sprintf("%s: kind %s, available %v, occupancy %.3f", c.Provider, c.Kind, c.Available, *c.Occupancy))
		}
		return all
	}
	g.waitFor("the occupancy of all", func() bool {
		known := 0
		for _, c := range state() {
			if c.Occupancy != nil {
				known++
			}
		}
		return known == len(urls)
	})
	t.Logf("before: %v", occupancies())
	// Fill the first.
	for i := range 30 {
		resp, err := http.Post(urls[0]+chatPath, "application/json", strings.NewReader(chat(model, longPrompt(7000+i, 2400))))
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("status %d", resp.StatusCode)
		}
	}
	g.waitFor("the first to be fuller than the second", func() bool {
		var first, second float64
		for _, c := range state() {
			switch c.Provider {
			case "engine-0":
				first = *c.Occupancy
			case "engine-1":
				second = *c.Occupancy
			}
		}
		return first > second+0.05
	})
	t.Logf("after: %v", occupancies())
	for i := range 6 {
		r := g.served(chatPath, chat(model, longPrompt(8000+i, 200)))
		t.Logf("request %d: %s, %s", i, r.target, r.reason)
		if r.target != "engine-1" {
			t.Errorf("went to %s, whose LMCache is fuller", r.target)
		}
		g.idle()
	}
}
