package replica

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"
)

func startLMCache(t *testing.T, cfg LMCacheConfig) *LMCache {
	t.Helper()
	l := NewLMCache(cfg)
	if err := l.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// request asks an LMCache; a body makes it a POST.
func (l *LMCache) request(t *testing.T, path, body string) (status int, answer string) {
	t.Helper()
	resp, err := l.try(path, body)
	if err != nil {
		t.Fatal(err)
	}
	return readAll(t, resp)
}

func (l *LMCache) try(path, body string) (*http.Response, error) {
	client := &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	if body == "" {
		return client.Get(l.URL() + path)
	}
	return client.Post(l.URL()+path, "application/json", strings.NewReader(body))
}

func tokens(n int) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(i)
	}
	return list
}

func lookupBody(field string, ids []uint32, more string) string {
	return fmt.Sprintf(`{%q:%s%s}`, field, encode(ids), more)
}

// The answers have the keys, in their order, and the types of LMCache 0.5.6's.
func TestLMCacheShapes(t *testing.T) {
	const path = "/opt/vllm/model"
	for _, c := range []struct {
		kind       LMCacheKind
		path, body string
		recording  string
		stored     int // tokens
	}{
		{LMCacheServer, "/status", "", "mp-status-filled.json", 1000},
		{LMCacheServer, "/healthcheck", "", "mp-healthcheck.body", 0},
		{LMCacheCoordinator, "/instances/usage", "", "coord-instances_usage.body", 0},
		{LMCacheCoordinator, "/healthz", "", "coord-healthz.body", 0},
		{LMCacheCoordinator, "/directory/lookup", lookupBody("token_ids", tokens(300), `,"model_name":"`+path+`","world_size":1,"cache_salt":""`), "coord-directory-lookup.body", 1000},
		{LMCacheController, "/lookup", lookupBody("tokens", tokens(300), ""), "ctl-lookup.body", 0},
		{LMCacheController, "/health", `{"instance_id":"nobody"}`, "ctl-health.body", 0},
		{LMCacheController, "/query_worker_info", `{"instance_id":"nobody","worker_ids":null}`, "ctl-query_worker_info.body", 0},
		{LMCacheInProcess, "/conf?names=max_local_cpu_size", "", "inproc6999-conf_names_max_local_cpu_size.body", 0},
	} {
		t.Run(c.recording, func(t *testing.T) {
			l := startLMCache(t, LMCacheConfig{Kind: c.kind, Model: path, ChunkTokens: 64, CapacityBytes: 256 << 20})
			l.Store("", tokens(c.stored), "")
			recorded, err := os.ReadFile("testdata/lmcache/" + c.recording)
			if err != nil {
				t.Fatal(err)
			}
			status, body := l.request(t, c.path, c.body)
			if got, want := shape(t, body), shape(t, string(recorded)); status != 200 || got != want {
				t.Errorf("%d\n%s\nrecorded\n%s", status, got, want)
			}
			if c.kind == LMCacheInProcess && body != strings.TrimSpace(string(recorded)) {
				t.Errorf("got %q", body)
			}
			if status, body := l.request(t, "/status/memory-pressure", ""); status != 404 || body != `{"detail":"Not Found"}` {
				t.Errorf("%d %s", status, body)
			}
		})
	}
	value := regexp.MustCompile(` [^ ]+$`)
	lines := func(text string) (list []string) {
		for line := range strings.Lines(text) {
			if !strings.HasPrefix(line, "#") {
				line = value.ReplaceAllString(strings.TrimSpace(line), "")
			}
			list = append(list, strings.TrimSpace(strings.ReplaceAll(line, `served_model_name="tiny"`, `served_model_name="sim"`)))
		}
		return list
	}
	for kind, recording := range map[LMCacheKind]string{LMCacheServer: "mp-metrics.txt", LMCacheInProcess: "inproc-metrics.txt"} {
		l := startLMCache(t, LMCacheConfig{Kind: kind, Model: path})
		recorded, err := os.ReadFile("testdata/lmcache/" + recording)
		if err != nil {
			t.Fatal(err)
		}
		_, body := l.request(t, "/metrics", "")
		want := strings.ReplaceAll(strings.Join(lines(string(recorded)), "\n"), `role="scheduler"`, `role="worker"`)
		if got := strings.Join(lines(body), "\n"); got != want {
			t.Errorf("%s:\n%s\nrecorded\n%s", kind, got, want)
		}
	}
}

func TestLMCacheTellsWhatItHolds(t *testing.T) {
	const capacity = 8 // chunks
	at64 := func(kind LMCacheKind) *LMCache {
		l := startLMCache(t, LMCacheConfig{Kind: kind, ChunkTokens: 64, CapacityBytes: capacity << 20})
		l.Store("", tokens(64*2+10), "")
		return l
	}
	l := at64(LMCacheContract)
	if _, body := l.request(t, "/anything", ""); body != `{"occupancy":0.25,"cache_available":true}` {
		t.Error(body)
	}
	l.SetOccupancy("", 0.6)
	l.SetHealthy(false)
	if _, body := l.request(t, "/", ""); body != `{"occupancy":0.6,"cache_available":false}` {
		t.Error(body)
	}

	l = at64(LMCacheServer)
	_, body := l.request(t, "/status", "")
	manager := func(key string) any { return at(t, body, "storage_manager", "l1_managers", "_default", key) }
	if manager("memory_used_bytes") != float64(2<<20) || manager("memory_total_bytes") != float64(8<<20) || manager("memory_usage_ratio") != 0.25 ||
		at(t, body, "is_healthy") != true {
		t.Error(body)
	}
	l.Store("", tokens(64*100), "") // as much as fits
	l.SetHealthy(false)
	if _, body = l.request(t, "/status", ""); manager("memory_usage_ratio") != 1.0 || manager("is_healthy") != false {
		t.Error(body)
	}
	if status, _ := l.request(t, "/healthcheck", ""); status != 503 {
		t.Error(status)
	}
	if _, body := l.request(t, "/metrics", ""); !strings.Contains(body, `lmcache_mp_l1_usage_ratio{backend="dram",l1_tag="_default"} 1.0`) {
		t.Error(body)
	}

	l = at64(LMCacheCoordinator)
	l.Store("inst-2", tokens(64), "")
	_, body = l.request(t, "/instances/usage", "")
	if at(t, body, "instances", "1", "instance_id") != "inst-2" || at(t, body, "instances", "1", "modules", "0", "usage_ratio") != 0.125 {
		t.Error(body)
	}
	for _, c := range []struct {
		more string
		want []int // instances by chunk
	}{{`,"model_name":"/models/sim"`, []int{2, 1, 0}}, {`,"model_name":"sim"`, []int{0, 0, 0}}, {`,"model_name":"/models/sim","cache_salt":"x"`, []int{0, 0, 0}}} {
		_, body := l.request(t, "/directory/lookup", lookupBody("token_ids", tokens(64*3), c.more))
		for i, want := range c.want {
			if got := at(t, body, "results", fmt.Sprint(i), "placements").([]any); len(got) != want {
				t.Errorf("%s, chunk %d: %d placements, want %d", c.more, i, len(got), want)
			}
		}
	}

	l = at64(LMCacheController)
	if _, body := l.request(t, "/lookup", lookupBody("tokens", tokens(300), "")); at(t, body, "layout_info", "inst-1", "1") != 128.0 {
		t.Error(body)
	}
	if _, body := l.request(t, "/health", `{"instance_id":"inst-1"}`); at(t, body, "error_codes", "0") != 0.0 {
		t.Error(body)
	}
	if _, body := l.request(t, "/query_worker_info", `{"instance_id":"inst-1"}`); at(t, body, "worker_infos", "0", "instance_id") != "inst-1" {
		t.Error(body)
	}
	if status, _ := l.request(t, "/lookup", `{"tokens":"none"}`); status != 422 {
		t.Error(status)
	}

	l = at64(LMCacheInProcess)
	if _, body := l.request(t, "/metrics", ""); !strings.Contains(body, `worker_id="0"} 2.097152e+06`) || !strings.Contains(body, `worker_id="0"} 1.0`) {
		t.Error(body)
	}
}

func TestLMCacheFaults(t *testing.T) {
	for _, kind := range []LMCacheKind{LMCacheContract, LMCacheServer, LMCacheCoordinator} {
		l := startLMCache(t, LMCacheConfig{Kind: kind})
		path := map[LMCacheKind]string{LMCacheContract: "/", LMCacheServer: "/status", LMCacheCoordinator: "/instances/usage"}[kind]
		for fault, want := range map[FaultKind]string{Overfull: "1.4", Negative: "-0.3", NotANumber: "NaN"} {
			l.SetFault(Fault{Kind: fault, Count: 1})
			if _, body := l.request(t, path, ""); !strings.Contains(body, ":"+want) || json.Valid([]byte(body)) == (fault == NotANumber) {
				t.Errorf("%s, %s: %s", kind, fault, body)
			}
		}
		if _, body := l.request(t, path, ""); !json.Valid([]byte(body)) {
			t.Errorf("%s, no fault: %s", kind, body)
		}
	}

	l := startLMCache(t, LMCacheConfig{Fault: Fault{Kind: Status500, Count: 1}})
	healthy := `{"occupancy":0.0,"cache_available":true}`
	for _, c := range []struct {
		fault  FaultKind
		status int
		body   string
	}{
		{"", 500, `{"detail":"Internal Server Error"}`},
		{Redirect, 302, ""},
		{NotJSON, 200, "<html><body>Welcome to nginx!</body></html>"},
		{Huge, 200, strings.Repeat(" ", 10<<20) + healthy},
		{NoFault, 200, healthy},
	} {
		if c.fault != NoFault {
			l.SetFault(Fault{Kind: c.fault, Count: 1})
		}
		status, body := l.request(t, "/status", "")
		if status != c.status || status != 302 && body != c.body {
			t.Errorf("%s: %d, %d bytes", c.fault, status, len(body))
		}
	}

	l.SetFault(Fault{Kind: HalfClosed})
	resp, err := l.try("/", "")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(resp.Body); string(got) != `{"occupancy":` || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%s, %v", got, err)
	}
	resp.Body.Close()

	l.SetFault(Fault{Kind: Flapping})
	for i := range 4 {
		if _, body := l.request(t, "/", ""); at(t, body, "cache_available") != (i%2 == 1) {
			t.Errorf("request %d: %s", i, body)
		}
	}

	if status, _ := l.request(t, "/sim/fault", `{"kind":"hang"}`); status != 200 {
		t.Error(status)
	}
	if status, _ := l.request(t, "/sim/fault", `die`); status != 400 {
		t.Error(status)
	}
	client := http.Client{Timeout: 50 * time.Millisecond, Transport: &http.Transport{DisableKeepAlives: true}}
	if resp, err := client.Get(l.URL()); err == nil {
		resp.Body.Close()
		t.Error("it answers")
	}
}

// An LMCache beside a replica is given what the replica prefills.
func TestLMCacheOfAReplica(t *testing.T) {
	l := startLMCache(t, LMCacheConfig{Kind: LMCacheController, ChunkTokens: 16})
	s := start(t, Config{LMCache: l, LMCacheInstance: "replica-2"})
	ids := tokens(100)
	if _, body := l.request(t, "/lookup", lookupBody("tokens", ids, "")); len(at(t, body, "layout_info").(map[string]any)) != 0 {
		t.Error(body)
	}
	post(t, s, completePath, lookupBody("prompt", ids, ""))
	if _, body := l.request(t, "/lookup", lookupBody("tokens", ids, "")); at(t, body, "layout_info", "replica-2", "1") != 96.0 {
		t.Error(body)
	}
}

func TestNothingOfAnLMCacheRunsAfterClose(t *testing.T) {
	before := runtime.NumGoroutine()
	l := NewLMCache(LMCacheConfig{})
	if err := l.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	if l.Start("127.0.0.1:0") == nil {
		t.Error("started twice")
	}
	done := make(chan struct{}, 2)
	for i, fault := range []FaultKind{Hang, HalfClosed} {
		l.SetFault(Fault{Kind: fault, Count: 1, For: time.Hour})
		go func() {
			if resp, err := l.try("/", ""); err == nil {
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			done <- struct{}{}
		}()
		eventually(t, fmt.Sprint("request ", i, " has met its fault"), func() bool { return l.faults.current().Kind == NoFault })
	}
	l.Close()
	<-done
	<-done
	eventually(t, "all goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}

func TestNonsensicalLMCache(t *testing.T) {
	for _, cfg := range []LMCacheConfig{{Kind: "oracle"}, {ChunkTokens: -1}, {ChunkBytes: 2, CapacityBytes: 1}, {Fault: Fault{Kind: Die}}, {Fault: Fault{Kind: Hang, Share: math.NaN()}}} {
		if NewLMCache(cfg).Start("127.0.0.1:0") == nil {
			t.Errorf("%+v is started", cfg)
		}
	}
}
