package replica

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Server is a simulated replica behind HTTP. It is an [http.Handler] too, for use behind another listener; the faults
// Refuse and the closing of idle connections need its own.
type Server struct {
	cfg      Config
	names    []string // of the model
	adapters []string
	ranks    []*rank                                // what is in them is guarded by mu
	turn     atomic.Int64                           // the rank whose turn it is
	routes   map[string]map[string]http.HandlerFunc // path, method
	http     *http.Server
	born     time.Time
	// started is born as /metrics tells it, and later than that of every server that this one has replaced.
	started time.Time

	mu       sync.Mutex
	wake     *time.Timer // fires at the engine's next event
	calls    map[*call]struct{}
	handlers int // HTTP requests being handled
	changed  *sync.Cond
	draining bool
	received int // HTTP requests to generate
	rejected int // of these, by MaxQueued
	requests []Request

	faults   faults
	addr     net.Addr     // set by the first listen; guarded by faults.mu
	listener net.Listener // nil while connections are refused; guarded by faults.mu

	eventFaults faults

	closeOnce sync.Once
	closed    chan struct{}
}

// Request is a request as it was received.
type Request struct {
	Time   time.Time
	Method string
	Path   string // with the query
	Header http.Header
	Body   []byte
}

// Stats are the counters of a replica, of all its ranks together.
type Stats struct {
	Requests int // HTTP requests to generate, also those that were rejected or met a fault
	Rejected int // HTTP requests, by MaxQueued

	// Sequences, of which a request may have several.
	Running, Waiting, Finished, Aborted int

	PromptTokens    int // of sequences that have been prefilled
	CachedTokens    int // part of PromptTokens
	GeneratedTokens int // of sequences that have ended

	ResidentBlocks int // in the cache, copies included
	UsedBlocks     int // needed by running sequences
}

// startTick is the precision of process_start_time_seconds, which Prometheus's client computes from the kernel's clock
// ticks.
const startTick = 10 * time.Millisecond

// New returns a server that does not listen yet. A configuration that cannot be meant is reported by Start and Serve.
func New(cfg Config) *Server {
	cfg = cfg.withDefaults()
	now := time.Now()
	s := &Server{
		cfg:     cfg,
		names:   splitNames(cfg.Model),
		born:    now,
		started: now.Truncate(startTick),
		calls:   make(map[*call]struct{}),
		closed:  make(chan struct{}),
	}
	s.changed = sync.NewCond(&s.mu)
	if cfg.Adapters != "" {
		s.adapters = splitNames(cfg.Adapters)
	}
	s.faults.kinds, s.faults.apply = serverFaults, s.applyListening
	s.eventFaults.kinds, s.eventFaults.apply = eventFaults, s.applyToPublishers
	for i := range min(cfg.Ranks, maxRanks) {
		s.ranks = append(s.ranks, s.newRank(i))
	}
	s.wake = time.AfterFunc(time.Hour, s.tick)
	s.wake.Stop()
	s.routes = s.newRoutes()
	_ = s.SetFault(cfg.Fault) // a nonsensical one is reported by Start
	s.http = &http.Server{
		Handler:           s,
		IdleTimeout:       cfg.KeepAlive,
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          log.New(io.Discard, "", 0),
	}
	return s
}

// Start listens on addr, such as "127.0.0.1:0", and serves until Close or Shutdown.
func (s *Server) Start(addr string) error {
	if err := s.cfg.Validate(); err != nil {
		return err
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	return s.start(l)
}

// Serve serves on l until Close or Shutdown, and then returns [http.ErrServerClosed].
func (s *Server) Serve(l net.Listener) error {
	if err := s.cfg.Validate(); err != nil {
		return err
	}
	if err := s.start(l); err != nil {
		return err
	}
	<-s.closed
	return http.ErrServerClosed
}

func (s *Server) start(l net.Listener) error {
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	if s.addr != nil || s.isClosed() {
		l.Close()
		return errors.New("replica: started before")
	}
	if err := s.startPublishers(); err != nil {
		l.Close()
		return err
	}
	s.addr = l.Addr()
	s.listen(l)
	return s.applyListening(s.faults.fault.Kind)
}

func (s *Server) listen(l net.Listener) {
	s.listener = l
	go s.http.Serve(l)
}

// applyListening opens or closes the listener as the fault wants it.
func (s *Server) applyListening(fault FaultKind) error {
	refuse := fault == Refuse
	if s.addr == nil || s.isClosed() || refuse == (s.listener == nil) {
		return nil
	}
	s.http.SetKeepAlivesEnabled(!refuse) // false closes idle connections too
	if refuse {
		err := s.listener.Close()
		s.listener = nil
		return err
	}
	l, err := net.Listen("tcp", s.addr.String())
	if err != nil {
		return err
	}
	s.listen(l)
	return nil
}

// Addr returns the address that the server listens on, "" before it does.
func (s *Server) Addr() string {
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	if s.addr == nil {
		return ""
	}
	return s.addr.String()
}

// URL returns the base URL, without a slash at the end.
func (s *Server) URL() string { return "http://" + s.Addr() }

// Close ends the server at once, as a killed process does: all connections are cut, nothing is answered any more.
// It returns when no request is being handled any more.
func (s *Server) Close() error {
	var err error
	s.closeOnce.Do(func() {
		s.faults.mu.Lock()
		close(s.closed)
		s.faults.mu.Unlock()
		s.faults.end()
		s.eventFaults.end()
		if err = s.http.Close(); errors.Is(err, net.ErrClosed) { // of a listener that was closed before
			err = nil
		}
	})
	s.mu.Lock()
	for s.handlers > 0 {
		s.changed.Wait()
	}
	s.wake.Stop()
	s.mu.Unlock()
	for _, r := range s.ranks {
		if r.publisher != nil {
			r.publisher.close()
		}
	}
	return err
}

// Restart closes the server and starts another one like it, with an empty cache, on the same addresses. Only its
// process_start_time_seconds tells the two apart, so that differs however soon one follows the other; and its KV events,
// which begin anew. change, where given, changes the configuration, such as the number that they begin with.
func (s *Server) Restart(change ...func(*Config)) (*Server, error) {
	s.Close()
	cfg := s.cfg
	if cfg.KVEvents.Endpoint != "" {
		p := s.ranks[0].publisher
		cfg.KVEvents.Endpoint = "tcp://" + p.pub.address()
		if p.replay != nil {
			cfg.KVEvents.ReplayEndpoint = "tcp://" + p.replay.address()
		}
	}
	for _, f := range change {
		f(&cfg)
	}
	next := New(cfg)
	if !next.started.After(s.started) {
		next.started = s.started.Add(startTick)
	}
	return next, next.Start(s.Addr())
}

// Shutdown ends the server as SIGTERM ends vLLM: from now on requests to generate are answered 500 while /health is
// still 200; running streams may go on for ShutdownTimeout and then end with finish_reason "abort"; after
// ShutdownLinger connections are refused. When ctx is done the rest goes fast.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()

	patience, cancel := context.WithTimeout(ctx, s.cfg.ShutdownTimeout)
	defer cancel()
	s.waitFor(patience, func() bool { return len(s.calls) == 0 })
	s.mu.Lock()
	for c := range s.calls {
		s.abort(c)
	}
	s.mu.Unlock()

	linger, cancel := context.WithTimeout(ctx, s.cfg.ShutdownLinger)
	defer cancel()
	<-linger.Done()
	// What was aborted has long been written, unless its client does not read.
	ending, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.http.Shutdown(ending)
	return s.Close()
}

// waitFor waits until a condition on what mu guards holds, or ctx is done.
func (s *Server) waitFor(ctx context.Context, condition func() bool) {
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.changed.Broadcast()
	})
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for !condition() && ctx.Err() == nil {
		s.changed.Wait()
	}
}

func (s *Server) isClosed() bool {
	select {
	case <-s.closed:
		return true
	default:
		return false
	}
}

// Stats returns the counters.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	stats := Stats{Requests: s.received, Rejected: s.rejected}
	for _, r := range s.ranks {
		m := &r.metrics
		stats.Running += r.engine.Running()
		stats.Waiting += r.engine.Waiting()
		stats.Finished += m.finished["stop"] + m.finished["length"]
		stats.Aborted += m.finished["abort"]
		stats.PromptTokens += m.promptTokens
		stats.CachedTokens += m.cachedTokens
		stats.GeneratedTokens += m.generatedTokens
		stats.ResidentBlocks += r.engine.Cache().Len()
		stats.UsedBlocks += r.engine.UsedBlocks()
	}
	return stats
}

// Requests returns the last KeepRequests requests that came with a JSON body, well formed or not, oldest first.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

func (s *Server) remember(r *http.Request, body []byte) {
	if s.cfg.KeepRequests == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.requests) == s.cfg.KeepRequests {
		s.requests = s.requests[1:]
	}
	s.requests = append(s.requests, Request{
		Time: time.Now(), Method: r.Method, Path: r.URL.RequestURI(), Header: r.Header.Clone(), Body: body,
	})
}

// now is the time in the engine's world.
func (s *Server) now() time.Duration { return scale(time.Since(s.born), s.cfg.TimeScale) }

// wall turns a duration in the engine's world into one in ours.
func (s *Server) wall(d time.Duration) time.Duration { return scale(d, 1/s.cfg.TimeScale) }

// advance brings the engine up to date and sets the timer for its next event. The caller holds mu.
func (s *Server) advance() time.Duration {
	now := s.now()
	for _, r := range s.ranks {
		r.engine.Advance(now)
	}
	s.arm(now)
	return now
}

func (s *Server) arm(now time.Duration) {
	next, busy := time.Duration(0), false
	for _, r := range s.ranks {
		if at, ok := r.engine.Next(); ok && (!busy || at < next) {
			next, busy = at, true
		}
	}
	if busy {
		s.wake.Reset(s.wall(next - now))
	} else {
		s.wake.Stop()
	}
}

func (s *Server) tick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.isClosed() {
		s.advance()
	}
}

// abort ends the sequences of a call that have not finished. The caller holds mu.
func (s *Server) abort(c *call) {
	now := s.now()
	for _, q := range c.sequences {
		c.rank.engine.Abort(now, &q.Job)
	}
	s.arm(now)
}

var _ http.Handler = (*Server)(nil)
