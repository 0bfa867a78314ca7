package kvevents

import (
	"encoding/binary"
	"math"
)

// reader walks MessagePack (https://github.com/msgpack/msgpack/blob/master/spec.md) of which nothing is trusted: a length is only believed when so many
// bytes are left, so that no claim makes anybody allocate or loop more than the payload is long; and nothing recurses.
//
// A hand-written one, because the libraries' generic decoders allocate what is claimed and recurse as deep as is nested, both of which end the process, and
// because the streaming ones are several times slower.
type reader struct {
	data []byte
	at   int
}

// kind is a class of MessagePack values.
type kind uint8

const (
	none kind = iota // not MessagePack, or cut off
	null
	boolean
	unsigned // an integer of 0 and above
	negative
	float
	text
	binaryData
	array
	object
	extension
)

func (r *reader) left() int { return len(r.data) - r.at }

// next reads the head of a value. n is the value of an integer (two's complement of a negative one), the bits of a float, the bytes of a text, binary or
// extension, which follow, or the elements of an array and pairs of an object, which follow; of these there are as many left at least.
func (r *reader) next() (k kind, n uint64) {
	if r.at >= len(r.data) {
		return none, 0
	}
	c := r.data[r.at]
	r.at++
	switch {
	case c < 0x80:
		return unsigned, uint64(c)
	case c < 0x90:
		return r.sized(object, uint64(c&0x0f))
	case c < 0xa0:
		return r.sized(array, uint64(c&0x0f))
	case c < 0xc0:
		return r.sized(text, uint64(c&0x1f))
	case c >= 0xe0:
		return negative, uint64(int64(int8(c)))
	}
	switch c {
	case 0xc0:
		return null, 0
	case 0xc2, 0xc3:
		return boolean, uint64(c & 1)
	case 0xc4, 0xc5, 0xc6:
		return r.sizedBy(binaryData, 1<<(c-0xc4))
	case 0xc7, 0xc8, 0xc9:
		return r.sizedBy(extension, 1<<(c-0xc7))
	case 0xca:
		n, ok := r.number(4)
		return known(ok, float), math.Float64bits(float64(math.Float32frombits(uint32(n))))
	case 0xcb:
		n, ok := r.number(8)
		return known(ok, float), n
	case 0xcc, 0xcd, 0xce, 0xcf:
		n, ok := r.number(1 << (c - 0xcc))
		return known(ok, unsigned), n
	case 0xd0, 0xd1, 0xd2, 0xd3:
		width := 1 << (c - 0xd0)
		n, ok := r.number(width)
		unused := 64 - 8*width
		signed := int64(n<<unused) >> unused
		if signed >= 0 {
			return known(ok, unsigned), uint64(signed)
		}
		return known(ok, negative), uint64(signed)
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8:
		return r.sized(extension, 1<<(c-0xd4))
	case 0xd9, 0xda, 0xdb:
		return r.sizedBy(text, 1<<(c-0xd9))
	case 0xdc, 0xdd:
		return r.sizedBy(array, 2<<(c-0xdc))
	case 0xde, 0xdf:
		return r.sizedBy(object, 2<<(c-0xde))
	}
	return none, 0
}

func known(ok bool, k kind) kind {
	if !ok {
		return none
	}
	return k
}

// number reads a big-endian integer of 1, 2, 4 or 8 bytes.
func (r *reader) number(width int) (uint64, bool) {
	if r.left() < width {
		return 0, false
	}
	b := r.data[r.at:]
	r.at += width
	switch width {
	case 1:
		return uint64(b[0]), true
	case 2:
		return uint64(binary.BigEndian.Uint16(b)), true
	case 4:
		return uint64(binary.BigEndian.Uint32(b)), true
	}
	return binary.BigEndian.Uint64(b), true
}

// sized believes a length, or not.
func (r *reader) sized(k kind, n uint64) (kind, uint64) {
	need := n
	switch k {
	case object:
		need = 2 * n
	case extension:
		need = n + 1 // its type
	}
	if need > uint64(r.left()) {
		return none, 0
	}
	if k == extension {
		r.at++
	}
	return k, n
}

func (r *reader) sizedBy(k kind, width int) (kind, uint64) {
	n, ok := r.number(width)
	if !ok {
		return none, 0
	}
	return r.sized(k, n)
}

// bytes takes the n bytes that next said to follow.
func (r *reader) bytes(n uint64) []byte {
	b := r.data[r.at : r.at+int(n)]
	r.at += int(n)
	return b
}

// skip passes over one value, however deep, in time that grows with its bytes only.
func (r *reader) skip() bool {
	// Every value that is still to come takes a byte at least, which bounds what values can add up to.
	for values := uint64(1); values > 0; values-- {
		if values > uint64(r.left()) {
			return false
		}
		switch k, n := r.next(); k {
		case none:
			return false
		case text, binaryData, extension:
			r.at += int(n)
		case array:
			values += n
		case object:
			values += 2 * n
		}
	}
	return true
}
