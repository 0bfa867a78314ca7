package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/rolter-ai/caddy-rolter/kvevents"
)

func tailCommand() *cobra.Command {
	t := tail{out: os.Stdout}
	cmd := &cobra.Command{
		Use:   "tail ENDPOINT… [--replay ENDPOINT] [--topic TOPIC] [--tokens] [--json]",
		Short: "Shows what engines publish, as it comes",
		Long: `
Follows the KV events of engines and prints one line for each, and one for whatever happens
to the stream: its state (down; syncing: what was missed is being fetched; exact: all that
is cached is known; partial: what is known is cached, but more may be), gaps, replays and
restarts. It goes on through all of these until Ctrl-C.

An endpoint is where an engine publishes, tcp://host:port, or the URL of a replica, such as
http://host:8000, which is then asked where its ranks publish and replay
(/kv_event_sources of vLLM, /server_info of SGLang). Where the replay is known, what the
engine still has of what it published before comes first.

The time of an event is the engine's. Token ids are shown with --tokens only: they are your
users' prompts.
`,
		Args: cobra.MinimumNArgs(1),
	}
	flags := cmd.Flags()
	t.register(flags)
	flags.BoolVar(&t.tokens, "tokens", false, "show the token ids of stored blocks")
	flags.BoolVar(&t.json, "json", false, "print JSON, an object a line")
	setRun(cmd, t.run)
	return cmd
}

// tail is one run of the command.
type tail struct {
	eventFlags
	tokens, json bool

	several bool               // sources
	stop    context.CancelFunc // ends the run
	mu      sync.Mutex
	out     io.Writer
	err     error // of writing
}

func (t *tail) run(ctx context.Context, endpoints []string) error {
	if t.replay != "" && len(endpoints) > 1 {
		return fmt.Errorf("--replay %s: is for one endpoint, not for %d", t.replay, len(endpoints))
	}
	var sources []eventSource
	for _, endpoint := range endpoints {
		found, err := t.find(ctx, endpoint, warn)
		if err != nil {
			return err
		}
		sources = append(sources, found...)
	}
	t.several = len(sources) > 1
	ctx, t.stop = context.WithCancel(ctx)
	defer t.stop()

	var streams []*kvevents.Stream
	for _, s := range sources {
		s.config.Watch = func(n kvevents.Notice) { t.show(s.name, n) }
		stream, err := kvevents.NewStream(s.config)
		if err != nil {
			return err
		}
		streams = append(streams, stream)
	}
	for _, s := range streams {
		s.Start()
	}
	<-ctx.Done()
	for _, s := range streams {
		s.Close()
	}
	return t.err
}

// tailLine is a line of output.
type tailLine struct {
	Source    string   `json:"source"`
	Time      float64  `json:"t"` // Unix seconds; of an event by the engine's clock, where it has told the time
	What      string   `json:"what"`
	Seq       *uint64  `json:"seq,omitempty"`
	Rank      *int     `json:"rank,omitempty"`
	Blocks    *int     `json:"blocks,omitempty"`
	BlockSize int      `json:"block_size,omitempty"`
	Group     *int     `json:"group,omitempty"`
	Medium    string   `json:"medium,omitempty"`
	Adapter   string   `json:"adapter,omitempty"`
	Tokens    []uint32 `json:"tokens,omitempty"`
	State     string   `json:"state,omitempty"`
	Events    int      `json:"events,omitempty"` // that were left out
	Why       string   `json:"why,omitempty"`
}

// The names of the kinds and of the media.
var (
	kindNames   = [...]string{kvevents.Stored: "stored", kvevents.Removed: "removed", kvevents.Cleared: "cleared"}
	mediumNames = [...]string{kvevents.GPU: "GPU", kvevents.CPU: "CPU", kvevents.Disk: "disk", kvevents.Remote: "remote", kvevents.UnknownMedium: "unknown"}
	noticeNames = [...]string{
		kvevents.NoticeState: "state", kvevents.NoticeNotUnderstood: "undecodable", kvevents.NoticeGap: "gap", kvevents.NoticeReplay: "replay",
		kvevents.NoticeReplayed: "replayed", kvevents.NoticeRestart: "restart", kvevents.NoticeLoss: "lost",
	}
)

// show prints what a notice says.
func (t *tail) show(source string, n kvevents.Notice) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out bytes.Buffer
	line := tailLine{Source: source, Time: unix(time.Now())}
	if n.What == kvevents.NoticeBatch {
		t.batch(&out, line, n)
	} else {
		line.What = noticeNames[n.What]
		switch n.What {
		case kvevents.NoticeState:
			line.State = n.State.String()
		case kvevents.NoticeReplay, kvevents.NoticeGap:
			line.Seq = &n.Seq
		case kvevents.NoticeNotUnderstood:
			if n.Payload != nil {
				line.Seq = &n.Seq
			}
		}
		if n.Err != nil {
			line.Why = n.Err.Error()
		}
		t.format(&out, &line)
	}
	if _, err := t.out.Write(out.Bytes()); err != nil {
		t.err = err
		t.stop()
	}
}

func (t *tail) batch(out *bytes.Buffer, line tailLine, n kvevents.Notice) {
	b := n.Batch
	line.Seq = &n.Seq
	if b.Time > 0 && b.Time < 1e11 { // infinity is no JSON
		line.Time = b.Time
	}
	if b.Rank >= 0 {
		line.Rank = &b.Rank
	}
	for i := range b.Events {
		e, event := &b.Events[i], line
		event.What = kindNames[e.Kind]
		if e.Kind != kvevents.Cleared {
			blocks := len(e.Hashes)
			event.Blocks, event.BlockSize, event.Medium, event.Adapter = &blocks, e.BlockSize, mediumNames[e.Medium], e.LoRA
			if e.Group >= 0 {
				event.Group = &e.Group
			}
			if t.tokens {
				event.Tokens = e.Tokens
			}
		}
		t.format(out, &event)
	}
	if b.Skipped > 0 {
		line.What, line.Events = "skipped", b.Skipped
		t.format(out, &line)
	}
}

// format appends a line to what is printed.
func (t *tail) format(out *bytes.Buffer, l *tailLine) {
	if t.json {
		_ = json.NewEncoder(out).Encode(l) // a buffer takes everything
		return
	}
	words := []string{time.UnixMicro(int64(l.Time*1e6)).Format("15:04:05.000") + " "}
	add := func(format string, args ...any) { words = append(words, fmt.Sprintf(format, args...)) }
	if t.several {
		add("%s ", l.Source)
	}
	add("%-8s", l.What)
	if l.State != "" {
		add("%s", l.State)
	}
	if l.Seq != nil {
		add("seq=%d", *l.Seq)
	}
	if l.Rank != nil {
		add("rank=%d", *l.Rank)
	}
	if l.Blocks != nil {
		add("blocks=%d", *l.Blocks)
	}
	if l.BlockSize > 0 {
		add("block_size=%d", l.BlockSize)
	}
	if l.Group != nil {
		add("group=%d", *l.Group)
	}
	if l.Medium != "" {
		add("medium=%s", l.Medium)
	}
	if l.Adapter != "" {
		add("adapter=%q", l.Adapter)
	}
	if l.Events > 0 {
		add("events=%d", l.Events)
	}
	if l.Tokens != nil {
		add("tokens=%d", l.Tokens)
	}
	if l.Why != "" {
		add("(%s)", printable(l.Why))
	}
	out.WriteString(strings.TrimRight(strings.Join(words, " "), " ") + "\n")
}

// printable keeps what a peer says from moving the cursor.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}
