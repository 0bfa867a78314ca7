// Command rolter is Caddy with Rolter built in, and with subcommands to try and judge it: demo, replica, replay and kvevents.
//
// Everything that caddy does, rolter does too: rolter run --config Caddyfile, rolter validate, rolter fmt and so on.
package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/spf13/cobra"

	_ "github.com/rolter-ai/caddy-rolter"
)

func main() {
	caddycmd.Main()
}

func init() {
	caddy.CustomBinaryName = "rolter"
}

// exitInterrupted is what a shell reports of a command that Ctrl-C ended.
const exitInterrupted = 130

// setRun has cmd run f. Ctrl-C or SIGTERM ends f's context; f returns the context's error if it was not done then.
func setRun(cmd *cobra.Command, f func(ctx context.Context, args []string) error) {
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		// A second Ctrl-C ends the process, even if something hangs.
		context.AfterFunc(ctx, stop)

		err := f(ctx, args)
		if errors.Is(err, context.Canceled) {
			os.Exit(exitInterrupted)
		}
		return err
	}
}
