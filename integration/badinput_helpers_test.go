package integration

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// received is a request as an engine got it.
type received struct {
	method, uri string
	header      http.Header
	length      int64 // Content-Length, -1 for chunked
	body        []byte
	err         error // reading the body
}

// engine is an upstream that answers everything with 200 and remembers what it got, to the byte.
type engine struct {
	*httptest.Server
	name string

	mu   sync.Mutex
	got  []received
	serv http.HandlerFunc // in place of the usual answer, after the request was read
}

func startEngine(t testing.TB, name string) *engine {
	e := &engine{name: name}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		e.mu.Lock()
		e.got = append(e.got, received{r.Method, r.RequestURI, r.Header.Clone(), r.ContentLength, body, err})
		serv := e.serv
		e.mu.Unlock()
		if serv != nil {
			serv(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"engine":%q}`, name)
	}))
	t.Cleanup(e.Close)
	return e
}

// take returns what the engine got since the last take.
func (e *engine) take() []received {
	e.mu.Lock()
	defer e.mu.Unlock()
	got := e.got
	e.got = nil
	return got
}

// answer is what a client got.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// code is the error code in OpenAI's shape; it fails the test when the body is not in that shape.
func (a answer) code(t *testing.T) string {
	t.Helper()
	var shape struct {
		Error *struct {
			Message, Type *string
			Code          *string
			Param         *string
		} `json:"error"`
	}
	decoder := json.NewDecoder(bytes.NewReader(a.body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&shape); err != nil || shape.Error == nil || shape.Error.Message == nil || shape.Error.Type == nil || shape.Error.Code == nil {
		t.Errorf("%d is not an error in OpenAI's shape: %s", a.status, tail(string(a.body), 500))
		return ""
	}
	if got := a.header.Get("Content-Type"); got != "application/json" {
		t.Errorf("Content-Type %q of an error", got)
	}
	return *shape.Error.Code
}

// roundTrip sends a request and reads the whole answer.
func roundTrip(client *http.Client, req *http.Request) (answer, error) {
	resp, err := client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, body}, err
}

// postBody sends a body with headers given as alternating names and values.
func (g *gateway) postBody(t *testing.T, path string, body io.Reader, headers ...string) answer {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, g.URL+path, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	a, err := roundTrip(http.DefaultClient, req)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// rawConn is a connection on which a client writes what no HTTP library would.
type rawConn struct {
	net.Conn
	t *testing.T
	r *bufio.Reader
}

func (g *gateway) dial(t *testing.T) *rawConn {
	t.Helper()
	conn, err := net.Dial("tcp", g.Addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(60 * time.Second))
	return &rawConn{conn, t, bufio.NewReader(conn)}
}

func (c *rawConn) send(format string, args ...any) {
	c.t.Helper()
	if _, err := fmt.Fprintf(c, format, args...); err != nil {
		c.t.Fatal(err)
	}
}

func (c *rawConn) read(method string) (answer, error) {
	resp, err := http.ReadResponse(c.r, &http.Request{Method: method})
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, body}, err
}

func (c *rawConn) answer(method string) answer {
	c.t.Helper()
	a, err := c.read(method)
	if err != nil {
		c.t.Fatal(err)
	}
	return a
}

var goroutineTotal = regexp.MustCompile(`goroutine profile: total (\d+)`)

// goroutines of the process.
func (g *gateway) goroutines() int {
	g.t.Helper()
	profile, err := g.admin(http.MethodGet, "/debug/pprof/goroutine?debug=1", "", "")
	if err != nil {
		g.t.Fatal(err)
	}
	m := goroutineTotal.FindStringSubmatch(profile)
	if m == nil {
		g.t.Fatalf("no total in the profile: %.200s", profile)
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

var heapAlloc = regexp.MustCompile(`# HeapAlloc = (\d+)`)

// heap is the memory in use, in bytes. Pools give up what they hold after two collections.
func (g *gateway) heap() (n int64) {
	g.t.Helper()
	for range 3 {
		profile, err := g.admin(http.MethodGet, "/debug/pprof/heap?debug=1&gc=1", "", "")
		if err != nil {
			g.t.Fatal(err)
		}
		m := heapAlloc.FindStringSubmatch(profile)
		if m == nil {
			g.t.Fatalf("no HeapAlloc in the profile: %.200s", profile)
		}
		n, _ = strconv.ParseInt(m[1], 10, 64)
	}
	return n
}

// idleMark is what an idle process needs.
type idleMark struct {
	goroutines int
	heap       int64
}

func (g *gateway) mark() idleMark { return idleMark{g.goroutines(), g.heap()} }

// settles waits until nothing is left of the requests since the mark: no reservation, no goroutine, and no more memory than kept.
func (g *gateway) settles(since idleMark, kept int64) {
	g.t.Helper()
	http.DefaultClient.CloseIdleConnections()
	g.waitFor("the reservations to be given back", func() bool { return g.state().inFlight() == 0 })
	// Idle connections to replicas go after some seconds.
	g.waitFor("the goroutines to end", func() bool { return g.goroutines() <= since.goroutines+4 })
	g.waitFor("the memory to be freed", func() bool { return g.heap() <= since.heap+kept })
}

// metrics are the samples of Rolter's collectors: name and labels as they are written, and the value.
func (g *gateway) metrics() map[string]float64 {
	g.t.Helper()
	text, err := g.admin(http.MethodGet, "/metrics", "", "")
	if err != nil {
		g.t.Fatal(err)
	}
	samples := make(map[string]float64)
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "caddy_rolter_") {
			continue
		}
		line = strings.TrimSpace(line)
		at := strings.LastIndexByte(line, ' ')
		value, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			g.t.Fatalf("metrics: %q", line)
		}
		samples[line[:at]] = value
	}
	return samples
}

// chat is a body of the chat completions API.
func chat(model, content string) string {
	encoded, err := json.Marshal(content)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%s}]}`, model, encoded)
}

// twoWays is a site with two handlers: behind /one a single route, whose target keeps the model's name; behind /several two routes, one of
// which changes it.
func twoWays(llama, qwen *engine) string {
	return fmt.Sprintf(`
handle_path /one/* {
	rolter {
		provider llama-1 %[1]s
		route llama {
			target llama-1
		}
	}
}
handle_path /several/* {
	rolter {
		provider llama-1 %[1]s
		provider qwen-1 %[2]s
		route llama {
			target llama-1
		}
		route qwen {
			target qwen-1 Qwen/Qwen3-8B
		}
	}
}
handle {
	respond "not for rolter" 418
}
`, llama.URL, qwen.URL)
}
