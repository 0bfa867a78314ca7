package trie

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

func TestCommonPrefix(t *testing.T) {
	a := make([]byte, 1100)
	for n := range a {
		b := bytes.Clone(a)
		b[n] = 1
		if got := commonPrefix(a, b); got != n {
			t.Fatalf("%d, want %d", got, n)
		}
		if got := commonPrefix(a[:n], b); got != n {
			t.Fatalf("%d of a text of %d", got, n)
		}
		if got := commonPrefix(a, a[:n]); got != n {
			t.Fatalf("%d of a text of %d", got, n)
		}
	}
}

// Edges are cut and joined at random; together they always hold the same text, each in an array of its own.
func TestCutAndJoin(t *testing.T) {
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 6))
		text := make([]byte, 1+random.IntN(3000))
		for i := range text {
			text[i] = byte(random.Uint32())
		}
		edges := []edge{newEdge(text)}
		for range 200 {
			i := random.IntN(len(edges))
			switch e := &edges[i]; {
			case random.IntN(2) == 0 && e.len() > 1:
				upper := e.cut(1 + random.IntN(e.len()-1))
				edges = append(edges[:i], append([]edge{upper}, edges[i:]...)...)
			case i > 0:
				e.join(edges[i-1])
				edges = append(edges[:i-1], edges[i:]...)
			}
			var got []byte
			for _, e := range edges {
				got = append(got, e.text()...)
				if room := int(e.heapBytes()) - e.len(); room > e.len()/2+64 {
					t.Fatalf("%d bytes of room for %d of text", room, e.len())
				}
			}
			if !bytes.Equal(got, text) {
				t.Fatal("the text has changed")
			}
		}
	}
}
