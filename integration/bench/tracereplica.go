package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"math"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replay"
	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

// replicasConfig describes the replicas that a trace is played onto.
type replicasConfig struct {
	Count       int
	CacheBlocks int     // of each; 0 is unbounded
	PrefillRate float64 // tokens/s of each
	DecodeMS    float64 // ms from one token of an answer to the next
	TimeScale   float64 // how many times faster than life they are
}

// serveReplicas serves replicas. The configuration is JSON.
func serveReplicas(config string) error {
	var c replicasConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		return err
	}
	var handlers []http.Handler
	for i := range c.Count {
		handlers = append(handlers, newSimulated(i, c))
	}
	return serveAll(handlers)
}

// simulated is a replica that computes as those of package replay do, behind as much of the streaming API as the trace's requests need. An answer
// has two events: one when its first token is there, and one with all other tokens when the last one is. The hundreds of thousands of events that
// an engine would send in between are of no interest to whoever routes, but would take the machine as a whole.
type simulated struct {
	number int
	scale  float64
	born   time.Time

	mu     sync.Mutex
	engine *replica.Engine
	wake   *time.Timer // fires at the engine's next event
}

func newSimulated(number int, c replicasConfig) *simulated {
	s := &simulated{number: number, scale: c.TimeScale, born: time.Now()}
	timing := replica.Timing{
		PrefillRate: c.PrefillRate,
		DecodeTime:  time.Duration(c.DecodeMS * float64(time.Millisecond)),
		MaxRunning:  math.MaxInt,
	}
	s.engine = replica.NewEngine(timing, replica.NewCache(c.CacheBlocks), func(blocks, promptTokens int) int {
		return min(blocks*replay.BlockTokens, promptTokens) // a partial block counts the tokens it has
	})
	s.wake = time.AfterFunc(time.Hour, s.tick)
	return s
}

// firstEvent is the first event of an answer, with what the measurement wants to know beside.
type firstEvent struct {
	Object  string          `json:"object"`
	Choices json.RawMessage `json:"choices"`
	Replica int             `json:"replica"`
	// Unix times in nanoseconds: when the prompt was there, when its first token was, and when this event was sent.
	Submitted int64 `json:"submitted"`
	Token     int64 `json:"token"`
	Sent      int64 `json:"sent"`
}

// lastEvent is what is of interest in the last event of an answer.
type lastEvent struct {
	Usage struct {
		PromptTokens  int64 `json:"prompt_tokens"`
		PromptDetails struct {
			CachedTokens int64 `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

// ServeHTTP implements [http.Handler].
func (s *simulated) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := bodies.Get().(*bytes.Buffer)
	body.Reset()
	_, err := body.ReadFrom(r.Body)
	job, ok := newJob(body.Bytes())
	bodies.Put(body)
	if err != nil {
		return
	}
	if !ok {
		http.Error(w, "this is no request of a trace", http.StatusBadRequest)
		return
	}
	phases := make(chan replica.Phase, 4)
	job.Notify = func() { phases <- job.Phase }
	s.submit(job)
	defer s.abort(job)
	// As engines do, say at once that it is taken.
	w.Header().Set("Content-Type", "text/event-stream")
	flusher := w.(http.Flusher)
	flusher.Flush()
	for {
		var phase replica.Phase
		select {
		case phase = <-phases:
		case <-r.Context().Done():
			return
		}
		switch phase {
		case replica.Decoding:
			event, err := json.Marshal(firstEvent{
				Object:    "chat.completion.chunk",
				Choices:   json.RawMessage(`[{"index":0,"delta":{"role":"assistant","content":"word"}}]`),
				Replica:   s.number,
				Submitted: s.wall(job.Submitted),
				Token:     s.wall(job.FirstToken),
				Sent:      time.Now().UnixNano(),
			})
			if err != nil {
				return
			}
			fmt.Fprintf(w, "data: %s\n\n", event)
			flusher.Flush()
		case replica.Done:
			fmt.Fprintf(w, `data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" more"},"finish_reason":"length"}],`+
				`"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`+"\n\ndata: [DONE]\n\n",
				job.PromptTokens, job.OutputTokens, job.PromptTokens+job.OutputTokens, job.CachedTokens)
			return
		}
	}
}

var seed = maphash.MakeSeed()

// newJob reads a request's body. Its blocks are those of the trace: each is named by the text up to its end.
func newJob(body []byte) (*replica.Job, bool) {
	rest, ok := bytes.CutPrefix(body, []byte(beforeText))
	text, rest, found := bytes.Cut(rest, []byte(`"`))
	rest, hasTokens := bytes.CutPrefix(rest, []byte(afterText[1:]))
	digits, whole := bytes.CutSuffix(rest, []byte(bodyEnd))
	tokens, err := strconv.Atoi(string(digits))
	if !ok || !found || !hasTokens || !whole || err != nil || len(text)%replay.BytesPerToken != 0 {
		return nil, false
	}
	job := &replica.Job{PromptTokens: len(text) / replay.BytesPerToken, OutputTokens: tokens}
	var hash maphash.Hash
	hash.SetSeed(seed)
	for len(text) > 0 {
		n := min(replay.BlockTokens*replay.BytesPerToken, len(text))
		_, _ = hash.Write(text[:n]) // never fails
		job.Keys = append(job.Keys, hash.Sum64())
		text = text[n:]
	}
	job.PromptBlocks = len(job.Keys)
	return job, true
}

func (s *simulated) submit(job *replica.Job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	_ = s.engine.Submit(now, job) // takes any number
	s.arm(now)
}

// abort ends a job whose client has gone; one that is done is left alone.
func (s *simulated) abort(job *replica.Job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	s.engine.Abort(now, job)
	s.arm(now)
}

func (s *simulated) tick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	s.engine.Advance(now)
	s.arm(now)
}

// arm sets the timer. The caller holds mu.
func (s *simulated) arm(now time.Duration) {
	if at, ok := s.engine.Next(); ok {
		s.wake.Reset(time.Duration(float64(at-now) / s.scale))
	}
}

// now is the time in the engine's world.
func (s *simulated) now() time.Duration { return time.Duration(float64(time.Since(s.born)) * s.scale) }

// wall is the Unix time of a time in the engine's world.
func (s *simulated) wall(t time.Duration) int64 {
	return s.born.Add(time.Duration(float64(t) / s.scale)).UnixNano()
}

var _ http.Handler = (*simulated)(nil)
