package selection

import (
	"fmt"
	"testing"
	"time"
)

// newPipeline is a fleet behind a pipeline in which every score counts 1.
func newPipeline(t *testing.T, n int, clock func() time.Duration) (*fleet, *Sessions) {
	f := newFleetAt(t, n, clock)
	sessions := NewSessions(clock)
	f.strategy = &Pipeline{Loads: f.loads, Prefixes: f.prefixes, Sessions: sessions, Scorers: []WeightedScorer{
		{SessionAffinity{}, 1}, {StaticWeight{}, 1}, {InFlightLoad{}, 1}, {PrefixAffinity{}, 1},
	}}
	return f, sessions
}

// serve picks, has the replica answer, and returns which it was.
func (f *fleet) serve(req *Request, without ...int) (int, Decision) {
	got, d, lease := f.pick(req, without...)
	lease.Answered(true)
	lease.Release()
	return got, d
}

func TestPipelineWeights(t *testing.T) {
	f, _ := newPipeline(t, 2, nil)
	f.all[0].Weight = 2
	for i := range 20 {
		if got, d := f.serve(text(fmt.Sprintf("%d idle", i*7919))); got != 0 || d.Reason != ReasonPipeline {
			t.Fatalf("replica %d for %s, want the heavy one", got, d.Reason)
		}
	}
	f, _ = newPipeline(t, 2, nil)
	f.all[0].Weight = 2
	f.load(3, 0)
	if got, _ := f.serve(text("prompt")); got != 1 {
		t.Error("the heavy one got it with 3 in flight")
	}
}

func TestPipelineTakesTheSecondBestWhereverItStands(t *testing.T) {
	for second := range 4 {
		f, _ := newPipeline(t, 5, nil)
		f.warm(4, text("a prompt that is held"))
		f.warm(second, text("a prompt that is half…"))
		if got, _ := f.serve(text("a prompt that is held"), 4); got != second {
			t.Errorf("replica %d, want %d", got, second)
		}
	}
}

// The chance that a fair pick fails this is one in a million: the quantile of χ² with 4 degrees of freedom at 1 − 10⁻⁶ is 33.4.
func TestPipelineTakesEqualsAtRandom(t *testing.T) {
	f, _ := newPipeline(t, 5, nil)
	served := make([]int, 5)
	for i := range 3000 {
		got, _, lease := f.pick(text(fmt.Sprint(i)), 0)
		_ = got
		lease.Release() // not answered: nothing is recorded, all stay equal
		got, _, lease = f.pick(text(fmt.Sprint(i)))
		lease.Release()
		served[got]++
	}
	chi := 0.0
	for _, n := range served {
		d := float64(n) - 600
		chi += d * d / 600
	}
	if chi > 33.4 {
		t.Errorf("served %v, χ² %.1f", served, chi)
	}
}

func TestASessionSticksAcrossPrompts(t *testing.T) {
	now := time.Duration(0)
	f, sessions := newPipeline(t, 4, func() time.Duration { return now })
	ask := func(id uint64, s string) *Request { return &Request{Text: []byte(s), Session: id} }
	home, _ := f.serve(ask(7, "hello"))
	for i := range 20 {
		now += 299 * time.Second // the time to live slides
		if got, d := f.serve(ask(7, fmt.Sprintf("%d something else", i))); got != home || d.Reason != ReasonSession {
			t.Fatalf("replica %d for %s, want %d for session", got, d.Reason, home)
		}
	}

	// Where its replica cannot be taken, the one that answers takes it over.
	next, d := f.serve(ask(7, "elsewhere"), home)
	if d.Reason == ReasonSession {
		t.Error("a replica that is not a candidate boosted another")
	}
	if got, _ := f.serve(ask(7, "again")); got != next {
		t.Errorf("replica %d, want %d, which answered last", got, next)
	}

	// An answer that did not come does not count.
	f.load(0, 0, 0, 0)
	_, _, lease := f.pick(ask(8, "broken"))
	lease.Answered(false)
	lease.Release()
	if _, ok := sessions.last(8); ok {
		t.Error("a session without an answer is remembered")
	}

	now += 300 * time.Second
	if _, ok := sessions.last(7); ok || sessions.Len() != 0 {
		t.Error("the session outlived its time")
	}
}

func TestSessionsAreABoostAndNotAChain(t *testing.T) {
	f, _ := newPipeline(t, 2, nil)
	req := &Request{Text: []byte("x"), Session: 1}
	home, _ := f.serve(req)
	loads := make([]int, 2)
	loads[home] = 40
	f.load(loads...)
	f.warm(1-home, text("another prompt"))
	if got, _ := f.serve(&Request{Text: []byte("another prompt"), Session: 1}); got == home {
		t.Error("load and prefix together did not outweigh the session")
	}
}

func TestSessionsAreBounded(t *testing.T) {
	f, sessions := newPipeline(t, 2, nil)
	sessions.SetLimits(10, time.Minute)
	for id := range uint64(100) {
		f.serve(&Request{Session: id + 1})
		f.serve(&Request{Session: 1}) // used all the time
	}
	if n := sessions.Len(); n != 10 {
		t.Errorf("%d sessions, want 10", n)
	}
	if _, ok := sessions.last(1); !ok {
		t.Error("the session that was used last went first")
	}
	sessions.SetLimits(10, 0)
	f.serve(&Request{Session: 3})
	if n := sessions.Len(); n != 0 {
		t.Errorf("%d sessions although they are switched off", n)
	}
}

func TestScoreWeights(t *testing.T) {
	f, _ := newPipeline(t, 2, nil)
	f.strategy.(*Pipeline).Scorers = []WeightedScorer{{InFlightLoad{}, 0}, {PrefixAffinity{}, 1}}
	f.warm(0, text("prompt"))
	f.load(1000, 0)
	if got, _ := f.serve(text("prompt")); got != 0 {
		t.Error("a score of no weight counted")
	}
}
