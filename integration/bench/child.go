package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime/metrics"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/rolter-ai/caddy-rolter"
)

// roleVar is the environment variable that makes this program one of the processes that are measured.
const roleVar = "ROLTER_BENCH_ROLE"

// runChild plays the role that the environment asks for, until the process that started this one closes standard input or dies.
func runChild() bool {
	role := os.Getenv(roleVar)
	if role == "" {
		return false
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	var err error
	switch role {
	case "caddy":
		caddycmd.Main()
	case "replicas":
		err = serveReplicas(os.Args[1])
	default:
		err = serveUpstreams()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

// process is a running child.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
	log   string // file with what it wrote to standard error
	done  chan struct{}
}

// startChild starts this program again in a role. The directory is the child's home. stdout may be nil.
func startChild(role, dir string, stdout io.Writer, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	log, err := os.CreateTemp(dir, role+"-*.log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &process{cmd: exec.Command(self, args...), log: log.Name(), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), roleVar+"="+role, "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	p.cmd.Stdout, p.cmd.Stderr = stdout, log
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// wait waits until ready says so.
func (p *process) wait(ctx context.Context, ready func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for !ready() {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		case <-p.done:
			log, _ := os.ReadFile(p.log)
			return fmt.Errorf("it ended: %s", log)
		}
	}
	return nil
}

// cpu is the CPU time that the process has used, once it has ended.
func (p *process) cpu() time.Duration {
	return p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
}

// stop ends the process.
func (p *process) stop() {
	_ = p.stdin.Close()
	select {
	case <-p.done:
	case <-time.After(5 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// A streamed answer has this many events, which are sent at this distance.
const (
	streamEvents = 100
	streamPace   = 2 * time.Millisecond
)

// upstreams is how many addresses serve the model.
const upstreams = 4

// serveUpstreams serves the upstreams that answer at once.
func serveUpstreams() error {
	return serveAll(slices.Repeat([]http.Handler{http.HandlerFunc(answer)}, upstreams))
}

// serveAll serves each handler at an address of its own and prints the addresses as one line of JSON.
func serveAll(handlers []http.Handler) error {
	var addresses []string
	failed := make(chan error)
	for _, h := range handlers {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		addresses = append(addresses, l.Addr().String())
		go func() { failed <- http.Serve(l, h) }()
	}
	if err := json.NewEncoder(os.Stdout).Encode(addresses); err != nil {
		return err
	}
	return <-failed
}

var bodies = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// answer answers as an engine does, at once and without a look at the prompt.
func answer(w http.ResponseWriter, r *http.Request) {
	body := bodies.Get().(*bytes.Buffer)
	defer bodies.Put(body)
	body.Reset()
	if _, err := body.ReadFrom(r.Body); err != nil {
		return
	}
	if !bytes.HasSuffix(body.Bytes(), []byte(`"stream":true}`)) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":"Certainly."},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	flusher := w.(http.Flusher)
	start := time.Now()
	for i := range streamEvents {
		time.Sleep(time.Until(start.Add(time.Duration(i) * streamPace)))
		// The time of sending is in the event, for the client to see how long it was under way.
		_, err := fmt.Fprintf(w, "data: {\"sent\":%d,\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}]}\n\n", time.Now().UnixNano())
		if err != nil {
			return
		}
		flusher.Flush()
	}
}

func init() { caddy.RegisterModule(usageAPI{}) }

// usageAPI shows at Caddy's admin endpoint what the process has used. All variants have it.
type usageAPI struct{}

// CaddyModule returns the Caddy module information.
func (usageAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.bench", New: func() caddy.Module { return new(usageAPI) }}
}

// Routes implements [caddy.AdminRouter].
func (usageAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{
		{Pattern: "/bench/cpu", Handler: caddy.AdminHandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			total, err := cpuTime()
			if err != nil {
				return err
			}
			return json.NewEncoder(w).Encode(cpuUsage{total, gcTime()})
		})},
		{Pattern: "/bench/memory", Handler: caddy.AdminHandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			return json.NewEncoder(w).Encode(readMemory())
		})},
	}
}

// cpuUsage is the CPU time that a process has used.
type cpuUsage struct {
	Total time.Duration // user and system time
	GC    time.Duration // what of it garbage collection took, as Go's runtime estimates it
}

func gcTime() time.Duration {
	sample := []metrics.Sample{{Name: "/cpu/classes/gc/total:cpu-seconds"}}
	metrics.Read(sample)
	return time.Duration(sample[0].Value.Float64() * float64(time.Second))
}

var _ caddy.AdminRouter = (*usageAPI)(nil)
