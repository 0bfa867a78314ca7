package lmcache

import (
	"bytes"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// The metrics that are read.
const (
	mpRatio   = "lmcache_mp_l1_usage_ratio"        // one series a tag and backend
	mpUsed    = "lmcache_mp_l1_memory_usage_bytes" // likewise
	inUsed    = "lmcache:local_cache_usage"        // bytes, one series a worker; none before the engine has worked
	inHealthy = "lmcache:lmcache_is_healthy"       // 1 or 0
)

// gauges are what the metrics tell.
type gauges struct {
	ratios    []float64
	used      float64 // bytes
	workers   int     // how many series used is the sum of
	inProcess bool    // the metrics are those of an engine
	unhealthy bool
}

// parseMetrics reads the gauges from Prometheus' text format. The other lines, which are nearly all, need not be understood.
func parseMetrics(text []byte) (g gauges, err error) {
	var lines bytes.Buffer
	for line := range bytes.Lines(text) {
		switch name := line[:max(0, bytes.IndexAny(line, "{ \t"))]; string(name) {
		case mpRatio, mpUsed, inUsed, inHealthy:
			lines.Write(bytes.TrimRight(line, "\r\n"))
			lines.WriteByte('\n')
		}
	}
	if lines.Len() == 0 {
		return g, failed(Malformed, "none of LMCache's metrics in the answer")
	}
	defer func() {
		if v := recover(); v != nil {
			err = failed(Malformed, "panic: %v", v) // in a parser that was given what a stranger wrote
		}
	}()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(&lines)
	if err != nil {
		return g, failed(Malformed, "%w", err)
	}
	for name, family := range families {
		for _, metric := range family.GetMetric() {
			value := metric.GetUntyped().GetValue()
			switch name {
			case mpRatio:
				if value >= 0 { // not so for NaN
					g.ratios = append(g.ratios, min(value, 1))
				}
			case mpUsed, inUsed:
				if value >= 0 {
					g.used += value
					g.workers++
				}
				g.inProcess = g.inProcess || name == inUsed
			case inHealthy:
				g.inProcess = true
				role := ""
				for _, pair := range metric.GetLabel() {
					if pair.GetName() == "role" {
						role = pair.GetValue()
					}
				}
				// A scheduler has no cache, and was seen to say 0 all the time.
				g.unhealthy = g.unhealthy || value == 0 && role != "scheduler"
			}
		}
	}
	return g, nil
}

// answer is what the gauges say of a cache of so many bytes; 0 is unknown. Where there are several tiers whose sizes are not known, it is the mean of them.
func (g *gauges) answer(capacity float64) answer {
	switch {
	case g.workers > 0 && g.unhealthy:
		return answer{}
	case g.workers > 0 && capacity > 0:
		return full(g.used, capacity)
	case len(g.ratios) > 0:
		sum := 0.0
		for _, ratio := range g.ratios {
			sum += ratio
		}
		return full(sum, float64(len(g.ratios)))
	case g.workers > 0:
		return answer{err: failed(NoValue, "only the bytes in use are told: the capacity must be configured")}
	}
	return answer{err: failed(NoValue, "the metrics tell no occupancy yet")}
}
