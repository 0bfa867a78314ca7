package rolter

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rolter-ai/caddy-rolter/kvevents"
	"github.com/rolter-ai/caddy-rolter/lmcache"
	"github.com/rolter-ai/caddy-rolter/prompt"
)

// holdings is what the candidates' engines hold of one request's prompt, for its latest attempt. It implements [selection.Residency].
type holdings struct {
	query   kvevents.Query
	of      []kvevents.Holding // by candidate; without a residency where nothing can be relied on
	outer   []float64          // by candidate: the share of the prompt that its LMCache holds; below 0 is not known
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

// outerWorth is how much a block counts in LMCache, compared to one in the engine's own cache: as one in the host's memory does in [kvevents.Holding].
const outerWorth = 0.8

// Share implements [selection.Residency].
func (h *holdings) Share(i int) (float64, bool) {
	of, outer := &h.of[i], h.outer[i]
	return max(of.Score, outerWorth*outer), of.Residency != nil || outer >= 0
}

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
	h.of, h.outer, h.located, h.picked, h.expected = h.of[:0], h.outer[:0], false, -1, 0
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
		h.of, h.outer = append(h.of, of), append(h.outer, -1)
		warm = warm || p.target.provider.lookup != nil
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
		q.lookUp(r.Context(), s)
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
	query := tokenQuery{
		api: q.api, renderOnly: q.parsed.RenderOnly, body: q.body, parts: q.partsFor(model, nil, false), authorization: r.Header["Authorization"],
		providers: func() []*tokenSource { return s.tokenSources(model) },
	}
	if ids := c.tokenizer.ids(r.Context(), &query); len(ids) > 0 {
		q.tokens, q.tokensFrom = ids, tokensOfEngine
	}
}

// tokenSources are the providers whose targets have this model name, the idlest first.
func (s *scratch) tokenSources(model string) []*tokenSource {
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
	sources := make([]*tokenSource, len(order))
	for i, o := range order {
		sources[i] = o.source
	}
	return sources
}

// predicted is how many tokens of the prompt the engine that was picked will find cached, or -1 where that is not known.
func (q *request) predicted() int {
	h := q.holdings
	if h == nil || !h.located || h.picked < 0 || h.of[h.picked].Residency == nil {
		return -1
	}
	return h.of[h.picked].Cached
}

// lookupTimeout is for all look-ups of a request.
const lookupTimeout = 50 * time.Millisecond

// lookUp asks those who know what the candidates' LMCaches hold of the prompt.
func (q *request) lookUp(ctx context.Context, s *scratch) {
	if len(s.picks) < 2 || !slices.ContainsFunc(s.picks, func(p pick) bool { return p.target.provider.lookup != nil }) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	if q.lookedUp == nil {
		q.lookedUp = make(map[*lmcache.Lookup]map[string]int)
	}
	for i, p := range s.picks {
		lookup := p.target.provider.lookup
		if lookup == nil {
			continue
		}
		held, asked := q.lookedUp[lookup]
		if !asked {
			var err error
			if held, err = lookup.Tokens(ctx, q.tokens); err != nil {
				held = nil
				countLookupFailure()
			} else if held == nil {
				held = map[string]int{} // nobody holds anything
			}
			q.lookedUp[lookup] = held
		}
		if held != nil {
			q.holdings.outer[i] = min(1, float64(held[p.target.provider.LMCache.Instance])/float64(len(q.tokens)))
		}
	}
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
