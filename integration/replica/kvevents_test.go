package replica

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"
	"time"
)

// The recorded payloads of vLLM 0.32 (maps) and 0.23 (arrays), decoded and encoded again, are the same bytes.
func TestEventsAreEncodedAsByVLLM(t *testing.T) {
	f, err := os.Open("testdata/kvevents.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	n := 0
	for ; lines.Scan(); n++ {
		var recorded struct {
			Form    EventForm `json:"form"`
			Payload string    `json:"payload"`
		}
		if err := json.Unmarshal(lines.Bytes(), &recorded); err != nil {
			t.Fatal(err)
		}
		want, err := hex.DecodeString(recorded.Payload)
		if err != nil {
			t.Fatal(err)
		}
		in := decodeRecorded(t, want)
		b := newEventBatch(recorded.Form, in.rank)
		for _, e := range in.events {
			if e.kind == "BlockRemoved" {
				b.removed(e.hashes[0])
				continue
			}
			s := &storedBlocks{hashes: e.hashes, parent: e.parent, tokens: e.tokens, blockSize: 32}
			if lora, ok := e.lora.(string); ok {
				s.adapter = adapter{name: lora, id: 1}
			}
			if keys, ok := e.extra[0].([]any); ok && keys[len(keys)-1] != e.lora {
				s.salt = keys[len(keys)-1].(string)
			}
			if session, ok := e.session.(string); ok {
				s.session = session
			}
			b.stored(s)
		}
		got := b.take(time.Unix(0, 0))
		const beforeTime, afterTime = 2, 10 // a float64 in between
		if !bytes.Equal(got[:beforeTime], want[:beforeTime]) || !bytes.Equal(got[afterTime:], want[afterTime:]) {
			t.Errorf("got  %x\nwant %x", got, want)
		}
	}
	if n == 0 {
		t.Error("no recordings")
	}
}

// decodeRecorded is decodeBatch for what was published at another time.
func decodeRecorded(t *testing.T, payload []byte) decodedBatch {
	payload = bytes.Clone(payload)
	now := newEventBatch(EventMaps, 0)
	now.cleared()
	copy(payload[2:10], now.take(time.Now())[2:10])
	return decodeBatch(t, payload)
}

func TestClearedInBothForms(t *testing.T) {
	for form, want := range map[EventForm]string{
		EventMaps:   "9381a474797065b0416c6c426c6f636b73436c6561726564",
		EventArrays: "9391b0416c6c426c6f636b73436c6561726564",
	} {
		b := newEventBatch(form, 0)
		if b.take(time.Now()) != nil {
			t.Error("a batch of nothing")
		}
		b.cleared()
		got := hex.EncodeToString(b.take(time.Now()))
		if got = got[:2] + got[2+18+2:len(got)-2]; got != want { // without the time, the length 1, and the rank
			t.Errorf("%s: %s", form, got)
		}
	}
}
