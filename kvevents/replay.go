package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"os"

	"github.com/go-zeromq/zmq4"
)

// An engine keeps its latest batches (10,000 unless it is told otherwise) and sends those from some number on to whoever asks. It does so in one burst,
// of which its socket silently leaves out what does not fit into its queue of 1,000 messages, the mark of the end included; and if it does not have
// the number that was asked for, it begins with what it has. So a replay is asked for in rounds: of each is taken what continues without a hole.

const (
	replayRounds = 8
	// replayBurst is how many replies in a round may have filled the engine's queue, so that what came after them and before the end may be missing.
	replayBurst = 500
)

// ReplayLimiter spares a replica: an engine replays in the thread in which it publishes, and when it does not come to publish it does not compute. All
// ranks of a replica share one, and have one replay at a time. The process has two at a time.
type ReplayLimiter struct{ slot chan struct{} }

// NewReplayLimiter returns the limiter of one replica.
func NewReplayLimiter() *ReplayLimiter { return &ReplayLimiter{make(chan struct{}, 1)} }

var replaySlots = make(chan struct{}, 2)

// acquire waits for a turn. release gives it back.
func (l *ReplayLimiter) acquire(ctx context.Context) (release func(), err error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case l.slot <- struct{}{}:
	}
	select {
	case <-ctx.Done():
		<-l.slot
		return nil, ctx.Err()
	case replaySlots <- struct{}{}:
	}
	return func() { <-replaySlots; <-l.slot }, nil
}

// fingerprint tells the batches of different processes apart that have the same number: a payload has the time in it. (The hashes of blocks do not tell
// processes apart: equal prompts have equal ones.)
func fingerprint(payload []byte) uint64 { return maphash.Bytes(fingerprintSeed, payload) }

var fingerprintSeed = maphash.MakeSeed()

// position is the last batch that has been applied, if one has.
type position struct {
	known bool
	seq   uint64
	print uint64
}

// next is the number of the batch that follows.
func (p position) next() uint64 {
	if !p.known {
		return 0
	}
	return p.seq + 1
}

// replay fetches what an engine has published after some position.
type replay struct {
	dial    DialFunc
	address string
	tuning  *tuning
	from    position
	// goal returns from which number on everything comes without a replay; 0 is not known yet.
	goal func() uint64
	// put passes a message on, of any kind but msgBad. Batches follow each other in number, except after msgLost and msgReborn.
	put func(message) error

	rounds int
	// seq is the number of the batch that is wanted next.
	seq uint64
	// verified says that from is of this process, or that nothing was known.
	verified bool
	// fresh says that nothing was passed on and nothing known: where it starts, nothing is missing that was there.
	fresh bool
}

// run returns when it has reached the goal, or when the engine has no more. It is an error if that cannot be found out.
func (r *replay) run(ctx context.Context) error {
	r.seq, r.verified, r.fresh = r.from.seq, !r.from.known, !r.from.known
	for r.rounds < replayRounds {
		r.rounds++
		asked, verified := r.seq, r.verified
		replies, end, err := r.round(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if r.reached() {
			return nil
		}
		if end == endMark && !r.verified && replies == 0 {
			// A process that has published that batch has it or a later one.
			if err := r.startOver(); err != nil {
				return err
			}
			continue
		}
		progress := r.seq != asked || r.verified != verified
		switch {
		case end == endMark && (!progress || replies < replayBurst && r.goal() == 0):
			return nil
		case !progress && err != nil:
			return err
		case !progress:
			return errors.New("no answer to the request for a replay")
		}
	}
	return fmt.Errorf("replay is incomplete after %d rounds", replayRounds)
}

func (r *replay) reached() bool {
	goal := r.goal()
	return r.verified && goal > 0 && r.seq >= goal
}

// startOver begins with the first batch of another process.
func (r *replay) startOver() error {
	r.seq, r.verified, r.fresh = 0, true, true
	return r.put(message{kind: msgReborn})
}

// ending is how a round ended.
type ending uint8

const (
	silence ending = iota // or an error
	endMark
	enough // it has reached the goal, or another round must be asked for
)

// round asks once, on a connection of its own: the rest of an earlier answer may still be under way on another.
func (r *replay) round(ctx context.Context) (replies int, end ending, err error) {
	request := zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, r.seq))
	c, err := connect(ctx, r.dial, r.address, zmq4.Dealer, request)
	if err != nil {
		return 0, silence, err
	}
	defer c.close()
	for wait := r.tuning.replayAnswer; ; wait = r.tuning.replaySilence {
		frames, err := c.receiveWithin(wait)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return replies, silence, nil
		}
		if err != nil {
			return replies, silence, err
		}
		m := parse(frames)
		switch {
		case m.kind == msgBad:
			return replies, silence, errors.New("replay with a message that has no sequence number")
		case m.seq == endSeq:
			return replies, endMark, nil
		}
		more, err := r.take(m, replies == 0)
		if err != nil || !more {
			return replies, enough, err
		}
		replies++
	}
}

// take passes on a batch if it is the one that is wanted. It returns false when the round need not go on. opens says that it is the first of the round: what
// was asked for is then not to be had, for the engine's queue was empty.
func (r *replay) take(m message, opens bool) (more bool, err error) {
	switch {
	case !r.verified && m.seq == r.from.seq && fingerprint(m.payload) == r.from.print:
		r.verified = true
		r.seq++
		return !r.reached(), nil
	case !r.verified && m.seq <= r.from.seq:
		return false, r.startOver()
	case m.seq < r.seq:
		return true, nil // which is not what was asked for
	case m.seq > r.seq:
		if !opens {
			return false, nil
		}
		if !r.fresh {
			if err := r.put(message{kind: msgLost}); err != nil {
				return false, err
			}
		}
	}
	// Most engines count from 0, simulators from 1.
	if r.fresh && m.seq <= 1 {
		m.kind = msgFirst
	}
	r.verified, r.fresh = true, false
	r.seq = m.seq + 1
	if err := r.put(m); err != nil {
		return false, err
	}
	return !r.reached(), nil
}
