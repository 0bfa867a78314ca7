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
			got.N != again.N || got.Priority != again.Priority || got.HasPriority != again.HasPriority || !slices.Equal(got.PrioritySpans, again.PrioritySpans) || got.Object != again.Object || got.Members != again.Members {
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

		for _, spans := range [][]Span{got.ModelSpans, got.PrioritySpans} {
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
