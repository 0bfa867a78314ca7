package prompt

import "testing"

func TestAPIOf(t *testing.T) {
	for path, want := range map[string]API{
		"/v1/chat/completions":              Chat,
		"/v1/chat/completions/":             Chat,
		"/openai/eu/v1/chat/completions":    Chat,
		"/v1/completions":                   Completions,
		"/v1/messages":                      Messages,
		"/anthropic/v1/messages":            Messages,
		"/v1/responses":                     Responses,
		"/v1/embeddings":                    Other,
		"/v1/rerank":                        Other,
		"/rerank":                           Other,
		"/v2/rerank":                        Other,
		"/v1/score":                         Other,
		"/v1/messages/count_tokens":         Other,
		"/v1/chat/completions/render":       Other,
		"/tokenize":                         Other,
		"/detokenize":                       Other,
		"/v1/audio/transcriptions":          Other,
		"/v1/models":                        NoAPI,
		"/v1/responses/resp_1/cancel":       NoAPI,
		"/v1/chat/completions//":            NoAPI,
		"/V1/chat/completions":              NoAPI,
		"/xv1/chat/completions":             NoAPI,
		"/v1/chat/completions/../../secret": NoAPI,
		"":                                  NoAPI,
		"/":                                 NoAPI,
	} {
		if got := APIOf(path); got != want {
			t.Errorf("APIOf(%q) = %d, want %d", path, got, want)
		}
	}
}

func TestAPIOfDoesNotAllocate(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() { APIOf("/some/prefix/v1/chat/completions/") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
