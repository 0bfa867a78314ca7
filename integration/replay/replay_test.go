package replay

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"image/png"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// replay runs the command.
func replay(t *testing.T, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	flags := pflag.NewFlagSet("replay", pflag.ContinueOnError)
	opts := RegisterFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	err = Run(t.Context(), *opts, flags.Args(), strings.NewReader(stdin), &out, &errOut)
	return out.String(), errOut.String(), err
}

// results runs the command with --json.
func results(t *testing.T, stdin string, args ...string) []Result {
	t.Helper()
	out, _, err := replay(t, stdin, append(args, "--json")...)
	if err != nil {
		t.Fatal(err)
	}
	var report Report
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return report.Runs
}

// publicTrace is the path of Mooncake's conversation trace, which lies beside the repository where there is one.
func publicTrace(t *testing.T) string {
	t.Helper()
	shared := filepath.Join("..", "..", "..", "shared")
	path := filepath.Join(shared, "traces", "conversation.jsonl.gz")
	if _, err := os.Stat(path); err != nil {
		if _, err := os.Stat(shared); err == nil && os.Getenv("CI") != "" {
			t.Fatalf("%s is missing", path)
		}
		t.Skipf("no public trace: %v", err)
	}
	return path
}

func TestPublicTraceInfiniteCache(t *testing.T) {
	t.Parallel()
	r := results(t, "", publicTrace(t), "--replicas", "1", "--cache-blocks", "0", "--strategy", "cache_aware")[0]
	const cached, prompt = 54_098_411, 144_793_823
	if r.Requests != 12_031 || r.CachedTokens != cached || r.CeilingTokens != cached || r.PromptTokens != prompt {
		t.Errorf("%d requests, %d cached, ceiling %d of %d prompt tokens, want 12031 requests, %d of %d",
			r.Requests, r.CachedTokens, r.CeilingTokens, r.PromptTokens, cached, prompt)
	}
}

// The model of a replica has to agree with figures that were computed elsewhere for the public trace, 8 replicas, 7,000 tokens/s and 30 ms. What
// is promised of the strategies has a little room.
func TestPublicTraceReferencePoints(t *testing.T) {
	t.Parallel()
	type span struct{ least, most float64 }
	for _, tt := range []struct {
		blocks, strategy string
		mean, cached     span
	}{
		{"4000", "round_robin", span{4.35, 4.45}, span{0.0995, 0.1005}},
		{"600", "round_robin", span{4.95, 5.05}, span{0, 0.1}},
		{"4000", "cache_aware", span{0, 3.2}, span{0.28, 0.3737}},
		{"4000", "least_prefill", span{0, 1.55}, span{0.305, 0.3737}},
		{"600", "least_prefill", span{0, 2.1}, span{0.095, 0.12}},
	} {
		t.Run(tt.strategy+" "+tt.blocks, func(t *testing.T) {
			r := results(t, "", publicTrace(t), "--cache-blocks", tt.blocks, "--strategy", tt.strategy)[0]
			cached := float64(r.CachedTokens) / float64(r.PromptTokens)
			t.Logf("mean %.3f s, cached %.2f %%", r.TTFT.Mean, 100*cached)
			if r.TTFT.Mean < tt.mean.least || r.TTFT.Mean > tt.mean.most {
				t.Errorf("mean %v s, want %v", r.TTFT.Mean, tt.mean)
			}
			if cached < tt.cached.least || cached > tt.cached.most {
				t.Errorf("cached %v, want %v", cached, tt.cached)
			}
		})
	}
}

// Small traces, one block a second to prefill and one second a token to decode.
func TestModel(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name     string
		strategy string
		args     []string
		requests []Request
		ttft     []float64 // seconds
		cached   []int     // tokens
		replica  []int     // all on replica 0 when nil
	}{
		{
			name:     "first come first served, and the cache is looked up when prefill starts",
			strategy: "round_robin",
			requests: []Request{
				{0, 1024, 1, []uint64{1, 2}},
				{1000, 1024, 1, []uint64{1, 3}},     // waits 1 s; finds block 1, which was not there when it came
				{3000, 1152, 1, []uint64{1, 2, 4}},  // a quarter of a block is new
				{10000, 1152, 1, []uint64{1, 2, 4}}, // wholly cached, the partial block too
			},
			ttft:   []float64{2, 2, 0.25, 0},
			cached: []int{0, 512, 1024, 1152},
		},
		{
			name:     "of requests that come together, the one that is first in the trace",
			strategy: "round_robin",
			requests: []Request{
				{5000, 512, 1, []uint64{2}},
				{0, 512, 1, []uint64{1}},
				{5000, 1024, 1, []uint64{3, 4}},
			},
			ttft:   []float64{1, 1, 3},
			cached: []int{0, 0, 0},
		},
		{
			name:     "the least recently used block is evicted, the last of a prompt before the others",
			strategy: "round_robin",
			args:     []string{"--cache-blocks", "3"},
			requests: []Request{
				{0, 1024, 1, []uint64{1, 2}},
				{10000, 1024, 1, []uint64{3, 4}}, // evicts 2
				{20000, 1024, 1, []uint64{1, 2}}, // evicts 4
				{30000, 1024, 1, []uint64{3, 4}},
			},
			ttft:   []float64{2, 2, 1, 1},
			cached: []int{0, 0, 512, 512},
		},
		{
			name:     "twice the rate",
			strategy: "round_robin",
			args:     []string{"--rate-scale", "2"},
			requests: []Request{
				{0, 1536, 1, []uint64{1, 2, 3}},
				{4000, 512, 1, []uint64{4}}, // comes after 2 s and waits for 1
			},
			ttft:   []float64{3, 2},
			cached: []int{0, 0},
		},
		{
			name:     "a request is in flight until the last token of its answer",
			strategy: "least_load",
			args:     []string{"--replicas", "2"},
			requests: []Request{
				{0, 512, 1, []uint64{1}},
				{0, 512, 3, []uint64{2}},     // in flight until 3 s, first token at 1 s
				{1500, 512, 1, []uint64{3}},  // until 2.5 s
				{2600, 512, 20, []uint64{4}}, // the second replica still decodes
				{3500, 512, 1, []uint64{5}},  // no more
			},
			ttft:    []float64{1, 1, 1, 1, 1},
			cached:  []int{0, 0, 0, 0, 0},
			replica: []int{0, 1, 0, 0, 1},
		},
		{
			name:     "a warm replica is found by the text of the prompt",
			strategy: "cache_aware",
			args:     []string{"--replicas", "2"},
			requests: []Request{
				{0, 1024, 1, []uint64{1, 2}},
				{10000, 1024, 1, []uint64{3, 4}},
				{20000, 1536, 1, []uint64{1, 2, 5}},
				{30000, 1536, 1, []uint64{1, 2, 6}},
				{40000, 1536, 1, []uint64{3, 4, 7}},
			},
			ttft:    []float64{2, 2, 1, 1, 1},
			cached:  []int{0, 0, 1024, 1024, 1024},
			replica: []int{0, 1, 0, 0, 1},
		},
		{
			name:     "a slow replica",
			strategy: "least_load",
			args:     []string{"--replicas", "2", "--slow", "1:0.5"},
			requests: []Request{
				{0, 512, 1, []uint64{1}},
				{0, 512, 1, []uint64{2}},
			},
			ttft:    []float64{1, 2},
			cached:  []int{0, 0},
			replica: []int{0, 1},
		},
		{
			name:     "a replica fails and returns empty",
			strategy: "least_load",
			args:     []string{"--replicas", "2", "--fail", "0@1500ms+10s"},
			requests: []Request{
				{0, 512, 5, []uint64{1}},       // has its first token at 1 s, and no more than that after 1.5 s
				{0, 512, 1, []uint64{2}},       //
				{250, 1024, 1, []uint64{3, 4}}, // is being prefilled at 1.5 s: begins again on the second, when the next has left it at 2 s
				{375, 512, 1, []uint64{5}},     //
				{500, 512, 1, []uint64{6}},     // waits at 1.5 s: goes behind the one above
				{12000, 512, 1, []uint64{1}},   // the first is back, and has been picked longest ago
			},
			ttft:    []float64{1, 1, 3.75, 1.625, 4.5, 1},
			cached:  []int{0, 0, 0, 0, 0, 0},
			replica: []int{0, 1, 1, 1, 1, 0},
		},
		{
			name:     "a replica that returns at the moment of an arrival, and one that fails then",
			strategy: "least_load",
			args:     []string{"--replicas", "2", "--fail", "1@5s+1s", "--fail", "0@1s+4s"},
			requests: []Request{
				{0, 512, 1, []uint64{1}},
				{1000, 512, 1, []uint64{2}},
				{5000, 512, 1, []uint64{3}},
				{6000, 512, 1, []uint64{4}},
			},
			ttft:    []float64{1, 1, 1, 1},
			cached:  []int{0, 0, 0, 0},
			replica: []int{0, 1, 0, 1},
		},
		{
			name:     "a replica joins",
			strategy: "round_robin",
			args:     []string{"--replicas", "2", "--join", "0@5s"},
			requests: []Request{
				{0, 512, 1, []uint64{1}},
				{1000, 512, 1, []uint64{2}},
				{5000, 512, 1, []uint64{1}},
				{6000, 512, 1, []uint64{1}},
			},
			ttft:    []float64{1, 1, 0, 1},
			cached:  []int{0, 0, 512, 0},
			replica: []int{1, 1, 1, 0},
		},
		{
			name:     "gateways do not know what others have sent",
			strategy: "cache_aware",
			args:     []string{"--replicas", "2", "--gateways", "2"},
			requests: []Request{
				{0, 1024, 1, []uint64{1, 2}},
				{10000, 1024, 1, []uint64{3, 4}}, // the first of the second gateway
				{20000, 1536, 1, []uint64{3, 4, 5}},
				{30000, 1536, 1, []uint64{3, 4, 6}},
			},
			ttft:    []float64{2, 2, 3, 1},
			cached:  []int{0, 0, 0, 1024},
			replica: []int{0, 0, 1, 0},
		},
		{
			name:     "first come first served where it is said",
			strategy: "least_prefill",
			args:     []string{"--engine-order", "fifo"},
			requests: deadlines,
			ttft:     []float64{2, 5.5, 6},
			cached:   []int{0, 0, 0},
		},
		{
			name:     "the earliest deadline first",
			strategy: "least_prefill",
			args:     []string{"--engine-order", "priority", "--rate-error", "1"},
			requests: deadlines,
			ttft:     []float64{2, 6.5, 2},
			cached:   []int{0, 0, 0},
		},
		{
			name:     "no deadline, no other order",
			strategy: "round_robin",
			args:     []string{"--engine-order", "priority"},
			requests: deadlines,
			ttft:     []float64{2, 5.5, 6},
			cached:   []int{0, 0, 0},
		},
		{
			name:     "a record smaller than the cache",
			strategy: "cache_aware",
			args:     []string{"--replicas", "2", "--cache-blocks", "100", "--index-scale", "0.02"}, // two blocks
			requests: []Request{
				{0, 1024, 1, []uint64{1, 2}},
				{10000, 1024, 1, []uint64{3, 4}},
				{20000, 1024, 1, []uint64{5, 6}}, // nobody's: to the first, whose record has room for nothing else
				{30000, 1024, 1, []uint64{1, 2}}, // so this is nobody's too, and the second has been picked longest ago
			},
			ttft:    []float64{2, 2, 2, 2},
			cached:  []int{0, 0, 0, 0},
			replica: []int{0, 1, 0, 1},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			args := []string{"--strategy", tt.strategy, "--prefill-rate", "512", "--decode-ms", "1000", "--replicas", "1", "--cache-blocks", "0"}
			s := simulateLines(t, lines(t, tt.requests), append(args, tt.args...))
			for i, a := range s.attempts {
				wantReplica := 0
				if tt.replica != nil {
					wantReplica = tt.replica[i]
				}
				if ttft := a.ttft(); ttft != tt.ttft[i] || a.job.CachedTokens != tt.cached[i] || a.replica != wantReplica {
					t.Errorf("request %d: first token after %v s, %d tokens cached, on replica %d, want %v s, %d, %d",
						i+1, ttft, a.job.CachedTokens, a.replica, tt.ttft[i], tt.cached[i], wantReplica)
				}
			}
		})
	}
}

// Three requests for one replica that prefills one block a second: the second has its deadline after 0.5 + 5 × 4 s, the third after 1 + 5 × 1 s.
var deadlines = []Request{
	{0, 1024, 1, []uint64{1, 2}},
	{500, 2048, 1, []uint64{3, 4, 5, 6}},
	{1000, 512, 1, []uint64{7}},
}

// The deadline shows what a strategy takes the rate for: 5 × the time for two blocks.
func TestRateError(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		args []string
		want int64 // ms
	}{
		{[]string{"--rate-error", "1"}, 10_000},
		{[]string{"--rate-error", "2"}, 5_000},
		{[]string{"--rate-error", "0.5"}, 20_000},
		{[]string{"--rate-error", "2", "--slow", "0:0.5"}, 10_000},
	} {
		s := simulateLines(t, lines(t, deadlines), append(tt.args, "--replicas", "1", "--prefill-rate", "512", "--strategy", "least_prefill"))
		if got := s.attempts[0].job.Priority; got != tt.want {
			t.Errorf("%v: a deadline after %d ms, want %d", tt.args, got, tt.want)
		}
	}
}

// TestOverload sends three times as many requests as the replicas can take. A strategy that evens out the queues then moves every conversation at every turn, and
// the replicas compute most prompts anew, which makes the queues longer still.
func TestOverload(t *testing.T) {
	t.Parallel()
	r := results(t, "", "--seed", "1", "--replicas", "4", "--cache-blocks", "300", "--rate-scale", "3", "--strategy", "least_load,cache_aware,least_prefill")
	load, cache, prefill := r[0], r[1], r[2]
	if n := prefill.CachedTokens; n < 2*load.CachedTokens || n < cache.CachedTokens || prefill.TTFT.Mean > cache.TTFT.Mean {
		t.Errorf("%d tokens cached and %.0f s to the first token, want more than %d and less than %.0f s, and twice %d at least",
			n, prefill.TTFT.Mean, cache.CachedTokens, cache.TTFT.Mean, load.CachedTokens)
	}
}

func TestFailuresAreCounted(t *testing.T) {
	t.Parallel()
	requests := []Request{
		{0, 512, 5, []uint64{1}},
		{0, 512, 1, []uint64{2}},
		{250, 1024, 1, []uint64{3, 4}},
		{375, 512, 1, []uint64{5}},
		{500, 512, 1, []uint64{6}},
	}
	args := []string{"--replicas", "2", "--prefill-rate", "512", "--decode-ms", "1000", "--strategy", "least_load", "--fail", "0@1500ms+10s"}
	r := results(t, lines(t, requests), append(args, "-")...)[0]
	if *r.Failures != (Failures{Retried: 2, CutOff: 1}) || r.ByReplica[0].Requests != 1 || r.ByReplica[1].Requests != 4 {
		t.Errorf("got %+v, %+v, want 2 retried, 1 cut off, 1 and 4 requests", *r.Failures, r.ByReplica)
	}
}

func TestHerd(t *testing.T) {
	t.Parallel()
	h := newHerd(4)
	for _, step := range []struct {
		now    time.Duration // s
		queues [4]time.Duration
		there  int
		want   time.Duration // the longest so far
	}{
		{0, [4]time.Duration{0, 0, 0, 0}, 4, 0},
		{1, [4]time.Duration{4, 1, 0, 0}, 4, 0}, // 4 > 3 × 5/4
		{3, [4]time.Duration{3, 1, 0, 0}, 4, 2}, // 3 = 3 × 4/4 is not above
		{4, [4]time.Duration{5, 0, 1, 0}, 4, 2},
		{5, [4]time.Duration{9, 0, 1, 0}, 4, 2},
		{7, [4]time.Duration{0, 9, 1, 0}, 4, 3}, // another one takes over
		{9, [4]time.Duration{0, 9, 1, 0}, 3, 3}, // 9 < 3 × 10/3
		{20, [4]time.Duration{1, 1, 1, 1}, 4, 3},
	} {
		copy(h.queues, step.queues[:])
		if h.sample(step.now, step.there); h.longest != step.want {
			t.Errorf("at %d s: %d s, want %d", step.now, h.longest, step.want)
		}
	}

	// Four replicas, the last of which joins. One prompt at each is no herd, however long. A fifth waits for 3 s, and then another one nowhere.
	requests := []Request{
		{0, 4096, 1, []uint64{1, 2, 3, 4, 5, 6, 7, 8}},
		{20_000, 2048, 1, []uint64{11, 12, 13, 14}},
		{20_000, 2048, 1, []uint64{21, 22, 23, 24}},
		{20_000, 2048, 1, []uint64{31, 32, 33, 34}},
		{20_000, 2048, 1, []uint64{41, 42, 43, 44}},
		{21_000, 1024, 1, []uint64{51, 52}},
		{40_000, 4096, 1, []uint64{61, 62, 63, 64, 65, 66, 67, 68}},
	}
	args := []string{"--replicas", "4", "--prefill-rate", "512", "--decode-ms", "1000", "--strategy", "least_load", "--join", "3@9s", "-"}
	if r := results(t, lines(t, requests), args...)[0]; *r.Herd != 3 {
		t.Errorf("%v s, want 3", *r.Herd)
	}
}

// simulateLines replays a trace with the only variant of the arguments.
func simulateLines(t *testing.T, lines string, args []string) *simulation {
	t.Helper()
	flags := pflag.NewFlagSet("replay", pflag.ContinueOnError)
	opts := RegisterFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	trace, err := ReadTrace(t.Context(), strings.NewReader(lines), 0)
	if err != nil {
		t.Fatal(err)
	}
	s, err := simulate(t.Context(), trace, opts.variants()[0], *opts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// lines renders requests as a trace.
func lines(t *testing.T, requests []Request) string {
	t.Helper()
	var b strings.Builder
	out := json.NewEncoder(&b)
	for _, r := range requests {
		if err := out.Encode(r); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// Three requests on one replica: two blocks, then the same and half a block, then the first two again.
const smallTrace = `{"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [7, 8]}

{"timestamp": 10000, "input_length": 1280, "output_length": 3, "hash_ids": [7, 8, 9], "type": "a field of somebody else"}
{"timestamp": 20000, "input_length": 1024, "output_length": 3, "hash_ids": [7, 8]}
`

var smallArgs = []string{"--replicas", "1", "--strategy", "cache_aware", "--prefill-rate", "512"}

func TestJSON(t *testing.T) {
	t.Parallel()
	out, _, err := replay(t, smallTrace, append(smallArgs, "--json", "-")...)
	const want = `{"runs":[{"strategy":"cache_aware","requests":3,"prompt_tokens":3328,"cached_tokens":2048,"ceiling_tokens":2048,` +
		`"ttft_s":{"mean":0.8333333333333334,"p50":0.5,"p90":2,"p99":2},` +
		`"by_replica":[{"requests":3,"prompt_tokens":3328,"cached_tokens":2048}]}]}`
	var compact bytes.Buffer
	if jsonErr := json.Compact(&compact, []byte(out)); err != nil || jsonErr != nil || compact.String() != want {
		t.Errorf("got %s, %v, %v\nwant %s", compact.String(), err, jsonErr, want)
	}
}

func TestJSONOfVariants(t *testing.T) {
	t.Parallel()
	out, _, err := replay(t, smallTrace, append(smallArgs, "--replicas", "2", "--json", "--index-scale", "0,0.5", "--gateways", "1,2",
		"--engine-order", "fifo,priority", "--fail", "0@11s+1s", "--join", "1@0s", "-")...)
	var report struct {
		Runs []map[string]any `json:"runs"`
	}
	if jsonErr := json.Unmarshal([]byte(out), &report); err != nil || jsonErr != nil || len(report.Runs) != 8 {
		t.Fatalf("%v, %v in %s", err, jsonErr, out)
	}
	first, last := report.Runs[0], report.Runs[7]
	for _, run := range report.Runs {
		for _, name := range []string{"strategy", "gateways", "engine_order", "requests", "ttft_s", "by_replica", "failures", "herd_s"} {
			if run[name] == nil {
				t.Errorf("no %s in %v", name, run)
			}
		}
	}
	_, scaled := first["index_scale"]
	if scaled || first["gateways"] != 1.0 || first["engine_order"] != "fifo" {
		t.Errorf("the first run is %v", first)
	}
	if last["index_scale"] != 0.5 || last["gateways"] != 2.0 || last["engine_order"] != "priority" {
		t.Errorf("the last run is %v", last)
	}
}

// Whatever is asked for, the same input has the same output.
func TestDeterminism(t *testing.T) {
	t.Parallel()
	args := []string{"--strategy", "cache_aware,least_prefill", "--gateways", "2", "--engine-order", "priority", "--rate-error", "2",
		"--slow", "0:0.5,1:2", "--fail", "3@300s+60s", "--fail", "4@600s+60s", "--join", "7@400s", "--rate-scale", "1.2", "--cache-blocks", "600", "--index-scale", "2"}
	once, again := results(t, "", args...), results(t, "", args...)
	if !reflect.DeepEqual(once, again) {
		t.Errorf("got %+v and %+v", once, again)
	}
	for _, r := range once {
		requests := 0
		for _, share := range r.ByReplica {
			requests += share.Requests
		}
		if requests != r.Requests || r.Failures.Retried+r.Failures.CutOff == 0 {
			t.Errorf("%s: %d of %d requests were answered, failures were %+v", r.Strategy, requests, r.Requests, *r.Failures)
		}
	}
}

func TestPlot(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	args := append(smallArgs, "--strategy", "round_robin,cache_aware", "--index-scale", "0.5,4", "--gateways", "1,3", "--slow", "0:0.5")
	names := []string{
		"round_robin, index × 0.5, 1 gateway", "round_robin, index × 0.5, 3 gateways", "round_robin, index × 4, 1 gateway", "round_robin, index × 4, 3 gateways",
		"cache_aware, index × 0.5, 1 gateway", "cache_aware, index × 0.5, 3 gateways", "cache_aware, index × 4, 1 gateway", "cache_aware, index × 4, 3 gateways",
	}
	svg := filepath.Join(dir, "out.SVG")
	if _, _, err := replay(t, smallTrace, append(args, "--plot", svg, "-")...); err != nil {
		t.Fatal(err)
	}
	picture, err := os.ReadFile(svg)
	if err != nil {
		t.Fatal(err)
	}
	var text []string
	for decoder := xml.NewDecoder(bytes.NewReader(picture)); ; {
		token, err := decoder.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("%v in %s", err, picture)
		}
		if data, ok := token.(xml.CharData); ok {
			text = append(text, string(data))
		}
	}
	all := strings.Join(text, "\n")
	for _, want := range append(names, "3 requests in 20 s", "--slow 0:0.5", "one infinite cache, 61.5 %", "seconds") {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in %s", want, all)
		}
	}

	// A trace in which nothing repeats, nothing is computed and no time passes can be drawn too.
	out := filepath.Join(dir, "out.png")
	if _, _, err := replay(t, `{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":[1]}`, "--strategy", "least_load", "--prefill-rate", "1e9", "--plot", out, "-"); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := png.Decode(file); err != nil {
		t.Error(err)
	}

	printed, _, err := replay(t, smallTrace, append(args, "--plot", filepath.Join(dir, "missing", "out.svg"), "-")...)
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(printed, "cache_aware") {
		t.Errorf("a file that cannot be written: %v, printed %q", err, printed)
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		trace string
		args  []string
		want  string
	}{
		{"bounded", smallTrace, smallArgs, `3 requests in 20 s, 3328 prompt tokens; 1 replicas with caches of 4000 blocks of 512 tokens, prefill 512 tokens/s, decode 30 ms/token

strategy     cached  of ceiling  TTFT mean  p50     p90     p99     requests by replica
cache_aware  61.5 %  100.0 %     0.83 s     0.50 s  2.00 s  2.00 s  3 to 3, most 1.00 × mean
`},
		{"unbounded, spread, nothing repeats", `{"timestamp":500,"input_length":700,"output_length":0,"hash_ids":[0,1]}`,
			[]string{"--cache-blocks", "0", "--strategy", "round_robin,least_load", "--replicas", "2", "--rate-scale", "0.5"},
			`1 requests in 1 s, 700 prompt tokens; 2 replicas with unbounded caches, prefill 7000 tokens/s, decode 30 ms/token

strategy     cached  of ceiling  TTFT mean  p50     p90     p99     requests by replica
round_robin  0.0 %   –           0.10 s     0.10 s  0.10 s  0.10 s  0 to 1, most 2.00 × mean
least_load   0.0 %   –           0.10 s     0.10 s  0.10 s  0.10 s  0 to 1, most 2.00 × mean
`},
		{"variants and disturbances", smallTrace, append(slices.Clone(smallArgs), "--replicas", "2", "--index-scale", "0,0.5", "--gateways", "2", "--engine-order", "priority",
			"--fail", "0@10500ms+1s,0@12s+1s", "--join", "1@0s", "--slow", "0:0.5", "--rate-error", "2"), `3 requests in 20 s, 3328 prompt tokens; 2 replicas with caches of 4000 blocks of 512 tokens, prefill 512 tokens/s, decode 30 ms/token, --rate-error 2, --slow 0:0.5, --fail 0@10500ms+1s,0@12s+1s, --join 1@0s

strategy     index       gateways  order     cached  of ceiling  TTFT mean  p50     p90     p99     requests by replica       herd   retried  cut off
cache_aware  own limits  2         priority  0.0 %   0.0 %       3.67 s     4.00 s  4.00 s  4.00 s  1 to 2, most 1.33 × mean  0.0 s  1        0
cache_aware  × 0.5       2         priority  0.0 %   0.0 %       3.67 s     4.00 s  4.00 s  4.00 s  1 to 2, most 1.33 × mean  0.0 s  1        0
`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errOut, err := replay(t, tt.trace, append(tt.args, "-")...)
			if err != nil || errOut != "" || out != tt.want {
				t.Errorf("error %v, standard error %q, got\n%s\nwant\n%s", err, errOut, out, tt.want)
			}
		})
	}
}

func TestSources(t *testing.T) {
	t.Parallel()
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	io.WriteString(w, smallTrace)
	w.Close()
	dir := t.TempDir()
	for name, content := range map[string]string{"plain": smallTrace, "zipped": zipped.String(), "no newline": strings.TrimRight(smallTrace, "\n")} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		want := results(t, smallTrace, append(smallArgs, "-")...)
		if got := results(t, content, append(smallArgs, "-")...); !reflect.DeepEqual(got, want) {
			t.Errorf("%s on standard input: got %+v, want %+v", name, got, want)
		}
		if got := results(t, "", append(smallArgs, path)...); !reflect.DeepEqual(got, want) {
			t.Errorf("%s in a file: got %+v, want %+v", name, got, want)
		}
	}
}

func TestGeneratedTrace(t *testing.T) {
	t.Parallel()
	all := results(t, "")
	again := results(t, "", "--strategy", "cache_aware")
	if len(all) != 3 || !reflect.DeepEqual(all[0], again[0]) {
		t.Errorf("the same strategy and trace gave %+v and %+v", all, again)
	}

	// What is generated must be a trace that could have been read.
	generated, err := generateTrace(1)
	if err != nil {
		t.Fatal(err)
	}
	var requests []Request
	for _, r := range generated.Requests {
		requests = append(requests, *r)
	}
	read, err := ReadTrace(t.Context(), strings.NewReader(lines(t, requests)), 0)
	if err != nil || !reflect.DeepEqual(read, generated) {
		t.Errorf("the generated trace reads as another one, or not: %v", err)
	}
	if other, err := generateTrace(2); err != nil || reflect.DeepEqual(other, generated) {
		t.Errorf("another seed gave the same trace, or %v", err)
	}
	perSecond := float64(len(requests)) / genSeconds
	mean := float64(generated.PromptTokens) / float64(len(requests))
	ceiling := float64(generated.CeilingTokens) / float64(generated.PromptTokens)
	if perSecond < 2.5 || perSecond > 4 || mean < 10_000 || mean > 16_000 || ceiling < 0.4 || ceiling > 0.6 {
		t.Errorf("%.2f requests a second of %.0f tokens with a ceiling of %.2f are not what is documented", perSecond, mean, ceiling)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	const good = `{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1,2]}` + "\n"
	for _, tt := range []struct {
		name  string
		trace string
		args  []string
		want  string // in the error
	}{
		{"empty", "", nil, "standard input: no requests"},
		{"blank lines", "\n \n", nil, "no requests"},
		{"not JSON", good + "\nhello\n", nil, "line 3: invalid character"},
		{"cut off", good + good[:20], nil, "line 2: unexpected end of JSON input"},
		{"two values", strings.TrimSpace(good) + good, nil, "line 1: invalid character"},
		{"text for a number", `{"timestamp":"x"}`, nil, "line 1: json: cannot unmarshal"},
		{"timestamp below 0", `{"timestamp":-1,"input_length":1,"output_length":1,"hash_ids":[1]}`, nil, "line 1: timestamp -1: must be"},
		{"timestamp of ages", `{"timestamp":1e300,"input_length":1,"output_length":1,"hash_ids":[1]}`, nil, "timestamp 1e+300: must be"},
		{"no input", good + `{"timestamp":0,"output_length":1,"hash_ids":[]}`, nil, "line 2: input_length 0: must be"},
		{"negative input", `{"timestamp":0,"input_length":-5,"output_length":1,"hash_ids":[]}`, nil, "input_length -5: must be"},
		{"too much input", `{"timestamp":0,"input_length":1048577,"output_length":1,"hash_ids":[]}`, nil, "input_length 1048577: must be"},
		{"too large for an integer", `{"timestamp":0,"input_length":1e40,"output_length":1,"hash_ids":[]}`, nil, "line 1: json: cannot unmarshal"},
		{"negative output", `{"timestamp":0,"input_length":1,"output_length":-1,"hash_ids":[1]}`, nil, "output_length -1: must be"},
		{"too much output", `{"timestamp":0,"input_length":1,"output_length":1048577,"hash_ids":[1]}`, nil, "output_length 1048577: must be"},
		{"negative id", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[-1]}`, nil, "line 1: json: cannot unmarshal"},
		{"too few ids", `{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}`, nil, "hash_ids has 1 blocks: an input_length of 513 has 2 blocks"},
		{"ids that are not chained", good + `{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[3,2]}`, nil, "line 2: hash id 2 stands for several blocks"},
		{"an id twice", `{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[1,1]}`, nil, "hash id 1 stands for several blocks"},
		{"an id of two lengths", good + `{"timestamp":0,"input_length":514,"output_length":1,"hash_ids":[1,2]}`, nil, "hash id 2 stands for several blocks"},
		{"line too long", good + strings.Repeat(" ", maxLineBytes+1), nil, "line 2: bufio.Scanner: token too long"},
		{"bad gzip", "\x1f\x8bnonsense...", nil, "standard input: gzip: invalid header"},
		{"gzip cut off", "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00", nil, "line 1: unexpected EOF"},

		{"unknown strategy", good, []string{"--strategy", "cache_aware,wrong"}, `--strategy "wrong": unknown; there are cache_aware, least_prefill, pipeline, least_load, round_robin, random`},
		{"no strategy", good, []string{"--strategy", ""}, "--strategy: none given; there are cache_aware"},
		{"no replicas", good, []string{"--replicas", "0"}, "--replicas 0: must be from 1 to 1024"},
		{"too many replicas", good, []string{"--replicas", "1025"}, "--replicas 1025: must be"},
		{"negative cache", good, []string{"--cache-blocks", "-1"}, "--cache-blocks -1: must be"},
		{"no prefill", good, []string{"--prefill-rate", "0"}, "--prefill-rate 0: must be"},
		{"prefill rate that is no number", good, []string{"--prefill-rate", "NaN"}, "--prefill-rate NaN: must be"},
		{"endless prefill rate", good, []string{"--prefill-rate", "Inf"}, "--prefill-rate +Inf: must be"},
		{"negative decode time", good, []string{"--decode-ms", "-30"}, "--decode-ms -30: must be"},
		{"no rate", good, []string{"--rate-scale", "0"}, "--rate-scale 0: must be"},
		{"too small an index", good, []string{"--index-scale", "1,-1"}, "--index-scale -1: must be from 0 to 1000"},
		{"no gateway", good, []string{"--gateways", "1,0"}, "--gateways 0: must be from 1 to 1024"},
		{"unknown order", good, []string{"--engine-order", "fifo,lifo"}, `--engine-order "lifo": must be fifo or priority`},
		{"negative rate error", good, []string{"--rate-error", "-1"}, "--rate-error -1: must be from 0 to 1000"},
		{"slow replica without factor", good, []string{"--slow", "0"}, "--slow 0: must be replica:factor, such as 0:0.5, a factor from 0.01 to 100, with a replica from 0 to 7"},
		{"slow replica that stands", good, []string{"--slow", "0:0"}, "--slow 0:0: must be"},
		{"slow replica that is not there", good, []string{"--slow", "1:2,8:1"}, "--slow 8:1: must be"},
		{"failure without end", good, []string{"--fail", "3@600s"}, "--fail 3@600s: must be replica@time+time, such as 3@600s+120s, with a replica from 0 to 7"},
		{"failure of no time", good, []string{"--fail", "3@600s+0s"}, "--fail 3@600s+0s: must be"},
		{"failure before the start", good, []string{"--fail", "3@-1s+5s"}, "--fail 3@-1s+5s: must be"},
		{"failure of nobody", good, []string{"--fail", "x@1s+5s"}, "--fail x@1s+5s: must be"},
		{"failure without unit", good, []string{"--fail", "3@600+120"}, "--fail 3@600+120: must be"},
		{"failure during another", good, []string{"--fail", "3@600s+120s", "--fail", "3@700s+1s"}, "--fail 3@700s+1s: the replica is away at 11m40s"},
		{"failure before it has joined", good, []string{"--fail", "3@600s+120s", "--join", "3@900s"}, "--fail 3@600s+120s: the replica is away at 10m0s"},
		{"failure of all", good, []string{"--replicas", "2", "--fail", "0@1s+9s,1@2s+1s"}, "--fail 1@2s+1s: no other replica is there at 2s"},
		{"join without time", good, []string{"--join", "7"}, "--join 7: must be replica@time, such as 7@900s, with a replica from 0 to 7"},
		{"join after ages", good, []string{"--join", "7@9999999h"}, "--join 7@9999999h: must be"},
		{"join twice", good, []string{"--join", "7@1s,7@2s"}, "--join 7@2s: the replica is there before 2s"},
		{"join of all", good, []string{"--replicas", "1", "--join", "0@1s"}, "--join 0@1s: no replica is there at first"},
		{"picture of another kind", good, []string{"--plot", "out.gif"}, "--plot out.gif: must end in .svg or .png"},
		{"two traces", good, []string{"another"}, "one trace at most, not 2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, _, err := replay(t, tt.trace, append(tt.args, "-")...)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q in it", err, tt.want)
			}
			if out != "" {
				t.Errorf("printed %q", out)
			}
		})
	}

	if _, _, err := replay(t, "", filepath.Join(t.TempDir(), "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	if err := Run(t.Context(), defaults(), []string{"-"}, strings.NewReader(smallTrace), brokenWriter{}, io.Discard); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("output that cannot be written: %v", err)
	}
}

func defaults() Options { return *RegisterFlags(pflag.NewFlagSet("replay", pflag.ContinueOnError)) }

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, args := range map[string][]string{"while reading": {"-"}, "while replaying": nil} {
		var out, errOut bytes.Buffer
		err := Run(ctx, defaults(), args, strings.NewReader(smallTrace), &out, &errOut)
		if !errors.Is(err, context.Canceled) || out.Len() > 0 {
			t.Errorf("%s: error %v, output %q", name, err, out.String())
		}
		if generated := strings.Contains(errOut.String(), "--seed 1"); generated != (args == nil) {
			t.Errorf("%s: standard error %q", name, errOut.String())
		}
	}
}

func TestPercentilesAgainstCounting(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 2))
	for n := 1; n <= 250; n++ {
		times := make([]float64, n)
		for i := range times {
			times[i] = float64(rng.IntN(100)) // with ties
		}
		// The smallest time for which the number of times that do not exceed it is at least p % of all.
		naive := func(p int) float64 {
			best := -1.0
			for _, candidate := range times {
				within := 0
				for _, t := range times {
					if t <= candidate {
						within++
					}
				}
				if 100*within >= p*n && (best < 0 || candidate < best) {
					best = candidate
				}
			}
			return best
		}
		sum := 0.0
		for _, t := range times {
			sum += t
		}
		want := TTFT{Mean: sum / float64(n), P50: naive(50), P90: naive(90), P99: naive(99)}
		if got := Summarize(times); got != want { // the sums of whole numbers are exact
			t.Fatalf("%d times: got %+v, want %+v", n, got, want)
		}
	}
	if got := Summarize(nil); got != (TTFT{}) {
		t.Errorf("of nothing: %+v", got)
	}
}

func TestText(t *testing.T) {
	t.Parallel()
	text := func(tokens int, ids ...uint64) string {
		return string((&Request{InputLength: tokens, HashIDs: ids}).AppendText([]byte("before ")))
	}
	whole := text(1300, 1, 2, 3)
	if want := len("before ") + 1300*BytesPerToken; len(whole) != want {
		t.Errorf("%d bytes, want %d", len(whole), want)
	}
	if !strings.HasPrefix(whole, text(1024, 1, 2)) || !strings.HasPrefix(whole, text(1023, 1, 2)) {
		t.Error("prompts with the same first blocks do not begin alike")
	}
	if whole != text(1300, 1, 2, 3) {
		t.Error("the same prompt has two texts")
	}
	// No two blocks may begin alike by more than chance gives: 16 letters, and 10,000 squared pairs.
	begin := make(map[string]uint64)
	for id := range uint64(10_000) {
		first := text(8, id)
		if other, ok := begin[first]; ok {
			t.Fatalf("blocks %d and %d have the same first 32 bytes", id, other)
		}
		begin[first] = id
	}
	for _, letter := range strings.TrimPrefix(whole, "before ") {
		if letter < 'a' || letter > 'p' {
			t.Fatalf("%q in the text", letter)
		}
	}
}
