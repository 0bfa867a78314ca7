package kvevents

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestParseEndpoint(t *testing.T) {
	for _, test := range []struct{ endpoint, address, failure string }{
		{endpoint: "tcp://10.0.0.7:5557", address: "10.0.0.7:5557"},
		{endpoint: "tcp://engine-0.engines.svc:5557", address: "engine-0.engines.svc:5557"},
		{endpoint: "tcp://[fd00::7]:5557", address: "[fd00::7]:5557"},
		{endpoint: "tcp://[fe80::7%eth0]:5557", address: "[fe80::7%eth0]:5557"},
		{endpoint: "tcp://*:5557", failure: `endpoint "tcp://*:5557": * is not a host to connect to`},
		{endpoint: "tcp://:5557", failure: `endpoint "tcp://:5557" has no host`},
		{endpoint: "tcp://fd00::7:5557", failure: `endpoint "tcp://fd00::7:5557": address fd00::7:5557: too many colons in address`},
		{endpoint: "tcp://engine", failure: `endpoint "tcp://engine": address engine: missing port in address`},
		{endpoint: "tcp://engine:0", failure: `endpoint "tcp://engine:0": port "0" is not in 1..65535`},
		{endpoint: "tcp://engine:65536", failure: `endpoint "tcp://engine:65536": port "65536" is not in 1..65535`},
		{endpoint: "tcp://engine:5557/x", failure: `endpoint "tcp://engine:5557/x": port "5557/x" is not in 1..65535`},
		{endpoint: "ipc:///tmp/kv", failure: `endpoint "ipc:///tmp/kv" is not of the form tcp://host:port`},
		{endpoint: "engine:5557", failure: `endpoint "engine:5557" is not of the form tcp://host:port`},
		{endpoint: "", failure: `endpoint "" is not of the form tcp://host:port`},
	} {
		address, err := addressOf(test.endpoint)
		if test.failure != "" {
			if err == nil || err.Error() != test.failure {
				t.Errorf("%q: error %v, want %s", test.endpoint, err, test.failure)
			}
		} else if err != nil || address != test.address {
			t.Errorf("%q: %q, %v; want %q", test.endpoint, address, err, test.address)
		}
	}
	if host, port, err := ParseEndpoint("tcp://*:5557"); host != "*" || port != "5557" || err != nil {
		t.Errorf("the host * is for the caller to replace: %q, %q, %v", host, port, err)
	}
}

var dial DialFunc = new(net.Dialer).DialContext

// listen serves one connection at a time.
func listen(t testing.TB, serve func(net.Conn)) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serve(c)
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return l.Addr().String()
}

// says is a peer that says something and waits until it is left.
func says(b []byte) func(net.Conn) {
	return func(c net.Conn) {
		c.Write(b)
		io.Copy(io.Discard, c)
	}
}

// shortly makes waiting for a handshake short.
func shortly(t *testing.T) {
	saved := handshakeTime
	handshakeTime = 200 * time.Millisecond
	t.Cleanup(func() { handshakeTime = saved })
}

func TestWhatPeersMayNotSend(t *testing.T) {
	noGoroutinesLeft(t)
	shortly(t)
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	changed := func(b []byte, at int, to byte) []byte { b[at] = to; return b }
	hello := join(greeting(), ready("PUB"))
	huge := func(flags byte, size uint64) []byte { return append([]byte{flags | longFlag}, bigEndian(size)...) }
	for _, test := range []struct {
		peer string
		says []byte
		want string // in the error
	}{
		{"silent", nil, "timeout"},
		{"half a greeting", greeting()[:30], "timeout"},
		{"no READY", greeting(), "timeout"},
		{"half a READY", join(greeting(), ready("PUB")[:9]), "timeout"},
		{"HTTP", []byte("HTTP/1.1 400 Bad Request\r\n\r\n" + strings.Repeat("x", 64)), "greeting"},
		{"ZMTP 2", changed(greeting(), 10, 1), "version"},
		{"CURVE", join(changed(greeting(), 12, 'C'), ready("PUB")), "security mechanism"},
		{"wants what it is", join(greeting(), ready("SUB")), "not compatible"},
		{"READY without a type", join(greeting(), frame(commandFlag, []byte("\x05READY"))), "malformed READY"},
		{"another command than READY", join(greeting(), frame(commandFlag, []byte("\x05ERROR\x02no"))), "invalid command"},
		{"command without a name", join(greeting(), frame(commandFlag, nil)), "unexpected EOF"},
		{"READY ends in a name", join(greeting(), frame(commandFlag, []byte("\x05READY\x0bSock"))), ""},
		{"READY ends after a name", join(greeting(), frame(commandFlag, []byte("\x05READY\x0bSocket-Type"))), "malformed READY"},
		{"READY ends in a size", join(greeting(), frame(commandFlag, []byte("\x05READY\x0bSocket-Type\x00\x00"))), "malformed READY"},
		{"READY claims 4 GiB", join(greeting(), frame(commandFlag, []byte("\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB"))), "EOF"},
		{"huge READY", join(greeting(), huge(commandFlag, 1<<62)), "command of 4611686018427387904 bytes"},
		{"big READY", join(greeting(), huge(commandFlag, maxCommand+1)), "command of 8193 bytes"},
		{"message instead of READY", join(greeting(), frame(0, []byte("x"))), "message before READY"},
		{"frame of 2^62 bytes", join(hello, huge(0, 1<<62)), "more than 16777216 bytes"},
		{"frame of 2^64-1 bytes", join(hello, huge(moreFlag, 1<<64-1)), "more than 16777216 bytes"},
		{"frame of 40 GiB", join(hello, huge(0, 40<<30)), "more than 16777216 bytes"},
		{"second frame beyond the limit", join(hello, frame(moreFlag, make([]byte, 1000)), huge(0, maxMessage-999)), "more than 16777216 bytes"},
		{"command of 40 GiB", join(hello, huge(commandFlag, 40<<30)), "command of 42949672960 bytes"},
		{"nine frames", join(hello, bytes.Repeat(frame(moreFlag, nil), 9)), "more than 8 frames"},
		{"frames without end", join(hello, bytes.Repeat(frame(moreFlag, nil), 100_000)), "more than 8 frames"},
		{"command within a message", join(hello, frame(moreFlag, nil), frame(commandFlag, []byte("\x04PING"))), "command within a message"},
		{"command with more", join(hello, frame(commandFlag|moreFlag, []byte("\x04PING"))), "command within a message"},
		{"unknown flags", join(hello, []byte{0x80, 0}), "flags 0x80"},
		{"noise", join(hello, []byte("\x01\xff"), bytes.Repeat([]byte{0xaa}, 300)), "flags 0xaa"},
		{"command that ends in its name", join(hello, frame(commandFlag, []byte("\x09PING"))), "invalid command"},
		{"empty command", join(hello, frame(commandFlag, nil)), "unexpected EOF"},
	} {
		t.Run(test.peer, func(t *testing.T) {
			address := listen(t, says(test.says))
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			c, err := subscribe(t.Context(), dial, address, "")
			for err == nil {
				_, err = c.receive()
			}
			if c != nil {
				c.close()
			}
			runtime.ReadMemStats(&after)
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %q does not say %q", err, test.want)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
				t.Errorf("%d bytes were allocated", n)
			}
		})
	}
}

func TestBigMessage(t *testing.T) {
	big := bytes.Repeat([]byte("0123456789abcdef"), maxMessage/16-1)
	address := listen(t, says(bytes.Join([][]byte{greeting(), ready("PUB"), wire([]byte("topic"), bigEndian(7), big), wire([]byte("topic"), bigEndian(8), nil)}, nil)))
	c, err := subscribe(t.Context(), dial, address, "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	for _, want := range []message{{seq: 7, payload: big}, {seq: 8}} {
		frames, err := c.receive()
		if err != nil {
			t.Fatal(err)
		}
		if m := parse(frames); m.kind != msgBatch || m.seq != want.seq || !bytes.Equal(m.payload, want.payload) {
			t.Errorf("message %d has not come as it was sent", want.seq)
		}
	}
}

func TestPingIsAnswered(t *testing.T) {
	answer := make(chan []byte, 1)
	address := listen(t, func(c net.Conn) {
		r := bufio.NewReader(c)
		c.Write(append(greeting(), ready("PUB")...))
		io.CopyN(io.Discard, r, greetingSize)
		readMessage(r) // READY
		readMessage(r) // the subscription
		c.Write(append(frame(commandFlag, []byte("\x04PING\x00\x0acontext")), wire(nil, bigEndian(1), []byte("x"))...))
		m, _ := readMessage(r)
		answer <- bytes.Join(m, nil)
		io.Copy(io.Discard, r)
	})
	c, err := subscribe(t.Context(), dial, address, "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	frames, err := c.receive()
	if err != nil || parse(frames).seq != 1 {
		t.Fatalf("%q, %v: the message after the PING was to come", frames, err)
	}
	if got := <-answer; string(got) != "\x04PONG" {
		t.Errorf("the answer to PING is %q", got)
	}
}

func TestEndOfContextEndsReceiving(t *testing.T) {
	noGoroutinesLeft(t)
	for name, said := range map[string][]byte{"in the handshake": nil, "idle": append(greeting(), ready("PUB")...)} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			said := said
			address := listen(t, func(c net.Conn) {
				c.Write(said)
				io.CopyN(io.Discard, c, greetingSize)
				cancel()
				io.Copy(io.Discard, c)
			})
			c, err := subscribe(ctx, dial, address, "")
			if err == nil {
				_, err = c.receive()
				c.close()
			}
			if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// captures are what libzmq 4.3.4 has sent, and the frames of messages of all engines.
type captures struct {
	Frames []struct {
		Name, Expect string
		Frames       []string
	}
	Captures map[string]string `json:"zmtp_captures"`
}

func readCaptures(t *testing.T) (c captures) {
	t.Helper()
	b, err := os.ReadFile("testdata/zmtp.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c captures) bytes(t *testing.T, prefix string) []byte {
	t.Helper()
	for name, b := range c.Captures {
		if strings.HasPrefix(name, prefix) {
			return unhex(t, b)
		}
	}
	t.Fatalf("no capture %s", prefix)
	return nil
}

func TestCaptureOfPublisher(t *testing.T) {
	c := readCaptures(t)
	address := listen(t, says(append(c.bytes(t, "libzmq_4.3.4_PUB_greeting_ready"), c.bytes(t, "libzmq_PUB_two_messages")...)))
	conn, err := subscribe(t.Context(), dial, address, "kv")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.close()
	for _, want := range []message{{seq: 5, payload: unhex(t, "92cb000000000000000090")}, {seq: 6, payload: bytes.Repeat([]byte("Z"), 300)}} {
		frames, err := conn.receive()
		if err != nil {
			t.Fatal(err)
		}
		if m := parse(frames); m.kind != msgBatch || m.seq != want.seq || !bytes.Equal(m.payload, want.payload) {
			t.Errorf("got %d %x, want %d %x", m.seq, m.payload, want.seq, want.payload)
		}
	}
}

func TestParseFrames(t *testing.T) {
	want := map[string]message{
		"live":                  {seq: 0x29},
		"live_empty_topic":      {seq: 0},
		"live_llmd_topic":       {seq: 1},
		"replay_request_dealer": {kind: msgBad},
		"replay_reply_3":        {seq: 0x29},
		"replay_end_3":          {seq: endSeq},
		"replay_reply_2":        {seq: 0x29},
		"replay_end_2":          {seq: endSeq},
		"atom_legacy_single":    {kind: msgBad},
	}
	for _, f := range readCaptures(t).Frames {
		var frames [][]byte
		for _, s := range f.Frames {
			frames = append(frames, unhex(t, s))
		}
		m := parse(frames)
		w, ok := want[f.Name]
		if !ok || m.kind != w.kind || m.seq != w.seq {
			t.Errorf("%s: kind %d, seq %d; want kind %d, seq %d", f.Name, m.kind, m.seq, w.kind, w.seq)
		}
		if m.kind == msgBatch && hex.EncodeToString(m.payload) != f.Frames[len(f.Frames)-1] {
			t.Errorf("%s: payload %x", f.Name, m.payload)
		}
		delete(want, f.Name)
	}
	if len(want) > 0 {
		t.Errorf("not in the file: %v", want)
	}
	if m := parse(nil); m.kind != msgBad {
		t.Errorf("no frames: kind %d", m.kind)
	}
}

// script is a peer that says something and hangs up, whatever it hears.
type script struct {
	net.Conn
	bytes.Reader
}

func (s *script) Read(p []byte) (int, error)       { return s.Reader.Read(p) }
func (s *script) Write(p []byte) (int, error)      { return len(p), nil }
func (s *script) Close() error                     { return nil }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

func FuzzConnection(f *testing.F) {
	hello := append(greeting(), ready("PUB")...)
	f.Add([]byte{})
	f.Add(greeting())
	f.Add(hello)
	f.Add(append(bytes.Clone(hello), wire([]byte("kv"), bigEndian(1), payload(1, 2))...))
	f.Add(append(bytes.Clone(hello), frame(commandFlag, []byte("\x04PING\x00\x0a"))...))
	f.Add(append(bytes.Clone(hello), frame(moreFlag, make([]byte, 300))...))
	f.Add(append(greeting(), "\x04\x0d\x05READY\x0bSocket"...))
	f.Fuzz(func(t *testing.T, said []byte) {
		// Mutations of the greeting only are soon boring.
		for _, said := range [][]byte{said, append(bytes.Clone(hello), said...)} {
			peer := new(script)
			peer.Reset(said)
			c, err := subscribe(t.Context(), func(context.Context, string, string) (net.Conn, error) { return peer, nil }, "peer", "")
			if err != nil {
				continue
			}
			for {
				frames, err := c.receive()
				if err != nil {
					break
				}
				total := 0
				for _, f := range frames {
					total += len(f)
				}
				if len(frames) == 0 || len(frames) > maxFrames || total > len(said) {
					t.Fatalf("%d frames of %d bytes from %d bytes", len(frames), total, len(said))
				}
				parse(frames)
			}
			c.close()
		}
	})
}

// flood publishes the same message again and again.
func flood(b testing.TB, m []byte) (address string) {
	chunk := bytes.Repeat(m, 64<<10/len(m)+1)
	return listen(b, func(c net.Conn) {
		c.Write(append(greeting(), ready("PUB")...))
		for {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	})
}

// The processor time is that of both sides. The publisher's is little: it writes about 64 KiB at once.
func BenchmarkReceive(b *testing.B) {
	c, err := subscribe(b.Context(), dial, flood(b, wire(nil, bigEndian(1), make([]byte, 484))), "")
	if err != nil {
		b.Fatal(err)
	}
	defer c.close()
	b.ReportAllocs()
	begun := processorTime(b)
	for b.Loop() {
		frames, err := c.receive()
		if err != nil || parse(frames).kind != msgBatch {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(processorTime(b)-begun)/float64(b.N), "cpu-ns/op")
}

func processorTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
