package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/rolter-ai/caddy-rolter/kvevents"
	"github.com/rolter-ai/caddy-rolter/prompt"
)

func recordCommand() *cobra.Command {
	r := recorder{out: os.Stdout}
	cmd := &cobra.Command{
		Use:   "record --url URL FILE [--events ENDPOINT] [--requests N]",
		Short: "Records requests to a replica and its KV events, for check",
		Long: `
Listens for requests, passes them on to the replica at --url as they are, and records them
together with the KV events that the replica publishes, until Ctrl-C or for --requests of
them. Send your traffic to the address that it prints: what does not come that way is known
by its events, but not as requests. FILE is written line by line, gzipped if it ends in .gz.
It holds your users' prompts.

Of chat completions, completions, messages and responses these are recorded: the body, the
status, what the answer says about cached tokens, and the token ids of the prompt. Neither
requests nor answers are changed for that, and streams are not held up. So

  - the engine must report cached tokens (vLLM: --enable-prompt-tokens-details), and in
    streams of chats and completions the client must ask for it
    (stream_options.include_usage);
  - token ids are taken from answers that have them (return_token_ids). Otherwise the
    replica is asked for them after each answer, one at a time: by the request's path and
    /render, where there is such (vLLM: --enable-scale-out), or else by /tokenize, which
    serves chats and completions.

Requests without the one or the other, with several prompts, or with images or the like are
recorded, but "check" leaves them out.
`,
		Args: cobra.ExactArgs(1),
	}
	flags := cmd.Flags()
	flags.StringVar(&r.url, "url", "", "URL of the replica, such as http://host:8000")
	flags.StringVar(&r.events, "events", "", "tcp://host:port where it publishes (default: it is asked)")
	r.register(flags)
	flags.StringVar(&r.listen, "listen", "127.0.0.1:0", "address to listen on; port 0 is any that is free")
	flags.IntVar(&r.requests, "requests", 0, "end after so many recorded requests (default: never)")
	_ = cmd.MarkFlagRequired("url") // it is there
	setRun(cmd, func(ctx context.Context, args []string) error { return r.run(ctx, args[0]) })
	return cmd
}

// What a recorder keeps of a request and its answer, in bytes, and how long it waits.
const (
	maxRecordedBody   = 32 << 20
	maxRecordedAnswer = 64 << 20
	maxUnsettled      = 64 // answered requests whose token ids are still to be asked for

	lateEvents   = 500 * time.Millisecond // events come up to a tenth of a second after the answers of what has caused them
	lastRequests = 5 * time.Second        // for requests that are under way at the end, and again for the token ids of these
	lastEvents   = 15 * time.Second       // until batches that were missed are there: replays have 5 to 7.5 s between them
	tokenizeTime = 10 * time.Second
)

// recorder is one run of the command.
type recorder struct {
	eventFlags
	url, events, listen string
	requests            int
	out                 io.Writer

	base   string // of url
	file   recordFile
	enough context.CancelFunc // ends the run
	proxy  *httputil.ReverseProxy
	client http.Client // asks the replica

	working sync.WaitGroup // requests that are passed on
	answers chan *exchange // whose token ids are to be found out
	number  atomic.Int64   // of the next request
	batches atomic.Int64

	mu      sync.Mutex
	settled int            // requests
	unknown map[string]int // why requests cannot be predicted

	// What follows belongs to the goroutine that takes from answers.

	parser prompt.Parser
	absent map[string]bool // paths that the replica does not have
}

func (r *recorder) run(ctx context.Context, name string) (err error) {
	target, err := url.Parse(baseURL(r.url))
	switch {
	case err != nil || !isURL(r.url) || target.Host == "":
		return fmt.Errorf("--url %q: is not a URL like http://host:8000", r.url)
	case r.requests < 0:
		return fmt.Errorf("--requests %d: must not be negative", r.requests)
	case r.events != "" && isURL(r.events):
		return fmt.Errorf("--events %q: is not of the form tcp://host:port", r.events)
	}
	r.base, r.client.Timeout = target.String(), tokenizeTime
	sources, err := r.find(ctx, cmp.Or(r.events, r.base), warn)
	if err != nil {
		return err
	}
	streams, ready, err := r.streams(sources)
	if err != nil {
		return err
	}
	listener, err := listen(r.listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	if err := r.file.create(name); err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, r.file.close()) }()

	ctx, r.enough = context.WithCancel(ctx)
	defer r.enough()
	r.describe(ctx)
	for _, s := range streams {
		s.Start()
		defer s.Close()
	}
	for range streams {
		select {
		case <-ready:
		case <-ctx.Done():
		}
	}
	r.serve(ctx, listener, target)
	time.Sleep(lateEvents)
	deadline := time.Now().Add(lastEvents)
	for _, s := range streams {
		// What has come is held back as long as something that came before is being fetched.
		for s.State() == kvevents.Syncing && time.Now().Before(deadline) {
			time.Sleep(10 * time.Millisecond)
		}
		s.Close()
	}
	r.summarize(name)
	return nil
}

// write writes a line of the recording. When that is not possible there is nothing more to do.
func (r *recorder) write(line any) {
	if !r.file.write(line) {
		r.enough()
	}
}

var (
	blocksLabel    = regexp.MustCompile(`vllm:cache_config_info\{[^}]*\bnum_gpu_blocks="(\d+)"`)
	blockSizeLabel = regexp.MustCompile(`vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"`)
)

// describe writes what the replica says of itself, as far as it says it.
func (r *recorder) describe(ctx context.Context) {
	var meta struct {
		Kind      string          `json:"kind"`
		Time      float64         `json:"t"`
		Engine    json.RawMessage `json:"engine,omitempty"`
		Blocks    int             `json:"num_gpu_blocks,omitempty"`
		BlockSize int             `json:"block_size,omitempty"`
		Sources   json.RawMessage `json:"kv_event_sources,omitempty"`
	}
	meta.Kind, meta.Time = "meta", unix(time.Now())
	meta.Engine, meta.Sources = r.json(ctx, "/version"), r.json(ctx, "/kv_event_sources")
	metrics, _, _ := r.ask(ctx, http.MethodGet, "/metrics", nil, nil)
	label := func(re *regexp.Regexp) (n int) {
		if found := re.FindSubmatch(metrics); found != nil {
			n, _ = strconv.Atoi(string(found[1])) // 0 is not known
		}
		return n
	}
	meta.Blocks, meta.BlockSize = label(blocksLabel), label(blockSizeLabel)
	r.write(meta)
	if models := r.json(ctx, "/v1/models"); models != nil { // the names of LoRA adapters are among them
		r.write(map[string]any{"kind": "models", "t": unix(time.Now()), "r": models})
	}
}

// json gets JSON from the replica; nil if it does not have it.
func (r *recorder) json(ctx context.Context, path string) json.RawMessage {
	answer, status, err := r.ask(ctx, http.MethodGet, path, nil, nil)
	if err != nil || status != http.StatusOK || !json.Valid(answer) {
		return nil
	}
	return answer
}

// ask asks the replica.
func (r *recorder) ask(ctx context.Context, method, path string, body []byte, authorization []string) (answer []byte, status int, err error) {
	req, err := http.NewRequestWithContext(ctx, method, r.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, 0, err
	}
	if authorization != nil {
		req.Header["Authorization"] = authorization
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(io.LimitReader(resp.Body, maxRecordedAnswer))
	return answer, resp.StatusCode, err
}

// streams returns the streams of the sources, which write what comes. ready tells of each that what had been published before is there.
func (r *recorder) streams(sources []eventSource) (streams []*kvevents.Stream, ready <-chan struct{}, err error) {
	there := make(chan struct{}, len(sources))
	for i, source := range sources {
		s := &recordedSource{recorder: r, name: source.name, topic: hex.EncodeToString([]byte(source.config.Topic))}
		s.ready = sync.OnceFunc(func() { there <- struct{}{} })
		if len(sources) > 1 {
			s.number = strconv.Itoa(i)
		}
		source.config.Watch = s.watch
		stream, err := kvevents.NewStream(source.config)
		if err != nil {
			return nil, nil, err
		}
		streams = append(streams, stream)
	}
	return streams, there, nil
}

// recordedSource is a stream that is recorded.
type recordedSource struct {
	*recorder
	name, topic string
	number      string // among several
	ready       func() // is called when what had been published before is there

	// The last batch that was written.
	any  bool
	seq  uint64
	time float64
}

// watch writes the batches of a stream, each of them once: the stream has some again when it has had to begin anew. As the topic of a message is not told,
// the one is written that was subscribed to.
func (s *recordedSource) watch(n kvevents.Notice) {
	switch n.What {
	case kvevents.NoticeState:
		if n.Err == nil {
			warn("Events of %s: %s", s.name, n.State)
		} else {
			warn("Events of %s: %s (%s)", s.name, n.State, printable(n.Err.Error()))
		}
		if n.State >= kvevents.Exact {
			s.ready()
		}
		return
	case kvevents.NoticeBatch:
		if s.any && n.Seq <= s.seq && n.Batch.Time <= s.time {
			return
		}
		s.time = n.Batch.Time
	case kvevents.NoticeNotUnderstood:
		if n.Payload == nil || s.any && n.Seq <= s.seq {
			return
		}
	default:
		return
	}
	s.any, s.seq = true, n.Seq
	s.batches.Add(1)
	s.write(struct {
		Kind   string    `json:"kind"`
		Time   float64   `json:"t"`
		Source string    `json:"src,omitempty"`
		Seq    uint64    `json:"seq"`
		Frames [3]string `json:"frames"`
	}{"ev", unix(time.Now()), s.number, n.Seq, [3]string{s.topic, fmt.Sprintf("%016x", n.Seq), hex.EncodeToString(n.Payload)}})
}

// serve passes requests on and records them until ctx is done, and then those that are under way.
func (r *recorder) serve(ctx context.Context, listener net.Listener, target *url.URL) {
	r.proxy = &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(target) },
		Transport: &http.Transport{
			DisableCompression:  true,            // answers pass as they are
			IdleConnTimeout:     4 * time.Second, // vLLM closes them after 5
			MaxIdleConnsPerHost: 1000,
		},
		FlushInterval: -1,
		ModifyResponse: func(resp *http.Response) error {
			if x, ok := resp.Request.Context().Value(exchangeKey{}).(*exchange); ok {
				x.answered(resp)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, req *http.Request, err error) {
			if x, ok := req.Context().Value(exchangeKey{}).(*exchange); ok {
				x.status = http.StatusBadGateway
			}
			if req.Context().Err() == nil { // otherwise the client has gone
				warn("%s %s: %v", req.Method, req.URL.Path, err)
			}
			w.WriteHeader(http.StatusBadGateway)
		},
		ErrorLog: log.New(io.Discard, "", 0),
	}
	r.answers = make(chan *exchange, maxUnsettled)
	r.absent, r.unknown = make(map[string]bool), make(map[string]int)
	asking, stopAsking := context.WithCancel(context.Background())
	defer stopAsking()
	var settling sync.WaitGroup
	settling.Go(func() {
		for x := range r.answers {
			r.settle(asking, x)
		}
	})

	server := &http.Server{Handler: r, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0)}
	go server.Serve(listener) // ends with the server
	fmt.Fprintf(r.out, "Listening on http://%s: send requests for %s there. Ctrl-C ends it.\n", listener.Addr(), r.url)
	<-ctx.Done()
	fmt.Fprintln(r.out, "Ending, as soon as what is under way is recorded.")
	patience, cancel := context.WithTimeout(context.Background(), lastRequests)
	defer cancel()
	if server.Shutdown(patience) != nil {
		server.Close()
	}
	r.working.Wait()
	close(r.answers)
	defer time.AfterFunc(lastRequests, stopAsking).Stop()
	settling.Wait()
}

// exchangeKey is where a request's context has its exchange.
type exchangeKey struct{}

// exchange is a request and its answer.
type exchange struct {
	number        int
	api           prompt.API
	path          string
	authorization []string
	body          []byte
	sent          time.Time

	status   int
	stream   bool
	answer   bytes.Buffer
	begun    time.Time // when the first byte of the answer's body came; 0 if none did
	ended    time.Time // the last one
	complete bool      // all of the answer has come and is here
}

// ServeHTTP passes a request on, and records it if it has a prompt.
func (r *recorder) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.working.Add(1)
	defer r.working.Done()
	api := prompt.APIOf(req.URL.Path)
	if _, ok := rendered[api]; !ok || req.Method != http.MethodPost {
		r.proxy.ServeHTTP(w, req)
		return
	}
	body, err := io.ReadAll(io.LimitReader(req.Body, maxRecordedBody+1))
	if err != nil {
		http.Error(w, "the request ends early", http.StatusBadRequest)
		return
	}
	if len(body) > maxRecordedBody {
		warn("%s: a request of more than %d bytes is not recorded", req.URL.Path, maxRecordedBody)
		req.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(body), req.Body), req.Body}
		r.proxy.ServeHTTP(w, req)
		return
	}
	req.Body = io.NopCloser(bytes.NewReader(body))
	x := &exchange{
		number: int(r.number.Add(1)) - 1, api: api, path: req.URL.Path, authorization: req.Header["Authorization"], body: body, sent: time.Now(),
	}
	line := struct {
		Kind    string            `json:"kind"`
		Time    float64           `json:"t"`
		Number  int               `json:"i"`
		Path    string            `json:"path"`
		Headers map[string]string `json:"headers,omitempty"`
		Body    json.RawMessage   `json:"body,omitempty"` // where it is JSON
	}{Kind: "req", Time: unix(x.sent), Number: x.number, Path: x.path}
	if rank := req.Header.Get(rankHeader); rank != "" {
		line.Headers = map[string]string{rankHeader: rank}
	}
	if json.Valid(body) {
		line.Body = body
	}
	r.write(line)
	defer func() {
		if x.ended.IsZero() {
			x.ended = time.Now()
		}
		select {
		case r.answers <- x:
		default: // rather than to hold up the answer's end
			r.finish(x.line(), "too many answers at a time to ask for token ids")
		}
	}()
	r.proxy.ServeHTTP(w, req.WithContext(context.WithValue(req.Context(), exchangeKey{}, x)))
}

const rankHeader = "X-data-parallel-rank"

// answered has the answer's body copied as it passes.
func (x *exchange) answered(resp *http.Response) {
	x.status = resp.StatusCode
	x.stream = strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream")
	resp.Body = &copied{resp.Body, x}
}

// copied is the body of an answer on its way to the client.
type copied struct {
	io.ReadCloser
	x *exchange
}

func (c *copied) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	x := c.x
	if n > 0 {
		x.ended = time.Now()
		if x.begun.IsZero() {
			x.begun = x.ended
		}
		if x.answer.Len() <= maxRecordedAnswer {
			x.answer.Write(p[:n])
		}
	}
	if err == io.EOF {
		x.complete = x.answer.Len() <= maxRecordedAnswer
	}
	return n, err
}

// respLine is the line of an answer.
type respLine struct {
	Kind       string          `json:"kind"`
	Time       float64         `json:"t"`
	Number     int             `json:"i"`
	Status     int             `json:"status"`
	Tokens     []uint32        `json:"prompt_token_ids,omitempty"`
	Usage      json.RawMessage `json:"usage,omitempty"`
	Cached     *int            `json:"cached_tokens,omitempty"`
	FirstToken float64         `json:"ttft_s,omitempty"` // of a stream
	Total      float64         `json:"total_s"`
}

// line returns the line of an answer, without what it says.
func (x *exchange) line() *respLine {
	l := &respLine{Kind: "resp", Time: unix(x.ended), Number: x.number, Status: x.status, Total: x.ended.Sub(x.sent).Seconds()}
	if x.stream && !x.begun.IsZero() {
		l.FirstToken = x.begun.Sub(x.sent).Seconds()
	}
	return l
}

// settle finds out what is to be known of an answer.
func (r *recorder) settle(ctx context.Context, x *exchange) {
	line, why := x.line(), ""
	switch body := r.parser.Parse(x.api, x.body); {
	case x.status != http.StatusOK:
		why = fmt.Sprintf("status %d", x.status)
	case !x.complete:
		why = "the answer did not come to its end"
	case body.Media:
		why = "images or the like"
	case x.severalPrompts():
		why = "several prompts"
	default:
		line.read(x)
		if line.Usage == nil {
			why = "no word about cached tokens in the answer"
		} else if line.Tokens == nil {
			line.Tokens, why = r.tokens(ctx, x, body.RenderOnly)
		}
	}
	r.finish(line, why)
}

// finish writes the line of an answer. If it cannot be predicted, why says so.
func (r *recorder) finish(line *respLine, why string) {
	r.write(line)
	r.mu.Lock()
	defer r.mu.Unlock()
	if why != "" {
		r.unknown[why]++
	}
	if r.settled++; r.settled == r.requests {
		r.enough()
	}
}

// severalPrompts says whether the request is a completion of several prompts: the answer has one report for all.
func (x *exchange) severalPrompts() bool {
	var body struct {
		Prompt []json.RawMessage `json:"prompt"`
	}
	var id uint32
	return x.api == prompt.Completions && json.Unmarshal(x.body, &body) == nil && len(body.Prompt) > 0 && json.Unmarshal(body.Prompt[0], &id) != nil
}

// answerPart is an answer, or an event of one that is streamed, as far as it tells about the prompt. The four APIs have it in different places.
type answerPart struct {
	Usage    json.RawMessage `json:"usage"`
	Response struct {
		Usage json.RawMessage `json:"usage"`
	} `json:"response"`
	Tokens  []uint32 `json:"prompt_token_ids"`
	Choices []struct {
		Tokens []uint32 `json:"prompt_token_ids"`
	} `json:"choices"`
}

// read takes from an answer what it tells about the prompt. Of a stream, the last report of its usage counts.
func (l *respLine) read(x *exchange) {
	parts := [][]byte{x.answer.Bytes()}
	if x.stream {
		parts = bytes.Split(parts[0], []byte("\n"))
	}
	for _, data := range parts {
		if x.stream {
			var ok bool
			if data, ok = bytes.CutPrefix(data, []byte("data:")); !ok {
				continue
			}
		}
		var part answerPart
		if json.Unmarshal(data, &part) != nil {
			continue // such as [DONE]
		}
		for _, usage := range []json.RawMessage{part.Usage, part.Response.Usage} {
			if len(usage) > 0 && string(usage) != "null" {
				l.Usage = usage
			}
		}
		if l.Tokens == nil {
			l.Tokens = part.Tokens
		}
		if l.Tokens == nil && len(part.Choices) > 0 {
			l.Tokens = part.Choices[0].Tokens
		}
	}
	type details struct {
		Cached *int `json:"cached_tokens"`
	}
	var usage struct {
		Prompt details `json:"prompt_tokens_details"`   // chat completions and completions
		Input  details `json:"input_tokens_details"`    // responses
		Read   *int    `json:"cache_read_input_tokens"` // messages
	}
	if json.Unmarshal(l.Usage, &usage) == nil {
		l.Cached = cmp.Or(usage.Prompt.Cached, usage.Input.Cached, usage.Read)
	}
}

// rendered has the paths at which vLLM tells token ids of requests of each API, the one that sees all of a body first. /tokenize takes bodies of chats and of
// completions.
var rendered = map[prompt.API][]string{
	prompt.Chat:        {"/v1/chat/completions/render", "/tokenize"},
	prompt.Completions: {"/v1/completions/render", "/tokenize"},
	prompt.Messages:    {"/v1/messages/render"},
	prompt.Responses:   {"/v1/responses/render"},
}

// tokens asks the replica for the token ids of a prompt. Without them, why says so.
func (r *recorder) tokens(ctx context.Context, x *exchange, renderOnly bool) (ids []uint32, why string) {
	for _, path := range rendered[x.api] {
		if r.absent[path] || renderOnly && path == "/tokenize" {
			continue
		}
		answer, status, err := r.ask(ctx, http.MethodPost, path, x.body, x.authorization)
		switch {
		case err != nil:
			return nil, "no token ids from " + path
		case status == http.StatusOK:
			ids, err := r.parser.ParseTokenized(answer)
			if err != nil {
				return nil, err.Error()
			}
			return slices.Clone(ids), ""
		case status == http.StatusForbidden, status == http.StatusNotFound, status == http.StatusMethodNotAllowed, status == http.StatusNotImplemented:
			r.absent[path] = true
		default:
			return nil, fmt.Sprintf("no token ids from %s: status %d", path, status)
		}
	}
	return nil, fmt.Sprintf("no token ids: the replica has no %s", rendered[x.api][0])
}

// summarize ends the recording and says what is in it.
func (r *recorder) summarize(name string) {
	n := r.batches.Load()
	r.write(map[string]any{"kind": "summary", "t": unix(time.Now()), "requests": r.settled, "batches": n})
	fmt.Fprintf(r.out, "%s: %d requests, %d batches of events.\n", name, r.settled, n)
	for _, why := range slices.Sorted(maps.Keys(r.unknown)) {
		fmt.Fprintf(r.out, "%d cannot be predicted: %s\n", r.unknown[why], printable(why))
	}
}

// recordFile is a file of JSON lines, of which each is there as soon as it is written.
type recordFile struct {
	mu   sync.Mutex
	file *os.File
	zip  *gzip.Writer // nil if it is not compressed
	err  error        // the first
}

// create creates the file, or empties it. Nobody else is to read the prompts in it.
func (f *recordFile) create(name string) (err error) {
	if f.file, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600); err == nil && strings.HasSuffix(name, ".gz") {
		f.zip = gzip.NewWriter(f.file)
	}
	return err
}

// write returns false if it cannot write. Then close says why.
func (f *recordFile) write(line any) bool {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	err := enc.Encode(line)
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.err != nil || err != nil:
	case f.zip != nil:
		_, err = f.zip.Write(out.Bytes())
		err = cmp.Or(err, f.zip.Flush())
	default:
		_, err = f.file.Write(out.Bytes())
	}
	f.err = cmp.Or(f.err, err)
	return f.err == nil
}

func (f *recordFile) close() error {
	if f.zip != nil {
		f.err = cmp.Or(f.err, f.zip.Close())
	}
	return cmp.Or(f.err, f.file.Close())
}
