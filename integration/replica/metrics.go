package replica

import (
	"cmp"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// metrics are what /metrics and Stats show of a rank. They are guarded by the server's mu.
type metrics struct {
	queriedTokens   int // prompt tokens looked up in the cache
	hitTokens       int
	promptTokens    int
	cachedTokens    int
	generatedTokens int
	finished        map[string]int // by finish_reason

	firstToken, queueTime, prefillTime, decodeTime, endToEnd histogram
}

// The buckets are those of vLLM 0.32, see testdata/metrics.txt.
var (
	firstTokenBuckets = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	requestBuckets    = []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
)

func newMetrics() metrics {
	return metrics{
		finished:    make(map[string]int),
		firstToken:  newHistogram(firstTokenBuckets),
		queueTime:   newHistogram(requestBuckets),
		prefillTime: newHistogram(requestBuckets),
		decodeTime:  newHistogram(requestBuckets),
		endToEnd:    newHistogram(requestBuckets),
	}
}

type histogram struct {
	bounds []float64
	counts []int // cumulative
	count  int
	sum    float64
}

func newHistogram(bounds []float64) histogram {
	return histogram{bounds: bounds, counts: make([]int, len(bounds))}
}

func (h *histogram) observe(d time.Duration) {
	h.count++
	h.sum += d.Seconds()
	for i, bound := range h.bounds {
		if d.Seconds() <= bound {
			h.counts[i]++
		}
	}
}

// sequenceChanged counts what the engine did with a sequence. The engine calls it, so the caller holds mu.
func (s *Server) sequenceChanged(r *rank, q *sequence) {
	m := &r.metrics
	switch q.Phase {
	case Prefilling:
		m.queriedTokens += q.PromptTokens
		m.hitTokens += q.CachedTokens
		m.queueTime.observe(s.wall(q.Started - q.Submitted))
	case Decoding:
		if lm := s.cfg.LMCache; lm != nil {
			lm.Store(s.cfg.LMCacheInstance, q.prompt, q.salt)
		}
		m.promptTokens += q.PromptTokens
		m.cachedTokens += q.CachedTokens
		m.prefillTime.observe(s.wall(q.FirstToken - q.Started))
		m.firstToken.observe(s.wall(q.FirstToken - q.Submitted))
	case Done, Aborted:
		m.generatedTokens += q.Generated
		m.finished[q.finishReason()]++
		if q.Phase == Done {
			m.decodeTime.observe(s.wall(q.Finished - q.FirstToken))
			m.endToEnd.observe(s.wall(q.Finished - q.Submitted))
		}
	}
}

func (s *Server) serveMetrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	var b strings.Builder
	s.mu.Lock()
	s.advance()
	s.writeMetrics(&b)
	s.mu.Unlock()
	io.WriteString(w, b.String())
}

func (s *Server) writeMetrics(w io.Writer) {
	head := func(name, kind, help string) {
		fmt.Fprintf(w, "# HELP %s %s\n# TYPE %[1]s %[3]s\n", name, help, kind)
	}
	labels := func(rank int, more string) string {
		return fmt.Sprintf("{engine=\"%d\",%smodel_name=%q}", rank, more, s.names[0])
	}
	gauge := func(name, help string, value func(r *rank) float64) {
		head(name, "gauge", help)
		for i, r := range s.ranks {
			fmt.Fprintf(w, "%s%s %s\n", name, labels(i, ""), float(value(r)))
		}
	}
	counter := func(name, help string, value func(m *metrics) int) {
		head(name, "counter", help)
		for i, r := range s.ranks {
			fmt.Fprintf(w, "%s%s %s\n", name, labels(i, ""), float(float64(value(&r.metrics))))
		}
	}
	histograms := func(name, help string, of func(m *metrics) *histogram) {
		head(name, "histogram", help)
		for i, r := range s.ranks {
			h := of(&r.metrics)
			for k, bound := range h.bounds {
				fmt.Fprintf(w, "%s_bucket%s %s\n", name, labels(i, fmt.Sprintf("le=%q,", float(bound))), float(float64(h.counts[k])))
			}
			fmt.Fprintf(w, "%s_bucket%s %s\n", name, labels(i, `le="+Inf",`), float(float64(h.count)))
			fmt.Fprintf(w, "%s_count%s %s\n%[1]s_sum%[2]s %[4]s\n", name, labels(i, ""), float(float64(h.count)), float(h.sum))
		}
	}

	head("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
	fmt.Fprintf(w, "process_start_time_seconds %s\n", float(float64(s.started.UnixMilli())/1e3))
	gauge("vllm:num_requests_running", "Number of requests in model execution batches.", func(r *rank) float64 { return float64(r.engine.Running()) })
	gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", func(r *rank) float64 { return float64(r.engine.Waiting()) })
	gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", func(r *rank) float64 {
		capacity := r.engine.Cache().Capacity()
		if capacity == 0 {
			return 0
		}
		return min(1, float64(r.engine.UsedBlocks())/float64(capacity))
	})
	counter("vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", func(m *metrics) int { return m.queriedTokens })
	counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", func(m *metrics) int { return m.hitTokens })
	counter("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", func(*metrics) int { return 0 })
	counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", func(m *metrics) int { return m.promptTokens })
	counter("vllm:prompt_tokens_cached_total", "Number of cached prompt tokens (local + external).", func(m *metrics) int { return m.cachedTokens })
	counter("vllm:generation_tokens_total", "Number of generation tokens processed.", func(m *metrics) int { return m.generatedTokens })
	head("vllm:request_success_total", "counter", "Count of successfully processed requests.")
	for i, r := range s.ranks {
		for _, reason := range []string{"stop", "length", "abort", "error", "repetition"} {
			fmt.Fprintf(w, "vllm:request_success_total%s %s\n", labels(i, fmt.Sprintf("finished_reason=%q,", reason)), float(float64(r.metrics.finished[reason])))
		}
	}
	head("vllm:admission_rejections_total", "counter", "Number of admission attempts rejected by a queue limit, by reason.")
	fmt.Fprintf(w, "vllm:admission_rejections_total{model_name=%q,reason=\"max_num_queued_reqs\"} %s\n", s.names[0], float(float64(s.rejected)))
	histograms("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", func(m *metrics) *histogram { return &m.firstToken })
	histograms("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", func(m *metrics) *histogram { return &m.endToEnd })
	histograms("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", func(m *metrics) *histogram { return &m.queueTime })
	histograms("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", func(m *metrics) *histogram { return &m.prefillTime })
	histograms("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", func(m *metrics) *histogram { return &m.decodeTime })
	head("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
	blocks, tokens := "None", "None" // vLLM's word for what it does not know; it always knows these
	if c := cmp.Or(s.cfg.ClaimedBlocks, s.cfg.CacheBlocks); c > 0 {
		blocks, tokens = strconv.Itoa(c), strconv.Itoa(c*s.cfg.BlockSize)
	}
	for i := range s.ranks {
		fmt.Fprintf(w, "vllm:cache_config_info{block_size=\"%d\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"%d\","+
			"kv_cache_size_tokens=%q,num_gpu_blocks=%q} 1.0\n", s.cfg.BlockSize, i, tokens, blocks)
	}
}

// float formats a number as Python's client does, which has at least one decimal.
func float(f float64) string {
	text := strconv.FormatFloat(f, 'g', -1, 64)
	if !strings.ContainsAny(text, ".eIN") {
		text += ".0"
	}
	return text
}
