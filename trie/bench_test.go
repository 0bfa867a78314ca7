package trie

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
)

// prompts makes texts the way a busy route sees them: the first half is the system prompt of one of eight families of
// clients, the rest is the request's own, different from its first bytes on.
type prompts struct {
	random   *rand.PCG
	families [8][]byte
	next     int
}

func newPrompts(size int) *prompts {
	p := &prompts{random: rand.NewPCG(1, uint64(size))}
	for i := range p.families {
		for len(p.families[i]) < size {
			p.families[i] = binary.LittleEndian.AppendUint64(p.families[i], p.random.Uint64())
		}
	}
	return p
}

// make returns the next text, in a buffer that is used again, as a handler's is.
func (p *prompts) make() []byte {
	p.next++
	text := p.families[p.next%len(p.families)]
	binary.LittleEndian.PutUint64(text[len(text)/2:], p.random.Uint64())
	return text
}

// fill inserts prompts until the tree prunes, or for half a million of them.
func fill(t *Tree, p *prompts, slots int) {
	for i := 0; i < 500_000 && t.Stats().Pruned == 0; i++ {
		t.Confirm(t.Insert(i*7%slots, p.make()))
	}
}

// churn has the tree serve one request after the other.
func churn(b *testing.B, t *Tree, p *prompts, slots int) {
	out := make([]Match, t.Slots())
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		text := p.make()
		t.Match(text, out)
		t.Confirm(t.Insert(i%slots, text))
	}
	b.ReportMetric(float64(t.Stats().Prompts), "prompts")
}

// BenchmarkFull is what one request costs a tree that is full to its default limits, so that each insert prunes: matching
// all slots, recording the prompt for one of them, confirming it.
func BenchmarkFull(b *testing.B) {
	for _, size := range []int{1 << 10, 8 << 10, 64 << 10, 2 << 20} {
		for _, slots := range []int{8, 64, 512} {
			b.Run(fmt.Sprintf("%dKiB/%dslots", size>>10, slots), func(b *testing.B) {
				t := newTree(slots, Limits{})
				p := newPrompts(size)
				fill(t, p, slots)
				churn(b, t, p, slots)
			})
		}
	}
}

// BenchmarkBounded is the same where each slot is bounded to its share of the text, so that each insert shortens the oldest prompts of its slot.
func BenchmarkBounded(b *testing.B) {
	for _, size := range []int{8 << 10, 64 << 10, 2 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			const slots = 64
			t := newTree(slots, Limits{})
			for s := range slots {
				t.SetMaxText(s, DefaultMaxBytes*3/4/slots)
			}
			p := newPrompts(size)
			for i := range 2 * DefaultMaxBytes / int64(size) {
				t.Confirm(t.Insert(int(i)%slots, p.make()))
			}
			churn(b, t, p, slots)
		})
	}
}

// BenchmarkMatch is the look-up alone, in a full tree.
func BenchmarkMatch(b *testing.B) {
	for _, slots := range []int{8, 64, 512} {
		b.Run(fmt.Sprintf("8KiB/%dslots", slots), func(b *testing.B) {
			t := newTree(slots, Limits{})
			p := newPrompts(8 << 10)
			fill(t, p, slots)
			out := make([]Match, t.Slots())
			for b.Loop() {
				t.Match(p.make(), out)
			}
		})
	}
}

// BenchmarkHeap reports how many bytes of heap a byte of text takes: 100 MB of prompts of 8 KiB that share nothing.
func BenchmarkHeap(b *testing.B) {
	for b.Loop() {
		before := live()
		t := newTree(8, Limits{})
		random := rand.NewPCG(1, 3)
		text := make([]byte, 8<<10)
		var total int64
		for i := 0; total < 100e6; i++ {
			binary.LittleEndian.PutUint64(text, random.Uint64())
			t.Insert(i%8, text)
			total += int64(len(text))
		}
		b.ReportMetric(float64(live()-before)/float64(total), "heap-B/text-B")
		b.ReportMetric(float64(t.Bytes())/float64(total), "Bytes/text-B")
	}
}
