package prompt

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// parse parses with a parser that has parsed something else, so that nothing depends on a fresh one.
func parse(t testing.TB, api API, body string) *Body {
	t.Helper()
	var p Parser
	p.Parse(Completions, []byte(`{"prompt":[1,2,3],"model":"earlier","cache_salt":"earlier","stream":true}`))
	p.Parse(Messages, []byte(`{"system":"earlier","tools":[{"a":"earlier"}],"messages":[{"role":"earlier","content":"earlier"}]}`))
	return p.Parse(api, []byte(body))
}

// text gives the rendering of a body that has one.
func text(t testing.TB, api API, body string) string {
	t.Helper()
	b := parse(t, api, body)
	if b.Why != HasPrompt || b.Text == nil {
		t.Fatalf("no prompt, %q: %s", b.Why, body)
	}
	if b.Lead < 0 || b.Tail < 0 || b.Lead+b.Tail >= len(b.Text) {
		t.Fatalf("lead %d, tail %d of %d: %s", b.Lead, b.Tail, len(b.Text), body)
	}
	return string(b.Text)
}

// counted gives the part of the rendering that counts.
func counted(b *Body) string { return string(b.Text[b.Lead : len(b.Text)-b.Tail]) }

// render makes a rendering from a notation in which a mark is its name in angle brackets. It adds the guards.
func render(notation string) string {
	for name, tag := range map[string]byte{
		"chat": tagConversation, "responses": tagResponses, "tokens": tagTokens, "name": tagName, "end": tagTurn,
		"part": tagPart, "thinking": tagThinking, "call": tagCall, "args": tagArguments, "result": tagResult,
		"endresult": tagResultEnd, "digest": tagDigest,
	} {
		notation = strings.ReplaceAll(notation, "<"+name+">", string([]byte{mark, tag}))
	}
	before, rest, _ := strings.Cut(notation, "<role>")
	for rest != "" {
		before += string([]byte{mark, tagRole, rest[1]})
		var turn string
		turn, rest, _ = strings.Cut(rest, "<role>")
		before += turn
	}
	return before
}

func chat(turns string) string { return `{"model":"m","messages":[` + turns + `]}` }

func TestRendering(t *testing.T) {
	for _, c := range []struct {
		name string
		api  API
		body string
		want string
	}{
		{"one question", Chat, chat(`{"role":"user","content":"hi"}`), "<chat>user<role>hi<end>"},
		{"several turns", Chat, chat(`{"role":"system","content":"s"},{"role":"user","content":"a"},{"role":"assistant","content":"b"}`),
			"<chat>system<role>s<end>user<role>a<end>assistant<role>b<end>"},
		{"roles are verbatim", Chat, chat(`{"role":"Developer \u00e9","content":"x"}`), "<chat>Developer é<role>x<end>"},
		{"null content is an empty turn", Chat, chat(`{"role":"user","content":"a"},{"role":"assistant","content":null}`), "<chat>user<role>a<end>assistant<role><end>"},
		{"absent content is an empty turn", Chat, chat(`{"role":"user","content":"a"},{"role":"assistant"}`), "<chat>user<role>a<end>assistant<role><end>"},
		{"content ahead of the role", Chat, chat(`{"content":"hi","x":[1],"role":"user"}`), "<chat>user<role>hi<end>"},
		{"of duplicate members the last", Chat, chat(`{"role":"system","content":"hi","role":"user","content":"ho"}`), "<chat>user<role>ho<end>"},
		{"of duplicate messages the last", Chat, `{"messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]}`, "<chat>user<role>b<end>"},
		{"a good field after a bad one", Chat, `{"messages":5,"messages":[{"role":"user","content":"b"}]}`, "<chat>user<role>b<end>"},
		{"escaped keys", Chat, `{"m\u0065ssages":[{"r\u006fle":"user","\u0063ontent":"b"}]}`, "<chat>user<role>b<end>"},
		{"keys in another case are others", Chat, `{"messages":[{"role":"user","content":"b","Content":"x"}],"Messages":[]}`, "<chat>user<role>b<end>"},
		{"participant", Chat, chat(`{"role":"user","name":"bob","content":"hi"}`), "<chat>user<name>bob<role>hi<end>"},
		{"participant after content", Chat, chat(`{"role":"user","content":"hi","name":"bob"}`), "<chat>user<name>bob<role>hi<end>"},

		{"one text part is the string", Chat, chat(`{"role":"user","content":[{"type":"text","text":"hi"}]}`), "<chat>user<role>hi<end>"},
		{"type after text", Chat, chat(`{"role":"user","content":[{"text":"hi","type":"text"}]}`), "<chat>user<role>hi<end>"},
		{"parts are kept apart", Chat, chat(`{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"},"c"]}`), "<chat>user<role>a<part>b<part>c<end>"},
		{"empty first part", Chat, chat(`{"role":"user","content":["",{"text":"b","type":"text"}]}`), "<chat>user<role><part>b<end>"},
		{"no parts", Chat, chat(`{"role":"user","content":"a"},{"role":"user","content":[]}`), "<chat>user<role>a<end>user<role><end>"},
		{"refusal part", Chat, chat(`{"role":"assistant","content":[{"type":"refusal","refusal":"no"}]}`), "<chat>assistant<role>no<end>"},
		{"cache_control is left out", Messages, chat(`{"role":"user","content":[{"type":"text","text":"hi","cache_control":{"type":"ephemeral"}}]}`), "<chat>user<role>hi<end>"},
		{"short unknown part", Chat, chat(`{"role":"user","content":["a",5]}`), "<chat>user<role>a<digest>5\xff<end>"},

		{"tool calls", Chat, chat(`{"role":"user","content":"w"},{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\": 1}"}},{"function":{"arguments":"{}","name":"g"},"id":"c2"}]},{"role":"tool","tool_call_id":"c1","content":"rain"}`),
			`<chat>user<role>w<end>assistant<role><call>f<args>{"a": 1}<call>g<args>{}<end>tool<role>rain<end>`},
		{"tool calls ahead of absent content", Chat, chat(`{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":""}}]}`), "<chat>assistant<role><call>f<args><end>"},
		{"text and call", Chat, chat(`{"tool_calls":[{"type":"custom","custom":{"name":"f","input":"x"}}],"content":"t","role":"assistant"}`), "<chat>assistant<role>t<call>f<args>x<end>"},
		{"function_call", Chat, chat(`{"role":"assistant","content":"t","function_call":{"name":"f","arguments":"x"}}`), "<chat>assistant<role>t<call>f<args>x<end>"},
		{"null tool calls", Chat, chat(`{"role":"assistant","content":"t","tool_calls":null,"refusal":null,"function_call":null,"audio":null}`), "<chat>assistant<role>t<end>"},
		{"reasoning", Chat, chat(`{"role":"assistant","reasoning_content":"hm","content":"t","tool_calls":[]}`), "<chat>assistant<role>t<thinking>hm<end>"},
		{"null reasoning", Chat, chat(`{"role":"assistant","content":"t","reasoning":null}`), "<chat>assistant<role>t<end>"},

		{"system", Messages, `{"system":"s","messages":[{"role":"user","content":"a"}]}`, "<chat>system<role>s<end>user<role>a<end>"},
		{"system last", Messages, `{"messages":[{"role":"user","content":"a"}],"system":"s"}`, "<chat>system<role>s<end>user<role>a<end>"},
		{"system blocks", Messages, `{"messages":[{"role":"user","content":"a"}],"system":[{"type":"text","text":"s"},{"type":"text","text":"t"}]}`, "<chat>system<role>s<part>t<end>user<role>a<end>"},
		{"empty system", Messages, `{"system":"","messages":[{"role":"user","content":"a"}]}`, "<chat>user<role>a<end>"},
		{"no system blocks", Messages, `{"system":[],"messages":[{"role":"user","content":"a"}]}`, "<chat>user<role>a<end>"},
		{"null system", Messages, `{"messages":[{"role":"user","content":"a"}],"system":null}`, "<chat>user<role>a<end>"},
		{"system withdrawn", Messages, `{"system":"s","messages":[{"role":"user","content":"a"}],"system":null}`, "<chat>user<role>a<end>"},
		{"chat has no system field", Chat, `{"system":"s","messages":[{"role":"user","content":"a"}]}`, "<chat>user<role>a<end>"},
		{"tool use", Messages, chat(`{"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"x"},{"type":"text","text":"t"},{"type":"tool_use","id":"c","name":"f","input":{"a" : "b"}}]}`),
			"<chat>assistant<role><thinking>hm<part>t<call>f<args>{\"a\xff\"b\xff}<end>"},
		{"tool results", Messages, chat(`{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"rain"},{"tool_use_id":"d","content":[{"type":"text","text":"x"},{"type":"text","text":"y"}],"type":"tool_result"},{"type":"text","text":"t"}]}`),
			"<chat>user<role><result>rain<endresult><result>x<part>y<endresult><part>t<end>"},

		{"input string", Responses, `{"input":"hi"}`, "<responses>user<role>hi<end>"},
		{"instructions", Responses, `{"input":"hi","instructions":"be short"}`, "<responses>system<role>be short<end>user<role>hi<end>"},
		{"items", Responses, `{"input":[{"role":"user","content":"a"},{"type":"message","role":"assistant","content":[{"type":"output_text","text":"b"}]},{"content":[{"type":"input_text","text":"c"}],"role":"user","type":"message"}]}`,
			"<responses>user<role>a<end>assistant<role>b<end>user<role>c<end>"},
		{"tool items", Responses, `{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"rain"}]}`,
			"<responses>assistant<role><call>f<args>{}<end>tool<role>rain<end>"},
		{"reasoning item", Responses, `{"input":[{"type":"reasoning","id":"r","summary":[{"type":"summary_text","text":"s"}],"content":[{"type":"reasoning_text","text":"c"}],"encrypted_content":"x"}]}`,
			"<responses>assistant<role>c<thinking>s<end>"},
		{"unknown item", Responses, `{"input":[{"id":7,"type":"x"}]}`, "<responses><role><digest>id\xff7\xfftype\xff\"x\xff<end>"},

		{"completion", Completions, `{"prompt":"hello you"}`, "hello you"},
		{"several prompts", Completions, `{"prompt":["a","b",["x"],7]}`, "a"},
		{"token ids", Completions, `{"prompt":[1, 258]}`, "<tokens>\x00\x00\x00\x01\x00\x00\x01\x02"},
		{"several token id prompts", Completions, `{"prompt":[[1,258 ],[3]]}`, "<tokens>\x00\x00\x00\x01\x00\x00\x01\x02"},
		{"text after token ids", Completions, `{"prompt":[1],"prompt":"a"}`, "a"},
		{"tools are nothing to completions", Completions, `{"prompt":"a","tools":[1]}`, "a"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got, want := text(t, c.api, c.body), render(c.want); got != want {
				t.Errorf("%s\n got %q\nwant %q", c.body, got, want)
			}
		})
	}
}

func TestDecoding(t *testing.T) {
	for json, want := range map[string]string{
		`a\"b\\c\/d\b\f\n\r\t`:   "a\"b\\c/d\b\f\n\r\t",
		`caf\u00e9 \u4F60\u597d`: "café 你好",
		`\ud83d\ude00`:           "😀",
		`\ud83d`:                 "\xed\xa0\xbd",
		`\ude00\ud83d`:           "\xed\xb8\x80\xed\xa0\xbd",
		`\ud83d\ud83d\ude00`:     "\xed\xa0\xbd😀",
		`\ud83dx`:                "\xed\xa0\xbdx",
		`\ud83d\n`:               "\xed\xa0\xbd\n",
		`\u0000x`:                "\x00x",
		"raw\ncontrol\x01":       "raw\ncontrol\x01",
		"\xc0\xafoverlong \xfe":  "\xc0\xafoverlong \xfe",
		"\xff":                   "\uFFFD",
		"a\xffb\xff\xff":         "a\uFFFDb\uFFFD\uFFFD",
		"é \\u00ff \xff long enough to be read in words": "é ÿ \uFFFD long enough to be read in words",
	} {
		if got := text(t, Completions, `{"prompt":"`+json+`"}`); got != want {
			t.Errorf("%q: got %q, want %q", json, got, want)
		}
		// The same string where the bytes of the body end soon after it.
		var p Parser
		p.Parse(NoAPI, []byte(`{"model":"`+json+`"}`))
		if p.out.Model != want {
			t.Errorf("%q as model: got %q, want %q", json, p.out.Model, want)
		}
	}
}

// TestSame lists bodies that give one prompt.
func TestSame(t *testing.T) {
	image := `{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAAAAAAAAAAAAAAAAAAAAA","detail":"low"}}`
	for _, c := range []struct {
		name   string
		api    API
		bodies []string
	}{
		{"sampling, white space, key order", Chat, []string{
			`{"model":"m","messages":[{"role":"user","content":"é"}]}`,
			" {\n\t\"temperature\" : 0.5e-3 ,\r\n\"messages\" : [ { \"content\" : \"\\u00e9\" , \"role\" : \"user\" } ] , \"stream\":true, \"model\":\"n\", \"x\":[[],{},{\"y\":[null,true,false,-1]}] } ",
		}},
		{"a byte order mark", Chat, []string{chat(`{"role":"user","content":"a"}`), "\uFEFF" + chat(`{"role":"user","content":"a"}`)}},
		{"tools after messages, other white space and escapes", Chat, []string{
			`{"tools":[{"type":"function","function":{"name":"f"}}],"messages":[{"role":"user","content":"a"}],"cache_salt":"s"}`,
			`{"cache_salt":"\u0073","messages":[{"role":"user","content":"a"}],"tools":[ {"type" : "function", "function": {"name": "\u0066"} } ]}`,
		}},
		{"nothing in the fields of the head", Chat, []string{
			chat(`{"role":"user","content":"a"}`),
			`{"messages":[{"role":"user","content":"a"}],"tools":[],"cache_salt":"","chat_template":null,"chat_template_kwargs":{ }}`,
			`{"tools":[1],"messages":[{"role":"user","content":"a"}],"tools":null}`,
		}},
		{"image, other white space, other cache_control", Chat, []string{
			chat(`{"role":"user","content":[` + image + `]}`),
			chat(`{"role":"user","content":[{"type":"image_url", "cache_control":{"type":"ephemeral"}, "image_url": {"url": "data:image\/png;base64,AAAAAAAAAAAAAAAAAAAAAAA", "detail": "low"}}]}`),
		}},
	} {
		first := text(t, c.api, c.bodies[0])
		for _, body := range c.bodies[1:] {
			if got := text(t, c.api, body); got != first {
				t.Errorf("%s:\n%s gives %q\n%s gives %q", c.name, c.bodies[0], first, body, got)
			}
		}
	}
}

// TestDifferent lists bodies of which no two share a prompt, nor is one's a prefix of another's.
func TestDifferent(t *testing.T) {
	image := func(data string) string {
		return chat(`{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` + data + `"}}]}`)
	}
	call := func(name, arguments string) string {
		return chat(`{"role":"assistant","content":"","tool_calls":[{"function":{"name":"` + name + `","arguments":"` + arguments + `"}}]}`)
	}
	result := func(content string) string { return chat(`{"role":"user","content":[` + content + `]}`) }
	bodies := []string{
		chat(`{"role":"user","content":"hi"}`),
		chat(`{"role":"user","content":"hiking"}`),
		chat(`{"role":"system","content":"hi"}`),
		chat(`{"role":"userhi","content":""},{"role":"user","content":"x"}`),
		chat(`{"role":"user","content":["h","i"]}`),
		chat(`{"role":"user","content":["h"]},{"role":"user","content":["i"]}`),
		chat(`{"role":"user","name":"hi","content":"x"}`),
		chat(`{"role":"user","content":"` + "hi\xff\x06" + `"}`),
		chat(`{"role":"assistant","content":"x","reasoning":"hi"}`),
		chat(`{"role":"assistant","content":["x","hi"]}`),
		image("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"), image("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAB"), image("a"), image("b"),
		call("f", "x"), call("f", "y"), call("g", "x"), call("fx", ""),
		result(`{"type":"tool_result","content":["a"]},"b"`), result(`{"type":"tool_result","content":["a","b"]}`),
		result(`{"type":"tool_result","content":[{"type":"tool_result","content":["a","b"]}]}`),
		result(`{"type":"tool_result","content":"a"}`), result(`"a"`),
		`{"messages":[{"role":"user","content":"a"}],"tools":["a"]}`,
		`{"messages":[{"role":"user","content":"a"}],"tools":["b"]}`,
		`{"messages":[{"role":"user","content":"a"}],"functions":["b"]}`,
		`{"messages":[{"role":"user","content":"a"}],"tools":["a"],"cache_salt":"a"}`,
		`{"messages":[{"role":"user","content":"a"}],"cache_salt":"a"}`,
		`{"messages":[{"role":"user","content":"a"}],"cache_salt":"b"}`,
		`{"messages":[{"role":"user","content":"a"}],"tools":[1,2]}`,
		`{"messages":[{"role":"user","content":"a"}],"tools":[12]}`,
		`{"messages":[{"role":"user","content":"a"}],"tools":["1","2"]}`,
		`{"messages":[{"role":"user","content":"a"}],"tools":[["1"],"2"]}`,
	}
	for i, a := range bodies {
		for j, b := range bodies {
			if i != j && strings.HasPrefix(text(t, Messages, a), text(t, Messages, b)) {
				t.Errorf("%s\ngives a prefix of\n%s", b, a)
			}
		}
	}
	one := text(t, Chat, bodies[0])
	for api, body := range map[API]string{Responses: `{"input":"hi"}`, Completions: `{"prompt":"hi"}`} {
		if got := text(t, api, body); strings.HasPrefix(one, got) || strings.HasPrefix(got, one) {
			t.Errorf("%s gives %q", body, got)
		}
	}
	if got := text(t, Completions, `{"prompt":"user"}`); strings.HasPrefix(one, got) {
		t.Errorf("a completion is a prefix of every chat")
	}
}

func TestCountedLength(t *testing.T) {
	for _, c := range []struct {
		api  API
		body string
		want int
	}{
		{Completions, `{"prompt":"0123456789"}`, 10},
		{Completions, `{"prompt":"0123456789","cache_salt":"s"}`, 10},
		{Completions, `{"prompt":[1,2,3]}`, 12},
		{Chat, chat(`{"role":"user","content":"0123456789"}`), 10},
		{Chat, chat(`{"role":"user","name":"bob","content":"0123456789"}`), 10},
		{Chat, `{"tools":[1],"messages":[{"role":"user","content":"0123456789"}],"cache_salt":"s"}`, 10},
		{Messages, `{"messages":[],"system":"0123456789"}`, 10},
		{Responses, `{"input":"0123456789"}`, 10},
		{Responses, `{"input":[{"content":"0123456789","role":"user"}]}`, 10},
		{Chat, chat(`{"role":"user","content":"0123456789"},{"role":"","content":null}`), 10 + markLen + roleMarkLen},
	} {
		if b := parse(t, c.api, c.body); len(counted(b)) != c.want {
			t.Errorf("%s: %d bytes count, want %d", c.body, len(counted(b)), c.want)
		}
	}
}

// shared gives the fraction of b's counted bytes that are leading bytes of a's rendering, as a trie tells it.
func shared(a, b *Body) float64 {
	n := 0
	for n < len(a.Text) && n < len(b.Text) && a.Text[n] == b.Text[n] {
		n++
	}
	n = min(n, len(b.Text)-b.Tail) - b.Lead
	return float64(max(n, 0)) / float64(len(counted(b)))
}

func TestStrangers(t *testing.T) {
	for _, c := range []struct {
		warm, asked string
		alike       bool
	}{
		{"hello", "hi", false},
		{"hello", "2+2", false},
		{"hello", "h", false},
		{"h", "hi", false},
		{"hello", "hello", true},
		{"hello", "hello there", false},
		{"01234abcde", "01234fghij", true},
		{"0123abcdef", "0123ghijkl", false},
	} {
		body := func(s string) *Body { return parse(t, Chat, chat(`{"role":"user","content":"`+s+`"}`)) }
		if got := shared(body(c.warm), body(c.asked)); (got >= 0.5) != c.alike {
			t.Errorf("%q warm, %q asked: %v shared", c.warm, c.asked, got)
		}
	}
	system := strings.Repeat("You are a careful assistant. ", 10)
	warm := parse(t, Chat, chat(`{"role":"system","content":"`+system+`"},{"role":"user","content":"a question"}`))
	asked := parse(t, Messages, `{"messages":[{"role":"user","content":"another one"}],"system":"`+system+`"}`)
	if got := shared(warm, asked); got < 0.5 {
		t.Errorf("one system prompt: %v shared", got)
	}
}

// TestRecordedRequests parses what clients sent to a vLLM.
func TestRecordedRequests(t *testing.T) {
	recorded := func(name string) (API, *Body) {
		raw, err := os.ReadFile("testdata/" + name + ".req")
		if err != nil {
			t.Fatal(err)
		}
		head, body, _ := bytes.Cut(raw, []byte("\r\n\r\n"))
		if body == nil {
			head, body, _ = bytes.Cut(raw, []byte("\n\n"))
		}
		api := APIOf(strings.Fields(string(head))[1])
		return api, parse(t, api, string(body))
	}
	for name, want := range map[string]struct {
		api API
		why Why
	}{
		"chat": {Chat, HasPrompt}, "chat-tools": {Chat, HasPrompt}, "chat-parts": {Chat, HasPrompt}, "chat-salt": {Chat, HasPrompt},
		"messages": {Messages, HasPrompt}, "responses": {Responses, HasPrompt}, "completions": {Completions, HasPrompt},
		"completions-ids": {Completions, HasPrompt}, "completions-two": {Completions, HasPrompt},
		"chat-err-json": {Chat, Unparsable}, "tokenize": {Other, NoPromptAPI},
	} {
		api, b := recorded(name)
		if api != want.api || b.Why != want.why || b.Model != "tiny" || (b.Text != nil) != (want.why == HasPrompt) {
			t.Errorf("%s: API %d, %q, model %q, %d bytes of text", name, api, b.Why, b.Model, len(b.Text))
		}
	}
	_, chat := recorded("chat")
	_, messages := recorded("messages")
	if !bytes.Equal(chat.Text, messages.Text) {
		t.Errorf("chat %q\nmessages %q", chat.Text, messages.Text)
	}
	_, salted := recorded("chat-salt")
	if shared(chat, salted) != 0 || counted(chat) != counted(salted) {
		t.Errorf("salted %q", salted.Text)
	}
	if _, ids := recorded("completions-ids"); len(ids.TokenIDs) != 100 || ids.TokenIDs[0] != 7 || ids.TokenIDs[99] != 106 {
		t.Errorf("token ids %d", ids.TokenIDs)
	}
}
