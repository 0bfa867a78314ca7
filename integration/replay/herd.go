package replay

import "time"

// herd measures whether requests run after one replica, as they may after one that has just joined.
//
// The queue of a replica is the time that it takes to prefill all requests that wait there, each less what the replica's cache held when the request came. The
// one that is being prefilled waits no longer: a prompt of 126,000 tokens that finds a replica idle keeps it for 18 s, and is no herd. The measure is
// the longest time for which the queue of some replica was above 3 times the mean of all candidates, without a break, after the first replica had
// joined. The queues are sampled at every event: an arrival, a first or a last token, a replica that comes or goes.
type herd struct {
	queues  []time.Duration // by replica
	since   []time.Duration // when the queue rose above the limit; noTime when it is not above
	longest time.Duration
}

const (
	herdFactor = 3
	noTime     = time.Duration(-1)
)

func newHerd(replicas int) *herd {
	h := &herd{queues: make([]time.Duration, replicas), since: make([]time.Duration, replicas)}
	for i := range h.since {
		h.since[i] = noTime
	}
	return h
}

// sample looks at the queues. Nothing waits at a replica that is no candidate.
func (h *herd) sample(now time.Duration, candidates int) {
	sum := time.Duration(0)
	for _, queue := range h.queues {
		sum += queue
	}
	limit := herdFactor * sum / time.Duration(candidates)
	for i, queue := range h.queues {
		if h.since[i] != noTime {
			h.longest = max(h.longest, now-h.since[i])
		}
		switch {
		case queue <= limit:
			h.since[i] = noTime
		case h.since[i] == noTime:
			h.since[i] = now
		}
	}
}
