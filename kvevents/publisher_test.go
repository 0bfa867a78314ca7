package kvevents

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"
)

// greeting is what both sides of a ZMTP connection begin with.
func greeting() []byte {
	g := make([]byte, greetingSize)
	g[0], g[9], g[10] = 0xff, 0x7f, 3
	copy(g[12:], "NULL")
	return g
}

// frame is one frame as it is on the wire.
func frame(flags byte, body []byte) []byte {
	if len(body) < 256 {
		return append([]byte{flags, byte(len(body))}, body...)
	}
	return append(binary.BigEndian.AppendUint64([]byte{flags | longFlag}, uint64(len(body))), body...)
}

// wire is a message of these frames.
func wire(frames ...[]byte) (all []byte) {
	for i, body := range frames {
		flags := byte(moreFlag)
		if i == len(frames)-1 {
			flags = 0
		}
		all = append(all, frame(flags, body)...)
	}
	return all
}

// property is one of those in READY.
func property(name, value string) []byte {
	b := append([]byte{byte(len(name))}, name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

func ready(socketType string) []byte {
	return frame(commandFlag, append([]byte("\x05READY"), property("Socket-Type", socketType)...))
}

func bigEndian(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// payload is a batch of that time that removes one block.
func payload(at float64, hash uint64) []byte {
	b := binary.BigEndian.AppendUint64([]byte{0x93, 0xcb}, math.Float64bits(at))
	b = append(b, "\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\x91\xcf"...)
	return append(binary.BigEndian.AppendUint64(b, hash), 0)
}

// published is a batch in a publisher's buffer.
type published struct {
	seq     uint64
	payload []byte
}

// publisher publishes as engines do, over sockets of its own: live to subscribers, and again to whoever asks. Its fields say how it differs.
type publisher struct {
	topic     string
	noTopic   bool                            // in replies, as engines before vLLM 0.26 have it
	steps     int                             // that the buffer holds; 0 is 10,000
	queue     int                             // messages that wait for a subscriber before the next are dropped; 0 is 100,000
	drop      func(request, reply int) bool   // leaves out a reply, counting both from 0
	noEnd     func(request int) bool          // leaves out the end
	onRequest func(request int, start uint64) // before it is answered
	mute      bool                            // requests are not answered at all

	live, replay net.Listener
	working      sync.WaitGroup

	mu         sync.Mutex
	conns      map[net.Conn]chan []byte // what is to be written; nil for those without a subscription
	prefixes   map[net.Conn]string
	subscribed int // ever
	next       uint64
	clock      float64
	buffer     []published
	requests   int
	askedFrom  []uint64
	deaf       bool // nothing is sent live
}

// open begins to listen, on any ports or on those that it had before.
func (p *publisher) open(t testing.TB) {
	t.Helper()
	listen := func(old net.Listener) net.Listener {
		address := "127.0.0.1:0"
		if old != nil {
			address = old.Addr().String()
		}
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	p.live, p.replay = listen(p.live), listen(p.replay)
	p.conns, p.prefixes = make(map[net.Conn]chan []byte), make(map[net.Conn]string)
	p.working.Go(func() { p.serve(p.live, "PUB", p.subscriber) })
	p.working.Go(func() { p.serve(p.replay, "ROUTER", p.requester) })
}

// start opens a publisher for the length of a test.
func (p *publisher) start(t testing.TB) *publisher {
	t.Helper()
	p.clock = 1e9
	p.open(t)
	t.Cleanup(p.kill)
	return p
}

// kill ends all connections and listens no more. What was published is still in the buffer.
func (p *publisher) kill() {
	p.live.Close()
	p.replay.Close()
	p.cut()
	p.working.Wait()
}

// cut ends all connections.
func (p *publisher) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

// restart comes back as another process, which has published that many batches.
func (p *publisher) restart(t testing.TB, batches int) {
	t.Helper()
	p.kill()
	p.next, p.buffer, p.clock = 0, nil, p.clock+30
	p.publish(batches)
	p.open(t)
}

func (p *publisher) endpoint() string       { return "tcp://" + p.live.Addr().String() }
func (p *publisher) replayEndpoint() string { return "tcp://" + p.replay.Addr().String() }

func (p *publisher) serve(l net.Listener, socketType string, serve func(net.Conn, *bufio.Reader)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		p.conns[c] = nil
		p.mu.Unlock()
		p.working.Go(func() {
			defer func() {
				c.Close()
				p.mu.Lock()
				delete(p.conns, c)
				delete(p.prefixes, c)
				p.mu.Unlock()
			}()
			r := bufio.NewReader(c)
			c.Write(append(greeting(), ready(socketType)...))
			if _, err := io.CopyN(io.Discard, r, greetingSize); err != nil {
				return
			}
			if _, err := readMessage(r); err == nil {
				serve(c, r)
			}
		})
	}
}

func readMessage(r *bufio.Reader) (frames [][]byte, err error) {
	for more := true; more; {
		flags, err := r.ReadByte()
		if err != nil {
			return nil, err
		}
		size, err := r.ReadByte()
		if err != nil {
			return nil, err
		}
		if flags&longFlag != 0 {
			return nil, errors.New("long frame")
		}
		body := make([]byte, size)
		if _, err := io.ReadFull(r, body); err != nil {
			return nil, err
		}
		frames, more = append(frames, body), flags&moreFlag != 0
	}
	return frames, nil
}

func (p *publisher) subscriber(c net.Conn, r *bufio.Reader) {
	m, err := readMessage(r)
	if err != nil || len(m) != 1 || len(m[0]) == 0 || m[0][0] != 1 {
		return
	}
	size := p.queue
	if size == 0 {
		size = 100_000
	}
	out := make(chan []byte, size)
	p.mu.Lock()
	p.conns[c], p.prefixes[c] = out, string(m[0][1:])
	p.subscribed++
	p.mu.Unlock()
	gone := make(chan struct{})
	p.working.Go(func() {
		defer close(gone)
		io.Copy(io.Discard, r)
	})
	for {
		select {
		case <-gone:
			return
		case m := <-out:
			if _, err := c.Write(m); err != nil {
				c.Close()
				<-gone
				return
			}
		}
	}
}

func (p *publisher) requester(c net.Conn, r *bufio.Reader) {
	for {
		m, err := readMessage(r)
		if err != nil {
			return
		}
		if len(m) != 2 || len(m[0]) != 0 || len(m[1]) != 8 {
			continue // as engines do
		}
		start := binary.BigEndian.Uint64(m[1])
		p.mu.Lock()
		request := p.requests
		p.requests++
		p.askedFrom = append(p.askedFrom, start)
		p.mu.Unlock()
		if p.mute {
			continue
		}
		if p.onRequest != nil {
			p.onRequest(request, start)
		}
		p.mu.Lock()
		buffer := p.buffer
		p.mu.Unlock()
		w := bufio.NewWriter(c)
		n := 0
		for _, b := range buffer {
			if b.seq < start {
				continue
			}
			if p.drop == nil || !p.drop(request, n) {
				w.Write(p.reply(p.topic, b.seq, b.payload))
			}
			n++
		}
		if p.noEnd == nil || !p.noEnd(request) {
			w.Write(p.reply("", endSeq, nil))
		}
		w.Flush()
	}
}

func (p *publisher) reply(topic string, seq uint64, payload []byte) []byte {
	if p.noTopic {
		return wire(nil, bigEndian(seq), payload)
	}
	return wire(nil, []byte(topic), bigEndian(seq), payload)
}

// publish publishes that many batches, each of which removes the block that has the number of all batches before, over all processes.
func (p *publisher) publish(n int) {
	for range n {
		p.publishPayload(nil)
	}
}

// publishPayload publishes a payload; nil is the next one.
func (p *publisher) publishPayload(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b == nil {
		p.clock++
		b = payload(p.clock, uint64(p.clock))
	}
	seq := p.next
	p.next++
	p.buffer = append(p.buffer, published{seq, b})
	steps := p.steps
	if steps == 0 {
		steps = 10_000
	}
	p.buffer = p.buffer[max(0, len(p.buffer)-steps):]
	p.send([]byte(p.topic), bigEndian(seq), b)
}

// send sends any message live. It is called with the lock held.
func (p *publisher) send(frames ...[]byte) {
	if p.deaf {
		return
	}
	m := wire(frames...)
	for c, out := range p.conns {
		if out == nil || !bytes.HasPrefix(frames[0], []byte(p.prefixes[c])) {
			continue
		}
		select {
		case out <- m:
		default:
		}
	}
}

// sendLive sends any message to subscribers.
func (p *publisher) sendLive(frames ...[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.send(frames...)
}

func (p *publisher) setDeaf(deaf bool) {
	p.mu.Lock()
	p.deaf = deaf
	p.mu.Unlock()
}

// asked returns from where replays were asked for.
func (p *publisher) asked() []uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]uint64(nil), p.askedFrom...)
}

// subscriptions counts those that there ever were.
func (p *publisher) subscriptions() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.subscribed
}

// held are the hashes that a sink should have been told of: those of all batches in the buffer that can be understood.
func (p *publisher) held() (hashes []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.buffer {
		if len(b.payload) < len(payload(0, 0)) {
			continue
		}
		hashes = append(hashes, binary.BigEndian.Uint64(b.payload[len(b.payload)-9:]))
	}
	return hashes
}

// record is a sink that remembers the hashes of removals since it was last cleared.
type record struct {
	mu     sync.Mutex
	hashes []uint64
	clears int
	block  chan struct{} // if not nil, Apply waits for something from it
}

func (r *record) Apply(b *Batch) {
	if r.block != nil {
		<-r.block
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range b.Events {
		r.hashes = append(r.hashes, e.Hashes...)
	}
}

func (r *record) Clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hashes, r.clears = nil, r.clears+1
}

func (r *record) held() []uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]uint64(nil), r.hashes...)
}

// eventually waits until something holds.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// noGoroutinesLeft checks at the end of a test that there are no more goroutines than at its beginning.
func noGoroutinesLeft(t testing.TB) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		t.Helper()
		for deadline := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				stacks := make([]byte, 1<<20)
				t.Fatalf("%d goroutines, %d before\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
			}
		}
	})
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
