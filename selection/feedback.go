package selection

// What engines deliver is compared with what was predicted, where answers say how many tokens of their prompt were cached. Predictions that keep
// failing mean that the replica holds less than it was sent: it has restarted, its cache is smaller than assumed, or others use it too. Its share of
// the record is then bounded to what is true. More than predicted is normal: what others have sent, or an outer cache.

const (
	// minPrediction is the least prediction, in bytes, that is compared: below it, whole blocks and templates blur the figures.
	minPrediction = 2048
	// feedbackWindow is how many predictions are judged together.
	feedbackWindow = 16
	// restartMisses is how many predictions must fail altogether, one after another, to say that the replica has lost everything.
	restartMisses = 4
	// failing is the share of what was predicted below which the record is too large, and kept the one that a bound is learned for: where what is recorded is
	// what the engine has, some is still evicted between the pick and the prefill.
	failing = 0.7
	kept    = 0.9
	// learning is by how much a bound follows the share of a window. Too small a bound costs far more than one that is a little too large.
	learning = 0.4
	// fall is by how much one prompt that was gone lowers the bound, of what that is more than the prompt's reuse distance.
	fall = 0.4
	// leastLearned is the least that a bound is learned to be, in bytes.
	leastLearned = 64 << 10
	// tokenBytes is how many bytes of a prompt a token is until it is learned.
	tokenBytes = 4
)

// feedback is what the answers of a replica told. Guarded by Prefixes.mu.
type feedback struct {
	tokenBytes float64 // learned bytes of prompt per token; 0 until it is
	judged     int     // predictions in the window
	predicted  float64 // bytes
	delivered  float64
	misses     int   // predictions in a row of which nothing was delivered
	before     int64 // what was learned before the first of them
	learned    int64 // bound of the record in bytes; 0 for none
}

// prediction is what was expected of an answer.
type prediction struct {
	prefixes *Prefixes
	member   *Member
	counted  int   // bytes of the prompt
	matched  int   // bytes of it that were thought to be cached
	distance int64 // of reuse; see [PrefixIndex]
}

// Delivered says what the engine reported: the tokens of the prompt, the cached ones among them.
func (l *Lease) Delivered(promptTokens, cachedTokens int) {
	l.mu.Lock()
	p := l.predicted
	l.predicted = prediction{}
	l.mu.Unlock()
	if p.prefixes == nil || promptTokens <= 0 || cachedTokens < 0 {
		return
	}
	p.prefixes.mu.Lock()
	defer p.prefixes.mu.Unlock()
	if p.member.slot != noSlot {
		p.prefixes.judge(p, promptTokens, min(cachedTokens, promptTokens))
	}
}

// judge takes in one comparison. The caller holds the lock.
func (p *Prefixes) judge(was prediction, promptTokens, cachedTokens int) {
	f := &was.member.feedback
	perToken := min(max(float64(was.counted)/float64(promptTokens), 0.5), 64)
	if f.tokenBytes == 0 {
		f.tokenBytes = perToken
	}
	f.tokenBytes += (perToken - f.tokenBytes) / 16
	if was.matched < minPrediction {
		p.bound(was.member)
		return
	}
	delivered := min(float64(cachedTokens)/float64(promptTokens)*float64(was.counted), float64(was.matched))
	f.judged++
	f.predicted += float64(was.matched)
	f.delivered += delivered
	share, text := delivered/float64(was.matched), p.index.Text(was.member.slot)
	switch {
	case share >= 0.1:
		f.misses = 0
	case f.misses == 0:
		f.misses, f.before = 1, f.learned
	default:
		f.misses++
	}
	// An engine that says how much it has room for is believed, unless it goes on so: one prompt may have been evicted before its turn came.
	if was.distance >= 0 && share < 0.5 && was.member.capacity == 0 {
		if f.learned == 0 {
			f.learned = text
		}
		f.learned -= int64(fall * float64(max(f.learned-was.distance, 0)))
	}
	switch {
	case f.misses >= restartMisses:
		p.forget(was.member)
		was.member.feedback = feedback{tokenBytes: f.tokenBytes, learned: f.before}
	case f.judged >= feedbackWindow:
		share = f.delivered / f.predicted
		// A record that does not fill its bound says nothing of a larger one.
		if f.learned == 0 && share < failing || f.learned > 0 && (share < kept || text > f.learned-f.learned/8) {
			f.learned = int64(float64(text) * (1 + learning*(share-kept)))
		}
		f.judged, f.predicted, f.delivered = 0, 0, 0
	}
	if f.learned > 0 {
		f.learned = max(f.learned, leastLearned)
	}
	p.bound(was.member)
}
