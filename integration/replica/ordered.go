package replica

import (
	"bytes"
	"encoding/json"
)

// object is a JSON object that keeps the order of its keys, so that answers read as vLLM's do: a router may meet the
// usage before a long list of token ids, not after it.
type object []field

type field struct {
	key   string
	value any
}

// obj makes an object of keys and values in turn.
func obj(pairs ...any) object {
	o := make(object, 0, len(pairs)/2+2)
	for i := 0; i < len(pairs); i += 2 {
		o = append(o, field{pairs[i].(string), pairs[i+1]})
	}
	return o
}

// with appends a field.
func (o object) with(key string, value any) object { return append(o, field{key, value}) }

// MarshalJSON implements [json.Marshaler].
func (o object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, f := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		b.Write(encode(f.key))
		b.WriteByte(':')
		b.Write(encode(f.value))
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// encode writes JSON as vLLM does: compact, and without Go's escapes for HTML.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // a programming error: all our types can be encoded
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

var _ json.Marshaler = object(nil)
