package prompt

import "strings"

// API is one of the HTTP APIs that LLM engines serve.
type API uint8

const (
	NoAPI       API = iota // none that is known
	Chat                   // …/v1/chat/completions (OpenAI)
	Completions            // …/v1/completions (OpenAI)
	Messages               // …/v1/messages (Anthropic)
	Responses              // …/v1/responses (OpenAI)
	Other                  // known, but what it sends is no prompt whose prefix an engine caches
)

// otherPaths are the suffixes of [Other]: what vLLM serves beside the four, and what OpenAI's API has that other
// engines serve.
var otherPaths = [...]string{
	"/v1/embeddings", "/v2/embed", "/rerank", "/score", "/pooling", "/classify",
	"/tokenize", "/detokenize", "/render", "/v1/messages/count_tokens",
	"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech", "/v1/moderations",
	"/v1/images/generations", "/v1/images/edits", "/inference/v1/generate",
}

// APIOf tells the API from a request's path. Whatever stands ahead of the API's own path is a prefix under which it is
// mounted; one trailing slash is ignored.
func APIOf(path string) API {
	path = strings.TrimSuffix(path, "/")
	switch {
	case strings.HasSuffix(path, "/v1/chat/completions"):
		return Chat
	case strings.HasSuffix(path, "/v1/completions"):
		return Completions
	case strings.HasSuffix(path, "/v1/messages"):
		return Messages
	case strings.HasSuffix(path, "/v1/responses"):
		return Responses
	}
	for _, suffix := range otherPaths {
		if strings.HasSuffix(path, suffix) {
			return Other
		}
	}
	return NoAPI
}
