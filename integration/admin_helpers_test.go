package integration

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// llm is an upstream that answers at once, or in a stream of many events that take their time, and can hold its answers back.
type llm struct {
	*httptest.Server
	name string
	held atomic.Pointer[chan struct{}] // answers wait for it, when it is set

	waiting, requests atomic.Int64
}

const streamEvents = 40

func startLLM(t testing.TB, name string) *llm {
	e := &llm{name: name}
	e.Server = httptest.NewServer(e)
	t.Cleanup(e.Close)
	return e
}

func startLLMs(t testing.TB, names ...string) (all []*llm) {
	for _, name := range names {
		all = append(all, startLLM(t, name))
	}
	return all
}

// hold keeps answers back until the result is called. Of a stream the first event is sent.
func (e *llm) hold() (release func()) {
	c := make(chan struct{})
	e.held.Store(&c)
	return sync.OnceFunc(func() {
		e.held.Store(nil)
		close(c)
	})
}

func (e *llm) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/health" {
		return
	}
	e.requests.Add(1)
	var body struct{ Stream bool }
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	wait := func() bool {
		held := e.held.Load()
		if held == nil {
			return true
		}
		e.waiting.Add(1)
		defer e.waiting.Add(-1)
		select {
		case <-*held:
			return true
		case <-r.Context().Done():
			return false
		}
	}
	if !body.Stream {
		if wait() {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"engine":%q,"choices":[{"message":{"role":"assistant","content":"an answer"}}]}`, e.name)
		}
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	pace := time.NewTicker(10 * time.Millisecond)
	defer pace.Stop()
	for i := range streamEvents {
		fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"%d \"}}]}\n\n", i)
		w.(http.Flusher).Flush()
		if i == 0 && !wait() {
			return
		}
		select {
		case <-pace.C:
		case <-r.Context().Done():
			return
		}
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}

// turn is one message of a conversation.
type turn struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// talk is the body of a request for the model llama.
func talk(stream bool, turns ...turn) string {
	body, err := json.Marshal(struct {
		Model    string `json:"model"`
		Stream   bool   `json:"stream,omitempty"`
		Messages []turn `json:"messages"`
	}{"llama", stream, turns})
	if err != nil {
		panic(err)
	}
	return string(body)
}

// freshConnections is a client that never meets a connection that the server has just let go of, which happens at every reload with idle ones.
func freshConnections() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
}

// persistently sends a request until there is an answer: when it replaces its configuration, Caddy itself resets connections on which it has not
// read anything yet. Callers check that such a request had reached no engine.
func persistently(send func() (*http.Response, error)) (resp *http.Response, err error) {
	for range 20 {
		if resp, err = send(); err == nil {
			break
		}
	}
	return resp, err
}

// ask sends a request and says which target answered. An answer that is not complete is an error.
func ask(client *http.Client, url, body string) (target string, err error) {
	resp, err := persistently(func() (*http.Response, error) { return client.Post(url, "application/json", strings.NewReader(body)) })
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	target = resp.Header.Get("X-Rolter-Target")
	switch {
	case err != nil:
		return target, fmt.Errorf("from %s, after %d bytes: %w", target, len(answer), err)
	case resp.StatusCode != http.StatusOK:
		return target, fmt.Errorf("from %s: %d %s", target, resp.StatusCode, answer)
	case strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream"):
		if n := bytes.Count(answer, []byte("data: ")); n != streamEvents+1 || !bytes.HasSuffix(answer, []byte("data: [DONE]\n\n")) {
			return target, fmt.Errorf("from %s: a stream of %d events", target, n)
		}
	}
	return target, nil
}

// openStream asks for a stream and returns when its first event is there; the rest is read by the result.
func openStream(t *testing.T, url string, turns ...turn) (target string, rest func() error) {
	t.Helper()
	client := freshConnections()
	resp, err := persistently(func() (*http.Response, error) {
		return client.Post(url, "application/json", strings.NewReader(talk(true, turns...)))
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(resp.Body)
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	r := bufio.NewReader(resp.Body)
	if line, err := r.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: ") {
		t.Fatalf("%q %v", line, err)
	}
	return resp.Header.Get("X-Rolter-Target"), func() error {
		rest, err := io.ReadAll(r)
		if err == nil && !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")) {
			err = fmt.Errorf("the stream ended after %d bytes more", len(rest))
		}
		return err
	}
}

// traffic is a steady load of short requests, long streams and growing conversations.
type traffic struct {
	url    string
	cancel context.CancelFunc
	wg     sync.WaitGroup

	done   atomic.Int64 // requests that were answered
	mu     sync.Mutex
	errs   []error
	served map[string]int // by target
}

// startTraffic runs until it is stopped. Conversations that are on a target for which stays holds must not leave it.
func startTraffic(url string, stays func(target string) bool) *traffic {
	ctx, cancel := context.WithCancel(context.Background())
	tr := &traffic{url: url, cancel: cancel, served: make(map[string]int)}
	client := freshConnections()
	request := func(body string) string {
		target, err := ask(client, url, body)
		tr.mu.Lock()
		defer tr.mu.Unlock()
		if err != nil {
			tr.errs = append(tr.errs, err)
		}
		tr.served[target]++
		tr.done.Add(1)
		return target
	}
	for i := range 3 {
		tr.wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				request(talk(false, turn{"user", fmt.Sprintf("%d: a question that is asked once, number %d", i, n)}))
			}
		})
		tr.wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				request(talk(true, turn{"user", fmt.Sprintf("%d: a long answer is wanted, number %d", i, n)}))
			}
		})
	}
	for i := range 4 {
		tr.wg.Go(func() {
			for c := 0; ctx.Err() == nil; c++ {
				turns := []turn{{"system", fmt.Sprintf("%d.%d %s", i, c, strings.Repeat("instructions of this conversation, ", 20))}}
				at := ""
				for n := 0; n < 12 && ctx.Err() == nil; n++ {
					turns = append(turns, turn{"user", fmt.Sprintf("question %d", n)})
					target := request(talk(false, turns...))
					if stays(at) && target != at {
						tr.mu.Lock()
						tr.errs = append(tr.errs, fmt.Errorf("conversation %d.%d left %s for %s at turn %d", i, c, at, target, n))
						tr.mu.Unlock()
					}
					at = target
					turns = append(turns, turn{"assistant", strings.Repeat("an answer ", 30)})
				}
			}
		})
	}
	return tr
}

// stop ends the load, waits for what is still running, and checks what came of it: an answer to every request, of one engine.
func (tr *traffic) stop(t *testing.T, engines ...*llm) {
	t.Helper()
	tr.cancel()
	tr.wg.Wait()
	var reached int64
	for _, e := range engines {
		reached += e.requests.Load()
	}
	if reached != tr.done.Load() {
		t.Errorf("%d requests were answered, and %d reached an engine", tr.done.Load(), reached)
	}
	for i, err := range tr.errs {
		if i == 10 {
			t.Errorf("… and %d more", len(tr.errs)-i)
			break
		}
		t.Error(err)
	}
	t.Logf("%d requests, by target %v", tr.done.Load(), tr.served)
}

// jsonConfig is a whole configuration around one handler.
func (g *gateway) jsonConfig(handlers string) string {
	return fmt.Sprintf(`{"admin":{"listen":%q,"config":{"persist":false}},"logging":{"logs":{"default":{"level":"DEBUG"}}},"apps":{"http":{"servers":{"srv0":{"listen":[%q],"automatic_https":{"disable":true},"routes":[{"handle":[%s]}]}}}}}`,
		strings.TrimPrefix(g.Admin, "http://"), g.Addr, handlers)
}

// loadJSON replaces the configuration.
func (g *gateway) loadJSON(handlers string) error {
	_, err := g.admin(http.MethodPost, "/load", "application/json", g.jsonConfig(handlers))
	return err
}

// providersJSON are providers of these names.
func providersJSON(engines ...*llm) string {
	var all []string
	for _, e := range engines {
		all = append(all, fmt.Sprintf(`{"name":%q,"api_base":%q}`, e.name, e.URL))
	}
	return "[" + strings.Join(all, ",") + "]"
}

// targetsJSON are targets of these names.
func targetsJSON(names ...string) string {
	var all []string
	for _, name := range names {
		all = append(all, fmt.Sprintf(`{"provider":%q}`, name))
	}
	return "[" + strings.Join(all, ",") + "]"
}

// handlerFor is a handler with one route, that prefers where a conversation is to where there is less to do. more are further fields of the route.
func handlerFor(engines []*llm, targets, more string) string {
	return fmt.Sprintf(`{"@id":"rolter","handler":"rolter","providers":%s,"routes":[{"@id":"llama","model":"llama","overload_margin":1000,"targets":%s%s}]}`,
		providersJSON(engines...), targets, more)
}

// addr is the address by which the state knows an engine.
func (e *llm) addr() string { return e.Listener.Addr().String() }
