package kvevents

import (
	"context"
	"sync"
)

// What a queue may hold.
const (
	queueMessages = 4096
	queueBytes    = 32 << 20 // of payloads; a single one may be bigger
)

// queue holds messages between the goroutine that reads them and the one that applies them. When it is full, reading stops: the peer's buffers fill, and
// in the end the peer leaves messages out, which their numbers show.
type queue struct {
	ready chan struct{} // tells that there may be something to take, or that the end has come
	space chan struct{} // tells that there may be room

	mu    sync.Mutex
	items []message
	bytes int
	ended bool
	err   error // why it has ended
}

func newQueue() *queue {
	return &queue{ready: make(chan struct{}, 1), space: make(chan struct{}, 1)}
}

// tryPut appends a message if there is room.
func (q *queue) tryPut(m message) bool {
	q.mu.Lock()
	fits := len(q.items) == 0 || len(q.items) < queueMessages && q.bytes+len(m.payload) <= queueBytes
	if fits {
		q.items = append(q.items, m)
		q.bytes += len(m.payload)
	}
	q.mu.Unlock()
	if fits {
		signal(q.ready)
	}
	return fits
}

// put appends a message when there is room.
func (q *queue) put(ctx context.Context, m message) error {
	for !q.tryPut(m) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-q.space:
		}
	}
	return nil
}

// end says that nothing more will come.
func (q *queue) end(err error) {
	q.mu.Lock()
	q.ended, q.err = true, err
	q.mu.Unlock()
	signal(q.ready)
}

// peek returns the oldest message without taking it.
func (q *queue) peek() (m message, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) == 0 {
		return m, false
	}
	return q.items[0], true
}

// pop takes the message that peek has returned.
func (q *queue) pop() {
	q.mu.Lock()
	q.bytes -= len(q.items[0].payload)
	q.items[0] = message{} // the array lives on
	q.items = q.items[1:]
	q.mu.Unlock()
	signal(q.space)
}

func (q *queue) empty() bool {
	_, ok := q.peek()
	return !ok
}

// over tells whether the end has come, and why.
func (q *queue) over() (bool, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ended, q.err
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
