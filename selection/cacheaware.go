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
	views := s.look(req, candidates, counted)
	d, ok := s.choose(candidates, views, lease)
	if !ok {
		return d, false
	}
	chosen := views[d.Index]
	d.Score = float64(chosen.matched) / float64(counted)
	if chosen.slot != noSlot {
		lease.holdRecord(s.Prefixes, s.Prefixes.index.Insert(chosen.slot, req.Text))
	}
	return d, true
}

// view is what a candidate holds of a prompt.
type view struct {
	slot    int
	matched int  // counted bytes
	clears  bool // the candidate is a holder
	reaches bool // by the share alone
}

// look says what every candidate holds. The caller holds the lock of the prefixes, as long as it uses the result.
func (s *CacheAware) look(req *Request, candidates []Candidate, counted int) []view {
	found := s.Prefixes.match(req.Text)
	views := s.Prefixes.views[:0]
	for i := range candidates {
		v := view{slot: candidates[i].slot()}
		if v.slot != noSlot {
			m := found[v.slot]
			v.matched = min(max(m.Bytes-req.Lead, 0), counted)
			v.reaches = float64(v.matched) >= s.Threshold*float64(counted)
			v.clears = v.reaches || m.Continues
		}
		views = append(views, v)
	}
	s.Prefixes.views = views
	return views
}

// choose picks and reserves. The caller holds the lock of the prefixes.
func (s *CacheAware) choose(candidates []Candidate, views []view, lease *Lease) (Decision, bool) {
	s.Loads.mu.Lock()
	defer s.Loads.mu.Unlock()

	// Prompts are counted and not tree nodes, because how many nodes a prompt takes depends on where other prompts happen to branch
	// off: the spread over idle replicas would be uneven.
	fewerPrompts := func(i, j int) int { return s.prompts(views[i].slot) - s.prompts(views[j].slot) }
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
		if !views[i].clears {
			continue
		}
		if holder < 0 || views[i].matched > views[holder].matched ||
			views[i].matched == views[holder].matched && preferred(candidates, i, holder, fewerPrompts) {
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
	case !views[holder].reaches:
		d.Reason = ReasonContinuation
	}
	if d.Reason == ReasonCold || d.Reason == ReasonOverloaded {
		d.Index = leastLoaded(candidates, func(i, j int) int {
			if views[i].clears != views[j].clears {
				if views[i].clears {
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
	d.Load = candidates[d.Index].load()
	s.Loads.reserve(&candidates[d.Index], lease)
	return d, true
}

// overloaded says whether a holder with this load should be spared, given the least load of all candidates.
func (s *CacheAware) overloaded(load, least int) bool {
	return load > least+s.OverloadMargin && float64(load) > s.OverloadRatio*float64(least)
}

// prompts is how many prompts are recorded in a slot.
func (s *CacheAware) prompts(slot int) int {
	if slot == noSlot {
		return 0
	}
	return s.Prefixes.index.Prompts(slot)
}

var _ Strategy = (*CacheAware)(nil)
