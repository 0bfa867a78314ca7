package kvevents

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// follow starts a stream for the length of a test. change may change it before.
func follow(t testing.TB, p *publisher, sink Sink, withReplay bool, change func(*Stream)) *Stream {
	t.Helper()
	cfg := StreamConfig{Endpoint: p.endpoint(), Dial: dial, Sink: sink}
	if withReplay {
		cfg.Replay = p.replayEndpoint()
	}
	s, err := NewStream(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.tuning = quick()
	if change != nil {
		change(s)
	}
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// settles waits until the stream is in the state and has told the sink what it should. nil is not looked at.
func settles(t testing.TB, s *Stream, state State, sink *record, want []uint64) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		got := sink.held()
		if s.State() == state && slices.Equal(got, want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v with %v, want %v with %v; %+v", s.State(), got, state, want, s.Stats())
		}
	}
}

// subscribed waits until all that is published is heard.
func subscribed(t testing.TB, s *Stream, p *publisher) {
	t.Helper()
	eventually(t, "subscribed", func() bool { return p.subscriptions() == int(s.Stats().Connects) && s.State() >= Exact })
}

func TestStreamFromTheBeginning(t *testing.T) {
	noGoroutinesLeft(t)
	for name, at := range map[string]uint64{"from 0": 0, "from 1, as simulators": 1} {
		t.Run(name, func(t *testing.T) {
			p := new(publisher).start(t)
			p.next = at
			sink := new(record)
			s := follow(t, p, sink, true, nil)
			subscribed(t, s, p)
			p.publish(100)
			settles(t, s, Exact, sink, p.held())
			got := s.Stats()
			want := Stats{LastSeq: 99 + at, Batches: 100, Events: 100, Bytes: 100 * uint64(len(payload(0, 0))), Replays: 1 + at, ReplayRounds: 1 + at, Connects: 1}
			got.Duplicates = 0 // of what a replay has brought
			if got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
		})
	}
}

// TestStreamMissesTheFirstBatch is about a subscription that is there a moment after the stream is told what has been published.
func TestStreamMissesTheFirstBatch(t *testing.T) {
	noGoroutinesLeft(t)
	for _, before := range []int{0, 20} {
		// missed returns a stream that thinks that it knows all, after a batch that was not sent to it.
		missed := func(t *testing.T, p *publisher, change func(*Stream)) (*Stream, *record) {
			p.start(t)
			p.publish(before)
			sink := new(record)
			s := follow(t, p, sink, true, change)
			subscribed(t, s, p)
			settles(t, s, Exact, sink, p.held())
			p.setDeaf(true)
			p.publish(1)
			p.setDeaf(false)
			return s, sink
		}
		t.Run(fmt.Sprintf("the next one tells, after %d", before), func(t *testing.T) {
			p := new(publisher)
			s, sink := missed(t, p, func(s *Stream) { s.tuning.replayInterval = time.Hour })
			p.publish(1)
			settles(t, s, Exact, sink, p.held())
		})
		t.Run(fmt.Sprintf("nothing tells, after %d", before), func(t *testing.T) {
			again := make(chan struct{})
			p := &publisher{onRequest: func(request int, _ uint64) {
				if request == 1 {
					<-again
				}
			}}
			answer := sync.OnceFunc(func() { close(again) })
			defer answer()
			s, sink := missed(t, p, func(s *Stream) {
				s.tuning.replayAgain, s.tuning.replayAnswer = time.Millisecond, 20*time.Second
				s.cfg.Watch = func(n Notice) {
					if n.What == NoticeState && n.State != Exact && s.Stats().Replays > 0 {
						t.Error("the state became", n.State)
					}
				}
			})
			answer()
			settles(t, s, Exact, sink, p.held())
			looked(t, s, p, sink)
		})
	}
}

// TestStreamLooksTwice is about second replays that have nothing to tell.
func TestStreamLooksTwice(t *testing.T) {
	noGoroutinesLeft(t)
	second := func(request int) bool { return request == 1 }
	for name, p := range map[string]*publisher{
		"it says so":        {},
		"it has no answer":  {drop: func(request, _ int) bool { return second(request) }, noEnd: second},
		"it has half of it": {noEnd: second},
	} {
		t.Run(name, func(t *testing.T) {
			p.start(t)
			p.publish(20)
			sink := new(record)
			s := follow(t, p, sink, true, func(s *Stream) { s.tuning.replayAgain = time.Millisecond })
			eventually(t, "a second replay", func() bool { return s.Stats().Replays == 2 })
			subscribed(t, s, p)
			looked(t, s, p, sink)
		})
	}
}

// looked checks that a stream that has looked twice goes on, and needs no third replay.
func looked(t *testing.T, s *Stream, p *publisher, sink *record) {
	t.Helper()
	p.publish(3)
	settles(t, s, Exact, sink, p.held())
	if n := s.Stats(); n.Replays != 2 || n.Gaps != 0 || n.Losses != 0 {
		t.Errorf("%+v", n)
	}
}

func TestStreamJoinsLate(t *testing.T) {
	noGoroutinesLeft(t)
	for _, test := range []struct {
		name   string
		steps  int
		replay bool
		state  State
		held   int // of the batches before
	}{
		{"replay has all", 0, true, Exact, 500},
		{"replay has the latest", 30, true, Partial, 30},
		{"no replay", 0, false, Partial, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := (&publisher{steps: test.steps}).start(t)
			p.publish(500)
			want := p.held()
			want = want[len(want)-test.held:]
			sink := new(record)
			s := follow(t, p, sink, test.replay, nil)
			settles(t, s, test.state, sink, want)
			subscribed(t, s, p)
			p.publish(3)
			all := p.held()
			settles(t, s, test.state, sink, append(want, all[len(all)-3:]...))
			if n := s.Stats(); n.Gaps != 0 || n.Losses != 0 || n.Restarts != 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// TestStreamThroughRestarts follows an engine that ends and comes back.
func TestStreamThroughRestarts(t *testing.T) {
	noGoroutinesLeft(t)
	for _, replay := range []bool{true, false} {
		for name, n := range map[string]int{"with less than before": 3, "with more than before": 60, "with nothing": 0, "with as much": 20} {
			t.Run(fmt.Sprintf("%s, replay %t", name, replay), func(t *testing.T) {
				p := new(publisher).start(t)
				sink := new(record)
				s := follow(t, p, sink, replay, nil)
				subscribed(t, s, p)
				p.publish(20)
				state := map[bool]State{true: Exact, false: Partial}[replay]
				settles(t, s, state, sink, p.held())
				p.restart(t, n)
				eventually(t, "subscribed again", func() bool { return p.subscriptions() == 2 })
				if replay {
					settles(t, s, Exact, sink, p.held())
				}
				p.publish(2)
				want := p.held()
				if !replay {
					want = want[n:]
				}
				settles(t, s, state, sink, want)
				if got := s.Stats(); replay && got.Restarts != 1 || got.Connects != 2 {
					t.Errorf("%+v", got)
				}
			})
		}
	}
}

func TestStreamThroughInterruptions(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher).start(t)
	sink := new(record)
	s := follow(t, p, sink, true, nil)
	for i := range 6 {
		eventually(t, "subscribed", func() bool { return p.subscriptions() == i+1 })
		p.publish(10)
		settles(t, s, Exact, sink, p.held())
		p.cut()
		p.publish(5) // some of which nobody hears
	}
	settles(t, s, Exact, sink, p.held())
	if n := s.Stats(); sink.clears != 0 || n.Losses != 0 || n.Restarts != 0 {
		t.Errorf("forgotten %d times: %+v", sink.clears, n)
	}
}

// TestStreamWithoutReplayForgets checks that nothing is taken to be held that may have been removed meanwhile.
func TestStreamWithoutReplayForgets(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher).start(t)
	sink := new(record)
	s := follow(t, p, sink, false, nil)
	subscribed(t, s, p)
	p.publish(5)
	settles(t, s, Partial, sink, p.held())

	p.next++ // a gap
	p.publish(2)
	settles(t, s, Partial, sink, p.held()[5:])

	p.next = 3 // backward
	p.publish(2)
	settles(t, s, Partial, sink, p.held()[7:])

	p.clock -= 100 // an earlier time
	p.publish(1)
	settles(t, s, Partial, sink, p.held()[9:])

	p.publishPayload([]byte{0xc1}) // not understood
	settles(t, s, Partial, sink, nil)
	p.publish(1)
	settles(t, s, Partial, sink, p.held()[10:])

	p.sendLive(nil) // no number
	settles(t, s, Partial, sink, nil)

	if n := s.Stats(); n.Gaps != 1 || n.Losses != 5 || n.Undecodable != 2 || n.Replays != 0 {
		t.Errorf("%+v", n)
	}
}

func TestStreamFillsGaps(t *testing.T) {
	noGoroutinesLeft(t)
	for _, test := range []struct {
		name  string
		steps int
		state State
	}{
		{"replay has them", 0, Exact},
		{"replay has them no more", 4, Partial},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := (&publisher{steps: test.steps}).start(t)
			sink := new(record)
			s := follow(t, p, sink, true, nil)
			subscribed(t, s, p)
			p.publish(4)
			settles(t, s, Exact, sink, p.held())
			p.setDeaf(true) // as when the subscription is not there yet, or the subscriber too slow
			p.publish(10)
			p.setDeaf(false)
			p.publish(1)
			settles(t, s, test.state, sink, p.held())
			want := append(p.held(), uint64(p.clock+1))
			p.publish(1)
			settles(t, s, test.state, sink, want)
			if n := s.Stats(); n.Gaps != 1 || n.Losses != uint64(sink.clears) {
				t.Errorf("%+v, forgotten %d times", n, sink.clears)
			}
		})
	}
}

// TestStreamWithNumbersThatWereNeverSent is about engines that count a batch and then fail to encode it.
func TestStreamWithNumbersThatWereNeverSent(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher).start(t)
	sink := new(record)
	s := follow(t, p, sink, true, nil)
	subscribed(t, s, p)
	p.publish(4)
	settles(t, s, Exact, sink, p.held())
	p.next++
	p.publish(3)
	settles(t, s, Partial, sink, p.held()[4:])
	if n := s.Stats(); n.Gaps != 1 || n.Losses != 1 || n.Restarts != 0 {
		t.Errorf("%+v", n)
	}
}

func TestStreamWithAnotherProcessBehindTheConnection(t *testing.T) {
	noGoroutinesLeft(t)
	for name, change := range map[string]func(p *publisher){
		"behind": func(p *publisher) { p.next, p.buffer = 0, nil },
		"ahead, by an earlier clock": func(p *publisher) {
			for i := range p.buffer {
				p.buffer[i].payload = payload(100+float64(i), uint64(i))
			}
			p.clock = 1000
		},
		"ahead, by a gap": func(p *publisher) {
			p.buffer = nil
			for p.next = range uint64(40) {
				p.buffer = append(p.buffer, published{p.next, payload(2e9, p.next)})
			}
			p.next, p.clock = 40, 2e9
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := new(publisher).start(t)
			sink := new(record)
			s := follow(t, p, sink, true, nil)
			subscribed(t, s, p)
			p.publish(20)
			settles(t, s, Exact, sink, p.held())
			change(p)
			p.publish(2)
			settles(t, s, Exact, sink, p.held())
			p.publish(2)
			settles(t, s, Exact, sink, p.held())
			if n := s.Stats(); n.Restarts != 1 || n.Connects != 1 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// TestStreamThroughClockSteps checks that a clock that was set back is not taken for another process, where that can be found out.
func TestStreamThroughClockSteps(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher).start(t)
	sink := new(record)
	s := follow(t, p, sink, true, nil)
	subscribed(t, s, p)
	p.publish(5)
	p.clock -= 100
	p.publish(5)
	settles(t, s, Exact, sink, p.held())
	if n := s.Stats(); n.Restarts != 0 || n.Losses != 0 {
		t.Errorf("%+v", n)
	}
}

func TestStreamDropsDuplicates(t *testing.T) {
	noGoroutinesLeft(t)
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprintf("replay %t", replay), func(t *testing.T) {
			p := new(publisher).start(t)
			sink := new(record)
			s := follow(t, p, sink, replay, nil)
			subscribed(t, s, p)
			p.publish(50)
			for _, b := range p.buffer[20:] {
				p.sendLive(nil, bigEndian(b.seq), b.payload)
			}
			p.publish(1)
			settles(t, s, map[bool]State{true: Exact, false: Partial}[replay], sink, p.held())
			if n := s.Stats(); n.Duplicates != 30 || n.Losses != 0 || n.Restarts != 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// TestStreamDropsWhatTheReplayHasBrought lets batches come live that were in the replay already.
func TestStreamDropsWhatTheReplayHasBrought(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher)
	p.onRequest = func(request int, _ uint64) { p.publish(10) }
	p.start(t)
	p.publish(10)
	sink := new(record)
	s := follow(t, p, sink, true, nil)
	eventually(t, "all", func() bool { return len(sink.held()) >= 20 })
	subscribed(t, s, p)
	p.publish(1)
	settles(t, s, Exact, sink, p.held())
	if n := s.Stats(); n.Gaps != 0 || n.Losses != 0 {
		t.Errorf("%+v", n)
	}
}

func TestStreamWithWhatIsNotUnderstood(t *testing.T) {
	noGoroutinesLeft(t)
	junk := []byte{0xc1}
	for _, test := range []struct {
		name  string
		send  func(p *publisher)
		state State
		lost  int // batches that are forgotten
		bad   uint64
	}{
		{"batch, which the replay has intact", func(p *publisher) {
			p.publishPayload(junk)
			p.buffer[len(p.buffer)-1].payload = payload(p.clock, 77)
		}, Exact, 0, 1},
		{"batch", func(p *publisher) { p.publishPayload(junk) }, Partial, 5, 2},
		{"message of one frame", func(p *publisher) { p.sendLive(junk) }, Partial, 5, 1},
		{"number of the end", func(p *publisher) { p.sendLive(nil, bigEndian(endSeq), junk) }, Partial, 5, 1},
		{"more frames than there should be", func(p *publisher) {
			p.setDeaf(true)
			p.publish(1)
			p.setDeaf(false)
			b := p.buffer[len(p.buffer)-1]
			p.sendLive(nil, nil, nil, bigEndian(b.seq), b.payload)
		}, Exact, 0, 0},
		{"no topic", func(p *publisher) {
			p.setDeaf(true)
			p.publish(1)
			p.setDeaf(false)
			b := p.buffer[len(p.buffer)-1]
			p.sendLive(bigEndian(b.seq), b.payload)
		}, Exact, 0, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := new(publisher).start(t)
			sink := new(record)
			s := follow(t, p, sink, true, nil)
			subscribed(t, s, p)
			p.publish(5)
			settles(t, s, Exact, sink, p.held())
			test.send(p)
			settles(t, s, test.state, sink, p.held()[test.lost:])
			p.publish(2)
			settles(t, s, test.state, sink, p.held()[test.lost:])
			if n := s.Stats(); n.Undecodable != test.bad {
				t.Errorf("%+v", n)
			}
		})
	}
}

// TestStreamOfNothingButJunk checks that the engine is not asked for replays again and again that are no use.
func TestStreamOfNothingButJunk(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher).start(t)
	sink := new(record)
	s := follow(t, p, sink, true, nil)
	subscribed(t, s, p)
	for range 200 {
		p.publishPayload([]byte{0xc1})
	}
	eventually(t, "all looked at", func() bool { return s.Stats().Undecodable >= 200 && s.State() == Partial })
	if n := s.Stats(); n.Replays > 1+maxReplayFailures || n.Batches > 0 {
		t.Errorf("%+v", n)
	}
}

func TestStreamWithDecoderThatPanics(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher).start(t)
	sink := new(record)
	s := follow(t, p, sink, false, func(s *Stream) { s.decoder = panics{} })
	subscribed(t, s, p)
	p.publish(3)
	eventually(t, "all looked at", func() bool { return s.Stats().Undecodable == 3 })
}

type panics struct{}

func (panics) Decode([]byte) (*Batch, error) { panic("index out of range") }

func TestStreamWithLossyReplay(t *testing.T) {
	noGoroutinesLeft(t)
	for _, noTopic := range []bool{false, true} {
		t.Run(fmt.Sprintf("old layout %t", noTopic), func(t *testing.T) {
			p := (&publisher{
				noTopic: noTopic,
				drop:    func(request, reply int) bool { return reply >= 1000 && reply%1000 < 100 },
				noEnd:   func(request int) bool { return request == 0 },
			}).start(t)
			p.publish(5000)
			sink := new(record)
			s := follow(t, p, sink, true, nil)
			settles(t, s, Exact, sink, p.held())
			if n := s.Stats(); n.Losses != 0 || n.ReplayRounds > replayRounds || n.ReplayFailures != 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

func TestStreamGivesUpReplays(t *testing.T) {
	noGoroutinesLeft(t)
	p := (&publisher{mute: true}).start(t)
	sink := new(record)
	s := follow(t, p, sink, true, func(s *Stream) { s.tuning.replayAnswer = 5 * time.Millisecond })
	subscribed(t, s, p)
	p.publish(3)
	settles(t, s, Partial, sink, p.held())
	p.next++
	p.publish(2)
	settles(t, s, Partial, sink, p.held()[3:])
	if n := s.Stats(); n.Replays != maxReplayFailures || n.ReplayFailures != maxReplayFailures {
		t.Errorf("%+v", n)
	}
}

func TestStreamSpacesReplays(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher).start(t)
	sink := new(record)
	s := follow(t, p, sink, true, func(s *Stream) { s.tuning.replayInterval = time.Hour })
	subscribed(t, s, p)
	p.publish(1)
	p.next++
	p.publish(2)
	settles(t, s, Syncing, sink, p.held()[:1])
	if n := s.Stats(); n.Replays != 1 {
		t.Errorf("%+v", n)
	}
	p.cut() // the first replay on a connection does not wait
	settles(t, s, Partial, sink, p.held()[1:])
}

func TestStreamIsToldOfRestart(t *testing.T) {
	noGoroutinesLeft(t)
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprintf("replay %t", replay), func(t *testing.T) {
			p := new(publisher).start(t)
			sink := new(record)
			s := follow(t, p, sink, replay, nil)
			subscribed(t, s, p)
			p.publish(5)
			state, want := Exact, p.held()
			if !replay {
				state = Partial
			}
			settles(t, s, state, sink, want)
			s.Restarted()
			if !replay {
				want = nil
			}
			eventually(t, "forgotten", func() bool { return s.Stats().Restarts == 1 })
			settles(t, s, state, sink, want)
		})
	}
	t.Run("while it is down", func(t *testing.T) {
		p := new(publisher).start(t)
		sink := new(record)
		s := follow(t, p, sink, true, func(s *Stream) { s.tuning.retry, s.tuning.retryMax = time.Hour, time.Hour })
		subscribed(t, s, p)
		p.publish(5)
		settles(t, s, Exact, sink, p.held())
		p.cut()
		settles(t, s, Down, sink, p.held())
		s.Restarted()
		eventually(t, "forgotten", func() bool { return s.Stats().Restarts == 1 })
		settles(t, s, Exact, sink, p.held())
	})
}

// TestStreamHoldsBack lets a sink be so slow that the publisher drops.
func TestStreamHoldsBack(t *testing.T) {
	noGoroutinesLeft(t)
	p := (&publisher{queue: 10, steps: 50}).start(t)
	sink := &record{block: make(chan struct{})}
	s := follow(t, p, sink, true, nil)
	subscribed(t, s, p)
	big := make([]byte, 64<<10)
	for n := 0; s.Stats().Stalls == 0; n++ { // no matter how much the system buffers
		p.mu.Lock()
		p.clock++
		b := payload(p.clock, uint64(p.clock))
		p.mu.Unlock()
		p.publishPayload(bytes.Join([][]byte{{0x94}, b[1:], {0xc6, 0, 1, 0, 0}, big}, nil)) // with more at its end than a decoder knows
		if n > 1e6 {
			t.Fatal("reading is never stopped")
		}
	}
	close(sink.block)
	p.mu.Lock()
	published := p.next
	p.mu.Unlock()
	eventually(t, "caught up", func() bool {
		p.publish(1) // which shows what was dropped
		return s.Stats().LastSeq >= published && (s.State() == Exact || s.State() == Partial)
	})
	if n := s.Stats(); n.Undecodable > 0 {
		t.Errorf("%+v", n)
	}
}

func TestQueueIsBounded(t *testing.T) {
	q := newQueue()
	n := 0
	for q.tryPut(message{payload: make([]byte, 10)}) {
		n++
	}
	if n != queueMessages {
		t.Errorf("%d messages", n)
	}
	q = newQueue()
	for n = 0; q.tryPut(message{payload: make([]byte, 1<<20)}); n++ {
	}
	if n != queueBytes>>20 {
		t.Errorf("%d MiB", n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := q.put(ctx, message{payload: make([]byte, 1)}); err != context.Canceled {
		t.Errorf("error %v", err)
	}
	q.pop()
	if err := q.put(t.Context(), message{payload: make([]byte, 1)}); err != nil {
		t.Error(err)
	}
	q = newQueue()
	if !q.tryPut(message{payload: make([]byte, queueBytes+1)}) {
		t.Error("an empty queue refuses a message")
	}
}

func TestStreamFiltersByTopic(t *testing.T) {
	noGoroutinesLeft(t)
	p := (&publisher{topic: "kv@10.0.0.7@llama"}).start(t)
	sink := new(record)
	s := follow(t, p, sink, true, func(s *Stream) { s.cfg.Topic = "kv@" })
	subscribed(t, s, p)
	p.sendLive([]byte("other"), bigEndian(7), payload(1, 1))
	p.publish(2)
	settles(t, s, Exact, sink, p.held())
	if n := s.Stats(); n.Batches != 2 || n.Gaps != 0 {
		t.Errorf("%+v", n)
	}
}

// TestStreamWaitsForPublisher starts before its publisher, and knows by the replica's HTTP when it is worth while to try.
func TestStreamWaitsForPublisher(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher).start(t)
	p.kill()
	var up atomic.Bool
	var asked atomic.Int32
	core, logs := observer.New(zapcore.InfoLevel)
	sink := new(record)
	s := follow(t, p, sink, true, func(s *Stream) {
		s.tuning.retry, s.tuning.retryMax = time.Hour, time.Hour
		s.logger = zap.New(core)
		s.cfg.Alive = func(context.Context) bool { asked.Add(1); return up.Load() }
	})
	eventually(t, "asked whether the replica is there", func() bool { return asked.Load() > 3 })
	p.publish(3)
	p.open(t)
	up.Store(true)
	settles(t, s, Exact, sink, p.held())
	var states []string
	for _, e := range logs.All() {
		states = append(states, fmt.Sprint(e.Level, " ", e.ContextMap()["state"]))
	}
	if want := []string{"warn down", "info syncing", "info exact"}; !slices.Equal(states, want) {
		t.Errorf("logged %v, want %v", states, want)
	}
}

// TestStreamWithPeersThatDoNotPublish checks that it goes on trying and can be closed at any time.
func TestStreamWithPeersThatDoNotPublish(t *testing.T) {
	noGoroutinesLeft(t)
	shortly(t)
	for name, said := range map[string][]byte{
		"silent":          nil,
		"half a greeting": greeting()[:20],
		"HTTP":            []byte(strings.Repeat("HTTP/1.1 400 Bad Request\r\n", 10)),
		"huge frame":      append(append(greeting(), ready("PUB")...), longFlag, 0x40, 0, 0, 0, 0, 0, 0, 0),
	} {
		t.Run(name, func(t *testing.T) {
			var tried atomic.Int32
			address := listen(t, func(c net.Conn) {
				tried.Add(1)
				says(said)(c)
			})
			s, err := NewStream(StreamConfig{Endpoint: "tcp://" + address, Dial: dial, Sink: new(record)})
			if err != nil {
				t.Fatal(err)
			}
			s.tuning = quick()
			s.Start()
			eventually(t, "tried again", func() bool { return tried.Load() >= 2 })
			s.Close()
			if s.State() != Down {
				t.Errorf("state %v", s.State())
			}
		})
	}
}

func TestStreamIsClosedAtAnyTime(t *testing.T) {
	noGoroutinesLeft(t)
	p := new(publisher).start(t)
	p.publish(3000)
	for i := range 15 {
		s, err := NewStream(StreamConfig{Endpoint: p.endpoint(), Replay: p.replayEndpoint(), Dial: dial, Sink: new(record)})
		if err != nil {
			t.Fatal(err)
		}
		s.tuning = quick()
		s.Start()
		p.publish(10)
		n := uint64(i * 300)
		eventually(t, "some applied", func() bool { return s.Stats().Batches >= min(n, 3000) })
		s.Close()
		s.Close()
	}
	s, err := NewStream(StreamConfig{Endpoint: p.endpoint(), Dial: dial, Sink: new(record)})
	if err != nil {
		t.Fatal(err)
	}
	s.Close() // without Start
}

func TestStreamResolvesEachTime(t *testing.T) {
	noGoroutinesLeft(t)
	one, other := new(publisher).start(t), new(publisher).start(t)
	one.publish(3)
	other.publish(5)
	current := atomic.Pointer[publisher]{}
	current.Store(one)
	sink := new(record)
	s := follow(t, one, sink, true, func(s *Stream) {
		s.publisher, s.replayer = "engine:5557", "engine:6557"
		s.cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			switch address {
			case "engine:5557":
				return dial(ctx, network, current.Load().live.Addr().String())
			case "engine:6557":
				return dial(ctx, network, current.Load().replay.Addr().String())
			}
			return nil, errors.New("unknown address")
		}
	})
	settles(t, s, Exact, sink, one.held())
	current.Store(other)
	one.kill()
	settles(t, s, Exact, sink, other.held())
}

// TestStreamTellsWhatHappens follows an engine through a gap, a restart and a batch that is not understood.
func TestStreamTellsWhatHappens(t *testing.T) {
	noGoroutinesLeft(t)
	var mu sync.Mutex
	var told []string
	watch := func(n Notice) {
		mu.Lock()
		defer mu.Unlock()
		switch n.What {
		case NoticeState:
			told = append(told, n.State.String())
		case NoticeBatch:
			if n.Batch == nil || len(n.Payload) == 0 {
				t.Errorf("batch %d is told without what is in it", n.Seq)
			}
			told = append(told, fmt.Sprint(n.Seq))
		case NoticeNotUnderstood:
			told = append(told, fmt.Sprint("not understood ", n.Seq, n.Err != nil))
		case NoticeGap:
			told = append(told, fmt.Sprint("gap ", n.Seq))
		case NoticeReplay:
			told = append(told, fmt.Sprint("replay ", n.Seq))
		case NoticeReplayed:
			told = append(told, fmt.Sprint("replayed ", n.Err == nil))
		case NoticeRestart:
			told = append(told, "restart")
		case NoticeLoss:
			told = append(told, "loss")
		}
	}
	p := new(publisher).start(t)
	p.publish(1)
	sink := new(record)
	s := follow(t, p, sink, true, func(s *Stream) { s.cfg.Watch = watch })
	subscribed(t, s, p)
	settles(t, s, Exact, sink, p.held())
	p.setDeaf(true)
	p.publish(1)
	p.setDeaf(false)
	p.publish(1)
	settles(t, s, Exact, sink, p.held())
	p.restart(t, 1)
	settles(t, s, Exact, sink, p.held())
	want := []string{
		"syncing", "replay 0", "0", "replayed true", "exact",
		"gap 2", "syncing", "replay 1", "1", "replayed true", "exact", "2",
		"down", "syncing", "replay 3", "restart", "0", "replayed true", "exact",
	}
	eventually(t, "told all", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(told) >= len(want)
	})
	s.Close()
	if !slices.Equal(told, want) {
		t.Errorf("told\n%q, want\n%q", told, want)
	}
}

func TestNewStreamRefusesEndpoints(t *testing.T) {
	for _, cfg := range []StreamConfig{{Endpoint: "tcp://*:5557"}, {Endpoint: "tcp://engine:5557", Replay: "tcp://*:6557"}, {}} {
		if _, err := NewStream(cfg); err == nil {
			t.Errorf("%+v is not refused", cfg)
		}
	}
}

// TestRecordedRestart plays a restart of a real engine, seen by one subscriber.
func TestRecordedRestart(t *testing.T) {
	noGoroutinesLeft(t)
	recorded, err := os.ReadFile("testdata/restart.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprintf("replay %t", replay), func(t *testing.T) {
			p := new(publisher).start(t)
			var s *Stream
			sink := new(record)
			state := map[bool]State{true: Exact, false: Partial}[replay]
			connected := 0
			for line := range bytes.Lines(recorded) {
				var e struct {
					Kind, What string
					Seq        uint64
					Ts         float64
				}
				if err := json.Unmarshal(line, &e); err != nil {
					t.Fatal(err)
				}
				switch {
				case e.What == "HANDSHAKE_SUCCEEDED" && s == nil:
					p.publish(56) // before the recording
					p.buffer = nil
					for i := range uint64(56) {
						p.buffer = append(p.buffer, published{i, payload(float64(i), i)})
					}
					s = follow(t, p, sink, replay, nil)
				case e.What == "HANDSHAKE_SUCCEEDED":
					p.open(t)
				case e.What == "DISCONNECTED":
					p.kill()
					p.next, p.buffer = 0, nil
					eventually(t, "noticed", func() bool { return s.State() == Down })
				case e.Kind == "ev":
					p.publishPayload(payload(e.Ts, e.Seq))
					if p.next != e.Seq+1 {
						t.Fatalf("batch %d instead of %d", p.next-1, e.Seq)
					}
				}
				if e.What == "HANDSHAKE_SUCCEEDED" {
					connected++
					eventually(t, "subscribed", func() bool { return p.subscriptions() == connected && s.State() == state })
				}
			}
			settles(t, s, state, sink, p.held())
			if n := s.Stats(); n.Gaps != 0 || n.Restarts > 1 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// The processor time is that of all on the way of a batch: the publisher, which writes many at once, and the stream with a sink that counts.
func BenchmarkStream(b *testing.B) {
	body := payload(1, 1)
	pad := 484 - len(body) - 3
	body = bytes.Join([][]byte{{0x94}, body[1:], {0xc5, byte(pad >> 8), byte(pad)}, make([]byte, pad)}, nil)
	address := listen(b, func(c net.Conn) {
		c.Write(append(greeting(), ready("PUB")...))
		m := wire(nil, bigEndian(0), body)
		for seq := uint64(0); ; {
			var chunk []byte
			for range 128 {
				copy(m[4:], bigEndian(seq))
				chunk = append(chunk, m...)
				seq++
			}
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	})
	var applied counter
	s, err := NewStream(StreamConfig{Endpoint: "tcp://" + address, Dial: dial, Sink: &applied})
	if err != nil {
		b.Fatal(err)
	}
	s.Start()
	defer s.Close()
	eventually(b, "running", func() bool { return applied.Load() > 0 })
	b.ReportAllocs()
	begun, first := processorTime(b), applied.Load()
	for b.Loop() {
		for until := applied.Load() + 1000; applied.Load() < until; {
			time.Sleep(time.Millisecond)
		}
	}
	b.ReportMetric(float64(processorTime(b)-begun)/float64(applied.Load()-first), "cpu-ns/batch")
	if n := s.Stats(); n.Undecodable+n.Gaps > 0 {
		b.Errorf("%+v", n)
	}
}

type counter struct{ atomic.Int64 }

func (c *counter) Apply(*Batch) { c.Add(1) }
func (c *counter) Clear()       {}
