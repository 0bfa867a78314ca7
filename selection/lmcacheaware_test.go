package selection

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// What may be known of a cache.
var (
	unknown = Outer{}
	full90  = Outer{Known: true, Available: true, Occupancy: 0.9}
	full60  = Outer{Known: true, Available: true, Occupancy: 0.6}
	full20  = Outer{Known: true, Available: true, Occupancy: 0.2}
	empty   = Outer{Known: true, Available: true}
	broken  = Outer{Known: true} // and empty
)

// outers are candidates with these loads and caches.
func outers(loads *Loads, inFlight []int, caches ...Outer) []Candidate {
	candidates := make([]Candidate, len(caches))
	for i, o := range caches {
		candidates[i] = Candidate{Load: loads.Acquire(fmt.Sprint(i)), Floor: inFlight[i], Outer: o}
	}
	return candidates
}

func TestLMCacheAware(t *testing.T) {
	for _, tc := range []struct {
		name   string
		loads  []int
		caches []Outer
		want   int
		reason Reason
	}{
		{"available and 90 % full beats unavailable and empty", []int{0, 0}, []Outer{broken, full90}, 1, ReasonPipeline},
		{"20 % beats 60 %", []int{0, 0}, []Outer{full60, full20}, 1, ReasonPipeline},
		{"20 % beats 60 %, with one request more", []int{0, 1}, []Outer{full60, full20}, 1, ReasonPipeline},
		{"60 % is near enough to 90 % for load to decide", []int{9, 0}, []Outer{{Known: true, Available: true, Occupancy: 0.8}, full90}, 1, ReasonPipeline},
		{"load cannot outweigh 40 %", []int{1000, 0}, []Outer{full20, full60}, 0, ReasonPipeline},
		{"an unknown one is better than those below the mean", []int{0, 0, 0}, []Outer{full90, unknown, full60}, 2, ReasonPipeline},
		{"an unknown one among equals goes by load", []int{1, 0, 1}, []Outer{full60, unknown, full60}, 1, ReasonPipeline},
		{"an unknown one is not drawn to", []int{0, 1, 1}, []Outer{full60, unknown, full60}, 0, ReasonPipeline},
		{"an unknown one is better than one that is down, when there is another", []int{0, 0, 0}, []Outer{full90, unknown, broken}, 0, ReasonPipeline},
		{"all are down", []int{1, 0}, []Outer{broken, broken}, 1, ReasonPipeline},
		{"nothing is known", []int{2, 1, 3}, []Outer{unknown, unknown, unknown}, 1, ReasonNoSignal},
		{"only one", []int{5}, []Outer{broken}, 0, ReasonOnlyCandidate},
	} {
		t.Run(tc.name, func(t *testing.T) {
			loads := NewLoads(nil)
			candidates := outers(loads, tc.loads, tc.caches...)
			var lease Lease
			d, ok := LMCacheAware{loads}.Pick(new(Request), candidates, &lease)
			if !ok || d.Index != tc.want || d.Reason != tc.reason || d.Load != tc.loads[tc.want] {
				t.Errorf("%+v, %v, want %d for %s", d, ok, tc.want, tc.reason)
			}
			if n := candidates[tc.want].Load.InFlight(); n != 1 {
				t.Errorf("%d reserved", n)
			}
			lease.Release()
		})
	}
	loads := NewLoads(nil)
	fullUp := outers(loads, []int{1}, empty)
	fullUp[0].Limit = 1
	if _, ok := (LMCacheAware{loads}).Pick(new(Request), fullUp, new(Lease)); ok {
		t.Error("a replica above its limit was picked")
	}
	idle := outers(loads, []int{0, 0}, full60, full60)
	served := make([]int, 2)
	for range 20 {
		var lease Lease
		d, _ := LMCacheAware{loads}.Pick(new(Request), idle, &lease)
		served[d.Index]++
		lease.Release()
	}
	if served[0] != 10 {
		t.Errorf("equals were served %v", served)
	}
}

// A target of which nothing is known neither draws nor repels: it is worth the mean of the others, whose order it does not change.
func TestATargetWithoutAValueNeitherAttractsNorRepels(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		loads := NewLoads(nil)
		n := 1 + random.IntN(6)
		inFlight, caches := make([]int, n), make([]Outer, n)
		mean := 0.0
		for i := range caches {
			inFlight[i] = random.IntN(6)
			caches[i] = Outer{Known: true, Available: random.IntN(4) > 0, Occupancy: random.Float64()}
			mean += caches[i].score(0) / float64(n)
		}
		least := slices.Min(inFlight)
		worth := func(c Candidate) float64 {
			return c.Outer.score(mean) + LoadWeight*float64(1+least)/float64(1+c.Floor)
		}
		pick := func(candidates []Candidate) Candidate {
			var lease Lease
			d, ok := LMCacheAware{loads}.Pick(new(Request), candidates, &lease)
			if !ok {
				t.Fatal("no pick")
			}
			lease.Release()
			return candidates[d.Index]
		}
		known := outers(loads, inFlight, caches...)
		// Not less loaded than all others, for that would change what their loads are compared to.
		stranger := Candidate{Load: loads.Acquire("stranger"), Floor: least + random.IntN(6), Outer: unknown}
		at := random.IntN(n + 1)
		with := slices.Insert(slices.Clone(known), at, stranger)
		if got, ok := meanOuter(with); !ok || math.Abs(got-mean) > 1e-9 {
			t.Fatalf("an unknown one is worth %v, want %v", got, mean)
		}
		best := worth(pick(known))
		if got := worth(pick(with)); math.Abs(got-max(best, worth(stranger))) > 1e-9 {
			t.Fatalf("picked one worth %v where there are %v and, unknown, %v", got, best, worth(stranger))
		}
		if stranger.Floor >= slices.Max(inFlight) && pick(known).Outer.score(0) >= mean && worth(pick(with)) < best-1e-9 {
			t.Fatalf("an unknown one that is as busy as any was picked before one that is better")
		}
	}
}

// In the other strategies a cache that is down decides between equals, and nothing else of it matters.
func TestACacheThatIsDownDecidesBetweenEqualsOnly(t *testing.T) {
	for name, newStrategy := range map[string]func(*Loads, *Prefixes) Strategy{
		"cache_aware": func(l *Loads, p *Prefixes) Strategy {
			return &CacheAware{Loads: l, Prefixes: p, Threshold: DefaultThreshold, OverloadMargin: DefaultOverloadMargin, OverloadRatio: DefaultOverloadRatio}
		},
		"least_prefill": func(l *Loads, p *Prefixes) Strategy { return &LeastPrefill{Loads: l, Prefixes: p, W: DefaultW} },
		"pipeline": func(l *Loads, p *Prefixes) Strategy {
			return &Pipeline{Loads: l, Prefixes: p, Sessions: NewSessions(nil), Scorers: []WeightedScorer{{InFlightLoad{}, 1}, {PrefixAffinity{}, 1}, {OuterCache{}, 0}}}
		},
		"least_load": func(l *Loads, _ *Prefixes) Strategy { return LeastLoad{l} },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, 3)
			f.strategy = newStrategy(f.loads, f.prefixes)
			f.all[0].Outer, f.all[1].Outer, f.all[2].Outer = broken, full90, broken
			for i := range 10 {
				got, _, lease := f.pick(text(fmt.Sprintf("%d prompt", i*7919)))
				lease.Release() // not answered: nothing is recorded
				if got != 1 {
					t.Fatalf("picked %d, whose cache is down", got)
				}
			}
			f.all[2].Outer = unknown
			served := make([]int, 3)
			for i := range 40 {
				got, _, lease := f.pick(text(fmt.Sprintf("%d prompt", i*7919)))
				lease.Release()
				served[got]++
			}
			if served[0] != 0 || served[2] == 0 {
				t.Errorf("served %v: an unknown cache is as good as one that is nearly full", served)
			}
			// Load and prefixes come first.
			f.load(0, 1, 1)
			if got, _, _ := f.pick(text("cold")); got != 0 {
				t.Errorf("picked %d, want the least loaded", got)
			}
			if name == "least_load" {
				return
			}
			f.load(0, 0, 0)
			f.warm(0, text("a long prompt that is held by one replica"))
			if got, _, _ := f.pick(text("a long prompt that is held by one replica")); got != 0 {
				t.Errorf("picked %d, want the holder", got)
			}
		})
	}
}

func TestTheOuterCacheInAPipeline(t *testing.T) {
	loads, prefixes := NewLoads(nil), NewPrefixes(newNaiveIndex())
	p := &Pipeline{Loads: loads, Prefixes: prefixes, Sessions: NewSessions(nil), Scorers: []WeightedScorer{{InFlightLoad{}, 1}, {OuterCache{}, 1}}}
	for _, tc := range []struct {
		loads  []int
		caches []Outer
		want   int
	}{
		{[]int{0, 0}, []Outer{broken, full90}, 1},
		{[]int{0, 0, 0}, []Outer{full60, full20, unknown}, 1},
		{[]int{1, 0, 0}, []Outer{full20, unknown, full60}, 1},
		{[]int{0, 1, 1}, []Outer{unknown, unknown, unknown}, 0},
	} {
		var lease Lease
		if d, ok := p.Pick(new(Request), outers(loads, tc.loads, tc.caches...), &lease); !ok || d.Index != tc.want {
			t.Errorf("picked %d of %+v with loads %v, want %d", d.Index, tc.caches, tc.loads, tc.want)
		}
		lease.Release()
	}
}
