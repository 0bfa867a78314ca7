package prompt

// content renders a string, an array of parts or null. inResult tells that it is a tool result's.
func (p *Parser) content(inResult bool) {
	switch p.peek() {
	case '"':
		p.str()
	case '[':
		p.i++
		for first := true; p.element(first); first = false {
			p.part(!first, inResult)
		}
	case 'n':
		p.skip()
	default:
		p.digestValue()
	}
}

// part renders a part of a content; further tells that it is not the first. A tool result has parts itself, but no
// further tool result, so this does not recurse any deeper.
func (p *Parser) part(further, inResult bool) {
	start, from := p.i, len(p.text)
	switch p.peek() {
	case '"':
		p.textPart(further)
		return
	case '{':
	default:
		p.digestValue()
		return
	}
	kind := partUntyped
	var text, refusal, thinking, name, arguments, result piece
	p.i++
	for first := true; kind != partUnknown; first = false {
		key, more := p.member(first)
		if !more {
			break
		}
		switch string(key) {
		case "type":
			kind = partKindOf(p.word())
			if kind == partResult && inResult {
				kind = partUnknown
			}
		case "text":
			text = p.textPart(further)
		case "refusal":
			refusal = p.textPart(further)
		case "thinking":
			thinking = p.markedContent(tagThinking)
		case "name":
			name = p.markedString(tagCall)
		case "input":
			arguments = p.arguments()
		case "content":
			if inResult {
				p.skip()
			} else {
				result = p.result()
			}
		default:
			p.skip()
		}
	}
	switch kind {
	case partText:
		p.settle(from, text)
	case partRefusal:
		p.settle(from, refusal)
	case partThinking:
		p.settle(from, thinking)
	case partCall:
		p.settle(from, name, arguments)
	case partResult:
		p.settle(from, result)
	default:
		if !p.bad {
			p.out.Media = true
			p.i, p.text = start, p.text[:from]
			p.digestObject()
		}
	}
}

type partKind uint8

const (
	partUntyped partKind = iota
	partUnknown
	partText
	partRefusal
	partThinking
	partCall
	partResult
)

func partKindOf(name []byte) partKind {
	switch string(name) {
	case "text", "input_text", "output_text", "summary_text", "reasoning_text":
		return partText
	case "refusal":
		return partRefusal
	case "thinking":
		return partThinking
	case "tool_use":
		return partCall
	case "tool_result":
		return partResult
	}
	return partUnknown
}

// textPart renders a text, behind a mark if it is not the first part. What is no string renders as the empty text.
func (p *Parser) textPart(further bool) piece {
	from := len(p.text)
	if further {
		p.mark(tagPart)
	}
	if p.peek() == '"' {
		p.str()
	} else {
		p.skip()
	}
	return piece{from, len(p.text)}
}

// result renders the content of a tool result.
func (p *Parser) result() piece {
	from := len(p.text)
	p.mark(tagResult)
	p.content(true)
	p.mark(tagResultEnd)
	return piece{from, len(p.text)}
}

// calls renders "tool_calls".
func (p *Parser) calls() piece {
	from := len(p.text)
	if p.peek() != '[' {
		p.skip()
		return piece{}
	}
	p.i++
	for first := true; p.element(first); first = false {
		if p.peek() != '{' {
			p.skip()
			continue
		}
		at := len(p.text)
		var call piece
		p.i++
		for first := true; ; first = false {
			key, more := p.member(first)
			if !more {
				break
			}
			switch string(key) {
			case "function", "custom":
				call = p.call()
			default:
				p.skip()
			}
		}
		p.settle(at, call)
	}
	return piece{from, len(p.text)}
}

// call renders the function that is called and its arguments.
func (p *Parser) call() piece {
	from := len(p.text)
	if p.peek() != '{' {
		p.skip()
		return piece{}
	}
	var name, arguments piece
	p.i++
	for first := true; ; first = false {
		key, more := p.member(first)
		if !more {
			break
		}
		switch string(key) {
		case "name":
			name = p.markedString(tagCall)
		case "arguments", "input":
			arguments = p.arguments()
		default:
			p.skip()
		}
	}
	p.settle(from, name, arguments)
	return piece{from, len(p.text)}
}

// arguments renders a call's arguments: a string's text, or an object (Anthropic's) normalised.
func (p *Parser) arguments() piece {
	from := len(p.text)
	p.mark(tagArguments)
	if p.peek() == '"' {
		p.str()
	} else {
		p.value()
	}
	return piece{from, len(p.text)}
}

// markedString renders a string behind a mark, and nothing for other values.
func (p *Parser) markedString(tag byte) piece {
	if p.peek() != '"' {
		p.skip()
		return piece{}
	}
	from := len(p.text)
	p.mark(tag)
	p.str()
	return piece{from, len(p.text)}
}

// markedContent renders content behind a mark, and nothing for null.
func (p *Parser) markedContent(tag byte) piece {
	if p.peek() == 'n' {
		p.skip()
		return piece{}
	}
	from := len(p.text)
	p.mark(tag)
	p.content(false)
	return piece{from, len(p.text)}
}
