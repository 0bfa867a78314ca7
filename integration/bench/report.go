package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// report is what was measured.
type report struct {
	Workloads []workloadReport `json:"workloads,omitempty"`
	Memory    []growth         `json:"memory,omitempty"`
}

type workloadReport struct {
	Size     string          `json:"size"`
	Variants []variantReport `json:"variants"`
}

type variantReport struct {
	Variant string `json:"variant"`
	// CPU is the CPU time of the Caddy process a request (or stream), in µs.
	CPU *spread `json:"cpu_us,omitempty"`
	// GC is the mean of what garbage collection takes of it.
	GC float64 `json:"gc_us,omitempty"`
	// Ratio is that of CPU to plain's in the same round, Overall that of the sums over all rounds.
	Ratio   *spread `json:"ratio,omitempty"`
	Overall float64 `json:"ratio_overall,omitempty"`

	PerSecond float64 `json:"requests_per_second"`
	P50       float64 `json:"p50_ms"`
	P99       float64 `json:"p99_ms"`
	// EventDelay is the median time from the upstream to the client of an event of a stream, in µs.
	EventDelay float64 `json:"event_delay_us,omitempty"`

	Requests   int            `json:"requests"`
	Reasons    map[string]int `json:"reasons,omitempty"` // of Rolter's decisions
	Errors     int            `json:"errors"`
	FirstError string         `json:"first_error,omitempty"`
}

// spread is a figure of every round, with their quartiles.
type spread struct {
	Low    float64   `json:"q1"`
	Median float64   `json:"median"`
	High   float64   `json:"q3"`
	Rounds []float64 `json:"rounds"`
}

func newSpread(rounds []float64) *spread {
	sorted := slices.Sorted(slices.Values(rounds))
	return &spread{quantile(sorted, 0.25), quantile(sorted, 0.5), quantile(sorted, 0.75), rounds}
}

// quantile of sorted values, 0 of none.
func quantile[T float64 | time.Duration](sorted []T, q float64) T {
	if len(sorted) == 0 {
		return 0
	}
	at := q * float64(len(sorted)-1)
	i := int(at)
	j := min(i+1, len(sorted)-1)
	return sorted[i] + T((at-float64(i))*float64(sorted[j]-sorted[i]))
}

func (w *workload) report() workloadReport {
	r := workloadReport{Size: w.size}
	var base *series
	for _, s := range w.series {
		if s.variant == plain {
			base = s
		}
	}
	for _, s := range w.series {
		slices.Sort(s.times)
		slices.Sort(s.delays)
		v := variantReport{
			Variant: s.variant, Requests: s.requests, Reasons: s.reasons, Errors: s.errors, FirstError: message(s.err),
			PerSecond:  float64(len(s.times)) / s.elapsed.Seconds(),
			P50:        quantile(s.times, 0.5).Seconds() * 1e3,
			P99:        quantile(s.times, 0.99).Seconds() * 1e3,
			EventDelay: quantile(s.delays, 0.5).Seconds() * 1e6,
		}
		if sum := total(s.cpu); sum > 0 {
			var cpu, ratio []float64
			for i, used := range s.cpu {
				cpu = append(cpu, used.Seconds()*1e6)
				if base != nil {
					ratio = append(ratio, float64(used)/float64(base.cpu[i]))
				}
			}
			v.CPU, v.GC = newSpread(cpu), s.gc.Seconds()*1e6/float64(s.requests)
			if base != nil {
				v.Ratio, v.Overall = newSpread(ratio), float64(sum)/float64(total(base.cpu))
			}
		}
		r.Variants = append(r.Variants, v)
	}
	return r
}

func total(all []time.Duration) (sum time.Duration) {
	for _, d := range all {
		sum += d
	}
	return sum
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// write writes the report as tables.
func (r report) write(out io.Writer) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, w := range r.Workloads {
		title := w.Size + " KiB"
		if w.Size == streamSize {
			title = fmt.Sprintf("streams of %d events, %v apart", streamEvents, streamPace)
		}
		fmt.Fprintf(t, "%s\n\tCPU µs\tquartiles\tGC µs\t× plain\tquartiles\toverall\treq/s\tp50 ms\tp99 ms\tevent µs\terrors\tdecisions\n", title)
		for _, v := range w.Variants {
			cpu, ratio, overall, delay := "-\t-\t-", "-\t-", "-", "-"
			if v.CPU != nil {
				cpu = fmt.Sprintf("%.0f\t%.0f–%.0f\t%.1f", v.CPU.Median, v.CPU.Low, v.CPU.High, v.GC)
			}
			if v.Ratio != nil {
				ratio = fmt.Sprintf("%.3f\t%.3f–%.3f", v.Ratio.Median, v.Ratio.Low, v.Ratio.High)
				overall = fmt.Sprintf("%.3f", v.Overall)
			}
			if w.Size == streamSize {
				delay = fmt.Sprintf("%.0f", v.EventDelay)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.0f\t%.2f\t%.2f\t%s\t%d\t%s\n",
				v.Variant, cpu, ratio, overall, v.PerSecond, v.P50, v.P99, delay, v.Errors, shares(v.Reasons))
		}
		fmt.Fprintln(t)
	}
	if len(r.Memory) > 0 {
		fmt.Fprintf(t, "Growth for each byte of text, in pieces of %d KiB\n\ttext MB\tresident\tresident after GC\theap\terrors\n", pieceBytes>>10)
		for _, g := range r.Memory {
			each := func(n int64) float64 { return float64(n) / float64(g.Text) }
			fmt.Fprintf(t, "%s\t%.0f\t%.2f\t%.2f\t%.2f\t%d\n", g.Variant, float64(g.Text)/1e6, each(g.Resident), each(g.ResidentAfterGC), each(g.Heap), g.Errors)
		}
	}
	return t.Flush()
}

// shares writes how often each reason was given.
func shares(reasons map[string]int) string {
	all := 0
	for _, n := range reasons {
		all += n
	}
	var list []string
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		list = append(list, fmt.Sprintf("%s %.0f%%", reason, 100*float64(reasons[reason])/float64(all)))
	}
	return strings.Join(list, ", ")
}

// failed is an error when requests failed.
func (r report) failed() error {
	for _, w := range r.Workloads {
		for _, v := range w.Variants {
			if v.Errors > 0 {
				return fmt.Errorf("%s, %s: %d requests failed, the first one with: %s", w.Size, v.Variant, v.Errors, v.FirstError)
			}
		}
	}
	for _, g := range r.Memory {
		if g.Errors > 0 {
			return fmt.Errorf("%s: %d requests failed, the first one with: %s", g.Variant, g.Errors, g.FirstError)
		}
	}
	return nil
}
