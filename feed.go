package rolter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/rolter-ai/caddy-rolter/egress"
	"github.com/rolter-ai/caddy-rolter/kvevents"
)

// The KV events of an engine are listened to in the background, by as many streams as the engine has data-parallel ranks. What is known of the engine
// outlives the configurations that say the same about it: a stream that is begun anew has missed what was stored before.

const (
	discoverTimeout  = 2 * time.Second
	aliveTimeout     = 500 * time.Millisecond
	discoverInterval = time.Minute // mean time between two questions that were answered
	firstDiscovery   = time.Second // mean time to the second try to ask an engine where it publishes; it doubles with each
)

// residency is what the engines of all configurations hold, as their KV events tell.
var residency = kvevents.NewIndex()

// feedSource is where the KV events of an engine are, as one configuration says.
type feedSource struct {
	identity string // of the provider
	base     string // URL of the engine's HTTP API, without /v1
	apiKey   string
	events   KVEvents
	policy   egress.Policy
	logger   *zap.Logger
	tokens   *tokenSource
	feed     *feed
}

// newFeedSource takes part in the feed of the provider's events. It contacts nobody.
func newFeedSource(p *Provider, policy egress.Policy, logger *zap.Logger) *feedSource {
	s := &feedSource{
		identity: p.identity(),
		base:     p.engineURL("").String(),
		apiKey:   p.APIKey,
		events:   *p.KVEvents,
		tokens:   p.tokens,
		policy:   policy,
		logger:   logger.With(zap.String("provider", p.Name)),
	}
	feeds.join(s)
	return s
}

// key is what must be the same for configurations to share a feed.
func (s *feedSource) key() string { return fmt.Sprintf("%s\x00%+v", s.identity, s.events) }

// feed is the KV events of one engine.
type feed struct {
	identity string
	events   KVEvents
	sources  []*feedSource              // of the configurations that name it; guarded by feedRegistry.mu
	current  atomic.Pointer[feedSource] // the latest of them that was started
	view     atomic.Pointer[[]*feedRank]
	limiter  *kvevents.ReplayLimiter
	again    chan struct{} // wakes the goroutine, to ask the engine once more

	capacity, block atomic.Int64 // tokens, of the cache and of a block; 0 is unknown

	cancel context.CancelFunc // nil until the feed is started; guarded by feedRegistry.mu
	done   chan struct{}

	// used by the goroutine
	adapters []string
	problems []string // that were said last
}

// feedRank is one rank of an engine.
type feedRank struct {
	endpoint endpoint

	// nil where the rank cannot be listened to
	residency *kvevents.Residency
	stream    *kvevents.Stream
}

// state says how far what is known of the rank can be relied on.
func (r *feedRank) state() kvevents.State {
	if r.stream == nil {
		return kvevents.Down
	}
	return r.stream.State()
}

// usable says whether it can.
func (r *feedRank) usable() bool {
	state := r.state()
	return state == kvevents.Exact || state == kvevents.Partial
}

// feedRegistry has the engines whose events are listened to.
type feedRegistry struct {
	mu    sync.Mutex
	byKey map[string]*feed
}

var feeds = feedRegistry{byKey: make(map[string]*feed)}

func (r *feedRegistry) join(s *feedSource) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.byKey[s.key()]
	if f == nil {
		f = &feed{identity: s.identity, events: s.events, limiter: kvevents.NewReplayLimiter(), again: make(chan struct{}, 1), done: make(chan struct{})}
		r.byKey[s.key()] = f
	}
	s.feed = f
	f.sources = append(f.sources, s)
}

// start begins to listen, or goes on.
func (r *feedRegistry) start(sources []*feedSource) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range sources {
		f := s.feed
		f.current.Store(s)
		if f.cancel == nil {
			var ctx context.Context
			ctx, f.cancel = context.WithCancel(context.Background())
			go f.run(ctx)
		}
	}
}

// leave gives back what join took. The last one ends the feed, and what was known of the engine is forgotten.
func (r *feedRegistry) leave(s *feedSource) {
	f := s.feed
	r.mu.Lock()
	f.sources = slices.DeleteFunc(f.sources, func(other *feedSource) bool { return other == s })
	last := len(f.sources) == 0
	if last {
		delete(r.byKey, s.key())
	} else if f.current.Load() == s {
		f.current.Store(f.sources[len(f.sources)-1])
	}
	cancel := f.cancel
	r.mu.Unlock()
	if last && cancel != nil {
		cancel()
		<-f.done
	}
}

// of lists the feeds of the engine with this identity: more than one where configurations say different things about it.
func (r *feedRegistry) of(identity string) (feeds []*feed) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.byKey {
		if f.identity == identity {
			feeds = append(feeds, f)
		}
	}
	return feeds
}

// all lists the feeds, those of one engine next to each other.
func (r *feedRegistry) all() []*feed {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]*feed, 0, len(r.byKey))
	for _, f := range r.byKey {
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b *feed) int { return strings.Compare(a.identity, b.identity) })
	return all
}

// ranks is how many ranks the engine with this identity has, as far as they are known.
func (r *feedRegistry) ranks(identity string) (n int) {
	for _, f := range r.of(identity) {
		n = max(n, len(f.ranks()))
	}
	return n
}

// restarted says that the engine with this identity has restarted, as its metrics tell.
func (r *feedRegistry) restarted(identity string) {
	for _, f := range r.of(identity) {
		for _, rank := range f.ranks() {
			if rank.stream != nil {
				rank.stream.Restarted()
			}
		}
		if s := f.current.Load(); s != nil {
			s.tokens.forget()
		}
		f.wake()
	}
}

// wake has the engine asked once more.
func (f *feed) wake() {
	select {
	case f.again <- struct{}{}:
	default:
	}
}

// resized says how many tokens there is room for in the cache of the engine with this identity, and in a block of it; 0 is unknown.
func (r *feedRegistry) resized(identity string, capacity int64, block int) {
	for _, f := range r.of(identity) {
		was, wasBlock := f.capacity.Swap(capacity), f.block.Swap(int64(block))
		if was != capacity || wasBlock != int64(block) {
			f.size()
		}
	}
}

// size tells what is known of the size of the cache to those who count its blocks.
func (f *feed) size() {
	capacity, block := f.capacity.Load(), f.block.Load()
	ranks := f.ranks()
	for _, rank := range ranks {
		if rank.residency != nil && block > 0 {
			rank.residency.SetBlockSize(int(block))
			rank.residency.SetCapacity(int(capacity / block / int64(len(ranks))))
		}
	}
}

// ranks is the engine's ranks, as far as they are known.
func (f *feed) ranks() []*feedRank {
	if f == nil {
		return nil
	}
	if view := f.view.Load(); view != nil {
		return *view
	}
	return nil
}

func (f *feed) run(ctx context.Context) {
	defer close(f.done)
	defer f.follow(nil)
	f.follow(f.endpoints(kvevents.Discovery{}))
	retry := firstDiscovery
	for {
		wait := discoverInterval
		if !f.discover(ctx) {
			wait, retry = min(retry, wait), min(2*retry, discoverInterval)
		} else {
			if retry > firstDiscovery { // it is back, and may have been started otherwise
				f.current.Load().tokens.forget()
			}
			retry = firstDiscovery
		}
		select {
		case <-ctx.Done():
			return
		case <-f.again:
		case <-time.After(wait*9/10 + rand.N(wait/5)):
		}
	}
}

// discover asks the engine where it publishes and which adapters it has, and follows. It returns whether the engine answered.
func (f *feed) discover(ctx context.Context) bool {
	s := f.current.Load()
	ctx, cancel := context.WithTimeout(ctx, discoverTimeout)
	defer cancel()
	found, err := kvevents.Discover(ctx, engineClient(ctx, s.policy), s.base, s.apiKey)
	if ctx.Err() == nil || err == nil {
		f.say(s.logger, found, err)
	}
	if err != nil {
		return false
	}
	if found.HasModels {
		f.adapters = found.Adapters
	}
	f.follow(f.endpoints(found))
	return true
}

// say logs what keeps the engine from being listened to, when it is another thing than before. It matters only where the engine is to tell.
func (f *feed) say(logger *zap.Logger, found kvevents.Discovery, err error) {
	problems := found.Problems
	if err != nil {
		problems = []string{err.Error()}
	}
	if f.events.Endpoint != eventsAuto || slices.Equal(problems, f.problems) {
		return
	}
	f.problems = problems
	for _, problem := range problems {
		logger.Warn("cannot listen to the KV events of the engine", zap.String("problem", problem))
	}
	if len(problems) == 0 {
		logger.Info("the engine tells where it publishes KV events")
	}
}

// endpoint is where one rank publishes.
type endpoint struct{ publisher, replay string }

// endpoints are those of the ranks as the configuration says, or the engine where that says nothing.
func (f *feed) endpoints(found kvevents.Discovery) (wanted []endpoint) {
	auto := f.events.Endpoint == eventsAuto
	for rank := 0; ; rank++ {
		var told kvevents.Rank
		if rank < len(found.Ranks) {
			told = found.Ranks[rank]
		}
		at := endpoint{told.Endpoint, told.Replay}
		if !auto {
			at.publisher = portAfter(f.events.Endpoint, rank)
			if !samePort(at.publisher, told.Endpoint) {
				at.replay = "" // of another publisher
			}
		}
		if f.events.Replay != "" {
			at.replay = portAfter(f.events.Replay, rank)
		}
		switch {
		case f.events.Ranks > 0 && rank >= f.events.Ranks,
			auto && rank >= len(found.Ranks),
			!auto && f.events.Ranks == 0 && rank > 0 && (rank >= len(found.Ranks) || !samePort(at.publisher, told.Endpoint)):
			return wanted
		}
		wanted = append(wanted, at)
	}
}

// portAfter is the endpoint with n added to its port.
func portAfter(endpoint string, n int) string {
	host, port, err := splitStream(endpoint)
	if err != nil {
		return ""
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port+n))
}

func samePort(a, b string) bool {
	_, p, errA := splitStream(a)
	_, q, errB := splitStream(b)
	return errA == nil && errB == nil && p == q
}

// follow makes the streams those that are wanted. A rank that cannot be listened to has none.
func (f *feed) follow(wanted []endpoint) {
	old := f.ranks()
	now := make([]*feedRank, len(wanted))
	kept := make(map[*feedRank]bool)
	for i, at := range wanted {
		if i < len(old) && old[i].endpoint == at {
			now[i] = old[i]
			kept[old[i]] = true
		} else {
			now[i] = f.listen(at)
		}
		if now[i].residency != nil {
			now[i].residency.SetAdapters(f.adapters)
		}
	}
	f.view.Store(&now)
	f.size()
	for _, r := range old {
		if !kept[r] {
			r.close()
		}
	}
}

// listen follows a rank.
func (f *feed) listen(at endpoint) *feedRank {
	r := &feedRank{endpoint: at}
	if at.publisher == "" {
		return r
	}
	logger := f.current.Load().logger
	r.residency = residency.Add(f.events.MaxBlocks)
	stream, err := kvevents.NewStream(kvevents.StreamConfig{
		Endpoint: at.publisher, Replay: at.replay, Topic: f.events.Topic,
		Dial:  f.dial,
		Alive: f.alive,
		Sink:  r.residency,
		Watch: func(n kvevents.Notice) {
			// It may have restarted, and otherwise than before.
			if n.What == kvevents.NoticeState && n.State == kvevents.Down || n.What == kvevents.NoticeRestart {
				f.wake()
			}
		},
		Limiter: f.limiter,
		Logger:  logger,
	})
	if err != nil {
		logger.Error("cannot listen to the KV events of the engine", zap.Error(err)) // the endpoint was checked before
		r.close()
		return &feedRank{endpoint: at}
	}
	r.stream = stream
	stream.Start()
	return r
}

func (r *feedRank) close() {
	if r.stream != nil {
		r.stream.Close()
	}
	if r.residency != nil {
		r.residency.Close()
	}
}

// dial connects as the latest configuration allows.
func (f *feed) dial(ctx context.Context, network, address string) (net.Conn, error) {
	dialer := dialerFor(f.current.Load().policy, purposeEvents)
	return dialer.DialContext(ctx, network, address)
}

// alive says whether the engine answers over HTTP.
func (f *feed) alive(ctx context.Context) bool {
	s := f.current.Load()
	ctx, cancel := context.WithTimeout(ctx, aliveTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.base+"/health", nil)
	if err != nil {
		return false
	}
	resp, err := engineClient(ctx, s.policy).Do(req)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode < 500
}
