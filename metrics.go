package rolter

import (
	"errors"
	"strconv"

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
	panicsTotal = prometheus.NewCounter(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "rolter", Name: "strategy_panics_total",
		Help: "Decisions that were made by load because the strategy failed.",
	})
)

func countNoPrompt(cause string) { noPromptTotal.WithLabelValues(cause).Inc() }
func countRejected(status int)   { rejectedTotal.WithLabelValues(strconv.Itoa(status)).Inc() }
func countPanic()                { panicsTotal.Inc() }

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
type stateCollector struct{ inFlight, others, capacity, prompts, bytes *prometheus.Desc }

var state = stateCollector{
	inFlight: prometheus.NewDesc("caddy_rolter_requests_in_flight", "Requests in flight at a replica, as reserved by Rolter.", []string{"address"}, nil),
	others:   prometheus.NewDesc("caddy_rolter_requests_of_others", "Requests at a replica that did not come through this gateway, as its metrics tell.", []string{"address"}, nil),
	capacity: prometheus.NewDesc("caddy_rolter_cache_capacity_tokens", "Tokens that a replica's cache has room for, as its metrics tell.", []string{"address"}, nil),
	prompts:  prometheus.NewDesc("caddy_rolter_recorded_prompts", "Prompts that are recorded for a replica.", []string{"model", "address", "upstream_model"}, nil),
	bytes:    prometheus.NewDesc("caddy_rolter_recorded_bytes", "Memory of the record of prompts of a route (bounded by max_bytes).", []string{"model"}, nil),
}

// Describe implements [prometheus.Collector].
func (c stateCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.inFlight
	ch <- c.others
	ch <- c.capacity
	ch <- c.prompts
	ch <- c.bytes
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
}

// registerMetrics registers the collectors with the registry of the configuration.
func registerMetrics(ctx caddy.Context) error {
	registry := ctx.GetMetricsRegistry()
	for _, c := range []prometheus.Collector{decisionsTotal, retriesTotal, noPromptTotal, rejectedTotal, scrapeFailuresTotal, panicsTotal, state} {
		if err := registry.Register(c); err != nil && !errors.As(err, &prometheus.AlreadyRegisteredError{}) {
			return err
		}
	}
	return nil
}
