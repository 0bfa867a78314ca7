package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "replica",
		Usage: "[--listen <address>] [--model <name>] [--cache-blocks <n>]",
		Short: "Runs a simulated vLLM replica",
		Long: `
Runs an HTTP server that behaves as a vLLM replica does, as far as a router can tell: it
has a prefix cache of a limited size, prefills at a limited speed, streams its answers, and
reports usage and metrics. What it answers is nonsense. Runs until Ctrl-C.
`,
		CobraFunc: func(cmd *cobra.Command) {
			flags := flag.NewFlagSet("replica", flag.ContinueOnError)
			config := replica.RegisterFlags(flags)
			cmd.Flags().AddGoFlagSet(flags)
			cmd.Args = cobra.NoArgs
			setRun(cmd, func(ctx context.Context, _ []string) error {
				if err := config.Validate(); err != nil {
					return err
				}
				return replica.Run(ctx, *config, func(format string, args ...any) {
					fmt.Fprintf(os.Stderr, format+"\n", args...)
				})
			})
		},
	})
}
