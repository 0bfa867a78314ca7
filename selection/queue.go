package selection

import (
	"slices"
	"time"
)

// queue is the prefill work of one replica: a virtual clock that is set right by every first byte. Guarded by the mutex of the loads.
type queue struct {
	works      []*work // in the order in which they were sent
	byDeadline bool    // the engine takes the work with the earliest deadline first, not the one that came first
	running    *work   // what is thought to be prefilled now, where byDeadline; otherwise it is the first of works
	started    time.Duration
	rate       float64 // bytes per second; 0 until it is learned
	samples    int
}

// work is what one request has to prefill.
type work struct {
	bytes    float64
	whole    float64 // bytes of the whole prompt, should nothing of it be cached after all
	sent     time.Duration
	deadline time.Duration
	observed bool // its first byte will be seen
	taken    bool // the replica has it, so that what is sent later comes after it
}

// onTheWay is for how long a request may be on its way to a replica that does not say that it has it.
const onTheWay = 50 * time.Millisecond

// ordered says whether what is sent now comes after the work.
func (w *work) ordered(now time.Duration) bool { return w.taken || now-w.sent > onTheWay }

// firstRate is what is assumed before anything is learned, in bytes per second: all replicas are equal then, and only the order of magnitude of
// what is pending against what is new matters.
const firstRate = 30_000

// usualRate is the mean of the learned rates.
func (l *Loads) usualRate() float64 {
	if l.rated == 0 {
		return firstRate
	}
	return l.rates / float64(l.rated)
}

// deadlineFactor is how many times its own prefill time a request may take to its first token before it goes ahead of shorter ones.
const deadlineFactor = 5

// queue puts a request, of which the candidate holds so many bytes, into the queue of the candidate of the decision, to which it adds the deadline. unobserved says
// that nobody sees first bytes; of an answer that is not streamed, the first one says nothing. The caller holds the mutex.
func (l *Loads) queue(d *Decision, req *Request, candidates []Candidate, matched int, unobserved bool, lease *Lease) {
	counted := req.counted()
	if counted == 0 {
		return
	}
	c, now := &candidates[d.Index], l.clock()
	q, uncached := &c.Load.queue, float64(counted-matched)
	rate := q.rateOr(l.usualRate())
	d.Deadline = deadlineOf(now, uncached, rate)
	w := &work{bytes: uncached, whole: float64(counted), sent: now, deadline: d.Deadline, observed: req.Stream && !unobserved}
	q.byDeadline = c.ByDeadline
	q.add(now, rate, w)
	lease.holdWork(w)
}

func deadlineOf(now time.Duration, uncached, rate float64) time.Duration {
	return now + seconds(deadlineFactor*uncached/rate)
}

// Clock is the time that deadlines are on.
func (l *Loads) Clock() time.Duration { return l.clock() }

func (q *queue) rateOr(usual float64) float64 {
	if q.rate == 0 {
		return usual
	}
	return q.rate
}

// current is the index of the work that is thought to be prefilled now.
func (q *queue) current() int {
	if q.byDeadline {
		return max(slices.Index(q.works, q.running), 0)
	}
	return 0
}

// next begins with the work that is next, at some time.
func (q *queue) next(at time.Duration) {
	q.started, q.running = at, nil
	if !q.byDeadline {
		return
	}
	for _, w := range q.works {
		if q.running == nil || w.deadline < q.running.deadline {
			q.running = w
		}
	}
}

// advance takes off the works whose first byte nobody will see, when they should be done.
func (q *queue) advance(now time.Duration, rate float64) {
	for len(q.works) > 0 {
		i := q.current()
		done := q.started + seconds(q.works[i].bytes/rate)
		if q.works[i].observed || done > now {
			return
		}
		q.works = slices.Delete(q.works, i, i+1)
		q.next(done)
	}
}

// waiting is the number of works whose first byte has not come.
func (q *queue) waiting(now time.Duration, rate float64) int {
	q.advance(now, rate)
	return len(q.works)
}

// pending is the work that has still to be done: what has been done of the current one is reckoned, up to its end.
func (q *queue) pending(now time.Duration, rate float64) (bytes float64) {
	bytes, _ = q.before(now, rate, never)
	return bytes
}

// overdue is how many times as long as it should, and a little, the prefill of a prompt takes when something is wrong.
const overdue = 1.5

// left is what is left to do of a work of which so much should be done. What takes far too long is being computed as a whole: what was thought to be
// cached was not. What takes longer even than that has not begun, because the replica has no room for what it decodes already, or hangs: what has lasted so
// long may last as long again.
func (w *work) left(done float64) float64 {
	switch {
	case !w.observed || done <= overdue*w.bytes+minSample:
		return max(0, w.bytes-done)
	case done <= w.whole:
		return w.whole - done
	default:
		return done - w.whole
	}
}

// never is later than all deadlines.
const never = time.Duration(1<<63 - 1)

// before is the work that is done before one with this deadline that is sent now, and the number of works that come after it. Requests that are on their way
// at the same time overtake each other: as likely as not, half of such a work comes before and half after.
func (q *queue) before(now time.Duration, rate float64, deadline time.Duration) (bytes, later float64) {
	q.advance(now, rate)
	current := q.current()
	for i, w := range q.works {
		switch {
		case !q.byDeadline && !w.ordered(now):
			bytes += w.bytes / 2
			later += 0.5
		case i == current:
			bytes += w.left(rate * (now - q.started).Seconds())
		case w.deadline <= deadline:
			bytes += w.bytes
		default:
			later++
		}
	}
	return bytes, later
}

func (q *queue) add(now time.Duration, rate float64, w *work) {
	q.advance(now, rate)
	q.works = append(q.works, w)
	if len(q.works) == 1 {
		q.next(now)
	}
}

// SetRate sets the prefill rate of the replica, in bytes of prompt per second, from where it goes on learning.
func (l *Load) SetRate(bytesPerSecond float64) {
	l.loads.mu.Lock()
	defer l.loads.mu.Unlock()
	l.queue.setRate(l.loads, bytesPerSecond)
	l.queue.samples = settled
}

func (q *queue) setRate(loads *Loads, rate float64) {
	if q.rate == 0 {
		loads.rated++
	}
	loads.rates += rate - q.rate
	q.rate = rate
}

// firstByte says that a request has been prefilled, and with it, where works are taken as they come, those that were sent before it and whose first byte nobody
// will see. One whose first byte is still to be seen was overtaken on its way.
func (q *queue) firstByte(loads *Loads, w *work) {
	loads.mu.Lock()
	defer loads.mu.Unlock()
	at := slices.Index(q.works, w)
	if at < 0 {
		return
	}
	i, done := 0, 0.0
	q.works = slices.DeleteFunc(q.works, func(o *work) bool {
		prefilled := i == at || i < at && !o.observed && !q.byDeadline
		i++
		if prefilled {
			done += o.bytes
		}
		return prefilled
	})
	now := loads.clock()
	q.learn(loads, done, now-q.started)
	q.next(now)
}

// withdraw says that a request will not be prefilled, or not to its end.
func (q *queue) withdraw(loads *Loads, w *work) {
	loads.mu.Lock()
	defer loads.mu.Unlock()
	at := slices.Index(q.works, w)
	if at < 0 {
		return
	}
	current := at == q.current()
	q.works = slices.Delete(q.works, at, at+1)
	if current {
		q.next(loads.clock())
	}
}

// minSample is the least work that a rate is learned from, about 1,000 tokens: less is lost in the engine's other delays.
const minSample = 4000

// settled is the number of samples after which a rate walks in small steps only.
const settled = 20

// learn takes in that so much was done in this time. The rate walks towards a low quantile of what is seen, because what was thought to be
// uncached and was cached after all makes a sample far too high: an average would believe it, and send a herd there.
func (q *queue) learn(loads *Loads, bytes float64, took time.Duration) {
	if bytes < minSample || took <= 0 {
		return
	}
	sample := bytes / took.Seconds()
	if q.rate == 0 {
		q.setRate(loads, sample)
		q.samples = 1
		return
	}
	step := max(0.01, 0.2/float64(q.samples))
	q.samples++
	if sample > q.rate {
		q.setRate(loads, q.rate*(1+step))
	} else {
		q.setRate(loads, q.rate*(1-2*step))
	}
}

func seconds(s float64) time.Duration { return time.Duration(min(s, 1e9) * float64(time.Second)) }
