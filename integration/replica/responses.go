package replica

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// responsesAPI is OpenAI's responses. Its prompts begin with two begin tokens, as on vLLM with a template that has one:
// so it shares no block with chat completions.
type responsesAPI struct{}

type responsesBody struct {
	options
	Instructions *string         `json:"instructions"`
	Input        json.RawMessage `json:"input"`
	Tools        []function      `json:"tools"`
}

// responsesItem is an item of the input, with the fields of the kinds that are text.
type responsesItem struct {
	Type      string          `json:"type"`
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	Name      string          `json:"name"`      // function_call
	Arguments string          `json:"arguments"` // function_call
	Output    json.RawMessage `json:"output"`    // function_call_output
}

func (responsesAPI) parse(body []byte) (*params, *apiError) {
	var in responsesBody
	if e := decode(body, &in); e != nil {
		return nil, e
	}
	if isNull(in.Input) {
		return nil, missing("body.input")
	}
	c := conversation{doubleBOS: true}
	c.addTools(in.Tools)
	if in.Instructions != nil {
		c.add("system", *in.Instructions)
	}
	var items []json.RawMessage
	if text := ""; json.Unmarshal(in.Input, &text) == nil {
		c.add("user", text)
	} else if json.Unmarshal(in.Input, &items) != nil {
		return nil, invalidContent("body.input")
	}
	for i, raw := range items {
		if !c.addItem(raw) {
			return nil, invalidContent(fmt.Sprintf("body.input.%d", i))
		}
	}
	in.N = nil // the API has no such field
	return &params{options: in.options, maxTokens: in.MaxOutputTokens, prompts: [][]uint32{promptTokens(c)}, instructions: in.Instructions}, nil
}

func (c *conversation) addItem(raw json.RawMessage) bool {
	var item responsesItem
	if json.Unmarshal(raw, &item) != nil {
		return false
	}
	switch item.Type {
	case "function_call":
		c.addTurn("assistant", "", []calledFunction{{item.Name, item.Arguments}})
	case "function_call_output":
		text, err := contentText(item.Output)
		if err != nil {
			return false
		}
		c.add("tool", text)
	case "", "message":
		text, err := contentText(item.Content)
		if err != nil {
			return false
		}
		c.add(item.Role, text)
	default:
		c.addRaw(item.Type, raw)
	}
	return true
}

func (responsesAPI) idPrefix() string { return "resp_" }

func (responsesAPI) writeError(w http.ResponseWriter, e *apiError) { chatAPI{}.writeError(w, e) }

// sendError breaks the stream off: vLLM 0.32 turns only errors of generation into an event, not a full queue
// (entrypoints/openai/responses/serving.py, responses_stream_generator).
func (responsesAPI) sendError(out *events, _ *apiError) {
	out.flush()
	panic(http.ErrAbortHandler)
}

type responsesAnswer struct {
	*call
	itemID string
	number int // of the next event
}

func (responsesAPI) newAnswer(c *call) answer {
	return &responsesAnswer{call: c, itemID: "msg_" + randomID()}
}

// send numbers an event. The keys of these events are in alphabetical order.
func (a *responsesAnswer) send(out *events, name string, o object) {
	o = o.with("sequence_number", a.number).with("type", name)
	slices.SortFunc(o, func(x, y field) int { return strings.Compare(x.key, y.key) })
	out.send(name, o)
	a.number++
}

func (a *responsesAnswer) open(out *events) {
	a.send(out, "response.created", obj("response", a.response("in_progress", nil, []any{}, nil)))
	a.send(out, "response.in_progress", obj("response", a.response("in_progress", nil, []any{}, nil)))
}

func (a *responsesAnswer) begin(out *events, _ int) {
	item := obj("id", a.itemID, "content", []any{}, "role", "assistant", "status", "in_progress", "type", "message", "phase", nil)
	a.send(out, "response.output_item.added", obj("item", item, "output_index", 0))
	part := obj("annotations", []any{}, "text", "", "type", "output_text", "logprobs", []any{})
	a.send(out, "response.content_part.added", obj("content_index", 0, "item_id", a.itemID, "output_index", 0, "part", part))
}

func (a *responsesAnswer) token(out *events, _ int, ids []uint32, _ string) {
	if len(ids) > 0 {
		a.send(out, "response.output_text.delta", obj("content_index", 0, "delta", tokensText(ids), "item_id", a.itemID,
			"logprobs", []any{}, "output_index", 0))
	}
}

func (a *responsesAnswer) end(out *events) {
	at := func() object { return obj("content_index", 0, "item_id", a.itemID, "output_index", 0) }
	a.send(out, "response.output_text.done", at().with("logprobs", []any{}).with("text", a.sequences[0].text()))
	a.send(out, "response.content_part.done", at().with("part", a.part()))
	a.send(out, "response.output_item.done", obj("item", a.item(), "output_index", 0))
	a.send(out, "response.completed", obj("response", a.body()))
}

func (a *responsesAnswer) body() any {
	status, incomplete := "completed", any(nil)
	switch a.sequences[0].finishReason() {
	case "length":
		status, incomplete = "incomplete", obj("reason", "max_output_tokens")
	case "abort":
		status = "cancelled"
	}
	u := a.usage()
	return a.response(status, incomplete, []any{a.item()}, obj(
		"input_tokens", u.prompt,
		"input_tokens_details", obj("cached_tokens", u.cached, "cache_write_tokens", u.created,
			"input_tokens_per_turn", []any{}, "cached_tokens_per_turn", []any{}),
		"output_tokens", u.completion,
		"output_tokens_details", obj("reasoning_tokens", 0, "tool_output_tokens", 0,
			"output_tokens_per_turn", []any{}, "tool_output_tokens_per_turn", []any{}),
		"total_tokens", u.prompt+u.completion))
}

func (a *responsesAnswer) part() object {
	return obj("annotations", []any{}, "text", a.sequences[0].text(), "type", "output_text", "logprobs", nil)
}

func (a *responsesAnswer) item() object {
	return obj("id", a.itemID, "content", []any{a.part()}, "role", "assistant", "status", "completed", "type", "message", "phase", nil)
}

func (a *responsesAnswer) response(status string, incomplete any, output []any, usage any) object {
	return obj("id", a.id, "created_at", a.created, "incomplete_details", incomplete, "instructions", a.instructions,
		"metadata", nil, "model", a.Model, "object", "response", "output", output, "parallel_tool_calls", true,
		"temperature", json.RawMessage("1.0"), "tool_choice", "none", "tools", []any{}, "top_p", json.RawMessage("1.0"),
		"background", false, "max_output_tokens", a.sequences[0].OutputTokens, "max_tool_calls", nil,
		"previous_response_id", nil, "prompt", nil, "reasoning", nil, "service_tier", "auto", "status", status, "text", nil,
		"top_logprobs", nil, "truncation", "disabled", "usage", usage, "user", nil,
		"presence_penalty", json.RawMessage("0.0"), "frequency_penalty", json.RawMessage("0.0"),
		"kv_transfer_params", nil, "ec_transfer_params", nil, "input_messages", nil, "output_messages", nil)
}

var _ api = responsesAPI{}
