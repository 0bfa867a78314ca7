package replica

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestPriorityOrdersWaitingJobs(t *testing.T) {
	type arrival struct {
		at       time.Duration
		priority int64
	}
	for _, c := range []struct {
		name       string
		scheduling Scheduling
		arrivals   []arrival
		want       []int // arrivals by the order of their prefill
	}{
		{"default is fifo", "", []arrival{{0, 9}, {1, 5}, {2, 1}}, []int{0, 1, 2}},
		{"fifo ignores it", FIFO, []arrival{{0, 9}, {1, 5}, {2, 1}}, []int{0, 1, 2}},
		{"lowest first", ByPriority, []arrival{{0, 9}, {1, 5}, {2, 1}, {3, 3}}, []int{0, 2, 3, 1}},
		{"what runs is not interrupted", ByPriority, []arrival{{0, 9}, {0, -1}}, []int{0, 1}},
		{"ties by arrival", ByPriority, []arrival{{0, 0}, {1, 7}, {2, 7}, {2, 7}, {3, 7}}, []int{0, 1, 2, 3, 4}},
		{"default is 0", ByPriority, []arrival{{0, 0}, {1, 1}, {2, 0}, {3, -1}}, []int{0, 3, 2, 1}},
		{"extremes", ByPriority, []arrival{{0, 0}, {1, math.MaxInt64}, {2, math.MinInt64}, {3, 0}}, []int{0, 2, 3, 1}},
		{"a later one overtakes", ByPriority, []arrival{{0, 0}, {1, 5}, {2, 6}, {11, 1}}, []int{0, 1, 3, 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := testEngine(Timing{PrefillRate: 10, DecodeTime: second, Scheduling: c.scheduling}, 0)
			var order []int
			for i, a := range c.arrivals {
				j := job(uint64(i)*1000, 100, 1) // 10 s
				j.Priority = a.priority
				j.Notify = func() {
					if j.Phase == Prefilling {
						order = append(order, i)
					}
				}
				if err := e.Submit(a.at*second, j); err != nil {
					t.Fatal(err)
				}
			}
			drain(e)
			if !slices.Equal(order, c.want) {
				t.Errorf("prefilled %v, want %v", order, c.want)
			}
		})
	}
}

func TestParsePriority(t *testing.T) {
	for _, c := range []struct {
		json string
		want int64
		kind string
	}{
		{"0", 0, ""}, {"5", 5, ""}, {"-3", -3, ""}, {"5.0", 5, ""}, {"-1e3", -1000, ""}, {`" 7 "`, 7, ""}, {`"\u0037"`, 7, ""},
		{"true", 1, ""}, {"false", 0, ""}, {"9223372036854775807", math.MaxInt64, ""}, {"-9223372036854775808", math.MinInt64, ""},
		{"9223372036854775808", 0, "less_than_equal"}, {`"9223372036854775808"`, 0, "less_than_equal"},
		{"-9223372036854775809", 0, "greater_than_equal"}, {"1e19", 0, "int_parsing_size"}, {"-1e19", 0, "int_parsing_size"},
		{"1e400", 0, "finite_number"}, {"5.5", 0, "int_from_float"}, {"1e-3", 0, "int_from_float"},
		{`"x"`, 0, "int_parsing"}, {`""`, 0, "int_parsing"}, {`"5.5"`, 0, "int_parsing"}, {`"Inf"`, 0, "int_parsing"},
		{"null", 0, "int_type"}, {"[]", 0, "int_type"}, {"{}", 0, "int_type"},
	} {
		if n, kind, _ := parsePriority([]byte(c.json)); n != c.want || kind != c.kind {
			t.Errorf("%s: %d, %q; want %d, %q", c.json, n, kind, c.want, c.kind)
		}
	}
}

// bodyOf is a small request to any API that generates one token.
func bodyOf(path, text, more string) string {
	switch path {
	case completePath:
		return fmt.Sprintf(`{"prompt":%q,"max_tokens":1%s}`, text, more)
	case responsesPath:
		return fmt.Sprintf(`{"input":%q,"max_output_tokens":1%s}`, text, more)
	default:
		return chatBodyOf(text, `,"max_tokens":1`+more)
	}
}

var allPaths = []string{chatPath, completePath, messagesPath, responsesPath}

func TestBadPriority(t *testing.T) {
	fifo := start(t, Config{})
	byPriority := start(t, Config{Timing: Timing{Scheduling: ByPriority}})
	refusing := start(t, Config{RefusePriority: true})
	const refused = "Got priority %s but Priority scheduling is not enabled."
	for _, c := range []struct {
		name     string
		server   *Server
		priority string // "" for none
		status   int
		contains string
	}{
		{"fifo", fifo, "5", 200, ""},
		{"fifo, none", fifo, "", 200, ""},
		{"fifo, text", fifo, `"urgent"`, 400, "int_parsing"},
		{"fifo, fraction", fifo, "1.5", 400, "int_from_float"},
		{"fifo, null", fifo, "null", 400, "int_type"},
		{"by priority", byPriority, "-5", 200, ""},
		{"by priority, object", byPriority, "{}", 400, "int_type"},
		{"by priority, large", byPriority, "9223372036854775808", 400, "less_than_equal"},
		{"refused", refusing, "5", 400, fmt.Sprintf(refused, "5")},
		{"refused, negative", refusing, "-1", 400, fmt.Sprintf(refused, "-1")},
		{"refused, none", refusing, "", 200, ""},
		{"refused, 0", refusing, "0", 200, ""},
		{"refused, text", refusing, `"urgent"`, 400, "int_parsing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			more := ""
			if c.priority != "" {
				more = `,"priority":` + c.priority
			}
			for _, path := range allPaths {
				for _, stream := range []string{"", `,"stream":true`} {
					status, body := post(t, c.server, path, bodyOf(path, "x", more+stream))
					if status != c.status || !strings.Contains(body, c.contains) {
						t.Fatalf("%s: %d %s; want %d with %s", path, status, body, c.status, c.contains)
					}
					switch {
					case status == 200:
					case c.contains == fmt.Sprintf(refused, c.priority):
						if at(t, body, "error", "type") != "BadRequestError" || (path == messagesPath) != (at(t, body, "type") == "error") {
							t.Errorf("%s: %s", path, body)
						}
					case at(t, body, "error", "type") != "Bad Request" || at(t, body, "error", "param") != "body.priority" || at(t, body, "error", "code") != 400.0:
						t.Errorf("%s: %s", path, body)
					}
				}
			}
		})
	}
	// These share parsers with the others, but have no such field.
	for path, body := range map[string]string{
		"/v1/messages/count_tokens": chatBodyOf("x", `,"priority":"x"`),
		"/tokenize":                 chatBodyOf("x", `,"priority":"x"`),
	} {
		if status, answer := post(t, refusing, path, body); status != 200 {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
}

func TestBodiesHavePriority(t *testing.T) {
	requests := []struct{ path, priority string }{
		{chatPath, "5"}, {completePath, "-1"}, {messagesPath, "3"}, {responsesPath, ""}, {chatPath, "3"}, {responsesPath, "-2"},
	}
	for _, c := range []struct {
		scheduling Scheduling
		want       []int
	}{
		{FIFO, []int{0, 1, 2, 3, 4, 5}},
		{ByPriority, []int{5, 1, 3, 2, 4, 0}},
	} {
		t.Run(string(c.scheduling), func(t *testing.T) {
			s := start(t, Config{TimeScale: 1, Timing: Timing{PrefillRate: 1e6, DecodeTime: forever, MaxRunning: 1, Scheduling: c.scheduling}})
			stream, cancel := open(t, s, "occupies the slot")
			readLine(t, stream)
			known := make(map[*sequence]bool)
			waiting := make([]*sequence, len(requests))
			var wg sync.WaitGroup
			for i, r := range requests {
				more := ""
				if r.priority != "" {
					more = `,"priority":` + r.priority
				}
				body := bodyOf(r.path, fmt.Sprint("request ", i), more)
				wg.Go(func() {
					resp, err := http.Post(s.URL()+r.path, "application/json", strings.NewReader(body))
					if err != nil {
						t.Error(err)
						return
					}
					resp.Body.Close()
				})
				eventually(t, "request waits", func() bool {
					s.mu.Lock()
					defer s.mu.Unlock()
					for running := range s.calls {
						if q := running.sequences[0]; q.Phase == Waiting && !known[q] {
							known[q], waiting[i] = true, q
							return true
						}
					}
					return false
				})
			}
			cancel()
			wg.Wait()
			s.mu.Lock()
			defer s.mu.Unlock()
			order := []int{0, 1, 2, 3, 4, 5}
			slices.SortFunc(order, func(i, k int) int { return int(waiting[i].Started - waiting[k].Started) })
			if !slices.Equal(order, c.want) {
				t.Errorf("prefilled %v, want %v", order, c.want)
			}
		})
	}
}
