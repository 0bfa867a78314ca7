package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/rolter-ai/caddy-rolter/integration/converse"
)

// report is what the demo found; its JSON is the output of --json.
type report struct {
	Runs []run `json:"runs"`
}

type run struct {
	Strategy string `json:"strategy"`
	converse.Summary
}

func (r report) writeJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

func (r report) writeTable(w io.Writer) {
	row := func(label string, cell func(run) string) {
		fmt.Fprintf(w, "%-31s", label)
		for _, run := range r.Runs {
			fmt.Fprintf(w, " %12s", cell(run))
		}
		fmt.Fprintln(w)
	}
	seconds := func(s float64) string { return fmt.Sprintf("%.3f s", s) }

	row("", func(r run) string { return r.Strategy })
	row("requests", func(r run) string { return fmt.Sprint(r.Requests) })
	if slices.ContainsFunc(r.Runs, func(r run) bool { return r.Errors > 0 }) {
		row("failed", func(r run) string { return fmt.Sprint(r.Errors) })
	}
	row("prompt tokens", func(r run) string { return fmt.Sprint(r.PromptTokens) })
	row("cached share of prompt tokens", func(r run) string {
		if !r.CachedReported {
			return "unknown"
		}
		return fmt.Sprintf("%.1f %%", 100*r.CachedShare())
	})
	row("time to first token, mean", func(r run) string { return seconds(r.FirstToken.Mean) })
	row("time to first token, p95", func(r run) string { return seconds(r.FirstToken.P95) })
	replicas := map[string]bool{}
	for _, run := range r.Runs {
		for name := range run.ByReplica {
			replicas[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(replicas)) {
		row("requests to "+name, func(r run) string { return fmt.Sprint(r.ByReplica[name]) })
	}
}

// writeRemarks says what the figures do not.
func (r report) writeRemarks(w io.Writer) {
	for _, run := range r.Runs {
		if run.Requests > run.Errors && !run.CachedReported {
			fmt.Fprintf(w, "%s: the replicas do not report cached tokens (vLLM does with --enable-prompt-tokens-details).\n", run.Strategy)
		}
		for i, text := range slices.Sorted(maps.Keys(run.ErrorTexts)) {
			if i == 5 {
				fmt.Fprintf(w, "%s: and %d other errors\n", run.Strategy, len(run.ErrorTexts)-i)
				break
			}
			fmt.Fprintf(w, "%s: failed %d times: %s\n", run.Strategy, run.ErrorTexts[text], text)
		}
	}
}

// progressLine returns a function that shows how far a play is: on one line that is written over where out is a
// terminal, else in ten lines.
func progressLine(out *os.File, label string) func(done, total int) {
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	shown := 0
	return func(done, total int) {
		switch {
		case terminal:
			fmt.Fprintf(out, "\r%s: %d of %d requests", label, done, total)
			if done == total {
				fmt.Fprintln(out)
			}
		case done*10/total > shown:
			shown = done * 10 / total
			fmt.Fprintf(out, "%s: %d of %d requests\n", label, done, total)
		}
	}
}
