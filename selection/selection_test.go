package selection

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
	"time"
)

// naiveIndex is a PrefixIndex that keeps every prompt as it is.
type naiveIndex struct {
	slots   []map[string]int // prompt: claims; confirmed ones count as one for ever
	free    []int
	records map[Record]string
	serial  uint64
}

func newNaiveIndex() *naiveIndex { return &naiveIndex{records: make(map[Record]string)} }

func (*naiveIndex) ReuseDistance(int) int64 { return -1 }

func (x *naiveIndex) Match(text []byte, found []Match) {
	for slot, prompts := range x.slots {
		m := Match{}
		for p := range prompts {
			n := 0
			for n < len(p) && n < len(text) && p[n] == text[n] {
				n++
			}
			m.Bytes = max(m.Bytes, n)
			m.Continues = m.Continues || n == len(p)
		}
		found[slot] = m
	}
}

func (x *naiveIndex) Insert(slot int, text []byte) Record {
	x.slots[slot][string(text)]++
	x.serial++
	r := Record{Serial: x.serial, Index: uint32(slot)}
	x.records[r] = string(text)
	return r
}

func (x *naiveIndex) Confirm(r Record) { delete(x.records, r) }

func (x *naiveIndex) Rollback(r Record) {
	text, ok := x.records[r]
	if !ok {
		return
	}
	delete(x.records, r)
	if x.slots[r.Index][text]--; x.slots[r.Index][text] == 0 {
		delete(x.slots[r.Index], text)
	}
}

func (x *naiveIndex) Prompts(slot int) int { return len(x.slots[slot]) }

func (x *naiveIndex) Text(slot int) (n int64) {
	for p := range x.slots[slot] {
		n += int64(len(p))
	}
	return n
}

func (x *naiveIndex) SetMaxText(int, int64) {}

func (x *naiveIndex) Add() int {
	if n := len(x.free); n > 0 {
		slot := x.free[n-1]
		x.free = x.free[:n-1]
		x.slots[slot] = make(map[string]int)
		return slot
	}
	x.slots = append(x.slots, make(map[string]int))
	return len(x.slots) - 1
}

func (x *naiveIndex) Remove(slot int) {
	x.slots[slot] = nil
	x.free = append(x.free, slot)
}

func (x *naiveIndex) Slots() int { return len(x.slots) }

// fleet is a set of replicas behind one strategy.
type fleet struct {
	t        testing.TB
	loads    *Loads
	prefixes *Prefixes
	strategy Strategy
	all      []Candidate
}

func newFleet(t testing.TB, n int) *fleet { return newFleetAt(t, n, nil) }

func newFleetAt(t testing.TB, n int, clock func() time.Duration) *fleet {
	f := &fleet{t: t, loads: NewLoads(clock), prefixes: NewPrefixes(newNaiveIndex())}
	f.strategy = &CacheAware{
		Loads: f.loads, Prefixes: f.prefixes,
		Threshold: DefaultThreshold, OverloadMargin: DefaultOverloadMargin, OverloadRatio: DefaultOverloadRatio,
	}
	for i := range n {
		key := fmt.Sprintf("replica-%d:8000", i)
		f.all = append(f.all, Candidate{Load: f.loads.Acquire(key), Member: f.prefixes.Join(key), Weight: 1})
	}
	return f
}

func text(s string) *Request { return &Request{Text: []byte(s)} }

// available are the candidates without those named.
func (f *fleet) available(without ...int) (candidates []Candidate, index []int) {
next:
	for i, c := range f.all {
		for _, w := range without {
			if i == w {
				continue next
			}
		}
		candidates, index = append(candidates, c), append(index, i)
	}
	return candidates, index
}

// pick picks among the replicas that are not named, and returns which and the lease.
func (f *fleet) pick(req *Request, without ...int) (int, Decision, *Lease) {
	f.t.Helper()
	candidates, index := f.available(without...)
	lease := new(Lease)
	d, ok := f.strategy.Pick(req, candidates, lease)
	if !ok {
		f.t.Fatal("no candidate was picked")
	}
	return index[d.Index], d, lease
}

// warm makes a replica the server of a prompt.
func (f *fleet) warm(i int, req *Request) {
	lease := new(Lease)
	if _, ok := f.strategy.Pick(req, f.all[i:i+1], lease); !ok {
		f.t.Fatal("the replica was not picked")
	}
	lease.Answered(true)
	lease.Release()
}

// load puts requests on the replicas.
func (f *fleet) load(loads ...int) {
	for i, n := range loads {
		for range n {
			if _, ok := (LeastLoad{f.loads}).Pick(&Request{}, f.all[i:i+1], new(Lease)); !ok {
				f.t.Fatal("the replica was not picked")
			}
		}
	}
}

func (f *fleet) inFlight() (n int) {
	for _, l := range f.loads.Snapshot() {
		n += l.InFlight
	}
	return n
}

func TestGoldenCases(t *testing.T) {
	const prompt = "You are a helpful assistant. What is a prefix?"
	for _, tc := range []struct {
		name    string
		warm    int // replica, or -1
		loads   []int
		without []int
		want    []int
		reason  Reason
	}{
		{"warm and idle", 0, []int{0, 0, 0}, nil, []int{0}, ReasonCache},
		{"warm and at the margin", 0, []int{2, 0, 0}, nil, []int{0}, ReasonCache},
		{"warm and overloaded", 0, []int{3, 1, 0}, nil, []int{2}, ReasonOverloaded},
		{"warm and within the ratio", 0, []int{8, 6, 6}, nil, []int{0}, ReasonCache},
		{"overloaded against the candidates only", 1, []int{10, 3, 0}, []int{2}, []int{1}, ReasonCache},
		{"overloaded, the third one cannot be taken", 1, []int{1, 9, 0}, []int{2}, []int{0}, ReasonOverloaded},
		{"cold, the idle one cannot be taken", -1, []int{4, 3, 0}, []int{2}, []int{1}, ReasonCold},
		{"the warm one cannot be taken", 1, []int{0, 0, 0}, []int{1}, []int{0, 2}, ReasonCold},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFleet(t, 3)
			if tc.warm >= 0 {
				f.warm(tc.warm, text(prompt))
			}
			f.load(tc.loads...)
			got, d, _ := f.pick(text(prompt), tc.without...)
			if d.Reason != tc.reason || !contains(tc.want, got) {
				t.Errorf("replica %d for %s, want one of %v for %s", got, d.Reason, tc.want, tc.reason)
			}
			if d.Load != tc.loads[got] {
				t.Errorf("load %d, want %d", d.Load, tc.loads[got])
			}
		})
	}
}

func contains(all []int, v int) bool {
	for _, a := range all {
		if a == v {
			return true
		}
	}
	return false
}

func TestOverloadedFromWhichLoadOn(t *testing.T) {
	for least, want := range []int{3, 4, 5, 6, 7, 8, 10, 11, 13} {
		for load := least; load <= want+1; load++ {
			f := newFleet(t, 2)
			f.warm(0, text("prompt"))
			f.load(load, least)
			got, _, _ := f.pick(text("prompt"))
			if overloaded := got == 1; overloaded != (load >= want) {
				t.Errorf("least %d, load %d: overloaded %v", least, load, overloaded)
			}
		}
	}
}

func TestASingleCandidateIsNeverOverloaded(t *testing.T) {
	f := newFleet(t, 1)
	f.warm(0, text("prompt"))
	f.load(50)
	if got, d, _ := f.pick(text("prompt")); got != 0 || d.Reason != ReasonOnlyCandidate {
		t.Errorf("replica %d for %s", got, d.Reason)
	}
}

func TestThreshold(t *testing.T) {
	for _, tc := range []struct {
		prompt string
		pin    bool
	}{{"01234vwxyz", true}, {"0123uvwxyz", false}} {
		f := newFleet(t, 3)
		f.warm(1, text("0123456789"))
		got, d, _ := f.pick(text(tc.prompt))
		if pin := got == 1; pin != tc.pin {
			t.Errorf("%s: replica %d for %s, pin %v", tc.prompt, got, d.Reason, tc.pin)
		}
	}
}

func TestLeadAndTailDoNotCount(t *testing.T) {
	req := func(body string) *Request {
		return &Request{Text: []byte("user:" + body + "\xff."), Lead: 5, Tail: 2}
	}
	for _, tc := range []struct {
		prompt string
		score  float64
	}{{"hello", 1}, {"hi", 0.5}, {"2+2", 0}, {"h", 1}, {"jello", 0}} {
		f := newFleet(t, 1)
		f.warm(0, req("hello"))
		if _, d, _ := f.pick(req(tc.prompt)); d.Score != tc.score {
			t.Errorf("%s: score %v, want %v", tc.prompt, d.Score, tc.score)
		}
	}
}

func TestAContinuationClearsTheThreshold(t *testing.T) {
	f := newFleet(t, 3)
	first := bytes.Repeat([]byte("q"), 36)
	f.warm(2, &Request{Text: first})
	second := append(bytes.Clone(first), bytes.Repeat([]byte("a"), 2000)...)
	got, d, _ := f.pick(&Request{Text: second})
	if got != 2 || d.Reason != ReasonContinuation {
		t.Errorf("replica %d for %s (score %v), want 2 for continuation", got, d.Reason, d.Score)
	}
	// The mere beginning of a recorded prompt is no conversation that goes on.
	if _, d, _ := f.pick(&Request{Text: append(bytes.Repeat([]byte("q"), 35), bytes.Repeat([]byte("b"), 2000)...)}); d.Reason != ReasonCold {
		t.Errorf("reason %s, want cold", d.Reason)
	}
}

func TestUnrelatedPromptsSpreadOverIdleReplicas(t *testing.T) {
	f := newFleet(t, 3)
	served := make([]int, 3)
	for i := range 30 {
		got, _, lease := f.pick(text(fmt.Sprintf("%d: something else altogether", i*7919)))
		lease.Answered(true)
		lease.Release()
		served[got]++
	}
	for _, n := range served {
		if n < 9 || n > 11 {
			t.Errorf("served %v, want 10 each, ± 1", served)
		}
	}
}

func TestTiesGoToTheHolderThenToTheLeastWarmedThenRotate(t *testing.T) {
	f := newFleet(t, 4)
	f.warm(0, text("other 1"))
	f.warm(2, text("other 2"))
	f.warm(2, text("other 3"))
	f.warm(1, text("shared system prompt, a"))
	f.load(3, 0, 0, 3) // 1 and 2 are idle, and 1 holds the prompt
	if got, _, _ := f.pick(text("shared system prompt, b")); got != 1 {
		t.Errorf("replica %d, want the holder", got)
	}
	f = newFleet(t, 3)
	f.warm(0, text("x"))
	f.warm(2, text("y"))
	if got, _, _ := f.pick(text("something else")); got != 1 {
		t.Errorf("replica %d, want the least warmed", got)
	}
	f = newFleet(t, 3)
	seen := make(map[int]bool)
	for range 3 {
		got, _, lease := f.pick(&Request{})
		lease.Release()
		seen[got] = true
	}
	if len(seen) != 3 {
		t.Errorf("equals were not taken in turn: %v", seen)
	}
}

func TestNoPromptGoesByLoad(t *testing.T) {
	f := newFleet(t, 3)
	f.load(1, 0, 2)
	for _, req := range []*Request{{}, {Text: []byte("user:"), Lead: 5}} {
		got, d, lease := f.pick(req)
		if got != 1 || d.Reason != ReasonNoPrompt {
			t.Errorf("replica %d for %s, want 1 for no_prompt", got, d.Reason)
		}
		lease.Release()
	}
}

func TestOnlyWhatWasServedIsRecorded(t *testing.T) {
	f := newFleet(t, 2)
	first, _, lease := f.pick(text("prompt"))
	if got, _, sibling := f.pick(text("prompt")); got != first {
		t.Error("a sibling of a request on its way does not see it")
	} else {
		sibling.Release()
	}
	lease.Answered(false)
	lease.Answered(true) // too late
	lease.Release()
	lease.Release()
	for key, n := range f.prefixes.Prompts() {
		if n != 0 {
			t.Errorf("%s has %d prompts, want none", key, n)
		}
	}
	if f.inFlight() != 0 {
		t.Errorf("%d in flight", f.inFlight())
	}
	_, _, lease = f.pick(text("prompt"))
	lease.Answered(true)
	lease.Release()
	total := 0
	for _, n := range f.prefixes.Prompts() {
		total += n
	}
	if total != 1 {
		t.Errorf("%d prompts recorded, want 1", total)
	}
}

func TestLimitsAreKeptInTheCriticalSection(t *testing.T) {
	f := newFleet(t, 2)
	for i := range f.all {
		f.all[i].Limit = 3
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	served := 0
	for range 50 {
		wg.Go(func() {
			candidates, _ := f.available()
			if _, ok := f.strategy.Pick(text("prompt"), candidates, new(Lease)); ok {
				mu.Lock()
				served++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if served != 6 {
		t.Errorf("%d served, want 6", served)
	}
}

func TestTheTransportsCountIsAFloor(t *testing.T) {
	f := newFleet(t, 2)
	f.all[0].Floor = 5
	f.load(0, 3)
	if got, d, _ := f.pick(text("prompt")); got != 1 || d.Load != 3 {
		t.Errorf("replica %d at load %d, want 1 at 3", got, d.Load)
	}
}

// Two hundred and fifty-six at once must not go to the same replica.
func TestConcurrentPicksSeeEachOther(t *testing.T) {
	f := newFleet(t, 4)
	served := make([]int, 4)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 256 {
		wg.Go(func() {
			candidates, index := f.available()
			d, _ := f.strategy.Pick(text(fmt.Sprintf("%d unrelated", i*104729)), candidates, new(Lease))
			mu.Lock()
			served[index[d.Index]]++
			mu.Unlock()
		})
	}
	wg.Wait()
	for _, n := range served {
		if n > 256/4*5/4+1 {
			t.Errorf("served %v", served)
		}
	}
}

func TestABurstBehindOneSystemPromptSpreads(t *testing.T) {
	f := newFleet(t, 3)
	system := string(bytes.Repeat([]byte("s"), 2000))
	f.warm(0, text(system+"warm-up"))
	served := make([]int, 3)
	for i := range 100 {
		got, _, _ := f.pick(text(fmt.Sprintf("%s%d?", system, i*7919)))
		served[got]++
	}
	for _, n := range served {
		if n < 28 || n > 40 {
			t.Errorf("served %v, want 28…40 each", served)
		}
	}
}

func TestAMemberThatLeftIsForgotten(t *testing.T) {
	f := newFleet(t, 2)
	f.warm(0, text("prompt"))
	f.prefixes.Leave(f.all[0].Member)
	stranger := f.prefixes.Join("stranger")
	got, d, lease := f.pick(text("prompt"), 1)
	if d.Score != 0 {
		t.Errorf("replica %d scores %v after it has left", got, d.Score)
	}
	lease.Answered(true)
	lease.Release()
	f.prefixes.Do(func(x PrefixIndex) {
		if n := x.Prompts(stranger.slot); n != 0 {
			t.Errorf("the slot's new owner got %d prompts of the old one", n)
		}
	})
}

func TestAnAddressIsForgottenWhenNothingIsLeft(t *testing.T) {
	loads := NewLoads(nil)
	load := loads.Acquire("a")
	lease := new(Lease)
	(LeastLoad{loads}).Pick(&Request{}, []Candidate{{Load: load}}, lease)
	loads.Release(load)
	if again := loads.Acquire("a"); again != load {
		t.Error("an address with requests in flight was forgotten")
	} else {
		loads.Release(again)
	}
	lease.Release()
	if n := len(loads.Snapshot()); n != 0 {
		t.Errorf("%d addresses left", n)
	}
	// An unloaded configuration picks once more while a new one knows the address.
	fresh := loads.Acquire("a")
	(LeastLoad{loads}).Pick(&Request{}, []Candidate{{Load: load}}, lease)
	if fresh.InFlight() != 1 {
		t.Errorf("%d in flight, want the old configuration's request to count", fresh.InFlight())
	}
	lease.Release()
	if fresh.InFlight() != 0 {
		t.Errorf("%d in flight", fresh.InFlight())
	}
}

// Whatever happens, in any order, each reservation is given back once.
func TestLeasesUnderRace(t *testing.T) {
	f := newFleet(t, 4)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			for j := range 50 {
				candidates, _ := f.available()
				lease := new(Lease)
				f.strategy.Pick(text(fmt.Sprintf("%d %d", i%8, j)), candidates, lease)
				var both sync.WaitGroup
				both.Go(func() { lease.Answered(j%2 == 0) })
				both.Go(lease.Release)
				both.Wait()
				if lease.Held() {
					t.Error("still held")
				}
			}
		})
	}
	wg.Wait()
	if f.inFlight() != 0 {
		t.Errorf("%d in flight", f.inFlight())
	}
}

// Thirty conversations get their answers at the same time, and some are back before the others: a replica that has nothing to do for a moment is
// not idle, and nobody moves there. One that has been idle for long is.
func TestAFurtherTurnIsNotMovedByAWave(t *testing.T) {
	for _, tc := range []struct {
		pause time.Duration
		want  Reason
	}{{10 * time.Millisecond, ReasonCache}, {time.Second, ReasonOverloaded}} {
		now := time.Duration(0)
		f := newFleetAt(t, 3, func() time.Duration { return now })
		f.warm(0, text("a conversation, "))
		var ended []*Lease
		for i := range 30 {
			lease := new(Lease)
			(LeastLoad{f.loads}).Pick(&Request{}, f.all[i%3:i%3+1], lease)
			ended = append(ended, lease)
		}
		for _, lease := range ended {
			lease.Release()
		}
		now += tc.pause
		f.load(4, 0, 0) // those of replica 0 are back first
		if _, d, _ := f.pick(text("a conversation, continued")); d.Reason != tc.want {
			t.Errorf("after %v: %s, want %s", tc.pause, d.Reason, tc.want)
		}
		// To begin another conversation behind the same words is nothing that would be lost elsewhere.
		if _, d, _ := f.pick(text("a conversation, ")); d.Reason != ReasonOverloaded {
			t.Errorf("the same prompt again after %v: %s, want overloaded", tc.pause, d.Reason)
		}
	}
}

func TestHoldersWithinABlockAreEquals(t *testing.T) {
	system := string(bytes.Repeat([]byte("s"), 6400))
	f := newFleet(t, 2)
	f.warm(0, text(system+"first question of somebody"))
	f.warm(1, text(system+"second question"))
	f.load(1, 0)
	if got, _, _ := f.pick(text(system + "first question of another")); got != 1 {
		t.Error("a few bytes more outweighed a request in flight")
	}
	if got, d, _ := f.pick(text(system + "first question of somebody")); got != 0 || d.Reason != ReasonCache {
		t.Errorf("replica %d for %s, want the one that has served this very prompt", got, d.Reason)
	}
	if got, _, _ := f.pick(text(system + "first question of somebody, answer, and a further turn")); got != 0 {
		t.Error("a conversation moved")
	}
	f = newFleet(t, 2)
	f.warm(0, text("thirty bytes of a short prompt, a"))
	f.warm(1, text("thirty bytes of a short prompt, bc"))
	f.load(1, 0)
	if got, _, _ := f.pick(text("thirty bytes of a short prompt, ad")); got != 0 {
		t.Error("in a short prompt every byte counts")
	}
}

func TestWeightsSayHowMuchAReplicaCanTake(t *testing.T) {
	f := newFleet(t, 2)
	f.all[0].Weight = 2
	served := make([]int, 2)
	for i := range 30 {
		got, _, _ := f.pick(text(fmt.Sprintf("%d is held open", i*7919)))
		served[got]++
	}
	if served[0] != 20 {
		t.Errorf("served %v, want 20 and 10", served)
	}
	f = newFleet(t, 2)
	f.all[0].Weight = 2
	f.warm(0, text("prompt"))
	f.load(6, 0)
	if got, d, _ := f.pick(text("prompt")); got != 1 || d.Reason != ReasonOverloaded {
		t.Errorf("replica %d for %s", got, d.Reason)
	}
	f = newFleet(t, 2)
	f.all[0].Weight = 2
	f.warm(0, text("prompt"))
	f.load(4, 0)
	if got, d, _ := f.pick(text("prompt")); got != 0 || d.Reason != ReasonCache {
		t.Errorf("replica %d for %s", got, d.Reason)
	}
}
