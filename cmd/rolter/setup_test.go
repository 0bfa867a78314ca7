package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func TestCommonModel(t *testing.T) {
	serve := func(status int, body string) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(status)
			fmt.Fprint(w, body)
		}))
		t.Cleanup(server.Close)
		return server.URL
	}
	ab := serve(200, `{"data":[{"id":"a"},{"id":"b"}]}`)
	ca := serve(200, `{"data":[{"id":"c"},{"id":"a"}]}`)
	locked := serve(401, `{}`)
	bare := serve(200, `{"data":[]}`)
	for _, tc := range []struct {
		replicas []string
		want     string
	}{
		{[]string{ab, ca}, "a"},
		{[]string{ca, ab}, "--real " + ab + `: does not serve "c", which ` + ca + ` does, but ["a" "b"]`},
		{[]string{ab, locked}, "--real " + locked + ": /v1/models answered 401 Unauthorized"},
		{[]string{bare}, "--real " + bare + ": /v1/models names no model"},
	} {
		got, err := commonModel(t.Context(), tc.replicas)
		if err != nil {
			got = err.Error()
		}
		if got != tc.want {
			t.Errorf("got %s, want %s", got, tc.want)
		}
	}
}

func TestCaddyfile(t *testing.T) {
	s := &setup{model: "demo", replicas: []string{"http://127.0.0.1:8001", "http://127.0.0.1:8002"}, port: 8080, adminPort: 2019}
	want := `{
	admin localhost:2019
	log {
		level ERROR
	}
}

:8080 {
	rolter {
		provider vllm-1 http://127.0.0.1:8001
		provider vllm-2 http://127.0.0.1:8002
		route demo {
			strategy cache_aware
			target vllm-1
			target vllm-2
		}
	}
}
`
	if got := s.caddyfile("cache_aware"); got != want {
		t.Errorf("got\n%s", got)
	}
	for _, s := range []*setup{
		s,
		{model: `it's "odd" {x}\ #1`, replicas: s.replicas, host: "::1", port: 1, adminPort: 2, verbose: true},
	} {
		text := s.caddyfile("round_robin")
		if formatted := string(caddyfile.Format([]byte(text))); formatted != text {
			t.Errorf("not as caddy fmt writes it:\n%s", text)
		}
		if tokens, err := caddyfile.Tokenize([]byte(text), "Caddyfile"); err != nil || tokenAfter(tokens, "route") != s.model {
			t.Errorf("model %q became %q, %v", s.model, tokenAfter(tokens, "route"), err)
		}
	}
	if got := (&setup{host: "::1", port: 80}).url(); got != "http://[::1]:80" {
		t.Error(got)
	}
}

func tokenAfter(tokens []caddyfile.Token, text string) string {
	for i, token := range tokens[:len(tokens)-1] {
		if token.Text == text {
			return tokens[i+1].Text
		}
	}
	return ""
}
