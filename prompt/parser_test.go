package prompt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestWhy(t *testing.T) {
	const turn = `{"role":"user","content":"a"}`
	for _, c := range []struct {
		api  API
		body string
		want Why
	}{
		{Chat, chat(turn), HasPrompt},
		{Other, chat(turn), NoPromptAPI},
		{NoAPI, `not json`, NoPromptAPI},

		{Chat, ``, Unparsable},
		{Chat, ` `, Unparsable},
		{Chat, "\uFEFF", Unparsable},
		{Chat, "\x00", Unparsable},
		{Chat, `{`, Unparsable},
		{Chat, chat(turn) + `x`, Unparsable},
		{Chat, chat(turn) + "\x00", Unparsable},
		{Chat, chat(turn) + `{}`, Unparsable},
		{Chat, `{"messages":[` + turn + `}`, Unparsable},
		{Chat, `{"messages":[` + turn + `]]`, Unparsable},
		{Chat, `{"x":[{]},"messages":[` + turn + `]}`, Unparsable},
		{Chat, `{"messages":[` + turn + `],}`, Unparsable},
		{Chat, `{"messages":[` + turn + `,]}`, Unparsable},
		{Chat, `{,"messages":[` + turn + `]}`, Unparsable},
		{Chat, `{"messages":[` + turn + `] "x":1}`, Unparsable},
		{Chat, `{"messages" [` + turn + `]}`, Unparsable},
		{Chat, `{messages:[` + turn + `]}`, Unparsable},
		{Chat, chat(`{"role":"user","content":"a`), Unparsable},
		{Chat, chat(`{"role":"user","content":"\q"}`), Unparsable},
		{Chat, chat(`{"role":"user","content":"\u12G4"}`), Unparsable},
		{Chat, chat(`{"role":"user","content":["a",{"type":"x","y":}]}`), Unparsable},
		{Chat, chat(turn)[:30], Unparsable},
		{Chat, `{"x":01,"messages":[` + turn + `]}`, Unparsable},
		{Chat, `{"x":1.,"messages":[` + turn + `]}`, Unparsable},
		{Chat, `{"x":1e+,"messages":[` + turn + `]}`, Unparsable},
		{Chat, `{"x":-,"messages":[` + turn + `]}`, Unparsable},
		{Chat, `{"x":tru,"messages":[` + turn + `]}`, Unparsable},
		{Chat, `{"x":[NaN,-Infinity,Infinity],"messages":[` + turn + `]}`, HasPrompt},
		{Responses, `{"input":[{"type":`, Unparsable},
		{Responses, `{"input":[{"type":"x","y":]}]}`, Unparsable},
		{Completions, `{"prompt":[1,2,]}`, Unparsable},
		{Completions, `{"prompt":[1,02]}`, Unparsable},
		{Completions, `{"prompt":[1 2]}`, Unparsable},
		{Completions, `{"prompt":[1111,2222,3333`, Unparsable},

		{Chat, `[]`, UnknownShape},
		{Chat, `"hi"`, UnknownShape},
		{Chat, `{}`, UnknownShape},
		{Chat, `{"prompt":"a"}`, UnknownShape},
		{Chat, `{"messages":"a"}`, UnknownShape},
		{Chat, `{"":7,"messages":[` + turn + `]}`, HasPrompt},
		{Chat, `{"messages":null}`, UnknownShape},
		{Chat, `{"messages":{"role":"user"}}`, UnknownShape},
		{Chat, chat(`"a"`), UnknownShape},
		{Chat, chat(turn + `,[` + turn + `]`), UnknownShape},
		{Chat, chat(`{"content":"a"}`), UnknownShape},
		{Chat, chat(`{"role":5,"content":"a"}`), UnknownShape},
		{Messages, `{"system":7,"messages":[` + turn + `]}`, UnknownShape},
		{Responses, chat(turn), UnknownShape},
		{Responses, `{"input":7}`, UnknownShape},
		{Responses, `{"input":[{"type":"message","content":"a"}]}`, UnknownShape},
		{Completions, `{"prompt":null}`, UnknownShape},
		{Completions, `{"prompt":{"a":1}}`, UnknownShape},
		{Completions, `{"prompt":[1,"a"]}`, UnknownShape},
		{Completions, `{"prompt":[1.5]}`, UnknownShape},
		{Completions, `{"prompt":[-1]}`, UnknownShape},
		{Completions, `{"prompt":[4294967296]}`, UnknownShape},
		{Completions, `{"prompt":[true]}`, UnknownShape},
		{Completions, `{"prompt":[[1],2,"a"]}`, HasPrompt},

		{Chat, chat(``), Empty},
		{Chat, chat(`{"role":"user","content":""}`), Empty},
		{Chat, chat(`{"role":"user"}`), Empty},
		{Responses, `{"input":""}`, Empty},
		{Responses, `{"input":[]}`, Empty},
		{Completions, `{"prompt":""}`, Empty},
		{Completions, `{"prompt":[]}`, Empty},
		{Completions, `{"prompt":[[]]}`, Empty},
		{Completions, `{"prompt":["","b"]}`, Empty},
	} {
		b := parse(t, c.api, c.body)
		if b.Why != c.want || (b.Text != nil) != (c.want == HasPrompt) || c.want != HasPrompt && b.TokenIDs != nil {
			t.Errorf("%s: %q, %q, token ids %d, want %q", c.body, b.Why, b.Text, b.TokenIDs, c.want)
		}
	}
}

func TestWhyLabels(t *testing.T) {
	for why, want := range map[Why]string{HasPrompt: "", NoPromptAPI: "no_prompt_api", Unparsable: "unparsable", UnknownShape: "unknown_shape", Empty: "empty", 99: "unknown"} {
		if why.String() != want {
			t.Errorf("%d: %q, want %q", why, why, want)
		}
	}
}

func TestModel(t *testing.T) {
	for _, c := range []struct {
		name, body, want string
		has              bool
		spans            []string
	}{
		{"plain", `{"model":"llama","x":1}`, "llama", true, []string{`"llama"`}},
		{"white space", `{ "model" : "llama" }`, "llama", true, []string{`"llama"`}},
		{"absent", `{"x":1}`, "", false, nil},
		{"empty", `{"model":""}`, "", true, []string{`""`}},
		{"escaped", `{"mod\u0065l":"ll\u0061ma"}`, "llama", true, []string{`"ll\u0061ma"`}},
		{"the last of two", `{"model":"a","x":{"model":"z"},"model":"b"}`, "b", true, []string{`"a"`, `"b"`}},
		{"nested only", `{"x":{"model":"z"},"y":["model"]}`, "", false, nil},
		{"another case", `{"Model":"a"}`, "", false, nil},
		{"null", `{"model":null}`, "", false, []string{`null`}},
		{"number after string", `{"model":"a","model":5}`, "", false, []string{`"a"`, `5`}},
		{"string after object", `{"model":{"model":"x"},"model":"a"}`, "a", true, []string{`{"model":"x"}`, `"a"`}},
		{"behind a byte order mark", "\uFEFF" + `{"model":"a"}`, "a", true, []string{`"a"`}},
		{"truncated later", `{"model":"a","messages":[`, "a", true, []string{`"a"`}},
		{"garbage behind", `{"model":"a"}}`, "a", true, []string{`"a"`}},
		{"itself truncated", `{"model":"a`, "", false, nil},
		{"ahead of the error only", `{"model":"a","x":],"model":"b"}`, "a", true, []string{`"a"`}},
		{"not an object", `["model","a"]`, "", false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, api := range []API{Chat, Completions, Messages, Responses, Other, NoAPI} {
				b := parse(t, api, c.body)
				var spans []string
				for _, s := range b.ModelSpans {
					spans = append(spans, c.body[s.Start:s.End])
				}
				if b.Model != c.want || b.HasModel != c.has || !slices.Equal(spans, c.spans) {
					t.Errorf("API %d: %q, %v, %q", api, b.Model, b.HasModel, spans)
				}
			}
		})
	}
}

func TestStream(t *testing.T) {
	for body, want := range map[string]bool{
		`{"stream":true}`: true, `{"stream" : true , "x":1}`: true, `{"stream":false}`: false, `{}`: false, `{"x":{"stream":true}}`: false,
		`{"stream":"true"}`: false, `{"stream":1}`: false, `{"stream":true,"stream":false}`: false,
	} {
		if got := parse(t, Chat, body).Stream; got != want {
			t.Errorf("%s: %v", body, got)
		}
	}
}

func splice(body string, spans []Span, model string) string {
	var out []byte
	at := 0
	for _, s := range spans {
		out = AppendJSONString(append(out, body[at:s.Start]...), model)
		at = s.End
	}
	return string(append(out, body[at:]...))
}

func TestSplicingTheModel(t *testing.T) {
	for _, body := range []string{
		`{"model":"a","messages":[{"role":"user","content":"model"}],"t":0.5}`,
		" {\"x\":{\"model\":\"a\"} , \"mod\\u0065l\" : [1,{\"model\":2}] , \"y\":null,\"model\" :\"b\\\"\" }\n",
	} {
		for _, model := range []string{"org/model-7b", `q"uo\te`, "line\nbreak\x01", "é😀", ""} {
			got := splice(body, parse(t, Chat, body).ModelSpans, model)
			var was, is map[string]any
			if err := json.Unmarshal([]byte(body), &was); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal([]byte(got), &is); err != nil {
				t.Fatalf("%s: %v", got, err)
			}
			was["model"] = model
			if fmt.Sprint(was) != fmt.Sprint(is) {
				t.Errorf("%s\nbecame\n%s", body, got)
			}
			if b := parse(t, Chat, got); b.Model != model {
				t.Errorf("%s: model %q", got, b.Model)
			}
		}
	}
}

func TestAppendJSONString(t *testing.T) {
	for s, want := range map[string]string{
		"": "", "plain": "plain", `"\/`: `"\/`, "\x00\x1f\x7f": "\x00\x1f\x7f", "é你😀<&>": "é你😀<&>", "a\xffb": "a\uFFFDb",
	} {
		var got string
		if err := json.Unmarshal(AppendJSONString(nil, s), &got); err != nil || got != want {
			t.Errorf("%q: %q, %v", s, got, err)
		}
	}
	if got := string(AppendJSONString([]byte("x"), "y")); got != `x"y"` {
		t.Error(got)
	}
}

func TestDepth(t *testing.T) {
	const n = 150_000
	deep := strings.Repeat("[", n) + strings.Repeat("]", n)
	mixed := strings.Repeat(`{"a":[`, n) + strings.Repeat("]}", n)
	const turn = `{"role":"user","content":"a"}`
	for _, c := range []struct {
		name, body string
		want       Why
	}{
		{"in messages", chat(deep), UnknownShape},
		{"beside messages", `{"x":` + deep + `,"messages":[` + turn + `]}`, HasPrompt},
		{"objects", `{"x":` + mixed + `,"messages":[` + turn + `]}`, HasPrompt},
		{"one bracket wrong far inside", `{"x":` + strings.Replace(mixed, "]}", "}]", 1) + `,"messages":[` + turn + `]}`, Unparsable},
		{"in content", chat(`{"role":"user","content":` + deep + `}`), HasPrompt},
		{"in tools", `{"tools":` + deep + `,"messages":[` + turn + `]}`, HasPrompt},
		{"never closed", chat(strings.Repeat("[", n)), Unparsable},
		{"tool results in tool results", chat(`{"role":"user","content":` + strings.Repeat(`[{"type":"tool_result","content":`, n) + `"a"` + strings.Repeat("}]", n) + `}`), HasPrompt},
		{"the same, types last", chat(`{"role":"user","content":` + strings.Repeat(`[{"content":`, n) + `"a"` + strings.Repeat(`,"type":"tool_result"}]`, n) + `}`), HasPrompt},
	} {
		if b := parse(t, Chat, c.body); b.Why != c.want {
			t.Errorf("%s: %q, want %q", c.name, b.Why, c.want)
		}
	}
}

// TestMemory bounds what hostile bodies make of a parser.
func TestMemory(t *testing.T) {
	const n = 30_000
	for _, unit := range []string{`0`, `{}`, `[]`, `""`, `{"type":"text","text":""}`, `{"type":"x"}`, `{"type":"tool_result"}`, `{"text":"a","text":"b","type":"y"}`, "\"\xff\xff\xff\xff\xff\xff\xff\xff\""} {
		body := chat(`{"content":[` + strings.Repeat(unit+",", n) + `0],"role":"user"}`)
		var p Parser
		if b := p.Parse(Chat, []byte(body)); b.Why != HasPrompt || cap(p.text) > 12*len(body) || len(b.Text) > 4*len(body) {
			t.Errorf("%s: %q, %d bytes held for %d, text %d", unit, b.Why, cap(p.text), len(body), len(b.Text))
		}
		p.Reset()
		if cap(p.text) > maxKept || p.body != nil {
			t.Errorf("%s: %d bytes kept", unit, cap(p.text))
		}
	}
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	for _, kind := range []string{"prose", "escaped", "parts", "system", "tools", "tokens", "image"} {
		api, body := benchBody(kind, 8<<10)
		body = append([]byte(`{"n":1,"priority":7,"best_of":"1","cache_salt":"tenant","vllm_xargs":{"kv_cache_report_mode":"full"},"echo":false,"logprobs":1,`), body[1:]...)
		var p Parser
		p.Parse(api, body)
		if n := testing.AllocsPerRun(20, func() { p.Parse(api, body); p.Reset() }); n != 0 {
			t.Errorf("%s: %v allocations", kind, n)
		}
	}
}

func TestN(t *testing.T) {
	for body, want := range map[string]int{
		`{}`: 1, `[]`: 1, `{"n":3}`: 3, `{"n" : 3 }`: 3, `{"n":1}`: 1, `{"n":0}`: 1, `{"n":-3}`: 1, `{"n":null}`: 1, `{"n":true}`: 1, `{"n":[3]}`: 1,
		`{"n":{"n":3}}`: 1, `{"x":{"n":3}}`: 1, `{"n":"many"}`: 1, `{"n":""}`: 1, `{"n":NaN}`: 1, `{"N":3}`: 1,
		`{"n":"3"}`: 3, `{"n":" 3 "}`: 3, `{"n":3.0}`: 3, `{"n":2.5}`: 3, `{"n":3e0}`: 3, `{"\u006e":3}`: 3, `{"n":"\u0033"}`: 3,
		`{"n":9223372036854775808}`: math.MaxInt32, `{"n":1e999}`: math.MaxInt32, `{"n":Infinity}`: math.MaxInt32, `{"n":-1e999}`: 1,
		`{"n":3,"n":2}`: 2, `{"n":3,"n":null}`: 1, `{"best_of":4}`: 4, `{"n":2,"best_of":4}`: 4, `{"best_of":2,"n":4}`: 4, `{"best_of":4,"best_of":1}`: 1,
		`{"n":3`: 3, `{"n":`: 1, `{"n":"3`: 1,
	} {
		for _, api := range []API{Chat, Completions, Messages, Responses, Other, NoAPI} {
			if got := parse(t, api, body).N; got != want {
				t.Errorf("%s: %d, want %d", body, got, want)
			}
		}
	}
}

func TestPriority(t *testing.T) {
	for _, c := range []struct {
		body  string
		want  int64
		has   bool
		spans []string
	}{
		{`{"x":1}`, 0, false, nil},
		{`{"priority":7}`, 7, true, []string{`7`}},
		{` { "priority" : -7 } `, -7, true, []string{`-7`}},
		{`{"priority":0}`, 0, true, []string{`0`}},
		{`{"pr\u0069ority":7}`, 7, true, []string{`7`}},
		{`{"Priority":7}`, 0, false, nil},
		{`{"x":{"priority":7},"y":["priority"]}`, 0, false, nil},
		{`{"priority":-9223372036854775808}`, math.MinInt64, true, []string{`-9223372036854775808`}},
		{`{"priority":9223372036854775808}`, 0, false, []string{`9223372036854775808`}},
		{`{"priority":7.0}`, 0, false, []string{`7.0`}},
		{`{"priority":"7"}`, 0, false, []string{`"7"`}},
		{`{"priority":null}`, 0, false, []string{`null`}},
		{`{"priority":-Infinity}`, 0, false, []string{`-Infinity`}},
		{`{"priority":{"priority":[7]},"priority":8}`, 8, true, []string{`{"priority":[7]}`, `8`}},
		{`{"priority":8,"x":0,"priority":"high"}`, 0, false, []string{`8`, `"high"`}},
		{`{"priority":7,"x":],"priority":8}`, 7, true, []string{`7`}},
		{`{"priority":`, 0, false, nil},
		{`{"priority":-`, 0, false, nil},
	} {
		for _, api := range []API{Chat, Completions, Messages, Responses, Other, NoAPI} {
			b := parse(t, api, c.body)
			var spans []string
			for _, s := range b.PrioritySpans {
				spans = append(spans, c.body[s.Start:s.End])
			}
			if b.Priority != c.want || b.HasPriority != c.has || !slices.Equal(spans, c.spans) {
				t.Errorf("%s: %d, %v, %q", c.body, b.Priority, b.HasPriority, spans)
			}
		}
	}
}

func TestObject(t *testing.T) {
	for body, want := range map[string]struct {
		object  int
		members bool
	}{
		`{}`: {1, false}, " \n{ }": {3, false}, "\uFEFF{}": {4, false}, `{"a":1}`: {1, true}, ` { "a":1}`: {2, true}, `{`: {1, false},
		`[{}]`: {0, false}, `"{"`: {0, false}, ``: {0, false},
	} {
		if b := parse(t, Chat, body); b.Object != want.object || b.Members != want.members {
			t.Errorf("%s: %d, %v", body, b.Object, b.Members)
		}
	}
}

// stamp gives a body of which b has been told another priority.
func stamp(body []byte, b *Body, priority int64) []byte {
	var out []byte
	at := 0
	for _, s := range b.PrioritySpans {
		out = strconv.AppendInt(append(out, body[at:s.Start]...), priority, 10)
		at = s.End
	}
	if len(b.PrioritySpans) == 0 {
		out = strconv.AppendInt(append(append(out, body[:b.Object]...), `"priority":`...), priority, 10)
		if b.Members {
			out = append(out, ',')
		}
		at = b.Object
	}
	return append(out, body[at:]...)
}

func TestStampingAPriority(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	var p Parser
	for range 3000 {
		api, request, _ := randomRequest(r)
		switch r.IntN(4) {
		case 0:
			request["priority"] = []any{7, -7, 0.5, "7", nil, []any{7}, map[string]any{"priority": 7}}[r.IntN(7)]
		case 1:
			request = map[string]any{}
		}
		body := spelled(r, request)
		if at := bytes.LastIndexByte(body, '}'); r.IntN(4) == 0 && len(request) > 0 {
			body = fmt.Appendf(nil, `%s,"pr\u0069ority" :%d%s`, body[:at], r.IntN(9), body[at:])
		}
		got := stamp(body, p.Parse(api, body), 42)
		var was, is map[string]any
		if err := json.Unmarshal(body, &was); err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		if err := json.Unmarshal(got, &is); err != nil {
			t.Fatalf("%s: %v", got, err)
		}
		was["priority"] = 42.0
		if !reflect.DeepEqual(was, is) {
			t.Fatalf("%s\nbecame\n%s", body, got)
		}
		if b := p.Parse(api, got); b.Priority != 42 || !b.HasPriority {
			t.Fatalf("%s: priority %d", got, b.Priority)
		}
	}
}

func TestAPriorityThatIsGivenTooOften(t *testing.T) {
	for n, want := range map[int]Why{MaxModelSpans: HasPrompt, MaxModelSpans + 1: Unparsable, 100_000: Unparsable} {
		body := `{` + strings.Repeat(`"priority":1,`, n) + `"messages":[{"role":"user","content":"hello"}],"model":"m"}`
		got := new(Parser).Parse(Chat, []byte(body))
		if got.Why != want || len(got.PrioritySpans) > MaxModelSpans+1 {
			t.Errorf("%d times: %v with %d spans, want %v", n, got.Why, len(got.PrioritySpans), want)
		}
	}
}

func TestAModelThatIsNamedTooOften(t *testing.T) {
	for n, want := range map[int]Why{MaxModelSpans: HasPrompt, MaxModelSpans + 1: Unparsable, 100_000: Unparsable} {
		body := `{` + strings.Repeat(`"model":"m",`, n) + `"messages":[{"role":"user","content":"hello"}]}`
		got := new(Parser).Parse(Chat, []byte(body))
		if got.Why != want || len(got.ModelSpans) > MaxModelSpans+1 {
			t.Errorf("%d times: %v with %d spans, want %v", n, got.Why, len(got.ModelSpans), want)
		}
	}
}

var allAPIs = []API{Chat, Completions, Messages, Responses, Other, NoAPI}

func TestReportMode(t *testing.T) {
	for _, c := range []struct {
		name, body string
		spans      []string
	}{
		{"absent", `{"vllm_xargs":{"session_id":"a"}}`, nil},
		{"plain", `{"vllm_xargs":{"kv_cache_report_mode":"full"}}`, []string{`"full"`}},
		{"white space", `{ "vllm_xargs" : { "a" : 1 , "kv_cache_report_mode" : "full" } }`, []string{`"full"`}},
		{"escaped keys", `{"vllm\u005fxargs":{"\u006bv_cache_report_mode":"fu\u006cl"}}`, []string{`"fu\u006cl"`}},
		{"given twice", `{"vllm_xargs":{"kv_cache_report_mode":"full","kv_cache_report_mode":"incremental"}}`, []string{`"full"`, `"incremental"`}},
		{"in two objects", `{"vllm_xargs":{"kv_cache_report_mode":"full"},"vllm_xargs":null,"vllm_xargs":{"kv_cache_report_mode":7}}`, []string{`"full"`, `7`}},
		{"of another kind", `{"vllm_xargs":{"kv_cache_report_mode":{"kv_cache_report_mode":["full"]}}}`, []string{`{"kv_cache_report_mode":["full"]}`}},
		{"of the request that render makes", `{"sampling_params":{"n":1,"extra_args":{"kv_cache_report_mode":"full"}}}`, []string{`"full"`}},
		{"at the top", `{"kv_cache_report_mode":"full","extra_args":{"kv_cache_report_mode":"full"}}`, nil},
		{"too deep", `{"x":{"vllm_xargs":{"kv_cache_report_mode":"full"}},"vllm_xargs":{"vllm_xargs":{"kv_cache_report_mode":"full"}}}`, nil},
		{"in an array", `{"vllm_xargs":[{"kv_cache_report_mode":"full"}],"sampling_params":[{"extra_args":{"kv_cache_report_mode":"full"}}]}`, nil},
		{"in a string", `{"vllm_xargs":"{\"kv_cache_report_mode\":\"full\"}"}`, nil},
		{"in a conversation", chat(`{"role":"user","vllm_xargs":{"kv_cache_report_mode":"full"},"content":"\"vllm_xargs\":{\"kv_cache_report_mode\":\"full\"}"}`), nil},
		{"another case", `{"VLLM_xargs":{"kv_cache_report_mode":"full"},"vllm_xargs":{"KV_cache_report_mode":"full"}}`, nil},
		{"truncated later", `{"vllm_xargs":{"kv_cache_report_mode":"full","x":`, []string{`"full"`}},
		{"itself truncated", `{"vllm_xargs":{"kv_cache_report_mode":"full`, nil},
		{"without a value", `{"vllm_xargs":{"kv_cache_report_mode"}}`, nil},
	} {
		for _, api := range allAPIs {
			b := parse(t, api, c.body)
			var spans []string
			for _, s := range b.ReportModeSpans {
				spans = append(spans, c.body[s.Start:s.End])
			}
			if !slices.Equal(spans, c.spans) {
				t.Errorf("%s: %q, want %q", c.name, spans, c.spans)
			}
		}
	}
}

func TestAReportModeThatIsGivenTooOften(t *testing.T) {
	members := strings.Repeat(`,"kv_cache_report_mode":"full"`, MaxModelSpans)
	const turns = `"messages":[{"role":"user","content":"a"}]`
	if b := parse(t, Chat, `{"vllm_xargs":{`+members[1:]+`},`+turns+`}`); b.Why != HasPrompt || len(b.ReportModeSpans) != MaxModelSpans {
		t.Errorf("%q, %d of them", b.Why, len(b.ReportModeSpans))
	}
	for _, body := range []string{
		`{"vllm_xargs":{"kv_cache_report_mode":"full"` + members + `},` + turns + `}`,
		`{` + strings.Repeat(`"vllm_xargs":{"kv_cache_report_mode":"full"},`, 100_000) + turns + `}`,
	} {
		if b := parse(t, Chat, body); b.Why != Unparsable || len(b.ReportModeSpans) > MaxModelSpans+1 {
			t.Errorf("%q, %d of them", b.Why, len(b.ReportModeSpans))
		}
	}
}

func TestSalt(t *testing.T) {
	for _, c := range []struct{ body, want string }{
		{`{"x":1}`, ""},
		{`{"cache_salt":"tenant-1"}`, "tenant-1"},
		{`{"cache\u005fsalt":"t\u00e9n\n\ud83d\ude00"}`, "tén\n😀"},
		{`{"cache_salt":"a","x":{"cache_salt":"b"},"cache_salt":"c"}`, "c"},
		{`{"cache_salt":"a","cache_salt":null}`, ""},
		{`{"cache_salt":""}`, ""},
		{`{"cache_salt":7}`, ""},
		{`{"cache_salt":["a"]}`, ""},
		{`{"cache_salt":"a`, ""},
		{"{\"cache_salt\":\"a\xffb\"}", "a\uFFFDb"},
	} {
		for _, api := range []API{Chat, Completions, Messages, Responses} {
			if got := string(parse(t, api, c.body).Salt); got != c.want {
				t.Errorf("%s: %q, want %q", c.body, got, c.want)
			}
		}
	}
	if got := parse(t, Other, `{"cache_salt":"a"}`).Salt; len(got) > 0 {
		t.Errorf("%q without a prompt", got)
	}
}

func TestPromptLogprobs(t *testing.T) {
	for body, want := range map[string][]API{
		`{}`:                        nil,
		`{"prompt_logprobs":0}`:     allAPIs,
		`{"prompt_logprobs":-1}`:    allAPIs,
		`{"prompt_logprobs":"5"}`:   allAPIs,
		`{"prompt_logprobs":false}`: allAPIs, // pydantic makes a 0 of it
		`{"prompt_logprobs":null}`:  nil,
		`{"prompt_logprobs":5,"prompt_logprobs":null}`: nil,
		`{"x":{"prompt_logprobs":5}}`:                  nil,
		`{"prompt_l\u006fgprobs":5}`:                   allAPIs,
		`{"echo":true}`:                                {Chat},
		`{"echo":true,"logprobs":null}`:                {Chat},
		`{"echo":"yes","logprobs":0}`:                  allAPIs,
		`{"logprobs":0,"echo":1}`:                      allAPIs,
		`{"echo":false,"logprobs":1}`:                  nil,
		`{"echo":0,"logprobs":1}`:                      nil,
		`{"echo":null,"logprobs":1}`:                   nil,
		`{"logprobs":1}`:                               nil,
		`{"echo":true,"echo":false,"logprobs":1}`:      nil,
	} {
		for _, api := range allAPIs {
			if got := parse(t, api, body).PromptLogprobs; got != slices.Contains(want, api) {
				t.Errorf("%s as %d: %v", body, api, got)
			}
		}
	}
}

func TestWhatTokenIDsDoNotTell(t *testing.T) {
	for _, c := range []struct {
		api               API
		body              string
		media, renderOnly bool
	}{
		{Chat, chat(`{"role":"user","content":[{"type":"text","text":"a"},"b"]},{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}`), false, false},
		{Chat, chat(`{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:"}}]}`), true, false},
		{Chat, chat(`{"role":"user","content":[{"image":"data:"}]},{"role":"user","content":"a"}`), true, false},
		{Messages, chat(`{"role":"user","content":[{"type":"tool_result","content":[{"type":"image","source":{}}]}]}`), true, false},
		{Messages, chat(`{"role":"assistant","content":[{"type":"thinking","thinking":"a"},{"type":"tool_use","name":"f","input":{}}]}`), false, false},
		{Responses, `{"input":[{"role":"user","content":[{"type":"input_image"},{"type":"input_text","text":"a"}]}]}`, true, false},
		{Responses, `{"input":[{"type":"function_call","name":"f","arguments":"{}"},{"type":"function_call_output","output":"a"}]}`, false, false},
		{Chat, `{"reasoning_effort":"low","messages":[{"role":"user","content":"a"}]}`, false, true},
		{Chat, `{"reasoning_effort":null,"documents":[],"truncate_prompt_tokens":null,"messages":[{"role":"user","content":"a"}]}`, false, false},
		{Chat, `{"documents":[{"text":"a"}],"messages":[{"role":"user","content":"a"}]}`, false, true},
		{Completions, `{"prompt":[1,2,3]}`, false, false},
		{Completions, `{"prompt":[1,2,3],"truncate_prompt_tokens":2}`, false, true},
	} {
		b := parse(t, c.api, c.body)
		if b.Why != HasPrompt || b.Media != c.media || b.RenderOnly != c.renderOnly {
			t.Errorf("%s: %q, media %v, render only %v", c.body, b.Why, b.Media, b.RenderOnly)
		}
		if (b.TokenIDs != nil) != (c.api == Completions && !c.renderOnly) {
			t.Errorf("%s: token ids %d", c.body, b.TokenIDs)
		}
	}
}
