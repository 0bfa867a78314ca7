// Package lmcache reads from LMCache how full the cache behind an engine is, and whether it works.
//
// It speaks the small contract `{"occupancy": 0..1, "cache_available": bool}`, and natively what LMCache 0.5 serves: the multiprocess server's status,
// Prometheus metrics (of the multiprocess server, and of the API server inside an engine), the controller and the coordinator.
//
// Answers are untrusted: they are bounded, redirects are not followed, and what cannot be meant is an error.
package lmcache

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// Kind is what answers at a URL.
type Kind string

// The kinds.
const (
	Auto        Kind = "auto"        // whichever of the others is found
	JSON        Kind = "json"        // the contract, at the URL itself
	MP          Kind = "mp"          // the multiprocess server: /status
	Prometheus  Kind = "prometheus"  // metrics of the multiprocess server or of the API server inside an engine: /metrics
	Controller  Kind = "controller"  // the controller of in-process engines: /health of an instance; it does not tell occupancy
	Coordinator Kind = "coordinator" // the coordinator of multiprocess servers: /instances/usage
)

// Kinds are all of them.
var Kinds = []Kind{Auto, JSON, MP, Prometheus, Controller, Coordinator}

// Defaults of [Config].
const (
	DefaultRefresh = 2 * time.Second
	DefaultStale   = 10 * time.Second
)

// DefaultTimeout is the default of [Config.Timeout].
func DefaultTimeout(refresh time.Duration) time.Duration { return min(time.Second, refresh/2) }

// Config is what is polled, and how. Zero durations are the defaults.
type Config struct {
	// URL is where it answers: http or https. But for [JSON] the path may be left out, or be that of one of its endpoints.
	URL  string
	Kind Kind // "" is Auto

	Refresh time.Duration // mean time between polls
	Stale   time.Duration // after which an answer counts no more
	Timeout time.Duration // of a request; below Refresh

	// Capacity is the size of the cache in bytes, for sources that tell only how much is used. 0 is unknown; an engine's API server tells it.
	Capacity int64

	// DialContext makes the connections; nil is the system's dialler. An error of it that wraps Refusal is counted as [Denied].
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
	Refusal     error

	// Logger tells where changes of state are logged, now; nil logs nothing.
	Logger func() *zap.Logger
}

// Cause is why a poll failed.
type Cause string

// The causes: a closed list, for metrics.
const (
	Denied          Cause = "denied"           // the dialler refused to contact it
	Unreachable     Cause = "unreachable"      // no connection, or it broke
	Timeout         Cause = "timeout"          // no answer, or not all of it, in time
	BadStatus       Cause = "status"           // an answer other than 200; a redirect is one
	TooLarge        Cause = "too_large"        // an answer that is too long
	Malformed       Cause = "malformed"        // an answer that is not of the kind
	NoValue         Cause = "no_value"         // an answer that does not tell occupancy (yet)
	UnknownInstance Cause = "unknown_instance" // the controller or coordinator does not know the instance
)

// Causes are all of them.
var Causes = []Cause{Denied, Unreachable, Timeout, BadStatus, TooLarge, Malformed, NoValue, UnknownInstance}

// failure is an error with its cause.
type failure struct {
	Cause
	err error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func failed(cause Cause, format string, args ...any) error {
	return &failure{cause, fmt.Errorf(format, args...)}
}

// causeOf is why an attempt failed.
func causeOf(err error) Cause {
	if f, ok := errors.AsType[*failure](err); ok {
		return f.Cause
	}
	return Malformed
}

// reprobeAfter is how long everything must have failed before it is asked anew what answers at the URL. Tests shorten it.
var reprobeAfter = time.Minute

// Poller asks one URL again and again, for any number of instances.
type Poller struct {
	cfg    Config
	client client
	base   *url.URL // without the path of an endpoint
	cancel context.CancelFunc
	done   chan struct{}
	wake   chan struct{} // another instance is watched

	polls    atomic.Uint64
	failures []atomic.Uint64 // by index in Causes
	kind     atomic.Value    // Kind that was found

	mu    sync.Mutex
	cells map[string]*cell // by instance

	// used by the goroutine that polls
	found      *endpoint
	understood time.Time // when an answer was, the last time
	logged     string    // what was wrong then; "" when nothing was
	capacity   float64   // bytes a worker, as the source told; 0 is unknown
	capacityAt time.Time
}

// cell is the latest of what is known of one instance.
type cell struct {
	watches int // guarded by Poller.mu
	latest  atomic.Pointer[reading]
}

// reading is what an answer told.
type reading struct {
	available bool
	occupancy float64 // in [0, 1]
	told      bool    // whether occupancy is known
	at        time.Time
}

// Start begins to poll, once there is something to watch. The error is about the URL.
func Start(cfg Config) (*Poller, error) {
	if cfg.Kind == "" {
		cfg.Kind = Auto
	}
	if cfg.Refresh <= 0 {
		cfg.Refresh = DefaultRefresh
	}
	if cfg.Stale <= 0 {
		cfg.Stale = DefaultStale
	}
	if cfg.Timeout <= 0 || cfg.Timeout >= cfg.Refresh {
		cfg.Timeout = DefaultTimeout(cfg.Refresh)
	}
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop
	}
	base, err := baseOf(cfg.URL)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Poller{
		cfg: cfg, client: client{cfg.DialContext, cfg.Refusal, cfg.Timeout}, base: base, cancel: cancel, done: make(chan struct{}), wake: make(chan struct{}, 1),
		failures: make([]atomic.Uint64, len(Causes)), cells: make(map[string]*cell), understood: time.Now(),
	}
	go p.run(ctx)
	return p, nil
}

// Close ends the polling. When it returns, no goroutine is left and nothing is known of any instance. It may be called again.
func (p *Poller) Close() {
	p.cancel()
	<-p.done
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.cells {
		c.latest.Store(nil)
	}
}

// Kind is what was found at the URL, or "".
func (p *Poller) Kind() Kind {
	kind, _ := p.kind.Load().(Kind)
	return kind
}

// Stats are the number of polls, and of those that failed, by cause. A poll for several instances fails once for each that it fails for.
func (p *Poller) Stats() (polls uint64, failures map[Cause]uint64) {
	failures = make(map[Cause]uint64, len(Causes))
	for i, cause := range Causes {
		failures[cause] = p.failures[i].Load()
	}
	return p.polls.Load(), failures
}

// Watch is what is known of one instance.
type Watch struct {
	poller   *Poller
	instance string
	cell     *cell
	once     sync.Once
}

// Watch asks for an instance too, until the watch is closed. The instance matters only where one source tells of many: a controller must be asked by name;
// of a coordinator "" is the only instance there is.
func (p *Poller) Watch(instance string) *Watch {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.cells[instance]
	if c == nil {
		c = new(cell)
		p.cells[instance] = c
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
	c.watches++
	return &Watch{poller: p, instance: instance, cell: c}
}

// Close ends the watch. It may be called again.
func (w *Watch) Close() {
	w.once.Do(func() {
		p := w.poller
		p.mu.Lock()
		defer p.mu.Unlock()
		if w.cell.watches--; w.cell.watches == 0 {
			delete(p.cells, w.instance)
			w.cell.latest.Store(nil)
		}
	})
}

// State is what is known of the instance now. Where known is false, occupancy is not to be looked at, and available says whether the cache is known to
// work. It does not block.
func (w *Watch) State() (known, available bool, occupancy float64) {
	r := w.cell.latest.Load()
	if r == nil || time.Since(r.at) >= w.poller.cfg.Stale {
		return false, false, 0
	}
	return r.told || !r.available, r.available, r.occupancy
}

func (p *Poller) run(ctx context.Context) {
	defer close(p.done)
	var next <-chan time.Time // nothing is asked before the first watch
	for {
		select {
		case <-ctx.Done():
			return
		case <-next:
		case <-p.wake:
		}
		wait := p.cfg.Refresh
		// What answers there is not LMCache, or not yet: to ask for everything that it could be is not to be done so often.
		if err := p.poll(ctx); p.cfg.Kind == Auto && p.found == nil && answered(err) {
			wait *= 5
		}
		next = time.After(wait*9/10 + rand.N(wait/5+1))
	}
}

// poll asks once and keeps what is told. The error is that of the whole poll.
func (p *Poller) poll(ctx context.Context) error {
	p.mu.Lock()
	instances := slices.Sorted(maps.Keys(p.cells))
	p.mu.Unlock()

	p.polls.Add(1)
	answers, err := p.ask(ctx, instances)
	if ctx.Err() != nil {
		return nil // what came after the end is dropped
	}
	var wrong trouble
	if err != nil {
		p.count(err)
		wrong.add("", err)
	} else {
		p.understood = time.Now()
		p.mu.Lock()
		for _, instance := range instances {
			a, c := answers(instance), p.cells[instance]
			if a.err != nil {
				p.count(a.err)
				wrong.add(instance, a.err)
			}
			switch {
			case c == nil: // nobody watches it any more
			case a.err == nil:
				c.latest.Store(&reading{a.available, a.occupancy, a.told, time.Now()})
			case causeOf(a.err) == UnknownInstance, causeOf(a.err) == NoValue:
				c.latest.Store(nil) // whoever says that it does not know is believed at once
			}
		}
		p.mu.Unlock()
	}
	p.log(wrong)
	if err != nil && p.found != nil && time.Since(p.understood) >= max(reprobeAfter, p.cfg.Stale) {
		p.found, p.understood = nil, time.Now()
	}
	return err
}

func (p *Poller) count(err error) { p.failures[slices.Index(Causes, causeOf(err))].Add(1) }

// trouble is what was wrong with a poll.
type trouble struct {
	causes string // by instance
	first  error
}

func (t *trouble) add(instance string, err error) {
	t.causes += fmt.Sprintf("%s %s;", instance, causeOf(err))
	if t.first == nil {
		t.first = err
	}
}

// log tells of a change of what is wrong.
func (p *Poller) log(wrong trouble) {
	logger := p.cfg.Logger().With(zap.String("url", p.base.Redacted()))
	switch {
	case wrong.causes == p.logged:
	case wrong.first == nil:
		logger.Info("the state of LMCache is known again")
	default:
		// It may quote a stranger at length.
		logger.Warn("the state of LMCache is not known", zap.String("cause", string(causeOf(wrong.first))), zap.String("error", fmt.Sprintf("%.300s", wrong.first)))
	}
	p.logged = wrong.causes
}

// ask asks what was found, or everything that it could be. The answers are by instance.
func (p *Poller) ask(ctx context.Context, instances []string) (func(instance string) answer, error) {
	var first error
	for i := range endpoints {
		e := &endpoints[i]
		switch {
		case p.found != nil && e != p.found && !(e.fallback && e.kind == p.found.kind),
			p.cfg.Kind != Auto && e.kind != p.cfg.Kind:
			continue
		}
		answers, err := e.ask(ctx, p, instances)
		if err == nil {
			if !e.fallback && e != p.found {
				p.found = e
				p.kind.Store(e.kind)
				p.cfg.Logger().Info("found LMCache", zap.String("url", p.base.Redacted()), zap.String("kind", string(e.kind)), zap.String("path", e.path))
			}
			return answers, nil
		}
		if first == nil {
			first = err
		}
		if !answered(err) {
			break // nor will it answer anything else
		}
	}
	return nil, first
}
