package selection_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/rolter-ai/caddy-rolter/selection"
	"github.com/rolter-ai/caddy-rolter/trie"
)

// lru is the cache of an engine: whole prompts, of so many tokens in all, of 4 bytes each.
type lru struct {
	capacity int
	prompts  []string // the latest last
}

// serve returns how many tokens of the prompt were cached.
func (c *lru) serve(prompt string) (cached int) {
	for i, p := range c.prompts {
		if p == prompt {
			cached = len(p) / 4
			c.prompts = append(c.prompts[:i:i], c.prompts[i+1:]...)
			break
		}
	}
	c.prompts = append(c.prompts, prompt)
	used := 0
	for i := len(c.prompts) - 1; i >= 0; i-- {
		if used += len(c.prompts[i]) / 4; used > c.capacity {
			c.prompts = c.prompts[i+1:]
			break
		}
	}
	return cached
}

// one is a replica behind cache_aware, with a real tree.
type one struct {
	tree      *trie.Tree
	prefixes  *selection.Prefixes
	strategy  selection.Strategy
	candidate selection.Candidate
	cache     lru
	capacity  int64 // that the cache is said to have, in tokens
	rng       *rand.Rand
}

func newOne(capacity int) *one {
	o := &one{tree: trie.New(), cache: lru{capacity: capacity}, rng: rand.New(rand.NewPCG(1, 2))}
	loads := selection.NewLoads(nil)
	o.prefixes = selection.NewPrefixes(o.tree)
	o.prefixes.Capacity = func(string) int64 { return o.capacity }
	o.strategy = &selection.CacheAware{Loads: loads, Prefixes: o.prefixes, Threshold: 0.5, OverloadMargin: 2, OverloadRatio: 1.5}
	o.candidate = selection.Candidate{Load: loads.Acquire("a"), Member: o.prefixes.Join("a")}
	return o
}

// ask serves a prompt of about 8 KiB, one of many, and returns what was predicted and what was delivered, as shares of it.
func (o *one) ask(which int) (predicted, delivered float64) {
	prompt := fmt.Sprintf("%08d", which*7919)
	for len(prompt) < 8192 {
		prompt += prompt
	}
	lease := new(selection.Lease)
	d, _ := o.strategy.Pick(&selection.Request{Text: []byte(prompt)}, []selection.Candidate{o.candidate}, lease)
	cached := o.cache.serve(prompt)
	lease.Answered(true)
	lease.Delivered(len(prompt)/4, cached)
	lease.Delivered(len(prompt)/4, 0) // a second report of the same answer does not count
	lease.Release()
	return d.Score, float64(cached) / float64(len(prompt)/4)
}

// overclaim is the share of what was predicted over n requests, for prompts of which the late ones are asked again more often, that was not delivered.
func (o *one) overclaim(n int) float64 {
	predicted, delivered := 0.0, 0.0
	for range n {
		which := int(o.rng.ExpFloat64() * 40)
		p, d := o.ask(which)
		if p > 0.5 {
			predicted += p
			delivered += min(p, d)
		}
	}
	return 1 - delivered/predicted
}

func TestARecordShrinksToASmallCache(t *testing.T) {
	o := newOne(20 * 2048) // 20 prompts
	o.capacity = 200 * 2048
	o.prefixes.Resize()
	before := o.overclaim(200)
	o.overclaim(1000)
	after := o.overclaim(500)
	if before < 0.3 || after > 0.25 {
		t.Errorf("of what was predicted %.2f was missing at first and %.2f after it was learned", before, after)
	}
	if text := o.tree.Text(0); text > 60*8192 {
		t.Errorf("%d bytes are recorded for a cache of %d", text, 20*8192)
	}
}

func TestARecordThatIsTrueStays(t *testing.T) {
	o := newOne(1000 * 2048)
	for range 5 {
		if missing := o.overclaim(300); missing > 0 {
			t.Errorf("%.2f was missing", missing)
		}
	}
	if n := o.tree.Prompts(0); n < 100 {
		t.Errorf("%d prompts are recorded", n)
	}
}

func TestARestartIsNoticed(t *testing.T) {
	o := newOne(1000 * 2048)
	o.overclaim(1000)
	before := o.prefixes.Prompts()["a"]
	o.cache.prompts = nil
	wrong := 0
	for i := range 40 {
		if p, d := o.ask(i); p > 0.5 && d == 0 {
			wrong++
		}
	}
	if wrong > 5 {
		t.Errorf("%d of %d predictions were wrong after the restart", wrong, 40)
	}
	if missing := o.overclaim(500); missing > 0.01 {
		t.Errorf("%.3f is missing after it has started again (%d prompts before)", missing, before)
	}
}

func TestABoundThatWasLearnedGrowsAgain(t *testing.T) {
	o := newOne(20 * 2048)
	o.overclaim(1000)
	small := o.tree.Text(0)
	o.cache.capacity = 1000 * 2048
	o.overclaim(4000)
	if text := o.tree.Text(0); text < 2*small {
		t.Errorf("%d bytes recorded, %d when the cache was small", text, small)
	}
}

// Nearly all conversations go on at once. The few that go on late, and find nothing, tell how much there is room for.
func TestTheSizeOfACacheIsLearned(t *testing.T) {
	for _, capacity := range []int{10, 20, 40} { // prompts
		o := newOne(capacity * 2048)
		latest := 0
		for range 5000 {
			switch n := o.rng.IntN(100); {
			case n < 50:
				latest++
				o.ask(latest)
			case n < 92:
				o.ask(max(latest-o.rng.IntN(4), 0))
			default:
				o.ask(max(latest-o.rng.IntN(4*capacity), 0))
			}
		}
		if text := float64(o.tree.Text(0)) / 8192; text < 0.6*float64(capacity) || text > 2*float64(capacity) {
			t.Errorf("%.1f prompts are recorded for a cache of %d", text, capacity)
		}
	}
}

// In an engine that goes by deadlines, what comes later may be prefilled before, and what was there is gone when its turn comes.
func TestOnePromptThatIsGoneTeachesNothingByDeadline(t *testing.T) {
	for _, byDeadline := range []bool{false, true} {
		o := newOne(1000 * 2048)
		o.candidate.ByDeadline = byDeadline
		for i := range 20 {
			o.ask(i)
		}
		o.cache.prompts = slices.Delete(o.cache.prompts, 9, 10)
		sent := o.tree.Text(0)
		o.ask(9)
		if text := o.tree.Text(0); text == sent != byDeadline {
			t.Errorf("by deadline: %v: %d bytes are recorded of %d", byDeadline, text, sent)
		}
	}
}

func TestARestartTeachesNoSize(t *testing.T) {
	o := newOne(1000 * 2048)
	for i := range 200 {
		o.ask(i % 100)
	}
	o.cache.prompts = nil
	for i := range 200 {
		o.ask(i % 100)
	}
	if text := o.tree.Text(0) / 8192; text < 100-4 {
		t.Errorf("%d of 100 prompts are recorded after a restart", text)
	}
}

func TestCapacityIsInTokens(t *testing.T) {
	o := newOne(1000 * 2048)
	o.capacity = 10 * 2048
	o.prefixes.Resize()
	for i := range 50 {
		o.ask(i)
	}
	prompts := func() int { return int(o.tree.Text(0)+4096) / 8192 } // one has lost its end
	if n := prompts(); n != 10 {
		t.Errorf("%d prompts are recorded, want the 10 that there is room for", n)
	}
	o.capacity = 0
	o.prefixes.Resize()
	for i := range 50 {
		o.ask(i)
	}
	if n := prompts(); n != 50 {
		t.Errorf("%d prompts are recorded without a bound", n)
	}
	o.prefixes.Forget(func(key string) bool { return key == "b" })
	if n := prompts(); n != 50 {
		t.Errorf("%d prompts are left after another replica was forgotten", n)
	}
	o.prefixes.Forget(func(key string) bool { return key == "a" })
	if n := o.prefixes.Prompts()["a"]; n != 0 {
		t.Errorf("%d prompts are recorded for an empty cache", n)
	}
}

func TestHostileFigures(t *testing.T) {
	o := newOne(1000 * 2048)
	for _, figures := range [][2]int{{0, 0}, {-1, 5}, {1, 1 << 62}, {1 << 62, 1}, {10, -3}} {
		for range 50 {
			lease := new(selection.Lease)
			o.strategy.Pick(&selection.Request{Text: make([]byte, 5000)}, []selection.Candidate{o.candidate}, lease)
			lease.Answered(true)
			lease.Delivered(figures[0], figures[1])
			lease.Release()
		}
	}
	if n := o.tree.Prompts(0); n > 1 {
		t.Errorf("%d prompts", n)
	}
	new(selection.Lease).Delivered(10, 10)
}

// A retry that is picked without a look at the prompt says nothing of the replica that failed before.
func TestFeedbackIsForTheReplicaThatAnswers(t *testing.T) {
	o := newOne(1000 * 2048)
	prompt := make([]byte, 8192)
	served := new(selection.Lease)
	o.strategy.Pick(&selection.Request{Text: prompt}, []selection.Candidate{o.candidate}, served)
	served.Answered(true)
	served.Release()
	for range 10 {
		lease := new(selection.Lease)
		o.strategy.Pick(&selection.Request{Text: prompt}, []selection.Candidate{o.candidate}, lease)
		lease.Release() // it failed, and another took the request
		lease.Delivered(2048, 0)
	}
	if n := o.prefixes.Prompts()["a"]; n != 1 {
		t.Errorf("%d prompts are recorded for a replica that did not answer, want what it had served", n)
	}
}
