package rolter

import (
	"fmt"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func TestNormalDial(t *testing.T) {
	for dial, want := range map[string]string{
		"localhost:8001":         "localhost:8001",
		"tcp/LOCALHOST:8001":     "localhost:8001",
		"[::1]:80":               "[::1]:80",
		"udp/host:1":             "udp/host:1",
		"unix//run/vllm.sock":    "unix//run/vllm.sock",
		"{http.request.host}:80": "{http.request.host}:80",
		"not an address:x":       "not an address:x",
	} {
		if got := normalDial(dial); got != want {
			t.Errorf("%s: %s, want %s", dial, got, want)
		}
	}
}

func TestGroupsShareAndForget(t *testing.T) {
	one, err := newGroup("test group")
	if err != nil {
		t.Fatal(err)
	}
	two, _ := newGroup("test group")
	a, b := one.get(identity{address: "a:1", model: "m"}), two.get(identity{address: "a:1", model: "m"})
	if a.load != b.load || a.recorded != b.recorded {
		t.Error("two configurations do not share the state of a replica")
	}
	if other := two.get(identity{address: "a:1", model: "other model"}); other.load != a.load || other.recorded == a.recorded {
		t.Error("another model at the same address must share the load and not the prompts")
	}
	if opaque := two.get(identity{address: "{env.X}:1"}); opaque.recorded != nil {
		t.Error("prompts would be recorded for an address that stands for many")
	}
	one.close()
	one.close()
	if n := len(two.prefixes.Prompts()); n != 2 {
		t.Errorf("%d replicas after the first group was closed, want 2", n)
	}
	late := one.get(identity{address: "late:1"})
	if late.recorded != nil {
		t.Error("a closed group joined a replica")
	}
	two.close()
	if n := len(two.prefixes.Prompts()); n != 0 {
		t.Errorf("%d replicas after all groups were closed", n)
	}
	for _, l := range loads.Snapshot() {
		if l.Address == "a:1" || l.Address == "late:1" {
			t.Errorf("%s is still known", l.Address)
		}
	}
}

func TestGroupsOfDynamicUpstreamsAreBounded(t *testing.T) {
	g, err := newGroup("test dynamic")
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	for i := range 3 * maxMembers {
		g.of(reverseproxy.UpstreamPool{{Dial: fmt.Sprintf("10.0.%d.%d:80", i/250, i%250)}})
	}
	if n := len(g.members); n > maxMembers || n != len(g.prefixes.Prompts()) {
		t.Errorf("%d members, %d recorded, want %d at most", n, len(g.prefixes.Prompts()), maxMembers)
	}
	pool := reverseproxy.UpstreamPool{{Dial: "a:1"}, {Dial: "tcp/A:1"}, {Dial: "b:1"}}
	members := g.of(pool)
	if members[0] != members[1] || members[0] == members[2] {
		t.Error("members do not go by the normalised address")
	}
	if again := g.of(pool); &again[0] != &members[0] {
		t.Error("a pool that was seen before was looked up again")
	}
}

func TestPathFor(t *testing.T) {
	for _, tc := range []struct{ base, path, want string }{
		{"http://h:1", "/v1/models", "/v1/models"},
		{"http://h:1/", "/v1/models", "/v1/models"},
		{"http://h:1/gpu/0", "/v1/models", "/gpu/0/v1/models"},
		{"http://h:1/v1", "/v1/models", "/v1/models"},
		{"http://h:1/openai/v1/", "/v1/models", "/openai/v1/models"},
		{"http://h:1/openai/v1", "/llm/v1/models", "/openai/v1/llm/v1/models"},
	} {
		p := Provider{APIBase: tc.base}
		if err := p.parseBase(tc.base); err != nil {
			t.Fatal(err)
		}
		if got := p.pathFor(tc.path); got != tc.want {
			t.Errorf("%s + %s = %s, want %s", tc.base, tc.path, got, tc.want)
		}
	}
}

// A policy sees its upstreams at the first request only: what the configuration before knew must still be there then.
func TestAPolicyInheritsFromTheConfigurationBefore(t *testing.T) {
	before, err := newGroup(policyGroup)
	if err != nil {
		t.Fatal(err)
	}
	pool := reverseproxy.UpstreamPool{{Dial: "a:1"}, {Dial: "b:1"}}
	known := before.of(pool)[0]
	failed, _ := newGroup(policyGroup)
	failed.close()
	after, _ := newGroup(policyGroup)
	both := after.get(identity{address: "b:1"})
	before.close()
	if got := after.of(reverseproxy.UpstreamPool{{Dial: "a:1"}})[0]; got.recorded != known.recorded || got.recorded == nil {
		t.Error("what was recorded for an upstream is lost")
	}
	if after.get(identity{address: "b:1"}) != both || len(after.prefixes.Prompts()) != 2 {
		t.Errorf("%d replicas, want 2", len(after.prefixes.Prompts()))
	}
	if both == nil || after.get(identity{address: "b:1"}) != both {
		t.Error("b has two members")
	}
	// The same pool again: there is no other, and b is gone.
	one := reverseproxy.UpstreamPool{{Dial: "a:1"}}
	after.of(one)
	after.of(one)
	if n := len(after.prefixes.Prompts()); n != 1 {
		t.Errorf("%d replicas, want 1", n)
	}
	known = after.get(identity{address: "c:1"})
	known.lastSeen.Store(0)
	after.get(identity{address: "d:1"})
	if n := len(after.prefixes.Prompts()); n != 2 {
		t.Errorf("%d replicas, want a and d, %v", n, after.prefixes.Prompts())
	}
	after.close()
	if n := len(after.prefixes.Prompts()); n != 0 {
		t.Errorf("%d replicas left", n)
	}
	for _, l := range loads.Snapshot() {
		if l.Address == "a:1" || l.Address == "b:1" {
			t.Errorf("%s is still known", l.Address)
		}
	}
}
