package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/converse"
)

// realEngines are the base URLs in ROLTER_VLLM, of two replicas at least, and the model that they serve. Without it the test is skipped: engines are too heavy
// to start here. They must report cached tokens (vLLM: --enable-prompt-tokens-details).
func realEngines(t *testing.T) (urls []string, model string) {
	t.Helper()
	if os.Getenv("ROLTER_VLLM") == "" {
		t.Skip("set ROLTER_VLLM=http://…,http://… to play against real engines")
	}
	urls = strings.Split(os.Getenv("ROLTER_VLLM"), ",")
	if len(urls) < 2 {
		t.Fatalf("ROLTER_VLLM=%s: two replicas at least", os.Getenv("ROLTER_VLLM"))
	}
	resp, err := http.Get(urls[0] + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var models struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(resp.Body).Decode(&models); err != nil || len(models.Data) == 0 {
		t.Fatalf("models of %s: %v", urls[0], err)
	}
	return urls, models.Data[0].ID
}

func realSite(urls []string, model, strategy string) string {
	var b strings.Builder
	b.WriteString("rolter {\n")
	for i, url := range urls {
		fmt.Fprintf(&b, "provider engine-%d %s\n", i, url)
	}
	fmt.Fprintf(&b, "route %s {\nstrategy %s\n", model, strategy)
	for i := range urls {
		fmt.Fprintf(&b, "target engine-%d\n", i)
	}
	b.WriteString("}\n}")
	return b.String()
}

// Real engines say themselves how much they had cached: with cache_aware it must be clearly more than with round_robin.
func TestRealEnginesReuseMore(t *testing.T) {
	urls, model := realEngines(t)
	g := startGateway(t, realSite(urls, model, "round_robin"))
	summaries := make(map[string]converse.Summary)
	for _, strategy := range []string{"round_robin", "cache_aware"} {
		if err := g.load(realSite(urls, model, strategy)); err != nil {
			t.Fatal(err)
		}
		player := converse.Player{BaseURL: g.URL, Model: model, Salt: fmt.Sprint(strategy, time.Now().UnixNano()), MaxTokens: 32, Pace: 2}
		s := converse.Summarize(player.Play(context.Background(), converse.Generate(1, 16, 4)))
		if s.Errors > 0 || !s.CachedReported {
			t.Fatalf("%s: %d errors %v, cached tokens reported: %v", strategy, s.Errors, s.ErrorTexts, s.CachedReported)
		}
		t.Logf("%s: %d requests, %.1f %% of %d prompt tokens cached, time to first token %.3f s mean, %.3f s p95, by replica %v",
			strategy, s.Requests, 100*s.CachedShare(), s.PromptTokens, s.FirstToken.Mean, s.FirstToken.P95, s.ByReplica)
		summaries[strategy] = s
	}
	if ours, theirs := summaries["cache_aware"].CachedShare(), summaries["round_robin"].CachedShare(); ours < theirs+0.05 {
		t.Errorf("cached share %.3f with cache_aware, %.3f with round_robin", ours, theirs)
	}
	if n := g.state().inFlight(); n != 0 {
		t.Errorf("%d requests in flight after all have ended", n)
	}
}

// Replicas are killed, come back and are drained while conversations go on. How that is done to the last of ROLTER_VLLM is told by shell commands in
// ROLTER_VLLM_KILL, ROLTER_VLLM_START (which returns when it answers) and ROLTER_VLLM_DRAIN. A stream that runs when its engine dies cannot be
// saved; everything else must be served by the others.
func TestRealEnginesComeAndGo(t *testing.T) {
	urls, model := realEngines(t)
	command := func(name string) func() {
		script := os.Getenv(name)
		if script == "" {
			t.Skipf("set %s to a command that does it to %s", name, urls[len(urls)-1])
		}
		return func() {
			if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
				t.Errorf("%s: %v %s", name, err, out)
			}
		}
	}
	kill, start, drain := command("ROLTER_VLLM_KILL"), command("ROLTER_VLLM_START"), command("ROLTER_VLLM_DRAIN")
	last := fmt.Sprintf("engine-%d", len(urls)-1)
	g := startGateway(t, realSite(urls, model, "cache_aware"))

	for _, phase := range []struct {
		name string
		do   func()
		gone bool // the last replica does not serve at the end
	}{{"killed", kill, true}, {"started", start, false}, {"drained", drain, true}, {"started again", start, false}} {
		player := converse.Player{BaseURL: g.URL, Model: model, Salt: fmt.Sprint(phase.name, time.Now().UnixNano()), MaxTokens: 32, Pace: 2}
		once := sync.Once{}
		var acting sync.WaitGroup
		player.Progress = func(done, total int) {
			if done >= total/4 {
				once.Do(func() { acting.Go(phase.do) })
			}
		}
		s := converse.Summarize(player.Play(t.Context(), converse.Generate(2, 16, 4)))
		acting.Wait()
		t.Logf("%s in the middle: %d requests, %d errors %v, by replica %v", phase.name, s.Requests, s.Errors, s.ErrorTexts, s.ByReplica)
		if !phase.gone {
			continue
		}
		// After that nobody notices.
		player.Progress, player.Salt = nil, player.Salt+"after"
		after := converse.Summarize(player.Play(t.Context(), converse.Generate(3, 4, 2)))
		if after.Errors > 0 || after.ByReplica[last] > 0 {
			t.Errorf("after it was %s: %d errors %v, by replica %v", phase.name, after.Errors, after.ErrorTexts, after.ByReplica)
		}
	}
	player := converse.Player{BaseURL: g.URL, Model: model, Salt: fmt.Sprint("back", time.Now().UnixNano()), MaxTokens: 32, Pace: 1}
	s := converse.Summarize(player.Play(t.Context(), converse.Generate(4, 8, 4)))
	if s.Errors > 0 || s.ByReplica[last] == 0 {
		t.Errorf("after it came back: %d errors %v, by replica %v", s.Errors, s.ErrorTexts, s.ByReplica)
	}
	if n := g.state().inFlight(); n != 0 {
		t.Errorf("%d requests in flight after all have ended", n)
	}
}
