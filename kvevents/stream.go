package kvevents

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// State says how far what a [Stream] has passed on can be relied on.
type State int32

// The states of a stream. In the first two, what was passed on may be out of date and must not be used.
const (
	Down    State = iota // not connected
	Syncing              // connected; what was missed is being fetched
	Exact                // all that the engine holds is known, and nothing else
	Partial              // what is known is held; more may be
)

func (s State) String() string {
	switch s {
	case Down:
		return "down"
	case Syncing:
		return "syncing"
	case Exact:
		return "exact"
	case Partial:
		return "partial"
	}
	return fmt.Sprintf("State(%d)", int32(s))
}

// Sink is told what an engine's cache holds. It is called by one goroutine at a time.
type Sink interface {
	// Apply takes over the events of a batch. The batch may be used until it returns.
	Apply(*Batch)
	// Clear forgets everything.
	Clear()
}

// StreamConfig is what a stream follows: the publisher of one engine, or of one rank of it.
type StreamConfig struct {
	Endpoint string // of the publisher; see ParseEndpoint
	Replay   string // endpoint of its replay socket; "" if it has none
	Topic    string // what the topics of interest begin with; "" is all

	// Dial connects, and looks names up anew each time.
	Dial DialFunc

	// Alive tells whether the replica answers over HTTP: while it does, a publisher that is not there is tried at least once a second. It is asked about
	// once a second when there is no connection, and must heed its context. nil knows nothing.
	Alive func(ctx context.Context) bool

	Sink    Sink
	Watch   func(Notice)   // is told what happens, in order, by who calls the sink; may be nil
	Limiter *ReplayLimiter // shared by the ranks of a replica; nil if there are no others
	Logger  *zap.Logger    // nil is none
}

// Notice is something that a stream has met with, told to those who want to see more of it than what it comes to.
type Notice struct {
	What    NoticeKind
	State   State  // of NoticeState
	Seq     uint64 // number of the batch
	Payload []byte // of the batch
	Batch   *Batch // of NoticeBatch; it may be used until Watch returns
	Err     error  // why; may be nil
}

// NoticeKind is what a [Notice] is about.
type NoticeKind uint8

// The kinds of notices.
const (
	NoticeState         NoticeKind = iota // the state is another one
	NoticeBatch                           // a batch was applied
	NoticeNotUnderstood                   // a batch cannot be decoded; if it has no number either, it has no payload
	NoticeGap                             // batches ahead of this one are missing
	NoticeReplay                          // a replay begins, with this batch: those that are applied from now on come from it
	NoticeReplayed                        // it has ended; what is not there then cannot be had
	NoticeRestart                         // of the engine: what was known is forgotten
	NoticeLoss                            // what was known is given up, because what has become of it cannot be known
)

// Stats counts what a stream has met with since it was made.
type Stats struct {
	LastSeq uint64 // number of the last batch that was applied; 0 too if none was
	Batches uint64 // that were applied
	Events  uint64 // in them
	Bytes   uint64 // of payloads that came live

	SkippedEvents uint64 // of batches that were applied, but not understood or malformed
	Undecodable   uint64 // batches that were not understood at all, and messages that have no number
	Duplicates    uint64 // batches that had been applied before
	Gaps          uint64 // times that batches were missing
	Losses        uint64 // times that what was known was given up, because missing batches could not be had
	Restarts      uint64 // of the engine, that were noticed

	Replays        uint64
	ReplayRounds   uint64 // requests that these took
	ReplayFailures uint64
	Connects       uint64
	Stalls         uint64 // times that reading had to wait until something was applied
}

// tuning has the times that tests shorten.
type tuning struct {
	retry      time.Duration // the most that is waited before the second try to connect; it doubles with each
	retryMax   time.Duration // what it grows to
	retryAlive time.Duration // how often Alive is asked
	stable     time.Duration // after so long a connection counts as good

	replaySilence  time.Duration // ends a round
	replayAnswer   time.Duration // the first reply of a round may take so long: engines look after their replay sockets now and then
	replayTime     time.Duration // for all rounds
	replayInterval time.Duration // between replays, except the first on a connection
	replayAgain    time.Duration // a connection that has been silent for so long gets a second one
	replayOff      time.Duration // without replays, after maxReplayFailures of them
}

const maxReplayFailures = 3

var defaultTuning = tuning{
	retry:          100 * time.Millisecond,
	retryMax:       10 * time.Second,
	retryAlive:     time.Second,
	stable:         30 * time.Second,
	replaySilence:  400 * time.Millisecond,
	replayAnswer:   2 * time.Second,
	replayTime:     time.Minute,
	replayInterval: 5 * time.Second,
	replayAgain:    time.Second,
	replayOff:      time.Minute,
}

// decoder is [Decoder], for tests to replace.
type decoder interface {
	Decode(payload []byte) (*Batch, error)
}

// Stream follows one publisher until it is closed, through restarts of the engine and losses on the way.
//
// It subscribes first and then asks for a replay of what it has missed. The two go by different connections, so that the publisher may answer before it knows
// of the subscription: what it sends between is shown by a gap in what comes next or, if nothing does, by a second replay. A replay begins with the last batch that was
// applied: if that comes back unchanged, it is still the same process. Otherwise everything is forgotten and learned anew. Where there is no replay, an
// interruption means to forget too, for what an engine has removed meanwhile will never be known.
type Stream struct {
	cfg       StreamConfig
	publisher string // address
	replayer  string // address; "" if there is none
	tuning    tuning
	decoder   decoder
	logger    *zap.Logger

	ctx       context.Context // until Close
	cancel    context.CancelFunc
	running   sync.WaitGroup
	restarted chan struct{} // holds one notice
	state     atomic.Int32

	mu    sync.Mutex
	stats Stats

	// What follows belongs to the goroutine that runs.

	logged State // the last state that was logged; -1 is none
	warned bool  // of what is not understood, on this connection
	// position is the last batch of what is known. If that is nothing, the next batch may be any.
	position
	time   float64               // of that batch: what follows is not older; -Inf tells nothing
	prints [recentBatches]uint64 // fingerprints of the last batches, by number
	whole  bool                  // all that the engine holds is known

	replayAt  time.Time // no replay before
	noReplays time.Time // nor before then, since they have failed
	failures  int       // of replays in a row
}

const recentBatches = 64

// NewStream returns a stream that does nothing until it is started. It is an error if an endpoint is not one that can be connected to.
func NewStream(cfg StreamConfig) (*Stream, error) {
	s := &Stream{
		cfg:       cfg,
		tuning:    defaultTuning,
		decoder:   new(Decoder),
		restarted: make(chan struct{}, 1),
		logged:    -1,
		time:      math.Inf(-1),
	}
	var err error
	if s.publisher, err = addressOf(cfg.Endpoint); err != nil {
		return nil, err
	}
	if cfg.Replay != "" {
		if s.replayer, err = addressOf(cfg.Replay); err != nil {
			return nil, fmt.Errorf("replay: %w", err)
		}
	}
	if s.cfg.Limiter == nil {
		s.cfg.Limiter = NewReplayLimiter()
	}
	s.logger = cmp.Or(cfg.Logger, zap.NewNop()).With(zap.String("endpoint", cfg.Endpoint))
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s, nil
}

// Start begins to follow. It is called once.
func (s *Stream) Start() { s.running.Go(s.run) }

// Close ends what Start began and waits for it. The sink is not told.
func (s *Stream) Close() {
	s.cancel()
	s.running.Wait()
}

// State is how far what the sink was told can be relied on now.
func (s *Stream) State() State { return State(s.state.Load()) }

// Stats returns what has been counted.
func (s *Stream) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

// Restarted says that the engine has restarted, as one learns who reads the start time of its process: its cache was empty then. What is known is forgotten
// and learned anew.
func (s *Stream) Restarted() { signal(s.restarted) }

func (s *Stream) run() {
	defer s.state.Store(int32(Down))
	for attempt := 0; ; attempt++ {
		stood, err := s.follow()
		if s.ctx.Err() != nil {
			return
		}
		s.setState(Down, err)
		if s.replayer == "" {
			s.forget(false)
		}
		if stood >= s.tuning.stable {
			attempt = 0
		}
		s.pause(attempt)
	}
}

// pause waits before the next try to connect, the longer the more have failed, but not on when the replica answers: an engine listens for subscribers before
// it does for requests, so that by then it is there, and its first events are on their way.
func (s *Stream) pause(attempt int) {
	limit := s.tuning.retryMax
	if attempt < 16 {
		limit = min(limit, s.tuning.retry<<attempt)
	}
	for wait := rand.N(limit) + 1; wait > 0; wait -= s.tuning.retryAlive {
		select {
		case <-s.ctx.Done():
			return
		case <-s.restarted:
			s.forget(true)
			return
		case <-time.After(min(wait, s.tuning.retryAlive)):
		}
		if wait > s.tuning.retryAlive && s.alive() {
			return
		}
	}
}

func (s *Stream) alive() bool {
	if s.cfg.Alive == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.tuning.retryAlive)
	defer cancel()
	return s.cfg.Alive(ctx)
}

// setState changes the state and logs that once. why may be nil.
func (s *Stream) setState(state State, why error) {
	s.state.Store(int32(state))
	if s.logged == state {
		return
	}
	s.logged = state
	log := s.logger.Info
	if state == Down {
		log = s.logger.Warn
	}
	log("KV events of the engine", zap.Stringer("state", state), zap.Error(why))
	s.notify(Notice{What: NoticeState, State: state, Err: why})
}

func (s *Stream) notify(n Notice) {
	if s.cfg.Watch != nil {
		s.cfg.Watch(n)
	}
}

func (s *Stream) count(f func(*Stats)) {
	s.mu.Lock()
	f(&s.stats)
	s.mu.Unlock()
}

// forget gives up all that is known. restart says that the engine has lost it too.
func (s *Stream) forget(restart bool) {
	switch {
	case restart:
		s.count(func(n *Stats) { n.Restarts++ })
		s.notify(Notice{What: NoticeRestart})
	case s.known:
		s.count(func(n *Stats) { n.Losses++ })
		s.notify(Notice{What: NoticeLoss})
	}
	s.cfg.Sink.Clear()
	s.position, s.whole, s.time = position{}, false, math.Inf(-1)
}

// apply passes on a batch, which is the next one.
func (s *Stream) apply(m message, b *Batch) {
	s.cfg.Sink.Apply(b)
	s.position = position{known: true, seq: m.seq, print: fingerprint(m.payload)}
	s.prints[m.seq%recentBatches] = s.print
	s.time = b.Time
	s.count(func(n *Stats) {
		n.LastSeq = m.seq
		n.Batches++
		n.Events += uint64(len(b.Events))
		n.SkippedEvents += uint64(b.Skipped)
	})
	s.notify(Notice{What: NoticeBatch, Seq: m.seq, Payload: m.payload, Batch: b})
}

func (s *Stream) decode(m message) (b *Batch, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v) // in a parser that was given what a stranger wrote
		}
		if err != nil {
			s.notUnderstood(m, err)
		}
	}()
	return s.decoder.Decode(m.payload)
}

// notUnderstood counts what the engine has published in vain, and logs the first of it on each connection: an engine of a newer version may publish nothing
// else.
func (s *Stream) notUnderstood(m message, err error) {
	s.count(func(n *Stats) { n.Undecodable++ })
	s.notify(Notice{What: NoticeNotUnderstood, Seq: m.seq, Payload: m.payload, Err: err})
	if !s.warned {
		s.warned = true
		s.logger.Warn("KV events that are not understood", zap.Error(err))
	}
}

// session is one connection to the publisher.
type session struct {
	*Stream
	ctx  context.Context
	work sync.WaitGroup

	live *queue // what the publisher sends
	// seen is the number of the latest batch that was taken from it, since the last sync. What has not been seen and yet is known came by a replay.
	seen    uint64
	anySeen bool
	heard   bool     // something has come from it: it knows of the subscription
	sync    *syncing // nil unless the state is Syncing, or a second look is to be taken or under way
}

// syncing is a replay that is under way or will be.
type syncing struct {
	goal    uint64      // all batches below have been published: they must be fetched
	start   *time.Timer // when it may start
	fetched *queue      // what it has brought; nil until it has started
	cancel  context.CancelFunc
	again   bool // what is known is complete as far as can be told: the state stays what it is
	brought bool // a batch
	lossy   bool // one is missing
}

// follow connects and follows until the connection ends. stood is how long it was there.
func (s *Stream) follow() (stood time.Duration, err error) {
	ctx, cancel := context.WithCancel(s.ctx)
	c := &session{Stream: s, ctx: ctx, live: newQueue()}
	defer c.work.Wait()
	defer cancel()
	conn, err := subscribe(ctx, s.cfg.Dial, s.publisher, s.cfg.Topic)
	if err != nil {
		return 0, err
	}
	defer conn.close()
	begun := time.Now()
	s.count(func(n *Stats) { n.Connects++ })
	c.work.Go(func() { c.live.end(c.read(conn)) })
	s.warned, s.replayAt = false, begun
	c.resync(0, nil)
	err = c.run()
	return time.Since(begun), err
}

// read queues what comes until there is an error.
func (c *session) read(conn *conn) error {
	for {
		frames, err := conn.receive()
		if err != nil {
			return err
		}
		m := parse(frames)
		c.count(func(n *Stats) { n.Bytes += uint64(len(m.payload)) })
		if c.live.tryPut(m) {
			continue
		}
		c.count(func(n *Stats) { n.Stalls++ })
		if err := c.live.put(c.ctx, m); err != nil {
			return err
		}
	}
}

// atOnce is how many batches are applied before it is looked whether something else is to be done.
const atOnce = 256

func (c *session) run() error {
	for {
		var start <-chan time.Time
		var fetched <-chan struct{}
		switch {
		case c.sync == nil:
		case c.sync.fetched == nil:
			start = c.sync.start.C
		default:
			fetched = c.sync.fetched.ready
		}
		select {
		case <-c.ctx.Done():
			return c.ctx.Err()
		case <-c.restarted:
			c.replayAt = time.Now()
			c.forget(true)
			c.resync(0, errors.New("the engine has restarted"))
		case <-start:
			c.fetch()
		case <-fetched:
			c.takeFetched()
		case <-c.live.ready:
		}
		if c.listening() {
			c.takeLive()
		}
		// What is still queued is dropped when it would have to wait for a replay. The replay on the next connection brings it.
		if ended, err := c.live.over(); ended && (!c.listening() || c.live.empty()) {
			c.stopSync()
			return err
		}
	}
}

// listening says that what comes live need not wait for a replay.
func (c *session) listening() bool { return c.sync == nil || c.sync.again && c.sync.fetched == nil }

// resync makes sure of what is known and fetches what is missing below goal, and beyond it what there is. Where that is not possible, everything is forgotten,
// and whatever comes next is where knowledge begins.
func (c *session) resync(goal uint64, why error) {
	c.stopSync()
	c.anySeen, c.time = false, math.Inf(-1)
	if c.replayer == "" || time.Now().Before(c.noReplays) {
		c.forget(false)
		c.setState(Partial, why)
		return
	}
	c.setState(Syncing, why)
	c.sync = newSync(goal, time.Until(c.replayAt))
}

func newSync(goal uint64, in time.Duration) *syncing {
	return &syncing{goal: goal, start: time.NewTimer(in), cancel: func() {}}
}

func (c *session) stopSync() {
	if c.sync != nil {
		c.sync.start.Stop()
		c.sync.cancel()
		c.sync = nil
	}
}

// goal is from which number on everything comes without a replay; 0 is not known.
func (c *session) goal(y *syncing) uint64 {
	if m, ok := c.live.peek(); ok && m.kind == msgBatch {
		return max(y.goal, m.seq)
	}
	return y.goal
}

// fetch starts the replay.
func (c *session) fetch() {
	y := c.sync
	ctx, cancel := context.WithCancel(c.ctx)
	y.cancel, y.fetched = cancel, newQueue()
	r := &replay{
		dial:    c.cfg.Dial,
		address: c.replayer,
		tuning:  &c.tuning,
		from:    c.position,
		goal:    func() uint64 { return c.goal(y) },
		put:     func(m message) error { return y.fetched.put(ctx, m) },
	}
	c.notify(Notice{What: NoticeReplay, Seq: c.next()})
	c.work.Go(func() {
		release, err := c.cfg.Limiter.acquire(ctx)
		if err == nil {
			ctx, cancel := context.WithTimeout(ctx, c.tuning.replayTime)
			err = r.run(ctx)
			cancel()
			release()
		}
		c.count(func(n *Stats) {
			n.Replays++
			n.ReplayRounds += uint64(r.rounds)
			if err != nil && ctx.Err() == nil {
				n.ReplayFailures++
			}
		})
		y.fetched.end(err)
	})
}

// takeFetched applies what the replay has brought.
func (c *session) takeFetched() {
	y := c.sync
	for range atOnce {
		ended, err := y.fetched.over()
		m, ok := y.fetched.peek()
		if !ok {
			if ended {
				c.synced(err)
			}
			return
		}
		y.fetched.pop()
		switch m.kind {
		case msgReborn:
			c.forget(true)
		case msgLost:
			y.lossy = true
			c.forget(false)
		default:
			y.brought = true
			b, err := c.decode(m)
			if err != nil {
				y.lossy = true
				c.forget(false)
				continue
			}
			c.apply(m, b)
			c.whole = c.whole || m.kind == msgFirst
		}
	}
	signal(y.fetched.ready)
}

// synced ends a sync when its replay has ended.
func (c *session) synced(err error) {
	y := c.sync
	c.stopSync()
	c.notify(Notice{What: NoticeReplayed, Err: err})
	c.replayAt = time.Now().Add(jittered(c.tuning.replayInterval))
	if err != nil && y.again {
		return // there was no need
	}
	if err == nil {
		switch goal := c.goal(y); {
		case !c.known && !y.brought && y.goal == 0 && goal <= 1:
			c.whole = true // the engine had not published anything; simulators begin with 1
		case c.next() < goal:
			y.lossy = true
			c.forget(false)
		}
	}
	if err == nil && !y.lossy {
		c.failures = 0
	} else if c.failures++; c.failures >= maxReplayFailures {
		c.failures, c.noReplays = 0, time.Now().Add(c.tuning.replayOff)
	}
	if err != nil {
		c.resync(y.goal, err)
		return
	}
	if c.whole {
		c.setState(Exact, nil)
	} else {
		c.setState(Partial, nil)
	}
	if !c.heard && !y.again {
		c.sync = newSync(0, c.tuning.replayAgain)
		c.sync.again = true
	}
}

// takeLive applies what the publisher has sent, until a replay is needed.
func (c *session) takeLive() {
	for range atOnce {
		m, ok := c.live.peek()
		if !ok {
			return
		}
		c.stopSync() // which has not begun
		if c.take(m) {
			c.live.pop()
		}
		c.heard = true
		if !c.listening() {
			return
		}
	}
	signal(c.live.ready)
}

// take applies a message that came live. It returns false if the message must be looked at again, after a sync or because all was forgotten.
func (c *session) take(m message) bool {
	switch {
	case m.kind == msgBad || m.seq == endSeq:
		err := errors.New("message without a sequence number")
		c.notUnderstood(message{}, err)
		c.resync(c.next()+1, err) // it may have been the next batch
		return true
	case c.known && m.seq <= c.seq:
		if !c.isCopy(m) {
			c.resync(0, fmt.Errorf("batch %d came after %d", m.seq, c.seq))
			return false
		}
		c.seen, c.anySeen = m.seq, true
		c.count(func(n *Stats) { n.Duplicates++ })
		return true
	case c.known && m.seq > c.next(), !c.known && c.whole && m.seq > 1:
		c.count(func(n *Stats) { n.Gaps++ })
		err := fmt.Errorf("batches %d to %d are missing", c.next(), m.seq-1)
		c.notify(Notice{What: NoticeGap, Seq: m.seq, Err: err})
		if !c.heard {
			c.replayAt = time.Now() // the subscription came late: this is no sign of a connection that loses
		}
		c.resync(m.seq, err)
		return false
	}
	if !c.known && c.whole && m.seq == 1 {
		// Simulators begin with this one. Other engines have begun before the subscription was there.
		c.replayAt = time.Now()
		c.resync(2, errors.New("batch 0 may be missing"))
		return false
	}
	b, err := c.decode(m)
	if err != nil {
		c.resync(m.seq+1, fmt.Errorf("batch %d: %w", m.seq, err))
		return true
	}
	if b.Time < c.time {
		c.resync(m.seq, fmt.Errorf("batch %d is older than the one before", m.seq))
		return false
	}
	c.apply(m, b)
	c.seen, c.anySeen = m.seq, true
	return true
}

// isCopy tells whether a batch that is not newer than what is known is part of that. Otherwise it is of a process that has begun anew behind the same
// connection.
func (c *session) isCopy(m message) bool {
	covered := !c.anySeen || m.seq > c.seen // by a replay
	return covered || c.seq-m.seq < recentBatches && c.prints[m.seq%recentBatches] == fingerprint(m.payload)
}

// jittered adds up to a half.
func jittered(d time.Duration) time.Duration { return d + rand.N(d/2+1) }

// Interface guards
var (
	_ Sink    = (*Residency)(nil)
	_ decoder = (*Decoder)(nil)
)
