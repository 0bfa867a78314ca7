package selection_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/rolter-ai/caddy-rolter/selection"
	"github.com/rolter-ai/caddy-rolter/trie"
)

// BenchmarkPick is a whole decision of cache_aware: match of all targets, pick, reservation, record and its confirmation, with a record that is
// at its memory limit, so that every pick prunes too. Half of each prompt is one of 8 system prompts, half is unique.
func BenchmarkPick(b *testing.B) {
	for _, size := range []int{1 << 10, 8 << 10, 64 << 10} {
		for _, targets := range []int{8, 64, 512} {
			b.Run(fmt.Sprintf("prompt=%dKiB/targets=%d", size>>10, targets), func(b *testing.B) {
				rng := rand.New(rand.NewPCG(1, 2))
				random := func(n int) []byte {
					p := make([]byte, n)
					for i := range p {
						p[i] = byte('a' + rng.IntN(26))
					}
					return p
				}
				tree := trie.New()
				tree.SetLimits(trie.Limits{MaxBytes: 64 << 20})
				loads, prefixes := selection.NewLoads(nil), selection.NewPrefixes(tree)
				strategy := &selection.CacheAware{
					Loads: loads, Prefixes: prefixes,
					Threshold: selection.DefaultThreshold, OverloadMargin: selection.DefaultOverloadMargin, OverloadRatio: selection.DefaultOverloadRatio,
				}
				var candidates []selection.Candidate
				for i := range targets {
					key := fmt.Sprint("replica-", i)
					candidates = append(candidates, selection.Candidate{Load: loads.Acquire(key), Member: prefixes.Join(key), Weight: 1})
				}
				systems := make([][]byte, 8)
				for i := range systems {
					systems[i] = random(size / 2)
				}
				unique := random(1 << 22)
				req := &selection.Request{Text: make([]byte, size)}
				lease := new(selection.Lease)
				n := 0
				pick := func() {
					copy(req.Text, systems[n%8])
					at := (n * 7919) % (len(unique) - size)
					copy(req.Text[size/2:], fmt.Sprint(n))
					copy(req.Text[size/2+12:], unique[at:])
					n++
					if _, ok := strategy.Pick(req, candidates, lease); !ok {
						b.Fatal("nothing was picked")
					}
					lease.Answered(true)
					lease.Release()
				}
				for range (64 << 20) / (size / 2) {
					pick()
				}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				b.ResetTimer()
				for range b.N {
					pick()
				}
			})
		}
	}
}

// BenchmarkContended is a pick of an 8 KiB prompt, half of which is one of 8 system prompts, by goroutines that hold their replica for no time.
func BenchmarkContended(b *testing.B) {
	for _, name := range []string{"cache_aware", "least_prefill"} {
		for _, targets := range []int{8, 64, 512} {
			for _, goroutines := range []int{1, 2, 8} {
				b.Run(fmt.Sprintf("%s/targets=%d/goroutines=%d", name, targets, goroutines), func(b *testing.B) {
					tree := trie.New()
					tree.SetLimits(trie.Limits{MaxBytes: 64 << 20})
					loads, prefixes := selection.NewLoads(nil), selection.NewPrefixes(tree)
					var strategy selection.Strategy = &selection.CacheAware{Loads: loads, Prefixes: prefixes, Threshold: 0.5, OverloadMargin: 2, OverloadRatio: 1.5}
					if name == "least_prefill" {
						strategy = &selection.LeastPrefill{Loads: loads, Prefixes: prefixes, W: selection.DefaultW}
					}
					var all []selection.Candidate
					for i := range targets {
						key := fmt.Sprint("replica-", i)
						all = append(all, selection.Candidate{Load: loads.Acquire(key), Member: prefixes.Join(key), Weight: 1})
					}
					work := func(seed uint64, n int) {
						candidates := append([]selection.Candidate(nil), all...)
						req := &selection.Request{Text: make([]byte, 8<<10), Stream: true}
						rng := rand.New(rand.NewPCG(seed, 1))
						lease := new(selection.Lease)
						for range n {
							req.Text[0] = byte(rng.IntN(8))
							binary.LittleEndian.PutUint64(req.Text[4<<10:], rng.Uint64())
							strategy.Pick(req, candidates, lease)
							lease.FirstByte()
							lease.Answered(true)
							lease.Release()
						}
					}
					work(1, 20_000) // the record is full
					b.ReportAllocs()
					b.ResetTimer()
					var wg sync.WaitGroup
					for g := range goroutines {
						wg.Go(func() { work(uint64(g+2), (b.N+g)/goroutines) })
					}
					wg.Wait()
				})
			}
		}
	}
}
