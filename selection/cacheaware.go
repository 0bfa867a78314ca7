package selection

import (
	"math"
	"time"
)

// Defaults of [CacheAware].
const (
	DefaultThreshold      = 0.5
	DefaultOverloadMargin = 2
	DefaultOverloadRatio  = 1.5
)

// CacheAware sends a request to the replica that was sent the longest part of its prompt before, unless that replica has clearly more
// to do than the others; otherwise to the least loaded one.
type CacheAware struct {
	Loads    *Loads
	Prefixes *Prefixes

	// Threshold is the share of the prompt, in [0, 1], from which on a replica counts as its holder. A prompt that continues
	// a recorded one counts in any case: a long answer makes most of the next prompt new, and yet its whole past is cached.
	Threshold float64

	// Loads are taken for the weights. A holder is overloaded when its load is above the least load of all candidates + OverloadMargin and above that load × OverloadRatio.
	OverloadMargin int
	OverloadRatio  float64

	// Unobserved says that nobody calls [Lease.FirstByte].
	Unobserved bool
}

// Pick implements [Strategy].
func (s *CacheAware) Pick(req *Request, candidates []Candidate, lease *Lease) (Decision, bool) {
	return s.Prefixes.pick(s.Loads, req, candidates, lease, func(views []view) (Decision, bool) {
		return s.choose(req, candidates, views, lease)
	})
}

// tolerance is how many bytes of a prompt may be held more or less without a difference to the engine, which reuses whole blocks: 16 tokens, about 64 bytes,
// and no more than 1/64 of the prompt.
func tolerance(counted int) int { return min(64, counted/64) }

// choose picks and reserves. Holders whose shares differ by no more than tolerance bytes are equals, unless one has served the prompt before. The caller
// holds the lock of the prefixes.
func (s *CacheAware) choose(req *Request, candidates []Candidate, views []view, lease *Lease) (Decision, bool) {
	s.Loads.mu.Lock()
	defer s.Loads.mu.Unlock()

	counted := req.counted()
	reaches := func(v *view) bool { return float64(v.matched) >= s.Threshold*float64(counted) }
	clears := func(v *view) bool { return v.continues || v.slot != noSlot && reaches(v) }
	most, least, open := 0, 0.0, 0
	for i := range candidates {
		c := &candidates[i]
		if c.full() {
			continue
		}
		if load := c.relative(); open == 0 || load < least {
			least = load
		}
		open++
		if clears(&views[i]) {
			most = max(most, views[i].matched)
		}
	}
	if open == 0 {
		return Decision{}, false
	}
	fewerPrompts := func(i, j int) float64 { return s.Prefixes.fewer(candidates, views, i, j) }
	holder := -1
	for i := range candidates {
		v := &views[i]
		if candidates[i].full() || !clears(v) || v.matched < most-tolerance(counted) {
			continue
		}
		if holder < 0 {
			holder = i
			continue
		}
		h := &views[holder]
		switch {
		case v.continues != h.continues:
			if v.continues {
				holder = i
			}
		case v.continues && v.matched != h.matched:
			if v.matched > h.matched {
				holder = i
			}
		case preferred(candidates, i, holder, fewerPrompts):
			holder = i
		}
	}

	d := Decision{Index: holder, Reason: ReasonCache}
	switch {
	case holder < 0:
		d.Reason = ReasonCold
	case overloaded(&candidates[holder], least, s.OverloadMargin, s.OverloadRatio) &&
		!(views[holder].turn && !overloaded(&candidates[holder], leastRecent(candidates, s.Loads.clock()), s.OverloadMargin, s.OverloadRatio)):
		d.Reason = ReasonOverloaded
	case !reaches(&views[holder]):
		d.Reason = ReasonContinuation
	}
	if d.Reason == ReasonCold || d.Reason == ReasonOverloaded {
		d.Index = leastLoaded(candidates, func(i, j int) float64 {
			if ci, cj := clears(&views[i]), clears(&views[j]); ci != cj {
				if ci {
					return -1
				}
				return 1
			}
			return fewerPrompts(i, j)
		})
	}
	s.Loads.take(&d, candidates, lease)
	s.Loads.queue(&d, req, candidates, views[d.Index].matched, s.Unobserved, lease)
	return d, true
}

// overloaded says whether a holder should be spared, given the least load of all candidates. The caller holds the mutex of the loads.
func overloaded(holder *Candidate, least float64, margin int, ratio float64) bool {
	load := holder.relative()
	return load > least+float64(margin) && load > ratio*least
}

// leastRecent is the least load of all candidates over the last moments. A further turn is spared only against that: when many
// conversations get their answers at the same time, some are back before the others, and a replica without requests is not idle then. To
// move a conversation costs all of its past. The caller holds the mutex of the loads.
func leastRecent(candidates []Candidate, now time.Duration) float64 {
	least := math.Inf(1)
	for i := range candidates {
		if c := &candidates[i]; !c.full() {
			least = min(least, c.recent(now))
		}
	}
	return least
}

var _ Strategy = (*CacheAware)(nil)
