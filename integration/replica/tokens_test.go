package replica

import (
	"slices"
	"strings"
	"testing"
)

func FuzzTokens(f *testing.F) {
	for _, text := range []string{"", "a", "four", "fives", "é", "abcé", "日本語のテキスト", "a\x00b\x00", "\xff\xfe\xfd\xfc\xfb"} {
		f.Add(text, "more")
	}
	f.Fuzz(func(t *testing.T, text, more string) {
		tokens := appendTokens(nil, text)
		var back strings.Builder
		for _, id := range tokens {
			if id >= specialToken {
				t.Errorf("%q has special token %d", text, id)
			}
			back.WriteString(tokenText(id))
		}
		if back.String() != text {
			t.Errorf("%q comes back as %q", text, back.String())
		}
		if longer := appendTokens(nil, text+more); len(tokens) > 0 && !slices.Equal(longer[:len(tokens)-1], tokens[:len(tokens)-1]) {
			t.Errorf("%q + %q changes more than the last token", text, more)
		}
	})
}

func FuzzTokenText(f *testing.F) {
	f.Add(uint32(0))
	f.Add(uint32(tokenEnd))
	f.Fuzz(func(_ *testing.T, id uint32) { tokenText(id) })
}

func TestAnswersAreReproducible(t *testing.T) {
	long := answerTokens(7, 100)
	if len(long) != 100 || !slices.Equal(long[:30], answerTokens(7, 30)) {
		t.Error("a shorter answer is not the beginning of a longer one")
	}
	if slices.Equal(long, answerTokens(8, 100)) {
		t.Error("seed does not change the answer")
	}
	if !slices.Equal(appendTokens(nil, tokensText(long)), long) {
		t.Error("the answer's text has other tokens than the answer")
	}
}

// TestWhatChangesThePrompt: fields that change what is prefilled change the tokens, others do not.
func TestWhatChangesThePrompt(t *testing.T) {
	const base = `"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hello there"}]`
	tokens := func(body string) []uint32 {
		t.Helper()
		p, e := chatAPI{}.parse([]byte("{" + body + "}"))
		if e != nil {
			t.Fatalf("%s: %+v", body, e)
		}
		return p.prompts[0]
	}
	plain := tokens(base)
	for _, same := range []string{
		`"temperature":0.5,"stream":true,"max_tokens":7,"user":"u",` + base,
		`"messages":[{"role":"system","content":[{"type":"text","text":"be brief"}]},{"role":"user","content":[{"type":"text","text":"hello "},{"type":"text","text":"there"}]}]`,
		`"tools":[],` + base,
		`"tools":null,"documents":null,` + base,
	} {
		if !slices.Equal(tokens(same), plain) {
			t.Errorf("changes the tokens: %s", same)
		}
	}
	const tool = `{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}}`
	seen := [][]uint32{plain}
	for _, other := range []string{
		strings.Replace(base, "hello", "hallo", 1),
		strings.Replace(base, `"user"`, `"assistant"`, 1),
		`"tools":[` + tool + `],` + base,
		`"tools":[` + strings.Replace(tool, `"f"`, `"g"`, 1) + `],` + base,
		`"tools":[` + tool + `,` + tool + `],` + base,
		`"chat_template_kwargs":{"enable_thinking":false},` + base,
		`"documents":[{"text":"x"}],` + base,
		`"add_generation_prompt":false,` + base,
		strings.Replace(base, `]`, `,{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]}]`, 1),
		strings.Replace(base, `]`, `,{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]}]`, 1),
		strings.Replace(base, `"hello there"`, `[{"type":"text","text":"hello there"},{"type":"image_url","image_url":{"url":"data:1"}}]`, 1),
		strings.Replace(base, `"hello there"`, `[{"type":"text","text":"hello there"},{"type":"image_url","image_url":{"url":"data:2"}}]`, 1),
	} {
		got := tokens(other)
		if slices.ContainsFunc(seen, func(s []uint32) bool { return slices.Equal(s, got) }) {
			t.Errorf("has the tokens of another: %s", other)
		}
		seen = append(seen, got)
	}
}

// TestAPIsShareTheirPrompts: messages have the tokens of the same chat, responses have one begin token more.
func TestAPIsShareTheirPrompts(t *testing.T) {
	parse := func(a api, body string) []uint32 {
		t.Helper()
		p, e := a.parse([]byte(body))
		if e != nil {
			t.Fatalf("%s: %+v", body, e)
		}
		return p.prompts[0]
	}
	for _, c := range []struct{ name, chat, messages, responses string }{
		{
			"text",
			`{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hello"},{"role":"assistant","content":"yes"}]}`,
			`{"max_tokens":1,"system":[{"type":"text","text":"be brief","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":"hello"},{"role":"assistant","content":[{"type":"text","text":"yes"}]}]}`,
			`{"instructions":"be brief","input":[{"role":"user","content":[{"type":"input_text","text":"hello"}]},{"type":"message","role":"assistant","content":"yes"}]}`,
		},
		{
			"tools",
			`{"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type": "object"}}}],"messages":[{"role":"user","content":"do"},{"role":"assistant","content":"","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"1","content":"done"}]}`,
			`{"max_tokens":1,"tools":[{"name":"f","description":"d","input_schema":{"type":"object"}}],"messages":[{"role":"user","content":"do"},{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{"a":1}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"done"}]}]}`,
			`{"tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object"}}],"input":[{"role":"user","content":"do"},{"type":"function_call","call_id":"1","name":"f","arguments":"{\"a\":1}"},{"type":"function_call_output","call_id":"1","output":"done"}]}`,
		},
	} {
		chat := parse(chatAPI{}, c.chat)
		if got := parse(messagesAPI{}, c.messages); !slices.Equal(got, chat) {
			t.Errorf("%s: messages %q, chat %q", c.name, tokensText(got), tokensText(chat))
		}
		if got := parse(responsesAPI{}, c.responses); !slices.Equal(got[1:], chat) || got[0] != tokenBOS {
			t.Errorf("%s: responses %q, chat %q", c.name, tokensText(got), tokensText(chat))
		}
	}
}

// FuzzParse: no body makes a parser panic or ask for more than it holds.
func FuzzParse(f *testing.F) {
	f.Add(`{"messages":[{"role":"user","content":[{"type":"tool_result","content":[1]}]}],"max_tokens":1}`)
	f.Add(`{"input":[{"type":"x"},null,1],"prompt":[[1,2],[3]],"tools":[{}]}`)
	f.Add(`{"input":"x","prompt":"x","messages":[],"max_tokens":1,"priority":"-1"}`)
	f.Add(`{"messages":[null],"system":[{}],"prompt":["a",1]}`)
	f.Fuzz(func(t *testing.T, body string) {
		for _, a := range []api{chatAPI{}, completionsAPI{}, messagesAPI{}, responsesAPI{}} {
			if p, e := a.parse([]byte(body)); (p == nil) == (e == nil) {
				t.Errorf("%T: %v, %v", a, p, e)
			} else if p != nil {
				p.readPriority()
				p.check(1000)
			}
		}
	})
}
