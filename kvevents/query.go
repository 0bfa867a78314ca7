package kvevents

import "math/bits"

// Query is a prompt that is looked up. It is for one goroutine at a time, and to be used again: what it needs is allocated once.
type Query struct {
	tokens []uint32
	salt   uint64
	grain  int
	prefix []uint64 // hashes of the first grain tokens, of twice as many and so on; none where nobody has asked yet

	asked []asked
	steps []step
	reach []uint64    // for each place in the prompt, the sources that hold blocks from the start to there
	onGPU [64]int     // how many tokens each source of a page was followed on the GPU,
	depth [64]int     // and in any medium,
	lost  [64]float64 // and what these are worth less there
}

// asked is a holding that is looked up.
type asked struct {
	view   *view
	lora   string
	spaces []space
	done   bool
}

// step is a block size, and the sources of a page that have blocks of it.
type step struct {
	space
	mask uint64
}

// Holding is what a source holds of a prompt.
type Holding struct {
	Residency *Residency // nil is passed over
	Model     string     // the name by which the engine is asked: an adapter's picks the adapter's blocks

	// Filled in by Match:

	// Score is how much of the prompt's full blocks, from the start to the first that is missing, the source holds: 0 to 1, where a block on the GPU
	// counts whole, one in the host's memory 0.8 and one on disk 0.5.
	Score float64
	// Resident is how many tokens are in these blocks.
	Resident int
	// Cached is how many tokens the engine will report as cached: whole blocks on the GPU, and never the last token, which is always computed.
	Cached int
	// Total is how many tokens are in the prompt's full blocks; where an engine has blocks of several sizes, of their common divisor.
	Total int

	stored uint64 // how many blocks the source had stored before
}

// worth is what a block counts by where it is.
var worth = [tiers]float64{GPU: 1, CPU: 0.8, Disk: 0.5}

// Reset makes the query one for a prompt. tokens must not change while the query is used; salt is the request's cache_salt.
func (q *Query) Reset(tokens []uint32, salt string) {
	q.tokens, q.salt = tokens, SaltDigest(salt)
	q.prefix = q.prefix[:0]
}

// hash makes the hashes of the prompt's prefixes, where they are not there. Views are to be loaded before, so that the grain divides their block sizes.
func (q *Query) hash(x *Index) {
	grain := int(x.grain.Load())
	if q.grain == grain && len(q.prefix) == len(q.tokens)/grain {
		return
	}
	q.grain, q.prefix = grain, q.prefix[:0]
	h := hashExtra(start, q.salt)
	for at := 0; at+grain <= len(q.tokens); at += grain {
		h = hashTokens(h, q.tokens[at:at+grain])
		q.prefix = append(q.prefix, h)
	}
}

// prefixOf returns the hash of the first tokens, a multiple of the grain.
func (q *Query) prefixOf(tokens int) uint64 { return q.prefix[tokens/q.grain-1] }

// Match fills in what each source holds of the prompt. It takes one walk along the prompt for all sources with the same adapter, or for each 64 of them.
func (x *Index) Match(q *Query, holdings []Holding) {
	q.asked = q.asked[:0]
	for i := range holdings {
		h := &holdings[i]
		h.Score, h.Resident, h.Cached, h.Total = 0, 0, 0, 0
		a := asked{done: true}
		if h.Residency != nil {
			h.stored = h.Residency.stored.Load()
			a = asked{view: h.Residency.view.Load()}
			a.lora, a.spaces = a.view.spacesOf(h.Model)
		}
		q.asked = append(q.asked, a)
	}
	q.hash(x)
	for i := range holdings {
		if !q.asked[i].done {
			q.match(holdings[i:], q.asked[i:])
		}
	}
	clear(q.asked) // to keep nothing alive
}

// match fills in the first holding, and those that the same walk serves.
func (q *Query) match(holdings []Holding, all []asked) {
	page, lora := holdings[0].Residency.page, all[0].lora
	same := func(i int) bool { return !all[i].done && all[i].lora == lora && holdings[i].Residency.page == page }

	q.steps = q.steps[:0]
	unit := 0
	var sources uint64
	for i := range all {
		if !same(i) {
			continue
		}
		bit := holdings[i].Residency.bit
		for _, s := range all[i].spaces {
			q.addStep(s, bit)
			unit = gcd(s.size, unit)
			sources |= bit
		}
	}
	if sources != 0 {
		below := page.lower.Load() > 0
		if below {
			q.walk(page, sources, unit, true)
		}
		q.walk(page, sources, unit, false)
		if !below {
			q.depth, q.lost = q.onGPU, [64]float64{}
		}
	}
	for i := range all {
		if !same(i) {
			continue
		}
		h, a := &holdings[i], &all[i]
		size := a.view.blockSize(a.spaces)
		for _, s := range a.spaces {
			size = gcd(size, s.size)
		}
		h.Total = len(q.tokens) / size * size
		if len(a.spaces) > 0 && h.Total > 0 {
			source := bits.TrailingZeros64(h.Residency.bit)
			h.Resident = q.depth[source]
			h.Score = (float64(h.Resident) - q.lost[source]) / float64(h.Total)
			h.Cached = q.cached(h.Residency.bit, q.onGPU[source], unit, a.view.align)
		}
	}
	for i := range all {
		all[i].done = all[i].done || same(i)
	}
}

func (q *Query) addStep(s space, bit uint64) {
	for i := range q.steps {
		if q.steps[i].name == s.name {
			q.steps[i].mask |= bit
			return
		}
	}
	q.steps = append(q.steps, step{s, bit})
}

// walk follows the sources along the prompt, from block to block: on the GPU, or in any medium. A source may have blocks of several sizes; where
// these lead is found by going through the prompt's places, a unit apart, in order.
func (q *Query) walk(p *page, sources uint64, unit int, anywhere bool) {
	places := len(q.tokens) / unit
	if cap(q.reach) <= places {
		q.reach = make([]uint64, places+1)
	}
	q.reach = q.reach[:places+1]
	clear(q.reach)
	depth := &q.onGPU
	if anywhere {
		depth, q.lost = &q.depth, [64]float64{}
	}
	q.reach[0] = sources
	last := 0
	for at := 0; at <= last; at++ {
		here := q.reach[at]
		if here == 0 {
			continue
		}
		var further uint64
		for i := range q.steps {
			s := &q.steps[i]
			mask, to := here&s.mask, at+s.size/unit
			if mask == 0 || to > places {
				continue
			}
			key := s.key(q.prefixOf(to * unit))
			var hit uint64
			if anywhere {
				held := p.byTier(key)
				hit = mask & (held[GPU] | held[CPU] | held[Disk])
				q.lose(hit&^held[GPU]&held[CPU]&^q.reach[to], s.size, CPU)
				q.lose(hit&^(held[GPU]|held[CPU]|q.reach[to]), s.size, Disk)
			} else {
				hit = mask & p.onGPU(key)
			}
			if hit != 0 {
				q.reach[to] |= hit
				last = max(last, to)
				further |= hit
			}
		}
		for ended := here &^ further; ended != 0; ended &= ended - 1 {
			depth[bits.TrailingZeros64(ended)] = at * unit
		}
	}
}

// lose notes for the sources that a block is not on the GPU.
func (q *Query) lose(sources uint64, size int, tier Medium) {
	for ; sources != 0; sources &= sources - 1 {
		q.lost[bits.TrailingZeros64(sources)] += float64(size) * (1 - worth[tier])
	}
}

// cached returns how many tokens an engine will have cached that holds blocks up to depth: as far as they reach before the last token, to a multiple
// of align.
func (q *Query) cached(bit uint64, depth, unit, align int) int {
	tokens := min(depth, len(q.tokens)-1)
	tokens -= tokens % align
	for tokens > 0 && (tokens%unit != 0 || q.reach[tokens/unit]&bit == 0) {
		tokens -= align
	}
	return max(tokens, 0)
}

// Overclaimed tells that the engine had so many of the prompt's tokens cached, which is fewer than the holding says that Match has filled in: what lies
// beyond is forgotten for this source until the engine stores it again. What it has stored since is not, for that may be why.
func (x *Index) Overclaimed(q *Query, h *Holding, cachedTokens int) {
	q.hash(x)
	r := h.Residency
	v := r.view.Load()
	_, spaces := v.spacesOf(h.Model)
	if cachedTokens < 0 || cachedTokens+v.blockSize(spaces) > len(q.tokens)-1 {
		return // the engine has all that it can report
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	stored := r.stored.Load()
	if r.closed || stored-h.stored > recentKeys {
		return
	}
	since := make(map[uint64]bool)
	for n := h.stored; n < stored; n++ {
		since[r.recent[n%recentKeys]] = true
	}
	for _, s := range spaces {
		for to := cachedTokens/q.grain*q.grain + q.grain; to <= len(q.tokens); to += q.grain {
			key := s.key(q.prefixOf(to))
			if to < s.size || since[key] {
				continue
			}
			for t := range Medium(tiers) {
				if r.page.drop(key, t, r.bit) {
					r.stats.Overclaimed++
				}
			}
		}
	}
}
