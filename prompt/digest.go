package prompt

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
)

// digestLen is the length of a digest in bytes.
const digestLen = 16

// Renderings never leave the process, so digests need not be stable across processes; seeds that no client knows keep
// a client from making two images collide. Both hashes together are three times as fast as SHA-256 in hardware.
var seeds = [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}

func digest(b []byte) (sum [digestLen]byte) {
	binary.LittleEndian.PutUint64(sum[:8], maphash.Bytes(seeds[0], b))
	binary.LittleEndian.PutUint64(sum[8:], maphash.Bytes(seeds[1], b))
	return sum
}

// shorten replaces the rendering from offset from on by its digest, unless it is no longer than that: many tiny
// unknown parts must not make a rendering several times as long as the body.
func (p *Parser) shorten(from int) {
	if len(p.text)-from > digestLen {
		sum := digest(p.text[from:])
		p.text = append(p.text[:from], sum[:]...)
	}
}

// digestValue renders a value of a kind that is not known.
func (p *Parser) digestValue() {
	p.mark(tagDigest)
	from := len(p.text)
	p.value()
	p.shorten(from)
}

// digestObject renders an object of a kind that is not known, as [Parser.digestValue] does, but without cache_control.
func (p *Parser) digestObject() {
	p.mark(tagDigest)
	from := len(p.text)
	p.i++
	for first := true; ; first = false {
		at := len(p.text)
		key, more := p.member(first)
		if !more {
			break
		}
		if string(key) == "cache_control" {
			p.skip()
			continue
		}
		p.text = append(p.text[:at+len(key)], mark) // key is there already, beyond the end
		p.value()
	}
	p.shorten(from)
}

// headDigest reads the value of a head field. The last of several wins.
func (p *Parser) headDigest(h int) {
	from := len(p.text)
	p.value()
	v := p.text[from:]
	if h == headSalt {
		p.salt = p.salt[:0]
		if v, isString := bytes.CutPrefix(v, []byte{'"'}); isString && !p.bad {
			p.salt = append(p.salt, v[:len(v)-1]...) // without the mark
		}
		p.out.Salt = p.salt
	}
	switch string(v) {
	case "null\xff", "\"\xff", "[]", "{}":
		p.headSet[h] = false
	default:
		p.headSum[h], p.headSet[h] = digest(v), true
	}
	p.text = p.text[:from]
}
