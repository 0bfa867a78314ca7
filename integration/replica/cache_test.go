package replica

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// naiveCache is the specification of Cache: blocks in a list, in the order in which they may be evicted.
type naiveCache struct {
	capacity int
	copies   bool
	lru      []*naiveBlock // unreferenced
	all      []*naiveBlock // by age
	removed  []uint64
}

type naiveBlock struct {
	key  uint64
	refs int
}

func (c *naiveCache) find(key uint64) *naiveBlock {
	i := slices.IndexFunc(c.all, func(b *naiveBlock) bool { return b.key == key })
	if i < 0 {
		return nil
	}
	return c.all[i]
}

func (c *naiveCache) lookup(keys []uint64) int {
	n := 0
	for n < len(keys) && c.find(keys[n]) != nil {
		n++
	}
	return n
}

// acquire holds keys, of which the first so many are looked up and the others computed.
func (c *naiveCache) acquire(keys []uint64, hits int) (held []*naiveBlock) {
	for i, key := range keys {
		b := c.find(key)
		if b == nil || i >= hits && c.copies {
			if c.capacity > 0 && len(c.all) >= c.capacity {
				if len(c.lru) == 0 {
					return held
				}
				gone := c.lru[0]
				c.removed = append(c.removed, gone.key)
				c.lru = c.lru[1:]
				c.all = slices.DeleteFunc(c.all, func(b *naiveBlock) bool { return b == gone })
			}
			b = &naiveBlock{key: key}
			c.all = append(c.all, b)
		}
		c.lru = slices.DeleteFunc(c.lru, func(other *naiveBlock) bool { return other == b })
		b.refs++
		held = append(held, b)
	}
	return held
}

func (c *naiveCache) release(held []*naiveBlock) {
	for _, b := range slices.Backward(held) {
		if b.refs--; b.refs == 0 {
			c.lru = append(c.lru, b)
		}
	}
}

// randomPrompt walks down a tree with few branches, so that prompts share prefixes of any length.
func randomPrompt(r *rand.Rand) []uint64 {
	keys := make([]uint64, r.IntN(12))
	parent := uint64(0)
	for i := range keys {
		parent = mix(parent + uint64(r.IntN(3)) + 1)
		keys[i] = parent
	}
	return keys
}

func TestCacheEqualsNaiveModel(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 0))
		capacity := r.IntN(40)
		cache := NewCache(capacity)
		naive := &naiveCache{capacity: capacity, copies: seed%2 > 0}
		if naive.copies {
			cache.KeepCopies()
		}
		var removed []uint64
		cache.OnRemove(func(key uint64) { removed = append(removed, key) })
		var held [][]*block
		var naiveHeld [][]*naiveBlock
		for op := range 300 {
			keys := randomPrompt(r)
			var got, want int
			switch r.IntN(4) {
			case 0:
				got, want = cache.Lookup(keys), naive.lookup(keys)
			case 1:
				got = cache.Insert(keys)
				blocks := naive.acquire(keys, naive.lookup(keys))
				naive.release(blocks)
				want = len(blocks)
			case 2: // in steps, as the engine does it, which computes some of what is resident again
				found := cache.find(nil, keys)
				hits := r.IntN(len(found) + 1)
				cache.pin(found[:hits])
				blocks := cache.compute(found[:hits], keys[hits:])
				held = append(held, blocks)
				naiveHeld = append(naiveHeld, naive.acquire(keys, hits))
				got, want = len(blocks), len(naiveHeld[len(naiveHeld)-1])
			case 3:
				if len(held) > 0 {
					i := r.IntN(len(held))
					cache.release(held[i])
					naive.release(naiveHeld[i])
					held, naiveHeld = slices.Delete(held, i, i+1), slices.Delete(naiveHeld, i, i+1)
				}
			}
			if got != want {
				t.Fatalf("seed %d, operation %d: %d, naive %d", seed, op, got, want)
			}
			if pinned := len(naive.all) - len(naive.lru); cache.Len() != len(naive.all) || cache.Pinned() != pinned {
				t.Fatalf("seed %d, operation %d: %d resident, %d pinned; naive %d, %d", seed, op,
					cache.Len(), cache.Pinned(), len(naive.all), pinned)
			}
		}
		if !slices.Equal(removed, naive.removed) {
			t.Fatalf("seed %d: removed %v, naive %v", seed, removed, naive.removed)
		}
	}
}

func TestCacheEvictsLeafFirst(t *testing.T) {
	cache := NewCache(4)
	cache.Insert([]uint64{1, 2, 3})
	cache.Insert([]uint64{1, 9})
	cache.Insert([]uint64{7, 8}) // room for one: the older leaf goes first
	for _, c := range []struct {
		keys []uint64
		want int
	}{
		{[]uint64{1, 2, 3}, 1},
		{[]uint64{1, 9}, 2},
		{[]uint64{7, 8}, 2},
	} {
		if got := cache.Lookup(c.keys); got != c.want {
			t.Errorf("%v: %d resident, want %d", c.keys, got, c.want)
		}
	}
}

func TestCacheKeepsHeldBlocks(t *testing.T) {
	cache := NewCache(3)
	held := cache.compute(nil, []uint64{1, 2})
	if len(held) != 2 || cache.Insert([]uint64{5, 6, 7}) != 1 || cache.Lookup([]uint64{1, 2}) != 2 {
		t.Error("a held block made room for another")
	}
	if len(cache.compute(nil, []uint64{1, 2, 3, 4})) != 3 {
		t.Error("the one block that nobody holds should have made room")
	}
	if n := len(cache.compute(nil, []uint64{8})); n != 0 {
		t.Errorf("acquired %d blocks of a full cache", n)
	}
}

// A block is resident until its last copy is gone.
func TestCopies(t *testing.T) {
	cache := NewCache(3)
	cache.KeepCopies()
	removed := 0
	cache.OnRemove(func(uint64) { removed++ })
	for range 2 {
		cache.release(cache.compute(nil, []uint64{1}))
	}
	if cache.Len() != 2 {
		t.Errorf("%d blocks, want two copies", cache.Len())
	}
	cache.Insert([]uint64{2, 3})
	if removed != 1 || cache.Lookup([]uint64{1}) != 1 {
		t.Errorf("%d removed, resident %d", removed, cache.Lookup([]uint64{1}))
	}
	cache.Insert([]uint64{4})
	if removed != 2 || cache.Lookup([]uint64{1}) != 0 {
		t.Errorf("%d removed, resident %d", removed, cache.Lookup([]uint64{1}))
	}
}

func TestReleaseOfWhatIsNotHeldPanics(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	cache := NewCache(0)
	cache.Insert([]uint64{1})
	cache.release(cache.find(nil, []uint64{1}))
}

func BenchmarkCache(b *testing.B) {
	const prompts, blocks = 4096, 16
	keys := make([][]uint64, prompts)
	for i := range keys {
		keys[i] = make([]uint64, blocks)
		parent := uint64(i / 8)
		for j := range keys[i] {
			if j == blocks/2 {
				parent += uint64(i)
			}
			parent = mix(parent)
			keys[i][j] = parent
		}
	}
	for _, capacity := range []int{0, prompts * blocks / 4} {
		b.Run(fmt.Sprint("capacity=", capacity), func(b *testing.B) {
			cache := NewCache(capacity)
			var held []*block
			for i := 0; b.Loop(); i++ {
				p := keys[i*31%prompts]
				held = cache.find(held[:0], p)
				cache.pin(held)
				held = cache.compute(held, p[len(held):])
				cache.release(held)
			}
			b.ReportMetric(float64(b.N)*blocks/b.Elapsed().Seconds(), "blocks/s")
		})
	}
}
