package prompt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"
)

// naive renders a request as the package's comment says, over encoding/json and without a thought of speed. It knows
// strings, text parts, calls and results, not digests.
type naive struct{ bytes.Buffer }

func (n *naive) mark(tag byte) { n.Write([]byte{mark, tag}) }

func (n *naive) content(v any, inResult bool) {
	switch v := v.(type) {
	case string:
		n.WriteString(v)
	case []any:
		for i, part := range v {
			text, isText := part.(string)
			fields, _ := part.(map[string]any)
			switch fields["type"] {
			case "text", "input_text", "output_text":
				text, isText = fields["text"].(string), true
			case "tool_use":
				n.call(fields["name"], fields["input"])
			case "tool_result":
				n.mark(tagResult)
				n.content(fields["content"], true)
				n.mark(tagResultEnd)
			}
			if isText {
				if i > 0 {
					n.mark(tagPart)
				}
				n.WriteString(text)
			}
		}
	}
}

func (n *naive) call(name, arguments any) {
	n.mark(tagCall)
	n.WriteString(name.(string))
	n.mark(tagArguments)
	n.WriteString(arguments.(string))
}

func (n *naive) turn(role any, render func()) {
	n.WriteString(role.(string))
	n.mark(tagRole)
	at := n.Len()
	n.WriteByte(0)
	render()
	n.mark(tagTurn)
	n.Bytes()[at] = n.Bytes()[at+2]
}

func (n *naive) request(api API, fields map[string]any) []byte {
	opening, instructions, turns := byte(tagConversation), "system", "messages"
	if api == Responses {
		opening, instructions, turns = tagResponses, "instructions", "input"
	}
	n.mark(opening)
	if s := fields[instructions]; s != nil && api != Chat {
		n.turn("system", func() { n.content(s, false) })
	}
	for _, v := range fields[turns].([]any) {
		turn := v.(map[string]any)
		switch turn["type"] {
		case "function_call":
			n.turn("assistant", func() { n.call(turn["name"], turn["arguments"]) })
		case "function_call_output":
			n.turn("tool", func() { n.content(turn["output"], false) })
		default:
			n.turn(turn["role"], func() {
				n.content(turn["content"], false)
				calls, _ := turn["tool_calls"].([]any)
				for _, c := range calls {
					f := c.(map[string]any)["function"].(map[string]any)
					n.call(f["name"], f["arguments"])
				}
			})
		}
	}
	return n.Bytes()
}

// spell writes v as JSON with white space, key order and escapes left to chance.
func spell(r *rand.Rand, b *bytes.Buffer, v any) {
	space := func() { b.WriteString([]string{"", "", "", " ", "\n  ", "\t\r\n"}[r.IntN(6)]) }
	space()
	switch v := v.(type) {
	case map[string]any:
		b.WriteByte('{')
		keys := slices.Sorted(maps.Keys(v))
		r.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		for i, key := range keys {
			if i > 0 {
				b.WriteByte(',')
			}
			spell(r, b, key)
			b.WriteByte(':')
			spell(r, b, v[key])
		}
		b.WriteByte('}')
	case []any:
		b.WriteByte('[')
		for i, element := range v {
			if i > 0 {
				b.WriteByte(',')
			}
			spell(r, b, element)
		}
		b.WriteByte(']')
	case string:
		escapeMore := r.IntN(4) == 0
		b.WriteByte('"')
		for _, c := range v {
			short := strings.IndexRune("\"\\/\b\f\n\r\t", c)
			switch {
			case short >= 0 && (c != '/' || escapeMore):
				b.WriteByte('\\')
				b.WriteByte(`"\/bfnrt`[short])
			case c < ' ' || escapeMore && r.IntN(3) == 0:
				for _, unit := range utf16.Encode([]rune{c}) {
					fmt.Fprintf(b, []string{`\u%04x`, `\u%04X`}[r.IntN(2)], unit)
				}
			default:
				b.WriteRune(c)
			}
		}
		b.WriteByte('"')
	default:
		plain, _ := json.Marshal(v)
		b.Write(plain)
	}
	space()
}

func spelled(r *rand.Rand, v any) []byte {
	var b bytes.Buffer
	spell(r, &b, v)
	return b.Bytes()
}

func randomText(r *rand.Rand) string {
	if r.IntN(8) == 0 {
		return ""
	}
	return strings.TrimSpace(words(r, r.IntN(80), 10, "\n", "\"", "\\", "/", "é", "你好", "😀", "\x00", "\x1f", "\u2028", "\uFFFD"))
}

func randomContent(r *rand.Rand, results bool) any {
	switch r.IntN(5) {
	case 0:
		return nil
	case 1, 2:
		return randomText(r)
	}
	parts := []any{}
	for range r.IntN(4) {
		part := map[string]any{"type": []string{"text", "input_text", "output_text"}[r.IntN(3)], "text": randomText(r)}
		if r.IntN(4) == 0 {
			part["cache_control"] = map[string]any{"type": "ephemeral"}
		}
		switch {
		case results && r.IntN(4) == 0:
			part = map[string]any{"type": "tool_result", "tool_use_id": "c", "content": randomContent(r, false)}
		case r.IntN(8) == 0:
			part = map[string]any{"type": "tool_use", "id": "c", "name": randomText(r), "input": randomText(r)}
		}
		parts = append(parts, part)
		if r.IntN(6) == 0 {
			parts = append(parts, randomText(r))
		}
	}
	return parts
}

func randomTurn(r *rand.Rand, api API) any {
	turn := map[string]any{"role": []string{"user", "assistant", "system", "tool", "developer", "é\""}[r.IntN(6)]}
	if content := randomContent(r, true); content != nil || r.IntN(2) == 0 {
		turn["content"] = content
	}
	switch {
	case api == Responses && r.IntN(6) == 0:
		return map[string]any{"type": "function_call", "call_id": "c", "name": randomText(r), "arguments": randomText(r)}
	case api == Responses && r.IntN(6) == 0:
		return map[string]any{"type": "function_call_output", "call_id": "c", "output": randomText(r)}
	case api == Responses && r.IntN(2) == 0:
		turn["type"] = "message"
	case api == Chat && r.IntN(4) == 0:
		calls := []any{}
		for range r.IntN(3) {
			calls = append(calls, map[string]any{"id": "c", "type": "function", "function": map[string]any{"name": randomText(r), "arguments": randomText(r)}})
		}
		turn["tool_calls"] = calls
	}
	return turn
}

func randomRequest(r *rand.Rand) (API, map[string]any, string) {
	api := []API{Chat, Messages, Responses}[r.IntN(3)]
	turns := []any{map[string]any{"role": "user", "content": "it starts"}}
	for range r.IntN(6) {
		turns = append(turns, randomTurn(r, api))
	}
	request := map[string]any{"model": randomText(r), "temperature": r.Float64(), "stream": r.IntN(2) == 0, "stop": []any{"x", nil}, "metadata": map[string]any{"model": "no"}}
	for key := range request {
		if r.IntN(2) == 0 {
			delete(request, key)
		}
	}
	system := map[API]string{Chat: "system", Messages: "system", Responses: "instructions"}[api]
	if r.IntN(2) == 0 {
		request[system] = []any{"be short", []any{map[string]any{"type": "text", "text": "be"}, map[string]any{"type": "text", "text": "short"}}}[r.IntN(2)]
	}
	source := "messages"
	if api == Responses {
		source = "input"
	}
	request[source] = turns
	return api, request, source
}

func TestAgreesWithTheNaiveRendering(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var p Parser
	for range 6_000 {
		api, request, _ := randomRequest(r)
		body := spelled(r, request)
		var decoded map[string]any
		if err := json.Unmarshal(body, &decoded); err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		b := p.Parse(api, body)
		if want := new(naive).request(api, decoded); !bytes.Equal(b.Text, want) {
			t.Fatalf("%s\n got %q\nwant %q", body, b.Text, want)
		}
		model, hasModel := decoded["model"].(string)
		if b.Model != model || b.HasModel != hasModel || b.Stream != (decoded["stream"] == true) {
			t.Fatalf("%s: model %q, stream %v", body, b.Model, b.Stream)
		}
	}
}

func TestContinuationsAndOthers(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	rendering := func(api API, request map[string]any) []byte {
		var p Parser
		b := p.Parse(api, spelled(r, request))
		if b.Why != HasPrompt {
			t.Fatalf("%q", b.Why)
		}
		return b.Text
	}
	for range 2000 {
		api, request, source := randomRequest(r)
		turns := request[source].([]any)
		if r.IntN(2) == 0 {
			request["tools"] = []any{map[string]any{"name": randomText(r)}}
		}
		was := rendering(api, request)
		if again := rendering(api, request); !bytes.Equal(was, again) {
			t.Fatalf("%v\n%q\n%q", request, was, again)
		}

		continued := maps.Clone(request)
		continued[source] = append(slices.Clone(turns), randomTurn(r, api))
		if longer := rendering(api, continued); len(longer) <= len(was) || !bytes.HasPrefix(longer, was) {
			t.Fatalf("%v\n%q is no prefix of\n%q", continued, was, longer)
		}

		changed := maps.Clone(request)
		i := r.IntN(len(turns))
		turn, _ := turns[i].(map[string]any)
		if _, isMessage := turn["role"]; !isMessage {
			continue
		}
		turn = maps.Clone(turn)
		if text, isText := turn["content"].(string); isText && r.IntN(2) == 0 {
			turn["content"] = text + []string{"!", " ", "\x06", "\n"}[r.IntN(4)]
		} else {
			turn["role"] = turn["role"].(string) + "s"
		}
		changed[source] = slices.Clone(turns)
		changed[source].([]any)[i] = turn
		if other := rendering(api, changed); bytes.HasPrefix(other, was) || bytes.HasPrefix(was, other) {
			t.Fatalf("%v\nand\n%v\nare alike: %q", request, changed, other)
		}
	}
}

func TestTextConversationsAreAlikeInChatAndMessages(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	var p, q Parser
	for range 2000 {
		system := "s" + randomText(r)
		turns := []any{}
		for range 1 + r.IntN(4) {
			turns = append(turns, map[string]any{"role": "user", "content": randomText(r)})
		}
		a := p.Parse(Messages, spelled(r, map[string]any{"system": system, "messages": turns}))
		b := q.Parse(Chat, spelled(r, map[string]any{"messages": append([]any{map[string]any{"role": "system", "content": system}}, turns...)}))
		if !bytes.Equal(a.Text, b.Text) || a.Lead != b.Lead || a.Tail != b.Tail {
			t.Fatalf("%q\n%q", a.Text, b.Text)
		}
	}
}
