package replica

import (
	"bytes"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// eventBatch gathers the KV events of an engine's step and encodes them as vLLM's msgspec does
// (distributed/kv_events.py).
type eventBatch struct {
	form   EventForm
	rank   int
	count  int
	events bytes.Buffer
	enc    *msgpack.Encoder // into events
}

func newEventBatch(form EventForm, rank int) *eventBatch {
	b := &eventBatch{form: form, rank: rank}
	b.enc = msgpack.NewEncoder(&b.events)
	b.enc.UseCompactInts(true)
	return b
}

// storedBlocks are consecutive blocks of one sequence.
type storedBlocks struct {
	hashes    []uint64
	parent    any // hash of the block before them; nil where they begin the sequence
	tokens    []uint32
	blockSize int
	adapter   adapter
	salt      string // of the sequence
	session   string
}

// adapter is a LoRA adapter; the zero value is none.
type adapter struct {
	name string
	id   int // from 1
}

// extraKeys are what else the hash of the i-th of the blocks depends on; nil is nothing.
func (s *storedBlocks) extraKeys(i int) any {
	var keys []string
	if s.adapter.name != "" {
		keys = append(keys, s.adapter.name)
	}
	if s.salt != "" && s.parent == nil && i == 0 {
		keys = append(keys, s.salt)
	}
	if keys == nil {
		return nil
	}
	return keys
}

func (b *eventBatch) stored(s *storedBlocks) {
	var loraID, loraName any
	if s.adapter.name != "" {
		loraID, loraName = s.adapter.id, s.adapter.name
	}
	extra := make([]any, len(s.hashes))
	for i := range extra {
		extra[i] = s.extraKeys(i)
	}
	event := obj("type", "BlockStored", "block_hashes", s.hashes, "parent_block_hash", s.parent, "token_ids", s.tokens,
		"block_size", s.blockSize, "lora_id", loraID, "medium", "GPU", "lora_name", loraName, "extra_keys", extra,
		"group_idx", 0, "kv_cache_spec_kind", "full_attention")
	switch {
	case b.form == EventArrays:
		event = event.with("kv_cache_spec_sliding_window", nil)
	case s.session != "":
		event = event.with("session_id", s.session)
	}
	b.add(event)
}

func (b *eventBatch) removed(hash uint64) {
	b.add(obj("type", "BlockRemoved", "block_hashes", []uint64{hash}, "medium", "GPU", "group_idx", 0))
}

func (b *eventBatch) cleared() { b.add(obj("type", "AllBlocksCleared")) }

func (b *eventBatch) add(event object) {
	b.count++
	if b.form == EventArrays {
		_ = b.enc.EncodeArrayLen(len(event)) // a buffer takes everything
	} else {
		_ = b.enc.EncodeMapLen(len(event))
	}
	for _, f := range event {
		if b.form != EventArrays {
			_ = b.enc.EncodeString(f.key)
		}
		if err := b.enc.Encode(f.value); err != nil {
			panic(err) // a programming error: all our types can be encoded
		}
	}
}

// take returns the batch, and begins a new one; nil where nothing has happened.
func (b *eventBatch) take(now time.Time) []byte {
	if b.count == 0 {
		return nil
	}
	var out bytes.Buffer
	enc := msgpack.NewEncoder(&out)
	_ = enc.EncodeArrayLen(3)
	_ = enc.EncodeFloat64(float64(now.UnixNano()) / 1e9)
	_ = enc.EncodeArrayLen(b.count)
	out.Write(b.events.Bytes())
	_ = enc.EncodeInt(int64(b.rank))
	b.events.Reset()
	b.count = 0
	return out.Bytes()
}
