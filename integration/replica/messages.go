package replica

import (
	"encoding/json"
	"fmt"
	"net/http"
)

// messagesAPI is Anthropic's messages. A conversation has the same tokens as by chat completions, so the two share the
// cache. priority is read as in the other bodies, while vLLM 0.32 knows it in these three only and ignores it here
// (entrypoints/anthropic/protocol.py).
type messagesAPI struct{ countOnly bool }

func (m messagesAPI) parse(body []byte) (*params, *apiError) {
	var in struct {
		options
		System   json.RawMessage `json:"system"`
		Messages []struct {
			Role    string          `json:"role"`
			Content json.RawMessage `json:"content"`
		} `json:"messages"`
		Tools []struct {
			Name        string          `json:"name"`
			Description string          `json:"description"`
			InputSchema json.RawMessage `json:"input_schema"`
		} `json:"tools"`
	}
	if e := decode(body, &in); e != nil {
		return nil, e
	}
	if in.Messages == nil {
		return nil, missing("body.messages")
	}
	if in.MaxTokens == nil && !m.countOnly {
		return nil, missing("body.max_tokens")
	}
	var c conversation
	var tools []function
	for _, t := range in.Tools {
		tools = append(tools, function{t.Name, t.Description, t.InputSchema})
	}
	c.addTools(tools)
	if !isNull(in.System) {
		text, err := contentText(in.System)
		if err != nil {
			return nil, invalidContent("body.system")
		}
		c.add("system", text)
	}
	for i, m := range in.Messages {
		parts, err := contentParts(m.Content)
		if err != nil {
			return nil, invalidContent(fmt.Sprintf("body.messages.%d.content", i))
		}
		c.addParts(m.Role, parts)
	}
	in.N = nil // the API has no such field
	return &params{options: in.options, maxTokens: in.MaxTokens, prompts: [][]uint32{promptTokens(c)}}, nil
}

// addParts turns Anthropic's content blocks into what they are by chat completions: tool results are messages of their
// own, before the rest of the message they came in.
func (c *conversation) addParts(role string, parts []part) {
	text, rest := "", len(parts) == 0
	var calls []calledFunction
	for _, p := range parts {
		switch p.Type {
		case "tool_result":
			result, err := contentText(p.Content)
			if err != nil {
				result = render(p.Content)
			}
			c.add("tool", result)
			continue
		case "tool_use":
			calls = append(calls, calledFunction{p.Name, render(p.Input)})
		default:
			text += p.text()
		}
		rest = true
	}
	if rest {
		c.addTurn(role, text, calls)
	}
}

func (messagesAPI) idPrefix() string { return "chatcmpl-" }

func (messagesAPI) writeError(w http.ResponseWriter, e *apiError) {
	if !writeValidationError(w, e) {
		writeJSON(w, e.status, e.anthropic(e.kind))
	}
}

func (e *apiError) anthropic(kind string) object {
	return obj("type", "error", "error", obj("type", kind, "message", e.message))
}

// sendError is what becomes of an OpenAI error event in vLLM's conversion of the stream, which has no [DONE]
// (entrypoints/anthropic/serving.py, message_stream_converter).
func (messagesAPI) sendError(out *events, e *apiError) {
	out.send("error", e.anthropic("internal_error"))
}

type messagesAnswer struct{ *call }

func (messagesAPI) newAnswer(c *call) answer { return messagesAnswer{c} }

func (messagesAnswer) open(*events) {}

func (a messagesAnswer) begin(out *events, _ int) {
	out.send("message_start", obj("type", "message_start", "message", obj("id", a.id, "type", "message", "role", "assistant",
		"content", []any{}, "model", a.Model, "stop_reason", nil, "stop_sequence", nil,
		"usage", obj("input_tokens", len(a.prompts[0]), "output_tokens", 0))))
	out.send("content_block_start", obj("type", "content_block_start", "content_block", obj("type", "text", "text", ""), "index", 0))
}

func (a messagesAnswer) token(out *events, _ int, ids []uint32, _ string) {
	if len(ids) > 0 {
		out.send("content_block_delta", obj("type", "content_block_delta",
			"delta", obj("type", "text_delta", "text", tokensText(ids)), "index", 0))
	}
}

func (a messagesAnswer) end(out *events) {
	out.send("content_block_stop", obj("type", "content_block_stop", "index", 0))
	out.send("message_delta", obj("type", "message_delta", "delta", obj("stop_reason", a.stopReason(), "stop_sequence", nil),
		"usage", a.messagesUsage()))
	out.send("message_stop", obj("type", "message_stop"))
}

func (a messagesAnswer) body() any {
	o := obj("id", a.id, "type", "message", "role", "assistant",
		"content", []any{obj("type", "text", "text", a.sequences[0].text())}, "model", a.Model)
	if reason := a.stopReason(); reason != nil {
		o = o.with("stop_reason", reason)
	}
	return o.with("usage", a.messagesUsage())
}

// stopReason is Anthropic's name of the finish_reason; vLLM has none for "abort".
func (a messagesAnswer) stopReason() any {
	switch a.sequences[0].finishReason() {
	case "length":
		return "max_tokens"
	case "stop":
		return "end_turn"
	default:
		return nil
	}
}

// messagesUsage: input_tokens is only what was neither in the cache nor put there (entrypoints/anthropic/serving.py,
// _build_anthropic_usage).
func (a messagesAnswer) messagesUsage() object {
	u := a.usage()
	if !a.details {
		return obj("input_tokens", u.prompt, "output_tokens", u.completion)
	}
	return obj("input_tokens", u.prompt-u.cached-u.created, "output_tokens", u.completion,
		"cache_creation_input_tokens", u.created, "cache_read_input_tokens", u.cached)
}

var _ api = messagesAPI{}
