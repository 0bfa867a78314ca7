package selection

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// engines is a fleet behind least_prefill, in virtual time: engines that prefill first come first served.
type engines struct {
	*fleet
	now   time.Duration
	rates []float64 // bytes per second
	free  []time.Duration
}

func newEngines(t testing.TB, rates ...float64) *engines {
	e := &engines{rates: rates, free: make([]time.Duration, len(rates))}
	e.fleet = newFleetAt(t, len(rates), func() time.Duration { return e.now })
	e.strategy = &LeastPrefill{Loads: e.loads, Prefixes: e.prefixes, W: 2}
	return e
}

func prompt(seed, n int) *Request {
	rng := rand.New(rand.NewPCG(uint64(seed), 1))
	p := make([]byte, n)
	for i := range p {
		p[i] = byte('a' + rng.IntN(26))
	}
	return &Request{Text: p, Stream: true}
}

// learned makes all rates known.
func (e *engines) learned() *engines {
	for i, rate := range e.rates {
		e.all[i].Load.SetRate(rate)
	}
	return e
}

// send has a prompt of n bytes prefilled, and returns the replica and the function that says that its first byte came.
func (e *engines) send(req *Request) (int, Decision, *Lease, time.Duration) {
	i, d, lease := e.pick(req)
	uncached := float64(len(req.Text)) * (1 - d.Score)
	e.free[i] = max(e.free[i], e.now) + seconds(uncached/e.rates[i])
	return i, d, lease, e.free[i]
}

// finish has an answer come, whole.
func finish(lease *Lease) {
	lease.FirstByte()
	lease.Answered(true)
	lease.Release()
}

// answers are still to come, each at its time.
type answers []answer

type answer struct {
	at    time.Duration
	lease *Lease
}

// pass lets time pass, and has the answers come that do in it.
func (e *engines) pass(d time.Duration, waiting *answers) {
	end := e.now + d
	*waiting = slices.DeleteFunc(*waiting, func(a answer) bool {
		if a.at > end {
			return false
		}
		e.now = a.at
		finish(a.lease)
		return true
	})
	e.now = end
}

func TestLeastPrefillWeighsTheQueueAgainstTheMiss(t *testing.T) {
	for _, tc := range []struct {
		name    string
		pending int // bytes before the holder
		want    int
	}{{"idle", 0, 0}, {"a short queue", 19_000, 0}, {"a queue as long as w misses", 21_000, 1}} {
		e := newEngines(t, 10_000, 10_000).learned()
		held := prompt(1, 10_000)
		e.warm(0, held)
		e.warm(1, prompt(3, 10_000+tc.pending))
		if tc.pending > 0 {
			lease := new(Lease)
			if _, ok := e.strategy.Pick(prompt(2, tc.pending), e.all[:1], lease); !ok {
				t.Fatal("not picked")
			}
			lease.Taken()
		}
		e.all[0].Member.takenIn, e.all[1].Member.takenIn = 1, 1 // both have lately taken in as much
		if got, d, _ := e.pick(held); got != tc.want || d.Reason != ReasonLeastPrefill {
			t.Errorf("%s: replica %d for %s, want %d", tc.name, got, d.Reason, tc.want)
		}
	}
}

// Where requests wait everywhere, each one that is added delays many: only reuse makes the queues shorter. One replica with nothing to do, or one that
// hangs, is another matter.
func TestAnOverloadedFleetGoesByReuse(t *testing.T) {
	for _, tc := range []struct {
		name    string
		waiting []int // requests of 1000 bytes at each replica; the first one holds what is asked for
		stays   bool
	}{
		{"nobody waits", []int{0, 0, 0}, true},
		{"the holder is busy", []int{30, 0, 0}, false},
		{"one has nothing to do", []int{30, 10, 0}, false},
		{"all are busy", []int{30, 10, 10}, true},
		{"more at the holder than reuse is worth", []int{900, 10, 10}, false},
		{"the holder hangs", []int{300, 0, 1}, false},
		{"another one hangs", []int{30, 3000, 0}, false},
	} {
		e := newEngines(t, slices.Repeat([]float64{10_000}, len(tc.waiting))...).learned()
		held := prompt(1, 5000)
		e.warm(0, held)
		for i, n := range tc.waiting {
			for j := range n {
				lease := new(Lease)
				e.strategy.Pick(prompt(10_000*(i+1)+j, 1000), e.all[i:i+1], lease)
				lease.Taken()
			}
		}
		if got, _, _ := e.pick(held); (got == 0) != tc.stays {
			t.Errorf("%s: replica %d", tc.name, got)
		}
	}
}

func TestTheVirtualClock(t *testing.T) {
	e := newEngines(t, 1000, 1000).learned()
	q := &e.all[0].Load.queue
	pending := func() float64 { return q.pending(e.now, 1000) }
	var leases []*Lease
	for i := range 3 {
		lease := new(Lease)
		e.strategy.Pick(prompt(i, 5000), e.all[:1], lease)
		lease.Taken()
		leases = append(leases, lease)
	}
	want := func(when string, bytes float64) {
		t.Helper()
		if got := pending(); got != bytes {
			t.Errorf("%s: %v bytes pending, want %v", when, got, bytes)
		}
	}
	want("at once", 15_000)
	e.now = 2 * time.Second
	want("after 2 s", 13_000)
	e.now = 8 * time.Second
	want("later than the first should have come", 10_000)
	leases[1].FirstByte() // the second has overtaken the first
	want("at the second's first byte", 10_000)
	e.now = 10 * time.Second
	want("after 2 s more", 8000)
	leases[0].FirstByte()
	leases[1].FirstByte()
	want("at the first's, and one that says nothing new", 5000)
	e.now = 12 * time.Second
	want("after 2 s more", 3000)
	leases[2].Release() // cancelled
	leases[2].FirstByte()
	leases[2].Taken()
	want("at the end", 0)
}

// Nobody says when the first byte of an answer in one piece has come. When that of a later request has, it has been prefilled.
func TestAFirstByteSaysThatWhatIsNotSeenIsDone(t *testing.T) {
	e := newEngines(t, 1000).learned()
	unseen := prompt(1, 5000)
	unseen.Stream = false
	e.pick(unseen)
	_, _, seen := e.pick(prompt(2, 3000))
	e.now = 4 * time.Second
	seen.FirstByte()
	if works := e.all[0].Load.queue.works; len(works) != 0 {
		t.Errorf("%d works are left", len(works))
	}
}

// What is on its way at the same time may come before or after; what a replica has said that it has, or should have by now, comes before.
func TestRequestsOvertakeEachOtherOnTheirWay(t *testing.T) {
	e := newEngines(t, 1000).learned()
	q := &e.all[0].Load.queue
	_, _, first := e.pick(prompt(1, 4000))
	e.pick(prompt(2, 2000))
	for _, step := range []struct {
		name         string
		do           func()
		bytes, later float64
	}{
		{"both on their way", func() {}, 3000, 1},
		{"the first is there", first.Taken, 5000, 0.5},
		{"the second should be", func() { e.now += onTheWay + time.Millisecond }, 6000 - 51, 0},
	} {
		step.do()
		if bytes, later := q.before(e.now, 1000, never); bytes != step.bytes || later != step.later {
			t.Errorf("%s: %v bytes before and %v works after, want %v and %v", step.name, bytes, later, step.bytes, step.later)
		}
	}
}

// A first byte that does not come in time says that what was thought to be cached was not, which is known of the replica before the answer says so, and then
// that the replica does not begin.
func TestWorkThatIsOverdueIsDoneAsAWhole(t *testing.T) {
	for _, observed := range []bool{true, false} {
		e := newEngines(t, 1000).learned()
		q := &e.all[0].Load.queue
		held := prompt(1, 19_000)
		e.warm(0, held)
		held.Text = append(held.Text, make([]byte, 1000)...)
		held.Stream = observed
		_, _, lease := e.pick(held)
		for _, step := range []struct {
			after time.Duration
			want  float64
		}{{0, 1000}, {1, 0}, {5, 0}, {6, 14_000}, {15, 5000}, {20, 0}, {25, 5000}, {60, 40_000}} {
			e.now = step.after * time.Second
			want := step.want
			if !observed && step.after > 1 {
				want = 0 // nobody would see it
			}
			if step.after == 0 {
				lease.Taken()
			}
			if got := q.pending(e.now, 1000); got != want {
				t.Errorf("observed %v: %v pending after %d s, want %v", observed, got, step.after, want)
			}
		}
		if lease.FirstByte(); q.pending(e.now, 1000) != 0 {
			t.Error("pending after the first byte")
		}
	}
}

// A replica that takes requests and does not answer looks idle by its work, for it should be done: what it was thought to hold must not draw all to it.
func TestAReplicaThatHangsIsLeft(t *testing.T) {
	e := newEngines(t, 1000, 1000, 1000).learned()
	held := prompt(1, 20_000)
	e.warm(0, held)
	for i := 0; ; i++ {
		held.Text = append(held.Text, make([]byte, 100)...)
		at, _, lease := e.pick(held)
		lease.Taken()
		if at != 0 {
			break
		}
		if i > 100 {
			t.Fatal("100 requests wait at a replica that hangs")
		}
		e.now += 10 * time.Second
	}
}

func TestWorkWhoseFirstByteIsNotSeenIsReckoned(t *testing.T) {
	for _, unobserved := range []bool{true, false} {
		e := newEngines(t, 1000).learned()
		e.strategy.(*LeastPrefill).Unobserved = unobserved
		q := &e.all[0].Load.queue
		for i := range 3 {
			req := prompt(i, 5000)
			req.Stream = unobserved // where the handler sees first bytes, only a stream's says anything
			e.pick(req)
		}
		for at, want := range map[time.Duration]float64{0: 15_000, 7 * time.Second: 8000} {
			e.now = at
			if got := q.pending(e.now, 1000); at == 7*time.Second && got != want {
				t.Errorf("after %v: %v pending, want %v", at, got, want)
			}
		}
		e.now = 20 * time.Second
		if got := q.pending(e.now, 1000); got != 0 {
			t.Errorf("after 20 s: %v pending", got)
		}
		if n := len(q.works); n != 0 {
			t.Errorf("%d works are kept", n)
		}
	}
}

// A request whose prompt was cached after all makes a sample that is far too high.
func TestTheRateErrsLow(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, start := range []float64{5000, 10_000, 20_000} {
		e := newEngines(t, 10_000)
		e.all[0].Load.SetRate(start)
		for i := range 2000 {
			lease := new(Lease)
			e.strategy.Pick(prompt(i, 8000), e.all, lease)
			took := 800 * time.Millisecond
			if rng.IntN(10) == 0 {
				took /= 20
			}
			e.now += took
			lease.FirstByte()
			lease.Release()
		}
		if rate := e.all[0].Load.queue.rate; rate < 9000 || rate > 10_500 {
			t.Errorf("from %v: the rate is %.0f, want about 10,000 and not above", start, rate)
		}
	}
}

func TestBeforeAnythingIsLearnedAllAreEqual(t *testing.T) {
	e := newEngines(t, 1000, 1000, 1000)
	served := make([]int, 3)
	for i := range 30 {
		got, _, lease := e.pick(prompt(i, 1000))
		lease.Answered(true)
		lease.Release()
		served[got]++
	}
	for _, n := range served {
		if n < 9 || n > 11 {
			t.Errorf("served %v", served)
		}
	}
}

func TestAReplicaOfHalfTheSpeedOrWeightGetsHalf(t *testing.T) {
	for _, byWeight := range []bool{false, true} {
		e := newEngines(t, 10_000, 5_000)
		if byWeight {
			e.rates[1] = 10_000
			e.all[0].Weight = 2
		}
		e.learned()
		served := make([]int, 2)
		for i := range 300 {
			got, _, _, _ := e.send(prompt(i, 1000))
			served[got]++
		}
		if served[0] < 190 || served[0] > 210 {
			t.Errorf("by weight %v: served %v, want about 200 and 100", byWeight, served)
		}
	}
}

func TestDeadlines(t *testing.T) {
	e := newEngines(t, 1000).learned()
	e.now = 3 * time.Second
	if _, d, _ := e.pick(prompt(1, 2000)); d.Deadline != 13*time.Second {
		t.Errorf("deadline %v, want 3 s + 5 × 2 s", d.Deadline)
	}
}

func TestARateIsForgottenWithItsAddress(t *testing.T) {
	e := newEngines(t, 1000, 3000).learned()
	if usual := e.loads.usualRate(); usual != 2000 {
		t.Errorf("usual rate %v", usual)
	}
	e.loads.Release(e.all[1].Load)
	if usual := e.loads.usualRate(); usual != 1000 {
		t.Errorf("usual rate %v", usual)
	}
	e.loads.Release(e.all[0].Load)
	if usual := e.loads.usualRate(); usual != firstRate {
		t.Errorf("usual rate %v", usual)
	}
}

// A new replica is neither flooded nor left out, when the others have more than they can do.
func TestANewReplica(t *testing.T) {
	e := newEngines(t, 10_000, 10_000, 10_000).learned()
	system := bytes.Repeat([]byte("s"), 4000)
	for i := range 3 {
		e.warm(i, &Request{Text: system})
	}
	e.rates, e.free = append(e.rates, 10_000), append(e.free, 0)
	e.all = append(e.all, Candidate{Load: e.loads.Acquire("new"), Member: e.prefixes.Join("new")})
	served := make([]int, 4)
	var waiting answers
	for i := range 400 {
		e.pass(120*time.Millisecond, &waiting)
		req := &Request{Text: append(bytes.Clone(system), fmt.Sprintf("%d %s", i, prompt(i, 4000).Text)...), Stream: true}
		got, _, lease, at := e.send(req)
		waiting = append(waiting, answer{at, lease})
		served[got]++
	}
	if served[3] < 50 || served[3] > 150 {
		t.Errorf("served %v, want the new one to get its share", served)
	}
}

// An engine that takes short prompts first overtakes long ones: a first byte says nothing of those that were sent before.
func TestTheVirtualClockOfAnEngineThatGoesByDeadlines(t *testing.T) {
	e := newEngines(t, 1000).learned()
	e.all[0].ByDeadline = true
	q := &e.all[0].Load.queue
	send := func(seed, bytes int) *Lease {
		lease := new(Lease)
		e.strategy.Pick(prompt(seed, bytes), e.all, lease)
		return lease
	}
	first, long, short := send(1, 2000), send(2, 9000), send(3, 1000)
	if bytes, later := q.before(e.now, 1000, deadlineOf(e.now, 3000, 1000)); bytes != 3000 || later != 1 {
		t.Errorf("%v bytes before a prompt of 3,000 and %v after it, want 3000 and 1", bytes, later)
	}
	e.now = 2 * time.Second
	first.FirstByte()
	if q.running != q.works[1] {
		t.Error("the short one is not thought to be next")
	}
	e.now = 3 * time.Second
	short.FirstByte()
	if got := q.pending(e.now, 1000); got != 9000 {
		t.Errorf("%v pending, want the long one", got)
	}
	e.now = 7 * time.Second
	if got := q.pending(e.now, 1000); got != 5000 {
		t.Errorf("%v pending, want what is left of the long one", got)
	}
	long.Release()
	if got := q.pending(e.now, 1000); got != 0 {
		t.Errorf("%v pending at the end", got)
	}
}

// What is new goes where there is room, and does not queue up there.
func TestAnEmptyCacheIsFilled(t *testing.T) {
	for _, tc := range []struct {
		name    string
		pending int // bytes before the empty one
		want    int
	}{{"idle", 0, 1}, {"a short queue", 4000, 1}, {"a queue of about the prompt's length", 9000, 0}} {
		e := newEngines(t, 10_000, 10_000).learned()
		e.strategy.(*LeastPrefill).W = 3
		e.warm(0, prompt(1, 200_000))
		if tc.pending > 0 {
			_, _, lease := e.pick(prompt(2, tc.pending), 0)
			lease.Taken()
		}
		if got, _, _ := e.pick(prompt(3, 10_000)); got != tc.want {
			t.Errorf("%s: replica %d, want %d", tc.name, got, tc.want)
		}
	}
}

// What others send to a replica shows in when its first bytes come. How many they are, as of seconds ago, says little of what is waiting now, so that
// it only decides between equals.
func TestAReplicaThatOthersKeepBusyGetsLess(t *testing.T) {
	e := newEngines(t, 10_000, 10_000)
	served := make([]int, 2)
	var waiting answers
	for i := range 1000 {
		e.pass(650*time.Millisecond, &waiting)
		got, _, lease, at := e.send(prompt(i, 8000))
		lease.Taken()
		waiting = append(waiting, answer{at, lease})
		if got == 0 { // and as much of somebody else's
			e.free[0] += 800 * time.Millisecond
		}
		if i >= 500 {
			served[got]++
		}
	}
	if served[0] < 100 || served[0] > 200 {
		t.Errorf("served %v, want about a third at the one that is half others'", served)
	}
}

// Where a cache is full, what is new still goes to the one that has taken in less lately: a little speed is not worth what one replica would evict that gets everything.
func TestAReplicaThatLooksSlowerIsUsedToo(t *testing.T) {
	e := newEngines(t, 10_000, 9_000).learned()
	e.strategy.(*LeastPrefill).W = 3
	for _, c := range e.all {
		c.Member.bounded = 50_000
	}
	served := make([]int, 2)
	for i := range 200 {
		e.now += time.Minute
		got, _, lease, at := e.send(prompt(i, 10_000))
		e.now = at
		finish(lease)
		if i >= 20 {
			served[got]++
		}
	}
	if served[1] < 60 {
		t.Errorf("served %v, want a third at least at the one that looks slower", served)
	}
}
