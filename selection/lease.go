package selection

import "sync"

// Lease is what one attempt of a request holds: a place in its replica's load, and the provisional record of its prompt. The zero
// value is free. Its methods may be called from several goroutines, in any order and any number of times.
type Lease struct {
	mu        sync.Mutex
	load      *Load
	prefixes  *Prefixes // nil once the record is settled
	record    Record
	predicted prediction
	sessions  *Sessions // nil where there is no session, or once it is settled
	session   uint64
	who       replica
	work      *work // nil where no work is accounted, or once it is settled
}

// hold takes a reservation. The caller holds the mutex of the load's registry.
func (l *Lease) hold(load *Load) {
	l.mu.Lock()
	l.load = load
	l.mu.Unlock()
}

// holdRecord takes a provisional record. The caller holds prefixes.mu.
func (l *Lease) holdRecord(prefixes *Prefixes, record Record, predicted prediction) {
	l.mu.Lock()
	l.prefixes, l.record, l.predicted = prefixes, record, predicted
	l.mu.Unlock()
}

// holdSession remembers the session, which the replica takes over when it answers.
func (l *Lease) holdSession(sessions *Sessions, id uint64, who replica) {
	l.mu.Lock()
	l.sessions, l.session, l.who = sessions, id, who
	l.mu.Unlock()
}

// holdWork takes a place in the replica's queue. The caller holds the mutex of the loads.
func (l *Lease) holdWork(w *work) {
	l.mu.Lock()
	l.work = w
	l.mu.Unlock()
}

// takeWork ends the accounting of the work, once.
func (l *Lease) takeWork() (*Load, *work) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.work
	l.work = nil
	return l.load, w
}

// Taken says that the replica has the request. An engine that streams says so at once, with the head of its answer.
func (l *Lease) Taken() {
	l.mu.Lock()
	load, w := l.load, l.work
	l.mu.Unlock()
	if w != nil {
		load.loads.mu.Lock()
		w.taken = true
		load.loads.mu.Unlock()
	}
}

// FirstByte says that the first byte of the answer came: the prompt has been prefilled. Only the first call counts.
func (l *Lease) FirstByte() {
	if load, w := l.takeWork(); w != nil {
		load.queue.firstByte(load.loads, w)
	}
}

// Answered says that the replica answered: served is true when it took the prompt in (a status below 400), and what was recorded
// stands; otherwise it is taken back. Only the first call of a lease counts.
func (l *Lease) Answered(served bool) {
	l.mu.Lock()
	prefixes, record, sessions := l.prefixes, l.record, l.sessions
	l.prefixes, l.sessions = nil, nil
	l.mu.Unlock()
	if sessions != nil && served {
		sessions.answered(l.session, l.who)
	}
	if prefixes != nil {
		prefixes.settle(record, served)
	}
}

// Release gives the reservation back, and takes back what was recorded if no answer came.
func (l *Lease) Release() {
	l.Answered(false)
	if load, w := l.takeWork(); w != nil {
		load.queue.withdraw(load.loads, w)
	}
	l.mu.Lock()
	load := l.load
	l.load, l.predicted = nil, prediction{} // what was predicted of this replica is not to be held against the next
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
