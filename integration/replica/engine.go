package replica

import (
	"container/heap"
	"container/list"
	"errors"
	"math"
	"time"
)

// Engine is the model of one replica's scheduler, in whatever time its caller lives in: times are durations since an
// origin that the caller chooses, and never go back. Requests wait first come first served, are prefilled one at a
// time, then decode side by side, each at its own pace.
//
// A caller alternates between submitting and aborting, each with the current time, and [Engine.Advance] at the times
// that [Engine.Next] announces. What happens in between is computed for the exact time at which it happens, however late
// the call. An Engine is not safe for concurrent use.
type Engine struct {
	timing       Timing
	cache        *Cache
	cachedTokens func(residentBlocks, promptTokens int) int

	waiting   list.List // of *Job
	prefill   *Job      // the one running job that is being prefilled
	running   int       // jobs that hold a slot, prefill included
	events    eventHeap // running jobs by the time of their next event
	submitted uint64
}

// Job is one sequence to prefill and decode. The caller sets the first group of fields and leaves them alone after
// [Engine.Submit]; the engine sets the rest, for the caller to read.
type Job struct {
	// Keys are the block keys of the prompt, and after these the keys of the blocks that the answer will fill.
	Keys []uint64
	// PromptBlocks is how many of Keys can be looked up, and are resident once the prompt is prefilled.
	PromptBlocks int
	// PromptTokens and OutputTokens (at least 1) are the lengths.
	PromptTokens, OutputTokens int
	// BlockSize is the number of tokens of the blocks that the answer fills; unused without such blocks.
	BlockSize int
	// SlowFactor, where above 0, multiplies all of the job's computing times.
	SlowFactor float64
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
	held       int           // Keys[:held] are pinned
	full       bool          // the cache had no room for a block: the rest is not cached
	at         time.Duration // time of the next event
	order      uint64        // breaks ties of at
	queued     *list.Element
	heapPos    int
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

// ErrQueueFull is what Submit answers when MaxQueued requests are in flight.
var ErrQueueFull = errors.New("queue full")

// NewEngine returns an idle engine. cachedTokens decides how many tokens of a prompt count as cached when so many of
// its leading blocks are resident, the one rule that differs between users: [CachedTokens] is vLLM's.
func NewEngine(timing Timing, cache *Cache, cachedTokens func(residentBlocks, promptTokens int) int) *Engine {
	return &Engine{timing: timing.WithDefaults(), cache: cache, cachedTokens: cachedTokens}
}

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
		used += e.prefill.PromptBlocks - e.prefill.held
	}
	return used
}

// Submit queues jobs that belong to one request: all of them, or none and ErrQueueFull.
func (e *Engine) Submit(now time.Duration, jobs ...*Job) error {
	e.Advance(now)
	if e.timing.MaxQueued > 0 && e.running+e.waiting.Len()+len(jobs) > e.timing.MaxQueued {
		return ErrQueueFull
	}
	for _, j := range jobs {
		j.Phase, j.Submitted = Waiting, now
		j.OutputTokens = max(j.OutputTokens, 1)
		setDefault(&j.SlowFactor, 1)
		j.order = e.submitted
		e.submitted++
		j.queued = e.waiting.PushBack(j)
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
		e.waiting.Remove(j.queued)
		j.Finished = now
		e.setPhase(j, Aborted)
	case Prefilling, Decoding:
		heap.Remove(&e.events, j.heapPos)
		j.Generated = j.TokensAt(now)
		e.finish(j, now, Aborted)
	case Done, Aborted:
		return
	}
	e.admit(now)
}

// Next returns the time at which something happens next; false where nothing does without a Submit.
func (e *Engine) Next() (time.Duration, bool) {
	if len(e.events) == 0 {
		return 0, false
	}
	return e.events[0].at, true
}

// Advance makes everything happen that happens until now, in the order of time.
func (e *Engine) Advance(now time.Duration) {
	for len(e.events) > 0 && e.events[0].at <= now {
		e.step(e.events[0])
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
	return min(j.OutputTokens, 1+int((now-j.FirstToken)/j.decodeTime))
}

// TokenTime returns when a decoding job generates its n-th token, counted from 1.
func (j *Job) TokenTime(n int) time.Duration { return j.FirstToken + time.Duration(n-1)*j.decodeTime }

// step makes the job's next event happen: the end of prefill, a block of the answer that is full, the end.
func (e *Engine) step(j *Job) {
	now := j.at
	if j.Phase == Prefilling {
		e.prefill = nil
		j.held = e.cache.AcquireFrom(j.Keys[:j.PromptBlocks], j.held)
		j.full = j.held < j.PromptBlocks
		j.FirstToken = now
		e.setPhase(j, Decoding)
	}
	generated := j.TokensAt(now)
	for j.answerBlockAt() <= generated {
		held := j.held
		j.held = e.cache.AcquireFrom(j.Keys[:held+1], held)
		j.full = j.held == held // vLLM would preempt a request here
	}
	if generated < j.OutputTokens {
		j.at = j.TokenTime(min(j.OutputTokens, j.answerBlockAt()))
		heap.Fix(&e.events, j.heapPos)
	} else {
		heap.Remove(&e.events, j.heapPos)
		j.Generated = generated
		e.finish(j, now, Done)
	}
	e.admit(now)
}

// answerBlockAt returns how many tokens have been generated when the next block of the answer is full: one more than
// it holds, because a sampled token is computed only in the next step (the last one never is).
func (j *Job) answerBlockAt() int {
	if j.full || j.held == len(j.Keys) {
		return math.MaxInt
	}
	return (j.held+1)*j.BlockSize - j.PromptTokens + 1
}

// admit starts the prefill of the first waiting job, if the prefill unit, a slot and enough blocks are free.
func (e *Engine) admit(now time.Duration) {
	if e.prefill != nil || e.running >= e.timing.MaxRunning || e.waiting.Len() == 0 {
		return
	}
	j := e.waiting.Front().Value.(*Job)
	prompt := j.Keys[:j.PromptBlocks]
	resident, fits := e.cache.room(prompt)
	if !fits && e.running > 0 { // alone, it is let in to cache what it can
		return
	}
	e.waiting.Remove(j.queued)
	e.running++
	e.prefill = j
	j.held = e.cache.Acquire(prompt[:resident])
	j.CachedTokens = min(e.cachedTokens(resident, j.PromptTokens), j.PromptTokens)
	j.Started = now
	j.decodeTime = min(scale(e.timing.DecodeTime, j.SlowFactor), aeon/time.Duration(j.OutputTokens))
	j.at = now + scale(e.timing.PrefillTime(j.PromptTokens-j.CachedTokens), j.SlowFactor)
	heap.Push(&e.events, j)
	e.setPhase(j, Prefilling)
}

// finish takes a running job out of its slot.
func (e *Engine) finish(j *Job, now time.Duration, phase Phase) {
	if e.prefill == j {
		e.prefill = nil
	}
	e.running--
	e.cache.Release(j.Keys[:j.held])
	j.held = 0
	j.Finished = now
	e.setPhase(j, phase)
}

func (e *Engine) setPhase(j *Job, phase Phase) {
	j.Phase = phase
	if j.Notify != nil {
		j.Notify()
	}
}

// eventHeap orders running jobs by the time of their next event.
type eventHeap []*Job

func (h eventHeap) Len() int { return len(h) }

func (h eventHeap) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].order < h[j].order
}

func (h eventHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heapPos, h[j].heapPos = i, j
}

func (h *eventHeap) Push(x any) {
	j := x.(*Job)
	j.heapPos = len(*h)
	*h = append(*h, j)
}

func (h *eventHeap) Pop() any {
	last := len(*h) - 1
	j := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return j
}

var _ heap.Interface = (*eventHeap)(nil)
