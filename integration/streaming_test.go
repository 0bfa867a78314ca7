package integration

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// The engine sends its next piece only when the client has confirmed the one before: whoever holds a piece back stops the stream, and the test
// ends when its patience does.
func TestAnswersAreNotBuffered(t *testing.T) {
	const patience = 30 * time.Second
	s := newStub(t, "a", nil)
	g := startGateway(t, fmt.Sprintf(`
		handle /gzip/* {
			encode gzip
			%[1]s
		}
		handle /policy/* {
			reverse_proxy %[2]s {
				lb_policy rolter cache_aware
			}
		}
		handle {
			%[1]s
		}`, rolterFor([]*stub{s}, route("m", "", s)), s.addr))

	for _, c := range []struct {
		name, path, contentType, accept string
		piece                           func(i int) string
	}{
		{"events", chatPath, "text/event-stream", "", func(i int) string { return fmt.Sprintf("data: {\"i\":%d}\n\n", i) }},
		{"events with a charset", chatPath, "text/event-stream; charset=utf-8", "", func(i int) string { return fmt.Sprintf("data: {\"i\":%d}\r\n\r\n", i) }},
		// The first event is looked at before the rest, which must not keep its lines from the client.
		{"single lines", chatPath, "text/event-stream", "", func(i int) string { return fmt.Sprintf(": keep-alive %d\n", i) }},
		{"pieces of one line", chatPath, "text/event-stream", "", func(i int) string { return fmt.Sprintf("<%d>", i) }},
		{"JSON lines", chatPath, "application/x-ndjson", "", func(i int) string { return fmt.Sprintf("{\"i\":%d}\n", i) }},
		{"text completions", textPath, "text/event-stream", "", func(i int) string { return fmt.Sprintf("data: %d\n\n", i) }},
		{"an unknown API", "/v1/audio/speech", "audio/wav", "", func(i int) string { return fmt.Sprintf("\x00%d", i) }},
		{"events, compressed", "/gzip" + chatPath, "text/event-stream", "gzip", func(i int) string { return fmt.Sprintf("data: {\"i\":%d}\n\n", i) }},
		{"by the policy", "/policy" + chatPath, "text/event-stream", "", func(i int) string { return fmt.Sprintf("data: {\"i\":%d}\n\n", i) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			const pieces = 5
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			confirmed := make(chan int, pieces+1)
			s.answers(func(w http.ResponseWriter, r *http.Request, _ []byte) {
				w.Header().Set("Content-Type", c.contentType)
				rc := http.NewResponseController(w)
				_ = rc.Flush() // the headers, at once
				for i := range pieces {
					select {
					case <-confirmed:
					case <-r.Context().Done():
						return
					}
					_, _ = io.WriteString(w, c.piece(i))
					_ = rc.Flush()
				}
			})
			header := []string{}
			if c.accept != "" {
				header = []string{"Accept-Encoding", c.accept}
			}
			resp, err := testClient.Do(newRequest(ctx, http.MethodPost, g.URL+c.path, strings.NewReader(`{"model":"m","prompt":"hi","stream":true}`), header...))
			if err != nil {
				t.Fatalf("the headers did not come before the first piece: %v", err)
			}
			defer resp.Body.Close()
			confirmed <- 0 // the headers
			var body io.Reader = resp.Body
			if c.accept != "" {
				if got := resp.Header.Get("Content-Encoding"); got != c.accept {
					t.Fatalf("Content-Encoding %q, want %q", got, c.accept)
				}
				if body, err = gzip.NewReader(body); err != nil {
					t.Fatal(err)
				}
			}
			for i := range pieces {
				want := c.piece(i)
				got := make([]byte, len(want))
				if _, err := io.ReadFull(body, got); err != nil {
					t.Fatalf("piece %d did not come: %v", i, err)
				}
				if string(got) != want {
					t.Fatalf("piece %d is %q, want %q", i, got, want)
				}
				confirmed <- i
			}
			if rest, err := io.ReadAll(body); err != nil || len(rest) != 0 {
				t.Errorf("after the last piece: %q, %v", rest, err)
			}
		})
	}
	g.idle()
}

// A stream of an engine that dies must not look complete.
func TestStreamThatBreaksOff(t *testing.T) {
	s := newStub(t, "a", events(func(i int) bool { return i < 3 }, "data: 0\n\n", "data: 1\n\n", "data: 2\n\n", "data: 3\n\n"))
	g := startGateway(t, rolterFor([]*stub{s}, route("m", "", s)))
	resp, err := testClient.Do(newRequest(context.Background(), http.MethodPost, g.URL+chatPath, strings.NewReader(asks("m", "hi"))))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	got, err := io.ReadAll(in)
	if err == nil {
		t.Errorf("the stream ended in order after %q", got)
	}
	if want := "data: 0\n\ndata: 1\n\ndata: 2\n\n"; string(got) != want {
		t.Errorf("received %q before the end, want %q", got, want)
	}
	g.idle()
}
