package trie

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestHolders(t *testing.T) {
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 4))
		var h holders
		held, ending := map[Slot]bool{}, map[Slot]bool{}
		for range 300 {
			s := random.IntN(3)*200 + random.IntN(70)
			switch {
			case !held[s]:
				h.hold(s)
				held[s] = true
			case ending[s]:
				h.unend(s)
				delete(ending, s)
			case random.IntN(2) == 0:
				h.end(s)
				ending[s] = true
			default:
				h.drop(s)
				delete(held, s)
			}
			if h.holds(s) != held[s] || h.ends(s) != ending[s] || h.empty() != (len(held) == 0) || h.endless() != (len(ending) == 0) {
				t.Fatalf("slot %d: holds %v, ends %v, empty %v, endless %v", s, h.holds(s), h.ends(s), h.empty(), h.endless())
			}
			want := slices.Sorted(maps.Keys(held))
			clone := h.clone()
			if got := slices.Collect(h.all); !slices.Equal(got, want) {
				t.Fatalf("holders %v, want %v", got, want)
			}
			if got := slices.Collect(clone.all); !slices.Equal(got, want) || !clone.endless() {
				t.Fatalf("clone's holders %v, want %v", got, want)
			}
			for first := range h.all {
				if first != want[0] {
					t.Fatalf("first holder %d, want %d", first, want[0])
				}
				break
			}
		}
	}
}

// A node that a single slot holds takes nothing beyond itself, whatever the slot's number.
func TestHoldersOfFarSlot(t *testing.T) {
	var h holders
	h.hold(5000)
	if h.heapBytes() != 0 || !h.holds(5000) || h.holds(0) || h.holds(9000) {
		t.Errorf("%d bytes", h.heapBytes())
	}
}
