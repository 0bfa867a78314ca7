package prompt

// Span is a half-open range of byte offsets into a request's body.
type Span struct{ Start, End int }

// Why tells why a body gives no prompt. The zero value means that there is one.
type Why uint8

const (
	HasPrompt    Why = iota
	NoPromptAPI      // the API has no prompt, whatever the body is
	Unparsable       // the body is not JSON
	UnknownShape     // the body is JSON but not shaped like a request of its API
	Empty            // the prompt has no byte that counts
)

// String gives a label for metrics: snake_case, and "" for [HasPrompt].
func (w Why) String() string {
	switch w {
	case HasPrompt:
		return ""
	case NoPromptAPI:
		return "no_prompt_api"
	case Unparsable:
		return "unparsable"
	case UnknownShape:
		return "unknown_shape"
	case Empty:
		return "empty"
	}
	return "unknown"
}

// MaxModelSpans is how many times a body may name its model, and its priority, and its report mode. One that does it a
// million times is there to take memory.
const MaxModelSpans = 64

// Body is what a request's body says. Its slices belong to the [Parser].
type Body struct {
	// Model is the decoded value of the top-level "model". Of several the last decides, as in Python's json, which
	// engines use. It is "" when that is absent or not a string.
	Model string
	// HasModel tells that Model comes from the body.
	HasModel bool
	// ModelSpans are the values of every top-level "model", in order, strings with their quotes. Values that are no
	// strings are among them: who replaces all of them knows which model the engine sees, whichever it takes.
	// For an unparsable body these are the ones ahead of the first error. A body with more than [MaxModelSpans] of them
	// counts as unparsable, and must not be passed on: the rest of them is not here.
	ModelSpans []Span
	// Stream tells that the last top-level "stream" is true.
	Stream bool

	// N is how many answers a prompt is to get: the last top-level "n" or the last top-level "best_of", whichever is more,
	// and at least 1; no more than 1<<31 - 1 is told. Strings of a number count, as pydantic, which engines read requests
	// with, takes them for numbers; fractions are rounded up. With more than one answer vLLM's count of cached tokens is
	// that of one of them, which may have found what another had just computed.
	N int
	// Priority is the last top-level "priority", if HasPriority tells that this is an integer, as JSON writes them, that
	// fits. vLLM takes the lowest first.
	Priority    int64
	HasPriority bool
	// PrioritySpans are the values of every top-level "priority" of any kind, as ModelSpans are those of "model"; more than
	// [MaxModelSpans] of them are treated alike, too.
	PrioritySpans []Span
	// Object is the offset behind the opening brace of a body that is an object, where a further member can be inserted, and
	// 0 for other bodies. Members tells that the object has a member, so that a comma must follow the inserted one. An
	// engine for which the last of two members decides does not see what is inserted if the body has that key too.
	Object  int
	Members bool

	// ReportModeSpans are the values of every "kv_cache_report_mode" in a top-level "vllm_xargs", or in the "extra_args" of
	// top-level "sampling_params", of any kind, as ModelSpans are those of "model". vLLM reads the first in all four APIs
	// and the second in /inference/v1/generate. With "full" it reports blocks that a request has found in the cache as if
	// they were stored once more; "incremental" is its default.
	ReportModeSpans []Span
	// PromptLogprobs tells that log probabilities of the prompt are asked for, by "prompt_logprobs" that is not null or by
	// "echo" (with "logprobs", in completions). vLLM computes such a prompt without a look into its cache.
	PromptLogprobs bool
	// Salt is the decoded "cache_salt" of an API that has a prompt, empty if that is absent or no string.
	Salt []byte
	// Media tells that the conversation has a part that is neither text nor a call or its result, such as an image. Its token
	// ids, whoever knows them, do not tell all of what is computed.
	Media bool
	// RenderOnly tells that the engine's own rendering of the body knows the token ids of its prompt, but vLLM's /tokenize
	// does not, as that has no "documents", "reasoning_effort" and "truncate_prompt_tokens".
	RenderOnly bool

	// Text is the rendering of the conversation, described at the package. It is nil when Why tells that there is none.
	Text []byte
	// Lead and Tail are how many bytes at the start and at the end of Text count neither as matched nor as length: digests
	// and the first turn's role, and the last turn's end mark. At least one byte counts.
	Lead, Tail int
	// TokenIDs are the prompt of a completion that is given as token ids; Text renders them too. They are left out of a
	// body that is RenderOnly, as the engine may cut them.
	TokenIDs []uint32
	// Why tells why Text is nil.
	Why Why
}
