package rolter

import (
	"fmt"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// Parts of configurations for the tables below.
const (
	providerJSON  = `{"name":"vllm-1","api_base":"http://vllm-1.example:8000"}`
	providerBlock = "provider vllm-1 http://vllm-1.example:8000\n"
	routeJSON     = `{"model":"bad-config","targets":[{"provider":"vllm-1"}]}`
	routeBlock    = "route bad-config {\ntarget vllm-1\n}\n"
)

// handlerJSON is a handler with these providers and routes.
func handlerJSON(providers, routes string) string {
	return fmt.Sprintf(`{"handler":"rolter","providers":[%s],"routes":[%s]}`, providers, routes)
}

// provider and route with one more field.
func withProviderField(field string) string {
	return handlerJSON(strings.TrimSuffix(providerJSON, "}")+","+field+"}", routeJSON)
}

func withRouteField(field string) string {
	return handlerJSON(providerJSON, strings.TrimSuffix(routeJSON, "}")+","+field+"}")
}

func withHandlerField(field string) string {
	return strings.TrimSuffix(handlerJSON(providerJSON, routeJSON), "}") + "," + field + "}"
}

func withTargets(targets string) string {
	return handlerJSON(providerJSON, `{"model":"bad-config","targets":[`+targets+`]}`)
}

func withBase(base string) string {
	return handlerJSON(`{"name":"vllm-1","api_base":"`+base+`"}`, routeJSON)
}

func baseBlock(base string) string { return "provider vllm-1 " + base + "\n" + routeBlock }

func inProviderBlock(s string) string {
	return "provider vllm-1 http://vllm-1.example:8000 {\n" + s + "\n}\n" + routeBlock
}

func inRouteBlock(s string) string {
	return providerBlock + "route bad-config {\ntarget vllm-1\n" + s + "\n}\n"
}

// serverJSON is a configuration with one handler.
func serverJSON(handler string) []byte {
	return []byte(`{"apps":{"http":{"servers":{"srv0":{"listen":["127.0.0.1:8080"],"automatic_https":{"disable":true},"routes":[{"handle":[` + handler + `]}]}}}}}`)
}

// A bad value fails the load, and the error names the key and the value. Each mistake is made in JSON and, where it can be said there, in the Caddyfile.
func TestBadValueFailsTheLoad(t *testing.T) {
	const two = providerJSON + `,{"name":"vllm-2","api_base":"http://vllm-2.example:8000"}`
	for _, tc := range []struct {
		name, json, block string
		want              []string
	}{
		// The list of the promise.
		{"empty provider", handlerJSON(`{"api_base":"http://vllm-1.example"}`, routeJSON), "provider \"\" http://vllm-1.example\n" + routeBlock, []string{`provider ""`, "name"}},
		{"duplicate provider", handlerJSON(providerJSON+","+providerJSON, routeJSON), providerBlock + providerBlock + routeBlock, []string{`provider "vllm-1"`, "twice"}},
		{"empty route", handlerJSON(providerJSON, `{"targets":[{"provider":"vllm-1"}]}`), providerBlock + "route \"\" {\ntarget vllm-1\n}\n", []string{`route ""`, "model"}},
		{"duplicate route", handlerJSON(providerJSON, routeJSON+","+routeJSON), providerBlock + routeBlock + routeBlock, []string{`route "bad-config"`, "twice"}},
		{"unknown provider in a target", withTargets(`{"provider":"vllm-9"}`), providerBlock + "route bad-config {\ntarget vllm-9\n}\n", []string{`route "bad-config"`, `target "vllm-9"`, "unknown provider"}},
		{"target without a provider", withTargets(`{"model":"m"}`), "", []string{`route "bad-config"`, `target ""`, "provider"}},
		{"zero weight", withTargets(`{"provider":"vllm-1","weight":0}`), providerBlock + "route bad-config {\ntarget vllm-1 weight 0\n}\n", []string{`target "vllm-1"`, "weight 0"}},
		{"negative weight", withTargets(`{"provider":"vllm-1","weight":-1.5}`), providerBlock + "route bad-config {\ntarget vllm-1 weight -1.5\n}\n", []string{`target "vllm-1"`, "weight -1.5"}},
		{"precise_cache_aware without kv_events", withRouteField(`"strategy":"precise_cache_aware"`), inRouteBlock("strategy precise_cache_aware"), []string{`route "bad-config"`, `strategy "precise_cache_aware"`, "kv_events"}},
		{"lmcache_aware without lmcache", withRouteField(`"strategy":"lmcache_aware"`), inRouteBlock("strategy lmcache_aware"), []string{`route "bad-config"`, `strategy "lmcache_aware"`, "lmcache"}},
		{"stream that is not tcp", withProviderField(`"kv_events":{"endpoint":"http://vllm-1.example:5557"}`), inProviderBlock("kv_events http://vllm-1.example:5557"), []string{`provider "vllm-1"`, `kv_events.endpoint "http://vllm-1.example:5557"`, "tcp://"}},
		{"stale shorter than its refresh", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example/s","refresh":"5s","stale":"4s"}`), inProviderBlock("lmcache http://vllm-1.example/s {\nrefresh 5s\nstale 4s\n}"), []string{`provider "vllm-1"`, "lmcache.stale 4s", "lmcache.refresh 5s"}},
		{"stale shorter than the default refresh", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example/s","stale":"1s"}`), inProviderBlock("lmcache http://vllm-1.example/s {\nstale 1s\n}"), []string{"lmcache.stale 1s", "lmcache.refresh 2s"}},
		{"refresh longer than the default stale", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example/s","refresh":"11s"}`), inProviderBlock("lmcache http://vllm-1.example/s {\nrefresh 11s\n}"), []string{"lmcache.stale 10s", "lmcache.refresh 11s"}},
		{"denied stream", withProviderField(`"kv_events":{"endpoint":"tcp://169.254.169.254:5557"}`), inProviderBlock("kv_events tcp://169.254.169.254:5557"), []string{`kv_events.endpoint "tcp://169.254.169.254:5557"`, "denied"}},
		{"denied controller", withProviderField(`"lmcache":{"endpoint":"http://168.63.129.16/status"}`), inProviderBlock("lmcache http://168.63.129.16/status"), []string{`lmcache.endpoint "http://168.63.129.16/status"`, "denied"}},
		{"denied controller in full-width digits", withProviderField(`"lmcache":{"endpoint":"http://1６9.254.169.254/"}`), inProviderBlock("lmcache http://1６9.254.169.254/"), []string{"lmcache.endpoint", "link-local", "denied"}},
		{"denied controller behind credentials", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example@169.254.169.254/"}`), inProviderBlock("lmcache http://vllm-1.example@169.254.169.254/"), []string{"lmcache.endpoint", "link-local", "denied"}},
		{"controller whose host is escaped", withProviderField(`"lmcache":{"endpoint":"http://169.254.169%2e254/"}`), inProviderBlock("lmcache http://169.254.169%2e254/"), []string{"lmcache.endpoint", "URL"}},
		{"denied controller without a port, in IPv6", withProviderField(`"lmcache":{"endpoint":"http://[fd00:ec2::254]/status"}`), inProviderBlock("lmcache http://[fd00:ec2::254]/status"), []string{"lmcache.endpoint", "fd00:ec2::254", "denied"}},
		{"denied replica", withBase("http://169.254.169.254"), baseBlock("http://169.254.169.254"), []string{`api_base "http://169.254.169.254"`, "denied"}},

		// What else operators get wrong.
		{"no routes", handlerJSON(providerJSON, ""), providerBlock, []string{"routes"}},
		{"no targets", withTargets(""), providerBlock + "route bad-config {\n}\n", []string{`route "bad-config"`, "targets"}},
		{"provider that is null", handlerJSON("null", routeJSON), "", []string{"providers", "null"}},
		{"route that is null", handlerJSON(providerJSON, "null"), "", []string{"routes", "null"}},
		{"target that is null", withTargets("null"), "", []string{"targets", "null"}},
		{"duplicate target", withTargets(`{"provider":"vllm-1"},{"provider":"vllm-1"}`), providerBlock + "route bad-config {\ntarget vllm-1\ntarget vllm-1\n}\n", []string{`target "vllm-1"`, "twice"}},
		{"provider whose name cannot be sent in a header", handlerJSON(`{"name":"a\nb","api_base":"http://vllm-1.example"}`, routeJSON), "", []string{`provider "a\nb"`, "header"}},
		{"other kind", withProviderField(`"kind":"anthropic"`), inProviderBlock("kind anthropic"), []string{`provider "vllm-1"`, `kind "anthropic"`, "openai_compatible"}},
		{"api_key with a line break", withProviderField(`"api_key":"a\r\nX-Evil: 1"`), "", []string{`provider "vllm-1"`, "api_key"}},

		{"api_base that is empty", withBase(""), baseBlock(`""`), []string{`provider "vllm-1"`, `api_base ""`}},
		{"api_base without a scheme", withBase("vllm-1.example:8000"), baseBlock("vllm-1.example:8000"), []string{`api_base "vllm-1.example:8000"`, "http://"}},
		{"api_base that is an address", withBase("10.0.0.1:8000"), baseBlock("10.0.0.1:8000"), []string{`api_base "10.0.0.1:8000"`}},
		{"api_base of another scheme", withBase("grpc://vllm-1.example"), baseBlock("grpc://vllm-1.example"), []string{`api_base "grpc://vllm-1.example"`, "http://"}},
		{"api_base without a host", withBase("http://:8000"), baseBlock("http://:8000"), []string{`api_base "http://:8000"`, "host"}},
		{"api_base with a port that is none", withBase("http://vllm-1.example:99999"), baseBlock("http://vllm-1.example:99999"), []string{`api_base "http://vllm-1.example:99999"`}},
		{"api_base with port 0", withBase("http://vllm-1.example:0"), baseBlock("http://vllm-1.example:0"), []string{`api_base "http://vllm-1.example:0"`}},
		{"api_base with a range of ports", withBase("http://vllm-1.example:8000-8003"), baseBlock("http://vllm-1.example:8000-8003"), []string{`api_base "http://vllm-1.example:8000-8003"`}},
		{"api_base with a query", withBase("http://vllm-1.example?x=1"), baseBlock("http://vllm-1.example?x=1"), []string{`api_base "http://vllm-1.example?x=1"`, "query"}},
		{"api_base with a fragment", withBase("http://vllm-1.example#x"), baseBlock("http://vllm-1.example#x"), []string{`api_base "http://vllm-1.example#x"`, "fragment"}},
		{"api_base with a variable that is not set", withBase("{env.ROLTER_TEST_NOT_SET}"), baseBlock("{env.ROLTER_TEST_NOT_SET}"), []string{`api_base "{env.ROLTER_TEST_NOT_SET}"`, "empty"}},
		{"mixed schemes", handlerJSON(providerJSON+`,{"name":"vllm-2","api_base":"https://vllm-2.example"}`, `{"model":"bad-config","targets":[{"provider":"vllm-1"},{"provider":"vllm-2"}]}`),
			providerBlock + "provider vllm-2 https://vllm-2.example\nroute bad-config {\ntarget vllm-1\ntarget vllm-2\n}\n", []string{`route "bad-config"`, `target "vllm-2"`, `api_base "https://vllm-2.example"`, "scheme"}},

		{"metadata service as a decimal number", withBase("http://2852039166"), baseBlock("http://2852039166"), []string{"api_base", "2852039166", "denied"}},
		{"metadata service inside IPv6", withBase("http://[::ffff:169.254.169.254]:80"), baseBlock("http://[::ffff:169.254.169.254]:80"), []string{"api_base", "denied"}},
		{"metadata service of Alibaba", withBase("http://100.100.100.200"), baseBlock("http://100.100.100.200"), []string{"api_base", "denied"}},
		{"private replica where that is blocked", strings.TrimSuffix(withBase("http://10.0.0.1:8000"), "}") + `,"egress":{"block_private":true}}`, baseBlock("http://10.0.0.1:8000") + "egress {\nblock_private on\n}\n", []string{`api_base "http://10.0.0.1:8000"`, "private", "denied"}},
		{"loopback replica where that is blocked", strings.TrimSuffix(withBase("http://127.1:8000"), "}") + `,"egress":{"block_loopback":true}}`, baseBlock("http://127.1:8000") + "egress {\nblock_loopback on\n}\n", []string{`api_base "http://127.1:8000"`, "loopback", "denied"}},

		{"stream without a port", withProviderField(`"kv_events":{"endpoint":"tcp://vllm-1.example"}`), inProviderBlock("kv_events tcp://vllm-1.example"), []string{`kv_events.endpoint "tcp://vllm-1.example"`}},
		{"stream without a host", withProviderField(`"kv_events":{"endpoint":"tcp://:5557"}`), inProviderBlock("kv_events tcp://:5557"), []string{`kv_events.endpoint "tcp://:5557"`}},
		{"stream with a port that is none", withProviderField(`"kv_events":{"endpoint":"tcp://vllm-1.example:events"}`), inProviderBlock("kv_events tcp://vllm-1.example:events"), []string{`kv_events.endpoint "tcp://vllm-1.example:events"`}},
		{"stream without an endpoint", withProviderField(`"kv_events":{"topic":"x"}`), "", []string{`kv_events.endpoint ""`}},
		{"controller that is no URL", withProviderField(`"lmcache":{"endpoint":"vllm-1.example:9000"}`), inProviderBlock("lmcache vllm-1.example:9000"), []string{`lmcache.endpoint "vllm-1.example:9000"`}},
		{"negative refresh", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","refresh":"-2s"}`), inProviderBlock("lmcache http://vllm-1.example {\nrefresh -2s\n}"), []string{"lmcache.refresh -2s"}},
		{"refresh that is too short", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","refresh":"50ms"}`), inProviderBlock("lmcache http://vllm-1.example {\nrefresh 50ms\n}"), []string{"lmcache.refresh 50ms", "at least 100ms"}},
		{"timeout that is not below its refresh", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","timeout":"2s"}`), inProviderBlock("lmcache http://vllm-1.example {\ntimeout 2s\n}"), []string{"lmcache.timeout 2s", "lmcache.refresh 2s"}},
		{"negative timeout", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","timeout":"-1s"}`), inProviderBlock("lmcache http://vllm-1.example {\ntimeout -1s\n}"), []string{"lmcache.timeout -1s"}},
		{"negative capacity", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","capacity":-1}`), "", []string{"lmcache.capacity -1"}},
		{"kind that is not there", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","kind":"redis"}`), inProviderBlock("lmcache http://vllm-1.example {\nkind redis\n}"), []string{`lmcache.kind "redis"`, "coordinator"}},
		{"controller without an instance", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","kind":"controller"}`), inProviderBlock("lmcache http://vllm-1.example {\nkind controller\n}"), []string{`lmcache.kind "controller"`, "lmcache.instance"}},
		{"controller with a port that is none", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example:0"}`), inProviderBlock("lmcache http://vllm-1.example:0"), []string{`lmcache.endpoint "http://vllm-1.example:0"`}},
		{"score weight of lmcache", withRouteField(`"strategy":"pipeline","score_weights":{"lmcache":-1}`), inRouteBlock("strategy pipeline\nscore_weights {\nlmcache -1\n}"), []string{"score_weights", "lmcache -1"}},
		{"look-up of no instance", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","kind":"coordinator","lookup":true,"model":"m"}`), inProviderBlock("lmcache http://vllm-1.example {\nkind coordinator\nlookup on\nmodel m\n}"), []string{"lmcache.lookup", "lmcache.instance"}},
		{"look-up where there is none", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","instance":"i","lookup":true}`), inProviderBlock("lmcache http://vllm-1.example {\ninstance i\nlookup on\n}"), []string{"lmcache.lookup", "controller", "coordinator"}},
		{"look-up without a model", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","kind":"coordinator","instance":"i","lookup":true}`), inProviderBlock("lmcache http://vllm-1.example {\nkind coordinator\ninstance i\nlookup on\n}"), []string{"lmcache.lookup", "lmcache.model"}},
		{"negative chunk", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","chunk":-1}`), inProviderBlock("lmcache http://vllm-1.example {\nchunk -1\n}"), []string{"lmcache.chunk -1"}},
		{"negative stale", withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","stale":"-1s"}`), inProviderBlock("lmcache http://vllm-1.example {\nstale -1s\n}"), []string{"lmcache.stale -1s"}},

		{"unknown strategy", withRouteField(`"strategy":"cash_aware"`), inRouteBlock("strategy cash_aware"), []string{"cash_aware", "cache_aware", "least_load", "round_robin", "least_conn", "weighted_round_robin"}},
		{"strategy rolter", withRouteField(`"strategy":"rolter"`), inRouteBlock("strategy rolter"), []string{"rolter", "cache_aware"}},
		{"stream without a port", withProviderField(`"kv_events":{"endpoint":"tcp://vllm-1.example"}`), inProviderBlock("kv_events tcp://vllm-1.example"), []string{`kv_events.endpoint "tcp://vllm-1.example"`, "host:port"}},
		{"stream of any host", withProviderField(`"kv_events":{"endpoint":"tcp://*:5557"}`), inProviderBlock("kv_events tcp://*:5557"), []string{`kv_events.endpoint "tcp://*:5557"`, "host:port"}},
		{"no stream", withProviderField(`"kv_events":{}`), "", []string{`kv_events.endpoint ""`, "tcp://"}},
		{"replay that is not tcp", withProviderField(`"kv_events":{"endpoint":"auto","replay":"udp://a:1"}`), inProviderBlock("kv_events auto {\nreplay udp://a:1\n}"), []string{`kv_events.replay "udp://a:1"`, "tcp://"}},
		{"denied replay", withProviderField(`"kv_events":{"endpoint":"auto","replay":"tcp://0xa9fea9fe:1"}`), inProviderBlock("kv_events auto {\nreplay tcp://0xa9fea9fe:1\n}"), []string{`kv_events.replay "tcp://0xa9fea9fe:1"`, "denied"}},
		{"negative ranks", withProviderField(`"kv_events":{"endpoint":"auto","ranks":-1}`), inProviderBlock("kv_events auto {\nranks -1\n}"), []string{"kv_events.ranks -1"}},
		{"more ranks than ports", withProviderField(`"kv_events":{"endpoint":"tcp://vllm-1.example:65000","ranks":1000}`), inProviderBlock("kv_events tcp://vllm-1.example:65000 {\nranks 1000\n}"), []string{"kv_events.endpoint", "1000 ranks"}},
		{"negative max_blocks", withProviderField(`"kv_events":{"endpoint":"auto","max_blocks":-1}`), inProviderBlock("kv_events auto {\nmax_blocks -1\n}"), []string{"kv_events.max_blocks -1"}},
		{"negative tokenize_timeout", withRouteField(`"tokenize_timeout":"-1s"`), inRouteBlock("tokenize_timeout -1s"), []string{"tokenize_timeout -1s"}},
		{"tokenize that is neither", "", inRouteBlock("tokenize maybe"), []string{"tokenize", "maybe"}},
		{"weights that would be ignored", handlerJSON(two, `{"model":"bad-config","strategy":"round_robin","targets":[{"provider":"vllm-1","weight":2},{"provider":"vllm-2"}]}`),
			providerBlock + "provider vllm-2 http://vllm-2.example:8000\nroute bad-config {\nstrategy round_robin\ntarget vllm-1 weight 2\ntarget vllm-2\n}\n", []string{`target "vllm-2"`, "weight 1", `strategy "round_robin"`}},
		{"w below 1", withRouteField(`"w":0.5`), inRouteBlock("w 0.5"), []string{"w 0.5"}},
		{"negative score weight", withRouteField(`"score_weights":{"prefix":-1}`), inRouteBlock("score_weights {\nprefix -1\n}"), []string{"score_weights", "prefix -1"}},
		{"session_header that is none", withRouteField(`"session_header":"x session"`), inRouteBlock(`session_header "x session"`), []string{`session_header "x session"`}},
		{"negative session_ttl", withRouteField(`"session_ttl":"-1s"`), inRouteBlock("session_ttl -1s"), []string{"session_ttl -1s"}},
		{"negative max_sessions", withRouteField(`"max_sessions":-1`), inRouteBlock("max_sessions -1"), []string{"max_sessions -1"}},
		{"strategy of ours with a policy", withRouteField(`"strategy":"cache_aware","selection_policy":{"policy":"round_robin"}`), "", []string{"selection_policy", "cache_aware"}},
		{"strategy and another policy", withRouteField(`"strategy":"round_robin","selection_policy":{"policy":"first"}`), "", []string{"round_robin", "first"}},
		{"policy without a name", withRouteField(`"selection_policy":{}`), "", []string{"strategy"}},
		{"policy that is no object", withRouteField(`"selection_policy":"first"`), "", []string{"selection_policy"}},
		{"weighted_round_robin with a fraction", handlerJSON(two, `{"model":"bad-config","strategy":"weighted_round_robin","targets":[{"provider":"vllm-1","weight":1.5},{"provider":"vllm-2"}]}`),
			providerBlock + "provider vllm-2 http://vllm-2.example:8000\nroute bad-config {\nstrategy weighted_round_robin\ntarget vllm-1 weight 1.5\ntarget vllm-2\n}\n", []string{`target "vllm-1"`, "weight 1.5", "weighted_round_robin"}},
		{"threshold above 1", withRouteField(`"threshold":1.5`), inRouteBlock("threshold 1.5"), []string{`route "bad-config"`, "threshold 1.5"}},
		{"threshold below 0", withRouteField(`"threshold":-0.1`), inRouteBlock("threshold -0.1"), []string{"threshold -0.1"}},
		{"negative overload_margin", withRouteField(`"overload_margin":-1`), inRouteBlock("overload_margin -1"), []string{"overload_margin -1"}},
		{"overload_ratio below 1", withRouteField(`"overload_ratio":0.5`), inRouteBlock("overload_ratio 0.5"), []string{"overload_ratio 0.5"}},
		{"negative max_nodes", withRouteField(`"max_nodes":-1`), inRouteBlock("max_nodes -1"), []string{"max_nodes -1"}},
		{"negative max_bytes", withRouteField(`"max_bytes":-1`), "", []string{"max_bytes -1"}},
		{"negative max_body", withHandlerField(`"max_body":-1`), "", []string{"max_body -1"}},

		{"upstreams of the proxy", withRouteField(`"reverse_proxy":{"upstreams":[{"dial":"other.example:1"}]}`), "", []string{"reverse_proxy", "upstreams", "targets"}},
		{"policy of the proxy", withRouteField(`"reverse_proxy":{"load_balancing":{"selection_policy":{"policy":"first"}}}`), "", []string{"reverse_proxy", "selection_policy", "strategy"}},
		{"proxy that cannot be provisioned", withRouteField(`"reverse_proxy":{"transport":{"protocol":"http","dial_timeout":"soon"}}`), "", []string{"reverse_proxy", "soon"}},
		{"transport that is not there", withRouteField(`"reverse_proxy":{"transport":{"protocol":"carrier_pigeon"}}`), "", []string{"reverse_proxy", "carrier_pigeon"}},
		{"retry expression that is none", withRouteField(`"reverse_proxy":{"load_balancing":{"retries":1,"retry_match":[{"expression":"{http.bad"}]}}`), inRouteBlock("reverse_proxy {\nlb_retries 1\nlb_retry_match {\nexpression `nonsense(`\n}\n}"), []string{"reverse_proxy", "expression"}},

		{"unknown field", withHandlerField(`"provider":[]`), "", []string{`unknown field "provider"`}},
		{"unknown field of a provider", withProviderField(`"url":"x"`), "", []string{`unknown field "url"`}},
		{"unknown field of a route", withRouteField(`"weights":[1]`), "", []string{`unknown field "weights"`}},
		{"unknown field of a target", withTargets(`{"name":"vllm-1"}`), "", []string{`unknown field "name"`}},
		{"unknown field of egress", withHandlerField(`"egress":{"allow":[]}`), "", []string{`unknown field "allow"`}},
		{"unknown field of kv_events", withProviderField(`"kv_events":{"endpoint":"tcp://a.example:1","topics":[]}`), "", []string{`unknown field "topics"`}},
		{"unknown field of lmcache", withProviderField(`"lmcache":{"endpoint":"http://a.example","interval":1}`), "", []string{`unknown field "interval"`}},
		{"weight that is text", withTargets(`{"provider":"vllm-1","weight":"2"}`), "", []string{"weight"}},
	} {
		if tc.json != "" {
			t.Run(tc.name+"/JSON", func(t *testing.T) { checkMistake(t, validateConfig(serverJSON(tc.json)), tc.want) })
		}
		if tc.block != "" {
			t.Run(tc.name+"/Caddyfile", func(t *testing.T) { checkMistake(t, loadBlock(t, tc.block), tc.want) })
		}
	}
}

// An error may be shown to others than the operator, and the log is kept.
func TestErrorsKeepSecrets(t *testing.T) {
	for name, handler := range map[string]string{
		"credentials in api_base":            withBase("http://user:hunter2@vllm-1.example"),
		"credentials in a broken api_base":   withBase("http://user:hunter2@vllm-1.example:bad"),
		"credentials without a scheme":       withBase("user:hunter2@vllm-1.example"),
		"credentials in a denied controller": withProviderField(`"lmcache":{"endpoint":"http://user:hunter2@169.254.169.254/"}`),
		"credentials in another scheme":      withProviderField(`"lmcache":{"endpoint":"ftp://user:hunter2@vllm-1.example/"}`),
		"api_key with a line break":          withProviderField(`"api_key":"hunter2\n"`),
		"secrets from the environment":       withBase("http://vllm-1.example:{env.ROLTER_TEST_SECRET}"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("ROLTER_TEST_SECRET", "hunter2")
			err := validateConfig(serverJSON(handler))
			checkMistake(t, err, nil)
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error tells a secret: %v", err)
			}
		})
	}
}

// The policy's values are checked as the handler's are.
func TestBadPolicyValueFailsTheLoad(t *testing.T) {
	for _, tc := range []struct {
		name, fields string
		want         []string
	}{
		{"unknown strategy", `"strategy":"cash_aware"`, []string{`strategy "cash_aware"`, "cache_aware"}},
		{"strategy that needs providers", `"strategy":"precise_cache_aware"`, []string{`strategy "precise_cache_aware"`, "providers"}},
		{"threshold above 1", `"threshold":2`, []string{"threshold 2"}},
		{"negative max_body", `"max_body":-1`, []string{"max_body -1"}},
		{"negative max_nodes", `"max_nodes":-5`, []string{"max_nodes -5"}},
		{"unknown field", `"treshold":0.5`, []string{`unknown field "treshold"`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			proxy := `{"handler":"reverse_proxy","upstreams":[{"dial":"vllm-1.example:8000"}],"load_balancing":{"selection_policy":{"policy":"rolter",` + tc.fields + `}}}`
			checkMistake(t, validateConfig(serverJSON(proxy)), tc.want)
		})
	}
}

// What looks odd and is meant.
func TestUnusualValuesLoad(t *testing.T) {
	t.Setenv("ROLTER_TEST_BASE", "http://vllm-1.example:8000/llm")
	for name, handler := range map[string]string{
		"one replica under two names of a model": withTargets(`{"provider":"vllm-1","model":"a"},{"provider":"vllm-1","model":"b"}`),
		"threshold 0":                            withRouteField(`"threshold":0`),
		"threshold 1":                            withRouteField(`"threshold":1`),
		"overload_margin 0 and overload_ratio 1": withRouteField(`"overload_margin":0,"overload_ratio":1`),
		"placeholder in api_base":                withBase("{env.ROLTER_TEST_BASE}"),
		"IPv6":                                   withBase("http://[2001:db8::1]:8000"),
		"upper-case scheme and host":             withBase("HTTP://VLLM-1.example"),
		"denied address that is allowed":         strings.TrimSuffix(withBase("http://169.254.10.1:8000"), "}") + `,"egress":{"allow_hosts":["169.254.10.1"]}}`,
		"link-local that is not blocked":         strings.TrimSuffix(withBase("http://169.254.10.1:8000"), "}") + `,"egress":{"block_link_local":false}}`,
		"name that needs DNS":                    withProviderField(`"kv_events":{"endpoint":"tcp://does-not-resolve.example:5557"}`),
		"stale that equals its refresh":          withProviderField(`"lmcache":{"endpoint":"http://vllm-1.example","refresh":"3s","stale":"3s"}`),
		"@id everywhere":                         `{"@id":"h","handler":"rolter","providers":[{"@id":"p","name":"vllm-1","api_base":"http://vllm-1.example"}],"routes":[{"@id":"r","model":"bad-config","targets":[{"@id":"t","provider":"vllm-1"}]}]}`,
		"model name of other scripts":            handlerJSON(providerJSON, `{"model":"模型 \"1\"/x","targets":[{"provider":"vllm-1"}]}`),
		"policy without a strategy":              withRouteField(`"selection_policy":{"policy":"random_choose","choose":2}`),
	} {
		t.Run(name, func(t *testing.T) {
			if err := validateConfig(caddy.RemoveMetaFields(serverJSON(handler))); err != nil {
				t.Fatal(err)
			}
			checkNothingLeft(t)
		})
	}
}
