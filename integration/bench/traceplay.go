package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replay"
)

// player sends the requests of a trace when they are due, whether or not those before have been answered.
type player struct {
	trace  *replay.Trace
	door   *door
	rate   float64 // how many times faster than in the trace
	atOnce bool    // see traceOptions

	mu   sync.Mutex
	idle map[string][]*client // by address, the one that was used last at the end
}

// visit is what came of a request. All times are of the clock on the wall.
type visit struct {
	sent  time.Time
	at    time.Duration // sent, since the trace began
	late  time.Duration // it was sent so long after it was due
	seen  time.Time     // when the first event came
	ttft  time.Duration // from sent to seen
	first firstEvent
	last  lastEvent
	err   error
}

// patience is for how long a request waits for the one before to be taken.
const patience = 20 * time.Millisecond

// play sends all requests, waits for their answers, and returns what came of each.
func (p *player) play(ctx context.Context) []visit {
	p.idle = make(map[string][]*client)
	defer func() {
		for _, clients := range p.idle {
			for _, c := range clients {
				c.close()
			}
		}
	}()
	visits := make([]visit, len(p.trace.Requests))
	ready := make(chan *client, 32) // whose bodies are made before they are due
	go func() {
		defer close(ready)
		for i, r := range p.trace.Requests {
			c := p.take(p.door.addresses[i%len(p.door.addresses)])
			c.body = appendBody(c.body[:0], r)
			select {
			case ready <- c:
			case <-ctx.Done():
				return
			}
		}
	}()
	var wg sync.WaitGroup
	defer wg.Wait()
	start := time.Now().Add(100 * time.Millisecond)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i, r := range p.trace.Requests {
		c, ok := <-ready
		if !ok {
			return visits
		}
		due := start.Add(time.Duration(r.Timestamp / p.rate * float64(time.Millisecond)))
		timer.Reset(time.Until(due))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return visits
		}
		taken, take := context.WithCancel(ctx)
		wg.Go(func() {
			defer take()
			v := &visits[i]
			v.sent = time.Now()
			v.at, v.late = v.sent.Sub(start), v.sent.Sub(due)
			v.err = c.post(ctx, func(resp *http.Response) error {
				take()
				return v.read(resp.Body)
			})
			if v.err != nil {
				c.close()
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			p.idle[c.address] = append(p.idle[c.address], c)
		})
		if !p.atOnce {
			select {
			case <-taken.Done():
			case <-time.After(patience):
			}
		}
	}
	return visits
}

// take returns a client that is not in use.
func (p *player) take(address string) *client {
	p.mu.Lock()
	defer p.mu.Unlock()
	idle := p.idle[address]
	if len(idle) == 0 {
		// Only a replica that has lost a request takes so long; at life's own speed answers take minutes.
		return &client{address: address, timeout: time.Hour}
	}
	p.idle[address] = idle[:len(idle)-1]
	return idle[len(idle)-1]
}

// read reads a stream of two events.
func (v *visit) read(body io.Reader) error {
	events := 0
	for lines := bufio.NewReader(body); ; {
		line, err := lines.ReadSlice('\n')
		if err == io.EOF && events == 2 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("stream broke off after %d events: %w", events, err)
		}
		data, ok := bytes.CutPrefix(line, []byte("data: {"))
		if !ok {
			continue
		}
		data = line[len(line)-len(data)-1:]
		switch events++; events {
		case 1:
			v.seen = time.Now()
			v.ttft = v.seen.Sub(v.sent)
			err = json.Unmarshal(data, &v.first)
		case 2:
			err = json.Unmarshal(data, &v.last)
		default:
			err = errors.New("more events than a replica sends")
		}
		if err != nil {
			return err
		}
	}
}
