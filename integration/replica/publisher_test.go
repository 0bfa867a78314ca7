package replica

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
	"github.com/vmihailenco/msgpack/v5"
)

// publishing is a replica that publishes and replays events.
func publishing(t *testing.T, cfg Config) *Server {
	t.Helper()
	setDefault(&cfg.KVEvents.Endpoint, "tcp://127.0.0.1:0")
	setDefault(&cfg.KVEvents.ReplayEndpoint, "tcp://127.0.0.1:0")
	setDefault(&cfg.KVEvents.Topic, "kv@sim")
	return start(t, cfg)
}

// dial connects a ZeroMQ socket, as go-zeromq speaks ZMTP.
func dial(t *testing.T, endpoint string, kind zmq4.SocketType) *zmq4.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c, err := zmq4.Open(conn, null.Security(), kind, nil, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// published is a message of three frames.
type published struct {
	topic string
	batch
}

func read(frames [][]byte) published {
	p := published{batch: batch{seq: binary.BigEndian.Uint64(frames[len(frames)-2]), payload: frames[len(frames)-1]}}
	if len(frames) == 3 {
		p.topic = string(frames[0])
	}
	return p
}

// subscription collects what is published to a subscriber.
type subscription struct {
	mu       sync.Mutex
	messages []published
	ended    bool
}

// subscribe returns when the publisher knows of the subscription.
func subscribe(t *testing.T, s *Server, rank int, topic string) *subscription {
	t.Helper()
	pub, _ := s.EventEndpoints(rank)
	p := s.ranks[rank].publisher
	p.mu.Lock()
	before := maps.Clone(p.subscribers) // those that have been cut may still be among them
	p.mu.Unlock()
	c := dial(t, pub, zmq4.Sub)
	if err := c.SendMsg(zmq4.NewMsgString("\x01" + topic)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the subscription arrives", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for s := range p.subscribers {
			if _, old := before[s]; !old && s.topics[topic] > 0 {
				return true
			}
		}
		return false
	})
	sub := new(subscription)
	go func() {
		for {
			m, err := c.RecvMsg()
			sub.mu.Lock()
			if err != nil {
				sub.ended = true
				sub.mu.Unlock()
				return
			}
			sub.messages = append(sub.messages, read(m.Frames))
			sub.mu.Unlock()
		}
	}()
	return sub
}

func (s *subscription) all() []published {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.messages)
}

func (s *subscription) seqs() []uint64 { return seqs(s.all()) }

func seqs(messages []published) []uint64 {
	list := []uint64{}
	for _, m := range messages {
		list = append(list, m.seq)
	}
	return list
}

func (s *subscription) wait(t *testing.T, n int) []published {
	t.Helper()
	eventually(t, fmt.Sprint(n, " messages come"), func() bool { return len(s.all()) >= n })
	return s.all()
}

// replay asks for past batches and returns the frames of all replies, the empty first one left out, until the mark of the
// end or until nothing comes.
func replay(t *testing.T, endpoint string, from uint64) (replies [][][]byte, ended bool) {
	t.Helper()
	c := dial(t, endpoint, zmq4.Dealer)
	if err := c.SendMsg(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, from))); err != nil {
		t.Fatal(err)
	}
	messages := make(chan [][]byte)
	go func() {
		defer close(messages)
		for {
			m, err := c.RecvMsg()
			if err != nil {
				return
			}
			messages <- m.Frames
		}
	}()
	defer func() {
		c.Close()
		for range messages {
		}
	}()
	for {
		select {
		case frames, ok := <-messages:
			if !ok || len(frames[0]) != 0 {
				t.Fatalf("reply %x", frames)
			}
			if seq := frames[len(frames)-2]; binary.BigEndian.Uint64(seq) == math.MaxUint64 {
				return replies, true
			}
			replies = append(replies, frames[1:])
		case <-time.After(300 * time.Millisecond):
			return replies, false
		}
	}
}

func replaySeqs(replies [][][]byte) []uint64 {
	list := []uint64{}
	for _, r := range replies {
		list = append(list, read(r).seq)
	}
	return list
}

// ask generates a prompt of so many tokens, all of them new where n is new, and a token. It fills ⌊tokens ÷ block size⌋ blocks
// and makes one batch.
func ask(t *testing.T, s *Server, n, tokens int) {
	t.Helper()
	ids := make([]string, tokens)
	for i := range ids {
		ids[i] = fmt.Sprint(n*100_000 + i)
	}
	if status, body := post(t, s, completePath, `{"max_tokens":1,"prompt":[`+strings.Join(ids, ",")+`]}`); status != 200 {
		t.Fatal(body)
	}
}

func TestSubscriptions(t *testing.T) {
	s := publishing(t, Config{})
	all, right, prefix, wrong := subscribe(t, s, 0, ""), subscribe(t, s, 0, "kv@sim"), subscribe(t, s, 0, "kv@"), subscribe(t, s, 0, "kv@sim2")
	for i := range 3 {
		ask(t, s, i, 32)
	}
	for _, sub := range []*subscription{all, right, prefix} {
		for i, m := range sub.wait(t, 3) {
			if m.topic != "kv@sim" || m.seq != uint64(i) {
				t.Errorf("message %d: topic %q, number %d", i, m.topic, m.seq)
			}
		}
	}
	if got := wrong.all(); len(got) != 0 {
		t.Errorf("%d messages of another topic", len(got))
	}
}

func TestReplay(t *testing.T) {
	for _, withoutTopic := range []bool{false, true} {
		s := publishing(t, Config{KVEvents: KVEvents{BufferSteps: 5, ReplayWithoutTopic: withoutTopic}})
		sub := subscribe(t, s, 0, "")
		for i := range 8 {
			ask(t, s, i, 32)
		}
		live := sub.wait(t, 8)
		_, endpoint := s.EventEndpoints(0)
		for from, want := range map[uint64][]uint64{0: {3, 4, 5, 6, 7}, 6: {6, 7}, 8: {}, math.MaxUint64: {}} {
			got, ended := replay(t, endpoint, from)
			if !ended || !slices.Equal(replaySeqs(got), want) {
				t.Errorf("from %d: %v, ended %v", from, replaySeqs(got), ended)
			}
			for _, r := range got {
				wantFrames := 3
				if withoutTopic {
					wantFrames = 2
				} else if string(r[0]) != "kv@sim" {
					t.Errorf("topic %q", r[0])
				}
				if m := read(r); len(r) != wantFrames || !bytes.Equal(m.payload, live[m.seq].payload) {
					t.Errorf("reply of %d frames, %x", len(r), r)
				}
			}
		}
		// A request without the empty frame is never answered, and does no harm.
		c := dial(t, endpoint, zmq4.Dealer)
		for _, request := range []zmq4.Msg{zmq4.NewMsg(make([]byte, 8)), zmq4.NewMsgFrom(nil, nil, make([]byte, 8)), zmq4.NewMsgFrom(nil, []byte{7})} {
			if err := c.SendMsg(request); err != nil {
				t.Fatal(err)
			}
		}
		if m, err := c.RecvMsg(); err != nil || read(m.Frames).seq != 7 {
			t.Errorf("%v, %v", m, err)
		}
	}
}

func TestEventFaults(t *testing.T) {
	for _, c := range []struct {
		fault      Fault
		live, past []uint64 // numbers of what the subscriber and a replay from 0 get of six batches, the fault being set before the third
		end        bool
	}{
		{Fault{}, []uint64{0, 1, 2, 3, 4, 5}, []uint64{0, 1, 2, 3, 4, 5}, true},
		{Fault{Kind: Gap, Count: 2}, []uint64{0, 1, 4, 5}, []uint64{0, 1, 2, 3, 4, 5}, true},
		{Fault{Kind: Gap}, []uint64{0, 1}, []uint64{0, 1, 2, 3, 4, 5}, true},
		{Fault{Kind: Lost, Count: 3}, []uint64{0, 1, 5}, []uint64{0, 1, 5}, true},
		{Fault{Kind: Duplicate, Count: 1}, []uint64{0, 1, 2, 2, 3, 4, 5}, []uint64{0, 1, 2, 3, 4, 5}, true},
		{Fault{Kind: LossyReplay, Share: 1}, []uint64{0, 1, 2, 3, 4, 5}, []uint64{}, false},
		{Fault{Kind: NoEnd}, []uint64{0, 1, 2, 3, 4, 5}, []uint64{0, 1, 2, 3, 4, 5}, false},
		{Fault{Kind: Late, Delay: time.Millisecond}, []uint64{0, 1, 2, 3, 4, 5}, []uint64{0, 1, 2, 3, 4, 5}, true},
	} {
		t.Run(string(c.fault.Kind), func(t *testing.T) {
			s := publishing(t, Config{})
			sub := subscribe(t, s, 0, "")
			for i := range 6 {
				if i == 2 {
					if err := s.SetEventFault(c.fault); err != nil {
						t.Fatal(err)
					}
				}
				ask(t, s, i, 32)
			}
			sub.wait(t, len(c.live))
			if got := sub.seqs(); !slices.Equal(got, c.live) {
				t.Errorf("published %v, want %v", got, c.live)
			}
			_, endpoint := s.EventEndpoints(0)
			if got, ended := replay(t, endpoint, 0); !slices.Equal(replaySeqs(got), c.past) || ended != c.end {
				t.Errorf("replayed %v, ended %v", replaySeqs(got), ended)
			}
		})
	}
}

func TestMalformedBatches(t *testing.T) {
	s := publishing(t, Config{KVEvents: KVEvents{Fault: Fault{Kind: Malformed, Count: 6}}})
	sub := subscribe(t, s, 0, "")
	for i := range 7 {
		ask(t, s, i, 32)
	}
	messages := sub.wait(t, 7)
	for i, m := range messages[:6] {
		if size := len(messages[6].payload); len(m.payload) >= size && len(m.payload) < 1<<20 {
			t.Errorf("batch %d: %x", i, m.payload)
		}
	}
	if got := decodeBatch(t, messages[6].payload); len(got.events) != 1 {
		t.Errorf("after the fault: %+v", got)
	}
}

func TestPublisherGoesDownWhileHTTPGoesOn(t *testing.T) {
	s := publishing(t, Config{})
	sub := subscribe(t, s, 0, "")
	ask(t, s, 0, 32)
	sub.wait(t, 1)
	if err := s.SetEventFault(Fault{Kind: Down}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the connection is cut", func() bool { sub.mu.Lock(); defer sub.mu.Unlock(); return sub.ended })
	pub, endpoint := s.EventEndpoints(0)
	if conn, err := net.Dial("tcp", strings.TrimPrefix(pub, "tcp://")); err == nil {
		conn.Close()
		t.Error("connected to a publisher that is down")
	}
	ask(t, s, 1, 32)
	s.SetEventFault(Fault{})
	again := subscribe(t, s, 0, "")
	ask(t, s, 2, 32)
	again.wait(t, 1)
	if got := again.seqs(); !slices.Equal(got, []uint64{2}) {
		t.Errorf("afterwards %v", got)
	}
	if got, _ := replay(t, endpoint, 1); !slices.Equal(replaySeqs(got), []uint64{1, 2}) {
		t.Errorf("replayed %v", replaySeqs(got))
	}

	s.SetEventFault(Fault{Kind: Restarted})
	if got := s.EventFault().Kind; got != NoFault {
		t.Errorf("%q goes on", got)
	}
	again = subscribe(t, s, 0, "")
	ask(t, s, 0, 32) // its first block is still cached, its last one is computed again
	if got := decodeBatch(t, again.wait(t, 1)[0].payload); len(got.events[0].hashes) != 1 || again.seqs()[0] != 0 {
		t.Errorf("after a restart of the publisher: number %d, %+v", again.seqs()[0], got)
	}
	if got, _ := replay(t, endpoint, 0); len(got) != 1 {
		t.Errorf("replayed %v", replaySeqs(got))
	}
}

func TestHangingPublisher(t *testing.T) {
	s := publishing(t, Config{})
	sub := subscribe(t, s, 0, "")
	s.SetEventFault(Fault{Kind: Hang})
	ask(t, s, 0, 32)
	pub, endpoint := s.EventEndpoints(0)
	for _, e := range []string{pub, endpoint} { // accepted, and not greeted
		conn, err := net.Dial("tcp", strings.TrimPrefix(e, "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if n, err := conn.Read(make([]byte, 1)); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%d bytes, %v", n, err)
		}
	}
	if got := sub.all(); len(got) != 0 {
		t.Errorf("%d messages", len(got))
	}
	s.SetEventFault(Fault{})
	sub.wait(t, 1)
	s.SetEventFault(Fault{Kind: Hang}) // Close does not wait for its end
}

func TestEventFaultByHTTP(t *testing.T) {
	s := publishing(t, Config{})
	for body, want := range map[string]int{`{"kind":"gap","count":3}`: 200, `gap`: 200, `{"kind":"down","count":1}`: 400, `503`: 400, `{"kind":"lossy-replay","share":2}`: 400} {
		if status, answer := post(t, s, "/sim/kv-fault", body); status != want {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
	post(t, s, "/sim/kv-fault", `{"kind":"late","delay":"2s","for":"1h"}`)
	if _, body := get(t, s, "/sim/kv-fault"); body != `{"kind":"late","for":"1h0m0s","delay":"2s"}` {
		t.Error(body)
	}
	if s.Fault().Kind != NoFault {
		t.Error("it is a fault of the server too")
	}
}

func TestEventsComeLateAndInOrder(t *testing.T) {
	s := publishing(t, Config{KVEvents: KVEvents{Delay: 5 * time.Millisecond}})
	sub := subscribe(t, s, 0, "")
	for i := range 20 {
		ask(t, s, i, 32)
	}
	sub.wait(t, 20)
	if got := sub.seqs(); !slices.IsSorted(got) || len(slices.Compact(got)) != 20 {
		t.Error(got)
	}
}

func TestSlowSubscriberLosesBatches(t *testing.T) {
	s := publishing(t, Config{KVEvents: KVEvents{HighWater: 2}})
	sub := subscribe(t, s, 0, "")
	s.SetEventFault(Fault{Kind: Hang}) // so that the queue fills up
	for i := range 10 {
		ask(t, s, i, 32)
	}
	s.SetEventFault(Fault{})
	ask(t, s, 10, 32)
	eventually(t, "something comes", func() bool { return len(sub.all()) >= 2 })
	if got := sub.seqs(); len(got) > 5 || got[0] != 0 {
		t.Errorf("%v for a subscriber with room for 2", got)
	}
}

// A restart begins a new stream at the same place: nothing says that the old cache is gone.
func TestRestartOfTheStream(t *testing.T) {
	s := publishing(t, Config{})
	pub, endpoint := s.EventEndpoints(0)
	for i := range 3 {
		ask(t, s, i, 32)
	}
	for _, first := range []uint64{0, 1000} {
		next, err := s.Restart(func(c *Config) { c.KVEvents.FirstSeq = first })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { next.Close() })
		if p, r := next.EventEndpoints(0); p != pub || r != endpoint {
			t.Errorf("at %s, %s", p, r)
		}
		if got, ended := replay(t, endpoint, 0); len(got) != 0 || !ended {
			t.Errorf("a new process replays %v", replaySeqs(got))
		}
		sub := subscribe(t, next, 0, "")
		ask(t, next, 0, 32)
		got := sub.wait(t, 1)[0]
		if b := decodeBatch(t, got.payload); got.seq != first || len(b.events) != 1 || len(b.events[0].hashes) != 2 {
			t.Errorf("number %d, %+v", got.seq, b)
		}
		s = next
	}
}

func TestRanks(t *testing.T) {
	s := publishing(t, Config{Ranks: 3, CacheBlocks: 100})
	port := func(endpoint string) int { _, n, _ := parseEndpoint(endpoint); return n }
	var subs []*subscription
	pub0, replay0 := s.EventEndpoints(0)
	for i := range 3 {
		pub, replay := s.EventEndpoints(i)
		if port(pub) != port(pub0)+i || port(replay) != port(replay0)+i {
			t.Errorf("rank %d at %s, %s", i, pub, replay)
		}
		subs = append(subs, subscribe(t, s, i, ""))
	}
	on := func(rank string) (status int, cached any) {
		r, _ := http.NewRequest("POST", s.URL()+chatPath, strings.NewReader(chatBodyOf(long, "")))
		r.Header.Set("Content-Type", "application/json")
		if rank != "" {
			r.Header.Set("X-data-parallel-rank", rank)
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		status, body := readAll(t, resp)
		return status, at(t, body, "usage", "prompt_tokens_details", "cached_tokens")
	}
	for i, c := range []struct {
		rank string
		hit  bool
	}{{"1", false}, {"1", true}, {"0", false}, {" 0 ", true}, {"2", false}, {"", true}, {"", true}, {"", true}, {"nonsense", true}} {
		if status, cached := on(c.rank); status != 200 || (cached != 0.0) != c.hit {
			t.Errorf("request %d to rank %q: %d, %v cached", i, c.rank, status, cached)
		}
	}
	for i, sub := range subs {
		for k, m := range sub.wait(t, 1) {
			if b := decodeBatch(t, m.payload); b.rank != i || m.seq != uint64(k) {
				t.Errorf("rank %d: %+v", i, b)
			}
		}
	}
	_, metrics := get(t, s, "/metrics")
	for i, requests := range []int{4, 3, 2} {
		for _, line := range []string{
			`vllm:num_requests_running{engine="%d",model_name="sim"} %d.0`, `vllm:request_success_total{engine="%d",finished_reason="stop",model_name="sim"} %d.0`,
			`vllm:time_to_first_token_seconds_count{engine="%d",model_name="sim"} %d.0`,
		} {
			n := requests
			if strings.Contains(line, "running") {
				n = 0
			}
			if line = fmt.Sprintf(line, i, n); !strings.Contains(metrics, line) {
				t.Errorf("no %s in\n%s", line, metrics)
			}
		}
	}
	if n := strings.Count(metrics, "# TYPE vllm:num_requests_running"); n != 1 {
		t.Errorf("%d times the type", n)
	}
	_, sources := get(t, s, "/kv_event_sources")
	if got, want := at(t, sources, "2", "endpoint"), fmt.Sprintf("tcp://*:%d", port(pub0)+2); got != want {
		t.Errorf("%v, want %s", got, want)
	}
	r, _ := http.NewRequest("POST", s.URL()+chatPath, strings.NewReader(chatBodyOf(long, "")))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-data-parallel-rank", "3")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	if status, body := readAll(t, resp); status != 400 || !strings.Contains(body, "out of range [0, 3)") {
		t.Errorf("%d %s", status, body)
	}
}

func TestEventSources(t *testing.T) {
	s := publishing(t, Config{KVEvents: KVEvents{Topic: "kv@A@tiny"}, SGLangInfo: true})
	recorded, _ := io.ReadAll(recordedResponse(t, "testdata/kv_event_sources.resp").Body)
	pub, replay := s.EventEndpoints(0)
	star := func(endpoint string) string { return strings.Replace(endpoint, "127.0.0.1", "*", 1) }
	want := strings.NewReplacer("tcp://*:5601", star(pub), "tcp://*:5701", star(replay)).Replace(strings.TrimSpace(string(recorded)))
	if _, got := get(t, s, "/kv_event_sources"); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	_, info := get(t, s, "/server_info")
	_, port, _ := parseEndpoint(pub)
	if at(t, info, "kv_events", "endpoint_port_base") != float64(port) || at(t, info, "kv_events", "topic") != "kv@A@tiny" {
		t.Error(info)
	}
	if status, body := get(t, start(t, Config{}), "/kv_event_sources"); status != 200 || body != "{}" {
		t.Errorf("without events: %d %s", status, body)
	}
	old := start(t, Config{KVEvents: KVEvents{NoSources: true}})
	for _, path := range []string{"/kv_event_sources", "/server_info"} {
		if status, _ := get(t, old, path); status != 404 {
			t.Errorf("%s: %d", path, status)
		}
	}
}

func TestNothingRunsAfterClose(t *testing.T) {
	http.DefaultClient.CloseIdleConnections()
	before := runtime.NumGoroutine()
	s := New(Config{TimeScale: 1000, Ranks: 2, KVEvents: KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", Delay: time.Hour}})
	if err := s.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	subscribe(t, s, 1, "")
	_, endpoint := s.EventEndpoints(0)
	replay(t, endpoint, 0)
	ask(t, s, 0, 32)
	s.SetEventFault(Fault{Kind: Hang, For: time.Hour})
	s.Close()
	if err := s.SetEventFault(Fault{Kind: Restarted}); err != nil { // of no effect
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
	eventually(t, "all goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}

// TestPyzmq lets libzmq subscribe and ask for a replay, where Python has it.
func TestPyzmq(t *testing.T) {
	if exec.Command("python3", "-c", "import zmq").Run() != nil {
		t.Skip("no python3 with pyzmq")
	}
	s := publishing(t, Config{})
	ask(t, s, 0, 32)
	pub, endpoint := s.EventEndpoints(0)
	script := exec.Command("python3", "-c", `
import sys, zmq
pub, replay = sys.argv[1:]
ctx = zmq.Context()
sub = ctx.socket(zmq.SUB)
sub.setsockopt(zmq.HEARTBEAT_IVL, 50)
sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000)
sub.connect(pub)
sub.subscribe("other")
sub.subscribe("kv@")
sub.unsubscribe("other")
print("ready", flush=True)
for _ in range(2):
    print(*[f.hex() for f in sub.recv_multipart()], flush=True)
for kind, request in (zmq.DEALER, [b"", bytes(8)]), (zmq.REQ, [bytes(8)]):
    s = ctx.socket(kind)
    s.connect(replay)
    s.send_multipart(request)
    while True:
        frames = s.recv_multipart()
        print(*[f.hex() for f in frames if f], flush=True)
        if kind == zmq.REQ or frames[-2] == b"\xff" * 8:
            break
`, pub, endpoint)
	var errs bytes.Buffer
	script.Stderr = &errs
	out, err := script.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := script.Start(); err != nil {
		t.Fatal(err)
	}
	defer script.Process.Kill()
	p := s.ranks[0].publisher
	eventually(t, "libzmq subscribes", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for s := range p.subscribers {
			return len(s.topics) == 1 && s.topics["kv@"] == 1
		}
		return false
	})
	ask(t, s, 1, 32)
	ask(t, s, 2, 32)
	text, _ := io.ReadAll(out)
	if err := script.Wait(); err != nil {
		t.Fatal(err, errs.String())
	}
	live := p.since(0)
	line := func(b batch) string { return fmt.Sprintf("%x %016x %x\n", "kv@sim", b.seq, b.payload) }
	want := "ready\n" + line(live[1]) + line(live[2]) + line(live[0]) + line(live[1]) + line(live[2]) + "ffffffffffffffff\n" + line(live[0])
	if string(text) != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
}

// index is what a subscriber makes of a stream: how many copies of each block there are.
type index struct {
	t      *testing.T
	copies map[uint64]int
	parent map[uint64]uint64
}

type decodedBatch struct {
	events []decodedEvent
	rank   int
}

type decodedEvent struct {
	kind    string
	hashes  []uint64
	parent  any
	tokens  []uint32
	lora    any
	extra   []any
	session any
}

func decodeBatch(t *testing.T, payload []byte) decodedBatch {
	t.Helper()
	dec := msgpack.NewDecoder(bytes.NewReader(payload))
	dec.UseLooseInterfaceDecoding(true)
	v, err := dec.DecodeInterface()
	if err != nil {
		t.Fatalf("%v in %x", err, payload)
	}
	outer := v.([]any)
	b := decodedBatch{rank: int(number(outer[2]))}
	if now := float64(time.Now().UnixNano()) / 1e9; math.Abs(outer[0].(float64)-now) > 3600 {
		t.Errorf("time %v", outer[0])
	}
	for _, e := range outer[1].([]any) {
		get := func(i int, key string) any {
			switch e := e.(type) {
			case map[string]any:
				return e[key]
			case []any:
				if i < len(e) {
					return e[i]
				}
			}
			return nil
		}
		d := decodedEvent{kind: get(0, "type").(string)}
		if hashes, ok := get(1, "block_hashes").([]any); ok {
			for _, h := range hashes {
				d.hashes = append(d.hashes, number(h))
			}
		}
		if d.kind == "BlockStored" {
			if parent := get(2, "parent_block_hash"); parent != nil {
				d.parent = number(parent)
			}
			for _, id := range get(3, "token_ids").([]any) {
				d.tokens = append(d.tokens, uint32(number(id)))
			}
			d.lora, d.extra = get(7, "lora_name"), get(8, "extra_keys").([]any)
			d.session = get(99, "session_id")
		}
		b.events = append(b.events, d)
	}
	return b
}

func number(v any) uint64 {
	switch v := v.(type) {
	case int64:
		return uint64(v)
	case uint64:
		return v
	}
	panic(fmt.Sprintf("%T is no number", v))
}

func (x *index) apply(b decodedBatch) {
	for _, e := range b.events {
		switch e.kind {
		case "BlockStored":
			size := len(e.tokens) / len(e.hashes)
			parent := e.parent
			if parent != nil && x.copies[parent.(uint64)] == 0 {
				x.t.Errorf("%x stored behind a block that is not there", e.hashes)
			}
			want := []uint64(nil) // the hashes are those of the tokens and what else is said
			if parent != nil {
				want = chain(parent.(uint64), e.tokens, size)
			} else {
				salt, lora := "", ""
				if l, ok := e.lora.(string); ok {
					lora = l
				}
				if extra, ok := e.extra[0].([]any); ok && extra[len(extra)-1] != any(lora) {
					salt = extra[len(extra)-1].(string)
				}
				want = BlockKeys(e.tokens, size, salt, lora)
			}
			if !slices.Equal(e.hashes, want) {
				x.t.Errorf("hashes %x, want %x", e.hashes, want)
			}
			for _, h := range e.hashes {
				if x.copies[h]++; parent != nil {
					x.parent[h] = parent.(uint64)
				}
				parent = h
			}
		case "BlockRemoved":
			h := e.hashes[0]
			if x.copies[h]--; x.copies[h] < 0 || len(e.hashes) != 1 {
				x.t.Errorf("%x removed, which is not there", e.hashes)
			}
			if x.copies[h] == 0 {
				delete(x.copies, h)
				for child, parent := range x.parent {
					if parent == h && x.copies[child] > 0 {
						x.t.Errorf("%x removed before its child", h)
					}
				}
			}
		case "AllBlocksCleared":
			clear(x.copies)
		}
	}
}

// An index that is fed with the events holds what the cache holds, copy by copy, and predicts cached_tokens.
func TestEventsAreWhatTheCacheHolds(t *testing.T) {
	for _, form := range []EventForm{EventMaps, EventArrays} {
		t.Run(string(form), func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			s := publishing(t, Config{BlockSize: 4, CacheBlocks: 60, Adapters: "ad1,ad2", KVEvents: KVEvents{Form: form}})
			sub := subscribe(t, s, 0, "")
			x := &index{t: t, copies: map[uint64]int{}, parent: map[uint64]uint64{}}
			fed := 0
			catchUp := func() {
				p := s.ranks[0].publisher
				p.mu.Lock()
				n := int(p.seq)
				p.mu.Unlock()
				for _, m := range sub.wait(t, n)[fed:] {
					x.apply(decodeBatch(t, m.payload))
				}
				fed = n
			}
			repeated := 0
			for i := range 300 {
				ids := make([]uint32, 0, 48)
				for range 1 + r.IntN(4) { // prompts that share beginnings, half of them of whole blocks
					for range 4 + 4*r.IntN(2) {
						ids = append(ids, uint32(1+len(ids)/8*1000+r.IntN(2)*7*(len(ids)/8)))
					}
				}
				if r.IntN(2) == 0 {
					ids = append(ids, uint32(r.IntN(3)))
				}
				model, salt := []string{"sim", "sim", "ad1", "ad2"}[r.IntN(4)], []string{"", "", "s1"}[r.IntN(3)]
				lora := ""
				if model != "sim" {
					lora = model
				}
				body := fmt.Sprintf(`{"model":%q,"prompt":%s,"max_tokens":%d`, model, encode(ids), 1+r.IntN(20))
				if salt != "" {
					body += fmt.Sprintf(`,"cache_salt":%q`, salt)
				}
				resident := 0
				for _, key := range BlockKeys(ids, 4, salt, lora) {
					if x.copies[key] == 0 {
						break
					}
					resident++
				}
				ignore := r.IntN(10) == 0
				if ignore {
					body += `,"prompt_logprobs":1`
					resident = 0
				}
				status, answer := post(t, s, completePath, body+"}")
				if status != 200 {
					t.Fatal(answer)
				}
				if got, want := at(t, answer, "usage", "prompt_tokens_details", "cached_tokens"), float64(CachedTokens(4, resident, len(ids))); got != want {
					t.Fatalf("request %d: %v tokens cached, predicted %v", i, got, want)
				}
				if i%70 == 49 {
					post(t, s, "/reset_prefix_cache", "{}")
					ask(t, s, i, 8) // the event goes out with the next step
				}
				catchUp()
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			cache := s.ranks[0].engine.Cache()
			total := 0
			for key := range cache.blocks {
				n := 1 + len(cache.copies[key])
				if total += n; n > 1 {
					repeated++
				}
				if x.copies[key] != n {
					t.Errorf("block %x: %d copies, the index says %d", key, n, x.copies[key])
				}
			}
			if total != cache.Len() || len(x.copies) != len(cache.blocks) || repeated == 0 {
				t.Errorf("%d blocks in the cache, %d in the index, %d of them more than once", cache.Len(), len(x.copies), repeated)
			}
		})
	}
}

// A repeated prompt of whole blocks computes its last block again: two copies, two removals.
func TestRepeatedPromptOfWholeBlocks(t *testing.T) {
	s := publishing(t, Config{CacheBlocks: 9})
	sub := subscribe(t, s, 0, "")
	ask(t, s, 1, 48)
	ask(t, s, 1, 48)
	ask(t, s, 1, 49) // shares all
	ask(t, s, 2, 128)
	messages := sub.wait(t, 3)
	first, second := decodeBatch(t, messages[0].payload), decodeBatch(t, messages[1].payload)
	last := first.events[0].hashes[2]
	if e := second.events[0]; !slices.Equal(e.hashes, []uint64{last}) || e.parent != first.events[0].hashes[1] {
		t.Errorf("first %+v, then %+v", first, second)
	}
	removed := 0
	for _, e := range decodeBatch(t, messages[2].payload).events {
		if e.kind == "BlockRemoved" && e.hashes[0] == last {
			removed++
		}
	}
	if len(messages) != 3 || removed != 2 {
		t.Errorf("%d batches, the last block removed %d times", len(messages), removed)
	}
}

func TestResetWaitsForTheNextStep(t *testing.T) {
	s := publishing(t, Config{Timing: Timing{DecodeTime: forever}})
	sub := subscribe(t, s, 0, "")
	ask(t, s, 1, 32)
	sub.wait(t, 1)
	if _, body := post(t, s, "/reset_prefix_cache", ""); body != `{"success":true}` || s.Stats().ResidentBlocks != 0 {
		t.Errorf("%s, %d blocks", body, s.Stats().ResidentBlocks)
	}
	if got := sub.all(); len(got) != 1 {
		t.Errorf("an idle engine publishes %d batches", len(got))
	}
	ask(t, s, 2, 32)
	b := decodeBatch(t, sub.wait(t, 2)[1].payload)
	if len(b.events) != 2 || b.events[0].kind != "AllBlocksCleared" || b.events[1].kind != "BlockStored" {
		t.Errorf("%+v", b)
	}
	_, cancel := open(t, s, long)
	defer cancel()
	eventually(t, "it holds blocks", func() bool { return s.Stats().UsedBlocks > 0 })
	if _, body := post(t, s, "/reset_prefix_cache", ""); body != `{"success":false}` || s.Stats().ResidentBlocks == 0 {
		t.Errorf("while blocks are held: %s", body)
	}
}

func TestSessionTagsItsEvents(t *testing.T) {
	s := publishing(t, Config{})
	sub := subscribe(t, s, 0, "")
	r, _ := http.NewRequest("POST", s.URL()+chatPath, strings.NewReader(chatBodyOf(long, `,"max_tokens":1,"session_id":"theirs"`)))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Session-ID", "ours")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if e := decodeBatch(t, sub.wait(t, 1)[0].payload).events[0]; e.session != "ours" {
		t.Errorf("%+v", e)
	}
}
