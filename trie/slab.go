package trie

import "math/bits"

// slab keeps values of one type in chunks of 64 and names them by index, so that links between them are four bytes which
// the garbage collector does not follow. A chunk whose last value is freed is given back to the heap. Index 0 is never
// handed out: it means "none".
type slab[T any] struct {
	chunks []*chunk[T]
	open   []uint32 // the chunks that have room, each exactly once; the last one is allocated from
}

type chunk[T any] struct {
	free  uint64 // bit i: items[i] is free
	items [64]T
}

// at returns the value at i, which must be in use.
func (s *slab[T]) at(i uint32) *T {
	return &s.chunks[i>>6].items[i&63]
}

// find returns the value at i, or nil where its chunk has been given back. A value that is in use or was freed since is
// for the caller to tell apart.
func (s *slab[T]) find(i uint32) *T {
	if int(i>>6) >= len(s.chunks) || s.chunks[i>>6] == nil {
		return nil
	}
	return s.at(i)
}

// add returns the index of a zero value.
func (s *slab[T]) add() uint32 {
	if len(s.open) == 0 {
		s.open = append(s.open, uint32(len(s.chunks)))
		s.chunks = append(s.chunks, nil)
	}
	number := s.open[len(s.open)-1]
	c := s.chunks[number]
	if c == nil {
		c = &chunk[T]{free: ^uint64(0)}
		if number == 0 {
			c.free = ^uint64(1)
		}
		s.chunks[number] = c
	}
	i := uint32(bits.TrailingZeros64(c.free))
	c.free &= c.free - 1
	if c.free == 0 {
		s.open = s.open[:len(s.open)-1]
	}
	return number<<6 | i
}

// remove frees the value at i.
func (s *slab[T]) remove(i uint32) {
	number := i >> 6
	c := s.chunks[number]
	if c.free == 0 {
		s.open = append(s.open, number)
	}
	c.free |= 1 << (i & 63)
	all := ^uint64(0)
	if number == 0 {
		all = ^uint64(1)
	}
	if c.free == all {
		s.chunks[number] = nil
		return
	}
	var zero T
	c.items[i&63] = zero
}
