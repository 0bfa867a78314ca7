package replica

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The recordings in testdata are requests to a vLLM 0.32.0 with block size 32 and its answers.

// TestShapesAreThoseOfVLLM plays the recorded requests and compares the answers' status, content type, and the order,
// keys and types of what is in them.
func TestShapesAreThoseOfVLLM(t *testing.T) {
	requests, err := filepath.Glob("testdata/*.req")
	if err != nil || len(requests) == 0 {
		t.Fatal("no recordings", err)
	}
	s := start(t, Config{Model: "tiny", BlockSize: 32, CacheBlocks: 4096, MaxModelLen: 8192, ScaleOut: true})
	for _, file := range requests {
		name := strings.TrimSuffix(filepath.Base(file), ".req")
		t.Run(name, func(t *testing.T) {
			want := recordedResponse(t, "testdata/"+name+".resp")
			got := play(t, s, file)
			if got.StatusCode != want.StatusCode {
				t.Errorf("status %d, recorded %d", got.StatusCode, want.StatusCode)
			}
			if g, w := got.Header.Get("Content-Type"), want.Header.Get("Content-Type"); g != w {
				t.Errorf("content type %q, recorded %q", g, w)
			}
			if g, w := bodyShape(t, got), bodyShape(t, want); !slices.Equal(g, w) {
				t.Errorf("shape\n%s\nrecorded\n%s", strings.Join(g, "\n"), strings.Join(w, "\n"))
			}
		})
	}
}

// TestErrorMessagesAreThoseOfVLLM compares whole bodies where they do not depend on a model.
func TestErrorMessagesAreThoseOfVLLM(t *testing.T) {
	s := start(t, Config{Model: "tiny"})
	for _, name := range []string{"chat-err-model", "chat-err-empty-salt", "chat-err-json", "messages-err", "version", "load"} {
		t.Run(name, func(t *testing.T) {
			want, _ := io.ReadAll(recordedResponse(t, "testdata/"+name+".resp").Body)
			got, _ := io.ReadAll(play(t, s, "testdata/"+name+".req").Body)
			if string(got) != strings.TrimSpace(string(want)) {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
}

// TestMetricsAreThoseOfVLLM compares names, types, help and label names. What is not simulated may be missing.
func TestMetricsAreThoseOfVLLM(t *testing.T) {
	s := start(t, Config{Model: "tiny", BlockSize: 32, CacheBlocks: 4096})
	recorded, err := os.ReadFile("testdata/metrics.txt")
	if err != nil {
		t.Fatal(err)
	}
	_, got := get(t, s, "/metrics")
	values := regexp.MustCompile(`[^ ]+$`)
	// The labels of the simulated cache_config_info are a selection.
	config := regexp.MustCompile(`(?m)^vllm:cache_config_info.*\n`)
	lines := func(text string) []string {
		var lines []string
		for line := range strings.Lines(config.ReplaceAllString(text, "")) {
			line = strings.TrimSpace(line)
			if !strings.HasPrefix(line, "#") {
				line = values.ReplaceAllString(line, "")
			}
			lines = append(lines, line)
		}
		slices.Sort(lines)
		return lines
	}
	g, w := lines(got), lines(string(recorded))
	for _, line := range g {
		if !slices.Contains(w, line) {
			t.Errorf("not in vLLM's: %s", line)
		}
	}
	if !strings.Contains(got, `block_size="32"`) || !strings.Contains(got, `num_gpu_blocks="4096"`) ||
		!strings.Contains(got, `kv_cache_size_tokens="131072"`) {
		t.Errorf("cache_config_info: %s", config.FindString(got))
	}
}

func play(t *testing.T, s *Server, file string) *http.Response {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, body, _ := bytes.Cut(text, []byte("\n\n"))
	lines := strings.Split(string(head), "\n")
	fields := strings.Fields(lines[0])
	r, err := http.NewRequest(fields[0], s.URL()+fields[1], bytes.NewReader(bytes.TrimSuffix(body, []byte("\n"))))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range lines[1:] {
		if key, value, ok := strings.Cut(line, ": "); ok {
			r.Header.Set(key, value)
		}
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func recordedResponse(t *testing.T, file string) *http.Response {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, body, _ := bytes.Cut(text, []byte("\n\n"))
	// The lengths and the chunking are those of the wire, not of the recording.
	head = regexp.MustCompile(`(?m)^(content-length|transfer-encoding):.*\n?`).ReplaceAll(head, nil)
	r, err := http.ReadResponse(bufio.NewReader(io.MultiReader(bytes.NewReader(bytes.TrimSpace(head)),
		strings.NewReader("\n\n"), bytes.NewReader(body))), nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// bodyShape returns the shapes of an answer's events, of which equal ones in a row count once, or of its body.
func bodyShape(t *testing.T, r *http.Response) []string {
	t.Helper()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "text/event-stream") {
		return []string{shape(t, string(body))}
	}
	var shapes []string
	for _, e := range sse(string(body)) {
		line := e.name + " " + e.data
		if e.data != "[DONE]" {
			line = e.name + " " + shape(t, e.data)
		}
		shapes = append(shapes, line)
	}
	return slices.Compact(shapes)
}

// shape describes JSON by its keys, in their order, and types; a list by its first element.
func shape(t *testing.T, text string) string {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(text))
	var value func() string
	value = func() string {
		token, err := dec.Token()
		if err != nil {
			t.Fatalf("%v in %s", err, text)
		}
		switch token := token.(type) {
		case json.Delim:
			var parts []string
			for dec.More() {
				if token == '{' {
					key, _ := dec.Token()
					parts = append(parts, fmt.Sprintf("%v:%s", key, value()))
				} else {
					parts = append(parts, value())
				}
			}
			dec.Token()
			if token == '[' {
				return "[" + strings.Join(parts[:min(1, len(parts))], "") + "]"
			}
			return "{" + strings.Join(parts, " ") + "}"
		case nil:
			return "null"
		default:
			return fmt.Sprintf("%T", token)
		}
	}
	return value()
}
