package main

import (
	"context"
	"os"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/rolter-ai/caddy-rolter/integration/replay"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "replay",
		Usage: "[<file>|-] [--strategy <name,name>] [--replicas <n>] [--json]",
		Short: "Compares strategies on a recorded load, in virtual time",
		Long: `
Feeds a trace of requests through Rolter's strategies and simulated replicas, in virtual
time, and compares cached tokens and time to first token. The trace is JSON lines in
Mooncake's form, from a file or, with -, from standard input; without either, one is made up.
`,
		CobraFunc: func(cmd *cobra.Command) {
			options := replay.RegisterFlags(cmd.Flags())
			cmd.Args = cobra.MaximumNArgs(1)
			setRun(cmd, func(ctx context.Context, args []string) error {
				return replay.Run(ctx, *options, args, os.Stdin, os.Stdout, os.Stderr)
			})
		},
	})
}
