package kvevents

import (
	"testing"
	"time"
)

// expecting is an index with a clock, and two sources of which no event has come.
func expecting() (x *Index, now *time.Duration, holdings []Holding) {
	x, now = NewIndex(), new(time.Duration)
	x.pending.now = func() time.Duration { return *now }
	return x, now, []Holding{{Residency: x.Add(0), Model: "m"}, {Residency: x.Add(0), Model: "m"}}
}

func choose(x *Index, q *Query, holdings []Holding, tokens []uint32) {
	q.Reset(tokens, "")
	x.Match(q, holdings)
	x.MatchExpected(q, holdings)
}

func TestSiblingSeesWhatIsExpected(t *testing.T) {
	prompt := numbered(1, 128)
	sibling := append(numbered(1, 96), numbered(2, 33)...)
	for _, c := range []struct {
		name  string
		setUp func(r *Residency)
		size  int
	}{
		{"cold replica", func(*Residency) {}, 16},
		{"cold replica, block size told", func(r *Residency) { r.SetBlockSize(24) }, 24},
		{"block size seen", func(r *Residency) { apply(r, storeEvent(0, []uint64{9}, numbered(9, 48))) }, 48},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, now, holdings := expecting()
			r := holdings[0].Residency
			c.setUp(r)
			var q Query
			choose(x, &q, holdings, prompt)
			if holdings[0].Resident != 0 {
				t.Fatalf("%+v before anything is expected", holdings[0])
			}
			e := x.Expect(&q, r, "m")
			choose(x, &q, holdings, prompt)
			full := 128 / c.size * c.size
			if h := holdings[0]; h.Resident != full || h.Cached != 127/c.size*c.size || h.Score != 1 || h.Total != full {
				t.Errorf("same prompt: %+v, want all %d tokens", h, full)
			}
			choose(x, &q, holdings, sibling)
			if h := holdings[0]; h.Resident != 96/c.size*c.size || h.Score != float64(h.Resident)/float64(h.Total) {
				t.Errorf("sibling: %+v, want %d tokens", h, 96/c.size*c.size)
			}
			if holdings[1].Resident != 0 {
				t.Errorf("the other source: %+v", holdings[1])
			}

			x.Withdraw(e)
			x.Withdraw(e)
			choose(x, &q, holdings, sibling)
			if holdings[0].Resident != 0 || x.pending.count.Load() != 0 || x.pending.blocks != 0 {
				t.Errorf("withdrawn, but %+v", holdings[0])
			}

			x.Expect(&q, r, "m")
			*now += expectFor
			choose(x, &q, holdings, sibling)
			if holdings[0].Resident != 0 || x.pending.count.Load() != 0 {
				t.Errorf("too old, but %+v", holdings[0])
			}
		})
	}
}

func TestExpectationEndsWithTheEvent(t *testing.T) {
	x, _, holdings := expecting()
	r := holdings[0].Residency
	prompt := numbered(1, 64)
	var q Query
	choose(x, &q, holdings, prompt)
	x.Expect(&q, r, "m")
	apply(r, storeEvent(0, hashesOf(1, 4), prompt)) // between Match and MatchExpected
	x.MatchExpected(&q, holdings)
	if holdings[0].Resident != 64 {
		t.Errorf("%+v, want 64 tokens", holdings[0])
	}
	choose(x, &q, holdings, prompt)
	if holdings[0].Resident != 64 || x.pending.blocks != 0 {
		t.Errorf("%+v, want 64 tokens, and nothing expected: %d blocks", holdings[0], x.pending.blocks)
	}
	if e := x.Expect(&q, r, "m"); e != 0 {
		t.Error("what is held is expected")
	}
	apply(r, removal(hashesOf(1, 4)...))
	choose(x, &q, holdings, prompt)
	if holdings[0].Resident != 0 {
		t.Errorf("removed, but %+v", holdings[0])
	}
}

func TestExpectedIsApartByAdapter(t *testing.T) {
	x, _, holdings := expecting()
	holdings[0].Residency.SetAdapters([]string{"ad"})
	var q Query
	choose(x, &q, holdings, numbered(1, 64))
	x.Expect(&q, holdings[0].Residency, "ad")
	choose(x, &q, holdings, numbered(1, 64))
	if holdings[0].Resident != 0 {
		t.Errorf("the model itself: %+v", holdings[0])
	}
	holdings[0].Model = "ad"
	choose(x, &q, holdings, numbered(1, 64))
	if holdings[0].Resident != 64 {
		t.Errorf("the adapter: %+v", holdings[0])
	}
}

func TestExpectedIsBounded(t *testing.T) {
	x, _, holdings := expecting()
	var q Query
	for i := range 2 * maxExpected {
		q.Reset(numbered(i, 32), "")
		x.Expect(&q, holdings[0].Residency, "m")
	}
	if n := len(x.pending.list); n != maxExpected {
		t.Errorf("%d expectations, want %d", n, maxExpected)
	}
	holdings[0].Residency.SetBlockSize(1)
	long := numbered(1, maxExpectedBlocks/3)
	for i := range 5 {
		long[0] = uint32(i)
		q.Reset(long, "")
		x.Expect(&q, holdings[0].Residency, "m")
	}
	if p := &x.pending; p.blocks > maxExpectedBlocks || len(p.list) == 0 {
		t.Errorf("%d expectations of %d blocks, want at most %d", len(p.list), p.blocks, maxExpectedBlocks)
	}
	holdings[0].Residency.Close()
	if p := &x.pending; p.blocks != 0 {
		t.Errorf("%d blocks are expected of a source that is gone", p.blocks)
	}
}
