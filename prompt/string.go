package prompt

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"
	"unicode/utf8"
)

// str reads a string whose opening quote is next, and appends it, decoded, to p.text. Escapes of lone surrogates become
// three bytes each (as in WTF-8), so that different ones stay different.
func (p *Parser) str() {
	b, i := p.body, p.i+1
	from := len(p.text)
	// A string is never longer than its JSON, so there is room for all that follows, whole words too.
	text := slices.Grow(p.text, len(b)-i+8)
	text, n := text[:cap(text)], from
	clean := 0 // words since the last quote or backslash
	for {
		// Words are best for text, where an escape is never far. After 128 bytes without one (plain prose, images) look for
		// the next with wider registers; within a limit, as a far quote would be looked for again after every backslash.
		if clean == 16 {
			clean = 0
			w := b[i:min(i+1024, len(b))]
			if k := bytes.IndexByte(w, '"'); k >= 0 {
				w = w[:k]
			}
			if k := bytes.IndexByte(w, '\\'); k >= 0 {
				w = w[:k]
			}
			copy(text[n:], w)
			i += len(w)
			n += len(w)
		}
		if i+8 <= len(b) {
			w := binary.LittleEndian.Uint64(b[i:])
			binary.LittleEndian.PutUint64(text[n:], w)
			stop := quoteOrBackslash(w)
			if stop == 0 {
				i += 8
				n += 8
				clean++
				continue
			}
			clean = 0
			k := bits.TrailingZeros64(stop) / 8
			i += k
			n += k
		}
		if i >= len(b) {
			p.fail()
			return
		}
		switch c := b[i]; c {
		case '"':
			p.i = i + 1
			p.text = text[:n]
			if p.has0xFF {
				p.replace0xFF(from)
			}
			return
		case '\\':
			for {
				used, r := escape(b[i:])
				if used == 0 {
					p.fail()
					return
				}
				i += used
				n += encode(text[n:], r)
				if i >= len(b) || b[i] != '\\' {
					break
				}
			}
		default: // within the last seven bytes of the body
			text[n] = c
			i++
			n++
		}
	}
}

// ones has one in each byte of a word.
const ones = 0x0101010101010101

// quoteOrBackslash gives a word whose lowest set bit is in the first byte of w, in little-endian order, that is a quote
// or a backslash; 0 if none is. (For zero bytes: Hacker's Delight, 6-1.)
func quoteOrBackslash(w uint64) uint64 {
	q, s := w^('"'*ones), w^('\\'*ones)
	return ((q-ones)&^q | (s-ones)&^s) & (0x80 * ones)
}

// escape reads the escape sequence that b begins with, or two that are a surrogate pair. It gives their length, 0 if
// there is none, and the character.
func escape(b []byte) (used int, r rune) {
	if len(b) < 2 {
		return 0, 0
	}
	if b[1] != 'u' {
		if c := escapes[b[1]]; c != 0 {
			return 2, rune(c)
		}
		return 0, 0
	}
	r = hex4(b[2:])
	if r < 0 {
		return 0, 0
	}
	if r>>10 == 0xD800>>10 && len(b) >= 12 && b[6] == '\\' && b[7] == 'u' {
		if low := hex4(b[8:]); low>>10 == 0xDC00>>10 {
			return 12, 0x10000 + (r&0x3FF)<<10 + low&0x3FF
		}
	}
	return 6, r
}

// escapes gives the character for the letter of a two-byte escape.
var escapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// hex4 gives the value of the four hexadecimal digits that b begins with, or a negative number.
func hex4(b []byte) rune {
	if len(b) < 4 {
		return -1
	}
	return hexDigits[b[0]]<<12 | hexDigits[b[1]]<<8 | hexDigits[b[2]]<<4 | hexDigits[b[3]]
}

var hexDigits = func() (t [256]rune) {
	for c := range t {
		switch {
		case c >= '0' && c <= '9':
			t[c] = rune(c - '0')
		case c >= 'a' && c <= 'f':
			t[c] = rune(c - 'a' + 10)
		case c >= 'A' && c <= 'F':
			t[c] = rune(c - 'A' + 10)
		default:
			t[c] = -1
		}
	}
	return t
}()

// encode writes r at the start of b and gives its length. It is UTF-8, but for surrogates, which unicode/utf8 refuses.
func encode(b []byte, r rune) int {
	switch {
	case r < 0x80:
		b[0] = byte(r)
		return 1
	case r < 0x800:
		b[1] = 0x80 | byte(r)&0x3F
		b[0] = 0xC0 | byte(r>>6)
		return 2
	case r < 0x10000:
		b[2] = 0x80 | byte(r)&0x3F
		b[1] = 0x80 | byte(r>>6)&0x3F
		b[0] = 0xE0 | byte(r>>12)
		return 3
	default:
		b[3] = 0x80 | byte(r)&0x3F
		b[2] = 0x80 | byte(r>>6)&0x3F
		b[1] = 0x80 | byte(r>>12)&0x3F
		b[0] = 0xF0 | byte(r>>18)
		return 4
	}
}

// replace0xFF replaces each 0xFF from offset from on by U+FFFD.
func (p *Parser) replace0xFF(from int) {
	to := len(p.text)
	grow := 2 * bytes.Count(p.text[from:], []byte{mark})
	p.text = slices.Grow(p.text, grow)[:to+grow]
	for in, out := to-1, to+grow-1; in != out; in-- { // backwards: the space opens at the end
		if c := p.text[in]; c != mark {
			p.text[out] = c
			out--
		} else {
			copy(p.text[out-2:], "\uFFFD")
			out -= 3
		}
	}
}

// AppendJSONString appends s to dst as a JSON string. Bytes that are not UTF-8 become U+FFFD.
func AppendJSONString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r < ' ':
			dst = append(dst, '\\', 'u', '0', '0', hex[r>>4], hex[r&0xF])
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, '"')
}
