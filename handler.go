package rolter

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/rolter-ai/caddy-rolter/prompt"
)

// Handler routes requests for large language models to the replica whose KV cache already holds the beginning of the prompt.
//
// It serves the OpenAI-compatible API of its routes: it reads the `model` of a request, finds the route of that name, lets the route's strategy
// choose one of the targets, and proxies to it as Caddy's reverse_proxy does. `GET /v1/models` lists the routes. Requests that
// are none of the API go to the next handler.
//
// The request goes upstream byte for byte, apart from the model's name where the target has another one, and the answer comes back
// untouched. The response headers `x-rolter-target` and `x-rolter-reason` say who served the request and why.
//
// Placeholders, for access logs and headers:
//
// Placeholder | Description
// ------------|---------------
// `{http.rolter.model}` | The model name that the client asked for
// `{http.rolter.strategy}` | The strategy of the route
// `{http.rolter.target}` | The provider that was chosen at the latest attempt
// `{http.rolter.reason}` | Why: `cache`, `continuation`, `overloaded`, `cold`, `no_prompt`, `session`, `pipeline`, `least_prefill`, `only_candidate`, `no_tokens`, `no_signal` or `fallback`
// `{http.rolter.score}` | The share of the prompt, from 0 to 1, that the target was sent before
// `{http.rolter.predicted}` | The tokens of the prompt that the target's engine has cached by its KV events, empty where they do not tell
// `{http.rolter.load}` | The requests that were in flight at the target
// `{http.rolter.attempt}` | The number of the latest attempt, from 1
type Handler struct {
	// The replicas.
	Providers []*Provider `json:"providers,omitempty"`

	// The models that are served, and by which replicas.
	Routes []*Route `json:"routes,omitempty"`

	// Which endpoints may be contacted.
	Egress *Egress `json:"egress,omitempty"`

	// The largest request body, in bytes; a larger one is answered with 413. Default: 32 MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// Whether responses say which target served them, and why. Default: `true`.
	DecisionHeaders *bool `json:"decision_headers,omitempty"`

	routes    map[string]*Route
	feeds     []*feedSource
	byDefault *Route // for requests without a model, where there is no choice
	logger    *zap.Logger
}

// defaultMaxBody is the default of max_body.
const defaultMaxBody = 32 << 20

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.rolter", New: func() caddy.Module { return new(Handler) }}
}

// Provision checks the configuration and prepares the routes. It contacts nobody.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	app, err := ctx.App("rolter")
	if err != nil {
		return err
	}
	if err := registerMetrics(ctx); err != nil {
		return err
	}
	if h.MaxBody < 0 {
		return fmt.Errorf("max_body %d: must not be negative", h.MaxBody)
	}
	if h.MaxBody == 0 {
		h.MaxBody = defaultMaxBody
	}
	policy := h.Egress.policy()
	seen := make(map[string]bool)
	for _, p := range h.Providers {
		if p == nil {
			return errors.New("providers: must not contain null")
		}
		if p.Name == "" {
			return errors.New("provider \"\": name must not be empty")
		}
		if !validHeaderValue(p.Name) {
			return fmt.Errorf("provider %q: name must be printable, it is sent in a header", p.Name)
		}
		if seen[p.Name] {
			return fmt.Errorf("provider %q: named twice", p.Name)
		}
		seen[p.Name] = true
		if err := p.provision(policy); err != nil {
			return fmt.Errorf("provider %q: %w", p.Name, err)
		}
		if p.Metrics == metricsAuto {
			app := app.(*App)
			app.sources = append(app.sources, newSource(p, policy, h.logger))
		}
		p.tokens = newTokenSource(p)
		if p.KVEvents != nil {
			source := newFeedSource(p, policy, h.logger)
			p.feed = source.feed
			h.feeds = append(h.feeds, source)
			app := app.(*App)
			app.feeds = append(app.feeds, source)
		}
		if p.LMCache != nil {
			p.outer = newOuterSource(p, policy, h.logger)
			app := app.(*App)
			app.outers = append(app.outers, p.outer)
			var err error
			if p.lookup, err = h.lookupFor(p, policy); err != nil {
				return fmt.Errorf("provider %q: lmcache.endpoint %q: %w", p.Name, redactedURL(p.LMCache.Endpoint), err)
			}
		}
	}
	if len(h.Routes) == 0 {
		return errors.New("routes: must not be empty")
	}
	h.routes = make(map[string]*Route, len(h.Routes))
	for _, rt := range h.Routes {
		if rt == nil {
			return errors.New("routes: must not contain null")
		}
		if rt.Model == "" {
			return errors.New("route \"\": model must not be empty")
		}
		if h.routes[rt.Model] != nil {
			return fmt.Errorf("route %q: named twice", rt.Model)
		}
		if err := rt.provision(ctx, h); err != nil {
			return fmt.Errorf("route %q: %w", rt.Model, err)
		}
		h.routes[rt.Model] = rt
	}
	if len(h.Routes) == 1 {
		h.byDefault = h.Routes[0]
	}
	return nil
}

// Cleanup gives back what the routes took. Requests that are still running go on.
func (h *Handler) Cleanup() error {
	var errs []error
	for _, rt := range h.Routes {
		if rt != nil {
			errs = append(errs, rt.cleanup())
		}
	}
	for _, source := range h.feeds {
		feeds.leave(source)
	}
	return errors.Join(errs...)
}

func (h *Handler) provider(name string) *Provider {
	for _, p := range h.Providers {
		if p.Name == name {
			return p
		}
	}
	return nil
}

// validHeaderValue says whether s can be sent in a header as it is.
func validHeaderValue(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c > '~' })
}

// tokenIDsHeader carries the token ids of the prompt, for us and not for the engine.
const tokenIDsHeader = "X-Rolter-Vllm-Token-Ids"

// ServeHTTP routes the request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	path := r.URL.Path
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		if model, ok := modelsPath(path); ok {
			return h.serveModels(w, r, model)
		}
	}
	// What an engine has under /v1/ that is not known here goes by its model too, without a look at the prompt.
	api := prompt.APIOf(path)
	if r.Method != http.MethodPost {
		if api == prompt.NoAPI || r.Method == http.MethodOptions {
			return next.ServeHTTP(w, r)
		}
		w.Header().Set("Allow", http.MethodPost)
		return reject(w, r, apiError{http.StatusMethodNotAllowed, "invalid_request_error", "method_not_allowed", "", "this endpoint takes POST"})
	}
	if api == prompt.NoAPI && !strings.Contains(path, "/v1/") {
		return next.ServeHTTP(w, r)
	}

	q := &request{owner: h, logger: h.logger}
	defer q.end()
	rt, err := h.read(w, r, q)
	if err != nil {
		if r.Context().Err() != nil {
			return caddyhttp.Error(499, err) // the client has gone: nobody reads an answer
		}
		var bad apiError
		if errors.As(err, &bad) {
			return reject(w, r, bad)
		}
		return err
	}
	rt.group.limit(&rt.Tuning)
	q.asked.Session = rt.session(rt.Strategy, r.Header)
	q.strategy, q.counters = rt.Strategy, rt.counters
	q.publishTo(r.Context(), handlerVar, q)

	rw := newResponseWriter(w, q, or(h.DecisionHeaders, true))
	defer rw.close()
	err = rt.ReverseProxy.ServeHTTP(rw, r, next)
	if err == nil || rw.status != 0 {
		rw.ended()
		return err
	}
	answer, ok := upstreamError(err)
	if !ok {
		return err
	}
	h.logger.Warn("no target served the request", zap.String("model", rt.Model), zap.String("target", q.targetName()), zap.Int("attempts", q.attempt), zap.Error(err))
	return reject(rw, r, answer)
}

// read reads the body of the request into q and finds its route. The errors are for the client: an [apiError], or one that already has a status.
func (h *Handler) read(w http.ResponseWriter, r *http.Request, q *request) (*Route, error) {
	q.tokenHeader = r.Header[tokenIDsHeader]
	r.Header.Del(tokenIDsHeader)
	if r.ContentLength > h.MaxBody {
		return nil, h.tooLarge(r)
	}
	if caddyhttp.IsIncremental(r.Header) {
		// The client asked that nobody holds the body back. It can be had only where the body neither decides where it goes nor is changed.
		if h.byDefault == nil || h.byDefault.renames {
			return nil, apiError{http.StatusNotImplemented, "invalid_request_error", "incremental_refused", "", "the model cannot be read from an incremental request"}
		}
		countNoPrompt("incremental")
		r.Body = http.MaxBytesReader(w, r.Body, h.MaxBody)
		return h.byDefault, nil
	}
	body, err := readBody(r.Body, r.ContentLength, h.MaxBody)
	q.body = body
	if err != nil {
		return nil, h.bodyError(r, err)
	}
	encoding := r.Header.Get("Content-Encoding")
	if strings.EqualFold(encoding, "gzip") || strings.EqualFold(encoding, "x-gzip") {
		// Engines refuse compressed bodies.
		q.body, err = gunzip(body, h.MaxBody)
		body.release()
		if errors.Is(err, errBodyTooLarge) {
			return nil, h.tooLarge(r)
		}
		if err != nil {
			return nil, apiError{http.StatusBadRequest, "invalid_request_error", "invalid_encoding", "", "the request body is not valid gzip"}
		}
		r.Header.Del("Content-Encoding")
		encoding = ""
	}
	// The body is complete: the engine gets it with its length, and need not be asked whether it wants it. Every attempt has a reader of
	// its own (see request.resend); this one is for whoever looks at the body before.
	_ = r.Body.Close()
	r.Body = io.NopCloser(bytes.NewReader(q.body.data))
	r.ContentLength = int64(len(q.body.data))
	r.TransferEncoding, r.Trailer = nil, nil
	r.Header.Del("Expect")
	r.Header.Del("Trailer")

	if encoding != "" && !strings.EqualFold(encoding, "identity") {
		countNoPrompt("encoding")
		q.parsed = new(prompt.Body)
		return h.route(q.parsed, true)
	}
	q.parse(r.URL.Path)
	return h.route(q.parsed, isJSON(r) && len(q.body.data) > 0)
}

// route finds the route of a request.
func (h *Handler) route(parsed *prompt.Body, mayHaveModel bool) (*Route, error) {
	switch {
	case len(parsed.ModelSpans) > prompt.MaxModelSpans:
		return nil, apiError{http.StatusBadRequest, "invalid_request_error", "ambiguous_model", "model", "the request names its model too often"}
	case len(parsed.PrioritySpans) > prompt.MaxModelSpans:
		return nil, apiError{http.StatusBadRequest, "invalid_request_error", "ambiguous_priority", "priority", "the request names its priority too often"}
	case len(parsed.ReportModeSpans) > prompt.MaxModelSpans:
		return nil, apiError{http.StatusBadRequest, "invalid_request_error", "ambiguous_report_mode", "vllm_xargs", "the request names its kv_cache_report_mode too often"}
	case parsed.HasModel:
		if rt := h.routes[parsed.Model]; rt != nil {
			return rt, nil
		}
		return nil, apiError{http.StatusNotFound, "invalid_request_error", "model_not_found", "model", fmt.Sprintf("The model %s does not exist.", quoted(parsed.Model))}
	case h.byDefault != nil:
		return h.byDefault, nil
	case !mayHaveModel:
		return nil, apiError{http.StatusBadRequest, "invalid_request_error", "invalid_body", "", "the request body must be JSON"}
	case parsed.Why == prompt.Unparsable:
		return nil, apiError{http.StatusBadRequest, "invalid_request_error", "invalid_json", "", "the request body is not valid JSON"}
	}
	return nil, apiError{http.StatusBadRequest, "invalid_request_error", "missing_model", "model", "you must provide a model parameter"}
}

// isJSON says whether the client claims that its body is JSON, or claims nothing.
func isJSON(r *http.Request) bool {
	contentType := r.Header.Get("Content-Type")
	if contentType == "" {
		return true
	}
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && (media == "application/json" || strings.HasSuffix(media, "+json"))
}

// tooLarge is the error for a body above the limit. What the client is still sending is read away, within bounds, because many clients
// read no answer before they have sent everything; one that asks first is told at once.
func (h *Handler) tooLarge(r *http.Request) error {
	if r.Header.Get("Expect") == "" {
		_, _ = io.CopyN(io.Discard, r.Body, 2*h.MaxBody)
	}
	return apiError{http.StatusRequestEntityTooLarge, "invalid_request_error", "request_too_large", "", fmt.Sprintf("the request body is larger than %d bytes", h.MaxBody)}
}

// bodyError is the error for a body that could not be read.
func (h *Handler) bodyError(r *http.Request, err error) error {
	if errors.Is(err, errBodyTooLarge) {
		return h.tooLarge(r)
	}
	// Such as the limit of Caddy's request_body.
	if herr, ok := errors.AsType[caddyhttp.HandlerError](err); ok {
		return apiError{herr.StatusCode, "invalid_request_error", "invalid_body", "", http.StatusText(herr.StatusCode)}
	}
	return apiError{http.StatusBadRequest, "invalid_request_error", "invalid_body", "", "the request body could not be read to its end"}
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
