package kvevents

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// wirePayload is a payload of testdata/kvevents.json: bytes of real encoders, what they decode to, and what must become of them.
type wirePayload struct {
	Name, Expect string
	Hex          string
	Decoded      json.RawMessage
}

func wirePayloads(t testing.TB) (payloads, malformed []wirePayload) {
	data, err := os.ReadFile("testdata/kvevents.json")
	if err != nil {
		t.Fatal(err)
	}
	var f struct{ Payloads, Malformed []wirePayload }
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatal(err)
	}
	return f.Payloads, f.Malformed
}

func (p wirePayload) bytes(t testing.TB) []byte {
	b, err := hex.DecodeString(p.Hex)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDecodeRealPayloads(t *testing.T) {
	payloads, malformed := wirePayloads(t)
	if len(payloads) != 49 || len(malformed) != 11 {
		t.Fatalf("%d payloads and %d malformed ones, want 49 and 11", len(payloads), len(malformed))
	}
	skipped := map[string]int{"tolerance_unknown_tag_map": 1, "tolerance_unknown_tag_array": 1, "sglang_bigram_array": 1}
	var d Decoder
	for _, p := range payloads {
		t.Run(p.Name, func(t *testing.T) {
			b, err := d.Decode(p.bytes(t))
			if err != nil {
				t.Fatal(err)
			}
			want := oracle(t, p.bytes(t))
			if b.Time != want.Time || b.Rank != want.Rank || b.Skipped != skipped[p.Name] {
				t.Errorf("time %v, rank %d, %d skipped; want %v, %d, %d", b.Time, b.Rank, b.Skipped, want.Time, want.Rank, skipped[p.Name])
			}
			if len(b.Events)+b.Skipped != len(want.Events) {
				t.Fatalf("%d events and %d skipped of %d", len(b.Events), b.Skipped, len(want.Events))
			}
			for i, e := range b.Events {
				w := want.Events[len(want.Events)-len(b.Events)+i] // those that are skipped come first
				e.Extra = nil                                      // TestExtra
				if e.Kind != Stored {
					w.LoRA = ""
				}
				if fmt.Sprint(e) != fmt.Sprint(w) {
					t.Errorf("event %d:\n got %+v\nwant %+v", i, e, w)
				}
			}
		})
	}
	for _, p := range malformed {
		if b, err := d.Decode(p.bytes(t)); err == nil {
			t.Errorf("%s: %+v, want an error", p.Name, b)
		}
	}
}

// oracle decodes a payload with the library, without a care.
func oracle(t *testing.T, payload []byte) Batch {
	var v any
	if err := msgpack.Unmarshal(payload, &v); err != nil {
		t.Fatal(err)
	}
	b := Batch{Rank: -1}
	var list []any
	switch v := v.(type) {
	case map[string]any:
		b.Time, list, b.Rank = v["ts"].(float64), v["events"].([]any), int(integer(v["data_parallel_rank"]))
	case []any:
		b.Time, list = v[0].(float64), v[1].([]any)
		if len(v) > 2 && v[2] != nil {
			b.Rank = int(integer(v[2]))
		}
	}
	order := map[string][]string{
		"BlockStored": {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx",
			"kv_cache_spec_kind"},
		"BlockRemoved": {"type", "block_hashes", "medium", "group_idx"},
	}
	for _, v := range list {
		if blob, ok := v.([]byte); ok {
			var inner any
			if err := msgpack.Unmarshal(blob, &inner); err != nil {
				t.Fatal(err)
			}
			v = inner
		}
		m, ok := v.(map[string]any)
		if !ok {
			m = map[string]any{"type": v.([]any)[0]}
			for i, name := range order[v.([]any)[0].(string)] {
				if i < len(v.([]any)) {
					m[name] = v.([]any)[i]
				}
			}
		}
		e := Event{Kind: map[any]Kind{"BlockRemoved": Removed, "AllBlocksCleared": Cleared}[m["type"]], Group: -1}
		hashes, _ := m["block_hashes"].([]any)
		for _, h := range hashes {
			e.Hashes = append(e.Hashes, uint64(integer(h)))
		}
		e.Parent = uint64(integer(m["parent_block_hash"]))
		e.HasParent = e.Parent != 0
		tokens, _ := m["token_ids"].([]any)
		for _, token := range tokens {
			e.Tokens = append(e.Tokens, uint32(integer(token)))
		}
		e.BlockSize = int(integer(m["block_size"]))
		if p := len(e.Tokens); p > 0 && p < len(e.Hashes)*e.BlockSize {
			e.BlockSize = p / len(e.Hashes)
		}
		if e.LoRA, _ = m["lora_name"].(string); e.LoRA == "" && m["lora_id"] != nil {
			e.LoRA = fmt.Sprintf("#%d", integer(m["lora_id"]))
		}
		medium, _ := m["medium"].(string)
		e.Medium = map[string]Medium{"": GPU, "GPU": GPU, "CPU": CPU, "CPU_PINNED": CPU, "SHARED_STORAGE": Remote}[medium]
		if medium == "FS" || medium == "STORAGE" {
			e.Medium = map[any]Medium{"LOCAL": Disk}[m["locality"]]
			if e.Medium != Disk {
				e.Medium = Remote
			}
		}
		if m["group_idx"] != nil {
			e.Group = int(integer(m["group_idx"]))
		}
		kinds := map[any]Attention{nil: Unspecified, "full_attention": MainAttention, "mamba": Mamba, "sliding_window": OtherAttention}
		e.Attention = kinds[m["kv_cache_spec_kind"]]
		counts, _ := m["remaining_copy_counts"].([]any)
		for _, c := range counts {
			e.Remaining = append(e.Remaining, int(integer(c)))
		}
		b.Events = append(b.Events, e)
	}
	return b
}

// integer makes 64 bits of whatever the library makes of an integer or a hash.
func integer(v any) int64 {
	switch r := reflect.ValueOf(v); {
	case !r.IsValid() || r.Kind() == reflect.Slice && r.Type().Elem().Kind() != reflect.Uint8:
		return 0
	case r.CanInt():
		return r.Int()
	case r.CanUint():
		return int64(r.Uint())
	default:
		var n int64
		for _, c := range r.Bytes() {
			n = n<<8 | int64(c)
		}
		return n
	}
}

func decodeOne(t *testing.T, event any) (Event, int) {
	t.Helper()
	payload, err := msgpack.Marshal([]any{1.5, []any{event}})
	if err != nil {
		t.Fatal(err)
	}
	b, err := new(Decoder).Decode(payload)
	if err != nil {
		t.Fatalf("%v: %v", event, err)
	}
	if len(b.Events) == 0 {
		return Event{}, b.Skipped
	}
	return b.Events[0], b.Skipped
}

func TestExtra(t *testing.T) {
	salt := SaltDigest("tenant-a")
	store := func(parent, lora, extra any) map[string]any {
		return map[string]any{"type": "BlockStored", "block_hashes": []any{1, 2}, "parent_block_hash": parent, "token_ids": []int{1, 2, 3, 4}, "block_size": 2,
			"lora_name": lora, "extra_keys": extra}
	}
	withSalt := func(m map[string]any) map[string]any { m["cache_salt"] = "tenant-a"; return m }
	sglang := []any{"BlockStored", []int{1, 2}, nil, []int{1, 2, 3, 4}, 2, nil, "GPU", map[string]any{"other": []int{1}, "cache_salt": "tenant-a"}}
	for _, c := range []struct {
		name  string
		event any
		want  []uint64
	}{
		{"no keys", store(nil, nil, nil), nil},
		{"nothing for any block", store(nil, nil, []any{nil, []any{}}), nil},
		{"an adapter's name", store(nil, "ad", []any{[]any{"ad"}, []any{"ad"}}), nil},
		{"a salt", store(nil, nil, []any{[]any{"tenant-a"}, nil}), []uint64{salt, 0}},
		{"an adapter's name and a salt", store(nil, "ad", []any{[]any{"ad", "tenant-a"}, []any{"ad"}}), []uint64{salt, 0}},
		{"SGLang's salt in a map", withSalt(store(nil, nil, nil)), []uint64{salt, 0}},
		{"SGLang's salt behind a parent", withSalt(store(7, nil, nil)), nil},
		{"SGLang's salt in an array", sglang, []uint64{salt, 0}},
	} {
		e, skipped := decodeOne(t, c.event)
		if skipped != 0 || !slices.Equal(e.Extra, c.want) {
			t.Errorf("%s: %d, %d skipped; want %d", c.name, e.Extra, skipped, c.want)
		}
	}
	for _, other := range []any{[]any{"tenant-b"}, []any{[]any{"tenant-a", 0}}, []any{[]byte("tenant-a")}, []any{map[string]any{"salt": "tenant-a"}}, []any{5},
		[]any{"tenant-a", "image"}} {
		if e, _ := decodeOne(t, store(nil, nil, []any{other, nil})); len(e.Extra) != 2 || e.Extra[0] == 0 || e.Extra[0] == salt || e.Extra[1] != 0 {
			t.Errorf("%v: %d, want a digest that is not the salt's", other, e.Extra)
		}
	}
}

func TestDecodeMedia(t *testing.T) {
	for name, want := range map[string]Medium{"": GPU, "gpu": GPU, "cpu": CPU, "CPU_TIER2": CPU, "Disk": Disk, "NVME": Disk, "FS": Remote, "STORAGE LOCAL": Disk,
		"FS local": Disk, "GPU REMOTE": Remote, "STORAGE REMOTE": Remote, "EXTERNAL": Remote, "OBJ": Remote, "device(type='cuda', index=0)": UnknownMedium, "HBM": UnknownMedium} {
		name, where, _ := strings.Cut(name, " ")
		e, _ := decodeOne(t, map[string]any{"type": "BlockRemoved", "block_hashes": []int{1}, "medium": name, "locality": where})
		if e.Medium != want {
			t.Errorf("%q, locality %q: %d, want %d", name, where, e.Medium, want)
		}
	}
}

func TestDecodeSkipsSingleEvents(t *testing.T) {
	sparse := func(kind any) []any {
		return []any{"BlockStored", []int{1}, nil, []int{1, 2, 3, 4}, 2, nil, "GPU", nil, []any{nil}, 1, kind, nil}
	}
	good := []any{"BlockRemoved", []int{1}, "GPU", 0, "a field of tomorrow"}
	for name, event := range map[string]any{
		"a kind of tomorrow":               []any{"BlockTransferred", 1},
		"a store without tokens":           []any{"BlockStored", []int{1}, nil},
		"a store without hashes":           map[string]any{"type": "BlockStored", "token_ids": []int{}, "block_size": 16},
		"a removal without hashes":         []any{"BlockRemoved"},
		"hashes that are text":             []any{"BlockRemoved", []string{"x"}},
		"an empty hash":                    []any{"BlockRemoved", [][]byte{{}}},
		"a negative token":                 []any{"BlockStored", []int{1}, nil, []int{-1}, 1},
		"a token of more than 32 bits":     []any{"BlockStored", []int{1}, nil, []int{1 << 32}, 1},
		"pairs of tokens":                  []any{"BlockStored", []int{1}, nil, [][]int{{1, 2}}, 1},
		"blocks left out":                  sparse("full_attention"),
		"blocks left out, of unknown kind": sparse(nil),
		"an extra key too few":             []any{"BlockStored", []int{1, 2}, nil, []int{1, 2}, 1, nil, nil, nil, []any{nil}},
		"a count too few":                  map[string]any{"type": "BlockRemoved", "block_hashes": []int{1, 2}, "remaining_copy_counts": []int{1}},
		"tokens that are no equal parts":   []any{"BlockStored", []int{1, 2}, nil, []int{1, 2, 3}, 2},
		"what overflows":                   []any{"BlockStored", []int{1, 2}, nil, []int{1}, math.MaxInt64},
	} {
		payload, err := msgpack.Marshal([]any{1.5, []any{event, good}, nil, "a field of tomorrow"})
		if err != nil {
			t.Fatal(err)
		}
		b, err := new(Decoder).Decode(payload)
		if err != nil || b.Skipped != 1 || len(b.Events) != 1 || b.Events[0].Kind != Removed {
			t.Errorf("%s: %+v, %v; want it skipped and the other event kept", name, b, err)
		}
	}
	if e, skipped := decodeOne(t, sparse("sliding_window")); skipped != 0 || e.Attention != OtherAttention {
		t.Errorf("blocks left out in a window group: %+v, %d skipped; want it kept", e, skipped)
	}
}

// TestDecodeRandom compares the decoder with the library's encoder, in both forms.
func TestDecodeRandom(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var d Decoder
	for range 300 {
		size, blocks := 1+rnd.IntN(70), 1+rnd.IntN(20)
		want := Event{BlockSize: size, Group: rnd.IntN(9), Attention: MainAttention, Parent: rnd.Uint64(), HasParent: true}
		for range blocks {
			want.Hashes = append(want.Hashes, rnd.Uint64()>>rnd.IntN(64))
			for range size {
				want.Tokens = append(want.Tokens, rnd.Uint32()>>rnd.IntN(32))
			}
		}
		var event any = []any{"BlockStored", want.Hashes, int64(want.Parent), want.Tokens, size, nil, nil, nil, nil, want.Group, "full_attention"}
		if rnd.IntN(2) == 0 {
			event = map[string]any{"block_hashes": want.Hashes, "parent_block_hash": want.Parent, "token_ids": want.Tokens, "block_size": size,
				"group_idx": want.Group, "kv_cache_spec_kind": "mla_attention", "unknown": map[string]any{"x": []any{1, "y", 2.5, nil, true}}, "type": "BlockStored"}
		}
		var buf bytes.Buffer
		e := msgpack.NewEncoder(&buf)
		e.UseCompactInts(rnd.IntN(2) == 0)
		if err := e.Encode([]any{float32(0.5), []any{event, event}, rnd.IntN(3)}); err != nil {
			t.Fatal(err)
		}
		b, err := d.Decode(buf.Bytes())
		if err != nil || len(b.Events) != 2 || b.Time != 0.5 {
			t.Fatalf("%+v, %v", b, err)
		}
		for _, got := range b.Events {
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("\n got %+v\nwant %+v", got, want)
			}
		}
	}
}

func TestDecoderKeepsNoLargeBuffers(t *testing.T) {
	var d Decoder
	large := msgpack.RawMessage(append([]byte{0xdd, 0, 2 * keepValues >> 16, 0, 0}, make([]byte, 2*keepValues)...)) // an array of zeros
	events := make([]any, keepEvents+1)
	for i := range events {
		events[i] = []any{"AllBlocksCleared"}
	}
	for _, list := range []any{events, []any{[]any{"BlockStored", large, nil, large, 1}}, []any{map[string]any{"type": "BlockRemoved", "block_hashes": large,
		"remaining_copy_counts": large}}} {
		payload, err := msgpack.Marshal([]any{1.5, list})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Decode(payload); err != nil {
			t.Fatal(err)
		}
		d.reset()
		if cap(d.batch.Events) > keepEvents || cap(d.numbers) > keepValues || cap(d.tokens) > keepValues || cap(d.remaining) > keepValues {
			t.Errorf("kept %d events, %d numbers, %d tokens, %d counts", cap(d.batch.Events), cap(d.numbers), cap(d.tokens), cap(d.remaining))
		}
	}
	payload, err := msgpack.Marshal([]any{1.5, make([]any, maxEvents+1)})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := d.Decode(payload); err == nil {
		t.Errorf("%d events: no error", len(b.Events))
	}
}

func TestDecodeDoesNotAllocate(t *testing.T) {
	payloads, _ := wirePayloads(t)
	var d Decoder
	for _, p := range payloads {
		payload := p.bytes(t)
		want := 0.0
		if strings.HasSuffix(p.Name, "child_lora") {
			want = 1 // an adapter's number is made a name
		}
		if n := testing.AllocsPerRun(10, func() { _, _ = d.Decode(payload) }); n > want {
			t.Errorf("%s: %v allocations", p.Name, n)
		}
	}
}

func FuzzDecode(f *testing.F) {
	payloads, malformed := wirePayloads(f)
	for _, p := range slices.Concat(payloads, malformed) {
		f.Add(p.bytes(f))
	}
	var d Decoder
	r := NewIndex().Add(1000)
	f.Fuzz(func(t *testing.T, payload []byte) {
		b, err := d.Decode(payload)
		if err == nil {
			r.Apply(b)
			for _, e := range b.Events {
				if n := len(e.Hashes) + len(e.Tokens) + len(e.Extra) + len(e.Remaining); n > 4*len(payload) {
					t.Errorf("%d values from %d bytes", n, len(payload))
				}
			}
		}
		// The library follows what it skips as deep as it goes, and believes lengths.
		if len(payload) > 1<<10 {
			return
		}
		mine := reader{data: payload}
		in := bytes.NewReader(payload)
		theirs := msgpack.NewDecoder(in)
		if ok, err := mine.skip(), theirs.Skip(); ok && (err != nil || in.Len() != mine.left()) {
			t.Errorf("skipped %d bytes, the library %d, %v", mine.at, len(payload)-in.Len(), err)
		} else if !ok && err == nil {
			t.Errorf("not skipped, but by the library")
		}
	})
}
