package prompt

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// words makes about n bytes of prose with special mixed in about every interval bytes.
func words(r *rand.Rand, n, interval int, special ...string) string {
	var b strings.Builder
	next := interval
	for b.Len() < n {
		b.WriteString(vocabulary[r.IntN(len(vocabulary))])
		b.WriteByte(' ')
		if len(special) > 0 && b.Len() > next {
			b.WriteString(special[r.IntN(len(special))])
			next = b.Len() + interval/2 + r.IntN(interval)
		}
	}
	return b.String()
}

var vocabulary = strings.Fields("the cache holds a prefix of every prompt that this replica has prefilled so requests which share it need not compute keys and values again until they are evicted by another")

func benchBody(kind string, size int) (API, []byte) {
	r := rand.New(rand.NewPCG(1, uint64(size)))
	turn := func(i int, text string) string {
		role := "user"
		if i%2 == 1 {
			role = "assistant"
		}
		quoted, _ := json.Marshal(text)
		return fmt.Sprintf(`{"role": "%s", "content": %s}`, role, quoted)
	}
	chat := func(tail string, texts ...string) []byte {
		var turns []string
		for i, text := range texts {
			turns = append(turns, turn(i, text))
		}
		return []byte(`{"model": "llama-3.1-8b", "messages": [` + strings.Join(turns, ", ") + `], "temperature": 0.7, "stream": true` + tail + `}`)
	}
	n := min(max(size/1000, 2), 8)
	var texts []string
	switch kind {
	case "prose": // several turns, something escaped about every 60 bytes, some of it not ASCII
		for range n {
			texts = append(texts, words(r, size/n, 60, "\n", "\"", "\n", "é", "\"so\"", "–", "\t"))
		}
	case "plain":
		for range n {
			texts = append(texts, words(r, size/n, 0))
		}
	case "accents": // French as a client that escapes all but ASCII sends it
		return Chat, []byte(`{"model": "m", "messages": [` + strings.ReplaceAll(turn(0, words(r, size/2, 8, "é", "à", "déjà")), "é", `\u00e9`) + `]}`)
	case "escaped": // Chinese from a client that escapes all but ASCII
		text := strings.Repeat(`\u4f60\u597d\u4e16`, size/18)
		return Chat, []byte(`{"model": "m", "messages": [{"role": "user", "content": "` + text + `"}]}`)
	case "parts": // content as parts, keys in alphabetical order
		var turns []string
		for range n {
			quoted, _ := json.Marshal(words(r, size/n, 60, "\n", "\""))
			turns = append(turns, `{"content":[{"text":`+string(quoted)+`,"type":"text"}],"role":"user"}`)
		}
		return Chat, []byte(`{"messages":[` + strings.Join(turns, ",") + `],"model":"m"}`)
	case "system": // Anthropic's clients send system last
		for range n {
			texts = append(texts, words(r, size/n/2, 60, "\n", "\""))
		}
		quoted, _ := json.Marshal(words(r, size/2, 60, "\n", "\""))
		return Messages, chat(`, "system": `+string(quoted), texts...)
	case "tools": // half of the body is function schemas
		for range n {
			texts = append(texts, words(r, size/n/2, 60, "\n", "\""))
		}
		tool := `{"type": "function", "function": {"name": "get_weather", "description": "` + words(r, 80, 0) + `", "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "name of the city"}, "days": {"type": "integer", "minimum": 1}}, "required": ["city"]}}}`
		tools := strings.Repeat(", "+tool, max(1, size/2/len(tool)))
		return Chat, chat(`, "tools": [`+tools[2:]+`]`, texts...)
	case "tokens":
		var ids []string
		for size > 0 {
			id := fmt.Sprint(r.IntN(128000))
			ids = append(ids, id)
			size -= len(id) + 2
		}
		return Completions, []byte(`{"model": "m", "prompt": [` + strings.Join(ids, ", ") + `], "max_tokens": 6}`)
	case "image":
		image := strings.Repeat("iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4", size/60)
		return Chat, []byte(`{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,` + image + `"}}, {"type": "text", "text": "What is it?"}]}]}`)
	}
	return Chat, chat("", texts...)
}

func BenchmarkParse(b *testing.B) {
	for _, kind := range []string{"prose", "plain", "accents", "escaped", "parts", "system", "tools", "tokens", "image"} {
		for _, size := range []int{512, 8 << 10, 64 << 10} {
			b.Run(fmt.Sprintf("%s/%d", kind, size), func(b *testing.B) {
				api, body := benchBody(kind, size)
				var p Parser
				if got := p.Parse(api, body); got.Why != HasPrompt {
					b.Fatal(got.Why)
				}
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					p.Parse(api, body)
				}
			})
		}
	}
}

func BenchmarkParseTokenIDs(b *testing.B) {
	header := strings.Repeat("17, 128000, 402, ", 1000) + "1"
	var ids []uint32
	b.SetBytes(int64(len(header)))
	b.ReportAllocs()
	for b.Loop() {
		ids, _ = ParseTokenIDs(ids[:0], header)
	}
}
