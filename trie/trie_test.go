package trie

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// newTree returns a tree with slots 0 to slots-1.
func newTree(slots int, l Limits) *Tree {
	t := New()
	t.SetLimits(l)
	for range slots {
		t.Add()
	}
	return t
}

func match(t *Tree, text string) []Match {
	out := make([]Match, t.Slots())
	t.Match([]byte(text), out)
	return out
}

func TestMatch(t *testing.T) {
	tree := newTree(3, Limits{})
	for _, p := range []struct {
		slot Slot
		text string
	}{
		{0, "You are helpful. What is Go?"},
		{0, "You are helpful. What is C?"},
		{1, "You are helpful."},
		{1, "\x00\xff\x00"},
	} {
		tree.Confirm(tree.Insert(p.slot, []byte(p.text)))
	}
	for _, c := range []struct {
		text string
		want [3]Match
	}{
		{"", [3]Match{}},
		{"Z", [3]Match{}},
		{"You", [3]Match{{3, false}, {3, false}, {}}},
		{"You are helpful.", [3]Match{{16, false}, {16, true}, {}}},
		{"You are helpful. What is C?", [3]Match{{27, true}, {16, true}, {}}},
		{"You are helpful. What is C? A language.", [3]Match{{27, true}, {16, true}, {}}},
		{"You are helpful. What is Rust?", [3]Match{{25, false}, {16, true}, {}}},
		{"\x00\xff\x00\x00", [3]Match{{}, {3, true}, {}}},
	} {
		if got := [3]Match(match(tree, c.text)); got != c.want {
			t.Errorf("%q: %v, want %v", c.text, got, c.want)
		}
	}
}

// Siblings of a burst may insert the same prompt on the same target, and their answers come in any order.
func TestClaims(t *testing.T) {
	for name, c := range map[string]struct {
		settle func(tree *Tree, a, b Record)
		stays  bool
	}{
		"none settled":              {func(tree *Tree, a, b Record) {}, true},
		"one rolled back":           {func(tree *Tree, a, b Record) { tree.Rollback(a) }, true},
		"both rolled back":          {func(tree *Tree, a, b Record) { tree.Rollback(a); tree.Rollback(b) }, false},
		"confirmed and rolled back": {func(tree *Tree, a, b Record) { tree.Confirm(b); tree.Rollback(a) }, true},
		"rolled back and confirmed": {func(tree *Tree, a, b Record) { tree.Rollback(a); tree.Confirm(b) }, true},
		"settled too often": {func(tree *Tree, a, b Record) {
			tree.Confirm(a)
			tree.Confirm(b)
			tree.Rollback(a)
			tree.Rollback(b)
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			tree := newTree(1, Limits{})
			a, b := tree.Insert(0, []byte("prompt")), tree.Insert(0, []byte("prompt"))
			c.settle(tree, a, b)
			if got := match(tree, "prompt")[0].Continues; got != c.stays {
				t.Errorf("resident: %v, want %v", got, c.stays)
			}
		})
	}
}

func TestStaleRecords(t *testing.T) {
	tree := newTree(2, Limits{})
	gone := []Record{{}, tree.Insert(0, nil), tree.Insert(7, []byte("no such slot")), tree.Insert(-1, []byte("no such slot"))}
	for _, r := range gone {
		if r != (Record{}) {
			t.Errorf("record %v of nothing", r)
		}
	}
	rolledBack := tree.Insert(0, []byte("prompt"))
	tree.Rollback(rolledBack)
	removed := tree.Insert(0, []byte("prompt"))
	tree.Remove(0)
	if s := tree.Add(); s != 0 {
		t.Fatalf("slot %d, want 0 again", s)
	}
	tree.Insert(0, []byte("prompt"))
	for _, r := range append(gone, rolledBack, removed) {
		tree.Confirm(r)
		tree.Rollback(r)
	}
	if !match(tree, "prompt")[0].Continues {
		t.Error("a stale record took the prompt of another insert")
	}
}

func TestPruning(t *testing.T) {
	type inserts []string
	for name, c := range map[string]struct {
		maxNodes int
		inserts  inserts
		resident []string
		gone     []string
		bytes    map[string]int // leading bytes held of a text
	}{
		"the oldest goes": {
			2, inserts{"x", "y", "z"}, []string{"y", "z"}, []string{"x"}, nil,
		},
		"inserting again refreshes": {
			2, inserts{"x", "y", "x", "z"}, []string{"x", "z"}, []string{"y"}, nil,
		},
		"what is shared survives": {
			3, inserts{"abc", "abd", "x"}, []string{"abd", "x"}, []string{"abc"}, map[string]int{"abc": 2},
		},
		"a prefix may go before its continuation": {
			1, inserts{"turn 1", "turn 1, turn 2"}, []string{"turn 1, turn 2"}, []string{"turn 1"}, map[string]int{"turn 1": 6},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tree := newTree(1, Limits{MaxNodes: c.maxNodes})
			for _, text := range c.inserts {
				tree.Confirm(tree.Insert(0, []byte(text)))
				match(tree, c.inserts[0]) // looking up does not refresh
			}
			for _, text := range c.resident {
				if m := match(tree, text)[0]; m != (Match{len(text), true}) {
					t.Errorf("%q: %+v, want it resident", text, m)
				}
			}
			for _, text := range c.gone {
				if match(tree, text)[0].Continues {
					t.Errorf("%q is resident", text)
				}
			}
			for text, want := range c.bytes {
				if m := match(tree, text)[0]; m.Bytes != want {
					t.Errorf("%q: %d bytes, want %d", text, m.Bytes, want)
				}
			}
		})
	}
}

// An engine evicts the last blocks of the prompt that was used the longest time ago, and so does a slot that holds too much text.
func TestTextIsPrunedFromTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		maxText   int64
		inserts   []string
		bytes     map[string]int // leading bytes held of a text
		continued []string
	}{
		"the oldest loses its end":         {9, []string{"aaaaa", "bbbbb"}, map[string]int{"aaaaa": 4, "bbbbb": 5}, []string{"bbbbb"}},
		"as much as is needed":             {9, []string{"aaaaa", "bbbbb", "cc"}, map[string]int{"aaaaa": 2, "bbbbb": 5, "cc": 2}, []string{"bbbbb", "cc"}},
		"then all of it, and the next one": {9, []string{"aaaaa", "bbbbb", "cccccc"}, map[string]int{"aaaaa": 0, "bbbbb": 3}, []string{"cccccc"}},
		"what is shared stays":             {9, []string{"abcde", "abxyz", "qq"}, map[string]int{"abcde": 4, "abxyz": 5}, []string{"abxyz", "qq"}},
		"and is nobody's end":              {9, []string{"abcde", "abxyz", "qqqq"}, map[string]int{"abcde": 2, "abxyz": 5}, []string{"abxyz", "qqqq"}},
		"inserting again refreshes":        {9, []string{"aaaaa", "bbbb", "aaaaa", "cc"}, map[string]int{"aaaaa": 5, "bbbb": 2}, []string{"aaaaa"}},
		"and makes whole":                  {9, []string{"aaaaa", "bbbbb", "aaaa", "c"}, map[string]int{"aaaaa": 4, "bbbbb": 4}, []string{"aaaa", "c"}},
		"one that is too long":             {9, []string{"bbbbb", "aaaaaaaaaaaa"}, map[string]int{"bbbbb": 0, "aaaaaaaaaaaa": 9}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			tree := newTree(2, Limits{})
			for _, text := range c.inserts { // what another slot holds is not of interest
				tree.Insert(1, []byte(text))
			}
			tree.SetMaxText(0, c.maxText)
			for _, text := range c.inserts {
				tree.Insert(0, []byte(text))
			}
			for text, want := range c.bytes {
				if got := match(tree, text)[0]; got != (Match{want, want > 0 && slices.Contains(c.continued, text[:want])}) {
					t.Errorf("%q: %+v, want %d bytes", text, got, want)
				}
			}
			for _, text := range c.continued {
				if !match(tree, text)[0].Continues {
					t.Errorf("%q is not continued", text)
				}
			}
			if tree.Text(0) != c.maxText {
				t.Errorf("%d bytes, want %d", tree.Text(0), c.maxText)
			}
			check(t, tree)
		})
	}
}

// MaxBytes is for the tree: the slot that inserts is not the one that pays.
func TestPruningAcrossSlots(t *testing.T) {
	tree := newTree(2, Limits{MaxBytes: 3 * (1000 + 300)})
	text := func(b byte) []byte { return bytes.Repeat([]byte{b}, 1000) }
	tree.Insert(0, text('a'))
	tree.Insert(1, text('b'))
	tree.Insert(1, text('c'))
	tree.Insert(1, text('d'))
	if tree.Prompts(0) != 0 || tree.Prompts(1) != 3 {
		t.Errorf("%d and %d prompts, want 0 and 3", tree.Prompts(0), tree.Prompts(1))
	}
	if got := tree.Stats().Pruned; got != 1 {
		t.Errorf("%d pruned, want 1", got)
	}
}

// Another slot's prompts can make a slot hold more nodes than it may.
func TestCrowdedByOthers(t *testing.T) {
	tree := newTree(2, Limits{MaxNodes: 2})
	tree.Insert(0, []byte("aaaa"))
	tree.Insert(0, []byte("bbbb"))
	tree.Insert(1, []byte("bb"))
	if tree.Nodes(0) != 2 || match(tree, "aaaa")[0].Bytes != 0 || match(tree, "bbbb")[0].Bytes != 4 {
		t.Errorf("slot 0 holds %d nodes, %d prompts", tree.Nodes(0), tree.Prompts(0))
	}
}

func TestTooLarge(t *testing.T) {
	tree := newTree(1, Limits{MaxBytes: 2000})
	tree.Insert(0, []byte("small"))
	if r := tree.Insert(0, make([]byte, 2000)); r != (Record{}) {
		t.Error("recorded")
	}
	if tree.Prompts(0) != 1 {
		t.Error("something was pruned for a prompt that cannot stay")
	}
	// Two slots whose prompts part three times on the way of a third that may hold only two nodes.
	for _, text := range []string{"a", "ab", "abc"} {
		tree.Insert(tree.Add(), []byte(text))
	}
	tree.SetLimits(Limits{MaxNodes: 2})
	if r := tree.Insert(0, []byte("abcd")); r != (Record{}) || tree.Prompts(0) != 0 || tree.Nodes(0) != 0 {
		t.Errorf("record %v, %d prompts", r, tree.Prompts(0))
	}
}

func TestSlots(t *testing.T) {
	tree := newTree(3, Limits{})
	for s := range 3 {
		tree.Insert(s, []byte("same"))
		tree.Insert(s, fmt.Appendf(nil, "same %d", s))
	}
	before := tree.Stats()
	tree.Remove(1)
	tree.Remove(1)
	tree.Remove(-1)
	tree.Remove(3)
	if got := match(tree, "same 1"); got[0] != (Match{5, true}) || got[1] != (Match{}) || got[2] != (Match{5, true}) {
		t.Errorf("after removing slot 1: %v", got)
	}
	if got := tree.Stats(); got.Nodes != before.Nodes-1 || got.Prompts != before.Prompts-2 || got.Bytes >= before.Bytes {
		t.Errorf("%+v, before %+v", got, before)
	}
	if s := tree.Add(); s != 1 || tree.Slots() != 3 {
		t.Errorf("slot %d of %d, want 1 of 3", s, tree.Slots())
	}
	if tree.Prompts(1) != 0 || tree.Nodes(1) != 0 || tree.Prompts(9) != 0 || tree.Nodes(9) != 0 {
		t.Error("a slot without prompts has some")
	}
}

// Prompts that differ in one place, for every byte there is, and at the edges of what is compared at a time.
func TestFanOut(t *testing.T) {
	for _, depth := range []int{0, 1, 7, 8, 9, 511, 512, 513, 1030} {
		tree := newTree(2, Limits{})
		text := make([]byte, depth+20)
		for b := range 256 {
			text[depth] = byte(b)
			tree.Insert(0, text)
			check(t, tree)
		}
		for b := range 256 {
			text[depth] = byte(b)
			if got := match(tree, string(text))[0]; got != (Match{len(text), true}) {
				t.Fatalf("depth %d, byte %d: %+v", depth, b, got)
			}
		}
		tree.SetLimits(Limits{MaxNodes: 5})
		check(t, tree)
		if got := tree.Prompts(0); got != 4 && got != 5 { // the shared start, where there is one, is a node as well
			t.Errorf("depth %d: %d prompts left", depth, got)
		}
	}
}

// Prompts that are prefixes of each other byte by byte make the deepest tree there is.
func TestDeepChain(t *testing.T) {
	const depth = 100_000
	tree := newTree(130, Limits{})
	text := bytes.Repeat([]byte{'a'}, depth)
	for n := depth; n > 0; n-- { // from the longest, as each walks over one node then
		tree.Insert(0, text[:n])
	}
	if tree.Nodes(0) != depth {
		t.Fatalf("%d nodes", tree.Nodes(0))
	}
	tree.Insert(129, text)
	if tree.Nodes(129) != depth {
		t.Fatalf("%d nodes for the second slot", tree.Nodes(129))
	}
	out := make([]Match, tree.Slots())
	tree.Match(append(text, 'b'), out)
	if out[0] != (Match{depth, true}) || out[129] != (Match{depth, true}) || out[1] != (Match{}) {
		t.Fatalf("%+v, %+v", out[0], out[129])
	}
	tree.Remove(0)
	if tree.Nodes(129) != 1 {
		t.Fatalf("%d nodes left of a chain that nothing branches off", tree.Nodes(129))
	}
	check(t, tree)
	tree.Remove(129)
	check(t, tree)
}

// Prompts that branch off a long one cut it, and their pruning makes it whole again. That must not copy the long text
// each time: what is allocated tells.
func TestCutAndJoinLong(t *testing.T) {
	const branches = 1000
	long := make([]byte, 4<<20)
	for name, c := range map[string]struct{ longFirst, deepestFirst bool }{
		"long first, pruned from the near end": {true, false},
		"long first, pruned from the far end":  {true, true},
		"long last, pruned from the near end":  {false, false},
		"long last, pruned from the far end":   {false, true},
	} {
		t.Run(name, func(t *testing.T) {
			tree := newTree(2, Limits{})
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if c.longFirst {
				tree.Insert(0, long)
			}
			var records [branches]Record
			short := make([]byte, branches)
			for i := range branches {
				short[i] = 1
				records[i] = tree.Insert(1, short[:i+1])
				short[i] = 0
			}
			if !c.longFirst {
				tree.Insert(0, long)
			}
			if c.deepestFirst {
				slices.Reverse(records[:])
			}
			for _, r := range records {
				tree.Rollback(r)
			}
			runtime.ReadMemStats(&after)
			if copied := (after.TotalAlloc - before.TotalAlloc) / uint64(len(long)); copied > 5 {
				t.Errorf("allocated %d times the long text", copied)
			}
			if got := match(tree, string(long))[0]; got != (Match{len(long), true}) || tree.Nodes(0) != 1 {
				t.Errorf("%+v with %d nodes", got, tree.Nodes(0))
			}
			check(t, tree)
		})
	}
}

// A long prompt that loses a little of its end each time is not copied each time either, whether or not another slot holds it.
func TestShortenLong(t *testing.T) {
	const inserts, size = 1000, 1 << 10
	long := make([]byte, 4<<20)
	for name, slots := range map[string]int{"alone": 1, "of two slots": 2} {
		t.Run(name, func(t *testing.T) {
			tree := newTree(slots, Limits{})
			for s := range slots {
				tree.Insert(s, long)
			}
			tree.SetMaxText(0, int64(len(long)))
			short := make([]byte, size)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for i := range inserts {
				binary.BigEndian.PutUint32(short, uint32(i+1)<<8)
				tree.Insert(0, short)
			}
			runtime.ReadMemStats(&after)
			if copied := (after.TotalAlloc - before.TotalAlloc) / uint64(len(long)); copied > 5 {
				t.Errorf("allocated %d times the long text", copied)
			}
			if held := match(tree, string(long))[0].Bytes; held < len(long)-inserts*size || held > len(long)-inserts*(size-4) {
				t.Errorf("%d of %d bytes are held after %d inserts of %d", held, len(long), inserts, size)
			}
			check(t, tree)
		})
	}
}

// live returns what is on the heap besides garbage.
func live() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestBytesFollowTheHeap(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	noise := func(n int) []byte {
		text := make([]byte, n)
		for i := range text {
			text[i] = byte(random.Uint32())
		}
		return text
	}
	long := noise(10_000)
	for name, c := range map[string]struct {
		slots, inserts int
		insert         func(tree *Tree, i int)
	}{
		"8 KiB prompts":             {8, 2000, func(tree *Tree, i int) { tree.Insert(i%8, noise(8<<10)) }},
		"8 byte prompts":            {8, 40_000, func(tree *Tree, i int) { tree.Insert(i%8, noise(8)) }},
		"3 byte prompts, one slot":  {1, 40_000, func(tree *Tree, i int) { tree.Insert(0, noise(3)) }},
		"prefixes of each other":    {1, 10_000, func(tree *Tree, i int) { tree.Insert(0, long[:10_000-i]) }},
		"512 slots share prompts":   {512, 40_000, func(tree *Tree, i int) { tree.Insert(i%512, long[:i/512+1]) }},
		"512 slots, random letters": {512, 40_000, func(tree *Tree, i int) { tree.Insert(i*131%512, noise(3)) }},
	} {
		t.Run(name, func(t *testing.T) {
			before := live()
			tree := newTree(c.slots, Limits{})
			for i := range c.inserts {
				c.insert(tree, i)
			}
			heap := live() - before
			if ratio := float64(heap) / float64(tree.Bytes()); ratio < 0.6 || ratio > 1.2 {
				t.Errorf("%d bytes on the heap, reckoned as %d: %.2f", heap, tree.Bytes(), ratio)
			} else {
				t.Logf("%d bytes on the heap, reckoned as %d: %.2f", heap, tree.Bytes(), ratio)
			}
			runtime.KeepAlive(tree)
		})
	}
}

// What is pruned has to leave the heap too, whatever was cut and joined on the way.
func TestChurnStaysBounded(t *testing.T) {
	const limit = 4 << 20
	before := live()
	tree := newTree(200, Limits{MaxBytes: limit})
	random := rand.New(rand.NewPCG(1, 2))
	texts := make([][]byte, 64)
	for i := range 30_000 {
		var text []byte
		if from := texts[random.IntN(len(texts))]; len(from) > 0 && random.IntN(4) > 0 {
			text = append(text, from[:random.IntN(len(from))+1]...)
		}
		for range 1 << random.IntN(12) { // many short additions, some of 2 KiB
			text = append(text, byte(random.Uint32()))
		}
		text = text[:min(len(text), 40<<10)]
		texts[random.IntN(len(texts))] = text
		s := random.IntN(200)
		switch r := tree.Insert(s, text); random.IntN(4) {
		case 0:
			tree.Rollback(r)
		case 1:
			tree.Confirm(r)
		}
		if random.IntN(2000) == 0 {
			tree.Remove(s)
			tree.Add()
		}
		if i%5000 == 4999 {
			if heap := live() - before; heap > 2*limit || tree.Bytes() > limit {
				t.Errorf("%d bytes on the heap, reckoned as %d, after %d inserts", heap, tree.Bytes(), i+1)
			} else {
				t.Logf("%d bytes on the heap, reckoned as %d, %+v", heap, tree.Bytes(), tree.Stats())
			}
		}
	}
	check(t, tree)
	for s := range tree.Slots() {
		tree.Remove(s)
	}
	texts = nil
	if heap := live() - before; heap > limit/4 || tree.Bytes() != 0 {
		t.Errorf("empty, and %d bytes on the heap, reckoned as %d", heap, tree.Bytes())
	}
	runtime.KeepAlive(tree)
}

func TestReuseDistance(t *testing.T) {
	tree := New()
	a, b := tree.Add(), tree.Add()
	out := make([]Match, tree.Slots())
	text := func(first byte, n int) string { return string(first) + strings.Repeat(".", n-1) }
	want := func(when string, of string, s Slot, distance int64) {
		t.Helper()
		tree.Match([]byte(of), out)
		if got := tree.ReuseDistance(s); got != distance {
			t.Errorf("%s: %d, want %d", when, got, distance)
		}
	}
	want("of nothing", text('a', 100), a, -1)
	for _, first := range []byte("abcd") {
		tree.Insert(a, []byte(text(first, 100)))
	}
	want("the oldest of four", text('a', 200), a, 400)
	want("the same prompt", text('c', 100), a, 400/3)
	want("the latest", text('d', 101), a, 0)
	want("a slot that holds nothing", text('d', 101), b, -1)
	want("a slot that is not in use", text('d', 101), 17, -1)
	want("a short part of a prompt", text('a', 79), a, -1)
	want("most of a prompt", text('a', 80), a, 400)

	tree.Insert(a, []byte(text('a', 120)))
	want("the last turn", text('a', 150), a, 0)
	want("an earlier turn of it", text('a', 100)+"x", a, 0)
	tree.Insert(a, []byte(text('b', 100)+"x"))
	tree.Insert(a, []byte(text('b', 100)+"y"))
	want("one of two", text('b', 100), a, -1)
	want("that of two", text('b', 100)+"x", a, 422/6)
	tree.Insert(b, []byte(text('c', 100)+"z"))
	want("what another slot goes on with", text('c', 101), a, 422*4/6)
	for range 100 {
		tree.Insert(a, []byte(text('d', 100)))
	}
	want("no more than all", text('c', 101), a, 422*104/106)
}

// A prompt that thousands of others go on from, or a chain of thousands of prompts, is not looked through.
func TestReuseDistanceIsBounded(t *testing.T) {
	tree := New()
	s := tree.Add()
	out := make([]Match, tree.Slots())
	long := strings.Repeat("long", 1000)
	for i := range 250 {
		tree.Insert(s, []byte(long+string(rune('a'))+strings.Repeat("b", i)))
		tree.Insert(s, append([]byte("wide"+long), byte(i)))
	}
	for _, start := range []string{long, "wide" + long} {
		tree.Match([]byte(start), out)
		if got := tree.ReuseDistance(s); got != -1 {
			t.Errorf("%d", got)
		}
	}
}
