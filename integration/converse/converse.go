// Package converse plays multi-turn conversations against anything that speaks OpenAI's chat completions API and
// measures what the user of a chat would feel: the time to the first token, and how much of each prompt came from a cache.
//
// The conversations are made up but look real: a handful of long system prompts, users who come back after they have
// read the answer, and a history that grows by the answers that were really received. They are the same in every
// play with the same seed, so that two ways of routing can be compared.
package converse

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Player plays conversations through one base URL.
type Player struct {
	// BaseURL is what comes before /v1/chat/completions, for example http://localhost:8080.
	BaseURL string
	// Model is the model name of every request.
	Model string
	// Salt, when not empty, becomes the first line of every system prompt. A salt that was never used before makes
	// sure that nothing of an earlier play is still cached.
	Salt string
	// MaxTokens limits each answer. 0 leaves it to the engine.
	MaxTokens int
	// Pace multiplies the pauses of the conversations: 1 plays them as written, 0 without any pause.
	Pace float64
	// Client sends the requests. Nil is a client that gives up a request after two minutes.
	Client *http.Client
	// Progress, when not nil, is told after each request how many of how many are done. Calls do not overlap.
	Progress func(done, total int)
}

// Result is the outcome of one request.
type Result struct {
	// Conversation and Turn count from 0.
	Conversation, Turn int
	// FirstToken is the time from sending the request to the first piece of the answer's text, or to the end of an
	// answer without text.
	FirstToken time.Duration
	// PromptTokens and CachedTokens are what the engine reported.
	PromptTokens, CachedTokens int
	// CachedReported says whether the engine reported cached tokens at all (vLLM: --enable-prompt-tokens-details).
	CachedReported bool
	// Target is the replica that Rolter says it chose, from the response header x-rolter-target; empty without it.
	Target string
	// Err says why there is no complete answer. The other figures are then those known by that time.
	Err error
}

// Play plays all conversations at once and returns one result for each request, by conversation and turn.
//
// A conversation whose request fails ends there: what the user would have said next makes no sense without an answer.
// When ctx ends, Play returns soon with the requests that were complete, and the broken off ones are left out.
func (p *Player) Play(ctx context.Context, conversations []Conversation) []Result {
	client := p.Client
	if client == nil {
		transport := http.DefaultTransport.(*http.Transport).Clone()
		// One connection for each conversation is kept: a new one would be counted as time to first token.
		transport.MaxIdleConns, transport.MaxIdleConnsPerHost = 0, len(conversations)+1
		defer transport.CloseIdleConnections()
		client = &http.Client{Transport: transport, Timeout: 2 * time.Minute}
	}

	progress := progress{report: p.Progress}
	for _, c := range conversations {
		progress.total += len(c.Turns)
	}
	byConversation := make([][]Result, len(conversations))
	var wg sync.WaitGroup
	for i, c := range conversations {
		wg.Go(func() { byConversation[i] = p.playOne(ctx, client, i, c, &progress) })
	}
	wg.Wait()

	var results []Result
	for _, list := range byConversation {
		results = append(results, list...)
	}
	return results
}

func (p *Player) playOne(ctx context.Context, client *http.Client, index int, c Conversation, progress *progress) []Result {
	system := c.System
	if p.Salt != "" {
		system = p.Salt + "\n" + system
	}
	history := []message{{Role: "system", Content: system}}
	var results []Result
	if !p.pause(ctx, c.Start) {
		return nil
	}
	for t, turn := range c.Turns {
		if !p.pause(ctx, turn.Think) {
			return results
		}
		history = append(history, message{Role: "user", Content: turn.Text})
		result := Result{Conversation: index, Turn: t}
		answer, err := p.ask(ctx, client, history, &result)
		if ctx.Err() != nil {
			return results
		}
		result.Err = err
		results = append(results, result)
		if err != nil {
			progress.add(len(c.Turns) - t)
			return results
		}
		progress.add(1)
		history = append(history, message{Role: "assistant", Content: answer})
	}
	return results
}

// pause waits and says whether ctx is still alive.
func (p *Player) pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(time.Duration(float64(d) * p.Pace))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chunk is one event of a streamed answer, as far as it matters here.
type chunk struct {
	Choices []struct {
		Delta struct {
			Content string `json:"content"`
			// Thinking models stream these first. The names differ between versions of the engines.
			Reasoning        string `json:"reasoning"`
			ReasoningContent string `json:"reasoning_content"`
		} `json:"delta"`
		FinishReason string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		PromptTokens        int `json:"prompt_tokens"`
		PromptTokensDetails *struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	// A full vLLM answers 200 and then sends its error as an event.
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// ask sends one request, fills in result and returns the text of the answer.
func (p *Player) ask(ctx context.Context, client *http.Client, history []message, result *Result) (string, error) {
	body, err := json.Marshal(struct {
		Model         string          `json:"model"`
		Messages      []message       `json:"messages"`
		MaxTokens     int             `json:"max_tokens,omitempty"`
		Temperature   int             `json:"temperature"`
		Stream        bool            `json:"stream"`
		StreamOptions map[string]bool `json:"stream_options"`
	}{p.Model, history, p.MaxTokens, 0, true, map[string]bool{"include_usage": true}})
	if err != nil {
		return "", err
	}
	url := strings.TrimSuffix(p.BaseURL, "/") + "/v1/chat/completions"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	sent := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	result.Target = resp.Header.Get("x-rolter-target")
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return "", fmt.Errorf("status %d: %s", resp.StatusCode, bytes.TrimSpace(text))
	}

	var answer strings.Builder
	finished := false
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, isData := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !isData {
			continue
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			if !finished {
				return "", errors.New("the answer has no finish_reason")
			}
			// The rest must be read for the connection to be used again.
			_, _ = io.Copy(io.Discard, resp.Body)
			return answer.String(), nil
		}
		var event chunk
		if err := json.Unmarshal(data, &event); err != nil {
			return "", fmt.Errorf("unreadable event in the stream: %w", err)
		}
		if event.Error != nil {
			return "", fmt.Errorf("error in the stream: %s", event.Error.Message)
		}
		for _, choice := range event.Choices {
			if choice.FinishReason == "abort" { // what a vLLM says to its running requests when it is stopped
				return "", errors.New("the engine aborted the answer")
			}
			finished = finished || choice.FinishReason != ""
			// An answer may be empty: a model can end it with its first token.
			text := cmp.Or(choice.Delta.Content, choice.Delta.Reasoning, choice.Delta.ReasoningContent)
			if result.FirstToken == 0 && (text != "" || finished) {
				result.FirstToken = time.Since(sent)
			}
			answer.WriteString(choice.Delta.Content)
		}
		if usage := event.Usage; usage != nil {
			result.PromptTokens = usage.PromptTokens
			if usage.PromptTokensDetails != nil {
				result.CachedReported = true
				result.CachedTokens = usage.PromptTokensDetails.CachedTokens
			}
		}
	}
	if err := lines.Err(); err != nil {
		return "", err
	}
	return "", errors.New("the stream ended before [DONE]")
}

type progress struct {
	mu          sync.Mutex
	done, total int
	report      func(done, total int)
}

func (p *progress) add(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	if p.report != nil {
		p.report(p.done, p.total)
	}
}
