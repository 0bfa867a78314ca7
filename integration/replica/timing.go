package replica

import (
	"fmt"
	"math"
	"time"
)

// Timing says how fast a replica is, how much it takes on and in which order. Zero fields mean the defaults;
// [Timing.WithDefaults] fills them in.
type Timing struct {
	// PrefillRate is the prefill speed in tokens that are not cached per second. Default 7000.
	PrefillRate float64
	// DecodeTime is the time from one generated token of a request to its next. Default 30 ms.
	DecodeTime time.Duration
	// MaxRunning limits the requests that are prefilled or decoded at the same time (vLLM's --max-num-seqs); more wait.
	// Default 256.
	MaxRunning int
	// MaxQueued is vLLM's --max-num-queued-reqs: the most requests in flight, the running ones *included*; one more
	// is rejected. 0 is unlimited, vLLM's default.
	MaxQueued int
	// Scheduling is the order in which waiting requests are taken (vLLM's --scheduling-policy). Default FIFO, vLLM's
	// too, which calls it fcfs.
	Scheduling Scheduling
}

// WithDefaults returns t with the defaults for its zero fields.
func (t Timing) WithDefaults() Timing {
	setDefault(&t.PrefillRate, 7000)
	setDefault(&t.DecodeTime, 30*time.Millisecond)
	setDefault(&t.MaxRunning, 256)
	setDefault(&t.Scheduling, FIFO)
	return t
}

// Validate reports the first value that cannot be meant.
func (t Timing) Validate() error {
	switch {
	case !(t.PrefillRate >= 0) || math.IsInf(t.PrefillRate, 0):
		return fmt.Errorf("prefill rate %v: must be tokens per second, more than 0", t.PrefillRate)
	case t.DecodeTime < 0:
		return fmt.Errorf("decode time %v: must not be negative", t.DecodeTime)
	case t.MaxRunning < 0:
		return fmt.Errorf("max running %d: must not be negative", t.MaxRunning)
	case t.MaxQueued < 0:
		return fmt.Errorf("max queued %d: must not be negative", t.MaxQueued)
	case t.Scheduling != "" && t.Scheduling != FIFO && t.Scheduling != ByPriority:
		return fmt.Errorf("scheduling %q: must be %s or %s", t.Scheduling, FIFO, ByPriority)
	}
	return nil
}

// PrefillTime is the time to prefill so many tokens that are not cached; the first generated token comes with its end.
func (t Timing) PrefillTime(uncachedTokens int) time.Duration {
	return scale(time.Second, float64(uncachedTokens)/t.PrefillRate)
}

// AnswerTime is the time from the first to the last of so many generated tokens.
func (t Timing) AnswerTime(tokens int) time.Duration {
	return time.Duration(max(tokens-1, 0)) * t.DecodeTime
}

// aeon is the longest duration that the model computes with, 73 years, so that sums of a few do not overflow.
const aeon = time.Duration(1 << 61)

func scale(d time.Duration, factor float64) time.Duration {
	return time.Duration(min(float64(d)*factor, float64(aeon)))
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
