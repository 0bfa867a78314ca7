package integration

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"
)

// accessLogs are the lines of the access log so far.
func (g *gateway) accessLogs() (lines []map[string]any) {
	for line := range strings.Lines(g.log.String()) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil && strings.HasPrefix(fmt.Sprint(entry["logger"]), "http.log.access") {
			lines = append(lines, entry)
		}
	}
	return lines
}

func TestPlaceholders(t *testing.T) {
	names := []string{"model", "strategy", "target", "reason", "score", "load", "attempt"}
	var explain strings.Builder
	explain.WriteString("log {\nformat json\n}\n")
	for _, name := range names {
		fmt.Fprintf(&explain, "header >X-Say-%s {http.rolter.%s}\nlog_append say_%s {http.rolter.%s}\n", name, name, name, name)
	}
	stubs := newStubs(t, 2, nil)
	bad, good := stubs[0], stubs[1]
	bad.answers(says(503, "{}"))
	g := startGateway(t, fmt.Sprintf(`
		%s
		handle /policy/* {
			reverse_proxy %s %s {
				lb_policy rolter least_load
				%s
			}
		}
		handle {
			%s
		}`, &explain, bad.addr, good.addr, retryAll,
		rolterFor(stubs, route("m", "", stubs...), route("rr", "strategy round_robin", stubs...), soleRoutes(stubs...))))
	free := g.occupy(good, 2) // so that it is tried last
	defer free()

	for _, c := range []struct {
		name, path, body string
		status           int
		want             map[string]string
	}{
		{"handler, first", chatPath, asks("m", "What do you say?"), 200,
			map[string]string{"model": "m", "strategy": "cache_aware", "target": "b", "reason": "only_candidate", "score": "0", "load": "2", "attempt": "2"}},
		{"handler, again", chatPath, asks("m", "What do you say?"), 200,
			map[string]string{"model": "m", "strategy": "cache_aware", "target": "b", "reason": "cache", "score": "1", "load": "2", "attempt": "1"}},
		{"handler, a policy of Caddy's", chatPath, asks("rr", "hi"), 200,
			map[string]string{"model": "rr", "strategy": "round_robin", "target": "b", "reason": "fallback", "score": "0", "load": "2"}},
		{"handler, nobody", chatPath, asks("only-a", "hi"), 503,
			map[string]string{"model": "only-a", "strategy": "cache_aware", "target": "a", "reason": "only_candidate", "attempt": "1"}},
		{"policy", "/policy" + chatPath, asks("x", "hi"), 200,
			map[string]string{"model": "x", "strategy": "least_load", "target": good.addr, "reason": "only_candidate", "load": "2", "attempt": "2"}},
		{"nothing was chosen", "/health", "", 200, map[string]string{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := len(g.accessLogs())
			answer := g.post(c.path, c.body)
			if answer.status != c.status {
				t.Fatalf("status %d, want %d: %s", answer.status, c.status, answer.body)
			}
			g.waitFor("the access log", func() bool { return len(g.accessLogs()) > before })
			logs := g.accessLogs()[before:]
			if len(logs) != 1 {
				t.Fatalf("%d lines in the access log, want 1", len(logs))
			}
			for name, want := range c.want {
				if got := answer.header.Get("X-Say-" + name); got != want {
					t.Errorf("{http.rolter.%s} is %q in a header, want %q", name, got, want)
				}
				if got := fmt.Sprint(logs[0]["say_"+name]); got != want {
					t.Errorf("{http.rolter.%s} is %q in the access log, want %q", name, got, want)
				}
			}
			if strings.Contains(fmt.Sprint(maps.Collect(maps.All(logs[0]))), "What do you say") {
				t.Error("the access log has the prompt")
			}
		})
	}
	if strings.Contains(g.log.String(), "What do you say") {
		t.Error("the log has the prompt")
	}
}
