package integration

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

// publishing starts simulated replicas that publish what their caches hold.
func publishing(t *testing.T, n int, config replica.Config) []*replica.Server {
	t.Helper()
	config.KVEvents.Endpoint = "tcp://*:0"
	config.KVEvents.ReplayEndpoint = "tcp://*:0"
	return simulated(t, n, config)
}

// kvStream is one of the streams of /rolter/state.
type kvStream struct {
	Address  string `json:"address"`
	State    string `json:"state"`
	Blocks   int    `json:"blocks"`
	Batches  uint64 `json:"batches"`
	Gaps     uint64 `json:"gaps"`
	Restarts uint64 `json:"restarts"`
}

func (g *gateway) streams() map[string]kvStream {
	g.t.Helper()
	var state struct {
		KVEvents []kvStream `json:"kv_events"`
	}
	g.readState(&state)
	all := make(map[string]kvStream)
	for _, s := range state.KVEvents {
		all[s.Address] = s
	}
	return all
}

// exact waits until so many streams are there and all are exact.
func (g *gateway) exact(streams int) {
	g.t.Helper()
	g.waitFor(fmt.Sprintf("%d exact streams", streams), func() bool {
		all := g.streams()
		for _, s := range all {
			if s.State != "exact" {
				return false
			}
		}
		return len(all) == streams
	})
}

// caughtUp waits until the gateway knows of as many blocks as the replica has.
func (g *gateway) caughtUp(s *replica.Server) {
	g.t.Helper()
	addr := strings.TrimPrefix(s.URL(), "http://")
	g.waitFor("all events of "+addr, func() bool { return g.streams()[addr].Blocks == s.CachedBlocks() })
}

// preciseSite is a route that goes by what engines say.
func preciseSite(servers []*replica.Server, route string) string {
	return siteFor(servers, "kv_events auto", "strategy precise_cache_aware\ntokenize_timeout 5s\n"+route)
}

// reasoned asks, and wants a reason.
func (g *gateway) reasoned(reason, path, body string, header ...string) (target string) {
	g.t.Helper()
	r := g.served(path, body, header...)
	if r.reason != reason {
		g.t.Errorf("reason %s, want %s", r.reason, reason)
	}
	g.idle()
	return r.target
}

// What an engine has evicted, or was sent by others, is known: nothing of it came through the gateway.
func TestRoutesByWhatEnginesHold(t *testing.T) {
	servers := publishing(t, 3, replica.Config{CacheBlocks: 400})
	g := startGateway(t, preciseSite(servers, "tokenize on"))
	g.exact(3)
	byName := make(map[string]*replica.Server)
	for i, s := range servers {
		byName[fmt.Sprintf("r%d", i)] = s
	}
	question := chat("m", longPrompt(1, 8000))
	first := g.reasoned("cold", chatPath, question)
	g.caughtUp(byName[first])
	for range 3 {
		if to := g.reasoned("cache", chatPath, question); to != first {
			t.Errorf("went to %s, %s holds it", to, first)
		}
	}
	// Somebody else fills the cache of the one that holds it, and asks another one for the same.
	for i := range 8 {
		direct(t, byName[first], chat("m", longPrompt(100+i, 8000)))
	}
	g.caughtUp(byName[first])
	for name, s := range byName {
		if name == first {
			continue
		}
		direct(t, s, question)
		g.caughtUp(s)
		if to := g.reasoned("cache", chatPath, question); to != name {
			t.Errorf("went to %s, only %s holds it", to, name)
		}
		break
	}
	if n, exact := g.predictions(); n != 4 || exact != n {
		t.Errorf("%d of %d predictions were right", exact, n)
	}
}

// predictions is how many predictions were compared with what engines delivered, and how many of them were right.
func (g *gateway) predictions() (n, right int) {
	g.t.Helper()
	const metric = "caddy_rolter_kv_prediction_error_tokens_"
	m := g.metrics()
	return int(m[metric+"count"]), int(m[metric+`bucket{le="0"}`] - m[metric+`bucket{le="-1"}`])
}

// Token ids come from the prompt, from a header, or from nobody.
func TestTokenIDs(t *testing.T) {
	servers := publishing(t, 2, replica.Config{CacheBlocks: 4000})
	g := startGateway(t, preciseSite(servers, ""))
	g.exact(2)
	ids := make([]string, 400)
	for i := range ids {
		ids[i] = fmt.Sprint(1000 + i*7%911)
	}
	list := strings.Join(ids, ",")
	completion := `{"model":"m","prompt":[` + list + `]}`
	holder := g.reasoned("cold", "/v1/completions", completion)
	g.caughtUp(servers[0])
	g.caughtUp(servers[1])
	if to := g.reasoned("cache", "/v1/completions", completion); to != holder {
		t.Errorf("went to %s, %s holds it", to, holder)
	}
	const header = "X-Rolter-Vllm-Token-Ids"
	hello := chat("m", "hello")
	if to := g.reasoned("cache", chatPath, hello, header, " "+strings.ReplaceAll(list, ",", " ,\t")); to != holder {
		t.Errorf("went to %s, %s holds what the header says", to, holder)
	}
	g.reasoned("no_tokens", chatPath, hello)
	g.reasoned("no_tokens", chatPath, hello, header, "")
	for _, bad := range []string{"1,,2", "1,-2", "1,4294967296", "1,x", list + ","} {
		g.reasoned("no_tokens", chatPath, hello, header, bad)
	}
	if n := g.metrics()["caddy_rolter_bad_token_headers_total"]; n != 5 {
		t.Errorf("%v bad headers counted, want 5", n)
	}
}

// A stream that cannot be relied on neither attracts nor repels, and comes back.
func TestStreamsThatAreDown(t *testing.T) {
	servers := publishing(t, 2, replica.Config{CacheBlocks: 4000})
	g := startGateway(t, preciseSite(servers, "tokenize on"))
	g.exact(2)
	question := chat("m", longPrompt(1, 8000))
	holder := g.reasoned("cold", chatPath, question)
	at := int(holder[1] - '0')
	g.caughtUp(servers[at])
	down := func(i int) {
		t.Helper()
		if err := servers[i].SetEventFault(replica.Fault{Kind: replica.Down}); err != nil {
			t.Fatal(err)
		}
		addr := strings.TrimPrefix(servers[i].URL(), "http://")
		g.waitFor("a stream to be down", func() bool { return g.streams()[addr].State == "down" })
	}
	down(1 - at)
	if to := g.reasoned("cache", chatPath, question); to != holder {
		t.Errorf("went to %s, %s holds it", to, holder)
	}
	down(at)
	g.reasoned("no_signal", chatPath, question)
	for _, s := range servers {
		if err := s.SetEventFault(replica.Fault{}); err != nil {
			t.Fatal(err)
		}
	}
	g.exact(2)
	if to := g.reasoned("cache", chatPath, question); to != holder {
		t.Errorf("went to %s, %s holds it", to, holder)
	}
}

// A reload, also one that fails, does not interrupt what is listened to.
func TestReloadKeepsTheStreams(t *testing.T) {
	servers := publishing(t, 2, replica.Config{CacheBlocks: 4000})
	g := startGateway(t, preciseSite(servers, "tokenize on"))
	g.exact(2)
	question := chat("m", longPrompt(1, 8000))
	holder := g.reasoned("cold", chatPath, question)
	at := servers[holder[1]-'0']
	g.caughtUp(at)
	g.waitFor("what has come to be counted too", func() bool { return g.streams()[strings.TrimPrefix(at.URL(), "http://")].Batches > 0 })
	before := g.streams()
	if err := g.load(preciseSite(servers, "tokenize on\noverload_margin 3")); err != nil {
		t.Fatal(err)
	}
	if err := g.load(preciseSite(servers, "threshold 7")); err == nil {
		t.Fatal("a bad value loads")
	}
	after := g.streams()
	for addr, was := range before {
		if after[addr] != was {
			t.Errorf("%s: %+v before, %+v after", addr, was, after[addr])
		}
	}
	if to := g.reasoned("cache", chatPath, question); to != holder {
		t.Errorf("went to %s, %s holds it", to, holder)
	}
	// Without the provider nothing is kept.
	if err := g.load(preciseSite(servers[:1], "tokenize on")); err != nil {
		t.Fatal(err)
	}
	if n := len(g.streams()); n != 1 {
		t.Errorf("%d streams for one provider", n)
	}
}

// An engine that restarts is known to be empty before its first answer.
func TestARestartEmptiesWhatIsKnown(t *testing.T) {
	servers := publishing(t, 1, replica.Config{CacheBlocks: 4000})
	g := startGateway(t, preciseSite(servers, "tokenize on"))
	g.exact(1)
	direct(t, servers[0], chat("m", longPrompt(1, 8000)))
	g.caughtUp(servers[0])
	again, err := servers[0].Restart()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = again.Close() })
	addr := strings.TrimPrefix(again.URL(), "http://")
	g.waitFor("the stream to be exact, and empty", func() bool {
		s := g.streams()[addr]
		return s.State == "exact" && s.Blocks == 0
	})
	direct(t, again, chat("m", longPrompt(2, 8000)))
	g.caughtUp(again)
}

// usage is what an engine reports of a prompt.
type usage struct {
	Prompt  int `json:"prompt_tokens"`
	Details struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// Each rank of an engine has a cache of its own: requests go to the one that holds their prompt.
func TestRanksAreTargets(t *testing.T) {
	servers := publishing(t, 2, replica.Config{CacheBlocks: 4000, Ranks: 3})
	for _, strategy := range []string{"precise_cache_aware", "least_prefill", "pipeline"} {
		t.Run(strategy, func(t *testing.T) {
			g := startGateway(t, siteFor(servers, "kv_events auto", "strategy "+strategy+"\ntokenize on\ntokenize_timeout 5s"))
			g.exact(6)
			const conversations = 12
			for i := range conversations {
				g.served(chatPath, chat("m", longPrompt(i, 4000)))
			}
			g.idle()
			for i := range conversations {
				r := g.served(chatPath, chat("m", longPrompt(i, 4000)))
				var answer struct {
					Usage usage `json:"usage"`
				}
				if err := json.Unmarshal([]byte(r.body), &answer); err != nil {
					t.Fatal(err)
				}
				if answer.Usage.Details.Cached < answer.Usage.Prompt-32 {
					t.Errorf("conversation %d: %d of %d tokens cached", i, answer.Usage.Details.Cached, answer.Usage.Prompt)
				}
			}
		})
	}
}

// direct asks a replica past the gateway.
func direct(t *testing.T, s *replica.Server, body string) {
	t.Helper()
	resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d", resp.StatusCode)
	}
}

// A client cannot have the engine count blocks twice.
func TestTheReportModeOfClientsIsNeutralised(t *testing.T) {
	for _, tc := range []struct{ provider, want string }{
		{"kv_events tcp://127.0.0.1:1", `{"kv_cache_report_mode":"incremental","other":1}`},
		{"", `{"kv_cache_report_mode":"full","other":1}`},
	} {
		stubs := newStubs(t, 1, completion)
		g := startGateway(t, fmt.Sprintf("rolter {\nprovider a http://%s {\n%s\n}\nroute m {\ntarget a\n}\n}", stubs[0].addr, tc.provider))
		g.served(chatPath, `{"model":"m","vllm_xargs":{"kv_cache_report_mode":"full","other":1},"messages":[]}`)
		want := `{"model":"m","vllm_xargs":` + tc.want + `,"messages":[]}`
		sent := func(r stubRequest) bool { return r.body != "" } // and no question about the engine
		all := stubs[0].received()
		if at := slices.IndexFunc(all, sent); at < 0 || all[at].body != want {
			t.Errorf("with %q the replica got %+v, want %s", tc.provider, all, want)
		}
	}
}

// Whatever publishers send, requests are served, and nothing is left of the publishers afterwards.
func TestHostilePublishers(t *testing.T) {
	greeting := "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + strings.Repeat("\x00", 16) + "\x00" + strings.Repeat("\x00", 31)
	ready := "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
	for name, says := range map[string]string{
		"silent":                 "",
		"half a greeting":        greeting[:20],
		"another protocol":       "HTTP/1.1 200 OK\r\n\r\n",
		"no handshake":           greeting,
		"a frame of 2^62 bytes":  greeting + ready + "\x02\x40\x00\x00\x00\x00\x00\x00\x00",
		"a frame of 40 GiB":      greeting + ready + "\x02\x00\x00\x00\x0a\x00\x00\x00\x00",
		"a command of 2^62":      greeting + "\x06\x40\x00\x00\x00\x00\x00\x00\x00",
		"messages without end":   greeting + ready + strings.Repeat("\x01\x00", 1000),
		"a payload that is none": greeting + ready + "\x01\x00\x01\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00\x06\xdd\xff\xff\xff\xff\xc1",
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			connected := make(chan struct{}, 100)
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = c.Write([]byte(says))
					select {
					case connected <- struct{}{}:
					default:
					}
					go func() { _, _ = io.Copy(io.Discard, c); _ = c.Close() }()
				}
			}()
			stubs := newStubs(t, 1, completion)
			site := func(provider string) string {
				return fmt.Sprintf("rolter {\nprovider a http://%[1]s {\n%[2]s\n}\nprovider b http://%[1]s/b {\nkv_events tcp://127.0.0.1:1\n}\nroute m {\nstrategy precise_cache_aware\ntarget a\ntarget b\n}\n}", stubs[0].addr, provider)
			}
			g := startGateway(t, site(""))
			since := g.mark()
			if err := g.load(site("kv_events tcp://" + l.Addr().String())); err != nil {
				t.Fatal(err)
			}
			<-connected
			for range 20 {
				r := g.served(textPath, `{"model":"m","prompt":[1,2,3]}`)
				if r.reason != "no_signal" && r.reason != "cold" {
					t.Errorf("reason %s", r.reason)
				}
			}
			if err := g.load(site("")); err != nil {
				t.Fatal(err)
			}
			g.settles(since, 8<<20)
		})
	}
}
