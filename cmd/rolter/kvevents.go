package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rolter-ai/caddy-rolter/kvevents"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "kvevents",
		Usage: "tail|record|check",
		Short: "Shows KV events of engines, and how exactly they tell what is cached",
		Long: `
Engines that publish KV events say which blocks of tokens are in their caches. "tail" shows
what one publishes. "record" and "check" find out how exactly the events predict, for your
own traffic, how many tokens of a prompt an engine takes from its cache.
`,
		CobraFunc: func(cmd *cobra.Command) {
			cmd.AddCommand(tailCommand(), recordCommand(), checkCommand())
			cmd.Args = cobra.NoArgs
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		},
	})
}

func checkCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check FILE… [--json]",
		Short: "Compares what recordings predict to be cached with what the engine reported",
		Long: `
Plays recordings, as "record" makes them, to the index that the router has, in the order in
which it all happened, and compares for each request the number of cached tokens that the
index predicts with the one that the engine reported: how many predictions were exact, how
many over it and how many under it. Requests are left out that read no cache (those with
prompt_logprobs) or of which the recording does not have both the token ids and the report.
`,
		Args: cobra.MinimumNArgs(1),
	}
	asJSON := cmd.Flags().Bool("json", false, "print JSON")
	setRun(cmd, func(_ context.Context, files []string) error { return check(files, *asJSON, os.Stdout) })
	return cmd
}

// checked is what a recording has come to.
type checked struct {
	File     string `json:"file"`
	Requests int    `json:"requests"`
	Exact    int    `json:"exact"`
	Over     int    `json:"over"`
	Under    int    `json:"under"`

	all kvevents.Check
}

// check checks all files that can be read, and returns what is wrong with the others.
func check(files []string, asJSON bool, out io.Writer) error {
	results := []checked{}
	var errs []error
	for _, name := range files {
		c, err := checkFile(name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		results = append(results, checked{name, c.Requests, c.Exact, c.Over, c.Under, c})
	}
	if asJSON {
		errs = append(errs, json.NewEncoder(out).Encode(map[string]any{"files": results}))
	} else if len(results) > 0 {
		errs = append(errs, writeChecks(out, results))
	}
	return errors.Join(errs...)
}

func checkFile(name string) (kvevents.Check, error) {
	f, err := os.Open(name)
	if err != nil {
		return kvevents.Check{}, err
	}
	defer f.Close()
	c, err := kvevents.CheckRecording(f)
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return c, err
}

func writeChecks(out io.Writer, results []checked) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "requests\texact\tover\tunder\t  file")
	for _, r := range results {
		fmt.Fprintf(table, "%d\t%d\t%d\t%d\t  %s\n", r.Requests, r.Exact, r.Over, r.Under, r.File)
	}
	err := table.Flush()
	for _, r := range results {
		for _, n := range []struct {
			count int
			what  string
		}{
			{r.all.LeftOut, "requests left out, which read no cache or whose token ids or cached tokens are not there"},
			{r.all.Gaps, "gaps in the events"},
			{r.all.Restarts, "restarts of the engine"},
			{r.all.Bad, "batches of events that cannot be decoded"},
			{r.all.Skipped, "events that are not understood or say nothing about prefixes"},
		} {
			if n.count > 0 {
				fmt.Fprintf(out, "%s: %d %s\n", r.File, n.count, n.what)
			}
		}
		for _, w := range r.all.Wrong {
			fmt.Fprintf(out, "%s: request %s: %d predicted, %d reported\n", r.File, w.Request, w.Predicted, w.Reported)
		}
	}
	return err
}

// eventFlags say more about event streams than where they are.
type eventFlags struct{ replay, topic string }

func (f *eventFlags) register(flags *pflag.FlagSet) {
	flags.StringVar(&f.replay, "replay", "", "tcp://host:port where the engine replays what it has published (default: as it says, if it was asked)")
	flags.StringVar(&f.topic, "topic", "", "what the topics of interest begin with (default: as the engine says, if it was asked, or else all)")
}

// eventSource is a stream of events that can be followed.
type eventSource struct {
	name   string
	config kvevents.StreamConfig
}

// find returns the streams at an endpoint: the one that is published there or, where it is the URL of a replica, all that this says it has. What the replica
// says is wrong with them goes to warn.
func (f *eventFlags) find(ctx context.Context, endpoint string, warn func(format string, args ...any)) ([]eventSource, error) {
	switch {
	case strings.HasPrefix(endpoint, "tcp://"):
		return []eventSource{{endpoint, streamConfig(endpoint, f.replay, f.topic)}}, nil
	case !isURL(endpoint):
		return nil, fmt.Errorf("%q is neither tcp://host:port nor the http:// URL of a replica", endpoint)
	case f.replay != "":
		return nil, fmt.Errorf("--replay %s: is for an endpoint tcp://host:port; %s says itself where it replays", f.replay, endpoint)
	}
	base := baseURL(endpoint)
	found, err := kvevents.Discover(ctx, &http.Client{Timeout: 10 * time.Second}, base, "")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", endpoint, err)
	}
	var sources []eventSource
	limiter := kvevents.NewReplayLimiter()
	for _, r := range found.Ranks {
		if r.Endpoint == "" {
			continue
		}
		config := streamConfig(r.Endpoint, r.Replay, cmp.Or(f.topic, r.Topic))
		config.Limiter = limiter
		name := strings.TrimPrefix(base, "http://")
		if len(found.Ranks) > 1 {
			name = fmt.Sprintf("%s/%d", name, r.Rank)
		}
		sources = append(sources, eventSource{name, config})
	}
	if len(sources) == 0 {
		return nil, fmt.Errorf("%s: no KV events to follow: %s", endpoint, strings.Join(found.Problems, "; "))
	}
	for _, problem := range found.Problems {
		warn("%s: %s", endpoint, problem)
	}
	return sources, nil
}

func streamConfig(endpoint, replay, topic string) kvevents.StreamConfig {
	return kvevents.StreamConfig{
		Endpoint: endpoint,
		Replay:   replay,
		Topic:    topic,
		Dial:     new(net.Dialer).DialContext,
		Alive:    func(context.Context) bool { return true }, // somebody is looking: try every second
		Sink:     noSink{},
	}
}

func isURL(s string) bool { return strings.HasPrefix(s, "http://") || strings.HasPrefix(s, "https://") }

// baseURL is the URL of a replica without what its API's paths begin with.
func baseURL(url string) string { return strings.TrimSuffix(strings.TrimRight(url, "/"), "/v1") }

// noSink is for who watches a stream and keeps nothing.
type noSink struct{}

func (noSink) Apply(*kvevents.Batch) {}
func (noSink) Clear()                {}

// unix is a time in seconds.
func unix(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// warn tells the user of something that is not as it should be.
func warn(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// Interface guard
var _ kvevents.Sink = noSink{}
