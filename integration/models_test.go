package integration

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
)

func TestModels(t *testing.T) {
	stubs := newStubs(t, 1, nil)
	g := startGateway(t, "route {\n"+rolterFor(stubs, route("llama", "", stubs...), route("org/qwen-2.5", "", stubs...))+"respond \"next handler\" 418\n}\n")
	ask := func(t *testing.T, method, path, body string) reply {
		t.Helper()
		answer, err := do(testClient, newRequest(t.Context(), method, g.URL+path, strings.NewReader(body)))
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	type object struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		Created int64  `json:"created"`
		OwnedBy string `json:"owned_by"`
	}
	check := func(t *testing.T, o object, id string) {
		t.Helper()
		if o.ID != id || o.Object != "model" || o.Created <= 0 || o.OwnedBy == "" {
			t.Errorf("%+v is not the model %q", o, id)
		}
	}

	for _, path := range []string{"/v1/models", "/v1/models/", "/team/v1/models"} {
		t.Run("list "+path, func(t *testing.T) {
			answer := ask(t, http.MethodGet, path, "")
			var list struct {
				Object string   `json:"object"`
				Data   []object `json:"data"`
			}
			if err := json.Unmarshal([]byte(answer.body), &list); err != nil || answer.status != http.StatusOK || list.Object != "list" || len(list.Data) != 2 {
				t.Fatalf("%d %s, %v", answer.status, answer.body, err)
			}
			check(t, list.Data[0], "llama")
			check(t, list.Data[1], "org/qwen-2.5")
		})
	}
	for path, id := range map[string]string{
		"/v1/models/llama":            "llama",
		"/v1/models/org/qwen-2.5":     "org/qwen-2.5",
		"/v1/models/org%2Fqwen-2.5":   "org/qwen-2.5",
		"/team/v1/models/llama":       "llama",
		"/v1/models/llama?verbose=no": "llama",
	} {
		t.Run("one "+path, func(t *testing.T) {
			answer := ask(t, http.MethodGet, path, "")
			var one object
			if err := json.Unmarshal([]byte(answer.body), &one); err != nil || answer.status != http.StatusOK {
				t.Fatalf("%d %s, %v", answer.status, answer.body, err)
			}
			check(t, one, id)
		})
	}
	t.Run("head", func(t *testing.T) {
		if answer := ask(t, http.MethodHead, "/v1/models", ""); answer.status != http.StatusOK || answer.body != "" {
			t.Errorf("%d %q", answer.status, answer.body)
		}
	})

	for _, c := range []struct {
		name, method, path, body string
		status                   int
		code                     string
	}{
		{"no such model", http.MethodGet, "/v1/models/gpt", "", 404, "model_not_found"},
		{"a request for no such model", http.MethodPost, chatPath, asks("gpt", "hi"), 404, "model_not_found"},
		{"text completions for no such model", http.MethodPost, textPath, textBody("Llama", "hi"), 404, "model_not_found"}, // names are exact
		{"embeddings for no such model", http.MethodPost, "/v1/embeddings", `{"model":"","input":"hi"}`, 404, "model_not_found"},
		{"no model", http.MethodPost, chatPath, `{"messages":[]}`, 400, "missing_model"},
		{"GET of the API", http.MethodGet, chatPath, "", 405, "method_not_allowed"},
		{"DELETE of the API", http.MethodDelete, "/v1/messages", "", 405, "method_not_allowed"},
		{"PUT of the API", http.MethodPut, "/v1/responses", asks("llama", "hi"), 405, "method_not_allowed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			answer := ask(t, c.method, c.path, c.body)
			if code := wantOpenAIError(t, answer, c.status); code != c.code {
				t.Errorf("code %q, want %q", code, c.code)
			}
			if allow := answer.header.Get("Allow"); (allow == http.MethodPost) != (c.status == 405) {
				t.Errorf("Allow %q", allow)
			}
			if answer.target != "" {
				t.Errorf("a target is told: %q", answer.target)
			}
		})
	}
	if n := stubs[0].count(); n != 0 {
		t.Errorf("the engine received %d requests, want none", n)
	}
}

// One route, and no choice: a request without a model goes there, as an engine that serves one model takes it.
func TestNoModelWhereThereIsOneRoute(t *testing.T) {
	stubs := newStubs(t, 1, nil)
	g := startGateway(t, rolterFor(stubs, route("llama", "", stubs...)))
	for _, body := range []string{`{"messages":[{"role":"user","content":"hi"}]}`, `{"prompt":`, ""} {
		before := stubs[0].count()
		g.served(chatPath, body)
		if got := stubs[0].received()[before].body; got != body {
			t.Errorf("the engine received %q, want %q", got, body)
		}
	}
}

func TestNoTargetThatCanTakeTheRequest(t *testing.T) {
	stubs := newStubs(t, 2, nil)
	g := startGateway(t, rolterFor(stubs, route("m", "reverse_proxy {\nunhealthy_request_count 1\n}", stubs...), soleRoutes(stubs...)))
	for _, s := range stubs {
		free := g.occupy(s, 1)
		defer free()
	}
	before := total(counts(stubs))
	answer := g.post(chatPath, asks("m", "Is there room?"))
	wantOpenAIError(t, answer, http.StatusServiceUnavailable)
	if n := total(counts(stubs)) - before; n != 0 {
		t.Errorf("%d targets were asked, want none: all are full", n)
	}
}
