package replica

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
)

// render returns the handler of an API's /render: what generate would prefill, as a request to a token-in server. Such
// paths are there for scale-out only.
func (s *Server) render(a api) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !s.cfg.ScaleOut {
			writeJSON(w, http.StatusForbidden, (&apiError{status: http.StatusForbidden, kind: "PermissionDeniedError",
				message: "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."}).openAI())
			return
		}
		body, e := s.readBody(w, r)
		var p *params
		if e == nil {
			p, e = s.parse(a, body)
		}
		if e != nil {
			a.writeError(w, e)
			return
		}
		id := a.idPrefix() + randomID()
		var rendered []any
		for i, prompt := range p.prompts {
			o := s.rendered(a, p, body, prompt)
			if o[0].value = id; len(p.prompts) > 1 {
				o[0].value = fmt.Sprint(id, "-", i)
			}
			rendered = append(rendered, o)
		}
		if _, ok := a.(completionsAPI); ok {
			writeJSON(w, http.StatusOK, rendered)
		} else {
			writeJSON(w, http.StatusOK, rendered[0])
		}
	}
}

// rendered is one prompt's request; its first field, the id, is still to be set.
func (s *Server) rendered(a api, p *params, body []byte, prompt []uint32) object {
	var in struct {
		Temperature *json.Number `json:"temperature"`
		Seed        *int64       `json:"seed"`
	}
	_ = json.Unmarshal(body, &in) // it has been parsed; what is nonsense here is not used by the simulation either
	zero, one := json.RawMessage("0.0"), json.RawMessage("1.0")
	temperature := 1.0
	if in.Temperature != nil {
		temperature, _ = in.Temperature.Float64()
	}
	sampling := obj("presence_penalty", zero, "frequency_penalty", zero, "repetition_penalty", one,
		"temperature", json.RawMessage(float(temperature)))
	if temperature > 0 {
		sampling = sampling.with("top_p", one).with("min_p", zero)
	}
	if in.Seed != nil {
		sampling = sampling.with("seed", *in.Seed)
	}
	maxTokens, outputKind := s.cfg.MaxModelLen-len(prompt), 2 // all at the end
	if p.maxTokens != nil {
		maxTokens = *p.maxTokens
	}
	if p.Stream {
		outputKind = 1 // piece by piece
	}
	sampling = append(sampling, obj("stop", []any{}, "stop_token_ids", []any{}, "max_tokens", maxTokens,
		"output_kind", outputKind, "skip_clone", true)...)
	if _, ok := a.(responsesAPI); ok {
		sampling = sampling.with("extra_args", obj())
	}
	sampling = append(sampling, obj("bad_words", []any{}, "skip_reading_prefix_cache", p.ignoreCached)...)
	return obj("request_id", nil, "token_ids", prompt, "token_offsets", nil, "features", nil, "content_parts", nil,
		"sampling_params", sampling, "model", cmp.Or(p.Model, s.names[0]), "reasoning_ended", nil, "reasoning_parser_kwargs", nil,
		"return_token_ids", nil, "output_mode", "tokens", "stream", p.Stream, "stream_options", nil, "cache_salt", p.CacheSalt,
		"priority", p.priority, "kv_transfer_params", nil, "ec_transfer_params", nil)
}
