package lmcache

import (
	"math"
	"os"
	"strings"
	"testing"
)

func recorded(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// is says whether an answer is as expected; cause is "" where it is to be one.
func check(t *testing.T, got answer, want answer, cause Cause) {
	t.Helper()
	if (got.err != nil) != (cause != "") || got.err != nil && causeOf(got.err) != cause {
		t.Errorf("error %v, want %q", got.err, cause)
	}
	if cause == "" && (got.available != want.available || got.told != want.told || math.Abs(got.occupancy-want.occupancy) > 1e-12) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

var down = answer{}

func works(occupancy float64) answer {
	return answer{available: true, told: true, occupancy: occupancy}
}

func TestTheContract(t *testing.T) {
	for body, tc := range map[string]struct {
		want  answer
		cause Cause
	}{
		`{"occupancy":0.25,"cache_available":true}`:         {works(0.25), ""},
		`{"occupancy":0.25}`:                                {works(0.25), ""},
		`{"occupancy":0.25,"cache_available":null}`:         {works(0.25), ""},
		`{"occupancy":0.9,"cache_available":false}`:         {answer{told: true, occupancy: 0.9}, ""},
		`{"occupancy":1.4}`:                                 {works(1), ""},
		`{"occupancy":-0.5}`:                                {works(0), ""},
		`{"occupancy":0}`:                                   {works(0), ""},
		` {"model":"x","occupancy":5e-1,"more":{"a":[1]}} `: {works(0.5), ""},
		`{"cache_available":true}`:                          {down, Malformed},
		`{"occupancy":null}`:                                {down, Malformed},
		`{"occupancy":NaN}`:                                 {down, Malformed},
		`{"occupancy":Infinity}`:                            {down, Malformed},
		`{"occupancy":1e999}`:                               {down, Malformed},
		`{"occupancy":"0.5"}`:                               {down, Malformed},
		`{"occupancy":0.5,"cache_available":"yes"}`:         {down, Malformed},
		`{"occupancy":0.5`:                                  {down, Malformed},
		`{"occupancy":0.5}{}`:                               {down, Malformed},
		`{}`:                                                {down, Malformed},
		`[0.5]`:                                             {down, Malformed},
		`null`:                                              {down, Malformed},
		``:                                                  {down, Malformed},
		`<html>502 Bad Gateway</html>`:                      {down, Malformed},
		strings.Repeat(`{"a":`, 20000) + "1":                {down, Malformed},
	} {
		t.Run(body[:min(len(body), 40)], func(t *testing.T) { check(t, parseContract([]byte(body)), tc.want, tc.cause) })
	}
}

func TestTheStatusOfAMultiprocessServer(t *testing.T) {
	filled := string(recorded(t, "mp-status-filled.json"))
	const used = 1900544.0 / 536870912
	for name, tc := range map[string]struct {
		body  string
		want  answer
		cause Cause
	}{
		"empty":                 {string(recorded(t, "mp-status.json")), works(0), ""},
		"filled":                {filled, works(used), ""},
		"unhealthy":             {strings.Replace(filled, `"is_healthy":true`, `"is_healthy":false`, 1), down, ""},
		"several tags":          {`{"is_healthy":true,"storage_manager":{"l1_managers":{"a":{"memory_used_bytes":10,"memory_total_bytes":100},"b":{"memory_used_bytes":290,"memory_total_bytes":300}}}}`, works(0.75), ""},
		"before tags":           {`{"is_healthy":true,"storage_manager":{"l1_manager":{"memory_used_bytes":10,"memory_total_bytes":100}}}`, works(0.1), ""},
		"more used than total":  {`{"is_healthy":true,"storage_manager":{"l1_managers":{"a":{"memory_used_bytes":101,"memory_total_bytes":100}}}}`, works(1), ""},
		"no first tier":         {`{"is_healthy":true,"storage_manager":{}}`, down, NoValue},
		"no total":              {`{"is_healthy":true,"storage_manager":{"l1_managers":{"a":{"memory_used_bytes":10}}}}`, down, NoValue},
		"negative":              {`{"is_healthy":true,"storage_manager":{"l1_managers":{"a":{"memory_used_bytes":-10,"memory_total_bytes":100}}}}`, down, NoValue},
		"still starting":        {`{"error":"engine not initialized"}`, down, Malformed},
		"no word on its health": {`{"storage_manager":{}}`, down, Malformed},
		"another service":       {`{"status":"ok","service":"LMCache HTTP API"}`, down, Malformed},
	} {
		t.Run(name, func(t *testing.T) { check(t, parseStatus([]byte(tc.body)), tc.want, tc.cause) })
	}
}

func TestMemoryPressure(t *testing.T) {
	for name, tc := range map[string]struct {
		body  string
		want  answer
		cause Cause
	}{
		"ok": {`{"instance_id":"inst-1","overall_level":"high","complete":true,"tiers":[{"tier":"l1","used_bytes":85,"capacity_bytes":100,"used_ratio":0.85,"health":"ok"},` +
			`{"tier":"l2","used_bytes":1,"capacity_bytes":1,"health":"failed"}]}`, works(0.85), ""},
		"failed":  {`{"tiers":[{"tier":"l1","used_bytes":null,"capacity_bytes":null,"used_ratio":null,"health":"failed"}]}`, down, ""},
		"unknown": {`{"tiers":[{"tier":"l1","used_bytes":null,"capacity_bytes":100,"health":"unknown"},{"tier":"l1","capacity_bytes":-100}]}`, down, NoValue},
		"missing": {`{"detail":"Not Found"}`, down, Malformed},
	} {
		t.Run(name, func(t *testing.T) { check(t, parsePressure([]byte(tc.body)), tc.want, tc.cause) })
	}
}

func TestTheUsageOfInstances(t *testing.T) {
	for name, tc := range map[string]struct {
		body     string
		capacity int64
		want     answer
		cause    Cause
	}{
		"nothing reported yet": {string(recorded(t, "coordinator-usage-empty.json")), 0, down, NoValue},
		"reported": {`{"instances":[{"instance_id":"inst-1","registered":true,"modules":[{"tier":"l1","backend":"dram","shared":false,"used_bytes":30,"capacity_bytes":40,"usage_ratio":0.75},` +
			`{"tier":"l2","backend":"fs","used_bytes":1,"capacity_bytes":1000},{"tier":"l1","backend":"devdax","shared":true,"used_bytes":1,"capacity_bytes":1}]}]}`, 0, works(0.75), ""},
		"no capacity declared":   {`{"instances":[{"instance_id":"inst-1","registered":true,"modules":[{"tier":"l1","used_bytes":30,"capacity_bytes":0,"usage_ratio":null}]}]}`, 0, down, NoValue},
		"the capacity is set":    {`{"instances":[{"instance_id":"inst-1","registered":true,"modules":[{"tier":"l1","used_bytes":30,"capacity_bytes":0,"usage_ratio":null}]}]}`, 60, works(0.5), ""},
		"gone but its data":      {`{"instances":[{"instance_id":"inst-1","registered":false,"modules":[{"tier":"l1","used_bytes":30,"capacity_bytes":40}]}]}`, 0, down, UnknownInstance},
		"nobody":                 {`{"instances":[]}`, 0, down, UnknownInstance},
		"another service's JSON": {`{"status":"healthy"}`, 0, down, Malformed},
	} {
		t.Run(name, func(t *testing.T) {
			all, err := parseUsage([]byte(tc.body))
			got := answer{err: err}
			if err == nil {
				got.err = failed(UnknownInstance, "nobody")
				if len(all) > 0 {
					got = all[0].answer(tc.capacity)
				}
			}
			check(t, got, tc.want, tc.cause)
		})
	}
}

func TestTheHealthOfAnInstance(t *testing.T) {
	for body, tc := range map[string]struct {
		want  answer
		cause Cause
	}{
		string(recorded(t, "controller-health-unknown.json")): {down, UnknownInstance},
		`{}`:    {down, UnknownInstance},
		" {}\n": {down, UnknownInstance},
		`{"event_id":"health1","error_codes":{"0":0,"1":0}}`:  {answer{available: true}, ""},
		`{"event_id":"health1","error_codes":{"0":0,"1":-3}}`: {down, ""},
		`{"event_id":"health1","error_codes":{"0":"fine"}}`:   {down, Malformed},
		`{"detail":"Method Not Allowed"}`:                     {down, Malformed},
		`[]`:                                                  {down, Malformed},
	} {
		t.Run(body, func(t *testing.T) { check(t, parseHealth("inst-1", []byte(body)), tc.want, tc.cause) })
	}
}

func TestMetrics(t *testing.T) {
	scheduler := string(recorded(t, "scheduler-metrics.txt"))
	const worker = "lmcache:local_cache_usage{role=\"worker\",worker_id=\"%\"} 1.5e+06\nlmcache:lmcache_is_healthy{role=\"worker\",worker_id=\"%\"} 1.0\n"
	workers := strings.ReplaceAll(worker, "%", "0") + strings.ReplaceAll(worker, "%", "1")
	for name, tc := range map[string]struct {
		text     string
		capacity float64
		want     answer
		cause    Cause
	}{
		"multiprocess server":                 {string(recorded(t, "mp-metrics-filled.txt")), 0, works(0.0035400390625), ""},
		"multiprocess server, capacity set":   {string(recorded(t, "mp-metrics-filled.txt")), 1900544 * 4, works(0.25), ""},
		"several tiers":                       {"lmcache_mp_l1_usage_ratio{l1_tag=\"a\"} 0.5\nlmcache_mp_l1_usage_ratio{l1_tag=\"b\"} 1\n", 0, works(0.75), ""},
		"more than full":                      {"lmcache_mp_l1_usage_ratio 1.4\n", 0, works(1), ""},
		"not a number":                        {"lmcache_mp_l1_usage_ratio NaN\n", 0, down, NoValue},
		"negative":                            {"lmcache_mp_l1_usage_ratio -1\n", 0, down, NoValue},
		"infinite":                            {"lmcache:local_cache_usage +Inf\n", 100, down, NoValue},
		"a scheduler has no cache":            {scheduler, 1e9, down, NoValue},
		"two workers":                         {workers, 6e6, works(0.5), ""},
		"two workers beside their scheduler":  {scheduler + workers, 6e6, works(0.5), ""},
		"a worker is ill":                     {strings.Replace(workers, "} 1.0", "} 0.0", 1), 6e6, down, ""},
		"capacity unknown":                    {workers, 0, down, NoValue},
		"line breaks of DOS":                  {strings.ReplaceAll(workers, "\n", "\r\n"), 6e6, works(0.5), ""},
		"nonsense in lines that are not read": {"}{ \x00\xff\nlmcache_mp_l1_usage_ratio 0.5\nfoo{bar=\n", 0, works(0.5), ""},
		"half a line":                         {`lmcache_mp_l1_usage_ratio{l1_tag="`, 0, down, Malformed},
		"another server's":                    {"vllm:num_requests_running 1\n", 0, down, Malformed},
		"empty":                               {"", 0, down, Malformed},
	} {
		t.Run(name, func(t *testing.T) {
			g, err := parseMetrics([]byte(tc.text))
			got := answer{err: err}
			if err == nil {
				got = g.answer(tc.capacity)
			}
			check(t, got, tc.want, tc.cause)
		})
	}
	if capacity, err := parseConf(recorded(t, "conf.json")); err != nil || capacity != 0.25*(1<<30) {
		t.Errorf("capacity %v, %v", capacity, err)
	}
	for _, bad := range []string{"", "{}", `{"max_local_cpu_size":0}`, `{"max_local_cpu_size":-1}`, `{"max_local_cpu_size":"big"}`} {
		if capacity, err := parseConf([]byte(bad)); err == nil {
			t.Errorf("%s: %v, want an error", bad, capacity)
		}
	}
}

// FuzzAnswers reads whatever it is given as every kind of answer.
func FuzzAnswers(f *testing.F) {
	for _, name := range []string{"mp-status-filled.json", "mp-metrics-filled.txt", "scheduler-metrics.txt", "coordinator-usage-empty.json",
		"coordinator-lookup.json", "controller-health-unknown.json", "controller-lookup-unknown.json", "conf.json"} {
		f.Add(recorded(f, name))
	}
	f.Add([]byte(`{"occupancy":0.5,"cache_available":true}`))
	f.Add([]byte(`{"layout_info":{"inst-1":["LocalCPUBackend",512]}}`))
	f.Add([]byte(`{"tiers":[{"tier":"l1","used_bytes":85,"capacity_bytes":100,"health":"ok"}]}`))
	f.Add([]byte("lmcache:local_cache_usage 5\nlmcache:lmcache_is_healthy{role=\"worker\"} 0"))
	f.Fuzz(func(t *testing.T, body []byte) {
		answers := []answer{parseContract(body), parseStatus(body), parsePressure(body), parseHealth("a", body)}
		if all, err := parseUsage(body); err == nil {
			for i := range all {
				answers = append(answers, all[i].answer(100))
			}
		}
		if g, err := parseMetrics(body); err == nil {
			answers = append(answers, g.answer(0), g.answer(100))
		}
		for _, a := range answers {
			if a.err == nil && !(a.occupancy >= 0 && a.occupancy <= 1) {
				t.Errorf("%+v", a)
			}
		}
		if capacity, err := parseConf(body); err == nil && !(capacity > 0) {
			t.Errorf("capacity %v", capacity)
		}
		for _, parse := range []func() (map[string]int, error){
			func() (map[string]int, error) { return parseLayout(body, 1000) },
			func() (map[string]int, error) { return parsePlacements(body, 1000, 256) },
		} {
			held, _ := parse()
			for instance, n := range held {
				if n < 0 || n > 1000 {
					t.Errorf("%q holds %d of 1000 tokens", instance, n)
				}
			}
		}
	})
}
