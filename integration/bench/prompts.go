package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/rolter-ai/caddy-rolter/integration/converse"
)

// prompts makes request bodies that differ: each is one of the first halves, a number that was never used before, and one of the second halves.
type prompts struct {
	before, after []string
	next          atomic.Uint64
}

const (
	model       = "bench"
	families    = 8  // shared system prompts
	tails       = 16 // texts behind the number, which are not shared because the number is not
	numberBytes = 16
)

// newPrompts makes chat completions of size bytes, of which half is a system prompt that others share.
func newPrompts(size int, stream bool) *prompts {
	opening := fmt.Sprintf(`{"model":%q,"messages":[{"role":"system","content":"`, model)
	middle := `"},{"role":"user","content":"`
	end := fmt.Sprintf(`"}],"temperature":0.7,"max_tokens":256,"stream":%t}`, stream)
	shared := size / 2
	unique := size - shared - len(opening) - len(middle) - numberBytes - len(end)
	p := new(prompts)
	for i := range families {
		p.before = append(p.before, opening+escape(prose(uint64(i), shared))+middle)
	}
	for i := range tails {
		p.after = append(p.after, escape(prose(uint64(families+i), unique))+end)
	}
	return p
}

// newDistinctPrompts makes chat completions of one message of size bytes, which share nothing.
func newDistinctPrompts(size int) *prompts {
	p := &prompts{before: []string{fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"`, model)}}
	for i := range tails {
		// Without escapes, the text is as long as its JSON.
		text := strings.NewReplacer("\n", " ", `"`, " ", `\`, " ").Replace(prose(uint64(i), size))
		p.after = append(p.after, text[:size-numberBytes]+`"}]}`)
	}
	return p
}

// append appends the next body.
func (p *prompts) append(b []byte) []byte {
	n := p.next.Add(1)
	b = append(b, p.before[n%uint64(len(p.before))]...)
	// An odd factor makes the numbers look random, as the beginnings of real texts do, and leaves them distinct.
	b = fmt.Appendf(b, "%016x", n*0x9E3779B97F4A7C15)
	return append(b, p.after[n/families%uint64(len(p.after))]...)
}

// prose is n bytes of text as people write it to assistants.
func prose(seed uint64, n int) string {
	var b strings.Builder
	for ; b.Len() < n; seed += 1000 {
		for _, turn := range converse.Generate(seed, 1, 1)[0].Turns {
			b.WriteString(turn.Text + "\n\n")
		}
	}
	return b.String()[:n]
}

// escape writes text as the inside of a JSON string, cut to be no longer than the text is.
func escape(text string) string {
	n := len(text)
	escaped := func() string {
		var b bytes.Buffer
		encoder := json.NewEncoder(&b)
		encoder.SetEscapeHTML(false)                      // as clients in other languages than Go do
		_ = encoder.Encode(strings.ToValidUTF8(text, "")) // a string can always be encoded
		return string(b.Bytes()[1 : b.Len()-len("\"\n")]) // without its quotes
	}
	text = text[:n-(len(escaped())-n)]
	s := escaped()
	return s + strings.Repeat(".", n-len(s))
}
