package rolter

import (
	"errors"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/rolter-ai/caddy-rolter/selection"
)

// The collectors are made once and registered with the registry of every configuration, so that counts go on over reloads. Labels come from
// the configuration and from closed lists, never from requests.
var (
	decisionsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "decisions_total",
		Help: "Attempts that were given a target, by the route's model (empty for lb_policy rolter), strategy and reason.",
	}, []string{"model", "strategy", "reason"})
	retriesTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "retries_total",
		Help: "Attempts beyond the first of their request, by the route's model.",
	}, []string{"model"})
	noPromptTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "no_prompt_total",
		Help: "Requests that were routed without a look at their prompt, by cause.",
	}, []string{"cause"})
	rejectedTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "rejected_total",
		Help: "Requests that were answered with an error by Rolter itself, by status.",
	}, []string{"status"})
	scrapeFailuresTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "scrape_failures_total",
		Help: "Failed attempts to read the metrics of an engine.",
	}, []string{"address"})
	badTokensTotal = prometheus.NewCounter(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "bad_token_headers_total",
		Help: "Requests whose header of token ids was dropped because it is malformed.",
	})
	lookupFailuresTotal = prometheus.NewCounter(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "lmcache_lookup_failures_total",
		Help: "Look-ups of a prompt in LMCache that failed, or were not made because others had.",
	})
	tokenizeSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "tokenize_seconds",
		Help:    "Time to find out the token ids of a prompt, by outcome.",
		Buckets: []float64{.0001, .001, .0025, .005, .01, .025, .05, .1, .25, 1},
	}, []string{"outcome"})
	predictionError = prometheus.NewHistogram(prometheus.HistogramOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "kv_prediction_error_tokens",
		Help:    "Tokens that an engine had cached beyond those that were predicted by its KV events.",
		Buckets: []float64{-8192, -1024, -128, -1, 0, 128, 1024, 8192},
	})
	egressRefusedTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "egress_refused_total",
		Help: "Connections that the egress policy refused, by what they were for.",
	}, []string{"purpose"})
	panicsTotal = prometheus.NewCounter(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "strategy_panics_total",
		Help: "Decisions that were made by load because the strategy failed.",
	})
)

func countNoPrompt(cause string) { noPromptTotal.WithLabelValues(cause).Inc() }
func countRejected(status int)   { rejectedTotal.WithLabelValues(strconv.Itoa(status)).Inc() }
func countLookupFailure()        { lookupFailuresTotal.Inc() }
func countBadTokens()            { badTokensTotal.Inc() }
func observePrediction(err int)  { predictionError.Observe(float64(err)) }
func observeTokens(outcome tokenOutcome, took time.Duration) {
	tokenizeSeconds.WithLabelValues(string(outcome)).Observe(took.Seconds())
}
func countPanic()                 { panicsTotal.Inc() }
func countRefused(purpose string) { egressRefusedTotal.WithLabelValues(purpose).Inc() }

// decisionCounters are the counters of one route, looked up once.
type decisionCounters struct {
	byReason map[selection.Reason]prometheus.Counter
	retries  prometheus.Counter
}

func newDecisionCounters(model, strategy string) *decisionCounters {
	c := &decisionCounters{byReason: make(map[selection.Reason]prometheus.Counter), retries: retriesTotal.WithLabelValues(model)}
	for _, reason := range selection.Reasons {
		c.byReason[reason] = decisionsTotal.WithLabelValues(model, strategy, string(reason))
	}
	return c
}

func (c *decisionCounters) count(reason selection.Reason, attempt int) {
	if counter := c.byReason[reason]; counter != nil {
		counter.Inc()
	}
	if attempt > 1 {
		c.retries.Inc()
	}
}

// stateCollector reads the shared state when it is scraped.
type stateCollector struct {
	inFlight, others, capacity, prompts, bytes *prometheus.Desc
	kvState, kvBlocks, kvBatches, kvGaps       *prometheus.Desc
	outerAvailable, outerOccupancy             *prometheus.Desc
	outerPolls, outerFailures                  *prometheus.Desc
}

var state = stateCollector{
	inFlight:       prometheus.NewDesc("caddy_rolter_requests_in_flight", "Requests in flight at a replica, as reserved by Rolter.", []string{"address"}, nil),
	others:         prometheus.NewDesc("caddy_rolter_requests_of_others", "Requests at a replica that did not come through this gateway, as its metrics tell.", []string{"address"}, nil),
	capacity:       prometheus.NewDesc("caddy_rolter_cache_capacity_tokens", "Tokens that a replica's cache has room for, as its metrics tell.", []string{"address"}, nil),
	prompts:        prometheus.NewDesc("caddy_rolter_recorded_prompts", "Prompts that are recorded for a replica.", []string{"model", "address", "upstream_model"}, nil),
	kvState:        prometheus.NewDesc("caddy_rolter_kv_stream_state", "State of the KV event stream of a replica or rank: 0 is down, 1 syncing, 2 exact, 3 partial.", []string{"address"}, nil),
	kvBlocks:       prometheus.NewDesc("caddy_rolter_kv_blocks", "KV blocks that a replica or rank holds, as its events tell.", []string{"address"}, nil),
	kvBatches:      prometheus.NewDesc("caddy_rolter_kv_batches_total", "Batches of KV events of a replica or rank, by what became of them.", []string{"address", "outcome"}, nil),
	kvGaps:         prometheus.NewDesc("caddy_rolter_kv_interruptions_total", "Interruptions of the KV event stream of a replica or rank, by kind.", []string{"address", "kind"}, nil),
	outerAvailable: prometheus.NewDesc("caddy_rolter_lmcache_available", "Whether a provider's LMCache works: 1 or 0; absent where it is not known.", []string{"provider", "endpoint", "instance"}, nil),
	outerOccupancy: prometheus.NewDesc("caddy_rolter_lmcache_occupancy", "How full a provider's LMCache is, from 0 to 1; absent where it is not known.", []string{"provider", "endpoint", "instance"}, nil),
	outerPolls:     prometheus.NewDesc("caddy_rolter_lmcache_polls_total", "Polls of an LMCache.", []string{"endpoint"}, nil),
	outerFailures:  prometheus.NewDesc("caddy_rolter_lmcache_failures_total", "Polls of an LMCache that failed, by cause.", []string{"endpoint", "cause"}, nil),
	bytes:          prometheus.NewDesc("caddy_rolter_recorded_bytes", "Memory of the record of prompts of a route (bounded by max_bytes).", []string{"model"}, nil),
}

// Describe implements [prometheus.Collector].
func (c stateCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.inFlight
	ch <- c.others
	ch <- c.capacity
	ch <- c.prompts
	ch <- c.bytes
	ch <- c.outerAvailable
	ch <- c.outerOccupancy
	ch <- c.outerPolls
	ch <- c.outerFailures
	ch <- c.kvState
	ch <- c.kvBlocks
	ch <- c.kvBatches
	ch <- c.kvGaps
}

// Collect implements [prometheus.Collector].
func (c stateCollector) Collect(ch chan<- prometheus.Metric) {
	for _, load := range loads.Snapshot() {
		ch <- prometheus.MustNewConstMetric(c.inFlight, prometheus.GaugeValue, float64(load.InFlight), load.Address)
		if capacity := engines.capacity(load.Address); capacity > 0 {
			ch <- prometheus.MustNewConstMetric(c.others, prometheus.GaugeValue, float64(load.Others), load.Address)
			ch <- prometheus.MustNewConstMetric(c.capacity, prometheus.GaugeValue, float64(capacity), load.Address)
		}
	}
	for _, rec := range records() {
		ch <- prometheus.MustNewConstMetric(c.bytes, prometheus.GaugeValue, float64(rec.Bytes), rec.Model)
		for _, replica := range rec.Replicas {
			ch <- prometheus.MustNewConstMetric(c.prompts, prometheus.GaugeValue, float64(replica.Prompts), rec.Model, replica.Address, replica.Model)
		}
	}
	caches, endpoints := outers.states()
	for _, o := range caches {
		if o.Available != nil {
			working := 0.0
			if *o.Available {
				working = 1
			}
			ch <- prometheus.MustNewConstMetric(c.outerAvailable, prometheus.GaugeValue, working, o.Provider, o.Endpoint, o.Instance)
		}
		if o.Occupancy != nil {
			ch <- prometheus.MustNewConstMetric(c.outerOccupancy, prometheus.GaugeValue, *o.Occupancy, o.Provider, o.Endpoint, o.Instance)
		}
	}
	for _, e := range endpoints {
		ch <- prometheus.MustNewConstMetric(c.outerPolls, prometheus.CounterValue, float64(e.polls), e.endpoint)
		for cause, n := range e.failures {
			ch <- prometheus.MustNewConstMetric(c.outerFailures, prometheus.CounterValue, float64(n), e.endpoint, string(cause))
		}
	}
	for _, s := range streams() {
		gauge := func(desc *prometheus.Desc, v float64) {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, s.Address)
		}
		counter := func(desc *prometheus.Desc, v uint64, label string) {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(v), s.Address, label)
		}
		gauge(c.kvState, float64(s.state))
		gauge(c.kvBlocks, float64(s.Blocks))
		counter(c.kvBatches, s.Batches, "applied")
		counter(c.kvBatches, s.Undecodable, "undecodable")
		counter(c.kvBatches, s.Duplicates, "duplicate")
		counter(c.kvGaps, s.Gaps, "gap")
		counter(c.kvGaps, s.Losses, "loss")
		counter(c.kvGaps, s.Restarts, "restart")
	}
}

// registerMetrics registers the collectors with the registry of the configuration.
func registerMetrics(ctx caddy.Context) error {
	registry := ctx.GetMetricsRegistry()
	for _, c := range []prometheus.Collector{decisionsTotal, retriesTotal, noPromptTotal, rejectedTotal, scrapeFailuresTotal, badTokensTotal, lookupFailuresTotal, tokenizeSeconds, predictionError, egressRefusedTotal, panicsTotal, state} {
		if err := registry.Register(c); err != nil && !errors.As(err, &prometheus.AlreadyRegisteredError{}) {
			return err
		}
	}
	return nil
}
