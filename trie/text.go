package trie

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// edge is the text on the way from a node's parent to the node. Each edge owns its array alone, so pruning a node frees
// exactly what Bytes counted for it.
//
// The array may have room on both sides of the text: what a split cut off, or what a join added on purpose. With that
// room, cutting and joining cost the length of the shorter part, so that a few short prompts cannot make the tree copy a
// long one over and over; and it is bounded, so that what was cut off does not stay in memory.
type edge struct {
	array []byte // the room before the text and the text; the room behind it is the array's spare capacity
	start uint32 // where in array the text starts
}

// newEdge returns an edge that holds a copy of text.
//
// It appends instead of making and copying: that spares clearing the memory first, and leaves a capacity that is what
// the heap really spent, its size class.
func newEdge(text []byte) edge {
	return edge{array: append([]byte(nil), text...)}
}

func (e *edge) text() []byte { return e.array[e.start:] }

func (e *edge) len() int { return len(e.array) - int(e.start) }

// heapBytes returns what the edge takes of the heap, room included.
func (e *edge) heapBytes() int64 { return int64(cap(e.array)) }

// cut leaves the edge with what comes after its first n bytes and returns those as an edge of their own; n is above 0 and
// below the edge's length.
func (e *edge) cut(n int) (upper edge) {
	text := e.text()
	if n <= len(text)/2 {
		upper = newEdge(text[:n])
		e.start += uint32(n)
		e.tighten()
		return upper
	}
	upper = edge{array: e.array[:int(e.start)+n], start: e.start}
	*e = newEdge(text[n:])
	upper.tighten()
	return upper
}

// tighten copies the text into an array of its size where more than a third of the present one is room.
func (e *edge) tighten() {
	if n := e.len(); cap(e.array) > n+n/2+64 {
		*e = newEdge(e.text())
	}
}

// join puts upper's text before the edge's. upper is used up.
func (e *edge) join(upper edge) {
	head, tail := upper.text(), e.text()
	switch n := len(head) + len(tail); {
	case len(head) <= int(e.start):
		e.start -= uint32(len(head))
		copy(e.text(), head)
	case cap(upper.array)-len(upper.array) >= len(tail):
		*e = edge{array: append(upper.array, tail...), start: upper.start}
	case len(head) < len(tail):
		// The room goes to the side where the shorter part was added, and more may follow. Join fills it with anything, which is less than
		// make, which clears all.
		room := n / 8
		*e = edge{array: bytes.Join([][]byte{tail[:room], head, tail}, nil), start: uint32(room)}
	default:
		array := bytes.Join([][]byte{head, tail, head[:n/8]}, nil)
		*e = edge{array: array[:n]}
	}
	e.tighten()
}

// commonPrefix returns how many leading bytes a and b share.
func commonPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	a, b = a[:n], b[:n]
	// bytes.Equal compares with the machine's widest registers but says only whether; the words then say where.
	const block = 512
	i := 0
	for n-i >= block && bytes.Equal(a[i:i+block], b[i:i+block]) {
		i += block
	}
	for ; n-i >= 8; i += 8 {
		if x := binary.LittleEndian.Uint64(a[i:]) ^ binary.LittleEndian.Uint64(b[i:]); x != 0 {
			return i + bits.TrailingZeros64(x)/8
		}
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}
