package trie

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// model is the naive tree: a list of prompts, oldest first, from which everything is worked out anew each time.
type model struct {
	prompts []*modelPrompt
	used    map[Slot]bool
	limits  Limits
	maxText map[Slot]int64
	inserts map[Slot]int // since the slot was added
}

type modelPrompt struct {
	number    int // of the slot's inserts, the last one of this prompt
	slot      Slot
	text      string
	pending   int
	confirmed bool
	cut       bool
}

func (m *model) match(s Slot, text string) (best Match) {
	for _, p := range m.prompts {
		if p.slot == s {
			n := commonPrefixNaive(p.text, text)
			best.Bytes = max(best.Bytes, n)
			best.Continues = best.Continues || n == len(p.text) && !p.cut
		}
	}
	return best
}

// reuseDistance is what the tree's is, of the prompt that all prompts of the slot that share as much with text as any lead to.
func (m *model) reuseDistance(s Slot, text string) int64 {
	matched := m.match(s, text).Bytes
	var longest *modelPrompt
	var through []*modelPrompt
	for _, p := range m.prompts {
		if p.slot == s && commonPrefixNaive(p.text, text) >= max(matched, 1) {
			through = append(through, p)
			if longest == nil || len(p.text) > len(longest.text) {
				longest = p
			}
		}
	}
	if longest == nil || len(longest.text) > matched+matched/4 ||
		slices.ContainsFunc(through, func(p *modelPrompt) bool { return !strings.HasPrefix(longest.text, p.text) }) {
		return -1
	}
	oldest := m.prompts[slices.IndexFunc(m.prompts, func(p *modelPrompt) bool { return p.slot == s })]
	return int64(float64(m.text(s)) * float64(m.inserts[s]-longest.number) / float64(max(m.inserts[s]-oldest.number, 1)))
}

func commonPrefixNaive(a, b string) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// allNodes returns the paths of all nodes: where prompts end, and where they part.
func (m *model) allNodes() []string {
	var texts []string
	for _, p := range m.prompts {
		texts = append(texts, p.text)
	}
	slices.Sort(texts)
	nodes := slices.Clone(texts)
	for i := 1; i < len(texts); i++ {
		if n := commonPrefixNaive(texts[i-1], texts[i]); n > 0 {
			nodes = append(nodes, texts[i][:n])
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// nodes returns how many nodes a slot holds.
func (m *model) nodes(s Slot) (n int) {
	for _, path := range m.allNodes() {
		if slices.ContainsFunc(m.prompts, func(p *modelPrompt) bool {
			return p.slot == s && strings.HasPrefix(p.text, path)
		}) {
			n++
		}
	}
	return n
}

// text returns how many bytes a slot holds: its prompts' distinct prefixes.
func (m *model) text(s Slot) (n int64) {
	var texts []string
	for _, p := range m.prompts {
		if p.slot == s {
			texts = append(texts, p.text)
		}
	}
	slices.Sort(texts)
	last := ""
	for _, text := range texts {
		n += int64(len(text) - commonPrefixNaive(last, text))
		last = text
	}
	return n
}

func (m *model) overText(s Slot) bool { return m.maxText[s] > 0 && m.text(s) > m.maxText[s] }

func (m *model) count(s Slot) (n int) {
	for _, p := range m.prompts {
		if p.slot == s {
			n++
		}
	}
	return n
}

func (m *model) resident(p *modelPrompt) bool { return slices.Contains(m.prompts, p) }

func (m *model) remove(p *modelPrompt) {
	m.prompts = slices.DeleteFunc(m.prompts, func(o *modelPrompt) bool { return o == p })
}

func (m *model) insert(s Slot, text string) *modelPrompt {
	if text == "" || !m.used[s] || int64(len(text)+len(text)/8+64)+nodeBytes+promptBytes > m.limits.MaxBytes {
		return nil
	}
	p := &modelPrompt{slot: s, text: text}
	for _, o := range m.prompts {
		if o.slot == s && o.text == text {
			p = o
		}
	}
	m.remove(p)
	m.prompts = append(m.prompts, p)
	m.inserts[s]++
	p.number = m.inserts[s]
	p.cut = false
	p.pending++
	return p
}

// pruneSlots keeps the limits of the slots, the lowest slot first.
func (m *model) pruneSlots() {
	if len(m.allNodes()) <= m.limits.MaxNodes && len(m.maxText) == 0 {
		return
	}
	slots := slices.Max(append(slices.Collect(keys(m.used)), 0)) + 1
	for again := true; again; { // as a prompt that is cut may be one more node of a lower slot
		again = false
		for s := range slots {
			for m.nodes(s) > m.limits.MaxNodes || m.overText(s) {
				again = true
				m.pruneOldest(s, m.nodes(s) > m.limits.MaxNodes)
			}
		}
	}
}

// pruneOldest takes a slot's oldest prompt, or as much as is over the slot's bound off its end, where the prompt has more than that alone.
func (m *model) pruneOldest(s Slot, whole bool) {
	i := slices.IndexFunc(m.prompts, func(p *modelPrompt) bool { return p.slot == s })
	oldest, text := m.prompts[i], m.text(s)
	over := text - m.maxText[s]
	m.prompts = slices.Delete(m.prompts, i, i+1)
	if alone := text - m.text(s); !whole && over < alone {
		oldest.text, oldest.cut = oldest.text[:int64(len(oldest.text))-over], true
		m.prompts = slices.Insert(m.prompts, i, oldest)
	}
}

func keys[K comparable, V any](m map[K]V) func(func(K) bool) {
	return func(yield func(K) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// program reads operations from bytes; past the end it reads zeros.
type program struct {
	data []byte
}

func (p *program) done() bool { return len(p.data) == 0 }

func (p *program) next(n int) int {
	if len(p.data) == 0 {
		return 0
	}
	b := p.data[0]
	p.data = p.data[1:]
	return int(b) % n
}

// text makes prompts that share a lot: of two letters, often a continuation or a part of an earlier one, now and then
// long enough for every path of text.go.
func (p *program) text(earlier []string) string {
	var b strings.Builder
	if len(earlier) > 0 && p.next(3) > 0 {
		from := earlier[p.next(len(earlier))]
		if p.next(2) == 0 {
			from = from[:len(from)*p.next(5)/4]
		}
		b.WriteString(from)
	}
	for range p.next(6) {
		unit := string(rune('a' + p.next(2)))
		switch p.next(8) {
		case 0:
			b.WriteString(strings.Repeat(unit, 40))
		case 1:
			b.WriteString(strings.Repeat(unit, 700))
		default:
			b.WriteString(unit)
		}
	}
	return b.String()[:min(b.Len(), 5000)]
}

// run interprets data as operations on a tree and on the model, and compares all that can be observed after each.
func run(t *testing.T, data []byte) {
	p := &program{data: data}
	tree := New()
	m := &model{used: map[Slot]bool{}, maxText: map[Slot]int64{}, inserts: map[Slot]int{}, limits: Limits{DefaultMaxNodes, DefaultMaxBytes}}

	// The slots in use lie in one group of 64, in neighbouring groups, or far apart.
	step := []int{1, 33, 150}[p.next(3)]
	for range 5 * step {
		s := tree.Add()
		m.used[s] = true
	}
	slot := func() Slot { return p.next(5) * step }

	type insert struct {
		record Record
		prompt *modelPrompt
	}
	var open []insert
	var texts []string
	for !p.done() {
		var step string
		var pruning bool
		switch op := p.next(17); op {
		default:
			s, text := slot(), p.text(texts)
			step = fmt.Sprintf("insert %d %.60q (%d)", s, text, len(text))
			texts = append(texts, text)
			buffer := []byte(text)
			record, prompt := tree.Insert(s, buffer), m.insert(s, text)
			clear(buffer)
			open = append(open, insert{record, prompt})
			if prompt == nil && record != (Record{}) {
				t.Fatalf("%s: recorded", step)
			}
			pruning = true
		case 8, 9, 10, 11:
			if len(open) == 0 {
				continue
			}
			i := p.next(len(open))
			o := open[i]
			open = slices.Delete(open, i, i+1)
			there := o.prompt != nil && m.resident(o.prompt)
			if op < 10 {
				step = "confirm"
				tree.Confirm(o.record)
				if there {
					o.prompt.pending--
					o.prompt.confirmed = true
				}
			} else {
				step = "rollback"
				tree.Rollback(o.record)
				if there {
					o.prompt.pending--
					if o.prompt.pending == 0 && !o.prompt.confirmed {
						m.remove(o.prompt)
						pruning = true
					}
				}
			}
		case 12:
			s := slot()
			step = fmt.Sprintf("remove %d", s)
			tree.Remove(s)
			m.used[s] = false
			delete(m.maxText, s)
			delete(m.inserts, s)
			m.prompts = slices.DeleteFunc(m.prompts, func(p *modelPrompt) bool { return p.slot == s })
			pruning = true
		case 13:
			want := 0
			for m.used[want] {
				want++
			}
			step = "add"
			if s := tree.Add(); s != want {
				t.Fatalf("added slot %d, want %d", s, want)
			}
			m.used[want] = true
		case 14:
			m.limits.MaxNodes = []int{DefaultMaxNodes, 1, 2, 3, 5, 8, 13}[p.next(7)]
			step = fmt.Sprintf("limits %+v", m.limits)
			tree.SetLimits(m.limits)
			pruning = true
		case 16:
			s, most := slot(), []int64{0, -1, 1, 10, 60, 800, 3000}[p.next(7)]
			step = fmt.Sprintf("at most %d bytes in slot %d", most, s)
			tree.SetMaxText(s, most)
			if m.used[s] {
				m.maxText[s] = most
			}
			pruning = true
		case 15:
			m.limits.MaxBytes = []int64{DefaultMaxBytes, 250, 400, 1000, 2000, 6000, 12000}[p.next(7)]
			step = fmt.Sprintf("limits %+v", m.limits)
			tree.SetLimits(m.limits)
			pruning = true
		}

		if pruning {
			m.pruneSlots()
			// What text takes on the heap is not the model's to know. But what goes, goes in order, and not while there
			// is room.
			if excess := len(m.prompts) - tree.Stats().Prompts; excess > 0 {
				last := m.prompts[excess-1]
				m.prompts = m.prompts[excess:]
				room := int64(2*len(last.text)) + 1000
				for _, p := range m.prompts {
					// A merge may add room to a remaining text, up to half of it.
					if p.text[0] == last.text[0] {
						room += int64(len(p.text)/2 + 64)
					}
				}
				if tree.Bytes()+room < m.limits.MaxBytes {
					t.Fatalf("%s: pruned %q, with %d of %d bytes taken", step, last.text, tree.Bytes(), m.limits.MaxBytes)
				}
			}
		}
		if tree.Bytes() > m.limits.MaxBytes {
			t.Fatalf("%s: %d bytes, above the limit %d", step, tree.Bytes(), m.limits.MaxBytes)
		}
		for _, o := range open {
			if there := o.prompt != nil && m.resident(o.prompt); there != (tree.find(o.record) != nil) {
				t.Fatalf("%s: record is live: %v, want %v", step, !there, there)
			}
		}
		probes := []string{"", p.text(texts)}
		if len(texts) > 0 {
			probes = append(probes, texts[len(texts)-1], texts[len(texts)/2]+"a")
		}
		compare(t, step, tree, m, probes)
		check(t, tree)
	}

	for s := range tree.Slots() {
		tree.Remove(s)
	}
	if got := tree.Stats(); got.Prompts != 0 || got.Nodes != 0 || got.Bytes != 0 || len(tree.uses) != 0 || len(tree.ends) != 0 {
		t.Fatalf("left over: %+v, %d uses, %d ends", got, len(tree.uses), len(tree.ends))
	}
}

func compare(t *testing.T, step string, tree *Tree, m *model, probes []string) {
	t.Helper()
	if got, want := tree.Stats().Nodes, len(m.allNodes()); got != want {
		t.Fatalf("%s: %d nodes, want %d", step, got, want)
	}
	holding := map[Slot]bool{}
	for _, p := range m.prompts {
		holding[p.slot] = true
	}
	for s := range tree.Slots() {
		if holding[s] {
			if got, want := tree.Prompts(s), m.count(s); got != want {
				t.Fatalf("%s: slot %d has %d prompts, want %d", step, s, got, want)
			}
			if got, want := tree.Nodes(s), m.nodes(s); got != want {
				t.Fatalf("%s: slot %d has %d nodes, want %d", step, s, got, want)
			}
			if got, want := tree.Text(s), m.text(s); got != want {
				t.Fatalf("%s: slot %d holds %d bytes of text, want %d", step, s, got, want)
			}
		} else if tree.Prompts(s) != 0 || tree.Nodes(s) != 0 || tree.Text(s) != 0 {
			t.Fatalf("%s: slot %d has %d prompts, %d nodes, want none", step, s, tree.Prompts(s), tree.Nodes(s))
		}
	}
	out := make([]Match, tree.Slots())
	for _, probe := range probes {
		out[0] = Match{-1, true}
		tree.Match([]byte(probe), out)
		for s, got := range out {
			var want Match
			if holding[s] {
				want = m.match(s, probe)
			}
			if got != want {
				t.Fatalf("%s: slot %d matches %+v of %q, want %+v", step, s, got, probe, want)
			}
			distance := int64(-1)
			if holding[s] {
				distance = m.reuseDistance(s, probe)
			}
			if got := tree.ReuseDistance(s); got != distance {
				t.Fatalf("%s: slot %d has a reuse distance of %d for %q, want %d", step, s, got, probe, distance)
			}
		}
	}
}

// check verifies what the tree keeps twice: links, counts, and the bytes.
func check(t *testing.T, tree *Tree) {
	t.Helper()
	var got Stats
	children := map[uint32]int32{}
	uses := map[useKey]uint32{}
	for c, chunk := range tree.nodes.chunks {
		if chunk == nil {
			continue
		}
		for i := range chunk.items {
			index := uint32(c<<6 + i)
			if index == 0 || chunk.free&(1<<i) != 0 {
				continue
			}
			n := &chunk.items[i]
			got.Bytes += n.children.heapBytes()
			if index == tree.root {
				continue
			}
			got.Nodes++
			got.Bytes += nodeBytes + n.edge.heapBytes() + n.holders.heapBytes()
			parent := tree.nodes.at(n.parent)
			if n.edge.len() == 0 || int(parent.depth)+n.edge.len() != int(n.depth) {
				t.Fatalf("node %d: depth %d, edge of %d, parent's depth %d", index, n.depth, n.edge.len(), parent.depth)
			}
			if room := cap(n.edge.array) - n.edge.len(); room > n.edge.len()/2+64 {
				t.Fatalf("node %d: %d bytes of room for %d of text", index, room, n.edge.len())
			}
			if parent.children.get(n.edge.text()[0]) != index {
				t.Fatalf("node %d is not its parent's child", index)
			}
			if n.children.count == 1 && n.holders.endless() {
				t.Fatalf("node %d should have been merged", index)
			}
			if n.holders.empty() {
				t.Fatalf("node %d has no holders", index)
			}
			children[n.parent]++
			for s := range n.holders.all {
				uses[useKey{n.parent, uint32(s)}]++
				if n.parent != tree.root && !parent.holders.holds(s) {
					t.Fatalf("slot %d holds node %d but not its parent", s, index)
				}
			}
		}
	}
	for parent, n := range children {
		if c := &tree.nodes.at(parent).children; c.count != n {
			t.Fatalf("node %d: %d children, counted as %d", parent, n, c.count)
		}
	}
	inMap := 0
	for i, last := tree.recent.oldest, uint32(0); i != 0; last, i = i, tree.prompts.at(i).inTree.newer {
		p := tree.prompts.at(i)
		if p.inTree.older != last {
			t.Fatalf("prompt %d: older is %d, want %d", i, p.inTree.older, last)
		}
		if tree.endAt(p.node, Slot(p.slot)) != i {
			t.Fatalf("prompt %d ends at node %d, which does not know", i, p.node)
		}
		if tree.nodes.at(p.node).prompt != i {
			inMap++
		}
		uses[useKey{p.node, p.slot}]++
		got.Prompts++
		got.Bytes += promptBytes
	}
	if inMap != len(tree.ends) {
		t.Fatalf("%d ends in the map, want %d", len(tree.ends), inMap)
	}
	more := 0
	for key, n := range uses {
		if key.node == tree.root {
			continue
		}
		if tree.uses[key] != n-1 {
			t.Fatalf("%+v: %d uses, want %d", key, tree.uses[key]+1, n)
		}
		if n > 1 {
			more++
		}
	}
	if more != len(tree.uses) {
		t.Fatalf("%d entries of uses, want %d", len(tree.uses), more)
	}
	got.Pruned = tree.stats.Pruned
	if got != tree.Stats() {
		t.Fatalf("stats %+v, counted %+v", tree.Stats(), got)
	}
}

func TestTreeIsLikeTheModel(t *testing.T) {
	for seed := range 300 {
		random := rand.New(rand.NewPCG(uint64(seed), 1))
		data := make([]byte, 50+random.IntN(800))
		for i := range data {
			data[i] = byte(random.Uint32())
		}
		run(t, data)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func FuzzTree(f *testing.F) {
	for seed := range uint64(8) {
		random := rand.New(rand.NewPCG(seed, 2))
		data := make([]byte, 200)
		for i := range data {
			data[i] = byte(random.Uint32())
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		run(t, data[:min(len(data), 2000)])
	})
}
