package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// A route's strategy may be any of Caddy's policies. What each one promises holds, and a target that is down costs nobody an answer.
func TestPoliciesOfCaddy(t *testing.T) {
	const requests = 30
	sticky := func(t *testing.T, got []int) {
		if slices.Max(got) != total(got) {
			t.Errorf("targets received %v, want all at one", got)
		}
	}
	even := func(t *testing.T, got []int) {
		if slices.Min(got) != requests/3 || slices.Max(got) != requests/3 {
			t.Errorf("targets received %v, want 10 each", got)
		}
	}
	spread := func(t *testing.T, got []int) {
		if slices.Min(got) == 0 {
			t.Errorf("targets received %v, want some each", got)
		}
	}
	cases := []struct {
		name, strategy string
		weights        [3]int
		header         func(i int) []string
		check          func(*testing.T, []int)
	}{
		{name: "round robin", strategy: "round_robin", check: even},
		{name: "least connections", strategy: "least_conn", check: spread},
		{name: "random", strategy: "random", check: spread},
		// On an idle pool Caddy takes the first idle one of its sample, which is never the second of three.
		{name: "random choose", strategy: "random_choose 2", check: func(t *testing.T, got []int) {
			if slices.Max(got) == requests {
				t.Errorf("targets received %v, want some at another", got)
			}
		}},
		{name: "first", strategy: "first", check: func(t *testing.T, got []int) {
			if got[0] != requests {
				t.Errorf("targets received %v, want all at the first", got)
			}
		}},
		{name: "weighted round robin by target", strategy: "weighted_round_robin", weights: [3]int{3, 2, 1}, check: func(t *testing.T, got []int) {
			if !slices.Equal(got, []int{15, 10, 5}) {
				t.Errorf("targets received %v, want 15, 10 and 5", got)
			}
		}},
		{name: "weighted round robin by argument", strategy: "weighted_round_robin 1 2 3", check: func(t *testing.T, got []int) {
			if !slices.Equal(got, []int{5, 10, 15}) {
				t.Errorf("targets received %v, want 5, 10 and 15", got)
			}
		}},
		{name: "same header", strategy: "header X-Foo", header: func(int) []string { return []string{"X-Foo", "bar"} }, check: sticky},
		{name: "many headers", strategy: "header X-Foo", header: func(i int) []string { return []string{"X-Foo", fmt.Sprintf("user %d", i)} }, check: spread},
		{name: "client address", strategy: "ip_hash", check: sticky},
		{name: "query", strategy: "query user", check: spread}, // there is none, so the fallback, which is random
		{name: "uri", strategy: "uri_hash", check: sticky},
		{name: "cookie", strategy: "cookie", check: spread}, // the client keeps none
		{name: "least load", strategy: "least_load", check: even},
	}
	stubs := newStubs(t, 3, nil)
	var routes []string
	for i, c := range cases {
		var b strings.Builder
		fmt.Fprintf(&b, "route m%d {\nstrategy %s\nreverse_proxy {\nfail_duration 10ms\n}\n", i, c.strategy)
		for j, s := range stubs {
			fmt.Fprintf(&b, "target %s", s.name)
			if c.weights[j] > 0 {
				fmt.Fprintf(&b, " weight %d", c.weights[j])
			}
			b.WriteString("\n")
		}
		b.WriteString("}\n")
		routes = append(routes, b.String())
	}
	g := startGateway(t, rolterFor(stubs, routes...))
	send := func(t *testing.T, i, n int) {
		t.Helper()
		var header []string
		if cases[i].header != nil {
			header = cases[i].header(n)
		}
		answer := g.served(chatPath, asks(fmt.Sprintf("m%d", i), fmt.Sprintf("%d", n)), header...)
		if answer.reason != "fallback" {
			t.Errorf("reason %q, want fallback", answer.reason)
		}
	}
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			g.waitFor("no target to rest", g.noFails)
			before := counts(stubs)
			for n := range requests {
				send(t, i, n)
			}
			got := counts(stubs)
			for j := range got {
				got[j] -= before[j]
			}
			c.check(t, got)
		})
	}

	for _, s := range stubs {
		t.Run(s.name+" is down", func(t *testing.T) {
			s.refuse()
			defer s.listen()
			for i, c := range cases {
				t.Run(c.name, func(t *testing.T) {
					g.waitFor("no target to rest", g.noFails)
					for n := range 8 {
						var header []string
						if c.header != nil {
							header = c.header(n)
						}
						if answer := g.post(chatPath, asks(fmt.Sprintf("m%d", i), fmt.Sprintf("%d", n)), header...); answer.status != 200 || answer.target == s.name {
							t.Errorf("request %d: status %d from %q: %s", n, answer.status, answer.target, answer.body)
						}
					}
				})
			}
		})
	}

	t.Run("two are down", func(t *testing.T) {
		stubs[0].answers(resets)
		stubs[1].answers(says(503, "{}"))
		for i, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				g.waitFor("no target to rest", g.noFails)
				for n := range 8 {
					body := asks(fmt.Sprintf("m%d", i), fmt.Sprintf("two %d", n))
					if answer := g.post(chatPath, body); answer.status != 200 || answer.target != stubs[2].name {
						t.Errorf("request %d: status %d from %q: %s", n, answer.status, answer.target, answer.body)
					}
				}
			})
		}
	})
	g.idle()
}
