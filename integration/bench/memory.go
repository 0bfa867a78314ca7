package main

import (
	"bytes"
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
)

// memory is what a process takes, in bytes.
type memory struct {
	// Resident is the memory of the process as the system counts it; 0 where that cannot be read.
	Resident int64 `json:"resident"`
	// ResidentAfterGC is the same after a garbage collection that returned what was free.
	ResidentAfterGC int64 `json:"resident_after_gc"`
	// Heap is what of Go's heap is in use after it.
	Heap int64 `json:"heap"`
}

// readMemory reads the memory of this process.
func readMemory() (m memory) {
	m.Resident = resident()
	debug.FreeOSMemory()
	m.ResidentAfterGC = resident()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	m.Heap = int64(stats.HeapAlloc)
	return m
}

// resident reads the resident memory from Linux's /proc.
func resident() int64 {
	statm, _ := os.ReadFile("/proc/self/statm")
	if fields := bytes.Fields(statm); len(fields) > 1 {
		pages, _ := strconv.ParseInt(string(fields[1]), 10, 64)
		return pages * int64(os.Getpagesize())
	}
	return 0
}

// growth is how much a variant's memory has grown.
type growth struct {
	Variant string `json:"variant"`
	Text    int64  `json:"text"` // bytes of prompts that were sent
	memory
	Errors     int    `json:"errors"`
	FirstError string `json:"first_error,omitempty"`
}

// pieceBytes is the length of a prompt of the measurement of memory.
const pieceBytes = 8 << 10

// measureMemory sends so much text, none of it twice, through every variant.
func (l *lab) measureMemory(ctx context.Context, text int) (all []growth, err error) {
	for _, d := range l.doors {
		p := newDistinctPrompts(pieceBytes)
		c := newClients(d, p)
		defer c.close()
		// Before it counts, the process gets the buffers that it needs in any case.
		o := c.send(ctx, 20*connections)
		var before, after memory
		if err := d.read(ctx, "/bench/memory", &before); err != nil {
			return nil, err
		}
		n := text / pieceBytes
		o.add(c.send(ctx, n))
		if err := d.read(ctx, "/bench/memory", &after); err != nil {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		g := growth{Variant: d.name, Text: int64(n * pieceBytes), Errors: o.errors, memory: memory{
			Resident:        after.Resident - before.Resident,
			ResidentAfterGC: after.ResidentAfterGC - before.ResidentAfterGC,
			Heap:            after.Heap - before.Heap,
		}}
		g.FirstError = message(o.err)
		all = append(all, g)
	}
	return all, nil
}
