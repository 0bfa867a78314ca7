package kvevents

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// quick has times for tests.
func quick() tuning {
	return tuning{
		retry:          2 * time.Millisecond,
		retryMax:       20 * time.Millisecond,
		retryAlive:     5 * time.Millisecond,
		stable:         time.Hour,
		replaySilence:  50 * time.Millisecond,
		replayAnswer:   500 * time.Millisecond,
		replayTime:     20 * time.Second,
		replayInterval: time.Millisecond,
		replayAgain:    time.Hour,
		replayOff:      time.Hour,
	}
}

// fetch runs a replay and returns what it has passed on: the numbers of batches, -1 for what is lost and -2 for another process.
func fetch(t *testing.T, address string, from position, goal uint64) (got []int, r *replay, err error) {
	t.Helper()
	times := quick()
	r = &replay{
		dial:    dial,
		address: address,
		tuning:  &times,
		from:    from,
		goal:    func() uint64 { return goal },
		put: func(m message) error {
			switch m.kind {
			case msgLost:
				got = append(got, -1)
			case msgReborn:
				got = append(got, -2)
			case msgFirst:
				if len(got) > 0 && got[len(got)-1] != -2 {
					t.Errorf("batch %d is said to be the first", m.seq)
				}
				fallthrough
			default:
				got = append(got, int(m.seq))
			}
			return nil
		},
	}
	err = r.run(t.Context())
	return got, r, err
}

func span(from, to int) (all []int) {
	for i := from; i < to; i++ {
		all = append(all, i)
	}
	return all
}

func TestReplay(t *testing.T) {
	noGoroutinesLeft(t)
	lossy := func(request, reply int) bool { return reply >= 100*(request+1) && reply%3 == 0 }
	for _, test := range []struct {
		name      string
		publisher *publisher
		batches   int
		missing   []uint64 // that the publisher has never had
		from      int      // last batch that is known; -1 is none
		other     bool     // it is known with other contents
		goal      uint64
		want      []int
		rounds    int // at most
		failure   string
	}{
		{name: "all", batches: 300, from: -1, want: span(0, 300), rounds: 1},
		{name: "all, old layout", publisher: &publisher{noTopic: true}, batches: 300, from: -1, want: span(0, 300), rounds: 1},
		{name: "nothing published", from: -1, rounds: 1},
		{name: "nothing new", batches: 20, from: 19, rounds: 1},
		{name: "the rest", batches: 20, from: 7, want: span(8, 20), rounds: 1},
		{name: "up to what comes live", batches: 20, from: 7, goal: 12, want: span(8, 12), rounds: 1},
		{name: "long burst: the end is believed only in a short one", batches: 2000, from: -1, want: span(0, 2000), rounds: 2},
		{name: "holes", publisher: &publisher{drop: lossy}, batches: 500, from: -1, want: span(0, 500), rounds: 6},
		{name: "tail lost", publisher: &publisher{drop: func(request, reply int) bool { return request == 0 && reply >= 1000 }}, batches: 1200, from: -1,
			want: span(0, 1200), rounds: 2},
		{name: "no end", publisher: &publisher{noEnd: func(request int) bool { return request == 0 }}, batches: 40, from: -1, want: span(0, 40), rounds: 2},
		{name: "never an end", publisher: &publisher{noEnd: func(int) bool { return true }}, batches: 40, from: -1, want: span(0, 40), rounds: 2,
			failure: "no answer"},
		{name: "never an end, but what comes live", publisher: &publisher{noEnd: func(int) bool { return true }}, batches: 40, from: -1, goal: 40,
			want: span(0, 40), rounds: 1},
		{name: "too many holes", publisher: &publisher{drop: func(request, reply int) bool { return reply%3 == 2 }}, batches: 100, from: -1, want: span(0, 16),
			rounds: 8, failure: "incomplete after 8 rounds"},
		{name: "buffer begins late", publisher: &publisher{steps: 5}, batches: 13, from: -1, want: span(8, 13), rounds: 1},
		{name: "buffer begins after what is known", publisher: &publisher{steps: 5}, batches: 13, from: 3, want: append([]int{-1}, span(8, 13)...), rounds: 1},
		{name: "batch that was never sent", batches: 10, missing: []uint64{6}, from: 2, want: []int{3, 4, 5, -1, 7, 8, 9}, rounds: 2},
		{name: "another process, behind", batches: 3, from: 5, other: true, want: []int{-2, 0, 1, 2}, rounds: 2},
		{name: "another process, ahead", batches: 9, from: 5, other: true, want: append([]int{-2}, span(0, 9)...), rounds: 2},
		{name: "another process that has published nothing", from: 5, other: true, want: []int{-2}, rounds: 2},
		{name: "nothing where something comes live", from: -1, goal: 5, rounds: 1},
		{name: "mute", publisher: &publisher{mute: true}, batches: 5, from: -1, rounds: 1, failure: "no answer"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := cmp.Or(test.publisher, new(publisher))
			p.start(t)
			p.publish(test.batches)
			var from position
			if test.from >= 0 {
				from = position{known: true, seq: uint64(test.from)}
				if !test.other {
					from.print = fingerprint(payload(1e9+1+float64(test.from), 1e9+1+uint64(test.from)))
				}
			}
			p.buffer = slices.DeleteFunc(p.buffer, func(b published) bool { return slices.Contains(test.missing, b.seq) })
			got, r, err := fetch(t, p.replay.Addr().String(), from, test.goal)
			if test.failure == "" && err != nil || test.failure != "" && (err == nil || !strings.Contains(err.Error(), test.failure)) {
				t.Errorf("error %v, want %q", err, test.failure)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("passed on %v, want %v", got, test.want)
			}
			if r.rounds > test.rounds {
				t.Errorf("%d rounds, %d should do: %d", r.rounds, test.rounds, p.asked())
			}
		})
	}
}

// TestRecordedReplays plays what real engines have answered.
func TestRecordedReplays(t *testing.T) {
	recorded, err := os.ReadFile("testdata/replay.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(recorded) {
		var r struct {
			Engine  string
			Sent    []string
			Replies [][]string
			Seqs    []int
		}
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		t.Run(fmt.Sprintf("%s from %s", r.Engine, r.Sent[1]), func(t *testing.T) {
			said := append(greeting(), ready("ROUTER")...)
			for _, reply := range r.Replies {
				var frames [][]byte
				for _, f := range reply {
					frames = append(frames, unhex(t, f))
				}
				said = append(said, wire(frames...)...)
			}
			// The recording answers a request from where it begins, as from there on nothing was known before.
			var got []int
			times := quick()
			replay := &replay{dial: dial, address: listen(t, says(said)), tuning: &times, goal: func() uint64 { return 0 }, put: func(m message) error {
				got = append(got, int(m.seq))
				return nil
			}}
			if err := replay.run(t.Context()); err != nil || !slices.Equal(got, r.Seqs) {
				t.Errorf("%v, %v; want %v", got, err, r.Seqs)
			}
		})
	}
}

func TestCaptureOfRouter(t *testing.T) {
	c := readCaptures(t)
	heard := make(chan []byte, 1)
	address := listen(t, func(conn net.Conn) {
		conn.Write(append(c.bytes(t, "libzmq_4.3.4_ROUTER_greeting_ready"), c.bytes(t, "libzmq_ROUTER_replay_reply_and_END")...))
		b, _ := io.ReadAll(conn)
		heard <- b
	})
	if got, _, err := fetch(t, address, position{}, 0); err != nil || !slices.Equal(got, []int{3}) {
		t.Errorf("%v, %v", got, err)
	}
	if b := <-heard; !bytes.HasSuffix(b, []byte("\x01\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00")) {
		t.Errorf("the request is %x", b)
	}
}

// TestHostileReplays checks that a replay ends whatever it is answered.
func TestHostileReplays(t *testing.T) {
	noGoroutinesLeft(t)
	shortly(t)
	hello := append(greeting(), ready("ROUTER")...)
	said := func(frames ...[]byte) []byte { return append(bytes.Clone(hello), bytes.Join(frames, nil)...) }
	batch := func(seq uint64) []byte { return wire(nil, bigEndian(seq), []byte("x")) }
	for name, b := range map[string][]byte{
		"silent":             nil,
		"silent after READY": hello,
		"no number":          said(wire([]byte("x"))),
		"backward":           said(batch(9), batch(8), batch(7)),
		"always the same":    said(bytes.Repeat(batch(0), 100)),
		"huge frame":         said([]byte{longFlag, 0x40, 0, 0, 0, 0, 0, 0, 0}),
	} {
		t.Run(name, func(t *testing.T) {
			known := position{known: true, seq: 9}
			for _, from := range []position{{}, known} {
				got, r, err := fetch(t, listen(t, says(b)), from, 100)
				if err == nil || r.rounds > replayRounds {
					t.Errorf("%v after %d rounds, error %v", got, r.rounds, err)
				}
			}
		})
	}
	t.Run("endless", func(t *testing.T) {
		address := listen(t, func(c net.Conn) {
			c.Write(hello)
			for {
				if _, err := c.Write(batch(0)); err != nil {
					return
				}
			}
		})
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		times := quick()
		r := &replay{dial: dial, address: address, tuning: &times, goal: func() uint64 { return 0 }, put: func(message) error { return nil }}
		if err := r.run(ctx); err != context.DeadlineExceeded {
			t.Errorf("error %v", err)
		}
	})
}

func TestReplayLimiter(t *testing.T) {
	one, other, third := NewReplayLimiter(), NewReplayLimiter(), NewReplayLimiter()
	acquire := func(l *ReplayLimiter) (release func(), ok bool) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		release, err := l.acquire(ctx)
		return release, err == nil
	}
	releaseOne, ok := acquire(one)
	if !ok {
		t.Fatal("the first replay does not get a turn")
	}
	if _, ok := acquire(one); ok {
		t.Error("a replica has two replays at a time")
	}
	releaseOther, ok := acquire(other)
	if !ok {
		t.Error("two replicas have no replay each")
	}
	if _, ok := acquire(third); ok {
		t.Error("there are three replays at a time")
	}
	releaseOne()
	releaseThird, ok := acquire(third)
	if !ok {
		t.Error("a third replay does not get a turn when the first has ended")
	}
	releaseOther()
	releaseThird()
	if len(replaySlots) != 0 || len(third.slot) != 0 {
		t.Error("a turn was not given back")
	}
}
