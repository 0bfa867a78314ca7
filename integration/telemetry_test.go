package integration

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

// told is what the metrics of a replica told, by GET /rolter/state.
type told struct {
	Address  string `json:"address"`
	Others   int    `json:"requests_of_others"`
	Capacity int64  `json:"capacity_tokens"`
}

func (g *gateway) told(addr string) told {
	g.t.Helper()
	var state struct {
		Loads []told `json:"loads"`
	}
	g.readState(&state)
	for _, l := range state.Loads {
		if l.Address == addr {
			return l
		}
	}
	return told{}
}

// The record of a replica is as large as its cache, and is emptied when the replica restarts, without a request.
func TestTheRecordMirrorsTheReplicasMetrics(t *testing.T) {
	const blocks = 20 * 2000 / 16 // about 20 prompts
	servers := simulated(t, 1, replica.Config{CacheBlocks: blocks})
	addr := strings.TrimPrefix(servers[0].URL(), "http://")
	g := startGateway(t, siteFor(servers, "metrics auto", ""))
	g.waitFor("the capacity", func() bool { return g.told(addr).Capacity == blocks*16 })
	const prompts = 60
	for i := range prompts {
		g.served("/v1/chat/completions", streamed(i, 8000))
	}
	g.idle()
	if n := g.state().prompts()[addr]; n < 10 || n > 30 {
		t.Errorf("%d prompts are recorded for a cache that holds 20", n)
	}
	// What is known of the replica's start outlives the reload: nobody reads the metrics between it and the restart.
	if err := g.load(siteFor(servers, "metrics auto", "threshold 0.6")); err != nil {
		t.Fatal(err)
	}
	again, err := servers[0].Restart()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = again.Close() })
	g.waitFor("the restart", func() bool { return g.state().prompts()[addr] == 0 })
}

// Requests that others send to a replica keep those of the gateway away.
func TestRequestsOfOthersCount(t *testing.T) {
	servers := simulated(t, 2, replica.Config{})
	busy := strings.TrimPrefix(servers[0].URL(), "http://")
	g := startGateway(t, siteFor(servers, "metrics auto", ""))

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	const others = 6
	for range others {
		resp, err := testClient.Do(newRequest(ctx, http.MethodPost, servers[0].URL()+"/v1/chat/completions",
			strings.NewReader(`{"model":"m","stream":true,"max_tokens":100000,"ignore_eos":true,"messages":[{"role":"user","content":"count"}]}`)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
	}
	g.waitFor("the requests of others", func() bool { return g.told(busy).Others == others })
	for i := range 4 {
		if r := g.served("/v1/chat/completions", streamed(i, 8000)); r.target != "r1" {
			t.Errorf("request %d went to %s (%s)", i, r.target, r.reason)
		}
	}
	cancel()
	g.waitFor("the others to end", func() bool { return g.told(busy).Others == 0 })
}
