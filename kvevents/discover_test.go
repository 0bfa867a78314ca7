package kvevents

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func described(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile("testdata/discover/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// describing is an engine that gives these answers, and 404 for the rest.
func describing(t testing.TB, answers map[string]string) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, ok := answers[r.URL.Path]
		if !ok || r.Method != http.MethodGet {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, answer)
	}))
	t.Cleanup(s.Close)
	return s
}

func TestDiscoversARecordedEngine(t *testing.T) {
	engine := describing(t, map[string]string{
		"/at/kv_event_sources": described(t, "vllm-0.32.0-dp2"),
		"/at/v1/models":        described(t, "models-0.32.0-lora"),
	})
	got, err := Discover(t.Context(), engine.Client(), engine.URL+"/at/", "")
	want := Discovery{
		Ranks: []Rank{
			{Rank: 0, Endpoint: "tcp://127.0.0.1:5603", Replay: "tcp://127.0.0.1:5703", Topic: "kv@C@tiny"},
			{Rank: 1, Endpoint: "tcp://127.0.0.1:5604", Replay: "tcp://127.0.0.1:5704", Topic: "kv@C@tiny"},
		},
		Adapters: []string{"ad1"}, MaxModelLen: 1024, HasModels: true,
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestDiscoversAnEngineOverIPv6(t *testing.T) {
	listener, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6 here")
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, described(t, "vllm-0.32.0")) })}
	go server.Serve(listener)
	defer server.Close()
	got, err := Discover(t.Context(), http.DefaultClient, "http://"+listener.Addr().String(), "")
	if want := []Rank{{Endpoint: "tcp://[::1]:5601", Replay: "tcp://[::1]:5701", Topic: "kv@A@tiny"}}; err != nil || !slices.Equal(got.Ranks, want) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestDiscoverSendsTheKey(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		fmt.Fprint(w, `{}`)
	}))
	defer engine.Close()
	if _, err := Discover(t.Context(), engine.Client(), engine.URL, "secret"); err != nil {
		t.Error(err)
	}
	if _, err := Discover(t.Context(), engine.Client(), engine.URL, ""); err == nil || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
}

// vllmSource is the description of one rank of vLLM.
func vllmSource(endpoint, replay string) string {
	b, _ := json.Marshal(map[string]any{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay, "topic": "t"})
	return string(b)
}

func TestWhereVLLMCanBeListenedTo(t *testing.T) {
	const zero = `{"0":`
	for _, c := range []struct {
		name, answer, host string
		want               []Rank
		problems           []string // a piece of each
	}{
		{"bound to everything", zero + vllmSource("tcp://*:5557", "tcp://*:6557") + `}`, "gpu-1", []Rank{{0, "tcp://gpu-1:5557", "tcp://gpu-1:6557", "t"}}, nil},
		{"bound to everything of IPv6", zero + vllmSource("tcp://[::]:5557", "tcp://[::]:6557") + `}`, "fd00::7", []Rank{{0, "tcp://[fd00::7]:5557", "tcp://[fd00::7]:6557", "t"}}, nil},
		{"without replay", `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":null,"topic":""}}`, "gpu-1", []Rank{{0, "tcp://gpu-1:5557", "", ""}}, nil},
		{"described by less", `{"0":{"endpoint":"tcp://*:5557"}}`, "gpu-1", []Rank{{0, "tcp://gpu-1:5557", "", ""}}, nil},
		{"ten ranks in order", `{"10":` + vllmSource("tcp://*:15", "") + `,"9":` + vllmSource("tcp://*:14", "") + `}`, "h", []Rank{{9, "tcp://h:14", "", "t"}, {10, "tcp://h:15", "", "t"}}, nil},
		{"an IPv6 address", zero + vllmSource("tcp://[fd00::9]:5557", "") + `}`, "gpu-1", []Rank{{0, "tcp://[fd00::9]:5557", "", "t"}}, nil},
		{"what port 0 has become", zero + vllmSource("tcp://10.0.0.9:41234", "tcp://10.0.0.9:6557") + `}`, "gpu-1", []Rank{{0, "tcp://10.0.0.9:41234", "tcp://10.0.0.9:6557", "t"}}, nil},
		{"replay at an interface", zero + vllmSource("tcp://*:5557", "tcp://eth0:6557") + `}`, "gpu-1", []Rank{{0, "tcp://gpu-1:5557", "tcp://gpu-1:6557", "t"}}, nil},
		{"replay at 0.0.0.0", zero + vllmSource("tcp://*:5557", "tcp://0.0.0.0:6557") + `}`, "gpu-1", []Rank{{0, "tcp://gpu-1:5557", "tcp://gpu-1:6557", "t"}}, nil},
		{"on this machine", zero + vllmSource("tcp://127.0.0.1:41234", "tcp://127.0.0.1:6557") + `}`, "localhost", []Rank{{0, "tcp://127.0.0.1:41234", "tcp://127.0.0.1:6557", "t"}}, nil},

		{"connects to 0.0.0.0", zero + vllmSource("tcp://0.0.0.0:5557", "") + `}`, "gpu-1", []Rank{{0, "", "", "t"}}, []string{`start it with "endpoint":"tcp://*:5557"`}},
		{"connects to an address", zero + vllmSource("tcp://10.0.0.9:5557", "") + `}`, "gpu-1", []Rank{{0, "", "", "t"}}, []string{`"tcp://10.0.0.9:5557"`}},
		{"connects to a name", zero + vllmSource("tcp://gpu-1:41234", "") + `}`, "gpu-1", []Rank{{0, "", "", "t"}}, []string{`tcp://*:41234`}},
		{"bound to its own loopback", zero + vllmSource("tcp://[::1]:5557", "tcp://127.0.0.1:6557") + `}`, "gpu-1", []Rank{{0, "", "", "t"}}, []string{`tcp://*:5557`, "replay"}},
		{"another transport", zero + vllmSource("ipc:///tmp/kv", "inproc://x") + `}`, "gpu-1", []Rank{{0, "", "", "t"}}, []string{"--kv-events-config", "replay"}},
		{"a port that is none", zero + vllmSource("tcp://*:0", "tcp://*:65536") + `}`, "gpu-1", []Rank{{0, "", "", "t"}}, []string{"--kv-events-config", "replay"}},
		{"events off", `{"0":{"enable_kv_cache_events":false,"publisher":"zmq","endpoint":"tcp://*:5557"}}`, "gpu-1", []Rank{{}}, []string{"publishes no KV events"}},
		{"no publisher", `{"0":{"enable_kv_cache_events":true,"publisher":"null","endpoint":"tcp://*:5557"}}`, "gpu-1", []Rank{{}}, []string{"publishes no KV events"}},
		{"no ranks", `{}`, "gpu-1", nil, []string{"publishes no KV events"}},
		{"null", `null`, "gpu-1", nil, []string{"publishes no KV events"}},
		{"ranks that are no numbers", `{"a":{},"-1":{},"01":{},"1024":{},"1":` + vllmSource("tcp://*:1", "") + `}`, "h", []Rank{{1, "tcp://h:1", "", "t"}}, []string{`"-1"`, `"01"`, `"1024"`, `"a"`}},
		{"a rank of another shape", `{"0":[1],"1":{"endpoint":7},"2":null}`, "h", []Rank{{Rank: 0}, {Rank: 1}, {Rank: 2}}, []string{"rank 0", "rank 1", "rank 2"}},
		{"two ranks at one port", `{"0":` + vllmSource("tcp://*:5557", "") + `,"1":` + vllmSource("tcp://*:5557", "") + `}`, "h", []Rank{{0, "tcp://h:5557", "", "t"}, {1, "", "", "t"}}, []string{"ranks 0 and 1"}},
		{"replay at the port of the next rank", `{"0":` + vllmSource("tcp://*:5557", "tcp://*:5558") + `,"1":` + vllmSource("tcp://*:5558", "tcp://*:5559") + `}`, "h",
			[]Rank{{0, "tcp://h:5557", "", "t"}, {1, "tcp://h:5558", "tcp://h:5559", "t"}}, []string{"further apart"}},
		{"replay where it publishes", zero + vllmSource("tcp://*:5557", "tcp://*:5557") + `}`, "h", []Rank{{0, "tcp://h:5557", "", "t"}}, []string{"further apart"}},
		{"a topic that is too long", zero + `{"endpoint":"tcp://*:5557","topic":"` + strings.Repeat("t", maxTopic+1) + `"}}`, "h", []Rank{{}}, []string{"not as expected"}},
	} {
		var d Discovery
		err := d.readSources([]byte(c.answer), c.host)
		d.separate()
		if err != nil || !slices.Equal(d.Ranks, c.want) || !saysEach(d.Problems, c.problems) {
			t.Errorf("%s: %+v, %v", c.name, d, err)
		}
	}
}

func saysEach(problems, pieces []string) bool {
	if len(problems) != len(pieces) {
		return false
	}
	for i, p := range problems {
		if !strings.Contains(p, pieces[i]) {
			return false
		}
	}
	return true
}

func TestWhereSGLangCanBeListenedTo(t *testing.T) {
	for _, c := range []struct {
		name, events, host string
		want               []Rank
		problems           []string
	}{
		{"two ranks", `{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv","block_size":64,"dp_size":2}`, "gpu-1",
			[]Rank{{0, "tcp://gpu-1:5557", "", "kv"}, {1, "tcp://gpu-1:5558", "", "kv"}}, nil},
		{"with replay", `{"publisher":"zmq","endpoint_host":"0.0.0.0","endpoint_port_base":5557,"replay_endpoint_host":"*","replay_endpoint_port_base":6557,"topic":"","dp_size":1}`, "fd00::7",
			[]Rank{{0, "tcp://[fd00::7]:5557", "tcp://[fd00::7]:6557", ""}}, nil},
		{"with its own address", `{"publisher":"zmq","endpoint_host":"10.0.0.9","endpoint_port_base":5557}`, "gpu-1", []Rank{{0, "tcp://10.0.0.9:5557", "", ""}}, nil},
		{"with its own name", `{"publisher":"zmq","endpoint_host":"gpu-1.local","endpoint_port_base":5557,"replay_endpoint_port_base":6557}`, "10.0.0.9", []Rank{{0, "tcp://gpu-1.local:5557", "tcp://gpu-1.local:6557", ""}}, nil},
		{"in brackets", `{"publisher":"zmq","endpoint_host":"[::]","endpoint_port_base":5557}`, "gpu-1", []Rank{{0, "tcp://gpu-1:5557", "", ""}}, nil},
		{"at its loopback", `{"publisher":"zmq","endpoint_host":"127.0.0.1","endpoint_port_base":5557}`, "gpu-1", []Rank{{}}, []string{"start the engine with"}},
		{"with a host that is none", `{"publisher":"zmq","endpoint_host":"a:1/@b","endpoint_port_base":5557}`, "gpu-1", []Rank{{}}, []string{"start the engine with"}},
		{"without a host", `{"publisher":"zmq","endpoint_port_base":5557}`, "gpu-1", []Rank{{}}, []string{"start the engine with"}},
		{"ports that end", `{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":65535,"replay_endpoint_port_base":-3,"dp_size":2}`, "h",
			[]Rank{{0, "tcp://h:65535", "", ""}, {Rank: 1}}, []string{"replays", "65535 + 1", "replays"}},
		{"replay in the way", `{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"replay_endpoint_port_base":5558,"dp_size":2}`, "h",
			[]Rank{{0, "tcp://h:5557", "", ""}, {1, "tcp://h:5558", "tcp://h:5559", ""}}, []string{"further apart"}},
		{"off", `null`, "h", nil, []string{"publishes no KV events"}},
		{"no publisher", `{"publisher":"null","endpoint_host":"*","endpoint_port_base":5557}`, "h", nil, []string{"publishes no KV events"}},
	} {
		var d Discovery
		err := d.readServerInfo([]byte(`{"served_model_name":"m","kv_events":`+c.events+`}`), c.host)
		d.separate()
		if err != nil || !slices.Equal(d.Ranks, c.want) || !saysEach(d.Problems, c.problems) {
			t.Errorf("%s: %+v, %v", c.name, d, err)
		}
	}
}

func TestAsksSGLangWhereVLLMsAnswerIsMissing(t *testing.T) {
	for _, status := range []int{403, 404, 405, 501} {
		mux := http.NewServeMux()
		mux.HandleFunc("/kv_event_sources", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
		mux.HandleFunc("/server_info", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `{"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"dp_size":1}}`)
		})
		engine := httptest.NewServer(mux)
		got, err := Discover(t.Context(), engine.Client(), engine.URL, "")
		if want := []Rank{{Endpoint: "tcp://127.0.0.1:5557"}}; err != nil || !slices.Equal(got.Ranks, want) || got.HasModels {
			t.Errorf("%d: %+v, %v", status, got, err)
		}
		engine.Close()
	}
	for _, answers := range []map[string]string{{}, {"/server_info": `{"vllm_config":{}}`}, {"/server_info": `null`}} {
		engine := describing(t, answers)
		got, err := Discover(t.Context(), engine.Client(), engine.URL, "")
		if err != nil || got.Ranks != nil || !saysEach(got.Problems, []string{"does not tell"}) {
			t.Errorf("%+v, %v", got, err)
		}
	}
}

func TestModels(t *testing.T) {
	for _, c := range []struct {
		answer   string
		adapters []string
		length   int
		has      bool
	}{
		{described(t, "models-0.32.0"), nil, 8192, true},
		{`{"data":[{"id":"a"},{"id":"b","parent":"a","max_model_len":null},{"id":"c","parent":""},{"id":"","parent":"a"}]}`, []string{"b", "c"}, 0, true},
		{`{"data":[7,{"id":5},{"id":"a","max_model_len":"x"},{"id":"b","max_model_len":-4},{"id":"c","max_model_len":16}]}`, nil, 16, true},
		{`{"data":[` + strings.Repeat(`{"id":"x","parent":"y"},`, maxAdapters+5) + `{}]}`, slices.Repeat([]string{"x"}, maxAdapters), 0, true},
		{`{"data":[]}`, nil, 0, true},
		{`{}`, nil, 0, false},
		{`[]`, nil, 0, false},
		{`<html>`, nil, 0, false},
	} {
		var d Discovery
		d.readModels([]byte(c.answer))
		if !slices.Equal(d.Adapters, c.adapters) || d.MaxModelLen != c.length || d.HasModels != c.has {
			t.Errorf("%.80s: %+v", c.answer, d)
		}
	}
}

func TestEnginesThatCannotDescribeThemselves(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a redirect was followed") }))
	defer elsewhere.Close()
	many := func() string {
		var b strings.Builder
		for i := range MaxRanks + 1 {
			fmt.Fprintf(&b, `"%d":{},`, i)
		}
		return `{` + b.String() + `"x":{}}`
	}()
	for name, answer := range map[string]http.HandlerFunc{
		"fails":              func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		"is not up":          func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) },
		"redirects":          func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, elsewhere.URL, http.StatusFound) },
		"says it in HTML":    func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") },
		"says a list":        func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `[{}]`) },
		"nests without end":  func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"0":`+strings.Repeat("[", 1<<20)) },
		"has too many ranks": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, many) },
		"says too much":      func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`, strings.Repeat(" ", maxDescription)) },
		"breaks off": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "9")
			fmt.Fprint(w, `{}`)
		},
		"is of SGLang, wrong": serverInfo(`{"kv_events":7}`),
		"has no rank":         serverInfo(`{"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"dp_size":0}}`),
		"has a million ranks": serverInfo(`{"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"dp_size":1000000}}`),
		"has half a rank":     serverInfo(`{"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"dp_size":0.5}}`),
		"is of SGLang, empty": serverInfo(``),
	} {
		engine := httptest.NewServer(answer)
		if got, err := Discover(t.Context(), engine.Client(), engine.URL, ""); err == nil || !reflect.DeepEqual(got, Discovery{}) {
			t.Errorf("an engine that %s: %+v, %v", name, got, err)
		}
		engine.Close()
	}
	for _, base := range []string{"", "::", "http://", "gpu-1:8000"} {
		if _, err := Discover(t.Context(), http.DefaultClient, base, ""); err == nil {
			t.Errorf("base %q is taken", base)
		}
	}
}

func serverInfo(info string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/server_info" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, info)
	}
}

func TestDiscoverEndsWithItsContext(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { close(asked); <-release }))
	defer engine.Close()
	defer close(release)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	go func() { <-asked; cancel() }()
	if _, err := Discover(ctx, engine.Client(), engine.URL, ""); err == nil {
		t.Error("no error from a silent engine")
	}
}

func FuzzDiscovery(f *testing.F) {
	for _, s := range []string{
		described(f, "vllm-0.32.0"), described(f, "vllm-0.32.0-dp2"), described(f, "models-0.32.0-lora"),
		`{"0":` + vllmSource("tcp://[::1%eth0]:5557", "tcp://:6557") + `,"0":{},"1":` + vllmSource("tcp://0.0.0.0:40000", "tcp://[::ffff:127.0.0.1]:1") + `}`,
		`{"kv_events":{"publisher":"zmq","endpoint_host":"[fe80::1%a]","endpoint_port_base":65534,"replay_endpoint_port_base":1,"dp_size":1024}}`,
		`{"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":9223372036854775807,"dp_size":2}}`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, answer string) {
		for _, host := range []string{"gpu-1", "127.0.0.1", "fd00::7"} {
			for _, read := range []func(*Discovery, []byte, string) error{(*Discovery).readSources, (*Discovery).readServerInfo} {
				var d Discovery
				if read(&d, []byte(answer), host) != nil {
					continue
				}
				d.separate()
				d.readModels([]byte(answer))
				checkDiscovery(t, d, host)
			}
		}
	})
}

// checkDiscovery has what holds for whatever an engine says.
func checkDiscovery(t *testing.T, d Discovery, host string) {
	t.Helper()
	if len(d.Ranks) > MaxRanks || len(d.Problems) > maxProblems || len(d.Adapters) > maxAdapters {
		t.Fatalf("%d ranks, %d problems, %d adapters", len(d.Ranks), len(d.Problems), len(d.Adapters))
	}
	for _, p := range d.Problems {
		if len(p) > 2000 || strings.ContainsFunc(p, func(c rune) bool { return c < ' ' }) {
			t.Fatalf("problem %q", p)
		}
	}
	seen := make(map[string]bool)
	for i, r := range d.Ranks {
		if r.Rank < 0 || r.Rank >= MaxRanks || i > 0 && r.Rank <= d.Ranks[i-1].Rank || len(r.Topic) > maxTopic {
			t.Fatalf("ranks %+v", d.Ranks)
		}
		if r.Endpoint == "" && len(d.Problems) == 0 {
			t.Fatalf("nothing is said about rank %+v", r)
		}
		for _, endpoint := range []string{r.Endpoint, r.Replay} {
			if endpoint == "" {
				continue
			}
			at, _, err := ParseEndpoint(endpoint)
			addr, _ := netip.ParseAddr(at)
			if err != nil || at == "*" || addr.IsValid() && addr.IsUnspecified() || seen[endpoint] || host == "gpu-1" && addr.Unmap().IsLoopback() {
				t.Fatalf("endpoint %q, %v", endpoint, err)
			}
			if _, err := url.Parse("//" + at); err != nil && !addr.IsValid() {
				t.Fatalf("endpoint %q, %v", endpoint, err)
			}
			seen[endpoint] = true
		}
	}
}
