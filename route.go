package rolter

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
)

// Route sends the requests for one model to one of its targets.
type Route struct {
	// The model name that clients ask for.
	Model string `json:"model,omitempty"`

	// How the target is chosen: `cache_aware`, `least_prefill`, `pipeline`, `least_load`, `lmcache_aware`, or the name of any of Caddy's load-balancing policies
	// (`round_robin`, `least_conn`, …). Default: `cache_aware`.
	Strategy string `json:"strategy,omitempty"`

	// The parameters of the strategy, where it is one of Caddy's policies that takes any.
	SelectionPolicyRaw json.RawMessage `json:"selection_policy,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	Tuning

	// Whether an engine is asked for the token ids of prompts that do not come as such, so that what is known from KV events can be used with any client.
	// One replica is asked, before the request is routed. Default: `false`.
	Tokenize *bool `json:"tokenize,omitempty"`

	// How long that may take; then the request is routed without token ids. Default: `50ms`.
	TokenizeTimeout caddy.Duration `json:"tokenize_timeout,omitempty"`

	// The replicas that serve the model.
	Targets []*Target `json:"targets,omitempty"`

	// How requests are proxied: everything that Caddy's reverse_proxy takes, except for the upstreams and the load-balancing policy, which are the
	// targets and the strategy. Where it says nothing: idle connections to replicas are kept for 4 seconds, because engines close theirs
	// after 5; a refused connection, a connection that breaks before the answer and a 503 are tried again on each other target once;
	// a target that refused or broke a connection rests for 1 second, while there is another.
	ReverseProxy *reverseproxy.Handler `json:"reverse_proxy,omitempty"`

	handler      *Handler
	group        *group
	choice       choice
	members      []*member
	counters     *decisionCounters
	rewritesPath bool // some provider has a path
	setsHeaders  bool // some provider has a key, a priority, or may have ranks
	stamps       bool // some provider has a priority
	renames      bool // some target has another name for the model
	proxying     bool // the proxy was provisioned
	logger       *zap.Logger
}

// idleTimeout is below the 5 s after which vLLM closes an idle connection: a POST on a connection that has just been closed is a 502.
const idleTimeout = caddy.Duration(4 * time.Second)

// restTime is for how long a target that refused or broke a connection is not tried.
const restTime = caddy.Duration(time.Second)

// retryExpression says which answers and failures are tried on another target. A request that makes one engine fail must not visit them all,
// so other statuses are not; a 400 is only where it may be for the priority that we added.
const retryExpression = `{http.reverse_proxy.status_code} in [400, 503] || {http.reverse_proxy.is_transport_error} == true`

// retryMatcher is the expression, and before it the same in Go, because the proxy asks for every answer and hardly any is to be tried again. The
// expression cannot be left out: the proxy shows answers only to sets of matchers that have one.
func retryMatcher(ctx caddy.Context) (caddyhttp.MatcherSets, error) {
	expression := &caddyhttp.MatchExpression{Expr: retryExpression}
	if err := expression.Provision(ctx); err != nil {
		return nil, err
	}
	return caddyhttp.MatcherSets{{mayRetry{}, expression}}, nil
}

type mayRetry struct{}

// MatchWithError implements [caddyhttp.RequestMatcherWithError].
func (mayRetry) MatchWithError(r *http.Request) (bool, error) {
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return true, nil
	}
	if failed, _ := repl.Get("http.reverse_proxy.is_transport_error"); failed == true {
		return true, nil
	}
	switch status, _ := repl.Get("http.reverse_proxy.status_code"); status {
	case http.StatusServiceUnavailable:
		return true, nil
	case http.StatusBadRequest:
		q, _ := caddyhttp.GetVar(r.Context(), handlerVar).(*request)
		return q != nil && q.mayUnstamp(), nil
	}
	return false, nil
}

// provision checks the route and prepares it. Errors name the key and the value.
func (rt *Route) provision(ctx caddy.Context, h *Handler) error {
	rt.handler, rt.logger = h, h.logger
	if rt.Strategy == "" && rt.SelectionPolicyRaw == nil {
		rt.Strategy = strategyCacheAware
	}
	if err := rt.Tuning.validate(); err != nil {
		return err
	}
	if rt.TokenizeTimeout < 0 {
		return fmt.Errorf("tokenize_timeout %v: must not be negative", time.Duration(rt.TokenizeTimeout))
	}
	if err := rt.findProviders(h); err != nil {
		return err
	}
	if err := rt.checkSignals(); err != nil {
		return err
	}
	group, err := newGroup(routeGroup + rt.Model)
	if err != nil {
		return err
	}
	rt.group = group
	if err := rt.provisionStrategy(ctx); err != nil {
		return err
	}
	rt.counters = newDecisionCounters(rt.Model, rt.Strategy)
	if rt.ReverseProxy == nil {
		rt.ReverseProxy = new(reverseproxy.Handler)
	}
	if err := rt.provisionProxy(ctx); err != nil {
		return fmt.Errorf("reverse_proxy: %w", err)
	}
	for _, t := range rt.Targets {
		t.group = rt.group
		t.member = rt.group.get(identity{address: t.provider.identity(), model: t.Model})
		rt.members = append(rt.members, t.member)
	}
	return nil
}

// findProviders connects the targets with their providers.
func (rt *Route) findProviders(h *Handler) error {
	if len(rt.Targets) == 0 {
		return errors.New("targets: must not be empty")
	}
	seen := make(map[[2]string]bool)
	dials := make(map[string]string)
	for _, t := range rt.Targets {
		if t == nil {
			return errors.New("targets: must not contain null")
		}
		t.provider = h.provider(t.Provider)
		if t.provider == nil {
			return fmt.Errorf("target %q: unknown provider", t.Provider)
		}
		if seen[[2]string{t.Provider, t.Model}] {
			return fmt.Errorf("target %q: named twice", t.Provider)
		}
		seen[[2]string{t.Provider, t.Model}] = true
		t.weight = or(t.Weight, 1)
		if !(t.weight > 0) || math.IsInf(t.weight, 0) {
			return fmt.Errorf("target %q: weight %v: must be above 0", t.Provider, t.weight)
		}
		if name, ok := dials[t.provider.dial]; ok && name != t.provider.identity() {
			rt.choice.sharedDial = true
		}
		dials[t.provider.dial] = t.provider.identity()
		if first := rt.Targets[0].provider; t.provider.scheme != first.scheme {
			return fmt.Errorf("target %q: api_base %q: all targets of a route must have the same scheme (%s)", t.Provider, redactedURL(t.provider.APIBase), first.scheme)
		}
		rt.rewritesPath = rt.rewritesPath || t.provider.path != ""
		rt.renames = rt.renames || t.Model != ""
		rt.stamps = rt.stamps || t.provider.EnginePriority != "" && t.provider.EnginePriority != priorityOff
		rt.setsHeaders = rt.setsHeaders || rt.stamps || t.provider.APIKey != "" || t.provider.KVEvents != nil
	}
	return nil
}

// checkSignals checks that some provider has the signal that the strategy goes by.
func (rt *Route) checkSignals() error {
	has := func(f func(*Provider) bool) bool {
		return slices.ContainsFunc(rt.Targets, func(t *Target) bool { return f(t.provider) })
	}
	switch rt.Strategy {
	case strategyPreciseCacheAware:
		if !has(func(p *Provider) bool { return p.KVEvents != nil }) {
			return fmt.Errorf("strategy %q: no provider of the route has kv_events", rt.Strategy)
		}
	case strategyLMCacheAware:
		if !has(func(p *Provider) bool { return p.LMCache != nil }) {
			return fmt.Errorf("strategy %q: no provider of the route has lmcache", rt.Strategy)
		}
	}
	return nil
}

// provisionStrategy builds Rolter's strategy of that name, or loads Caddy's policy.
func (rt *Route) provisionStrategy(ctx caddy.Context) error {
	if strategy, known := newStrategy(rt.Strategy, means{&rt.Tuning, rt.group.prefixes, true}); known {
		if rt.SelectionPolicyRaw != nil {
			return fmt.Errorf("selection_policy: strategy %q takes none", rt.Strategy)
		}
		rt.choice.strategy = strategy
		rt.provisionResidency()
		return nil
	}
	var named struct {
		Policy string `json:"policy"`
	}
	switch {
	case rt.SelectionPolicyRaw != nil:
		if err := json.Unmarshal(rt.SelectionPolicyRaw, &named); err != nil {
			return fmt.Errorf("selection_policy: %w", err)
		}
		if rt.Strategy == "" {
			rt.Strategy = named.Policy
		}
	case rt.Strategy == "weighted_round_robin":
		weights := make([]int, len(rt.Targets))
		for i, t := range rt.Targets {
			weights[i] = int(t.weight)
			if float64(weights[i]) != t.weight {
				return fmt.Errorf("target %q: weight %v: strategy \"weighted_round_robin\" takes whole numbers", t.Provider, t.weight)
			}
		}
		rt.SelectionPolicyRaw = caddyconfig.JSONModuleObject(&reverseproxy.WeightedRoundRobinSelection{Weights: weights}, "policy", rt.Strategy, nil)
		named.Policy = rt.Strategy
	default:
		rt.SelectionPolicyRaw = caddyconfig.JSON(map[string]string{"policy": rt.Strategy}, nil)
		named.Policy = rt.Strategy
	}
	if names := strategyNames(); named.Policy != rt.Strategy || !slices.Contains(names, rt.Strategy) {
		return fmt.Errorf("strategy %q: unknown; there are %s", rt.Strategy, strings.Join(names, ", "))
	}
	for _, t := range rt.Targets {
		if rt.Strategy != "weighted_round_robin" && t.weight != rt.Targets[0].weight {
			return fmt.Errorf("target %q: weight %v: strategy %q takes no weights", t.Provider, t.weight, rt.Strategy)
		}
	}
	module, err := ctx.LoadModule(rt, "SelectionPolicyRaw")
	if err != nil {
		return fmt.Errorf("strategy %q: %w", rt.Strategy, err)
	}
	rt.choice.policy = module.(reverseproxy.Selector)
	return nil
}

// provisionResidency sets up the use of KV events and of look-ups in LMCache, for strategies that can use them and where there are any.
func (rt *Route) provisionResidency() {
	uses := rt.Strategy == strategyPreciseCacheAware || rt.Strategy == strategyLeastPrefill || rt.Strategy == strategyPipeline
	if !uses || !slices.ContainsFunc(rt.Targets, func(t *Target) bool { return t.provider.feed != nil || t.provider.lookup != nil }) {
		return
	}
	rt.choice.residency, rt.choice.recorded = true, rt.Strategy != strategyPreciseCacheAware
	if or(rt.Tokenize, false) {
		rt.choice.tokenizer = newTokenizer(rt.handler.Egress.policy(), time.Duration(rt.TokenizeTimeout), observeTokens)
	}
}

// provisionProxy fills in what the operator left open and provisions the proxy.
func (rt *Route) provisionProxy(ctx caddy.Context) (err error) {
	rp := rt.ReverseProxy
	switch {
	case len(rp.Upstreams) > 0:
		return errors.New("upstreams: the targets of the route are its upstreams")
	case rp.DynamicUpstreamsRaw != nil:
		return errors.New("dynamic_upstreams: the targets of the route are its upstreams (for dynamic ones use lb_policy rolter in a reverse_proxy)")
	case rp.LoadBalancing != nil && rp.LoadBalancing.SelectionPolicyRaw != nil:
		return errors.New("selection_policy: the strategy of the route is its policy")
	}
	for _, t := range rt.Targets {
		rp.Upstreams = append(rp.Upstreams, &reverseproxy.Upstream{Dial: t.provider.dial})
	}
	several := len(rt.Targets) > 1

	if rp.TransportRaw, err = withTransportDefaults(rp.TransportRaw, rt.Targets[0].provider.scheme == "https"); err != nil {
		return err
	}
	if err := loadTransport(ctx, rp, rt.handler.Egress.policy()); err != nil {
		return err
	}

	if rp.LoadBalancing == nil {
		rp.LoadBalancing = new(reverseproxy.LoadBalancing)
	}
	lb := rp.LoadBalancing
	lb.SelectionPolicy = rt
	rt.choice.tryAgain = lb.Retries > 0 || lb.TryDuration > 0
	if !rt.choice.tryAgain {
		lb.Retries = len(rt.Targets) - 1
		if rt.stamps {
			lb.Retries++ // without the priority
		}
	}
	if lb.RetryMatchRaw == nil && lb.Retries+int(lb.TryDuration) > 0 {
		if lb.RetryMatch, err = retryMatcher(ctx); err != nil {
			return err
		}
	}

	if several {
		if rp.HealthChecks == nil {
			rp.HealthChecks = new(reverseproxy.HealthChecks)
		}
		if rp.HealthChecks.Passive == nil {
			rp.HealthChecks.Passive = new(reverseproxy.PassiveHealthChecks)
		}
		if rp.HealthChecks.Passive.FailDuration == 0 {
			rp.HealthChecks.Passive.FailDuration = restTime
		}
		rt.choice.tryResting = rp.HealthChecks.Active == nil && rp.CBRaw == nil
	}

	if rt.setsHeaders {
		// With header operations, even none, the proxy makes new headers for every attempt. Without them it would hand the same map to
		// every attempt, and a target's key would be changed under the eyes of an earlier attempt's transport.
		if rp.Headers == nil {
			rp.Headers = new(headers.Handler)
		}
		if rp.Headers.Request == nil {
			rp.Headers.Request = new(headers.HeaderOps)
		}
	}
	if err := rp.Provision(ctx); err != nil {
		return err
	}
	rt.proxying = true
	return nil
}

// withTransportDefaults adds to the HTTP transport's configuration what it leaves open. Other transports are left alone.
func withTransportDefaults(raw json.RawMessage, tls bool) (json.RawMessage, error) {
	transport := map[string]json.RawMessage{"protocol": json.RawMessage(`"http"`)}
	if raw != nil {
		if err := json.Unmarshal(raw, &transport); err != nil {
			return nil, fmt.Errorf("transport: %w", err)
		}
	}
	if string(transport["protocol"]) != `"http"` {
		return raw, nil
	}
	if _, set := transport["tls"]; tls && !set {
		transport["tls"] = json.RawMessage(`{}`)
	}
	if _, set := transport["compression"]; !set {
		// Otherwise Go asks for gzip where the client did not, and unpacks the answer.
		transport["compression"] = json.RawMessage(`false`)
	}
	keepAlive := map[string]json.RawMessage{}
	if set, ok := transport["keep_alive"]; ok {
		if err := json.Unmarshal(set, &keepAlive); err != nil {
			return nil, fmt.Errorf("transport: keep_alive: %w", err)
		}
	}
	if _, set := keepAlive["idle_timeout"]; !set {
		keepAlive["idle_timeout"] = caddyconfig.JSON(idleTimeout, nil)
	}
	transport["keep_alive"] = caddyconfig.JSON(keepAlive, nil)
	return caddyconfig.JSON(transport, nil), nil
}

// Select implements [reverseproxy.Selector] for the route's own proxy.
func (rt *Route) Select(pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	q, _ := caddyhttp.GetVar(r.Context(), handlerVar).(*request)
	if q == nil || q.owner != rt.handler {
		return nil // only the handler comes here
	}
	var i int
	if q.unstamp && q.stamped {
		i = q.selectAgain(rt)
	} else {
		i = q.choose(&rt.choice, pool, rt.members, rt.Targets, r, w)
	}
	if i < 0 {
		return nil
	}
	q.aim(r, rt, rt.Targets[i])
	return pool[i]
}

// cleanup gives back what the route took. It may be called on a route that was never provisioned, or only in part.
func (rt *Route) cleanup() error {
	rt.group.close()
	if rt.choice.tokenizer != nil {
		rt.choice.tokenizer.close()
	}
	if rt.ReverseProxy == nil {
		return nil
	}
	if !rt.proxying {
		// The proxy takes its upstreams off a shared count even when it failed before it had put them on.
		rt.ReverseProxy.Upstreams = slices.DeleteFunc(rt.ReverseProxy.Upstreams, func(u *reverseproxy.Upstream) bool { return u.Host == nil })
		if len(rt.ReverseProxy.Upstreams) == 0 {
			return nil
		}
	}
	return rt.ReverseProxy.Cleanup()
}

// Interface guards
var (
	_ reverseproxy.Selector             = (*Route)(nil)
	_ caddyhttp.RequestMatcherWithError = mayRetry{}
)
