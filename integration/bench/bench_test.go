package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if runChild() {
		return
	}
	os.Exit(m.Run())
}

// runBench runs the command, which must leave nothing behind, and returns what it writes.
func runBench(t *testing.T, args ...string) []byte {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	o, err := parse(args)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := run(t.Context(), o, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "rolter-bench-*")); left != nil {
		t.Errorf("left behind: %v", left)
	}
	return out.Bytes()
}

func TestCPU(t *testing.T) {
	out := runBench(t, "--quick", "--json")
	var r report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var sizes []string
	for _, w := range r.Workloads {
		sizes = append(sizes, w.Size)
		var names []string
		for _, v := range w.Variants {
			names = append(names, v.Variant)
			if v.Requests == 0 || v.Errors > 0 || v.PerSecond <= 0 || v.P50 <= 0 || v.P99 < v.P50 {
				t.Errorf("%s, %s: %+v", w.Size, v.Variant, v)
			}
			if w.Size == streamSize && v.P50 < float64(streamEvents-1)*streamPace.Seconds()*1e3 {
				t.Errorf("%s: a stream took only %.0f ms", v.Variant, v.P50)
			}
			if v.Variant == "direct" {
				continue
			}
			if v.CPU == nil || len(v.CPU.Rounds) != 1 || v.CPU.Median <= 0 || v.Ratio == nil {
				t.Errorf("%s, %s: no CPU time: %+v", w.Size, v.Variant, v)
			}
			if v.Variant == plain && v.Ratio.Median != 1 {
				t.Errorf("%s: ratio of plain to itself: %v", w.Size, v.Ratio.Median)
			}
			decisions := 0
			for _, n := range v.Reasons {
				decisions += n
			}
			if byRolter := v.Variant == "rolter" || v.Variant == "policy"; byRolter && decisions != v.Requests || !byRolter && decisions > 0 || v.Reasons["fallback"] > 0 {
				t.Errorf("%s, %s: %d requests, decisions %v", w.Size, v.Variant, v.Requests, v.Reasons)
			}
		}
		if want := []string{"direct", plain, "buffered", "rolter", "policy"}; !slices.Equal(names, want) {
			t.Errorf("%s: variants %v, want %v", w.Size, names, want)
		}
	}
	if want := []string{"0.5", "8", "64", streamSize}; !slices.Equal(sizes, want) {
		t.Errorf("sizes %v, want %v", sizes, want)
	}

	var table bytes.Buffer
	if err := r.write(&table); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"0.5 KiB", "64 KiB", "streams of 100 events", "× plain", "policy"} {
		if !bytes.Contains(table.Bytes(), []byte(part)) {
			t.Errorf("the table lacks %q:\n%s", part, &table)
		}
	}
}

func TestMemory(t *testing.T) {
	out := runBench(t, "--quick", "--memory", "--json")
	var r report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if len(r.Memory) != len(memoryVariants) {
		t.Fatalf("%d variants, want %d", len(r.Memory), len(memoryVariants))
	}
	for _, g := range r.Memory[1:] {
		if g.Text == 0 || g.Errors > 0 || g.Heap < g.Text/2 {
			t.Errorf("%+v: prompts take less than half of their text", g)
		}
	}
}

func TestPrompts(t *testing.T) {
	seen := make(map[string]bool)
	for _, size := range []int{512, 8 << 10, 64 << 10} {
		for _, stream := range []bool{false, true} {
			p := newPrompts(size, stream)
			for range 40 {
				body := p.append(nil)
				var request struct {
					Stream   bool
					Messages []struct{ Content string }
				}
				if err := json.Unmarshal(body, &request); err != nil {
					t.Fatalf("%v\n%s", err, body)
				}
				if len(body) != size || request.Stream != stream || len(request.Messages) != 2 {
					t.Fatalf("%d bytes, want %d: %s", len(body), size, body)
				}
				seen[request.Messages[1].Content] = true
			}
		}
	}
	if len(seen) != 3*2*40 {
		t.Errorf("%d distinct prompts, want %d", len(seen), 3*2*40)
	}
}

func TestArguments(t *testing.T) {
	for _, args := range [][]string{
		{"--sizes", "0"}, {"--sizes", "8,x"}, {"--only", "plane"}, {"--rounds", "0"}, {"--cpuprofile", "direct"}, {"more"},
	} {
		if _, err := parse(args); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}

func TestQuantile(t *testing.T) {
	sorted := []time.Duration{10, 20, 30, 40, 50}
	for q, want := range map[float64]time.Duration{0: 10, 0.25: 20, 0.5: 30, 0.625: 35, 1: 50} {
		if got := quantile(sorted, q); got != want {
			t.Errorf("quantile %v: %d, want %d", q, got, want)
		}
	}
	if got := quantile([]time.Duration(nil), 0.5); got != 0 {
		t.Errorf("of nothing: %d", got)
	}
}
