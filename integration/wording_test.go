package integration

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// wording makes texts of one manner. How texts differ decides where a byte tree branches, so cases about many texts are played in several manners.
type wording struct {
	name string
	text func(rng *rand.Rand, i, length int) string
}

// wordings are ways in which the i-th of many texts is distinct from the others.
var wordings = []wording{
	{"numbers", func(_ *rand.Rand, i, length int) string {
		var b strings.Builder
		for n := i; b.Len() < length; n += 1000 {
			fmt.Fprintf(&b, "%d ", n)
		}
		return b.String()[:length]
	}},
	{"a shared beginning", func(_ *rand.Rand, i, length int) string {
		const beginning = "Question "
		var b strings.Builder
		fmt.Fprintf(&b, "%s%d: ", beginning, i)
		for b.Len() < length {
			fmt.Fprintf(&b, "what about %d? ", i)
		}
		return b.String()[:length]
	}},
	{"random words", func(rng *rand.Rand, _, length int) string {
		words := strings.Fields("why does the cache miss when a replica restarts and how long would it take to fill again with what was there before " +
			"please explain tell me show write summarise translate compare list count find a an of in on for with about")
		var b strings.Builder
		for b.Len() < length {
			b.WriteString(words[rng.IntN(len(words))])
			b.WriteByte(' ')
		}
		return b.String()[:length]
	}},
	{"random letters", func(rng *rand.Rand, _, length int) string {
		b := make([]byte, length)
		for i := range b {
			b[i] = byte('a' + rng.IntN(26))
		}
		return string(b)
	}},
}

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 7)) }

// prose is text that shares nothing with other prose but by chance.
func prose(rng *rand.Rand, length int) string { return wordings[3].text(rng, 0, length) }
