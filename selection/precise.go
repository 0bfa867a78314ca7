package selection

import "sync"

// PreciseCacheAware sends a request to the replica whose engine says that it holds the longest part of the prompt, unless that replica has clearly more to
// do than the others; otherwise to the least loaded one. A replica of which nothing is known is neither drawn to nor avoided.
type PreciseCacheAware struct {
	Loads *Loads

	// When a holder is overloaded: see [CacheAware].
	OverloadMargin int
	OverloadRatio  float64

	// Unobserved says that nobody calls [Lease.FirstByte].
	Unobserved bool

	mu sync.Mutex // a pick sees what is expected of the one before
}

// Pick implements [Strategy].
func (s *PreciseCacheAware) Pick(req *Request, candidates []Candidate, lease *Lease) (Decision, bool) {
	if req.Residency == nil {
		d, ok := LeastLoad{s.Loads}.Pick(req, candidates, lease)
		if d.Reason == ReasonFallback {
			d.Reason = ReasonNoTokens
		}
		return d, ok
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	req.Residency.Refresh()
	d, ok := s.choose(req, candidates, lease)
	if ok {
		req.Residency.Expect(d.Index)
	}
	return d, ok
}

// choose picks and reserves.
func (s *PreciseCacheAware) choose(req *Request, candidates []Candidate, lease *Lease) (Decision, bool) {
	s.Loads.mu.Lock()
	defer s.Loads.mu.Unlock()
	idlest := leastLoaded(candidates, nil)
	if idlest < 0 {
		return Decision{}, false
	}
	holder, highest, reason := -1, 0.0, ReasonNoSignal
	for i := range candidates {
		if candidates[i].full() {
			continue
		}
		share, ok := req.Residency.Share(i)
		if !ok {
			continue
		}
		if reason == ReasonNoSignal {
			reason = ReasonCold
		}
		if share > highest || share > 0 && share == highest && preferred(candidates, i, holder, nil) {
			holder, highest, reason = i, share, ReasonCache
		}
	}
	d := Decision{Index: holder, Reason: reason}
	if holder >= 0 && overloaded(&candidates[holder], candidates[idlest].relative(), s.OverloadMargin, s.OverloadRatio) {
		d.Reason = ReasonOverloaded
	}
	if d.Reason != ReasonCache {
		d.Index = idlest
	}
	if len(candidates) == 1 {
		d.Reason = ReasonOnlyCandidate
	}
	c := &candidates[d.Index]
	d.Score, _ = req.Residency.Share(d.Index)
	d.Load = c.load()
	s.Loads.reserve(c, lease)
	if counted := float64(req.counted()); counted > 0 {
		d.Deadline = s.Loads.queue(c, int(counted*(1-d.Score)), req.Stream && !s.Unobserved, lease)
	}
	return d, true
}

var _ Strategy = (*PreciseCacheAware)(nil)
