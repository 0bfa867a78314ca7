package rolter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/zap"

	"github.com/rolter-ai/caddy-rolter/egress"
	"github.com/rolter-ai/caddy-rolter/selection"
)

// The metrics of engines are read in the background, where a provider says `metrics auto`. They tell how much the engine's cache has room for, which
// bounds what is recorded for it; how many requests it has, which may not all be ours; and when it started, for its cache was empty then.

const (
	scrapeTimeout = 2 * time.Second
	maxScrape     = 4 << 20 // bytes of an answer
	maxFigures    = 1 << 20 // bytes of the lines in it that are of interest; one line of vLLM's has more than 1 KiB
	foreignLasts  = 15 * time.Second
)

// scrapeInterval is the mean time between scrapes. Tests shorten it.
var scrapeInterval = 5 * time.Second

// source is where the metrics of an engine are, as one configuration says.
type source struct {
	identity string // of the provider
	url      string
	apiKey   string
	policy   egress.Policy
	logger   *zap.Logger
}

func newSource(p *Provider, policy egress.Policy, logger *zap.Logger) *source {
	return &source{p.identity(), p.engineURL("/metrics").String(), p.APIKey, policy, logger.With(zap.String("provider", p.Name))}
}

// telemetry has the engines whose metrics are read, by identity. An engine that is in the next configuration too is read on.
type telemetry struct {
	mu         sync.Mutex
	byIdentity map[string]*engine
}

var engines = telemetry{byIdentity: make(map[string]*engine)}

// engine is one engine whose metrics are read.
type engine struct {
	sources  []*source              // of the configurations that name it; guarded by telemetry.mu
	current  atomic.Pointer[source] // the latest of them
	load     *selection.Load
	capacity atomic.Int64 // tokens; 0 until it is known
	cancel   context.CancelFunc
	done     chan struct{}

	// used by the goroutine that reads
	failing bool
	starts  []float64 // the latest start times that were seen
}

// start begins to read, or goes on.
func (t *telemetry) start(sources []*source) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range sources {
		e := t.byIdentity[s.identity]
		if e == nil {
			ctx, cancel := context.WithCancel(context.Background())
			e = &engine{load: loads.Acquire(s.identity), cancel: cancel, done: make(chan struct{})}
			e.current.Store(s)
			t.byIdentity[s.identity] = e
			go e.run(ctx)
		}
		e.sources = append(e.sources, s)
		e.current.Store(s)
	}
}

// stop ends what start began, where no other configuration goes on with it. What was learned of the engine is forgotten with it. It may be called
// again.
func (t *telemetry) stop(sources []*source) {
	ended := t.leave(sources)
	for _, e := range ended {
		<-e.done
		scrapeFailuresTotal.DeleteLabelValues(e.current.Load().identity)
		e.load.SetForeign(0, 0)
		loads.Release(e.load)
	}
	if len(ended) > 0 {
		eachPool((*prefixPool).Resize)
	}
}

// leave takes the sources away and returns the engines that have none left.
func (t *telemetry) leave(sources []*source) (ended []*engine) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range sources {
		e := t.byIdentity[s.identity]
		if e == nil || !slices.Contains(e.sources, s) {
			continue
		}
		e.sources = slices.DeleteFunc(e.sources, func(other *source) bool { return other == s })
		if n := len(e.sources); n > 0 {
			e.current.Store(e.sources[n-1])
			continue
		}
		delete(t.byIdentity, s.identity)
		e.cancel()
		ended = append(ended, e)
	}
	return ended
}

// capacity is how many tokens there is room for in the cache of the engine with this identity; 0 is unknown.
func (t *telemetry) capacity(identity string) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.byIdentity[identity]; e != nil {
		return e.capacity.Load()
	}
	return 0
}

// eachPool calls f with the records of every route.
func eachPool(f func(*prefixPool)) {
	prefixPools.Range(func(_, value any) bool {
		if pool, ok := value.(*prefixPool); ok {
			f(pool)
		}
		return true
	})
}

func (e *engine) run(ctx context.Context) {
	defer close(e.done)
	for {
		e.read(ctx)
		select {
		case <-ctx.Done():
			return
		case <-time.After(scrapeInterval*9/10 + rand.N(scrapeInterval/5)):
		}
	}
}

// read scrapes once and passes on what is new.
func (e *engine) read(ctx context.Context) {
	// The engine counts at some moment in between, and a request that has just ended here may not have ended there. So the most that may be ours is
	// taken off: foreign load is rather missed than imagined.
	s := e.current.Load()
	ours := e.recent(s.identity)
	f, err := s.scrape(ctx)
	ours = max(ours, e.recent(s.identity))
	if ctx.Err() != nil {
		return
	}
	if e.failing != (err != nil) {
		e.failing = err != nil
		if e.failing {
			s.logger.Warn("cannot read the metrics of the engine", zap.String("url", s.url), zap.Error(err))
		} else {
			s.logger.Info("the metrics of the engine can be read again", zap.String("url", s.url))
		}
	}
	if err != nil {
		scrapeFailuresTotal.WithLabelValues(s.identity).Inc()
		return
	}
	if f.requests >= 0 {
		others := max(0, f.requests-ours)
		e.load.SetForeign(others, foreignLasts)
		// Those who do not name a rank have them take turns.
		eachRank(s.identity, func(load *selection.Load, ranks int) { load.SetForeign(others/ranks, foreignLasts) })
	}
	if f.capacity > 0 && e.capacity.Swap(f.capacity) != f.capacity {
		eachPool((*prefixPool).Resize)
	}
	feeds.resized(s.identity, f.capacity, f.block)
	if e.restarted(f.started) {
		s.logger.Info("the engine has restarted: nothing is taken to be in its cache")
		eachPool(func(pool *prefixPool) {
			pool.Forget(func(key string) bool { return identityOf(key).address == s.identity })
		})
		feeds.restarted(s.identity)
	}
}

// recent is the most requests that the engine may still count as ours.
func (e *engine) recent(identity string) int {
	n := e.load.Recent()
	eachRank(identity, func(load *selection.Load, _ int) { n += load.Recent() })
	return n
}

// eachRank calls f with the load of each rank of an engine that has several.
func eachRank(identity string, f func(load *selection.Load, ranks int)) {
	ranks := feeds.ranks(identity)
	if ranks < 2 {
		return
	}
	for rank := range ranks {
		load := loads.Acquire(placeOf(identity, strconv.Itoa(rank)))
		f(load, ranks)
		loads.Release(load)
	}
}

// restarted says whether a start time is new. Where several processes answer behind one address, their start times alternate; that is no restart.
func (e *engine) restarted(at float64) bool {
	if at == 0 || slices.ContainsFunc(e.starts, func(seen float64) bool { return at-seen < 0.001 && seen-at < 0.001 }) {
		return false
	}
	known := len(e.starts)
	e.starts = append(e.starts[max(0, known-15):], at)
	return known > 0
}

// figures are what is read from an engine's metrics.
type figures struct {
	requests int     // running and waiting; -1 is unknown
	capacity int64   // tokens that the cache has room for; 0 is unknown
	started  float64 // Unix seconds; 0 is unknown
	block    int     // tokens of a block; 0 is unknown
}

// engineClient asks an engine something, over a connection of its own: engines close idle ones after 5 s. It serves as long as ctx.
func engineClient(ctx context.Context, policy egress.Policy) *http.Client {
	dialer := dialerFor(policy, purposeEngine)
	return &http.Client{
		Transport: &http.Transport{
			// A transport goes on dialling when its request has ended, if it is not bound to it.
			DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
				return dialer.DialContext(ctx, network, address)
			},
			TLSHandshakeTimeout: scrapeTimeout,
			DisableKeepAlives:   true,
			DisableCompression:  true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// scrape fetches the metrics.
func (s *source) scrape(ctx context.Context) (f figures, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v) // in a parser that was given what a stranger wrote
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		return f, err
	}
	if s.apiKey != "" {
		req.Header.Set("Authorization", "Bearer "+s.apiKey)
	}
	resp, err := engineClient(ctx, s.policy).Do(req)
	if err != nil {
		return f, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return f, fmt.Errorf("status %d", resp.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxScrape+1))
	switch {
	case err != nil:
		return f, err
	case len(text) > maxScrape:
		return f, fmt.Errorf("answer of more than %d bytes", maxScrape)
	}
	return parseMetrics(text)
}

// The metrics that are read.
const (
	requestsRunning = "vllm:num_requests_running"
	requestsWaiting = "vllm:num_requests_waiting"
	cacheConfig     = "vllm:cache_config_info"
	processStart    = "process_start_time_seconds"
)

// parseMetrics reads the figures from Prometheus' text format. Those of several engines behind one address, which are the ranks of a data-parallel
// one, are added up. A number that cannot be meant is taken as unknown.
func parseMetrics(text []byte) (figures, error) {
	f := figures{requests: -1}
	// The other lines, which are nearly all, need not be understood.
	var lines bytes.Buffer
	for line := range bytes.Lines(text) {
		switch name := line[:max(0, bytes.IndexAny(line, "{ \t"))]; string(name) {
		case requestsRunning, requestsWaiting, cacheConfig, processStart:
			lines.Write(bytes.TrimRight(line, "\r\n"))
			lines.WriteByte('\n')
		}
	}
	switch {
	case lines.Len() == 0:
		return f, errors.New("none of vLLM's metrics in the answer")
	case lines.Len() > maxFigures:
		return f, errors.New("too many metrics in the answer")
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(&lines)
	if err != nil {
		return f, fmt.Errorf("%.200s", err) // it may quote a stranger at length
	}
	// By engine, so that what is said twice counts once.
	requests, capacities := make(map[string]float64), make(map[string]float64)
	for name, family := range families {
		for _, metric := range family.GetMetric() {
			labels := make(map[string]string)
			for _, pair := range metric.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			value := metric.GetUntyped().GetValue()
			switch name {
			case requestsRunning, requestsWaiting:
				if plausible(value) {
					requests[name+"\x00"+labels["engine"]+"\x00"+labels["model_name"]] = value
				}
			case cacheConfig:
				tokens, block := capacityOf(labels)
				if tokens > 0 {
					capacities[labels["engine"]] = tokens
				}
				f.block = max(f.block, int(block))
			case processStart:
				if value > 0 && value < 1e12 {
					f.started = value
				}
			}
		}
	}
	if len(requests) > 0 {
		f.requests = int(sum(requests))
	}
	f.capacity = int64(sum(capacities))
	return f, nil
}

// capacityOf is how many tokens the cache of one engine has room for, and a block of it. Blocks × their size is wrong for hybrid models, but vLLM 0.23 tells
// no more.
func capacityOf(labels map[string]string) (tokens, block float64) {
	number := func(label string) float64 {
		v, err := strconv.ParseFloat(labels[label], 64) // vLLM writes None for what it does not know
		if err != nil || !plausible(v) {
			return 0
		}
		return v
	}
	block = number("block_size")
	if tokens := number("kv_cache_size_tokens"); tokens > 0 {
		return tokens, block
	}
	return min(number("num_gpu_blocks")*block, 1e9), block
}

// plausible says whether v can be a number of requests, blocks or tokens.
func plausible(v float64) bool { return v >= 0 && v <= 1e9 }

func sum(of map[string]float64) (total float64) {
	for _, v := range of {
		total += v
	}
	return total
}
