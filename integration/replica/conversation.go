package replica

import (
	"bytes"
	"encoding/json"
	"strings"
)

// conversation is what the chat template makes a prompt of, whichever API it came by.
type conversation struct {
	messages           []message
	doubleBOS          bool // the Responses API's: see [responsesAPI]
	noGenerationPrompt bool
}

type message struct{ role, text string }

// add appends a message.
func (c *conversation) add(role, text string) {
	c.messages = append(c.messages, message{role, text})
}

// function is a tool, in the order in which every API's tools are rendered.
type function struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	Parameters  json.RawMessage `json:"parameters,omitempty"`
}

// addTools puts the tools in front, where templates have them.
func (c *conversation) addTools(tools []function) {
	if len(tools) > 0 {
		c.add("tools", render(tools))
	}
}

// addTurn appends a message with the tool calls that it makes.
func (c *conversation) addTurn(role, text string, calls []calledFunction) {
	if len(calls) > 0 {
		text += render(calls)
	}
	c.add(role, text)
}

// render gives tools or tool calls their place in the prompt: compact JSON.
func render(v any) string {
	text, err := json.Marshal(v)
	if err != nil { // the only parts that can fail are raw JSON that has been parsed already
		return ""
	}
	return string(text)
}

// addRaw appends a message for a field that changes the prompt in a way that only the real template knows.
func (c *conversation) addRaw(role string, raw json.RawMessage) {
	if !isNull(raw) {
		c.add(role, render(raw))
	}
}

func isNull(raw json.RawMessage) bool {
	return len(raw) == 0 || bytes.Equal(raw, []byte("null"))
}

// part is a piece of content, with the fields of all APIs.
type part struct {
	Type    string          `json:"type"`
	Text    *string         `json:"text"`
	Name    string          `json:"name"`    // Anthropic's tool_use
	Input   json.RawMessage `json:"input"`   // Anthropic's tool_use
	Content json.RawMessage `json:"content"` // Anthropic's tool_result

	raw json.RawMessage
}

// contentParts returns the parts of a content field: null, a string, or a list of parts.
func contentParts(content json.RawMessage) ([]part, error) {
	if isNull(content) {
		return nil, nil
	}
	if content[0] == '"' {
		var text string
		err := json.Unmarshal(content, &text)
		return []part{{Type: "text", Text: &text}}, err
	}
	var raws []json.RawMessage
	if err := json.Unmarshal(content, &raws); err != nil {
		return nil, err
	}
	parts := make([]part, 0, len(raws))
	for _, raw := range raws {
		p := part{raw: raw}
		if err := json.Unmarshal(raw, &p); err != nil {
			return nil, err
		}
		parts = append(parts, p)
	}
	return parts, nil
}

// text returns a part's text; what has none, such as an image, stands for itself as JSON.
func (p part) text() string {
	if p.Text != nil {
		return *p.Text
	}
	return render(p.raw)
}

// contentText joins a content field's parts without anything between, as vLLM does for text.
func contentText(content json.RawMessage) (string, error) {
	parts, err := contentParts(content)
	var b strings.Builder
	for _, p := range parts {
		b.WriteString(p.text())
	}
	return b.String(), err
}
