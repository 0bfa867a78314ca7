package replica

import (
	"encoding/json"
	"fmt"
	"net/http"
)

// chatAPI is OpenAI's chat completions.
type chatAPI struct{}

// chatBody is a request's body. Fields that do not change what is generated or how it is answered are left out.
type chatBody struct {
	options
	Messages []chatMessage `json:"messages"`
	Tools    []chatTool    `json:"tools"`

	// These change the prompt in ways that depend on the model's template.
	Documents          json.RawMessage `json:"documents"`
	ChatTemplate       json.RawMessage `json:"chat_template"`
	ChatTemplateKwargs json.RawMessage `json:"chat_template_kwargs"`
	ReasoningEffort    json.RawMessage `json:"reasoning_effort"`

	AddGenerationPrompt *bool `json:"add_generation_prompt"`

	promptLogprobs
	TopLogprobs *int `json:"top_logprobs"`
}

// promptLogprobs ask for the log probabilities of the prompt's own tokens. An engine has them only of what it computes,
// so vLLM does not look into its cache then (sampling_params.py, skip_reading_prefix_cache).
type promptLogprobs struct {
	PromptLogprobs *int `json:"prompt_logprobs"`
	Echo           bool `json:"echo"`
}

// apply sets what the fields mean. logprobs is what echo extends to the prompt.
func (l promptLogprobs) apply(p *params, logprobs *int) *apiError {
	switch n := l.PromptLogprobs; {
	case n != nil && p.Stream && (*n > 0 || *n == -1):
		return badRequest("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`. (parameter=prompt_logprobs)")
	case n != nil && *n < -1:
		return badRequest("prompt_logprobs", "`prompt_logprobs` must be a positive value or -1. (parameter=prompt_logprobs, value=%d)", *n)
	}
	p.ignoreCached = l.PromptLogprobs != nil || l.Echo && logprobs != nil
	return nil
}

type chatMessage struct {
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	ToolCalls []toolCall      `json:"tool_calls"`
}

type toolCall struct {
	Function calledFunction `json:"function"`
}

type calledFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

type chatTool struct {
	Function function `json:"function"`
}

func (chatAPI) parse(body []byte) (*params, *apiError) {
	var in chatBody
	if e := decode(body, &in); e != nil {
		return nil, e
	}
	c, e := in.conversation()
	if e != nil {
		return nil, e
	}
	p := &params{options: in.options, maxTokens: in.MaxTokens, prompts: [][]uint32{promptTokens(c)}}
	if in.MaxCompletionTokens != nil {
		p.maxTokens = in.MaxCompletionTokens
	}
	return p, in.apply(p, in.TopLogprobs)
}

func (in *chatBody) conversation() (conversation, *apiError) {
	var c conversation
	if in.Messages == nil {
		return c, missing("body.messages")
	}
	var tools []function
	for _, t := range in.Tools {
		tools = append(tools, t.Function)
	}
	c.addTools(tools)
	c.addRaw("documents", in.Documents)
	c.addRaw("template", in.ChatTemplate)
	c.addRaw("template_kwargs", in.ChatTemplateKwargs)
	c.addRaw("reasoning_effort", in.ReasoningEffort)
	for i, m := range in.Messages {
		text, err := contentText(m.Content)
		if err != nil {
			return c, invalidContent(fmt.Sprintf("body.messages.%d.content", i))
		}
		var calls []calledFunction
		for _, call := range m.ToolCalls {
			calls = append(calls, call.Function)
		}
		c.addTurn(m.Role, text, calls)
	}
	c.noGenerationPrompt = in.AddGenerationPrompt != nil && !*in.AddGenerationPrompt
	return c, nil
}

func invalidContent(loc string) *apiError {
	return invalid(loc, fmt.Sprintf("{'type': 'string_type', 'loc': '%s', 'msg': 'Input should be a valid string'}", loc))
}

func (chatAPI) idPrefix() string { return "chatcmpl-" }

func (chatAPI) writeError(w http.ResponseWriter, e *apiError) {
	if !writeValidationError(w, e) {
		writeJSON(w, e.status, e.openAI())
	}
}

func (chatAPI) sendError(out *events, e *apiError) {
	out.sendRaw("", pythonJSON(e))
	out.done()
}

// pythonJSON writes an error as Python's json.dumps does, with spaces after colons and commas: so it is in vLLM's
// streams, while its error bodies have none (entrypoints/generate/base/serving.py, create_streaming_error_response).
func pythonJSON(e *apiError) []byte {
	return fmt.Appendf(nil, `{"error": {"message": %s, "type": %s, "param": %s, "code": %d}}`,
		encode(e.message), encode(e.kind), encode(e.param), e.status)
}

const fingerprint = "vllm-0.32.0-simulated"

// openAIUsage is a usage object. The details are those of the API and of the place, and come after these.
func openAIUsage(prompt, completion int) object {
	return obj("prompt_tokens", prompt, "total_tokens", prompt+completion, "completion_tokens", completion)
}

// bodyUsage is the usage of an answer that is no stream. created is nil where the API does not tell it.
func (c *call) bodyUsage(u usage, created any) object {
	var details any
	if c.details {
		details = obj("cached_tokens", u.cached, "created_cache_tokens", created, "multimodal_tokens", nil)
	}
	return openAIUsage(u.prompt, u.completion).with("prompt_tokens_details", details).with("completion_tokens_details", nil)
}

// streamUsage is the usage of a stream's last chunk.
func (c *call) streamUsage(u usage, details object) object {
	o := openAIUsage(u.prompt, u.completion)
	if c.details {
		o = o.with("prompt_tokens_details", details)
	}
	return o
}

// ids returns token ids where the request wants them, else null.
func (c *call) ids(tokens []uint32) any {
	if !c.ReturnTokenIDs || tokens == nil {
		return nil
	}
	return tokens
}

// optional is a finish_reason before and at the end.
func optional(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// openAIStream is what the streams of chat and text completions have in common.
type openAIStream struct {
	*call
	kind     string // "object" of the chunks
	sent     []int  // tokens, by sequence
	finished int    // sequences
}

func (c *call) openAIStream(kind string) openAIStream {
	return openAIStream{call: c, kind: kind, sent: make([]int, len(c.sequences))}
}

func (s *openAIStream) chunk(choices ...any) object {
	return obj("id", s.id, "object", s.kind, "created", s.created, "model", s.Model, "choices", append([]any{}, choices...))
}

// withUsage adds the running usage that continuous_usage_stats asks for; cached_tokens is never in it.
func (s *openAIStream) withUsage(o object, choice int) object {
	if !s.StreamOptions.IncludeUsage || !s.StreamOptions.ContinuousUsageStats {
		return o
	}
	usage := openAIUsage(s.sequences[choice].PromptTokens, s.sent[choice])
	return o.with("usage", usage.with("completion_tokens_details", nil))
}

// withFingerprint ends the last chunk with a choice, unless a chunk with the usage follows it.
func (s *openAIStream) withFingerprint(o object, finish string) object {
	if finish == "" {
		return o
	}
	if s.finished++; s.finished < len(s.sequences) || s.StreamOptions.IncludeUsage {
		return o
	}
	return o.with("system_fingerprint", fingerprint)
}

func (s *openAIStream) finishWith(out *events, details func(usage) object) {
	if s.StreamOptions.IncludeUsage {
		u := s.usage()
		out.send("", s.chunk().with("usage", s.streamUsage(u, details(u))).with("system_fingerprint", fingerprint))
	}
	out.done()
}

func (*openAIStream) open(*events) {}

type chatAnswer struct{ openAIStream }

func (chatAPI) newAnswer(c *call) answer { return &chatAnswer{c.openAIStream("chat.completion.chunk")} }

func (a *chatAnswer) begin(out *events, choice int) {
	delta := obj("role", "assistant", "content", "")
	o := a.chunk(obj("index", choice, "delta", delta, "logprobs", nil, "finish_reason", nil))
	o = a.withUsage(o, choice)
	out.send("", o.with("prompt_token_ids", a.ids(a.sequences[choice].prompt)).with("prompt_text", nil))
}

func (a *chatAnswer) token(out *events, choice int, ids []uint32, finish string) {
	a.sent[choice] += len(ids)
	o := obj("index", choice, "delta", obj("content", tokensText(ids)), "logprobs", nil, "finish_reason", optional(finish))
	if finish != "" {
		o = o.with("stop_reason", nil)
	}
	chunk := a.withUsage(a.chunk(o.with("token_ids", a.ids(ids))), choice)
	out.send("", a.withFingerprint(chunk, finish))
}

func (a *chatAnswer) end(out *events) {
	a.finishWith(out, func(u usage) object { return obj("cached_tokens", u.cached, "created_cache_tokens", u.created) })
}

func (a *chatAnswer) body() any {
	choices := []any{}
	for i, q := range a.sequences {
		message := obj("role", "assistant", "content", q.text(), "refusal", nil, "annotations", nil, "audio", nil,
			"function_call", nil, "reasoning", nil)
		choices = append(choices, obj("index", i, "message", message, "logprobs", nil, "finish_reason", q.finishReason(),
			"stop_reason", nil, "token_ids", a.ids(q.answer[:q.Generated]), "routed_experts", nil))
	}
	u := a.usage()
	return obj("id", a.id, "object", "chat.completion", "created", a.created, "model", a.Model, "choices", choices,
		"service_tier", nil, "system_fingerprint", fingerprint, "usage", a.bodyUsage(u, u.created), "prompt_logprobs", nil,
		"prompt_token_ids", a.ids(a.prompts[0]), "prompt_text", nil, "kv_transfer_params", nil, "ec_transfer_params", nil,
		"metrics", nil)
}

// completionsAPI is OpenAI's text completions.
type completionsAPI struct{ chatAPI }

func (completionsAPI) idPrefix() string { return "cmpl-" }

func (completionsAPI) parse(body []byte) (*params, *apiError) {
	var in struct {
		options
		promptLogprobs
		Prompt   json.RawMessage `json:"prompt"`
		Logprobs *int            `json:"logprobs"`
	}
	if e := decode(body, &in); e != nil {
		return nil, e
	}
	p := &params{options: in.options, maxTokens: in.MaxTokens}
	var ok bool
	if p.prompts, ok = parsePrompt(in.Prompt); !ok {
		return nil, invalidContent("body.prompt")
	}
	if len(p.prompts) == 0 {
		return nil, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")
	}
	return p, in.apply(p, in.Logprobs)
}

// parsePrompt reads the four forms of a prompt: a text, token ids, or a list of either.
func parsePrompt(raw json.RawMessage) (prompts [][]uint32, ok bool) {
	if isNull(raw) {
		return nil, true
	}
	var ids []uint32
	if text := ""; json.Unmarshal(raw, &text) == nil {
		return [][]uint32{completionTokens(text)}, true
	} else if json.Unmarshal(raw, &ids) == nil {
		return [][]uint32{ids}, true
	}
	var texts []string
	if json.Unmarshal(raw, &texts) == nil {
		for _, text := range texts {
			prompts = append(prompts, completionTokens(text))
		}
		return prompts, true
	}
	return prompts, json.Unmarshal(raw, &prompts) == nil
}

type completionsAnswer struct{ openAIStream }

func (completionsAPI) newAnswer(c *call) answer {
	return &completionsAnswer{c.openAIStream("text_completion")}
}

func (a *completionsAnswer) begin(*events, int) {}

func (a *completionsAnswer) token(out *events, choice int, ids []uint32, finish string) {
	var prompt []uint32
	if a.sent[choice] == 0 {
		prompt = a.sequences[choice].prompt
	}
	a.sent[choice] += len(ids)
	o := obj("index", choice, "text", tokensText(ids), "logprobs", nil, "finish_reason", optional(finish), "stop_reason", nil,
		"prompt_token_ids", a.ids(prompt), "token_ids", a.ids(ids))
	out.send("", a.withFingerprint(a.withUsage(a.chunk(o), choice), finish))
}

func (a *completionsAnswer) end(out *events) {
	a.finishWith(out, func(u usage) object { return obj("cached_tokens", u.cached) })
}

func (a *completionsAnswer) body() any {
	choices := []any{}
	for i, q := range a.sequences {
		choices = append(choices, obj("index", i, "text", q.text(), "logprobs", nil, "finish_reason", q.finishReason(),
			"stop_reason", nil, "token_ids", a.ids(q.answer[:q.Generated]), "prompt_logprobs", nil,
			"prompt_token_ids", a.ids(q.prompt), "routed_experts", nil))
	}
	return obj("id", a.id, "object", "text_completion", "created", a.created, "model", a.Model, "choices", choices,
		"service_tier", nil, "system_fingerprint", fingerprint, "usage", a.bodyUsage(a.usage(), nil),
		"kv_transfer_params", nil, "ec_transfer_params", nil, "metrics", nil)
}

var (
	_ api = chatAPI{}
	_ api = completionsAPI{}
)
