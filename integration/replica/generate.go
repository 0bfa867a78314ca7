package replica

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"
)

// api is one of the HTTP interfaces to generate text by.
type api interface {
	// parse reads a body that is valid UTF-8.
	parse(body []byte) (*params, *apiError)
	// newAnswer returns what writes the answer to a call.
	newAnswer(c *call) answer
	// writeError answers with an error instead.
	writeError(w http.ResponseWriter, e *apiError)
	// sendError puts an error into a stream, where its answer's open has been sent.
	sendError(out *events, e *apiError)
	// idPrefix begins the ids of the API's answers.
	idPrefix() string
}

// answer writes the answer to one call, as a stream (open to end, in this order) or at once (body).
type answer interface {
	// open sends what precedes the first token of all.
	open(out *events)
	// begin sends what comes with a sequence's first token.
	begin(out *events, choice int)
	// token sends one token, or none (ids is empty) where the sequence ends without. finish is "" before its end.
	token(out *events, choice int, ids []uint32, finish string)
	// end sends what follows the last token of all.
	end(out *events)
	// body is the whole answer.
	body() any
}

// options are the fields that the APIs have in common, under all their names.
type options struct {
	Model               string          `json:"model"`
	Stream              bool            `json:"stream"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MaxOutputTokens     *int            `json:"max_output_tokens"`
	N                   *int            `json:"n"`
	CacheSalt           *string         `json:"cache_salt"`
	Priority            json.RawMessage `json:"priority"`
	ReturnTokenIDs      bool            `json:"return_token_ids"`
	SessionID           string          `json:"session_id"`
	StreamOptions       struct {
		IncludeUsage         bool `json:"include_usage"`
		ContinuousUsageStats bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
}

// params are a parsed request.
type params struct {
	options
	maxTokens    *int       // whichever of the names the API has
	priority     int64      // what Priority says, once it has been read
	prompts      [][]uint32 // a list for text completions only
	ignoreCached bool       // the prompt's own log probabilities are wanted, for which all of it must be computed
	instructions *string    // responses only
}

// The most sequences that one request may ask for.
const maxSequences = 64

func (p *params) check(maxModelLen int) *apiError {
	if p.CacheSalt != nil && *p.CacheSalt == "" {
		return badRequest("cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)")
	}
	if m := p.maxTokens; m != nil && *m < 1 {
		return badRequest("max_tokens", "max_tokens must be at least 1, got %d. (parameter=max_tokens, value=%[1]d)", *m)
	}
	if m := p.maxTokens; m != nil && *m > maxModelLen {
		return badRequest("max_tokens", "max_tokens=%d cannot be greater than max_model_len=%d. Please request fewer output tokens. (parameter=max_tokens, value=%[1]d)", *m, maxModelLen)
	}
	if n := p.n(); n < 1 || n > maxSequences || n*len(p.prompts) > maxSequences {
		return badRequest("n", "n must be at least 1 and at most %d in all, got %d. (parameter=n, value=%[2]d)", maxSequences, n)
	}
	for _, prompt := range p.prompts {
		if len(prompt) == 0 {
			return badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")
		}
		if len(prompt) >= maxModelLen {
			return badRequest("input_tokens", "This model's maximum context length is %d tokens. However, your prompt contains at least %d input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%[2]d)",
				maxModelLen, len(prompt))
		}
	}
	return nil
}

func (p *params) n() int {
	if p.N == nil {
		return 1
	}
	return *p.N
}

// call is a request that is being generated.
type call struct {
	*params
	id        string
	created   int64
	rank      *rank
	adapter   adapter
	salt      string
	session   string
	details   bool // cached_tokens in the OpenAI usage
	sequences []*sequence
	poke      chan struct{} // says that the phase of a sequence has changed
}

// sequence is one text that is generated.
type sequence struct {
	Job
	prompt, answer []uint32
	computed       []uint32 // both, without the last token of the answer: it is sampled and never computed
	salt           string
	limited        bool // ends because of max_tokens or the model's length
}

func (q *sequence) finishReason() string {
	switch {
	case q.Phase == Aborted:
		return "abort"
	case q.limited:
		return "length"
	default:
		return "stop"
	}
}

func (q *sequence) text() string { return tokensText(q.answer[:q.Generated]) }

func (s *Server) newCall(p *params, id string, r *rank, session string, slowFactor float64) *call {
	c := &call{params: p, id: id, created: time.Now().Unix(), rank: r, session: cmp.Or(session, p.SessionID),
		details: !s.cfg.NoPromptTokensDetails, poke: make(chan struct{}, 1)}
	if c.Model == "" {
		c.Model = s.names[0]
	}
	if i := slices.Index(s.adapters, c.Model); i >= 0 {
		c.adapter = adapter{name: c.Model, id: i + 1}
	}
	if p.CacheSalt != nil {
		c.salt = *p.CacheSalt
	}
	for _, prompt := range p.prompts {
		seed := s.cfg.Seed
		for _, token := range prompt {
			seed = mix(seed ^ uint64(token))
		}
		for choice := range p.n() {
			q := &sequence{prompt: prompt, salt: c.salt}
			n, room := s.cfg.AnswerTokens, s.cfg.MaxModelLen-len(prompt)
			if p.maxTokens != nil {
				n = *p.maxTokens
			}
			q.limited = p.maxTokens != nil || n > room
			q.answer = answerTokens(seed+uint64(choice), min(n, room))
			q.computed = slices.Concat(prompt, q.answer[:len(q.answer)-1])
			q.Job = Job{
				Keys:         BlockKeys(q.computed, s.cfg.BlockSize, c.salt, c.adapter.name),
				PromptBlocks: len(prompt) / s.cfg.BlockSize,
				PromptTokens: len(prompt),
				OutputTokens: len(q.answer),
				Priority:     p.priority,
				BlockSize:    s.cfg.BlockSize,
				SlowFactor:   slowFactor,
				IgnoreCached: p.ignoreCached,
				Stored:       func(from, to int) { c.stored(q, from, to) },
				Notify: func() {
					s.sequenceChanged(r, q)
					select {
					case c.poke <- struct{}{}:
					default:
					}
				},
			}
			c.sequences = append(c.sequences, q)
		}
	}
	return c
}

// stored tells the subscribers of the rank's events what a sequence has computed.
func (c *call) stored(q *sequence, from, to int) {
	if c.rank.events == nil {
		return
	}
	s := &storedBlocks{
		hashes:    q.Keys[from:to],
		tokens:    q.computed[from*q.BlockSize : to*q.BlockSize],
		blockSize: q.BlockSize,
		adapter:   c.adapter,
		salt:      q.salt,
		session:   c.session,
	}
	if from > 0 {
		s.parent = q.Keys[from-1]
	}
	c.rank.events.stored(s)
}

// parse reads a body and checks all that is not up to the API.
func (s *Server) parse(a api, body []byte) (*params, *apiError) {
	p, e := a.parse(body)
	if e == nil {
		e = p.readPriority()
	}
	if e == nil {
		e = s.checkModel(p.Model)
	}
	if e == nil {
		e = p.check(s.cfg.MaxModelLen)
	}
	return p, e
}

// generate returns the handler of one API.
func (s *Server) generate(a api) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, e := s.readBody(w, r)
		s.mu.Lock()
		s.received++
		draining := s.draining
		s.mu.Unlock()
		fault := s.faults.take()
		switch {
		case draining || fault.Kind == Status500 || fault.Kind == Unhealthy:
			a.writeError(w, errShutdown)
			return
		case fault.Kind == Status503:
			a.writeError(w, errBusy)
			return
		case fault.Kind == Reset:
			reset(w)
			return
		case fault.Kind == Hang:
			select {
			case <-r.Context().Done():
			case <-s.closed:
			}
			panic(http.ErrAbortHandler)
		}
		var p *params
		if e == nil {
			p, e = s.parse(a, body)
		}
		var rank *rank
		if e == nil {
			rank, e = s.chooseRank(r)
		}
		if e == nil && s.cfg.RefusePriority && p.priority != 0 {
			e = priorityRefused(p.priority)
		}
		if e == nil && fault.Kind == StreamError && !p.Stream {
			e = errBusy
		}
		if e != nil {
			a.writeError(w, e)
			return
		}
		id := r.Header.Get("X-Request-Id")
		if id == "" {
			id = randomID()
		}
		slowFactor, dieAfter := 1.0, 0
		switch fault.Kind {
		case Slow:
			slowFactor = fault.Factor
		case Die:
			dieAfter = fault.After
		}
		c := s.newCall(p, a.idPrefix()+id, rank, r.Header.Get("X-Session-ID"), slowFactor)
		if fault.Kind == StreamError {
			out := newEvents(w, 0)
			a.newAnswer(c).open(out)
			a.sendError(out, errBusy)
			out.flush()
			return
		}
		if !s.submit(c) {
			a.writeError(w, errBusy)
			return
		}
		defer s.forget(c)
		if p.Stream {
			s.stream(w, r, c, a.newAnswer(c), dieAfter)
			return
		}
		if s.wait(r, c) && dieAfter == 0 {
			writeJSON(w, http.StatusOK, a.newAnswer(c).body())
			return
		}
		panic(http.ErrAbortHandler) // closes the connection
	}
}

func (s *Server) submit(c *call) bool {
	jobs := make([]*Job, len(c.sequences))
	for i, q := range c.sequences {
		jobs[i] = &q.Job
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if err := c.rank.engine.Submit(now, jobs...); errors.Is(err, ErrQueueFull) {
		s.rejected++
		return false
	}
	s.calls[c] = struct{}{}
	s.arm(now)
	return true
}

// forget ends a call, whichever way it went: what still runs is aborted, which frees its place at once.
func (s *Server) forget(c *call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.abort(c)
	delete(s.calls, c)
	s.changed.Broadcast()
}

// progress is how far a sequence is.
type progress struct {
	generated int
	finish    string // finish_reason, "" before the end
}

// progress returns how far every sequence is, and when the next token is due: false where none is decoded.
func (s *Server) progress(c *call, into []progress) (next time.Duration, decoding bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.advance()
	for i, q := range c.sequences {
		into[i] = progress{generated: q.TokensAt(now)}
		switch {
		case q.Phase > Decoding:
			into[i].finish = q.finishReason()
		case q.Phase == Decoding:
			if at := q.TokenTime(into[i].generated + 1); !decoding || at < next {
				next, decoding = at, true
			}
		}
	}
	return s.wall(next - now), decoding
}

// stream sends the tokens as they are generated.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, c *call, a answer, dieAfter int) {
	out := newEvents(w, dieAfter)
	a.open(out)
	out.flush() // vLLM sends the headers at once, before the first token
	timer := time.NewTimer(0)
	defer timer.Stop()
	sent := make([]progress, len(c.sequences))
	now := make([]progress, len(c.sequences))
	for unfinished := len(c.sequences); ; {
		next, decoding := s.progress(c, now)
		for i, q := range c.sequences {
			n, p := sent[i].generated, now[i]
			if sent[i].finish != "" || n == p.generated && p.finish == "" {
				continue
			}
			if n == 0 {
				a.begin(out, i)
			}
			last := p.generated == q.OutputTokens && p.finish != ""
			for ; n < p.generated; n++ {
				finish := ""
				if last && n == p.generated-1 {
					finish = p.finish
				}
				a.token(out, i, q.answer[n:n+1], finish)
			}
			if p.finish != "" && !last {
				a.token(out, i, nil, p.finish)
			}
			if p.finish != "" {
				unfinished--
			}
			sent[i] = p
		}
		if unfinished == 0 {
			break
		}
		out.flush()
		if out.err != nil {
			return
		}
		timer.Stop()
		if decoding {
			timer.Reset(next)
		}
		select {
		case <-timer.C:
		case <-c.poke:
		case <-r.Context().Done():
			return
		case <-s.closed:
			panic(http.ErrAbortHandler)
		}
	}
	if dieAfter > 0 { // the stream was too short to die in the midst of it
		out.flush()
		panic(http.ErrAbortHandler)
	}
	a.end(out)
	out.flush()
}

// wait waits until all sequences have finished; false if the client or the server went away first.
func (s *Server) wait(r *http.Request, c *call) bool {
	now := make([]progress, len(c.sequences))
	for {
		s.progress(c, now)
		if !slices.ContainsFunc(now, func(p progress) bool { return p.finish == "" }) {
			return true
		}
		select {
		case <-c.poke:
		case <-r.Context().Done():
			return false
		case <-s.closed:
			return false
		}
	}
}

// usage is what the tokens of a call were, once all its sequences have finished.
type usage struct{ prompt, cached, created, completion int }

func (c *call) usage() usage {
	var u usage
	for i, q := range c.sequences {
		u.completion += q.Generated
		if i%c.n() == 0 { // the sequences of one prompt count it once
			u.prompt += q.PromptTokens
			u.cached += q.CachedTokens
			u.created += max(q.PromptBlocks*q.BlockSize-q.CachedTokens, 0)
		}
	}
	return u
}

func randomID() string { return fmt.Sprintf("%016x", rand.Uint64()) }
