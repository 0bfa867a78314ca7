package replica

// Cache is a block-wise prefix cache, as vLLM's block pool is: a capacity in blocks, reference counts on the blocks of
// running requests, and a queue of the unreferenced ones from which the least recently used is evicted.
//
// A block is named by a key that depends on all blocks before it (see [BlockKeys]), and every method takes keys in
// order from the first block of a prompt. Blocks are released from last to first, so of the blocks last used together
// the leaf stands before its parent in the queue: a block is never evicted before its children. That is how vLLM gets
// leaf-first order too (v1/core/block_pool.py, free_blocks).
//
// All operations are O(1) for each key. A Cache is not safe for concurrent use.
type Cache struct {
	capacity int // 0: unbounded
	pinned   int // blocks with at least one reference
	blocks   map[uint64]*block
	lru      block  // sentinel of the ring of unreferenced blocks; lru.next is evicted first
	spare    *block // evicted blocks, for reuse, linked by next
	observer Observer
}

type block struct {
	key        uint64
	refs       int
	prev, next *block // in the LRU ring while refs is 0
}

// Observer is told what becomes resident and what is evicted, in order: the place to publish KV events from. It must
// not call the cache.
type Observer interface {
	// BlocksStored reports that keys[from:] became resident. keys[:from] are their ancestors, as far as the caller
	// of the cache named them. The slice belongs to the caller.
	BlocksStored(keys []uint64, from int)
	// BlockRemoved reports the eviction of one block, as vLLM reports one hash an event.
	BlockRemoved(key uint64)
}

// NewCache returns an empty cache of so many blocks; 0 is unbounded.
func NewCache(capacityBlocks int) *Cache {
	c := &Cache{capacity: max(capacityBlocks, 0), blocks: make(map[uint64]*block)}
	c.lru.prev, c.lru.next = &c.lru, &c.lru
	return c
}

// Observe sets the observer; nil removes it.
func (c *Cache) Observe(o Observer) { c.observer = o }

// Capacity returns the capacity in blocks, 0 for unbounded.
func (c *Cache) Capacity() int { return c.capacity }

// Len returns the number of resident blocks.
func (c *Cache) Len() int { return len(c.blocks) }

// Pinned returns the number of blocks that running requests hold.
func (c *Cache) Pinned() int { return c.pinned }

// Lookup returns how many leading keys are resident. It changes nothing.
func (c *Cache) Lookup(keys []uint64) int {
	for i, key := range keys {
		if c.blocks[key] == nil {
			return i
		}
	}
	return len(keys)
}

// room returns how many leading keys are resident, and whether all keys would fit beside the blocks that are held.
func (c *Cache) room(keys []uint64) (resident int, fits bool) {
	resident = c.Lookup(keys)
	need := len(keys)
	for _, key := range keys[:resident] {
		if c.blocks[key].refs > 0 {
			need--
		}
	}
	return resident, c.capacity == 0 || need <= c.capacity-c.pinned
}

// Acquire makes keys resident and pins them, evicting the least recently used blocks that nobody holds. It stops when
// there is nothing left to evict, and returns how many leading keys it pinned: the caller owes a Release for these.
func (c *Cache) Acquire(keys []uint64) int { return c.AcquireFrom(keys, 0) }

// AcquireFrom is Acquire of keys[from:] by a caller that already holds keys[:from]. It returns how many leading keys
// the caller now holds, at least from.
func (c *Cache) AcquireFrom(keys []uint64, from int) int {
	stored := from // keys[stored:i] are new and not yet reported
	i := from
	for ; i < len(keys); i++ {
		if b := c.blocks[keys[i]]; b != nil {
			c.report(keys[:i], stored)
			stored = i + 1
			if b.refs == 0 {
				b.unlink()
				c.pinned++
			}
			b.refs++
			continue
		}
		if c.capacity > 0 && len(c.blocks) >= c.capacity {
			if c.pinned == len(c.blocks) {
				break
			}
			c.evict()
		}
		c.pinned++
		c.blocks[keys[i]] = c.newBlock(keys[i])
	}
	c.report(keys[:i], stored)
	return i
}

// Release gives up one reference to each key, which stays resident as the most recently used.
func (c *Cache) Release(keys []uint64) {
	for i := len(keys) - 1; i >= 0; i-- {
		b := c.blocks[keys[i]]
		if b == nil || b.refs == 0 {
			panic("replica: release of a block that is not held")
		}
		if b.refs--; b.refs == 0 {
			c.pinned--
			b.linkBefore(&c.lru)
		}
	}
}

// Touch marks the leading resident keys as just used and returns their number.
func (c *Cache) Touch(keys []uint64) int {
	n := c.Lookup(keys)
	c.Release(keys[:c.Acquire(keys[:n])])
	return n
}

// Insert makes keys resident as the most recently used, and returns how many leading keys fit.
func (c *Cache) Insert(keys []uint64) int {
	n := c.Acquire(keys)
	c.Release(keys[:n])
	return n
}

// forget empties a cache of which nothing is held, as the end of a process does: without telling the observer, since a
// process that ends publishes nothing.
func (c *Cache) forget() {
	if c.pinned > 0 {
		panic("replica: a cache with blocks that are held is emptied")
	}
	clear(c.blocks)
	c.lru.prev, c.lru.next = &c.lru, &c.lru
}

func (c *Cache) evict() {
	b := c.lru.next
	b.unlink()
	delete(c.blocks, b.key)
	if c.observer != nil {
		c.observer.BlockRemoved(b.key)
	}
	b.next, c.spare = c.spare, b
}

func (c *Cache) report(keys []uint64, from int) {
	if c.observer != nil && from < len(keys) {
		c.observer.BlocksStored(keys, from)
	}
}

func (c *Cache) newBlock(key uint64) *block {
	b := c.spare
	if b == nil {
		return &block{key: key, refs: 1}
	}
	c.spare = b.next
	*b = block{key: key, refs: 1}
	return b
}

func (b *block) unlink() {
	b.prev.next, b.next.prev = b.next, b.prev
	b.prev, b.next = nil, nil
}

func (b *block) linkBefore(at *block) {
	b.prev, b.next = at.prev, at
	at.prev.next, at.prev = b, b
}
