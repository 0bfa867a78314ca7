package prompt

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestParseTokenized(t *testing.T) {
	var p Parser
	for _, c := range []struct {
		answer  string
		want    []uint32
		unknown bool
	}{
		{`{"tokens":[1,2,3],"count":3,"token_strs":["a","b","c"]}`, []uint32{1, 2, 3}, false},
		{` { "token_ids" : [ 0 , 4294967295 ] , "features" : null } `, []uint32{0, 4294967295}, false},
		{`[{"token_ids":[7],"sampling_params":{"stop_token_ids":[],"token_ids":[8]}}]`, []uint32{7}, false},
		{`{"tok\u0065ns":[5]}`, []uint32{5}, false},
		{`{"tokens":[5],"tokens":[6,7]}`, []uint32{6, 7}, false},
		{`{"tokens":[5],"features":{}}`, []uint32{5}, false},
		{`{"tokens":[5],"features":{"mm_hashes":{},"mm_placeholders":null,"x":[]}}`, []uint32{5}, false},

		{`{"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{}},"token_ids":[5]}`, nil, true},
		{`{"token_ids":[5],"features":[1]}`, nil, true},
		{`{"token_ids":[5],"features":false}`, nil, true},
		{`[{"token_ids":[5]},{"token_ids":[6]}]`, nil, true},
		{`[{"token_ids":[5]},null]`, nil, true},

		{``, nil, false},
		{`null`, nil, false},
		{`[]`, nil, false},
		{`{}`, nil, false},
		{`[[{"tokens":[5]}]]`, nil, false},
		{`{"x":{"tokens":[5]}}`, nil, false},
		{`{"tokens":[]}`, nil, false},
		{`{"tokens":null}`, nil, false},
		{`{"tokens":"5"}`, nil, false},
		{`{"tokens":{"0":5}}`, nil, false},
		{`{"tokens":[[5]]}`, nil, false},
		{`{"tokens":[5,-1]}`, nil, false},
		{`{"tokens":[5,1.0]}`, nil, false},
		{`{"tokens":[5,4294967296]}`, nil, false},
		{`{"tokens":["5"]}`, nil, false},
		{`{"tokens":[5],"tokens":7}`, nil, false},
		{`{"tokens":[5]`, nil, false},
		{`{"tokens":[5]}}`, nil, false},
		{`{"tokens":[5]} x`, nil, false},
		{`[{"tokens":[5]}`, nil, false},
		{`<html>`, nil, false},
		{strings.Repeat("[", 200_000), nil, false},
		{`{"features":` + strings.Repeat("[", 200_000) + `}`, nil, false},
		{`{"tokens":[` + strings.Repeat("1,", MaxTokenIDs) + `1]}`, nil, false},
	} {
		got, err := p.ParseTokenized([]byte(c.answer))
		if !slices.Equal(got, c.want) || (err == nil) != (c.want != nil) || errors.Is(err, ErrUnknownPrompt) != c.unknown {
			t.Errorf("%.80s: %d, %v", c.answer, got, err)
		}
	}
}

// TestRecordedTokenizations has that every way of asking gives the ids that the engine has used.
func TestRecordedTokenizations(t *testing.T) {
	used := func(name string) (ids []uint32) {
		var answer struct {
			IDs []uint32 `json:"prompt_token_ids"`
		}
		if err := json.Unmarshal([]byte(recordedAnswer(t, name)), &answer); err != nil || answer.IDs == nil {
			t.Fatalf("%s: %v", name, err)
		}
		return answer.IDs
	}
	chat := used("chat-return-token-ids")
	for name, want := range map[string][]uint32{
		"render-chat":            chat,
		"render-messages":        chat,
		"tokenize-chat":          chat,
		"render-responses":       append([]uint32{1}, chat...), // one more token at the start
		"render-completions":     {1, 456, 418, 367, 289, 431},
		"tokenize-prompt":        {1, 456, 418, 367, 289, 431},
		"tokenize-prompt-strs":   {456, 418},
		"render-completions-two": nil,
	} {
		got, err := new(Parser).ParseTokenized([]byte(recordedAnswer(t, name)))
		if !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%s: %d, %v, want %d", name, got, err, want)
		}
	}
	rendered, err := new(Parser).ParseTokenized([]byte(recordedAnswer(t, "render-chat-tools")))
	tokenized, otherErr := new(Parser).ParseTokenized([]byte(recordedAnswer(t, "tokenize-chat-tools")))
	if err != nil || otherErr != nil || !slices.Equal(rendered, tokenized) || len(rendered) != 342 {
		t.Errorf("with tools: %d, %v and %d, %v", rendered, err, tokenized, otherErr)
	}
}

func BenchmarkParseTokenized(b *testing.B) {
	var ids []string
	for i := range 131_072 {
		ids = append(ids, fmt.Sprint(i*977%128_000))
	}
	answer := []byte(`{"request_id":"a","token_ids":[` + strings.Join(ids, ",") + `],"features":null}`)
	var p Parser
	b.SetBytes(int64(len(answer)))
	b.ReportAllocs()
	for b.Loop() {
		if got, err := p.ParseTokenized(answer); err != nil || len(got) != len(ids) {
			b.Fatal(len(got), err)
		}
	}
}
