package integration

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var labelPair = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)

// labelValues are what the labels of Rolter's metrics may say, apart from what the configuration names.
var labelValues = map[string][]string{
	"reason": {"cache", "continuation", "session", "overloaded", "cold", "no_prompt", "no_tokens", "no_signal", "least_prefill", "pipeline", "only_candidate", "fallback"},
	"status": {"400", "404", "405", "413", "501", "502", "503", "504"},
	"cause":  {"no_prompt_api", "unparsable", "unknown_shape", "empty", "encoding", "incremental", "too_large", "unreadable"},
}

// checkLabels checks that no label says what a client said.
func checkLabels(t *testing.T, samples map[string]float64) {
	t.Helper()
	if len(samples) == 0 {
		t.Error("no metrics")
	}
	for sample := range samples {
		for _, pair := range labelPair.FindAllStringSubmatch(sample, -1) {
			name, value := pair[1], pair[2]
			ok := false
			switch name {
			case "model", "upstream_model":
				ok = slices.Contains([]string{"", "llama", "qwen", "Qwen/Qwen3-8B"}, value)
			case "strategy":
				ok = slices.Contains([]string{"cache_aware", "least_load", "round_robin"}, value)
			case "address":
				ok = strings.HasPrefix(value, "127.0.0.1:")
			case "le": // of a histogram
				ok = true
			default:
				ok = slices.Contains(labelValues[name], value)
			}
			if !ok {
				t.Errorf("label %s=%q in %s", name, value, sample)
			}
		}
	}
}

// Neither the log, at its most talkative, nor the state, the metrics or an answer to somebody else says what a prompt says, or whose session it is.
func TestPromptsAreNotTold(t *testing.T) {
	engines := startLLMs(t, "a", "b")
	failing := startEngine(t, "failing")
	failing.serv = func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusServiceUnavailable) }
	g := startGateway(t, fmt.Sprintf(`
	rolter {
		provider a %s
		provider b %s
		provider failing %s
		provider gone http://%s
		route llama {
			target failing
			target a
			target b
		}
		route qwen {
			target gone
		}
	}`, engines[0].URL, engines[1].URL, failing.URL, freeAddr(t)))
	const secret = "the-merger-is-on-friday"
	turns := []turn{{"system", secret + strings.Repeat(" and nobody must know", 50)}, {"user", "what did I say?"}}
	bodies := []string{
		talk(false, turns...), talk(true, turns...), talk(false, append(turns, turn{"assistant", "…"}, turn{"user", secret})...),
		strings.Replace(talk(false, turns...), `"llama"`, `"qwen"`, 1), // no target
		strings.Replace(talk(false, turns...), `"llama"`, `"gpt-5"`, 1),
		strings.TrimSuffix(talk(false, turns...), "}"), // unparsable
		`{"messages":"` + secret + `"}`, `{"model":7,"messages":"` + secret + `"}`, secret, `["` + secret + `"]`,
	}
	for _, body := range bodies {
		for _, path := range []string{chatCompletions, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"} {
			a := g.postBody(t, path, strings.NewReader(body), "X-Session-Id", "session-of-alice")
			for name, values := range a.header {
				if text := strings.Join(values, " "); strings.Contains(text, secret) || strings.Contains(text, "alice") {
					t.Errorf("%s: header %s: %s", path, name, text)
				}
			}
			if strings.Contains(string(a.body), secret) {
				t.Errorf("%s: answer: %s", path, a.body)
			}
		}
	}
	for _, path := range []string{"/rolter/state", "/metrics", "/config/", "/reverse_proxy/upstreams"} {
		text, err := g.admin(http.MethodGet, path, "", "")
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(text, secret) || strings.Contains(text, "alice") {
			t.Errorf("%s tells it", path)
		}
	}
	if strings.Contains(g.log.String(), secret) {
		t.Error("the log tells it")
	}
	for line := range strings.Lines(g.log.String()) {
		// Caddy's own debug lines name all headers.
		if strings.Contains(line, "http.handlers.rolter\"") && strings.Contains(line, "alice") && !strings.Contains(line, `"request":`) {
			t.Errorf("the log tells the session: %s", line)
		}
	}
	if n := g.recorded(engines[0]) + g.recorded(engines[1]); n == 0 {
		t.Error("no prompt was recorded: there was nothing to tell")
	}
}

// The state can be read and not changed.
func TestStateIsReadOnly(t *testing.T) {
	engines := startLLMs(t, "a")
	g := startGateway(t, "respond 204")
	if err := g.loadJSON(handlerFor(engines, targetsJSON("a"), "")); err != nil {
		t.Fatal(err)
	}
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		if _, err := g.admin(method, "/rolter/state", "application/json", "{}"); err == nil || !strings.Contains(err.Error(), ": 405 ") {
			t.Errorf("%s: %v, want 405", method, err)
		}
	}
	resp, err := http.Get(g.Admin + "/rolter/state")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || !json.Valid(body) || resp.Header.Get("Content-Type") != "application/json" {
		t.Errorf("%v, %s: %s", err, resp.Header.Get("Content-Type"), body)
	}
}

// Counts go on over reloads, gauges show what is, and what clients say makes no series.
func TestMetrics(t *testing.T) {
	engines := startLLMs(t, "a", "b")
	a, b := engines[0], engines[1]
	g := startGateway(t, "respond 204")
	handler := handlerFor(engines, targetsJSON("a", "b"), "")
	if err := g.loadJSON(handler); err != nil {
		t.Fatal(err)
	}
	url := g.URL + chatCompletions
	client := freshConnections()
	const cold = `caddy_rolter_decisions_total{model="llama",reason="cold",strategy="cache_aware"}`
	const continuation = `caddy_rolter_decisions_total{model="llama",reason="continuation",strategy="cache_aware"}`
	inFlight := func(e *llm) string { return fmt.Sprintf(`caddy_rolter_requests_in_flight{address=%q}`, e.addr()) }
	prompts := func(e *llm) string {
		return fmt.Sprintf(`caddy_rolter_recorded_prompts{address=%q,model="llama",upstream_model=""}`, e.addr())
	}
	release := []func(){a.hold(), b.hold()}
	_, rest := openStream(t, url, turn{"user", "first"})
	for i := range 5 {
		m := g.metrics()
		if m[cold] != 1 || m[inFlight(a)]+m[inFlight(b)] != 1 || m[prompts(a)]+m[prompts(b)] != 1 {
			t.Errorf("after %d reloads: cold %v, in flight %v + %v, prompts %v + %v", i, m[cold], m[inFlight(a)], m[inFlight(b)], m[prompts(a)], m[prompts(b)])
		}
		if m[`caddy_rolter_recorded_bytes{model="llama"}`] <= 0 {
			t.Error("no recorded bytes")
		}
		if err := g.loadJSON(strings.Replace(handler, `"overload_margin":1000`, fmt.Sprintf(`"overload_margin":%d`, i), 1)); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range release {
		f()
	}
	if err := rest(); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(client, url, talk(false, turn{"user", "first"}, turn{"assistant", "…"}, turn{"user", "second"})); err != nil {
		t.Fatal(err)
	}
	g.waitFor("the reservations to be given back", func() bool { m := g.metrics(); return m[inFlight(a)]+m[inFlight(b)] == 0 })
	m := g.metrics()
	if m[cold] != 1 || m[continuation] != 1 {
		t.Errorf("cold %v, continuation %v, want 1 and 1", m[cold], m[continuation])
	}

	refuse := func() {
		for i := range 30 {
			for _, body := range []string{
				fmt.Sprintf(`{"model":"hostile-%d","messages":[]}`, i), fmt.Sprintf(`{"model":"llama","messages":[{"role":"role-%d","content":"hi"}]}`, i), fmt.Sprintf("not JSON %d", i),
			} {
				g.postBody(t, fmt.Sprintf("/p%d%s", i, chatCompletions), strings.NewReader(body), "X-Session-Id", fmt.Sprint(i))
			}
		}
	}
	refuse()
	before := g.metrics()
	refuse()
	after := g.metrics()
	if len(after) != len(before) {
		t.Errorf("clients made series: %d, before %d", len(after), len(before))
	}
	checkLabels(t, after)
	if got := after[`caddy_rolter_rejected_total{status="404"}`]; got != 60 {
		t.Errorf("%v refusals with 404, want 60", got)
	}
	// What is gone is not shown any more; what happened is still counted.
	if _, err := g.admin(http.MethodDelete, "/id/llama/targets/1", "", ""); err != nil {
		t.Fatal(err)
	}
	m = g.metrics()
	if _, shown := m[prompts(b)]; shown {
		t.Error("a target that was removed is still shown")
	}
	if m[continuation] < 1 {
		t.Errorf("continuation %v after the removal", m[continuation])
	}
}

// What only tries, simulates or measures is not compiled into an operator's Caddy.
func TestPluginDependsOnNoTools(t *testing.T) {
	const module = "github.com/rolter-ai/caddy-rolter"
	out, err := exec.Command("go", "list", "-deps", module).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	packages := strings.Fields(string(out))
	if !slices.Contains(packages, module+"/prompt") {
		t.Errorf("the list misses the plugin's own packages:\n%s", out)
	}
	for _, p := range packages {
		if strings.HasPrefix(p, module+"/integration") || strings.HasPrefix(p, module+"/cmd") || p == "testing" {
			t.Errorf("the plugin depends on %s", p)
		}
	}
}
