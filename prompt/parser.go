package prompt

import (
	"bytes"
	"math"
	"strconv"
)

// Parser parses request bodies. Its zero value is ready. It keeps its buffers from one body to the next, so it belongs
// in a sync.Pool; it is not safe for concurrent use.
type Parser struct {
	api  API
	body []byte
	i    int  // offset in body of what is read next
	bad  bool // body is not JSON

	has0xFF bool     // body has a byte 0xFF somewhere
	objects []uint64 // stack of [Parser.value], one bit for each open bracket

	text    []byte // headRoom, then the rendering
	system  section
	turns   section
	headSum [heads][digestLen]byte
	headSet [heads]bool

	spans      []Span // of models
	priorities []Span
	reports    []Span // of report modes
	ids        []uint32
	salt       []byte
	n, bestOf  int    // of the body, 0 if absent
	given      fields // of the body
	out        Body
}

// fields are top-level fields of which only matters whether they are given.
type fields uint8

const (
	fieldPromptLogprobs fields = 1 << iota
	fieldLogprobs
	fieldEcho
	fieldEffort
	fieldTruncation
)

// section is what one top-level field renders to: the system turn, or the turns; for completions, the prompt.
type section struct {
	piece
	lead int  // length of its first turn's role and role mark
	seen bool // the body has the field
	odd  bool // its shape is not known
}

// piece is a range of p.text. The zero value is a piece that is not there.
type piece struct{ from, to int }

func (c piece) len() int { return c.to - c.from }

// maxKept is how much of each buffer, in bytes, a [Parser] keeps over a [Parser.Reset].
const maxKept = 1 << 20

// Reset lets go of the body and of large buffers. Call it before a Parser goes back to a pool. It ends the life of the
// last [Body] as [Parser.Parse] does.
func (p *Parser) Reset() {
	model := p.out.Model
	kept := Parser{objects: p.objects, text: p.text, spans: p.spans, priorities: p.priorities, reports: p.reports, ids: p.ids, salt: p.salt}
	if len(model) <= 256 {
		kept.out.Model = model
	}
	if cap(kept.objects) > maxKept/8 {
		kept.objects = nil
	}
	if cap(kept.text) > maxKept {
		kept.text = nil
	}
	if cap(kept.spans) > maxKept/16 {
		kept.spans = nil
	}
	if cap(kept.priorities) > maxKept/16 {
		kept.priorities = nil
	}
	if cap(kept.reports) > maxKept/16 {
		kept.reports = nil
	}
	if cap(kept.ids) > maxKept/4 {
		kept.ids = nil
	}
	if cap(kept.salt) > maxKept {
		kept.salt = nil
	}
	*p = kept
}

// Parse reads the body of a request of the given API. It takes time linear in the body's length and keeps no reference
// to the body beyond the next Parse or [Parser.Reset], until which what it returns is valid. A body that cannot be
// understood is no error: Body.Why says so.
func (p *Parser) Parse(api API, body []byte) *Body {
	p.api, p.body, p.bad = api, body, false
	p.has0xFF = bytes.IndexByte(body, mark) >= 0
	// Most renderings are shorter than the body: one allocation will do.
	if need := headRoom + len(body) + 64; cap(p.text) < need {
		p.text = make([]byte, 0, need)
	}
	p.text = p.text[:headRoom]
	p.system, p.turns = section{}, section{}
	p.headSet = [heads]bool{}
	p.ids = p.ids[:0]
	p.n, p.bestOf, p.given = 0, 0, 0
	p.out = Body{Model: p.out.Model, ModelSpans: p.spans[:0], PrioritySpans: p.priorities[:0], ReportModeSpans: p.reports[:0]}

	p.i = literal(body, "\uFEFF") // a byte order mark
	object := p.peek() == '{'
	if object {
		p.i++
		p.out.Object = p.i
		p.object()
	} else {
		p.skip()
	}
	if p.peek(); p.i < len(body) {
		p.fail()
	}
	p.spans, p.priorities, p.reports = p.out.ModelSpans, p.out.PrioritySpans, p.out.ReportModeSpans
	p.out.N = max(1, p.n, p.bestOf)
	p.out.PromptLogprobs = p.has(fieldPromptLogprobs) || p.has(fieldEcho) && (api == Chat || p.has(fieldLogprobs))
	p.out.RenderOnly = p.headSet[headDocuments] || p.has(fieldEffort) || p.has(fieldTruncation)
	if !p.out.HasModel {
		p.out.Model = ""
	}
	p.out.Why = p.finish(object)
	return &p.out
}

// sources names the top-level fields that the conversation is read from.
var sources = [...]struct{ turns, system string }{
	Chat:        {turns: "messages"},
	Messages:    {turns: "messages", system: "system"},
	Responses:   {turns: "input", system: "instructions"},
	Completions: {turns: "prompt"},
	Other:       {},
}

// object reads the members of the top-level object.
func (p *Parser) object() {
	source := sources[p.api]
	for first := true; ; first = false {
		key, more := p.member(first)
		if !more {
			return
		}
		p.out.Members = true
		switch {
		case string(key) == "model":
			p.model()
		case string(key) == "stream":
			p.out.Stream = literal(p.body[p.i:], "true") > 0
			p.skip()
		case string(key) == "n":
			p.n = p.choices()
		case string(key) == "best_of":
			p.bestOf = p.choices()
		case string(key) == "priority":
			p.priority()
		case string(key) == "vllm_xargs":
			p.extraArgs()
		case string(key) == "sampling_params":
			p.samplingParams()
		case string(key) == "prompt_logprobs":
			p.note(fieldPromptLogprobs)
		case string(key) == "logprobs":
			p.note(fieldLogprobs)
		case string(key) == "echo":
			p.note(fieldEcho)
		case string(key) == "reasoning_effort":
			p.note(fieldEffort)
		case string(key) == "truncate_prompt_tokens":
			p.note(fieldTruncation)
		case len(key) == 0 || source.turns == "":
			p.skip()
		case string(key) == source.turns && p.api == Completions:
			p.turns = p.completion()
		case string(key) == source.turns:
			p.turns = p.conversation()
		case string(key) == source.system:
			p.system = p.systemTurn()
		default:
			p.otherField(key)
		}
	}
}

// otherField reads a field that may be a head. Of these only the salt is known to completions.
func (p *Parser) otherField(key []byte) {
	for h, name := range headKeys {
		if string(key) == name && (h == headSalt || p.api != Completions) {
			p.headDigest(h)
			return
		}
	}
	p.skip()
}

func (p *Parser) model() {
	start, from := p.i, len(p.text)
	isString := p.peek() == '"'
	if isString {
		p.str()
	} else {
		p.value()
	}
	if p.bad {
		return
	}
	// The string of the last request is taken again where it is the same: most requests name few models.
	if name := p.text[from:]; isString && string(name) != p.out.Model {
		p.out.Model = string(name)
	}
	p.text = p.text[:from]
	p.out.HasModel = isString
	p.out.ModelSpans = append(p.out.ModelSpans, Span{start, p.i})
	p.bad = len(p.out.ModelSpans) > MaxModelSpans
}

// choices reads the value of "n" or "best_of". What is no number is 0.
func (p *Parser) choices() int {
	from := len(p.text)
	p.value()
	v := p.text[from:]
	p.text = p.text[:from]
	v = bytes.TrimSuffix(bytes.TrimPrefix(v, []byte{'"'}), []byte{mark})
	// Without a look at the error: then it is 0, or infinite for what is too much.
	n, _ := strconv.ParseFloat(string(bytes.TrimSpace(v)), 64)
	if p.bad || !(n > 0) { // NaN is not
		return 0
	}
	return int(min(math.Ceil(n), math.MaxInt32))
}

func (p *Parser) priority() {
	start := p.i
	p.skip()
	if p.bad {
		return
	}
	v := p.body[start:p.i]
	p.out.Priority, p.out.HasPriority = 0, false
	if v[0] == '-' || v[0]-'0' <= 9 {
		if n, err := strconv.ParseInt(string(v), 10, 64); err == nil {
			p.out.Priority, p.out.HasPriority = n, true
		}
	}
	p.out.PrioritySpans = append(p.out.PrioritySpans, Span{start, p.i})
	p.bad = len(p.out.PrioritySpans) > MaxModelSpans
}

// note reads the value of a field and notes whether it is given. An echo that is false is not.
func (p *Parser) note(field fields) {
	start := p.i
	p.skip()
	v := p.body[start:p.i]
	if string(v) == "null" || field == fieldEcho && (string(v) == "false" || string(v) == "0") {
		p.given &^= field
	} else {
		p.given |= field
	}
}

func (p *Parser) has(field fields) bool { return p.given&field != 0 }

// samplingParams reads "sampling_params", which may have extra arguments.
func (p *Parser) samplingParams() {
	if p.peek() != '{' {
		p.skip()
		return
	}
	p.i++
	for first := true; ; first = false {
		key, more := p.member(first)
		switch {
		case !more:
			return
		case string(key) == "extra_args":
			p.extraArgs()
		default:
			p.skip()
		}
	}
}

// extraArgs reads the extra arguments of a request.
func (p *Parser) extraArgs() {
	if p.peek() != '{' {
		p.skip()
		return
	}
	p.i++
	for first := true; ; first = false {
		key, more := p.member(first)
		if !more {
			return
		}
		start, isMode := p.i, string(key) == "kv_cache_report_mode"
		p.skip()
		if isMode && !p.bad {
			p.out.ReportModeSpans = append(p.out.ReportModeSpans, Span{start, p.i})
			p.bad = len(p.out.ReportModeSpans) > MaxModelSpans
		}
	}
}

// finish puts the rendering together.
func (p *Parser) finish(object bool) Why {
	var opening, tail int
	switch p.api {
	case Chat, Messages:
		opening, tail = tagConversation, markLen
	case Responses:
		opening, tail = tagResponses, markLen
	case Completions:
		if len(p.ids) > 0 {
			opening = tagTokens
		}
	default:
		return NoPromptAPI
	}
	switch {
	case p.bad:
		return Unparsable
	case !object || !p.turns.seen || p.turns.odd || p.system.odd:
		return UnknownShape
	}
	from := p.arrange(headRoom, p.system.piece, p.turns.piece)
	lead := p.turns.lead
	if p.system.len() > 0 {
		lead = p.system.lead
	}
	if len(p.text)-from <= lead+tail {
		return Empty
	}
	// What stands ahead of the conversation is written backwards into the room before it.
	start := from
	for h := heads - 1; h >= 0; h-- {
		if p.headSet[h] {
			start -= digestLen
			copy(p.text[start:], p.headSum[h][:])
			start -= markLen
			p.text[start], p.text[start+1] = mark, byte(tagHead+h)
		}
	}
	if opening != 0 {
		start -= markLen
		p.text[start], p.text[start+1] = mark, byte(opening)
	}
	p.out.Text = p.text[start:]
	p.out.Lead = from - start + lead
	p.out.Tail = tail
	if len(p.ids) > 0 && !p.out.RenderOnly {
		p.out.TokenIDs = p.ids
	}
	return HasPrompt
}

// arrange makes the pieces follow one another and gives where they start; they end at the end of p.text. Usually they
// do already, from offset from on. Otherwise, as a client's key order is not the rendering's, they are copied behind
// all the rest.
func (p *Parser) arrange(from int, pieces ...piece) int {
	to := from
	for _, c := range pieces {
		if c.len() == 0 {
			continue
		}
		if c.from != to {
			from = len(p.text)
			for _, c := range pieces {
				p.text = append(p.text, p.text[c.from:c.to]...)
			}
			return from
		}
		to = c.to
	}
	p.text = p.text[:to]
	return from
}

// settle is arrange, with the pieces moved to offset from if they are not there.
func (p *Parser) settle(from int, pieces ...piece) {
	if at := p.arrange(from, pieces...); at != from {
		p.text = append(p.text[:from], p.text[at:]...)
	}
}
