package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

// TestMain lets the test binary be the command itself, so that signals, exit codes and output are the real ones.
func TestMain(m *testing.M) {
	if os.Getenv("ROLTER_TEST_RUN_MAIN") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// command is rolter with the given arguments and a home directory that must stay empty.
func command(t *testing.T, args ...string) *exec.Cmd {
	home := t.TempDir()
	t.Cleanup(func() {
		if entries, err := os.ReadDir(home); err != nil || len(entries) > 0 {
			t.Errorf("the home directory is not untouched: %v, %v", entries, err)
		}
	})
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), "ROLTER_TEST_RUN_MAIN=1", "HOME="+home, "XDG_CONFIG_HOME="+home, "XDG_DATA_HOME="+home)
	return cmd
}

// compare runs the demo to its end and returns its report and what it said on standard error.
func compare(t *testing.T, args ...string) (report, string) {
	t.Helper()
	cmd := command(t, append([]string{"demo", "--once", "--json", "--listen", "127.0.0.1:0"}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, stderr.Bytes())
	}
	var r report
	dec := json.NewDecoder(&stdout)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		t.Fatalf("standard output is not the report: %v", err)
	}
	if rest, _ := io.ReadAll(dec.Buffered()); len(bytes.TrimSpace(rest)) > 0 {
		t.Errorf("standard output has more than the report: %s", rest)
	}
	if strings.Contains(stderr.String(), "\r") {
		t.Error("standard error is no terminal, but lines are written over")
	}
	if len(r.Runs) != 2 || r.Runs[0].Strategy != "round_robin" || r.Runs[1].Strategy != "cache_aware" {
		t.Fatalf("runs %+v, want round_robin and cache_aware", r.Runs)
	}
	for _, run := range r.Runs {
		served := 0
		for _, n := range run.ByReplica {
			served += n
		}
		if run.Errors != 0 || run.Requests == 0 || served != run.Requests || run.Requests != r.Runs[0].Requests {
			t.Errorf("%+v: want the same requests in both runs, all served", run)
		}
		if run.PromptTokens <= run.CachedTokens || run.FirstToken.Mean <= 0 || run.FirstToken.P95 < run.FirstToken.P50 {
			t.Errorf("%+v: figures that cannot be", run)
		}
	}
	return r, stderr.String()
}

func TestDemoComparesStrategies(t *testing.T) {
	r, stderr := compare(t, "--conversations", "12", "--pace", "0.2")
	if baseline, ours := r.Runs[0].CachedShare(), r.Runs[1].CachedShare(); ours <= baseline {
		t.Errorf("cached share %.3f with cache_aware, %.3f with round_robin: want more", ours, baseline)
	}
	for _, want := range []string{"strategy cache_aware", "curl -i http://127.0.0.1:", "round_robin: ", "cache_aware: "} {
		if !strings.Contains(stderr, want) {
			t.Errorf("standard error has no %q:\n%s", want, stderr)
		}
	}
	for _, name := range []string{"vllm-1", "vllm-2", "vllm-3"} {
		if r.Runs[0].ByReplica[name] == 0 {
			t.Errorf("round_robin served nothing from %s: %v", name, r.Runs[0].ByReplica)
		}
	}
}

func TestDemoWithOwnReplicas(t *testing.T) {
	var urls []string
	for range 2 {
		r := replica.New(replica.Config{Model: "org/some model", NoPromptTokensDetails: true, TimeScale: 20})
		if err := r.Start("127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.Close() })
		urls = append(urls, r.URL()+"/v1/")
	}
	r, stderr := compare(t, "--conversations", "3", "--pace", "0", "--real", strings.Join(urls, ","))
	if r.Runs[0].CachedTokens != 0 || !strings.Contains(stderr, "--enable-prompt-tokens-details") {
		t.Errorf("no word about replicas that do not report cached tokens:\n%s", stderr)
	}
}

// output collects what a process writes, and closes seen when it contains want.
type output struct {
	want string
	seen chan struct{}

	mu   sync.Mutex
	text strings.Builder
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before := strings.Contains(o.text.String(), o.want)
	o.text.Write(p)
	if !before && strings.Contains(o.text.String(), o.want) {
		close(o.seen)
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// startUntil starts cmd and returns when out has seen what it waits for. The function it returns sends an interrupt and returns
// the exit code.
func startUntil(t *testing.T, cmd *exec.Cmd, out *output) (interrupt func() int) {
	t.Helper()
	out.seen = make(chan struct{})
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-out.seen:
	case err := <-ended:
		t.Fatalf("ended too early: %v\n%s", err, out)
	}
	return func() int {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Skip("no interrupts here: ", err)
		}
		<-ended
		return cmd.ProcessState.ExitCode()
	}
}

func TestDemoInterruptedWhilePlaying(t *testing.T) {
	cmd := command(t, "demo", "--listen", "127.0.0.1:0")
	out := &output{want: "round_robin: "}
	cmd.Stderr = out
	interrupt := startUntil(t, cmd, out)
	if code := interrupt(); code != exitInterrupted {
		t.Errorf("exit code %d, want %d", code, exitInterrupted)
	}
	if !strings.Contains(out.String(), "Interrupted during round_robin, after ") || strings.Contains(out.String(), "goroutine ") {
		t.Errorf("standard error: %s", out)
	}
}

func TestDemoIdle(t *testing.T) {
	cmd := command(t, "demo", "--idle", "--listen", "127.0.0.1:0")
	out := &output{want: "Ctrl-C ends it."}
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	interrupt := startUntil(t, cmd, out)

	t.Run("the printed Caddyfile is what is loaded", func(t *testing.T) {
		_, printed, _ := strings.Cut(out.String(), "The Caddyfile:\n\n")
		printed, _, _ = strings.Cut(printed, "\nTry it:")
		adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(printed), nil)
		if err != nil {
			t.Fatalf("%v\n%s", err, printed)
		}
		admin := regexp.MustCompile(`admin (\S+)`).FindStringSubmatch(printed)
		resp, err := http.Get("http://" + admin[1] + "/config/")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var got, want any
		if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(adapted, &want); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("loaded %v\nprinted %v", got, want)
		}
	})
	t.Run("the curl line works", func(t *testing.T) {
		line := regexp.MustCompile(`(?m)^curl .*$`).FindString(out.String())
		if _, err := exec.LookPath("curl"); err != nil {
			t.Skip(err)
		}
		answer, err := exec.CommandContext(t.Context(), "sh", "-c", line).Output()
		if err != nil || !bytes.Contains(answer, []byte(" 200 OK")) || !bytes.Contains(bytes.ToLower(answer), []byte("x-rolter-target: vllm-")) {
			t.Errorf("%s: %v\n%s", line, err, answer)
		}
	})
	if code := interrupt(); code != 0 {
		t.Errorf("exit code %d after Ctrl-C, want 0", code)
	}
}

func TestTakenPorts(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()

	var note string
	l, err := listenFrom("127.0.0.1", portOf(taken), func(format string, args ...any) { note = fmt.Sprintf(format, args...) })
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if want := fmt.Sprintf("Port %d is taken, using %d.", portOf(taken), portOf(l)); portOf(l) <= portOf(taken) || note != want {
		t.Errorf("port %d and note %q, want a later port and %q", portOf(l), note, want)
	}

	out, err := command(t, "demo", "--once", "--listen", taken.Addr().String()).CombinedOutput()
	if err == nil || !bytes.Contains(out, []byte("cannot listen on "+taken.Addr().String())) {
		t.Errorf("demo on a taken port: %v\n%s", err, out)
	}
}

func TestBadArguments(t *testing.T) {
	for want, args := range map[string][]string{
		"--conversations 0: must be at least 1":            {"demo", "--conversations", "0"},
		"--pace NaN: must be from 0 to 1000":               {"demo", "--pace", "NaN"},
		"[idle once] were all set":                         {"demo", "--idle", "--once"},
		"--real http://127.0.0.1:1":                        {"demo", "--real", "http://127.0.0.1:1"},
		`--strategy "magic": unknown`:                      {"replay", "--strategy", "magic"},
		"prefill rate -1: must be tokens per second":       {"replica", "--prefill-rate", "-1"},
		"accepts at most 1 arg(s), received 2":             {"replay", "a", "b"},
		`unknown command "elsewhere" for "rolter replica"`: {"replica", "elsewhere"},
		"cannot listen on nowhere: ":                       {"demo", "--listen", "nowhere"},
	} {
		out, err := command(t, args...).CombinedOutput()
		if err == nil || !bytes.Contains(out, []byte(want)) || bytes.Contains(out, []byte("goroutine ")) {
			t.Errorf("%v: %v, want an error with %q\n%s", args, err, want, out)
		}
	}
}
