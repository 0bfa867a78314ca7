package rolter

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rolter-ai/caddy-rolter/egress"
	"github.com/rolter-ai/caddy-rolter/prompt"
)

// teller is an engine that is asked for token ids.
type teller struct {
	*tokenSource
	mu    sync.Mutex
	asked []string // the paths
}

// newTeller starts an engine whose endpoints answer; the others are not there.
func newTeller(t testing.TB, endpoints map[string]http.HandlerFunc) *teller {
	e := new(teller)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.mu.Lock()
		e.asked = append(e.asked, r.URL.Path)
		e.mu.Unlock()
		if answer := endpoints[r.URL.Path]; answer != nil {
			answer(w, r)
			return
		}
		http.NotFound(w, r)
	}))
	t.Cleanup(server.Close)
	e.tokenSource = sourceOf(t, &Provider{Name: "vllm", APIBase: server.URL + "/v1"})
	return e
}

func sourceOf(t testing.TB, p *Provider) *tokenSource {
	t.Helper()
	if err := p.provision(egress.Policy{}); err != nil {
		t.Fatal(err)
	}
	return newTokenSource(p)
}

// paths are those that were asked since the last call.
func (e *teller) paths() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	asked := e.asked
	e.asked = nil
	return asked
}

// startTokenizer has a time-out that nothing runs into by accident.
func startTokenizer(t testing.TB) (*tokenizer, *outcomeLog) {
	outcomes := new(outcomeLog)
	tok := newTokenizer(egress.Policy{}, 30*time.Second, outcomes.add)
	t.Cleanup(tok.close)
	return tok, outcomes
}

type outcomeLog struct {
	mu  sync.Mutex
	all []tokenOutcome
}

func (o *outcomeLog) add(outcome tokenOutcome, _ time.Duration) {
	if !slices.Contains(tokenOutcomes, outcome) {
		panic(outcome)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all = append(o.all, outcome)
}

func (o *outcomeLog) take() []tokenOutcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.all
	o.all = nil
	return all
}

// wantTokens is a query for a body.
func wantTokens(api prompt.API, body string, engines ...*teller) *tokenQuery {
	b := &buffer{data: []byte(body)}
	b.refs.Store(1)
	var sources []*tokenSource
	for _, e := range engines {
		sources = append(sources, e.tokenSource)
	}
	return &tokenQuery{api: api, body: b, parts: [][]byte{b.data}, providers: from(sources...)}
}

func from(sources ...*tokenSource) func() []*tokenSource {
	return func() []*tokenSource { return sources }
}

func says(answer string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answer) }
}

func status(code int, answer string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		fmt.Fprint(w, answer)
	}
}

// recordedTokens is the answer of a real engine, and the ids in it.
func recordedTokens(t *testing.T, name string) (answer string, ids []uint32) {
	t.Helper()
	raw, err := os.ReadFile("prompt/testdata/" + name + ".resp")
	if err != nil {
		t.Fatal(err)
	}
	_, answer, _ = strings.Cut(string(raw), "\r\n\r\n")
	ids, err = new(prompt.Parser).ParseTokenized([]byte(answer))
	if err != nil {
		t.Fatal(name, err)
	}
	return answer, ids
}

func TestAsksTheEngineItsOwnWay(t *testing.T) {
	const forbidden = `{"error":{"message":"Scale-out endpoints are disabled.","code":403}}`
	chat, chatIDs := recordedTokens(t, "render-chat")
	tokenized, _ := recordedTokens(t, "tokenize-chat")
	responses, responseIDs := recordedTokens(t, "render-responses")
	completion, completionIDs := recordedTokens(t, "render-completions")
	rendering := map[string]http.HandlerFunc{
		"/v1/chat/completions/render": says(chat), "/v1/messages/render": says(chat), "/v1/responses/render": says(responses),
		"/v1/completions/render": says(completion), "/tokenize": says(`{"tokens":[1]}`),
	}
	plain := map[string]http.HandlerFunc{
		"/v1/chat/completions/render": status(403, forbidden), "/v1/messages/render": status(405, ""), "/v1/responses/render": status(501, ""),
		"/tokenize": says(tokenized),
	}
	for _, c := range []struct {
		name       string
		api        prompt.API
		renderOnly bool
		engine     map[string]http.HandlerFunc
		want       []uint32
		outcome    tokenOutcome
		first      []string // what is asked at first
		again      []string // and with the next body
	}{
		{"a chat", prompt.Chat, false, rendering, chatIDs, tokensAsked, []string{"/v1/chat/completions/render"}, []string{"/v1/chat/completions/render"}},
		{"messages", prompt.Messages, false, rendering, chatIDs, tokensAsked, []string{"/v1/messages/render"}, []string{"/v1/messages/render"}},
		{"responses", prompt.Responses, false, rendering, responseIDs, tokensAsked, []string{"/v1/responses/render"}, []string{"/v1/responses/render"}},
		{"a completion", prompt.Completions, false, rendering, completionIDs, tokensAsked, []string{"/v1/completions/render"}, []string{"/v1/completions/render"}},
		{"a chat without render", prompt.Chat, false, plain, chatIDs, tokensAsked, []string{"/v1/chat/completions/render", "/tokenize"}, []string{"/tokenize"}},
		{"a completion without render", prompt.Completions, false, plain, chatIDs, tokensAsked, []string{"/v1/completions/render", "/tokenize"}, []string{"/tokenize"}},
		{"a chat that only render knows", prompt.Chat, true, plain, nil, tokensUnavailable, []string{"/v1/chat/completions/render"}, nil},
		{"messages without render", prompt.Messages, false, plain, nil, tokensUnavailable, []string{"/v1/messages/render"}, nil},
		{"responses without render", prompt.Responses, false, plain, nil, tokensUnavailable, []string{"/v1/responses/render"}, nil},
		{"an engine with nothing", prompt.Chat, false, nil, nil, tokensUnavailable, []string{"/v1/chat/completions/render", "/tokenize"}, nil},
		{"no API with a prompt", prompt.Other, false, rendering, nil, tokensUnavailable, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			tok, outcomes := startTokenizer(t)
			e := newTeller(t, c.engine)
			for i, asks := range [][]string{c.first, c.again} {
				q := wantTokens(c.api, fmt.Sprint(`{"seed":`, i, `}`), e)
				q.renderOnly = c.renderOnly
				if ids := tok.ids(t.Context(), q); !slices.Equal(ids, c.want) {
					t.Errorf("%d, want %d", ids, c.want)
				}
				if got := outcomes.take(); !slices.Equal(got, []tokenOutcome{c.outcome}) {
					t.Errorf("%q, want %q", got, c.outcome)
				}
				if got := e.paths(); !slices.Equal(got, asks) {
					t.Errorf("asked %q, want %q", got, asks)
				}
			}
		})
	}
}

func TestAbsentEndpointsAreAskedAgain(t *testing.T) {
	tok, _ := startTokenizer(t)
	now := time.Now()
	tok.now = func() time.Time { return now }
	e := newTeller(t, nil)
	asks := func() bool {
		tok.ids(t.Context(), wantTokens(prompt.Messages, `{}`, e))
		return len(e.paths()) > 0
	}
	for i, want := range []bool{true, false, true, false} {
		if got := asks(); got != want {
			t.Errorf("%d: asks %v", i, got)
		}
		if i == 1 {
			now = now.Add(tokenAbsence)
		}
	}
	e.forget()
	if !asks() {
		t.Error("not asked after a restart")
	}
}

func TestSendsTheBodyThatGoesUpstream(t *testing.T) {
	var got string
	var header http.Header
	keep := func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got, header = fmt.Sprintf("%s, %d", b, r.ContentLength), r.Header
		fmt.Fprint(w, `{"token_ids":[5]}`)
	}
	e := newTeller(t, map[string]http.HandlerFunc{"/v1/chat/completions/render": keep})
	tok, _ := startTokenizer(t)

	q := wantTokens(prompt.Chat, `{"model":"alias","x":1}`, e)
	q.parts = [][]byte{q.body.data[:9], []byte(`"llama"`), q.body.data[16:]}
	q.authorization = []string{"Bearer of-client"}
	tok.ids(t.Context(), q)
	if want := `{"model":"llama","x":1}, 23`; got != want || header.Get("Authorization") != "Bearer of-client" || header.Get("Content-Type") != "application/json" {
		t.Errorf("%s, want %s, %v", got, want, header)
	}
	if header["Idempotency-Key"] != nil {
		t.Errorf("sent %v", header)
	}

	e.apiKey = "of-provider"
	q.body.data[18] = 'y'
	tok.ids(t.Context(), q)
	if header.Get("Authorization") != "Bearer of-provider" {
		t.Errorf("%v", header)
	}
	if refs := q.body.refs.Load(); refs != 1 {
		t.Errorf("%d references to the body", refs)
	}
}

func TestPathsOfAProvider(t *testing.T) {
	for base, want := range map[string][2]string{
		"http://gpu-1:8000":       {"http://gpu-1:8000/v1/chat/completions/render", "http://gpu-1:8000/tokenize"},
		"https://gpu-1/v1/":       {"https://gpu-1:443/v1/chat/completions/render", "https://gpu-1:443/tokenize"},
		"http://gpu-1:8000/at":    {"http://gpu-1:8000/at/v1/chat/completions/render", "http://gpu-1:8000/at/tokenize"},
		"http://[::1]:8000/at/v1": {"http://[::1]:8000/at/v1/chat/completions/render", "http://[::1]:8000/at/tokenize"},
	} {
		s := sourceOf(t, &Provider{Name: "a", APIBase: base})
		if got := [2]string{s.urls[renderChat].String(), s.urls[plainTokenize].String()}; got != want {
			t.Errorf("%s: %q", base, got)
		}
	}
}

func TestAnswersThatAreNone(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a redirect was followed") }))
	defer elsewhere.Close()
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   tokenOutcome
	}{
		"has failed":          {status(500, `{"token_ids":[5]}`), tokensFailed},
		"is full":             {status(503, ""), tokensFailed},
		"has had enough":      {status(429, ""), tokensFailed},
		"says something else": {status(204, ""), tokensFailed},
		"redirects": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
		}, tokensFailed},
		"says it in HTML":    {says("<html>"), tokensFailed},
		"says nothing":       {says(""), tokensFailed},
		"has other ids":      {says(`{"token_ids":[5,-1]}`), tokensFailed},
		"has ids as strings": {says(`{"token_ids":["5"]}`), tokensFailed},
		"has no ids":         {says(`{"token_ids":[]}`), tokensFailed},
		"says too much":      {func(w http.ResponseWriter, _ *http.Request) { io.CopyN(w, zeros{}, maxTokenAnswer+2) }, tokensFailed},
		"breaks off": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "99")
			fmt.Fprint(w, `{"token_ids":[5]}`)
		}, tokensFailed},
		"hangs up":              {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, tokensFailed},
		"is no HTTP":            {hijack("SSH-2.0-OpenSSH\r\n"), tokensFailed},
		"has endless headers":   {hijack("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 128<<10)), tokensFailed},
		"does not like it":      {status(400, `{"error":{"message":"too long"}}`), tokensRefused},
		"wants a key":           {status(401, ""), tokensRefused},
		"does not know it":      {status(404, "{\"error\":{\"message\":\"The model `llama` does not exist.\",\"type\":\"NotFoundError\"}}"), tokensRefused},
		"has an image":          {says(`{"token_ids":[5],"features":{"mm_hashes":{"image":["a"]}}}`), tokensUnknown},
		"sees several prompts":  {says(`[{"token_ids":[5]},{"token_ids":[6]}]`), tokensUnknown},
		"answers all the same":  {says(`{"token_ids":[4294967295],"features":{}}`), tokensAsked},
		"answers with an array": {says(`[{"token_ids":[4294967295]}]`), tokensAsked},
	} {
		t.Run(name, func(t *testing.T) {
			tok, outcomes := startTokenizer(t)
			e := newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": c.answer})
			ids := tok.ids(t.Context(), wantTokens(prompt.Messages, `{}`, e))
			if got := outcomes.take(); !slices.Equal(got, []tokenOutcome{c.want}) || (ids != nil) != (c.want == tokensAsked) {
				t.Errorf("an engine that %s: %q, %d", name, got, ids)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

// hijack answers with raw bytes, and then with silence.
func hijack(raw string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, raw)
	}
}

// stuck is an engine that does not answer before the test ends.
func stuck(t *testing.T) (e *teller, asked chan struct{}) {
	asked, over := make(chan struct{}, 100), make(chan struct{})
	e = newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": func(http.ResponseWriter, *http.Request) {
		asked <- struct{}{}
		<-over
	}})
	t.Cleanup(func() { close(over) }) // before the server is closed, which waits
	return e, asked
}

func TestAnswersThatComeLate(t *testing.T) {
	tok, outcomes := startTokenizer(t)
	tok.timeout = 20 * time.Millisecond
	e, _ := stuck(t)
	if ids := tok.ids(t.Context(), wantTokens(prompt.Messages, `{}`, e)); ids != nil {
		t.Errorf("%d", ids)
	}
	if got := outcomes.take(); !slices.Equal(got, []tokenOutcome{tokensTimedOut}) {
		t.Errorf("%q", got)
	}
	if newTokenizer(egress.Policy{}, 0, nil).timeout != defaultTokenTimeout {
		t.Error("no default")
	}
}

func TestClientsThatGo(t *testing.T) {
	tok, outcomes := startTokenizer(t)
	e, asked := stuck(t)
	for range 2 * tokenFailures { // it does not count against the engine
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-asked; cancel() }()
		tok.ids(ctx, wantTokens(prompt.Messages, `{}`, e))
		if got := outcomes.take(); !slices.Equal(got, []tokenOutcome{tokensCancelled}) {
			t.Errorf("%q", got)
		}
	}
}

func TestAnEngineThatFailsRests(t *testing.T) {
	tok, outcomes := startTokenizer(t)
	now := time.Now()
	tok.now = func() time.Time { return now }
	var failing atomic.Bool
	failing.Store(true)
	e := newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": func(w http.ResponseWriter, r *http.Request) {
		if failing.Load() {
			w.WriteHeader(500)
			return
		}
		fmt.Fprint(w, `{"token_ids":[5]}`)
	}})
	body := 0
	ask := func(want tokenOutcome) {
		t.Helper()
		body++
		tok.ids(t.Context(), wantTokens(prompt.Messages, fmt.Sprint(body), e))
		if got := outcomes.take(); !slices.Equal(got, []tokenOutcome{want}) {
			t.Fatalf("%q, want %q", got, want)
		}
	}
	for range tokenFailures {
		ask(tokensFailed)
	}
	for rest := tokenRest; rest < 2*maxTokenRest; rest *= 2 {
		ask(tokensResting)
		now = now.Add(min(rest, maxTokenRest) - 1)
		ask(tokensResting)
		now = now.Add(1)
		ask(tokensFailed) // one tries it out
	}
	now = now.Add(maxTokenRest)
	failing.Store(false)
	ask(tokensAsked)
	failing.Store(true)
	for range tokenFailures {
		ask(tokensFailed)
	}
	ask(tokensResting)
	now = now.Add(tokenRest) // as short as at first
	failing.Store(false)
	ask(tokensAsked)
	ask(tokensAsked)

	failing.Store(true)
	for range tokenFailures {
		ask(tokensFailed)
	}
	e.forget()
	ask(tokensFailed)
}

func TestBreaker(t *testing.T) {
	now := time.Now()
	open := func() *tokenBreaker {
		b := new(tokenBreaker)
		for range tokenFailures {
			b.begin(now)
			b.end(false, tokensTimedOut, now)
		}
		return b
	}
	t.Run("failures that were on their way", func(t *testing.T) {
		b := open()
		for range 50 {
			b.end(false, tokensFailed, now)
		}
		if _, ok := b.begin(now.Add(tokenRest)); !ok {
			t.Errorf("rests for %s", b.rest)
		}
	})
	t.Run("one tries it out", func(t *testing.T) {
		b := open()
		now := now.Add(tokenRest)
		if probe, ok := b.begin(now); !probe || !ok {
			t.Error("nobody does")
		}
		if _, ok := b.begin(now); ok {
			t.Error("two do")
		}
		b.end(true, tokensCancelled, now)
		if probe, ok := b.begin(now); !probe || !ok {
			t.Error("nobody does after a client that went")
		}
	})
	t.Run("failures that are not in a row", func(t *testing.T) {
		b := new(tokenBreaker)
		for range 10 {
			for range tokenFailures - 1 {
				b.end(false, tokensFailed, now)
			}
			b.end(false, tokensRefused, now)
		}
		if _, ok := b.begin(now); !ok {
			t.Error("rests")
		}
	})
}

func TestLongBodiesFailByThemselves(t *testing.T) {
	tok, outcomes := startTokenizer(t)
	e := newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength >= longTokenBody {
			w.WriteHeader(500)
			return
		}
		fmt.Fprint(w, `{"token_ids":[5]}`)
	}})
	for i := range 2 * tokenFailures {
		tok.ids(t.Context(), wantTokens(prompt.Messages, fmt.Sprint(i, strings.Repeat(" ", longTokenBody)), e))
	}
	want := slices.Concat(slices.Repeat([]tokenOutcome{tokensFailed}, tokenFailures), slices.Repeat([]tokenOutcome{tokensResting}, tokenFailures))
	if got := outcomes.take(); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if ids := tok.ids(t.Context(), wantTokens(prompt.Messages, `{}`, e)); ids == nil {
		t.Error("a short body is not asked for")
	}
}

func TestAsksOneProvider(t *testing.T) {
	tok, outcomes := startTokenizer(t)
	failing := newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": status(500, "")})
	without := newTeller(t, nil)
	answering := newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": says(`{"token_ids":[5]}`)})
	engines := []*teller{failing, without, answering}
	body := 0
	ask := func(engines ...*teller) []int {
		body++
		tok.ids(t.Context(), wantTokens(prompt.Messages, fmt.Sprint(body), engines...))
		return []int{len(failing.paths()), len(without.paths()), len(answering.paths())}
	}
	for i, want := range [][]int{{1, 0, 0}, {1, 0, 0}, {1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {0, 0, 1}} {
		if got := ask(engines...); !slices.Equal(got, want) {
			t.Errorf("%d: asked %d, want %d", i, got, want)
		}
	}
	outcomes.take()
	ask(failing, without)
	ask(without)
	ask()
	if got, want := outcomes.take(), []tokenOutcome{tokensResting, tokensUnavailable, tokensUnavailable}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

func TestTheSameBodyIsAskedForOnce(t *testing.T) {
	tok, outcomes := startTokenizer(t)
	asked, answer := make(chan struct{}, 10), make(chan struct{})
	e := newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": func(w http.ResponseWriter, _ *http.Request) {
		asked <- struct{}{}
		<-answer
		fmt.Fprint(w, `{"token_ids":[5,6]}`)
	}})
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			if ids := tok.ids(t.Context(), wantTokens(prompt.Messages, `{}`, e)); !slices.Equal(ids, []uint32{5, 6}) {
				t.Errorf("%d", ids)
			}
		})
	}
	<-asked
	close(answer)
	group.Wait()
	if len(asked) > 0 {
		t.Error("asked again")
	}
	tok.ids(t.Context(), wantTokens(prompt.Messages, `{}`, e))
	got := outcomes.take()
	slices.Sort(got)
	if want := append([]tokenOutcome{tokensAsked}, slices.Repeat([]tokenOutcome{tokensCached}, 20)...); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	tok.forget()
	if tok.ids(t.Context(), wantTokens(prompt.Messages, `{}`, e)); len(asked) != 1 {
		t.Error("not asked after it was forgotten")
	}
}

// TestAnotherClientTakesOver has one client ask, a second wait for it, and the first one go.
func TestAnotherClientTakesOver(t *testing.T) {
	tok, outcomes := startTokenizer(t)
	asked, answer := make(chan struct{}), make(chan struct{})
	e := newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": func(w http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		select {
		case <-answer:
			fmt.Fprint(w, `{"token_ids":[5]}`)
		case <-r.Context().Done():
		}
	}})
	ctx, cancel := context.WithCancel(t.Context())
	var first, second sync.WaitGroup
	first.Go(func() { tok.ids(ctx, wantTokens(prompt.Messages, `{}`, e)) })
	<-asked
	second.Go(func() {
		if ids := tok.ids(t.Context(), wantTokens(prompt.Messages, `{}`, e)); !slices.Equal(ids, []uint32{5}) {
			t.Errorf("%d", ids)
		}
	})
	cancel()
	first.Wait()
	<-asked
	close(answer)
	second.Wait()
	if got, want := outcomes.take(), []tokenOutcome{tokensCancelled, tokensAsked}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

func TestTokenKeys(t *testing.T) {
	whole := &tokenQuery{api: prompt.Chat, parts: [][]byte{[]byte("abcdef")}}
	if other := (&tokenQuery{api: prompt.Chat, parts: [][]byte{[]byte("abc"), nil, []byte("def")}}); whole.key() != other.key() {
		t.Error("the same body in other parts has another key")
	}
	for _, other := range []*tokenQuery{{api: prompt.Messages, parts: whole.parts}, {api: prompt.Chat, parts: [][]byte{[]byte("abcdeg")}}} {
		if whole.key() == other.key() {
			t.Errorf("%v has the same key", other)
		}
	}
}

func TestTokenCacheIsBounded(t *testing.T) {
	now := time.Now()
	var c tokenCache
	for i := range uint64(3 * maxTokenEntries) {
		c.put(tokenKey{i}, []uint32{1}, now)
		c.get(tokenKey{0}, now)
	}
	if len(c.byKey) != maxTokenEntries || c.latest.Len() != maxTokenEntries {
		t.Errorf("%d entries", len(c.byKey))
	}
	if c.get(tokenKey{0}, now) == nil || c.get(tokenKey{1}, now) != nil {
		t.Error("not the one that was used last has stayed")
	}
	big := make([]uint32, maxTokenBytes/16)
	for i := range uint64(20) {
		c.put(tokenKey{i}, big, now)
		c.put(tokenKey{i}, big, now)
	}
	if c.bytes > maxTokenBytes || len(c.byKey) != 3 {
		t.Errorf("%d bytes in %d entries", c.bytes, len(c.byKey))
	}
	if c.get(tokenKey{19}, now.Add(tokenLifetime-1)) == nil || c.get(tokenKey{19}, now.Add(tokenLifetime)) != nil {
		t.Error("an answer does not stay right for ever")
	}
	for _, key := range []uint64{17, 18} {
		c.get(tokenKey{key}, now.Add(tokenLifetime))
	}
	if c.bytes != 0 || len(c.byKey) != 0 || c.latest.Len() != 0 {
		t.Errorf("%d bytes in %d entries", c.bytes, len(c.byKey))
	}
}

func TestATokenizerKeepsToTheEgressPolicy(t *testing.T) {
	var outcomes outcomeLog
	tok := newTokenizer(egress.Policy{BlockLoopback: true}, 30*time.Second, outcomes.add)
	defer tok.close()
	e := newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": says(`{"token_ids":[5]}`)})
	if ids := tok.ids(t.Context(), wantTokens(prompt.Messages, `{}`, e)); ids != nil || len(e.paths()) > 0 {
		t.Errorf("%d", ids)
	}
	if got := outcomes.take(); !slices.Equal(got, []tokenOutcome{tokensFailed}) {
		t.Errorf("%q", got)
	}
}

// TestConnectionsThatAreClosedMeanwhile has an engine that closes each connection instead of answering a second time over it.
func TestConnectionsThatAreClosedMeanwhile(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				requests := bufio.NewReader(conn)
				for i := range 2 {
					r, err := http.ReadRequest(requests)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, r.Body)
					if i == 0 {
						fmt.Fprint(conn, "HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{\"token_ids\":[5]}")
					}
				}
			}()
		}
	}()
	tok, _ := startTokenizer(t)
	s := sourceOf(t, &Provider{Name: "a", APIBase: "http://" + listener.Addr().String()})
	for i := range 10 {
		q := wantTokens(prompt.Messages, fmt.Sprint(i))
		q.providers = from(s)
		if ids := tok.ids(t.Context(), q); ids == nil {
			t.Errorf("%d: none", i)
		}
	}
}

func TestNothingIsLeftOfATokenizer(t *testing.T) {
	e, asked := stuck(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts and says nothing, as far as TLS goes
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	quick := newTeller(t, map[string]http.HandlerFunc{"/v1/messages/render": says(`{"token_ids":[5]}`)})
	before := runtime.NumGoroutine()

	var outcomes outcomeLog
	tok := newTokenizer(egress.Policy{}, 30*time.Second, outcomes.add)
	tok.ids(t.Context(), wantTokens(prompt.Messages, `{"a":1}`, quick))
	var group sync.WaitGroup
	for i := range 10 {
		group.Go(func() { tok.ids(t.Context(), wantTokens(prompt.Messages, fmt.Sprint(i/2), e)) })
	}
	tls := wantTokens(prompt.Messages, `{"tls":1}`)
	tls.providers = from(sourceOf(t, &Provider{Name: "a", APIBase: "https://" + silent.Addr().String()}))
	group.Go(func() { tok.ids(t.Context(), tls) })
	for range 5 {
		<-asked
	}
	tok.close()
	tok.close()
	group.Wait()
	tok.ids(t.Context(), wantTokens(prompt.Messages, `{"b":1}`, quick))
	for _, outcome := range outcomes.take()[1:] {
		if outcome != tokensCancelled {
			t.Errorf("%q", outcome)
		}
	}
	waitFor(t, "goroutines to end", func() bool {
		tok.transport.CloseIdleConnections()
		return runtime.NumGoroutine() <= before+5 // the engine's own, of requests that it has not ended
	})
}

func TestManyAskAtOnce(t *testing.T) {
	tok, outcomes := startTokenizer(t)
	tok.timeout = 5 * time.Second
	var n atomic.Int64
	e := newTeller(t, map[string]http.HandlerFunc{"/v1/chat/completions/render": status(403, ""), "/tokenize": func(w http.ResponseWriter, r *http.Request) {
		var body struct{ ID uint32 }
		if json.NewDecoder(r.Body).Decode(&body) != nil || n.Add(1)%7 == 0 {
			w.WriteHeader(500)
			return
		}
		fmt.Fprintf(w, `{"tokens":[%d]}`, body.ID)
	}})
	var group sync.WaitGroup
	for i := range 400 {
		group.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if i%5 == 0 {
				go cancel()
			}
			id := uint32(i % 50)
			if ids := tok.ids(ctx, wantTokens(prompt.Chat, fmt.Sprintf(`{"id":%d}`, id), e)); ids != nil && !slices.Equal(ids, []uint32{id}) {
				t.Errorf("%d for %d", ids, id)
			}
			switch i % 100 {
			case 50:
				tok.forget()
			case 51:
				e.forget()
			}
		})
	}
	group.Wait()
	if got := outcomes.take(); len(got) != 400 {
		t.Errorf("%d outcomes", len(got))
	}
	if len(tok.flights) > 0 {
		t.Errorf("%d are still asked for", len(tok.flights))
	}
}

func BenchmarkTokensCached(b *testing.B) {
	tok, _ := startTokenizer(b)
	tok.observe = nil
	e := newTeller(b, map[string]http.HandlerFunc{"/v1/messages/render": says(`{"token_ids":[5]}`)})
	q := wantTokens(prompt.Messages, strings.Repeat("x", 64<<10), e)
	tok.ids(b.Context(), q)
	b.SetBytes(q.length())
	b.ReportAllocs()
	for b.Loop() {
		if tok.ids(b.Context(), q) == nil {
			b.Fatal("not cached")
		}
	}
}

// forget forgets all answers.
func (t *tokenizer) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.answers = tokenCache{}
}
