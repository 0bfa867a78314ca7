package kvevents

import (
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of what is expected. A prompt of 131,072 tokens has 8,192 blocks of 16.
const (
	expectFor         = 3 * time.Second
	maxExpected       = 4096
	maxExpectedBlocks = 1 << 22
)

// Expectation is the handle of one Expect; 0 is none.
type Expectation uint64

// pending has the prompts that have been sent to engines, but whose events have not come: these take up to 75 ms after the response (vLLM 0.32), and the
// next request with the same prefix may be there before.
type pending struct {
	now    func() time.Duration
	count  atomic.Int64 // of list
	mu     sync.Mutex
	last   Expectation
	list   []expected // in the order of Expect, which is that of its ends too
	blocks int
}

// expected is a prompt that a source is about to hold.
type expected struct {
	id        Expectation
	over      bool
	residency *Residency
	lora      string
	size      int
	first     uint64   // of prefixes, beside the rest for speed
	prefixes  []uint64 // hashes to the end of each full block
	ends      time.Duration
}

// Expect notes that the source was sent the prompt, under the model's name, and will hold its full blocks soon: [Index.MatchExpected] sees them at once,
// for 3 s at most. It returns 0 where the source holds them already, and where there are none.
func (x *Index) Expect(q *Query, r *Residency, model string) Expectation {
	v := r.view.Load()
	q.hash(x)
	lora, spaces := v.spacesOf(model)
	size := v.blockSize(spaces)
	blocks := len(q.tokens) / size
	if blocks == 0 || blocks > maxExpectedBlocks {
		return 0
	}
	e := expected{residency: r, lora: lora, size: size, first: q.prefixOf(size)}
	if e.arrived(q.prefixOf(blocks * size)) {
		return 0
	}
	e.prefixes = make([]uint64, blocks)
	for i := range e.prefixes {
		e.prefixes[i] = q.prefixOf((i + 1) * size)
	}

	p := &x.pending
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last++
	e.id, e.ends = p.last, p.now()+expectFor
	p.list = append(p.list, e)
	p.blocks += blocks
	p.prune()
	return e.id
}

// arrived tells whether the last of the blocks is known to be held.
func (e *expected) arrived(last uint64) bool {
	return e.residency.page.onGPU(last^namespace(e.lora, e.size))&e.residency.bit != 0
}

// Withdraw takes back an Expect, as when the request has failed. An expectation that is over is passed over.
func (x *Index) Withdraw(id Expectation) {
	p := &x.pending
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := sort.Search(len(p.list), func(i int) bool { return p.list[i].id >= id }); i < len(p.list) && p.list[i].id == id {
		p.end(i)
	}
	p.prune()
}

// drop ends all that is expected of a source.
func (p *pending) drop(r *Residency) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.list {
		if p.list[i].residency == r {
			p.end(i)
		}
	}
	p.prune()
}

func (p *pending) end(i int) {
	e := &p.list[i]
	p.blocks -= len(e.prefixes)
	e.over, e.residency, e.prefixes = true, nil, nil
}

// prune removes what is over, from the oldest on, and the oldest where there are too many.
func (p *pending) prune() {
	now, n := p.now(), 0
	for n < len(p.list) {
		e := &p.list[n]
		if !e.over && now < e.ends && len(p.list)-n <= maxExpected && p.blocks <= maxExpectedBlocks {
			break
		}
		p.end(n)
		n++
	}
	p.list = slices.Delete(p.list, 0, n)
	p.count.Store(int64(len(p.list)))
}

// MatchExpected extends what Match has filled in by what is expected. It is cheap while nothing is, and is meant to be called right before the choice,
// under the lock under which Expect is called after it: so that the second of two requests that come at once sees where the first one goes.
func (x *Index) MatchExpected(q *Query, holdings []Holding) {
	p := &x.pending
	if p.count.Load() == 0 {
		return
	}
	q.hash(x)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.prune()
	for i := range p.list {
		e := &p.list[i]
		if e.over || e.size > len(q.tokens) || e.size%q.grain != 0 || q.prefixOf(e.size) != e.first {
			continue
		}
		// Equal hashes of prefixes mean equal prefixes, and these equal ones of all that is shorter.
		common := sort.Search(min(len(e.prefixes), len(q.tokens)/e.size), func(i int) bool { return q.prefixOf((i+1)*e.size) != e.prefixes[i] })
		for h := range holdings {
			if holdings[h].Residency == e.residency {
				holdings[h].expect(e, common*e.size, len(q.tokens))
			}
		}
		if e.arrived(e.prefixes[len(e.prefixes)-1]) {
			p.end(i) // after it was counted: it may have arrived since Match
		}
	}
}

// expect extends a holding by so many tokens that are expected.
func (h *Holding) expect(e *expected, tokens, length int) {
	v := h.Residency.view.Load()
	if lora, _ := v.spacesOf(h.Model); lora != e.lora || h.Total == 0 {
		return
	}
	h.Resident = max(h.Resident, tokens)
	h.Score = max(h.Score, min(1, float64(tokens)/float64(h.Total)))
	cached := min(tokens, (length-1)/e.size*e.size)
	h.Cached = max(h.Cached, cached-cached%v.align)
}
