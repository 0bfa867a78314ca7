package lmcache

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/url"
	"sync"
	"time"
)

// DefaultChunk is LMCache's default number of tokens in a chunk.
const DefaultChunk = 256

// Limits of a [Lookup].
const (
	maxLookupTokens = 1 << 17         // of a prompt
	breakAfter      = 3               // failures in a row
	breakFor        = 5 * time.Second // then nobody is asked
)

// LookupConfig is who is asked for prefixes, and how.
type LookupConfig struct {
	URL  string
	Kind Kind // Controller or Coordinator

	Timeout time.Duration // of a look-up; 0 is 50 ms: a request waits for it

	// For a coordinator: the model as LMCache knows it, which is its path where it was started with one; how many workers an instance has; and how
	// many tokens are in a chunk. 0 is 1, and DefaultChunk.
	Model     string
	WorldSize int
	Chunk     int

	// As in [Config].
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
	Refusal     error
}

// Lookup asks a controller or a coordinator which instances hold the beginning of a prompt. It may be used concurrently.
type Lookup struct {
	cfg    LookupConfig
	client client
	base   *url.URL

	mu       sync.Mutex
	failures int       // in a row
	closed   time.Time // until then nobody is asked
}

// Errors of [Lookup.Tokens] for which nobody was asked.
var (
	ErrBroken  = errors.New("look-ups have failed, and are not tried again yet")
	ErrTooLong = errors.New("too many tokens to look up")
)

// NewLookup checks the configuration. It asks nobody.
func NewLookup(cfg LookupConfig) (*Lookup, error) {
	if cfg.Kind != Controller && cfg.Kind != Coordinator {
		return nil, errors.New("only a controller or a coordinator can be asked for prefixes")
	}
	base, err := baseOf(cfg.URL)
	if err != nil {
		return nil, err
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = 50 * time.Millisecond
	}
	if cfg.Chunk <= 0 {
		cfg.Chunk = DefaultChunk
	}
	cfg.WorldSize = max(cfg.WorldSize, 1)
	return &Lookup{cfg: cfg, client: client{cfg.DialContext, cfg.Refusal, cfg.Timeout}, base: base}, nil
}

// Tokens returns how many leading tokens of the prompt each instance holds; instances that hold none may be missing. After three failures in a
// row nobody is asked for 5 seconds, and then once.
func (l *Lookup) Tokens(ctx context.Context, tokens []uint32) (map[string]int, error) {
	switch {
	case len(tokens) == 0:
		return nil, nil
	case len(tokens) > maxLookupTokens:
		return nil, ErrTooLong
	case !l.mayAsk():
		return nil, ErrBroken
	}
	held, err := l.ask(ctx, tokens)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		l.failures = 0
	case ctx.Err() == nil: // a request that has gone says nothing of LMCache
		l.failures++
		if l.failures >= breakAfter {
			l.closed = time.Now().Add(breakFor)
		}
	}
	return held, err
}

// mayAsk says whether the next look-up is to be made. When the breaker's time is over, one is tried first.
func (l *Lookup) mayAsk() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failures < breakAfter {
		return true
	}
	now := time.Now()
	if now.Before(l.closed) {
		return false
	}
	l.closed = now.Add(breakFor)
	return true
}

func (l *Lookup) ask(ctx context.Context, tokens []uint32) (map[string]int, error) {
	path, question := "/lookup", map[string]any{"tokens": tokens}
	if l.cfg.Kind == Coordinator {
		path, question = "/directory/lookup", map[string]any{"token_ids": tokens, "model_name": l.cfg.Model, "world_size": l.cfg.WorldSize, "cache_salt": ""}
	}
	body, err := json.Marshal(question)
	if err != nil {
		return nil, err
	}
	_, answer, err := l.client.do(ctx, l.base.String()+path, body, maxList)
	if err != nil {
		return nil, err
	}
	if l.cfg.Kind == Coordinator {
		return parsePlacements(answer, len(tokens), l.cfg.Chunk)
	}
	return parseLayout(answer, len(tokens))
}

// parseLayout reads a controller's {"layout_info": {instance: [location, matched tokens]}}.
func parseLayout(body []byte, tokens int) (map[string]int, error) {
	var told struct {
		Layout map[string][]json.RawMessage `json:"layout_info"`
	}
	if err := json.Unmarshal(body, &told); err != nil {
		return nil, failed(Malformed, "not a look-up's answer: %w", err)
	}
	held := make(map[string]int, len(told.Layout))
	for instance, place := range told.Layout {
		var n int
		if len(place) != 2 || json.Unmarshal(place[1], &n) != nil || n < 0 {
			return nil, failed(Malformed, "not a look-up's answer")
		}
		held[instance] = min(n, tokens)
	}
	return held, nil
}

// parsePlacements reads a coordinator's placements: those of every key of the first chunk (there is one for each worker and group), then of the second, …
// An instance holds a chunk when it holds all keys of it.
func parsePlacements(body []byte, tokens, chunk int) (map[string]int, error) {
	var told struct {
		Chunks  int `json:"chunks"`
		Results []struct {
			Placements []struct {
				Instance string `json:"instance_id"`
			} `json:"placements"`
		} `json:"results"`
	}
	if err := json.Unmarshal(body, &told); err != nil {
		return nil, failed(Malformed, "not a look-up's answer: %w", err)
	}
	held := make(map[string]int)
	if told.Chunks <= 0 || len(told.Results) == 0 {
		return held, nil
	}
	if len(told.Results)%told.Chunks != 0 {
		return nil, failed(Malformed, "%d keys of %d chunks", len(told.Results), told.Chunks)
	}
	keys := len(told.Results) / told.Chunks
	streak := make(map[string]int) // leading keys that each instance holds
	for i, result := range told.Results {
		for _, p := range result.Placements {
			if streak[p.Instance] == i { // once a key is missing, it can never be
				streak[p.Instance] = i + 1
			}
		}
	}
	for instance, n := range streak {
		if n >= keys {
			held[instance] = min(n/keys*chunk, tokens)
		}
	}
	return held, nil
}
