package replica

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Scheduling is the order in which waiting requests are taken.
type Scheduling string

// The orders that vLLM's --scheduling-policy has.
const (
	// FIFO is first come first served; priorities are accepted and ignored.
	FIFO Scheduling = "fifo"
	// ByPriority is lowest [Job.Priority] first, and first come first served among equals.
	ByPriority Scheduling = "priority"
)

// before returns what says which of two waiting jobs is taken first.
func (s Scheduling) before() func(a, b *Job) bool {
	if s == ByPriority {
		return func(a, b *Job) bool {
			return a.Priority < b.Priority || a.Priority == b.Priority && a.order < b.order
		}
	}
	return func(a, b *Job) bool { return a.order < b.order }
}

// readPriority reads a body's priority. It is not part of parsing because some paths share the parsers but not the
// field (tokenize, count_tokens): there a router may send anything.
func (p *params) readPriority() *apiError {
	if len(p.Priority) == 0 {
		return nil
	}
	n, kind, complaint := parsePriority(p.Priority)
	if kind != "" {
		return invalid("body.priority", fmt.Sprintf("{'type': '%s', 'loc': 'body.priority', 'msg': '%s'}", kind, complaint))
	}
	p.priority = n
	return nil
}

// parsePriority converts a JSON value as Pydantic's int does, which is what stands behind vLLM's field: whole numbers
// in any notation, booleans and numbers in a string pass. kind, where not "", is Pydantic's name for what is wrong.
func parsePriority(raw json.RawMessage) (n int64, kind, complaint string) {
	text := string(bytes.TrimSpace(raw))
	quoted := false
	switch text[0] {
	case 't':
		return 1, "", ""
	case 'f':
		return 0, "", ""
	case 'n', '[', '{':
		return 0, "int_type", "Input should be a valid integer"
	case '"':
		quoted = true
		_ = json.Unmarshal(raw, &text) // succeeds: it is part of what has been parsed
		text = strings.TrimSpace(text)
	}
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err == nil:
		return n, "", ""
	case errors.Is(err, strconv.ErrRange) && strings.HasPrefix(text, "-"):
		return 0, "greater_than_equal", fmt.Sprint("Input should be greater than or equal to ", math.MinInt64)
	case errors.Is(err, strconv.ErrRange):
		return 0, "less_than_equal", fmt.Sprint("Input should be less than or equal to ", math.MaxInt64)
	case quoted:
		return 0, "int_parsing", "Input should be a valid integer, unable to parse string as an integer"
	}
	f, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil:
		return 0, "finite_number", "Input should be a finite number"
	case f != math.Trunc(f):
		return 0, "int_from_float", "Input should be a valid integer, got a number with a fractional part"
	case f < math.MinInt64 || f >= -math.MinInt64:
		return 0, "int_parsing_size", "Unable to parse input string as an integer, exceeded maximum size"
	}
	return int64(f), "", ""
}

// priorityRefused is what versions of vLLM before its V1 engine answer when the engine does not run with priority
// scheduling (engine/llm_engine.py, add_request).
func priorityRefused(priority int64) *apiError {
	return &apiError{status: 400, kind: "BadRequestError",
		message: fmt.Sprintf("Got priority %d but Priority scheduling is not enabled.", priority)}
}
