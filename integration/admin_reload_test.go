package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// recorded is how many prompts are recorded for an engine, -1 when it is not known.
func (g *gateway) recorded(e *llm) int {
	if n, ok := g.state().prompts()[e.addr()]; ok {
		return n
	}
	return -1
}

// Targets come, go, change their weight and their order through the admin API, by every method that it has, under a steady load. No request fails,
// no conversation leaves a target that stayed, no record of a target that stayed is lost, and in the end nothing is left of it all.
func TestTargetsAreManagedUnderLoad(t *testing.T) {
	engines := startLLMs(t, "a", "b", "c", "d")
	a, b, c, d := engines[0], engines[1], engines[2], engines[3]
	g := startGateway(t, "respond 204")
	targets := []string{"a", "b"}
	if err := g.loadJSON(handlerFor(engines, targetsJSON(targets...), "")); err != nil {
		t.Fatal(err)
	}
	idle := g.mark()
	stays := func(target string) bool { return target == "a" || target == "b" }
	load := startTraffic(g.URL+chatCompletions, stays)

	const direct = "/config/apps/http/servers/srv0/routes/0/handle/0/routes/0/targets"
	const byID = "/id/llama/targets"
	random := rand.New(rand.NewPCG(1, 2))
	call := func(method, path, body string) {
		t.Helper()
		if _, err := g.admin(method, path, "application/json", body); err != nil {
			t.Error(err)
		}
	}
	for i := range 50 {
		before := g.state().prompts()
		path := direct
		if i%2 == 1 {
			path = byID
		}
		other := []string{"c", "d"}[random.IntN(2)]
		at := slices.Index(targets, other)
		switch {
		case i%5 == 4: // the whole list, in another order
			random.Shuffle(len(targets), func(i, j int) { targets[i], targets[j] = targets[j], targets[i] })
			if i%10 == 9 {
				call(http.MethodPatch, path, targetsJSON(targets...))
			} else if err := g.loadJSON(handlerFor(engines, targetsJSON(targets...), "")); err != nil {
				t.Error(err)
			}
		case i%5 == 3: // another weight
			at := random.IntN(len(targets))
			call(http.MethodPatch, fmt.Sprintf("%s/%d", path, at), fmt.Sprintf(`{"provider":%q,"weight":%d}`, targets[at], 1+random.IntN(5)))
		case at >= 0: // one goes
			targets = slices.Delete(targets, at, at+1)
			call(http.MethodDelete, fmt.Sprintf("%s/%d", path, at), "")
		case random.IntN(2) == 0: // one comes, at the end
			targets = append(targets, other)
			call(http.MethodPost, path, fmt.Sprintf(`{"provider":%q}`, other))
		default: // or in front
			targets = slices.Insert(targets, 0, other)
			call(http.MethodPut, path+"/0", fmt.Sprintf(`{"provider":%q}`, other))
		}

		after := g.state().prompts()
		for _, e := range []*llm{a, b} {
			if after[e.addr()] < before[e.addr()] {
				t.Errorf("change %d: %s, which stayed, had %d prompts and has %d", i, e.name, before[e.addr()], after[e.addr()])
			}
		}
		for _, e := range []*llm{c, d} {
			if _, known := after[e.addr()]; known != slices.Contains(targets, e.name) {
				t.Errorf("change %d: %s known: %v; the targets are %v", i, e.name, known, targets)
			}
		}
		served := load.done.Load()
		g.waitFor("requests after a change", func() bool { return load.done.Load() > served+20 })
	}
	var got []struct{ Provider string }
	answer, err := g.admin(http.MethodGet, direct, "", "")
	if err != nil || json.Unmarshal([]byte(answer), &got) != nil || len(got) != len(targets) {
		t.Errorf("the targets are %s (%v), want %v", answer, err, targets)
	}
	load.stop(t, engines...)
	for _, e := range engines {
		if e.requests.Load() == 0 {
			t.Errorf("%s got nothing", e.name)
		}
	}
	g.settles(idle, 64<<20)

	// Without requests every change costs nothing that stays.
	settled := g.mark()
	for i := range 50 {
		call(http.MethodPatch, byID+"/0", fmt.Sprintf(`{"provider":%q,"weight":%d}`, targets[0], 1+i))
	}
	g.settles(settled, 8<<20)
}

// A target that was removed is forgotten, and starts anew when it comes back; the others are not touched.
func TestTargetThatComesBackStartsEmpty(t *testing.T) {
	engines := startLLMs(t, "a", "b")
	a, b := engines[0], engines[1]
	g := startGateway(t, "respond 204")
	if err := g.loadJSON(handlerFor(engines, targetsJSON("a", "b"), "")); err != nil {
		t.Fatal(err)
	}
	client := freshConnections()
	url := g.URL + chatCompletions
	long := func(i int) turn {
		return turn{"user", fmt.Sprintf("%d %s", i, strings.Repeat("tell me about it, ", 20))}
	}
	home := map[int]string{}
	for i := range 20 {
		target, err := ask(client, url, talk(false, long(i)))
		if err != nil {
			t.Fatal(err)
		}
		home[i] = target
	}
	onA, onB := g.recorded(a), g.recorded(b)
	if onA < 5 || onB < 5 || onA+onB != 20 {
		t.Fatalf("recorded: %d and %d", onA, onB)
	}

	// A stream goes on at the target that is removed.
	release := b.hold()
	defer release()
	var rest func() error
	for i, target := range home {
		if target == "b" {
			_, rest = openStream(t, url, long(i), turn{"assistant", "yes"}, turn{"user", "more"})
			break
		}
	}
	if _, err := g.admin(http.MethodDelete, "/id/llama/targets/1", "", ""); err != nil {
		t.Fatal(err)
	}
	if g.recorded(a) != onA || g.recorded(b) != -1 {
		t.Errorf("after the removal: %d (want %d) and %d", g.recorded(a), onA, g.recorded(b))
	}
	if n := g.state().inFlight(); n != 1 {
		t.Errorf("%d in flight, want the stream", n)
	}
	if _, err := g.admin(http.MethodPost, "/id/llama/targets", "application/json", `{"provider":"b"}`); err != nil {
		t.Fatal(err)
	}
	if g.recorded(a) != onA || g.recorded(b) != 0 {
		t.Errorf("after the return: %d (want %d) and %d (want 0)", g.recorded(a), onA, g.recorded(b))
	}
	for _, l := range g.state().Loads {
		if want := map[string]int{b.addr(): 1}[l.Address]; l.InFlight != want {
			t.Errorf("%s has %d in flight, want %d", l.Address, l.InFlight, want)
		}
	}
	release()
	if err := rest(); err != nil {
		t.Errorf("the stream: %v", err)
	}
	g.waitFor("the stream's reservation to be given back", func() bool { return g.state().inFlight() == 0 })
	if n := g.recorded(b); n != 0 {
		t.Errorf("a request of a configuration that is gone recorded %d prompts", n)
	}
	for i, target := range home {
		if target != "a" {
			continue
		}
		if got, err := ask(client, url, talk(false, long(i), turn{"assistant", "yes"}, turn{"user", "more"})); err != nil || got != "a" {
			t.Errorf("conversation %d left a for %s (%v)", i, got, err)
		}
	}
}

// A configuration that fails to load, at whatever stage, is as if it had never been sent.
func TestFailedLoadDisturbsNothing(t *testing.T) {
	engines := startLLMs(t, "a", "b")
	g := startGateway(t, "respond 204")
	good := handlerFor(engines, targetsJSON("a", "b"), "")
	if err := g.loadJSON(good); err != nil {
		t.Fatal(err)
	}
	url := g.URL + chatCompletions
	client := freshConnections()
	home := map[int]string{}
	question := func(i int) turn {
		return turn{"user", fmt.Sprintf("%d %s", i, strings.Repeat("tell me about it, ", 20))}
	}
	for i := range 10 {
		target, err := ask(client, url, talk(false, question(i)))
		if err != nil {
			t.Fatal(err)
		}
		home[i] = target
	}
	var rests []func() error
	var releases []func()
	for _, e := range engines {
		releases = append(releases, e.hold())
	}
	release := func() {
		for _, f := range releases {
			f()
		}
	}
	defer release()
	for i := range 4 {
		_, rest := openStream(t, url, question(100+i))
		rests = append(rests, rest)
	}
	pending := make(chan error, 1)
	go func() {
		_, err := ask(client, url, talk(false, question(200)))
		pending <- err
	}()
	g.waitFor("the requests to be at the engines", func() bool { return engines[0].waiting.Load()+engines[1].waiting.Load() == 5 })
	http.DefaultClient.CloseIdleConnections()
	before := g.state()
	upstreams := g.upstreams()
	goroutines := g.goroutines()

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	tiny := handlerFor(engines, targetsJSON("b", "a"), `,"max_nodes":1,"max_bytes":1`)
	for name, config := range map[string]string{
		"not JSON":                     `{"apps":`,
		"unknown field":                g.jsonConfig(strings.Replace(tiny, `"model"`, `"modle"`, 1)),
		"unknown provider":             g.jsonConfig(handlerFor(engines, targetsJSON("a", "x"), "")),
		"bad weight":                   g.jsonConfig(handlerFor(engines, `[{"provider":"a"},{"provider":"b","weight":-1}]`, "")),
		"unknown strategy":             g.jsonConfig(handlerFor(engines, targetsJSON("a", "b"), `,"strategy":"cash_aware"`)),
		"proxy that fails":             g.jsonConfig(handlerFor(engines, targetsJSON("a", "b"), `,"max_nodes":1,"reverse_proxy":{"transport":{"protocol":"carrier_pigeon"}}`)),
		"retry rule that fails":        g.jsonConfig(handlerFor(engines, targetsJSON("a", "b"), `,"max_nodes":1,"reverse_proxy":{"load_balancing":{"retries":1,"retry_match":[{"expression":"nonsense("}]}}`)),
		"health check that fails":      g.jsonConfig(handlerFor(engines, targetsJSON("a", "b"), `,"reverse_proxy":{"health_checks":{"active":{"uri":"/h","expect_body":"("}}}`)),
		"second route that fails":      g.jsonConfig(strings.TrimSuffix(tiny, "]}") + `,{"model":"other","targets":[{"provider":"x"}]}]}`),
		"next handler that fails":      g.jsonConfig(tiny + `,{"handler":"nonsense"}`),
		"other app that fails":         strings.Replace(g.jsonConfig(tiny), `"apps":{`, `"apps":{"nonsense":{},`, 1),
		"address that is taken":        strings.Replace(g.jsonConfig(tiny), g.Addr, taken.Addr().String(), 1),
		"address taken, second server": strings.Replace(g.jsonConfig(tiny), `"servers":{`, fmt.Sprintf(`"servers":{"srv1":{"listen":[%q]},`, taken.Addr()), 1),
	} {
		// Apps are started in random order.
		for range 5 {
			if _, err := g.admin(http.MethodPost, "/load", "application/json", config); err == nil {
				t.Fatalf("%s: loaded", name)
			}
			if after := g.state(); !reflect.DeepEqual(after, before) {
				t.Errorf("%s: changed\n%+v\nto\n%+v", name, before, after)
				before = after
			}
		}
	}
	// The same through the paths of the configuration, and by its id.
	for _, change := range [][3]string{
		{http.MethodPost, "/id/llama/targets", `{"provider":"x"}`},
		{http.MethodPatch, "/id/llama/targets/0", `{"provider":"a","weight":0}`},
		{http.MethodPut, "/id/rolter/providers/0", `{"name":"a","api_base":"http://elsewhere.example"}`},
		{http.MethodDelete, "/id/rolter/providers/0", ""},
		{http.MethodPatch, "/id/llama/model", `""`},
		{http.MethodDelete, "/id/llama/targets", ""},
	} {
		if _, err := g.admin(change[0], change[1], "application/json", change[2]); err == nil {
			t.Errorf("%v: accepted", change)
		}
		if after := g.state(); !reflect.DeepEqual(after, before) {
			t.Errorf("%v: changed the state to %+v", change, after)
		}
	}
	if after := g.upstreams(); !slices.Equal(after, upstreams) {
		t.Errorf("the proxy's upstreams were %v, are %v", upstreams, after)
	}
	g.waitFor("the goroutines of failed loads to end", func() bool {
		http.DefaultClient.CloseIdleConnections()
		return g.goroutines() <= goroutines+4
	})

	release()
	for _, rest := range rests {
		if err := rest(); err != nil {
			t.Errorf("a stream that ran over the failed loads: %v", err)
		}
	}
	if err := <-pending; err != nil {
		t.Errorf("a request that ran over the failed loads: %v", err)
	}
	g.waitFor("the reservations to be given back", func() bool { return g.state().inFlight() == 0 })

	// And a good load after them keeps the state.
	records := g.state().prompts()
	if err := g.loadJSON(handlerFor(engines, targetsJSON("b", "a"), `,"threshold":0.4`)); err != nil {
		t.Fatal(err)
	}
	if after := g.state().prompts(); !reflect.DeepEqual(after, records) {
		t.Errorf("a good load changed the records from %v to %v", records, after)
	}
	for i, at := range home {
		if target, err := ask(client, url, talk(false, question(i), turn{"assistant", "yes"}, turn{"user", "more"})); err != nil || target != at {
			t.Errorf("conversation %d was at %s and went to %s (%v)", i, at, target, err)
		}
	}
	for _, e := range engines {
		if after := g.upstreams(); !slices.ContainsFunc(after, func(up upstream) bool { return up.Address == e.addr() }) {
			t.Errorf("the proxy has lost %s: %v", e.addr(), after)
		}
	}
}

// upstream is what Caddy's proxy knows of an address.
type upstream struct {
	Address     string `json:"address"`
	NumRequests int    `json:"num_requests"`
	Fails       int    `json:"fails"`
}

// upstreams lists them by address; Caddy has no order.
func (g *gateway) upstreams() (all []upstream) {
	g.t.Helper()
	answer, err := g.admin(http.MethodGet, "/reverse_proxy/upstreams", "", "")
	if err == nil {
		err = json.Unmarshal([]byte(answer), &all)
	}
	if err != nil {
		g.t.Fatal(err)
	}
	slices.SortFunc(all, func(a, b upstream) int { return strings.Compare(a.Address, b.Address) })
	return all
}

// A hundred loads that fail leave nothing behind, and neither does validating.
func TestFailedLoadsLeaveNothing(t *testing.T) {
	engines := startLLMs(t, "a", "b")
	g := startGateway(t, "respond 204")
	idle := g.mark()
	for i := range 25 {
		for _, bad := range []string{
			handlerFor(engines, targetsJSON("a", "b"), `,"strategy":"cash_aware"`),
			handlerFor(engines, targetsJSON("a", "b"), `,"reverse_proxy":{"transport":{"protocol":"carrier_pigeon"}}`),
			handlerFor(engines, targetsJSON("a", "b"), "") + `,{"handler":"nonsense"}`,
			handlerFor(engines, targetsJSON("a", "b"), "") + fmt.Sprintf(`,{"handler":"reverse_proxy","upstreams":[{"dial":"127.0.0.1:%d"}],"load_balancing":{"selection_policy":{"policy":"rolter","threshold":7}}}`, 10000+i),
		} {
			if err := g.loadJSON(bad); err == nil {
				t.Fatal("loaded")
			}
		}
	}
	if s := g.state(); len(s.Loads) != 0 || len(s.Records) != 0 {
		t.Errorf("left behind: %+v", s)
	}
	g.settles(idle, 8<<20)

	dir := t.TempDir()
	for name, wantErr := range map[string]bool{handlerFor(engines, targetsJSON("a", "b"), ""): false, handlerFor(engines, targetsJSON("a", "x"), ""): true} {
		file := filepath.Join(dir, "config.json")
		config := strings.NewReplacer(`"@id":"rolter",`, "", `"@id":"llama",`, "").Replace(g.jsonConfig(name))
		if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(binary(t), "validate", "--config", file)
		cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
		out, err := cmd.CombinedOutput()
		if (err != nil) != wantErr {
			t.Errorf("caddy validate: %v\n%s", err, out)
		}
		if wantErr && !strings.Contains(string(out), `unknown provider`) {
			t.Errorf("caddy validate does not say what is wrong:\n%s", out)
		}
	}
	for _, e := range engines {
		if e.requests.Load() != 0 {
			t.Errorf("%s was contacted", e.name)
		}
	}
}

// A request that waits for a target to come back when the configuration is replaced gets an answer, and leaves nothing.
func TestReloadWhileRetriesArePending(t *testing.T) {
	away := freeAddr(t)
	back := startLLM(t, "back")
	g := startGateway(t, "respond 204")
	handler := func(base, more string) string {
		return fmt.Sprintf(`{"handler":"rolter","providers":[{"name":"away","api_base":%q}],"routes":[{"model":"llama","targets":[{"provider":"away"}],"reverse_proxy":{"load_balancing":{"try_duration":"20s","try_interval":"20ms"}}%s}]}`, base, more)
	}
	if err := g.loadJSON(handler("http://"+away, "")); err != nil {
		t.Fatal(err)
	}
	idle := g.mark()
	const n = 10
	type result struct {
		answer answer
		err    error
	}
	results := make(chan result, n)
	for i := range n {
		go func() {
			req, err := http.NewRequest(http.MethodPost, g.URL+chatCompletions, strings.NewReader(talk(false, turn{"user", fmt.Sprint(i)})))
			if err != nil {
				results <- result{err: err}
				return
			}
			a, err := roundTrip(freshConnections(), req)
			results <- result{a, err}
		}()
	}
	retries := func() float64 { return g.metrics()[`caddy_rolter_retries_total{model="llama"}`] }
	g.waitFor("retries", func() bool { return retries() > 3*n })
	if err := g.loadJSON(handler(back.URL, `,"threshold":0.3`)); err != nil {
		t.Fatal(err)
	}
	// Caddy gives up retries when their configuration goes; what matters is that the client is told in the API's way.
	for range n {
		r := <-results
		if r.err != nil {
			t.Errorf("no answer: %v", r.err)
		} else if r.answer.status != http.StatusOK {
			if r.answer.code(t); r.answer.status < 500 {
				t.Errorf("%d %s", r.answer.status, r.answer.body)
			}
		}
	}
	if target, err := ask(freshConnections(), g.URL+chatCompletions, talk(false, turn{"user", "hi"})); err != nil {
		t.Errorf("after the reload: %s %v", target, err)
	}
	for _, l := range g.state().Loads {
		if l.Address == away {
			t.Errorf("the target that went is still known, with %d in flight", l.InFlight)
		}
	}
	g.settles(idle, 16<<20)
}

// Rolter is taken out of the configuration while a stream runs, and put back.
func TestConfigurationWithoutRolterAndBack(t *testing.T) {
	engines := startLLMs(t, "a", "b")
	g := startGateway(t, "respond 204")
	handler := handlerFor(engines, targetsJSON("a", "b"), "")
	if err := g.loadJSON(handler); err != nil {
		t.Fatal(err)
	}
	idle := g.mark()
	url := g.URL + chatCompletions
	release := []func(){engines[0].hold(), engines[1].hold()}
	_, rest := openStream(t, url, turn{"user", "a long story, please"})
	decisions := g.metrics()[`caddy_rolter_decisions_total{model="llama",reason="cold",strategy="cache_aware"}`]
	if decisions != 1 {
		t.Errorf("%v cold decisions, want 1", decisions)
	}
	for range 5 {
		if err := g.loadJSON(`{"handler":"static_response","status_code":204}`); err != nil {
			t.Fatal(err)
		}
		if s := g.state(); len(s.Records) != 0 || s.inFlight() != 1 {
			t.Errorf("without rolter: %+v, want only the stream", s)
		}
		if err := g.loadJSON(handler); err != nil {
			t.Fatal(err)
		}
		if s := g.state(); s.inFlight() != 1 || g.recorded(engines[0]) != 0 || g.recorded(engines[1]) != 0 {
			t.Errorf("back again: %+v, want the stream and no record", s)
		}
	}
	for _, f := range release {
		f()
	}
	if err := rest(); err != nil {
		t.Errorf("the stream: %v", err)
	}
	if _, err := ask(freshConnections(), url, talk(false, turn{"user", "and now something else"})); err != nil {
		t.Error(err)
	}
	if got := g.metrics()[`caddy_rolter_decisions_total{model="llama",reason="cold",strategy="cache_aware"}`]; got != decisions+1 {
		t.Errorf("%v cold decisions, want %v: counts go on over reloads", got, decisions+1)
	}
	g.settles(idle, 16<<20)
}

// Two sites with a handler each that name the same replicas see one load and one record; taking one away leaves the other what it has.
func TestTwoSites(t *testing.T) {
	engines := startLLMs(t, "a", "b")
	g := startGateway(t, "respond 204")
	second := freeAddr(t)
	handler := strings.NewReplacer(`"@id":"rolter",`, "", `"@id":"llama",`, "").Replace(handlerFor(engines, targetsJSON("a", "b"), ""))
	both := strings.Replace(g.jsonConfig(handler), `"servers":{`, fmt.Sprintf(`"servers":{"srv1":{"listen":[%q],"automatic_https":{"disable":true},"routes":[{"handle":[%s]}]},`, second, handler), 1)
	if _, err := g.admin(http.MethodPost, "/load", "application/json", both); err != nil {
		t.Fatal(err)
	}
	const path = chatCompletions
	client := freshConnections()
	talks := map[int]string{}
	question := func(i int) turn { return turn{"user", fmt.Sprintf("%d %s", i, strings.Repeat("on and on ", 30))} }
	for i := range 10 {
		target, err := ask(client, g.URL+path, talk(false, question(i)))
		if err != nil {
			t.Fatal(err)
		}
		talks[i] = target
	}
	goOn := func(url string) {
		t.Helper()
		for i, at := range talks {
			if target, err := ask(client, url, talk(false, question(i), turn{"assistant", "yes"}, turn{"user", "more"})); err != nil || target != at {
				t.Errorf("conversation %d was at %s and went to %s (%v)", i, at, target, err)
			}
		}
	}
	goOn("http://" + second + path)

	release := []func(){engines[0].hold(), engines[1].hold()}
	_, first := openStream(t, g.URL+path, turn{"user", "one"})
	_, other := openStream(t, "http://"+second+path, turn{"user", "two"})
	for _, l := range g.state().Loads {
		if l.InFlight != 1 {
			t.Errorf("%s has %d in flight, want one stream each", l.Address, l.InFlight)
		}
	}
	if records := g.state().Records; len(records) != 1 {
		t.Errorf("%d records, want one for the route: %+v", len(records), records)
	}
	before := g.state().prompts()
	if err := g.loadJSON(handler); err != nil {
		t.Fatal(err)
	}
	if after := g.state(); after.inFlight() != 2 || !reflect.DeepEqual(after.prompts(), before) {
		t.Errorf("one site less: %+v, want both streams and %v", after, before)
	}
	for _, f := range release {
		f()
	}
	for _, rest := range []func() error{first, other} {
		if err := rest(); err != nil {
			t.Errorf("a stream: %v", err)
		}
	}
	goOn(g.URL + path)
	g.waitFor("the reservations to be given back", func() bool { return g.state().inFlight() == 0 })
}

// Many operators at once: every change is applied as a whole, and requests do not notice.
func TestConcurrentChanges(t *testing.T) {
	engines := startLLMs(t, "a", "b", "c")
	g := startGateway(t, "respond 204")
	if err := g.loadJSON(handlerFor(engines, targetsJSON("a", "b"), `,"overload_ratio":1.5`)); err != nil {
		t.Fatal(err)
	}
	load := startTraffic(g.URL+chatCompletions, func(target string) bool { return target == "a" || target == "b" })
	// The admin endpoint is replaced with the configuration, and resets connections as the sites do.
	change := func(method, path, body string) (err error) {
		for range 20 {
			_, err = g.admin(method, path, "application/json", body)
			if urlErr := (*url.Error)(nil); !errors.As(err, &urlErr) {
				break
			}
		}
		return err
	}
	done := make(chan error)
	for i := range 4 {
		go func() {
			var err error
			for n := range 6 {
				if n%2 == 0 {
					err = change(http.MethodPatch, "/id/llama/overload_ratio", fmt.Sprintf("1.%d", 3+i))
				} else {
					err = change(http.MethodPatch, "/id/llama/targets", targetsJSON([][]string{{"a", "b"}, {"b", "c", "a"}}[(n/2+i)%2]...))
				}
				if err != nil {
					break
				}
			}
			done <- err
		}()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	load.stop(t, engines...)
	g.waitFor("the reservations to be given back", func() bool { return g.state().inFlight() == 0 })
}

// The limits of a configuration that has been loaded do apply, at once or with the next request.
func TestLimitsOfALoadApply(t *testing.T) {
	engines := startLLMs(t, "a")
	g := startGateway(t, "respond 204")
	if err := g.loadJSON(handlerFor(engines, targetsJSON("a"), "")); err != nil {
		t.Fatal(err)
	}
	client := freshConnections()
	say := func(n int) {
		t.Helper()
		for i := range n {
			if _, err := ask(client, g.URL+chatCompletions, talk(false, turn{"user", fmt.Sprintf("%d is %s", i, strings.Repeat("a number ", i))})); err != nil {
				t.Fatal(err)
			}
		}
	}
	say(50)
	all := g.recorded(engines[0])
	if all != 50 {
		t.Errorf("%d prompts recorded, want 50", all)
	}
	if err := g.loadJSON(handlerFor(engines, targetsJSON("a"), `,"max_nodes":10`)); err != nil {
		t.Fatal(err)
	}
	say(1)
	g.waitFor("the record to be cut", func() bool { n := g.recorded(engines[0]); return n > 0 && n <= 10 })
	if err := g.loadJSON(handlerFor(engines, targetsJSON("a"), "")); err != nil {
		t.Fatal(err)
	}
	say(50)
	if n := g.recorded(engines[0]); n != 50 {
		t.Errorf("%d prompts recorded without the limit, want 50", n)
	}
}

// The same for the policy, whose targets are the upstreams of somebody's reverse_proxy.
func TestUpstreamsOfThePolicyAreManagedUnderLoad(t *testing.T) {
	engines := startLLMs(t, "a", "b", "c")
	a, b, c := engines[0], engines[1], engines[2]
	g := startGateway(t, "respond 204")
	upstreams := func(engines ...*llm) string {
		var all []string
		for _, e := range engines {
			all = append(all, fmt.Sprintf(`{"dial":%q}`, e.addr()))
		}
		return "[" + strings.Join(all, ",") + "]"
	}
	if err := g.loadJSON(`{"@id":"proxy","handler":"reverse_proxy","upstreams":` + upstreams(a, b) + `,"transport":{"protocol":"http","keep_alive":{"idle_timeout":"1s"}},"load_balancing":{"selection_policy":{"policy":"rolter","overload_margin":1000}}}`); err != nil {
		t.Fatal(err)
	}
	idle := g.mark()
	load := startTraffic(g.URL+chatCompletions, func(target string) bool { return target == a.addr() || target == b.addr() })
	for i, order := range [][]*llm{{a, b, c}, {c, b, a}, {b, a}, {c, a, b}, {a, c, b}, {a, b}, {b, a, c}, {b, a}, {a, b, c}, {a, b}} {
		before := g.state().prompts()
		if _, err := g.admin(http.MethodPatch, "/id/proxy/upstreams", "application/json", upstreams(order...)); err != nil {
			t.Error(err)
		}
		after := g.state().prompts()
		for _, e := range []*llm{a, b} {
			if after[e.addr()] < before[e.addr()] {
				t.Errorf("change %d: %s, which stayed, had %d prompts and has %d", i, e.name, before[e.addr()], after[e.addr()])
			}
		}
		served := load.done.Load()
		g.waitFor("requests after a change", func() bool { return load.done.Load() > served+20 })
		// The policy learns of its upstreams with the requests.
		if !slices.Contains(order, c) && g.recorded(c) > 0 {
			t.Errorf("change %d: what c was sent is still recorded", i)
		}
	}
	load.stop(t, engines...)
	g.settles(idle, 32<<20)
}

// Replicas may stand behind one address and differ by their path: each has a cache of its own.
func TestReplicasBehindOneAddress(t *testing.T) {
	front := startLLM(t, "front")
	g := startGateway(t, "respond 204")
	handler := fmt.Sprintf(`{"handler":"rolter","providers":[{"name":"one","api_base":"%[1]s/one"},{"name":"two","api_base":"%[1]s/two"}],"routes":[{"model":"llama","overload_margin":1000,"targets":%[2]s}]}`,
		front.URL, targetsJSON("one", "two"))
	if err := g.loadJSON(handler); err != nil {
		t.Fatal(err)
	}
	client := freshConnections()
	used := map[string]int{}
	for i := range 6 {
		turns := []turn{{"system", fmt.Sprintf("%d %s", i, strings.Repeat("instructions of this conversation, ", 20))}}
		at := ""
		for n := range 4 {
			turns = append(turns, turn{"user", fmt.Sprintf("question %d", n)})
			target, err := ask(client, g.URL+chatCompletions, talk(false, turns...))
			if err != nil {
				t.Fatal(err)
			}
			if at != "" && target != at {
				t.Errorf("conversation %d left %s for %s at turn %d", i, at, target, n)
			}
			at = target
			used[at]++
			turns = append(turns, turn{"assistant", "an answer"})
		}
	}
	if len(used) != 2 {
		t.Errorf("requests by target: %v, want both used", used)
	}
}
