package integration

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// exchange is one request of a conversation with real engines.
type exchange struct {
	at                        time.Time
	target, reason            string
	prompt, cached, predicted int // tokens; predicted is -1 where it is not known
}

// converseWith plays conversations of several turns behind a few system prompts, so many at a time, and returns what happened, in any order.
func converseWith(t *testing.T, g *gateway, model string, conversations, turns, atOnce int, salt string) (all []exchange, failed int) {
	t.Helper()
	var mu sync.Mutex
	var running sync.WaitGroup
	// A turn of each conversation after the other: the longest time for others to evict what it left.
	histories := make([][]turn, conversations)
	for n := range turns {
		next := make(chan int)
		for range atOnce {
			running.Go(func() {
				for i := range next {
					if n == 0 {
						histories[i] = []turn{{"system", salt + longPrompt(i%5, 900)}}
					}
					histories[i] = append(histories[i], turn{"user", longPrompt(1000*i+n, 220)})
					e, answer, err := exchangeWith(g, model, histories[i])
					mu.Lock()
					if err != nil {
						failed++
						t.Logf("conversation %d: %v", i, err)
					} else {
						all = append(all, e)
					}
					mu.Unlock()
					histories[i] = append(histories[i], turn{"assistant", answer})
				}
			})
		}
		for i := range conversations {
			next <- i
		}
		close(next)
		running.Wait()
	}
	return all, failed
}

func exchangeWith(g *gateway, model string, history []turn) (e exchange, answer string, err error) {
	body, err := json.Marshal(map[string]any{"model": model, "messages": history, "max_tokens": 24, "temperature": 0, "seed": 1})
	if err != nil {
		return e, "", err
	}
	e.at = time.Now()
	r, err := g.try(chatPath, string(body))
	if err != nil {
		return e, "", err
	}
	if r.status != http.StatusOK {
		return e, "", fmt.Errorf("status %d: %.200s", r.status, r.body)
	}
	var said struct {
		Choices []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
		Usage usage `json:"usage"`
	}
	if err := json.Unmarshal([]byte(r.body), &said); err != nil || len(said.Choices) == 0 {
		return e, "", fmt.Errorf("answer %.200s: %w", r.body, err)
	}
	e.target, e.reason, e.prompt, e.cached, e.predicted = r.target, r.reason, said.Usage.Prompt, said.Usage.Details.Cached, -1
	if n, err := strconv.Atoi(r.header.Get("X-Predicted")); err == nil {
		e.predicted = n
	}
	return e, said.Choices[0].Message.Content, nil
}

// realPreciseSite has every answer carry what was predicted.
func realPreciseSite(urls []string, model, strategy string) string {
	site := realSite(urls, model, strategy)
	if strategy == "precise_cache_aware" {
		for _, url := range urls {
			site = strings.Replace(site, url+"\n", url+" {\nkv_events auto\n}\n", 1)
		}
		site = strings.Replace(site, "strategy "+strategy, "strategy "+strategy+"\ntokenize on\ntokenize_timeout "+cmp.Or(os.Getenv("ROLTER_VLLM_TOKENIZE_TIMEOUT"), "1s"), 1)
	}
	return "header >X-Predicted {http.rolter.predicted}\n" + site
}

// Real engines that evict all the time: what is predicted from their KV events is what they find in their caches. With BLOCKS=160 they hold a fraction of
// the conversations. One of them is killed and started again, where ROLTER_VLLM_KILL and ROLTER_VLLM_START say how.
func TestRealEnginesHoldWhatTheySay(t *testing.T) {
	urls, model := realEngines(t)
	g := startGateway(t, realPreciseSite(urls, model, "precise_cache_aware"))
	const conversations, turns = 30, 6
	play := func(strategy string, atOnce int) (all []exchange) {
		t.Helper()
		if err := g.load(realPreciseSite(urls, model, strategy)); err != nil {
			t.Fatal(err)
		}
		testClient.CloseIdleConnections() // Caddy closes them
		if strategy == "precise_cache_aware" {
			g.exactOrPartial(len(urls))
		}
		all, failed := converseWith(t, g, model, conversations, turns, atOnce, fmt.Sprint(strategy, atOnce, time.Now().UnixNano()))
		var prompt, cached, predicted, right, over, under int
		reasons := make(map[string]int)
		for _, e := range all {
			prompt += e.prompt
			cached += e.cached
			reasons[e.reason]++
			if e.predicted >= 0 {
				predicted++
				switch {
				case e.predicted == e.cached:
					right++
				case e.predicted > e.cached:
					over++
				default:
					under++
				}
			}
		}
		t.Logf("%s, %d at a time: %d requests, %d failed, %.1f %% of %d prompt tokens cached, %d of %d predictions right (%d too much, %d too little), %v",
			strategy, atOnce, len(all), failed, 100*float64(cached)/float64(prompt), prompt, right, predicted, over, under, reasons)
		if failed > 0 {
			t.Errorf("%s: %d requests failed", strategy, failed)
		}
		if atOnce == 1 && strategy == "precise_cache_aware" && float64(right) < 0.99*float64(predicted) {
			t.Errorf("%d of %d predictions were right although nobody else evicted anything", right, predicted)
		}
		return all
	}
	for _, atOnce := range []int{1, 4} {
		for _, strategy := range []string{"round_robin", "cache_aware", "precise_cache_aware"} {
			play(strategy, atOnce)
		}
	}

	kill, start := os.Getenv("ROLTER_VLLM_KILL"), os.Getenv("ROLTER_VLLM_START")
	if kill == "" || start == "" {
		return
	}
	var acting sync.WaitGroup
	acting.Go(func() {
		time.Sleep(3 * time.Second) // into the middle
		for _, command := range []string{kill, start} {
			if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
				t.Errorf("%s: %v %s", command, err, out)
			}
			t.Logf("%s: done", command)
		}
		answers := time.Now()
		g.exactOrPartial(len(urls))
		t.Logf("%.2f s from its first answer until all streams could be relied on: %+v", time.Since(answers).Seconds(), g.streams())
	})
	play("precise_cache_aware", 2)
	acting.Wait()
	play("precise_cache_aware", 1)
}

// exactOrPartial waits until so many streams can be relied on.
func (g *gateway) exactOrPartial(streams int) {
	g.t.Helper()
	g.waitFor("streams that can be relied on", func() bool {
		all := g.streams()
		for _, s := range all {
			if s.State != "exact" && s.State != "partial" {
				return false
			}
		}
		return len(all) == streams
	})
}
