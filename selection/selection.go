// Package selection decides which replica gets a request.
//
// It is pure logic: strategies look at candidates (the replicas that can take the request), at the load that Rolter itself
// has put on them and at what their caches are believed to hold, and pick one. Picking reserves the load in the same critical
// section, so that requests which arrive at the same moment see each other; a [Lease] gives it back exactly once.
//
// Every strategy chooses only among the candidates it is given. Ties go to the lower load, then to the replica with
// the fewest recorded prompts, then to the one that was picked longest ago; never to the first by index.
package selection

import "time"

// Candidate is one replica that can take the request: healthy, not full by the transport's own count, not tried before.
type Candidate struct {
	// Load counts the requests in flight at the replica's address.
	Load *Load

	// Floor is the number of requests in flight there as the transport counts them, which includes those that Rolter
	// did not route. The candidate's load is the larger of the two.
	Floor int

	// Limit is the most requests that the replica may have in flight; 0 is no limit. It is checked against Load in
	// the critical section of the pick, where the transport's own check can be late.
	Limit int

	// Weight is the operator's static weight: how much the replica can take, compared to others. 0 is 1.
	Weight float64

	// ByDeadline says that the engine takes waiting requests by [Decision.Deadline], and not as they come.
	ByDeadline bool

	// Member is the replica's place in the [Prefixes] of the strategy; nil when nothing is recorded for it.
	Member *Member

	// Outer is what is known of a cache behind the engine's own, such as LMCache; the zero value is unknown.
	Outer Outer
}

// Outer is the state of a cache behind the engine's own.
type Outer struct {
	Known     bool
	Available bool    // it works
	Occupancy float64 // how full it is, in [0, 1]
}

// down says whether the cache is known not to work.
func (o Outer) down() bool { return o.Known && !o.Available }

// slot is the candidate's slot in the index, or noSlot. The caller holds the lock of the prefixes.
func (c *Candidate) slot() int {
	if c.Member == nil {
		return noSlot
	}
	return c.Member.slot
}

// Request is what the strategies know of a request.
type Request struct {
	// Text is the rendered conversation. It is nil when the request has no prompt, and is not retained after Pick.
	Text []byte

	// Lead and Tail are the bytes at either end of Text that count neither as matched nor as length (role labels and
	// marks which every conversation shares).
	Lead, Tail int

	// Session names the client's session; 0 is none.
	Session uint64

	// Stream says that the answer is a stream, whose first byte tells that the prompt has been prefilled.
	Stream bool

	// Residency is what engines say that they hold of the prompt; nil where its token ids are not known.
	Residency Residency
}

// Residency is what engines say that they hold of one prompt. Where it is known of a candidate, it takes the place of what was recorded. Its methods are
// called in the critical section of a pick.
type Residency interface {
	// Refresh takes in what is expected of the picks before.
	Refresh()
	// Share is the share of the prompt, in [0, 1], that candidate i holds; ok is false where that is not known.
	Share(i int) (share float64, ok bool)
	// Pressure is how fast candidate i fills its cache, in any unit, and whether it evicts, because there is no room for more. 0 and false are
	// told where nothing is known.
	Pressure(i int) (rate float64, evicts bool)
	// Expect says that candidate i was picked: it will soon hold the prompt.
	Expect(i int)
}

// counted is how many bytes of the prompt count.
func (r *Request) counted() int { return max(len(r.Text)-r.Lead-r.Tail, 0) }

// Reason says why a candidate was picked. The list is closed: it is used as a metric label and as a response header.
type Reason string

// The reasons, as users read them.
const (
	// ReasonCache: the candidate holds enough of the prompt.
	ReasonCache Reason = "cache"
	// ReasonContinuation: the prompt continues one that the candidate has served.
	ReasonContinuation Reason = "continuation"
	// ReasonOverloaded: the best holder of the prompt has too much to do, so the least loaded candidate was taken.
	ReasonOverloaded Reason = "overloaded"
	// ReasonCold: nobody holds enough of the prompt.
	ReasonCold Reason = "cold"
	// ReasonNoPrompt: the request has no prompt to compare.
	ReasonNoPrompt Reason = "no_prompt"
	// ReasonNoTokens: the token ids of the request's prompt are not known.
	ReasonNoTokens Reason = "no_tokens"
	// ReasonNoSignal: nothing that can be relied on is known of any candidate.
	ReasonNoSignal Reason = "no_signal"
	// ReasonSession: the candidate answered the session last, and nothing outweighed that.
	ReasonSession Reason = "session"
	// ReasonPipeline: the weighted sum of the scores was the highest.
	ReasonPipeline Reason = "pipeline"
	// ReasonLeastPrefill: the least prefill work stood before the request's first token.
	ReasonLeastPrefill Reason = "least_prefill"
	// ReasonOnlyCandidate: there was no choice.
	ReasonOnlyCandidate Reason = "only_candidate"
	// ReasonFallback: the pick was made by another rule than a score of Rolter's: least load, or one of Caddy's policies.
	ReasonFallback Reason = "fallback"
)

// Reasons are all of them.
var Reasons = []Reason{ReasonCache, ReasonContinuation, ReasonOverloaded, ReasonCold, ReasonNoPrompt, ReasonNoTokens, ReasonNoSignal, ReasonSession, ReasonPipeline, ReasonLeastPrefill, ReasonOnlyCandidate, ReasonFallback}

// Decision is the outcome of a pick.
type Decision struct {
	Index  int     // of the candidate that was picked
	Reason Reason  // why
	Score  float64 // the candidate's share of the prompt, or for [LMCacheAware] the room in its cache, in [0, 1]
	Load   int     // its requests in flight, this one not counted

	// Deadline is when the request should have its first token so that short ones go first and none waits for ever, on the clock of the loads: its
	// arrival + 5 × the time that its own prefill takes. 0 where the strategy does not know.
	Deadline time.Duration
}

// Strategy picks one of the candidates, reserves load on it and records what must be recorded, atomically. The lease must be
// free (never used, or released); it holds the reservation afterwards. ok is false, and nothing is held, when no candidate can take the
// request. Pick is called concurrently and must not retain candidates or req.Text.
type Strategy interface {
	Pick(req *Request, candidates []Candidate, lease *Lease) (d Decision, ok bool)
}
