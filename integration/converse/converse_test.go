package converse

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// engine is a chat completions endpoint that answers "Answer N." to a conversation with N turns.
type engine struct {
	mu       sync.Mutex
	requests []engineRequest
	// hook, where set, may answer a request itself and then says true.
	hook func(w http.ResponseWriter, r *http.Request, turn int) bool
}

type engineRequest struct {
	Model         string    `json:"model"`
	Messages      []message `json:"messages"`
	MaxTokens     int       `json:"max_tokens"`
	Stream        bool      `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var req engineRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	e.mu.Lock()
	e.requests = append(e.requests, req)
	e.mu.Unlock()
	turn := len(req.Messages)/2 - 1
	w.Header().Set("x-rolter-target", fmt.Sprintf("vllm-%d", turn%2+1))
	if e.hook != nil && e.hook(w, r, turn) {
		return
	}
	fmt.Fprint(w, ": a comment\n\n")
	fmt.Fprint(w, `data: {"choices":[{"delta":{"role":"assistant","content":""}}]}`+"\n\n")
	for _, piece := range []string{"Answer ", fmt.Sprint(turn), "."} {
		fmt.Fprintf(w, `data: {"choices":[{"delta":{"content":%q}}]}`+"\n\n", piece)
	}
	fmt.Fprint(w, `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}`+"\n\n")
	fmt.Fprintf(w, `data: {"choices":[],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":%d}}}`+"\n\n", 10*turn)
	fmt.Fprint(w, "data: [DONE]\n\n")
}

func script(turns ...int) []Conversation {
	var list []Conversation
	for i, n := range turns {
		c := Conversation{System: fmt.Sprint("System ", i)}
		for t := range n {
			c.Turns = append(c.Turns, Turn{Text: fmt.Sprint("Question ", t), Think: time.Hour})
		}
		list = append(list, c)
	}
	return list
}

func start(t *testing.T, e *engine) *Player {
	server := httptest.NewServer(e)
	t.Cleanup(server.Close)
	return &Player{BaseURL: server.URL, Model: "m", MaxTokens: 7}
}

func TestHistoryGrowsByWhatWasReceived(t *testing.T) {
	e := &engine{}
	p := start(t, e)
	p.Salt = "salted"
	var seen []string
	p.Progress = func(done, total int) { seen = append(seen, fmt.Sprint(done, "/", total)) }

	results := p.Play(t.Context(), script(3))

	if want := []string{"1/3", "2/3", "3/3"}; !slices.Equal(seen, want) {
		t.Errorf("progress %v, want %v", seen, want)
	}
	if len(results) != 3 || len(e.requests) != 3 {
		t.Fatalf("%d results of %d requests, want 3", len(results), len(e.requests))
	}
	want := []message{
		{"system", "salted\nSystem 0"},
		{"user", "Question 0"}, {"assistant", "Answer 0."},
		{"user", "Question 1"}, {"assistant", "Answer 1."},
		{"user", "Question 2"},
	}
	last := e.requests[2]
	if !slices.Equal(last.Messages, want) {
		t.Errorf("third request %v, want %v", last.Messages, want)
	}
	if !last.Stream || !last.StreamOptions.IncludeUsage || last.Model != "m" || last.MaxTokens != 7 {
		t.Errorf("request %+v", last)
	}
	for i, r := range results {
		if r.Err != nil || r.Turn != i || r.Target != fmt.Sprintf("vllm-%d", i%2+1) ||
			r.PromptTokens != 100 || r.CachedTokens != 10*i || !r.CachedReported || r.FirstToken <= 0 {
			t.Errorf("result %d: %+v", i, r)
		}
	}
}

func TestFirstTokenIsTheFirstTextOrTheEnd(t *testing.T) {
	for _, field := range []string{"content", "reasoning", "reasoning_content", "nothing"} {
		const delay = 50 * time.Millisecond
		p := start(t, &engine{hook: func(w http.ResponseWriter, _ *http.Request, _ int) bool {
			fmt.Fprint(w, `data: {"choices":[{"delta":{"role":"assistant","content":""}}]}`+"\n\n")
			w.(http.Flusher).Flush()
			time.Sleep(delay) // what is measured, not a synchronisation
			fmt.Fprintf(w, `data: {"choices":[{"delta":{%q:"x"},"finish_reason":"length"}]}`+"\n\ndata: [DONE]\n\n", field)
			return true
		}})
		results := p.Play(t.Context(), script(1))
		if results[0].Err != nil || results[0].FirstToken < delay {
			t.Errorf("%s: %+v, want a first token after %s", field, results[0], delay)
		}
	}
}

func TestFailuresAreCountedAndEndTheConversation(t *testing.T) {
	for name, tc := range map[string]struct {
		answer func(w http.ResponseWriter)
		want   string
	}{
		"status": {func(w http.ResponseWriter) { http.Error(w, "all full", http.StatusServiceUnavailable) }, "status 503: all full"},
		"error event": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `data: {"error":{"message":"queue full","code":503}}`+"\n\ndata: [DONE]\n\n")
		}, "error in the stream: queue full"},
		"truncated": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `data: {"choices":[{"delta":{"content":"x"}}]}`+"\n\n")
		}, "the stream ended before [DONE]"},
		"aborted": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `data: {"choices":[{"delta":{"content":"x"},"finish_reason":"abort"}]}`+"\n\ndata: [DONE]\n\n")
		}, "the engine aborted the answer"},
		"empty":   {func(w http.ResponseWriter) { fmt.Fprint(w, "data: [DONE]\n\n") }, "the answer has no finish_reason"},
		"garbage": {func(w http.ResponseWriter) { fmt.Fprint(w, "data: {\n\n") }, "unreadable event in the stream: unexpected end of JSON input"},
		"cut":     {func(w http.ResponseWriter) { w.(http.Flusher).Flush(); panic(http.ErrAbortHandler) }, "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, &engine{hook: func(w http.ResponseWriter, _ *http.Request, turn int) bool {
				if turn == 1 {
					tc.answer(w)
				}
				return turn == 1
			}})
			var done, total int
			p.Progress = func(d, t int) { done, total = d, t }
			s := Summarize(p.Play(t.Context(), script(1, 4)))
			want := Summary{
				Requests: 3, Errors: 1, PromptTokens: 200, CachedReported: true, FirstToken: s.FirstToken,
				ByReplica: map[string]int{"vllm-1": 2}, ErrorTexts: map[string]int{tc.want: 1},
			}
			if !reflect.DeepEqual(s, want) {
				t.Errorf("summary %+v, want %+v", s, want)
			}
			if done != 5 || total != 5 {
				t.Errorf("progress ended at %d of %d, want 5 of 5", done, total)
			}
		})
	}
}

func TestCancelStopsAtOnceWithoutErrors(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	p := start(t, &engine{hook: func(_ http.ResponseWriter, r *http.Request, turn int) bool {
		if turn == 1 { // the longer conversation's second request hangs
			cancel()
			<-r.Context().Done()
		}
		return turn == 1
	}})
	conversations := script(2, 1)
	conversations[1].Start = time.Hour // and the other one waits
	conversations[0].Turns[1].Think = 0
	conversations[0].Turns[0].Think = 0
	p.Pace = 1
	if results := p.Play(ctx, conversations); len(results) != 1 || results[0].Err != nil {
		t.Errorf("results %+v, want the one complete answer", results)
	}
}

func TestGenerate(t *testing.T) {
	list := Generate(1, 40, 6)
	if !reflect.DeepEqual(list, Generate(1, 40, 6)) {
		t.Error("the same seed gives different conversations")
	}
	if reflect.DeepEqual(list, Generate(2, 40, 6)) {
		t.Error("another seed gives the same conversations")
	}
	systems, long := map[string]int{}, 0
	for _, c := range list {
		systems[c.System]++
		if len(c.System) < 2000 || len(c.System) > 4096 {
			t.Errorf("a system prompt of %d bytes", len(c.System))
		}
		if strings.ContainsAny(c.System+c.Turns[0].Text, "{}") {
			t.Errorf("a blank was not filled in: %s", c.System)
		}
		if len(c.Turns) >= 7 {
			long++
		}
	}
	if len(systems) != 6 || long != 8 {
		t.Errorf("%d system prompts and %d long conversations, want 6 and 8", len(systems), long)
	}
}

func TestSummaryPercentiles(t *testing.T) {
	var results []Result
	for i := range 100 {
		results = append(results, Result{FirstToken: time.Duration(100-i) * time.Second, PromptTokens: 10, CachedTokens: 4})
	}
	s := Summarize(results)
	if want := (Times{Mean: 50.5, P50: 50, P95: 95}); s.FirstToken != want {
		t.Errorf("times %v, want %v", s.FirstToken, want)
	}
	if s.CachedShare() != 0.4 || s.ByReplica["unknown"] != 100 || s.CachedReported {
		t.Errorf("summary %+v", s)
	}
	if empty := Summarize(nil); empty.CachedShare() != 0 || empty.FirstToken != (Times{}) {
		t.Errorf("summary of nothing %+v", empty)
	}
}
