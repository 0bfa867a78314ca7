package selection

// perToken is how many bytes of a prompt a token of the replica is. The caller holds the lock.
func (m *Member) perToken() float64 {
	if m.feedback.tokenBytes > 0 {
		return m.feedback.tokenBytes
	}
	return tokenBytes
}

// SetCapacity says how many tokens the replica's cache has room for; 0 is unknown. Its share of the record is kept to that.
func (p *Prefixes) SetCapacity(m *Member, tokens int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m.capacity = max(tokens, 0)
	p.bound(m)
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

// Forget drops everything that is recorded for a replica, because its cache is known to be empty.
func (p *Prefixes) Forget(m *Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forget(m)
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
