package replica

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// start runs a server on a free port until the test ends. It lives a thousand times faster than life unless told
// otherwise.
func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	setDefault(&cfg.TimeScale, 1000)
	s := New(cfg)
	if err := s.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func get(t *testing.T, s *Server, path string) (status int, body string) {
	t.Helper()
	resp, err := http.Get(s.URL() + path)
	if err != nil {
		t.Fatal(err)
	}
	return readAll(t, resp)
}

func post(t *testing.T, s *Server, path, body string) (status int, answer string) {
	t.Helper()
	resp, err := http.Post(s.URL()+path, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return readAll(t, resp)
}

func readAll(t *testing.T, resp *http.Response) (int, string) {
	t.Helper()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: " + what)
		}
	}
}

type event struct{ name, data string }

func sse(body string) []event {
	var events []event
	for block := range strings.SplitSeq(strings.TrimSpace(body), "\n\n") {
		var e event
		for line := range strings.Lines(block) {
			key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
			switch key {
			case "event":
				e.name = value
			case "data":
				e.data = value
			}
		}
		events = append(events, e)
	}
	return events
}

// at returns what is in a JSON text at a path of keys; list elements are "0", "1" … "9".
func at(t *testing.T, text string, path ...string) any {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	for _, key := range path {
		switch node := v.(type) {
		case map[string]any:
			v = node[key]
		case []any:
			v = node[key[0]-'0']
		default:
			t.Fatalf("no %v in %s", path, text)
		}
	}
	return v
}
