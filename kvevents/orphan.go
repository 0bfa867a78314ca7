package kvevents

import (
	"container/list"
	"iter"
	"math"
)

// Bounds of the orphans of one source.
const (
	maxOrphans      = 1 << 14
	maxOrphanTokens = 1 << 20
)

// orphan is a block that was stored behind one that is not known, as after a late start. Where in a prompt it is cannot be told until the other comes.
type orphan struct {
	id     blockID
	parent uint64 // in the same group
	tokens []uint32
	extra  uint64
	space  uint16
	copies [tiers]uint16

	age        *list.Element
	prev, next *orphan // others with the same parent
}

func (o *orphan) addCopy(tier Medium) {
	if o.copies[tier] < math.MaxUint16 {
		o.copies[tier]++
	}
}

// orphans are the orphans of a source: the oldest give way.
type orphans struct {
	blocks   map[blockID]*orphan
	children map[blockID]*orphan // the first child of each block that is waited for
	byAge    list.List
	tokens   int
}

func (o *orphans) clear() {
	*o = orphans{blocks: make(map[blockID]*orphan), children: make(map[blockID]*orphan)}
}

// add takes in a copy of an orphan. It returns how many orphans had to go for it.
func (o *orphans) add(n *orphan, tier Medium) (dropped uint64) {
	if n.parent == n.id.hash {
		return 1 // which nothing can ever lead to
	}
	if same := o.blocks[n.id]; same != nil && same.parent == n.parent && same.space == n.space && same.extra == n.extra {
		same.addCopy(tier)
		return 0
	}
	o.remove(n.id)
	n.addCopy(tier)
	n.age = o.byAge.PushBack(n)
	o.blocks[n.id] = n
	o.tokens += len(n.tokens)
	parent := blockID{n.id.group, n.parent}
	if n.next = o.children[parent]; n.next != nil {
		n.next.prev = n
	}
	o.children[parent] = n
	for len(o.blocks) > maxOrphans || o.tokens > maxOrphanTokens {
		o.remove(o.byAge.Front().Value.(*orphan).id)
		dropped++
	}
	return dropped
}

// remove forgets an orphan, if there is one of that name.
func (o *orphans) remove(id blockID) {
	n := o.blocks[id]
	if n == nil {
		return
	}
	delete(o.blocks, id)
	o.byAge.Remove(n.age)
	o.tokens -= len(n.tokens)
	if n.next != nil {
		n.next.prev = n.prev
	}
	parent := blockID{id.group, n.parent}
	switch {
	case n.prev != nil:
		n.prev.next = n.next
	case n.next != nil:
		o.children[parent] = n.next
	default:
		delete(o.children, parent)
	}
}

// take removes and returns, one by one, the orphans that wait for a block.
func (o *orphans) take(parent blockID) iter.Seq[*orphan] {
	return func(yield func(*orphan) bool) {
		for {
			n := o.children[parent]
			if n == nil {
				return
			}
			o.remove(n.id)
			if !yield(n) {
				return
			}
		}
	}
}
