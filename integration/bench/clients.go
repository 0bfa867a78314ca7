package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// connections is how many requests are under way at the same time.
const connections = 16

// clients are the connections to a door.
type clients struct {
	prompts *prompts
	all     []*client
}

// outcome is what came of requests.
type outcome struct {
	requests int
	elapsed  time.Duration
	times    []time.Duration // of the requests that succeeded
	delays   []time.Duration // of the events of streams
	reasons  map[string]int  // of Rolter's decisions
	errors   int
	err      error // the first one
}

func (o *outcome) add(other outcome) {
	o.requests += other.requests
	o.elapsed += other.elapsed
	o.times = append(o.times, other.times...)
	o.delays = append(o.delays, other.delays...)
	if o.reasons == nil {
		o.reasons = make(map[string]int)
	}
	for reason, n := range other.reasons {
		o.reasons[reason] += n
	}
	o.errors += other.errors
	if o.err == nil {
		o.err = other.err
	}
}

func newClients(d *door, p *prompts) *clients {
	c := &clients{prompts: p}
	for i := range connections {
		c.all = append(c.all, &client{address: d.addresses[i%len(d.addresses)], timeout: 30 * time.Second})
	}
	return c
}

// send sends n requests, over all connections at the same time.
func (c *clients) send(ctx context.Context, n int) (total outcome) {
	var left atomic.Int64
	left.Store(int64(n))
	var mu sync.Mutex
	var wg sync.WaitGroup
	start := time.Now()
	for _, client := range c.all {
		wg.Go(func() {
			var o outcome
			for left.Add(-1) >= 0 && ctx.Err() == nil {
				client.send(ctx, c.prompts, &o)
			}
			mu.Lock()
			defer mu.Unlock()
			total.add(o)
		})
	}
	wg.Wait()
	total.elapsed = time.Since(start)
	return total
}

func (c *clients) close() {
	for _, client := range c.all {
		client.close()
	}
}

// client is one connection. It writes HTTP by itself, because a whole HTTP client would need as much of the machine as what is measured.
type client struct {
	address string
	timeout time.Duration // of one request
	conn    net.Conn      // nil when there is none
	reader  *bufio.Reader
	request []byte
	body    []byte
}

// send sends one request and adds what came of it.
func (c *client) send(ctx context.Context, p *prompts, o *outcome) {
	c.body = p.append(c.body[:0])
	o.requests++
	start := time.Now()
	if err := c.exchange(ctx, o); err != nil {
		c.close()
		o.add(outcome{errors: 1, err: err})
		return
	}
	o.times = append(o.times, time.Since(start))
}

// exchange sends c.body and reads the answer to its end.
func (c *client) exchange(ctx context.Context, o *outcome) error {
	return c.post(ctx, func(resp *http.Response) error { return readAnswer(resp, o) })
}

// post sends c.body and has the answer read, to its end, where it is not an error.
func (c *client) post(ctx context.Context, read func(*http.Response) error) error {
	c.request = append(c.request[:0], "POST /v1/chat/completions HTTP/1.1\r\nHost: "+c.address+
		"\r\nUser-Agent: bench\r\nAuthorization: Bearer key\r\nAccept: application/json\r\nContent-Type: application/json\r\nContent-Length: "...)
	c.request = strconv.AppendInt(c.request, int64(len(c.body)), 10)
	c.request = append(append(c.request, "\r\n\r\n"...), c.body...)
	if c.conn == nil {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", c.address)
		if err != nil {
			return err
		}
		c.conn, c.reader = conn, bufio.NewReader(conn)
	}
	if err := c.conn.SetDeadline(time.Now().Add(c.timeout)); err != nil {
		return err
	}
	conn := c.conn
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if _, err := c.conn.Write(c.request); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 200))
		return fmt.Errorf("%s: %s", resp.Status, text)
	}
	return read(resp)
}

func readAnswer(resp *http.Response, o *outcome) error {
	if reason := resp.Header.Get("X-Rolter-Reason"); reason != "" {
		o.add(outcome{reasons: map[string]int{reason: 1}})
	}
	if resp.Header.Get("Content-Type") != "text/event-stream" {
		_, err := io.Copy(io.Discard, resp.Body)
		return err
	}
	return readEvents(resp.Body, o)
}

// readEvents reads a stream and notes how long each event was under way.
func readEvents(body io.Reader, o *outcome) error {
	events := 0
	for lines := bufio.NewReader(body); ; {
		line, err := lines.ReadSlice('\n')
		if err == io.EOF && events == streamEvents {
			return nil
		}
		if err != nil {
			return fmt.Errorf("stream broke off after %d events: %w", events, err)
		}
		now := time.Now()
		if sent, ok := bytes.CutPrefix(line, []byte(`data: {"sent":`)); ok {
			digits, _, _ := bytes.Cut(sent, []byte(","))
			nanos, err := strconv.ParseInt(string(digits), 10, 64)
			if err != nil {
				return err
			}
			events++
			o.delays = append(o.delays, now.Sub(time.Unix(0, nanos)))
		}
	}
}

func (c *client) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}
