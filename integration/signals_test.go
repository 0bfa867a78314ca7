package integration

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

// simulated starts replicas that live 200 times faster than real ones.
func simulated(t *testing.T, n int, config replica.Config) []*replica.Server {
	t.Helper()
	config.TimeScale = 200
	if config.AnswerTokens == 0 {
		config.AnswerTokens = 4
	}
	config.Model = "m"
	servers := make([]*replica.Server, n)
	for i := range servers {
		servers[i] = replica.New(config)
		if err := servers[i].Start("127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = servers[i].Close() })
	}
	return servers
}

// siteFor is a rolter block in front of simulated replicas; provider is put into each provider's block and route into the route's.
func siteFor(servers []*replica.Server, provider, route string) string {
	var b strings.Builder
	b.WriteString("rolter {\n")
	for i, s := range servers {
		fmt.Fprintf(&b, "provider r%d %s {\n%s\n}\n", i, s.URL(), provider)
	}
	fmt.Fprintf(&b, "route m {\n%s\n", route)
	for i := range servers {
		fmt.Fprintf(&b, "target r%d\n", i)
	}
	b.WriteString("}\n}")
	return b.String()
}

// longPrompt is a prompt of about n bytes that nobody else has.
func longPrompt(seed, n int) string {
	rng := rand.New(rand.NewPCG(uint64(seed), 7))
	var b strings.Builder
	for b.Len() < n {
		fmt.Fprintf(&b, "word%d ", rng.IntN(1_000_000))
	}
	return b.String()
}

func streamed(seed, n int) string {
	return fmt.Sprintf(`{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":%q}]}`, longPrompt(seed, n))
}

// An engine that restarts has an empty cache, and says nothing. Its answers tell.
func TestARestartedReplicaIsNoLongerThoughtWarm(t *testing.T) {
	servers := simulated(t, 2, replica.Config{CacheBlocks: 100_000})
	g := startGateway(t, siteFor(servers, "", "strategy cache_aware"))
	const prompts = 40
	for i := range prompts {
		g.served("/v1/chat/completions", streamed(i, 8000))
	}
	g.idle()
	before := g.state().prompts()
	addr := strings.TrimPrefix(servers[0].URL(), "http://")
	if before[addr] < prompts/3 {
		t.Fatalf("recorded %v", before)
	}
	again, err := servers[0].Restart()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = again.Close() })
	// The first few are predicted wrongly, and then everything is forgotten. A request that meets the death of the replica goes to the other one, and for a
	// second those after it too.
	ends := time.Now().Add(20 * time.Second)
	for i := 0; ; i++ {
		g.served("/v1/chat/completions", streamed(i%prompts, 8000))
		g.idle()
		after := g.state().prompts()[addr]
		if after < before[addr] {
			break
		}
		if time.Now().After(ends) {
			t.Fatalf("%d prompts are recorded for a replica that has restarted, %d before", after, before[addr])
		}
	}
}

// A replica whose cache is a tenth of what it seems keeps a record of that size.
func TestARecordShrinksToTheReplicasCache(t *testing.T) {
	servers := simulated(t, 1, replica.Config{CacheBlocks: 20 * 8000 / 4 / 16}) // 20 prompts
	g := startGateway(t, siteFor(servers, "", "strategy cache_aware"))
	rng := rand.New(rand.NewPCG(1, 1))
	for range 600 {
		g.served("/v1/chat/completions", streamed(int(rng.ExpFloat64()*40), 8000))
	}
	g.idle()
	if n := g.state().prompts()[strings.TrimPrefix(servers[0].URL(), "http://")]; n > 70 {
		t.Errorf("%d prompts are recorded for a cache that holds 20", n)
	}
}

// With several answers to a prompt the engine's figure is that of one of them.
func TestFeedbackOfSeveralAnswersIsLeftOut(t *testing.T) {
	stubs := newStubs(t, 1, says(200, `{"choices":[],"usage":{"prompt_tokens":2000,"completion_tokens":1,"total_tokens":2001,"prompt_tokens_details":{"cached_tokens":0}}}`))
	g := startGateway(t, rolterFor(stubs, soleRoutes(stubs...)))
	body := func(n int) string {
		return fmt.Sprintf(`{"model":%q,"n":%d,"messages":[{"role":"user","content":%q}]}`, "only-"+stubs[0].name, n, longPrompt(1, 8000))
	}
	for range 8 {
		g.post("/v1/chat/completions", body(2))
	}
	g.idle()
	if n := g.state().prompts()[stubs[0].addr]; n != 1 {
		t.Errorf("%d prompts recorded, want the one that was served", n)
	}
	forgotten := false
	for range 8 {
		g.post("/v1/chat/completions", body(1))
		g.idle()
		forgotten = forgotten || g.state().prompts()[stubs[0].addr] == 0
	}
	if !forgotten {
		t.Error("an engine that never has anything cached is still thought to be warm")
	}
}

func TestEnginePriority(t *testing.T) {
	type received struct {
		Priority *int64 `json:"priority"`
		header   string
	}
	ask := func(t *testing.T, provider string, body string, header ...string) received {
		t.Helper()
		stubs := newStubs(t, 1, completion)
		g := startGateway(t, fmt.Sprintf("rolter {\nprovider a http://%s {\n%s\n}\nroute m {\nstrategy least_prefill\ntarget a other\n}\n}", stubs[0].addr, provider))
		if r := g.post("/v1/chat/completions", body, header...); r.status != http.StatusOK {
			t.Fatalf("status %d %s", r.status, r.body)
		}
		got := stubs[0].only()
		var seen received
		if err := json.Unmarshal([]byte(got.body), &seen); err != nil {
			t.Fatalf("%v: %s", err, got.body)
		}
		seen.header = got.header.Get("X-Vllm-Priority")
		// Apart from the model and the priority the body is the client's.
		var was, is map[string]any
		_ = json.Unmarshal([]byte(body), &was)
		_ = json.Unmarshal([]byte(got.body), &is)
		delete(was, "priority")
		delete(is, "priority")
		was["model"] = "other"
		if fmt.Sprint(was) != fmt.Sprint(is) {
			t.Errorf("%v became %v", was, is)
		}
		return seen
	}
	now := time.Now().UnixMilli()
	stamped := func(r received) bool { return r.Priority != nil && *r.Priority >= now && *r.Priority < now+3_600_000 }
	plain := asks("m", "hello")
	own := `{"priority":-5,"messages":[{"role":"user","content":"hello"}],"prior\u0069ty" : -7 , "model":"m"}`
	for name, tc := range map[string]struct {
		provider, body string
		header         []string
		want           func(received) bool
	}{
		"off":                          {"", plain, nil, func(r received) bool { return r.Priority == nil && r.header == "" }},
		"off, the client's own":        {"engine_priority off", own, []string{"X-Vllm-Priority", "-9"}, func(r received) bool { return *r.Priority == -7 && r.header == "-9" }},
		"on":                           {"engine_priority on", plain, nil, func(r received) bool { return stamped(r) && r.header == fmt.Sprint(*r.Priority) }},
		"on, the client's own":         {"engine_priority on", own, []string{"X-Vllm-Priority", "-9"}, func(r received) bool { return stamped(r) && r.header == fmt.Sprint(*r.Priority) }},
		"trusted, none":                {"engine_priority trust_client", plain, nil, stamped},
		"trusted, the client's own":    {"engine_priority trust_client", own, nil, func(r received) bool { return *r.Priority == -7 && r.header == "" }},
		"trusted, the client's header": {"engine_priority trust_client", plain, []string{"X-Vllm-Priority", "-9"}, func(r received) bool { return r.Priority == nil && r.header == "-9" }},
	} {
		t.Run(name, func(t *testing.T) {
			if got := ask(t, tc.provider, tc.body, tc.header...); !tc.want(got) {
				t.Errorf("the engine got %+v", got)
			}
		})
	}
}

// An engine that refuses the field costs one request a detour, and nobody an error.
func TestAnEngineThatRefusesThePriority(t *testing.T) {
	servers := simulated(t, 2, replica.Config{RefusePriority: true, KeepRequests: 100})
	g := startGateway(t, siteFor(servers, "engine_priority on", "strategy least_prefill"))
	for i := range 10 {
		if r := g.post("/v1/chat/completions", streamed(i, 2000)); r.status != http.StatusOK {
			t.Fatalf("status %d %s", r.status, r.body)
		}
	}
	g.idle()
	for _, s := range servers {
		with := 0
		for _, r := range s.Requests() {
			if strings.Contains(string(r.Body), `"priority"`) {
				with++
			}
		}
		if with > 1 {
			t.Errorf("%d of %d requests carried a priority", with, len(s.Requests()))
		}
	}
	if n := strings.Count(g.log.String(), "--scheduling-policy priority"); n != 2 {
		t.Errorf("%d warnings, want one for each provider", n)
	}
	// What is wrong with a request itself stays the engine's to say, and says nothing of the field.
	if r := g.post("/v1/chat/completions", `{"model":"m","messages":"none"}`); r.status != http.StatusBadRequest {
		t.Errorf("status %d for a bad request", r.status)
	}
}

// A bad request to an engine that takes the field is the client's, and is asked twice at most.
func TestABadRequestWithAPriority(t *testing.T) {
	servers := simulated(t, 1, replica.Config{KeepRequests: 100})
	g := startGateway(t, siteFor(servers, "engine_priority on", "strategy least_prefill"))
	for range 3 {
		if r := g.post("/v1/chat/completions", `{"model":"m","messages":"none"}`); r.status != http.StatusBadRequest {
			t.Errorf("status %d", r.status)
		}
	}
	if r := g.post("/v1/chat/completions", streamed(1, 2000)); r.status != http.StatusOK {
		t.Errorf("status %d", r.status)
	}
	before := len(servers[0].Requests())
	g.post("/v1/chat/completions", `{"model":"m","messages":"none"}`)
	if n := len(servers[0].Requests()) - before; n != 1 {
		t.Errorf("a bad request was sent %d times to an engine that takes priorities", n)
	}
	last := servers[0].Requests()
	if !strings.Contains(string(last[len(last)-1].Body), `"priority"`) {
		t.Error("the priority was given up for a bad request")
	}
}

func TestSessionsStickAcrossPrompts(t *testing.T) {
	stubs := newStubs(t, 4, completion)
	g := startGateway(t, rolterFor(stubs, route("m", "strategy pipeline", stubs...)))
	home := map[string]string{}
	for i := range 60 {
		id := fmt.Sprint("session-", i%6)
		r := g.served("/v1/chat/completions", asks("m", longPrompt(i, 300)), "X-Session-ID", id)
		if home[id] != "" && (r.target != home[id] || r.reason != "session") {
			t.Errorf("%s went to %s for %s, want %s", id, r.target, r.reason, home[id])
		}
		home[id] = r.target
	}
	for _, s := range stubs {
		for _, r := range s.received() {
			if r.header.Get("X-Session-ID") == "" {
				t.Fatal("the engine does not see the session, by which it tags its events")
			}
		}
	}
	if strings.Contains(g.log.String(), `"session-`) && !strings.Contains(g.log.String(), "X-Session-Id") {
		t.Error("a session id is in the log")
	}
}
