package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// stub is a stand-in for a replica: it answers as the test wants and remembers what it was sent.
type stub struct {
	t      testing.TB
	name   string
	addr   string
	answer atomic.Pointer[stubAnswer]
	active atomic.Int32 // requests whose answer has not ended

	mu       sync.Mutex
	requests []stubRequest
	server   *http.Server // nil while connections are refused
}

type stubAnswer func(w http.ResponseWriter, r *http.Request, body []byte)

// stubRequest is a request as it came over the wire.
type stubRequest struct {
	method, uri string
	header      http.Header
	length      int64 // -1 when it was chunked
	body        string
}

// newStub starts a stand-in; without an answer it says [completion].
func newStub(t testing.TB, name string, answer stubAnswer) *stub {
	t.Helper()
	s := &stub{t: t, name: name, addr: freeAddr(t)}
	if answer == nil {
		answer = completion
	}
	s.answers(answer)
	s.listen()
	t.Cleanup(s.refuse)
	return s
}

// newStubs starts several, which are named a, b, c, …
func newStubs(t testing.TB, n int, answer stubAnswer) []*stub {
	t.Helper()
	stubs := make([]*stub, n)
	for i := range stubs {
		stubs[i] = newStub(t, string(rune('a'+i)), answer)
	}
	return stubs
}

func (s *stub) answers(answer stubAnswer) { s.answer.Store(&answer) }

// listen has the stand-in accept connections, again.
func (s *stub) listen() {
	s.t.Helper()
	l, err := net.Listen("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	server := &http.Server{Handler: s, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0)}
	s.mu.Lock()
	s.server = server
	s.mu.Unlock()
	go func() { _ = server.Serve(l) }()
}

// refuse has connections refused from now on. Answers that are under way have a moment to end, as those of a process that shuts down.
func (s *stub) refuse() {
	s.mu.Lock()
	server := s.server
	s.server = nil
	s.mu.Unlock()
	if server == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	if server.Shutdown(ctx) != nil {
		_ = server.Close()
	}
}

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	s.mu.Lock()
	s.requests = append(s.requests, stubRequest{r.Method, r.RequestURI, r.Header.Clone(), r.ContentLength, string(body)})
	s.mu.Unlock()
	s.active.Add(1)
	defer s.active.Add(-1)
	if r.Header.Get("X-Occupy") != "" {
		<-r.Context().Done()
		return
	}
	(*s.answer.Load())(w, r, body)
}

// received are the requests so far.
func (s *stub) received() []stubRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]stubRequest(nil), s.requests...)
}

// count is the number of requests so far.
func (s *stub) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.requests)
}

// only is the one request that the stand-in must have been sent.
func (s *stub) only() stubRequest {
	s.t.Helper()
	all := s.received()
	if len(all) != 1 {
		s.t.Fatalf("%s received %d requests, want 1", s.name, len(all))
	}
	return all[0]
}

func counts(stubs []*stub) []int {
	n := make([]int, len(stubs))
	for i, s := range stubs {
		n[i] = s.count()
	}
	return n
}

func total(n []int) (sum int) {
	for _, v := range n {
		sum += v
	}
	return sum
}

// completionBody is the answer of [completion].
const completionBody = `{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}`

func completion(w http.ResponseWriter, _ *http.Request, _ []byte) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, completionBody)
}

// says answers with a status and a JSON body.
func says(status int, body string) stubAnswer {
	return func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// resets breaks the connection before the answer.
func resets(w http.ResponseWriter, _ *http.Request, _ []byte) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	_ = conn.(*net.TCPConn).SetLinger(0)
	_ = conn.Close()
}

// raw answers with bytes as they are and closes the connection.
func raw(answer string) stubAnswer {
	return func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(conn, answer)
		_ = conn.Close()
	}
}

// events answers with a stream of server-sent events, each flushed; where next is not nil it is called before each one, and false breaks the stream off
// as a process that is killed does.
func events(next func(i int) bool, events ...string) stubAnswer {
	return func(w http.ResponseWriter, r *http.Request, _ []byte) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		rc := http.NewResponseController(w)
		_ = rc.Flush()
		for i, event := range events {
			if next != nil && !next(i) {
				panic(http.ErrAbortHandler)
			}
			if _, err := io.WriteString(w, event); err != nil {
				return
			}
			_ = rc.Flush()
		}
	}
}

// route is a route of the handler, for all the stand-ins; options are further lines of its block.
func route(model, options string, stubs ...*stub) string {
	var b strings.Builder
	fmt.Fprintf(&b, "route %s {\n%s\n", model, options)
	for _, s := range stubs {
		fmt.Fprintf(&b, "target %s\n", s.name)
	}
	b.WriteString("}\n")
	return b.String()
}

// soleRoutes are routes to each of the stand-ins alone, named only-<name>.
func soleRoutes(stubs ...*stub) string {
	var b strings.Builder
	for _, s := range stubs {
		b.WriteString(route("only-"+s.name, "", s))
	}
	return b.String()
}

// providers defines a provider for each stand-in.
func providers(stubs ...*stub) string {
	var b strings.Builder
	for _, s := range stubs {
		fmt.Fprintf(&b, "provider %s http://%s\n", s.name, s.addr)
	}
	return b.String()
}

// rolterFor is a site's handler for stand-ins, with these routes and other lines.
func rolterFor(stubs []*stub, lines ...string) string {
	return "rolter {\n" + providers(stubs...) + strings.Join(lines, "\n") + "\n}\n"
}

// said is a turn of a conversation.
type said struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chatBody is a request for chat completions.
func chatBody(model string, turns ...said) string {
	body, err := json.Marshal(struct {
		Model    string `json:"model"`
		Messages []said `json:"messages"`
	}{model, turns})
	if err != nil {
		panic(err)
	}
	return string(body)
}

// asks is a request of one user turn.
func asks(model, question string) string { return chatBody(model, said{"user", question}) }

// textBody is a request for text completions.
func textBody(model, prompt string) string {
	body, err := json.Marshal(map[string]string{"model": model, "prompt": prompt})
	if err != nil {
		panic(err)
	}
	return string(body)
}

// Paths of the APIs.
const (
	chatPath = "/v1/chat/completions"
	textPath = "/v1/completions"
)

// reply is an answer of the gateway.
type reply struct {
	status         int
	header         http.Header
	body           string
	target, reason string
}

// testClient leaves everything to the test: it follows nothing, asks for no compression, and keeps enough connections.
var testClient = &http.Client{
	Transport:     &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 512},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	Timeout:       time.Minute,
}

// newRequest makes a request; header is names and values in turn.
func newRequest(ctx context.Context, method, url string, body io.Reader, header ...string) *http.Request {
	r, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		panic(err)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

// do sends a request and reads the answer to its end.
func do(client *http.Client, r *http.Request) (reply, error) {
	resp, err := client.Do(r)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(body), resp.Header.Get("X-Rolter-Target"), resp.Header.Get("X-Rolter-Reason")}, err
}

// try posts a body; header is names and values in turn.
func (g *gateway) try(path, body string, header ...string) (reply, error) {
	return do(testClient, newRequest(context.Background(), http.MethodPost, g.URL+path, strings.NewReader(body), header...))
}

// post posts a body and wants an answer, whichever.
func (g *gateway) post(path, body string, header ...string) reply {
	g.t.Helper()
	answer, err := g.try(path, body, header...)
	if err != nil {
		g.t.Fatal(err)
	}
	return answer
}

// served posts a body and wants it to be answered 200.
func (g *gateway) served(path, body string, header ...string) reply {
	g.t.Helper()
	answer := g.post(path, body, header...)
	if answer.status != http.StatusOK {
		g.t.Fatalf("status %d, want 200: %s", answer.status, answer.body)
	}
	return answer
}

// idle waits until nothing is in flight.
func (g *gateway) idle() {
	g.t.Helper()
	g.waitFor("all reservations to be given back", func() bool { return g.state().inFlight() == 0 })
}

// occupy puts n requests in flight at a stand-in, through the route to it alone, until free is called.
func (g *gateway) occupy(s *stub, n int) (free func()) {
	g.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	before := s.active.Load()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			r := newRequest(ctx, http.MethodPost, g.URL+chatPath, strings.NewReader(asks("only-"+s.name, "stay")), "X-Occupy", "yes")
			_, _ = do(testClient, r)
		})
	}
	g.waitFor("requests to occupy "+s.name, func() bool { return s.active.Load() >= before+int32(n) })
	return func() {
		g.t.Helper()
		cancel()
		wg.Wait()
		g.waitFor(s.name+" to be free", func() bool { return g.state().load(s.addr) <= int(before) && s.active.Load() <= before })
	}
}

// load is the number of requests in flight at an address.
func (s state) load(addr string) int {
	for _, l := range s.Loads {
		if l.Address == addr {
			return l.InFlight
		}
	}
	return 0
}

// promptsOf is how many prompts are recorded for an address in one route.
func (s state) promptsOf(model, addr string) (n int) {
	for _, rec := range s.Records {
		if rec.Model != model {
			continue
		}
		for _, replica := range rec.Replicas {
			if replica.Address == addr {
				n += replica.Prompts
			}
		}
	}
	return n
}

// openAIError is the shape in which clients of the API expect errors.
type openAIError struct {
	Error *struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    any     `json:"code"`
	} `json:"error"`
}

// wantOpenAIError checks that an answer is an error of this status in the shape of the API.
func wantOpenAIError(t testing.TB, answer reply, status int) (code string) {
	t.Helper()
	if answer.status != status {
		t.Errorf("status %d, want %d: %s", answer.status, status, answer.body)
	}
	if got := answer.header.Get("Content-Type"); got != "application/json" {
		t.Errorf("Content-Type %q, want application/json", got)
	}
	var e openAIError
	if err := json.Unmarshal([]byte(answer.body), &e); err != nil || e.Error == nil || e.Error.Message == "" || e.Error.Type == "" {
		t.Errorf("not an error in OpenAI's shape: %s", answer.body)
		return ""
	}
	code, _ = e.Error.Code.(string)
	return code
}
