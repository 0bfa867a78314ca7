// Package trie remembers which prompts were sent to which targets, and says for a new prompt how much of it each target
// has seen: what its KV cache can be expected to hold.
//
// All targets of a route share one radix tree over bytes (path-compressed: an edge carries a string, not a byte). Every
// node knows which targets hold it, so that one walk along the prompt scores all of them and text is stored once however
// many targets hold it. What can be observed is what one byte trie for each target would show.
//
// Prompts come from clients and may be made to hurt. No operation recurses; matching and inserting cost the length of
// the text, pruning a prompt costs the nodes on its path and at most the copying of as many bytes as it has; and all
// memory is bounded by Limits.
package trie

import (
	"math"
	"math/bits"
)

// Slot names a target within one Tree. Slots are small and dense, so that they can index a slice.
type Slot = int

// Limits bounds a Tree. Over a limit, the least recently inserted prompts are pruned.
type Limits struct {
	// MaxNodes is how many tree nodes a slot may hold; 0 and below mean DefaultMaxNodes. A node is a node of the shared,
	// path-compressed tree: a place where a prompt of any slot ends, or where prompts of any slots part.
	MaxNodes int
	// MaxBytes is how much memory the whole tree may take, by the reckoning of Bytes; 0 and below mean DefaultMaxBytes.
	MaxBytes int64
}

// The limits of a Tree that SetLimits was never called on.
const (
	DefaultMaxNodes       = 1_000_000
	DefaultMaxBytes int64 = 256 << 20
)

// What a node and a prompt take apart from text, children and far slots: the value in its slab and, for a prompt, an
// entry of a map (which is between half and seven eighths full). TestBytesFollowTheHeap compares the reckoning with the
// heap.
const (
	nodeBytes   = 152
	promptBytes = 88
)

// Tree is a radix tree of the prompts of all its slots. It is not safe for concurrent use: callers hold a lock around
// every method, the read-only ones included.
//
// It is deterministic: the same calls in the same order have the same results.
type Tree struct {
	limits  Limits
	nodes   slab[node]
	prompts slab[prompt]
	slots   []slot
	root    uint32
	recent  list // all prompts, by insertion
	serial  uint64
	stats   Stats
	crowded bool // some slot may hold more nodes than it may

	// uses counts why a slot holds a node: each child of the node that it holds is one use, and a prompt of its own that
	// ends there is one. The first is not counted, so that only nodes where the slot's own prompts part or end on the
	// way have an entry: fewer than it has prompts.
	uses map[useKey]uint32
	// ends has the prompts that end at a node besides the one that the node has room for.
	ends map[useKey]uint32

	// Match's scratch: the slots that have got their Bytes and their Continues.
	scored, continued []uint64
	// Where the text of the last Match leaves the tree, as walk has it.
	left      uint32
	leftDepth int
}

type useKey struct {
	node uint32
	slot uint32
}

type node struct {
	edge     edge
	holders  holders
	children children
	parent   uint32
	depth    uint32 // bytes from the root to the node's end, its own edge included
	prompt   uint32 // one that ends here, 0 for none; Tree.ends has others
	first    byte   // of the edge: what is pruned has been cold for long, and reading its text would wait for memory
}

// prompt is a resident prompt of a slot.
type prompt struct {
	serial    uint64 // never used twice, so that a Record of an earlier prompt at the same index is known to be stale
	node      uint32 // where the prompt ends
	slot      uint32
	pending   uint32 // inserts neither confirmed nor rolled back
	confirmed bool
	number    uint64 // of the slot's inserts, the one that inserted it last
	inTree    links
	inSlot    links
}

// slot is what the tree knows of a target.
type slot struct {
	used    bool
	nodes   int
	prompts int
	recent  list   // its prompts, by insertion
	inserts uint64 // ever
	text    int64  // bytes of its prompts, what they share counted once
	maxText int64  // 0 for no limit
	cut     uint32 // its oldest prompt, where the end of that has been pruned; 0 for none
}

func (s *slot) overText() bool { return s.maxText > 0 && s.text > s.maxText }

// Record is the handle of one Insert, to be settled at most once, by Confirm or Rollback. Records are comparable; the zero
// Record is none, and settling it does nothing.
//
// Record and Match are aliases of plain types, so that whoever uses a Tree can declare the interface that it needs
// without importing this package.
type Record = struct {
	Serial uint64 // of the prompt
	Index  uint32 // where it is
}

// Match is what a slot holds of a text.
//
// Bytes is how many leading bytes of the text the slot holds: they lead one of its prompts too. Continues tells that the whole of one of the slot's
// prompts leads the text (or is the text): the text may be the next turn of a conversation that the slot has.
type Match = struct {
	Bytes     int
	Continues bool
}

// Stats are totals of a tree.
type Stats struct {
	Prompts int    // resident prompts, counted for each slot that has them
	Nodes   int    // tree nodes, each counted once
	Bytes   int64  // what MaxBytes bounds
	Pruned  uint64 // prompts that gave way to a limit, ever
}

// New returns an empty tree without slots, under the default limits.
func New() *Tree {
	t := &Tree{
		limits: Limits{MaxNodes: DefaultMaxNodes, MaxBytes: DefaultMaxBytes},
		uses:   make(map[useKey]uint32),
		ends:   make(map[useKey]uint32),
	}
	t.root = t.nodes.add()
	return t
}

// SetLimits replaces the limits and prunes at once what is over them.
func (t *Tree) SetLimits(l Limits) {
	if l.MaxNodes <= 0 {
		l.MaxNodes = DefaultMaxNodes
	}
	if l.MaxBytes <= 0 {
		l.MaxBytes = DefaultMaxBytes
	}
	t.limits = l
	t.crowded = true
	t.prune()
}

// SetMaxText limits the bytes of text that a slot may hold, what its prompts share counted once; 0 and below is no limit. It is how a slot is
// kept to what its target's own cache has room for, and what is over it is pruned as an engine evicts: off the end of the least recently inserted
// prompt, as far as no other needs it. A prompt that has lost its end is still matched, and continued by none.
func (t *Tree) SetMaxText(s Slot, bytes int64) {
	if !t.inUse(s) {
		return
	}
	t.slots[s].maxText = max(bytes, 0)
	t.crowded = t.crowded || t.slots[s].overText()
	t.prune()
}

// Text returns how many bytes of text the slot holds, what its prompts share counted once.
func (t *Tree) Text(s Slot) int64 {
	if !t.inUse(s) {
		return 0
	}
	return t.slots[s].text
}

// Add returns a new slot, the lowest that is free.
func (t *Tree) Add() Slot {
	for s := range t.slots {
		if !t.slots[s].used {
			t.slots[s].used = true
			return s
		}
	}
	t.slots = append(t.slots, slot{used: true})
	groups := (len(t.slots) + 63) / 64
	if groups > len(t.scored) {
		t.scored = append(t.scored, 0)
		t.continued = append(t.continued, 0)
	}
	return len(t.slots) - 1
}

// Remove frees the slot and all that only it held. Its records become stale. A slot that is not in use is ignored.
func (t *Tree) Remove(s Slot) {
	if !t.inUse(s) {
		return
	}
	for t.slots[s].recent.oldest != 0 {
		t.forget(t.slots[s].recent.oldest)
	}
	t.slots[s] = slot{}
	t.prune()
}

// Slots returns the length that Match needs: above every slot in use.
func (t *Tree) Slots() int { return len(t.slots) }

// Prompts returns how many prompts of the slot are resident.
func (t *Tree) Prompts(s Slot) int {
	if !t.inUse(s) {
		return 0
	}
	return t.slots[s].prompts
}

// Nodes returns how many tree nodes the slot holds. Other slots' prompts count in so far as theirs end, or part, on the
// way of the slot's own.
func (t *Tree) Nodes(s Slot) int {
	if !t.inUse(s) {
		return 0
	}
	return t.slots[s].nodes
}

// Bytes returns about how much heap the tree takes: its text, once however many slots hold it, and a constant for each
// node and each prompt.
func (t *Tree) Bytes() int64 { return t.stats.Bytes }

// Stats returns the tree's totals.
func (t *Tree) Stats() Stats { return t.stats }

// Match says what each slot holds of text: entry s of out, which must be no shorter than Slots, is slot s. A slot that
// is not in use gets a zero Match.
func (t *Tree) Match(text []byte, out []Match) {
	out = out[:len(t.slots)]
	clear(out)
	clear(t.scored)
	clear(t.continued)

	// Children's holders are among their parent's, so going up from where the text leaves the tree, a slot's first node
	// is its deepest.
	at, depth := t.walk(text)
	t.left, t.leftDepth = at, depth
	for at != t.root {
		n := t.nodes.at(at)
		h := &n.holders
		for i := range h.groups() {
			g, number := h.group(i), int(h.base)+i
			for fresh := g.held &^ t.scored[number]; fresh != 0; fresh &= fresh - 1 {
				out[number<<6+bits.TrailingZeros64(fresh)].Bytes = depth
			}
			t.scored[number] |= g.held
			if depth == int(n.depth) {
				for fresh := g.ending &^ t.continued[number]; fresh != 0; fresh &= fresh - 1 {
					if s := number<<6 + bits.TrailingZeros64(fresh); !t.isCut(at, s) {
						out[s].Continues = true
						t.continued[number] |= fresh & -fresh
					}
				}
			}
		}
		depth = int(n.depth) - n.edge.len()
		at = n.parent
	}
}

// maxChain bounds how many nodes, and maxFork how many children of each, ReuseDistance looks at.
const (
	maxChain = 32
	maxFork  = 16
)

// ReuseDistance says about how many bytes of the slot's prompts are more recent than the one that the text of the last Match continues: a cache of that
// size that goes by recency would just have kept it. It is -1 where the text continues none, or not clearly one: where the slot has several that begin so, nobody
// knows which of them was the last one. The tree must not have changed since Match.
//
// It is reckoned from how many prompts have been inserted since, of how many since the oldest.
func (t *Tree) ReuseDistance(s Slot) int64 {
	if !t.inUse(s) {
		return -1
	}
	at, matched := t.left, t.leftDepth
	for ; at != t.root && !t.nodes.at(at).holders.holds(s); at = t.nodes.at(at).parent {
		matched = int(t.nodes.at(at).depth) - t.nodes.at(at).edge.len()
	}
	// An answer and what a template adds may follow, of which the text has another form.
	longest := matched + matched/4
	for range maxChain {
		n := t.nodes.at(at)
		if at == t.root || int(n.depth) > longest || n.children.count > maxFork {
			return -1
		}
		next := uint32(0)
		for c := range n.children.all {
			if t.nodes.at(c).holders.holds(s) {
				if next != 0 {
					return -1
				}
				next = c
			}
		}
		if next == 0 {
			own := &t.slots[s]
			since := own.inserts - t.prompts.at(t.endAt(at, s)).number
			span := own.inserts - t.prompts.at(own.recent.oldest).number
			return int64(float64(own.text) * float64(since) / float64(max(span, 1)))
		}
		at = next
	}
	return -1
}

// walk follows text from the root. It returns the last node that it shares a byte of the edge with (the root for none),
// and how many bytes of text are in the tree: fewer than the node's depth where text leaves the tree within the edge.
func (t *Tree) walk(text []byte) (at uint32, depth int) {
	at = t.root
	for depth < len(text) {
		next := t.nodes.at(at).children.get(text[depth])
		if next == 0 {
			break
		}
		e := &t.nodes.at(next).edge
		same := commonPrefix(e.text(), text[depth:])
		at, depth = next, depth+same
		if same < e.len() {
			break
		}
	}
	return at, depth
}

// Insert records text as the slot's most recent prompt, provisionally: Match sees it at once, and the Record that is
// returned settles whether it stays. A prompt that is resident becomes the most recent, and gains a claim. text is
// copied.
//
// What is over a limit then is pruned, the least recently inserted first: the prompts of a slot that holds too many
// nodes or too much text, and the prompts of all slots while the tree takes too many bytes. Where the new prompt itself has to go, and
// where nothing is recorded to begin with, the Record is zero: that is so for an empty text, a slot that is not in use,
// and a text that would not fit into MaxBytes alone, for which nothing else is pruned.
func (t *Tree) Insert(s Slot, text []byte) Record {
	if len(text) == 0 || !t.inUse(s) || !t.fits(len(text)) {
		return Record{}
	}
	end := t.place(text)
	i := t.endAt(end, s)
	if i != 0 {
		p := t.prompts.at(i)
		p.pending++
		t.unlink(i, p)
		t.link(i, p)
		t.uncut(i, p) // this is the whole of it
		return Record{Serial: p.serial, Index: i}
	}

	i = t.prompts.add()
	t.serial++
	p := t.prompts.at(i)
	*p = prompt{serial: t.serial, node: end, slot: uint32(s), pending: 1}
	t.link(i, p)
	t.slots[s].prompts++
	t.stats.Prompts++
	t.stats.Bytes += promptBytes
	t.hold(end, s)
	t.setEnd(end, s, i)

	record := Record{Serial: p.serial, Index: i}
	t.prune()
	if t.find(record) == nil {
		return Record{}
	}
	return record
}

// Confirm makes the claim of an insert permanent: its prompt stays until a limit or Remove takes it. A stale record does
// nothing.
func (t *Tree) Confirm(r Record) {
	if p := t.find(r); p != nil && p.pending > 0 {
		p.pending--
		p.confirmed = true
	}
}

// Rollback withdraws the claim of an insert: its prompt goes, unless it was confirmed or another insert of it is yet to
// be settled. (It stays as recent as the insert made it.) A stale record does nothing.
func (t *Tree) Rollback(r Record) {
	p := t.find(r)
	if p == nil || p.pending == 0 {
		return
	}
	p.pending--
	if p.pending == 0 && !p.confirmed {
		t.forget(r.Index)
		t.prune()
	}
}

// fits tells whether a text of length n could be in a tree of its own: with what the heap's size classes add to it, an
// eighth at most for all but the smallest. Depths are 32 bits, with one to spare for the room beside a text.
func (t *Tree) fits(n int) bool {
	size := int64(n)
	return size+size/8+64+nodeBytes+promptBytes <= t.limits.MaxBytes && size <= math.MaxInt32
}

func (t *Tree) inUse(s Slot) bool { return s >= 0 && s < len(t.slots) && t.slots[s].used }

// find returns the record's prompt, nil where it is no longer resident.
func (t *Tree) find(r Record) *prompt {
	if p := t.prompts.find(r.Index); p != nil && p.serial == r.Serial && r.Serial != 0 {
		return p
	}
	return nil
}

// place returns the node where text ends, which it adds where there is none.
func (t *Tree) place(text []byte) uint32 {
	at, depth := t.walk(text)
	if depth < int(t.nodes.at(at).depth) {
		at = t.split(at, depth)
	}
	if depth == len(text) {
		return at
	}
	leaf := t.addNode(node{edge: newEdge(text[depth:]), depth: uint32(len(text))})
	t.attach(leaf, at)
	return leaf
}

// split puts a node into a node's edge, at depth bytes from the root, and returns it.
func (t *Tree) split(lower uint32, depth int) uint32 {
	n := t.nodes.at(lower)
	parent := n.parent
	t.detach(lower)
	t.stats.Bytes -= n.edge.heapBytes()
	edge := n.edge.cut(n.edge.len() - (int(n.depth) - depth))
	t.stats.Bytes += n.edge.heapBytes()
	upper := t.addNode(node{edge: edge, holders: n.holders.clone(), depth: uint32(depth)})
	t.attach(lower, upper)
	t.attach(upper, parent)
	for s := range n.holders.all {
		t.countNodes(s, 1)
	}
	return upper
}

// merge undoes a split where nothing ends or parts any more.
func (t *Tree) merge(upper uint32) {
	n := t.nodes.at(upper)
	if upper == t.root || n.children.count != 1 || !n.holders.endless() {
		return
	}
	// Without an end here, every holder holds the child too; and as that is its only use of the node, there are no
	// entries in uses and ends to move.
	lower, parent := n.children.only.node(), n.parent
	for s := range n.holders.all {
		t.countNodes(s, -1)
	}
	t.detach(lower)
	t.detach(upper)
	child := t.nodes.at(lower)
	t.stats.Bytes -= child.edge.heapBytes()
	edge := n.edge
	t.removeNode(upper)
	child.edge.join(edge)
	t.stats.Bytes += child.edge.heapBytes()
	t.attach(lower, parent)
}

func (t *Tree) addNode(n node) uint32 {
	i := t.nodes.add()
	*t.nodes.at(i) = n
	t.stats.Nodes++
	t.stats.Bytes += nodeBytes + n.edge.heapBytes() + n.holders.heapBytes()
	return i
}

func (t *Tree) removeNode(i uint32) {
	n := t.nodes.at(i)
	t.stats.Nodes--
	t.stats.Bytes -= nodeBytes + n.edge.heapBytes() + n.holders.heapBytes()
	t.nodes.remove(i)
}

// attach makes a node the child of parent.
func (t *Tree) attach(i, parent uint32) {
	n, p := t.nodes.at(i), t.nodes.at(parent)
	n.parent, n.first = parent, n.edge.text()[0]
	t.stats.Bytes -= p.children.heapBytes()
	p.children.add(newChild(n.first, i))
	t.stats.Bytes += p.children.heapBytes()
}

// detach takes a node from its parent.
func (t *Tree) detach(i uint32) {
	n := t.nodes.at(i)
	p := t.nodes.at(n.parent)
	t.stats.Bytes -= p.children.heapBytes()
	p.children.remove(newChild(n.first, i))
	t.stats.Bytes += p.children.heapBytes()
}

// endAt returns the slot's prompt that ends at a node, 0 for none.
func (t *Tree) endAt(at uint32, s Slot) uint32 {
	n := t.nodes.at(at)
	if !n.holders.ends(s) {
		return 0
	}
	if n.prompt != 0 && t.prompts.at(n.prompt).slot == uint32(s) {
		return n.prompt
	}
	return t.ends[useKey{at, uint32(s)}]
}

// setEnd notes that the slot's prompt i ends at a node, which the slot holds.
func (t *Tree) setEnd(at uint32, s Slot, i uint32) {
	n := t.nodes.at(at)
	n.holders.end(s)
	if n.prompt == 0 {
		n.prompt = i
	} else {
		t.ends[useKey{at, uint32(s)}] = i
	}
}

// clearEnd takes the note back.
func (t *Tree) clearEnd(at uint32, s Slot, i uint32) {
	n := t.nodes.at(at)
	n.holders.unend(s)
	if n.prompt == i {
		n.prompt = 0
	} else {
		delete(t.ends, useKey{at, uint32(s)})
	}
}

// hold adds a use of a node by the slot; where it is the first, the slot now holds the node, which is a use of the
// node's parent.
func (t *Tree) hold(at uint32, s Slot) {
	for at != t.root {
		n := t.nodes.at(at)
		if n.holders.holds(s) {
			t.uses[useKey{at, uint32(s)}]++
			return
		}
		t.stats.Bytes -= n.holders.heapBytes()
		n.holders.hold(s)
		t.stats.Bytes += n.holders.heapBytes()
		t.countNodes(s, 1)
		t.countText(s, n.edge.len())
		at = n.parent
	}
}

// release takes back what hold did. A node that nobody holds any more goes. It returns the lowest node of the path that
// remains.
func (t *Tree) release(at uint32, s Slot) (lowest uint32) {
	lowest = at
	for at != t.root {
		key := useKey{at, uint32(s)}
		if more := t.uses[key]; more > 1 {
			t.uses[key] = more - 1
			break
		} else if more == 1 {
			delete(t.uses, key)
			break
		}
		n := t.nodes.at(at)
		parent := n.parent
		n.holders.drop(s)
		t.countNodes(s, -1)
		t.countText(s, -n.edge.len())
		if n.holders.empty() {
			t.detach(at)
			t.removeNode(at)
			lowest = parent
		}
		at = parent
	}
	return lowest
}

// forget removes a prompt, and with it the nodes that no other prompt needs.
func (t *Tree) forget(i uint32) {
	p := t.prompts.at(i)
	end, s := p.node, Slot(p.slot)
	t.unlink(i, p)
	t.uncut(i, p)
	t.slots[s].prompts--
	t.stats.Prompts--
	t.stats.Bytes -= promptBytes
	t.prompts.remove(i)
	t.clearEnd(end, s, i)
	// Nothing else on the path has lost an end or a child.
	t.merge(t.release(end, s))
}

func (t *Tree) countNodes(s Slot, by int) {
	t.slots[s].nodes += by
	if t.slots[s].nodes > t.limits.MaxNodes {
		t.crowded = true
	}
}

func (t *Tree) countText(s Slot, by int) {
	t.slots[s].text += int64(by)
	if t.slots[s].overText() {
		t.crowded = true
	}
}

// isCut tells whether the slot's prompt that ends at a node went on once.
func (t *Tree) isCut(at uint32, s Slot) bool {
	cut := t.slots[s].cut
	return cut != 0 && t.prompts.at(cut).node == at
}

// uncut forgets that prompt i, which is p, was cut.
func (t *Tree) uncut(i uint32, p *prompt) {
	if own := &t.slots[p.slot]; own.cut == i {
		own.cut = 0
	}
}

// shorten takes so many bytes off the end of the slot's oldest prompt, or reports that they are not to be had: that it has no more than these for
// itself.
func (t *Tree) shorten(s Slot, bytes int64) bool {
	i := t.slots[s].recent.oldest
	p := t.prompts.at(i)
	at, end := p.node, p.node
	for ; ; at = t.nodes.at(at).parent {
		if at == t.root || t.uses[useKey{at, uint32(s)}] > 0 {
			return false
		}
		n := int64(t.nodes.at(at).edge.len())
		if bytes < n {
			break
		}
		bytes -= n
	}
	if bytes > 0 {
		at = t.split(at, int(t.nodes.at(at).depth)-int(bytes))
	}
	t.hold(at, s)
	t.clearEnd(end, s, i)
	t.setEnd(at, s, i)
	p.node = at
	t.slots[s].cut = i
	t.merge(t.release(end, s))
	return true
}

// prune takes away what is over the limits.
func (t *Tree) prune() {
	// Where a prompt is shortened, other slots may get a node more.
	for t.crowded {
		t.crowded = false
		for s := range t.slots {
			own := &t.slots[s]
			for own.nodes > t.limits.MaxNodes || own.overText() {
				if own.nodes <= t.limits.MaxNodes && t.shorten(s, own.text-own.maxText) {
					continue
				}
				t.forget(own.recent.oldest)
				t.stats.Pruned++
			}
		}
	}
	for t.stats.Bytes > t.limits.MaxBytes && t.recent.oldest != 0 {
		t.forget(t.recent.oldest)
		t.stats.Pruned++
	}
}
