package prompt

// This file is the JSON grammar (RFC 8259), laxer in what Python's json or lenient engines take: see the package's
// comment. The first error ends the input: it moves the position behind the last byte, where nothing more is found.

func (p *Parser) fail() {
	p.bad = true
	p.i = len(p.body)
}

// peek skips white space and gives the next byte, 0 at the end of the body; a byte 0 there is as wrong as no byte.
func (p *Parser) peek() byte {
	b, i := p.body, p.i
	for i < len(b) {
		c := b[i]
		if c > ' ' || (c != ' ' && c != '\n' && c != '\r' && c != '\t') {
			p.i = i
			return c
		}
		i++
	}
	p.i = i
	return 0
}

// member goes to the value of the next member of the object whose brace has been read, and gives the member's decoded
// key. The key stands behind the end of p.text: it is valid until something is rendered. At the end of the object more
// is false.
func (p *Parser) member(first bool) (key []byte, more bool) {
	c := p.peek()
	if c == '}' {
		p.i++
		return nil, false
	}
	if c == ',' && !first {
		p.i++
		c = p.peek()
	} else if !first {
		c = 0
	}
	if c == '"' {
		key = p.word()
		if p.peek() == ':' {
			p.i++
			p.peek()
			return key, true
		}
	}
	p.fail()
	return nil, false
}

// element goes to the next element of the array whose bracket has been read.
func (p *Parser) element(first bool) (more bool) {
	switch c := p.peek(); {
	case c == ']':
		p.i++
		return false
	case first:
		return true
	case c == ',':
		p.i++
		p.peek()
		return true
	}
	p.fail()
	return false
}

// word gives a string's decoded bytes, valid until something is rendered; none for other values.
func (p *Parser) word() []byte {
	from := len(p.text)
	if p.peek() == '"' {
		p.str()
	} else {
		p.skip()
	}
	word := p.text[from:]
	p.text = p.text[:from]
	return word
}

// skip reads a value and renders nothing.
func (p *Parser) skip() {
	from := len(p.text)
	p.value()
	p.text = p.text[:from]
}

// value reads a value of any kind and depth, and renders it normalised: brackets as they are, strings decoded behind
// a quote, other scalars as they are, each scalar ended by 0xFF; no white space, colons and commas.
func (p *Parser) value() {
	depth := 0 // open brackets
	for {
		switch c := p.peek(); c {
		case '{', '[':
			p.i++
			p.text = append(p.text, c)
			p.push(depth, c == '{')
			depth++
			if next := p.peek(); next == '}' || next == ']' {
				break // closed below, or refused there
			}
			if c == '{' && !p.key() {
				return
			}
			continue
		case '"':
			p.text = append(p.text, '"')
			p.str()
			p.text = append(p.text, mark)
		default:
			p.scalar(c)
		}
		// A value ends here. Close what ends with it, up to a comma.
		for {
			if depth == 0 {
				return
			}
			c := p.peek()
			if c == ',' {
				break
			}
			depth--
			if object := p.isObject(depth); object && c != '}' || !object && c != ']' {
				p.fail()
				return
			}
			p.i++
			p.text = append(p.text, c)
		}
		p.i++
		if p.isObject(depth-1) && !p.key() {
			return
		}
	}
}

// key reads and renders a key and its colon.
func (p *Parser) key() bool {
	if p.peek() == '"' {
		p.text = append(p.text, '"')
		p.str()
		p.text = append(p.text, mark)
		if p.peek() == ':' {
			p.i++
			return true
		}
	}
	p.fail()
	return false
}

// push notes in p.objects, a stack of bits, whether the bracket at the given depth is a brace.
func (p *Parser) push(depth int, object bool) {
	if depth/64 == len(p.objects) {
		p.objects = append(p.objects, 0)
	}
	bit := uint64(1) << (depth % 64)
	if object {
		p.objects[depth/64] |= bit
	} else {
		p.objects[depth/64] &^= bit
	}
}

// isObject tells what push has noted.
func (p *Parser) isObject(depth int) bool {
	return p.objects[depth/64]>>(depth%64)&1 != 0
}

// scalar reads and renders a number or a literal whose first byte is c.
func (p *Parser) scalar(c byte) {
	var n int
	rest := p.body[p.i:]
	switch c {
	case 't':
		n = literal(rest, "true")
	case 'f':
		n = literal(rest, "false")
	case 'n':
		n = literal(rest, "null")
	case 'N':
		n = literal(rest, "NaN")
	case 'I':
		n = literal(rest, "Infinity")
	default:
		n = number(rest)
	}
	if n == 0 {
		p.fail()
		return
	}
	p.i += n
	p.text = append(append(p.text, rest[:n]...), mark)
}

// literal gives the length of word if b begins with it, else 0.
func literal(b []byte, word string) int {
	if len(b) >= len(word) && string(b[:len(word)]) == word {
		return len(word)
	}
	return 0
}

// number gives the length of the number that b begins with, 0 if there is none.
func number(b []byte) int {
	i := 0
	if i < len(b) && b[i] == '-' {
		i++
		if n := literal(b[i:], "Infinity"); n > 0 {
			return i + n
		}
	}
	whole := digits(b[i:])
	if whole == 0 || whole > 1 && b[i] == '0' {
		return 0
	}
	i += whole
	if i < len(b) && b[i] == '.' {
		n := digits(b[i+1:])
		if n == 0 {
			return 0
		}
		i += 1 + n
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		n := digits(b[i:])
		if n == 0 {
			return 0
		}
		i += n
	}
	return i
}

// digits counts the decimal digits that b begins with.
func digits(b []byte) int {
	for i, c := range b {
		if c-'0' > 9 {
			return i
		}
	}
	return len(b)
}
