package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
	"github.com/rolter-ai/caddy-rolter/kvevents"
)

// publishing starts a simulated replica that publishes what its cache holds, and says so.
func publishing(t *testing.T, cfg replica.Config) *replica.Server {
	t.Helper()
	cfg.TimeScale = 1000
	cfg.KVEvents.Endpoint, cfg.KVEvents.ReplayEndpoint = "tcp://*:0", "tcp://*:0"
	s := replica.New(cfg)
	if err := s.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func post(t *testing.T, url, body string, header ...string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(answer)
}

// chat is a body with a system prompt of about so many blocks, which has a letter of its own, and what is said after it.
func chat(letter string, blocks int, said ...string) string {
	messages := []map[string]string{{"role": "system", "content": strings.Repeat(letter+" to be ", 8*blocks)}}
	for i, text := range said {
		messages = append(messages, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": text})
	}
	body, _ := json.Marshal(map[string]any{"model": "sim", "messages": messages, "max_tokens": 24}) // it has nothing that cannot be
	return string(body)
}

// waitFor waits until an output has a text, from an offset on, and returns the offset behind it.
func (o *output) waitFor(t *testing.T, from int, pattern string) int {
	t.Helper()
	re := regexp.MustCompile("(?m)" + pattern)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		text := o.String()
		if found := re.FindStringIndex(text[from:]); found != nil {
			return from + found[1]
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %q in:\n%s", pattern, text[from:])
		}
	}
}

func newOutput() *output { return &output{seen: make(chan struct{}), want: "\x00"} }

func TestCheckOfRecordings(t *testing.T) {
	var files []string
	for _, name := range []string{"truth", "truth-evict", "truth-v0230-array"} {
		files = append(files, filepath.Join("..", "..", "kvevents", "testdata", name+".jsonl.gz"))
	}
	var table, text bytes.Buffer
	if err := check(files, false, &table); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(table.String(), "  60     60     0      0  "); n != len(files) {
		t.Errorf("60 of 60 exact %d times, not for each of:\n%s", n, table.String())
	}
	files = append(files, "not there")
	if err := check(files, true, &text); err == nil || !strings.Contains(err.Error(), "not there") {
		t.Errorf("error %v, want one that names the file that is not there", err)
	}
	want := `{"files":[`
	for i, name := range files[:3] {
		want += strings.Repeat(",", min(i, 1)) + fmt.Sprintf(`{"file":%q,"requests":60,"exact":60,"over":0,"under":0}`, name)
	}
	if want += "]}\n"; text.String() != want {
		t.Errorf("%swant %s", text.String(), want)
	}
}

// startRecording runs the recorder until the test ends or finish is called, which returns what it has said.
func startRecording(t *testing.T, r *recorder, file string) (url string, finish func() string) {
	t.Helper()
	out := newOutput()
	r.out, r.listen = out, "127.0.0.1:0"
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.run(ctx, file) }()
	out.waitFor(t, 0, "Listening on .*\n")
	url = regexp.MustCompile(`http://\S+:\d+`).FindString(out.String())
	return url, func() string {
		t.Helper()
		if r.requests == 0 {
			cancel()
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		cancel()
		return out.String()
	}
}

// recorded waits until so many requests and batches are.
func recorded(t *testing.T, r *recorder, requests int, batches int64) {
	t.Helper()
	settled := func() int {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.settled
	}
	for deadline := time.Now().Add(20 * time.Second); settled() < requests || r.batches.Load() < batches; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d requests and %d batches, want %d and %d", settled(), r.batches.Load(), requests, batches)
		}
	}
}

func checkOf(t *testing.T, file string) kvevents.Check {
	t.Helper()
	c, err := checkFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestRecordAndCheck plays conversations through the recorder to a replica whose cache is too small for them.
func TestRecordAndCheck(t *testing.T) {
	for name, cfg := range map[string]replica.Config{
		"maps, tokenize": {CacheBlocks: 30},
		"arrays, render": {CacheBlocks: 30, ScaleOut: true, KVEvents: replica.KVEvents{Form: replica.EventArrays, ReplayWithoutTopic: true}},
		"ranks":          {CacheBlocks: 30, Ranks: 2},
		"late events":    {CacheBlocks: 30, KVEvents: replica.KVEvents{Delay: 50 * time.Millisecond}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg.KVEvents.Topic = "kv@sim"
			s := publishing(t, cfg)
			post(t, s.URL()+"/v1/chat/completions", chat("a", 3, "before the recording")) // a replay has it
			file := filepath.Join(t.TempDir(), "traffic.jsonl.gz")
			const conversations, turns = 6, 5
			r := &recorder{url: s.URL(), requests: conversations * turns}
			url, finish := startRecording(t, r, file)
			said := make([][]string, conversations)
			for turn := range turns {
				for c := range said {
					said[c] = append(said[c], fmt.Sprintf("turn %d of conversation %d", turn, c))
					var header []string
					if cfg.Ranks > 0 {
						header = []string{rankHeader, fmt.Sprint(c % cfg.Ranks)}
					}
					var answer struct {
						Choices []struct{ Message struct{ Content string } }
					}
					text := post(t, url+"/v1/chat/completions", chat(string(rune('a'+c/2)), 3, said[c]...), header...)
					if err := json.Unmarshal([]byte(text), &answer); err != nil || len(answer.Choices) == 0 {
						t.Fatalf("%v: %s", err, text)
					}
					said[c] = append(said[c], answer.Choices[0].Message.Content)
				}
			}
			finish()
			c := checkOf(t, file)
			if c.Requests != conversations*turns || c.Exact != c.Requests || c.LeftOut+c.Gaps+c.Bad+c.Restarts > 0 {
				t.Errorf("%+v, want all of %d requests exact", c, conversations*turns)
			}
			if n := s.Stats().CachedTokens; n == 0 || !bytes.Contains(unzipped(t, file), hex.AppendEncode(nil, []byte("BlockRemoved"))) {
				t.Errorf("%d tokens were cached, or nothing was evicted: there was nothing to be predicted", n)
			}
		})
	}
}

func unzipped(t *testing.T, file string) []byte {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestRecordOfAllKinds looks at what is recorded of requests of all kinds, and that the recorder changes none of the answers.
func TestRecordOfAllKinds(t *testing.T) {
	system := strings.Repeat("The cache holds blocks. ", 10)
	const counted, leftOut = true, false
	requests := []struct {
		path, body string
		counted    bool
	}{
		{"/v1/chat/completions", chat("x", 2, "hello"), counted},
		{"/v1/chat/completions", chat("x", 2, "hello"), counted},
		{"/v1/chat/completions", `{"n": 2, ` + chat("x", 2, "hello")[1:], counted},
		{"/v1/chat/completions", `{"stream": true, "stream_options": {"include_usage": true}, ` + chat("x", 2, "hello")[1:], counted},
		{"/v1/chat/completions", `{"stream": true, "return_token_ids": true, "stream_options": {"include_usage": true}, ` + chat("x", 2, "bye")[1:], counted},
		{"/v1/chat/completions", `{"cache_salt": "<&>", ` + chat("x", 2, "hello")[1:], counted},
		{"/v1/chat/completions", `{"return_token_ids": true, ` + chat("x", 2, "hello")[1:], counted},
		{"/v1/messages", fmt.Sprintf(`{"max_tokens": 4, "system": %q, "messages": [{"role": "user", "content": "hello"}]}`, system), counted},
		{"/v1/messages", fmt.Sprintf(`{"stream": true, "max_tokens": 4, "system": %q, "messages": [{"role": "user", "content": "hello"}]}`, system), counted},
		{"/v1/responses", fmt.Sprintf(`{"max_output_tokens": 4, "instructions": %q, "input": "hello"}`, system), counted},
		{"/v1/responses", fmt.Sprintf(`{"stream": true, "max_output_tokens": 4, "instructions": %q, "input": "hello"}`, system), counted},
		{"/v1/completions", fmt.Sprintf(`{"max_tokens": 4, "prompt": %q}`, system), counted},
		{"/v1/completions", fmt.Sprintf(`{"return_token_ids": true, "max_tokens": 4, "prompt": %q}`, system), counted},
		{"/v1/completions", `{"max_tokens": 4, "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]}`, counted},
		{"/v1/completions", `{"max_tokens": 4, "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]}`, counted},
		{"/v1/completions", fmt.Sprintf(`{"max_tokens": 4, "prompt": [%q, "another"]}`, system), leftOut},
		{"/v1/chat/completions", `{"stream": true, ` + chat("x", 2, "hello")[1:], leftOut}, // no usage
		{"/v1/chat/completions", `{"prompt_logprobs": 1, ` + chat("x", 2, "hello")[1:], leftOut},
		{"/v1/chat/completions", `{"messages": 1}`, leftOut},
		{"/v1/chat/completions", `no JSON`, leftOut},
	}
	config := replica.Config{ScaleOut: true}
	s, alike := publishing(t, config), publishing(t, config)
	file := filepath.Join(t.TempDir(), "traffic.jsonl")
	r := &recorder{url: s.URL() + "/v1/"}
	url, finish := startRecording(t, r, file)
	want := 0
	varies := regexp.MustCompile(`[a-z]+[-_][0-9a-f]{12,}|"created(_at)?":\d+`)
	for _, q := range requests {
		got, direct := post(t, url+q.path, q.body), post(t, alike.URL()+q.path, q.body)
		if got, direct := varies.ReplaceAllString(got, ""), varies.ReplaceAllString(direct, ""); got != direct {
			t.Errorf("%s %s: the answer is\n%s\nwithout the recorder\n%s", q.path, q.body, got, direct)
		}
		if q.counted {
			want++
		}
	}
	post(t, url+"/tokenize", `{"prompt": "not recorded"}`)
	said := finish()
	c := checkOf(t, file)
	if c.Requests != want || c.Exact != want || c.LeftOut != len(requests)-want {
		t.Errorf("%+v, want %d exact, and %d left out", c, want, len(requests)-want)
	}
	for _, want := range []string{fmt.Sprintf("%d requests, ", len(requests)), "1 cannot be predicted: several prompts", "1 cannot be predicted: no word about cached tokens"} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in:\n%s", want, said)
		}
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v: others can read the prompts", info.Mode(), err)
	}

	// Every line is what check and whoever else reads such files expect.
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	kinds := make(map[string]int)
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line struct {
			Kind   string
			Time   float64 `json:"t"`
			Number *int    `json:"i"`
			Frames []string
			Body   json.RawMessage
			Blocks *int `json:"num_gpu_blocks"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatalf("%v: %s", err, lines.Bytes())
		}
		kinds[line.Kind]++
		if ago := time.Since(time.UnixMicro(int64(line.Time * 1e6))); ago < 0 || ago > time.Minute {
			t.Errorf("time %f is not now: %.80s", line.Time, lines.Bytes())
		}
		switch line.Kind {
		case "req", "resp":
			if line.Number == nil {
				t.Errorf("no number: %.80s", lines.Bytes())
			}
		case "ev":
			if len(line.Frames) != 3 || len(line.Frames[1]) != 16 {
				t.Errorf("frames %.80q", line.Frames)
			}
		}
	}
	if n := len(requests); kinds["meta"] != 1 || kinds["models"] != 1 || kinds["req"] != n || kinds["resp"] != n || kinds["ev"] != c.Batches || kinds["summary"] != 1 {
		t.Errorf("%v, want %d requests and answers, and %d batches", kinds, n, c.Batches)
	}
}

// TestRecordThroughRestart goes on when the replica is killed and comes back, and when events get lost on the way.
func TestRecordThroughRestart(t *testing.T) {
	s := publishing(t, replica.Config{})
	file := filepath.Join(t.TempDir(), "traffic.jsonl")
	r := &recorder{url: s.URL()}
	url, finish := startRecording(t, r, file)
	path := "/v1/chat/completions"
	post(t, url+path, chat("x", 2, "hello"))
	if err := s.SetEventFault(replica.Fault{Kind: replica.Gap, Count: 1}); err != nil {
		t.Fatal(err)
	}
	post(t, url+path, chat("y", 2, "hello"))
	post(t, url+path, chat("z", 2, "hello"))
	recorded(t, r, 3, 3) // what was lost comes by a replay
	post(t, url+path, chat("y", 2, "hello again"))
	recorded(t, r, 4, 0)

	s.Close()
	post(t, url+path, chat("x", 2, "nobody hears this"))
	again, err := s.Restart()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { again.Close() })
	batches := r.batches.Load()
	post(t, url+path, chat("x", 2, "hello"))
	recorded(t, r, 6, batches+1)
	post(t, url+path, chat("x", 2, "hello"))
	if said := finish(); !strings.Contains(said, "1 cannot be predicted: status 502") {
		t.Errorf("no word about the request that failed:\n%s", said)
	}
	// The first request after a restart meets an empty cache of which no event has told yet.
	if c := checkOf(t, file); c.Requests != 6 || c.Exact < 5 || c.Under > 0 || c.LeftOut != 1 || c.Restarts != 1 || c.Gaps > 0 {
		t.Errorf("%+v, want 6 requests, at most one of them not exact, one left out, and one restart", c)
	}
}

// TestRecordInterrupted ends the command by Ctrl-C while a request is under way.
func TestRecordInterrupted(t *testing.T) {
	s := publishing(t, replica.Config{})
	file := filepath.Join(t.TempDir(), "traffic.jsonl.gz")
	cmd := command(t, "kvevents", "record", "--url", s.URL(), file)
	out := &output{want: "Ctrl-C ends it."}
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	interrupt := startUntil(t, cmd, out)
	url := regexp.MustCompile(`http://\S+:\d+`).FindString(out.String())
	post(t, url+"/v1/chat/completions", chat("x", 2, "hello"))
	if err := s.SetFault(replica.Fault{Kind: replica.Hang}); err != nil {
		t.Fatal(err)
	}
	before := s.Stats().Requests
	hanging := make(chan struct{})
	go func() {
		defer close(hanging)
		resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(chat("x", 2, "hello")))
		if err == nil {
			resp.Body.Close()
		}
	}()
	for s.Stats().Requests == before {
		time.Sleep(time.Millisecond)
	}
	if code := interrupt(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	<-hanging
	if c := checkOf(t, file); c.Requests != 1 || c.Exact != 1 || c.LeftOut != 1 {
		t.Errorf("%+v, want one exact, and the one under way left out", c)
	}
}

// startTail runs the tail until the test ends.
func startTail(t *testing.T, tl *tail, endpoints ...string) *output {
	t.Helper()
	out := newOutput()
	tl.out = out
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- tl.run(ctx, endpoints) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return out
}

func TestTailThroughTrouble(t *testing.T) {
	s := publishing(t, replica.Config{CacheBlocks: 6, Adapters: "sql\x1b[2J"})
	pub, replay := s.EventEndpoints(0)
	out := startTail(t, &tail{eventFlags: eventFlags{replay: replay}}, pub)
	at := out.waitFor(t, 0, "  state    syncing$")
	at = out.waitFor(t, at, `  replay   seq=0$`)
	at = out.waitFor(t, at, `  state    exact$`)
	path := s.URL() + "/v1/chat/completions"
	post(t, path, chat("x", 2, "hello"))
	at = out.waitFor(t, at, `^\d\d:\d\d:\d\d\.\d{3}  stored   seq=0 rank=0 blocks=\d+ block_size=16 group=0 medium=GPU$`)
	post(t, path, strings.Replace(chat("x", 2, "hello"), `"sim"`, `"sql\u001b[2J"`, 1))
	at = out.waitFor(t, at, `  removed  seq=\d+ rank=0 blocks=1 group=0 medium=GPU$`)
	at = out.waitFor(t, at, `  stored   .* adapter="sql\\x1b\[2J"$`)

	if err := s.SetEventFault(replica.Fault{Kind: replica.Gap, Count: 1}); err != nil {
		t.Fatal(err)
	}
	for _, letter := range []string{"c", "d", "e"} {
		post(t, path, chat(letter, 2, "hello"))
	}
	at = out.waitFor(t, at, `  gap      seq=\d+ \(batches (\d+) to \d+ are missing\)$`)
	at = out.waitFor(t, at, `  state    syncing`)
	at = out.waitFor(t, at, `  replay   `)
	at = out.waitFor(t, at, `  stored   `)
	at = out.waitFor(t, at, `  replayed$`)
	at = out.waitFor(t, at, `  state    exact$`)

	if err := s.SetEventFault(replica.Fault{Kind: replica.Malformed, Count: 1}); err != nil {
		t.Fatal(err)
	}
	post(t, path, chat("f", 2, "hello"))
	at = out.waitFor(t, at, `  undecodable seq=\d+ \(`)

	again, err := s.Restart()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { again.Close() })
	at = out.waitFor(t, at, `  state    down`)
	post(t, again.URL()+"/v1/chat/completions", chat("x", 2, "hello"))
	at = out.waitFor(t, at, `  restart$`)
	out.waitFor(t, at, `  stored   seq=0 `)
	if text := out.String(); strings.Contains(text, "tokens=") || strings.ContainsRune(text, '\x1b') {
		t.Errorf("token ids, or what an engine can do to a terminal:\n%s", text)
	}
}

func TestTailOfReplicas(t *testing.T) {
	ranks := publishing(t, replica.Config{Ranks: 2})
	one := publishing(t, replica.Config{})
	pub, _ := one.EventEndpoints(0)
	out := startTail(t, &tail{json: true, tokens: true}, ranks.URL()+"/v1", pub)
	host := strings.TrimPrefix(ranks.URL(), "http://")
	for _, source := range []string{host + "/0", host + "/1"} {
		out.waitFor(t, 0, `"source":"`+source+`".*"state":"exact"`)
	}
	out.waitFor(t, 0, `"source":"`+pub+`".*"state":"partial"`) // without a replay
	post(t, ranks.URL()+"/v1/chat/completions", chat("x", 2, "hello"), rankHeader, "1")
	out.waitFor(t, 0, `"source":"`+host+`/1".*"what":"stored"`)
	for line := range strings.Lines(out.String()) {
		var l tailLine
		dec := json.NewDecoder(strings.NewReader(line))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&l); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if l.What == "stored" && (l.Source != host+"/1" || l.Seq == nil || *l.Rank != 1 || *l.Group != 0 || l.BlockSize != 16 || len(l.Tokens) != 16**l.Blocks) {
			t.Errorf("%s", line)
		}
	}
}

func TestTailInterrupted(t *testing.T) {
	cmd := command(t, "kvevents", "tail", "tcp://127.0.0.1:1")
	out := &output{want: "  state    down ("}
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	if code := startUntil(t, cmd, out)(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestKVEventsBadUsage(t *testing.T) {
	quiet := replica.New(replica.Config{})
	if err := quiet.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { quiet.Close() })
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	precious := filepath.Join(t.TempDir(), "precious")
	if err := os.WriteFile(precious, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ args, want string }{
		{"nonsense", "nonsense"},
		{"tail", "arg"},
		{"tail localhost:5557", "neither tcp://host:port nor the http:// URL"},
		{"tail tcp://*:5557", "* is not a host to connect to"},
		{"tail tcp://localhost", "missing port"},
		{"tail tcp://localhost:1 --replay localhost:2", "replay"},
		{"tail tcp://localhost:1 tcp://localhost:2 --replay tcp://localhost:3", "--replay"},
		{"tail http://127.0.0.1:1", "127.0.0.1:1"},
		{"tail " + quiet.URL(), "--kv-events-config"},
		{"record " + precious, `"url"`},
		{"record --url http://127.0.0.1:1", "arg"},
		{"record --url 127.0.0.1:1 " + precious, "--url"},
		{"record --url http://127.0.0.1:1 " + precious, "127.0.0.1:1"},
		{"record --url http://127.0.0.1:1 --events http://127.0.0.1:2 " + precious, "--events"},
		{"record --url http://127.0.0.1:1 --events tcp://*:2 " + precious, "* is not a host"},
		{"record --url http://127.0.0.1:1 --events tcp://localhost:2 --requests -1 " + precious, "--requests -1"},
		{"record --url http://127.0.0.1:1 --events tcp://localhost:2 /no/such/folder/file", "/no/such/folder/file"},
		{"check", "arg"},
		{"check /no/such/file", "/no/such/file"},
		{"check " + garbage, garbage},
	} {
		t.Run(c.args, func(t *testing.T) {
			t.Parallel()
			cmd := command(t, append([]string{"kvevents"}, strings.Fields(c.args)...)...)
			said, err := cmd.CombinedOutput()
			if err == nil || !strings.Contains(string(said), c.want) {
				t.Errorf("%v, want an error with %q:\n%s", err, c.want, said)
			}
		})
	}
	t.Cleanup(func() {
		if text, err := os.ReadFile(precious); err != nil || string(text) != "precious" {
			t.Errorf("a file that was there is %q, %v", text, err)
		}
	})
}
