package selection

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"testing"
)

// told is what engines say that they hold of one prompt, by candidate; below 0 is not known. What was picked is expected by the next pick.
type told struct {
	shares   []float64
	next     []float64
	pressure []float64 // below 0 without evictions
}

func (e *told) Refresh() { copy(e.shares, e.next) }
func (e *told) Share(i int) (float64, bool) {
	return max(e.shares[i], 0), e.shares[i] >= 0
}
func (e *told) Expect(i int) { e.next[i] = 1 }
func (e *told) Pressure(i int) (float64, bool) {
	if e.pressure == nil {
		return 0, false
	}
	return math.Abs(e.pressure[i]), e.pressure[i] > 0
}

func newTold(shares ...float64) *told {
	return &told{shares: shares, next: slices.Clone(shares)}
}

// newPrecise returns the strategy, and candidates that have so many requests each.
func newPrecise(requests ...int) (*PreciseCacheAware, []Candidate) {
	loads := NewLoads(nil)
	var candidates []Candidate
	for i, n := range requests {
		candidates = append(candidates, Candidate{Load: loads.Acquire(fmt.Sprint(i)), Floor: n})
	}
	return &PreciseCacheAware{Loads: loads, Prefixes: NewPrefixes(newNaiveIndex()), OverloadMargin: DefaultOverloadMargin, OverloadRatio: DefaultOverloadRatio}, candidates
}

func TestPreciseCacheAware(t *testing.T) {
	for _, tc := range []struct {
		name   string
		loads  []int
		shares []float64 // nil: no token ids
		want   []int     // any of these
		reason Reason
	}{
		{"the longest holder", []int{0, 0, 0}, []float64{.2, .9, .5}, []int{1}, ReasonCache},
		{"a small share", []int{2, 0, 0}, []float64{.07, 0, 0}, []int{0}, ReasonCache},
		{"next to nothing", []int{1, 0, 1}, []float64{.06, 0, 0}, []int{1}, ReasonCold},
		{"equal holders go by load", []int{1, 0, 0}, []float64{.5, 0, .5}, []int{2}, ReasonCache},
		{"not yet overloaded", []int{2, 0, 0}, []float64{1, 0, 0}, []int{0}, ReasonCache},
		{"overloaded", []int{3, 1, 0}, []float64{1, 0, 0}, []int{2}, ReasonOverloaded},
		{"busy as the others", []int{8, 6, 6}, []float64{1, 0, 0}, []int{0}, ReasonCache},
		{"nobody holds it", []int{1, 2, 0}, []float64{0, 0, 0}, []int{2}, ReasonCold},
		{"one is not known", []int{1, 0, 1}, []float64{.3, -1, 0}, []int{0}, ReasonCache},
		{"one that is not known is not avoided", []int{1, 0, 1}, []float64{0, -1, 0}, []int{1}, ReasonCold},
		{"one that is not known is not drawn to", []int{0, 1, 2}, []float64{0, -1, 0}, []int{0}, ReasonCold},
		{"nothing is known", []int{1, 0, 1}, []float64{-1, -1, -1}, []int{1}, ReasonNoSignal},
		{"no token ids", []int{1, 0, 1}, nil, []int{1}, ReasonNoTokens},
		{"only one", []int{9}, []float64{0}, []int{0}, ReasonOnlyCandidate},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, candidates := newPrecise(tc.loads...)
			req := &Request{}
			if tc.shares != nil {
				req.Residency = newTold(tc.shares...)
			}
			var lease Lease
			d, ok := s.Pick(req, candidates, &lease)
			if !ok || d.Reason != tc.reason || d.Index != tc.want[0] {
				t.Errorf("picked %d (%s, %v), want %v (%s)", d.Index, d.Reason, ok, tc.want, tc.reason)
			}
			lease.Release()
		})
	}
}

// A cache that is full loses something to a miss.
func TestPreciseCacheAwareUnderPressure(t *testing.T) {
	for _, tc := range []struct {
		name     string
		loads    []int
		shares   []float64
		pressure []float64
		want     int
		reason   Reason
	}{
		{"a small part, and another is hardly used", []int{0, 0}, []float64{.1, 0}, []float64{100, -10}, 1, ReasonCold},
		{"most of it", []int{0, 0}, []float64{.6, 0}, []float64{100, -10}, 0, ReasonCache},
		{"a small part, and the other fills as fast", []int{0, 0}, []float64{.1, 0}, []float64{100, -90}, 0, ReasonCache},
		{"a small part, and the other evicts too", []int{0, 0}, []float64{.1, 0}, []float64{100, 50}, 0, ReasonCache},
		{"the other has some of it too", []int{0, 0}, []float64{.4, .3}, []float64{100, 0}, 1, ReasonCache},
		{"the holder has room", []int{0, 0}, []float64{.1, 0}, []float64{-100, 0}, 0, ReasonCache},
		{"nobody holds it", []int{0, 0, 0}, []float64{0, 0, 0}, []float64{100, 20, 80}, 1, ReasonCold},
		{"nobody holds it, and one is idle", []int{0, 1, 1}, []float64{0, 0, 0}, []float64{100, 20, 80}, 0, ReasonCold},
		{"the one that is hardly used is overloaded", []int{0, 3, 0}, []float64{.1, 0, 0}, []float64{100, 0, 100}, 0, ReasonCache},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, candidates := newPrecise(tc.loads...)
			engines := newTold(tc.shares...)
			engines.pressure = tc.pressure
			var lease Lease
			d, _ := s.Pick(&Request{Residency: engines}, candidates, &lease)
			if d.Index != tc.want || d.Reason != tc.reason {
				t.Errorf("picked %d (%s), want %d (%s)", d.Index, d.Reason, tc.want, tc.reason)
			}
		})
	}
}

// A burst of siblings sticks before the first event has come.
func TestPreciseCacheAwareSeesWhatIsExpected(t *testing.T) {
	s, candidates := newPrecise(0, 0, 0)
	req := &Request{Residency: newTold(0, 0, 0)}
	var leases [3]Lease
	first, _ := s.Pick(req, candidates, &leases[0])
	for i := 1; i < len(leases); i++ {
		if d, _ := s.Pick(req, candidates, &leases[i]); d.Index != first.Index || d.Reason != ReasonCache {
			t.Errorf("sibling %d went to %d (%s), the first one to %d", i, d.Index, d.Reason, first.Index)
		}
	}
}

// What engines say takes the place of what was recorded, where it is known.
func TestResidencyReplacesTheRecord(t *testing.T) {
	text := bytes.Repeat([]byte("the prompt of a conversation "), 200)
	for _, tc := range []struct {
		name   string
		shares []float64
		want   int
	}{
		{"the engine has lost what it was sent", []float64{0, .8}, 1},
		{"nothing is known of the engine that was sent it", []float64{-1, .8}, 0},
		{"nothing is known of the other", []float64{1, -1}, 0},
	} {
		for _, strategy := range []string{"least_prefill", "pipeline"} {
			t.Run(tc.name+"/"+strategy, func(t *testing.T) {
				loads, prefixes := NewLoads(nil), NewPrefixes(newNaiveIndex())
				var s Strategy = &LeastPrefill{Loads: loads, Prefixes: prefixes, W: DefaultW}
				if strategy == "pipeline" {
					s = &Pipeline{Loads: loads, Prefixes: prefixes, Sessions: NewSessions(nil), Scorers: []WeightedScorer{{PrefixAffinity{}, 1}}}
				}
				candidates := []Candidate{
					{Load: loads.Acquire("a"), Member: prefixes.Join("a")},
					{Load: loads.Acquire("b"), Member: prefixes.Join("b")},
				}
				var warm Lease
				if _, ok := s.Pick(&Request{Text: text}, candidates[:1], &warm); !ok {
					t.Fatal("no pick")
				}
				warm.FirstByte()
				warm.Answered(true)
				warm.Release()
				var lease Lease
				d, _ := s.Pick(&Request{Text: text, Residency: newTold(tc.shares...)}, candidates, &lease)
				if d.Index != tc.want {
					t.Errorf("picked %d, want %d", d.Index, tc.want)
				}
				lease.Release()
			})
		}
	}
}

// When all caches are full and have lost a prompt, it goes where it was sent before: each of them is asked for less.
func TestPreciseCacheAwareKeepsHabits(t *testing.T) {
	loads := NewLoads(nil)
	prefixes := NewPrefixes(newNaiveIndex())
	s := &PreciseCacheAware{Loads: loads, Prefixes: prefixes, OverloadMargin: DefaultOverloadMargin, OverloadRatio: DefaultOverloadRatio}
	var candidates []Candidate
	for i := range 4 {
		name := fmt.Sprint(i)
		candidates = append(candidates, Candidate{Load: loads.Acquire(name), Member: prefixes.Join(name)})
	}
	pick := func(conversation, turns int, engines *told) Decision {
		var lease Lease
		text := bytes.Repeat(fmt.Appendf(nil, "%d ", conversation), 1000*turns)
		d, ok := s.Pick(&Request{Text: text, Residency: engines}, candidates, &lease)
		if !ok {
			t.Fatal("no pick")
		}
		lease.Answered(true)
		lease.Release()
		return d
	}
	nothing := func(pressure ...float64) *told {
		engines := newTold(0, 0, 0, 0)
		engines.pressure = pressure
		return engines
	}
	first := make([]int, 8)
	for c := range first {
		first[c] = pick(c, 1, nothing(0, 0, 0, 0)).Index
	}
	// A cache that has hardly anything to do is made use of.
	if d := pick(0, 2, nothing(10, 10, 1, 10)); d.Index != 2 {
		t.Errorf("went to %d, 2 has nothing to do", d.Index)
	}
	first[0] = 2
	for turns := 2; turns < 5; turns++ {
		for c := range first {
			if d := pick(c, turns, nothing(20, 30, 30, 40)); d.Index != first[c] || d.Reason != ReasonCold {
				t.Errorf("turn %d of conversation %d went to %d (%s), the first one to %d", turns, c, d.Index, d.Reason, first[c])
			}
		}
	}
	// Where there is room, or somebody holds it, that counts for more.
	elsewhere := (first[0] + 1) % 4
	room := nothing(10, 10, 10, 10)
	room.pressure[elsewhere] = -1
	if d := pick(0, 5, room); d.Index != elsewhere {
		t.Errorf("went to %d, %d has room", d.Index, elsewhere)
	}
	held := nothing(10, 10, 10, 10)
	held.shares[elsewhere], held.next[elsewhere] = .9, .9
	if d := pick(0, 6, held); d.Index != elsewhere || d.Reason != ReasonCache {
		t.Errorf("went to %d (%s), %d holds it", d.Index, d.Reason, elsewhere)
	}
}
