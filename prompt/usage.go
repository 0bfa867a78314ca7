package prompt

import "bytes"

// tailSize is how many bytes of an answer a [Tail] keeps. Behind the usage vLLM puts less than 300 bytes, unless it was
// asked for log probabilities or token ids of the prompt.
const tailSize = 4 << 10

// maxCount is about the greatest number of tokens that is believed. Three of them fit in an int of 32 bits.
const maxCount = 500_000_000

// Tail keeps the end of an answer, where its usage is: the last 4 KiB. Its zero value is ready. It is not safe for
// concurrent use.
type Tail struct {
	buf [tailSize]byte // a ring once it is full
	at  int            // offset in buf of what is written next, the oldest byte of a full ring
	cut bool           // the ring is full: bytes may have been lost
}

// Reset makes t ready for another answer.
func (t *Tail) Reset() { t.at, t.cut = 0, false }

// Write takes the answer's next bytes. It copies at most what is kept of them, and never fails.
func (t *Tail) Write(p []byte) (int, error) {
	n := len(p)
	p = p[max(0, n-tailSize):]
	first := copy(t.buf[t.at:], p)
	t.at += first
	if t.at == tailSize {
		t.at, t.cut = copy(t.buf[:], p[first:]), true
	}
	return n, nil
}

// bytes gives what is kept, in order, and whether there may have been more. It is valid until the next Write.
func (t *Tail) bytes() (kept []byte, cut bool) {
	if !t.cut {
		return t.buf[:t.at], false
	}
	if t.at > 0 {
		ring := t.buf
		copy(t.buf[copy(t.buf[:], ring[t.at:]):], ring[:t.at])
		t.at = 0
	}
	return t.buf[:], true
}

// Usage is what an engine says about the tokens of a prompt.
type Usage struct {
	// PromptTokens is the length of the prompt in tokens, cached ones included. It is at least 1.
	PromptTokens int
	// CachedTokens is how many of them were found in the engine's cache, if CachedKnown tells that the engine has said.
	CachedTokens int
	CachedKnown  bool
}

// Usage finds the usage in the end of an answer of the given API: the last one that can be read, of an answer that is
// one JSON object or a stream of server-sent events with one JSON object in a line. It gives false where none is found,
// as in answers with a content encoding, in streams of clients that have not asked for it, and where more than 4 KiB
// follow it.
//
//   - Chat and completions (OpenAI): usage.prompt_tokens, and usage.prompt_tokens_details.cached_tokens. In a stream
//     vLLM sends both in one chunk ahead of [DONE]; with continuous usage every chunk has the first.
//   - Messages (Anthropic): usage.input_tokens, to which cache_read_input_tokens (these are the cached ones) and
//     cache_creation_input_tokens are added, as there the three are disjoint. In a stream they are in message_delta, or
//     in message_start under message, which only short answers have not left behind.
//   - Responses (OpenAI): usage.input_tokens and usage.input_tokens_details.cached_tokens. In a stream this is under
//     response, in response.completed.
//
// A usage that lacks the first of these or whose counts make no sense is passed over, as is null.
func (t *Tail) Usage(api API) (Usage, bool) {
	if int(api) >= len(usages) || usages[api].prompt == "" {
		return Usage{}, false
	}
	b, cut := t.bytes()
	if !bytes.Contains(b, []byte(`"usage"`)) {
		return Usage{}, false
	}
	for last := true; ; last = false {
		b = bytes.TrimRight(b, " \t\r\n")
		if len(b) == 0 {
			return Usage{}, false
		}
		start := bytes.LastIndexByte(b, '\n') + 1
		object, isEvent := bytes.CutPrefix(b[start:], []byte("data:"))
		headless := false
		switch {
		case isEvent:
		case last || start == 0 && cut: // the answer is one object, or the line's start was not kept
			object, headless = b, cut
		default: // another line of an event
			object = nil
		}
		if value := findUsage(object, headless, usages[api].parent); value != nil {
			if u, ok := readUsage(value, api); ok {
				return u, true
			}
		}
		b = b[:start]
	}
}

// usages tells for each API under which top-level key the usage may be, instead of at the top level, and which members
// of it count: the details are an object with cached_tokens, read and written are added to prompt.
var usages = [...]struct{ parent, prompt, details, read, written string }{
	Chat:        {prompt: "prompt_tokens", details: "prompt_tokens_details"},
	Completions: {prompt: "prompt_tokens", details: "prompt_tokens_details"},
	Messages:    {parent: "message", prompt: "input_tokens", read: "cache_read_input_tokens", written: "cache_creation_input_tokens"},
	Responses:   {parent: "response", prompt: "input_tokens", details: "input_tokens_details"},
}

// findUsage gives the last "usage" among an object's members or, failing that, the one among those of its member with
// the key parent. It is nil if there is none; if it is no object, it is anything that is none. Of a headless object the
// start is missing.
//
// It reads the object backwards, which JSON allows: outside of a string a quote ends one, and that begins at the next
// quote with an even number of backslashes before it. So what a string says is never taken for a member, and depths are
// known from the end on.
func findUsage(b []byte, headless bool, parent string) []byte {
	if len(b) == 0 || b[len(b)-1] != '}' {
		return nil
	}
	var (
		depth  int    // closing brackets whose opening ones are still to come
		ends   [4]int // offset behind the last closing bracket that led to each depth
		colon  = -1   // offset behind a colon, if that was the last token
		top    []byte // the value of the last "usage" at depth 1
		inner  []byte // the same at depth 2, of the member at depth 1 whose key is still to come
		nested []byte // the same at depth 2, under the key parent
		others bool   // there are keys at depth 1 that an event with a parent does not have
	)
	i := len(b)
scan:
	for i > 0 {
		i--
		switch class[b[i]] {
		case space:
			continue
		case closing:
			depth++
			if depth < len(ends) {
				ends[depth] = i + 1
			}
		case opening:
			depth--
			if depth == 0 {
				break scan
			}
		case ':':
			colon = i + 1
			continue
		case '"':
			if backslashes(b[:i])%2 != 0 {
				return nil
			}
			end := i
			i = stringStart(b[:end])
			if i < 0 {
				break scan
			}
			if colon < 0 || depth > 2 {
				break
			}
			key := b[i+1 : end]
			value := b[colon:max(colon, ends[depth+1])] // if that is an object, else something else
			switch {
			case depth == 2:
				if string(key) == "usage" && inner == nil {
					inner = value
				}
			default:
				switch string(key) {
				case "usage":
					if top == nil {
						top = value
					}
				case parent:
					if nested == nil {
						nested = inner
					}
				case "type", "sequence_number":
				default:
					others = true
				}
				inner = nil
			}
		case 0:
			return nil
		}
		colon = -1
	}
	switch {
	case depth > 0 && !headless: // it was cut off at its end: the depths are wrong
		return nil
	case depth == 0 && len(bytes.TrimLeft(b[:i], " \t\r\n")) > 0:
		return nil
	case top != nil:
		return top
	case nested != nil && parent != "":
		return nested
	case depth > 0 && parent != "" && !others: // what began ahead of b is an event with a parent
		return inner
	}
	return nil
}

// stringStart gives the offset of the quote that begins the string whose last character b ends with, and a negative
// number if that is not in b for sure.
func stringStart(b []byte) int {
	for at := len(b); ; {
		at = bytes.LastIndexByte(b[:at], '"')
		if at < 0 {
			return -1
		}
		switch n := backslashes(b[:at]); {
		case n == at:
			return -1 // there may be more
		case n%2 == 0:
			return at
		}
	}
}

// backslashes counts the backslashes that b ends with.
func backslashes(b []byte) int {
	n := 0
	for n < len(b) && b[len(b)-1-n] == '\\' {
		n++
	}
	return n
}

// Classes of the bytes outside of strings. That of what is not allowed there is 0.
const (
	space   = ' '
	closing = '}'
	opening = '{'
	other   = ',' // and what numbers and literals, Python's among them, are made of
)

var class = func() (t [256]byte) {
	for _, c := range " \t\r\n" {
		t[c] = space
	}
	for _, c := range ",+-.0123456789eEtrufalsnNIity" {
		t[c] = other
	}
	t['}'], t[']'] = closing, closing
	t['{'], t['['] = opening, opening
	t[':'], t['"'] = ':', '"'
	return t
}()

// readUsage reads a usage.
func readUsage(b []byte, api API) (Usage, bool) {
	p := Parser{body: b}
	prompt, cached, written := -1, -1, -1
	if p.peek() != '{' {
		return Usage{}, false
	}
	p.i++
	for first := true; ; first = false {
		key, more := p.member(first)
		if !more {
			break
		}
		switch f := &usages[api]; string(key) {
		case "":
			p.skip()
		case f.prompt:
			prompt = p.count()
		case f.read:
			cached = p.count()
		case f.written:
			written = p.count()
		case f.details:
			cached = p.cachedTokens()
		default:
			p.skip()
		}
	}
	u := Usage{PromptTokens: prompt, CachedTokens: max(cached, 0), CachedKnown: cached >= 0}
	if usages[api].read != "" {
		u.PromptTokens += u.CachedTokens + max(written, 0)
	}
	return u, !p.bad && prompt >= 0 && u.PromptTokens > 0 && u.CachedTokens <= u.PromptTokens
}

// cachedTokens reads the details of a usage. It gives -1 if they do not tell.
func (p *Parser) cachedTokens() int {
	if p.peek() != '{' {
		if p.count() >= 0 {
			p.fail()
		}
		return -1
	}
	p.i++
	cached := -1
	for first := true; ; first = false {
		key, more := p.member(first)
		switch {
		case !more:
			return cached
		case string(key) == "cached_tokens":
			cached = p.count()
		default:
			p.skip()
		}
	}
}

// count reads a number of tokens. It gives -1 for null; nothing else is right.
func (p *Parser) count() int {
	start := p.i
	p.skip()
	v := p.body[start:p.i]
	if string(v) == "null" {
		return -1
	}
	n := 0
	for _, c := range v {
		if c -= '0'; c > 9 || n > maxCount/10 {
			p.fail()
			return -1
		}
		n = 10*n + int(c)
	}
	return n
}
