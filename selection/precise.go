package selection

// PreciseCacheAware sends a request to the replica whose engine says that it holds the longest part of the prompt, unless that replica has clearly more to
// do than the others; otherwise to the least loaded one. Less than 1/16 of the prompt, such as the words that every chat begins with, is nothing. A replica
// of which nothing is known is neither drawn to nor avoided.
//
// A cache that evicts holds what was asked for most lately. Where all do, and none holds anything of the prompt, it goes where it, or what it continues, was sent
// before: such habits leave each of them less to hold. But where one evicts that holds less than half of the prompt, and another one has hardly anything
// to store, the other one is taken: a miss where blocks are evicted costs more than its own time, and all prompts that begin alike would go on to fill the
// one cache that had the first of them.
type PreciseCacheAware struct {
	Loads    *Loads
	Prefixes *Prefixes

	// When a holder is overloaded: see [CacheAware].
	OverloadMargin int
	OverloadRatio  float64

	// Unobserved says that nobody calls [Lease.FirstByte].
	Unobserved bool
}

// leastShare is the least share of a prompt that counts.
const leastShare = 1. / 16

// Pick implements [Strategy].
func (s *PreciseCacheAware) Pick(req *Request, candidates []Candidate, lease *Lease) (Decision, bool) {
	if req.Residency == nil {
		return byLoad(s.Loads, req, candidates, lease, ReasonNoTokens)
	}
	s.Prefixes.mu.Lock()
	defer s.Prefixes.mu.Unlock()
	var views []view
	if req.counted() > 0 {
		views = s.Prefixes.look(req, candidates)
	} else {
		req.Residency.Refresh()
	}
	d, ok := s.choose(req, candidates, views, lease)
	switch {
	case !ok:
	case views == nil:
		req.Residency.Expect(d.Index)
	default:
		s.Prefixes.record(req, candidates, views, d.Index, lease)
	}
	return d, ok
}

// choose picks and reserves. views is nil where the request has no text. The caller holds the lock of the prefixes.
func (s *PreciseCacheAware) choose(req *Request, candidates []Candidate, views []view, lease *Lease) (Decision, bool) {
	s.Loads.mu.Lock()
	defer s.Loads.mu.Unlock()
	f := fillings{residency: req.Residency, candidates: candidates}
	for i := range candidates {
		rate, _ := req.Residency.Pressure(i)
		f.fastest = max(f.fastest, rate)
	}
	idlest := leastLoaded(candidates, f.idler)
	if idlest < 0 {
		return Decision{}, false
	}
	idle := candidates[idlest].relative()
	busy := func(i int) bool { return overloaded(&candidates[i], idle, s.OverloadMargin, s.OverloadRatio) }

	d := Decision{Index: idlest, Reason: ReasonNoSignal}
	holder, other, usual, full := -1, -1, -1, true
	for i := range candidates {
		if candidates[i].full() {
			continue
		}
		share, known := req.Residency.Share(i)
		if known && d.Reason == ReasonNoSignal {
			d.Reason = ReasonCold
		}
		if share >= leastShare && (holder < 0 || f.better(i, holder, share-f.share(holder))) {
			holder = i
		}
		if busy(i) {
			continue
		}
		_, evicts := req.Residency.Pressure(i)
		full = full && evicts
		if f.rate(i) <= hardlyFilling && (other < 0 || f.better(i, other, share-f.share(other))) {
			other = i
		}
		if views != nil && (views[i].continues || 2*views[i].recorded >= req.counted()) &&
			(usual < 0 || f.better(i, usual, float64(views[i].recorded-views[usual].recorded))) {
			usual = i
		}
	}
	switch {
	case holder < 0 && full && usual >= 0 && other < 0:
		d.Index = usual
	case holder < 0:
	case busy(holder):
		d.Reason = ReasonOverloaded
	case other >= 0 && f.wastes(holder, other):
		d.Index = other
	default:
		d.Index = holder
	}
	d.Score = f.share(d.Index)
	if d.Reason == ReasonCold && d.Score >= leastShare {
		d.Reason = ReasonCache
	}
	s.Loads.take(&d, candidates, lease)
	s.Loads.queue(&d, req, candidates, int(d.Score*float64(req.counted())), s.Unobserved, lease)
	return d, true
}

// fillings is how fast the candidates fill their caches.
type fillings struct {
	residency  Residency
	candidates []Candidate
	fastest    float64
}

// hardlyFilling is the most, compared to the fastest, that a cache is filled that has hardly anything to do.
const hardlyFilling = 0.25

func (f *fillings) share(i int) float64 {
	share, _ := f.residency.Share(i)
	return share
}

// rate is compared to the fastest.
func (f *fillings) rate(i int) float64 {
	rate, _ := f.residency.Pressure(i)
	if f.fastest == 0 {
		return 1
	}
	return rate / f.fastest
}

// idler is negative when candidate i has hardly anything to store, and j has. Otherwise they take turns: of a burst of new prompts all would go where a
// little less was stored before.
func (f *fillings) idler(i, j int) float64 {
	if a, b := f.rate(i) <= hardlyFilling, f.rate(j) <= hardlyFilling; a != b {
		return f.rate(i) - f.rate(j)
	}
	return 0
}

// better says whether candidate i is to be taken before j, given by how much it is ahead.
func (f *fillings) better(i, j int, ahead float64) bool {
	return ahead > 0 || ahead == 0 && preferred(f.candidates, i, j, f.idler)
}

// wastes says whether the holder would evict, for what it misses of the prompt, more than the other one would have to compute beyond that.
func (f *fillings) wastes(holder, other int) bool {
	_, evicts := f.residency.Pressure(holder)
	misses := 1 - f.share(holder)
	return evicts && misses*(1+f.rate(holder)) > (1-f.share(other))*(1+f.rate(other))
}

var _ Strategy = (*PreciseCacheAware)(nil)
