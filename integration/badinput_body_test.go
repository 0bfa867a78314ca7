package integration

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const chatCompletions = "/v1/chat/completions"

// modelsIn are the values of the top-level key "model", in order, as a strict parser reads them.
func modelsIn(t *testing.T, body []byte) (models []string) {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(body))
	if _, err := decoder.Token(); err != nil {
		t.Fatal(err)
	}
	for decoder.More() {
		key, err := decoder.Token()
		if err != nil {
			t.Fatal(err)
		}
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			t.Fatal(err)
		}
		if key == "model" {
			models = append(models, string(value))
		}
	}
	return models
}

// A body that cannot be understood goes where it can only go, byte for byte, and the engine says what it thinks of it. Where there is a choice and
// the body does not make it, the client is told.
func TestStrangeBodies(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	idle := g.mark()

	const messages = `"messages":[{"role":"user","content":"hi"}]`
	deep := strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000)
	for _, tc := range []struct {
		name, body string
		several    string // "llama", "qwen", or the code of the error, where there are several routes
		one        string // "llama" unless said
		status     int    // of the error; 400 unless said
	}{
		{name: "not JSON", body: `hello`, several: "invalid_json"},
		{name: "broken before the model", body: `{"messages":[}`, several: "invalid_json"},
		{name: "broken after the model", body: `{"model":"llama","messages":[`, several: "llama"},
		{name: "garbage after the object", body: `{"model":"llama",` + messages + `} trailing`, several: "llama"},
		{name: "a second object", body: `{"model":"llama",` + messages + `}{"model":"qwen"}`, several: "llama"},
		{name: "no model", body: `{` + messages + `}`, several: "missing_model"},
		{name: "model that is null", body: `{"model":null,` + messages + `}`, several: "missing_model"},
		{name: "model that is a number", body: `{"model":7,` + messages + `}`, several: "missing_model"},
		{name: "model that is an object", body: `{"model":{"model":"llama"},` + messages + `}`, several: "missing_model"},
		{name: "model that is empty", body: `{"model":"",` + messages + `}`, several: "model_not_found", one: "model_not_found", status: 404},
		{name: "unknown model", body: chat("gpt-5", "hi"), several: "model_not_found", one: "model_not_found", status: 404},
		{name: "model in other case", body: chat("LLAMA", "hi"), several: "model_not_found", one: "model_not_found", status: 404},
		{name: "model with a blank", body: chat("llama ", "hi"), several: "model_not_found", one: "model_not_found", status: 404},
		{name: "model of a megabyte", body: chat(strings.Repeat("m", 1<<20), "hi"), several: "model_not_found", one: "model_not_found", status: 404},
		{name: "model with an escape", body: `{"model":"ll\u0061ma",` + messages + `}`, several: "llama"},
		{name: "model in a nested object", body: `{"metadata":{"model":"qwen"},"model":"llama",` + messages + `}`, several: "llama"},
		{name: "model behind the messages", body: `{` + messages + `,"model":"llama"}`, several: "llama"},
		{name: "empty body", body: ``, several: "invalid_body"},
		{name: "white space", body: " \n\t ", several: "invalid_json"},
		{name: "null", body: `null`, several: "missing_model"},
		{name: "an array", body: `[]`, several: "missing_model"},
		{name: "an array with an object", body: `[{"model":"llama"}]`, several: "missing_model"},
		{name: "a string", body: `"x"`, several: "missing_model"},
		{name: "a number", body: `123`, several: "missing_model"},
		{name: "more models than anybody means", body: "{" + strings.Repeat(`"model":"llama",`, 100_000) + messages + "}", several: "ambiguous_model", one: "ambiguous_model"},
		{name: "byte order mark", body: "\uFEFF" + chat("llama", "hi"), several: "llama"},
		{name: "UTF-16", body: "\xff\xfe{\x00}\x00", several: "invalid_json"},
		{name: "lone surrogate", body: `{"model":"llama","messages":[{"role":"user","content":"\ud800 and \udc00"}]}`, several: "llama"},
		{name: "invalid UTF-8", body: "{\"model\":\"llama\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\xc0\x80\"}]}", several: "llama"},
		{name: "invalid UTF-8 in the model", body: "{\"model\":\"ll\xffama\"," + messages + "}", several: "model_not_found", one: "model_not_found", status: 404},
		{name: "control characters", body: "{\"model\":\"llama\",\"messages\":[{\"role\":\"user\",\"content\":\"a\x00\x01\nb\"}]}", several: "llama"},
		{name: "prompt of one byte", body: chat("llama", "x"), several: "llama"},
		{name: "prompt of two megabytes", body: chat("llama", strings.Repeat("the same words again, ", 100_000)), several: "llama"},
		{name: "empty prompt", body: chat("llama", ""), several: "llama"},
		{name: "messages that are text", body: `{"model":"llama","messages":"hi"}`, several: "llama"},
		{name: "messages that are null", body: `{"model":"llama","messages":null}`, several: "llama"},
		{name: "100,000 arrays in the messages", body: `{"model":"llama","messages":` + deep + `}`, several: "llama"},
		{name: "100,000 arrays in another field", body: `{"x":` + deep + `,"model":"llama",` + messages + `}`, several: "llama"},
		{name: "100,000 open arrays", body: `{"model":"llama","messages":` + deep[:100_000], several: "llama"},
		{name: "a million commas", body: `{"model":"llama","messages":[` + strings.Repeat(",", 1<<20) + `]}`, several: "llama"},
		{name: "numbers that no float holds", body: `{"model":"llama","temperature":1e99999,"x":-` + strings.Repeat("9", 5000) + `,` + messages + `}`, several: "llama"},
		{name: "Python's NaN", body: `{"model":"llama","temperature":NaN,` + messages + `}`, several: "llama"},
	} {
		for prefix, want := range map[string]string{"/one": tc.one, "/several": tc.several} {
			if want == "" {
				want = "llama"
			}
			t.Run(tc.name+prefix, func(t *testing.T) {
				a := g.postBody(t, prefix+chatCompletions, strings.NewReader(tc.body))
				toLlama, toQwen := llama.take(), qwen.take()
				if len(a.body) > 1000 {
					t.Errorf("an answer of %d bytes", len(a.body))
				}
				if want != "llama" {
					status := tc.status
					if status == 0 {
						status = http.StatusBadRequest
					}
					if code := a.code(t); a.status != status || code != want {
						t.Errorf("%d %s, want %d %s", a.status, a.body, status, want)
					}
					if len(toLlama)+len(toQwen) > 0 {
						t.Error("an engine got the request nevertheless")
					}
					return
				}
				if a.status != http.StatusOK || len(toLlama) != 1 || len(toQwen) != 0 {
					t.Fatalf("%d %s, %d requests to llama, %d to qwen", a.status, a.body, len(toLlama), len(toQwen))
				}
				if got := toLlama[0]; string(got.body) != tc.body || got.length != int64(len(tc.body)) {
					t.Errorf("the engine got %d bytes (Content-Length %d) that are not the client's %d: %.200q", len(got.body), got.length, len(tc.body), got.body)
				}
				if got := a.header.Get("X-Rolter-Target"); got != "llama-1" {
					t.Errorf("X-Rolter-Target %q", got)
				}
			})
		}
	}
	g.settles(idle, 64<<20)
}

// Parsers differ in which of two equal keys they take. Whichever the engine takes, it sees the model that was routed.
func TestDuplicateModelKeys(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	const tail = `"messages":[{"role":"user","content":"hi"}]`
	for _, tc := range []struct {
		name, body string
		to         *engine // nil: nowhere
		upstream   string
	}{
		{"the same twice", `{"model":"llama",` + tail + `,"model":"llama"}`, llama, `"llama"`},
		{"different", `{"model":"qwen",` + tail + `,"model":"llama"}`, llama, `"llama"`},
		{"different, to a target with another name", `{"model":"llama",` + tail + `,"model":"qwen"}`, qwen, `"Qwen/Qwen3-8B"`},
		{"the first unknown", `{"model":"gpt-5",` + tail + `,"model":"qwen"}`, qwen, `"Qwen/Qwen3-8B"`},
		{"the last unknown", `{"model":"qwen",` + tail + `,"model":"gpt-5"}`, nil, ""},
		{"escaped key first", `{"mod\u0065l":"llama",` + tail + `,"model":"qwen"}`, qwen, `"Qwen/Qwen3-8B"`},
		{"escaped key last", `{"model":"qwen",` + tail + `,"mod\u0065l":"llama"}`, llama, `"llama"`},
		{"escaped key only", `{"\u006d\u006f\u0064\u0065\u006C":"qwen",` + tail + `}`, qwen, `"Qwen/Qwen3-8B"`},
		{"a number first", `{"model":7,` + tail + `,"model":"llama"}`, llama, `"llama"`},
		{"an object first", `{"model":{"a":["model"]},` + tail + `,"model":"qwen"}`, qwen, `"Qwen/Qwen3-8B"`},
		{"null last", `{"model":"llama",` + tail + `,"model":null}`, nil, ""},
		{"three", `{"model":"llama","model":"qwen",` + tail + `,"model":"llama","x":1}`, llama, `"llama"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := g.postBody(t, "/several"+chatCompletions, strings.NewReader(tc.body))
			got := map[*engine][]received{llama: llama.take(), qwen: qwen.take()}
			if tc.to == nil {
				if a.code(t); a.status < 400 || len(got[llama])+len(got[qwen]) > 0 {
					t.Errorf("%d %s, want a refusal", a.status, a.body)
				}
				return
			}
			if a.status != http.StatusOK || len(got[llama])+len(got[qwen]) != 1 || len(got[tc.to]) != 1 {
				t.Fatalf("%d %s; llama got %d, qwen got %d", a.status, a.body, len(got[llama]), len(got[qwen]))
			}
			for _, model := range modelsIn(t, got[tc.to][0].body) {
				if model != tc.upstream {
					t.Errorf("the engine may read the model %s, want %s: %s", model, tc.upstream, got[tc.to][0].body)
				}
			}
		})
	}
}

// The Content-Type is a hint of the client's: a body that can be read is read, whatever it is called, and passes with the name that it has.
func TestContentTypes(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	for _, tc := range []struct {
		contentType, body, code string // the code of the error where there are several routes, or "" when it is routed
	}{
		{"text/plain", chat("llama", "hi"), ""},
		{"text/plain", "hello", "invalid_body"},
		{"application/json; charset=utf-8", chat("llama", "hi"), ""},
		{"application/vnd.api+json", chat("llama", "hi"), ""},
		{"multipart/form-data; boundary=x", "--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nllama\r\n--x--\r\n", "invalid_body"},
		{"", chat("llama", "hi"), ""},
		{"nonsense; ===", chat("llama", "hi"), ""},
		{"application/x-www-form-urlencoded", "model=llama", "invalid_body"},
	} {
		t.Run(tc.contentType+"/"+tc.code, func(t *testing.T) {
			for _, prefix := range []string{"/one", "/several"} {
				a := g.postBody(t, prefix+chatCompletions, strings.NewReader(tc.body), "Content-Type", tc.contentType)
				got := llama.take()
				if prefix == "/several" && tc.code != "" {
					if code := a.code(t); a.status != http.StatusBadRequest || code != tc.code || len(got) != 0 {
						t.Errorf("%s: %d %s, want 400 %s", prefix, a.status, a.body, tc.code)
					}
					continue
				}
				if a.status != http.StatusOK || len(got) != 1 || string(got[0].body) != tc.body {
					t.Fatalf("%s: %d %s, the engine got %v", prefix, a.status, a.body, got)
				}
				if sent := got[0].header.Get("Content-Type"); sent != tc.contentType {
					t.Errorf("%s: the engine got Content-Type %q", prefix, sent)
				}
			}
		})
	}
}

// What a client calls a model is said back to it, and to nobody else in a form that does harm.
func TestHostileModelNames(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, "header X-Model {http.rolter.model}\n"+twoWays(llama, qwen))
	var before int
	for i, name := range []string{
		"a\x00b", "a\r\nX-Evil: 1", "a\nb", "\x1b[31mred", "</script><script>", `"},"x":{"`, "\u2028\u202e", "{env.HOME}", "{http.request.host}", "llama\x00", "%6clama",
		strings.Repeat("é", 150_000),
	} {
		body, err := json.Marshal(map[string]any{"model": name, "messages": []any{}})
		if err != nil {
			t.Fatal(err)
		}
		raw := []byte("{\"model\":\"" + strings.NewReplacer(`"`, `\"`, `\`, `\\`).Replace(name) + "\"}")
		for _, b := range [][]byte{body, raw} {
			for _, prefix := range []string{"/one", "/several"} {
				a := g.postBody(t, prefix+chatCompletions, bytes.NewReader(b))
				if code := a.code(t); a.status != http.StatusNotFound || code != "model_not_found" {
					t.Errorf("name %d: %d %s", i, a.status, a.body)
				}
				if len(a.body) > 2000 {
					t.Errorf("name %d: an answer of %d bytes", i, len(a.body))
				}
				if a.header.Get("X-Evil") != "" || strings.Contains(string(a.body), os.Getenv("HOME")+"\"") && os.Getenv("HOME") != "" {
					t.Errorf("name %d: injected: %v %s", i, a.header, a.body)
				}
			}
		}
		if i == 0 {
			before = len(g.metrics()) // counters of refusals and of causes are there now
		}
		// The same in the path of the list of models.
		req, err := http.NewRequest(http.MethodGet, g.URL+"/several/v1/models/x", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.URL.Path = "/several/v1/models/" + name[:min(len(name), 2000)]
		a, err := roundTrip(http.DefaultClient, req)
		if err != nil {
			t.Fatal(err)
		}
		if code := a.code(t); a.status != http.StatusNotFound || code != "model_not_found" {
			t.Errorf("name %d in the path: %d %s", i, a.status, a.body)
		}
	}
	if got := llama.take(); len(got) != 0 {
		t.Errorf("an engine got %d requests", len(got))
	}
	samples := g.metrics()
	if after := len(samples); after > before+2 { // two more causes of no prompt may have come
		t.Errorf("hostile names made series: %d, before %d", after, before)
	}
	checkLabels(t, samples)
	for line := range strings.Lines(g.log.String()) {
		if !json.Valid([]byte(line)) && strings.Contains(line, "X-Evil") {
			t.Errorf("a name broke the log: %q", line)
		}
	}
}

func gzipped(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Engines refuse compressed bodies, so gzip is undone, within the limit. What else there is goes by load, as it came.
func TestCompressedBodies(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	idle := g.mark()
	plain := []byte(chat("llama", strings.Repeat("compressible ", 1000)))
	packed := gzipped(t, plain)
	bomb := gzipped(t, append([]byte(`{"model":"llama","messages":[],"x":"`), make([]byte, 40<<20)...))
	flipped := bytes.Clone(packed)
	flipped[len(flipped)-6] ^= 0xFF // in the checksum

	for _, tc := range []struct {
		name, encoding string
		body           []byte
		status         int
		code           string // of the error
		got            []byte // what the engine gets
		kept           string // the encoding that the engine is told
	}{
		{"gzip", "gzip", packed, 200, "", plain, ""},
		{"x-gzip", "x-gzip", packed, 200, "", plain, ""},
		{"upper case", "GZIP", packed, 200, "", plain, ""},
		{"two members", "gzip", append(gzipped(t, plain[:40]), gzipped(t, plain[40:])...), 200, "", plain, ""},
		{"identity", "identity", plain, 200, "", plain, "identity"},
		{"bomb", "gzip", bomb, 413, "request_too_large", nil, ""},
		{"not gzip", "gzip", plain, 400, "invalid_encoding", nil, ""},
		{"nothing", "gzip", nil, 400, "invalid_encoding", nil, ""},
		{"cut off", "gzip", packed[:len(packed)/2], 400, "invalid_encoding", nil, ""},
		{"wrong checksum", "gzip", flipped, 400, "invalid_encoding", nil, ""},
		{"garbage behind", "gzip", append(bytes.Clone(packed), "garbage"...), 400, "invalid_encoding", nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := g.postBody(t, "/several"+chatCompletions, bytes.NewReader(tc.body), "Content-Encoding", tc.encoding)
			got := llama.take()
			if a.status != tc.status {
				t.Fatalf("%d %s, want %d", a.status, a.body, tc.status)
			}
			if tc.status != http.StatusOK {
				if code := a.code(t); code != tc.code || len(got) != 0 {
					t.Errorf("%s, want %s; %d requests to the engine", code, tc.code, len(got))
				}
				return
			}
			if len(got) != 1 || !bytes.Equal(got[0].body, tc.got) || got[0].length != int64(len(tc.got)) || got[0].header.Get("Content-Encoding") != tc.kept {
				t.Errorf("the engine did not get the plain body: %v", got)
			}
		})
	}
	for _, encoding := range []string{"br", "zstd", "deflate", "gzip, gzip", "nonsense"} {
		t.Run("unknown "+encoding, func(t *testing.T) {
			body := []byte("\x00\x01 not for us")
			a := g.postBody(t, "/one"+chatCompletions, bytes.NewReader(body), "Content-Encoding", encoding)
			got := llama.take()
			if a.status != http.StatusOK || len(got) != 1 || !bytes.Equal(got[0].body, body) || got[0].header.Get("Content-Encoding") != encoding {
				t.Errorf("%d %s, the engine got %v", a.status, a.body, got)
			}
			a = g.postBody(t, "/several"+chatCompletions, bytes.NewReader(body), "Content-Encoding", encoding)
			if a.code(t); a.status < 400 || a.status >= 500 || len(llama.take()) != 0 {
				t.Errorf("where there is a choice: %d %s", a.status, a.body)
			}
		})
	}
	g.settles(idle, 48<<20)
}

// countingReader counts what was taken from it.
type countingReader struct {
	io.Reader
	n int64
}

func (r *countingReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.n += int64(n)
	return n, err
}

// bigBody is a request of this size, made up as it is read.
func bigBody(size int64) io.Reader {
	head := `{"model":"llama","messages":[{"role":"user","content":"`
	return io.MultiReader(strings.NewReader(head), io.LimitReader(repeating('a'), size-int64(len(head))-4), strings.NewReader(`"}]}`))
}

type repeating byte

func (b repeating) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(b)
	}
	return len(p), nil
}

// A body above max_body (32 MiB by default) is 413, and the client gets to read that, however it sends.
func TestBodyTooLarge(t *testing.T) {
	llama, qwen := startEngine(t, "llama-1"), startEngine(t, "qwen-1")
	g := startGateway(t, twoWays(llama, qwen))
	idle := g.mark()
	const size = 50_000_000
	url := g.URL + "/several" + chatCompletions

	tooLarge := func(t *testing.T, a answer) {
		t.Helper()
		if code := a.code(t); a.status != http.StatusRequestEntityTooLarge || code != "request_too_large" {
			t.Errorf("%d %s, want 413", a.status, a.body)
		}
		if got := len(llama.take()); got != 0 {
			t.Errorf("the engine got %d requests", got)
		}
	}
	for _, tc := range []struct {
		name            string
		chunked, expect bool
	}{{"with its length", false, false}, {"chunked", true, false}, {"asking first", false, true}} {
		t.Run("Go/"+tc.name, func(t *testing.T) {
			body := &countingReader{Reader: bigBody(size)}
			req, err := http.NewRequest(http.MethodPost, url, body)
			if err != nil {
				t.Fatal(err)
			}
			req.ContentLength = size
			if tc.chunked {
				req.ContentLength = -1
			}
			transport := http.DefaultTransport.(*http.Transport).Clone()
			defer transport.CloseIdleConnections()
			if tc.expect {
				req.Header.Set("Expect", "100-continue")
				transport.ExpectContinueTimeout = 10 * time.Second // much longer than an answer takes
			}
			a, err := roundTrip(&http.Client{Transport: transport}, req)
			if err != nil {
				t.Fatal(err)
			}
			tooLarge(t, a)
			if tc.expect && body.n > 1<<20 {
				t.Errorf("the client was not told before it had sent %d bytes", body.n)
			}
		})
	}

	t.Run("just below", func(t *testing.T) {
		const limit = 32 << 20
		for _, size := range []int64{limit, limit + 1} {
			req, err := http.NewRequest(http.MethodPost, url, bigBody(size))
			if err != nil {
				t.Fatal(err)
			}
			a, err := roundTrip(http.DefaultClient, req)
			if err != nil {
				t.Fatal(err)
			}
			if size > limit {
				tooLarge(t, a)
				continue
			}
			if got := llama.take(); a.status != http.StatusOK || len(got) != 1 || int64(len(got[0].body)) != size {
				t.Errorf("a body of exactly the limit: %d %s", a.status, a.body)
			}
		}
	})

	file := filepath.Join(t.TempDir(), "body.json")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(f, bigBody(size)); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	curl := []string{"-sS", "-X", "POST", "-H", "Content-Type: application/json", "-w", "\n%{http_code}", url}
	python := `
import http.client, sys
conn = http.client.HTTPConnection(sys.argv[1])
body = open(sys.argv[3], "rb")
kwargs = {"encode_chunked": True} if sys.argv[4] == "chunked" else {}
headers = {"Content-Type": "application/json"}
headers.update({"Transfer-Encoding": "chunked"} if kwargs else {"Content-Length": "50000000"})
conn.request("POST", sys.argv[2], body=body, headers=headers, **kwargs)
resp = conn.getresponse()
sys.stdout.write(resp.read().decode() + "\n" + str(resp.status))
`
	for name, command := range map[string][]string{
		"curl":                append([]string{"curl", "--data-binary", "@" + file}, curl...),
		"curl without asking": append([]string{"curl", "-H", "Expect:", "--data-binary", "@" + file}, curl...),
		"curl chunked":        append([]string{"curl", "-H", "Transfer-Encoding: chunked", "-T", file}, curl...),
		"python":              {"python3", "-c", python, g.Addr, "/several" + chatCompletions, file, "plain"},
		"python chunked":      {"python3", "-c", python, g.Addr, "/several" + chatCompletions, file, "chunked"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := exec.LookPath(command[0]); err != nil {
				t.Skip(err)
			}
			var stderr bytes.Buffer
			cmd := exec.Command(command[0], command[1:]...)
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v\n%s\n%s", err, stderr.String(), out)
			}
			if text := strings.TrimSpace(string(out)); !strings.HasSuffix(text, "\n413") || !strings.Contains(text, "request_too_large") {
				t.Errorf("%s\n%s", out, stderr.String())
			}
			if got := len(llama.take()); got != 0 {
				t.Errorf("the engine got %d requests", got)
			}
		})
	}
	// The record of the one prompt that was served may stay.
	g.settles(idle, 64<<20)
}

// A limit of the operator's own.
func TestMaxBody(t *testing.T) {
	llama := startEngine(t, "llama-1")
	g := startGateway(t, fmt.Sprintf(`
	request_body /small/* {
		max_size 500
	}
	rolter {
		max_body 1000
		provider llama-1 %s
		route llama {
			target llama-1
		}
	}`, llama.URL))
	for _, tc := range []struct {
		path   string
		size   int64
		status int
	}{
		{chatCompletions, 1000, 200}, {chatCompletions, 1001, 413}, {"/small" + chatCompletions, 500, 200}, {"/small" + chatCompletions, 501, 413},
	} {
		for _, length := range []int64{tc.size, -1} {
			req, err := http.NewRequest(http.MethodPost, g.URL+tc.path, bigBody(tc.size))
			if err != nil {
				t.Fatal(err)
			}
			req.ContentLength = length
			a, err := roundTrip(http.DefaultClient, req)
			if err != nil {
				t.Fatal(err)
			}
			if a.status != tc.status {
				t.Errorf("%s, %d bytes, Content-Length %d: %d %s, want %d", tc.path, tc.size, length, a.status, a.body, tc.status)
			}
		}
	}
}
