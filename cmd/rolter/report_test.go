package main

import (
	"strings"
	"testing"

	"github.com/rolter-ai/caddy-rolter/integration/converse"
)

var example = report{Runs: []run{
	{"round_robin", converse.Summary{
		Requests: 200, Errors: 2, PromptTokens: 1000, CachedTokens: 411, CachedReported: true,
		FirstToken: converse.Times{Mean: 0.4125, P50: 0.3, P95: 1.2}, ByReplica: map[string]int{"vllm-1": 100, "vllm-2": 98},
		ErrorTexts: map[string]int{"status 503": 2},
	}},
	{"cache_aware", converse.Summary{Requests: 200, PromptTokens: 1000, ByReplica: map[string]int{"vllm-2": 200}}},
}}

func TestTable(t *testing.T) {
	var b strings.Builder
	example.writeTable(&b)
	example.writeRemarks(&b)
	want := `
                                 round_robin  cache_aware
requests                                 200          200
failed                                     2            0
prompt tokens                           1000         1000
cached share of prompt tokens         41.1 %      unknown
time to first token, mean            0.412 s      0.000 s
time to first token, p95             1.200 s      0.000 s
requests to vllm-1                       100            0
requests to vllm-2                        98          200
round_robin: failed 2 times: status 503
cache_aware: the replicas do not report cached tokens (vLLM does with --enable-prompt-tokens-details).
`
	if got := "\n" + b.String(); got != want {
		t.Errorf("got\n%s", got)
	}
}

func TestJSON(t *testing.T) {
	var b strings.Builder
	if err := example.writeJSON(&b); err != nil {
		t.Fatal(err)
	}
	want := `{"runs":[` +
		`{"strategy":"round_robin","requests":200,"errors":2,"prompt_tokens":1000,"cached_tokens":411,` +
		`"ttft_s":{"mean":0.4125,"p50":0.3,"p95":1.2},"by_replica":{"vllm-1":100,"vllm-2":98},"error_texts":{"status503":2}},` +
		`{"strategy":"cache_aware","requests":200,"errors":0,"prompt_tokens":1000,"cached_tokens":0,` +
		`"ttft_s":{"mean":0,"p50":0,"p95":0},"by_replica":{"vllm-2":200}}]}`
	if got := strings.NewReplacer(" ", "", "\n", "").Replace(b.String()); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
