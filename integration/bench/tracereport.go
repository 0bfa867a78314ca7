package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replay"
)

// traceReport is what was measured with a trace. Times are those of the trace's world: what the clock on the wall says, times the scale.
type traceReport struct {
	Runs []traceRun `json:"runs"`

	trace    *replay.Trace
	options  traceOptions
	replayed map[string]*replay.Result // by strategy; nil where it cannot be replayed
}

// traceRun is how one strategy did once: what package replay says of it, and where the times come from.
type traceRun struct {
	replay.Result
	Round int `json:"round"`

	// Replayed is the time to first token of the same requests in virtual time, without any HTTP, and ReplayedAsSent that of the requests when they
	// were sent, not when they were due.
	Replayed       *replay.TTFT `json:"replay_ttft_s,omitempty"`
	ReplayedAsSent *replay.TTFT `json:"replay_as_sent_ttft_s,omitempty"`
	// What of the time to first token passes outside of the replica's model: until the prompt has come to it, until it wakes up for the first
	// token, until that has come to the client.
	In   spanTimes `json:"in_s"`
	Wake spanTimes `json:"wake_s"`
	Out  spanTimes `json:"out_s"`
	// Late is how long after it was due a request was sent, which is not part of its time to first token.
	Late spanTimes `json:"late_s"`

	CPU        cpuShares `json:"cpu_cores"`
	Errors     int       `json:"errors"`
	FirstError string    `json:"first_error,omitempty"`
}

// spanTimes are the mean and a high percentile, in seconds.
type spanTimes struct {
	Mean float64 `json:"mean"`
	P99  float64 `json:"p99"`
}

// cpuShares is how many cores each process kept busy.
type cpuShares struct {
	Caddy    float64 `json:"caddy"`
	Replicas float64 `json:"replicas"`
	Client   float64 `json:"client"`
}

func (c cpuShares) all() float64 { return c.Caddy + c.Replicas + c.Client }

// sumUp sums up a run.
func sumUp(t *replay.Trace, visits []visit, o traceOptions) (run traceRun) {
	run.Requests, run.CeilingTokens = len(visits), t.CeilingTokens
	run.ByReplica = make([]replay.ReplicaShare, o.replicas.Count)
	var ttft, in, wake, out, late []float64
	for _, v := range visits {
		if v.err != nil {
			run.Errors++
			if run.FirstError == "" {
				run.FirstError = v.err.Error()
			}
			continue
		}
		prompt, cached := v.last.Usage.PromptTokens, v.last.Usage.PromptDetails.CachedTokens
		run.PromptTokens += prompt
		run.CachedTokens += cached
		share := &run.ByReplica[v.first.Replica]
		share.Requests++
		share.PromptTokens += prompt
		share.CachedTokens += cached
		inTrace := func(d time.Duration) float64 { return d.Seconds() * o.timeScale }
		ttft = append(ttft, inTrace(v.ttft))
		in = append(in, inTrace(time.Unix(0, v.first.Submitted).Sub(v.sent)))
		wake = append(wake, inTrace(time.Duration(v.first.Sent-v.first.Token)))
		out = append(out, inTrace(v.seen.Sub(time.Unix(0, v.first.Sent))))
		late = append(late, inTrace(v.late))
	}
	for _, span := range []struct {
		times []float64
		into  *spanTimes
	}{{in, &run.In}, {wake, &run.Wake}, {out, &run.Out}, {late, &run.Late}} {
		all := replay.Summarize(span.times)
		*span.into = spanTimes{all.Mean, all.P99}
	}
	run.TTFT = replay.Summarize(ttft)
	return run
}

// replayOptions are those that replay what the measurement plays.
func (o traceOptions) replayOptions(strategy string) replay.Options {
	return replay.Options{
		Strategies:  []string{strategy},
		Replicas:    o.replicas.Count,
		CacheBlocks: o.replicas.CacheBlocks,
		PrefillRate: o.replicas.PrefillRate,
		DecodeMS:    o.replicas.DecodeMS,
		RateScale:   o.rateScale,
		JSON:        true,
	}
}

// replay replays requests in virtual time with a strategy; nil where it cannot be replayed.
func (o traceOptions) replay(ctx context.Context, strategy string, requests []*replay.Request) (*replay.Result, error) {
	name := strings.TrimPrefix(strings.TrimPrefix(strategy, "reverse_proxy "), "rolter ")
	if strategy == "direct" {
		name = "round_robin"
	}
	var in, out bytes.Buffer
	lines := json.NewEncoder(&in)
	for _, r := range requests {
		if err := lines.Encode(r); err != nil {
			return nil, err
		}
	}
	err := replay.Run(ctx, o.replayOptions(name), []string{"-"}, &in, &out, io.Discard)
	if err != nil && strings.HasPrefix(err.Error(), "--strategy ") {
		return nil, nil
	}
	var report replay.Report
	if err == nil {
		err = json.Unmarshal(out.Bytes(), &report)
	}
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	return &report.Runs[0], nil
}

// write writes the report as tables.
func (r *traceReport) write(out io.Writer) error {
	o := r.options
	fmt.Fprintf(out, "%s; %v × faster than life\n\n", replay.Setup(r.trace, o.replayOptions("")), o.timeScale)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(name string, cells []string) { fmt.Fprintf(w, "%s\t%s\n", name, strings.Join(cells, "\t")) }
	row("strategy", replay.Titles())
	for _, s := range o.strategies {
		for _, run := range r.of(s) {
			row(run.Strategy, run.Cells())
		}
		if replayed := r.replayed[s]; replayed != nil {
			row("  replayed without HTTP", replayed.Cells())
		}
	}
	fmt.Fprintln(w)
	fmt.Fprintln(w, "strategy\tTTFT mean\treplayed as sent\tway in\twaking up\tway out\tsent late\tp99\tCPU caddy\treplicas\tclient\terrors")
	for _, run := range r.Runs {
		fmt.Fprintf(w, "%s\t%.2f s\t%s\t%.3f s\t%.3f s\t%.3f s\t%.3f s\t%.3f s\t%.2f cores\t%.2f\t%.2f\t%d\n", run.Strategy, run.TTFT.Mean, meanOf(run.ReplayedAsSent),
			run.In.Mean, run.Wake.Mean, run.Out.Mean, run.Late.Mean, run.Late.P99, run.CPU.Caddy, run.CPU.Replicas, run.CPU.Client, run.Errors)
	}
	if o.rounds > 1 {
		fmt.Fprintf(w, "\nTTFT mean of %d rounds\tmean\tlowest\thighest\treplayed\n", o.rounds)
		for _, s := range o.strategies {
			var means []float64
			runs := r.of(s)
			for _, run := range runs {
				means = append(means, run.TTFT.Mean)
			}
			mean := replay.Summarize(means).Mean
			fmt.Fprintf(w, "%s\t%.2f s\t%.2f s\t%.2f s\t%s\n", s, mean, slices.Min(means), slices.Max(means), meanOf(runs[0].Replayed))
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, run := range r.Runs {
		if reason := run.overtaxed(o.timeScale); reason != "" {
			if _, err := fmt.Fprintf(out, "\n%s, round %d: the machine could not keep up: %s. A lower --time-scale helps.\n", run.Strategy, run.Round, reason); err != nil {
				return err
			}
		}
	}
	return nil
}

func meanOf(t *replay.TTFT) string {
	if t == nil {
		return "–"
	}
	return fmt.Sprintf("%.2f s", t.Mean)
}

// of are the runs of a strategy.
func (r *traceReport) of(strategy string) (runs []traceRun) {
	for _, run := range r.Runs {
		if run.Strategy == strategy {
			runs = append(runs, run)
		}
	}
	return runs
}

// Beyond these the figures are the machine's and not the strategy's. The times are means, of the clock on the wall.
const (
	mostBusy     = 0.75                  // of the cores
	mostLate     = 10 * time.Millisecond // after a request is due
	mostUnderWay = 5 * time.Millisecond  // in and out, and until the replica wakes up
)

// overtaxed says why the machine was too slow for the run; "" when it was not.
func (run traceRun) overtaxed(timeScale float64) string {
	onWall := func(s float64) time.Duration {
		return time.Duration(s / timeScale * float64(time.Second)).Round(100 * time.Microsecond)
	}
	late, underWay := onWall(run.Late.Mean), onWall(run.In.Mean+run.Wake.Mean+run.Out.Mean)
	busy := run.CPU.all() / float64(runtime.NumCPU())
	switch {
	case busy > mostBusy:
		return fmt.Sprintf("%.0f %% of its CPU time was used", busy*100)
	case late > mostLate:
		return fmt.Sprintf("requests were sent %v late in the mean", late)
	case underWay > mostUnderWay:
		return fmt.Sprintf("requests and answers were under way for %v in the mean", underWay)
	}
	return ""
}

// failed is an error when requests failed.
func (r *traceReport) failed() error {
	for _, run := range r.Runs {
		if run.Errors > 0 {
			return fmt.Errorf("%s: %d requests failed, the first one with: %s", run.Strategy, run.Errors, run.FirstError)
		}
	}
	return nil
}
