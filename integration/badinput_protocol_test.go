package integration

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
)

// requestHead is the head of a POST, without the blank line.
func requestHead(g *gateway, path string, headers ...string) string {
	return "POST " + path + " HTTP/1.1\r\nHost: " + g.Addr + "\r\nContent-Type: application/json\r\n" + strings.Join(append(headers, ""), "\r\n")
}

// Clients go away in the middle of their request. Nobody is sent half of it, and nothing stays behind.
func TestBodyThatBreaksOff(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	idle := g.mark()
	half := chat("llama", strings.Repeat("x", 2000))[:1500]

	for name, framing := range map[string][2]string{
		"with its length": {"Content-Length: 3000", half},
		"chunked":         {"Transfer-Encoding: chunked", fmt.Sprintf("%x\r\n%s\r\n", len(half), half)},
		"in a chunk":      {"Transfer-Encoding: chunked", fmt.Sprintf("%x\r\n%s", 2*len(half), half)},
		"broken chunk":    {"Transfer-Encoding: chunked", "zz\r\n" + half + "\r\n0\r\n\r\n"},
	} {
		for _, path := range []string{"/one" + chatCompletions, "/several" + chatCompletions} {
			t.Run(name+path, func(t *testing.T) {
				closes := g.dial(t)
				closes.send("%s\r\n%s", requestHead(g, path, framing[0]), framing[1])
				_ = closes.Close()

				// A client that only stops sending may still read.
				stops := g.dial(t)
				stops.send("%s\r\n%s", requestHead(g, path, framing[0]), framing[1])
				if err := stops.Conn.(*net.TCPConn).CloseWrite(); err != nil {
					t.Fatal(err)
				}
				if a, err := stops.read(http.MethodPost); err == nil && (a.status < 400 || a.status > 499) {
					t.Errorf("%d %s", a.status, a.body)
				}
			})
		}
	}

	t.Run("stalled", func(t *testing.T) {
		var stalled []*rawConn
		for range 50 {
			c := g.dial(t)
			c.send("%s\r\n%s", requestHead(g, "/several"+chatCompletions, "Content-Length: 3000"), half)
			stalled = append(stalled, c)
		}
		if n := g.state().inFlight(); n != 0 {
			t.Errorf("%d reservations for requests that are not there yet", n)
		}
		if a := g.postBody(t, "/several"+chatCompletions, strings.NewReader(chat("llama", "hi"))); a.status != http.StatusOK {
			t.Errorf("beside stalled clients: %d %s", a.status, a.body)
		}
		for _, c := range stalled {
			_ = c.Close()
		}
	})
	for _, got := range slices.Concat(llama.take(), qwen.take()) {
		if got.err != nil || !bytes.HasSuffix(got.body, []byte("}")) {
			t.Errorf("an engine got a part of a request: %v, %.100q", got.err, got.body)
		}
	}
	g.settles(idle, 16<<20)
}

// A client that declares more or less than it sends.
func TestContentLengthThatIsWrong(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	body := chat("llama", "hi")
	for _, tc := range []struct {
		name    string
		headers []string
		status  int
		got     string // what the engine gets, or ""
	}{
		{"right", []string{fmt.Sprintf("Content-Length: %d", len(body))}, 200, body},
		{"too small", []string{"Content-Length: 5"}, 200, body[:5]},
		{"zero", []string{"Content-Length: 0"}, 200, ""},
		{"negative", []string{"Content-Length: -1"}, 400, ""},
		{"no number", []string{"Content-Length: lots"}, 400, ""},
		{"beyond 64 bits", []string{"Content-Length: 99999999999999999999"}, 400, ""},
		{"two that differ", []string{"Content-Length: 5", fmt.Sprintf("Content-Length: %d", len(body))}, 400, ""},
		{"missing", nil, 200, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := g.dial(t)
			c.send("%s\r\n%s", requestHead(g, "/one"+chatCompletions, tc.headers...), body)
			a := c.answer(http.MethodPost)
			got := llama.take()
			if a.status != tc.status {
				t.Fatalf("%d %s, want %d", a.status, a.body, tc.status)
			}
			if tc.status != http.StatusOK {
				if len(got) != 0 {
					t.Errorf("the engine got %d requests", len(got))
				}
				return
			}
			if len(got) != 1 || string(got[0].body) != tc.got || got[0].length != int64(len(tc.got)) {
				t.Errorf("the engine got %v", got)
			}
			// What is left of the body is no request, and must not become one.
			if err := c.Conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if a, err := c.read(http.MethodPost); err == nil && a.status != http.StatusBadRequest {
				t.Errorf("the rest of the body was answered: %d %s", a.status, a.body)
			}
			if len(llama.take()) != 0 {
				t.Error("the rest of the body reached the engine")
			}
		})
	}
}

// A chunked body has no length. The engine gets it with one, as the whole of it is there, and without the trailers that nobody declared to it.
func TestChunkedBody(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	body := chat("llama", strings.Repeat("in small pieces, ", 100))
	for _, trailer := range []string{"", "X-Checksum: 1\r\n"} {
		c := g.dial(t)
		c.send("%s", requestHead(g, "/several"+chatCompletions, "Transfer-Encoding: chunked", "Trailer: X-Checksum")+"\r\n")
		for piece := range slices.Chunk([]byte(body), 7) {
			c.send("%x;ext=1\r\n%s\r\n", len(piece), piece)
		}
		c.send("0\r\n%s\r\n", trailer)
		a := c.answer(http.MethodPost)
		got := llama.take()
		if a.status != http.StatusOK || len(got) != 1 || string(got[0].body) != body || got[0].length != int64(len(body)) {
			t.Errorf("%d %s, the engine got %v", a.status, a.body, got)
		}
	}
}

// The client asks before it sends its body; the engine, to which the whole body can be sent at once, is not asked.
func TestExpectIsHonoured(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	body := chat("llama", "hi")
	for name, length := range map[string]string{"with its length": fmt.Sprintf("Content-Length: %d", len(body)), "chunked": "Transfer-Encoding: chunked"} {
		t.Run(name, func(t *testing.T) {
			c := g.dial(t)
			c.send("%s\r\n", requestHead(g, "/several"+chatCompletions, length, "Expect: 100-continue"))
			if line, err := c.r.ReadString('\n'); err != nil || line != "HTTP/1.1 100 Continue\r\n" {
				t.Fatalf("%q %v, want 100 before the body is sent", line, err)
			}
			if _, err := c.r.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(length, "Transfer") {
				c.send("%x\r\n%s\r\n0\r\n\r\n", len(body), body)
			} else {
				c.send("%s", body)
			}
			a := c.answer(http.MethodPost)
			got := llama.take()
			if a.status != http.StatusOK || len(got) != 1 || string(got[0].body) != body {
				t.Fatalf("%d %s, the engine got %v", a.status, a.body, got)
			}
			if e := got[0].header.Get("Expect"); e != "" {
				t.Errorf("the engine was asked for %q", e)
			}
		})
	}
}

// A refusal that needs no body is given without one, to a client that waits to be asked for it.
func TestExpectIsAnsweredAtOnce(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	for _, tc := range []struct {
		name, head string
		status     int
	}{
		{"too large", requestHead(g, "/several"+chatCompletions, "Content-Length: 50000000"), http.StatusRequestEntityTooLarge},
		{"wrong method", strings.Replace(requestHead(g, "/several"+chatCompletions, "Content-Length: 1000"), "POST", "PUT", 1), http.StatusMethodNotAllowed},
		{"incremental", requestHead(g, "/several"+chatCompletions, "Content-Length: 1000", "Incremental: ?1"), http.StatusNotImplemented},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := g.dial(t)
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			c.send("%sExpect: 100-continue\r\n\r\n", tc.head)
			a, err := c.read(http.MethodPost)
			if err != nil {
				t.Fatalf("no answer: %v", err)
			}
			if a.code(t); a.status != tc.status {
				t.Errorf("%d %s, want %d", a.status, a.body, tc.status)
			}
		})
	}
}

// Old and hasty clients.
func TestHTTPVersionsAndPipelining(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	body := chat("llama", "hi")

	t.Run("HTTP/1.0", func(t *testing.T) {
		c := g.dial(t)
		c.send("%sContent-Length: %d\r\n\r\n%s", strings.Replace(requestHead(g, "/several"+chatCompletions), "HTTP/1.1", "HTTP/1.0", 1), len(body), body)
		if a := c.answer(http.MethodPost); a.status != http.StatusOK || string(a.body) != `{"engine":"llama-1"}` {
			t.Errorf("%d %s", a.status, a.body)
		}
		if _, err := c.r.ReadByte(); !errors.Is(err, io.EOF) {
			t.Errorf("the connection stays open: %v", err)
		}
		llama.take()
	})
	t.Run("pipelined", func(t *testing.T) {
		c := g.dial(t)
		var all strings.Builder
		models := []string{"llama", "qwen", "gpt-5", "llama"}
		for _, model := range models {
			body := chat(model, "hi")
			fmt.Fprintf(&all, "%sContent-Length: %d\r\n\r\n%s", requestHead(g, "/several"+chatCompletions), len(body), body)
		}
		c.send("%s", all.String())
		for i, want := range []string{`{"engine":"llama-1"}`, `{"engine":"qwen-1"}`, "model_not_found", `{"engine":"llama-1"}`} {
			if a := c.answer(http.MethodPost); !strings.Contains(string(a.body), want) {
				t.Errorf("answer %d, to %s: %d %s", i, models[i], a.status, a.body)
			}
		}
	})
}

// What is not POST.
func TestMethods(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	// Inside route, what is written below the handler comes after it.
	g := startGateway(t, strings.NewReplacer("*/ {", "*/ {\nroute {", "/* {", "/* {\nroute {", "\t}\n}\n", "\t}\nrespond \"not for rolter\" 418\n}\n}\n").Replace(twoWays(llama, qwen)))
	for _, tc := range []struct {
		method, path string
		status       int
	}{
		{http.MethodGet, chatCompletions, 405}, {http.MethodHead, chatCompletions, 405}, {http.MethodPut, chatCompletions, 405},
		{http.MethodDelete, chatCompletions, 405}, {http.MethodPatch, chatCompletions, 405}, {"BREW", chatCompletions, 405},
		{http.MethodOptions, chatCompletions, 418}, // cross-origin requests are answered by whoever comes next
		{http.MethodGet, "/v1/models", 200}, {http.MethodHead, "/v1/models", 200}, {http.MethodGet, "/v1/models/llama", 200}, {http.MethodGet, "/v1/models/gpt-5", 404},
		{http.MethodHead, "/v1/models/gpt-5", 404}, {http.MethodGet, "/health", 418}, {http.MethodPost, "/other", 418}, {http.MethodPost, "/", 418},
	} {
		t.Run(tc.method+tc.path, func(t *testing.T) {
			var body io.Reader
			if tc.method != http.MethodHead {
				body = strings.NewReader(chat("llama", "hi"))
			}
			req, err := http.NewRequest(tc.method, g.URL+"/several"+tc.path, body)
			if err != nil {
				t.Fatal(err)
			}
			a, err := roundTrip(http.DefaultClient, req)
			if err != nil {
				t.Fatal(err)
			}
			if a.status != tc.status || len(llama.take()) != 0 {
				t.Errorf("%d %s, want %d", a.status, a.body, tc.status)
			}
			if tc.status == http.StatusMethodNotAllowed {
				if allow := a.header.Get("Allow"); allow != http.MethodPost {
					t.Errorf("Allow: %q", allow)
				}
			}
			if tc.method == http.MethodHead {
				if len(a.body) != 0 {
					t.Errorf("a body: %q", a.body)
				}
			} else if tc.status == 404 || tc.status == 405 {
				a.code(t)
			}
		})
	}
}

// Path and query go to the engine as the client wrote them.
func TestPathsAreKept(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	prefixed := startEngine(t, "prefixed")
	g := startGateway(t, fmt.Sprintf(`
	rolter {
		provider llama-1 %s
		provider qwen-1 %s
		provider prefixed %s/llm/v1
		route llama {
			target llama-1
		}
		route qwen {
			target qwen-1 Qwen/Qwen3-8B
		}
		route prefixed {
			target prefixed
		}
	}`, llama.URL, qwen.URL, prefixed.URL))
	for _, tc := range []struct{ uri, prefixed string }{
		{"/v1/chat/completions", "/llm/v1/chat/completions"},
		{"/v1/chat/completions/", "/llm/v1/chat/completions/"},
		{"//v1/chat/completions", "/llm/v1//v1/chat/completions"},
		{"/v1/chat/completions?a=1&b=%20&a=2;c", "/llm/v1/chat/completions?a=1&b=%20&a=2;c"},
		{"/v1/chat/completions?", "/llm/v1/chat/completions?"},
		{"/v1/chat%2Fcompletions", "/llm/v1/chat%2Fcompletions"},
		{"/v1/%63hat/completions", "/llm/v1/%63hat/completions"},
		{"/a%20b/v1/chat/completions", "/llm/v1/a%20b/v1/chat/completions"},
		{"/v1/unheard/of", "/llm/v1/unheard/of"},
		{"/proxy/v1/messages", "/llm/v1/proxy/v1/messages"},
	} {
		t.Run(tc.uri, func(t *testing.T) {
			for _, want := range []struct {
				model, uri string
				engine     *engine
			}{{"llama", tc.uri, llama}, {"prefixed", tc.prefixed, prefixed}} {
				body := chat(want.model, "hi")
				c := g.dial(t)
				c.send("%sContent-Length: %d\r\n\r\n%s", requestHead(g, tc.uri), len(body), body)
				a := c.answer(http.MethodPost)
				got := want.engine.take()
				if a.status != http.StatusOK || len(got) != 1 {
					t.Errorf("%s: %d %s", want.model, a.status, a.body)
				} else if got[0].uri != want.uri {
					t.Errorf("%s: the engine got %s, want %s", want.model, got[0].uri, want.uri)
				}
			}
		})
	}
	// Dots in a path: whoever reads it differently from us must not be led to another model.
	for _, uri := range []string{"/v1/%2e%2e/v1/chat/completions", "/v1/../v1/chat/completions", "/v1/chat/./completions", "/x/..%2fv1/chat/completions"} {
		body := chat("qwen", "hi")
		c := g.dial(t)
		c.send("%sContent-Length: %d\r\n\r\n%s", requestHead(g, uri), len(body), body)
		a := c.answer(http.MethodPost)
		if toLlama := llama.take(); len(toLlama) != 0 {
			t.Errorf("%s: the wrong engine got it", uri)
		}
		for _, got := range qwen.take() {
			if models := modelsIn(t, got.body); len(models) != 1 || models[0] != `"Qwen/Qwen3-8B"` || got.uri != uri {
				t.Errorf("%s: the engine got %s with %s", uri, got.uri, got.body)
			}
		}
		if a.status >= 500 {
			t.Errorf("%s: %d %s", uri, a.status, a.body)
		}
	}
}

// Engines read the session's name too, so it passes, up to what the server takes in headers. Token ids are for us.
func TestLargeHeaders(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	idle := g.mark()
	check := func(size, status int) {
		t.Helper()
		for _, name := range []string{"X-Session-Id", "X-Rolter-Vllm-Token-Ids"} {
			value := strings.Repeat("1,", size/2)
			a := g.postBody(t, "/several"+chatCompletions, strings.NewReader(chat("llama", "hi")), name, value)
			if a.status != status {
				t.Errorf("%s of %d bytes: %d %.200s, want %d", name, size, a.status, a.body, status)
			}
			for _, got := range llama.take() {
				if want := map[string]string{"X-Session-Id": value}[name]; got.header.Get(name) != want {
					t.Errorf("the engine got %d bytes of %s", len(got.header.Get(name)), name)
				}
			}
		}
	}
	check(12<<10, http.StatusOK)
	check(200<<10, http.StatusRequestHeaderFieldsTooLarge) // Caddy takes 16 KiB unless it is told otherwise
	check(1<<20, http.StatusRequestHeaderFieldsTooLarge)

	// Very many headers.
	c := g.dial(t)
	body := chat("llama", "hi")
	c.send("%s%sContent-Length: %d\r\n\r\n%s", requestHead(g, "/several"+chatCompletions), strings.Repeat("X-A: 1\r\n", 1500), len(body), body)
	if a := c.answer(http.MethodPost); a.status != http.StatusOK {
		t.Errorf("many headers: %d %s", a.status, a.body)
	}
	llama.take()

	roomy := strings.Replace(g.caddyfile(twoWays(llama, qwen)), "\tdebug\n", "\tdebug\n\tservers {\n\t\tmax_header_size 2MB\n\t}\n", 1)
	if _, err := g.admin(http.MethodPost, "/load", "text/caddyfile", roomy); err != nil {
		t.Fatal(err)
	}
	check(200<<10, http.StatusOK)
	g.settles(idle, 16<<20)
}

// A client may ask that nobody holds its body back (RFC 10036). That can be done where the body does not decide where it goes.
func TestIncremental(t *testing.T) {
	begun := make(chan string, 1)
	streaming := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		first := make([]byte, 10)
		if _, err := io.ReadFull(r.Body, first); err != nil {
			return
		}
		begun <- string(first)
		rest, _ := io.ReadAll(r.Body)
		_, _ = w.Write(append(first, rest...))
	})}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = streaming.Serve(l) }()
	defer streaming.Close()
	other := startEngine(t, "other")
	g := startGateway(t, strings.ReplaceAll(twoWays(other, other), other.URL, "http://"+l.Addr().String()))

	body := chat("llama", "hi")
	reader, writer := io.Pipe()
	req, err := http.NewRequest(http.MethodPost, g.URL+"/one"+chatCompletions, reader)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Incremental", "?1")
	result := make(chan answer, 1)
	go func() {
		a, err := roundTrip(http.DefaultClient, req)
		if err != nil {
			a.body = []byte(err.Error())
		}
		result <- a
	}()
	_, _ = writer.Write([]byte(body[:10]))
	select {
	case first := <-begun:
		if first != body[:10] {
			t.Errorf("the engine got %q", first)
		}
	case <-time.After(20 * time.Second):
		t.Error("the body was held back")
	}
	_, _ = writer.Write([]byte(body[10:]))
	_ = writer.Close()
	if a := <-result; a.status != http.StatusOK || string(a.body) != body {
		t.Errorf("%d %s", a.status, a.body)
	}

	a := g.postBody(t, "/several"+chatCompletions, strings.NewReader(body), "Incremental", "?1")
	if code := a.code(t); a.status != http.StatusNotImplemented || code != "incremental_refused" {
		t.Errorf("where the model decides: %d %s, want 501", a.status, a.body)
	}
	// The limit of the body holds for it too.
	c := g.dial(t)
	c.send("%s\r\n", requestHead(g, "/one"+chatCompletions, "Incremental: ?1", "Expect: 100-continue", "Content-Length: 50000000"))
	if a := c.answer(http.MethodPost); a.status != http.StatusRequestEntityTooLarge {
		t.Errorf("too large: %d %s, want 413", a.status, a.body)
	}
	_ = c.Close()
	// ?0 asks for nothing.
	go func() { <-begun }()
	if a := g.postBody(t, "/several"+chatCompletions, strings.NewReader(body), "Incremental", "?0"); a.status != http.StatusOK {
		t.Errorf("?0: %d %s", a.status, a.body)
	}
	g.waitFor("the reservations to be given back", func() bool { return g.state().inFlight() == 0 })
}

// A body that was not kept cannot be sent again: no engine may take a part of it for the whole.
func TestIncrementalBodyIsNotCutByARetry(t *testing.T) {
	resetting, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer resetting.Close()
	read := make(chan struct{}, 10)
	go func() {
		for {
			c, err := resetting.Accept()
			if err != nil {
				return
			}
			_, _ = io.ReadAtLeast(c, make([]byte, 4096), 600) // the head and the first part of the body
			read <- struct{}{}
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}()
	healthy := startEngine(t, "healthy")
	g := startGateway(t, fmt.Sprintf(`
	rolter {
		provider resetting http://%s
		provider healthy %s
		route llama {
			strategy first
			target resetting
			target healthy
		}
	}`, resetting.Addr(), healthy.URL))

	body := chat("llama", strings.Repeat("x", 1000))
	for _, framing := range []string{"Transfer-Encoding: chunked", fmt.Sprintf("Content-Length: %d", len(body))} {
		c := g.dial(t)
		c.send("%s\r\n", requestHead(g, chatCompletions, framing, "Incremental: ?1"))
		chunked := strings.HasPrefix(framing, "Transfer")
		if chunked {
			c.send("%x\r\n%s\r\n", 600, body[:600])
		} else {
			c.send("%s", body[:600])
		}
		<-read
		rest := body[600:]
		if chunked {
			rest = fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(rest), rest)
		}
		_, _ = io.WriteString(c, rest) // it may have been refused already
		_, _ = c.read(http.MethodPost)
		for _, got := range healthy.take() {
			if got.err == nil && string(got.body) != body {
				t.Errorf("%s: an engine got %d bytes of %d as if they were all", framing, len(got.body), len(body))
			}
		}
		g.waitFor("the target to have rested", func() bool {
			state, err := g.admin(http.MethodGet, "/reverse_proxy/upstreams", "", "")
			return err == nil && !strings.Contains(state, `"fails":1`)
		})
	}
}

// The same way in over HTTP/2 and HTTP/3, where a GET may come with a body of unknown length.
func TestHTTP2AndHTTP3(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, "respond 418")
	_, port, err := net.SplitHostPort(freeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf("{\n\tadmin %s\n\tpersist_config off\n\tauto_https disable_redirects\n\tskip_install_trust\n}\nhttps://localhost:%s {\n\ttls internal\n%s\n}\n",
		strings.TrimPrefix(g.Admin, "http://"), port, strings.ReplaceAll(twoWays(llama, qwen), "rolter {", "rolter {\nmax_body 1MiB\n"))
	if _, err := g.admin(http.MethodPost, "/load", "text/caddyfile", config); err != nil {
		t.Fatal(err)
	}
	insecure := &tls.Config{InsecureSkipVerify: true, ServerName: "localhost"} // the certificate is one of Caddy's own
	h3 := &http3.Transport{TLSClientConfig: insecure}
	defer h3.Close()
	h2 := &http.Transport{TLSClientConfig: insecure, ForceAttemptHTTP2: true}
	defer h2.CloseIdleConnections()
	url := "https://localhost:" + port + "/several"
	g.waitFor("the certificate", func() bool {
		resp, err := (&http.Client{Transport: h2}).Get(url + "/v1/models")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})

	for name, transport := range map[string]http.RoundTripper{"HTTP/2": h2, "HTTP/3": h3} {
		client := &http.Client{Transport: transport, Timeout: 30 * time.Second}
		send := func(t *testing.T, method, path string, body io.Reader) answer {
			t.Helper()
			req, err := http.NewRequest(method, url+path, body)
			if err != nil {
				t.Fatal(err)
			}
			a, err := roundTrip(client, req)
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		// A reader that is no buffer hides the length.
		unknown := func(s string) io.Reader { return io.MultiReader(strings.NewReader(s)) }
		t.Run(name, func(t *testing.T) {
			body := chat("llama", "hi")
			for _, r := range []io.Reader{strings.NewReader(body), unknown(body)} {
				a := send(t, http.MethodPost, chatCompletions, r)
				if got := llama.take(); a.status != http.StatusOK || len(got) != 1 || string(got[0].body) != body || got[0].length != int64(len(body)) {
					t.Errorf("POST: %d %s, the engine got %v", a.status, a.body, got)
				}
			}
			if a := send(t, http.MethodGet, "/v1/models", unknown(body)); a.status != http.StatusOK || !bytes.Contains(a.body, []byte(`"qwen"`)) {
				t.Errorf("GET with a body: %d %s", a.status, a.body)
			}
			if a := send(t, http.MethodGet, chatCompletions, unknown(body)); a.status != http.StatusMethodNotAllowed {
				t.Errorf("GET of the API with a body: %d %s", a.status, a.body)
			}
			a := send(t, http.MethodPost, chatCompletions, io.LimitReader(repeating(' '), 3<<19))
			if code := a.code(t); a.status != http.StatusRequestEntityTooLarge || code != "request_too_large" {
				t.Errorf("too large: %d %s", a.status, a.body)
			}
			// A client that resets its stream in the middle of the body.
			ctx, cancel := context.WithCancel(context.Background())
			reader, writer := io.Pipe()
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+chatCompletions, reader)
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, _ = roundTrip(client, req)
			}()
			_, _ = writer.Write([]byte(body[:10]))
			cancel()
			<-done
			_ = writer.Close()
			if got := llama.take(); len(got) != 0 {
				t.Errorf("the engine got a part of a request: %v", got)
			}
		})
	}
	g.waitFor("the reservations to be given back", func() bool { return g.state().inFlight() == 0 })
}
