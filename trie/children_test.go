package trie

import (
	"math/rand/v2"
	"testing"
)

func TestChildren(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 5))
	var c children
	want := map[byte]uint32{}
	// Growing to every byte there is, then shrinking to none, several times.
	for _, towards := range []int{256, 0, 20, 5, 20, 0, 256, 1, 2, 0} {
		for len(want) != towards {
			first := byte(random.Uint32())
			if node := want[first]; node == 0 && len(want) < towards {
				want[first] = random.Uint32() | 1
				c.add(newChild(first, want[first]))
			} else if node != 0 && len(want) > towards {
				c.remove(newChild(first, node))
				delete(want, first)
			}
			if int(c.count) != len(want) {
				t.Fatalf("%d children, want %d", c.count, len(want))
			}
			for b := range 256 {
				if got := c.get(byte(b)); got != want[byte(b)] {
					t.Fatalf("of %d children, that of byte %d is %d, want %d", len(want), b, got, want[byte(b)])
				}
			}
			if len(want) <= longestList/2 && c.heapBytes() > longestList*childBytes {
				t.Fatalf("%d children take %d bytes", len(want), c.heapBytes())
			}
		}
	}
	if c.heapBytes() != 0 {
		t.Errorf("no children take %d bytes", c.heapBytes())
	}
}
