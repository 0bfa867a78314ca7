// Command bench measures what Rolter costs: the CPU time that a Caddy spends on a request with it and without it.
//
//	go run ./integration/bench                            # two to three minutes
//	go run ./integration/bench --quick                    # seconds: does it work at all?
//	go run ./integration/bench --only plain,rolter --sizes 64 --cpuprofile rolter
//	go run ./integration/bench --memory                   # memory of the record of prompts
//	go run ./integration/bench --trace conversation.jsonl # times to first token of strategies on a recorded load
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
//
// With --trace it is about strategies instead, and prints what `rolter replay` does: the first requests of the trace are sent through
// a Caddy to simulated replicas, everything many times faster than life. The times are those of the trace's world. The replicas
// compute as in the replay, so that what differs from it, which is printed beside, is what it costs to learn of everything by HTTP. Of the time to first
// token the second table tells what is spent under way, because a millisecond on the wall is as many in the trace as --time-scale says. Each
// run starts with a new Caddy and empty caches.
//
// What a trace has at the same moment, which with a clock that ticks every few seconds is a lot, is sent one after the other, each request when a
// replica has taken the one before. With --at-once it is not: then requests overtake each other between the pick and the replica, which a
// short one that falls behind a long one pays for, and on a machine that is clients, gateway and replicas at once that is mostly the machine's doing. Times to first token
// count from when a request is sent; "sent late" is how long after it was due that is, and "replayed as sent" the replay of the requests at those times.
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
	trace      traceOptions
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
	flags.IntVar(&o.rounds, "rounds", 40, "how often every variant gets its turn; with --trace, 1 unless it is given")
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
	o.trace.register(flags)
	quick := flags.Bool("quick", false, "try only whether it works: one round, few requests, little text")
	if err = flags.Parse(args); err != nil {
		return o, err
	}
	o.memoryText, o.trace.rounds = 100e6, 1
	flags.Visit(func(f *flag.Flag) {
		if f.Name == "rounds" {
			o.trace.rounds = o.rounds
		}
	})
	if *quick {
		o.rounds, o.requests, o.memoryText = 1, 64, 1e6
		o.trace.rounds, o.trace.first = 1, 100
	}
	if o.trace.file != "" {
		err = o.trace.validate()
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
	if o.trace.file != "" {
		return runTrace(ctx, o, out)
	}
	if o.memory {
		o.variants = memoryVariants
	}
	l, err := newLab(ctx, o.variants, "upstreams")
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
	if err := show(&r, o.json, out); err != nil {
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

// runTrace measures with a trace and writes the result.
func runTrace(ctx context.Context, o options, out io.Writer) error {
	r, err := measureTrace(ctx, o.trace, os.Stderr)
	if err != nil {
		return err
	}
	if err := show(r, o.json, out); err != nil {
		return err
	}
	return r.failed()
}

// show writes a report as JSON or as tables.
func show(r interface{ write(io.Writer) error }, asJSON bool, out io.Writer) error {
	if !asJSON {
		return r.write(out)
	}
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}
