package kvevents

import (
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"strconv"
)

// What a batch may have, and what a Decoder keeps of its buffers from one batch to the next. A payload has as many tokens as bytes at most, so that
// whoever bounds the payload bounds the rest.
const (
	maxEvents  = 1 << 18
	keepEvents = 1 << 14
	keepValues = 1 << 20
	maxNames   = 1 << 10
)

// Decoder reads the payloads of one engine. The zero Decoder is ready. It is not safe for concurrent use.
//
// It reads what vLLM has sent since 0.9 (events as arrays of 2 to 12 elements, then as maps), what SGLang and TensorRT-LLM send, and what simulators and
// offloading connectors were seen to send: events packed once more, and integers of any width. Keys, trailing elements and kinds of events that it does
// not know are passed over.
type Decoder struct {
	batch     Batch
	numbers   []uint64 // the arrays that the slices of events are parts of
	tokens    []uint32
	remaining []int
	names     map[string]string // of adapters, so that each is allocated once
	fields    fields
}

// errMalformed is what a payload is that cannot be walked, or that has what no event can have.
var errMalformed = errors.New("malformed")

// Decode reads a payload. The batch and all that it refers to are the decoder's, and valid until the next call.
//
// An event that is of an unknown kind, lacks what it must have, or contradicts itself is left out and counted. An error is returned for what is not
// MessagePack, not a batch, or has events without a name: then nothing of the payload is known, and what it would have said is lost.
func (d *Decoder) Decode(payload []byte) (*Batch, error) {
	d.reset()
	r := reader{data: payload}
	k, n := r.next()
	switch {
	case k == array && n >= 2:
		for i := range n {
			if err := d.batchField(&r, int(i)); err != nil {
				return nil, err
			}
		}
	case k == object:
		for range n {
			name, ok := r.key()
			if !ok {
				return nil, fmt.Errorf("batch: %w", errMalformed)
			}
			if err := d.batchField(&r, batchFields[string(name)]-1); err != nil {
				return nil, err
			}
		}
	default:
		return nil, fmt.Errorf("batch: %w: neither an array of two elements or more nor a map", errMalformed)
	}
	if r.left() > 0 {
		return nil, fmt.Errorf("batch: %w: %d bytes after its end", errMalformed, r.left())
	}
	return &d.batch, nil
}

// reset empties the buffers, and gives back those that an uncommon payload has made large.
func (d *Decoder) reset() {
	if cap(d.batch.Events) > keepEvents {
		d.batch.Events = nil
	}
	if cap(d.numbers) > keepValues {
		d.numbers = nil
	}
	if cap(d.tokens) > keepValues {
		d.tokens = nil
	}
	if cap(d.remaining) > keepValues {
		d.remaining = nil
	}
	if len(d.names) > maxNames {
		d.names = nil
	}
	d.numbers, d.tokens, d.remaining = d.numbers[:0], d.tokens[:0], d.remaining[:0]
	d.batch = Batch{Rank: -1, Events: d.batch.Events[:0]}
}

// batchFields has the places of a batch's fields in its array form, plus one. The map form was never released, but was seen.
var batchFields = map[string]int{"ts": 1, "events": 2, "data_parallel_rank": 3, "attn_dp_rank": 3}

func (d *Decoder) batchField(r *reader, place int) error {
	switch place {
	case 0:
		from := *r
		switch k, n := r.next(); k {
		case float:
			if t := math.Float64frombits(n); !math.IsNaN(t) && !math.IsInf(t, 0) {
				d.batch.Time = t
			}
			return nil
		case unsigned:
			d.batch.Time = float64(n)
			return nil
		}
		*r = from
	case 1:
		return d.events(r)
	case 2:
		from := *r
		if k, n := r.next(); k == unsigned && n <= math.MaxInt32 {
			d.batch.Rank = int(n)
			return nil
		}
		*r = from
	}
	if !r.skip() {
		return fmt.Errorf("batch: %w", errMalformed)
	}
	return nil
}

func (d *Decoder) events(r *reader) error {
	k, n := r.next()
	if k != array {
		return fmt.Errorf("events: %w: not an array", errMalformed)
	}
	if n > maxEvents {
		return fmt.Errorf("events: %d in a batch, more than %d", n, maxEvents)
	}
	for i := range n {
		from := r.at
		err := d.event(r)
		if errors.Is(err, errSkip) {
			r.at = from
			err = errMalformed
			if r.skip() {
				d.batch.Skipped++
				continue
			}
		}
		if err != nil {
			return fmt.Errorf("event %d: %w", i, err)
		}
	}
	return nil
}

// errSkip is why an event is left out.
var errSkip = errors.New("skip")

// fields is an event as it is sent, before its parts are put together.
type fields struct {
	tag       tag
	has       uint32 // the fields that are there and not null, a bit for each
	event     Event
	loraID    int64
	loraName  []byte
	salt      []byte
	extra     int // where the list of extra keys is in the payload
	blockSize int64
	remote    bool // what is called so, and
	local     bool // what is called so
	medium    []byte
}

type tag uint8

const (
	noTag tag = iota
	storedTag
	removedTag
	clearedTag
	unknownTag
)

var tags = map[string]tag{"BlockStored": storedTag, "BlockRemoved": removedTag, "AllBlocksCleared": clearedTag}

// field is a field of an event.
type field uint8

const (
	unknownField field = iota
	typeField
	hashesField
	parentField
	tokensField
	blockSizeField
	loraIDField
	mediumField
	loraNameField // in SGLang's array form a map of other things
	extraKeysField
	groupField
	attentionField
	localityField
	saltField
	remainingField
)

// The fields in the order of the array forms. What comes behind is passed over.
var (
	storedFields = [...]field{typeField, hashesField, parentField, tokensField, blockSizeField, loraIDField, mediumField, loraNameField, extraKeysField,
		groupField, attentionField}
	removedFields = [...]field{typeField, hashesField, mediumField, groupField}
)

var fieldNames = map[string]field{
	"type": typeField, "block_hashes": hashesField, "parent_block_hash": parentField, "token_ids": tokensField, "block_size": blockSizeField,
	"lora_id": loraIDField, "medium": mediumField, "lora_name": loraNameField, "extra_keys": extraKeysField, "group_idx": groupField,
	"kv_cache_spec_kind": attentionField, "locality": localityField, "cache_salt": saltField, "remaining_copy_counts": remainingField,
}

// event reads one event and adds it to the batch. It returns errSkip where the event is to be left out, wherever the reader then is.
func (d *Decoder) event(r *reader) error {
	k, n := r.next()
	if k == binaryData {
		// Packed once more, by connectors that put together events of their own.
		inner := reader{data: r.bytes(n)}
		k, n = inner.next()
		r = &inner
	}
	f := &d.fields
	*f = fields{event: Event{Group: -1}}
	switch k {
	case array:
		if n == 0 {
			return errMalformed
		}
		if !d.field(r, typeField) {
			return errMalformed
		}
		var order []field
		switch f.tag {
		case storedTag:
			order = storedFields[:]
		case removedTag:
			order = removedFields[:]
		}
		for i := uint64(1); i < n; i++ {
			next := unknownField
			if i < uint64(len(order)) {
				next = order[i]
			}
			if !d.field(r, next) {
				return errSkip
			}
		}
	case object:
		for range n {
			name, ok := r.key()
			if !ok || !d.field(r, fieldNames[string(name)]) {
				return errSkip
			}
		}
	default:
		return errMalformed
	}
	return d.finish(r)
}

// key reads the name of a map's entry.
func (r *reader) key() ([]byte, bool) {
	k, n := r.next()
	if k != text && k != binaryData {
		return nil, false
	}
	return r.bytes(n), true
}

// field reads the value of a field. It returns false for a value that the field cannot have.
func (d *Decoder) field(r *reader, which field) bool {
	if which == unknownField {
		return r.skip()
	}
	f := &d.fields
	from := *r
	k, n := r.next()
	if k == null {
		return true
	}
	f.has |= 1 << which
	switch which {
	case typeField:
		if k != text {
			return false
		}
		f.tag = tags[string(r.bytes(n))]
		if f.tag == noTag {
			f.tag = unknownTag
		}
	case hashesField:
		return k == array && d.hashes(r, n)
	case parentField:
		hash, ok := blockHash(r, k, n)
		f.event.Parent, f.event.HasParent = hash, ok && hash != 0 // simulators send 0 for none
		return ok
	case tokensField:
		return k == array && d.tokenIDs(r, n)
	case blockSizeField:
		f.blockSize = int64(n)
		return k == unsigned && n <= math.MaxInt32 || k == negative
	case loraIDField:
		f.loraID = int64(n)
		return k == unsigned || k == negative
	case loraNameField:
		if k == object {
			return d.metadata(r, n)
		}
		if k != text {
			return false
		}
		f.loraName = r.bytes(n)
	case mediumField:
		if k != text {
			return false
		}
		f.medium = r.bytes(n)
	case saltField:
		if k != text {
			return false
		}
		f.salt = r.bytes(n)
	case extraKeysField:
		f.extra = from.at
		*r = from
		return k == array && r.skip()
	case groupField:
		f.event.Group = int(n)
		return k == unsigned && n <= math.MaxInt32
	case attentionField:
		if k != text {
			return false
		}
		f.event.Attention = attention(r.bytes(n))
	case localityField:
		if k != text {
			return false
		}
		where := r.bytes(n)
		f.local, f.remote = bytes.EqualFold(where, []byte("LOCAL")), bytes.EqualFold(where, []byte("REMOTE"))
	case remainingField:
		return k == array && d.counts(r, n)
	}
	return true
}

// metadata reads the map that SGLang's array form ends with.
func (d *Decoder) metadata(r *reader, n uint64) bool {
	for range n {
		name, ok := r.key()
		if !ok {
			return false
		}
		which := unknownField
		if string(name) == "cache_salt" {
			which = saltField
		}
		if !d.field(r, which) {
			return false
		}
	}
	return true
}

// blockHash makes 64 bits of a hash: of bytes the last 8, which are what vLLM sends when it sends integers.
func blockHash(r *reader, k kind, n uint64) (uint64, bool) {
	switch k {
	case unsigned, negative:
		return n, true
	case binaryData:
		var hash uint64
		b := r.bytes(n)
		for _, c := range b[max(0, len(b)-8):] {
			hash = hash<<8 | uint64(c)
		}
		return hash, n > 0
	}
	return 0, false
}

func (d *Decoder) hashes(r *reader, n uint64) bool {
	from := len(d.numbers)
	for range n {
		k, v := r.next()
		hash, ok := blockHash(r, k, v)
		if !ok {
			return false
		}
		d.numbers = append(d.numbers, hash)
	}
	d.fields.event.Hashes = d.numbers[from:len(d.numbers):len(d.numbers)]
	return true
}

func (d *Decoder) tokenIDs(r *reader, n uint64) bool {
	from := len(d.tokens)
	for range n {
		k, v := r.next()
		if k != unsigned || v > math.MaxUint32 {
			return false // also the pairs of tokens that SGLang sends for EAGLE
		}
		d.tokens = append(d.tokens, uint32(v))
	}
	d.fields.event.Tokens = d.tokens[from:len(d.tokens):len(d.tokens)]
	return true
}

func (d *Decoder) counts(r *reader, n uint64) bool {
	from := len(d.remaining)
	for range n {
		k, v := r.next()
		if k != unsigned || v > math.MaxInt32 {
			return false
		}
		d.remaining = append(d.remaining, int(v))
	}
	d.fields.event.Remaining = d.remaining[from:len(d.remaining):len(d.remaining)]
	return true
}

func (f *fields) with(which field) bool { return f.has&(1<<which) != 0 }

// finish puts the event together and adds it to the batch.
func (d *Decoder) finish(r *reader) error {
	f := &d.fields
	e := &f.event
	e.Medium = medium(f.medium, f.local, f.remote)
	switch f.tag {
	case noTag:
		return errMalformed
	case unknownTag:
		return errSkip
	case clearedTag:
		e.Kind = Cleared
	case removedTag:
		e.Kind = Removed
		if !f.with(hashesField) || f.with(remainingField) && len(e.Remaining) != len(e.Hashes) {
			return errSkip
		}
	case storedTag:
		e.Kind = Stored
		if f.blockSize < 0 {
			return fmt.Errorf("%w: block_size %d", errMalformed, f.blockSize)
		}
		if !f.with(hashesField) || !f.with(tokensField) || !f.with(blockSizeField) {
			return errSkip
		}
		e.BlockSize = int(f.blockSize)
		e.LoRA = d.lora()
		main := e.Attention == MainAttention || e.Attention == Unspecified
		if main && len(e.Tokens) > 0 && !e.fits() {
			return errSkip
		}
		if main && f.with(extraKeysField) && !d.extraKeys(r.data) {
			return errSkip
		}
		if len(f.salt) > 0 && !e.HasParent && len(e.Hashes) > 0 {
			d.extraOf(0, addDigest(0, maphash.Bytes(seed, f.salt)))
		}
	}
	d.batch.Events = append(d.batch.Events, *e)
	return nil
}

// fits tells whether there are tokens for each block of a store. Where there are too many, blocks have been left out, and there is no telling which
// (vllm#44451). Where there are too few, the size is not that of these blocks (as in TensorRT-LLM's), but equal parts may be.
func (e *Event) fits() bool {
	tokens, blocks := len(e.Tokens), len(e.Hashes)
	if blocks > 0 && tokens/blocks < e.BlockSize {
		e.BlockSize = tokens / blocks
	}
	return tokens == blocks*e.BlockSize
}

// lora returns the name of the adapter.
func (d *Decoder) lora() string {
	f := &d.fields
	if len(f.loraName) == 0 {
		if f.with(loraIDField) {
			return "#" + strconv.FormatInt(f.loraID, 10)
		}
		return ""
	}
	name, ok := d.names[string(f.loraName)]
	if !ok {
		if d.names == nil {
			d.names = make(map[string]string)
		}
		name = string(f.loraName)
		d.names[name] = name
	}
	return name
}

// extraOf adds a digest to those of a block of the event.
func (d *Decoder) extraOf(block int, digest uint64) {
	e := &d.fields.event
	if e.Extra == nil {
		from := len(d.numbers)
		for range e.Hashes {
			d.numbers = append(d.numbers, 0)
		}
		e.Extra = d.numbers[from:len(d.numbers):len(d.numbers)]
	}
	if e.Extra[block] != 0 {
		digest = addDigest(e.Extra[block], digest)
	}
	e.Extra[block] = digest
}

// extraKeys makes digests of vLLM's extra keys: an entry for each block, null or a list of an adapter's name, media, a salt and embeddings. The adapter
// is known from elsewhere; the others cannot be told apart. It returns false where there is not an entry for each block.
func (d *Decoder) extraKeys(data []byte) bool {
	f := &d.fields
	r := reader{data: data, at: f.extra}
	_, n := r.next()
	if n != uint64(len(f.event.Hashes)) {
		return false
	}
	for block := range n {
		k, elements := r.next()
		if k == null {
			continue
		}
		if k != array {
			return false
		}
		var digest uint64
		for range elements {
			from := r.at
			k, length := r.next()
			var element uint64
			if k == text {
				s := r.bytes(length)
				if bytes.Equal(s, f.loraName) {
					continue
				}
				element = maphash.Bytes(seed, s)
			} else {
				r.at = from
				r.skip()
				element = maphash.Bytes(seed, data[from:r.at]) ^ side // no text is equal to it
			}
			digest = addDigest(digest, element)
		}
		if digest != 0 {
			d.extraOf(int(block), digest)
		}
	}
	return true
}

// attention reads a kv_cache_spec_kind.
func attention(kind []byte) Attention {
	switch string(kind) {
	case "full_attention", "mla_attention", "sink_full_attention":
		return MainAttention
	case "mamba":
		return Mamba
	case "", "unknown":
		return Unspecified
	}
	return OtherAttention
}

// medium reads the name of a medium. A file system may be anybody's: it is the replica's own where the engine says so, or names the device.
func medium(name []byte, local, remote bool) Medium {
	var upper [16]byte
	if len(name) > len(upper) {
		return UnknownMedium
	}
	for i, c := range name {
		if 'a' <= c && c <= 'z' {
			c -= 'a' - 'A'
		}
		upper[i] = c
	}
	m := UnknownMedium
	switch string(upper[:len(name)]) {
	case "", "GPU":
		m = GPU
	case "CPU", "CPU_PINNED", "CPU_TIER1", "CPU_TIER2":
		m = CPU
	case "DISK", "NVME":
		m = Disk
	case "FS", "STORAGE":
		m = Remote
		if local {
			m = Disk
		}
	case "OBJ", "EXTERNAL", "REMOTE", "SHARED_STORAGE", "OBJECT_STORE":
		m = Remote
	}
	if remote {
		m = Remote
	}
	return m
}
