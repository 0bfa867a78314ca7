package kvevents

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRecordings(t *testing.T) {
	for _, c := range []struct {
		name            string
		requests, exact int
	}{
		{"truth", 60, 60},             // nothing is evicted
		{"truth-evict", 60, 60},       // 160 blocks
		{"truth-v0230-array", 60, 60}, // 72 blocks, events as arrays
		{"copies", 139, 139},          // 90 blocks, 32-byte hashes, prompt_logprobs, salts, n of 2
		{"events-A", 32, 32},          // two replicas, twins, lists, a reset
		{"lora", 14, 14},
		{"dp2", 19, 19}, // two ranks
		{"bytes-hashes", 11, 11},
		// Where layers with sliding windows have lost theirs, full attention alone predicts too much.
		{"gemma3-hybrid", 14, 13},
		{"hybrid-64-32", 100, 93}, // blocks of 64 tokens, tails of 32
	} {
		t.Run(c.name, func(t *testing.T) {
			f, err := os.Open(filepath.Join("testdata", c.name+".jsonl.gz"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			got, err := CheckRecording(f)
			if err != nil {
				t.Fatal(err)
			}
			if got.Requests != c.requests || got.Exact != c.exact || got.Exact+got.Over != got.Requests || got.Bad+got.Gaps+got.Restarts != 0 {
				t.Errorf("%+v, want %d of %d exact, and no fewer tokens predicted than reported", got, c.exact, c.requests)
			}
		})
	}
}

func TestBadRecordings(t *testing.T) {
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = io.WriteString(z, `{"kind":"req","t":1}`)
	if err := z.Flush(); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"not JSON":                 "x",
		"cut off":                  zipped.String(),
		"no frames":                `{"kind":"ev","t":1}`,
		"frames of no hexadecimal": `{"kind":"ev","t":1,"frames":["","0","zz"]}`,
		"sequence number":          `{"kind":"ev","t":1,"frames":["","x","00"]}`,
		"time":                     `{"kind":"req","t":"now"}`,
	} {
		if c, err := CheckRecording(strings.NewReader(text)); err == nil {
			t.Errorf("%s: %+v, want an error", name, c)
		}
	}
	// What cannot be predicted is left out.
	c, err := CheckRecording(strings.NewReader(`
		{"kind":"weather","t":"fine"}
		{"kind":"req","t":1,"i":0,"body":{"prompt":[1,2,3]}}
		{"kind":"req","t":2,"i":1,"body":{"prompt":"text"}}
		{"kind":"resp","t":3,"i":1,"status":200,"cached_tokens":0}
		{"kind":"req","t":4,"i":2,"body":{"prompt":[1,2,3],"prompt_logprobs":1}}
		{"kind":"resp","t":5,"i":2,"status":200,"cached_tokens":0}
		{"kind":"req","t":6,"i":3,"body":{"prompt":[1,2,3]}}
		{"kind":"resp","t":7,"i":3,"status":500}
		{"kind":"resp","t":7,"i":4,"status":200}
		{"kind":"ev","t":8,"frames":["","0000000000000005","93"]}
		{"kind":"ev","t":8,"frames":["","0000000000000005","92cb000000000000000090"]}
		{"kind":"ev","t":8,"frames":["","0000000000000007","92cb000000000000000090"]}
		{"kind":"ev","t":8,"frames":["","0000000000000000","92cb000000000000000090"]}`))
	if err != nil || c.Requests != 0 || c.LeftOut != 4 || c.Batches != 3 || c.Bad != 1 || c.Gaps != 1 || c.Restarts != 1 {
		t.Errorf("%+v, %v; want 4 requests left out, and of 3 batches one bad, one after a gap and one after a restart", c, err)
	}
}
