package rolter

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard" // everything that a Caddyfile may name
)

// adaptCaddyfile turns a Caddyfile into JSON. A warning is an error here: what we write ourselves must not cause any.
func adaptCaddyfile(t *testing.T, text string) ([]byte, error) {
	t.Helper()
	config, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err == nil {
		for _, w := range warnings {
			t.Errorf("warning: %s", w)
		}
	}
	return config, err
}

// validateConfig does what `caddy validate` does with JSON.
func validateConfig(config []byte) error {
	cfg := new(caddy.Config)
	if err := caddy.StrictUnmarshalJSON(config, cfg); err != nil {
		return err
	}
	return caddy.Validate(cfg)
}

func sameJSON(t *testing.T, got, want []byte) bool {
	t.Helper()
	var a, b any
	if err := json.Unmarshal(got, &a); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(want, &b); err != nil {
		t.Fatal(err)
	}
	return reflect.DeepEqual(a, b)
}

func indented(config []byte) string {
	var b bytes.Buffer
	if err := json.Indent(&b, config, "", "\t"); err != nil {
		return string(config)
	}
	return b.String()
}

// Every file is a Caddyfile, a line of dashes, and the JSON that it must become.
func TestCaddyfileAdapts(t *testing.T) {
	files, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			input, want, ok := strings.Cut(string(text), "\n----------\n")
			if !ok {
				t.Fatal("no line of dashes")
			}
			got, err := adaptCaddyfile(t, input+"\n")
			if err != nil {
				t.Fatal(err)
			}
			if !sameJSON(t, got, []byte(want)) {
				t.Errorf("adapts to\n%s\nwant\n%s", indented(got), want)
			}
			if formatted := caddyfile.Format([]byte(input + "\n")); string(formatted) != input+"\n" {
				t.Errorf("not as caddy fmt would have it:\n%s", formatted)
			}
		})
	}
}

// What a stranger copies must work as it is.
func TestExamples(t *testing.T) {
	for _, example := range []struct{ caddyfile, json string }{
		{"Caddyfile", "caddy.json"},
		{"reverse_proxy.Caddyfile", ""},
	} {
		t.Run(example.caddyfile, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("examples", example.caddyfile))
			if err != nil {
				t.Fatal(err)
			}
			if formatted := caddyfile.Format(text); !bytes.Equal(formatted, text) {
				t.Errorf("not as caddy fmt would have it:\n%s", formatted)
			}
			adapted, err := adaptCaddyfile(t, string(text))
			if err != nil {
				t.Fatal(err)
			}
			if err := validateConfig(adapted); err != nil {
				t.Errorf("the Caddyfile is not valid: %v", err)
			}
			if example.json == "" {
				return
			}
			config, err := os.ReadFile(filepath.Join("examples", example.json))
			if err != nil {
				t.Fatal(err)
			}
			if !sameJSON(t, adapted, config) {
				t.Errorf("%s is not what the Caddyfile adapts to:\n%s", example.json, indented(adapted))
			}
			if err := validateConfig(config); err != nil {
				t.Errorf("%s is not valid: %v", example.json, err)
			}
		})
	}
}

// What can be wrong in a Caddyfile and not in JSON. Each error must lead the operator to the line: it names the subdirective and, where there is
// one, the value.
func TestCaddyfileMistakes(t *testing.T) {
	const (
		provider = "provider vllm-1 http://vllm-1.example:8000\n"
		route    = "route bad-config {\ntarget vllm-1\n}\n"
	)
	inProvider := func(s string) string {
		return "provider vllm-1 http://vllm-1.example:8000 {\n" + s + "\n}\n" + route
	}
	inRoute := func(s string) string { return provider + "route bad-config {\ntarget vllm-1\n" + s + "\n}\n" }

	for _, tc := range []struct {
		name, block string
		want        []string
	}{
		{"unknown subdirective", "proivder a http://a.example\n", []string{"unrecognized subdirective", "proivder"}},
		{"argument to rolter in a block of its own", provider + "rolter x\n", []string{"unrecognized subdirective", "rolter"}},
		{"unknown subdirective of a provider", inProvider("apikey x"), []string{"provider vllm-1", "unrecognized subdirective", "apikey"}},
		{"unknown subdirective of a route", inRoute("tresholt 0.5"), []string{"route bad-config", "unrecognized subdirective", "tresholt"}},
		{"unknown subdirective of kv_events", inProvider("kv_events tcp://a.example:1 {\ntopics x\n}"), []string{"kv_events", "unrecognized subdirective", "topics"}},
		{"unknown subdirective of lmcache", inProvider("lmcache http://a.example {\ninterval 1s\n}"), []string{"lmcache", "unrecognized subdirective", "interval"}},
		{"unknown subdirective of egress", provider + route + "egress {\nblock_all on\n}\n", []string{"egress", "unrecognized subdirective", "block_all"}},
		{"unknown subdirective of reverse_proxy", inRoute("reverse_proxy {\nlb_strategy x\n}"), []string{"unrecognized subdirective", "lb_strategy"}},

		{"provider without a base", "provider vllm-1\n" + route, []string{"wrong argument count", "'vllm-1'"}},
		{"provider with too much", "provider vllm-1 http://a.example http://b.example\n" + route, []string{"wrong argument count", "'http://a.example'"}},
		{"route without a model", provider + "route {\ntarget vllm-1\n}\n", []string{"route", "wrong argument count"}},
		{"route with two models", provider + "route a b {\ntarget vllm-1\n}\n", []string{"wrong argument count", "'a'"}},
		{"target without a provider", provider + "route bad-config {\ntarget\n}\n", []string{"target", "wrong argument count"}},
		{"target with two models", provider + "route bad-config {\ntarget vllm-1 a b\n}\n", []string{"wrong argument count", "b"}},
		{"target with a weight that has no number", provider + "route bad-config {\ntarget vllm-1 weight\n}\n", []string{"weight"}},
		{"target with a model and a weight that has no number", provider + "route bad-config {\ntarget vllm-1 llama weight\n}\n", []string{"weight"}},
		{"strategy without a name", inRoute("strategy"), []string{"strategy", "wrong argument count"}},
		{"strategy of ours with arguments", inRoute("strategy cache_aware 0.7"), []string{"strategy cache_aware", "no arguments"}},
		{"strategy of ours with a block", inRoute("strategy cache_aware {\nthreshold 0.7\n}"), []string{"cache_aware"}},
		{"strategy of Caddy's with bad arguments", inRoute("strategy random_choose x"), []string{"'x'"}},
		{"strategy of Caddy's with too many arguments", inRoute("strategy round_robin x"), []string{"wrong argument count", "x"}},
		{"threshold without a value", inRoute("threshold"), []string{"threshold", "wrong argument count"}},
		{"threshold with two values", inRoute("threshold 0.1 0.2"), []string{"wrong argument count", "'0.1'"}},
		{"max_body without a value", provider + route + "max_body\n", []string{"max_body", "wrong argument count"}},
		{"decision_headers without a value", provider + route + "decision_headers\n", []string{"decision_headers", "wrong argument count"}},
		{"kv_events without an endpoint", inProvider("kv_events"), []string{"kv_events", "wrong argument count"}},
		{"lmcache without an endpoint", inProvider("lmcache {\nstale 1s\n}"), []string{"lmcache", "wrong argument count"}},
		{"egress with an argument", provider + route + "egress off\n", []string{"wrong argument count", "off"}},
		{"allow_hosts without hosts", provider + route + "egress {\nallow_hosts\n}\n", []string{"allow_hosts", "wrong argument count"}},

		{"max_body twice", provider + route + "max_body 1MB\nmax_body 2MB\n", []string{"max_body already specified"}},
		{"egress twice", provider + route + "egress {\n}\negress {\n}\n", []string{"egress already specified"}},
		{"a switch of egress twice", provider + route + "egress {\nblock_private on\nblock_private off\n}\n", []string{"block_private already specified"}},
		{"decision_headers twice", provider + route + "decision_headers on\ndecision_headers off\n", []string{"decision_headers already specified"}},
		{"strategy twice", inRoute("strategy cache_aware\nstrategy round_robin"), []string{"strategy already specified"}},
		{"threshold twice", inRoute("threshold 0.1\nthreshold 0.2"), []string{"threshold already specified"}},
		{"reverse_proxy twice", inRoute("reverse_proxy {\n}\nreverse_proxy {\n}"), []string{"reverse_proxy already specified"}},
		{"api_key twice", inProvider("api_key a\napi_key b"), []string{"api_key already specified"}},
		{"topic twice", inProvider("kv_events tcp://a.example:1 {\ntopic a\ntopic b\n}"), []string{"topic already specified"}},
		{"refresh twice", inProvider("lmcache http://a.example {\nrefresh 1s\nrefresh 2s\n}"), []string{"refresh already specified"}},

		{"threshold that is no number", inRoute("threshold half"), []string{"threshold", "half"}},
		{"threshold in percent", inRoute("threshold 50%"), []string{"threshold", "50%"}},
		{"threshold that is not a number", inRoute("threshold NaN"), []string{"threshold", "NaN"}},
		{"threshold that is infinite", inRoute("threshold Inf"), []string{"threshold", "Inf"}},
		{"overload_ratio that is not a number", inRoute("overload_ratio NaN"), []string{"overload_ratio", "NaN"}},
		{"overload_ratio that is infinite", inRoute("overload_ratio Inf"), []string{"overload_ratio", "Inf"}},
		{"score that is not there", inRoute("score_weights {\nluck 1\n}"), []string{"score_weights", "luck"}},
		{"score twice", inRoute("score_weights {\nload 1\nload 2\n}"), []string{"load already specified"}},
		{"score weight that is no number", inRoute("score_weights {\nload high\n}"), []string{"load", "high"}},
		{"overload_margin that is no integer", inRoute("overload_margin 1.5"), []string{"overload_margin", "1.5"}},
		{"max_nodes that is no integer", inRoute("max_nodes 1e6"), []string{"max_nodes", "1e6"}},
		{"max_bytes that is no size", inRoute("max_bytes plenty"), []string{"max_bytes", "plenty"}},
		{"max_bytes that is negative", inRoute("max_bytes -1"), []string{"max_bytes", "-1"}},
		{"max_body that is no size", provider + route + "max_body much\n", []string{"max_body", "much"}},
		{"max_body that is negative", provider + route + "max_body -5MB\n", []string{"max_body", "-5MB"}},
		{"max_body beyond all memory", provider + route + "max_body 100EB\n", []string{"max_body", "100EB"}},
		{"weight that is no number", provider + "route bad-config {\ntarget vllm-1 weight heavy\n}\n", []string{"target vllm-1", "weight", "heavy"}},
		{"weight that is not a number", provider + "route bad-config {\ntarget vllm-1 weight NaN\n}\n", []string{"vllm-1", "weight", "NaN"}},
		{"weight that is infinite", provider + "route bad-config {\ntarget vllm-1 weight Inf\n}\n", []string{"vllm-1", "weight", "Inf"}},
		{"a switch that is neither on nor off", provider + route + "decision_headers yes\n", []string{"decision_headers", "yes", "on or off"}},
		{"a switch of egress that is neither on nor off", provider + route + "egress {\nblock_private true\n}\n", []string{"block_private", "true", "on or off"}},
		{"refresh that is no duration", inProvider("lmcache http://a.example {\nrefresh soon\n}"), []string{"refresh", "soon"}},

		{"upstream as an argument of reverse_proxy", inRoute("reverse_proxy other.example:1"), []string{"reverse_proxy", "targets"}},
		{"to inside reverse_proxy", inRoute("reverse_proxy {\nto other.example:1\n}"), []string{"reverse_proxy", "targets"}},
		{"dynamic inside reverse_proxy", inRoute("reverse_proxy {\ndynamic a other.example 1\n}"), []string{"reverse_proxy", "dynamic_upstreams", "targets"}},
		{"lb_policy inside reverse_proxy", inRoute("reverse_proxy {\nlb_policy first\n}"), []string{"reverse_proxy", "policy", "strategy"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := loadBlock(t, tc.block)
			checkMistake(t, err, tc.want)
		})
	}
}

// The same for the policy.
func TestPolicyCaddyfileMistakes(t *testing.T) {
	for _, tc := range []struct {
		name, policy string
		want         []string
	}{
		{"two strategies", "cache_aware least_load", []string{"wrong argument count", "least_load"}},
		{"unknown strategy", "cash_aware", []string{`strategy "cash_aware"`, "cache_aware", "least_load"}},
		{"strategy of Caddy's", "round_robin", []string{`strategy "round_robin"`, "cache_aware", "least_load"}},
		{"strategy that needs providers", "lmcache_aware", []string{`strategy "lmcache_aware"`, "providers"}},
		{"unknown subdirective", "{\nmax_turns 5\n}", []string{"rolter", "unrecognized subdirective", "max_turns"}},
		{"threshold twice", "{\nthreshold 0.1\nthreshold 0.2\n}", []string{"threshold already specified"}},
		{"threshold above 1", "{\nthreshold 50\n}", []string{"threshold 50"}},
		{"threshold that is not a number", "{\nthreshold NaN\n}", []string{"threshold", "NaN"}},
		{"max_body that is no size", "{\nmax_body big\n}", []string{"max_body", "big"}},
		{"decision_headers that is neither on nor off", "{\ndecision_headers 1\n}", []string{"decision_headers", "1"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			config, err := adaptMistake("reverse_proxy vllm-1.example:8000 {\nlb_policy rolter " + tc.policy + "\n}")
			if err == nil {
				err = validateConfig(config)
			}
			checkMistake(t, err, tc.want)
		})
	}
}

func adaptMistake(site string) ([]byte, error) {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte("http://bad.example:8080 {\n"+site+"\n}\n"), map[string]any{"filename": "Caddyfile"})
	return config, err
}

// loadBlock adapts and validates the body of a rolter block.
func loadBlock(t *testing.T, block string) error {
	t.Helper()
	config, err := adaptMistake("rolter {\n" + block + "}")
	if err != nil {
		if !strings.Contains(err.Error(), "Caddyfile:") {
			t.Errorf("does not say where: %v", err)
		}
		return err
	}
	return validateConfig(config)
}

// checkMistake checks that a load failed, that its error says what it must, and that nothing is left behind.
func checkMistake(t *testing.T, err error, want []string) {
	t.Helper()
	if err == nil {
		t.Fatalf("loads, want an error with %q", want)
	}
	for _, part := range want {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not say %q:\n%v", part, err)
		}
	}
	checkNothingLeft(t)
}

// checkNothingLeft checks that a configuration that failed, or was only validated, left no state behind.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	for _, load := range loads.Snapshot() {
		if strings.Contains(load.Address, ".example:") {
			t.Errorf("a failed load left %s behind", load.Address)
		}
	}
	prefixPools.Range(func(name, _ any) bool {
		if strings.HasSuffix(name.(string), "bad-config") {
			t.Errorf("a failed load left the record %q behind", name)
		}
		return true
	})
}
