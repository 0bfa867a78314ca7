package rolter

import (
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/rolter-ai/caddy-rolter/kvevents"
	"github.com/rolter-ai/caddy-rolter/prompt"
)

// holdings is what the candidates' engines hold of one request's prompt, for its latest attempt. It implements [selection.Residency].
type holdings struct {
	query   kvevents.Query
	of      []kvevents.Holding // by candidate; without a residency where nothing can be relied on
	located bool               // the token ids are known, and what is held of them

	picked   int // -1 while nobody is
	expected kvevents.Expectation
}

var holdingsPool = sync.Pool{New: func() any { return new(holdings) }}

// Refresh implements [selection.Residency].
func (h *holdings) Refresh() {
	if h.located {
		residency.MatchExpected(&h.query, h.of)
	}
}

// Share implements [selection.Residency].
func (h *holdings) Share(i int) (float64, bool) { return h.of[i].Score, h.of[i].Residency != nil }

// Pressure implements [selection.Residency].
func (h *holdings) Pressure(i int) (float64, bool) {
	if of := &h.of[i]; of.Residency != nil {
		return of.Residency.Pressure()
	}
	return 0, false
}

// Expect implements [selection.Residency].
func (h *holdings) Expect(i int) {
	h.picked = i
	if of := &h.of[i]; h.located && of.Residency != nil {
		h.expected = residency.Expect(&h.query, of.Residency, of.Model)
	}
}

// withdraw takes back what is expected of the one that was picked.
func (h *holdings) withdraw() {
	residency.Withdraw(h.expected)
	h.expected = 0
}

func (h *holdings) reset() {
	h.query.Reset(nil, "")
	clear(h.of)
	h.of, h.located, h.picked, h.expected = h.of[:0], false, -1, 0
}

// tokensFrom says where the token ids of a prompt come from.
type tokensFrom int

const (
	tokensUntried tokensFrom = iota
	tokensOfNobody
	tokensOfPrompt
	tokensOfHeader
	tokensOfEngine
)

// locate works out what the candidates' engines hold of the prompt.
func (q *request) locate(r *http.Request, c *choice, s *scratch) {
	q.asked.Residency = nil
	if q.parsed == nil {
		return
	}
	if q.holdings == nil {
		q.holdings = holdingsPool.Get().(*holdings)
	}
	h := q.holdings
	h.reset()
	known, warm := false, false
	for _, p := range s.picks {
		of := kvevents.Holding{Model: q.model}
		if p.target.Model != "" {
			of.Model = p.target.Model
		}
		if p.feed != nil && p.feed.usable() {
			of.Residency = p.feed.residency
			known = true
			warm = warm || !of.Residency.Empty()
		}
		h.of = append(h.of, of)
	}
	if q.tokensFrom == tokensUntried {
		q.ownTokens()
	}
	if q.tokensFrom == tokensOfNobody && c.tokenizer != nil && warm && len(s.candidates) > 1 {
		q.askForTokens(r, c, s)
	}
	switch {
	case len(q.tokens) > 0:
		h.query.Reset(q.tokens, string(q.parsed.Salt))
		residency.Match(&h.query, h.of)
		h.located = true
	case known && (c.tokenizer == nil || warm):
		return // nothing can be said without the token ids
	case c.recorded:
		return // what was recorded says more than that nobody holds anything
	}
	q.asked.Residency = h
}

// ownTokens takes the token ids that the request itself has.
func (q *request) ownTokens() {
	q.tokensFrom = tokensOfNobody
	switch header := q.tokenHeader; {
	case q.parsed.Media: // token ids do not tell images apart
	case len(q.parsed.TokenIDs) > 0:
		q.tokens, q.tokensFrom = q.parsed.TokenIDs, tokensOfPrompt
	case header != nil:
		ids, err := prompt.ParseTokenIDs(nil, strings.Join(header, ","))
		if err != nil {
			countBadTokens()
			return
		}
		if len(ids) > 0 {
			q.tokens, q.tokensFrom = ids, tokensOfHeader
		}
	}
}

// askForTokens asks an engine, the idlest first.
func (q *request) askForTokens(r *http.Request, c *choice, s *scratch) {
	if q.body == nil || q.parsed.Why != prompt.HasPrompt || q.parsed.Media {
		return
	}
	// A target with another name for the model is sent another body.
	model := s.picks[0].target.Model
	type idle struct {
		source   *tokenSource
		inFlight int
	}
	var order []idle
	for i, p := range s.picks {
		if p.target.Model == model && (i == 0 || p.index != s.picks[i-1].index) {
			order = append(order, idle{p.target.provider.tokens, p.member.load.InFlight()})
		}
	}
	slices.SortStableFunc(order, func(a, b idle) int { return a.inFlight - b.inFlight })
	query := tokenQuery{api: q.api, renderOnly: q.parsed.RenderOnly, body: q.body, parts: q.partsFor(model, nil, false), authorization: r.Header["Authorization"]}
	for _, o := range order {
		query.providers = append(query.providers, o.source)
	}
	if ids := c.tokenizer.ids(r.Context(), &query); len(ids) > 0 {
		q.tokens, q.tokensFrom = ids, tokensOfEngine
	}
}

// predicted is how many tokens of the prompt the engine that was picked will find cached, or -1 where that is not known.
func (q *request) predicted() int {
	h := q.holdings
	if h == nil || !h.located || h.picked < 0 || h.of[h.picked].Residency == nil {
		return -1
	}
	return h.of[h.picked].Cached
}

// delivered compares what the engine had cached with what was predicted.
func (q *request) delivered(usage prompt.Usage) {
	q.lease.Delivered(usage.PromptTokens, usage.CachedTokens)
	predicted := q.predicted()
	// Of several prompts the engine reports the sum.
	if predicted < 0 || usage.PromptTokens != len(q.tokens) {
		return
	}
	observePrediction(usage.CachedTokens - predicted)
	// What a client says of its token ids may be wrong: it must not make us forget.
	if usage.CachedTokens < predicted && q.tokensFrom != tokensOfHeader {
		residency.Overclaimed(&q.holdings.query, &q.holdings.of[q.holdings.picked], usage.CachedTokens)
	}
}
