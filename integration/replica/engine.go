package replica

import (
	"cmp"
	"container/heap"
	"errors"
	"math"
	"slices"
	"time"
)

// Engine is the model of one replica's scheduler, in whatever time its caller lives in: times are durations since an
// origin that the caller chooses, and never go back. Requests wait in the order of [Timing.Scheduling], are prefilled one
// at a time, then decode side by side, each at its own pace. A prefill that runs is not interrupted for a request that
// would have come before it.
//
// A caller alternates between submitting and aborting, each with the current time, and [Engine.Advance] at the times
// that [Engine.Next] announces. What happens in between is computed for the exact time at which it happens, however late
// the call. An Engine is not safe for concurrent use.
type Engine struct {
	timing       Timing
	cache        *Cache
	cachedTokens func(residentBlocks, promptTokens int) int
	speed        float64 // times what timing says
	stopped      bool
	onStep       func()

	waiting   jobHeap // by the order in which they are taken
	prefill   *Job    // the one running job that is being prefilled
	running   int     // jobs that hold a slot, prefill included
	events    jobHeap // running jobs by the time of their next event
	submitted uint64
	found     []*block // reused from one admit to the next
}

// Job is one sequence to prefill and decode. The caller sets the first group of fields and leaves them alone after
// [Engine.Submit]; the engine sets the rest, for the caller to read. A job that has ended may be submitted once more, to
// any engine: it starts from the beginning.
type Job struct {
	// Keys are the block keys of the prompt, and after these the keys of the blocks that the answer will fill.
	Keys []uint64
	// PromptBlocks is how many of Keys can be looked up, and are resident once the prompt is prefilled.
	PromptBlocks int
	// PromptTokens and OutputTokens (at least 1) are the lengths.
	PromptTokens, OutputTokens int
	// BlockSize is the number of tokens of a block; unused where the answer fills none and the cache keeps no copies.
	BlockSize int
	// Priority orders waiting jobs, lowest first, where the engine's Scheduling is ByPriority.
	Priority int64
	// SlowFactor, where above 0, multiplies all of the job's computing times.
	SlowFactor float64
	// IgnoreCached makes the job compute all of its prompt, whatever is resident.
	IgnoreCached bool
	// Stored, where set, is called after Keys[from:to] have been computed and become resident. In a cache that keeps no
	// copies they may have been so before. It must not call the engine.
	Stored func(from, to int)
	// Notify, where set, is called after the job's Phase has changed. It must not call the engine.
	Notify func()

	Phase        Phase
	CachedTokens int           // prompt tokens that were cached when prefill began
	Submitted    time.Duration // when it came
	Started      time.Duration // when prefill began
	FirstToken   time.Duration // when prefill ended, which gives the first token
	Finished     time.Duration // when it was done or aborted
	Generated    int           // tokens generated before Finished

	decodeTime time.Duration // time between two tokens
	paceToken  int           // token number paceToken came at paceFrom, the later ones come decodeTime apart
	paceFrom   time.Duration
	held       []*block      // pinned: those of the first Keys
	full       bool          // the cache had no room for a block: the rest is not cached
	at         time.Duration // time of the next event
	order      uint64        // of submission
	heapPos    int           // in waiting or events
}

// Phase is where a job is.
type Phase int

// The phases in the order in which a job passes them; Aborted is reached from any of the first three.
const (
	Waiting Phase = iota
	Prefilling
	Decoding
	Done
	Aborted
)

// What Submit answers when it does not take a job.
var (
	// ErrQueueFull says that MaxQueued requests are in flight.
	ErrQueueFull = errors.New("queue full")
	// ErrStopped says that the engine has been stopped.
	ErrStopped = errors.New("engine stopped")
)

// NewEngine returns an idle engine. cachedTokens decides how many tokens of a prompt count as cached when so many of
// its leading blocks are resident, the one rule that differs between users: [CachedTokens] is vLLM's.
func NewEngine(timing Timing, cache *Cache, cachedTokens func(residentBlocks, promptTokens int) int) *Engine {
	timing = timing.WithDefaults()
	return &Engine{
		timing:       timing,
		cache:        cache,
		cachedTokens: cachedTokens,
		speed:        1,
		waiting:      jobHeap{before: timing.Scheduling.before()},
		events: jobHeap{before: func(a, b *Job) bool {
			return a.at < b.at || a.at == b.at && a.order < b.order
		}},
	}
}

// OnStep has f called whenever all that happens at one time has happened. It must not call the engine.
func (e *Engine) OnStep(f func()) { e.onStep = f }

// Cache returns the engine's prefix cache.
func (e *Engine) Cache() *Cache { return e.cache }

// Running returns how many jobs hold one of the MaxRunning slots.
func (e *Engine) Running() int { return e.running }

// Waiting returns how many jobs wait for a slot, for the prefill unit or for room in the cache.
func (e *Engine) Waiting() int { return e.waiting.Len() }

// UsedBlocks returns how many blocks the running jobs need, those still being computed included. Blocks that are only
// cached do not count: it is load, not warmth, as vllm:kv_cache_usage_perc is.
func (e *Engine) UsedBlocks() int {
	used := e.cache.Pinned()
	if e.prefill != nil {
		used += e.prefill.PromptBlocks - len(e.prefill.held)
	}
	return used
}

// Submit queues jobs that belong to one request: all of them, or none and ErrQueueFull or ErrStopped.
func (e *Engine) Submit(now time.Duration, jobs ...*Job) error {
	e.Advance(now)
	if e.stopped {
		return ErrStopped
	}
	if e.timing.MaxQueued > 0 && e.running+e.waiting.Len()+len(jobs) > e.timing.MaxQueued {
		return ErrQueueFull
	}
	for _, j := range jobs {
		j.Phase, j.Submitted = Waiting, now
		j.CachedTokens, j.Started, j.FirstToken, j.Finished, j.Generated, j.full = 0, 0, 0, 0, 0, false
		j.OutputTokens = max(j.OutputTokens, 1)
		setDefault(&j.SlowFactor, 1)
		j.order = e.submitted
		e.submitted++
		heap.Push(&e.waiting, j)
	}
	e.admit(now)
	return nil
}

// Abort ends a job at once and frees what it holds: its place in the queue, or its slot and blocks. What it has computed
// stays cached, except for the part of a prompt that was still being prefilled. A finished job is left alone.
func (e *Engine) Abort(now time.Duration, j *Job) {
	e.Advance(now)
	switch j.Phase {
	case Waiting:
		heap.Remove(&e.waiting, j.heapPos)
	case Prefilling, Decoding:
		heap.Remove(&e.events, j.heapPos)
	case Done, Aborted:
		return
	}
	e.abort(now, j)
	e.admit(now)
}

// abort ends a job that has been taken out of its heap.
func (e *Engine) abort(now time.Duration, j *Job) {
	if j.Phase == Waiting {
		j.Finished = now
		e.setPhase(j, Aborted)
		return
	}
	j.Generated = j.TokensAt(now)
	e.finish(j, now, Aborted)
}

// Stop is the end of the replica's process: all jobs are aborted at once, the cache is empty, and Submit answers
// ErrStopped until [Engine.Start]. Nobody is told which blocks are gone, as nobody is when a process dies. Stop
// returns the jobs that it has aborted in the order in which they came, for whoever sends them elsewhere.
func (e *Engine) Stop(now time.Duration) []*Job {
	e.Advance(now)
	e.stopped = true
	ended := slices.Concat(e.waiting.jobs, e.events.jobs)
	e.waiting.jobs, e.events.jobs = nil, nil
	slices.SortFunc(ended, func(a, b *Job) int { return cmp.Compare(a.order, b.order) })
	for _, j := range ended {
		e.abort(now, j)
	}
	e.cache.forget()
	return ended
}

// Start lets a stopped engine take jobs again. Its speed is what it was: that is the machine's.
func (e *Engine) Start() { e.stopped = false }

// SetSpeed makes the engine compute so many times as fast as its Timing says, from now on: 0.5 is a replica that is
// throttled to half its speed, 1 is back to normal. Running jobs keep what they have done and do the rest at the new
// speed. It panics where the factor is not between 1e-6 and 1e6.
func (e *Engine) SetSpeed(now time.Duration, factor float64) {
	if !(factor >= 1e-6 && factor <= 1e6) {
		panic("replica: a speed must be between 1e-6 and 1e6")
	}
	e.Advance(now)
	slower := e.speed / factor
	e.speed = factor
	for _, j := range e.events.jobs {
		if j.Phase == Prefilling {
			j.at = now + scale(j.at-now, slower)
			j.decodeTime = e.decodeTime(j)
			continue
		}
		generated := j.TokensAt(now)
		left := scale(j.TokenTime(generated+1)-now, slower) // of the token that is being computed
		j.decodeTime = e.decodeTime(j)
		j.paceToken, j.paceFrom = generated, now+min(left, j.decodeTime)-j.decodeTime
		j.at = j.nextDecodeEvent()
	}
	heap.Init(&e.events)
}

// decodeTime returns the time from one token of a job to the next at the present speed.
func (e *Engine) decodeTime(j *Job) time.Duration {
	return min(scale(e.timing.DecodeTime, j.SlowFactor/e.speed), aeon/time.Duration(j.OutputTokens))
}

// Next returns the time at which something happens next; false where nothing does without a Submit.
func (e *Engine) Next() (time.Duration, bool) {
	if e.events.Len() == 0 {
		return 0, false
	}
	return e.events.jobs[0].at, true
}

// Advance makes everything happen that happens until now, in the order of time.
func (e *Engine) Advance(now time.Duration) {
	for e.events.Len() > 0 && e.events.jobs[0].at <= now {
		at := e.events.jobs[0].at
		e.step(e.events.jobs[0])
		if e.onStep != nil && (e.events.Len() == 0 || e.events.jobs[0].at > at) {
			e.onStep()
		}
	}
}

// TokensAt returns how many tokens the job has generated by now, which must not be before the last Advance.
func (j *Job) TokensAt(now time.Duration) int {
	switch {
	case j.Phase < Decoding:
		return 0
	case j.Phase > Decoding:
		return j.Generated
	case j.decodeTime == 0:
		return j.OutputTokens
	}
	return min(j.OutputTokens, j.paceToken+int((now-j.paceFrom)/j.decodeTime))
}

// TokenTime returns when a decoding job generates its n-th token, counted from 1. Tokens from before a change of speed
// count as generated at the new one.
func (j *Job) TokenTime(n int) time.Duration {
	return j.paceFrom + time.Duration(n-j.paceToken)*j.decodeTime
}

// step makes the job's next event happen: the end of prefill, a block of the answer that is full, the end.
func (e *Engine) step(j *Job) {
	now := j.at
	if j.Phase == Prefilling {
		e.prefill = nil
		j.full = e.compute(j, j.PromptBlocks) < j.PromptBlocks
		j.FirstToken = now
		j.paceToken, j.paceFrom = 1, now
		e.setPhase(j, Decoding)
	}
	generated := j.TokensAt(now)
	for j.answerBlockAt() <= generated {
		want := len(j.held) + 1
		j.full = e.compute(j, want) < want // vLLM would preempt a request here
	}
	if generated < j.OutputTokens {
		j.at = j.nextDecodeEvent()
		heap.Fix(&e.events, j.heapPos)
	} else {
		heap.Remove(&e.events, j.heapPos)
		j.Generated = generated
		e.finish(j, now, Done)
	}
	e.admit(now)
}

// compute makes the first so many blocks of a job resident, as far as there is room, and returns how many are.
func (e *Engine) compute(j *Job, blocks int) int {
	from := len(j.held)
	j.held = e.cache.compute(j.held, j.Keys[from:blocks])
	if j.Stored != nil && len(j.held) > from {
		j.Stored(from, len(j.held))
	}
	return len(j.held)
}

// nextDecodeEvent returns when the next block of the answer is full, or the answer is.
func (j *Job) nextDecodeEvent() time.Duration {
	return j.TokenTime(min(j.OutputTokens, j.answerBlockAt()))
}

// answerBlockAt returns how many tokens have been generated when the next block of the answer is full: one more than
// it holds, because a sampled token is computed only in the next step (the last one never is).
func (j *Job) answerBlockAt() int {
	if j.full || len(j.held) == len(j.Keys) {
		return math.MaxInt
	}
	return (len(j.held)+1)*j.BlockSize - j.PromptTokens + 1
}

// admit starts the prefill of the first waiting job, if the prefill unit, a slot and enough blocks are free.
func (e *Engine) admit(now time.Duration) {
	if e.prefill != nil || e.running >= e.timing.MaxRunning || e.waiting.Len() == 0 {
		return
	}
	j := e.waiting.jobs[0]
	found := e.found[:0]
	if !j.IgnoreCached {
		found = e.cache.find(found, j.Keys[:j.PromptBlocks])
		e.found = found
	}
	cached := min(e.cachedTokens(len(found), j.PromptTokens), j.PromptTokens)
	if e.cache.keepCopies {
		found = found[:cached/j.BlockSize] // the rest is computed once more
	}
	if !e.cache.fits(found, j.PromptBlocks) && e.running > 0 { // alone, it is let in to cache what it can
		return
	}
	heap.Pop(&e.waiting)
	e.running++
	e.prefill = j
	e.cache.pin(found)
	j.held = append(make([]*block, 0, len(j.Keys)), found...)
	j.CachedTokens = cached
	j.Started = now
	j.decodeTime = e.decodeTime(j)
	j.at = now + scale(e.timing.PrefillTime(j.PromptTokens-j.CachedTokens), j.SlowFactor/e.speed)
	heap.Push(&e.events, j)
	e.setPhase(j, Prefilling)
}

// finish takes a running job out of its slot.
func (e *Engine) finish(j *Job, now time.Duration, phase Phase) {
	if e.prefill == j {
		e.prefill = nil
	}
	e.running--
	e.cache.release(j.held)
	j.held = nil
	j.Finished = now
	e.setPhase(j, phase)
}

func (e *Engine) setPhase(j *Job, phase Phase) {
	j.Phase = phase
	if j.Notify != nil {
		j.Notify()
	}
}

// jobHeap is a heap of jobs, each of which knows its place in it.
type jobHeap struct {
	jobs   []*Job
	before func(a, b *Job) bool
}

func (h *jobHeap) Len() int { return len(h.jobs) }

func (h *jobHeap) Less(i, k int) bool { return h.before(h.jobs[i], h.jobs[k]) }

func (h *jobHeap) Swap(i, k int) {
	h.jobs[i], h.jobs[k] = h.jobs[k], h.jobs[i]
	h.jobs[i].heapPos, h.jobs[k].heapPos = i, k
}

func (h *jobHeap) Push(x any) {
	j := x.(*Job)
	j.heapPos = len(h.jobs)
	h.jobs = append(h.jobs, j)
}

func (h *jobHeap) Pop() any {
	last := len(h.jobs) - 1
	j := h.jobs[last]
	h.jobs[last] = nil
	h.jobs = h.jobs[:last]
	return j
}

var _ heap.Interface = (*jobHeap)(nil)
