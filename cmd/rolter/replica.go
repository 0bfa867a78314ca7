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
		Usage: "[--listen <address>] [--model <name>] [--cache-blocks <n>] [--kv-events <endpoint>] [--ranks <n>] [--lmcache <address>]",
		Short: "Runs a simulated vLLM replica",
		Long: `
Runs an HTTP server that behaves as a vLLM replica does, as far as a router can tell: it
has a prefix cache of a limited size, prefills at a limited speed, streams its answers, and
reports usage and metrics. What it answers is nonsense. Runs until Ctrl-C.

With --kv-events it publishes what its cache holds as vLLM does, in ZeroMQ's protocol, and
answers requests for what was published before on --kv-replay; GET /kv_event_sources says
where. With --ranks it is several engines behind one address, with a stream each. With
--lmcache it has an LMCache beside it that holds the prompts it has prefilled.

All three can be made to fail, from the start by --fault, --kv-fault and --lmcache-fault, and
at any time by a POST of the same to /sim/fault and /sim/kv-fault of the replica, and to
/sim/fault of the LMCache:

    curl -d '{"kind":"gap","count":3}' localhost:8001/sim/kv-fault
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
