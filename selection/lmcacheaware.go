package selection

// LMCacheAware sends a request where the cache behind the engine's own has the most room:
//
//	score = (1 − occupancy) + LoadWeight × (1 + least load) ÷ (1 + load)
//
// A cache that is down has no room. A candidate of whose cache nothing is known is taken to have the mean of the others, so that a controller that
// fails neither draws requests to its replica nor keeps them away. Where nothing is known of any, the least loaded candidate gets it. Loads are taken for the weights.
//
// This prefers cold caches, because a warm LMCache is nearly full all the time; the prompt plays no part.
type LMCacheAware struct{ Loads *Loads }

// LoadWeight is how much the load counts in [LMCacheAware], beside the room in the cache.
const LoadWeight = 0.25

// score is the room in the cache, from 0 to 1; unknown where nothing is known of it.
func (o Outer) score(unknown float64) float64 {
	switch {
	case !o.Known:
		return unknown
	case !o.Available:
		return 0
	}
	return 1 - o.Occupancy
}

// meanOuter is the mean score of the caches of which something is known, among the candidates that can take the request; ok is false where there is none. The
// caller holds the mutex of the loads.
func meanOuter(candidates []Candidate) (mean float64, ok bool) {
	known := 0
	for i := range candidates {
		if c := &candidates[i]; c.Outer.Known && !c.full() {
			mean += c.Outer.score(0)
			known++
		}
	}
	return mean / float64(max(known, 1)), known > 0
}

// Pick implements [Strategy].
func (s LMCacheAware) Pick(_ *Request, candidates []Candidate, lease *Lease) (Decision, bool) {
	s.Loads.mu.Lock()
	defer s.Loads.mu.Unlock()
	idlest := leastLoaded(candidates, nil)
	if idlest < 0 {
		return Decision{}, false
	}
	d := Decision{Index: idlest, Reason: ReasonNoSignal}
	if mean, ok := meanOuter(candidates); ok {
		d.Reason = ReasonPipeline // it is one of two scores
		least, highest := candidates[idlest].relative(), -1.0
		for i := range candidates {
			c := &candidates[i]
			if c.full() {
				continue
			}
			total := c.Outer.score(mean) + LoadWeight*(1+least)/(1+c.relative())
			if total > highest || total == highest && preferred(candidates, i, d.Index, nil) {
				d.Index, highest = i, total
			}
		}
		d.Score = candidates[d.Index].Outer.score(mean)
	}
	s.Loads.take(&d, candidates, lease)
	return d, true
}

var _ Strategy = LMCacheAware{}
