// Command bench measures what Rolter costs: the CPU time that a Caddy spends on a request with it and without it.
//
//	go run ./integration/bench                            # two to three minutes
//	go run ./integration/bench --quick                    # seconds: does it work at all?
//	go run ./integration/bench --only plain,rolter --sizes 64 --cpuprofile rolter
//	go run ./integration/bench --memory                   # memory of the record of prompts
//
// One process serves trivial upstreams, and for each variant there is one Caddy process. All of them are up at the same time and
// run the same binary, so that they differ in their Caddyfile only:
//
//   - direct: no Caddy at all, for the latency
//   - plain: Caddy's reverse_proxy, as it comes
//   - buffered: the same with request_buffers, which is the least that reading the prompt takes
//   - rolter: the handler rolter with cache_aware
//   - policy: reverse_proxy with lb_policy rolter cache_aware
//
// Chat completions are sent over 16 connections. Half of the prompt is one of 8 system prompts and the other half has
// never been sent before. The variants take short turns, in another order every round, so that whatever else
// the machine does hits all of them alike. What counts is the CPU time (user and system) of the Caddy process, which
// depends far less on the machine's other load than latency and requests per second do.
//
// Each round gives a ratio to plain; the table shows their median and quartiles, and as "overall" the ratio of the sums over all
// rounds. The two differ by garbage collection: with a large heap it is rare, so that few rounds have one, and those have all
// of its cost. "GC" is the mean of what it takes. A Caddy with a record of prompts collects far less often than one with next
// to no heap, which pays for a part of what Rolter does; with --sizes 0.5 the record stays small and pays little. The
// processes inherit GOGC: with GOGC=400 in the environment, plain hardly collects either.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// options are what the flags say.
type options struct {
	rounds     int
	requests   int // of a turn
	sizes      []string
	variants   []variant
	profiled   []string // names of variants
	memory     bool
	memoryText int // bytes of prompts that the measurement of memory sends
	json       bool
}

func main() {
	if runChild() {
		return
	}
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		os.Exit(2) // package flag has said why
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err() // what it broke off does not matter
		}
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// parse reads the command line.
func parse(args []string) (o options, err error) {
	o.sizes = []string{"0.5", "8", "64", streamSize}
	o.variants = variants
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.IntVar(&o.rounds, "rounds", 40, "how often every variant gets its turn")
	flags.IntVar(&o.requests, "requests", 500, "requests of a turn; a turn of streams has 16 for every 500")
	flags.Func("sizes", "request bodies, in KiB; stream is 8 KiB with a streamed answer (default 0.5,8,64,stream)", func(s string) error {
		o.sizes = strings.Split(s, ",")
		for _, size := range o.sizes {
			if kib, err := strconv.ParseFloat(size, 64); size != streamSize && (err != nil || !(kib >= 0.5 && kib <= 1024)) {
				return fmt.Errorf("%s: must be from 0.5 to 1024, or stream", size)
			}
		}
		return nil
	})
	flags.Func("only", "only these variants, of direct,plain,buffered,rolter,policy", func(s string) error {
		o.variants = nil
		for name := range strings.SplitSeq(s, ",") {
			i := slices.IndexFunc(variants, func(v variant) bool { return v.name == name })
			if i < 0 {
				return fmt.Errorf("%s: no such variant", name)
			}
			o.variants = append(o.variants, variants[i])
		}
		return nil
	})
	flags.Func("cpuprofile", "after the measurement, profile these variants and write <variant>-<size>.pprof here", func(s string) error {
		o.profiled = strings.Split(s, ",")
		return nil
	})
	flags.BoolVar(&o.memory, "memory", false, "measure memory instead: its growth with 100 MB of distinct prompts in pieces of 8 KiB")
	flags.BoolVar(&o.json, "json", false, "print JSON, with the figures of every round")
	quick := flags.Bool("quick", false, "try only whether it works: one round, few requests, little text")
	if err = flags.Parse(args); err != nil {
		return o, err
	}
	o.memoryText = 100e6
	if *quick {
		o.rounds, o.requests, o.memoryText = 1, 64, 1e6
	}
	for _, name := range o.profiled {
		if !slices.ContainsFunc(o.variants, func(v variant) bool { return v.name == name && v.site != nil }) {
			err = fmt.Errorf("--cpuprofile %s: no Caddy of that name is measured", name)
		}
	}
	if flags.NArg() > 0 {
		err = fmt.Errorf("%s: unknown argument", flags.Arg(0))
	}
	if o.rounds < 1 || o.requests < 1 {
		err = errors.New("--rounds and --requests must be at least 1")
	}
	if err != nil {
		fmt.Fprintln(flags.Output(), err)
	}
	return o, err
}

// run starts everything, measures, and writes the result. It fails when requests failed, after it has shown the result.
func run(ctx context.Context, o options, out io.Writer) error {
	if o.memory {
		o.variants = memoryVariants
	}
	l, err := newLab(ctx, o.variants)
	if err != nil {
		return err
	}
	defer l.close()

	var r report
	var workloads []*workload
	if o.memory {
		r.Memory, err = l.measureMemory(ctx, o.memoryText)
	} else {
		for _, size := range o.sizes {
			workloads = append(workloads, newWorkload(size, o.requests, l.doors))
		}
		err = l.measureCPU(ctx, workloads, o.rounds)
	}
	if err != nil {
		return err
	}
	for _, w := range workloads {
		r.Workloads = append(r.Workloads, w.report())
	}
	if o.json {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(r)
	} else {
		err = r.write(out)
	}
	if err != nil {
		return err
	}
	for _, d := range l.doors {
		if !slices.Contains(o.profiled, d.name) {
			continue
		}
		for _, w := range workloads {
			if err := w.profile(ctx, d); err != nil {
				return fmt.Errorf("profile of %s: %w", d.name, err)
			}
		}
	}
	return r.failed()
}
