package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/caddyserver/certmagic"
	"github.com/spf13/cobra"

	"github.com/rolter-ai/caddy-rolter/integration/converse"
	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "demo",
		Usage: "[--real <url,url>] [--once] [--json] [--idle] [--listen <address>] [--conversations <n>] [--pace <factor>] [--verbose]",
		Short: "Shows what cache-aware routing does, with simulated replicas or your own",
		Long: `
Starts three simulated vLLM replicas and a Caddy with Rolter in front of them, plays
multi-turn conversations through it, first with round_robin and then with cache_aware,
and compares how much of the prompts came from the replicas' caches and how long the
first token took. Then it stays up, for you to try, until Ctrl-C.

With --real it plays the same against your own replicas. They must all serve the model
that the first one names first in its /v1/models, and have room for prompts of 13 KB. The
figures mean most when they have nothing else to do.

Nothing is written to the disk outside of a temporary directory.
`,
		CobraFunc: func(cmd *cobra.Command) {
			var d demo
			flags := cmd.Flags()
			flags.StringSliceVar(&d.real, "real", nil, "base URLs of your own replicas, instead of simulated ones")
			flags.BoolVar(&d.once, "once", false, "exit after the comparison")
			flags.BoolVar(&d.json, "json", false, "print the comparison as JSON on standard output, all else on standard error")
			flags.BoolVar(&d.idle, "idle", false, "only start everything, play nothing")
			flags.StringVar(&d.listen, "listen", "", "address of Caddy (default \":8080\", or the next free port)")
			flags.IntVar(&d.conversations, "conversations", 36, "how many conversations to play")
			flags.Float64Var(&d.pace, "pace", 1, "multiplies the pauses of the users, who take about a second between an answer and the next question")
			flags.BoolVar(&d.verbose, "verbose", false, "let Caddy log what it does, not only errors")
			cmd.MarkFlagsMutuallyExclusive("idle", "once")
			cmd.MarkFlagsMutuallyExclusive("idle", "json")
			cmd.Args = cobra.NoArgs
			setRun(cmd, func(ctx context.Context, _ []string) error { return d.run(ctx) })
		},
	})
}

// The simulated replicas: an 8B model on a mid-range GPU. One cache holds about half of what the conversations
// come to, so the three together hold all of it, but not three times over.
var simulated = replica.Config{
	Model:        "demo",
	CacheBlocks:  1800,
	AnswerTokens: answerTokens,
	Timing: replica.Timing{
		PrefillRate: 7000,
		DecodeTime:  10 * time.Millisecond,
	},
}

// answerTokens is the length of the answers, for real replicas the greatest.
const answerTokens = 48

// systemPrompts is how many different ones the conversations share.
const systemPrompts = 5

// demo is one run of the command.
type demo struct {
	real                      []string
	once, json, idle, verbose bool
	listen                    string
	conversations             int
	pace                      float64

	// info is where everything is said except for the JSON.
	info io.Writer
}

func (d *demo) run(ctx context.Context) error {
	d.info = os.Stdout
	if d.json {
		d.info = os.Stderr
	}
	if d.conversations < 1 {
		return fmt.Errorf("--conversations %d: must be at least 1", d.conversations)
	}
	if !(d.pace >= 0 && d.pace <= 1000) {
		return fmt.Errorf("--pace %v: must be from 0 to 1000", d.pace)
	}

	config, err := d.prepare(ctx)
	if err != nil {
		return err
	}
	stopCaddy, err := isolateCaddy()
	if err != nil {
		return err
	}
	defer stopCaddy()

	const baseline, ours = "round_robin", "cache_aware"
	d.say("The Caddyfile:\n\n%s", config.caddyfile(ours))
	d.say("Try it:\n\n%s\n", config.curl())

	if !d.idle {
		d.say("Playing %d conversations behind %d system prompts, first with \"strategy %s\", then with \"strategy %s\".",
			d.conversations, systemPrompts, baseline, ours)
		var result report
		for _, strategy := range []string{baseline, ours} {
			if err := loadCaddyfile(config.caddyfile(strategy)); err != nil {
				return err
			}
			summary, err := d.play(ctx, config, strategy)
			if err != nil {
				return err
			}
			result.Runs = append(result.Runs, run{strategy, summary})
		}
		if d.json {
			err = result.writeJSON(os.Stdout)
		} else {
			d.say("")
			result.writeTable(d.info)
		}
		result.writeRemarks(d.info)
		if err != nil || d.once {
			return err
		}
	} else if err := loadCaddyfile(config.caddyfile(ours)); err != nil {
		return err
	}

	d.say("\nCaddy is running with %s. Ctrl-C ends it.", ours)
	<-ctx.Done()
	return nil
}

func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.info, format+"\n", args...) }

// play plays the conversations through Caddy.
func (d *demo) play(ctx context.Context, s *setup, strategy string) (converse.Summary, error) {
	player := &converse.Player{
		BaseURL: s.url(),
		Model:   s.model,
		// The second run must not profit from what the first one left in the caches.
		Salt:      "Session " + rand.Text(),
		MaxTokens: answerTokens,
		Pace:      d.pace,
	}
	done, total := 0, 0
	show := progressLine(os.Stderr, strategy)
	player.Progress = func(d, t int) {
		done, total = d, t
		show(d, t)
	}
	results := player.Play(ctx, converse.Generate(1, d.conversations, systemPrompts))
	if ctx.Err() != nil {
		fmt.Fprintf(os.Stderr, "\nInterrupted during %s, after %d of %d requests.\n", strategy, done, total)
		return converse.Summary{}, ctx.Err()
	}
	summary := converse.Summarize(results)
	if summary.Errors == summary.Requests {
		return summary, fmt.Errorf("%s: no request was answered, for example: %w", strategy, results[0].Err)
	}
	return summary, nil
}

// isolateCaddy keeps Caddy from writing to the user's home directory, where it would save its configuration and
// look after certificates. The function it returns stops Caddy.
func isolateCaddy() (stop func(), err error) {
	dir, err := os.MkdirTemp("", "rolter-demo-")
	if err != nil {
		return nil, err
	}
	// Caddy reads the first two when it needs them, but has computed the other two from them before main began.
	os.Setenv("XDG_CONFIG_HOME", dir) // fails only for malformed names
	os.Setenv("XDG_DATA_HOME", dir)
	caddy.ConfigAutosavePath = filepath.Join(dir, "autosave.json")
	caddy.DefaultStorage = &certmagic.FileStorage{Path: dir}
	return func() {
		_ = caddy.Stop() // the process ends anyway
		_ = os.RemoveAll(dir)
	}, nil
}

func loadCaddyfile(text string) error {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	if err != nil {
		return err
	}
	return caddy.Load(config, true)
}
