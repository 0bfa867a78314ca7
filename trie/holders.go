package trie

import "math/bits"

// holders is the set of slots that hold a node, and the subset of them that have a prompt ending at it.
//
// It is a bitset over a window of 64-slot groups. The first group is inline, so a node that one slot holds (nearly every
// node, as most of the text is somebody's alone) costs the same however many slots there are.
type holders struct {
	base  int32 // number of the first group: slots 64*base to 64*base+63
	first group
	more  []group // the groups after it
}

// group is the part of the sets that concerns 64 consecutive slots.
type group struct {
	held, ending uint64
}

const groupBytes = 16

// groups returns how many groups the window has; they are numbered from base.
func (h *holders) groups() int { return 1 + len(h.more) }

// group returns group i of the window.
func (h *holders) group(i int) *group {
	if i == 0 {
		return &h.first
	}
	return &h.more[i-1]
}

// of returns the group that s belongs to, nil where the window does not reach it.
func (h *holders) of(s Slot) *group {
	i := s>>6 - int(h.base)
	if i < 0 || i >= h.groups() {
		return nil
	}
	return h.group(i)
}

func (h *holders) holds(s Slot) bool {
	g := h.of(s)
	return g != nil && g.held&(1<<(s&63)) != 0
}

// empty tells whether nobody holds the node.
func (h *holders) empty() bool {
	for i := range h.groups() {
		if h.group(i).held != 0 {
			return false
		}
	}
	return true
}

// endless tells whether no holder's prompt ends at the node.
func (h *holders) endless() bool {
	for i := range h.groups() {
		if h.group(i).ending != 0 {
			return false
		}
	}
	return true
}

// hold adds s to the holders.
func (h *holders) hold(s Slot) {
	h.reach(int32(s >> 6))
	h.of(s).held |= 1 << (s & 63)
}

// reach widens the window so that it covers the group number.
func (h *holders) reach(number int32) {
	groups := int32(h.groups())
	switch {
	case h.first == group{} && h.more == nil:
		h.base = number
	case number < h.base:
		shift := h.base - number
		more := make([]group, shift+groups-1)
		more[shift-1] = h.first
		copy(more[shift:], h.more)
		h.base, h.first, h.more = number, group{}, more
	case number >= h.base+groups:
		more := make([]group, number-h.base)
		copy(more, h.more)
		h.more = more
	}
}

// drop takes s, a prompt of which must not end here, out of the holders.
func (h *holders) drop(s Slot) { h.of(s).held &^= 1 << (s & 63) }

// ends tells whether a prompt of s ends here.
func (h *holders) ends(s Slot) bool {
	g := h.of(s)
	return g != nil && g.ending&(1<<(s&63)) != 0
}

// end notes that a prompt of the holder s ends here.
func (h *holders) end(s Slot) { h.of(s).ending |= 1 << (s & 63) }

// unend takes the note back.
func (h *holders) unend(s Slot) { h.of(s).ending &^= 1 << (s & 63) }

// clone returns the same holders, none of them with a prompt that ends.
func (h *holders) clone() holders {
	c := holders{base: h.base, first: group{held: h.first.held}}
	if h.more != nil {
		c.more = make([]group, len(h.more))
		for i, g := range h.more {
			c.more[i].held = g.held
		}
	}
	return c
}

// heapBytes returns the size of what the set keeps outside itself.
func (h *holders) heapBytes() int64 { return int64(len(h.more)) * groupBytes }

// all yields the holders in ascending order.
func (h *holders) all(yield func(Slot) bool) {
	for i := range h.groups() {
		for set := h.group(i).held; set != 0; set &= set - 1 {
			if !yield(Slot(int(h.base)+i)<<6 + bits.TrailingZeros64(set)) {
				return
			}
		}
	}
}
