package replica

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// ids are the numbers at a path of an answer.
func ids(t *testing.T, body string, path ...string) []uint32 {
	t.Helper()
	list, ok := at(t, body, path...).([]any)
	if !ok {
		t.Fatalf("no %v in %s", path, body)
	}
	var tokens []uint32
	for _, v := range list {
		tokens = append(tokens, uint32(v.(float64)))
	}
	return tokens
}

// Tokenize and render give the ids that the engine uses, whichever way they are asked for.
func TestRenderedIDsAreThoseOfTheEngine(t *testing.T) {
	s := publishing(t, Config{ScaleOut: true, BlockSize: 4})
	tools := `,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]`
	for i, c := range []struct {
		path, body       string
		rendered         []string // where the ids are
		tokenized, saved bool     // tokenize takes the body; the answer has the ids
	}{
		{chatPath, chatBodyOf("hello there, one", tools), []string{"token_ids"}, true, true},
		{completePath, `{"prompt":"hello there, two"}`, []string{"0", "token_ids"}, true, true},
		{completePath, `{"prompt":[7,8,9,10,11,4000000000]}`, []string{"0", "token_ids"}, false, true},
		{completePath, `{"prompt":["x",  "three times hello there"]}`, []string{"1", "token_ids"}, false, false},
		{messagesPath, chatBodyOf("hello there, four", `,"max_tokens":3,"system":"be brief"`), []string{"token_ids"}, false, false},
		{responsesPath, `{"input":"hello there, five","instructions":"be brief"}`, []string{"token_ids"}, false, false},
	} {
		t.Run(fmt.Sprint(i, c.path), func(t *testing.T) {
			_, body := post(t, s, c.path+"/render", c.body)
			rendered := ids(t, body, c.rendered...)
			if c.tokenized {
				if _, body := post(t, s, "/tokenize", c.body); !slices.Equal(ids(t, body, "tokens"), rendered) {
					t.Errorf("tokenized %s", body)
				}
			}
			sub := subscribe(t, s, 0, "")
			_, body = post(t, s, c.path, strings.Replace(c.body, "{", `{"return_token_ids":true,`, 1))
			if c.saved {
				where := []string{"prompt_token_ids"}
				if c.path == completePath {
					where = []string{"choices", "0", "prompt_token_ids"}
				}
				if got := ids(t, body, where...); !slices.Equal(got, rendered) {
					t.Errorf("prefilled %v, rendered %v", got, rendered)
				}
			}
			want := BlockKeys(rendered, 4, "", "")
			eventually(t, "the blocks of what was rendered are stored", func() bool {
				var stored []uint64
				for _, m := range sub.all() {
					for _, e := range decodeBatch(t, m.payload).events {
						stored = append(stored, e.hashes...)
					}
				}
				return !slices.ContainsFunc(want, func(key uint64) bool { return !slices.Contains(stored, key) })
			})
		})
	}
}

func TestRenderNeedsScaleOut(t *testing.T) {
	s := start(t, Config{})
	for _, path := range []string{chatPath, completePath, messagesPath, responsesPath} {
		status, body := post(t, s, path+"/render", "{}")
		if status != 403 || at(t, body, "error", "type") != "PermissionDeniedError" {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	s = start(t, Config{ScaleOut: true})
	for body, want := range map[string]int{`{"messages":[],"model":"other"}`: 404, `{`: 400, `{}`: 400, `{"messages":[],"cache_salt":""}`: 400} {
		if status, answer := post(t, s, chatPath+"/render", body); status != want {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
}

func TestAdapters(t *testing.T) {
	s := start(t, Config{Model: "base", Adapters: "ad1, ad2"})
	_, models := get(t, s, "/v1/models")
	if len(at(t, models, "data").([]any)) != 3 || at(t, models, "data", "0", "parent") != nil || at(t, models, "data", "2", "id") != "ad2" ||
		at(t, models, "data", "2", "parent") != "base" || at(t, models, "data", "2", "max_model_len") != nil {
		t.Error(models)
	}
	for i, c := range []struct {
		model string
		hit   bool
	}{{"base", false}, {"ad1", false}, {"ad1", true}, {"ad2", false}, {"base", true}} {
		_, body := post(t, s, chatPath, chatBodyOf(long, fmt.Sprintf(`,"model":%q`, c.model)))
		if hit := at(t, body, "usage", "prompt_tokens_details", "cached_tokens") != 0.0; hit != c.hit || at(t, body, "model") != c.model {
			t.Errorf("request %d for %s: %s", i, c.model, body)
		}
	}
}

// Log probabilities of the prompt's own tokens need all of it to be computed.
func TestPromptLogprobsReadNoCache(t *testing.T) {
	s := start(t, Config{})
	complete := fmt.Sprintf(`{"prompt":%q,"max_tokens":1}`, long)
	with := func(body, field string) string { return strings.Replace(body, "{", "{"+field+",", 1) }
	chat := chatBodyOf(long, "")
	post(t, s, completePath, complete)
	post(t, s, chatPath, chat)
	for _, c := range []struct {
		path, body string
		status     int
		hit        bool
	}{
		{completePath, complete, 200, true},
		{completePath, with(complete, `"prompt_logprobs":0`), 200, false},
		{completePath, with(complete, `"echo":true,"logprobs":1`), 200, false},
		{completePath, with(complete, `"echo":true`), 200, true},
		{completePath, with(complete, `"logprobs":1`), 200, true},
		{completePath, with(complete, `"prompt_logprobs":null`), 200, true},
		{completePath, with(complete, `"prompt_logprobs":-2`), 400, false},
		{completePath, with(complete, `"prompt_logprobs":1,"stream":true`), 400, false},
		{chatPath, with(chat, `"prompt_logprobs":-1`), 200, false},
		{chatPath, with(chat, `"echo":true,"logprobs":true,"top_logprobs":2`), 200, false},
		{chatPath, with(chat, `"logprobs":true,"top_logprobs":2`), 200, true},
	} {
		status, body := post(t, s, c.path, c.body)
		if status != c.status || status == 200 && (at(t, body, "usage", "prompt_tokens_details", "cached_tokens") != 0.0) != c.hit {
			t.Errorf("%s: %d %s", c.body[:40], status, body)
		}
	}
}
