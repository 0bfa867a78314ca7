package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"time"
)

// streamSize is the size that is 8 KiB with a streamed answer.
const streamSize = "stream"

// workload is one kind of request, and what was measured with it.
type workload struct {
	size    string
	prompts *prompts
	warmUp  int       // requests of a turn before it counts: they open the connections
	turn    int       // requests of a turn that count
	series  []*series // by door
}

// series is what was measured for one variant.
type series struct {
	variant string
	cpu     []time.Duration // a request, by round
	gc      time.Duration   // of all requests
	outcome
}

func newWorkload(size string, requests int, doors []*door) *workload {
	w := &workload{size: size}
	if size == streamSize {
		w.prompts, w.warmUp, w.turn = newPrompts(8<<10, true), connections, connections*max(1, requests/500)
	} else {
		kib, _ := strconv.ParseFloat(size, 64) // the command line was checked
		w.prompts, w.warmUp, w.turn = newPrompts(int(kib*1024), false), 4*connections, requests
	}
	for _, d := range doors {
		w.series = append(w.series, &series{variant: d.name})
	}
	return w
}

// measureCPU lets the variants take turns at every workload.
func (l *lab) measureCPU(ctx context.Context, workloads []*workload, rounds int) error {
	for round := range rounds + 1 {
		for _, i := range rand.Perm(len(workloads)) {
			w := workloads[i]
			for _, j := range rand.Perm(len(l.doors)) {
				s := w.series[j]
				if round == 0 { // the first one fills pools and caches
					s = new(series)
				}
				if err := w.takeTurn(ctx, l.doors[j], s); err != nil {
					return fmt.Errorf("%s: %w", l.doors[j].name, err)
				}
			}
		}
	}
	return nil
}

// takeTurn sends requests through a door and measures what its Caddy needs for them. Requests that fail are no error of the turn; they are counted.
func (w *workload) takeTurn(ctx context.Context, d *door, s *series) error {
	c := newClients(d, w.prompts)
	defer c.close()
	warmUp := c.send(ctx, w.warmUp)
	before, err := d.cpu(ctx)
	if err != nil {
		return err
	}
	o := c.send(ctx, w.turn)
	after, err := d.cpu(ctx)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.cpu = append(s.cpu, (after.Total-before.Total)/time.Duration(o.requests))
	s.gc += after.GC - before.GC
	s.outcome.add(o)
	s.outcome.add(outcome{errors: warmUp.errors, err: warmUp.err})
	return nil
}

// cpu is the CPU time that the door's Caddy has used.
func (d *door) cpu(ctx context.Context) (used cpuUsage, err error) {
	if d.admin != "" {
		err = d.read(ctx, "/bench/cpu", &used)
	}
	return used, err
}

// profileTime is how long a profile is taken.
const profileTime = 10 * time.Second

// profile takes a CPU profile of a door's Caddy while it serves the workload.
func (w *workload) profile(ctx context.Context, d *door) error {
	c := newClients(d, w.prompts)
	defer c.close()
	var o outcome
	sending, stop := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for sending.Err() == nil {
			o.add(c.send(ctx, w.turn))
		}
	}()
	profile, err := d.get(ctx, fmt.Sprintf("/debug/pprof/profile?seconds=%.0f", profileTime.Seconds()))
	stop()
	<-stopped
	if err == nil {
		err = o.err
	}
	if err != nil {
		return err
	}
	file := d.name + "-" + w.size + ".pprof"
	fmt.Fprintf(os.Stderr, "%s: %d requests\n", file, o.requests)
	return os.WriteFile(file, profile, 0o644)
}
