package rolter

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/rolter-ai/caddy-rolter/lmcache"
	"github.com/rolter-ai/caddy-rolter/prompt"
	"github.com/rolter-ai/caddy-rolter/selection"
)

// request is what Rolter knows of one request, over all its attempts. Its methods are called by the goroutine that serves the request, unless they say
// otherwise.
type request struct {
	owner    any // the *Handler or *Policy that made it
	strategy string
	counters *decisionCounters
	logger   *zap.Logger

	body   *buffer   // nil when the body was not read:
	stream *onceBody // then it goes to the first replica that reads of it
	parser *prompt.Parser
	parsed *prompt.Body // valid as long as parser is held
	api    prompt.API
	model  string  // that the client asked for
	text   *[]byte // pooled memory of asked.Text, where it is not the parser's
	asked  selection.Request

	tokenHeader []string // the client's word for the token ids
	tokens      []uint32 // of the prompt, once they were looked for
	tokensFrom  tokensFrom
	holdings    *holdings                          // of the candidates' engines; nil where nobody asked
	served      bool                               // the replica has taken the prompt in
	lookedUp    map[*lmcache.Lookup]map[string]int // tokens by instance; nil where the look-up failed

	attempt int
	tried   []*member
	lease   selection.Lease
	decided selection.Decision
	said    atomic.Pointer[decision] // read by whoever asks for a placeholder

	// What the first attempt found in the request that is proxied, for later attempts to start from.
	url            *url.URL
	header         http.Header
	authorization  []string
	priorityHeader []string
	rankHeader     []string

	// Of the latest attempt.
	member *member
	rank   int // noRank where the engine has but one

	// Of the latest attempt, in the handler.
	target  *Target
	stamped bool // with a priority
	unstamp bool // the engine may have refused it: the next attempt is for the same target, without
}

// decision is what is said about the latest attempt.
type decision struct {
	selection.Decision
	target    string
	predicted int // tokens of the prompt that its engine will find cached; -1 is not known
	attempt   int
}

func (d *decision) setHeaders(header http.Header) {
	header["X-Rolter-Target"] = []string{d.target}
	header["X-Rolter-Reason"] = []string{string(d.Reason)}
}

// Where the state of a request is kept among its variables, by the handler and by a policy that stands alone. It is set once, before anything is
// dialled: the map is not synchronised, and the transport reads it from goroutines of its own.
const (
	handlerVar = "rolter"
	policyVar  = "rolter_policy"
)

// publishTo makes the state known to those who are asked later, and publishes the placeholders.
func (q *request) publishTo(ctx context.Context, name string, state any) {
	caddyhttp.SetVar(ctx, name, state)
	if repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Map(q.placeholder)
	}
}

// placeholder answers for {http.rolter.*}.
func (q *request) placeholder(key string) (any, bool) {
	key, ok := strings.CutPrefix(key, "http.rolter.")
	if !ok {
		return nil, false
	}
	switch key {
	case "model":
		return q.model, true
	case "strategy":
		return q.strategy, true
	}
	d := q.said.Load()
	if d == nil {
		d = &decision{predicted: -1}
	}
	switch key {
	case "target":
		return d.target, true
	case "reason":
		return string(d.Reason), true
	case "score":
		return d.Score, true
	case "load":
		return d.Load, true
	case "predicted":
		if d.predicted < 0 {
			return "", true
		}
		return d.predicted, true
	case "attempt":
		return d.attempt, true
	}
	return nil, false
}

var parsers = sync.Pool{New: func() any { return new(prompt.Parser) }}

// parse reads what is needed out of the body.
func (q *request) parse(path string) {
	q.parser = parsers.Get().(*prompt.Parser)
	q.api = prompt.APIOf(path)
	q.parsed = q.parser.Parse(q.api, q.body.data)
	q.model = q.parsed.Model
	q.asked = selection.Request{Text: q.parsed.Text, Lead: q.parsed.Lead, Tail: q.parsed.Tail, Stream: q.parsed.Stream}
	if why := q.parsed.Why.String(); why != "" {
		countNoPrompt(why)
	}
}

// end gives back everything that the request holds. It is called once, and no other method after it but placeholder.
func (q *request) end() {
	q.lease.Release()
	if q.body != nil {
		q.body.release()
	}
	if q.text != nil && cap(*q.text) <= maxPooledBuffer {
		texts.Put(q.text)
	}
	if q.parser != nil {
		q.parser.Reset()
		parsers.Put(q.parser)
	}
	if h := q.holdings; h != nil {
		if !q.served {
			h.withdraw()
		}
		h.reset()
		holdingsPool.Put(h)
	}
}

// scratch is reused between picks: what a pick needs for every candidate.
type scratch struct {
	candidates []selection.Candidate
	picks      []pick // by candidate
}

// pick is what a candidate stands for.
type pick struct {
	index  int // in the pool
	member *member
	target *Target   // nil where a policy stands alone
	rank   int       // noRank where the engine has but one
	feed   *feedRank // of its KV events; nil where there are none
}

const noRank = -1

var scratches = sync.Pool{New: func() any { return new(scratch) }}

func (s *scratch) reset() { s.candidates, s.picks = s.candidates[:0], s.picks[:0] }

func (s *scratch) clear() {
	clear(s.candidates)
	clear(s.picks)
}

// add adds the upstream i of the pool, or each rank of its engine.
func (s *scratch) add(i int, up *reverseproxy.Upstream, m *member, t *Target, sharedDial bool) {
	p := pick{index: i, member: m, target: t, rank: noRank}
	if t != nil {
		ranks := t.provider.feed.ranks()
		if len(ranks) > 1 {
			for rank, m := range t.ranked(len(ranks)) {
				s.addPick(up, pick{i, m, t, rank, ranks[rank]}, true)
			}
			return
		}
		if len(ranks) == 1 {
			p.feed = ranks[0]
		}
	}
	s.addPick(up, p, sharedDial)
}

func (s *scratch) addPick(up *reverseproxy.Upstream, p pick, sharedDial bool) {
	c := selection.Candidate{Load: p.member.load, Floor: up.NumRequests(), Limit: up.MaxRequests, Member: p.member.recorded}
	if t := p.target; t != nil {
		c.Weight, c.ByDeadline, c.Outer = t.weight, t.provider.stamps(), t.provider.outer.state()
	}
	if sharedDial {
		c.Floor = 0
	}
	if p.rank != noRank {
		c.Limit = 0 // it is for all ranks together
	}
	s.candidates = append(s.candidates, c)
	s.picks = append(s.picks, p)
}

// choice is how a request's replica is chosen.
type choice struct {
	strategy selection.Strategy    // Rolter's, or nil:
	policy   reverseproxy.Selector // Caddy's

	// tryResting allows a replica that rests after a failure when there is no other left to try, which is better than an error. It is only
	// right where resting is the only thing that can make an upstream unhealthy.
	tryResting bool
	// sharedDial says that several replicas are behind one address, whose requests the proxy counts together.
	sharedDial bool
	// residency says that the strategy goes by what engines say that they hold, recorded that it goes by what was recorded where they do not.
	residency, recorded bool
	// tokenizer finds out the token ids of prompts; it may be nil.
	tokenizer *tokenizer
	// tryAgain allows replicas that this request has tried already when all have been: the operator asked for more attempts than replicas.
	tryAgain bool
}

// choose picks an upstream for the next attempt and reserves it. targets are those of the pool, where there are any. It returns its index in the pool, or -1.
func (q *request) choose(c *choice, pool reverseproxy.UpstreamPool, members []*member, targets []*Target, r *http.Request, w http.ResponseWriter) int {
	q.lease.Release() // the attempt before has failed, or we would not be asked again
	if q.holdings != nil {
		q.holdings.withdraw()
	}
	if q.stream != nil && r.Body == q.stream && q.stream.begun.Load() {
		return -1 // what is left of the body is not the request
	}
	s := scratches.Get().(*scratch)
	defer func() {
		s.clear()
		scratches.Put(s)
	}()

	collect := func(usable func(*reverseproxy.Upstream) bool) bool {
		s.reset()
		for i, up := range pool {
			if usable(up) && (len(q.tried) == 0 || !slices.Contains(q.tried, members[i])) {
				var t *Target
				if targets != nil {
					t = targets[i]
				}
				s.add(i, up, members[i], t, c.sharedDial)
			}
		}
		return len(s.candidates) > 0
	}
	found, rested := collect((*reverseproxy.Upstream).Available), false
	if !found && c.tryAgain && len(q.tried) > 0 {
		q.tried = q.tried[:0]
		found = collect((*reverseproxy.Upstream).Available)
	}
	if !found && c.tryResting {
		found = collect(func(up *reverseproxy.Upstream) bool { return !up.Full() })
		rested = found
	}
	if !found {
		return -1
	}

	d, ok := selection.Decision{}, false
	if c.policy != nil && !rested {
		d, ok = q.ask(c.policy, pool, s, r, w)
	} else {
		if c.residency {
			q.locate(r, c, s)
		}
		d, ok = q.pick(c.strategy, s.candidates)
	}
	if !ok {
		return -1
	}
	picked := s.picks[d.Index]
	q.tried = append(q.tried, members[picked.index])
	q.attempt++
	q.counters.count(d.Reason, q.attempt)
	q.decided, q.member, q.rank = d, picked.member, picked.rank
	return picked.index
}

// targetName is the target of the latest attempt, or "".
func (q *request) targetName() string {
	if d := q.said.Load(); d != nil {
		return d.target
	}
	return ""
}

// name publishes the decision with the name of its target, and logs it.
func (q *request) name(target string) {
	d := &decision{Decision: q.decided, target: target, predicted: q.predicted(), attempt: q.attempt}
	q.said.Store(d)
	if c := q.logger.Check(zapcore.DebugLevel, "selected target"); c != nil {
		c.Write(zap.String("target", target), zap.String("strategy", q.strategy), zap.String("reason", string(d.Reason)),
			zap.Float64("score", d.Score), zap.Int("load", d.Load), zap.Int("attempt", d.attempt))
	}
}

// pick asks one of Rolter's strategies. Should it panic, the request goes by load: routing must not be worse than not routing.
func (q *request) pick(strategy selection.Strategy, candidates []selection.Candidate) (d selection.Decision, ok bool) {
	defer func() {
		if v := recover(); v != nil {
			countPanic()
			q.logger.Error("strategy panicked, routing by load", zap.String("strategy", q.strategy), zap.Any("panic", v), zap.Stack("stack"))
			q.lease.Release()
			d, ok = selection.LeastLoad{Loads: loads}.Pick(&q.asked, candidates, &q.lease)
		}
	}()
	if strategy == nil {
		strategy = selection.LeastLoad{Loads: loads}
	}
	return strategy.Pick(&q.asked, candidates, &q.lease)
}

// ask asks one of Caddy's policies, and reserves what it picks. It sees the whole pool at the first attempt, because some policies go by
// index, and only what is left afterwards.
func (q *request) ask(policy reverseproxy.Selector, pool reverseproxy.UpstreamPool, s *scratch, r *http.Request, w http.ResponseWriter) (selection.Decision, bool) {
	rest := pool
	if len(q.tried) > 0 {
		rest = make(reverseproxy.UpstreamPool, 0, len(s.picks))
		for i, p := range s.picks {
			if i == 0 || p.index != s.picks[i-1].index {
				rest = append(rest, pool[p.index])
			}
		}
	}
	up := policy.Select(rest, r, w)
	if up == nil {
		return selection.Decision{}, false
	}
	first := slices.IndexFunc(s.picks, func(p pick) bool { return pool[p.index] == up })
	if first < 0 {
		return selection.Decision{}, false
	}
	last := first + 1
	for last < len(s.picks) && s.picks[last].index == s.picks[first].index {
		last++
	}
	d, ok := selection.LeastLoad{Loads: loads}.Pick(&q.asked, s.candidates[first:last], &q.lease)
	d.Index, d.Reason = first+d.Index, selection.ReasonFallback
	return d, ok
}

// aim makes the request that is about to be proxied one for this target: body, path and credentials.
func (q *request) aim(r *http.Request, rt *Route, t *Target) {
	if q.attempt == 1 {
		q.url, q.header = r.URL, r.Header
		q.authorization, q.priorityHeader, q.rankHeader = r.Header["Authorization"], r.Header[enginePriorityHeader], r.Header[rankHeader]
	}
	var priority []byte
	if q.stamped = q.stamp(t.provider); q.stamped {
		priority = strconv.AppendInt(nil, q.priority(), 10)
	}
	q.target = t
	q.resend(r, q.partsFor(t.Model, priority, t.provider.feed != nil))
	if rt.rewritesPath {
		u := *q.url
		u.Path = t.provider.pathFor(q.url.Path)
		if q.url.RawPath != "" {
			u.RawPath = t.provider.pathFor(q.url.RawPath)
		}
		r.URL = &u
	}
	if rt.setsHeaders {
		// The proxy copies q.header for every attempt, after this: see Route.provision.
		set := func(name string, value []string) {
			if value != nil {
				q.header[name] = value
			} else {
				delete(q.header, name)
			}
		}
		authorization, priorityHeader := q.authorization, q.priorityHeader
		if t.provider.APIKey != "" {
			authorization = []string{"Bearer " + t.provider.APIKey}
		}
		if q.stamped {
			priorityHeader = []string{string(priority)}
		} else if t.provider.EnginePriority == priorityOn {
			priorityHeader = nil // no client jumps the queue
		}
		rank := q.rankHeader
		if q.rank != noRank {
			rank = []string{strconv.Itoa(q.rank)}
		}
		set("Authorization", authorization)
		set(enginePriorityHeader, priorityHeader)
		set(rankHeader, rank)
	}
	q.name(t.Provider)
}

// reportIncrements is the kv_cache_report_mode of vLLM in which copies of blocks can be counted. In the other one, "full", what a request finds in the cache is
// reported as if it had been stored again.
var reportIncrements = []byte(`"incremental"`)

// edit replaces a span of the body; an empty span is where something is put in.
type edit struct {
	prompt.Span
	by []byte
}

// partsFor is the body with another model name in it, and a priority; "" leaves the name as it is, and nil adds no priority. once sees to it that the engine
// reports a block as stored no more than once.
func (q *request) partsFor(model string, priority []byte, once bool) [][]byte {
	if q.body == nil {
		return nil
	}
	data := q.body.data
	var edits []edit
	// An object that names its model twice is read differently by different parsers: all of them must see the name that was routed.
	if model == "" && len(q.parsed.ModelSpans) > 1 && q.parsed.HasModel {
		model = q.parsed.Model
	}
	if model != "" && !(len(q.parsed.ModelSpans) == 1 && q.parsed.HasModel && model == q.parsed.Model) {
		name := prompt.AppendJSONString(nil, model)
		for _, span := range q.parsed.ModelSpans {
			edits = append(edits, edit{span, name})
		}
	}
	if priority != nil {
		for _, span := range q.parsed.PrioritySpans {
			edits = append(edits, edit{span, priority})
		}
		if at := q.parsed.Object; at > 0 && len(q.parsed.PrioritySpans) == 0 {
			member := append([]byte(`"priority":`), priority...)
			if q.parsed.Members {
				member = append(member, ',')
			}
			edits = append(edits, edit{prompt.Span{Start: at, End: at}, member})
		}
	}
	if once {
		for _, span := range q.parsed.ReportModeSpans {
			edits = append(edits, edit{span, reportIncrements})
		}
	}
	slices.SortStableFunc(edits, func(a, b edit) int { return a.Start - b.Start })
	parts := make([][]byte, 0, 2*len(edits)+1)
	at := 0
	for _, e := range edits {
		parts = append(parts, data[at:e.Start], e.by)
		at = e.End
	}
	return append(parts, data[at:])
}

// resend puts a fresh body on the request that is about to be proxied.
func (q *request) resend(r *http.Request, parts [][]byte) {
	if r.Body == nil {
		return
	}
	if q.body == nil {
		if r.Body != q.stream {
			q.stream = &onceBody{ReadCloser: r.Body}
			r.Body = q.stream
		}
		return
	}
	body, err := q.body.reader(parts)
	if err != nil {
		return
	}
	r.Body = body
	// With GetBody the transport can repeat a request of which nothing was written, on a connection that had just been closed.
	r.GetBody = func() (io.ReadCloser, error) { return q.body.reader(parts) }
	r.ContentLength = 0
	for _, part := range parts {
		r.ContentLength += int64(len(part))
	}
}
