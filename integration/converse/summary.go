package converse

import (
	"cmp"
	"math"
	"slices"
)

// Summary condenses the results of one play. Its JSON is part of the demo's output.
type Summary struct {
	// Requests counts all requests, Errors those of them without a complete answer.
	Requests int `json:"requests"`
	Errors   int `json:"errors"`
	// PromptTokens and CachedTokens are sums over the complete answers.
	PromptTokens int `json:"prompt_tokens"`
	CachedTokens int `json:"cached_tokens"`
	// FirstToken is the time to first token of the complete answers.
	FirstToken Times `json:"ttft_s"`
	// ByReplica counts the complete answers by the name of the replica. Answers that do not say are "unknown".
	ByReplica map[string]int `json:"by_replica"`
	// ErrorTexts counts the errors by what they say.
	ErrorTexts map[string]int `json:"error_texts,omitempty"`
	// CachedReported says whether any answer said how many tokens were cached.
	CachedReported bool `json:"-"`
}

// Times are figures of a distribution, in seconds. Percentiles are by nearest rank.
type Times struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
}

// CachedShare is the share of the prompt tokens that were cached, from 0 to 1.
func (s Summary) CachedShare() float64 {
	return float64(s.CachedTokens) / float64(max(1, s.PromptTokens))
}

// Summarize condenses results.
func Summarize(results []Result) Summary {
	s := Summary{Requests: len(results), ByReplica: map[string]int{}, ErrorTexts: map[string]int{}}
	var times []float64
	for _, r := range results {
		if r.Err != nil {
			s.Errors++
			s.ErrorTexts[r.Err.Error()]++
			continue
		}
		s.PromptTokens += r.PromptTokens
		s.CachedTokens += r.CachedTokens
		s.CachedReported = s.CachedReported || r.CachedReported
		s.ByReplica[cmp.Or(r.Target, "unknown")]++
		times = append(times, r.FirstToken.Seconds())
	}
	if len(times) == 0 {
		return s
	}
	slices.Sort(times)
	for _, t := range times {
		s.FirstToken.Mean += t / float64(len(times))
	}
	s.FirstToken.P50, s.FirstToken.P95 = percentile(times, 0.50), percentile(times, 0.95)
	return s
}

// percentile is by nearest rank over sorted, which must not be empty.
func percentile(sorted []float64, q float64) float64 {
	return sorted[int(math.Ceil(q*float64(len(sorted))))-1]
}
