package prompt

// conversation reads "messages" (of OpenAI's Chat Completions or of Anthropic's Messages) or "input" (of Responses).
func (p *Parser) conversation() section {
	from := len(p.text)
	s := section{seen: true}
	switch c := p.peek(); {
	case c == '"' && p.api == Responses:
		s.lead = p.turn("user")
	case c == '[':
		p.i++
		for first := true; p.element(first); first = false {
			lead, ok := p.message()
			if first {
				s.lead = lead
			}
			s.odd = s.odd || !ok
		}
	default:
		s.odd = true
		p.skip()
	}
	s.piece = piece{from, len(p.text)}
	return s
}

// systemTurn reads "system" or "instructions". Empty ones are no turn, as they are none to engines.
func (p *Parser) systemTurn() section {
	from := len(p.text)
	s := section{seen: true}
	switch p.peek() {
	case '"', '[':
		s.lead = p.turn("system")
		if len(p.text)-from == s.lead+markLen {
			p.text = p.text[:from]
		}
	case 'n':
		p.skip()
	default:
		s.odd = true
		p.skip()
	}
	s.piece = piece{from, len(p.text)}
	return s
}

// turn renders a turn of the given role whose content is what is read next. It gives the length of role and role mark.
func (p *Parser) turn(role string) (lead int) {
	from := len(p.text)
	p.text = append(p.text, role...)
	p.turnContent()
	return p.endTurn(from, len(role))
}

// endTurn ends the turn that starts at offset from with a role and name of the given length.
func (p *Parser) endTurn(from, roleLen int) (lead int) {
	p.mark(tagTurn)
	lead = roleLen + roleMarkLen
	p.text[from+lead-1] = p.text[from+lead+1] // the guard; the end mark alone makes two bytes
	return lead
}

// message renders an element of "messages" or "input". It is ok if its shape is known.
func (p *Parser) message() (lead int, ok bool) {
	switch {
	case p.peek() != '{':
		p.skip()
		return 0, false
	case p.api == Responses:
		return p.item()
	}
	from := len(p.text)
	var role, name, content, reasoning, calls piece
	p.i++
	for first := true; ; first = false {
		key, more := p.member(first)
		if !more {
			break
		}
		switch string(key) {
		case "role":
			role, ok = p.role()
		case "name":
			name = p.markedString(tagName)
		case "content":
			content = p.turnContent()
		case "reasoning_content", "reasoning": // vLLM has had both names
			reasoning = p.markedContent(tagThinking)
		case "tool_calls":
			calls = p.calls()
		case "function_call": // what tool_calls was before
			calls = p.call()
		default:
			p.skip()
		}
	}
	if content.len() == 0 {
		content = p.noContent()
	}
	p.settle(from, role, name, content, reasoning, calls)
	return p.endTurn(from, role.len()+name.len()), ok
}

// item renders an item of a Responses input: a message, or what a tool or reasoning model has said meanwhile, which
// engines render as turns of the assistant and of the tool.
func (p *Parser) item() (lead int, ok bool) {
	start, from := p.i, len(p.text)
	kind := itemMessage
	var role, content, summary, name, arguments, output piece
	p.i++
	for first := true; kind != itemUnknown; first = false {
		key, more := p.member(first)
		if !more {
			break
		}
		switch string(key) {
		case "type":
			kind = itemKindOf(p.word())
		case "role":
			role, ok = p.role()
		case "content":
			content = p.turnContent()
		case "summary":
			summary = p.markedContent(tagThinking)
		case "name":
			name = p.markedString(tagCall)
		case "arguments", "input":
			arguments = p.arguments()
		case "output":
			output = p.turnContent()
		default:
			p.skip()
		}
	}
	switch kind {
	case itemMessage:
		name, arguments, summary = piece{}, piece{}, piece{}
	case itemCall:
		role, content, summary = p.constant("assistant"), piece{}, piece{}
	case itemOutput:
		role, content, summary = p.constant("tool"), output, piece{}
		name, arguments = piece{}, piece{}
	case itemReasoning:
		role = p.constant("assistant")
		name, arguments = piece{}, piece{}
	case itemUnknown:
		if p.bad { // then there is nothing to go back to
			return 0, false
		}
		p.i, p.text = start, p.text[:from]
		p.roleMark()
		p.digestObject()
		return p.endTurn(from, 0), true
	}
	if content.len() == 0 {
		content = p.noContent()
	}
	p.settle(from, role, content, summary, name, arguments)
	return p.endTurn(from, role.len()), ok || kind != itemMessage
}

type itemKind uint8

const (
	itemMessage itemKind = iota
	itemCall
	itemOutput
	itemReasoning
	itemUnknown
)

func itemKindOf(name []byte) itemKind {
	switch string(name) {
	case "message":
		return itemMessage
	case "function_call", "custom_tool_call":
		return itemCall
	case "function_call_output", "custom_tool_call_output":
		return itemOutput
	case "reasoning":
		return itemReasoning
	}
	return itemUnknown
}

// role reads a role. It is not ok if it is no string.
func (p *Parser) role() (c piece, ok bool) {
	if p.peek() != '"' {
		p.skip()
		return piece{}, false
	}
	from := len(p.text)
	p.str()
	return piece{from, len(p.text)}, true
}

// turnContent reads what a turn contains and renders it behind a role mark.
func (p *Parser) turnContent() piece {
	from := len(p.text)
	p.roleMark()
	p.content(false)
	return piece{from, len(p.text)}
}

// noContent renders what [Parser.turnContent] does of null.
func (p *Parser) noContent() piece {
	from := len(p.text)
	p.roleMark()
	return piece{from, len(p.text)}
}

func (p *Parser) constant(s string) piece {
	from := len(p.text)
	p.text = append(p.text, s...)
	return piece{from, len(p.text)}
}
