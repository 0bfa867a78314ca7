package kvevents

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// DefaultMaxBlocks is how many blocks a [Residency] holds where nothing else is said.
const DefaultMaxBlocks = 1_000_000

// defaultBlockSize is the number of tokens in the blocks of an engine that has not said: vLLM's default on GPUs.
const defaultBlockSize = 16

// Bounds of what one engine can make us keep beside its blocks.
const (
	maxGroups     = 256  // KV cache groups
	maxSpaces     = 1024 // pairs of an adapter and a block size
	maxBlockSizes = 8    // of one adapter
)

// Index holds which blocks of tokens are in the caches of which engines, as far as their events tell. All methods are safe for concurrent use.
type Index struct {
	mu      sync.Mutex
	pages   []*page
	grain   atomic.Int64 // every block size is a multiple of so many tokens
	pending pending
}

// page is 64 sources, of which a table holds one bit each.
type page struct {
	used   uint64 // the bits that are given out; guarded by Index.mu
	shards [shards]shard
	// lower counts the bits in the tables of media below the GPU: mostly none, and then they are not looked at.
	lower atomic.Int64
}

const shards = 64

// shard has for a part of the keys, by medium, who holds each.
type shard struct {
	mu      sync.RWMutex
	holders [tiers]map[uint64]uint64
	_       [16]byte // to fill a cache line
}

// NewIndex returns an empty index.
func NewIndex() *Index {
	x := &Index{}
	x.grain.Store(defaultBlockSize)
	x.pending.now = func() time.Duration { return time.Since(started) }
	return x
}

var started = time.Now()

// Residency is what the index knows of one source: of an engine, or of each rank of one. It is a sink for the events of the source's stream; all methods
// are safe for concurrent use, and do nothing after Close.
type Residency struct {
	index *Index
	page  *page
	bit   uint64
	view  atomic.Pointer[view] // what look-ups need to know

	mu        sync.Mutex
	closed    bool
	maxBlocks int
	capacity  int // the engine's number of blocks; 0 where it is not known
	groups    map[int]*group
	main      int // the group that is meant where none is named
	spaces    []space
	// shared counts, for keys that several hashes of the engine have led to, how many beyond the first hold each.
	shared   map[holding]int
	orphans  orphans
	ready    []blockID // stored since, and perhaps awaited by orphans
	copies   int       // on the GPU
	presence bool      // copies are not counted any more
	stats    ResidencyStats
	recent   [recentKeys]uint64 // keys that were stored on the GPU last: number n at n mod recentKeys

	// written with mu held
	stored   atomic.Uint64 // how many keys were stored on the GPU
	pressure pressure
}

const recentKeys = 1024

// group is a KV cache group of an engine.
type group struct {
	attention Attention
	blockSize int // the largest
	blocks    map[uint64]block
}

// block is what is known of a block by the engine's hash.
type block struct {
	prefix uint64        // hash of all tokens to the end of the block
	copies [tiers]uint16 // by medium
	space  uint16
}

// space is a namespace that the source has blocks in.
type space struct {
	lora string
	size int
	name uint64
}

func (s space) key(prefix uint64) uint64 { return prefix ^ s.name }

// holding is a key in a medium.
type holding struct {
	key  uint64
	tier Medium
}

// view is what look-ups need to know of a source. It is replaced, never changed.
type view struct {
	base     []space            // of the model itself
	adapters map[string][]space // of each adapter that is known, which may have none
	align    int                // the engine's hits end at multiples of so many tokens
	told     int                // block size that SetBlockSize was told
}

// spacesOf returns the namespaces that the blocks of a model, as it is called in requests, can be in.
func (v *view) spacesOf(model string) (lora string, spaces []space) {
	if spaces, ok := v.adapters[model]; ok {
		return model, spaces
	}
	return "", v.base
}

// blockSize returns the size of blocks to reckon with: the largest that was seen, for the adapter or else for the model.
func (v *view) blockSize(spaces []space) int {
	size := 0
	for _, s := range spaces {
		size = max(size, s.size)
	}
	for _, s := range v.base {
		if len(spaces) == 0 {
			size = max(size, s.size)
		}
	}
	switch {
	case size > 0:
		return size
	case v.told > 0:
		return v.told
	}
	return defaultBlockSize
}

// ResidencyStats are what a [Residency] holds, and what it has counted since Add.
type ResidencyStats struct {
	Blocks   int  // blocks that are held, by the engine's hashes
	Orphans  int  // blocks that wait for the one before them
	Presence bool // copies are not counted: the engine reports some that it has not made

	Refused        uint64 // stored blocks for which there was no room
	Dropped        uint64 // orphans for which there was no room any more
	Replaced       uint64 // hashes that came to name another block
	UnknownRemoves uint64 // removed blocks that were not held
	Ignored        uint64 // blocks named by hash only, and unknown
	Overclaimed    uint64 // blocks forgotten because the engine computed them
	Clears         uint64
}

// Add returns a new, empty residency for a source, which the caller must Close. maxBlocks bounds how many blocks are held: stores beyond are refused
// until others are removed, because what is held leads to what is refused, and would be worth nothing the other way round. 0 and below mean
// DefaultMaxBlocks.
func (x *Index) Add(maxBlocks int) *Residency {
	if maxBlocks <= 0 {
		maxBlocks = DefaultMaxBlocks
	}
	r := &Residency{index: x, maxBlocks: maxBlocks}
	r.view.Store(&view{align: 1})
	r.forget()

	x.mu.Lock()
	defer x.mu.Unlock()
	for _, p := range x.pages {
		if p.used != math.MaxUint64 {
			r.page = p
			break
		}
	}
	if r.page == nil {
		r.page = new(page)
		for i := range r.page.shards {
			for t := range r.page.shards[i].holders {
				r.page.shards[i].holders[t] = make(map[uint64]uint64)
			}
		}
		x.pages = append(x.pages, r.page)
	}
	r.bit = ^r.page.used & (r.page.used + 1) // the lowest that is free
	r.page.used |= r.bit
	return r
}

// forget makes the source's own maps new.
func (r *Residency) forget() {
	r.groups = make(map[int]*group)
	r.shared = make(map[holding]int)
	r.orphans.clear()
	r.main, r.spaces, r.copies, r.presence = 0, nil, 0, false
	r.stats.Blocks = 0
	r.pressure.evicting.Store(false)
}

// Close gives up all that the source holds. A residency that is closed stays empty, so that events that are under way cannot revive it.
func (r *Residency) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	r.clear()
	r.closed = true
	r.index.pending.drop(r)
	r.index.mu.Lock()
	defer r.index.mu.Unlock()
	r.page.used &^= r.bit
}

// Clear forgets all blocks, as after a restart of the engine or a loss of events.
func (r *Residency) Clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.clear()
	}
}

func (r *Residency) clear() {
	for _, g := range r.groups {
		for _, b := range g.blocks {
			key := r.spaces[b.space].key(b.prefix)
			for t := range Medium(tiers) {
				if b.copies[t] > 0 {
					r.page.drop(key, t, r.bit)
				}
			}
		}
	}
	r.forget()
	r.stats.Clears++
	r.updateView(func(v *view) {
		v.base, v.align = nil, 1
		for name := range v.adapters {
			v.adapters[name] = nil
		}
	})
}

// Stats returns what the residency holds and has counted.
func (r *Residency) Stats() ResidencyStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.stats
	s.Orphans, s.Presence = len(r.orphans.blocks), r.presence
	return s
}

// SetCapacity says how many blocks the engine has; 0 is unknown. While the engine says of more copies than it can have that they are stored, it reports
// some that it has not made, as vLLM does for requests with kv_cache_report_mode "full": then, until the next Clear, copies are not counted, and the
// first that is removed removes a block.
func (r *Residency) SetCapacity(blocks int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.capacity = max(blocks, 0)
	r.checkCapacity()
}

func (r *Residency) checkCapacity() {
	r.presence = r.presence || r.capacity > 0 && r.copies > r.capacity
}

// SetBlockSize says how many tokens the engine has in a block, for prompts that are expected before any event has told. 0 is unknown.
func (r *Residency) SetBlockSize(tokens int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.index.divide(tokens)
	r.updateView(func(v *view) { v.told = max(tokens, 0) })
}

// divide makes the grain divide a block size, before any view has it.
func (x *Index) divide(size int) {
	for size > 0 {
		grain := x.grain.Load()
		if x.grain.CompareAndSwap(grain, int64(gcd(int(grain), size))) {
			return
		}
	}
}

// SetAdapters says which of the names that the engine serves are adapters', beside those that events have mentioned: a request for one of them
// meets its blocks only.
func (r *Residency) SetAdapters(names []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.updateView(func(v *view) {
		for _, name := range names {
			v.addAdapter(name)
		}
	})
}

// Empty tells that no block has been stored since the beginning or the last Clear.
func (r *Residency) Empty() bool {
	v := r.view.Load()
	if len(v.base) > 0 {
		return false
	}
	for _, spaces := range v.adapters {
		if len(spaces) > 0 {
			return false
		}
	}
	return true
}

// HasAdapter tells whether the name is known as an adapter's.
func (r *Residency) HasAdapter(name string) bool {
	_, ok := r.view.Load().adapters[name]
	return ok
}

func (v *view) addAdapter(name string) bool {
	if _, ok := v.adapters[name]; ok || name == "" {
		return true
	}
	if len(v.adapters) >= maxSpaces {
		return false
	}
	v.adapters[name] = nil
	return true
}

// updateView replaces the view by a changed copy.
func (r *Residency) updateView(change func(*view)) {
	v := *r.view.Load()
	adapters := make(map[string][]space, len(v.adapters)+1)
	for name, spaces := range v.adapters {
		adapters[name] = spaces
	}
	v.adapters = adapters
	change(&v)
	r.view.Store(&v)
}

// space returns the number of the namespace of an adapter's blocks of a size. It returns false where there are too many.
func (r *Residency) space(lora string, size int) (uint16, bool) {
	for i := len(r.spaces) - 1; i >= 0; i-- {
		if s := &r.spaces[i]; s.size == size && s.lora == lora {
			return uint16(i), true
		}
	}
	known := r.view.Load().base
	if lora != "" {
		known = r.view.Load().adapters[lora]
	}
	if len(r.spaces) >= maxSpaces || len(known) >= maxBlockSizes {
		return 0, false
	}
	s := space{lora: lora, size: size, name: namespace(lora, size)}
	r.index.divide(size)
	ok := true
	r.updateView(func(v *view) {
		if lora == "" {
			v.base = append(slices.Clip(v.base), s)
		} else if ok = v.addAdapter(lora); ok {
			v.adapters[lora] = append(slices.Clip(v.adapters[lora]), s)
		}
	})
	if !ok {
		return 0, false
	}
	r.spaces = append(r.spaces, s)
	return uint16(len(r.spaces) - 1), true
}

// Apply takes in the events of a batch.
func (r *Residency) Apply(b *Batch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	before := r.stored.Load()
	for i := range b.Events {
		switch e := &b.Events[i]; e.Kind {
		case Stored:
			r.store(e)
		case Removed:
			r.remove(e)
		case Cleared:
			r.clear()
		}
	}
	r.pressure.add(r.stored.Load()-before, b.Time, r.index.pending.now())
}

// group returns the group that an event is about: nil where its blocks do not tell how long a prefix is cached. Stores say of what kind their
// group is, removals only which it is, and offloading connectors neither.
func (r *Residency) group(e *Event) *group {
	number := e.Group
	if number < 0 {
		number = r.main
	}
	g := r.groups[number]
	if g == nil {
		if len(r.groups) >= maxGroups {
			return nil
		}
		g = &group{blocks: make(map[uint64]block)}
		r.groups[number] = g
	}
	if e.Kind == Stored && (e.Attention != Unspecified && e.Attention != g.attention || e.BlockSize > g.blockSize) {
		if e.Attention != Unspecified {
			g.attention = e.Attention
		}
		if e.Attention == MainAttention && len(r.spaces) == 0 {
			r.main = number
		}
		if e.Medium == GPU { // elsewhere several may be kept as one
			g.blockSize = max(g.blockSize, e.BlockSize)
		}
		r.align()
	}
	if g.attention == MainAttention || g.attention == Unspecified && number == r.main {
		return g
	}
	return nil
}

// align finds where the engine's hits can end. vLLM ends them at a common multiple of the block sizes of all of its groups, unless it has recurrent
// layers, which make hits at shorter blocks possible (KVCacheCoordinator). A group alone says nothing.
func (r *Residency) align() {
	align := 1
	if len(r.groups) > 1 {
		for _, g := range r.groups {
			if g.attention == Mamba {
				align = 1
				break
			}
			if g.blockSize > 0 && align < math.MaxInt32 {
				align = align / gcd(align, g.blockSize) * g.blockSize
			}
		}
	}
	if align != r.view.Load().align {
		r.updateView(func(v *view) { v.align = align })
	}
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// blockID is a block as the engine names it. vLLM puts no group into the hash, so that the same one may be in several.
type blockID struct {
	group *group
	hash  uint64
}

func (r *Residency) store(e *Event) {
	g := r.group(e)
	if g == nil || e.Medium >= tiers {
		return
	}
	if len(e.Tokens) == 0 {
		for _, hash := range e.Hashes {
			r.addCopy(blockID{g, hash}, e.Medium)
		}
		return
	}
	if e.BlockSize <= 0 || len(e.Tokens) != len(e.Hashes)*e.BlockSize || len(e.Extra) > 0 && len(e.Extra) != len(e.Hashes) {
		return
	}
	sp, ok := r.space(e.LoRA, e.BlockSize)
	if !ok {
		r.stats.Refused += uint64(len(e.Hashes))
		return
	}

	prefix, parent, known := start, e.Parent, !e.HasParent
	if e.HasParent {
		var b block
		b, known = g.blocks[parent]
		prefix = b.prefix
	}
	for i, hash := range e.Hashes {
		id, tokens := blockID{g, hash}, e.Tokens[i*e.BlockSize:(i+1)*e.BlockSize]
		var extra uint64
		if len(e.Extra) > 0 {
			extra = e.Extra[i]
		}
		if known {
			prefix = hashTokens(hashExtra(prefix, extra), tokens)
		} else if b, ok := g.blocks[hash]; ok {
			// Only the block before has been removed. The hash still names the same tokens.
			prefix, known = b.prefix, true
		} else {
			r.stats.Dropped += r.orphans.add(&orphan{id: id, parent: parent, tokens: slices.Clone(tokens), extra: extra, space: sp}, e.Medium)
			parent = hash
			continue
		}
		if !r.put(id, prefix, sp, e.Medium, 1) {
			r.stats.Refused += uint64(len(e.Hashes) - i)
			break
		}
	}
	r.adopt()
	r.checkCapacity()
}

// put holds so many more copies of a block. It returns false where there is no room for it.
func (r *Residency) put(id blockID, prefix uint64, sp uint16, tier Medium, copies uint16) bool {
	b, ok := id.group.blocks[id.hash]
	switch {
	case ok && (b.prefix != prefix || b.space != sp):
		r.stats.Replaced++
		r.dropBlock(id, b)
		ok = false
	case !ok && r.stats.Blocks >= r.maxBlocks:
		return false
	}
	var waited [tiers]uint16 // copies that were orphans
	if !ok {
		b = block{prefix: prefix, space: sp}
		r.stats.Blocks++
		if len(r.orphans.blocks) > 0 {
			if o := r.orphans.blocks[id]; o != nil {
				waited = o.copies
				r.orphans.remove(id)
			}
			r.ready = append(r.ready, id)
		}
	}
	key := r.spaces[sp].key(prefix)
	if r.page.hold(key, tier, r.bit) && b.copies[tier] == 0 {
		r.shared[holding{key, tier}]++
	}
	r.setCopies(&b, tier, int(b.copies[tier])+int(copies))
	if tier == GPU {
		r.recent[r.stored.Load()%recentKeys] = key
		r.stored.Add(1)
	}
	id.group.blocks[id.hash] = b
	for t, n := range waited {
		if n > 0 {
			r.put(id, prefix, sp, Medium(t), n)
		}
	}
	return true
}

// setCopies changes how many copies of a block there are in a medium.
func (r *Residency) setCopies(b *block, tier Medium, copies int) {
	copies = min(max(copies, 0), math.MaxUint16)
	if tier == GPU {
		r.copies += copies - int(b.copies[GPU])
	}
	b.copies[tier] = uint16(copies)
}

// addCopy notes a copy, elsewhere, of a block that is known.
func (r *Residency) addCopy(id blockID, tier Medium) {
	if b, ok := id.group.blocks[id.hash]; ok {
		r.put(id, b.prefix, b.space, tier, 1)
	} else if o := r.orphans.blocks[id]; o != nil {
		o.addCopy(tier)
	} else {
		r.stats.Ignored++
	}
}

// adopt chains the orphans that wait for what has become known, and those that wait for these.
func (r *Residency) adopt() {
	for len(r.ready) > 0 {
		parent := r.ready[len(r.ready)-1]
		r.ready = r.ready[:len(r.ready)-1]
		for o := range r.orphans.take(parent) {
			// Put anew: an orphan's copies, none if all have been removed, count from here.
			prefix := hashTokens(hashExtra(parent.group.blocks[parent.hash].prefix, o.extra), o.tokens)
			for t, copies := range o.copies {
				if copies > 0 && !r.put(o.id, prefix, o.space, Medium(t), copies) {
					r.stats.Refused++
					break
				}
			}
		}
	}
}

func (r *Residency) remove(e *Event) {
	g := r.group(e)
	if g == nil || e.Medium >= tiers {
		return
	}
	for i, hash := range e.Hashes {
		id := blockID{g, hash}
		left := func(copies uint16) int {
			switch {
			case len(e.Remaining) == len(e.Hashes):
				return e.Remaining[i]
			case r.presence:
				return 0
			}
			return int(copies) - 1
		}
		b, ok := g.blocks[hash]
		if o := r.orphans.blocks[id]; !ok && o != nil && o.copies[e.Medium] > 0 {
			o.copies[e.Medium] = uint16(min(max(left(o.copies[e.Medium]), 0), math.MaxUint16))
			if o.copies == [tiers]uint16{} {
				r.orphans.remove(id)
			}
			continue
		}
		if b.copies[e.Medium] == 0 {
			r.stats.UnknownRemoves++
			continue
		}
		r.setCopies(&b, e.Medium, left(b.copies[e.Medium]))
		if e.Medium == GPU {
			r.pressure.evicting.Store(true)
		}
		if b.copies[e.Medium] == 0 {
			r.release(r.spaces[b.space].key(b.prefix), e.Medium)
		}
		if b.copies == [tiers]uint16{} {
			delete(g.blocks, hash)
			r.stats.Blocks--
		} else {
			g.blocks[hash] = b
		}
	}
}

// dropBlock forgets a block, however many copies there are.
func (r *Residency) dropBlock(id blockID, b block) {
	for t := range Medium(tiers) {
		if b.copies[t] > 0 {
			r.setCopies(&b, t, 0)
			r.release(r.spaces[b.space].key(b.prefix), t)
		}
	}
	delete(id.group.blocks, id.hash)
	r.stats.Blocks--
}

// release takes back what one hash held.
func (r *Residency) release(key uint64, tier Medium) {
	h := holding{key, tier}
	switch n := r.shared[h]; {
	case n > 1:
		r.shared[h] = n - 1
	case n == 1:
		delete(r.shared, h)
	default:
		r.page.drop(key, tier, r.bit)
	}
}

func (p *page) shard(key uint64) *shard { return &p.shards[key%shards] }

// hold sets a source's bit. It returns whether it was set.
func (p *page) hold(key uint64, tier Medium, bit uint64) bool {
	s := p.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	held := s.holders[tier][key]
	if held&bit != 0 {
		return true
	}
	s.holders[tier][key] = held | bit
	if tier != GPU {
		p.lower.Add(1)
	}
	return false
}

// drop clears a source's bit. It returns whether it was set.
func (p *page) drop(key uint64, tier Medium, bit uint64) bool {
	s := p.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	held := s.holders[tier][key]
	if held&bit == 0 {
		return false
	}
	if held == bit {
		delete(s.holders[tier], key)
	} else {
		s.holders[tier][key] = held &^ bit
	}
	if tier != GPU {
		p.lower.Add(-1)
	}
	return true
}

// onGPU returns who holds a key on the GPU.
func (p *page) onGPU(key uint64) uint64 {
	s := p.shard(key)
	s.mu.RLock()
	held := s.holders[GPU][key]
	s.mu.RUnlock()
	return held
}

// byTier returns who holds a key, in each medium.
func (p *page) byTier(key uint64) (held [tiers]uint64) {
	s := p.shard(key)
	s.mu.RLock()
	defer s.mu.RUnlock()
	for t := range held {
		held[t] = s.holders[t][key]
	}
	return held
}
