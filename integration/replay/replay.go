// Package replay judges strategies on a recorded load: it feeds a trace through the strategies of package selection, as they are
// in the gateway, against the model of a replica of package replica, in virtual time.
//
// A trace is JSON lines in the form of Mooncake's (github.com/kvcache-ai/Mooncake): when each request came, how many tokens it and its answer have,
// and the hash ids of its prompt's blocks of 512 tokens, where an id stands for a block and all before it. The strategy sees
// a text in which each hash id is a fixed pseudo-random block of 4 bytes a token. A prompt's last block is mostly partial, and the
// trace does not tell how it goes on in the next turn: so the text of a next turn leaves the text of the one before within that block,
// and the rule that a prompt continues a recorded one hardly ever applies. The index has its default limits.
//
// A replica prefills one request after the other, first come first served, at a fixed rate for the tokens that are not cached, and decodes
// all answers at a fixed rate, which slows nothing else down. Its cache is looked up when prefill starts, and the prompt's blocks can be
// found from the end of it; those of running requests are not evicted, and a prompt for which they leave no room waits. A request is
// in flight from the pick to the last token of its answer. The gateway and the network take no time.
//
// Equal input has equal results, except for the strategy random: Caddy's policy cannot be seeded.
package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"
)

// Options describe the replicas, the load and what to compare. [RegisterFlags] has the defaults.
type Options struct {
	Strategies  []string
	Replicas    int
	CacheBlocks int     // of each replica; 0 is unbounded
	PrefillRate float64 // tokens/s of each replica
	DecodeMS    float64 // ms from one token of an answer to the next
	IndexScale  float64 // size of the record of each replica's prompts, as a multiple of its cache; 0 leaves it to the strategies' own limits
	RateScale   float64 // how many times faster than in the trace the requests come
	Seed        uint64  // of the generated trace
	JSON        bool    // print JSON, not a table
}

// RegisterFlags adds the flags of the command to fs, and returns the options that hold their values.
func RegisterFlags(fs *pflag.FlagSet) *Options {
	o := new(Options)
	fs.StringSliceVar(&o.Strategies, "strategy", []string{"cache_aware", "least_load", "round_robin"}, "strategies to compare: "+strategyNames())
	fs.IntVar(&o.Replicas, "replicas", 8, "number of replicas")
	fs.IntVar(&o.CacheBlocks, "cache-blocks", 4000, "size of each replica's cache in blocks of 512 tokens, 0 for unbounded")
	fs.Float64Var(&o.PrefillRate, "prefill-rate", 7000, "prefill speed of each replica in tokens per second")
	fs.Float64Var(&o.DecodeMS, "decode-ms", 30, "time of each token of an answer in milliseconds")
	fs.Float64Var(&o.IndexScale, "index-scale", 0, "size of the record of each replica's prompts as a multiple of its cache, 0 for the strategies' own limits")
	fs.Float64Var(&o.RateScale, "rate-scale", 1, "how many times faster than in the trace the requests come")
	fs.Uint64Var(&o.Seed, "seed", 1, "seed of the trace that is generated when none is given")
	fs.BoolVar(&o.JSON, "json", false, "print JSON")
	return o
}

// validate reports the first option that cannot be meant, by the name of its flag. Within the limits the virtual time, in nanoseconds, does
// not overflow before a trace has 9 thousand million tokens.
func (o Options) validate() error {
	for _, option := range []struct {
		name               string
		value, least, most float64
	}{
		{"replicas", float64(o.Replicas), 1, 1024},
		{"cache-blocks", float64(o.CacheBlocks), 0, math.MaxInt32},
		{"prefill-rate", o.PrefillRate, 1, 1e9},
		{"decode-ms", o.DecodeMS, 0.001, 10_000},
		{"index-scale", o.IndexScale, 0, 1000},
		{"rate-scale", o.RateScale, 0.01, 1000},
	} {
		if !(option.value >= option.least && option.value <= option.most) { // NaN is not
			return fmt.Errorf("--%s %v: must be from %v to %v", option.name, option.value, option.least, option.most)
		}
	}
	if len(o.Strategies) == 0 {
		return fmt.Errorf("--strategy: none given; there are %s", strategyNames())
	}
	for _, name := range o.Strategies {
		if buildStrategy(name) == nil {
			return fmt.Errorf("--strategy %q: unknown; there are %s", name, strategyNames())
		}
	}
	return nil
}

// Report is the JSON that the command prints.
type Report struct {
	Runs []Result `json:"runs"`
}

// Result is how one strategy did.
type Result struct {
	Strategy      string         `json:"strategy"`
	Requests      int            `json:"requests"`
	PromptTokens  int64          `json:"prompt_tokens"`
	CachedTokens  int64          `json:"cached_tokens"`  // found in the cache of the replica that was picked
	CeilingTokens int64          `json:"ceiling_tokens"` // that one infinite cache would have found
	TTFT          TTFT           `json:"ttft_s"`
	ByReplica     []ReplicaShare `json:"by_replica"`
}

// TTFT is the distribution of the time to first token, in seconds.
type TTFT struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
}

// ReplicaShare is what one replica was sent.
type ReplicaShare struct {
	Requests     int   `json:"requests"`
	PromptTokens int64 `json:"prompt_tokens"`
	CachedTokens int64 `json:"cached_tokens"`
}

// Run is the command: args name the trace, "-" for standard input; without one a trace is generated. It prints the result to stdout, and to
// stderr what the user should know beside. It ends early, with an error, when ctx is done.
func Run(ctx context.Context, opts Options, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	if err := opts.validate(); err != nil {
		return err
	}
	t, err := loadTrace(ctx, opts, args, stdin, stderr)
	if err != nil {
		return err
	}
	var report Report
	for _, strategy := range opts.Strategies {
		result, err := runStrategy(ctx, t, strategy, opts)
		if err != nil {
			return fmt.Errorf("strategy %s: %w", strategy, err)
		}
		report.Runs = append(report.Runs, result)
	}
	if opts.JSON {
		out := json.NewEncoder(stdout)
		out.SetIndent("", "  ")
		return out.Encode(report)
	}
	return printTable(stdout, t, opts, report)
}

func loadTrace(ctx context.Context, opts Options, args []string, stdin io.Reader, stderr io.Writer) (*trace, error) {
	switch {
	case len(args) > 1:
		return nil, fmt.Errorf("one trace at most, not %d: %q", len(args), args)
	case len(args) == 0:
		fmt.Fprintf(stderr, "no trace given: replaying a generated one (--seed %d)\n", opts.Seed)
		return generateTrace(opts.Seed)
	}
	name, in := args[0], stdin
	if name == "-" {
		name = "standard input"
	} else {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		in = file
	}
	t, err := readTrace(ctx, in)
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", name, err)
	}
	return t, nil
}

// runStrategy replays the trace with a strategy and sums up.
func runStrategy(ctx context.Context, t *trace, strategy string, opts Options) (Result, error) {
	attempts, err := simulate(ctx, t, strategy, opts)
	if err != nil {
		return Result{}, err
	}
	result := Result{
		Strategy:      strategy,
		Requests:      len(t.requests),
		PromptTokens:  t.promptTokens,
		CeilingTokens: t.ceilingTokens,
		ByReplica:     make([]ReplicaShare, opts.Replicas),
	}
	ttft := make([]float64, 0, len(attempts))
	for _, a := range attempts {
		cached := int64(a.job.CachedTokens)
		result.CachedTokens += cached
		share := &result.ByReplica[a.replica]
		share.Requests++
		share.PromptTokens += int64(a.job.PromptTokens)
		share.CachedTokens += cached
		ttft = append(ttft, (a.job.FirstToken - a.job.Submitted).Seconds())
	}
	result.TTFT = summarize(ttft)
	return result, nil
}

// summarize sorts the times and returns their mean and percentiles by nearest rank: the smallest time that so many percent do
// not exceed. There is at least one.
func summarize(times []float64) TTFT {
	slices.Sort(times)
	sum := 0.0
	for _, t := range times {
		sum += t
	}
	percentile := func(p int) float64 { return times[(len(times)*p+99)/100-1] }
	return TTFT{Mean: sum / float64(len(times)), P50: percentile(50), P90: percentile(90), P99: percentile(99)}
}

func printTable(out io.Writer, t *trace, opts Options, report Report) error {
	cache := fmt.Sprintf("caches of %d blocks of %d tokens", opts.CacheBlocks, blockTokens)
	if opts.CacheBlocks == 0 {
		cache = "unbounded caches"
	}
	last := t.requests[len(t.requests)-1].Timestamp / 1000 / opts.RateScale
	var text strings.Builder
	fmt.Fprintf(&text, "%d requests in %.0f s, %d prompt tokens; %d replicas with %s, prefill %v tokens/s, decode %v ms/token\n\n",
		len(t.requests), last, t.promptTokens, opts.Replicas, cache, opts.PrefillRate, opts.DecodeMS)

	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "strategy\tcached\tof ceiling\tTTFT mean\tp50\tp90\tp99\trequests by replica")
	for _, r := range report.Runs {
		least, most := r.ByReplica[0].Requests, r.ByReplica[0].Requests
		for _, share := range r.ByReplica {
			least, most = min(least, share.Requests), max(most, share.Requests)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.2f s\t%.2f s\t%.2f s\t%.2f s\t%d to %d, most %.2f × mean\n",
			r.Strategy, percent(r.CachedTokens, r.PromptTokens), percent(r.CachedTokens, r.CeilingTokens),
			r.TTFT.Mean, r.TTFT.P50, r.TTFT.P90, r.TTFT.P99,
			least, most, float64(most*opts.Replicas)/float64(r.Requests))
	}
	w.Flush() // into memory, which does not fail
	_, err := io.WriteString(out, text.String())
	return err
}

// percent is a share for the table; a trace in which nothing repeats has a ceiling of none.
func percent(part, whole int64) string {
	if whole == 0 {
		return "–"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}
