package rolter

import (
	"bytes"
	"cmp"
	"container/list"
	"context"
	"errors"
	"hash/maphash"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/rolter-ai/caddy-rolter/egress"
	"github.com/rolter-ai/caddy-rolter/prompt"
)

// What an engine has cached is known by token ids, which only the engine makes exactly as it will: by its tokenizer, its chat template and its defaults. So it
// is asked, with the body that it will be sent. Whoever asks goes on without the answer when that does not come at once.

const (
	defaultTokenTimeout = 50 * time.Millisecond

	maxTokenAnswer = 32 << 20 // bytes: token ids without end, and what a render says beside them
	maxTokenError  = 4 << 10  // bytes of an answer that is none

	// What is remembered of answers. A chat template may print the date, so answers do not stay right for ever.
	maxTokenEntries = 4096
	maxTokenBytes   = 64 << 20
	tokenEntryBytes = 160 // of an entry beside its ids
	tokenLifetime   = 5 * time.Minute

	// How long an endpoint is not asked that a provider does not have.
	tokenAbsence = 5 * time.Minute

	// Bodies from here on, about 16,000 tokens, fail by themselves: that they take too long does not keep short ones from being asked for.
	longTokenBody = 64 << 10

	tokenDialTimeout = time.Second
)

// tokenOutcome is how a request for token ids has ended.
type tokenOutcome string

const (
	tokensCached      tokenOutcome = "cached"      // the same body was answered before, or is at the same time
	tokensAsked       tokenOutcome = "asked"       // the engine has answered
	tokensUnknown     tokenOutcome = "unknown"     // it has, but token ids do not tell all of the prompt, or there are several prompts
	tokensRefused     tokenOutcome = "refused"     // it does not take the request
	tokensUnavailable tokenOutcome = "unavailable" // no provider has an endpoint that would know
	tokensResting     tokenOutcome = "resting"     // providers that have failed are not asked for a while
	tokensTimedOut    tokenOutcome = "timed_out"
	tokensFailed      tokenOutcome = "failed"
	tokensCancelled   tokenOutcome = "cancelled" // the client has gone, or the configuration
)

var tokenOutcomes = []tokenOutcome{
	tokensCached, tokensAsked, tokensUnknown, tokensRefused, tokensUnavailable, tokensResting, tokensTimedOut, tokensFailed, tokensCancelled,
}

// tokenizer finds out the token ids of prompts. It must be closed.
type tokenizer struct {
	timeout   time.Duration                     // for one prompt, all in all
	observe   func(tokenOutcome, time.Duration) // is told of every prompt; may be nil
	now       func() time.Time
	transport *http.Transport
	ctx       context.Context // ends when the tokenizer is closed
	cancel    context.CancelFunc

	mu      sync.Mutex
	answers tokenCache
	flights map[tokenKey]*tokenFlight
}

// newTokenizer makes a tokenizer that contacts whom the policy allows. A time-out of 0 is the default.
func newTokenizer(policy egress.Policy, timeout time.Duration, observe func(tokenOutcome, time.Duration)) *tokenizer {
	t := &tokenizer{timeout: cmp.Or(timeout, defaultTokenTimeout), observe: observe, now: time.Now, flights: make(map[tokenKey]*tokenFlight)}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	dialer := dialerFor(policy, purposeTokenize)
	t.transport = &http.Transport{
		// A connection that comes too late for its request is there for the next one.
		DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(t.ctx, tokenDialTimeout)
			defer cancel()
			return dialer.DialContext(ctx, network, address)
		},
		TLSHandshakeTimeout:    tokenDialTimeout,
		IdleConnTimeout:        4 * time.Second, // vLLM closes them after 5
		MaxIdleConnsPerHost:    32,
		MaxConnsPerHost:        64,
		MaxResponseHeaderBytes: 64 << 10,
		DisableCompression:     true,
	}
	return t
}

// close ends what is being asked. It may be called again, and ids too, which then finds nothing.
func (t *tokenizer) close() {
	t.cancel()
	t.transport.CloseIdleConnections()
}

// tokenQuery is a prompt whose token ids are wanted.
type tokenQuery struct {
	api        prompt.API
	renderOnly bool // see [prompt.Body]
	body       *buffer
	parts      [][]byte // of the body, as they go upstream

	// The providers that would be sent this very body, the preferred first. The first that can be asked is, and no other. It is called when somebody
	// has to be asked.
	providers func() []*tokenSource

	authorization []string // the client's header, for a provider without a key
}

func (q *tokenQuery) length() (n int64) {
	for _, part := range q.parts {
		n += int64(len(part))
	}
	return n
}

// tokenKey stands for an API and a body. Clients do not know the seeds, so they cannot make two bodies alike.
type tokenKey [2]uint64

var tokenSeeds = [...]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}

func (q *tokenQuery) key() (key tokenKey) {
	for i, seed := range tokenSeeds {
		var h maphash.Hash
		h.SetSeed(seed)
		_ = h.WriteByte(byte(q.api))
		for _, part := range q.parts {
			_, _ = h.Write(part)
		}
		key[i] = h.Sum64()
	}
	return key
}

// ids returns the token ids, or none. They are shared: nobody may change them. It takes no longer than the time-out, and ends with the client's context.
func (t *tokenizer) ids(ctx context.Context, q *tokenQuery) []uint32 {
	start := time.Now()
	ids, outcome := t.find(ctx, q)
	if t.observe != nil {
		t.observe(outcome, time.Since(start))
	}
	return ids
}

var errTokensLate = errors.New("no token ids in time")

func (t *tokenizer) find(ctx context.Context, q *tokenQuery) ([]uint32, tokenOutcome) {
	key := q.key()
	ctx, cancel := context.WithTimeoutCause(ctx, t.timeout, errTokensLate)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()
	for ctx.Err() == nil {
		t.mu.Lock()
		if ids := t.answers.get(key, t.now()); ids != nil {
			t.mu.Unlock()
			return ids, tokensCached
		}
		f := t.flights[key]
		if f == nil {
			f = &tokenFlight{done: make(chan struct{}), outcome: tokensFailed}
			t.flights[key] = f
			t.mu.Unlock()
			return t.fly(ctx, q, key, f)
		}
		t.mu.Unlock()
		select {
		case <-f.done:
			switch f.outcome {
			case tokensAsked:
				return f.ids, tokensCached
			case tokensCancelled: // it was another client's request
			default:
				return nil, f.outcome
			}
		case <-ctx.Done():
		}
	}
	return nil, lateOrCancelled(ctx)
}

func lateOrCancelled(ctx context.Context) tokenOutcome {
	if context.Cause(ctx) == errTokensLate {
		return tokensTimedOut
	}
	return tokensCancelled
}

// tokenFlight is a body that is being asked for. What it has is set before done is closed.
type tokenFlight struct {
	done    chan struct{}
	ids     []uint32
	outcome tokenOutcome
}

// fly asks for all who want the same.
func (t *tokenizer) fly(ctx context.Context, q *tokenQuery, key tokenKey, f *tokenFlight) ([]uint32, tokenOutcome) {
	defer func() {
		t.mu.Lock()
		delete(t.flights, key)
		if f.ids != nil {
			t.answers.put(key, f.ids, t.now())
		}
		t.mu.Unlock()
		close(f.done)
	}()
	f.ids, f.outcome = t.ask(ctx, q)
	return f.ids, f.outcome
}

// ask asks the first provider that can be asked.
func (t *tokenizer) ask(ctx context.Context, q *tokenQuery) ([]uint32, tokenOutcome) {
	outcome := tokensUnavailable
	for _, s := range q.providers() {
		endpoints := s.endpoints(q, t.now())
		if len(endpoints) == 0 {
			continue
		}
		long := q.length() >= longTokenBody
		probe, ok := s.begin(long, t.now())
		if !ok {
			outcome = tokensResting
			continue
		}
		ids, outcome := t.askOne(ctx, q, s, endpoints)
		s.end(long, probe, outcome, t.now())
		return ids, outcome
	}
	return nil, outcome
}

// askOne asks one provider, at its endpoints in turn until one is there.
func (t *tokenizer) askOne(ctx context.Context, q *tokenQuery, s *tokenSource, endpoints []tokenEndpoint) (ids []uint32, outcome tokenOutcome) {
	defer func() {
		if recover() != nil { // in a parser that was given what a stranger wrote
			ids, outcome = nil, tokensFailed
		}
	}()
	for _, e := range endpoints {
		ids, outcome = t.post(ctx, q, s, e)
		switch {
		case ids == nil && (ctx.Err() != nil || t.ctx.Err() != nil):
			return nil, lateOrCancelled(ctx)
		case outcome == tokensUnavailable:
			s.miss(e, t.now())
		default:
			return ids, outcome
		}
	}
	return nil, tokensUnavailable
}

func (t *tokenizer) post(ctx context.Context, q *tokenQuery, s *tokenSource, e tokenEndpoint) ([]uint32, tokenOutcome) {
	body, err := q.body.reader(q.parts)
	if err != nil {
		return nil, tokensFailed
	}
	header := http.Header{
		"Content-Type":    {"application/json"},
		"Idempotency-Key": {}, // not sent: it lets the transport repeat the request when a connection had just been closed
	}
	if s.apiKey != "" {
		header["Authorization"] = []string{"Bearer " + s.apiKey}
	} else if q.authorization != nil {
		header["Authorization"] = q.authorization
	}
	req := (&http.Request{
		Method: http.MethodPost, URL: s.urls[e], Header: header, ContentLength: q.length(),
		Body: body, GetBody: func() (io.ReadCloser, error) { return q.body.reader(q.parts) },
	}).WithContext(ctx)
	resp, err := t.transport.RoundTrip(req) // which follows no redirects
	if err != nil {
		return nil, tokensFailed
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(resp.Body, maxTokenError)) // to the end, so that the connection can be used again
		return nil, refusal(resp.StatusCode, said)
	}
	return readTokens(resp)
}

// refusal says what an engine means by a status. What may be due to the client must not count against the engine, or one client could turn it off for all.
func refusal(status int, said []byte) tokenOutcome {
	switch status {
	case http.StatusNotFound:
		if bytes.Contains(said, []byte("does not exist")) { // the model
			return tokensRefused
		}
		return tokensUnavailable
	case http.StatusForbidden, http.StatusMethodNotAllowed, http.StatusNotImplemented: // 403: vLLM without --enable-scale-out
		return tokensUnavailable
	case http.StatusRequestTimeout, http.StatusTooManyRequests:
		return tokensFailed
	}
	if status >= 400 && status < 500 {
		return tokensRefused
	}
	return tokensFailed
}

var tokenBuffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

func readTokens(resp *http.Response) ([]uint32, tokenOutcome) {
	answer := tokenBuffers.Get().(*bytes.Buffer)
	answer.Reset()
	defer func() {
		if answer.Cap() <= maxPooledBuffer {
			tokenBuffers.Put(answer)
		}
	}()
	if n, err := answer.ReadFrom(io.LimitReader(resp.Body, maxTokenAnswer+1)); err != nil || n > maxTokenAnswer {
		return nil, tokensFailed
	}
	parser := parsers.Get().(*prompt.Parser)
	defer func() {
		parser.Reset()
		parsers.Put(parser)
	}()
	switch ids, err := parser.ParseTokenized(answer.Bytes()); {
	case err == nil:
		return slices.Clone(ids), tokensAsked
	case errors.Is(err, prompt.ErrUnknownPrompt):
		return nil, tokensUnknown
	}
	return nil, tokensFailed
}

// tokenEndpoint is one of the endpoints at which vLLM tells token ids.
type tokenEndpoint int

const (
	renderChat tokenEndpoint = iota
	renderCompletions
	renderMessages
	renderResponses
	plainTokenize
	tokenEndpoints // how many there are
)

var tokenPaths = [tokenEndpoints]string{
	renderChat: "/v1/chat/completions/render", renderCompletions: "/v1/completions/render", renderMessages: "/v1/messages/render",
	renderResponses: "/v1/responses/render", plainTokenize: "/tokenize",
}

// tokenEndpointsOf are those that take a body of an API, the preferred first. A render sees all of a body; /tokenize takes those of chats and of completions
// with one text, and gives the same ids as long as they have no field that it does not know.
var tokenEndpointsOf = map[prompt.API][]tokenEndpoint{
	prompt.Chat:        {renderChat, plainTokenize},
	prompt.Completions: {renderCompletions, plainTokenize},
	prompt.Messages:    {renderMessages},
	prompt.Responses:   {renderResponses},
}

// tokenSource is a provider that may be asked for token ids.
type tokenSource struct {
	urls   [tokenEndpoints]*url.URL
	apiKey string

	mu       sync.Mutex
	absent   [tokenEndpoints]time.Time // until when an endpoint is taken not to be there
	breakers [2]tokenBreaker           // of short and of long bodies
}

func newTokenSource(p *Provider) *tokenSource {
	s := &tokenSource{apiKey: p.APIKey}
	for e, path := range tokenPaths {
		s.urls[e] = p.engineURL(path) // they are beside /v1, or begin with it
	}
	return s
}

// forget forgets what the engine did not have and that it failed: it has restarted.
func (s *tokenSource) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.absent, s.breakers = [tokenEndpoints]time.Time{}, [2]tokenBreaker{}
}

// endpoints are those of the provider that may know the token ids of a prompt.
func (s *tokenSource) endpoints(q *tokenQuery, now time.Time) []tokenEndpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	there := make([]tokenEndpoint, 0, 2)
	for _, e := range tokenEndpointsOf[q.api] {
		if !now.Before(s.absent[e]) && !(e == plainTokenize && q.renderOnly) {
			there = append(there, e)
		}
	}
	return there
}

// miss notes that an endpoint is not there.
func (s *tokenSource) miss(e tokenEndpoint, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.absent[e] = now.Add(tokenAbsence)
}

// begin says whether the provider may be asked, and whether this is to try out whether it can be again. If ok, end must follow.
func (s *tokenSource) begin(long bool, now time.Time) (probe, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.breaker(long).begin(now)
}

func (s *tokenSource) end(long, probe bool, outcome tokenOutcome, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.breaker(long).end(probe, outcome, now)
}

func (s *tokenSource) breaker(long bool) *tokenBreaker {
	if long {
		return &s.breakers[1]
	}
	return &s.breakers[0]
}

const (
	tokenFailures = 3 // in a row, after which a provider rests
	tokenRest     = time.Second
	maxTokenRest  = time.Minute
)

// tokenBreaker lets a provider rest that fails. Then one request tries it out: if that fails too, it rests for twice as long.
type tokenBreaker struct {
	failures int // in a row
	rest     time.Duration
	until    time.Time
	probed   bool // somebody is trying it out
}

func (b *tokenBreaker) begin(now time.Time) (probe, ok bool) {
	switch {
	case b.failures < tokenFailures:
		return false, true
	case b.probed || now.Before(b.until):
		return false, false
	}
	b.probed = true
	return true, true
}

func (b *tokenBreaker) end(probe bool, outcome tokenOutcome, now time.Time) {
	if probe {
		b.probed = false
	}
	switch outcome {
	case tokensCancelled:
	case tokensFailed, tokensTimedOut:
		b.failures++
		// Those that were on their way when it began to rest say nothing new.
		if probe || b.failures == tokenFailures {
			b.rest = min(max(2*b.rest, tokenRest), maxTokenRest)
			b.until = now.Add(b.rest)
		}
	default:
		*b = tokenBreaker{}
	}
}

// tokenCache has the latest answers. Its zero value is ready.
type tokenCache struct {
	byKey  map[tokenKey]*list.Element
	latest list.List // of *tokenAnswer, the one used last at the front
	bytes  int
}

type tokenAnswer struct {
	key tokenKey
	ids []uint32
	at  time.Time
}

func (a *tokenAnswer) bytes() int { return tokenEntryBytes + 4*cap(a.ids) }

func (c *tokenCache) get(key tokenKey, now time.Time) []uint32 {
	e := c.byKey[key]
	if e == nil {
		return nil
	}
	a := e.Value.(*tokenAnswer)
	if now.Sub(a.at) >= tokenLifetime {
		c.drop(e)
		return nil
	}
	c.latest.MoveToFront(e)
	return a.ids
}

func (c *tokenCache) put(key tokenKey, ids []uint32, now time.Time) {
	if c.byKey == nil {
		c.byKey = make(map[tokenKey]*list.Element)
	}
	if e := c.byKey[key]; e != nil {
		c.drop(e)
	}
	a := &tokenAnswer{key, ids, now}
	c.byKey[key] = c.latest.PushFront(a)
	c.bytes += a.bytes()
	for len(c.byKey) > maxTokenEntries || c.bytes > maxTokenBytes {
		c.drop(c.latest.Back())
	}
}

func (c *tokenCache) drop(e *list.Element) {
	a := c.latest.Remove(e).(*tokenAnswer)
	delete(c.byKey, a.key)
	c.bytes -= a.bytes()
}
