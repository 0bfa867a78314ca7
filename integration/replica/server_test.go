package replica

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	chatPath      = "/v1/chat/completions"
	completePath  = "/v1/completions"
	messagesPath  = "/v1/messages"
	responsesPath = "/v1/responses"
)

// forever is a decode time that keeps a stream open after its first token.
const forever = 24 * time.Hour

var long = strings.Repeat("a long text that fills some blocks. ", 50)

func chatBodyOf(text string, more string) string {
	return fmt.Sprintf(`{"messages":[{"role":"user","content":%q}]%s}`, text, more)
}

// open starts a streaming request and returns when the server has its headers sent.
func open(t *testing.T, s *Server, text string) (stream *bufio.Reader, cancel func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, "POST", s.URL()+chatPath, strings.NewReader(chatBodyOf(text, `,"stream":true,"max_tokens":5`)))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return bufio.NewReader(resp.Body), cancel
}

func readLine(t *testing.T, r *bufio.Reader) string {
	t.Helper()
	line, err := r.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return line
}

func TestCachedTokensInEachAPI(t *testing.T) {
	for _, c := range []struct {
		path, body string
		cached     []string // where the number is
		input      []string
		exclusive  bool // input does not include cached
	}{
		{chatPath, chatBodyOf(long, ""), []string{"usage", "prompt_tokens_details", "cached_tokens"}, []string{"usage", "prompt_tokens"}, false},
		{completePath, fmt.Sprintf(`{"prompt":%q}`, long), []string{"usage", "prompt_tokens_details", "cached_tokens"}, []string{"usage", "prompt_tokens"}, false},
		{messagesPath, chatBodyOf(long, `,"max_tokens":3`), []string{"usage", "cache_read_input_tokens"}, []string{"usage", "input_tokens"}, true},
		{responsesPath, fmt.Sprintf(`{"input":%q}`, long), []string{"usage", "input_tokens_details", "cached_tokens"}, []string{"usage", "input_tokens"}, false},
	} {
		t.Run(c.path, func(t *testing.T) {
			s := start(t, Config{})
			_, first := post(t, s, c.path, c.body)
			_, second := post(t, s, c.path, c.body)
			prompt := float64(s.Stats().PromptTokens / 2)
			want := float64(CachedTokens(16, 1000, int(prompt)))
			input := prompt
			if c.exclusive {
				input -= want
			}
			if got := at(t, first, c.cached...); got != 0.0 {
				t.Errorf("first: %v cached", got)
			}
			if got := at(t, second, c.cached...); got != want {
				t.Errorf("second: %v cached, want %v", got, want)
			}
			if got := at(t, second, c.input...); got != input {
				t.Errorf("input %v, want %v", got, input)
			}
		})
	}
}

func TestPromptTokensDetailsCanBeOff(t *testing.T) {
	s := start(t, Config{NoPromptTokensDetails: true})
	_, body := post(t, s, chatPath, chatBodyOf("x", ""))
	if at(t, body, "usage", "prompt_tokens_details") != nil {
		t.Error(body)
	}
	_, stream := post(t, s, chatPath, chatBodyOf("x", `,"stream":true,"stream_options":{"include_usage":true}`))
	if strings.Contains(stream, "cached_tokens") || !strings.Contains(stream, `"usage"`) {
		t.Error(stream)
	}
}

// The next turn of a conversation finds the answer of the last one in the cache.
func TestNextTurnFindsTheAnswerCached(t *testing.T) {
	s := start(t, Config{})
	_, first := post(t, s, chatPath, chatBodyOf("hello", `,"max_tokens":200`))
	answer := at(t, first, "choices", "0", "message", "content").(string)
	_, second := post(t, s, chatPath, fmt.Sprintf(
		`{"messages":[{"role":"user","content":"hello"},{"role":"assistant","content":%q},{"role":"user","content":"more"}]}`, answer))
	computed := int(at(t, first, "usage", "total_tokens").(float64)) - 1
	if got, want := at(t, second, "usage", "prompt_tokens_details", "cached_tokens"), float64(computed/16*16); got != want {
		t.Errorf("%v tokens cached, want %v", got, want)
	}
}

func TestSaltSeparates(t *testing.T) {
	s := start(t, Config{})
	for i, c := range []struct {
		salt string
		hit  bool
	}{{"", false}, {`,"cache_salt":"a"`, false}, {`,"cache_salt":"a"`, true}, {`,"cache_salt":"b"`, false}, {"", true}} {
		_, body := post(t, s, chatPath, chatBodyOf(long, c.salt))
		if hit := at(t, body, "usage", "prompt_tokens_details", "cached_tokens") != 0.0; hit != c.hit {
			t.Errorf("request %d with %q: hit %v, want %v", i, c.salt, hit, c.hit)
		}
	}
}

// A stream has the text of the answer that is no stream, and as many tokens.
func TestStreamsHaveTheSameText(t *testing.T) {
	for _, c := range []struct {
		path, body, event   string
		delta, text, finish []string
		events              int
	}{
		{chatPath, chatBodyOf("x", `,"max_completion_tokens":7`), "", []string{"choices", "0", "delta", "content"},
			[]string{"choices", "0", "message", "content"}, []string{"choices", "0", "finish_reason"}, 8},
		{completePath, `{"prompt":"x","max_tokens":7}`, "", []string{"choices", "0", "text"},
			[]string{"choices", "0", "text"}, []string{"choices", "0", "finish_reason"}, 7},
		{messagesPath, chatBodyOf("x", `,"max_tokens":7`), "content_block_delta", []string{"delta", "text"},
			[]string{"content", "0", "text"}, []string{"stop_reason"}, 7},
		{responsesPath, `{"input":"x","max_output_tokens":7}`, "response.output_text.delta", []string{"delta"},
			[]string{"output", "0", "content", "0", "text"}, []string{"incomplete_details", "reason"}, 7},
	} {
		t.Run(c.path, func(t *testing.T) {
			s := start(t, Config{})
			_, body := post(t, s, c.path, c.body)
			_, stream := post(t, s, c.path, strings.Replace(c.body, "{", `{"stream":true,`, 1))
			var text strings.Builder
			events := 0
			for _, e := range sse(stream) {
				if e.name == c.event && e.data != "[DONE]" {
					text.WriteString(at(t, e.data, c.delta...).(string))
					events++
				}
			}
			if want := at(t, body, c.text...); text.String() != want || len(text.String()) != 7*tokenBytes {
				t.Errorf("stream %q, body %q", text.String(), want)
			}
			if events != c.events {
				t.Errorf("%d events, want %d", events, c.events)
			}
			if reason := at(t, body, c.finish...); !strings.Contains(fmt.Sprint(reason), "length") && !strings.Contains(fmt.Sprint(reason), "max_") {
				t.Errorf("finish reason %v", reason)
			}
		})
	}
}

func TestSeveralSequencesOfOneRequest(t *testing.T) {
	s := start(t, Config{})
	_, body := post(t, s, completePath, `{"prompt":["a","b"],"n":2,"max_tokens":3}`)
	texts := map[any]bool{}
	for i := range 4 {
		texts[at(t, body, "choices", fmt.Sprint(i), "text")] = true
	}
	if len(texts) != 4 || at(t, body, "usage", "completion_tokens") != 12.0 || at(t, body, "usage", "prompt_tokens") != 4.0 {
		t.Error(body)
	}
	_, stream := post(t, s, chatPath, chatBodyOf("x", `,"n":3,"max_tokens":4,"stream":true`))
	finished := map[any]int{}
	for _, e := range sse(stream) {
		if e.data != "[DONE]" && at(t, e.data, "choices", "0", "finish_reason") == "length" {
			finished[at(t, e.data, "choices", "0", "index")]++
		}
	}
	if len(finished) != 3 || strings.Count(stream, "data: ") != 3*5+1 {
		t.Error(stream)
	}
}

func TestReturnTokenIDsAreThoseOfTokenize(t *testing.T) {
	s := start(t, Config{})
	_, body := post(t, s, chatPath, chatBodyOf("hello there", `,"return_token_ids":true,"max_tokens":2`))
	_, tokens := post(t, s, "/tokenize", chatBodyOf("hello there", ""))
	got, want := at(t, body, "prompt_token_ids"), at(t, tokens, "tokens")
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, tokenize %v", got, want)
	}
	ids := strings.ReplaceAll(strings.Trim(fmt.Sprintf("%.0f", want), "[]"), " ", ",")
	_, text := post(t, s, "/detokenize", `{"tokens":[`+ids+`]}`)
	if got := at(t, text, "prompt"); got != "<|bos|><|start|>user<|sep|>hello there<|end|><|start|>assistant<|sep|>" {
		t.Error(got)
	}
	_, byIDs := post(t, s, completePath, `{"prompt":[`+ids+`],"max_tokens":2}`)
	if at(t, byIDs, "choices", "0", "text") != at(t, body, "choices", "0", "message", "content") {
		t.Error("the same ids are answered otherwise")
	}
}

func TestBadRequests(t *testing.T) {
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	z.Write([]byte(chatBodyOf("x", "")))
	z.Close()
	s := start(t, Config{Model: "m, alias", MaxModelLen: 100, MaxBodyBytes: 10000})
	const json = "application/json"
	for _, c := range []struct {
		name, method, path, contentType, body string
		status                                int
		contains                              string
	}{
		{"alias", "POST", chatPath, json, chatBodyOf("x", `,"model":"alias"`), 200, `"model":"alias"`},
		{"parameter of content type", "POST", chatPath, "application/json; charset=utf-8", chatBodyOf("x", ""), 200, ""},
		{"unknown fields", "POST", chatPath, json, chatBodyOf("x", `,"what":{}`), 200, ""},
		{"unknown model", "POST", chatPath, json, chatBodyOf("x", `,"model":"other"`), 404, "Valid aliases: m, alias."},
		{"text", "POST", chatPath, "text/plain", chatBodyOf("x", ""), 400, "Unsupported Media Type"},
		{"gzip", "POST", chatPath, json, zipped.String(), 400, `{"detail":"There was an error parsing the body"}`},
		{"empty", "POST", chatPath, json, "", 400, `"param":"body"`},
		{"list", "POST", chatPath, json, "[]", 400, `"param":"body"`},
		{"no messages", "POST", chatPath, json, "{}", 400, `"param":"body.messages"`},
		{"wrong messages", "POST", chatPath, json, `{"messages":"x"}`, 400, `"param":"body.messages"`},
		{"no max_tokens", "POST", messagesPath, json, chatBodyOf("x", ""), 400, `"param":"body.max_tokens"`},
		{"no prompt", "POST", completePath, json, "{}", 400, `"param":"prompt"`},
		{"empty prompt", "POST", completePath, json, `{"prompt":[[]]}`, 400, `"param":"prompt"`},
		{"no input", "POST", responsesPath, json, "{}", 400, `"param":"body.input"`},
		{"negative max_tokens", "POST", chatPath, json, chatBodyOf("x", `,"max_tokens":-1`), 400, "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)"},
		{"large max_tokens", "POST", chatPath, json, chatBodyOf("x", `,"max_tokens":101`), 400, "max_tokens=101 cannot be greater than max_model_len=100."},
		{"many sequences", "POST", chatPath, json, chatBodyOf("x", `,"n":1000000000`), 400, `"param":"n"`},
		{"long prompt", "POST", chatPath, json, chatBodyOf(long, ""), 400, "This model's maximum context length is 100 tokens."},
		{"long prompt in messages", "POST", messagesPath, json, chatBodyOf(long, `,"max_tokens":1`), 400, `{"type":"error","error":{"type":"BadRequestError"`},
		{"large body", "POST", chatPath, json, strings.Repeat("x", 10001), 413, ""},
		{"method", "GET", chatPath, json, "", 405, `{"detail":"Method Not Allowed"}`},
		{"path", "GET", "/other", json, "", 404, `{"detail":"Not Found"}`},
		{"tokenize unknown model", "POST", "/tokenize", json, `{"model":"other","prompt":"x"}`, 404, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := http.NewRequest(c.method, s.URL()+c.path, strings.NewReader(c.body))
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Content-Type", c.contentType)
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			status, body := readAll(t, resp)
			if status != c.status || !strings.Contains(body, c.contains) {
				t.Errorf("%d %s; want %d with %s", status, body, c.status, c.contains)
			}
		})
	}
	if st := s.Stats(); st.Running+st.Waiting != 0 || st.Finished != 3 {
		t.Errorf("%+v", st)
	}
}

func TestAPIKey(t *testing.T) {
	s := start(t, Config{APIKey: "secret"})
	for header, want := range map[string]int{"": 401, "Bearer wrong": 401, "Basic secret": 401, "Bearer secret": 200, "bearer secret": 200} {
		r, _ := http.NewRequest("GET", s.URL()+"/v1/models", nil)
		r.Header.Set("Authorization", header)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		if status, body := readAll(t, resp); status != want {
			t.Errorf("%q: %d %s", header, status, body)
		}
	}
	if status, _ := get(t, s, "/health"); status != 200 {
		t.Error("/health is guarded")
	}
}

func TestQueueIsFirstComeFirstServed(t *testing.T) {
	s := start(t, Config{TimeScale: 1, Timing: Timing{PrefillRate: 1e6, DecodeTime: forever, MaxRunning: 1}})
	var streams []*bufio.Reader
	var cancels []func()
	for i := range 4 {
		stream, cancel := open(t, s, fmt.Sprint("request ", i))
		streams, cancels = append(streams, stream), append(cancels, cancel)
		eventually(t, "request is queued", func() bool { st := s.Stats(); return st.Running == 1 && st.Waiting == i })
	}
	_, metrics := get(t, s, "/metrics")
	for _, line := range []string{"vllm:num_requests_running{engine=\"0\",model_name=\"sim\"} 1.0", "vllm:num_requests_waiting{engine=\"0\",model_name=\"sim\"} 3.0"} {
		if !strings.Contains(metrics, line) {
			t.Errorf("no %s in\n%s", line, metrics)
		}
	}
	readLine(t, streams[0])
	cancels[2]() // leaves the queue
	eventually(t, "request leaves the queue", func() bool { return s.Stats().Waiting == 2 })
	cancels[0]() // leaves its slot
	readLine(t, streams[1])
	eventually(t, "slot is free for the next", func() bool { st := s.Stats(); return st.Running == 1 && st.Waiting == 1 && st.Aborted == 2 })
	cancels[1]()
	readLine(t, streams[3])
}

func TestFullQueueRejects(t *testing.T) {
	s := start(t, Config{TimeScale: 1, Timing: Timing{DecodeTime: forever, MaxQueued: 2, MaxRunning: 1}})
	open(t, s, "one")
	open(t, s, "two")
	status, body := post(t, s, chatPath, chatBodyOf("three", ""))
	if status != 503 || at(t, body, "error", "code") != 503.0 || at(t, body, "error", "type") != "Service Unavailable" {
		t.Errorf("%d %s", status, body)
	}
	if status, body := post(t, s, messagesPath, chatBodyOf("three", `,"max_tokens":1`)); status != 503 || at(t, body, "type") != "error" {
		t.Errorf("%d %s", status, body)
	}
	if st := s.Stats(); st.Rejected != 2 || st.Requests != 4 {
		t.Errorf("%+v", st)
	}
}

func TestDisconnectOfWaitingBodyAborts(t *testing.T) {
	s := start(t, Config{TimeScale: 1, Timing: Timing{DecodeTime: forever}})
	ctx, cancel := context.WithCancel(context.Background())
	r, _ := http.NewRequestWithContext(ctx, "POST", s.URL()+chatPath, strings.NewReader(chatBodyOf("x", "")))
	r.Header.Set("Content-Type", "application/json")
	done := make(chan error)
	go func() {
		_, err := http.DefaultClient.Do(r)
		done <- err
	}()
	eventually(t, "request runs", func() bool { return s.Stats().Running == 1 })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	eventually(t, "request is aborted", func() bool { st := s.Stats(); return st.Running == 0 && st.Aborted == 1 && st.UsedBlocks == 0 })
}

func TestIdleConnectionIsClosedAfterKeepAlive(t *testing.T) {
	s := start(t, Config{KeepAlive: 50 * time.Millisecond})
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r := bufio.NewReader(conn)
	for range 2 { // the connection is kept between requests
		io.WriteString(conn, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		resp, err := http.ReadResponse(r, nil)
		if err != nil || resp.Close {
			t.Fatal(err, "or told to close")
		}
	}
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := r.ReadByte(); err != io.EOF {
		t.Error(err, "want EOF")
	}
}

func TestRequestsAreRemembered(t *testing.T) {
	s := start(t, Config{KeepRequests: 2})
	var want string
	for i := range 3 {
		want = chatBodyOf(fmt.Sprint("text ", i), ` , "odd":  [1.0]`)
		r, _ := http.NewRequest("POST", s.URL()+chatPath+"?q=1", strings.NewReader(want))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("X-Session-Id", "abc")
		r.Header.Set("X-Request-Id", "42")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, body := readAll(t, resp); at(t, body, "id") != "chatcmpl-42" {
			t.Error(body)
		}
	}
	got := s.Requests()
	if len(got) != 2 {
		t.Fatalf("%d requests", len(got))
	}
	last := got[1]
	if string(last.Body) != want || last.Method != "POST" || last.Path != chatPath+"?q=1" || last.Header.Get("X-Session-Id") != "abc" {
		t.Errorf("%+v", last)
	}
}

// Restarts follow each other within one second, and within one tick of the start time.
func TestRestartHasAnEmptyCacheAndAnotherStartTime(t *testing.T) {
	s := start(t, Config{CacheBlocks: 1000})
	url := s.URL()
	last := 0.0
	for i := range 5 {
		if s.URL() != url {
			t.Fatalf("now on %s, was on %s", s.URL(), url)
		}
		if st := s.Stats(); st.ResidentBlocks != 0 {
			t.Errorf("restart %d: %d blocks in the cache", i, st.ResidentBlocks)
		}
		started := startTime(t, s)
		if !(started > last) {
			t.Errorf("restart %d: started at %v, the one before at %v", i, started, last)
		}
		if i == 0 && math.Abs(started-float64(time.Now().Unix())) > 60 {
			t.Errorf("started at %v", started)
		}
		last = started
		_, body := post(t, s, chatPath, chatBodyOf(long, ""))
		if got := at(t, body, "usage", "prompt_tokens_details", "cached_tokens"); got != 0.0 {
			t.Errorf("restart %d: %v tokens cached", i, got)
		}
		next, err := s.Restart()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { next.Close() })
		http.DefaultClient.CloseIdleConnections() // they lead to the old one
		s = next
	}
}

// startTime is process_start_time_seconds as a router reads it.
func startTime(t *testing.T, s *Server) float64 {
	t.Helper()
	_, metrics := get(t, s, "/metrics")
	for line := range strings.Lines(metrics) {
		if value, ok := strings.CutPrefix(line, "process_start_time_seconds "); ok {
			f, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				t.Fatal(err)
			}
			return f
		}
	}
	t.Fatalf("no start time in\n%s", metrics)
	return 0
}

func TestClaimedBlocks(t *testing.T) {
	for _, c := range []struct {
		blocks, claimed int
		want            string
	}{
		{100, 0, `kv_cache_size_tokens="1600",num_gpu_blocks="100"`},
		{100, 400, `kv_cache_size_tokens="6400",num_gpu_blocks="400"`},
		{100, 25, `kv_cache_size_tokens="400",num_gpu_blocks="25"`},
		{0, 0, `kv_cache_size_tokens="None",num_gpu_blocks="None"`},
		{0, 400, `kv_cache_size_tokens="6400",num_gpu_blocks="400"`},
	} {
		s := start(t, Config{CacheBlocks: c.blocks, ClaimedBlocks: c.claimed})
		if _, metrics := get(t, s, "/metrics"); !strings.Contains(metrics, c.want) {
			t.Errorf("%d blocks, %d claimed: no %s in\n%s", c.blocks, c.claimed, c.want, metrics)
		}
	}
	// The cache itself is of its real size.
	s := start(t, Config{CacheBlocks: 20, ClaimedBlocks: 1000})
	for i := range 10 {
		post(t, s, chatPath, chatBodyOf(fmt.Sprintf("%d %s", i, strings.Repeat("x ", 100)), ""))
	}
	if st := s.Stats(); st.ResidentBlocks == 0 || st.ResidentBlocks > 20 {
		t.Errorf("%d blocks in a cache of 20", st.ResidentBlocks)
	}
}

func TestCloseCutsStreams(t *testing.T) {
	s := start(t, Config{TimeScale: 1, Timing: Timing{DecodeTime: forever}})
	stream, _ := open(t, s, "x")
	readLine(t, stream)
	s.Close()
	rest, err := io.ReadAll(stream)
	if err == nil || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("%v after %s", err, rest)
	}
	if _, err := net.Dial("tcp", s.Addr()); err == nil {
		t.Error("not refused")
	}
}

func TestShutdownAsOnSIGTERM(t *testing.T) {
	for _, patient := range []bool{false, true} {
		t.Run(fmt.Sprint("patient=", patient), func(t *testing.T) {
			cfg := Config{TimeScale: 1, Timing: Timing{DecodeTime: forever}, ShutdownLinger: time.Hour}
			if patient { // the stream is let go on, until the test has seen enough
				cfg.ShutdownTimeout = time.Hour
			}
			s := start(t, cfg)
			stream, _ := open(t, s, "x")
			readLine(t, stream)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			done := make(chan error)
			go func() { done <- s.Shutdown(ctx) }()
			eventually(t, "new requests are answered 500", func() bool {
				status, body := post(t, s, chatPath, chatBodyOf("y", `,"max_tokens":1`))
				return status == 500 && strings.Contains(body, "cannot schedule new futures after shutdown")
			})
			if status, _ := get(t, s, "/health"); status != 200 {
				t.Errorf("/health is %d", status)
			}
			if patient {
				if s.Stats().Running != 1 {
					t.Error("the stream has been ended")
				}
				cancel()
			}
			rest, err := io.ReadAll(stream)
			if err != nil || !strings.Contains(string(rest), `"finish_reason":"abort"`) || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
				t.Errorf("%v after %s", err, rest)
			}
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
			if _, err := net.Dial("tcp", s.Addr()); err == nil {
				t.Error("not refused")
			}
		})
	}
}

func TestMetricsCount(t *testing.T) {
	s := start(t, Config{CacheBlocks: 1000})
	for range 3 {
		post(t, s, chatPath, chatBodyOf(long, `,"max_tokens":10`))
	}
	st := s.Stats()
	_, text := get(t, s, "/metrics")
	for name, want := range map[string]int{
		"vllm:prompt_tokens_total":                st.PromptTokens,
		"vllm:prefix_cache_queries_total":         st.PromptTokens,
		"vllm:prompt_tokens_cached_total":         st.CachedTokens,
		"vllm:prefix_cache_hits_total":            st.CachedTokens,
		"vllm:generation_tokens_total":            30,
		"vllm:time_to_first_token_seconds_count":  3,
		"vllm:request_prefill_time_seconds_count": 3,
		"vllm:kv_cache_usage_perc":                0,
	} {
		if line := fmt.Sprintf("\n%s{engine=\"0\",model_name=\"sim\"} %d.0\n", name, want); !strings.Contains(text, line) {
			t.Errorf("no %s in\n%s", line, text)
		}
	}
	if st.CachedTokens == 0 || st.ResidentBlocks == 0 || st.Requests != 3 || st.Finished != 3 {
		t.Errorf("%+v", st)
	}
}

func TestManyStreams(t *testing.T) {
	before := runtime.NumGoroutine()
	s := New(Config{TimeScale: 20, KeepAlive: time.Minute, Timing: Timing{PrefillRate: 1e6, MaxRunning: 1000}})
	if err := s.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{}}
	var wg sync.WaitGroup
	for i := range 1000 {
		wg.Go(func() {
			resp, err := client.Post(s.URL()+chatPath, "application/json",
				strings.NewReader(chatBodyOf(fmt.Sprint(i), `,"stream":true,"max_tokens":6`)))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if body, err := io.ReadAll(resp.Body); err != nil || strings.Count(string(body), "data: ") != 8 {
				t.Errorf("%v after %s", err, body)
			}
		})
	}
	wg.Wait()
	if st := s.Stats(); st.Finished != 1000 || st.Running+st.Waiting+st.UsedBlocks != 0 {
		t.Errorf("%+v", st)
	}
	client.CloseIdleConnections()
	s.Close()
	eventually(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= before+2 })
}

func TestRunWithFlags(t *testing.T) {
	fs := flag.NewFlagSet("replica", flag.ContinueOnError)
	cfg := RegisterFlags(fs)
	if err := fs.Parse([]string{"--listen", "127.0.0.1:0", "--model", "a,b", "--cache-blocks", "100", "--block-size", "8",
		"--prefill-rate", "100", "--decode-ms", "1.5", "--max-running", "3", "--max-queued", "5", "--time-scale", "100",
		"--fault", `{"kind":"die","after":2,"count":1}`, "--api-key", "k", "--keep-alive", "1s", "--seed", "9",
		"--scheduling", "priority", "--claimed-blocks", "200", "--refuse-priority=false"}); err != nil {
		t.Fatal(err)
	}
	want := Fault{Kind: Die, After: 2, Count: 1}
	if cfg.Scheduling != ByPriority || cfg.ClaimedBlocks != 200 || cfg.RefusePriority {
		t.Errorf("%+v", cfg)
	}
	if cfg.DecodeTime != 1500*time.Microsecond || cfg.Fault != want || cfg.MaxQueued != 5 || cfg.CacheBlocks != 100 || cfg.KeepAlive != time.Second {
		t.Errorf("%+v", cfg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	urls := make(chan string, 1)
	done := make(chan error)
	go func() {
		done <- Run(ctx, *cfg, func(_ string, args ...any) { urls <- args[1].(string) })
	}()
	resp, err := http.Get(<-urls + "/health")
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestRunWithEventsAndLMCache(t *testing.T) {
	fs := flag.NewFlagSet("replica", flag.ContinueOnError)
	cfg := RegisterFlags(fs)
	if err := fs.Parse([]string{"--listen", "127.0.0.1:0", "--time-scale", "100", "--ranks", "2", "--adapters", "ad1", "--scale-out", "--sglang-info",
		"--kv-events", "tcp://127.0.0.1:0", "--kv-replay", "tcp://127.0.0.1:0", "--kv-topic", "kv", "--kv-buffer-steps", "7", "--kv-high-water", "9",
		"--kv-form", "array", "--kv-replay-without-topic", "--kv-first-seq", "3", "--kv-delay", "1ms", "--no-kv-event-sources",
		"--kv-fault", `{"kind":"gap","count":1}`, "--lmcache", "127.0.0.1:0", "--lmcache-kind", "controller", "--lmcache-instance", "a",
		"--lmcache-model", "/m", "--lmcache-chunk-tokens", "32", "--lmcache-capacity", "4194304", "--lmcache-fault", "500"}); err != nil {
		t.Fatal(err)
	}
	if want := (KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", Topic: "kv", BufferSteps: 7, HighWater: 9, Form: EventArrays,
		ReplayWithoutTopic: true, FirstSeq: 3, Delay: time.Millisecond, NoSources: true, Fault: Fault{Kind: Gap, Count: 1}}); cfg.KVEvents != want {
		t.Errorf("%+v", cfg.KVEvents)
	}
	if want := (LMCacheConfig{Listen: "127.0.0.1:0", Kind: LMCacheController, Instance: "a", Model: "/m", ChunkTokens: 32, ChunkBytes: 1 << 20,
		CapacityBytes: 4 << 20, Fault: Fault{Kind: Status500}}); cfg.RunLMCache != want {
		t.Errorf("%+v", cfg.RunLMCache)
	}
	ctx, cancel := context.WithCancel(context.Background())
	logged := make(chan string, 4)
	done := make(chan error)
	go func() {
		done <- Run(ctx, *cfg, func(format string, args ...any) { logged <- fmt.Sprintf(format, args...) })
	}()
	for _, want := range []string{"LMCache (controller) on http://", "replica of sim on http://", "KV events of rank 0 on tcp://", "KV events of rank 1 on tcp://"} {
		if line := <-logged; !strings.HasPrefix(line, want) {
			t.Errorf("%s, want %s", line, want)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, args := range [][]string{{"--kv-fault", "503"}, {"--lmcache-fault", "gap"}, {"--fault", "nan"}} {
		fs := flag.NewFlagSet("replica", flag.ContinueOnError)
		fs.SetOutput(io.Discard)
		RegisterFlags(fs)
		if fs.Parse(args) == nil {
			t.Errorf("%v is accepted", args)
		}
	}
}

func TestNonsenseIsNotStarted(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{Timing: Timing{PrefillRate: -1}}, "prefill rate -1"},
		{Config{Timing: Timing{DecodeTime: -1}}, "decode time -1ns"},
		{Config{CacheBlocks: -5}, "cache blocks -5"},
		{Config{ClaimedBlocks: -1}, "claimed blocks -1"},
		{Config{Timing: Timing{Scheduling: "lifo"}}, `scheduling "lifo"`},
		{Config{RefusePriority: true, Timing: Timing{Scheduling: ByPriority}}, "refuse priority"},
		{Config{TimeScale: -2}, "time scale -2"},
		{Config{Fault: Fault{Kind: "sulk"}}, `fault kind "sulk"`},
		{Config{Fault: Fault{Kind: Gap}}, `fault kind "gap"`},
		{Config{Ranks: -1}, "ranks -1"},
		{Config{Ranks: 1 << 40}, "ranks 1099511627776"},
		{Config{KVEvents: KVEvents{Endpoint: "127.0.0.1:5557"}}, `kv events endpoint "127.0.0.1:5557"`},
		{Config{KVEvents: KVEvents{Endpoint: "tcp://127.0.0.1:http"}}, `kv events endpoint "tcp://127.0.0.1:http"`},
		{Config{KVEvents: KVEvents{ReplayEndpoint: "tcp://127.0.0.1:0"}}, "there is no endpoint to replay"},
		{Config{KVEvents: KVEvents{Form: "xml"}}, `kv events form "xml"`},
		{Config{KVEvents: KVEvents{Delay: -1}}, "kv events delay -1ns"},
		{Config{KVEvents: KVEvents{Fault: Fault{Kind: Hang, Count: 1}}}, "fault count 1"},
		{Config{RunLMCache: LMCacheConfig{Kind: "oracle"}}, `lmcache kind "oracle"`},
	} {
		if err := New(c.cfg).Start("127.0.0.1:0"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
}

func BenchmarkStream(b *testing.B) {
	s := New(Config{TimeScale: 1e4})
	if err := s.Start("127.0.0.1:0"); err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	for b.Loop() {
		resp, err := http.Post(s.URL()+chatPath, "application/json", strings.NewReader(chatBodyOf(long, `,"stream":true,"max_tokens":100`)))
		if err != nil {
			b.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	b.ReportMetric(float64(b.N)*100/b.Elapsed().Seconds(), "tokens/s")
}
