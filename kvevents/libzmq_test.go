package kvevents

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"testing"
	"time"
)

// libzmqPublisher is a publisher as vLLM's, on libzmq with its default limits, that does what it reads: a number publishes so many batches of so many
// bytes more, "restart" begins anew on the same ports. When it has done so it
// prints its ports.
const libzmqPublisher = `
import collections, json, struct, sys, threading, queue, time
import zmq

todo = queue.Queue()
def read():
    for line in sys.stdin:
        todo.put(line)
    todo.put(None)
threading.Thread(target=read, daemon=True).start()

context = zmq.Context()
ports = [0, 0]
def bind(kind, i):
    socket = context.socket(kind)
    for _ in range(200):
        try:
            if ports[i]:
                socket.bind("tcp://127.0.0.1:%d" % ports[i])
            else:
                ports[i] = socket.bind_to_random_port("tcp://127.0.0.1")
            return socket
        except zmq.ZMQError:
            time.sleep(0.02)
    raise SystemExit("cannot bind again")

clock = 1e9
while True:
    pub, router = bind(zmq.PUB, 0), bind(zmq.ROUTER, 1)
    pub.set_hwm(100000)
    print(json.dumps(ports), flush=True)
    seq, steps = 0, collections.deque(maxlen=10000)
    while True:
        if router.poll(0):
            frames = router.recv_multipart()
            if len(frames) == 3:
                start = int.from_bytes(frames[2], "big")
                for n, payload in steps:
                    if n >= start:
                        router.send_multipart([frames[0], b"", b"kv", n.to_bytes(8, "big"), payload])
                router.send_multipart([frames[0], b"", b"", b"\xff" * 8, b""])
        try:
            line = todo.get(timeout=0.01)
        except queue.Empty:
            continue
        if line is None:
            raise SystemExit
        if line == "restart\n":
            break
        n, extra = map(int, line.split())
        for _ in range(n):
            clock += 1
            event = b"\x82\xa4type\xacBlockRemoved\xacblock_hashes\x91\xcf" + struct.pack(">Q", int(clock))
            payload = b"\x94\xcb" + struct.pack(">d", clock) + b"\x91" + event + b"\x00\xc6" + struct.pack(">I", extra) + bytes(extra)
            pub.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])
            steps.append((seq, payload))
            seq += 1
        print(json.dumps(ports), flush=True)
    pub.close(0)
    router.close(0)
    clock += 30
`

// TestWithLibzmq follows a publisher on the library that engines use, which loses replies as theirs do. On Debian, python3-zmq has it.
func TestWithLibzmq(t *testing.T) {
	python := ""
	for _, name := range []string{"python3", "/usr/bin/python3"} {
		if exec.Command(name, "-c", "import zmq").Run() == nil {
			python = name
			break
		}
	}
	if python == "" {
		t.Skip("no python3 that can import zmq")
	}
	noGoroutinesLeft(t)
	cmd := exec.Command(python, "-c", libzmqPublisher)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		cmd.Wait()
	})
	lines := bufio.NewReader(out)
	var ports [2]int
	done := func() {
		t.Helper()
		line, err := lines.ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(line, &ports)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	done()
	do := func(what string) {
		t.Helper()
		io.WriteString(in, what+"\n")
		done()
	}

	sink := new(record)
	s, err := NewStream(StreamConfig{
		Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", ports[0]),
		Replay:   fmt.Sprintf("tcp://127.0.0.1:%d", ports[1]),
		Topic:    "kv",
		Dial:     dial,
		Sink:     sink,
	})
	if err != nil {
		t.Fatal(err)
	}
	s.tuning.replayInterval = 10 * time.Millisecond
	do("9000 7600") // before anybody listens
	s.Start()
	t.Cleanup(s.Close)
	holds := func(n int) {
		t.Helper()
		eventually(t, fmt.Sprintf("all %d batches", n), func() bool { return s.State() == Exact && len(sink.held()) == n })
	}
	holds(9000)
	do("500 0")
	holds(9500)
	if n := s.Stats(); n.Losses != 0 || n.Gaps != 0 {
		t.Errorf("%+v", n)
	}
	t.Logf("9000 batches took %d rounds", s.Stats().ReplayRounds)

	do("restart")
	do("20 0")
	holds(20)
	if n := s.Stats(); n.Restarts != 1 || n.Connects < 2 {
		t.Errorf("%+v", n)
	}
}
