package prompt

// mark is the first byte of every mark. It occurs neither in UTF-8 nor, as lone surrogates take three bytes below it,
// in any decoded string.
const mark = 0xFF

// Tags: the second byte of a mark. They are below 0x20 so that they differ from what follows the 0xFF that ends a
// scalar in a normalised value (see [Parser.value]).
const (
	tagConversation = 1 + iota // opens a conversation of chat or Anthropic messages
	tagResponses               // opens a conversation of the Responses API
	tagTokens                  // opens token ids: four big-endian bytes for each follow
	tagName                    // a turn's role ends here, the participant's name follows
	tagRole                    // role and name end here; the guard byte, then the content follows
	tagTurn                    // end of a turn
	tagPart                    // a further text part follows
	tagThinking                // reasoning text follows
	tagCall                    // a tool call: its name follows
	tagArguments               // the name ends here, the arguments follow
	tagResult                  // a tool result follows
	tagResultEnd               // end of a tool result
	tagDigest                  // a digest of digestLen bytes follows, or a normalised value not longer than that
	tagHead                    // tagHead+h is followed by the digest of head h
)

// Heads are the top-level fields that change what is prefilled ahead of the first turn.
const (
	headTools = iota
	headFunctions
	headDocuments
	headTemplate
	headTemplateArgs
	headSalt
	heads // how many there are
)

var headKeys = [heads]string{
	headTools:        "tools",
	headFunctions:    "functions",
	headDocuments:    "documents",
	headTemplate:     "chat_template",
	headTemplateArgs: "chat_template_kwargs",
	headSalt:         "cache_salt",
}

// markLen is the length of a mark, roleMarkLen that of a role's with its guard.
const (
	markLen     = 2
	roleMarkLen = markLen + 1
)

// headRoom is kept free ahead of the rendering: fields that render ahead of the conversation may follow it in the body.
const headRoom = markLen + heads*(markLen+digestLen)

func (p *Parser) mark(tag byte) { p.text = append(p.text, mark, tag) }

// roleMark ends a role. [Parser.endTurn] fills in the guard.
func (p *Parser) roleMark() { p.text = append(p.text, mark, tagRole, 0) }
