package replica

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"
)

func (s *Server) newRoutes() map[string]map[string]http.HandlerFunc {
	get := func(h http.HandlerFunc) map[string]http.HandlerFunc { return map[string]http.HandlerFunc{"GET": h} }
	post := func(h http.HandlerFunc) map[string]http.HandlerFunc { return map[string]http.HandlerFunc{"POST": h} }
	routes := map[string]map[string]http.HandlerFunc{
		"/v1/chat/completions":      post(s.generate(chatAPI{})),
		"/v1/completions":           post(s.generate(completionsAPI{})),
		"/v1/messages":              post(s.generate(messagesAPI{})),
		"/v1/messages/count_tokens": post(s.countTokens),
		"/v1/responses":             post(s.generate(responsesAPI{})),
		"/v1/models":                get(s.listModels),
		"/tokenize":                 post(s.tokenize),
		"/detokenize":               post(s.detokenize),
		"/health":                   get(s.health),
		"/ping":                     {"GET": s.health, "POST": s.health},
		"/metrics":                  get(s.serveMetrics),
		"/version":                  get(func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, 200, obj("version", "0.32.0")) }),
		"/load":                     get(func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, 200, obj("server_load", 0)) }),
		"/reset_prefix_cache":       post(s.resetPrefixCache),
		"/kv_event_sources":         get(s.eventSources),
		"/server_info":              get(s.serverInfo),
		"/sim/fault":                {"GET": s.faults.serve, "POST": s.faults.serve, "DELETE": s.faults.serve},
		"/sim/kv-fault":             {"GET": s.eventFaults.serve, "POST": s.eventFaults.serve, "DELETE": s.eventFaults.serve},

		"/v1/chat/completions/render": post(s.render(chatAPI{})),
		"/v1/completions/render":      post(s.render(completionsAPI{})),
		"/v1/messages/render":         post(s.render(messagesAPI{})),
		"/v1/responses/render":        post(s.render(responsesAPI{})),
	}
	if s.cfg.KVEvents.NoSources {
		delete(routes, "/kv_event_sources")
	}
	if !s.cfg.SGLangInfo {
		delete(routes, "/server_info")
	}
	return routes
}

// ServeHTTP answers one request as vLLM's API server does.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.handlers++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.handlers--
		s.changed.Broadcast()
		s.mu.Unlock()
	}()
	w.Header().Set("Server", "uvicorn")
	if s.cfg.APIKey != "" && strings.HasPrefix(r.URL.Path, "/v1") && !authorized(r.Header.Get("Authorization"), s.cfg.APIKey) {
		writeJSON(w, http.StatusUnauthorized, obj("error", "Unauthorized"))
		return
	}
	methods, found := s.routes[r.URL.Path]
	switch handler := methods[r.Method]; {
	case !found:
		writeJSON(w, http.StatusNotFound, obj("detail", "Not Found"))
	case handler == nil:
		writeJSON(w, http.StatusMethodNotAllowed, obj("detail", "Method Not Allowed"))
	default:
		handler(w, r)
	}
}

func authorized(header, key string) bool {
	scheme, token, _ := strings.Cut(header, " ")
	return strings.EqualFold(scheme, "bearer") && token == key
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	status := http.StatusOK
	if s.Fault().Kind == Unhealthy {
		status = http.StatusServiceUnavailable
	}
	w.WriteHeader(status)
}

func (s *Server) listModels(w http.ResponseWriter, _ *http.Request) {
	models := []any{}
	add := func(name string, parent, maxLen any) {
		models = append(models, obj(
			"id", name, "object", "model", "created", s.born.Unix(), "owned_by", "vllm", "root", s.names[0], "parent", parent,
			"max_model_len", maxLen,
			"permission", []any{obj(
				"id", fmt.Sprintf("modelperm-%016x", mix(uint64(len(models)))), "object", "model_permission", "created", s.born.Unix(),
				"allow_create_engine", false, "allow_sampling", true, "allow_logprobs", true, "allow_search_indices", false,
				"allow_view", true, "allow_fine_tuning", false, "organization", "*", "group", nil, "is_blocking", false,
			)},
		))
	}
	for _, name := range s.names {
		add(name, nil, s.cfg.MaxModelLen)
	}
	for _, name := range s.adapters {
		add(name, s.names[0], nil)
	}
	writeJSON(w, http.StatusOK, obj("object", "list", "data", models))
}

// tokenize answers with the ids of a text, or of a conversation as chat completions would prefill it.
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	body, e := s.readBody(w, r)
	var in struct {
		chatBody
		Prompt           *string `json:"prompt"`
		ReturnTokenStrs  bool    `json:"return_token_strs"`
		AddSpecialTokens *bool   `json:"add_special_tokens"`
	}
	if e == nil {
		e = decode(body, &in)
	}
	if e == nil {
		e = s.checkModel(in.Model)
	}
	var tokens []uint32
	switch {
	case e != nil:
	case in.Prompt == nil:
		var c conversation
		c, e = in.conversation()
		tokens = promptTokens(c)
	case in.AddSpecialTokens != nil && !*in.AddSpecialTokens:
		tokens = appendTokens(nil, *in.Prompt)
	default:
		tokens = completionTokens(*in.Prompt)
	}
	if e != nil {
		chatAPI{}.writeError(w, e)
		return
	}
	var texts []string
	if in.ReturnTokenStrs {
		texts = make([]string, len(tokens))
		for i, t := range tokens {
			texts[i] = tokenText(t)
		}
	}
	writeJSON(w, http.StatusOK, obj("count", len(tokens), "max_model_len", s.cfg.MaxModelLen, "tokens", tokens, "token_strs", texts))
}

func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) {
	body, e := s.readBody(w, r)
	var in struct {
		Model  string   `json:"model"`
		Tokens []uint32 `json:"tokens"`
	}
	if e == nil {
		e = decode(body, &in)
	}
	if e == nil {
		e = s.checkModel(in.Model)
	}
	if e != nil {
		chatAPI{}.writeError(w, e)
		return
	}
	writeJSON(w, http.StatusOK, obj("prompt", tokensText(in.Tokens)))
}

func (s *Server) countTokens(w http.ResponseWriter, r *http.Request) {
	body, e := s.readBody(w, r)
	var p *params
	if e == nil {
		p, e = messagesAPI{countOnly: true}.parse(body)
	}
	if e == nil {
		e = s.checkModel(p.Model)
	}
	if e != nil {
		messagesAPI{}.writeError(w, e)
		return
	}
	n := len(p.prompts[0])
	writeJSON(w, http.StatusOK, obj("input_tokens", n, "context_management", obj("original_input_tokens", n)))
}

// apiError is an error as vLLM words it; see the recordings in testdata.
type apiError struct {
	status  int
	kind    string
	message string
	param   any
	detail  bool // FastAPI's own shape: {"detail": message}
}

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{status: 400, kind: "BadRequestError", message: fmt.Sprintf(format, args...), param: param}
}

// invalid is an error of the request's validation, which vLLM words differently.
func invalid(param any, message string) *apiError {
	return &apiError{status: 400, kind: "Bad Request", message: "1 validation error:\n  " + message, param: param}
}

var (
	errBusy = &apiError{status: 503, kind: "Service Unavailable",
		message: "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."}
	errShutdown = &apiError{status: 500, kind: "InternalServerError", message: "cannot schedule new futures after shutdown"}
)

func (e *apiError) openAI() any {
	return obj("error", obj("message", e.message, "type", e.kind, "param", e.param, "code", e.status))
}

// writeValidationError writes the errors that every API answers alike, because they happen before its handler; false
// where e is not one.
func writeValidationError(w http.ResponseWriter, e *apiError) bool {
	switch {
	case e.detail:
		writeJSON(w, e.status, obj("detail", e.message))
	case e.kind == "Bad Request":
		writeJSON(w, e.status, e.openAI())
	default:
		return false
	}
	return true
}

// readBody reads a JSON body and remembers the request.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, *apiError) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.cfg.MaxBodyBytes))
	s.remember(r, body)
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		return nil, &apiError{status: http.StatusRequestEntityTooLarge, message: "Request Entity Too Large", detail: true}
	}
	mediaType, _, _ := strings.Cut(strings.ToLower(r.Header.Get("Content-Type")), ";")
	switch {
	case mediaType != "application/json":
		return nil, invalid(nil, "Unsupported Media Type: Only 'application/json' is allowed")
	case err != nil || !utf8.Valid(body): // a gzip body ends here: vLLM does not look at Content-Encoding
		return nil, &apiError{status: 400, message: "There was an error parsing the body", detail: true}
	case len(body) == 0:
		return nil, missing("body")
	}
	return body, nil
}

func missing(field string) *apiError {
	return invalid(field, fmt.Sprintf("{'type': 'missing', 'loc': '%s', 'msg': 'Field required'}", field))
}

// decode parses a body, with errors in the words of vLLM's validation as far as a router can tell.
func decode(body []byte, v any) *apiError {
	err := json.Unmarshal(body, v)
	syntax, wrongType := (*json.SyntaxError)(nil), (*json.UnmarshalTypeError)(nil)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &syntax):
		loc := fmt.Sprintf("body.%d", syntax.Offset)
		return invalid(loc, fmt.Sprintf("{'type': 'json_invalid', 'loc': '%s', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}", loc))
	case errors.As(err, &wrongType) && wrongType.Field != "":
		loc := "body." + wrongType.Field
		return invalid(loc, fmt.Sprintf("{'type': 'type_error', 'loc': '%s', 'msg': 'Input should be a valid %s'}", loc, wrongType.Type))
	default:
		return invalid("body", "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid dictionary or object to extract fields from'}")
	}
}

// checkModel accepts a missing model, as vLLM does.
func (s *Server) checkModel(model string) *apiError {
	if model == "" || slices.Contains(s.names, model) || slices.Contains(s.adapters, model) {
		return nil
	}
	return &apiError{status: 404, kind: "NotFoundError", param: "model", message: fmt.Sprintf(
		"The model `%s` does not exist. Valid aliases: %s.", model, strings.Join(s.names, ", "))}
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body := encode(v)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", fmt.Sprint(len(body)))
	w.WriteHeader(status)
	w.Write(body)
}

// reset closes the connection with a TCP reset.
func reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	conn.Close()
}
