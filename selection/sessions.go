package selection

import (
	"container/list"
	"sync"
	"time"
)

// Sessions remembers which replica answered a session last. It is bounded: the session that was used longest ago goes first.
type Sessions struct {
	mu     sync.Mutex
	clock  func() time.Duration
	max    int
	ttl    time.Duration
	byID   map[uint64]*list.Element
	recent *list.List // of *session, the latest at the front
}

type session struct {
	id   uint64
	who  replica
	seen time.Duration
}

// replica is a candidate's identity from request to request.
type replica struct {
	load   *Load
	member *Member
}

func (c *Candidate) replica() replica { return replica{c.Load, c.Member} }

// Defaults of [Sessions].
const (
	DefaultSessions   = 100_000
	DefaultSessionTTL = 300 * time.Second
)

// NewSessions returns an empty record. clock tells the time since some moment; nil is the real one.
func NewSessions(clock func() time.Duration) *Sessions {
	if clock == nil {
		clock = realClock()
	}
	return &Sessions{clock: clock, max: DefaultSessions, ttl: DefaultSessionTTL, byID: make(map[uint64]*list.Element), recent: list.New()}
}

// SetLimits replaces how many sessions are remembered and for how long after their last answer; a ttl of 0 switches them off.
func (s *Sessions) SetLimits(sessions int, ttl time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.max, s.ttl = sessions, ttl
	s.trim()
}

// last is the replica that answered the session last; ok is false when nobody did, or too long ago.
func (s *Sessions) last(id uint64) (who replica, ok bool) {
	if id == 0 {
		return replica{}, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.byID[id]
	if e == nil {
		return replica{}, false
	}
	found := e.Value.(*session)
	if s.clock()-found.seen >= s.ttl {
		s.forget(e)
		return replica{}, false
	}
	return found.who, true
}

// answered records that a replica answered the session.
func (s *Sessions) answered(id uint64, who replica) {
	if id == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ttl <= 0 {
		return
	}
	if e := s.byID[id]; e != nil {
		found := e.Value.(*session)
		found.who, found.seen = who, s.clock()
		s.recent.MoveToFront(e)
		return
	}
	s.byID[id] = s.recent.PushFront(&session{id, who, s.clock()})
	s.trim()
}

func (s *Sessions) trim() {
	for s.recent.Len() > s.max || s.ttl <= 0 && s.recent.Len() > 0 {
		s.forget(s.recent.Back())
	}
}

func (s *Sessions) forget(e *list.Element) {
	delete(s.byID, e.Value.(*session).id)
	s.recent.Remove(e)
}

// Len is the number of sessions that are remembered.
func (s *Sessions) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.recent.Len()
}
