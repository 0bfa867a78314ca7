package kvevents

import (
	"math"
	"sync/atomic"
	"time"
)

// pressure is how fast an engine fills its cache. It is written with the mutex of the residency held, and read without.
type pressure struct {
	evicting atomic.Bool   // since the last Clear: the cache is full
	blocks   atomic.Uint64 // bits of a float: blocks that were stored, the longer ago the less they count,
	at       atomic.Int64  // at this time
	stamp    float64       // the engine's time of the last batch, in seconds
}

// pressureFades is after how long a block that was stored counts for 1/e.
const pressureFades = time.Minute

// add takes in the blocks of a batch with this time. In a replay more time passes between batches by the engine's clock than by ours.
func (p *pressure) add(blocks uint64, stamp float64, now time.Duration) {
	passed := now - time.Duration(p.at.Load())
	if between := stamp - p.stamp; p.stamp > 0 && between > passed.Seconds() && between < 1e9 {
		passed = time.Duration(between * float64(time.Second))
	}
	p.stamp = stamp
	p.blocks.Store(math.Float64bits(p.faded(passed) + float64(blocks)))
	p.at.Store(int64(now))
}

// faded is what is left of the blocks after some time.
func (p *pressure) faded(passed time.Duration) float64 {
	return math.Float64frombits(p.blocks.Load()) * math.Exp(-max(0, passed).Seconds()/pressureFades.Seconds())
}

// Pressure tells how fast the source has been storing blocks of late, their number, of which one of a minute ago counts 1/e; and whether it has evicted any,
// so that there is no room for more. Of two that evict, the one under more pressure keeps what it stores for a shorter time.
func (r *Residency) Pressure() (blocks float64, evicts bool) {
	return r.pressure.faded(r.index.pending.now() - time.Duration(r.pressure.at.Load())), r.pressure.evicting.Load()
}
