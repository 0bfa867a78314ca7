package replica

import "slices"

// Cache is a block-wise prefix cache, as vLLM's block pool is: a capacity in blocks, reference counts on the blocks of
// running requests, and a queue of the unreferenced ones from which the least recently used is evicted.
//
// A block is named by a key that depends on all blocks before it (see [BlockKeys]), and every method takes keys in
// order from the first block of a prompt. Blocks are released from last to first, so of the blocks last used together
// the leaf stands before its parent in the queue: a block is never evicted before its children. That is how vLLM gets
// leaf-first order too (v1/core/block_pool.py, free_blocks).
//
// All operations are O(1) for each key, and linear in the copies of a block that is evicted. A Cache is not safe for concurrent use.
type Cache struct {
	capacity int // 0: unbounded
	size     int // resident blocks
	pinned   int // blocks with at least one reference
	blocks   map[uint64]*block
	lru      block  // sentinel of the ring of unreferenced blocks; lru.next is evicted first
	spare    *block // evicted blocks, for reuse, linked by next

	keepCopies bool
	copies     map[uint64][]*block // those beside the one in blocks, oldest first
	onRemove   func(key uint64)
}

type block struct {
	key        uint64
	refs       int
	prev, next *block // in the LRU ring while refs is 0
}

// NewCache returns an empty cache of so many blocks; 0 is unbounded.
func NewCache(capacityBlocks int) *Cache {
	c := &Cache{capacity: max(capacityBlocks, 0), blocks: make(map[uint64]*block)}
	c.lru.prev, c.lru.next = &c.lru, &c.lru
	return c
}

// KeepCopies makes the cache hold a block once more where it is computed although it is resident, as vLLM's does: the
// last block of a repeated prompt of whole blocks, and the answers of equal requests. Each copy takes room and is
// evicted for itself. Without, such a block is shared.
func (c *Cache) KeepCopies() { c.keepCopies, c.copies = true, make(map[uint64][]*block) }

// OnRemove has f called at the eviction of each block, of each copy of it. It must not call the cache.
func (c *Cache) OnRemove(f func(key uint64)) { c.onRemove = f }

// Capacity returns the capacity in blocks, 0 for unbounded.
func (c *Cache) Capacity() int { return c.capacity }

// Len returns the number of resident blocks, copies included.
func (c *Cache) Len() int { return c.size }

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

// Insert makes keys resident as the most recently used, and returns how many leading keys fit.
func (c *Cache) Insert(keys []uint64) int {
	held := c.find(nil, keys)
	c.pin(held)
	held = c.compute(held, keys[len(held):])
	c.release(held)
	return len(held)
}

// find appends the resident blocks of the leading keys. It changes nothing.
func (c *Cache) find(found []*block, keys []uint64) []*block {
	for _, key := range keys {
		b := c.blocks[key]
		if b == nil {
			break
		}
		found = append(found, b)
	}
	return found
}

// fits reports whether so many blocks, of which some have been found, have room beside the blocks that are held.
func (c *Cache) fits(found []*block, blocks int) bool {
	for _, b := range found {
		if b.refs > 0 {
			blocks--
		}
	}
	return c.capacity == 0 || blocks <= c.capacity-c.pinned
}

// pin holds blocks that have been found: the caller owes a release.
func (c *Cache) pin(found []*block) {
	for _, b := range found {
		if b.refs == 0 {
			b.unlink()
			c.pinned++
		}
		b.refs++
	}
}

// compute makes keys resident and holds their blocks, which it appends to held, evicting the least recently used blocks
// that nobody holds. It stops where there is nothing left to evict.
func (c *Cache) compute(held []*block, keys []uint64) []*block {
	for _, key := range keys {
		resident := c.blocks[key]
		if resident != nil && !c.keepCopies {
			held = append(held, resident)
			c.pin(held[len(held)-1:])
			continue
		}
		if c.capacity > 0 && c.size >= c.capacity {
			if c.pinned == c.size {
				break
			}
			c.evict()
			if resident != nil {
				resident = c.blocks[key] // it may have been the one
			}
		}
		b := c.newBlock(key)
		if resident == nil {
			c.blocks[key] = b
		} else {
			c.copies[key] = append(c.copies[key], b)
		}
		c.size++
		c.pinned++
		held = append(held, b)
	}
	return held
}

// release gives up one reference to each block, which stays resident as the most recently used.
func (c *Cache) release(held []*block) {
	for _, b := range slices.Backward(held) {
		if b.refs == 0 {
			panic("replica: release of a block that is not held")
		}
		if b.refs--; b.refs == 0 {
			c.pinned--
			b.linkBefore(&c.lru)
		}
	}
}

// forget empties a cache of which nothing is held, as the end of a process does, or a reset. Nobody is told.
func (c *Cache) forget() {
	if c.pinned > 0 {
		panic("replica: a cache with blocks that are held is emptied")
	}
	clear(c.blocks)
	clear(c.copies)
	c.size = 0
	c.lru.prev, c.lru.next = &c.lru, &c.lru
}

func (c *Cache) evict() {
	b := c.lru.next
	b.unlink()
	c.size--
	switch others := c.copies[b.key]; {
	case len(others) == 0:
		delete(c.blocks, b.key)
		delete(c.copies, b.key)
	case c.blocks[b.key] == b:
		c.blocks[b.key], c.copies[b.key] = others[0], others[1:]
	default:
		i := slices.Index(others, b)
		c.copies[b.key] = slices.Delete(others, i, i+1)
	}
	if c.onRemove != nil {
		c.onRemove(b.key)
	}
	b.next, c.spare = c.spare, b
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
