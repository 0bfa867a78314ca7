package replica

import "strings"

// The tokeniser: tokens of four ASCII bytes, or of up to three bytes where others are among them. It is prefix-stable,
// in that appending to a text changes at most its last token, and needs no vocabulary, because an id holds its bytes:
//
//	bit 30 clear: bits 28–29 are the length minus 1, bits 0–27 up to four ASCII bytes
//	bit 30 set:   bits 24–25 are the length minus 1, bits 0–23 up to three bytes; length 4 marks special tokens
//
// Special tokens frame the messages, so that an answer that comes back in the next turn's conversation has the tokens
// that it had when it was generated.
const (
	tokenBOS   = specialToken + iota // where a text completion or a conversation begins
	tokenStart                       // <|start|>role<|sep|>text<|end|>
	tokenSep
	tokenEnd

	specialToken = 1<<30 | 3<<24
	bytesToken   = 1 << 30
	tokenBytes   = 4 // the most bytes of a token, and those of every generated token
)

var specialTexts = [...]string{"<|bos|>", "<|start|>", "<|sep|>", "<|end|>"}

// appendTokens appends the tokens of text.
func appendTokens(tokens []uint32, text string) []uint32 {
	for len(text) > 0 {
		n := min(tokenBytes, len(text))
		id, width := uint32(n-1)<<28, 7
		if !isASCII(text[:n]) {
			n = min(3, len(text))
			id, width = bytesToken|uint32(n-1)<<24, 8
		}
		for i := range n {
			id |= uint32(text[i]) << (i * width)
		}
		tokens = append(tokens, id)
		text = text[n:]
	}
	return tokens
}

// tokenText returns the text of a token; ids that the tokeniser does not produce have none that means anything.
func tokenText(id uint32) string {
	n, width, mask := id>>28&3+1, 7, uint32(0x7f)
	switch {
	case id >= specialToken && id < specialToken+uint32(len(specialTexts)):
		return specialTexts[id-specialToken]
	case id >= specialToken:
		return "\ufffd"
	case id >= bytesToken:
		n, width, mask = id>>24&3+1, 8, 0xff
	}
	var b [tokenBytes]byte
	for i := range n {
		b[i] = byte(id >> (int(i) * width) & mask)
	}
	return string(b[:n])
}

func tokensText(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteString(tokenText(t))
	}
	return strings.ToValidUTF8(b.String(), "\ufffd")
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}

// promptTokens is the chat template: what is prefilled for a conversation.
func promptTokens(c conversation) []uint32 {
	size := 0
	for _, m := range c.messages {
		size += len(m.role)/tokenBytes + len(m.text)/tokenBytes + 6
	}
	tokens := make([]uint32, 0, size)
	tokens = append(tokens, tokenBOS)
	if c.doubleBOS {
		tokens = append(tokens, tokenBOS)
	}
	for _, m := range c.messages {
		tokens = append(tokens, tokenStart)
		tokens = appendTokens(tokens, m.role)
		tokens = append(tokens, tokenSep)
		tokens = appendTokens(tokens, m.text)
		tokens = append(tokens, tokenEnd)
	}
	if !c.noGenerationPrompt {
		tokens = append(tokens, tokenStart)
		tokens = appendTokens(tokens, "assistant")
		tokens = append(tokens, tokenSep)
	}
	return tokens
}

// completionTokens are the tokens of a text prompt: a begin token and the text, as vLLM does it for text completions.
func completionTokens(text string) []uint32 {
	return appendTokens([]uint32{tokenBOS}, text)
}

var words = strings.Fields("the replica keeps a block of each prefix in its cache so that the next request finds what " +
	"it needs and only new tokens are computed while every other one waits for its turn in the queue")

// answerTokens makes up so many tokens of text. The same seed gives the same text, and a shorter answer is the
// beginning of a longer one.
func answerTokens(seed uint64, n int) []uint32 {
	text := make([]byte, 0, n*tokenBytes+16)
	for len(text) < n*tokenBytes {
		seed = mix(seed)
		text = append(text, words[seed%uint64(len(words))]...)
		text = append(text, ' ')
	}
	return appendTokens(make([]uint32, 0, n), string(text[:n*tokenBytes]))
}
