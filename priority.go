package rolter

import (
	"net/http"
	"time"

	"go.uber.org/zap"

	"github.com/rolter-ai/caddy-rolter/prompt"
	"github.com/rolter-ai/caddy-rolter/selection"
)

// Values of a provider's engine_priority.
const (
	priorityOff         = "off"
	priorityOn          = "on"
	priorityTrustClient = "trust_client"
)

// enginePriorityHeader overrides the body's priority in vLLM, since 0.32.
const enginePriorityHeader = "X-Vllm-Priority"

// Whether an engine takes the field, as far as its answers have told.
const (
	priorityUntried = iota
	priorityTaken
	priorityRefused
)

// stamps says whether requests to the provider carry a priority.
func (p *Provider) stamps() bool {
	return p.EnginePriority != "" && p.EnginePriority != priorityOff && p.priority.Load() != priorityRefused
}

// stamp says whether a request to the provider is to carry a priority.
func (q *request) stamp(p *Provider) bool {
	switch {
	case !p.stamps():
		return false
	case q.body == nil || q.parser == nil || q.parsed.Why == prompt.Unparsable || q.parsed.Object == 0:
		return false
	case p.EnginePriority == priorityTrustClient && (len(q.parsed.PrioritySpans) > 0 || q.priorityHeader != nil):
		return false
	}
	return !q.unstamp
}

// priority is the request's virtual deadline in milliseconds of Unix time, so that several gateways agree: the engine takes the lowest first, so
// short prompts go first and none waits for ever.
func (q *request) priority() int64 {
	now := time.Now()
	if q.decided.Deadline > 0 {
		now = now.Add(q.decided.Deadline - loads.Clock())
	}
	return now.UnixMilli()
}

// mayUnstamp says whether an answer with status 400 may have been for the priority. It is tried without then, unless the engine is known to take it.
func (q *request) mayUnstamp() bool {
	if q.target == nil || !q.stamped || q.target.provider.priority.Load() != priorityUntried {
		return false
	}
	q.unstamp = true
	return true
}

// selectAgain takes the same target again. It returns its index in the pool, or -1.
func (q *request) selectAgain(rt *Route) int {
	for i, t := range rt.Targets {
		if t != q.target {
			continue
		}
		q.lease.Release()
		d, ok := selection.LeastLoad{Loads: loads}.Pick(&q.asked, []selection.Candidate{{Load: q.member.load, Weight: t.weight}}, &q.lease)
		if !ok {
			return -1
		}
		d.Index, d.Reason, d.Score = i, q.decided.Reason, q.decided.Score
		q.attempt++
		q.counters.count(d.Reason, q.attempt)
		q.decided = d
		return i
	}
	return -1
}

// answered takes in the status of the answer that goes to the client.
func (q *request) answered(status int) {
	q.served = status < http.StatusBadRequest
	q.lease.Answered(q.served)
	if q.target == nil || status >= http.StatusBadRequest {
		return
	}
	p := q.target.provider
	if q.stamped {
		p.priority.CompareAndSwap(priorityUntried, priorityTaken)
	} else if q.unstamp && p.priority.CompareAndSwap(priorityUntried, priorityRefused) {
		q.logger.Warn("the engine refuses the field priority, requests go without it; start it with --scheduling-policy priority", zap.String("provider", p.Name))
	}
}
