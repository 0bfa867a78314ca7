package kvevents

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// storeEvent makes an event of so many blocks of so many tokens each behind a parent, 0 for none. Equal tokens have equal hashes.
func storeEvent(parent uint64, hashes []uint64, tokens []uint32) Event {
	return Event{Hashes: hashes, Parent: parent, HasParent: parent != 0, Tokens: tokens, BlockSize: len(tokens) / len(hashes), Attention: MainAttention}
}

// numbered returns a prompt of so many tokens, unlike that of any other number.
func numbered(number, tokens int) []uint32 {
	prompt := make([]uint32, tokens)
	for i := range prompt {
		prompt[i] = uint32(number*31 + i)
	}
	return prompt
}

// hashesOf returns hashes that an engine could have given to the blocks of a numbered prompt.
func hashesOf(number, blocks int) []uint64 {
	hashes := make([]uint64, blocks)
	for i := range hashes {
		hashes[i] = uint64(number)<<20 + uint64(i) + 1
	}
	return hashes
}

func packed(b *testing.B, events ...any) []byte {
	payload, err := msgpack.Marshal([]any{1795967325.25, events, 0})
	if err != nil {
		b.Fatal(err)
	}
	return payload
}

func BenchmarkDecode(b *testing.B) {
	tokens := numbered(1, 64)
	for i := range tokens {
		tokens[i] += 20_000 // most of a vocabulary takes two bytes or more
	}
	var hashes []any
	for _, h := range hashesOf(1, 4) {
		hashes = append(hashes, h<<40)
	}
	stored := map[string]any{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": hashes[0], "token_ids": tokens, "block_size": 16, "lora_id": nil,
		"medium": "GPU", "lora_name": nil, "extra_keys": []any{nil, nil, nil, nil}, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
	array := []any{"BlockStored", hashes, hashes[0], tokens, 16, nil, "GPU", nil, []any{nil, nil, nil, nil}, 0, "full_attention", nil}
	for _, c := range []struct {
		form  string
		event any
		n     int
	}{{"map", stored, 1}, {"map", stored, 16}, {"array", array, 16}} {
		b.Run(fmt.Sprintf("%s/events=%d", c.form, c.n), func(b *testing.B) {
			events := make([]any, c.n)
			for i := range events {
				events[i] = c.event
			}
			payload := packed(b, events...)
			var d Decoder
			b.ReportAllocs()
			for b.Loop() {
				batch, err := d.Decode(payload)
				if err != nil || len(batch.Events) != c.n {
					b.Fatal(batch, err)
				}
			}
			b.ReportMetric(float64(c.n)*float64(b.N)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

// BenchmarkApply stores and removes prompts of 32 blocks of 16 tokens, so that a source has 100,000 blocks at a time.
func BenchmarkApply(b *testing.B) {
	r := NewIndex().Add(0)
	const blocks, live = 32, 3125
	var batch Batch
	i := 0
	for b.Loop() {
		batch.Events = batch.Events[:0]
		batch.Events = append(batch.Events, storeEvent(0, hashesOf(i, blocks), numbered(i, 16*blocks)))
		if i >= live {
			batch.Events = append(batch.Events, Event{Kind: Removed, Hashes: hashesOf(i-live, blocks)})
		}
		r.Apply(&batch)
		i++
	}
	b.ReportMetric(float64(blocks)*float64(b.N)/b.Elapsed().Seconds(), "blocks/s")
}

// fill makes an index of so many sources, each with so many blocks of 16 tokens, of which shared are common to all. Blocks are churned: as many again
// have been stored and removed.
func fill(sources, shared, own int) (*Index, []Holding) {
	const blocks = 100
	x := NewIndex()
	holdings := make([]Holding, sources)
	for s := range holdings {
		r := x.Add(0)
		holdings[s] = Holding{Residency: r, Model: "m"}
		var batch Batch
		if shared > 0 {
			batch.Events = append(batch.Events, storeEvent(0, hashesOf(0, shared), numbered(0, 16*shared)))
		}
		r.Apply(&batch)
		for i := range 2 * own / blocks {
			number := 1 + s*own + i
			batch.Events = append(batch.Events[:0], storeEvent(0, hashesOf(number, blocks), numbered(number, 16*blocks)))
			if old := i - own/blocks; old >= 0 {
				batch.Events = append(batch.Events, Event{Kind: Removed, Hashes: hashesOf(number-own/blocks, blocks)})
			}
			r.Apply(&batch)
		}
	}
	return x, holdings
}

func BenchmarkMemory(b *testing.B) {
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		x, holdings := fill(64, 0, 100_000)
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/(64*100_000), "B/block")
		runtime.KeepAlive(x)
		runtime.KeepAlive(holdings)
	}
}

// BenchmarkMatch looks a prompt up that all sources hold, in an index with 20,000 other blocks for each.
func BenchmarkMatch(b *testing.B) {
	for _, sources := range []int{1, 64, 256} {
		for _, blocks := range []int{512, 8192} {
			x, holdings := fill(sources, blocks, 20_000)
			tokens := numbered(0, 16*blocks+5)
			for _, expected := range []int{0, 200} {
				b.Run(fmt.Sprintf("sources=%d/blocks=%d/expected=%d", sources, blocks, expected), func(b *testing.B) {
					var q Query
					for i := range expected {
						q.Reset(append(numbered(0, 16*blocks), numbered(i+1, 64)...), "")
						x.Expect(&q, holdings[i%sources].Residency, "m")
					}
					b.ReportAllocs()
					for b.Loop() {
						q.Reset(tokens, "")
						x.Match(&q, holdings)
						x.MatchExpected(&q, holdings)
					}
					if holdings[0].Resident != 16*blocks {
						b.Fatal(holdings[0])
					}
					x.pending.list = nil
				})
			}
		}
	}
}

// BenchmarkChoose is what a router does under its lock, while so many prompts that begin alike are expected.
func BenchmarkChoose(b *testing.B) {
	for _, expected := range []int{0, 200} {
		b.Run(fmt.Sprintf("expected=%d", expected), func(b *testing.B) {
			x, holdings := fill(64, 512, 0)
			var q Query
			for i := range expected {
				q.Reset(append(numbered(0, 16*512), numbered(i+1, 64)...), "")
				x.Expect(&q, holdings[i%64].Residency, "m")
			}
			q.Reset(append(numbered(0, 16*512), numbered(1000, 64)...), "")
			x.Match(&q, holdings)
			for b.Loop() {
				x.MatchExpected(&q, holdings)
				x.Withdraw(x.Expect(&q, holdings[0].Residency, "m"))
			}
		})
	}
}
