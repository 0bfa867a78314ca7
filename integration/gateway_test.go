package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	// The binary under test is made of it: without the import, Go would take earlier results for those of a plugin that has changed since.
	_ "github.com/rolter-ai/caddy-rolter"
)

var (
	binaryDir  string
	buildOnce  sync.Once
	binaryPath string
	errBuild   error
)

func TestMain(m *testing.M) {
	var err error
	if binaryDir, err = os.MkdirTemp("", "rolter-test-"); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(binaryDir)
	os.Exit(code)
}

// binary builds a Caddy with Rolter, once, with the race detector when the tests run with it. ROLTER_BINARY names another one to test, such as one
// that xcaddy built.
func binary(t testing.TB) string {
	t.Helper()
	buildOnce.Do(func() {
		if binaryPath = os.Getenv("ROLTER_BINARY"); binaryPath != "" {
			return
		}
		binaryPath = filepath.Join(binaryDir, "rolter")
		args := []string{"build", "-o", binaryPath}
		if raceEnabled {
			args = append(args, "-race")
		}
		out, err := exec.Command("go", append(args, "../cmd/rolter")...).CombinedOutput()
		if err != nil {
			errBuild = fmt.Errorf("%w\n%s", err, out)
		}
	})
	if errBuild != nil {
		t.Fatalf("building cmd/rolter: %v", errBuild)
	}
	return binaryPath
}

// gateway is a Caddy process with Rolter built in.
type gateway struct {
	t     testing.TB
	URL   string // of the first site
	Addr  string // host:port of the first site
	Admin string // URL of the admin endpoint
	cmd   *exec.Cmd
	log   *logBuffer
	done  chan struct{}
}

// logBuffer collects what the process logs.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// freeAddr is a loopback address on which nothing listens. Its port is not one that a system gives to whoever asks for any: of those, tests in other
// processes would take some before it is used.
func freeAddr(t testing.TB) string {
	t.Helper()
	for range 100 {
		address := fmt.Sprintf("127.0.0.1:%d", 10_000+rand.N(20_000))
		if l, err := net.Listen("tcp", address); err == nil {
			_ = l.Close()
			return address
		}
	}
	t.Fatal("no port is free")
	return ""
}

// startGateway runs Caddy with one plain-HTTP site whose body is given, and waits until it serves. The process must end cleanly, and without a
// report of the race detector, when the test is over.
func startGateway(t testing.TB, site string) *gateway {
	t.Helper()
	g := &gateway{t: t, Addr: freeAddr(t), log: new(logBuffer), done: make(chan struct{})}
	g.URL = "http://" + g.Addr
	g.Admin = "http://" + freeAddr(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(g.caddyfile(site)), 0o600); err != nil {
		t.Fatal(err)
	}
	g.cmd = exec.Command(binary(t), "run", "--config", file, "--adapter", "caddyfile")
	// The race detector lets a process that exits sleep for a second, for other threads to report. Ours has stopped everything by then.
	g.cmd.Env = append([]string{"GORACE=atexit_sleep_ms=50"}, os.Environ()...)
	g.cmd.Env = append(g.cmd.Env, "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	g.cmd.Stdout, g.cmd.Stderr = g.log, g.log
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = g.cmd.Wait()
		close(g.done)
	}()
	t.Cleanup(g.stop)
	g.waitFor("the admin endpoint and the site", func() bool {
		select {
		case <-g.done:
			t.Fatalf("caddy ended:\n%s", g.log)
		default:
		}
		if c, err := net.Dial("tcp", g.Addr); err != nil {
			return false
		} else {
			_ = c.Close()
		}
		resp, err := http.Get(g.Admin + "/config/")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return g
}

// caddyfile is a whole Caddyfile around the body of the site.
func (g *gateway) caddyfile(site string) string {
	return fmt.Sprintf("{\n\tadmin %s\n\tpersist_config off\n\tauto_https off\n\tdebug\n}\nhttp://%s {\n%s\n}\n", strings.TrimPrefix(g.Admin, "http://"), g.Addr, site)
}

// load replaces the configuration by another body of the site; the error is what the admin endpoint says.
func (g *gateway) load(site string) error {
	_, err := g.admin(http.MethodPost, "/load", "text/caddyfile", g.caddyfile(site))
	return err
}

// admin calls the admin endpoint; statuses from 400 are errors. After a change of the configuration it returns when only the new one is served.
func (g *gateway) admin(method, path, contentType, body string) (string, error) {
	resp, err := persistently(func() (*http.Response, error) {
		req := newRequest(context.Background(), method, g.Admin+path, strings.NewReader(body))
		if contentType != "" {
			req.Header.Set("Content-Type", contentType)
		}
		return http.DefaultClient.Do(req)
	})
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	if method != http.MethodGet {
		g.replaced()
	}
	if resp.StatusCode >= 400 {
		return "", fmt.Errorf("%s %s: %d %s", method, path, resp.StatusCode, answer)
	}
	return string(answer), nil
}

// replaced waits until the listeners of an earlier configuration are closed, which Caddy does a moment after it has answered: connections that they
// have not accepted by then are reset. Where the system does not tell how many there are, it does not wait.
func (g *gateway) replaced() {
	g.t.Helper()
	http.DefaultClient.CloseIdleConnections()
	testClient.CloseIdleConnections()
	for _, url := range []string{g.URL, g.Admin} {
		port := url[strings.LastIndex(url, ":")+1:]
		g.waitFor("the old listener on port "+port+" to be closed", func() bool { return listeners(port) < 2 })
	}
}

// listeners counts the sockets that listen on a port over IPv4; 0 may mean that the system does not tell.
func listeners(port string) int {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		panic(err)
	}
	table, _ := os.ReadFile("/proc/net/tcp") // of Linux; 0A says that a socket listens
	return strings.Count(string(table), fmt.Sprintf(":%04X 00000000:0000 0A ", n))
}

// state is what GET /rolter/state tells.
type state struct {
	Loads []struct {
		Address  string `json:"address"`
		InFlight int    `json:"requests_in_flight"`
	} `json:"loads"`
	Records []struct {
		Model    string `json:"model"`
		Bytes    int64  `json:"bytes"`
		Replicas []struct {
			Address string `json:"address"`
			Model   string `json:"upstream_model"`
			Prompts int    `json:"prompts"`
		} `json:"replicas"`
	} `json:"records"`
}

func (g *gateway) state() (s state) {
	g.t.Helper()
	g.readState(&s)
	return s
}

// readState reads of GET /rolter/state what into has fields for.
func (g *gateway) readState(into any) {
	g.t.Helper()
	answer, err := g.admin(http.MethodGet, "/rolter/state", "", "")
	if err != nil {
		g.t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(answer), into); err != nil {
		g.t.Fatal(err)
	}
}

// inFlight is the sum of all reservations.
func (s state) inFlight() (n int) {
	for _, l := range s.Loads {
		n += l.InFlight
	}
	return n
}

// prompts is how many prompts are recorded, by address, over all routes.
func (s state) prompts() map[string]int {
	n := make(map[string]int)
	for _, rec := range s.Records {
		for _, replica := range rec.Replicas {
			n[replica.Address] += replica.Prompts
		}
	}
	return n
}

// waitFor waits until a condition holds.
func (g *gateway) waitFor(what string, holds func() bool) {
	g.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			g.t.Fatalf("waited 30 s for %s; log:\n%s", what, tail(g.log.String(), 8000))
		}
	}
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

// stop ends the process and checks how it ended.
func (g *gateway) stop() {
	_ = g.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-g.done:
	case <-time.After(20 * time.Second):
		_ = g.cmd.Process.Kill()
		<-g.done
		g.t.Errorf("caddy did not stop in 20 s:\n%s", tail(g.log.String(), 4000))
	}
	if log := g.log.String(); strings.Contains(log, "DATA RACE") || strings.Contains(log, "panic:") || strings.Contains(log, "strategy panicked") {
		g.t.Errorf("caddy reported a race or a panic:\n%s", tail(log, 16000))
	}
}
