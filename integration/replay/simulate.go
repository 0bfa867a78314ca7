package replay

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
	"github.com/rolter-ai/caddy-rolter/selection"
	"github.com/rolter-ai/caddy-rolter/trie"
)

// simulation is the replay of a trace with one strategy, in virtual time: durations since the start of the trace.
type simulation struct {
	now        time.Duration
	strategy   selection.Strategy
	candidates []selection.Candidate
	engines    []*replica.Engine // by candidate
	text       []byte            // of the last request, reused
}

// attempt is what became of a request.
type attempt struct {
	replica int
	job     *replica.Job
}

// simulate replays the trace with a strategy, and returns an attempt for each request.
func simulate(ctx context.Context, t *trace, strategy string, opts Options) ([]attempt, error) {
	s := new(simulation)
	tree := trie.New()
	w := world{
		loads:    selection.NewLoads(func() time.Duration { return s.now }),
		prefixes: selection.NewPrefixes(tree),
		replicas: opts.Replicas,
		now:      func() time.Time { return time.Unix(0, 0).Add(s.now) },
	}
	s.strategy = buildStrategy(strategy)(w)
	timing := replica.Timing{
		PrefillRate: opts.PrefillRate,
		DecodeTime:  milliseconds(opts.DecodeMS),
		MaxRunning:  math.MaxInt,
	}
	for i := range opts.Replicas {
		s.candidates = append(s.candidates, selection.Candidate{Load: w.loads.Acquire(address(i)), Weight: 1, Member: w.prefixes.Join(address(i))})
		s.engines = append(s.engines, replica.NewEngine(timing, replica.NewCache(opts.CacheBlocks), cachedTokens))
	}
	if opts.IndexScale > 0 {
		for slot := range tree.Slots() {
			tree.SetMaxText(slot, int64(opts.IndexScale*float64(opts.CacheBlocks*blockTokens*bytesPerToken)))
		}
	}

	attempts := make([]attempt, 0, len(t.requests))
	for _, r := range t.requests {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		s.advance(milliseconds(r.Timestamp / opts.RateScale))
		a, err := s.send(r)
		if err != nil {
			return nil, err
		}
		attempts = append(attempts, a)
	}
	s.advance(math.MaxInt64)
	return attempts, nil
}

// cachedTokens is how many tokens of a prompt its leading blocks hold. The last block of a prompt in a trace has a hash id even when it
// is partial, and counts the tokens it has.
func cachedTokens(blocks, promptTokens int) int { return min(blocks*blockTokens, promptTokens) }

// send has the strategy pick a replica for a request, and the replica take it, as the gateway would.
func (s *simulation) send(r *request) (attempt, error) {
	s.text = r.appendText(s.text[:0])
	lease := new(selection.Lease)
	d, ok := s.strategy.Pick(&selection.Request{Text: s.text, Stream: true}, s.candidates, lease)
	if !ok {
		return attempt{}, errors.New("the strategy picked no replica")
	}
	job := &replica.Job{
		Keys:         r.HashIDs,
		PromptBlocks: len(r.HashIDs),
		PromptTokens: r.InputLength,
		OutputTokens: r.OutputLength,
	}
	job.Notify = func() {
		switch job.Phase {
		case replica.Decoding:
			lease.FirstByte()
			lease.Answered(true)
		case replica.Done:
			lease.Release()
		}
	}
	return attempt{d.Index, job}, s.engines[d.Index].Submit(s.now, job)
}

// advance makes everything happen that happens until end, on all replicas in the order of time. What happens on a replica at the
// moment of an arrival has happened before it.
func (s *simulation) advance(end time.Duration) {
	for {
		at, next := end, (*replica.Engine)(nil)
		for _, e := range s.engines {
			if t, ok := e.Next(); ok && (t < at || t == at && next == nil) {
				at, next = t, e
			}
		}
		s.now = at
		if next == nil {
			return
		}
		next.Advance(at)
	}
}

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }
