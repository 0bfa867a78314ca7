package selection

import "math/rand/v2"

// Scorer gives a candidate a score in [0, 1]. It is called in the critical section of a pick.
type Scorer interface {
	Score(s *Situation, i int) float64
}

// Situation is what scorers look at: the request, the candidates, and what was worked out for all of them.
type Situation struct {
	Request    *Request
	Candidates []Candidate

	views    []view
	least    int     // the least load of the candidates
	outer    float64 // the mean score of the outer caches of which something is known
	heaviest float64 // the largest weight
	session  replica // that answered the session last
}

// The scorers of [Pipeline].
type (
	// SessionAffinity is 1 for the replica that answered the session last.
	SessionAffinity struct{}
	// StaticWeight is the candidate's weight ÷ the largest one.
	StaticWeight struct{}
	// InFlightLoad is (1 + the least load) ÷ (1 + the candidate's load).
	InFlightLoad struct{}
	// OuterCache is how much room there is in the cache behind the engine's own: 1 − its occupancy, 0 when it is down. One of which nothing is known has
	// the mean of the others.
	OuterCache struct{}
	// PrefixAffinity is the share of the prompt that the candidate holds, as its engine says or else as it was sent before.
	PrefixAffinity struct{}
)

// Score implements [Scorer].
func (SessionAffinity) Score(s *Situation, i int) float64 {
	if s.session.load != nil && s.Candidates[i].replica() == s.session {
		return 1
	}
	return 0
}

// Score implements [Scorer].
func (StaticWeight) Score(s *Situation, i int) float64 { return s.Candidates[i].weight() / s.heaviest }

// Score implements [Scorer].
func (InFlightLoad) Score(s *Situation, i int) float64 {
	return float64(1+s.least) / float64(1+s.Candidates[i].load())
}

// Score implements [Scorer].
func (PrefixAffinity) Score(s *Situation, i int) float64 {
	if len(s.views) == 0 {
		return 0
	}
	return float64(s.views[i].matched) / float64(s.Request.counted())
}

// Score implements [Scorer].
func (OuterCache) Score(s *Situation, i int) float64 { return s.Candidates[i].Outer.score(s.outer) }

// WeightedScorer is a scorer and how much it counts.
type WeightedScorer struct {
	Scorer Scorer
	Weight float64 // 0 or more
}

// Pipeline drops the candidates that cannot take the request, adds up the weighted scores of the others, and takes the best. Equals are taken
// at random.
type Pipeline struct {
	Loads    *Loads
	Prefixes *Prefixes
	Sessions *Sessions
	Scorers  []WeightedScorer

	// Unobserved says that nobody calls [Lease.FirstByte].
	Unobserved bool
}

// Pick implements [Strategy].
func (p *Pipeline) Pick(req *Request, candidates []Candidate, lease *Lease) (Decision, bool) {
	s := Situation{Request: req, Candidates: candidates}
	s.session, _ = p.Sessions.last(req.Session)
	p.Prefixes.mu.Lock()
	defer p.Prefixes.mu.Unlock()
	if req.counted() > 0 {
		s.views = p.Prefixes.look(req, candidates)
	}
	d, ok := p.choose(&s, lease)
	if !ok {
		return d, false
	}
	if req.counted() > 0 {
		p.Prefixes.record(req, candidates, s.views, d.Index, lease)
	}
	lease.holdSession(p.Sessions, req.Session, candidates[d.Index].replica())
	return d, true
}

// choose picks and reserves. The caller holds the lock of the prefixes.
func (p *Pipeline) choose(s *Situation, lease *Lease) (Decision, bool) {
	p.Loads.mu.Lock()
	defer p.Loads.mu.Unlock()
	s.least = -1
	for i := range s.Candidates {
		c := &s.Candidates[i]
		if c.full() {
			continue
		}
		if load := c.load(); s.least < 0 || load < s.least {
			s.least = load
		}
		s.heaviest = max(s.heaviest, c.weight())
	}
	s.outer, _ = meanOuter(s.Candidates)
	best, highest, equals := -1, 0.0, 0
	for i := range s.Candidates {
		if s.Candidates[i].full() {
			continue
		}
		total := 0.0
		for _, scorer := range p.Scorers {
			total += scorer.Weight * scorer.Scorer.Score(s, i)
		}
		switch {
		case best < 0 || total > highest:
			best, highest, equals = i, total, 1
		case total < highest || s.Candidates[i].Outer.down() && !s.Candidates[best].Outer.down():
		case !s.Candidates[i].Outer.down() && s.Candidates[best].Outer.down():
			best, equals = i, 1
		default:
			// Each of n equals is kept with a chance of 1/n.
			if equals++; rand.IntN(equals) == 0 {
				best = i
			}
		}
	}
	if best < 0 {
		return Decision{}, false
	}
	d := Decision{Index: best, Reason: ReasonPipeline, Score: PrefixAffinity{}.Score(s, best)}
	if score := (SessionAffinity{}).Score(s, best); score > 0 {
		d.Reason = ReasonSession
	}
	p.Loads.take(&d, s.Candidates, lease)
	if len(s.views) > 0 {
		p.Loads.queue(&d, s.Request, s.Candidates, s.views[best].matched, p.Unobserved, lease)
	}
	return d, true
}

var _ Strategy = (*Pipeline)(nil)
