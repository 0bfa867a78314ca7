package replica

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// fresh is a client without old connections, which would hide how new ones fare.
func fresh(t *testing.T) *http.Client {
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func setFault(t *testing.T, s *Server, f Fault) {
	t.Helper()
	if err := s.SetFault(f); err != nil {
		t.Fatal(err)
	}
}

func TestFaultsWithAStatus(t *testing.T) {
	for _, c := range []struct {
		kind           FaultKind
		status, health int
		contains       string
	}{
		{Status503, 503, 200, `{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.","type":"Service Unavailable","param":null,"code":503}}`},
		{Status500, 500, 200, `"code":500`},
		{Unhealthy, 500, 503, `"code":500`},
		{StreamError, 503, 200, `"code":503`},
	} {
		t.Run(string(c.kind), func(t *testing.T) {
			s := start(t, Config{})
			setFault(t, s, Fault{Kind: c.kind})
			if status, body := post(t, s, chatPath, chatBodyOf("x", "")); status != c.status || !strings.Contains(body, c.contains) {
				t.Errorf("%d %s", status, body)
			}
			if status, body := post(t, s, messagesPath, chatBodyOf("x", `,"max_tokens":1`)); status != c.status || at(t, body, "type") != "error" {
				t.Errorf("%d %s", status, body)
			}
			if status, _ := get(t, s, "/health"); status != c.health {
				t.Errorf("/health is %d, want %d", status, c.health)
			}
			if err := s.ClearFault(); err != nil {
				t.Error(err)
			}
			if status, body := post(t, s, chatPath, chatBodyOf("x", "")); status != 200 {
				t.Errorf("lifted: %d %s", status, body)
			}
		})
	}
}

// The error of a stream is written by Python's json.dumps, with spaces.
func TestStreamErrorIsTheFirstEvent(t *testing.T) {
	const message = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
	s := start(t, Config{Fault: Fault{Kind: StreamError}})
	openAI := `data: {"error": {"message": "` + message + `", "type": "Service Unavailable", "param": null, "code": 503}}` + "\n\ndata: [DONE]\n\n"
	for path, want := range map[string]string{
		chatPath:     openAI,
		completePath: openAI,
		messagesPath: `event: error` + "\n" + `data: {"type":"error","error":{"type":"internal_error","message":"` + message + `"}}` + "\n\n",
	} {
		status, body := post(t, s, path, chatBodyOf("x", `,"prompt":"x","stream":true,"max_tokens":1`))
		if status != 200 || body != want {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	resp, err := http.Post(s.URL()+responsesPath, "application/json", strings.NewReader(`{"input":"x","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err == nil || strings.Count(string(body), "data: ") != 2 {
		t.Errorf("%v after %s", err, body)
	}
}

func TestFaultsOfTheConnection(t *testing.T) {
	for _, stream := range []bool{false, true} {
		body := chatBodyOf("x", fmt.Sprintf(`,"stream":%v,"max_tokens":20`, stream))
		t.Run(fmt.Sprint("reset/stream=", stream), func(t *testing.T) {
			s := start(t, Config{})
			setFault(t, s, Fault{Kind: Reset})
			_, err := fresh(t).Post(s.URL()+chatPath, "application/json", strings.NewReader(body))
			if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
				t.Error(err)
			}
		})
		t.Run(fmt.Sprint("die/stream=", stream), func(t *testing.T) {
			s := start(t, Config{})
			setFault(t, s, Fault{Kind: Die, After: 4})
			resp, err := fresh(t).Post(s.URL()+chatPath, "application/json", strings.NewReader(body))
			if !stream {
				if !errors.Is(err, io.EOF) {
					t.Error(err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			got, err := io.ReadAll(resp.Body)
			if !errors.Is(err, io.ErrUnexpectedEOF) || bytes.Count(got, []byte("data: ")) != 4 || bytes.Contains(got, []byte("[DONE]")) {
				t.Errorf("%v after %s", err, got)
			}
			eventually(t, "what died is aborted", func() bool { st := s.Stats(); return st.Running == 0 && st.Requests == 1 })
		})
		t.Run(fmt.Sprint("hang/stream=", stream), func(t *testing.T) {
			s := start(t, Config{})
			setFault(t, s, Fault{Kind: Hang})
			done := make(chan error)
			go func() {
				_, err := fresh(t).Post(s.URL()+chatPath, "application/json", strings.NewReader(body))
				done <- err
			}()
			eventually(t, "request is read", func() bool { return s.Stats().Requests == 1 })
			if status, _ := get(t, s, "/health"); status != 200 {
				t.Errorf("/health is %d", status)
			}
			select {
			case err := <-done:
				t.Error("answered", err)
			default:
			}
			s.Close()
			if err := <-done; err == nil {
				t.Error("answered in the end")
			}
		})
	}
}

func TestRefuse(t *testing.T) {
	s := start(t, Config{})
	client := fresh(t)
	ask := func() error {
		resp, err := client.Get(s.URL() + "/health")
		if err == nil {
			readAll(t, resp)
		}
		return err
	}
	for range 2 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
		setFault(t, s, Fault{Kind: Refuse})
		setFault(t, s, Fault{Kind: Refuse}) // of no further effect
		eventually(t, "connections are refused", func() bool { return errors.Is(ask(), syscall.ECONNREFUSED) })
		if err := s.ClearFault(); err != nil {
			t.Fatal(err)
		}
	}
	setFault(t, s, Fault{Kind: Refuse, For: time.Millisecond})
	eventually(t, "the fault ends", func() bool { return s.Fault().Kind == NoFault })
	if err := ask(); err != nil {
		t.Error(err)
	}
	setFault(t, s, Fault{Kind: Refuse})
	s.Close()
	if err := s.ClearFault(); err != nil {
		t.Error(err)
	}
	if _, err := net.Dial("tcp", s.Addr()); err == nil {
		t.Error("a closed server listens again")
	}
}

// Time in the model is exact, so that a slow replica's is too.
func TestSlow(t *testing.T) {
	seconds := func(f Fault) (sum string) {
		s := start(t, Config{Timing: Timing{PrefillRate: 1000, DecodeTime: 10 * time.Millisecond}, Fault: f})
		post(t, s, completePath, `{"prompt":[1,2,3,4,5,6,7,8,9,10],"max_tokens":3}`)
		_, text := get(t, s, "/metrics")
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "vllm:e2e_request_latency_seconds_sum") {
				return strings.Fields(line)[1]
			}
		}
		return ""
	}
	// 10 tokens of prompt and 2 steps after the first token: 30 ms of the model's time, a thousandth of it in ours.
	if fast, slow := seconds(Fault{}), seconds(Fault{Kind: Slow, Factor: 5}); fast != "3e-05" || slow != "0.00015" {
		t.Errorf("%s s, slow %s s", fast, slow)
	}
}

func TestFaultOfTheNextRequests(t *testing.T) {
	s := start(t, Config{})
	setFault(t, s, Fault{Kind: Status503, Count: 2})
	get(t, s, "/health") // does not count
	for i, want := range []int{503, 503, 200} {
		if status, _ := post(t, s, chatPath, chatBodyOf("x", "")); status != want {
			t.Errorf("request %d: %d, want %d", i, status, want)
		}
	}
	setFault(t, s, Fault{Kind: Status503, For: time.Millisecond})
	eventually(t, "the fault ends", func() bool { return s.Fault().Kind == NoFault })
	setFault(t, s, Fault{Kind: Status503, For: time.Hour})
	setFault(t, s, Fault{Kind: Status500}) // takes its place
	if got := s.Fault().Kind; got != Status500 {
		t.Error(got)
	}
}

func TestFaultByHTTP(t *testing.T) {
	s := start(t, Config{})
	for _, c := range []struct {
		body   string
		status int
		want   FaultKind
	}{
		{`{"kind":"503","count":3,"for":"1h"}`, 200, Status503},
		{`hang`, 200, Hang},
		{`{"kind":"sulk"}`, 400, Hang},
		{`{"kind":"refuse","count":1}`, 400, Hang},
		{`{"kind":"die","for":"soon"}`, 400, Hang},
		{`{"kind":`, 400, Hang},
		{``, 200, NoFault},
	} {
		status, body := post(t, s, "/sim/fault", c.body)
		if status != c.status || s.Fault().Kind != c.want {
			t.Errorf("%s: %d %s, in effect %+v", c.body, status, body, s.Fault())
		}
	}
	post(t, s, "/sim/fault", `{"kind":"503","count":3}`)
	if _, body := get(t, s, "/sim/fault"); body != `{"kind":"503","count":3}` {
		t.Error(body)
	}
	r, _ := http.NewRequest("DELETE", s.URL()+"/sim/fault", nil)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	if status, body := readAll(t, resp); status != 200 || body != `{"kind":""}` || s.Fault().Kind != NoFault {
		t.Errorf("%d %s", status, body)
	}
}

func TestDieInAShortStream(t *testing.T) {
	s := start(t, Config{})
	setFault(t, s, Fault{Kind: Die, After: 100})
	resp, err := fresh(t).Post(s.URL()+chatPath, "application/json", strings.NewReader(chatBodyOf("x", `,"stream":true,"max_tokens":2`)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) || bytes.Contains(got, []byte("[DONE]")) {
		t.Errorf("%v after %s", err, got)
	}
}
