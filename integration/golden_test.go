package integration

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// by finds the stand-in that served.
func by(stubs []*stub, name string) *stub {
	for _, s := range stubs {
		if s.name == name {
			return s
		}
	}
	return nil
}

// A target that is warm, or none that is, under loads: who is taken? The loads are by position, the warm target's first.
func TestChoiceByCacheAndLoad(t *testing.T) {
	stubs := newStubs(t, 3, nil)
	type row struct {
		warm  bool // whether the first is
		loads [3]int
		want  []int // the positions that may be taken; 0 is the warm target
	}
	rows := []row{
		{true, [3]int{0, 0, 0}, []int{0}},
		{true, [3]int{2, 0, 0}, []int{0}},
		{true, [3]int{3, 1, 0}, []int{2}},
		{true, [3]int{8, 6, 6}, []int{0}},
		{false, [3]int{4, 3, 0}, []int{2}},
		{false, [3]int{4, 3, 9}, []int{1}},
	}
	// The first load at which a holder is overloaded, for a least load of 0 to 8.
	for least, first := range []int{3, 4, 5, 6, 7, 8, 10, 11, 13} {
		rows = append(rows,
			row{true, [3]int{first - 1, least, least}, []int{0}},
			row{true, [3]int{first, least, least}, []int{1, 2}},
			row{true, [3]int{first, least, first}, []int{1}})
	}
	var routes []string
	for i := range rows {
		routes = append(routes, route(fmt.Sprintf("m%d", i), "", stubs...))
	}
	g := startGateway(t, rolterFor(stubs, append(routes, soleRoutes(stubs...))...))

	for i, c := range rows {
		t.Run(fmt.Sprintf("warm %v loads %v", c.warm, c.loads), func(t *testing.T) {
			body := asks(fmt.Sprintf("m%d", i), "Which of you knows this question already?")
			at := stubs
			if c.warm {
				warm := g.served(chatPath, body).target
				at = slices.Clone(stubs)
				slices.SortStableFunc(at, func(a, b *stub) int {
					switch {
					case a.name == warm:
						return -1
					case b.name == warm:
						return 1
					}
					return 0
				})
				g.idle()
			}
			for position, n := range c.loads {
				free := g.occupy(at[position], n)
				defer free()
			}
			answer := g.served(chatPath, body)
			taken := slices.Index(at, by(stubs, answer.target))
			if !slices.Contains(c.want, taken) {
				t.Errorf("target %d was taken because of %s, want one of %v", taken, answer.reason, c.want)
			}
			want := "cold"
			if c.warm && taken == 0 {
				want = "cache"
			} else if c.warm {
				want = "overloaded"
			}
			if answer.reason != want {
				t.Errorf("reason %q, want %q", answer.reason, want)
			}
		})
	}
}

// A target that cannot take the request is neither scored nor counted among the loads.
func TestChoiceAmongThoseThatCanTakeIt(t *testing.T) {
	const rest = "reverse_proxy {\nfail_duration 10m\n}"
	for _, c := range []struct {
		name  string
		loads [2]int // of the warm target, or of any where none is, and of the other one that is up
		warm  bool
		want  int
	}{
		{"warm, fewer than the other", [2]int{3, 10}, true, 0},
		{"warm, more than the other", [2]int{9, 1}, true, 1},
		// 4 would be overloaded if the idle target that is down counted as the least loaded one.
		{"warm, a little more than the other", [2]int{4, 3}, true, 0},
		{"cold", [2]int{4, 3}, false, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			stubs := newStubs(t, 3, nil)
			g := startGateway(t, rolterFor(stubs, route("m", rest, stubs...), route("other", rest, stubs...), soleRoutes(stubs...)))
			down := stubs[2]
			down.refuse()
			// Whoever has been sent least is next, so it is soon tried, and rests from then on.
			for n := 0; g.noFails(); n++ {
				g.served(chatPath, asks("other", fmt.Sprintf("%d", n)))
			}
			at := stubs[:2]
			body := asks("m", "Which of you knows this question already?")
			if c.warm {
				if g.served(chatPath, body).target == at[1].name {
					at = []*stub{at[1], at[0]}
				}
			}
			g.idle()
			for position, n := range c.loads {
				free := g.occupy(at[position], n)
				defer free()
			}
			if answer := g.served(chatPath, body); answer.target != at[c.want].name {
				t.Errorf("%q was taken because of %s, want %q", answer.target, answer.reason, at[c.want].name)
			}
		})
	}

	t.Run("the warm target is down", func(t *testing.T) {
		stubs := newStubs(t, 3, nil)
		g := startGateway(t, rolterFor(stubs, route("m", rest, stubs...)))
		// Five prompts that have nothing in common: two, two and one.
		held := make(map[string][]string)
		for n := range 5 {
			body := asks("m", strings.Repeat(string(rune('a'+n)), 40))
			target := g.served(chatPath, body).target
			held[target] = append(held[target], body)
			g.idle()
		}
		var least, warm *stub
		for _, s := range stubs {
			if len(held[s.name]) == 1 {
				least = s
			} else {
				warm = s
			}
		}
		if least == nil {
			t.Fatalf("five prompts were spread %v", held)
		}
		warm.refuse()
		for range 3 { // refused, then resting
			answer := g.served(chatPath, held[warm.name][0])
			if answer.target != least.name {
				t.Errorf("%q was taken because of %s, want the least warmed one, %q", answer.target, answer.reason, least.name)
			}
		}
	})
}

// The first prompt makes a target warm; the second is or is not a reason to go there.
func TestWhatCountsAsWarm(t *testing.T) {
	stubs := newStubs(t, 3, nil)
	system := said{"system", "You are a helpful assistant and answer in one short sentence, whatever the question is about."}
	user := func(text string) said { return said{"user", text} }
	cases := []struct {
		name, path    string
		first, second func(model string) string
		reason        string
		score         string // of the second, where it is to be checked
	}{
		{"completions, 5 of 10 bytes", textPath,
			func(m string) string { return textBody(m, "abcdefghij") },
			func(m string) string { return textBody(m, "abcdeVWXYZ") }, "cache", "0.5"},
		{"completions, 4 of 10 bytes", textPath,
			func(m string) string { return textBody(m, "abcdefghij") },
			func(m string) string { return textBody(m, "abcdUVWXYZ") }, "cold", ""},
		{"completions, all bytes", textPath,
			func(m string) string { return textBody(m, "abcdefghij") },
			func(m string) string { return textBody(m, "abcdefghij") }, "cache", "1"},
		{"completions, a short text goes on", textPath,
			func(m string) string { return textBody(m, "abc") },
			func(m string) string { return textBody(m, "abc"+strings.Repeat("z", 100)) }, "continuation", ""},
		{"hello, then hi", chatPath,
			func(m string) string { return chatBody(m, user("hello")) },
			func(m string) string { return chatBody(m, user("hi")) }, "cold", ""},
		{"hello, then 2+2", chatPath,
			func(m string) string { return chatBody(m, user("hello")) },
			func(m string) string { return chatBody(m, user("2+2")) }, "cold", ""},
		{"a shared system prompt", chatPath,
			func(m string) string { return chatBody(m, system, user("hello")) },
			func(m string) string { return chatBody(m, system, user("2+2")) }, "cache", ""},
		{"the same words of another role", chatPath,
			func(m string) string { return chatBody(m, system, user("hello")) },
			func(m string) string { return chatBody(m, said{"developer", system.Content}, user("2+2")) }, "cold", ""},
		{"a long answer makes turn 2 mostly new", chatPath,
			func(m string) string { return chatBody(m, user(strings.Repeat("q", 36))) },
			func(m string) string {
				return chatBody(m, user(strings.Repeat("q", 36)), said{"assistant", strings.Repeat("a", 2000)}, user("go on"))
			}, "continuation", ""},
		{"other parameters, key order and white space", chatPath,
			func(m string) string {
				return `{"model":"` + m + `","temperature":1,"messages":[{"role":"user","content":"What is a prefix?"}]}`
			},
			func(m string) string {
				return `{ "stream" : false, "messages": [ {"content":"What is a pr\u0065fix?", "role":"user"} ], "model":"` + m + `" }`
			}, "cache", "1"},
		{"messages: the system prompt", "/v1/messages",
			func(m string) string {
				return `{"model":"` + m + `","system":"` + system.Content + `","messages":[{"role":"user","content":"hello"}]}`
			},
			func(m string) string {
				return `{"model":"` + m + `","system":"` + system.Content + `","messages":[{"role":"user","content":"2+2"}]}`
			}, "cache", ""},
		{"responses: the instructions", "/v1/responses",
			func(m string) string {
				return `{"model":"` + m + `","instructions":"` + system.Content + `","input":"hello"}`
			},
			func(m string) string {
				return `{"model":"` + m + `","instructions":"` + system.Content + `","input":[{"role":"user","content":"2+2"}]}`
			}, "cache", ""},
		{"tools that differ", chatPath,
			func(m string) string {
				return `{"model":"` + m + `","tools":[{"type":"function","function":{"name":"a"}}],"messages":[{"role":"user","content":"What is a prefix?"}]}`
			},
			func(m string) string {
				return `{"model":"` + m + `","tools":[{"type":"function","function":{"name":"b"}}],"messages":[{"role":"user","content":"What is a prefix?"}]}`
			}, "cold", ""},
		{"embeddings", "/v1/embeddings",
			func(m string) string { return `{"model":"` + m + `","input":"What is a prefix?"}` },
			func(m string) string { return `{"model":"` + m + `","input":"What is a prefix?"}` }, "no_prompt", ""},
	}
	var routes []string
	for i := range cases {
		routes = append(routes, route(fmt.Sprintf("m%d", i), "", stubs...))
	}
	g := startGateway(t, "header >X-Score {http.rolter.score}\n"+rolterFor(stubs, routes...))
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			model := fmt.Sprintf("m%d", i)
			first := g.served(c.path, c.first(model))
			g.idle()
			second := g.served(c.path, c.second(model))
			if second.reason != c.reason {
				t.Errorf("reason %q (score %s), want %q", second.reason, second.header.Get("X-Score"), c.reason)
			}
			pinned := c.reason == "cache" || c.reason == "continuation"
			if (second.target == first.target) != pinned {
				t.Errorf("went to %q after %q", second.target, first.target)
			}
			if got := second.header.Get("X-Score"); c.score != "" && got != c.score {
				t.Errorf("score %s, want %s", got, c.score)
			}
			g.idle()
		})
	}
}

func TestUnrelatedPromptsOneAfterAnother(t *testing.T) {
	for _, w := range wordings {
		t.Run(w.name, func(t *testing.T) {
			if w.name == "a shared beginning" {
				t.Skip("these are related")
			}
			rng := newRand(1)
			stubs := newStubs(t, 3, nil)
			g := startGateway(t, rolterFor(stubs, route("m", "", stubs...), route("long", "", stubs...)))
			for _, c := range []struct {
				model  string
				length int
			}{{"m", 30}, {"long", 3000}} {
				before := counts(stubs)
				for i := range 30 {
					text := w.text(rng, i, c.length)
					if w.name == "numbers" {
						text = fmt.Sprintf("%d", i*7919+13) // a few digits
					}
					g.served(chatPath, asks(c.model, text))
				}
				got := counts(stubs)
				for i := range got {
					got[i] -= before[i]
				}
				t.Logf("%d bytes each: %v", c.length, got)
				if slices.Min(got) < 9 || slices.Max(got) > 11 {
					t.Errorf("30 prompts of %d bytes were spread %v, want 10 each, ± 1", c.length, got)
				}
			}
		})
	}
}

// burst holds every answer until all n requests have arrived, so that all are in flight at once, and says how many each stand-in was sent.
func burst(t *testing.T, g *gateway, stubs []*stub, n int, body func(i int) string) []int {
	t.Helper()
	g.idle()
	before := counts(stubs)
	release := make(chan struct{})
	for _, s := range stubs {
		s.answers(func(w http.ResponseWriter, r *http.Request, b []byte) {
			select {
			case <-release:
			case <-r.Context().Done():
			}
			completion(w, r, b)
		})
		defer s.answers(completion)
	}
	var (
		wg     sync.WaitGroup
		failed atomic.Bool
	)
	for i := range n {
		wg.Go(func() {
			if answer, err := g.try(chatPath, body(i)); err != nil || answer.status != http.StatusOK {
				t.Errorf("request %d: status %d, %v", i, answer.status, err)
				failed.Store(true)
			}
		})
	}
	g.waitFor("all requests to arrive", func() bool { return total(counts(stubs))-total(before) == n || failed.Load() })
	got := counts(stubs)
	close(release)
	wg.Wait()
	for i := range got {
		got[i] -= before[i]
	}
	return got
}

func TestBursts(t *testing.T) {
	stubs := newStubs(t, 4, nil)
	three := stubs[:3]
	const seeds = 3
	var routes []string
	for _, kind := range []string{"siblings", "warm"} {
		for w := range wordings {
			for seed := range seeds {
				routes = append(routes, route(fmt.Sprintf("%s-%d-%d", kind, w, seed), "", three...))
			}
		}
	}
	for w := range wordings {
		routes = append(routes, route(fmt.Sprintf("strangers-%d", w), "", stubs...))
	}
	g := startGateway(t, rolterFor(stubs, routes...))

	t.Run("24 siblings of one system prompt", func(t *testing.T) {
		for w, wording := range wordings {
			for seed := range seeds {
				rng := newRand(uint64(seed))
				system := said{"system", prose(rng, 200*(1+9*seed))}
				questions := make([]string, 24)
				for i := range questions {
					questions[i] = wording.text(rng, i, 60)
				}
				got := burst(t, g, three, 24, func(i int) string {
					return chatBody(fmt.Sprintf("siblings-%d-%d", w, seed), system, said{"user", questions[i]})
				})
				t.Logf("%s, seed %d: %v", wording.name, seed, got)
				if slices.Min(got) < 6 || slices.Max(got) > 10 {
					t.Errorf("%s, seed %d: targets received %v, want 6 to 10 each", wording.name, seed, got)
				}
			}
		}
	})

	t.Run("100 behind a warm prefix of 2000 bytes", func(t *testing.T) {
		for w, wording := range wordings {
			for seed := range seeds {
				rng := newRand(100 + uint64(seed))
				model := fmt.Sprintf("warm-%d-%d", w, seed)
				system := said{"system", prose(rng, 2000)}
				g.served(chatPath, chatBody(model, system, said{"user", "warm up"}))
				questions := make([]string, 100)
				for i := range questions {
					questions[i] = wording.text(rng, i, 60)
				}
				got := burst(t, g, three, 100, func(i int) string { return chatBody(model, system, said{"user", questions[i]}) })
				t.Logf("%s, seed %d: %v", wording.name, seed, got)
				if slices.Min(got) < 28 || slices.Max(got) > 40 {
					t.Errorf("%s, seed %d: targets received %v, want 28 to 40 each", wording.name, seed, got)
				}
			}
		}
	})

	t.Run("256 strangers on 4 targets", func(t *testing.T) {
		const most = 256/4*1.25 + 1
		for w, wording := range wordings {
			rng := newRand(200)
			questions := make([]string, 256)
			for i := range questions {
				questions[i] = wording.text(rng, i, 50)
			}
			got := burst(t, g, stubs, 256, func(i int) string { return asks(fmt.Sprintf("strangers-%d", w), questions[i]) })
			t.Logf("%s: %v", wording.name, got)
			if wording.name != "a shared beginning" && float64(slices.Max(got)) > most {
				t.Errorf("%s: targets received %v, want %v at most", wording.name, got, most)
			}
		}
	})
}

// dialogue is a conversation as its client sees it.
type dialogue struct {
	turns   []said
	targets []string // of each turn so far
	reasons []string
}

// stayed counts the turns after the first that went where the turn before went.
func (c *dialogue) stayed() (n int) {
	for i := 1; i < len(c.targets); i++ {
		if c.targets[i] == c.targets[i-1] {
			n++
		}
	}
	return n
}

// next plays a turn: the question goes out with the whole history, and the answer and what comes after it are added to it.
func (c *dialogue) next(g *gateway, model, question, answer string, after ...said) error {
	c.turns = append(c.turns, said{"user", question})
	got, err := g.try(chatPath, chatBody(model, c.turns...))
	if err != nil || got.status != http.StatusOK {
		return fmt.Errorf("status %d, %w: %s", got.status, err, got.body)
	}
	c.targets, c.reasons = append(c.targets, got.target), append(c.reasons, got.reason)
	c.turns = append(append(c.turns, said{"assistant", answer}), after...)
	return nil
}

func TestConversationsOneAfterAnother(t *testing.T) {
	type set struct {
		name                              string
		conversations                     int
		system, question, answer, results int // bytes
		interleaved                       bool
	}
	sets := []set{
		{"8 long system prompts", 8, 4096, 60, 150, 0, true},
		{"8 long system prompts, long answers and tool results", 8, 4096, 60, 2000, 20 << 10, true},
		{"10 without a system prompt, interleaved", 10, 0, 200, 150, 0, true},
		{"10 without a system prompt, one by one", 10, 0, 200, 150, 0, false},
	}
	const turns = 6
	stubs := newStubs(t, 3, nil)
	var routes []string
	for i := range sets {
		for w := range wordings {
			routes = append(routes, route(fmt.Sprintf("m-%d-%d", i, w), "", stubs...))
		}
	}
	g := startGateway(t, rolterFor(stubs, routes...))
	for i, c := range sets {
		t.Run(c.name, func(t *testing.T) {
			for w, wording := range wordings {
				rng := newRand(uint64(10*i + w))
				model := fmt.Sprintf("m-%d-%d", i, w)
				dialogues := make([]*dialogue, c.conversations)
				for n := range dialogues {
					dialogues[n] = new(dialogue)
					if c.system > 0 {
						dialogues[n].turns = []said{{"system", prose(rng, c.system)}}
					}
				}
				play := func(n, turn int) {
					var after []said
					if c.results > 0 {
						after = []said{{"tool", prose(rng, c.results)}}
					}
					if err := dialogues[n].next(g, model, wording.text(rng, turn*100+n, c.question), prose(rng, c.answer), after...); err != nil {
						t.Fatal(err)
					}
				}
				if c.interleaved {
					for turn := range turns {
						for n := range dialogues {
							play(n, turn)
						}
					}
				} else {
					for n := range dialogues {
						for turn := range turns {
							play(n, turn)
						}
					}
				}
				stayed, used := 0, make(map[string]int)
				for _, d := range dialogues {
					stayed += d.stayed()
					used[d.targets[0]]++
				}
				t.Logf("%s: %d of %d turns stay, conversations on targets %v", wording.name, stayed, c.conversations*(turns-1), used)
				if stayed != c.conversations*(turns-1) {
					t.Errorf("%s: %d of %d turns stay where their conversation was, want all", wording.name, stayed, c.conversations*(turns-1))
				}
				if len(used) < 2 {
					t.Errorf("%s: all conversations are on one target", wording.name)
				}
			}
		})
	}
}

// Both are wanted at once: conversations stay, and the system prompt that all share does not draw them to one target.
func TestConversationsAtOnce(t *testing.T) {
	const (
		conversations, turns = 30, 6
		service              = 100 * time.Millisecond
	)
	stubs := newStubs(t, 3, func(w http.ResponseWriter, r *http.Request, body []byte) {
		time.Sleep(service) // what it takes the engine
		completion(w, r, body)
	})
	var routes []string
	for w := range wordings {
		routes = append(routes, route(fmt.Sprintf("m-%d", w), "", stubs...))
	}
	g := startGateway(t, rolterFor(stubs, routes...))
	for w, wording := range wordings {
		t.Run(wording.name, func(t *testing.T) {
			g.idle()
			before := counts(stubs)
			system := said{"system", prose(newRand(uint64(w)), 3000)}
			dialogues := make([]dialogue, conversations)
			var wg sync.WaitGroup
			for n := range dialogues {
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(uint64(w), uint64(n)))
					dialogues[n].turns = []said{system}
					for turn := range turns {
						if err := dialogues[n].next(g, fmt.Sprintf("m-%d", w), wording.text(rng, 100*turn+n, 100), prose(rng, 200)); err != nil {
							t.Errorf("conversation %d, turn %d: %v", n, turn, err)
							return
						}
					}
				})
			}
			wg.Wait()
			stayed := 0
			moves := make(map[string]int)
			for n := range dialogues {
				stayed += dialogues[n].stayed()
				for turn := 1; turn < len(dialogues[n].targets); turn++ {
					if dialogues[n].targets[turn] != dialogues[n].targets[turn-1] {
						moves[fmt.Sprintf("turn %d: %s", turn+1, dialogues[n].reasons[turn])]++
					}
				}
			}
			got := counts(stubs)
			for i := range got {
				got[i] -= before[i]
			}
			t.Logf("%d of %d turns stay, targets received %v, moves %v", stayed, conversations*(turns-1), got, moves)
			if stayed < 147 {
				t.Errorf("%d of 150 turns stay, want 147 at least", stayed)
			}
			if slices.Max(got) > 75 {
				t.Errorf("targets received %v of 180 requests, want 75 each at most", got)
			}
		})
	}
}
