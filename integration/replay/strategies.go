package replay

import (
	"fmt"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/rolter-ai/caddy-rolter/selection"
)

// world is what a strategy may look at beside the request and its candidates.
type world struct {
	loads    *selection.Loads
	prefixes *selection.Prefixes
	replicas int
}

// strategies are those that can be replayed, by the name that a configuration gives them.
var strategies = []struct {
	name  string
	build func(world) selection.Strategy
}{
	{"cache_aware", func(w world) selection.Strategy {
		return &selection.CacheAware{
			Loads:          w.loads,
			Prefixes:       w.prefixes,
			Threshold:      selection.DefaultThreshold,
			OverloadMargin: selection.DefaultOverloadMargin,
			OverloadRatio:  selection.DefaultOverloadRatio,
		}
	}},
	{"least_prefill", func(w world) selection.Strategy {
		return &selection.LeastPrefill{Loads: w.loads, Prefixes: w.prefixes, W: selection.DefaultW}
	}},
	{"pipeline", func(w world) selection.Strategy {
		return &selection.Pipeline{Loads: w.loads, Prefixes: w.prefixes, Sessions: selection.NewSessions(nil), Scorers: []selection.WeightedScorer{
			{Scorer: selection.StaticWeight{}, Weight: 1}, {Scorer: selection.InFlightLoad{}, Weight: 1}, {Scorer: selection.PrefixAffinity{}, Weight: 1},
		}}
	}},
	{"least_load", func(w world) selection.Strategy { return selection.LeastLoad{Loads: w.loads} }},
	{"round_robin", func(w world) selection.Strategy { return newCaddyPolicy(new(reverseproxy.RoundRobinSelection), w) }},
	{"random", func(w world) selection.Strategy { return newCaddyPolicy(new(reverseproxy.RandomSelection), w) }},
}

// buildStrategy returns how a strategy is built, or nil.
func buildStrategy(name string) func(world) selection.Strategy {
	for _, s := range strategies {
		if s.name == name {
			return s.build
		}
	}
	return nil
}

func strategyNames() string {
	var names []string
	for _, s := range strategies {
		names = append(names, s.name)
	}
	return strings.Join(names, ", ")
}

// caddyPolicy lets one of Caddy's selection policies pick, for comparison. It serves those that look neither at the request nor at the
// load, which Caddy counts where only its proxy can. Nothing is reserved, as such a policy would not see it. To them all upstreams are alike: the
// pool is as many as there are candidates.
type caddyPolicy struct {
	policy reverseproxy.Selector
	pool   reverseproxy.UpstreamPool
}

func newCaddyPolicy(policy reverseproxy.Selector, w world) caddyPolicy {
	p := caddyPolicy{policy: policy}
	for i := range w.replicas {
		p.pool = append(p.pool, &reverseproxy.Upstream{Host: new(reverseproxy.Host), Dial: address(i)})
	}
	return p
}

// Pick implements [selection.Strategy].
func (p caddyPolicy) Pick(_ *selection.Request, candidates []selection.Candidate, _ *selection.Lease) (selection.Decision, bool) {
	pool := p.pool[:len(candidates)]
	i := slices.Index(pool, p.policy.Select(pool, nil, nil))
	return selection.Decision{Index: i, Reason: selection.ReasonFallback}, i >= 0
}

// address names a replica.
func address(i int) string { return fmt.Sprintf("replica-%d:8000", i+1) }

var _ selection.Strategy = caddyPolicy{}
