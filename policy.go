package rolter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/rolter-ai/caddy-rolter/prompt"
)

// Policy chooses among the upstreams of a reverse_proxy the one whose KV cache already holds the beginning of the prompt.
//
// It works with any reverse_proxy, with dynamic upstreams, and as the `fallback` of another policy. It reads the request body and gives the proxy
// a fresh one for every attempt, so that retries need no `request_buffers`. Where the handler `rolter` is not in front, nobody sees
// the response: what was recorded for an upstream stands once it has answered below 400, as far as the proxy tells, and the load is given back when the request ends.
// `least_prefill` is weaker here for the same reason: first bytes are not seen, so that prefill rates are not learned and the work that waits at an upstream is only reckoned.
//
// The placeholders are those of the handler; the target is the upstream's address.
type Policy struct {
	// How the upstream is chosen: `cache_aware`, `least_prefill`, `pipeline` or `least_load`. Default: `cache_aware`.
	Strategy string `json:"strategy,omitempty"`

	Tuning

	// The largest request body, in bytes, that is looked at; a larger one is proxied as it comes, by load. Default: 32 MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// Whether responses say which upstream served them, and why. Default: `true`.
	DecisionHeaders *bool `json:"decision_headers,omitempty"`

	group    *group
	choice   choice
	counters *decisionCounters
	logger   *zap.Logger
}

// CaddyModule returns the Caddy module information.
func (Policy) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: policyNamespace + ".rolter", New: func() caddy.Module { return new(Policy) }}
}

// Provision checks the configuration. It contacts nobody.
func (p *Policy) Provision(ctx caddy.Context) error {
	p.logger = ctx.Logger()
	if _, err := ctx.App("rolter"); err != nil {
		return err
	}
	if err := registerMetrics(ctx); err != nil {
		return err
	}
	if p.Strategy == "" {
		p.Strategy = strategyCacheAware
	}
	if err := p.Tuning.validate(); err != nil {
		return err
	}
	if p.MaxBody < 0 {
		return fmt.Errorf("max_body %d: must not be negative", p.MaxBody)
	}
	if p.MaxBody == 0 {
		p.MaxBody = defaultMaxBody
	}
	group, err := newGroup(policyGroup)
	if err != nil {
		return err
	}
	p.group = group
	if needsProviders(p.Strategy) {
		return fmt.Errorf("strategy %q: needs providers, which only the handler rolter has", p.Strategy)
	}
	strategy, known := newStrategy(p.Strategy, means{&p.Tuning, group.prefixes, false})
	if !known {
		return fmt.Errorf("strategy %q: unknown; there are %s (for a policy of Caddy's, name it instead of rolter)", p.Strategy, strings.Join(ownStrategies(), ", "))
	}
	// How often and for how long to try is the business of the proxy around us.
	p.choice = choice{strategy: strategy, tryAgain: true}
	p.counters = newDecisionCounters("", p.Strategy)
	return nil
}

// Cleanup gives back what the policy took. Requests that are still running go on.
func (p *Policy) Cleanup() error {
	p.group.close()
	return nil
}

// policyRequest is the state of a request that only the policy sees. It ends with the request's context, which a client may cancel at any time.
type policyRequest struct {
	mu    sync.Mutex
	ended bool
	request
}

// Select implements [reverseproxy.Selector]. w may be nil.
func (p *Policy) Select(pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	if len(pool) == 0 {
		return nil
	}
	p.group.limit(&p.Tuning)
	ctx := r.Context()
	q, _ := caddyhttp.GetVar(ctx, policyVar).(*policyRequest)
	if q == nil || q.owner != p {
		q = &policyRequest{request: request{owner: p, strategy: p.Strategy, counters: p.counters, logger: p.logger}}
		p.read(r, &q.request)
		q.asked.Session = p.session(p.Strategy, r.Header)
		q.publishTo(ctx, policyVar, q)
		context.AfterFunc(ctx, func() {
			q.mu.Lock()
			defer q.mu.Unlock()
			q.ended = true
			q.lease.Answered(answered(ctx))
			q.end()
		})
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended {
		return nil
	}
	i := q.choose(&p.choice, pool, p.group.of(pool), nil, r, w)
	if i < 0 {
		return nil
	}
	q.resend(r, q.partsFor("", nil, false))
	q.name(pool[i].Dial)
	if w != nil && or(p.DecisionHeaders, true) {
		q.said.Load().setHeaders(w.Header())
	}
	return pool[i]
}

// answered says whether the proxy has had an answer below 400 for the request.
func answered(ctx context.Context) bool {
	repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return false
	}
	status, _ := repl.Get("http.reverse_proxy.status_code")
	code, ok := status.(int)
	return ok && code < 400
}

// read reads the body into q, if it is one to look at. Otherwise the request keeps its body.
func (p *Policy) read(r *http.Request, q *request) {
	if cause := p.unreadable(r); cause != "" {
		countNoPrompt(cause)
		return
	}
	body, err := readBody(r.Body, r.ContentLength, p.MaxBody)
	if err != nil {
		// Too large, or the client broke off: what was read goes first, then what is still to come, or the error again.
		cause := "unreadable"
		if errors.Is(err, errBodyTooLarge) {
			cause = "too_large"
		}
		countNoPrompt(cause)
		r.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(body.data), r.Body), r.Body}
		return // and the buffer is left to the garbage collector
	}
	q.body = body
	q.parse(r.URL.Path)
	// The same text is another prompt to another model.
	if len(q.asked.Text) > 0 {
		q.text = texts.Get().(*[]byte)
		text := append(append(append((*q.text)[:0], q.model...), 0xFF), q.asked.Text...)
		*q.text = text
		q.asked.Text = text
		q.asked.Lead += len(q.model) + 1
	}
}

var texts = sync.Pool{New: func() any { return new([]byte) }}

// unreadable says why the body of a request is not looked at, or nothing.
func (p *Policy) unreadable(r *http.Request) string {
	api := prompt.APIOf(r.URL.Path)
	switch {
	case r.Method != http.MethodPost || r.Body == nil || api == prompt.NoAPI || api == prompt.Other:
		return prompt.NoPromptAPI.String()
	case caddyhttp.IsIncremental(r.Header):
		return "incremental"
	case r.Header.Get("Content-Encoding") != "":
		return "encoding"
	case r.ContentLength > p.MaxBody:
		return "too_large"
	}
	return ""
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	lb_policy rolter [<strategy>] {
//	    # the parameters of the strategy, as in a route of the handler
//	    <parameter>      <value>
//	    max_body         <size>
//	    decision_headers on|off
//	}
func (p *Policy) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the policy's name
	if d.NextArg() {
		p.Strategy = d.Val()
	}
	if d.NextArg() {
		return d.ArgErr()
	}
	seen := make(once)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		key := d.Val()
		if err := seen.check(d, key); err != nil {
			return err
		}
		known, err := p.Tuning.parse(d, key)
		switch {
		case known:
		case key == "max_body":
			p.MaxBody, err = sizeArg(d)
		case key == "decision_headers":
			p.DecisionHeaders, err = switchArg(d)
		default:
			err = d.Errf("rolter: unrecognized subdirective '%s'", key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Policy)(nil)
	_ caddy.CleanerUpper    = (*Policy)(nil)
	_ caddyfile.Unmarshaler = (*Policy)(nil)
	_ reverseproxy.Selector = (*Policy)(nil)
)
