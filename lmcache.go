package rolter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/rolter-ai/caddy-rolter/egress"
	"github.com/rolter-ai/caddy-rolter/lmcache"
	"github.com/rolter-ai/caddy-rolter/selection"
)

// LMCache is where the LMCache of a replica tells how full it is, and whether it works: for `lmcache_aware`, and for ties in the other strategies.
type LMCache struct {
	// The URL that is polled. Where LMCache itself answers, its host and port are enough.
	Endpoint string `json:"endpoint,omitempty"`

	// What answers there. Default: `auto`, which tries the others once and remembers what it found.
	//
	// - `json`: `{"occupancy": 0..1, "cache_available": bool}`, at the URL itself
	// - `mp`: LMCache's multiprocess server
	// - `prometheus`: the metrics of the multiprocess server, or of LMCache's API server inside an engine
	// - `coordinator`: the coordinator of multiprocess servers
	// - `controller`: the controller of LMCaches inside engines. It tells whether one works, and not how full it is.
	Kind string `json:"kind,omitempty"`

	// How often it is polled: at least every `100ms`. Default: `2s`.
	Refresh caddy.Duration `json:"refresh,omitempty"`

	// After how long without an answer the value is unknown. Default: `10s`. It cannot be shorter than `refresh`.
	Stale caddy.Duration `json:"stale,omitempty"`

	// How long an answer may take; it must be below `refresh`. Default: `1s`, or half of `refresh` where that is shorter.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// The size of the cache in bytes, where LMCache tells only how much of it is in use.
	Capacity int64 `json:"capacity,omitempty"`

	// The name of the instance, where the URL is that of a controller or a coordinator.
	Instance string `json:"instance,omitempty"`

	// Whether the controller or coordinator is asked, for every request whose token ids are known, how much of its prompt the instance holds: within 50 ms,
	// and not for a while after it has failed. What it holds counts 0.8 times as much as what is in the engine's own cache, in the strategies that
	// go by KV events. `kind` and `instance` must be given. Default: `false`.
	Lookup bool `json:"lookup,omitempty"`

	// For look-ups at a coordinator: the model as LMCache knows it, which is its path where the engine was started with one.
	Model string `json:"model,omitempty"`

	// For look-ups at a coordinator: the tokens in one of LMCache's chunks. Default: `256`.
	Chunk int `json:"chunk,omitempty"`
}

// minRefresh is the shortest time between polls.
const minRefresh = 100 * time.Millisecond

// validate checks the settings. Errors name the key and the value.
func (l *LMCache) validate(policy egress.Policy) error {
	u, err := url.Parse(l.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Port() != "" && !validPort(u.Port()) {
		return fmt.Errorf("lmcache.endpoint %q: must be an http or https URL", redactedURL(l.Endpoint))
	}
	if err := checkEndpoint(policy, "lmcache.endpoint", redactedURL(l.Endpoint), u.Host); err != nil {
		return err
	}
	if l.Kind != "" && !slices.Contains(lmcache.Kinds, lmcache.Kind(l.Kind)) {
		return fmt.Errorf("lmcache.kind %q: unknown; there are %s", l.Kind, joined(lmcache.Kinds))
	}
	refresh := cmp.Or(time.Duration(l.Refresh), lmcache.DefaultRefresh)
	stale := cmp.Or(time.Duration(l.Stale), lmcache.DefaultStale)
	timeout := time.Duration(l.Timeout)
	switch {
	case refresh < minRefresh:
		return fmt.Errorf("lmcache.refresh %v: must be at least %v", refresh, minRefresh)
	case stale < 0:
		return fmt.Errorf("lmcache.stale %v: must not be negative", stale)
	case stale < refresh:
		return fmt.Errorf("lmcache.stale %v: must not be shorter than lmcache.refresh %v", stale, refresh)
	case timeout < 0:
		return fmt.Errorf("lmcache.timeout %v: must not be negative", timeout)
	case timeout >= refresh:
		return fmt.Errorf("lmcache.timeout %v: must be below lmcache.refresh %v", timeout, refresh)
	case l.Capacity < 0:
		return fmt.Errorf("lmcache.capacity %d: must not be negative", l.Capacity)
	case l.Kind == string(lmcache.Controller) && l.Instance == "":
		return fmt.Errorf("lmcache.kind %q: needs lmcache.instance", l.Kind)
	case l.Lookup && l.Kind != string(lmcache.Controller) && l.Kind != string(lmcache.Coordinator):
		return fmt.Errorf("lmcache.lookup: needs lmcache.kind %s or %s", lmcache.Controller, lmcache.Coordinator)
	case l.Lookup && l.Instance == "":
		return errors.New("lmcache.lookup: needs lmcache.instance")
	case l.Lookup && l.Kind == string(lmcache.Coordinator) && l.Model == "":
		return fmt.Errorf("lmcache.lookup: needs lmcache.model with kind %s", l.Kind)
	case l.Chunk < 0:
		return fmt.Errorf("lmcache.chunk %d: must not be negative", l.Chunk)
	}
	return nil
}

func joined[S ~string](names []S) string {
	text := make([]string, len(names))
	for i, name := range names {
		text[i] = string(name)
	}
	return strings.Join(text, ", ")
}

// outerSource is the LMCache of one provider, as one configuration says.
type outerSource struct {
	settings LMCache // without the instance: configurations and providers that say the same share a poller
	instance string
	provider string
	dialer   *egress.Dialer
	logger   *zap.Logger

	watch atomic.Pointer[lmcache.Watch] // while the configuration runs
}

func newOuterSource(p *Provider, policy egress.Policy, logger *zap.Logger) *outerSource {
	s := &outerSource{settings: *p.LMCache, instance: p.LMCache.Instance, provider: p.Name, dialer: dialerFor(policy, purposeLMCache), logger: logger}
	s.settings.Instance = ""
	s.settings.Lookup, s.settings.Model, s.settings.Chunk = false, "", 0 // which polls have nothing to do with
	return s
}

// lookupFor is who is asked what the provider's LMCache holds of prompts, or nil where nobody is. Providers that name the same one share it.
func (h *Handler) lookupFor(p *Provider, policy egress.Policy) (*lmcache.Lookup, error) {
	l := p.LMCache
	if !l.Lookup {
		return nil, nil
	}
	for _, other := range h.Providers {
		if o := other.LMCache; other.lookup != nil && o.Endpoint == l.Endpoint && o.Kind == l.Kind && o.Model == l.Model && o.Chunk == l.Chunk {
			return other.lookup, nil
		}
	}
	dialer := dialerFor(policy, purposeLMCache)
	return lmcache.NewLookup(lmcache.LookupConfig{
		URL: l.Endpoint, Kind: lmcache.Kind(l.Kind), Model: l.Model, Chunk: l.Chunk,
		DialContext: dialer.DialContext, Refusal: egress.ErrDenied,
	})
}

// state is what is known of the cache now. It may be called on nil.
func (s *outerSource) state() (o selection.Outer) {
	if s == nil {
		return o
	}
	if w := s.watch.Load(); w != nil {
		o.Known, o.Available, o.Occupancy = w.State()
	}
	return o
}

// outerRegistry has the LMCaches that are polled. One that is in the next configuration too is polled on.
type outerRegistry struct {
	mu         sync.Mutex
	bySettings map[LMCache]*outer
}

var outers = outerRegistry{bySettings: make(map[LMCache]*outer)}

// outer is one URL that is polled.
type outer struct {
	poller  *lmcache.Poller
	sources []*outerSource              // guarded by outerRegistry.mu
	current atomic.Pointer[outerSource] // the latest of them
}

// start begins to poll, or goes on.
func (r *outerRegistry) start(sources []*outerSource) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range sources {
		o := r.bySettings[s.settings]
		if o == nil {
			o = new(outer)
			o.current.Store(s)
			var err error
			if o.poller, err = lmcache.Start(o.config(&s.settings)); err != nil {
				return fmt.Errorf("provider %q: lmcache.endpoint %q: %w", s.provider, redactedURL(s.settings.Endpoint), err)
			}
			r.bySettings[s.settings] = o
		}
		o.sources = append(o.sources, s)
		o.current.Store(s)
		s.watch.Store(o.poller.Watch(s.instance))
	}
	return nil
}

// config is that of the poller. What may change with a reload is asked for when it is needed.
func (o *outer) config(l *LMCache) lmcache.Config {
	return lmcache.Config{
		URL:      l.Endpoint,
		Kind:     lmcache.Kind(l.Kind),
		Refresh:  time.Duration(l.Refresh),
		Stale:    time.Duration(l.Stale),
		Timeout:  time.Duration(l.Timeout),
		Capacity: l.Capacity,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return o.current.Load().dialer.DialContext(ctx, network, address)
		},
		Refusal: egress.ErrDenied,
		Logger: func() *zap.Logger {
			s := o.current.Load()
			return s.logger.With(zap.String("provider", s.provider))
		},
	}
}

// stop ends what start began, where no other configuration goes on with it. It may be called again.
func (r *outerRegistry) stop(sources []*outerSource) {
	for _, p := range r.leave(sources) {
		p.Close()
	}
}

// leave takes the sources away and returns the pollers that have none left.
func (r *outerRegistry) leave(sources []*outerSource) (ended []*lmcache.Poller) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range sources {
		w := s.watch.Swap(nil)
		if w == nil {
			continue
		}
		w.Close()
		o := r.bySettings[s.settings]
		o.sources = slices.DeleteFunc(o.sources, func(other *outerSource) bool { return other == s })
		if n := len(o.sources); n > 0 {
			o.current.Store(o.sources[n-1])
			continue
		}
		delete(r.bySettings, s.settings)
		ended = append(ended, o.poller)
	}
	return ended
}

// outerState is what is known of the LMCache of one provider.
type outerState struct {
	Provider  string   `json:"provider"`
	Endpoint  string   `json:"endpoint"`
	Instance  string   `json:"instance,omitempty"`
	Kind      string   `json:"kind,omitempty"`      // that was found
	Available *bool    `json:"available,omitempty"` // absent where it is not known
	Occupancy *float64 `json:"occupancy,omitempty"` // likewise
}

// endpointState is how the polls of one endpoint went.
type endpointState struct {
	endpoint string
	polls    uint64
	failures map[lmcache.Cause]uint64
}

// states reads what is known of all of them, sorted.
func (r *outerRegistry) states() (providers []outerState, endpoints []endpointState) {
	r.mu.Lock()
	defer r.mu.Unlock()
	providers = []outerState{}
	byEndpoint := make(map[string]endpointState)
	seen := make(map[outerState]bool)
	for _, o := range r.bySettings {
		endpoint := redactedURL(o.current.Load().settings.Endpoint)
		polls, failures := o.poller.Stats()
		e := byEndpoint[endpoint]
		e.endpoint, e.polls = endpoint, e.polls+polls
		if e.failures == nil {
			e.failures = make(map[lmcache.Cause]uint64)
		}
		for cause, n := range failures {
			e.failures[cause] += n
		}
		byEndpoint[endpoint] = e
		for _, s := range o.sources {
			state := outerState{Provider: s.provider, Endpoint: endpoint, Instance: s.instance}
			// While one configuration takes the place of another, both are there.
			if seen[state] {
				continue
			}
			seen[state] = true
			state.Kind = string(o.poller.Kind())
			if now := s.state(); now.Known || now.Available {
				state.Available = &now.Available
				if now.Known && now.Available {
					state.Occupancy = &now.Occupancy
				}
			}
			providers = append(providers, state)
		}
	}
	slices.SortFunc(providers, func(a, b outerState) int {
		return cmp.Or(cmp.Compare(a.Provider, b.Provider), cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Instance, b.Instance))
	})
	for _, e := range byEndpoint {
		endpoints = append(endpoints, e)
	}
	return providers, endpoints
}
