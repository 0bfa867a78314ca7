package selection

// LeastPrefill sends a request where the least prefill work stands between it and its first token:
//
//	cost = (wait × pending + (miss + overtaken) × uncached) ÷ (rate × weight) + delayed × uncached ÷ mean of (rate × weight)
//
// Uncached is the part of the prompt that the replica was not sent before, pending the same of the requests that it has still to prefill, both in
// bytes, and rate is learned for each replica from the times of its first bytes. Where the engine takes requests by their deadlines, pending is what comes
// before this one, and overtaken the number of those that come after it. Otherwise those that are on their way to the replica at the same time are half
// before it and half after.
//
// What a request adds to a queue also delays those that come until the queue is gone. Delayed is about how many that are: none while some replicas have nothing to do,
// and many when requests wait everywhere; to a fast replica come more. Then only reuse makes the queues shorter, and no difference between two of them is worth a miss.
//
// Requests of others are not pending: how many there are is known seconds late, and gateways that all turn away from the same replica and back again
// do worse than those that go by what they see, a lower rate and first bytes that come late.
//
// A miss also evicts what others would have hit: it counts W where the cache is full, and less where there is still room, or what nobody has asked for in a long
// time, down to 1. Wait is W where there is nothing but room, down to 1 where there is none: what is new goes where there is room, such as to a replica that has just
// joined or that looks a little slower than the others, but does not queue up there.
type LeastPrefill struct {
	Loads    *Loads
	Prefixes *Prefixes

	// W is how much the request's own uncached work counts where the cache is full, 1 or more.
	W float64

	// Unobserved says that nobody calls [Lease.FirstByte]: work is then taken to be done at the learned rate.
	Unobserved bool
}

// DefaultW is the default of [LeastPrefill.W]. The optimum is flat: from 2 to 4 the mean time to first token of replayed traces hardly changes, and
// the cached share grows.
const DefaultW = 2.5

// delayed is how many requests are delayed by work that is added, where so many wait at each replica. While that queue is worked off about as many come, by
// Little's law, and while these are worked off more: 1 + n times as many, where arrivals and work are random (the M/M/1 queue). By traces, from 0.3 to 1 of the
// square is best, and makes no difference where few wait.
func delayed(waiting float64) float64 { return waiting * waiting / 2 }

// Pick implements [Strategy].
func (s *LeastPrefill) Pick(req *Request, candidates []Candidate, lease *Lease) (Decision, bool) {
	return s.Prefixes.pick(s.Loads, req, candidates, lease, func(views []view) (Decision, bool) {
		return s.choose(req, candidates, views, lease)
	})
}

// choose picks and reserves. The caller holds the lock of the prefixes.
func (s *LeastPrefill) choose(req *Request, candidates []Candidate, views []view, lease *Lease) (Decision, bool) {
	s.Loads.mu.Lock()
	defer s.Loads.mu.Unlock()
	now, counted := s.Loads.clock(), req.counted()
	usual := s.Loads.usualRate()
	fewerPrompts := func(i, j int) float64 { return s.Prefixes.fewer(candidates, views, i, j) }
	most, rooms, takenIn, speeds, idle := 0.0, 0.0, 0.0, 0.0, 0.0
	for i := range candidates {
		c, v := &candidates[i], &views[i]
		rate := c.Load.queue.rateOr(usual)
		v.speed = rate * c.weight()
		speeds += v.speed
		idle += 1 / float64(1+c.Load.queue.waiting(now, rate))
		most = max(most, s.Prefixes.text(v)/v.speed)
		takenIn += c.takenIn()
	}
	for i := range candidates {
		v := &views[i]
		v.room = candidates[i].room(most * v.speed)
		rooms += v.room
	}
	// The harmonic mean: a replica that hangs makes no crowd, nor is there one where many have nothing to do.
	n := float64(len(candidates))
	others := delayed(n/idle-1) / (speeds / n)
	best, least := -1, 0.0
	for i := range candidates {
		c, v := &candidates[i], &views[i]
		if c.full() {
			continue
		}
		q := &c.Load.queue
		rate := q.rateOr(usual)
		uncached := float64(counted - v.matched)
		full := s.Prefixes.fullness(c, v, takenIn/rooms)
		miss, wait := 1+(s.W-1)*full, 1+(s.W-1)*(1-full)
		deadline := never
		if c.ByDeadline {
			deadline = deadlineOf(now, uncached, rate)
		}
		// What comes after the request waits for its prefill too.
		pending, later := q.before(now, rate, deadline)
		cost := (wait*pending+(miss+later)*uncached)/v.speed + others*uncached
		if best < 0 || cost < least || cost == least && preferred(candidates, i, best, fewerPrompts) {
			best, least = i, cost
		}
	}
	if best < 0 {
		return Decision{}, false
	}
	d := Decision{Index: best, Reason: ReasonLeastPrefill}
	s.Loads.take(&d, candidates, lease)
	s.Loads.queue(&d, req, candidates, views[best].matched, s.Unobserved, lease)
	s.Prefixes.takeIn(&candidates[best], float64(counted-views[best].matched), rooms)
	return d, true
}

var _ Strategy = (*LeastPrefill)(nil)
