package selection

import "math"

// perToken is how many bytes of a prompt a token of the replica is. The caller holds the lock.
func (m *Member) perToken() float64 {
	if m.feedback.tokenBytes > 0 {
		return m.feedback.tokenBytes
	}
	return tokenBytes
}

// Resize asks for the capacity of every replica again.
func (p *Prefixes) Resize() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		p.resize(m)
	}
}

// resize asks how much there is room for in a replica's cache. The caller holds the lock.
func (p *Prefixes) resize(m *Member) {
	if p.Capacity != nil {
		m.capacity = max(p.Capacity(m.key), 0)
		p.bound(m)
	}
}

// bound applies the smaller of what the replica's cache is said to have room for and what was learned. The caller holds the lock.
func (p *Prefixes) bound(m *Member) {
	if m.slot == noSlot {
		return
	}
	// A bound is applied when it has moved by a little, not with every answer.
	most := min(float64(m.capacity)*m.perToken(), 1<<50)
	if learned := float64(m.feedback.learned); learned > 0 && (most == 0 || learned < most) {
		most = learned
	}
	if was := float64(m.bounded); most > was*1.02 || most < was*0.98 {
		m.bounded = int64(most)
		p.index.SetMaxText(m.slot, m.bounded)
	}
}

// Forget drops everything that is recorded for the replicas whose key meets a condition, because their caches are known to be empty. What is not settled
// yet goes too: whether it was sent before or after the cache was emptied is not known.
func (p *Prefixes) Forget(meets func(key string) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, m := range p.members {
		if meets(key) {
			p.forget(m)
		}
	}
}

// forget gives the member a new slot. The caller holds the lock.
func (p *Prefixes) forget(m *Member) {
	if m.slot == noSlot {
		return
	}
	p.index.Remove(m.slot)
	m.slot, m.bounded = p.index.Add(), 0
	p.bound(m)
}

// room is how many bytes of prompts the candidate's cache is thought to have room for: most where that is not known. The caller holds the lock.
func (c *Candidate) room(most float64) float64 {
	if c.Member != nil && c.Member.bounded > 0 {
		return float64(c.Member.bounded)
	}
	return max(most, 1)
}

// takenIn is what was new to the candidate lately; see [Member]. The caller holds the lock.
func (c *Candidate) takenIn() float64 {
	if c.Member == nil {
		return 0
	}
	return c.Member.takenIn
}

// fullness is how full the candidate's cache is thought to be of what is still in use, in [0, 1]. A full one that has taken in less for its room than all candidates
// have for theirs, which is the usual, holds what has been of no use for longer: it is as good as room. The caller holds the lock.
func (p *Prefixes) fullness(c *Candidate, v *view, usual float64) float64 {
	full := min(p.text(v)/v.room, 1)
	if usual > 0 {
		full *= min(c.takenIn()/v.room/usual, 1)
	}
	return full
}

// recentRooms is how many times what all caches have room for counts as recent.
const recentRooms = 2

// takeIn counts the bytes that are new to the candidate that was picked; rooms is what all have room for. What was counted before becomes less for all of them,
// which is to say that what is counted now is more. The caller holds the lock.
func (p *Prefixes) takeIn(picked *Candidate, uncached, rooms float64) {
	p.unit *= math.Exp(min(uncached/rooms, 1) / recentRooms)
	if p.unit > 1e100 {
		for _, m := range p.members {
			m.takenIn /= p.unit
		}
		p.unit = 1
	}
	if picked.Member != nil {
		picked.Member.takenIn += uncached * p.unit
	}
}
