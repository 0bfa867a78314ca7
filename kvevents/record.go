package kvevents

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Check is how well the index predicted, request by request, what the engine of a recording reported.
type Check struct {
	Requests int // that were predicted
	Exact    int
	Over     int // more was predicted than the engine had cached
	Under    int // less was predicted

	LeftOut  int // requests that read no cache, were not answered, or whose tokens or cached tokens are not in the recording
	Batches  int // batches of events
	Bad      int // batches that could not be decoded
	Skipped  int // events that were left out
	Gaps     int // places where batches are missing
	Restarts int

	// Wrong is the requests that were not predicted exactly, the first 100 of them.
	Wrong []Misprediction
}

// Misprediction is a request that was not predicted exactly.
type Misprediction struct {
	Request             string // its name or number in the recording
	Predicted, Reported int    // tokens
}

// maxRecording bounds what is read of a recording, in bytes after decompression, and maxWrong what is told of it.
const (
	maxRecording = 1 << 30
	maxWrong     = 100
)

// CheckRecording plays a recording of engines to an index, and compares what the index predicts with what the engines reported.
//
// A recording has JSON objects, one a line, and may be gzipped. By their kind:
//
//   - meta: num_gpu_blocks, where it is known
//   - models: r, the answer of /v1/models
//   - req: t, the Unix time in seconds; i or name; body, and headers and replica, where there are several sources
//   - ev: t; frames, the hexadecimal frames of a message; src, where there are several sources, each with a sequence of its own
//   - resp: t; i or name; status, usage or cached_tokens, prompt_token_ids
//
// Others are passed over. A prediction is for the moment at which the engine scheduled the request, which nothing tells. But requests take some
// milliseconds to get there, and what a request stores and removes is published after its first step: so what counts is what engines have published
// before the request was sent, by their own clock and however late it came, and what requests that are under way are expected to store.
func CheckRecording(r io.Reader) (Check, error) {
	p, err := readRecording(r)
	if err != nil {
		return Check{}, err
	}
	return p.play(), nil
}

// line is a line of a recording.
type line struct {
	Time   float64 `json:"t"`
	Number *int    `json:"i"`
	Name   string  `json:"name"`

	Blocks int `json:"num_gpu_blocks"` // of meta

	Models struct { // of models
		Data []struct {
			ID     string  `json:"id"`
			Parent *string `json:"parent"`
		} `json:"data"`
	} `json:"r"`

	Source string   `json:"src"` // of ev
	Frames []string `json:"frames"`

	Replica string            `json:"replica"` // of req
	Headers map[string]string `json:"headers"`
	Body    json.RawMessage   `json:"body"`

	Status json.RawMessage `json:"status"` // of resp
	Usage  *struct {
		Details *struct {
			Cached *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Cached *int     `json:"cached_tokens"`
	Tokens []uint32 `json:"prompt_token_ids"`
}

// name returns what a request and its response have in common.
func (l *line) name() string {
	if l.Number != nil {
		return strconv.Itoa(*l.Number)
	}
	return l.Name
}

// recording is a recording that has been read.
type recording struct {
	check    Check
	moments  []moment
	index    *Index
	sources  []*recorded
	adapters []string
	blocks   int
	reports  bool // some response has said how much was cached
}

// recorded is a source of events.
type recorded struct {
	name      string
	rank      int
	residency *Residency
	next      uint64 // sequence number
	started   bool
}

// moment is something that happens: a batch of events, a request, or the end of one.
type moment struct {
	time    float64
	source  *recorded // of a batch,
	seq     uint64
	payload []byte
	clears  bool // begins with AllBlocksCleared
	request *request
	end     bool // of the request
}

// request is a request and its response.
type request struct {
	name    string
	sent    float64
	ended   float64
	replica string
	rank    int // -1 where the client left it to the engine
	body    struct {
		Model          string          `json:"model"`
		Prompt         json.RawMessage `json:"prompt"`
		Salt           string          `json:"cache_salt"`
		N              int             `json:"n"`
		Echo           bool            `json:"echo"`
		Logprobs       json.RawMessage `json:"logprobs"`
		PromptLogprobs json.RawMessage `json:"prompt_logprobs"`
	}
	prompts  [][]uint32
	cached   int
	ok       bool
	unsaid   bool // cached, which vLLM 0.23 leaves out where it is 0
	expected []Expectation
}

func readRecording(r io.Reader) (*recording, error) {
	in := bufio.NewReader(r)
	if head, err := in.Peek(2); err == nil && head[0] == 0x1f && head[1] == 0x8b {
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, fmt.Errorf("recording: %w", err)
		}
		in = bufio.NewReader(z)
	}
	limited := &io.LimitedReader{R: in, N: maxRecording}
	p := &recording{index: NewIndex()}
	p.index.pending.now = func() time.Duration { return 0 } // a recording is played faster than it was made
	waiting := make(map[string][]*request)
	lines := json.NewDecoder(limited)
	for n := 1; ; n++ {
		var raw json.RawMessage
		err := lines.Decode(&raw)
		if limited.N <= 0 {
			return nil, fmt.Errorf("recording: more than %d bytes", maxRecording)
		}
		if err == io.EOF {
			break
		}
		if err == nil {
			err = p.take(raw, waiting)
		}
		if err != nil {
			return nil, fmt.Errorf("recording: object %d: %w", n, err)
		}
	}
	for _, unanswered := range waiting {
		p.check.LeftOut += len(unanswered)
	}
	slices.SortStableFunc(p.moments, func(a, b moment) int { return cmp.Compare(a.time, b.time) })
	for _, s := range p.sources {
		s.residency.SetCapacity(p.blocks)
		s.residency.SetAdapters(p.adapters)
	}
	return p, nil
}

func (p *recording) take(raw []byte, waiting map[string][]*request) error {
	l := new(line)
	var known struct {
		Kind string `json:"kind"`
	}
	if err := json.Unmarshal(raw, &known); err != nil {
		return err
	}
	switch known.Kind {
	case "meta", "models", "ev", "req", "resp":
		if err := json.Unmarshal(raw, l); err != nil {
			return err
		}
	}
	switch known.Kind {
	case "meta":
		p.blocks = l.Blocks
	case "models":
		for _, m := range l.Models.Data {
			if m.Parent != nil {
				p.adapters = append(p.adapters, m.ID)
			}
		}
	case "ev":
		return p.event(l)
	case "req":
		q := &request{name: l.name(), sent: l.Time, ended: math.Inf(1), replica: l.Replica, rank: -1}
		if err := json.Unmarshal(l.Body, &q.body); err != nil {
			q.body.Prompt = nil // not a body that can be predicted, such as one of several parts
		}
		for name, value := range l.Headers {
			if rank, err := strconv.Atoi(value); err == nil && strings.EqualFold(name, "X-data-parallel-rank") {
				q.rank = rank
			}
		}
		waiting[q.name] = append(waiting[q.name], q)
		p.moments = append(p.moments, moment{time: q.sent, request: q})
	case "resp":
		queue := waiting[l.name()]
		if len(queue) == 0 {
			return nil
		}
		waiting[l.name()] = queue[1:]
		p.response(queue[0], l)
	}
	return nil
}

func (p *recording) event(l *line) error {
	// Topic, sequence number, payload.
	if len(l.Frames) != 3 {
		return fmt.Errorf("frames: %d, not 3", len(l.Frames))
	}
	seq, err := strconv.ParseUint(l.Frames[1], 16, 64)
	if err != nil {
		return fmt.Errorf("frames: sequence number: %w", err)
	}
	payload, err := hex.DecodeString(l.Frames[2])
	if err != nil {
		return fmt.Errorf("frames: payload: %w", err)
	}
	i := slices.IndexFunc(p.sources, func(s *recorded) bool { return s.name == l.Source })
	if i < 0 {
		i = len(p.sources)
		p.sources = append(p.sources, &recorded{name: l.Source, rank: -1, residency: p.index.Add(0)})
	}
	m := moment{time: l.Time, source: p.sources[i], seq: seq, payload: payload}
	if b, err := new(Decoder).Decode(payload); err == nil {
		m.source.rank = b.Rank
		m.clears = len(b.Events) > 0 && b.Events[0].Kind == Cleared
		if age := l.Time - b.Time; b.Time > 0 && age > 0 && age < 60 { // otherwise it is another clock's
			m.time = b.Time
		}
		for _, e := range b.Events {
			if e.LoRA != "" && !slices.Contains(p.adapters, e.LoRA) {
				p.adapters = append(p.adapters, e.LoRA)
			}
		}
	}
	p.moments = append(p.moments, m)
	return nil
}

// response completes a request.
func (p *recording) response(q *request, l *line) {
	q.ended = l.Time
	p.moments = append(p.moments, moment{time: q.ended, request: q, end: true})
	switch {
	case l.Cached != nil:
		q.cached, q.ok = *l.Cached, true
	case l.Usage != nil && l.Usage.Details != nil && l.Usage.Details.Cached != nil:
		q.cached, q.ok = *l.Usage.Details.Cached, true
	case l.Usage != nil:
		q.ok, q.unsaid = true, true
	}
	p.reports = p.reports || q.ok && !q.unsaid
	q.ok = q.ok && string(l.Status) == "200" && isNull(q.body.PromptLogprobs) && !(q.body.Echo && !isNull(q.body.Logprobs))
	var one []uint32
	var many [][]uint32
	switch {
	case json.Unmarshal(q.body.Prompt, &many) == nil && len(many) > 0:
		q.prompts = many
	case len(l.Tokens) > 0:
		q.prompts = [][]uint32{l.Tokens}
	case json.Unmarshal(q.body.Prompt, &one) == nil && len(one) > 0:
		q.prompts = [][]uint32{one}
	default:
		q.ok = false
	}
}

func isNull(m json.RawMessage) bool { return len(m) == 0 || string(m) == "null" }

// play goes through what happened, in order.
func (p *recording) play() Check {
	var d Decoder
	for i, m := range p.moments {
		switch {
		case m.source != nil:
			p.apply(&d, m)
		case m.end:
			for _, e := range m.request.expected {
				p.index.Withdraw(e)
			}
		default:
			p.predict(m.request, p.served(m.request, p.moments[i+1:]))
		}
	}
	return p.check
}

func (p *recording) apply(d *Decoder, m moment) {
	s := m.source
	switch {
	case s.started && m.seq+1 == s.next:
		return // twice
	case s.started && m.seq < s.next:
		p.check.Restarts++
		s.residency.Clear()
	case s.started && m.seq > s.next:
		p.check.Gaps++
		s.residency.Clear()
	}
	s.started, s.next = true, m.seq+1
	p.check.Batches++
	b, err := d.Decode(m.payload)
	if err != nil {
		p.check.Bad++
		s.residency.Clear()
		return
	}
	p.check.Skipped += b.Skipped
	s.residency.Apply(b)
}

// served returns the sources that may have served a request: what the client chose, or else the one whose events come next, or else any.
func (p *recording) served(q *request, later []moment) []Holding {
	var all []Holding
	for _, s := range p.sources {
		if (q.rank < 0 || s.rank == q.rank) && (q.replica == "" || s.name == q.replica) {
			all = append(all, Holding{Residency: s.residency, Model: q.body.Model})
		}
	}
	for _, m := range later {
		if m.time > q.ended || m.request != nil && !m.end {
			break
		}
		if m.source == nil {
			continue
		}
		if i := slices.IndexFunc(all, func(h Holding) bool { return h.Residency == m.source.residency }); i >= 0 {
			if m.clears {
				// It happened before, while the engine was idle, which sends events with its next step only.
				m.source.residency.Clear()
			}
			return all[i : i+1]
		}
	}
	return all
}

// predict compares a prediction with what the engine reported.
func (p *recording) predict(q *request, sources []Holding) {
	var predicted int
	var query Query
	expect := func(r *Residency) {
		q.expected = append(q.expected, p.index.Expect(&query, r, q.body.Model))
	}
	for _, prompt := range q.prompts {
		query.Reset(prompt, q.body.Salt)
		if q.body.N > 1 && len(sources) == 1 {
			// vLLM reports what the last of them had, after the first.
			expect(sources[0].Residency)
		}
		p.index.Match(&query, sources)
		p.index.MatchExpected(&query, sources)
		best := Holding{}
		for _, h := range sources {
			if best.Residency == nil || h.Cached > best.Cached {
				best = h
			}
		}
		predicted += best.Cached
		if best.Residency != nil {
			expect(best.Residency)
		}
	}
	if !q.ok || q.unsaid && !p.reports {
		if !math.IsInf(q.ended, 1) {
			p.check.LeftOut++
		}
		return
	}
	p.check.Requests++
	switch {
	case predicted == q.cached:
		p.check.Exact++
		return
	case predicted > q.cached:
		p.check.Over++
	default:
		p.check.Under++
	}
	if len(p.check.Wrong) < maxWrong {
		p.check.Wrong = append(p.check.Wrong, Misprediction{Request: q.name, Predicted: predicted, Reported: q.cached})
	}
}
