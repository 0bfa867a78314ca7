package rolter

import (
	"strings"
	"testing"
)

func TestFirstEventSaysHowTheRequestFared(t *testing.T) {
	long := strings.Repeat("x", 10_000)
	for _, tc := range []struct {
		stream   string
		status   int
		complete bool
	}{
		{`data: {"id":"chatcmpl-1","choices":[]}` + "\n\n", 200, true},
		{`data: {"error":{"message":"queue is full","type":"ServiceUnavailableError","param":null,"code":503}}` + "\n\ndata: [DONE]\n\n", 503, true},
		{`data:{"error":{"code":400}}` + "\r\n\r\n", 400, true},
		{`data: {"error":{"message":"no code"}}` + "\n\n", 500, true},
		{`data: {"error":{"code":"context_length_exceeded"}}` + "\n\n", 500, true},
		{`data: {"error":{"code":200}}` + "\n\n", 500, true},
		{`data: {"error":"as a string"}` + "\n\n", 500, true},
		{`data: { "error" : { "code" : 503 } }` + "\n\n", 503, true},
		{`data: {"object":"error","error":{"code":503}}` + "\n\n", 503, true},
		{`data: {"choices":[{"delta":{"content":"an \"error\""}}]}` + "\n\n", 200, true},
		{`data: {"choices":[{"error":{"code":503}}]}` + "\n\n", 200, true},
		{`data: {"error":null,"choices":[]}` + "\n\n", 200, true},
		{`data: {"error":{"code":503}` + "\n\n", 200, true}, // not JSON: nothing is known
		{"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n", 500, true},
		{"event: message_start\ndata: {\"type\":\"message_start\",\"error\":1}\n\n", 200, true},
		{": keep-alive\n\ndata: {\"error\":{\"code\":429}}\n\n", 429, true},
		{"data: {\"error\":{\"code\":", 200, false},
		{"", 200, false},
		{": only a comment\n\n", 200, false},
		{"data: " + long, 200, false},
	} {
		status, complete := eventStatus([]byte(tc.stream))
		if status != tc.status || complete != tc.complete {
			t.Errorf("%.80q: %d %v, want %d %v", tc.stream, status, complete, tc.status, tc.complete)
		}
	}
}

func FuzzEventStatus(f *testing.F) {
	f.Add([]byte("data: {\"error\":{\"code\":503}}\n\n"))
	f.Add([]byte("event: error\ndata: {}\n\n"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		if status, _ := eventStatus(stream); status != 200 && (status < 400 || status > 599) {
			t.Errorf("status %d", status)
		}
	})
}
