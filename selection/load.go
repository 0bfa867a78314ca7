package selection

import (
	"math"
	"slices"
	"strings"
	"sync"
	"time"
)

// Loads counts the requests in flight by replica address, for every route and policy of the process. The mutex is also the
// critical section in which a pick reads the loads and reserves: two picks never see the same load.
type Loads struct {
	clock func() time.Duration
	mu    sync.Mutex
	byKey map[string]*Load
	picks uint64 // counts picks, for the rotation among equals

	// of the queues that have learned their rate
	rated int
	rates float64 // their sum
}

// Load is the load of one address.
type Load struct {
	loads *Loads
	key   string

	// all guarded by loads.mu
	inFlight   int
	refs       int // configurations that know the address
	lastPicked uint64
	peak       float64       // of inFlight,
	peakAt     time.Duration // at this time
	queue      queue
	foreign    int           // see SetForeign; it counts
	foreignTo  time.Duration // until this time
}

// NewLoads returns an empty registry. clock tells the time since some moment; nil is the real one.
func NewLoads(clock func() time.Duration) *Loads {
	if clock == nil {
		clock = realClock()
	}
	return &Loads{clock: clock, byKey: make(map[string]*Load)}
}

func realClock() func() time.Duration {
	start := time.Now()
	return func() time.Duration { return time.Since(start) }
}

// Acquire returns the load of an address, which stays registered until as many Release calls and until nothing is in flight.
func (l *Loads) Acquire(key string) *Load {
	l.mu.Lock()
	defer l.mu.Unlock()
	load := l.byKey[key]
	if load == nil {
		load = &Load{loads: l, key: key}
		l.byKey[key] = load
	}
	load.refs++
	return load
}

// Release gives back one Acquire.
func (l *Loads) Release(load *Load) {
	l.mu.Lock()
	defer l.mu.Unlock()
	load.refs--
	l.forget(load)
}

// forget drops a load that nobody knows and that has nothing in flight.
func (l *Loads) forget(load *Load) {
	if load.refs <= 0 && load.inFlight == 0 && l.byKey[load.key] == load {
		delete(l.byKey, load.key)
		if load.queue.rate > 0 {
			l.rated--
			l.rates -= load.queue.rate
			load.queue.rate = 0
		}
	}
}

// InFlight is the number of requests that hold a reservation at the address.
func (l *Load) InFlight() int {
	l.loads.mu.Lock()
	defer l.loads.mu.Unlock()
	return l.inFlight
}

// AddressLoad is the load of one address, for metrics.
type AddressLoad struct {
	Address  string
	InFlight int
	Others   int // requests that did not come through here
}

// Snapshot lists all addresses, sorted.
func (l *Loads) Snapshot() []AddressLoad {
	l.mu.Lock()
	all := make([]AddressLoad, 0, len(l.byKey))
	for key, load := range l.byKey {
		all = append(all, AddressLoad{key, load.inFlight, load.others()})
	}
	l.mu.Unlock()
	slices.SortFunc(all, func(a, b AddressLoad) int { return strings.Compare(a.Address, b.Address) })
	return all
}

// Recent is the number of requests that hold a reservation at the address, or what is left of an earlier higher one: the most that an engine may
// still count as ours.
func (l *Load) Recent() int {
	l.loads.mu.Lock()
	defer l.loads.mu.Unlock()
	return max(l.inFlight, int(math.Ceil(l.faded(l.loads.clock()))))
}

// SetForeign says how many requests of others are at the address. They add to its load for some time.
func (l *Load) SetForeign(requests int, lasts time.Duration) {
	l.loads.mu.Lock()
	defer l.loads.mu.Unlock()
	l.foreign, l.foreignTo = requests, l.loads.clock()+lasts
}

// others is the number of requests of others, as far as it is known. The caller holds the registry's mutex.
func (l *Load) others() int {
	if l.foreign == 0 || l.loads.clock() >= l.foreignTo {
		return 0
	}
	return l.foreign
}

// own is the requests that are in flight at the candidate through this gateway. The caller holds the registry's mutex.
func (c *Candidate) own() int { return max(c.Load.inFlight, c.Floor) }

// load is the requests that are in flight at the candidate. The caller holds the registry's mutex.
func (c *Candidate) load() int { return c.own() + c.Load.others() }

// peakFades is how long the peak of a load counts, less and less.
const peakFades = 500 * time.Millisecond

// ended takes a request off. The caller holds the registry's mutex.
func (l *Load) ended() {
	now := l.loads.clock()
	l.peak, l.peakAt = max(float64(l.inFlight), l.faded(now)), now
	l.inFlight--
}

// faded is what is left of the peak.
func (l *Load) faded(now time.Duration) float64 {
	return l.peak * max(0, 1-float64(now-l.peakAt)/float64(peakFades))
}

// recent is the candidate's load, or what is left of an earlier higher one: a replica whose requests ended a moment ago is about to get the next
// turns of their conversations. The caller holds the registry's mutex.
func (c *Candidate) recent(now time.Duration) float64 {
	return (max(float64(c.own()), c.Load.faded(now)) + float64(c.Load.others())) / c.weight()
}

// relative is the candidate's load for its weight: what can take twice as much is as busy with twice the load. The caller holds the
// registry's mutex.
func (c *Candidate) relative() float64 { return float64(c.load()) / c.weight() }

func (c *Candidate) weight() float64 {
	if c.Weight > 0 {
		return c.Weight
	}
	return 1
}

// full says that the candidate must not get another request. The requests of others do not count: what is known of them is seconds old, good enough to
// prefer another replica and not to refuse. The caller holds the registry's mutex.
func (c *Candidate) full() bool { return c.Limit > 0 && c.own() >= c.Limit }

// take reserves a place at the candidate of a decision, and completes the decision by what is the same for all strategies. The caller holds the registry's mutex.
func (l *Loads) take(d *Decision, candidates []Candidate, lease *Lease) {
	if len(candidates) == 1 {
		d.Reason = ReasonOnlyCandidate
	}
	c := &candidates[d.Index]
	d.Load = c.load()
	// A configuration that was unloaded may have dropped the entry while its last requests still pick.
	if known := l.byKey[c.Load.key]; known == nil {
		l.byKey[c.Load.key] = c.Load
	} else if known != c.Load {
		c.Load = known
	}
	l.picks++
	c.Load.lastPicked = l.picks
	c.Load.inFlight++
	lease.hold(c.Load)
}

// leastLoaded returns the index of the least loaded candidate that is not full, or -1. Among equal loads the one that was picked
// longest ago is taken, unless better says otherwise: better(i, j) is negative when i is to be preferred. Loads are taken for the weight. The caller holds the mutex.
func leastLoaded(candidates []Candidate, better func(i, j int) float64) int {
	best := -1
	for i := range candidates {
		c := &candidates[i]
		if c.full() {
			continue
		}
		if best < 0 || preferred(candidates, i, best, better) {
			best = i
		}
	}
	return best
}

// preferred says whether candidate i is to be taken before j: lower load, then better, then an outer cache that is not known to be down, then picked longest
// ago.
func preferred(candidates []Candidate, i, j int, better func(i, j int) float64) bool {
	a, b := &candidates[i], &candidates[j]
	if la, lb := a.relative(), b.relative(); la != lb {
		return la < lb
	}
	if better != nil {
		if order := better(i, j); order != 0 {
			return order < 0
		}
	}
	if down := a.Outer.down(); down != b.Outer.down() {
		return !down
	}
	return a.Load.lastPicked < b.Load.lastPicked
}

// byLoad picks by load, for a reason.
func byLoad(loads *Loads, req *Request, candidates []Candidate, lease *Lease, reason Reason) (Decision, bool) {
	d, ok := LeastLoad{loads}.Pick(req, candidates, lease)
	if d.Reason == ReasonFallback {
		d.Reason = reason
	}
	return d, ok
}

// LeastLoad picks the candidate with the fewest requests in flight. It is the rule that every other one falls back to.
type LeastLoad struct{ Loads *Loads }

// Pick implements [Strategy].
func (s LeastLoad) Pick(_ *Request, candidates []Candidate, lease *Lease) (Decision, bool) {
	s.Loads.mu.Lock()
	defer s.Loads.mu.Unlock()
	i := leastLoaded(candidates, nil)
	if i < 0 {
		return Decision{}, false
	}
	d := Decision{Index: i, Reason: ReasonFallback}
	s.Loads.take(&d, candidates, lease)
	return d, true
}

var _ Strategy = LeastLoad{}
