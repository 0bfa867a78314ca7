package replica

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

const second = time.Second

func testEngine(timing Timing, capacity int) *Engine {
	return NewEngine(timing, NewCache(capacity), func(resident, prompt int) int { return CachedTokens(10, resident, prompt) })
}

// job has a prompt of so many tokens in blocks of 10, the first of which are numbered from key on.
func job(key uint64, prompt, output int) *Job {
	j := &Job{PromptBlocks: prompt / 10, PromptTokens: prompt, OutputTokens: output, BlockSize: 10}
	for i := range (prompt + output - 1) / 10 {
		j.Keys = append(j.Keys, key+uint64(i))
	}
	return j
}

// drain lets everything happen that will.
func drain(e *Engine) {
	for at, ok := e.Next(); ok; at, ok = e.Next() {
		e.Advance(at)
	}
}

func TestPrefillIsFirstComeFirstServed(t *testing.T) {
	e := testEngine(Timing{PrefillRate: 100, DecodeTime: second}, 0)
	a, b, c := job(0, 200, 3), job(1000, 100, 1), job(2000, 50, 2)
	e.Submit(0, a)
	e.Submit(second, b)
	e.Submit(second, c)
	if e.Running() != 1 || e.Waiting() != 2 {
		t.Errorf("%d running, %d waiting", e.Running(), e.Waiting())
	}
	e.Advance(time.Hour) // however late, events have their own times
	for i, w := range []struct{ got, want time.Duration }{
		{a.Started, 0}, {a.FirstToken, 2 * second}, {a.Finished, 4 * second},
		{b.Started, 2 * second}, {b.FirstToken, 3 * second}, {b.Finished, 3 * second},
		{c.Started, 3 * second}, {c.FirstToken, 3500 * time.Millisecond}, {c.Finished, 4500 * time.Millisecond},
	} {
		if w.got != w.want {
			t.Errorf("time %d: %v, want %v", i, w.got, w.want)
		}
	}
}

func TestOnlyUncachedTokensTakeTime(t *testing.T) {
	e := testEngine(Timing{PrefillRate: 100, DecodeTime: second}, 0)
	a, again, longer := job(0, 100, 1), job(0, 100, 1), job(0, 150, 1)
	for _, j := range []*Job{a, again, longer} {
		e.Submit(time.Hour, j)
		e.Advance(time.Hour)
		drain(e)
	}
	// Of a prompt of whole blocks that are all resident, the last one is computed again.
	for i, j := range []*Job{a, again, longer} {
		want := []int{0, 90, 100}[i]
		if j.CachedTokens != want {
			t.Errorf("job %d: %d tokens cached, want %d", i, j.CachedTokens, want)
		}
		if took, want := j.FirstToken-j.Started, time.Duration(j.PromptTokens-want)*second/100; took != want {
			t.Errorf("job %d: prefill took %v, want %v", i, took, want)
		}
	}
}

// The answer's blocks become resident as they fill; the last sampled token is never computed.
func TestAnswerFillsBlocks(t *testing.T) {
	for _, c := range []struct{ prompt, output, blocks int }{
		{25, 5, 2}, {25, 6, 3}, {20, 10, 2}, {20, 11, 3}, {29, 1, 2}, {5, 50, 5}, {30, 1, 3},
	} {
		e := testEngine(Timing{}, 0)
		e.Submit(0, job(0, c.prompt, c.output))
		drain(e)
		if got := e.Cache().Len(); got != c.blocks {
			t.Errorf("%d + %d tokens: %d blocks, want %d", c.prompt, c.output, got, c.blocks)
		}
	}
	e := testEngine(Timing{PrefillRate: 10, DecodeTime: second}, 0)
	e.Submit(0, job(0, 20, 30)) // prefill ends at 2 s, token n comes at 1+n s, the 11th fills the third block
	e.Advance(12*second - 1)
	if got := e.Cache().Len(); got != 2 {
		t.Errorf("%d blocks before the third is full", got)
	}
	e.Advance(12 * second)
	if got := e.Cache().Len(); got != 3 {
		t.Errorf("%d blocks when the third is full", got)
	}
}

func TestMaxRunningMakesRequestsWait(t *testing.T) {
	e := testEngine(Timing{PrefillRate: 1000, DecodeTime: second, MaxRunning: 2}, 0)
	a, b, c := job(0, 10, 11), job(100, 10, 6), job(200, 10, 1)
	for _, j := range []*Job{a, b, c} {
		e.Submit(0, j)
	}
	e.Advance(second)
	if e.Running() != 2 || e.Waiting() != 1 {
		t.Errorf("%d running, %d waiting", e.Running(), e.Waiting())
	}
	drain(e)
	if c.Started != b.Finished {
		t.Errorf("started %v, want %v, when a slot became free", c.Started, b.Finished)
	}
}

func TestMaxQueuedCountsAllInFlight(t *testing.T) {
	e := testEngine(Timing{MaxQueued: 3}, 0)
	if err := e.Submit(0, job(0, 10, 2), job(100, 10, 2)); err != nil {
		t.Fatal(err)
	}
	if err := e.Submit(0, job(200, 10, 2), job(300, 10, 2)); !errors.Is(err, ErrQueueFull) || e.Waiting() != 1 {
		t.Errorf("a request of two for one place: %v, %d waiting", err, e.Waiting())
	}
	if err := e.Submit(0, job(200, 10, 2)); err != nil {
		t.Error(err)
	}
	drain(e)
	if err := e.Submit(time.Hour, job(400, 10, 2)); err != nil {
		t.Error("an idle engine rejects", err)
	}
}

func TestAbortFreesWhatIsHeld(t *testing.T) {
	newest := func() (*Engine, []*Job) {
		e := testEngine(Timing{PrefillRate: 10, DecodeTime: second, MaxRunning: 2}, 0)
		jobs := []*Job{job(0, 20, 100), job(100, 20, 100), job(200, 20, 1)}
		for _, j := range jobs {
			e.Submit(0, j)
		}
		e.Advance(3 * second) // the first decodes since 2 s, the second prefills until 4 s, the third waits
		return e, jobs
	}
	for phase := range 3 {
		e, jobs := newest()
		j := jobs[phase]
		e.Abort(3*second, j)
		e.Abort(3*second, j) // of no effect
		if j.Phase != Aborted || j.Finished != 3*second {
			t.Errorf("job %d: phase %v at %v", phase, j.Phase, j.Finished)
		}
		wantGenerated, wantStart := []int{2, 0, 0}[phase], []time.Duration{4 * second, 3 * second, 0}[phase]
		if j.Generated != wantGenerated {
			t.Errorf("job %d: %d tokens, want %d", phase, j.Generated, wantGenerated)
		}
		drain(e)
		if got := jobs[2].Started; got != wantStart {
			t.Errorf("job %d aborted: the third starts at %v, want %v", phase, got, wantStart)
		}
		if e.Running()+e.Waiting()+e.UsedBlocks() != 0 {
			t.Errorf("job %d aborted: %d running, %d waiting, %d blocks held in the end", phase, e.Running(), e.Waiting(), e.UsedBlocks())
		}
		if prefilled := e.Cache().Lookup(jobs[1].Keys[:2]) == 2; prefilled != (phase != 1) {
			t.Errorf("job %d aborted: prompt of the second resident: %v", phase, prefilled)
		}
	}
}

// A request whose blocks do not fit beside those of the running ones waits for them; alone it is let in.
func TestFullCacheMakesRequestsWait(t *testing.T) {
	e := testEngine(Timing{PrefillRate: 1000, DecodeTime: second}, 10)
	a, b, huge := job(0, 60, 3), job(100, 50, 3), job(200, 200, 3)
	for _, j := range []*Job{a, b, huge} {
		e.Submit(0, j)
	}
	drain(e)
	if b.Started != a.Finished || huge.Started != b.Finished || huge.Phase != Done {
		t.Errorf("started %v and %v, want %v and %v", b.Started, huge.Started, a.Finished, b.Finished)
	}
}

// TestEngineKeepsItsLimits drives an engine with random requests and checks after every step what must hold always.
func TestEngineKeepsItsLimits(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		timing := Timing{PrefillRate: 1000, DecodeTime: 10 * time.Millisecond, MaxRunning: 1 + r.IntN(5), MaxQueued: r.IntN(20),
			Scheduling: []Scheduling{FIFO, ByPriority}[seed%2]}
		e := testEngine(timing, r.IntN(50))
		var all []*Job
		started := 0
		now := time.Duration(0)
		for range 500 {
			now += time.Duration(r.IntN(100)) * time.Millisecond
			switch {
			case r.IntN(4) > 0:
				j := job(uint64(r.IntN(5))*1000, 1+r.IntN(200), 1+r.IntN(40))
				j.Priority = int64(r.IntN(3))
				j.Notify = func() {
					if j.Phase != Prefilling {
						return
					}
					started++
					for _, other := range all {
						if other.Phase == Waiting && timing.Scheduling.before()(other, j) {
							t.Fatalf("seed %d: prefill out of order", seed)
						}
					}
				}
				if e.Submit(now, j) == nil {
					all = append(all, j)
				}
			case r.IntN(20) == 0:
				e.SetSpeed(now, []float64{0.1, 0.5, 1, 3}[r.IntN(4)])
			case r.IntN(20) == 0:
				e.Advance(now)
				inFlight := e.Running() + e.Waiting()
				if got := len(e.Stop(now)); got != inFlight || e.Cache().Len() != 0 {
					t.Fatalf("seed %d: %d of %d jobs ended, %d blocks left", seed, got, inFlight, e.Cache().Len())
				}
				e.Start()
			case len(all) > 0:
				e.Abort(now, all[r.IntN(len(all))])
			default:
				e.Advance(now)
			}
			counts := map[Phase]int{}
			for _, j := range all {
				counts[j.Phase]++
			}
			if counts[Prefilling] > 1 || counts[Prefilling]+counts[Decoding] != e.Running() || counts[Waiting] != e.Waiting() ||
				e.Running() > timing.MaxRunning || timing.MaxQueued > 0 && e.Running()+e.Waiting() > timing.MaxQueued {
				t.Fatalf("seed %d: %v, %d running, %d waiting, limits %+v", seed, counts, e.Running(), e.Waiting(), timing)
			}
		}
		drain(e)
		if e.Running()+e.Waiting()+e.Cache().Pinned() != 0 {
			t.Fatalf("seed %d: something is left over", seed)
		}
		for _, j := range all {
			if j.Phase == Done && (j.Started < j.Submitted || j.FirstToken < j.Started || j.Finished < j.FirstToken || j.Generated != j.OutputTokens) {
				t.Fatalf("seed %d: %+v", seed, j)
			}
		}
		if started == 0 {
			t.Fatalf("seed %d: nothing ran", seed)
		}
	}
}

// A replica of 10 tokens a second that changes its speed: the job has 4 s of prefill and 2 s for each token after the
// first.
func TestSetSpeed(t *testing.T) {
	type change struct {
		at     time.Duration
		factor float64
	}
	for _, c := range []struct {
		name                 string
		slowFactor           float64
		changes              []change
		firstToken, finished time.Duration
	}{
		{"none", 1, nil, 4 * second, 10 * second},
		{"to what it was", 1, []change{{1 * second, 1}, {7 * second, 1}}, 4 * second, 10 * second},
		{"half from the start", 1, []change{{0, .5}}, 8 * second, 20 * second},
		{"half in prefill", 1, []change{{2 * second, .5}}, 6 * second, 18 * second},
		{"half in prefill for a while", 1, []change{{2 * second, .5}, {4 * second, 1}}, 5 * second, 11 * second},
		{"half at the first token", 1, []change{{4 * second, .5}}, 4 * second, 16 * second},
		{"half in decoding, between tokens", 1, []change{{7 * second, .5}}, 4 * second, 13 * second},
		{"half in decoding for a while", 1, []change{{7 * second, .5}, {9 * second, 1}}, 4 * second, 11 * second},
		{"double between tokens", 1, []change{{5 * second, 2}}, 4 * second, 7500 * time.Millisecond},
		{"a slow job", 2, []change{{4 * second, .5}}, 12 * second, 36 * second},
		{"a slow job on a fast engine", 2, []change{{4 * second, 2}}, 6 * second, 12 * second},
		{"after the end", 1, []change{{time.Hour, .5}}, 4 * second, 10 * second},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := testEngine(Timing{PrefillRate: 10, DecodeTime: 2 * second}, 0)
			j := job(0, 40, 4)
			j.SlowFactor = c.slowFactor
			e.Submit(0, j)
			tokens := 0
			for _, change := range c.changes {
				before := j.TokensAt(change.at)
				e.SetSpeed(change.at, change.factor)
				if now := j.TokensAt(change.at); now < max(before, tokens) {
					t.Errorf("%d tokens, had %d", now, before)
				}
				tokens = j.TokensAt(change.at)
			}
			drain(e)
			if j.FirstToken != c.firstToken || j.Finished != c.finished || j.Generated != 4 {
				t.Errorf("first token %v, finished %v, want %v and %v; %d tokens", j.FirstToken, j.Finished, c.firstToken, c.finished, j.Generated)
			}
			next := job(1000, 20, 1)
			e.Submit(2*time.Hour, next)
			drain(e)
			last := 1.0
			if n := len(c.changes); n > 0 {
				last = c.changes[n-1].factor
			}
			if took, want := next.FirstToken-next.Started, scale(2*second, 1/last); took != want {
				t.Errorf("the next prefill took %v, want %v", took, want)
			}
		})
	}
	for _, factor := range []float64{0, -1, math.NaN(), math.Inf(1)} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("a speed of %v passes", factor)
				}
			}()
			testEngine(Timing{}, 0).SetSpeed(0, factor)
		}()
	}
}

// Blocks of the answer become resident at the time of their tokens, also after a change of speed.
func TestSetSpeedMovesAnswerBlocks(t *testing.T) {
	e := testEngine(Timing{PrefillRate: 10, DecodeTime: second}, 0)
	e.Submit(0, job(0, 20, 30)) // token n comes at 1+n s, the 11th fills the third block
	e.SetSpeed(7*second, .5)    // with the 6th
	e.Advance(17*second - 1)
	if got := e.Cache().Len(); got != 2 {
		t.Errorf("%d blocks before the third is full", got)
	}
	e.Advance(17 * second)
	if got := e.Cache().Len(); got != 3 {
		t.Errorf("%d blocks when the third is full", got)
	}
}

func TestStop(t *testing.T) {
	for _, scheduling := range []Scheduling{FIFO, ByPriority} {
		t.Run(string(scheduling), func(t *testing.T) {
			e := testEngine(Timing{PrefillRate: 10, DecodeTime: second, Scheduling: scheduling}, 20)
			told := 0
			e.Cache().OnRemove(func(uint64) { told++ })
			done, decoding, prefilling := job(0, 20, 1), job(100, 20, 100), job(200, 20, 1)
			late, urgent := job(300, 20, 1), job(400, 20, 1)
			late.Priority, urgent.Priority = 5, -5
			all := []*Job{done, decoding, prefilling, late, urgent}
			notified := make(map[*Job]Phase)
			for i, j := range all {
				j.Notify = func() { notified[j] = j.Phase }
				at := time.Duration(0)
				if i > 2 {
					at = 4 * second
				}
				if err := e.Submit(at, j); err != nil {
					t.Fatal(err)
				}
			}
			ended := e.Stop(5 * second) // done since 2 s, decoding since 4 s
			if want := all[1:]; !slices.Equal(ended, want) {
				t.Errorf("%d jobs ended, or in another order", len(ended))
			}
			for i, j := range all {
				want := Aborted
				if j == done {
					want = Done
				}
				if j.Phase != want || notified[j] != want || j != done && j.Finished != 5*second {
					t.Errorf("job %d: phase %v, told %v, finished %v", i, j.Phase, notified[j], j.Finished)
				}
			}
			if decoding.Generated != 2 {
				t.Errorf("%d tokens generated, want 2", decoding.Generated)
			}
			if e.Running()+e.Waiting()+e.UsedBlocks()+e.Cache().Len()+e.Cache().Pinned() != 0 {
				t.Errorf("%d running, %d waiting, %d blocks used, %d resident", e.Running(), e.Waiting(), e.UsedBlocks(), e.Cache().Len())
			}
			if told != 0 {
				t.Errorf("a dead process tells of %d blocks", told)
			}
			if _, ok := e.Next(); ok {
				t.Error("something happens on a stopped engine")
			}
			if err := e.Submit(6*second, job(0, 20, 1)); !errors.Is(err, ErrStopped) {
				t.Errorf("a stopped engine answers %v", err)
			}
			if again := e.Stop(7 * second); len(again) != 0 {
				t.Errorf("%d jobs ended twice", len(again))
			}
			e.Abort(7*second, prefilling) // of no effect

			e.Start()
			for _, j := range ended { // they can be sent once more, here or elsewhere
				if err := e.Submit(10*second, j); err != nil {
					t.Fatal(err)
				}
			}
			again := job(0, 20, 1)
			e.Submit(10*second, again)
			drain(e)
			if decoding.FirstToken != 12*second || decoding.Generated != 100 || decoding.Phase != Done || decoding.CachedTokens != 0 {
				t.Errorf("once more: %+v", decoding)
			}
			if again.CachedTokens != 0 || again.Phase != Done {
				t.Errorf("a prompt from before: %d tokens cached, phase %v", again.CachedTokens, again.Phase)
			}
			if e.Cache().Lookup(again.Keys) != 2 || e.Cache().Len() > 20 {
				t.Errorf("%d blocks in the cache", e.Cache().Len())
			}
		})
	}
}

func TestCachedTokensIsVLLMsRule(t *testing.T) {
	for _, c := range []struct{ resident, prompt, want int }{
		{0, 100, 0}, {3, 142, 96}, {4, 142, 128}, {9, 142, 128}, {4, 128, 96}, {4, 129, 128}, {1, 0, 0}, {1, 32, 0},
	} {
		if got := CachedTokens(32, c.resident, c.prompt); got != c.want {
			t.Errorf("%d resident of %d tokens: %d, want %d", c.resident, c.prompt, got, c.want)
		}
	}
}

func TestBlockKeysAreChained(t *testing.T) {
	tokens := make([]uint32, 100)
	for i := range tokens {
		tokens[i] = uint32(i % 10) // every block has the same tokens
	}
	keys := BlockKeys(tokens, 10, "")
	if len(BlockKeys(tokens[:99], 10, "")) != 9 || !slices.Equal(BlockKeys(tokens[:55], 10, ""), keys[:5]) {
		t.Error("a prefix has other keys")
	}
	for i, key := range keys {
		if slices.Contains(keys[:i], key) {
			t.Errorf("key %d is not its parents' too", i)
		}
	}
	if salted := BlockKeys(tokens, 10, "x"); slices.ContainsFunc(salted, func(k uint64) bool { return slices.Contains(keys, k) }) {
		t.Error("salt does not reach all blocks")
	}
	if want := BlockKeys(tokens, 10, ""); !slices.Equal(keys, want) {
		t.Error("keys are not repeatable")
	}
}

// Durations that no clock can hold do not make time go back.
func TestAbsurdlySlow(t *testing.T) {
	e := testEngine(Timing{PrefillRate: 1e-300, DecodeTime: 1 << 60}, 0)
	j := job(0, 1000, 1000)
	j.SlowFactor = 1e6
	e.Submit(time.Hour, j)
	last := time.Hour
	for at, ok := e.Next(); ok; at, ok = e.Next() {
		if at < last {
			t.Fatalf("%v after %v", at, last)
		}
		last = at
		e.Advance(at)
	}
	if j.Phase != Done {
		t.Error(j.Phase)
	}
}

// A replay in virtual time: the second request's prompt begins as the first one's, of which two blocks of 512 tokens
// are cached by then.
func ExampleEngine() {
	wholeBlocks := func(resident, prompt int) int { return min(512*resident, prompt) }
	e := NewEngine(Timing{PrefillRate: 1024, DecodeTime: 10 * time.Millisecond}, NewCache(1000), wholeBlocks)
	first := &Job{Keys: []uint64{1, 2, 3}, PromptBlocks: 3, PromptTokens: 1400, OutputTokens: 50}
	second := &Job{Keys: []uint64{1, 2, 4}, PromptBlocks: 3, PromptTokens: 1536, OutputTokens: 50}
	e.Submit(0, first)
	e.Submit(10*time.Second, second)
	for at, ok := e.Next(); ok; at, ok = e.Next() {
		e.Advance(at)
	}
	fmt.Println(second.CachedTokens, second.FirstToken-second.Submitted, second.Finished-second.FirstToken)
	// Output: 1024 500ms 490ms
}

func BenchmarkEngine(b *testing.B) {
	e := testEngine(Timing{PrefillRate: 1e9, DecodeTime: time.Microsecond}, 100000)
	now := time.Duration(0)
	for i := 0; b.Loop(); i++ {
		now += 100 * time.Microsecond
		e.Submit(now, job(uint64(i%1000)*1000, 200, 100))
	}
}
