package selection

import "sync"

// Lease is what one attempt of a request holds: a place in its replica's load, and the provisional record of its prompt. The zero
// value is free. Its methods may be called from several goroutines, in any order and any number of times.
type Lease struct {
	mu       sync.Mutex
	load     *Load
	prefixes *Prefixes // nil once the record is settled
	record   Record
}

// hold takes a reservation. The caller holds the mutex of the load's registry.
func (l *Lease) hold(load *Load) {
	l.mu.Lock()
	l.load = load
	l.mu.Unlock()
}

// holdRecord takes a provisional record. The caller holds prefixes.mu.
func (l *Lease) holdRecord(prefixes *Prefixes, record Record) {
	l.mu.Lock()
	l.prefixes, l.record = prefixes, record
	l.mu.Unlock()
}

// Answered says that the replica answered: served is true when it took the prompt in (a status below 400), and what was recorded
// stands; otherwise it is taken back. Only the first call of a lease counts.
func (l *Lease) Answered(served bool) {
	l.mu.Lock()
	prefixes, record := l.prefixes, l.record
	l.prefixes = nil
	l.mu.Unlock()
	if prefixes != nil {
		prefixes.settle(record, served)
	}
}

// Release gives the reservation back, and takes back what was recorded if no answer came.
func (l *Lease) Release() {
	l.Answered(false)
	l.mu.Lock()
	load := l.load
	l.load = nil
	l.mu.Unlock()
	if load == nil {
		return
	}
	loads := load.loads
	loads.mu.Lock()
	load.ended()
	loads.forget(load)
	loads.mu.Unlock()
}

// Held says whether the lease holds a reservation.
func (l *Lease) Held() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.load != nil
}
