package selection

import "sync"

// PrefixIndex knows which replicas (by slot) have been sent which prompts. It need not be safe for concurrent use.
type PrefixIndex interface {
	// Match fills found, by slot, with what each slot holds of text. len(found) is at least Slots().
	Match(text []byte, found []Match)
	// ReuseDistance is about how many bytes of the slot's prompts are more recent than the one that the text of the last Match continues, -1 where that is
	// not known. Nothing has changed since Match.
	ReuseDistance(slot int) int64
	// Insert records text for a slot, provisionally; the result settles it, once, by Confirm or Rollback.
	Insert(slot int, text []byte) Record
	Confirm(Record)
	Rollback(Record)
	// Prompts is the number of prompts recorded for a slot.
	Prompts(slot int) int
	// Text is how many bytes they are together, what they share counted once.
	Text(slot int) int64
	// SetMaxText bounds that; 0 is no bound.
	SetMaxText(slot int, bytes int64)
	// Add makes a slot and Remove forgets all it holds; a number may be given again afterwards.
	Add() int
	Remove(slot int)
	Slots() int
}

// Match is what one slot holds of a text: how many leading bytes, and whether the whole of a recorded prompt is a prefix of it. It is an
// alias of a plain type, as is Record, so that an index can implement [PrefixIndex] without importing this package.
type Match = struct {
	Bytes     int
	Continues bool
}

// Record names an insertion of a [PrefixIndex]; the zero value is none.
type Record = struct {
	Serial uint64
	Index  uint32
}

// Prefixes is the shared record of who was sent what: an index, its lock, and its members, the replicas by their stable identity. It outlives
// configurations: each one joins the replicas that it has and leaves them when it is unloaded.
type Prefixes struct {
	// Capacity says how many tokens there is room for in the cache of a replica, by its key; 0 is unknown. A replica's share of the record is kept to
	// that. It is asked when the replica joins, and for all of them by Resize, under a lock: it must be quick. It is set before any replica joins.
	Capacity func(key string) int64

	mu      sync.Mutex
	index   PrefixIndex
	members map[string]*Member
	unit    float64 // of Member.takenIn: what a byte is now

	// reused from pick to pick
	found []Match
	views []view
}

// Member is one replica's place in [Prefixes].
type Member struct {
	key string

	// guarded by Prefixes.mu
	slot     int // noSlot once everybody has left
	refs     int
	capacity int64 // tokens that the replica's cache has room for; 0 is unknown
	bounded  int64 // bytes that its share of the record is bounded to; 0 is not
	feedback feedback
	takenIn  float64 // how much of what it was sent lately was new to it, in a unit that grows; see takeIn
}

const noSlot = -1

// NewPrefixes wraps an empty index.
func NewPrefixes(index PrefixIndex) *Prefixes {
	return &Prefixes{index: index, members: make(map[string]*Member), unit: 1}
}

// Join returns the member with this key, which stays until as many Leave calls.
func (p *Prefixes) Join(key string) *Member {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.members[key]
	if m == nil {
		m = &Member{key: key, slot: p.index.Add()}
		p.members[key] = m
		p.resize(m)
	}
	m.refs++
	return m
}

// Leave gives back one Join; after the last one all that was recorded for the replica is forgotten. Requests of an unloaded configuration may
// still hold the member: they find nothing recorded for it and record nothing.
func (p *Prefixes) Leave(m *Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.refs--; m.refs == 0 {
		delete(p.members, m.key)
		p.index.Remove(m.slot)
		m.slot = noSlot
	}
}

// Do calls f with the index, under the lock.
func (p *Prefixes) Do(f func(PrefixIndex)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(p.index)
}

// Prompts is the number of prompts recorded for each replica.
func (p *Prefixes) Prompts() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	prompts := make(map[string]int, len(p.members))
	for key, m := range p.members {
		prompts[key] = p.index.Prompts(m.slot)
	}
	return prompts
}

// view is what a candidate holds of a prompt.
type view struct {
	slot      int
	matched   int  // counted bytes
	recorded  int  // of them, by what was recorded
	continues bool // the candidate was sent this prompt or one that it continues,
	turn      bool // which is shorter: the prompt is a further turn of a conversation

	speed, room float64 // of the candidate, while least_prefill chooses
}

// look says what every candidate holds: by what its engine says, where that is known, otherwise by what was recorded. The caller holds the lock, as long
// as it uses the result.
func (p *Prefixes) look(req *Request, candidates []Candidate) []view {
	if n := p.index.Slots(); n > len(p.found) {
		p.found = make([]Match, n)
	}
	p.index.Match(req.Text, p.found)
	if req.Residency != nil {
		req.Residency.Refresh()
	}
	p.views = p.views[:0]
	for i := range candidates {
		v := view{slot: candidates[i].slot()}
		if v.slot != noSlot {
			m := p.found[v.slot]
			v.recorded = min(max(m.Bytes-req.Lead, 0), req.counted())
			v.matched = v.recorded
			v.continues, v.turn = m.Continues, m.Continues && m.Bytes < len(req.Text)
		}
		if req.Residency != nil {
			if share, ok := req.Residency.Share(i); ok {
				v.matched = int(share * float64(req.counted()))
			}
		}
		p.views = append(p.views, v)
	}
	return p.views
}

// pick looks the prompt up for all candidates, has one chosen (and reserved), and records the prompt for it, all under the lock. A request without a
// prompt goes by load.
func (p *Prefixes) pick(loads *Loads, req *Request, candidates []Candidate, lease *Lease, choose func([]view) (Decision, bool)) (Decision, bool) {
	counted := req.counted()
	if counted == 0 {
		return byLoad(loads, req, candidates, lease, ReasonNoPrompt)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	views := p.look(req, candidates)
	d, ok := choose(views)
	if !ok {
		return d, false
	}
	d.Score = float64(views[d.Index].matched) / float64(counted)
	p.record(req, candidates, views, d.Index, lease)
	return d, true
}

// record records the prompt for the candidate that was picked, provisionally. The caller holds the lock.
func (p *Prefixes) record(req *Request, candidates []Candidate, views []view, picked int, lease *Lease) {
	if req.Residency != nil {
		req.Residency.Expect(picked)
	}
	if v := views[picked]; v.slot != noSlot {
		c, distance := &candidates[picked], int64(-1)
		if v.recorded >= minPrediction && !c.ByDeadline { // by which what comes later may be prefilled before
			distance = p.index.ReuseDistance(v.slot)
		}
		predicted := prediction{p, c.Member, req.counted(), v.recorded, distance}
		lease.holdRecord(p, p.index.Insert(v.slot, req.Text), predicted)
	}
}

// prompts is how many prompts are recorded for a candidate. Prompts are counted and not tree nodes, because how many nodes a prompt takes depends
// on where other prompts happen to branch off: the spread over idle replicas would be uneven. The caller holds the lock.
func (p *Prefixes) prompts(v *view) int {
	if v.slot == noSlot {
		return 0
	}
	return p.index.Prompts(v.slot)
}

// text is how many bytes of prompts are recorded for a candidate. The caller holds the lock.
func (p *Prefixes) text(v *view) float64 {
	if v.slot == noSlot {
		return 0
	}
	return float64(p.index.Text(v.slot))
}

// fewer compares how many prompts are recorded for two candidates, for their weight: it is negative when i has fewer than j. One whose outer cache is known
// to be down comes after one that has more. The caller holds the lock.
func (p *Prefixes) fewer(candidates []Candidate, views []view, i, j int) float64 {
	if down := candidates[i].Outer.down(); down != candidates[j].Outer.down() {
		if down {
			return 1
		}
		return -1
	}
	return float64(p.prompts(&views[i]))/candidates[i].weight() - float64(p.prompts(&views[j]))/candidates[j].weight()
}

// settle confirms a provisional record or takes it back.
func (p *Prefixes) settle(record Record, served bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if served {
		p.index.Confirm(record)
	} else {
		p.index.Rollback(record)
	}
}
