package trie

import "testing"

func TestSlab(t *testing.T) {
	var s slab[int]
	const many = 1000
	seen := map[uint32]bool{0: true}
	var order []uint32
	for i := range many {
		index := s.add()
		if seen[index] {
			t.Fatalf("index %d twice", index)
		}
		seen[index] = true
		order = append(order, index)
		if *s.at(index) != 0 {
			t.Fatalf("value %d is not zero", index)
		}
		*s.at(index) = i
	}
	for i, index := range order {
		if got := s.find(index); got == nil || *got != i {
			t.Fatalf("value %d changed", index)
		}
		s.remove(index)
	}
	for i, c := range s.chunks {
		if c != nil {
			t.Errorf("chunk %d was not given back", i)
		}
	}
	if s.find(order[0]) != nil || s.find(1<<30) != nil {
		t.Error("found in a chunk that is not there")
	}
	chunks := len(s.chunks)
	for range many {
		if index := s.add(); index == 0 || *s.at(index) != 0 {
			t.Fatalf("index %d, value %d", index, *s.at(index))
		}
	}
	if len(s.chunks) != chunks {
		t.Errorf("%d chunks, %d before", len(s.chunks), chunks)
	}
}
