package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
)

const (
	// BlockTokens is the size of the blocks that the hash ids of a trace name.
	BlockTokens = 512

	// BytesPerToken is the usual rule of thumb for English text.
	BytesPerToken = 4

	// Limits of one request, well above every public trace; they keep a broken line from taking all memory.
	maxTokens      = 1 << 20
	maxTimestampMS = 1e10
	maxLineBytes   = 1 << 20
)

// Request is one line of a trace.
type Request struct {
	Timestamp    float64  `json:"timestamp"`     // arrival, ms after the start of the trace
	InputLength  int      `json:"input_length"`  // tokens of the prompt
	OutputLength int      `json:"output_length"` // tokens of the answer
	HashIDs      []uint64 `json:"hash_ids"`      // the prompt's blocks; the last may be partial
}

// tokens is the length of the prompt's first blocks: the last block of a prompt counts only the tokens it has.
func (r *Request) tokens(blocks int) int { return min(blocks*BlockTokens, r.InputLength) }

// AppendText appends the prompt's text: each block is a pseudo-random run of letters that depends on its hash id alone. Rendering
// is faster than keeping the text, of which a trace has hundreds of megabytes.
func (r *Request) AppendText(text []byte) []byte {
	text = slices.Grow(text, r.InputLength*BytesPerToken+8)
	end := len(text) + r.InputLength*BytesPerToken
	for _, id := range r.HashIDs {
		state := id * 0xd1342543de82ef95 // keeps the sequences of neighbouring ids apart
		for range BlockTokens * BytesPerToken / 8 {
			if len(text) >= end {
				break
			}
			// SplitMix64, four bits of each byte of which make a letter from a to p.
			state += 0x9e3779b97f4a7c15
			z := (state ^ state>>30) * 0xbf58476d1ce4e5b9
			z = (z ^ z>>27) * 0x94d049bb133111eb
			z ^= z >> 31
			text = binary.LittleEndian.AppendUint64(text, z&0x0f0f0f0f0f0f0f0f+0x6161616161616161)
		}
	}
	return text[:end]
}

// Trace is a list of requests by time of arrival, and what can be said of them without a replica.
type Trace struct {
	Requests      []*Request
	PromptTokens  int64
	CeilingTokens int64 // the prompt tokens that one infinite cache would hold already

	blocks map[uint64]block // while requests are added
}

// block is what a hash id stands for: so many tokens behind that prefix.
type block struct {
	parent        uint64
	depth, tokens int
}

// add appends a request, or says what is wrong with it.
func (t *Trace) add(r *Request) error {
	switch {
	case !(r.Timestamp >= 0 && r.Timestamp <= maxTimestampMS):
		return fmt.Errorf("timestamp %v: must be from 0 to %v", r.Timestamp, float64(maxTimestampMS))
	case r.InputLength < 1 || r.InputLength > maxTokens:
		return fmt.Errorf("input_length %d: must be from 1 to %d", r.InputLength, maxTokens)
	case r.OutputLength < 0 || r.OutputLength > maxTokens:
		return fmt.Errorf("output_length %d: must be from 0 to %d", r.OutputLength, maxTokens)
	}
	if want := (r.InputLength + BlockTokens - 1) / BlockTokens; len(r.HashIDs) != want {
		return fmt.Errorf("hash_ids has %d blocks: an input_length of %d has %d blocks of %d tokens", len(r.HashIDs), r.InputLength, want, BlockTokens)
	}
	var parent uint64
	for i, id := range r.HashIDs {
		b := block{parent: parent, depth: i, tokens: r.tokens(i+1) - r.tokens(i)}
		known, seen := t.blocks[id]
		switch {
		case !seen:
			t.blocks[id] = b
		case known != b:
			return fmt.Errorf("hash id %d stands for several blocks: an id must always have the same length and the same blocks before it", id)
		default:
			t.CeilingTokens += int64(b.tokens)
		}
		parent = id
	}
	t.PromptTokens += int64(r.InputLength)
	t.Requests = append(t.Requests, r)
	return nil
}

// finish sorts the requests by arrival; those that arrive together keep their order.
func (t *Trace) finish() {
	t.blocks = nil
	slices.SortStableFunc(t.Requests, func(a, b *Request) int { return cmp.Compare(a.Timestamp, b.Timestamp) })
}

// ReadTrace reads JSON lines, compressed with gzip or not: the first requests of them, or all for 0. Errors name the line.
func ReadTrace(ctx context.Context, in io.Reader, first int) (*Trace, error) {
	buffered := bufio.NewReader(in)
	in = buffered
	if magic, _ := buffered.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		unzipped, err := gzip.NewReader(buffered)
		if err != nil {
			return nil, err
		}
		in = unzipped
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLineBytes)
	t := &Trace{blocks: make(map[uint64]block)}
	line := 0
	for (first == 0 || len(t.Requests) < first) && lines.Scan() {
		line++
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		r := new(Request)
		err := json.Unmarshal(lines.Bytes(), r)
		if err == nil {
			err = t.add(r)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", line+1, err)
	}
	if len(t.Requests) == 0 {
		return nil, errors.New("no requests")
	}
	t.finish()
	return t, nil
}

// What a generated trace is made of, so that it puts about as much load on the replicas as the public conversation trace: 3.2 requests a
// second of 13,000 tokens, half of which one infinite cache would hold.
const (
	genSeconds           = 1200 // after which no more turns come
	genConversationGap   = 0.55 // mean seconds from the beginning of a conversation to that of the next
	genTurns             = 1.8  // mean for each conversation
	genThinkTime         = 30   // mean seconds from one turn to the next
	genSystemPrompts     = 12   // one of which opens each conversation
	genSystemTokensLeast = 512
	genSystemTokensMost  = 4_096
	genFirstMessage      = 8_000 // mean tokens
	genMessage           = 4_000 // mean tokens of the later ones
	genAnswer            = 350   // mean tokens
	genTokensMost        = 128_000
)

// generateTrace makes up a trace of the same form: conversations of several turns behind shared system prompts. Every turn's prompt is
// the one before, its answer and a new message. The same seed gives the same trace.
func generateTrace(seed uint64) (*Trace, error) {
	rng := rand.New(rand.NewPCG(seed, 0))
	about := func(mean float64) int { return 1 + int(rng.ExpFloat64()*mean) }
	var nextID uint64
	fresh := func() uint64 { nextID++; return nextID }

	type prompt struct {
		tokens int
		blocks []uint64 // the full ones
	}
	grow := func(p *prompt, tokens int) {
		p.tokens += tokens
		for len(p.blocks) < p.tokens/BlockTokens {
			p.blocks = append(p.blocks, fresh())
		}
	}
	systems := make([]prompt, genSystemPrompts)
	for i := range systems {
		grow(&systems[i], genSystemTokensLeast+rng.IntN(genSystemTokensMost-genSystemTokensLeast+1))
	}

	t := &Trace{blocks: make(map[uint64]block)}
	for start := 0.0; start < genSeconds; start += rng.ExpFloat64() * genConversationGap {
		p := systems[rng.IntN(len(systems))]
		p.blocks = slices.Clone(p.blocks)
		grow(&p, about(genFirstMessage))
		for at := start; at < genSeconds && p.tokens <= genTokensMost; at += rng.ExpFloat64() * genThinkTime {
			r := &Request{
				Timestamp:    float64(int64(at * 1000)),
				InputLength:  p.tokens,
				OutputLength: about(genAnswer),
				HashIDs:      slices.Clone(p.blocks),
			}
			if p.tokens%BlockTokens > 0 {
				r.HashIDs = append(r.HashIDs, fresh())
			}
			if err := t.add(r); err != nil {
				return nil, err
			}
			if rng.Float64() < 1.0/genTurns {
				break
			}
			grow(&p, r.OutputLength+about(genMessage))
		}
	}
	t.finish()
	return t, nil
}
