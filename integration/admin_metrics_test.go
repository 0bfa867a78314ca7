package integration

import (
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
			default:
				ok = slices.Contains(labelValues[name], value)
			}
			if !ok {
				t.Errorf("label %s=%q in %s", name, value, sample)
			}
		}
	}
}
