package replica

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

// KVEvents is how a replica publishes what its cache holds, as vLLM's --kv-events-config says it.
type KVEvents struct {
	// Endpoint is where the PUB socket listens, such as "tcp://*:5557" or, on any free port, "tcp://127.0.0.1:0"; rank r
	// listens r ports above. "" is no events.
	Endpoint string
	// ReplayEndpoint is where the ROUTER socket for replays listens, likewise. "" is no replay.
	ReplayEndpoint string
	// Topic is the first frame of each message.
	Topic string
	// BufferSteps is how many batches a replay can have. Default 10,000, vLLM's.
	BufferSteps int
	// HighWater is how many batches wait for a slow subscriber before it loses some. Default 100,000, vLLM's.
	HighWater int
	// Form is the form of an event: a map with names, as since vLLM 0.24, or an array, as before. Default EventMaps.
	Form EventForm
	// ReplayWithoutTopic leaves the topic out of replayed messages, as vLLM did before 0.26 and SGLang does.
	ReplayWithoutTopic bool
	// FirstSeq is the number of the first batch. Default 0.
	FirstSeq uint64
	// Delay lets events come late by a random time up to this, in real time, after what they are about.
	Delay time.Duration
	// NoSources answers 404 to GET /kv_event_sources, as engines without it do.
	NoSources bool
	// Fault is one of the publisher's own, in effect from the start. See [Server.SetEventFault].
	Fault Fault
}

// EventForm is how an event is encoded.
type EventForm string

// The forms of events.
const (
	EventMaps   EventForm = "map"
	EventArrays EventForm = "array"
)

// The faults of the publisher, for [Server.SetEventFault]. Count is in batches, where it can be given; with several ranks
// they are counted together.
const (
	// Gap keeps batches from subscribers; a replay has them.
	Gap FaultKind = "gap"
	// Lost loses batches for good; their numbers are used up.
	Lost FaultKind = "lost"
	// Duplicate publishes batches twice.
	Duplicate FaultKind = "duplicate"
	// Malformed publishes nonsense in place of batches, in replays too: the kinds of it come in turn.
	Malformed FaultKind = "malformed"
	// Late publishes batches [Fault.Delay] after what they are about.
	Late FaultKind = "late"
	// LossyReplay loses [Fault.Share] of the messages of replays, at random. The mark of their end may be among them.
	LossyReplay FaultKind = "lossy-replay"
	// NoEnd loses the mark of a replay's end.
	NoEnd FaultKind = "no-end"
	// Down refuses connections and cuts those there are. Meanwhile batches go only where a replay finds them.
	Down FaultKind = "down"
	// Restarted is a publisher that begins anew although the cache is what it was: connections are cut, the next batch
	// is number FirstSeq, and a replay has nothing. It happens once and is over.
	Restarted FaultKind = "restart"
	// The publisher knows Hang too: it accepts connections and says nothing, on those that there are neither. What is
	// published meanwhile comes when it is lifted.
)

var eventFaults = faultSet{
	counted: []FaultKind{Gap, Lost, Duplicate, Malformed, Late},
	lasting: []FaultKind{LossyReplay, NoEnd, Down, Restarted, Hang},
}

func (k *KVEvents) setDefaults() {
	setDefault(&k.BufferSteps, 10_000)
	setDefault(&k.HighWater, 100_000)
	setDefault(&k.Form, EventMaps)
}

func (k *KVEvents) validate() error {
	switch {
	case k.BufferSteps < 0:
		return fmt.Errorf("kv events buffer steps %d: must not be negative", k.BufferSteps)
	case k.HighWater < 0 || k.HighWater > 1e6:
		return fmt.Errorf("kv events high water %d: must be at most 1000000", k.HighWater)
	case k.Form != "" && k.Form != EventMaps && k.Form != EventArrays:
		return fmt.Errorf("kv events form %q: must be %s or %s", k.Form, EventMaps, EventArrays)
	case k.Delay < 0:
		return fmt.Errorf("kv events delay %v: must not be negative", k.Delay)
	case k.Endpoint == "" && k.ReplayEndpoint != "":
		return fmt.Errorf("kv events replay endpoint %q: there is no endpoint to replay", k.ReplayEndpoint)
	}
	for _, endpoint := range []string{k.Endpoint, k.ReplayEndpoint} {
		if _, _, err := parseEndpoint(endpoint); endpoint != "" && err != nil {
			return err
		}
	}
	return k.Fault.validate(eventFaults)
}

func parseEndpoint(endpoint string) (host string, port int, err error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	host, digits, err := net.SplitHostPort(address)
	if ok && err == nil {
		port, err = strconv.Atoi(digits)
	}
	if !ok || err != nil || port < 0 || port > math.MaxUint16 {
		return "", 0, fmt.Errorf("kv events endpoint %q: must be tcp://host:port", endpoint)
	}
	if host == "*" {
		host = ""
	}
	return host, port, nil
}

// listenInRow listens on n ports, one above the other, of which an endpoint names the first.
func listenInRow(endpoint string, n int) ([]net.Listener, error) {
	host, first, err := parseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	for attempt := 0; ; attempt++ {
		var listeners []net.Listener
		port := first
		for len(listeners) < n {
			l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
			if err != nil {
				for _, l := range listeners {
					l.Close()
				}
				if first != 0 || attempt == 100 {
					return nil, err
				}
				break
			}
			listeners = append(listeners, l)
			port = l.Addr().(*net.TCPAddr).Port + 1
		}
		if len(listeners) == n {
			return listeners, nil
		}
	}
}

// publisher sends a rank's batches to subscribers, and again to who asks for it.
type publisher struct {
	config *KVEvents
	faults *faults
	pub    *zmtpSocket
	replay *zmtpSocket // nil without replay

	mu          sync.Mutex
	seq         uint64 // of the next batch
	buffer      []batch
	subscribers map[*subscriber]struct{}
	queue       []lateBatch // by due
	timer       *time.Timer // sends what is due
	gate        chan struct{}
	hangs       bool // gate is not closed
}

type batch struct {
	seq     uint64
	payload []byte
}

type lateBatch struct {
	due     time.Time
	payload []byte
	fault   FaultKind
}

// subscriber is a connection to the PUB socket.
type subscriber struct {
	topics map[string]int // how often it has subscribed to each
	queue  chan []byte    // messages
}

// The most topics that a subscriber may subscribe to.
const maxTopics = 1000

func newPublisher(config *KVEvents, faults *faults) *publisher {
	p := &publisher{
		config:      config,
		faults:      faults,
		seq:         config.FirstSeq,
		subscribers: make(map[*subscriber]struct{}),
		gate:        make(chan struct{}),
	}
	close(p.gate)
	p.pub = &zmtpSocket{kind: "PUB", peers: []string{"SUB", "XSUB"}, greet: p.pass, serve: p.serveSubscriber}
	if config.ReplayEndpoint != "" {
		p.replay = &zmtpSocket{kind: "ROUTER", peers: []string{"DEALER", "REQ", "ROUTER"}, greet: p.pass, serve: p.serveReplays}
	}
	p.timer = time.AfterFunc(time.Hour, p.sendDue)
	p.timer.Stop()
	return p
}

func (p *publisher) sockets() []*zmtpSocket {
	if p.replay == nil {
		return []*zmtpSocket{p.pub}
	}
	return []*zmtpSocket{p.pub, p.replay}
}

// pass returns when the publisher does not hang.
func (p *publisher) pass() {
	p.mu.Lock()
	gate := p.gate
	p.mu.Unlock()
	<-gate
}

// publish takes a batch that has just happened.
func (p *publisher) publish(payload []byte) {
	fault := p.faults.take()
	delay := fault.Delay
	if fault.Kind != Late {
		delay = time.Duration(rand.Float64() * float64(p.config.Delay))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if delay == 0 && len(p.queue) == 0 {
		p.send(payload, fault.Kind)
		return
	}
	due := time.Now().Add(delay)
	if n := len(p.queue); n > 0 && due.Before(p.queue[n-1].due) {
		due = p.queue[n-1].due // batches never overtake each other
	}
	p.queue = append(p.queue, lateBatch{due, payload, fault.Kind})
	p.timer.Reset(time.Until(p.queue[0].due))
}

func (p *publisher) sendDue() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.queue) > 0 {
		if wait := time.Until(p.queue[0].due); wait > 0 {
			p.timer.Reset(wait)
			return
		}
		p.send(p.queue[0].payload, p.queue[0].fault)
		p.queue = p.queue[1:]
	}
}

// send gives a batch its number and sends it. The caller holds mu.
func (p *publisher) send(payload []byte, fault FaultKind) {
	b := batch{p.seq, payload}
	p.seq++
	switch fault {
	case Lost:
		return
	case Malformed:
		b.payload = malformed(b)
	}
	p.buffer = append(p.buffer, b)
	if len(p.buffer) > p.config.BufferSteps {
		p.buffer = p.buffer[1:]
	}
	if fault == Gap {
		return
	}
	message := appendMessage(nil, []byte(p.config.Topic), binary.BigEndian.AppendUint64(nil, b.seq), b.payload)
	for s := range p.subscribers {
		if !s.wants(p.config.Topic) {
			continue
		}
		s.offer(message)
		if fault == Duplicate {
			s.offer(message)
		}
	}
}

// malformed returns what a broken publisher may send.
func malformed(b batch) []byte {
	kinds := [][]byte{
		b.payload[:len(b.payload)/2],
		[]byte("this is no msgpack"),
		{0xdd, 0xff, 0xff, 0xff, 0xff},                               // an array of 2³²-1 elements
		{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdf, 0xff, 0xff, 0xff}, // a map in place of the events, cut off in its length
		[]byte(strings.Repeat("\x91", 1<<20)),                        // arrays in arrays
		{},
	}
	return kinds[b.seq%uint64(len(kinds))]
}

func (s *subscriber) wants(topic string) bool {
	for prefix := range s.topics {
		if strings.HasPrefix(topic, prefix) {
			return true
		}
	}
	return false
}

// offer queues a message, or loses it where the queue is full, as PUB sockets do.
func (s *subscriber) offer(message []byte) {
	select {
	case s.queue <- message:
	default:
	}
}

func (p *publisher) serveSubscriber(conn *zmtpConn) {
	s := &subscriber{topics: make(map[string]int), queue: make(chan []byte, p.config.HighWater)}
	p.mu.Lock()
	p.subscribers[s] = struct{}{}
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() {
		for message := range s.queue {
			p.pass()
			if _, err := conn.Write(message); err != nil {
				conn.Close() // the reader ends too
				return
			}
		}
	})
	for {
		parts, err := conn.readMessage()
		if err != nil || !p.subscribe(s, parts[0]) {
			break
		}
	}
	p.mu.Lock()
	delete(p.subscribers, s)
	close(s.queue)
	p.mu.Unlock()
	conn.Close()
	writer.Wait()
}

// subscribe does what a message of a subscriber says; false where it has too many topics.
func (p *publisher) subscribe(s *subscriber, message []byte) bool {
	if len(message) == 0 {
		return true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch topic := string(message[1:]); message[0] {
	case 1:
		s.topics[topic]++
	case 0:
		if s.topics[topic]--; s.topics[topic] <= 0 {
			delete(s.topics, topic)
		}
	}
	return len(s.topics) <= maxTopics
}

// serveReplays answers requests, an empty frame and a number each, with the batches from that number on.
func (p *publisher) serveReplays(conn *zmtpConn) {
	end := binary.BigEndian.AppendUint64(nil, math.MaxUint64)
	for {
		parts, err := conn.readMessage()
		if err != nil {
			return
		}
		if len(parts) != 2 || len(parts[1]) > 8 {
			continue // vLLM logs and does not answer (distributed/kv_events.py, _service_replay)
		}
		var number [8]byte
		copy(number[8-len(parts[1]):], parts[1])
		start := binary.BigEndian.Uint64(number[:])

		p.pass()
		fault := p.faults.current()
		lost := func() bool { return fault.Kind == LossyReplay && rand.Float64() < fault.Share }
		var out []byte
		for _, b := range p.since(start) {
			if !lost() {
				out = p.appendReply(out, p.config.Topic, binary.BigEndian.AppendUint64(nil, b.seq), b.payload)
			}
			if len(out) > 1<<16 {
				if _, err := conn.Write(out); err != nil {
					return
				}
				out = out[:0]
			}
		}
		if fault.Kind != NoEnd && !lost() {
			out = p.appendReply(out, "", end, nil)
		}
		if _, err := conn.Write(out); err != nil {
			return
		}
	}
}

func (p *publisher) appendReply(dst []byte, topic string, seq, payload []byte) []byte {
	if p.config.ReplayWithoutTopic {
		return appendMessage(dst, nil, seq, payload)
	}
	return appendMessage(dst, nil, []byte(topic), seq, payload)
}

// since returns the buffered batches from a number on.
func (p *publisher) since(seq uint64) []batch {
	p.mu.Lock()
	defer p.mu.Unlock()
	var batches []batch
	for _, b := range p.buffer {
		if b.seq >= seq {
			batches = append(batches, b)
		}
	}
	return batches
}

// apply makes a fault felt, or its end.
func (p *publisher) apply(kind FaultKind) error {
	p.mu.Lock()
	switch hang := kind == Hang; {
	case hang && !p.hangs:
		p.gate = make(chan struct{})
	case !hang && p.hangs:
		close(p.gate)
	}
	p.hangs = kind == Hang
	if kind == Restarted {
		p.seq, p.buffer, p.queue = p.config.FirstSeq, nil, nil
	}
	p.mu.Unlock()
	var errs []error
	for _, z := range p.sockets() {
		if kind == Down || kind == Restarted {
			z.close()
		}
		if kind != Down {
			errs = append(errs, z.reopen())
		}
	}
	return errors.Join(errs...)
}

// close ends the publisher and waits for all that it has started.
func (p *publisher) close() {
	for _, z := range p.sockets() {
		z.close()
	}
	p.mu.Lock()
	p.timer.Stop()
	p.queue = nil
	if p.hangs {
		p.hangs = false
		close(p.gate)
	}
	p.mu.Unlock()
	for _, z := range p.sockets() {
		z.handlers.Wait()
	}
}

// source is what /kv_event_sources says of a publisher.
func (p *publisher) source() object {
	var replay any
	if p.replay != nil {
		replay = endpoint("*", p.replay)
	}
	return obj("enable_kv_cache_events", true, "publisher", "zmq", "endpoint", endpoint("*", p.pub),
		"replay_endpoint", replay, "buffer_steps", p.config.BufferSteps, "hwm", p.config.HighWater, "max_queue_size", 100_000,
		"topic", p.config.Topic)
}

// SetEventFault puts a fault of the publisher into effect, beside the other faults and in place of the publisher's last.
func (s *Server) SetEventFault(f Fault) error { return s.eventFaults.set(f) }

// EventFault returns the publisher's fault in effect.
func (s *Server) EventFault() Fault { return s.eventFaults.current() }

// EventEndpoints returns where a rank publishes its events and replays them, such as "tcp://127.0.0.1:5557"; "" is
// nowhere.
func (s *Server) EventEndpoints(rank int) (pub, replay string) {
	p := s.ranks[rank].publisher
	if p == nil {
		return "", ""
	}
	if p.replay != nil {
		replay = endpoint("", p.replay)
	}
	return endpoint("", p.pub), replay
}

// endpoint names where a socket listens. host stands for its host; "" is one by which this machine reaches it.
func endpoint(host string, z *zmtpSocket) string {
	bound, port, err := net.SplitHostPort(z.address())
	if err != nil {
		return ""
	}
	if host == "" && net.ParseIP(bound).IsUnspecified() {
		host = "127.0.0.1"
	}
	return "tcp://" + net.JoinHostPort(cmp.Or(host, bound), port)
}

// applyToPublishers makes a fault of theirs felt.
func (s *Server) applyToPublishers(kind FaultKind) error {
	var errs []error
	for _, r := range s.ranks {
		if r.publisher != nil {
			errs = append(errs, r.publisher.apply(kind))
		}
	}
	return errors.Join(errs...)
}

// startPublishers binds the sockets of all ranks.
func (s *Server) startPublishers() error {
	k := &s.cfg.KVEvents
	if k.Endpoint == "" {
		return nil
	}
	pubs, err := listenInRow(k.Endpoint, len(s.ranks))
	if err != nil {
		return err
	}
	var replays []net.Listener
	if k.ReplayEndpoint != "" {
		if replays, err = listenInRow(k.ReplayEndpoint, len(s.ranks)); err != nil {
			for _, l := range pubs {
				l.Close()
			}
			return err
		}
	}
	for i, r := range s.ranks {
		r.publisher.pub.open(pubs[i])
		if replays != nil {
			r.publisher.replay.open(replays[i])
		}
	}
	return s.eventFaults.set(k.Fault)
}
