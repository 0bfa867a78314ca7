package prompt

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

func FuzzParse(f *testing.F) {
	recorded, err := filepath.Glob("testdata/*.req")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range recorded {
		raw, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		if i := bytes.IndexByte(raw, '{'); i >= 0 {
			for api := Chat; api <= Responses; api++ {
				f.Add(byte(api), raw[i:])
			}
		}
	}
	for _, s := range []string{
		`{"n":2,"priority":-7,"best_of":"3","pr\u0069ority":[{"priority":1}],"messages":[]}`,
		" { } ",
		`{"model":"a","messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"image"}]},{"text":"\ud83d\ude00","type":"text"}]}],"model":null}`,
		`{"input":[{"type":"function_call","name":"f","arguments":"{}"},{"type":"x"},{"summary":["a"],"type":"reasoning"}],"instructions":["b"],"tools":[{}]}`,
		`{"prompt":[[1234567,89],[3]],"cache_salt":"s"}`,
		`{"vllm_xargs":{"a":{"kv_cache_report_mode":1},"kv_cache_report\u005fmode":"full","kv_cache_report_mode":[]},"vllm_xargs":7,"echo":true,"logprobs":0,"prompt":"a"}`,
		`{"sampling_params":{"extra_args":{"kv_cache_report_mode":"full"}},"prompt_logprobs":null,"reasoning_effort":"low","messages":[{"role":"user","content":[{"type":"image_url"}]}]}`,
		"\uFEFF{\"prompt\":\"\xff\\ud800\"}",
	} {
		for api := Chat; api <= Responses; api++ {
			f.Add(byte(api), []byte(s))
		}
	}
	var reused Parser
	f.Fuzz(func(t *testing.T, api byte, body []byte) {
		before := bytes.Clone(body)
		var fresh Parser
		got := fresh.Parse(API(api%6), body)
		again := reused.Parse(API(api%6), body)
		if !bytes.Equal(before, body) {
			t.Fatal("the body has changed")
		}
		if !bytes.Equal(got.Text, again.Text) || got.Why != again.Why || got.Model != again.Model || !slices.Equal(got.ModelSpans, again.ModelSpans) || !slices.Equal(got.TokenIDs, again.TokenIDs) || got.Lead != again.Lead ||
			got.N != again.N || got.Priority != again.Priority || got.HasPriority != again.HasPriority || !slices.Equal(got.PrioritySpans, again.PrioritySpans) || got.Object != again.Object || got.Members != again.Members ||
			!slices.Equal(got.ReportModeSpans, again.ReportModeSpans) || !bytes.Equal(got.Salt, again.Salt) || got.PromptLogprobs != again.PromptLogprobs || got.Media != again.Media || got.RenderOnly != again.RenderOnly {
			t.Fatalf("reused parser: %+v, fresh one: %+v", again, got)
		}

		if (got.Text == nil) != (got.Why != HasPrompt) {
			t.Fatalf("%q with %q", got.Why, got.Text)
		}
		if got.Text != nil && (got.Lead < 0 || got.Tail < 0 || got.Lead+got.Tail >= len(got.Text)) {
			t.Fatalf("lead %d, tail %d of %d", got.Lead, got.Tail, len(got.Text))
		}
		if len(fresh.text) > headRoom+16*(len(body)+1) {
			t.Fatalf("%d bytes rendered of %d", len(fresh.text), len(body))
		}

		for _, spans := range [][]Span{got.ModelSpans, got.PrioritySpans, got.ReportModeSpans} {
			at := got.Object
			for _, s := range spans {
				if s.Start < at || s.End <= s.Start || s.End > len(body) {
					t.Fatalf("spans %d of %d", spans, len(body))
				}
				at = s.End
			}
		}
		if got.N < 1 || !got.HasPriority && got.Priority != 0 {
			t.Fatalf("n %d, priority %d", got.N, got.Priority)
		}

		plain := bytes.TrimPrefix(body, []byte("\uFEFF"))
		valid := json.Valid(plain)
		if valid == fresh.bad && (valid || strict(plain)) {
			t.Fatalf("valid %v, but %q", valid, got.Why)
		}
		if !valid {
			return
		}
		var top map[string]json.RawMessage
		if json.Unmarshal(plain, &top) != nil {
			return
		}
		if got.Members != (len(top) > 0) || (got.Object > 0) != (top != nil) {
			t.Fatalf("an object that begins at %d, with members: %v", got.Object, got.Members)
		}
		if top != nil && len(got.PrioritySpans) <= MaxModelSpans {
			priority, err := strconv.ParseInt(string(top["priority"]), 10, 64)
			if (err == nil) != got.HasPriority || err == nil && priority != got.Priority {
				t.Fatalf("priority %s, but %d", top["priority"], got.Priority)
			}
			stamped := stamp(body, got, -5)
			if b := new(Parser).Parse(API(api%6), stamped); !b.HasPriority || b.Priority != -5 || b.Why != got.Why || !bytes.Equal(b.Text, got.Text) || b.Model != got.Model {
				t.Fatalf("stamped %s: %+v", stamped, b)
			}
			if !json.Valid(bytes.TrimPrefix(stamped, []byte("\uFEFF"))) {
				t.Fatalf("stamped %s", stamped)
			}
			if n, err := strconv.Atoi(string(top["n"])); err == nil && n < 1<<31 && got.N < n {
				t.Fatalf("n %s, but %d", top["n"], got.N)
			}
		}
		if len(got.ReportModeSpans) <= MaxModelSpans && len(got.ModelSpans) <= MaxModelSpans && len(got.PrioritySpans) <= MaxModelSpans {
			neutral := []byte(splice(string(body), got.ReportModeSpans, "incremental"))
			if mode := reportMode(bytes.TrimPrefix(neutral, []byte("\uFEFF"))); mode != "" && mode != "incremental" {
				t.Fatalf("the engine reads %q in %s", mode, neutral)
			}
			if b := new(Parser).Parse(API(api%6), neutral); b.Why != got.Why || !bytes.Equal(b.Text, got.Text) || b.Model != got.Model || len(b.ReportModeSpans) != len(got.ReportModeSpans) {
				t.Fatalf("neutral %s: %+v", neutral, b)
			}
		}
		var model string
		raw, has := top["model"]
		has = has && raw[0] == '"'
		if has != got.HasModel {
			t.Fatalf("model %s, but %v", raw, got.HasModel)
		}
		if has && json.Unmarshal(raw, &model) == nil && utf8.ValidString(got.Model) && model != got.Model {
			t.Fatalf("model %q, want %q", got.Model, model)
		}
		if n := len(got.ModelSpans); n > 0 {
			if last := got.ModelSpans[n-1]; !bytes.Equal(body[last.Start:last.End], raw) {
				t.Fatalf("last span %s, want %s", body[last.Start:last.End], raw)
			}
			if !json.Valid([]byte(splice(string(plain), shift(got.ModelSpans, len(plain)-len(body)), "x"))) {
				t.Fatal("splicing breaks the body")
			}
		}
	})
}

// reportMode gives what an engine reads as "kv_cache_report_mode": the last one, as in Python's json.
func reportMode(body []byte) string {
	member := func(object json.RawMessage, key string) json.RawMessage {
		var m map[string]json.RawMessage
		if json.Unmarshal(object, &m) != nil {
			return nil
		}
		return m[key]
	}
	args := member(body, "vllm_xargs")
	if args == nil {
		args = member(member(body, "sampling_params"), "extra_args")
	}
	mode := member(args, "kv_cache_report_mode")
	var s string
	if mode != nil && json.Unmarshal(mode, &s) != nil {
		return string(mode)
	}
	return s
}

// strict tells that the body has nothing in which the parser is laxer than encoding/json.
func strict(body []byte) bool {
	return !bytes.ContainsFunc(body, func(r rune) bool { return r < ' ' }) && !bytes.Contains(body, []byte("NaN")) &&
		!bytes.Contains(body, []byte("Infinity")) && len(body) < 10_000 // deeper is invalid to encoding/json
}

func shift(spans []Span, by int) (out []Span) {
	for _, s := range spans {
		out = append(out, Span{s.Start + by, s.End + by})
	}
	return out
}

func FuzzParseTokenIDs(f *testing.F) {
	for _, s := range []string{"", "1", "1, 2,\t3", "4294967295,4294967296", "1,,2", "1,a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, header string) {
		got, err := ParseTokenIDs(nil, header)
		if strings.Trim(header, " \t") == "" {
			if err != nil || got != nil {
				t.Fatalf("%d, %v of an empty header", got, err)
			}
			return
		}
		var want []uint32
		for element := range strings.SplitSeq(header, ",") {
			element = strings.Trim(element, " \t")
			id, bad := strconv.ParseUint(element, 10, 32)
			if bad != nil {
				want = nil
				break
			}
			want = append(want, uint32(id))
		}
		if (err == nil) != (want != nil) || !slices.Equal(got, want) {
			t.Fatalf("%d, %v, want %d", got, err, want)
		}
	})
}

func FuzzParseTokenized(f *testing.F) {
	recorded, err := filepath.Glob("testdata/*.resp")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range recorded {
		raw, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		if _, answer, ok := bytes.Cut(raw, []byte("\r\n\r\n")); ok {
			f.Add(answer)
		}
	}
	for _, s := range []string{`[{"tokens":[1]},{}]`, `{"token_ids":[1],"features":{"a":{},"b":[]}}`, `{"tokens":[1],"tok\u0065ns":[[2]]}`, `{"tokens":"1"}`, `[[`} {
		f.Add([]byte(s))
	}
	var reused Parser
	f.Fuzz(func(t *testing.T, answer []byte) {
		var fresh Parser
		got, err := fresh.ParseTokenized(answer)
		if again, sameErr := reused.ParseTokenized(answer); !slices.Equal(got, again) || err != sameErr {
			t.Fatalf("reused parser: %d, %v, fresh one: %d, %v", again, sameErr, got, err)
		}
		if (err == nil) != (len(got) > 0) {
			t.Fatalf("%d, %v", got, err)
		}
		var one struct {
			Tokens   []uint32 `json:"tokens"`
			TokenIDs []uint32 `json:"token_ids"`
		}
		if !json.Valid(answer) || bytes.Contains(answer, []byte("okens")) && bytes.Contains(answer, []byte("oken_")) || bytes.Contains(answer, []byte("\\u")) {
			return
		}
		if json.Unmarshal(answer, &one) == nil && err == nil && !slices.Equal(got, one.Tokens) && !slices.Equal(got, one.TokenIDs) {
			t.Fatalf("%d of %+v", got, one)
		}
	})
}
