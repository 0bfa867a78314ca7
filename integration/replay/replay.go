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
// in flight from the pick to the last token of its answer, which says how many of the prompt's tokens were cached. The gateway and the
// network take no time.
//
// A replica that fails is no candidate while it is away. What it had not begun to answer is sent to another one at once, as a gateway would, and its
// time to first token counts from its arrival; answers that had begun are cut off there. The gateway is not told that the replica returns empty:
// its record of the replica's prompts stands, until what comes later has replaced it.
//
// Several gateways each have their own loads, records and rates, and send to the same replicas.
//
// Equal input has equal results, except for the strategies random, because Caddy's policy cannot be seeded, and pipeline, which takes equals at random.
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

	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

// Options describe the replicas, the load and what to compare. [RegisterFlags] has the defaults.
type Options struct {
	Strategies  []string
	Replicas    int
	CacheBlocks int     // of each replica; 0 is unbounded
	PrefillRate float64 // tokens/s of each replica
	DecodeMS    float64 // ms from one token of an answer to the next
	RateScale   float64 // how many times faster than in the trace the requests come
	RateError   float64 // what the strategies take the prefill rate for at first, as a multiple of what it is; 0 leaves them to learn it
	Seed        uint64  // of the generated trace

	// Each strategy is run with each combination of these. None is what a strategy has without.
	IndexScales  []float64 // size of the record of each replica's prompts, as a multiple of its cache; 0 leaves it to the strategies' own limits
	Gateways     []int     // number of gateways, which share nothing
	EngineOrders []string  // of the requests that wait at a replica

	// Disturbances; see [RegisterFlags] for their form.
	Slow, Fail, Join []string

	JSON bool   // print JSON, not a table
	Plot string // file for a picture
}

// RegisterFlags adds the flags of the command to fs, and returns the options that hold their values.
func RegisterFlags(fs *pflag.FlagSet) *Options {
	o := new(Options)
	fs.StringSliceVar(&o.Strategies, "strategy", []string{"cache_aware", "least_load", "round_robin"}, "strategies to compare: "+strategyNames())
	fs.IntVar(&o.Replicas, "replicas", 8, "number of replicas")
	fs.IntVar(&o.CacheBlocks, "cache-blocks", 4000, "size of each replica's cache in blocks of 512 tokens, 0 for unbounded")
	fs.Float64Var(&o.PrefillRate, "prefill-rate", 7000, "prefill speed of each replica in tokens per second")
	fs.Float64Var(&o.DecodeMS, "decode-ms", 30, "time of each token of an answer in milliseconds")
	fs.Float64Var(&o.RateScale, "rate-scale", 1, "how many times faster than in the trace the requests come")
	fs.Float64Var(&o.RateError, "rate-error", 0, "begin with each replica's prefill speed learned, but wrong by this `factor`, such as 2 or 0.5; 0 to begin without")
	fs.Float64SliceVar(&o.IndexScales, "index-scale", nil, "compare these sizes of the record of each replica's prompts, as `multiples` of its cache, such as 0.25,1,4; 0 for the strategies' own limits alone")
	fs.Lookup("index-scale").DefValue = "" // or the help would say "default []"
	fs.IntSliceVar(&o.Gateways, "gateways", nil, "compare these `numbers` of gateways, such as 1,2,4, that share nothing and get the requests in turn")
	fs.StringSliceVar(&o.EngineOrders, "engine-order", nil, "compare these `orders` in which a replica takes waiting requests: fifo, priority (earliest deadline first: arrival + 5 × estimated prefill time; as fifo where a strategy estimates none)")
	fs.StringSliceVar(&o.Slow, "slow", nil, "let a replica, counted from 0, prefill at another speed: 0:0.5 is half as fast; can be repeated (`replica:factor`)")
	fs.StringSliceVar(&o.Fail, "fail", nil, "take a replica away for a while, empty when it returns: 3@600s+120s; can be repeated (`replica@time+time`)")
	fs.StringSliceVar(&o.Join, "join", nil, "let a cold replica join later: 7@900s; can be repeated; adds for how long after that some queue was above 3 × the mean (`replica@time`)")
	fs.Uint64Var(&o.Seed, "seed", 1, "seed of the trace that is generated when none is given")
	fs.BoolVar(&o.JSON, "json", false, "print JSON")
	fs.StringVar(&o.Plot, "plot", "", "draw time to first token and reuse into a `file`, .svg or .png")
	return o
}

// validate reports the first option that cannot be meant, by the name of its flag. Within the limits the virtual time, in nanoseconds, does
// not overflow before a trace has 9 thousand million tokens.
func (o Options) validate() error {
	type number struct {
		name               string
		value, least, most float64
	}
	numbers := []number{
		{"replicas", float64(o.Replicas), 1, 1024},
		{"cache-blocks", float64(o.CacheBlocks), 0, math.MaxInt32},
		{"prefill-rate", o.PrefillRate, 1, 1e9},
		{"decode-ms", o.DecodeMS, 0.001, 10_000},
		{"rate-scale", o.RateScale, 0.01, 1000},
		{"rate-error", o.RateError, 0, 1000},
	}
	for _, scale := range o.IndexScales {
		numbers = append(numbers, number{"index-scale", scale, 0, 1000})
	}
	for _, n := range o.Gateways {
		numbers = append(numbers, number{"gateways", float64(n), 1, 1024})
	}
	for _, option := range numbers {
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
	for _, order := range o.EngineOrders {
		if order != string(replica.FIFO) && order != string(replica.ByPriority) {
			return fmt.Errorf("--engine-order %q: must be %s or %s", order, replica.FIFO, replica.ByPriority)
		}
	}
	if o.Plot != "" && plotFormat(o.Plot) == "" {
		return fmt.Errorf("--plot %s: must end in .svg or .png", o.Plot)
	}
	_, err := o.disturbances()
	return err
}

// variants are all combinations to run.
func (o Options) variants() []Variant {
	var all []Variant
	for _, strategy := range o.Strategies {
		for _, scale := range orZero(o.IndexScales) {
			for _, gateways := range orZero(o.Gateways) {
				for _, order := range orZero(o.EngineOrders) {
					all = append(all, Variant{strategy, scale, gateways, order})
				}
			}
		}
	}
	return all
}

// orZero makes a flag that was not given one value, the zero.
func orZero[T any](values []T) []T {
	if len(values) == 0 {
		return make([]T, 1)
	}
	return values
}

// Report is the JSON that the command prints.
type Report struct {
	Runs []Result `json:"runs"`
}

// Variant is what one run differs in from the others. What was not asked for is zero, and not in the JSON.
type Variant struct {
	Strategy    string  `json:"strategy"`
	IndexScale  float64 `json:"index_scale,omitempty"`
	Gateways    int     `json:"gateways,omitempty"`
	EngineOrder string  `json:"engine_order,omitempty"`
}

// name tells the run from the others.
func (v Variant) name() string {
	name := v.Strategy
	if v.IndexScale > 0 {
		name += fmt.Sprintf(", index × %v", v.IndexScale)
	}
	switch {
	case v.Gateways == 1:
		name += ", 1 gateway"
	case v.Gateways > 1:
		name += fmt.Sprintf(", %d gateways", v.Gateways)
	}
	if v.EngineOrder != "" {
		name += ", " + v.EngineOrder
	}
	return name
}

// Result is how one run did.
type Result struct {
	Variant
	Requests      int            `json:"requests"`
	PromptTokens  int64          `json:"prompt_tokens"`
	CachedTokens  int64          `json:"cached_tokens"`  // found in the cache of the replica that was picked
	CeilingTokens int64          `json:"ceiling_tokens"` // that one infinite cache would have found
	TTFT          TTFT           `json:"ttft_s"`
	ByReplica     []ReplicaShare `json:"by_replica"`

	Failures *Failures `json:"failures,omitempty"` // where a replica fails
	Herd     *float64  `json:"herd_s,omitempty"`   // where a replica joins: the longest time for which a queue was above 3 × the mean

	ttft []float64 // of all requests, sorted
}

// Failures is what replicas that failed did to requests.
type Failures struct {
	Retried int `json:"retried"` // waited or were prefilled there, and were sent to another one
	CutOff  int `json:"cut_off"` // had an answer begun, which ended there
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
	for _, v := range opts.variants() {
		result, err := run(ctx, t, v, opts)
		if err != nil {
			return fmt.Errorf("strategy %s: %w", v.name(), err)
		}
		report.Runs = append(report.Runs, result)
	}
	if opts.JSON {
		out := json.NewEncoder(stdout)
		out.SetIndent("", "  ")
		err = out.Encode(report)
	} else {
		err = printTable(stdout, t, opts, report)
	}
	if err == nil && opts.Plot != "" {
		err = writePlot(opts.Plot, t, opts, report)
	}
	return err
}

func loadTrace(ctx context.Context, opts Options, args []string, stdin io.Reader, stderr io.Writer) (*Trace, error) {
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
	t, err := ReadTrace(ctx, in, 0)
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", name, err)
	}
	return t, nil
}

// run replays the trace with a variant and sums up.
func run(ctx context.Context, t *Trace, v Variant, opts Options) (Result, error) {
	s, err := simulate(ctx, t, v, opts)
	if err != nil {
		return Result{}, err
	}
	result := Result{
		Variant:       v,
		Requests:      len(t.Requests),
		PromptTokens:  t.PromptTokens,
		CeilingTokens: t.CeilingTokens,
		ByReplica:     make([]ReplicaShare, opts.Replicas),
	}
	for _, a := range s.attempts {
		cached := int64(a.job.CachedTokens)
		result.CachedTokens += cached
		share := &result.ByReplica[a.replica]
		share.Requests++
		share.PromptTokens += int64(a.job.PromptTokens)
		share.CachedTokens += cached
		result.ttft = append(result.ttft, a.ttft())
	}
	result.TTFT = Summarize(result.ttft)
	if len(opts.Fail) > 0 {
		result.Failures = &s.failures
	}
	if len(opts.Join) > 0 {
		herd := s.herd.longest.Seconds()
		result.Herd = &herd
	}
	return result, nil
}

// Summarize sorts the times and returns their mean and percentiles by nearest rank: the smallest time that so many percent do
// not exceed. Of none all are 0.
func Summarize(times []float64) TTFT {
	if len(times) == 0 {
		return TTFT{}
	}
	slices.Sort(times)
	sum := 0.0
	for _, t := range times {
		sum += t
	}
	percentile := func(p int) float64 { return times[(len(times)*p+99)/100-1] }
	return TTFT{Mean: sum / float64(len(times)), P50: percentile(50), P90: percentile(90), P99: percentile(99)}
}

// Setup says in one line what was replayed on what.
func Setup(t *Trace, opts Options) string {
	cache := fmt.Sprintf("caches of %d blocks of %d tokens", opts.CacheBlocks, BlockTokens)
	if opts.CacheBlocks == 0 {
		cache = "unbounded caches"
	}
	last := t.Requests[len(t.Requests)-1].Timestamp / 1000 / opts.RateScale
	line := fmt.Sprintf("%d requests in %.0f s, %d prompt tokens; %d replicas with %s, prefill %v tokens/s, decode %v ms/token",
		len(t.Requests), last, t.PromptTokens, opts.Replicas, cache, opts.PrefillRate, opts.DecodeMS)
	for _, special := range []struct {
		name  string
		given bool
		value any
	}{
		{"rate-error", opts.RateError > 0, opts.RateError},
		{"slow", len(opts.Slow) > 0, strings.Join(opts.Slow, ",")},
		{"fail", len(opts.Fail) > 0, strings.Join(opts.Fail, ",")},
		{"join", len(opts.Join) > 0, strings.Join(opts.Join, ",")},
	} {
		if special.given {
			line += fmt.Sprintf(", --%s %v", special.name, special.value)
		}
	}
	return line
}

// column is one of the table.
type column struct {
	title string
	cell  func(Result) string
}

// columns are those of the options given: one for each thing that runs differ in, and the measures.
func columns(opts Options) []column {
	all := []column{{"strategy", func(r Result) string { return r.Strategy }}}
	add := func(given bool, title string, cell func(Result) string) {
		if given {
			all = append(all, column{title, cell})
		}
	}
	add(len(opts.IndexScales) > 0, "index", func(r Result) string {
		if r.IndexScale == 0 {
			return "own limits"
		}
		return fmt.Sprintf("× %v", r.IndexScale)
	})
	add(len(opts.Gateways) > 0, "gateways", func(r Result) string { return fmt.Sprint(r.Gateways) })
	add(len(opts.EngineOrders) > 0, "order", func(r Result) string { return r.EngineOrder })
	all = append(all, measures...)
	add(len(opts.Join) > 0, "herd", func(r Result) string { return fmt.Sprintf("%.1f s", *r.Herd) })
	add(len(opts.Fail) > 0, "retried", func(r Result) string { return fmt.Sprint(r.Failures.Retried) })
	add(len(opts.Fail) > 0, "cut off", func(r Result) string { return fmt.Sprint(r.Failures.CutOff) })
	return all
}

// measures are the columns of every table of results.
var measures = []column{
	{"cached", func(r Result) string { return percent(r.CachedTokens, r.PromptTokens) }},
	{"of ceiling", func(r Result) string { return percent(r.CachedTokens, r.CeilingTokens) }},
	{"TTFT mean", func(r Result) string { return fmt.Sprintf("%.2f s", r.TTFT.Mean) }},
	{"p50", func(r Result) string { return fmt.Sprintf("%.2f s", r.TTFT.P50) }},
	{"p90", func(r Result) string { return fmt.Sprintf("%.2f s", r.TTFT.P90) }},
	{"p99", func(r Result) string { return fmt.Sprintf("%.2f s", r.TTFT.P99) }},
	{"requests by replica", func(r Result) string {
		least, most := r.ByReplica[0].Requests, r.ByReplica[0].Requests
		for _, share := range r.ByReplica {
			least, most = min(least, share.Requests), max(most, share.Requests)
		}
		return fmt.Sprintf("%d to %d, most %.2f × mean", least, most, float64(most*len(r.ByReplica))/float64(r.Requests))
	}},
}

// Titles are those of the columns that [Result.Cells] fills.
func Titles() (titles []string) {
	for _, c := range measures {
		titles = append(titles, c.title)
	}
	return titles
}

// Cells is what a table says of the result.
func (r Result) Cells() (cells []string) {
	for _, c := range measures {
		cells = append(cells, c.cell(r))
	}
	return cells
}

func printTable(out io.Writer, t *Trace, opts Options, report Report) error {
	var text strings.Builder
	fmt.Fprint(&text, Setup(t, opts), "\n\n")
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	row := func(cell func(column) string) {
		var cells []string
		for _, c := range columns(opts) {
			cells = append(cells, cell(c))
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	row(func(c column) string { return c.title })
	for _, r := range report.Runs {
		row(func(c column) string { return c.cell(r) })
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
