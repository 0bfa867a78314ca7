package prompt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// usageOf gives the usage of an answer that is written in pieces that end at the given offsets.
func usageOf(api API, answer string, cuts ...int) (Usage, bool) {
	var tail Tail
	at := 0
	for _, cut := range append(cuts, len(answer)) {
		if n, err := tail.Write([]byte(answer[at:cut])); n != cut-at || err != nil {
			panic("a short write")
		}
		at = cut
	}
	return tail.Usage(api)
}

func recordedAnswer(t testing.TB, name string) string {
	raw, err := os.ReadFile("testdata/" + name + ".resp")
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(raw), "\r\n\r\n")
	if body == "" {
		t.Fatalf("%s: no body", name)
	}
	return body
}

var recordedUsages = map[string]struct {
	api  API
	want Usage
}{
	"chat":                         {Chat, Usage{142, 0, true}},
	"chat-again-cached":            {Chat, Usage{142, 128, true}},
	"chat-salt":                    {Chat, Usage{142, 0, true}},
	"chat-tools":                   {Chat, Usage{342, 0, true}},
	"chat-parts":                   {Chat, Usage{142, 128, true}},
	"chat-max-completion-tokens":   {Chat, Usage{142, 128, true}},
	"chat-return-token-ids":        {Chat, Usage{142, 128, true}},
	"chat-stream":                  {Chat, Usage{}},
	"chat-stream-usage":            {Chat, Usage{142, 128, true}},
	"chat-stream-usage-continuous": {Chat, Usage{142, 128, true}},
	"chat-stream-usage-ids":        {Chat, Usage{142, 128, true}},
	"chat-err-json":                {Chat, Usage{}},
	"completions":                  {Completions, Usage{74, 0, true}},
	"completions-ids":              {Completions, Usage{100, 0, true}},
	"completions-salt":             {Completions, Usage{74, 0, true}},
	"completions-two":              {Completions, Usage{164, 0, true}}, // the sum of both prompts
	"completions-stream-usage":     {Completions, Usage{74, 64, true}},
	"messages":                     {Messages, Usage{142, 128, true}},
	"messages-again-cached":        {Messages, Usage{142, 128, true}},
	"messages-stream":              {Messages, Usage{142, 128, true}},
	"messages-err":                 {Messages, Usage{}},
	"responses":                    {Responses, Usage{143, 0, true}},
	"responses-again-cached":       {Responses, Usage{143, 128, true}},
	"responses-stream":             {Responses, Usage{143, 128, true}},
}

func TestRecordedUsages(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for name, c := range recordedUsages {
		answer := recordedAnswer(t, name)
		check := func(cuts ...int) {
			t.Helper()
			if got, ok := usageOf(c.api, answer, cuts...); got != c.want || ok != (c.want != Usage{}) {
				t.Fatalf("%s, cut at %d: %+v, %v, want %+v", name, cuts, got, ok, c.want)
			}
		}
		check()
		for cut := range answer {
			check(cut)
		}
		var all []int
		for cut := range answer {
			all = append(all, cut)
		}
		check(all...)
		for range 50 {
			var cuts []int
			for at := r.IntN(300); at < len(answer); at += r.IntN(300) {
				cuts = append(cuts, at)
			}
			check(cuts...)
		}
		if got, ok := usageOf(Other, answer); ok {
			t.Errorf("%s: %+v from an API that has none", name, got)
		}
	}
}

// TestTruncatedAnswers cuts answers off: whole ones tell nothing then, and streams what one of their events has told.
func TestTruncatedAnswers(t *testing.T) {
	for name, c := range recordedUsages {
		answer := strings.TrimRight(recordedAnswer(t, name), "\n")
		for end := range answer {
			got, ok := usageOf(c.api, answer[:end])
			if !ok {
				continue
			}
			isStream := strings.Contains(answer, "data: ")
			if !isStream || got.PromptTokens != c.want.PromptTokens || got.CachedKnown && got != c.want {
				t.Fatalf("%s until %d: %+v", name, end, got)
			}
		}
	}
}

func TestUsage(t *testing.T) {
	pad := strings.Repeat("x", 2*tailSize)
	const spoof = `\"usage\":{\"prompt_tokens\":1,\"input_tokens\":1}`
	openAI := func(usage string) string { return `{"choices":[{"text":"` + spoof + `"}],"usage":` + usage + `}` }
	for _, c := range []struct {
		name   string
		api    API
		answer string
		want   Usage
	}{
		{"nothing", Chat, ``, Usage{}},
		{"white space", Chat, " \n\n", Usage{}},
		{"no usage", Chat, `{"choices":[]}`, Usage{}},
		{"null", Chat, openAI(`null`), Usage{}},
		{"null ahead of an object", Chat, `{"usage":null,"x":{"prompt_tokens":7}}`, Usage{}},
		{"an array", Chat, openAI(`[{"prompt_tokens":7}]`), Usage{}},
		{"details absent", Chat, openAI(`{"prompt_tokens":7}`), Usage{7, 0, false}},
		{"details null", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":null}`), Usage{7, 0, false}},
		{"details empty", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":{}}`), Usage{7, 0, false}},
		{"cached null", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":null}}`), Usage{7, 0, false}},
		{"other fields", Chat, openAI(`{"a":[{"prompt_tokens":1}],"prompt_tokens_details":{"x":{"cached_tokens":2},"cached_tokens":3},"prompt_tokens":7,"":8,"b":"\"}"}`), Usage{7, 3, true}},
		{"escaped keys", Chat, openAI(`{"prompt\u005ftokens":7}`), Usage{7, 0, false}},
		{"twice", Chat, openAI(`{"prompt_tokens":1,"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":3},"prompt_tokens_details":{}}`), Usage{7, 0, false}},
		{"white space everywhere", Chat, " {\n \"usage\" :\t{ \"prompt_tokens\" : 7 ,\r\n\"prompt_tokens_details\" : { \"cached_tokens\" : 3 } } ,\n \"x\" : [ ]\n}\n \n", Usage{7, 3, true}},
		{"the last of two", Chat, `{"usage":{"prompt_tokens":1},"usage":{"prompt_tokens":7}}`, Usage{7, 0, false}},
		{"the last of two is null", Chat, `{"usage":{"prompt_tokens":1},"usage":null}`, Usage{}},
		{"nested only", Chat, `{"x":{"usage":{"prompt_tokens":1}},"":{"usage":{"prompt_tokens":1}},"message":{"usage":{"prompt_tokens":1}}}`, Usage{}},
		{"a longer key", Chat, `{"x\"usage":{"prompt_tokens":1}}`, Usage{}},
		{"a value", Chat, `{"x":"usage","y":{"prompt_tokens":1}}`, Usage{}},
		{"backslashes in strings", Chat, `{"usage":{"prompt_tokens":7},"a":"\\","b":"\\\"","c":"\"\\\\"}`, Usage{7, 0, false}},
		{"long nulls behind", Chat, openAI(`{"prompt_tokens":7}` + strings.Repeat(`,"x":null`, 400)), Usage{7, 0, false}},
		{"behind long text", Chat, `{"choices":"` + pad + spoof + `","usage":{"prompt_tokens":7}}`, Usage{7, 0, false}},
		{"behind long escapes", Chat, `{"choices":"` + strings.Repeat(`\\`, tailSize) + `","usage":{"prompt_tokens":7}}`, Usage{7, 0, false}},
		{"too far from the end", Chat, `{"usage":{"prompt_tokens":7},"choices":"` + pad + `"}`, Usage{}},
		{"cut in two by what is kept", Chat, `{"usage":{"prompt_tokens":7},"x":"` + pad[:tailSize-20] + `"}`, Usage{}},
		{"no object", Chat, `[{"usage":{"prompt_tokens":7}}]`, Usage{}},
		{"two objects", Chat, `{"x":1} {"usage":{"prompt_tokens":7}}`, Usage{}},
		{"an object in words", Chat, `so {"usage":{"prompt_tokens":7}}`, Usage{}},
		{"a bracket too many", Chat, `{"usage":{"prompt_tokens":7}}}`, Usage{}},
		{"brackets that do not match", Chat, `{"usage":{"prompt_tokens":7]}`, Usage{}},
		{"only text", Chat, `{"choices":"` + spoof + `"}`, Usage{}},
		{"only text, long", Chat, `{"choices":"` + pad + spoof + `"}`, Usage{}},
		{"text, cut off", Chat, `{"choices":"` + pad + `{` + spoof + `}`, Usage{}},
		{"text that spells an event", Chat, `{"choices":"\n\ndata: {` + spoof + `}"}`, Usage{}},

		{"zero", Chat, openAI(`{"prompt_tokens":0}`), Usage{}},
		{"negative", Chat, openAI(`{"prompt_tokens":-7}`), Usage{}},
		{"a fraction", Chat, openAI(`{"prompt_tokens":7.0}`), Usage{}},
		{"an exponent", Chat, openAI(`{"prompt_tokens":7e0}`), Usage{}},
		{"a string", Chat, openAI(`{"prompt_tokens":"7"}`), Usage{}},
		{"an object", Chat, openAI(`{"prompt_tokens":{"prompt_tokens":7}}`), Usage{}},
		{"huge", Chat, openAI(`{"prompt_tokens":18446744073709551623}`), Usage{}},
		{"very huge", Chat, openAI(`{"prompt_tokens":` + strings.Repeat("9", 2000) + `}`), Usage{}},
		{"NaN", Chat, openAI(`{"prompt_tokens":NaN}`), Usage{}},
		{"NaN elsewhere", Chat, openAI(`{"prompt_tokens":7,"x":[NaN,-Infinity]}`), Usage{7, 0, false}},
		{"cached negative", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":-1}}`), Usage{}},
		{"cached a string", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":"3"}}`), Usage{}},
		{"all cached", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":7}}`), Usage{7, 7, true}},
		{"more cached than there are", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":8}}`), Usage{}},
		{"details a number", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":3}`), Usage{}},
		{"details an array", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":[3]}`), Usage{}},
		{"details cut off", Chat, openAI(`{"prompt_tokens":7,"prompt_tokens_details":`), Usage{}},
		{"deep", Chat, openAI(`{"x":` + strings.Repeat("[", 1500) + strings.Repeat("]", 1500) + `,"prompt_tokens":7}`), Usage{7, 0, false}},
		{"brackets only", Chat, `"usage"` + strings.Repeat("}", 2*tailSize), Usage{}},
		{"gzip", Chat, "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff\xabV*-NLOU\xb2\xaa\xae\x05\x00", Usage{}},
		{"bytes", Chat, `"usage"` + strings.Repeat("\x00\xff\"", 500) + "}", Usage{}},

		{"the other API's fields", Chat, openAI(`{"input_tokens":7}`), Usage{}},
		{"the other API's fields", Messages, openAI(`{"prompt_tokens":7}`), Usage{}},
		{"the other API's details", Messages, openAI(`{"input_tokens":7,"input_tokens_details":{"cached_tokens":3}}`), Usage{7, 0, false}},
		{"an unknown API", API(200), openAI(`{"prompt_tokens":7}`), Usage{}},
		{"no API", NoAPI, openAI(`{"prompt_tokens":7,"input_tokens":7}`), Usage{}},

		{"Messages, cached unknown", Messages, openAI(`{"input_tokens":7}`), Usage{7, 0, false}},
		{"Messages, cached null", Messages, openAI(`{"input_tokens":7,"cache_read_input_tokens":null}`), Usage{7, 0, false}},
		{"Messages, all three", Messages, openAI(`{"input_tokens":7,"cache_read_input_tokens":20,"cache_creation_input_tokens":100}`), Usage{127, 20, true}},
		{"Messages, all cached", Messages, openAI(`{"input_tokens":0,"cache_read_input_tokens":20}`), Usage{20, 20, true}},
		{"Messages, without the first", Messages, openAI(`{"cache_read_input_tokens":20}`), Usage{}},
		{"Messages, a tool's input", Messages, `{"content":[{"type":"tool_use","input":{"usage":{"input_tokens":1},"message":{"usage":{"input_tokens":1}}}}],"usage":null}`, Usage{}},
		{"Messages, nothing but such an input", Messages, `{"content":[{"input":{"usage":{"input_tokens":1}}}]}`, Usage{}},
		{"Messages, it began before what is kept", Messages, `{"content":[{"input":{"x":"` + pad + `","usage":{"input_tokens":1}}}]}`, Usage{}},
		{"Responses, an item", Responses, `{"item":{"usage":{"input_tokens":1}},"type":"response.output_item.done"}`, Usage{}},
		{"Responses, both depths", Responses, `{"response":{"usage":{"input_tokens":1}},"usage":{"input_tokens":7}}`, Usage{7, 0, false}},
		{"Responses, under a key that is not kept", Responses, `{"metadata":{"x":"` + pad + `","usage":{"input_tokens":1}},"object":"response"}`, Usage{}},
	} {
		if got, ok := usageOf(c.api, c.answer); got != c.want && ok || ok != (c.want != Usage{}) {
			t.Errorf("%s: %+v, %v, want %+v", c.name, got, ok, c.want)
		}
	}
}

func TestUsageInStreams(t *testing.T) {
	pad := strings.Repeat("x", 2*tailSize)
	chunk := func(usage string) string {
		return `data: {"choices":[{"delta":{"content":"\"usage\":{\"prompt_tokens\":1}"}}],"usage":` + usage + "}\n\n"
	}
	const done = "data: [DONE]\n\n"
	final := `data: {"choices":[],"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":3}}}` + "\n\n"
	for _, c := range []struct {
		name   string
		api    API
		answer string
		want   Usage
	}{
		{"plain", Chat, chunk("null") + final + done, Usage{7, 3, true}},
		{"no space behind the colon", Chat, strings.ReplaceAll(chunk("null")+final+done, "data: ", "data:"), Usage{7, 3, true}},
		{"carriage returns", Chat, strings.ReplaceAll(chunk("null")+final+done, "\n", "\r\n"), Usage{7, 3, true}},
		{"no line end", Chat, strings.TrimSpace(chunk("null") + final), Usage{7, 3, true}},
		{"comments and other fields", Chat, ": hello\n\n" + final + ": ping\n\nid: 7\nevent: x\n" + done + ": \"usage\"}\n\n", Usage{7, 3, true}},
		{"null behind it", Chat, final + chunk("null") + done, Usage{7, 3, true}},
		{"only null", Chat, chunk("null") + chunk("null") + done, Usage{}},
		{"continuous", Chat, chunk(`{"prompt_tokens":7}`) + chunk(`{"prompt_tokens":8}`) + done, Usage{8, 0, false}},
		{"cut off", Chat, chunk(`{"prompt_tokens":7}`) + chunk(`{"prompt_tokens":8}`)[:80], Usage{7, 0, false}},
		{"cut off in a field's name", Chat, final + "da", Usage{7, 3, true}},
		{"nonsense is passed over", Chat, final + chunk(`{"prompt_tokens":-1}`) + done, Usage{7, 3, true}},
		{"an error ends it", Chat, chunk("null") + "data: {\"error\":{\"message\":\"\\\"usage\\\"\"}}\n\n" + done, Usage{}},
		{"behind much", Chat, strings.Repeat(chunk("null"), 300) + final + done, Usage{7, 3, true}},
		{"in one long line", Chat, `data: {"choices":"` + pad + `","usage":{"prompt_tokens":7}}` + "\n\n" + done, Usage{7, 0, false}},
		{"text that spells an event", Chat, `data: {"choices":[{"delta":{"content":"\ndata: {\"usage\":{\"prompt_tokens\":1}}\n"}}]}` + "\n\n" + done, Usage{}},
		{"spread over chunks", Chat, `data: {"choices":[{"text":"\"usage"}]}` + "\n\n" + `data: {"choices":[{"text":"\":{\"prompt_tokens\":1}}"}]}` + "\n\n" + done, Usage{}},

		{"message_start only", Messages, `data: {"type":"message_start","message":{"usage":{"input_tokens":7,"cache_read_input_tokens":3}}}` + "\n\n" + `data: {"type":"message_delta","usage":{"output_tokens":9}}` + "\n\n", Usage{10, 3, true}},
		{"message_delta wins", Messages, `data: {"type":"message_start","message":{"usage":{"input_tokens":7}}}` + "\n\n" + `data: {"type":"message_delta","usage":{"input_tokens":4,"cache_read_input_tokens":3}}` + "\n\n", Usage{7, 3, true}},
		{"message_start long gone", Messages, `data: {"type":"message_start","message":{"usage":{"input_tokens":7}}}` + "\n\n" + strings.Repeat("data: {\"type\":\"ping\"}\n\n", 400) + `data: {"type":"message_delta","usage":{"output_tokens":9}}` + "\n\n", Usage{}},
		{"Responses, the key not kept", Responses, `data: {"type":"response.completed","response":{"instructions":"` + pad + `","usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":3}},"user":null}}` + "\n\n", Usage{7, 3, true}},
		{"Responses, the type last", Responses, `data: {"response":{"instructions":"` + pad + `","usage":{"input_tokens":7},"user":null},"sequence_number":9,"type":"response.completed"}` + "\n\n", Usage{7, 0, false}},
		{"Responses, in progress", Responses, `data: {"response":{"usage":null},"type":"response.in_progress"}` + "\n\n", Usage{}},
	} {
		if got, ok := usageOf(c.api, c.answer); got != c.want && ok || ok != (c.want != Usage{}) {
			t.Errorf("%s: %+v, %v, want %+v", c.name, got, ok, c.want)
		}
	}
}

// TestWhatIsKept compares the ring with all that was written.
func TestWhatIsKept(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var tail Tail
	for range 200 {
		tail.Reset()
		var all []byte
		for range r.IntN(20) {
			p := make([]byte, []int{r.IntN(50), r.IntN(3 * tailSize), tailSize, tailSize - len(all)%tailSize}[r.IntN(4)])
			for i := range p {
				p[i] = byte(r.Uint32())
			}
			if n, err := tail.Write(p); n != len(p) || err != nil {
				t.Fatal(n, err)
			}
			all = append(all, p...)
			if r.IntN(2) == 0 {
				kept, cut := tail.bytes()
				if want := all[max(0, len(all)-tailSize):]; !bytes.Equal(kept, want) || cut != (len(all) >= tailSize) {
					t.Fatalf("%d bytes kept of %d, cut %v", len(kept), len(all), cut)
				}
			}
		}
	}
}

// TestUsageAgainstHostileAnswers has answers that are nothing but what a search looks for.
func TestUsageAgainstHostileAnswers(t *testing.T) {
	for _, unit := range []string{`}`, `]}`, `"`, `\`, `\"`, `"usage":`, `"usage":{`, `{"usage":{}}`, "data:\n", "data:{\"usage\":{}}\n", "data:}\n", `"usage":{"":"`, "\n", ":", `"a":"usage",`, `\\"`} {
		for _, end := range []string{``, `}`, `"}`, "}\n\n", `{}}`} {
			answer := `"usage"` + strings.Repeat(unit, tailSize/len(unit)) + end
			for api := range API(8) {
				if got, ok := usageOf(api, answer); ok {
					t.Errorf("%s … %s: %+v", unit, end, got)
				}
			}
		}
	}
}

// naiveUsage finds the usage of a whole answer over encoding/json.
func naiveUsage(api API, object []byte) (u Usage, ok bool) {
	defer func() { ok = recover() == nil && u.PromptTokens > 0 && u.CachedTokens <= u.PromptTokens }()
	members := func(raw json.RawMessage) (m map[string]json.RawMessage) {
		if raw == nil || raw[0] != '{' || json.Unmarshal(raw, &m) != nil {
			panic("no object")
		}
		return m
	}
	count := func(raw json.RawMessage) (int, bool) {
		if raw == nil || string(raw) == "null" {
			return 0, false
		}
		n, err := strconv.ParseUint(string(raw), 10, 32)
		if err != nil || n >= maxCount+10 {
			panic("no count")
		}
		return int(n), true
	}
	parent := map[API]string{Messages: "message", Responses: "response"}[api]
	top := members(bytes.TrimSpace(object))
	raw, has := top["usage"]
	if inner := top[parent]; !has && parent != "" && inner != nil {
		raw = members(inner)["usage"]
	}
	usage := members(raw)
	prompt, details := "prompt_tokens", "prompt_tokens_details"
	if api == Messages || api == Responses {
		prompt, details = "input_tokens", "input_tokens_details"
	}
	u.PromptTokens, has = count(usage[prompt])
	if !has {
		panic("no prompt")
	}
	if api == Messages {
		u.CachedTokens, u.CachedKnown = count(usage["cache_read_input_tokens"])
		written, _ := count(usage["cache_creation_input_tokens"])
		u.PromptTokens += u.CachedTokens + written
	} else if d := usage[details]; d != nil && string(d) != "null" {
		u.CachedTokens, u.CachedKnown = count(members(d)["cached_tokens"])
	}
	return u, true
}

func FuzzUsage(f *testing.F) {
	for name, c := range recordedUsages {
		f.Add(byte(c.api), []byte(recordedAnswer(f, name)), uint16(7))
	}
	for _, s := range []string{
		`{"usage":{"prompt_tokens":7,"input_tokens":7,"prompt_tokens_details":{"cached_tokens":3},"cache_read_input_tokens":2},"x":"\\\"\\"}`,
		`{"message":{"usage":{"input_tokens":1}},"response":{"usage":{"input_tokens":1}}}`,
		`\",\"usage\":{\"prompt_tokens\":1}}`,
		`","usage":{"prompt_tokens":1}}`,
	} {
		for api := Chat; api <= Responses; api++ {
			f.Add(byte(api), []byte(s), uint16(3))
		}
	}
	f.Fuzz(func(t *testing.T, a byte, answer []byte, cut uint16) {
		api := API(a % 6)
		got, ok := usageOf(api, string(answer))
		if ok && (got.PromptTokens <= 0 || got.CachedTokens < 0 || got.CachedTokens > got.PromptTokens || !got.CachedKnown && got.CachedTokens != 0) {
			t.Fatalf("%+v", got)
		}
		if again, okAgain := usageOf(api, string(answer), int(cut)%(len(answer)+1)); got != again || ok != okAgain {
			t.Fatalf("cut at %d: %+v, %v, else %+v, %v", cut, again, okAgain, got, ok)
		}
		if api == NoAPI || api == Other {
			if ok {
				t.Fatalf("%+v", got)
			}
			return
		}
		// Keys with escapes are not looked for outside of the usage.
		if len(answer) < tailSize && json.Valid(answer) && !bytes.Contains(answer, []byte(`\u`)) && utf8.Valid(answer) {
			if want, wantOK := naiveUsage(api, answer); ok != wantOK || ok && got != want {
				t.Fatalf("%+v, %v, want %+v, %v", got, ok, want, wantOK)
			}
		}
		// As what the model says, in whole answers and in streams, kept from its start or not, it tells nothing.
		text, _ := json.Marshal(string(answer))
		first, _ := json.Marshal(string(answer[:int(cut)%(len(answer)+1)]))
		second, _ := json.Marshal(string(answer[int(cut)%(len(answer)+1):]))
		pad := strings.Repeat("x", int(cut)%(2*tailSize))
		const usage = `,"usage":{"prompt_tokens":9,"input_tokens":9}`
		for _, said := range []string{
			fmt.Sprintf(`{"pad":"%s","choices":[{"message":{"content":%s}}]`, pad, text),
			fmt.Sprintf("data: {\"choices\":[{\"delta\":{\"content\":%s}}],\"pad\":\"%s\"}\n\ndata: {\"choices\":[{\"delta\":{\"content\":%s}}]", first, pad, second),
		} {
			if got, ok := usageOf(api, said+"}\n\n"); ok {
				t.Fatalf("%s says %+v", said, got)
			}
			if got, ok := usageOf(api, said+usage+"}\n\n"); !ok || got != (Usage{9, 0, false}) {
				t.Fatalf("%s hides it: %+v, %v", said, got, ok)
			}
			if got, ok := usageOf(api, said[:len(said)-int(cut)%len(text)]); ok {
				t.Fatalf("%s, cut off, says %+v", said, got)
			}
		}
	})
}

func TestTailAllocatesLittle(t *testing.T) {
	answer := []byte(recordedAnswer(t, "responses-stream"))
	tail := new(Tail)
	if n := testing.AllocsPerRun(100, func() {
		tail.Reset()
		for at := 0; at < len(answer); at += 50 {
			_, _ = tail.Write(answer[at:min(at+50, len(answer))])
		}
	}); n != 0 {
		t.Errorf("%v allocations for writing", n)
	}
	if n := testing.AllocsPerRun(100, func() { tail.Usage(Responses) }); n > 3 {
		t.Errorf("%v allocations for reading", n)
	}
}

func BenchmarkTailWrite(b *testing.B) {
	for _, size := range []int{16, 250, 4 << 10, 32 << 10} {
		b.Run(strconv.Itoa(size), func(b *testing.B) {
			p := make([]byte, size)
			var tail Tail
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				_, _ = tail.Write(p)
			}
		})
	}
}

func BenchmarkUsage(b *testing.B) {
	answers := map[string]string{}
	for _, name := range []string{"chat", "chat-stream", "chat-stream-usage", "chat-stream-usage-continuous", "messages", "messages-stream", "responses", "responses-stream"} {
		answers[name] = recordedAnswer(b, name)
	}
	answers["chat-long"] = strings.Replace(answers["chat"], "replica", strings.Repeat("replica ", 1000), 1)
	answers["chat-stream-nulls"] = strings.Repeat(`data: {"choices":[{"delta":{"content":"a"}}],"usage":null}`+"\n\n", 100)
	for name, answer := range answers {
		b.Run(name, func(b *testing.B) {
			api := recordedUsages[name].api
			if api == NoAPI {
				api = Chat
			}
			var tail Tail
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				tail.Reset()
				_, _ = tail.Write([]byte(answer))
				b.StartTimer()
				tail.Usage(api)
			}
		})
	}
}
