package prompt

import "errors"

// ErrUnknownPrompt says that an engine has told token ids from which it cannot be known what it will compute.
var ErrUnknownPrompt = errors.New("the token ids are of several prompts, or not all of the prompt")

var errTokenized = errors.New("not an answer with token ids")

// ParseTokenized reads the token ids of a prompt in what vLLM answers when it is asked for them, which is an object: by
// /tokenize with "tokens", by /render with "token_ids"; for a completion it is an array of such objects, one for each
// prompt. Prompts with images or audio have "features", whose blocks are not known by their token ids: that and several
// prompts are [ErrUnknownPrompt]. The ids belong to the parser until its next use. There are at least one and at most
// [MaxTokenIDs].
func (p *Parser) ParseTokenized(answer []byte) (ids []uint32, err error) {
	p.Reset()
	p.body, p.ids = answer, p.ids[:0]
	var known, unknown bool
	switch p.peek() {
	case '{':
		known, unknown = p.tokenized()
	case '[':
		p.i++
		for first := true; p.element(first); first = false {
			switch {
			case !first:
				unknown = true
				p.skip()
			case p.peek() == '{':
				known, unknown = p.tokenized()
			default:
				p.fail()
			}
		}
	default:
		p.fail()
	}
	p.peek()
	switch {
	case p.bad || p.i < len(answer):
		return nil, errTokenized
	case unknown:
		return nil, ErrUnknownPrompt
	case !known || len(p.ids) == 0 || len(p.ids) > MaxTokenIDs:
		return nil, errTokenized
	}
	return p.ids, nil
}

// tokenized reads the object of one prompt into p.ids. It tells whether there are ids, all of them right, and whether there
// is more to the prompt.
func (p *Parser) tokenized() (known, more bool) {
	p.i++
	for first := true; ; first = false {
		key, another := p.member(first)
		if !another {
			return known, more
		}
		switch string(key) {
		case "token_ids", "tokens":
			p.ids = p.ids[:0]
			known = p.peek() == '['
			if known {
				known = p.tokenIDs()
			} else {
				p.skip()
			}
		case "features":
			more = !p.empty()
		default:
			p.skip()
		}
	}
}

// empty reads a value and tells whether it is null, an empty array or an object whose members are such.
func (p *Parser) empty() bool {
	from := len(p.text)
	if p.peek() != '{' {
		return p.isNothing(from)
	}
	p.i++
	nothing := true
	for first := true; ; first = false {
		if _, more := p.member(first); !more {
			return nothing
		}
		if !p.isNothing(from) {
			nothing = false
		}
	}
}

func (p *Parser) isNothing(from int) bool {
	p.value()
	v := string(p.text[from:])
	p.text = p.text[:from]
	return v == "null\xff" || v == "[]" || v == "{}"
}
