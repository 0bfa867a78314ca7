// Package prompt reads the JSON body of an LLM request and gives what routing needs of it: the model's name and where
// it stands, the conversation as one string of bytes, and token ids.
//
// # The rendering
//
// A conversation is rendered so that two requests share leading bytes where an engine would share prefilled KV blocks:
// the rendering of a conversation is a byte prefix of the rendering of its continuation, and of nothing else. JSON
// around it (key order, white space, how a character is escaped, sampling parameters) leaves no trace.
//
// A text completion is its decoded text and nothing else. Every other prompt is built with marks: the byte 0xFF, which
// valid UTF-8 never contains, and a tag. A raw 0xFF in a string of the body is rendered as U+FFFD, so that no text can
// forge a mark.
//
//	conversation = opening head* turn*
//	turn         = role [name "x"] role-mark guard [text] item* end-of-turn
//	item         = part text | thinking text | call name arguments text | result [text] item* end-of-result | digest sum
//
// The tags are listed with the constants in marks.go. The guard repeats the second byte that follows it. Without it the
// single byte that "hello" and "hi" share would be half of "hi"; with it, prompts whose first turns differ within two
// bytes part before the first byte that counts.
//
// What the parts of a request become:
//
//   - content that is a string and content that is an array of that one text part are the same; null or absent
//     content is an empty turn.
//   - Text parts (text, input_text, output_text, summary_text, reasoning_text, refusal, and plain strings) are text.
//     tool_use is a call, as are tool_calls (name and arguments); tool_result is a result; thinking and reasoning
//     text is marked as such. Every other part, images and audio above all, is a digest of its members, except
//     cache_control, which clients move from turn to turn.
//   - Fields that engines' chat templates do not see are left out: ids of calls, cache_control, signatures, a
//     message's refusal and audio.
//   - tools, functions, documents, chat_template, chat_template_kwargs and cache_salt are digests ahead of the first
//     turn, unless they are absent, null or empty. White space and escapes do not change a digest; key order does,
//     as templates print tools in the order given.
//   - Chat and Anthropic messages render the same conversation alike, as vLLM gives them the same tokens. Tool traffic
//     is alike only within one API: arguments are a string in one and an object in the other. Responses open with
//     their own mark: vLLM may begin them with other tokens, after which no block is shared.
//
// # Trust
//
// Bodies are hostile. Work is linear in the body's length, memory is at most a few times its size, nothing recurses on
// depth. What engines are known to refuse but a lenient one might take (control characters in strings, invalid UTF-8,
// lone surrogates, Python's NaN) is read, deterministically; the engine decides.
package prompt
