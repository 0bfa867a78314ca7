package replay

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
	"github.com/rolter-ai/caddy-rolter/selection"
	"github.com/rolter-ai/caddy-rolter/trie"
)

// simulation is one run over a trace, in virtual time: durations since the start of the trace.
type simulation struct {
	opts     Options
	variant  Variant
	events   disturbances
	now      time.Duration
	gateways []gateway
	engines  []*replica.Engine // by replica
	there    []int             // the replicas that are candidates, in order
	attempts []*attempt        // the last one of each request that has come
	failures Failures
	herd     *herd
	joined   bool // some replica has, from when on the herd is measured

	// reused from pick to pick
	candidates []selection.Candidate
	text       []byte
}

// gateway is all that one gateway knows.
type gateway struct {
	strategy   selection.Strategy
	candidates []selection.Candidate // by replica
}

// attempt is what became of a request.
type attempt struct {
	request *Request
	arrived time.Duration // before any other attempt
	gateway *gateway
	replica int
	job     *replica.Job
}

// ttft is the time to first token in seconds.
func (a *attempt) ttft() float64 { return (a.job.FirstToken - a.arrived).Seconds() }

// simulate replays the trace.
func simulate(ctx context.Context, t *Trace, v Variant, opts Options) (*simulation, error) {
	events, err := opts.disturbances()
	if err != nil {
		return nil, err
	}
	s := &simulation{opts: opts, variant: v, events: events, herd: newHerd(opts.Replicas)}
	for i := range opts.Replicas {
		timing := replica.Timing{
			PrefillRate: s.prefillRate(i),
			DecodeTime:  milliseconds(opts.DecodeMS),
			MaxRunning:  math.MaxInt,
			Scheduling:  replica.Scheduling(v.EngineOrder),
		}
		s.engines = append(s.engines, replica.NewEngine(timing, replica.NewCache(opts.CacheBlocks), cachedTokens))
		if !events.joins[i] {
			s.there = append(s.there, i)
		}
	}
	for range max(v.Gateways, 1) {
		s.gateways = append(s.gateways, s.newGateway())
	}
	for i, r := range t.Requests {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := s.advance(milliseconds(r.Timestamp / opts.RateScale)); err != nil {
			return nil, err
		}
		a := &attempt{request: r, arrived: s.now, gateway: &s.gateways[i%len(s.gateways)]}
		s.attempts = append(s.attempts, a)
		if err := s.send(a); err != nil {
			return nil, err
		}
	}
	return s, s.advance(math.MaxInt64)
}

// prefillRate is how many tokens per second a replica prefills.
func (s *simulation) prefillRate(i int) float64 {
	if factor, ok := s.events.slow[i]; ok {
		return s.opts.PrefillRate * factor
	}
	return s.opts.PrefillRate
}

// cachedTokens is how many tokens of a prompt its leading blocks hold. The last block of a prompt in a trace has a hash id even when it
// is partial, and counts the tokens it has.
func cachedTokens(blocks, promptTokens int) int { return min(blocks*BlockTokens, promptTokens) }

func (s *simulation) newGateway() gateway {
	w := world{
		loads:    selection.NewLoads(func() time.Duration { return s.now }),
		prefixes: selection.NewPrefixes(trie.New()),
		replicas: s.opts.Replicas,
	}
	w.prefixes.Capacity = func(string) int64 { return int64(s.variant.IndexScale * float64(s.opts.CacheBlocks*BlockTokens)) }
	g := gateway{strategy: buildStrategy(s.variant.Strategy)(w)}
	for i := range s.opts.Replicas {
		c := selection.Candidate{Load: w.loads.Acquire(address(i)), Weight: 1, Member: w.prefixes.Join(address(i)), ByDeadline: s.variant.EngineOrder == string(replica.ByPriority)}
		if s.opts.RateError > 0 {
			c.Load.SetRate(s.opts.RateError * s.prefillRate(i) * BytesPerToken)
		}
		g.candidates = append(g.candidates, c)
	}
	return g
}

// send has the strategy pick a replica for a request, and the replica take it, as the gateway would.
func (s *simulation) send(a *attempt) error {
	s.text = a.request.AppendText(s.text[:0])
	s.candidates = s.candidates[:0]
	for _, i := range s.there {
		s.candidates = append(s.candidates, a.gateway.candidates[i])
	}
	lease := new(selection.Lease)
	d, ok := a.gateway.strategy.Pick(&selection.Request{Text: s.text, Stream: true}, s.candidates, lease)
	if !ok {
		return errors.New("the strategy picked no replica")
	}
	a.replica = s.there[d.Index]
	engine := s.engines[a.replica]
	job := &replica.Job{
		Keys:         a.request.HashIDs,
		PromptBlocks: len(a.request.HashIDs),
		PromptTokens: a.request.InputLength,
		OutputTokens: a.request.OutputLength,
		Priority:     d.Deadline.Milliseconds(),
	}
	a.job = job
	queue := &s.herd.queues[a.replica]
	uncached := job.PromptTokens - cachedTokens(engine.Cache().Lookup(job.Keys), job.PromptTokens)
	work := seconds(float64(uncached) / s.prefillRate(a.replica))
	*queue += work
	job.Notify = func() {
		switch job.Phase {
		case replica.Prefilling: // it waits no longer
		case replica.Decoding:
			lease.FirstByte()
			lease.Answered(true)
		case replica.Done:
			lease.Delivered(job.PromptTokens, job.CachedTokens)
			lease.Release()
		case replica.Aborted:
			lease.Release()
		default:
			return
		}
		*queue -= work
		work = 0
	}
	if err := engine.Submit(s.now, job); err != nil {
		return err
	}
	lease.Taken()
	s.sample()
	return nil
}

func (s *simulation) sample() {
	if s.joined {
		s.herd.sample(s.now, len(s.there))
	}
}

// advance makes everything happen that happens until end. What happens on a replica at the moment of a change has happened before it,
// and both have happened before what comes at that moment.
func (s *simulation) advance(end time.Duration) error {
	for len(s.events.changes) > 0 && s.events.changes[0].at <= end {
		c := s.events.changes[0]
		s.events.changes = s.events.changes[1:]
		s.compute(c.at)
		if err := s.change(c); err != nil {
			return err
		}
	}
	s.compute(end)
	return nil
}

// compute makes everything happen that happens on the replicas until end, in the order of time.
func (s *simulation) compute(end time.Duration) {
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
		s.sample()
	}
}

// change makes a replica a candidate, or none. What a replica that fails had not begun to answer is sent again at once, in the order in which it
// came; answers that had begun end there, since a gateway cannot take back what it has passed on.
func (s *simulation) change(c change) error {
	at, there := slices.BinarySearch(s.there, c.replica)
	if !there {
		s.there = slices.Insert(s.there, at, c.replica)
		s.engines[c.replica].Start()
		s.joined = s.joined || s.events.joins[c.replica]
		s.sample()
		return nil
	}
	s.there = slices.Delete(s.there, at, at+1)
	var hit []*attempt
	for _, a := range s.attempts {
		if a.replica == c.replica && a.job.Phase < replica.Done {
			hit = append(hit, a)
		}
	}
	s.engines[c.replica].Stop(s.now)
	for _, a := range hit {
		if a.job.Generated > 0 {
			s.failures.CutOff++
			continue
		}
		s.failures.Retried++
		if err := s.send(a); err != nil {
			return err
		}
	}
	s.sample()
	return nil
}

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
