package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rolter-ai/caddy-rolter/integration/replay"
)

// smallTrace writes a trace of so many requests, 10 of which come at the same moment: each begins with one of 5 shared blocks.
func smallTrace(t *testing.T, requests int) string {
	t.Helper()
	var lines bytes.Buffer
	for i := range requests {
		fmt.Fprintf(&lines, `{"timestamp": %d, "input_length": 1300, "output_length": 20, "hash_ids": [%d, %d, %d]}`+"\n", i/10*1000, i%5, 1000+2*i, 1001+2*i)
	}
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(file, lines.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestTrace(t *testing.T) {
	file := smallTrace(t, 120)
	strategies := []string{"least_prefill", "least_conn", "reverse_proxy rolter least_prefill", "direct"}
	out := runBench(t, "--quick", "--trace", file, "--strategy", "least_prefill,least_conn,reverse_proxy rolter least_prefill,direct", "--replicas", "3", "--json")
	var r traceReport
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if len(r.Runs) != len(strategies) {
		t.Fatalf("%d runs, want %d", len(r.Runs), len(strategies))
	}
	for i, run := range r.Runs {
		if run.Strategy != strategies[i] || run.Round != 1 || run.Requests != 100 || run.Errors > 0 || run.PromptTokens != 100*1300 || run.CeilingTokens != 95*512 {
			t.Errorf("%+v", run)
		}
		// A shared block is prefilled once by each replica that gets it, or in a burst.
		if run.CachedTokens < 50*512 || run.CachedTokens > run.CeilingTokens || run.CachedTokens%512 != 0 {
			t.Errorf("%s: %d tokens cached", run.Strategy, run.CachedTokens)
		}
		requests := 0
		for _, share := range run.ByReplica {
			requests += share.Requests
		}
		if requests != 100 || len(run.ByReplica) != 3 {
			t.Errorf("%s: by replica %+v", run.Strategy, run.ByReplica)
		}
		// One that has a block cached takes 788 tokens' time, and nobody waits for all others.
		if ttft := run.TTFT; ttft.P50 < 788./8000 || ttft.Mean <= 0 || ttft.P90 < ttft.P50 || ttft.P99 < ttft.P90 {
			t.Errorf("%s: %+v", run.Strategy, ttft)
		}
		if run.In.Mean <= 0 || run.Wake.Mean < 0 || run.Out.Mean <= 0 || run.CPU.Replicas <= 0 || run.CPU.Client <= 0 || run.CPU.Caddy > 0 == (run.Strategy == "direct") {
			t.Errorf("%s: %+v", run.Strategy, run)
		}
		if replayed := run.Strategy != "least_conn"; replayed != (run.Replayed != nil) || replayed != (run.ReplayedAsSent != nil) {
			t.Errorf("%s: replayed %v, as sent %v", run.Strategy, run.Replayed, run.ReplayedAsSent)
		}
	}
}

// At once, and as a table.
func TestTraceTable(t *testing.T) {
	out := runBench(t, "--trace", smallTrace(t, 30), "--first", "20", "--rounds", "2", "--at-once", "--strategy", "round_robin", "--cache-blocks", "0")
	for _, part := range []string{"20 requests in 1 s, 26000 prompt tokens; 8 replicas with unbounded caches", "round_robin ", "2 to 3, most 1.20 × mean", "replayed without HTTP", "way in", "TTFT mean of 2 rounds"} {
		if !bytes.Contains(out, []byte(part)) {
			t.Errorf("the table lacks %q:\n%s", part, out)
		}
	}
}

// The replica finds in a body what the trace says.
func TestTraceBody(t *testing.T) {
	job := func(r replay.Request) []uint64 {
		t.Helper()
		body := appendBody(nil, &r)
		var request struct {
			Model         string
			Messages      []struct{ Role, Content string }
			MaxTokens     int `json:"max_tokens"`
			Stream        bool
			StreamOptions struct {
				IncludeUsage bool `json:"include_usage"`
			} `json:"stream_options"`
		}
		if err := json.Unmarshal(body, &request); err != nil {
			t.Fatal(err)
		}
		if request.Model != model || len(request.Messages) != 1 || len(request.Messages[0].Content) != 4*r.InputLength || request.MaxTokens != r.OutputLength ||
			!request.Stream || !request.StreamOptions.IncludeUsage {
			t.Errorf("%s", body)
		}
		j, ok := newJob(body)
		if !ok || j.PromptTokens != r.InputLength || j.OutputTokens != r.OutputLength || j.PromptBlocks != len(r.HashIDs) || len(j.Keys) != len(r.HashIDs) {
			t.Fatalf("%+v of %+v", j, r)
		}
		return j.Keys
	}
	a := job(replay.Request{InputLength: 1030, OutputLength: 7, HashIDs: []uint64{1, 2, 3}})
	b := job(replay.Request{InputLength: 1024, OutputLength: 8, HashIDs: []uint64{1, 2}})
	c := job(replay.Request{InputLength: 1024, OutputLength: 8, HashIDs: []uint64{2, 2}})
	if a[0] != b[0] || a[1] != b[1] || c[0] == a[0] || c[1] == a[1] {
		t.Errorf("keys %v, %v, %v", a, b, c)
	}
	if _, ok := newJob([]byte(`{"model":"bench"}`)); ok {
		t.Error("another body was taken")
	}
}

func TestTraceOvertaxed(t *testing.T) {
	var fine traceRun
	fine.CPU, fine.Late.Mean, fine.In.Mean = cpuShares{Caddy: 0.1}, 0.1, 0.09
	late, slow, busy := fine, fine, fine
	late.Late.Mean, slow.Out.Mean, busy.CPU.Caddy = 0.3, 0.02, 1000
	if reason := fine.overtaxed(20); reason != "" {
		t.Errorf("fine: %s", reason)
	}
	for _, run := range []traceRun{late, slow, busy} {
		if run.overtaxed(20) == "" {
			t.Errorf("%+v is taken for fine", run)
		}
	}
}

func TestTraceErrors(t *testing.T) {
	for _, args := range [][]string{
		{"--trace", "x", "--time-scale", "0"}, {"--trace", "x", "--rate-scale", "NaN"}, {"--trace", "x", "--strategy", ""}, {"--trace", "x", "--replicas", "0"}, {"--trace", "x", "--first", "-1"},
	} {
		if _, err := parse(args); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, o := range []traceOptions{{file: filepath.Join(t.TempDir(), "none")}, {file: empty}} {
		if _, err := measureTrace(t.Context(), o, new(bytes.Buffer)); err == nil {
			t.Errorf("%+v: no error", o)
		}
	}
}
