package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replay"
)

// traceOptions are what the flags say of the measurement with a trace.
type traceOptions struct {
	file       string // none where it is not asked for
	strategies []string
	first      int // so many requests
	rounds     int
	rateScale  float64
	timeScale  float64
	// atOnce sends requests that come at the same moment at the same time. Otherwise each one is sent when a replica has taken the one before.
	atOnce   bool
	replicas replicasConfig
}

// register adds the flags.
func (o *traceOptions) register(flags *flag.FlagSet) {
	o.strategies = []string{"least_prefill", "least_load", "round_robin"}
	flags.StringVar(&o.file, "trace", "", "measure times to first token instead: play this trace, JSON lines in Mooncake's form, onto simulated replicas")
	flags.Func("strategy", "with --trace: strategies of a route, \"reverse_proxy <lb_policy>\" for Caddy's own proxy, or direct (default "+strings.Join(o.strategies, ",")+")", func(s string) error {
		o.strategies = strings.Split(s, ",")
		return nil
	})
	flags.IntVar(&o.first, "first", 3000, "with --trace: play so many requests, 0 for all")
	flags.Float64Var(&o.rateScale, "rate-scale", 1.4, "with --trace: how many times faster than in the trace the requests come")
	flags.Float64Var(&o.timeScale, "time-scale", 20, "with --trace: how many times faster than life everything is")
	flags.BoolVar(&o.atOnce, "at-once", false, "with --trace: send what comes at the same moment at the same time, not one after the other")
	flags.IntVar(&o.replicas.Count, "replicas", 8, "with --trace: number of replicas")
	flags.IntVar(&o.replicas.CacheBlocks, "cache-blocks", 2000, "with --trace: size of each replica's cache in blocks of 512 tokens, 0 for unbounded")
	flags.Float64Var(&o.replicas.PrefillRate, "prefill-rate", 8000, "with --trace: prefill speed of each replica in tokens per second")
	flags.Float64Var(&o.replicas.DecodeMS, "decode-ms", 20, "with --trace: time of each token of an answer in milliseconds")
}

// validate reports the first option that cannot be meant, and completes the others.
func (o *traceOptions) validate() error {
	for _, option := range []struct {
		name               string
		value, least, most float64
	}{
		{"first", float64(o.first), 0, 1e9},
		{"rate-scale", o.rateScale, 0.01, 1000},
		{"time-scale", o.timeScale, 1, 1000},
		{"replicas", float64(o.replicas.Count), 1, 1024},
		{"cache-blocks", float64(o.replicas.CacheBlocks), 0, 1e9},
		{"prefill-rate", o.replicas.PrefillRate, 1, 1e9},
		{"decode-ms", o.replicas.DecodeMS, 0.001, 10_000},
	} {
		if !(option.value >= option.least && option.value <= option.most) { // NaN is not
			return fmt.Errorf("--%s %v: must be from %v to %v", option.name, option.value, option.least, option.most)
		}
	}
	if slices.Contains(o.strategies, "") {
		return errors.New("--strategy: must not be empty")
	}
	o.replicas.TimeScale = o.timeScale
	return nil
}

// strategyVariant is the way to the replicas that a strategy stands for.
func strategyVariant(strategy string) variant {
	if strategy == "direct" {
		return variant{name: strategy}
	}
	if policy, ok := strings.CutPrefix(strategy, "reverse_proxy "); ok {
		return variant{strategy, reverseProxy("lb_policy " + policy)}
	}
	return variant{strategy, handler(strategy, "")}
}

// measureTrace plays the trace with every strategy in turn, writes a line to progress after each, and reports.
func measureTrace(ctx context.Context, o traceOptions, progress io.Writer) (*traceReport, error) {
	file, err := os.Open(o.file)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	t, err := replay.ReadTrace(ctx, file, o.first)
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", o.file, err)
	}
	r := &traceReport{trace: t, options: o, replayed: make(map[string]*replay.Result)}
	for _, strategy := range o.strategies {
		if r.replayed[strategy], err = o.replay(ctx, strategy, t.Requests); err != nil {
			return nil, err
		}
	}
	for round := range o.rounds {
		for i := range o.strategies {
			strategy := o.strategies[(i+round)%len(o.strategies)]
			run, err := o.play(ctx, t, strategy)
			if err != nil {
				return nil, fmt.Errorf("strategy %s: %w", strategy, err)
			}
			run.Round = round + 1
			if replayed := r.replayed[strategy]; replayed != nil {
				run.Replayed = &replayed.TTFT
			}
			r.Runs = append(r.Runs, run)
			fmt.Fprintf(progress, "round %d, %s: mean %.2f s\n", run.Round, strategy, run.TTFT.Mean)
		}
	}
	slices.SortStableFunc(r.Runs, func(a, b traceRun) int {
		return cmp.Compare(slices.Index(o.strategies, a.Strategy), slices.Index(o.strategies, b.Strategy))
	})
	return r, nil
}

// play starts replicas and a Caddy, both of which know nothing yet, and plays the trace once.
func (o traceOptions) play(ctx context.Context, t *replay.Trace, strategy string) (run traceRun, err error) {
	config, err := json.Marshal(o.replicas)
	if err != nil {
		return run, err
	}
	l, err := newLab(ctx, []variant{strategyVariant(strategy)}, "replicas", string(config))
	if err != nil {
		return run, err
	}
	defer l.close()
	d := l.doors[0]
	before, err := d.cpu(ctx)
	if err != nil {
		return run, err
	}
	mine, err := cpuTime()
	if err != nil {
		return run, err
	}
	start := time.Now()
	visits := (&player{trace: t, door: d, rate: o.rateScale * o.timeScale, atOnce: o.atOnce}).play(ctx)
	elapsed := time.Since(start)
	if ctx.Err() != nil {
		return run, ctx.Err()
	}
	now, err := cpuTime()
	if err != nil {
		return run, err
	}
	after, err := d.cpu(ctx)
	if err != nil {
		return run, err
	}
	l.close()
	run = sumUp(t, visits, o)
	run.Strategy = strategy
	sent := make([]*replay.Request, len(visits))
	for i, v := range visits {
		r := *t.Requests[i]
		r.Timestamp = max(v.at.Seconds()*1e3*o.rateScale*o.timeScale, 0)
		sent[i] = &r
	}
	replayed, err := o.replay(ctx, strategy, sent)
	if err != nil {
		return run, err
	}
	if replayed != nil {
		run.ReplayedAsSent = &replayed.TTFT
	}
	share := func(used time.Duration) float64 { return used.Seconds() / elapsed.Seconds() }
	run.CPU = cpuShares{Caddy: share(after.Total - before.Total), Replicas: share(l.processes[0].cpu()), Client: share(now - mine)}
	return run, nil
}

// Around the prompt's text in the body of a request, which needs no escapes.
const (
	beforeText = `{"model":"` + model + `","messages":[{"role":"user","content":"`
	afterText  = `"}],"max_tokens":`
	bodyEnd    = `,"stream":true,"stream_options":{"include_usage":true}}`
)

// appendBody appends the body of a request, whose text is the one that is replayed.
func appendBody(b []byte, r *replay.Request) []byte {
	b = slices.Grow(b, r.InputLength*replay.BytesPerToken+200)
	b = r.AppendText(append(b, beforeText...))
	return fmt.Appendf(b, "%s%d%s", afterText, max(r.OutputLength, 1), bodyEnd)
}
