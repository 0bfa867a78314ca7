package prompt

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
)

// completion reads the "prompt" of a completion: a string, or token ids, or an array of one of these, of which the
// first counts.
func (p *Parser) completion() section {
	from := len(p.text)
	s := section{seen: true}
	p.ids = p.ids[:0]
	switch p.peek() {
	case '"':
		p.str()
	case '[':
		array := p.i
		p.i++
		if c := p.peek(); c != '"' && c != '[' {
			p.i = array
			s.odd = !p.tokenIDs()
			break
		}
		for first := true; p.element(first); first = false {
			switch {
			case !first:
				p.skip()
			case p.peek() == '"':
				p.str()
			default:
				s.odd = !p.tokenIDs()
			}
		}
	default:
		s.odd = true
		p.skip()
	}
	text := slices.Grow(p.text, 4*len(p.ids))
	for _, id := range p.ids {
		text = binary.BigEndian.AppendUint32(text, id)
	}
	p.text = text
	s.piece = piece{from, len(p.text)}
	return s
}

// tokenIDs reads an array into p.ids. It is not ok if an element is no token id.
func (p *Parser) tokenIDs() (ok bool) {
	p.i++
	if !p.element(true) {
		return true
	}
	ok = true
	b, ids := p.body, p.ids
	for {
		// Nearly all are up to seven digits and a comma: these are read as one word.
		i := p.i
		for i+8 < len(b) {
			w := binary.LittleEndian.Uint64(b[i:])
			// Digits have the bit 0x10, comma and space have not. This is all that the next round waits for.
			stop := ^w & (0x10 * ones)
			if stop == 0 {
				break
			}
			n := bits.TrailingZeros64(stop) / 8
			d := (w ^ '0'*ones) << (-8 * n & 63) // the n bytes ahead of it, as if there were zeros before
			if n == 0 || b[i+n] != ',' || (d+0x76*ones|d)&(0x80*ones) != 0 || byte(w) == '0' && n > 1 {
				break
			}
			ids = append(ids, eightDigits(d))
			i += n + 1
			if b[i] == ' ' {
				i++
			}
		}
		p.i = i
		id, isID := p.tokenID()
		if isID {
			ids = append(ids, id)
		}
		ok = ok && isID
		if !p.element(false) {
			p.ids = ids
			return ok
		}
	}
}

// eightDigits gives the number whose decimal digits are the bytes of d, the most significant in the lowest byte.
func eightDigits(d uint64) uint32 {
	d = d*10 + d>>8 // pairs
	d = (d&0xFF000000FF)*(100+1000000<<32) + (d>>16&0xFF000000FF)*(1+10000<<32)
	return uint32(d >> 32)
}

// tokenID reads an element of an array of token ids.
func (p *Parser) tokenID() (id uint32, ok bool) {
	p.peek()
	start := p.i
	p.skip()
	var v uint64
	for _, c := range p.body[start:p.i] {
		if c-'0' > 9 || v > math.MaxUint32 {
			return 0, false
		}
		v = 10*v + uint64(c-'0')
	}
	return uint32(v), v <= math.MaxUint32 && !p.bad
}

// MaxTokenIDs is how many token ids a header or an answer may have. No model's context is as long.
const MaxTokenIDs = 1 << 22

// ParseTokenIDs appends to dst the token ids of the header x-rolter-vllm-token-ids: decimal numbers of at most 32 bits,
// separated by commas, with blanks and tabs around them. A header without any is one that is not there. One element that
// is not of this kind is an error; dst is then given back as it was. The error tells the place of the bad element, never
// the element, as that is of a client's prompt.
func ParseTokenIDs(dst []uint32, header string) ([]uint32, error) {
	if strings.Trim(header, " \t") == "" {
		return dst, nil
	}
	ids := dst
	for i := 0; ; i++ {
		for i < len(header) && isBlank(header[i]) {
			i++
		}
		var id uint64
		start := i
		for i < len(header) && header[i]-'0' <= 9 && id <= math.MaxUint32 {
			id = 10*id + uint64(header[i]-'0')
			i++
		}
		bad := i == start || id > math.MaxUint32
		for i < len(header) && isBlank(header[i]) {
			i++
		}
		switch n := len(ids) - len(dst); {
		case bad || i < len(header) && header[i] != ',':
			return dst, fmt.Errorf("token ids: element %d is not an integer in 0…%d", n, uint32(math.MaxUint32))
		case n == MaxTokenIDs:
			return dst, fmt.Errorf("token ids: more than %d", MaxTokenIDs)
		}
		ids = append(ids, uint32(id))
		if i == len(header) {
			return ids, nil
		}
	}
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' }
