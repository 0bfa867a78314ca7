package selection

import (
	"testing"
	"time"
)

func TestForeignRequestsAddToTheLoad(t *testing.T) {
	now := time.Duration(0)
	f := newFleetAt(t, 2, func() time.Duration { return now })
	f.strategy = LeastLoad{f.loads}
	f.load(1, 2)
	busy := f.all[0].Load
	busy.SetForeign(5, 15*time.Second)
	f.all[0].Limit = 2 // the limit is ours: foreign requests do not fill it

	i, d, lease := f.pick(text("prompt"))
	if i != 1 || d.Load != 2 {
		t.Errorf("picked %d with load %d, want 1 with 2", i, d.Load)
	}
	lease.Release()
	if i, d, lease = f.pick(text("prompt"), 1); i != 0 || d.Load != 6 {
		t.Errorf("picked %d with load %d, want 0 with 6", i, d.Load)
	}
	lease.Release()
	now = 15 * time.Second
	if i, d, lease = f.pick(text("prompt")); i != 0 || d.Load != 1 {
		t.Errorf("picked %d with load %d when the figure was too old, want 0 with 1", i, d.Load)
	}
	lease.Release()
}

func TestAHolderIsSparedWhenOthersKeepItBusy(t *testing.T) {
	f := newFleet(t, 2)
	f.warm(0, text("a prompt that the first replica was sent"))
	f.all[0].Load.SetForeign(10, time.Minute)
	if i, d, lease := f.pick(text("a prompt that the first replica was sent and a turn")); i != 1 || d.Reason != ReasonOverloaded {
		t.Errorf("picked %d, %s", i, d.Reason)
	} else {
		lease.Release()
	}
}

// What ended a moment ago may still be in the engine's count.
func TestRecentLoad(t *testing.T) {
	now := time.Duration(0)
	f := newFleetAt(t, 1, func() time.Duration { return now })
	_, _, first := f.pick(text("a"))
	_, _, second := f.pick(text("b"))
	second.Release()
	first.Release()
	for _, step := range []struct {
		at   time.Duration
		want int
	}{{0, 2}, {peakFades / 4, 2}, {peakFades * 3 / 4, 1}, {peakFades, 0}} {
		now = step.at
		if got := f.all[0].Load.Recent(); got != step.want {
			t.Errorf("%v later: %d, want %d", step.at, got, step.want)
		}
	}
}
