package replica

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// naiveCache is the specification of Cache: blocks in a list, in the order in which they may be evicted.
type naiveCache struct {
	capacity int
	lru      []uint64 // unreferenced
	refs     map[uint64]int
	log      []string
}

func (c *naiveCache) resident(key uint64) bool { return c.refs[key] > 0 || slices.Contains(c.lru, key) }

func (c *naiveCache) lookup(keys []uint64) int {
	n := 0
	for n < len(keys) && c.resident(keys[n]) {
		n++
	}
	return n
}

func (c *naiveCache) acquire(keys []uint64) int {
	for i, key := range keys {
		if !c.resident(key) {
			if c.capacity > 0 && len(c.lru)+len(c.refs) >= c.capacity {
				if len(c.lru) == 0 {
					return i
				}
				c.log = append(c.log, fmt.Sprint("-", c.lru[0]))
				c.lru = c.lru[1:]
			}
			c.log = append(c.log, fmt.Sprint("+", key))
		}
		c.lru = slices.DeleteFunc(c.lru, func(k uint64) bool { return k == key })
		c.refs[key]++
	}
	return len(keys)
}

func (c *naiveCache) release(keys []uint64) {
	for _, key := range slices.Backward(keys) {
		if c.refs[key]--; c.refs[key] == 0 {
			delete(c.refs, key)
			c.lru = append(c.lru, key)
		}
	}
}

// eventLog records events, and checks that parents are stored before and removed after their children.
type eventLog struct {
	t        *testing.T
	log      []string
	parent   map[uint64]uint64
	children map[uint64]int
}

func newEventLog(t *testing.T) *eventLog {
	return &eventLog{t: t, parent: map[uint64]uint64{}, children: map[uint64]int{}}
}

func (l *eventLog) BlocksStored(keys []uint64, from int) {
	for i := from; i < len(keys); i++ {
		l.log = append(l.log, fmt.Sprint("+", keys[i]))
		if i > 0 {
			if _, resident := l.parent[keys[i-1]]; !resident {
				l.t.Errorf("block %d stored without its parent", keys[i])
			}
			l.children[keys[i-1]]++
			l.parent[keys[i]] = keys[i-1]
		} else {
			l.parent[keys[i]] = 0
		}
	}
}

func (l *eventLog) BlockRemoved(key uint64) {
	l.log = append(l.log, fmt.Sprint("-", key))
	if l.children[key] > 0 {
		l.t.Errorf("block %d removed before its children", key)
	}
	l.children[l.parent[key]]--
	delete(l.parent, key)
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
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 0))
		capacity := r.IntN(40)
		cache, log := NewCache(capacity), newEventLog(t)
		cache.Observe(log)
		naive := &naiveCache{capacity: capacity, refs: map[uint64]int{}}
		var held [][]uint64
		for op := range 300 {
			keys := randomPrompt(r)
			var got, want int
			switch r.IntN(5) {
			case 0:
				got, want = cache.Lookup(keys), naive.lookup(keys)
			case 1:
				got, want = cache.Touch(keys), naive.lookup(keys)
				naive.acquire(keys[:want])
				naive.release(keys[:want])
			case 2:
				got, want = cache.Insert(keys), naive.acquire(keys)
				naive.release(keys[:want])
			case 3:
				// In two steps, as the engine does it.
				n := cache.Lookup(keys)
				cache.Acquire(keys[:n])
				got, want = cache.AcquireFrom(keys, n), naive.acquire(keys)
				held = append(held, keys[:got])
			case 4:
				if len(held) > 0 {
					i := r.IntN(len(held))
					cache.Release(held[i])
					naive.release(held[i])
					held = slices.Delete(held, i, i+1)
				}
			}
			if got != want {
				t.Fatalf("seed %d, operation %d: %d, naive %d", seed, op, got, want)
			}
			if cache.Len() != len(naive.lru)+len(naive.refs) || cache.Pinned() != len(naive.refs) {
				t.Fatalf("seed %d, operation %d: %d resident, %d pinned; naive %d, %d", seed, op,
					cache.Len(), cache.Pinned(), len(naive.lru)+len(naive.refs), len(naive.refs))
			}
		}
		for _, sign := range []string{"+", "-"} {
			if !slices.Equal(only(log.log, sign), only(naive.log, sign)) {
				t.Fatalf("seed %d: events %s differ", seed, sign)
			}
		}
	}
}

// only returns the stores or the removals of a log; how they interleave is different, because a cache reports stores at
// the end of an operation.
func only(log []string, sign string) []string {
	return slices.DeleteFunc(slices.Clone(log), func(line string) bool { return !strings.HasPrefix(line, sign) })
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
	held := cache.Acquire([]uint64{1, 2})
	if held != 2 || cache.Insert([]uint64{5, 6, 7}) != 1 || cache.Lookup([]uint64{1, 2}) != 2 {
		t.Error("a held block made room for another")
	}
	if cache.Acquire([]uint64{1, 2, 3, 4}) != 3 {
		t.Error("the one block that nobody holds should have made room")
	}
	if n := cache.Acquire([]uint64{8}); n != 0 {
		t.Errorf("acquired %d blocks of a full cache", n)
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
	cache.Release([]uint64{1})
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
			for i := 0; b.Loop(); i++ {
				p := keys[i*31%prompts]
				cache.Lookup(p)
				cache.Release(p[:cache.Acquire(p)])
			}
			b.ReportMetric(float64(b.N)*blocks/b.Elapsed().Seconds(), "blocks/s")
		})
	}
}
