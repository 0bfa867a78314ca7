package rolter

import (
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/net/http/httpguts"

	"github.com/rolter-ai/caddy-rolter/egress"
	"github.com/rolter-ai/caddy-rolter/kvevents"
	"github.com/rolter-ai/caddy-rolter/lmcache"
	"github.com/rolter-ai/caddy-rolter/selection"
)

// Provider is one replica: an engine that serves an OpenAI-compatible API.
type Provider struct {
	// The name by which targets refer to the provider, and which is shown in the response header `x-rolter-target`.
	Name string `json:"name,omitempty"`

	// The kind of API. Default and only kind: `openai_compatible`.
	Kind string `json:"kind,omitempty"`

	// The base URL of the replica: `http` or `https`, a host, and optionally a port and a path, which is put before the path of the
	// request. A path of `/v1`, or one that ends in it, is not put before a request path that begins with `/v1/` a second time.
	// Global placeholders such as `{env.VLLM_URL}` are replaced when the configuration is loaded.
	APIBase string `json:"api_base,omitempty"`

	// If set, requests to this provider carry `Authorization: Bearer <api_key>` instead of the client's own. Global placeholders such as
	// `{env.KEY}` are replaced when the configuration is loaded.
	APIKey string `json:"api_key,omitempty"`

	// The KV event stream of the replica, for `precise_cache_aware`.
	KVEvents *KVEvents `json:"kv_events,omitempty"`

	// The LMCache of the replica.
	LMCache *LMCache `json:"lmcache,omitempty"`

	// Whether requests carry the field `priority`, by which an engine that runs with `--scheduling-policy priority` takes waiting requests: short
	// prompts first, and none waits for ever. `on` replaces a client's own priority, `trust_client` keeps it. An engine that
	// refuses the field is sent none from then on. Default: `off`.
	EnginePriority string `json:"engine_priority,omitempty"`

	priority atomic.Int32 // what is known of whether the engine takes it

	// Whether the engine's `/metrics` are read, every 5 seconds: `auto` or `off`. They tell how much its cache has room for (see the route's
	// `max_tokens`), how busy others keep it, and when it has restarted. The engine's certificate must be one that the system trusts. Default: `off`.
	Metrics string `json:"metrics,omitempty"`

	dial   string // address to dial
	scheme string
	path   string       // prefix of the request path, without a slash at the end
	feed   *feed        // of KV events; nil where there are none
	outer  *outerSource // its LMCache; nil where there is none
	tokens *tokenSource
	lookup *lmcache.Lookup // of prompts in its LMCache; nil where nobody is asked
}

// Values of a provider's metrics.
const (
	metricsAuto = "auto"
	metricsOff  = "off"
)

// KVEvents is where an engine publishes what its KV cache holds: vLLM's `--kv-events-config`, SGLang's too.
type KVEvents struct {
	// The `tcp://host:port` of the publisher, or `auto`: the replica is asked where it publishes (`/kv_event_sources`, or `/server_info`).
	Endpoint string `json:"endpoint,omitempty"`

	// The `tcp://host:port` from which what was missed is fetched. Default: what the replica says, if it is asked for its own endpoint or names the one above.
	Replay string `json:"replay,omitempty"`

	// Only messages whose topic starts with this are read. Default: all.
	Topic string `json:"topic,omitempty"`

	// The number of data-parallel ranks of the engine. Each publishes at a port of its own: the endpoint's + the number of the rank. Requests are routed to
	// ranks, by the header `X-data-parallel-rank`. Default: what the replica says, or 1.
	Ranks int `json:"ranks,omitempty"`

	// The most KV blocks that are kept for each rank; what is stored beyond them is not taken in. Default: `1000000`.
	MaxBlocks int `json:"max_blocks,omitempty"`
}

// eventsAuto is the endpoint that says to ask the replica.
const eventsAuto = "auto"

// validate checks the stream. Errors name the key and the value.
func (k *KVEvents) validate(policy egress.Policy) error {
	if k.Endpoint != eventsAuto {
		if err := checkStream(policy, "kv_events.endpoint", k.Endpoint, k.Ranks); err != nil {
			return err
		}
	}
	if k.Replay != "" {
		if err := checkStream(policy, "kv_events.replay", k.Replay, k.Ranks); err != nil {
			return err
		}
	}
	if k.Ranks < 0 || k.Ranks > kvevents.MaxRanks {
		return fmt.Errorf("kv_events.ranks %d: must be from 1 to %d", k.Ranks, kvevents.MaxRanks)
	}
	if k.MaxBlocks < 0 {
		return fmt.Errorf("kv_events.max_blocks %d: must not be negative", k.MaxBlocks)
	}
	return nil
}

// checkStream checks the endpoint of a stream, and that there are ports for all ranks.
func checkStream(policy egress.Policy, key, endpoint string, ranks int) error {
	host, port, err := splitStream(endpoint)
	if err != nil {
		return fmt.Errorf("%s %q: must be tcp://host:port", key, endpoint)
	}
	if port+ranks-1 > math.MaxUint16 {
		return fmt.Errorf("%s %q: there are no ports for %d ranks from there", key, endpoint, ranks)
	}
	return checkEndpoint(policy, key, endpoint, host)
}

// splitStream takes apart an endpoint that can be connected to.
func splitStream(endpoint string) (host string, port int, err error) {
	host, digits, err := kvevents.ParseEndpoint(endpoint)
	if err == nil && host == "*" {
		err = errors.New("must name a host")
	}
	if err != nil {
		return "", 0, err
	}
	port, err = strconv.Atoi(digits)
	return host, port, err
}

// Egress says which endpoints Rolter may contact. Link-local addresses and the metadata services of clouds are denied unless switched on here.
type Egress struct {
	// Deny 169.254.0.0/16 and fe80::/10. Default: `true`.
	BlockLinkLocal *bool `json:"block_link_local,omitempty"`

	// Deny the metadata services of clouds that have other addresses. Default: `true`.
	BlockMetadata *bool `json:"block_metadata,omitempty"`

	// Deny private addresses. Default: `false`: replicas live there.
	BlockPrivate *bool `json:"block_private,omitempty"`

	// Deny loopback addresses. Default: `false`.
	BlockLoopback *bool `json:"block_loopback,omitempty"`

	// Hosts that are exempt, exactly as an endpoint names them.
	AllowHosts []string `json:"allow_hosts,omitempty"`
}

// Target is a provider that serves a route.
type Target struct {
	// The name of the provider.
	Provider string `json:"provider,omitempty"`

	// The name that the provider knows the model by. It replaces the `model` of the request. Default: the name is left as it is.
	Model string `json:"model,omitempty"`

	// How much of the traffic the target can take compared to the others, above 0. Default: `1`.
	Weight *float64 `json:"weight,omitempty"`

	provider *Provider
	member   *member
	group    *group
	ranks    atomic.Pointer[[]*member] // where the provider's engine has several
	weight   float64
}

// ranked is the target's members by the ranks of its engine.
func (t *Target) ranked(n int) []*member {
	if known := t.ranks.Load(); known != nil && len(*known) == n {
		return *known
	}
	members := make([]*member, n)
	for rank := range members {
		id := t.member.identity
		id.rank, id.ranks = rank, n
		members[rank] = t.group.get(id)
	}
	t.ranks.Store(&members)
	return members
}

// rankHeader chooses the rank of an engine that has several. Without it they take turns, whatever is in their caches.
const rankHeader = "X-Data-Parallel-Rank"

// Tuning holds the parameters of the strategies.
type Tuning struct {
	// The share of a prompt, from 0 to 1, that a replica must hold to be preferred. Default: `0.5`.
	Threshold *float64 `json:"threshold,omitempty"`

	// A replica that holds the prompt is passed over when it has more requests in flight than the least loaded one plus this margin, and
	// more than that load times `overload_ratio`. Default: `2`.
	OverloadMargin *int `json:"overload_margin,omitempty"`

	// See `overload_margin`; at least 1. Default: `1.5`.
	OverloadRatio *float64 `json:"overload_ratio,omitempty"`

	// For `least_prefill`: how much the part of a prompt that is not cached at a replica counts against the work that waits there, at least 1. A miss
	// costs more than its own time, because it evicts what others would have found. Default: `2.5`.
	W *float64 `json:"w,omitempty"`

	// For `pipeline`: how much each score counts.
	ScoreWeights *ScoreWeights `json:"score_weights,omitempty"`

	// For `pipeline`: the request header that names a session, whose requests are drawn to the replica that answered it last. Default: `X-Session-ID`.
	SessionHeader string `json:"session_header,omitempty"`

	// For `pipeline`: how long after its last answer a session is drawn to its replica; `0` switches it off. Default: `300s`.
	SessionTTL *caddy.Duration `json:"session_ttl,omitempty"`

	// For `pipeline`: how many sessions are remembered. Default: `100000`.
	MaxSessions int `json:"max_sessions,omitempty"`

	// How many tokens of prompts may be recorded for each replica, so that the record forgets what the replica's cache has lost: a number, or `auto`, which is
	// what the replica's metrics tell its cache has room for, where they are read (see the provider's `metrics`). Default: `auto`.
	MaxTokens MaxTokens `json:"max_tokens,omitempty"`

	// The most tree nodes that the record of prompts may have for each replica. Default: `1000000`.
	MaxNodes int `json:"max_nodes,omitempty"`

	// The most memory, in bytes, that the record of prompts may take for all replicas. Default: 256 MiB.
	MaxBytes int64 `json:"max_bytes,omitempty"`
}

// MaxTokens is a number of tokens above 0, or 0, which is written `auto`.
type MaxTokens int64

// UnmarshalJSON implements [json.Unmarshaler].
func (m *MaxTokens) UnmarshalJSON(data []byte) (err error) {
	text := string(data)
	if text == `"auto"` {
		text = "auto"
	}
	*m, err = parseMaxTokens(text)
	return err
}

func parseMaxTokens(s string) (MaxTokens, error) {
	if s == "auto" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("max_tokens %s: must be \"auto\" or a whole number above 0", s)
	}
	return MaxTokens(n), nil
}

// ScoreWeights says how much each score of the `pipeline` counts, 0 or more. Every score is from 0 to 1.
type ScoreWeights struct {
	// 1 for the replica that answered the session last. Default: `1`.
	Session *float64 `json:"session,omitempty"`

	// The target's weight, compared to the largest. Default: `1`.
	Weight *float64 `json:"weight,omitempty"`

	// How few requests are in flight, compared to the fewest. Default: `1`.
	Load *float64 `json:"load,omitempty"`

	// The share of the prompt that the replica was sent before. Default: `1`.
	Prefix *float64 `json:"prefix,omitempty"`

	// How much room there is in the replica's LMCache. Default: `0`, because caches that are warm have little.
	LMCache *float64 `json:"lmcache,omitempty"`
}

// each calls f with every weight by its name.
func (w *ScoreWeights) each(f func(key string, weight **float64)) {
	f("session", &w.Session)
	f("weight", &w.Weight)
	f("load", &w.Load)
	f("prefix", &w.Prefix)
	f("lmcache", &w.LMCache)
}

func (t *Tuning) validate() (err error) {
	if v := t.Threshold; v != nil && !(*v >= 0 && *v <= 1) {
		return fmt.Errorf("threshold %v: must be from 0 to 1", *v)
	}
	if v := t.OverloadMargin; v != nil && *v < 0 {
		return fmt.Errorf("overload_margin %d: must not be negative", *v)
	}
	if v := t.OverloadRatio; v != nil && !(*v >= 1) {
		return fmt.Errorf("overload_ratio %v: must be at least 1", *v)
	}
	if v := t.W; v != nil && !(*v >= 1) {
		return fmt.Errorf("w %v: must be at least 1", *v)
	}
	if t.ScoreWeights != nil {
		t.ScoreWeights.each(func(key string, weight **float64) {
			if v := *weight; v != nil && !(*v >= 0) {
				err = fmt.Errorf("score_weights: %s %v: must not be negative", key, *v)
			}
		})
		if err != nil {
			return err
		}
	}
	if h := t.SessionHeader; h != "" && !httpguts.ValidHeaderFieldName(h) {
		return fmt.Errorf("session_header %q: not the name of a header", h)
	}
	if v := t.SessionTTL; v != nil && *v < 0 {
		return fmt.Errorf("session_ttl %v: must not be negative", time.Duration(*v))
	}
	if t.MaxSessions < 0 {
		return fmt.Errorf("max_sessions %d: must not be negative", t.MaxSessions)
	}
	if t.MaxNodes < 0 {
		return fmt.Errorf("max_nodes %d: must not be negative", t.MaxNodes)
	}
	if t.MaxBytes < 0 {
		return fmt.Errorf("max_bytes %d: must not be negative", t.MaxBytes)
	}
	return nil
}

// session is the session that a request belongs to, as a number that stands for it; 0 is none.
func (t *Tuning) session(strategy string, header http.Header) uint64 {
	if strategy != strategyPipeline {
		return 0
	}
	name := t.SessionHeader
	if name == "" {
		name = "X-Session-ID"
	}
	id := header.Get(name)
	if id == "" {
		return 0
	}
	return max(maphash.String(sessionSeed, id), 1)
}

// Session ids are not kept, only numbers that nobody can choose to be another's.
var sessionSeed = maphash.MakeSeed()

// Names of Rolter's strategies.
const (
	strategyCacheAware        = "cache_aware"
	strategyLeastLoad         = "least_load"
	strategyPipeline          = "pipeline"
	strategyPreciseCacheAware = "precise_cache_aware"
	strategyLMCacheAware      = "lmcache_aware"
	strategyLeastPrefill      = "least_prefill"
)

// means is what a strategy is built from.
type means struct {
	*Tuning
	pool *prefixPool
	// observed says that the first byte of an answer is seen.
	observed bool
}

// strategies builds Rolter's strategies by name.
var strategies = map[string]func(means) selection.Strategy{
	strategyCacheAware: func(m means) selection.Strategy {
		return &selection.CacheAware{
			Loads:          loads,
			Prefixes:       m.pool.Prefixes,
			Threshold:      or(m.Threshold, selection.DefaultThreshold),
			OverloadMargin: or(m.OverloadMargin, selection.DefaultOverloadMargin),
			OverloadRatio:  or(m.OverloadRatio, selection.DefaultOverloadRatio),
			Unobserved:     !m.observed,
		}
	},
	strategyLeastLoad: func(means) selection.Strategy { return selection.LeastLoad{Loads: loads} },
	strategyLeastPrefill: func(m means) selection.Strategy {
		return &selection.LeastPrefill{Loads: loads, Prefixes: m.pool.Prefixes, W: or(m.W, selection.DefaultW), Unobserved: !m.observed}
	},
	strategyPipeline: func(m means) selection.Strategy {
		weights := or(m.ScoreWeights, ScoreWeights{})
		return &selection.Pipeline{Unobserved: !m.observed, Loads: loads, Prefixes: m.pool.Prefixes, Sessions: m.pool.sessions, Scorers: []selection.WeightedScorer{
			{Scorer: selection.SessionAffinity{}, Weight: or(weights.Session, 1)},
			{Scorer: selection.StaticWeight{}, Weight: or(weights.Weight, 1)},
			{Scorer: selection.InFlightLoad{}, Weight: or(weights.Load, 1)},
			{Scorer: selection.PrefixAffinity{}, Weight: or(weights.Prefix, 1)},
			{Scorer: selection.OuterCache{}, Weight: or(weights.LMCache, 0)},
		}}
	},
	strategyPreciseCacheAware: func(m means) selection.Strategy {
		return &selection.PreciseCacheAware{
			Loads:          loads,
			Prefixes:       m.pool.Prefixes,
			OverloadMargin: or(m.OverloadMargin, selection.DefaultOverloadMargin),
			OverloadRatio:  or(m.OverloadRatio, selection.DefaultOverloadRatio),
			Unobserved:     !m.observed,
		}
	},
	strategyLMCacheAware: func(means) selection.Strategy { return selection.LMCacheAware{Loads: loads} },
}

// needsProviders says whether a strategy goes by what providers tell.
func needsProviders(strategy string) bool {
	return strategy == strategyPreciseCacheAware || strategy == strategyLMCacheAware
}

// newStrategy builds one of Rolter's own strategies; known is false when the name is not one of them.
func newStrategy(name string, m means) (strategy selection.Strategy, known bool) {
	build, known := strategies[name]
	if !known {
		return nil, false
	}
	return build(m), true
}

// ownStrategies lists Rolter's strategies.
func ownStrategies() []string { return slices.Sorted(maps.Keys(strategies)) }

// policyNamespace is where Caddy's selection policies are registered.
const policyNamespace = "http.reverse_proxy.selection_policies"

// strategyNames lists all strategies that are available: Rolter's, then Caddy's policies.
func strategyNames() []string {
	names := ownStrategies()
	for _, module := range caddy.GetModules(policyNamespace) {
		if name := module.ID.Name(); name != "rolter" {
			names = append(names, name)
		}
	}
	return names
}

// or is *p, or the default where nothing is set.
func or[T any](p *T, byDefault T) T {
	if p != nil {
		return *p
	}
	return byDefault
}

func (e *Egress) policy() egress.Policy {
	p := egress.Default()
	if e == nil {
		return p
	}
	p.BlockLinkLocal = or(e.BlockLinkLocal, p.BlockLinkLocal)
	p.BlockMetadata = or(e.BlockMetadata, p.BlockMetadata)
	p.BlockPrivate = or(e.BlockPrivate, p.BlockPrivate)
	p.BlockLoopback = or(e.BlockLoopback, p.BlockLoopback)
	p.AllowHosts = e.AllowHosts
	return p
}

// provision checks the provider and works out where it is. Errors name the key and the value.
func (p *Provider) provision(policy egress.Policy) error {
	if p.Kind != "" && p.Kind != "openai_compatible" {
		return fmt.Errorf("kind %q: the only kind is \"openai_compatible\"", p.Kind)
	}
	switch p.EnginePriority {
	case "", priorityOff, priorityOn, priorityTrustClient:
	default:
		return fmt.Errorf("engine_priority %q: must be off, on or trust_client", p.EnginePriority)
	}
	if p.Metrics != "" && p.Metrics != metricsAuto && p.Metrics != metricsOff {
		return fmt.Errorf("metrics %q: must be %q or %q", p.Metrics, metricsAuto, metricsOff)
	}
	repl := caddy.NewReplacer()
	p.APIKey = repl.ReplaceKnown(p.APIKey, "")
	if strings.ContainsAny(p.APIKey, "\r\n\x00") {
		return errors.New("api_key: must not contain line breaks")
	}
	if err := p.parseBase(repl.ReplaceKnown(p.APIBase, "")); err != nil {
		return fmt.Errorf("api_base %q: %w", redactedURL(p.APIBase), err)
	}
	if err := checkEndpoint(policy, "api_base", p.APIBase, p.dial); err != nil {
		return err
	}
	if p.KVEvents != nil {
		if err := p.KVEvents.validate(policy); err != nil {
			return err
		}
	}
	if p.LMCache != nil {
		if err := p.LMCache.validate(policy); err != nil {
			return err
		}
	}
	return nil
}

// parseBase works out the parts of the base URL.
func (p *Provider) parseBase(base string) error {
	u, err := url.Parse(base)
	switch {
	case base == "":
		return errors.New("must not be empty")
	case err != nil:
		return errors.New("not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return errors.New("must begin with http:// or https://")
	case u.Hostname() == "":
		return errors.New("has no host")
	case u.User != nil:
		return errors.New("must not carry credentials (use api_key)")
	case u.RawQuery != "" || u.Fragment != "":
		return errors.New("must not have a query or a fragment")
	}
	port := u.Port()
	if port == "" {
		port = "80"
		if u.Scheme == "https" {
			port = "443"
		}
	}
	if !validPort(port) {
		return errors.New("has an invalid port")
	}
	p.scheme = u.Scheme
	p.dial = net.JoinHostPort(strings.ToLower(u.Hostname()), port)
	if _, err := caddy.ParseNetworkAddress(p.dial); err != nil {
		return err
	}
	p.path = strings.TrimRight(u.Path, "/")
	return nil
}

// identity is what stays the same of the replica from one configuration to the next. A front may have several behind one address, by path.
func (p *Provider) identity() string { return p.dial + p.path }

// engineURL is the URL at the engine of a path that is not of the API under /v1.
func (p *Provider) engineURL(path string) *url.URL {
	return &url.URL{Scheme: p.scheme, Host: p.dial, Path: strings.TrimSuffix(p.path, "/v1") + path}
}

// pathFor is the path at the provider for the path of a request.
func (p *Provider) pathFor(path string) string {
	prefix := p.path
	if strings.HasSuffix(prefix, "/v1") && (path == "/v1" || strings.HasPrefix(path, "/v1/")) {
		prefix = strings.TrimSuffix(prefix, "/v1")
	}
	return prefix + path
}

// checkEndpoint applies the egress policy to host:port.
func checkEndpoint(policy egress.Policy, key, value, address string) error {
	host := address
	if h, _, err := net.SplitHostPort(address); err == nil {
		host = h
	}
	if err := policy.CheckHost(host); err != nil {
		return fmt.Errorf("%s %q: %w (allow it with egress allow_hosts)", key, value, err)
	}
	return nil
}

func validPort(s string) bool {
	port, err := strconv.ParseUint(s, 10, 16)
	return err == nil && port > 0
}

// redactedURL is a URL as it was written, for messages, without the credentials that it may hold, well-formed or not.
func redactedURL(s string) string {
	start := 0
	if i := strings.Index(s, "//"); i >= 0 {
		start = i + 2
	}
	end := len(s)
	if i := strings.IndexAny(s[start:], "/?#"); i >= 0 {
		end = start + i
	}
	if at := strings.LastIndex(s[start:end], "@"); at >= 0 {
		return s[:start] + "xxxxx" + s[start+at:]
	}
	return s
}
