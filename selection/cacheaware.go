package selection

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

	// A holder is overloaded when its load is above the least load of all candidates + OverloadMargin and above that load × OverloadRatio.
	OverloadMargin int
	OverloadRatio  float64
}

// Pick implements [Strategy].
func (s *CacheAware) Pick(req *Request, candidates []Candidate, lease *Lease) (Decision, bool) {
	counted := len(req.Text) - req.Lead - req.Tail
	if counted <= 0 {
		d, ok := LeastLoad{s.Loads}.Pick(req, candidates, lease)
		if d.Reason == ReasonFallback {
			d.Reason = ReasonNoPrompt
		}
		return d, ok
	}

	s.Prefixes.mu.Lock()
	defer s.Prefixes.mu.Unlock()
	found := s.Prefixes.match(req.Text)
	held := func(i int) Match {
		if slot := candidates[i].slot(); slot != noSlot {
			return found[slot]
		}
		return Match{}
	}
	score := func(i int) float64 {
		return float64(min(max(held(i).Bytes-req.Lead, 0), counted)) / float64(counted)
	}
	clears := func(i int) bool { return score(i) >= s.Threshold || held(i).Continues }

	d, ok := s.choose(candidates, score, clears, lease)
	if !ok {
		return d, false
	}
	if slot := candidates[d.Index].slot(); slot != noSlot {
		lease.holdRecord(s.Prefixes, s.Prefixes.index.Insert(slot, req.Text))
	}
	return d, true
}

// choose picks and reserves. The caller holds the lock of the prefixes.
func (s *CacheAware) choose(candidates []Candidate, score func(int) float64, clears func(int) bool, lease *Lease) (Decision, bool) {
	s.Loads.mu.Lock()
	defer s.Loads.mu.Unlock()

	fewerPrompts := func(i, j int) int { return s.prompts(&candidates[i]) - s.prompts(&candidates[j]) }
	holder, least, open := -1, 0, 0
	for i := range candidates {
		c := &candidates[i]
		if c.full() {
			continue
		}
		if load := c.load(); open == 0 || load < least {
			least = load
		}
		open++
		if !clears(i) {
			continue
		}
		if holder < 0 || score(i) > score(holder) || score(i) == score(holder) && preferred(candidates, i, holder, fewerPrompts) {
			holder = i
		}
	}
	if open == 0 {
		return Decision{}, false
	}

	d := Decision{Index: holder, Reason: ReasonCache}
	switch {
	case holder < 0:
		d.Reason = ReasonCold
	case s.overloaded(candidates[holder].load(), least):
		d.Reason = ReasonOverloaded
	case score(holder) < s.Threshold:
		d.Reason = ReasonContinuation
	}
	if d.Reason == ReasonCold || d.Reason == ReasonOverloaded {
		d.Index = leastLoaded(candidates, func(i, j int) int {
			if ci, cj := clears(i), clears(j); ci != cj {
				if ci {
					return -1
				}
				return 1
			}
			return fewerPrompts(i, j)
		})
	}
	if len(candidates) == 1 {
		d.Reason = ReasonOnlyCandidate
	}
	d.Score, d.Load = score(d.Index), candidates[d.Index].load()
	s.Loads.reserve(&candidates[d.Index], lease)
	return d, true
}

// overloaded says whether a holder with this load should be spared, given the least load of all candidates.
func (s *CacheAware) overloaded(load, least int) bool {
	return load > least+s.OverloadMargin && float64(load) > s.OverloadRatio*float64(least)
}

// prompts is how much has been recorded for a candidate. Prompts are counted and not tree nodes, because how many nodes a prompt takes
// depends on where other prompts happen to branch off: the spread over idle replicas would be uneven.
func (s *CacheAware) prompts(c *Candidate) int {
	if slot := c.slot(); slot != noSlot {
		return s.Prefixes.index.Prompts(slot)
	}
	return 0
}

var _ Strategy = (*CacheAware)(nil)
