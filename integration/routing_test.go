package integration

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"testing"
)

// The model name is the only thing in a body that may change on its way: engines read fields that we do not know, tool schemas are order
// sensitive, and caches are keyed by bytes.
func TestBodyGoesUpstreamByteForByte(t *testing.T) {
	stubs := newStubs(t, 1, nil)
	g := startGateway(t, rolterFor(stubs, `
		route plain {
			target a
		}
		route named {
			target a org/Model-7B
		}
		route quoted {
			target a "say \"hi\"\up"
		}`))

	for _, c := range []struct {
		name, path, body, want string // want is body where it is empty
	}{
		{name: "chat", path: chatPath,
			body: `{"model":"named","messages":[{"role":"user","content":"hi"}]}`,
			want: `{"model":"org/Model-7B","messages":[{"role":"user","content":"hi"}]}`},
		{name: "completions", path: textPath,
			body: `{"prompt":"hi","model":"named"}`,
			want: `{"prompt":"hi","model":"org/Model-7B"}`},
		{name: "messages", path: "/v1/messages",
			body: `{"model":"named","max_tokens":5,"system":"s","messages":[{"role":"user","content":"hi"}]}`,
			want: `{"model":"org/Model-7B","max_tokens":5,"system":"s","messages":[{"role":"user","content":"hi"}]}`},
		{name: "responses", path: "/v1/responses",
			body: `{"model":"named","instructions":"s","input":"hi"}`,
			want: `{"model":"org/Model-7B","instructions":"s","input":"hi"}`},
		{name: "embeddings", path: "/v1/embeddings",
			body: `{"input":["a","b"],"model":"named"}`,
			want: `{"input":["a","b"],"model":"org/Model-7B"}`},
		{name: "behind a prefix", path: "/team/blue/v1/chat/completions",
			body: `{"model":"named","messages":[]}`,
			want: `{"model":"org/Model-7B","messages":[]}`},
		{name: "odd white space", path: chatPath,
			body: "\r\n\t { \"messages\" : [ ] ,\n\n\"model\"\t:\r \"named\"  , \"stream\" : false }\n\n ",
			want: "\r\n\t { \"messages\" : [ ] ,\n\n\"model\"\t:\r \"org/Model-7B\"  , \"stream\" : false }\n\n "},
		{name: "unknown fields, numbers and key order", path: chatPath,
			body: `{"z":1.00,"a":1E+2,"big":123456789012345678901234567890,"model":"named","cache_salt":"x","messages":[{"role":"user","content":"hi","name":"n"}],"tools":[{"b":1,"a":2}],"extra":{"model":"inner"}}`,
			want: `{"z":1.00,"a":1E+2,"big":123456789012345678901234567890,"model":"org/Model-7B","cache_salt":"x","messages":[{"role":"user","content":"hi","name":"n"}],"tools":[{"b":1,"a":2}],"extra":{"model":"inner"}}`},
		{name: "escapes", path: chatPath,
			body: `{"model":"n\u0061med","messages":[{"role":"user","content":"\u00e9\ud83d\ude00\/\u2028<>&é😀"}],"k\u0065y":"\u0000"}`,
			want: `{"model":"org/Model-7B","messages":[{"role":"user","content":"\u00e9\ud83d\ude00\/\u2028<>&é😀"}],"k\u0065y":"\u0000"}`},
		{name: "an escaped key", path: chatPath,
			body: `{"mod\u0065l":"named","messages":[]}`,
			want: `{"mod\u0065l":"org/Model-7B","messages":[]}`},
		{name: "duplicate keys that are not the model", path: chatPath,
			body: `{"temperature":1,"messages":[],"temperature":2,"model":"named","messages":[{"role":"user","content":"hi"}]}`,
			want: `{"temperature":1,"messages":[],"temperature":2,"model":"org/Model-7B","messages":[{"role":"user","content":"hi"}]}`},
		// Whichever of the two the engine reads, it must be the model that was routed.
		{name: "the model twice", path: chatPath,
			body: `{"model":"other","messages":[],"model":"named"}`,
			want: `{"model":"org/Model-7B","messages":[],"model":"org/Model-7B"}`},
		{name: "a name that needs escapes", path: chatPath,
			body: `{"model":"quoted","messages":[]}`,
			want: `{"model":"say \"hi\"\\up","messages":[]}`},
		{name: "the name is kept", path: chatPath,
			body: "{ \"model\" : \"pl\\u0061in\",\"messages\":[],\"x\":[1 , 2]}\n"},
		{name: "invalid UTF-8 in the text", path: chatPath,
			body: "{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}],\"model\":\"plain\"}"},
		{name: "an API that is not known here", path: "/v1/future/api",
			body: `{"x":{"model":"plain"},"model":"named"}`,
			want: `{"x":{"model":"plain"},"model":"org/Model-7B"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := c.want
			if want == "" {
				want = c.body
			}
			for _, chunked := range []bool{false, true} {
				before := stubs[0].count()
				var body io.Reader = strings.NewReader(c.body)
				if chunked {
					body = io.MultiReader(body) // hides the length
				}
				answer, err := do(testClient, newRequest(context.Background(), http.MethodPost, g.URL+c.path, body))
				if err != nil {
					t.Fatal(err)
				}
				if answer.status != http.StatusOK {
					t.Fatalf("status %d: %s", answer.status, answer.body)
				}
				all := stubs[0].received()
				if len(all) != before+1 {
					t.Fatalf("the engine received %d requests, want 1", len(all)-before)
				}
				got := all[before]
				if got.body != want {
					t.Errorf("the engine received\n%q, want\n%q", got.body, want)
				}
				if got.length != int64(len(want)) {
					t.Errorf("Content-Length %d, want %d", got.length, len(want))
				}
				if got.uri != c.path {
					t.Errorf("path %q, want %q", got.uri, c.path)
				}
			}
		})
	}
}

func TestPathPrefixOfProvider(t *testing.T) {
	s := newStub(t, "a", nil)
	var config strings.Builder
	config.WriteString("rolter {\n")
	cases := []struct{ model, base, path, want string }{
		{"bare", "", chatPath, chatPath},
		{"slash", "/", chatPath, chatPath},
		{"prefix", "/gpu/7", chatPath, "/gpu/7/v1/chat/completions"},
		{"prefix-slash", "/gpu/7/", chatPath + "?a=b%20c&d", "/gpu/7/v1/chat/completions?a=b%20c&d"},
		{"v1", "/v1", chatPath, "/v1/chat/completions"},
		{"v1-slash", "/v1/", "/v1/responses", "/v1/responses"},
		{"prefix-v1", "/gpu/v1", "/v1/completions?x", "/gpu/v1/completions?x"},
		{"escaped", "/gpu", "/v1/a%2Fb", "/gpu/v1/a%2Fb"},
	}
	for _, c := range cases {
		fmt.Fprintf(&config, "provider %s http://%s%s\nroute %s {\ntarget %s\n}\n", c.model, s.addr, c.base, c.model, c.model)
	}
	config.WriteString("}\n")
	g := startGateway(t, config.String())
	for i, c := range cases {
		t.Run(c.model, func(t *testing.T) {
			g.served(c.path, asks(c.model, "hi"))
			if got := s.received()[i].uri; got != c.want {
				t.Errorf("%s behind %q went to %s, want %s", c.path, c.base, got, c.want)
			}
		})
	}
}

// The route of a request whose first target fails, in both orders and with and without header operations: each target must see its own key, or
// the client's own authorization, and never another target's key.
func TestKeysOfTargets(t *testing.T) {
	for _, ops := range []struct{ name, block string }{
		{"no operations", ""},
		{"with header_up", "header_up X-Added by-gateway\nheader_up -X-Unwanted"},
	} {
		t.Run(ops.name, func(t *testing.T) {
			stubs := newStubs(t, 3, nil)
			keyA, keyB, none := stubs[0], stubs[1], stubs[2]
			// The policy `first` makes the order of attempts that of the targets; a short rest makes a short test.
			options := "strategy first\nreverse_proxy {\nfail_duration 10ms\n" + ops.block + "\n}"
			site := fmt.Sprintf(`rolter {
				provider a http://%s {
					api_key key-of-a
				}
				provider b http://%s {
					api_key key-of-b
				}
				provider c http://%s
				%s %s %s
				%s
			}`, keyA.addr, keyB.addr, none.addr,
				route("abc", options, keyA, keyB, none),
				route("cba", options, none, keyB, keyA),
				route("acb", options, keyA, none, keyB),
				soleRoutes(stubs...))
			g := startGateway(t, site)
			want := func(own string) map[*stub]string {
				return map[*stub]string{keyA: "Bearer key-of-a", keyB: "Bearer key-of-b", none: own}
			}
			for _, model := range []string{"abc", "cba", "acb"} {
				for _, failure := range []struct {
					name   string
					answer stubAnswer
				}{{"503", says(503, `{}`)}, {"reset", resets}} {
					for _, own := range []string{"", "Bearer of-the-client"} {
						t.Run(fmt.Sprintf("%s %s %q", model, failure.name, own), func(t *testing.T) {
							before := counts(stubs)
							order := []*stub{keyA, keyB, none}
							switch model {
							case "cba":
								order = []*stub{none, keyB, keyA}
							case "acb":
								order = []*stub{keyA, none, keyB}
							}
							order[0].answers(failure.answer)
							order[1].answers(failure.answer)
							order[2].answers(completion)
							header := []string{"X-Unwanted", "yes", "X-Kept", "yes"}
							if own != "" {
								header = append(header, "Authorization", own)
							}
							g.waitFor("no target to rest", func() bool { return g.noFails() })
							answer := g.served(chatPath, asks(model, "hi"), header...)
							if answer.target != order[2].name {
								t.Errorf("served by %q, want %q", answer.target, order[2].name)
							}
							for i, s := range stubs {
								all := s.received()
								if len(all) != before[i]+1 {
									t.Fatalf("%s received %d requests, want 1", s.name, len(all)-before[i])
								}
								got := all[before[i]]
								if auth := got.header.Values("Authorization"); strings.Join(auth, "|") != want(own)[s] {
									t.Errorf("%s received Authorization %q, want %q", s.name, auth, want(own)[s])
								}
								added, unwanted := got.header.Get("X-Added"), got.header.Get("X-Unwanted")
								if (added == "by-gateway") != (ops.block != "") || (unwanted == "") != (ops.block != "") {
									t.Errorf("%s received X-Added %q and X-Unwanted %q", s.name, added, unwanted)
								}
								if got.header.Get("X-Kept") != "yes" {
									t.Errorf("%s did not receive X-Kept", s.name)
								}
								for name, values := range got.header {
									for other, key := range map[*stub]string{keyA: "key-of-a", keyB: "key-of-b"} {
										if other != s && strings.Contains(strings.Join(values, " "), key) {
											t.Errorf("%s received the key of %s in %s", s.name, other.name, name)
										}
									}
								}
							}
						})
					}
				}
			}
		})
	}
}

// Every attempt is made for its own target: model name and path of an attempt before must not stick.
func TestRetryIsMadeForItsTarget(t *testing.T) {
	stubs := newStubs(t, 4, nil)
	config := fmt.Sprintf(`rolter {
		provider a http://%s/one
		provider b http://%s
		provider c http://%s/three/v1
		provider d http://%s
		route m {
			strategy first
			target a long/name-of-the-first
			target b
			target c c
			target d m
			reverse_proxy {
				fail_duration 10ms
			}
		}
	}`, stubs[0].addr, stubs[1].addr, stubs[2].addr, stubs[3].addr)
	g := startGateway(t, config)
	for _, s := range stubs[:3] {
		s.answers(says(503, "{}"))
	}
	for _, body := range []string{
		"{\"model\" : \"m\" , \"messages\":[ ]}\n",
		"{\"messages\":[],\"x\":\"model\",\"model\":\"\\u006d\"}",
	} {
		before := counts(stubs)
		if answer := g.served("/prefix"+chatPath+"?q=%2F", body); answer.target != "d" {
			t.Errorf("served by %q, want d", answer.target)
		}
		at := strings.LastIndex(body, `"model"`) + len(`"model"`)
		start := at + strings.Index(body[at:], `"`)
		end := start + 1 + strings.Index(body[start+1:], `"`) + 1
		for i, want := range []struct{ name, path string }{
			{`"long/name-of-the-first"`, "/one/prefix/v1/chat/completions?q=%2F"},
			{body[start:end], "/prefix/v1/chat/completions?q=%2F"},
			{`"c"`, "/three/v1/prefix/v1/chat/completions?q=%2F"},
			{body[start:end], "/prefix/v1/chat/completions?q=%2F"},
		} {
			all := stubs[i].received()
			if len(all) != before[i]+1 {
				t.Fatalf("%s received %d requests, want 1", stubs[i].name, len(all)-before[i])
			}
			got := all[before[i]]
			if wantBody := body[:start] + want.name + body[end:]; got.body != wantBody || got.length != int64(len(wantBody)) {
				t.Errorf("%s received %q (length %d), want %q", stubs[i].name, got.body, got.length, wantBody)
			}
			if got.uri != want.path {
				t.Errorf("%s received path %s, want %s", stubs[i].name, got.uri, want.path)
			}
		}
	}
}

func TestHeadersOfTheClientPass(t *testing.T) {
	stubs := newStubs(t, 1, nil)
	g := startGateway(t, rolterFor(stubs, route("m", "", stubs...)))
	r := newRequest(context.Background(), http.MethodPost, g.URL+chatPath, strings.NewReader(asks("m", "hi")),
		"Authorization", "Bearer mine",
		"Content-Type", "application/json; charset=utf-8",
		"X-Session-ID", "s1",
		"X-Rolter-Vllm-Token-Ids", "1,2,3",
		"X-Data-Parallel-Rank", "1",
		"User-Agent", "my-agent/1",
		"Connection", "X-Hop",
		"X-Hop", "hop-by-hop",
	)
	r.Header["X-Many"] = []string{"1", "2", ""}
	if _, err := do(testClient, r); err != nil {
		t.Fatal(err)
	}
	got := stubs[0].only().header
	for name, values := range got {
		switch {
		case strings.HasPrefix(name, "X-Forwarded-"), name == "Via", name == "Content-Length": // as every proxy adds
		case r.Header[name] == nil:
			t.Errorf("%s: %q was added", name, values)
		}
	}
	for name, want := range map[string][]string{
		"Authorization":           {"Bearer mine"},
		"Content-Type":            {"application/json; charset=utf-8"},
		"X-Session-Id":            {"s1"},
		"X-Data-Parallel-Rank":    {"1"},
		"User-Agent":              {"my-agent/1"},
		"X-Many":                  {"1", "2", ""},
		"X-Rolter-Vllm-Token-Ids": nil,
		"X-Hop":                   nil,
	} {
		if !slices.Equal(got[name], want) {
			t.Errorf("%s: %q, want %q", name, got[name], want)
		}
	}
}

func TestAnswersPassUntouched(t *testing.T) {
	stubs := newStubs(t, 1, nil)
	s := stubs[0]
	g := startGateway(t, rolterFor(stubs, route("m", "", stubs...)))
	big := strings.Repeat("0123456789abcdef", 1<<16)
	for _, c := range []struct {
		name, status, header, body string
	}{
		{"ok", "200 OK", "Content-Type: application/json\r\n", `{"a" : 1.0,  "b":"\u00e9"}` + "\n\n"},
		{"created with headers", "201 Created", "X-Request-Id: r1\r\nX-Many: 1\r\nX-Many: 2\r\nSet-Cookie: a=b; Path=/\r\nContent-Type: text/x-odd\r\n", "\x00\x01\xff"},
		{"no content type", "200 OK", "", "<html>not sniffed?</html>"},
		{"empty", "204 No Content", "", ""},
		{"redirect", "302 Found", "Location: /elsewhere\r\n", "moved"},
		{"bad request", "400 Bad Request", "Content-Type: application/json\r\n", `{"error":{"message":"bad cache_salt","type":"BadRequestError","param":null,"code":400}}`},
		{"unauthorized", "401 Unauthorized", "Www-Authenticate: Bearer\r\n", `{"error":"Unauthorized"}`},
		{"not found", "404 Not Found", "Content-Type: application/json\r\n", `{"detail":"Not Found"}`},
		{"unprocessable", "422 Unprocessable Entity", "Content-Type: application/json\r\n", `{"detail":[]}`},
		{"too many", "429 Too Many Requests", "Retry-After: 7\r\n", "slow down"},
		{"server error", "500 Internal Server Error", "Content-Type: application/json\r\n", `{"error":{"message":"cannot schedule new futures after shutdown","code":500}}`},
		{"compressed", "200 OK", "Content-Encoding: br\r\nContent-Type: application/json\r\n", "\x0b\x02\x80compressed\x03"},
		{"one megabyte", "200 OK", "Content-Type: application/octet-stream\r\n", big},
	} {
		t.Run(c.name, func(t *testing.T) {
			length := ""
			if c.body != "" {
				length = fmt.Sprintf("Content-Length: %d\r\n", len(c.body))
			}
			s.answers(raw("HTTP/1.1 " + c.status + "\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nServer: uvicorn\r\nConnection: close\r\n" + c.header + length + "\r\n" + c.body))
			answer := g.post(chatPath, asks("m", c.name))
			if got := fmt.Sprint(answer.status); !strings.HasPrefix(c.status, got) {
				t.Errorf("status %s, want %s", got, c.status)
			}
			if answer.body != c.body {
				t.Errorf("body of %d bytes differs from what the engine sent (%d bytes): %.100q", len(answer.body), len(c.body), answer.body)
			}
			want, err := http.ReadResponse(bufio.NewReader(strings.NewReader("HTTP/1.1 "+c.status+"\r\n"+c.header+"\r\n")), nil)
			if err != nil {
				t.Fatal(err)
			}
			_ = want.Body.Close()
			for name, values := range want.Header {
				if !slices.Equal(answer.header[name], values) {
					t.Errorf("%s: %q, want %q", name, answer.header[name], values)
				}
			}
			for name := range answer.header {
				switch name {
				case "Date", "Server", "Via", "Content-Length", "X-Rolter-Target", "X-Rolter-Reason":
				default:
					if want.Header[name] == nil {
						t.Errorf("%s: %q was added", name, answer.header[name])
					}
				}
			}
			if answer.target != "a" || answer.reason != "only_candidate" {
				t.Errorf("decision headers say %q and %q", answer.target, answer.reason)
			}
		})
	}
}

// What comes before and after an answer passes, too.
func TestEarlyHintsAndTrailersPass(t *testing.T) {
	s := newStub(t, "a", raw("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"+
		"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Sum: 7\r\n\r\n"))
	g := startGateway(t, rolterFor([]*stub{s}, route("m", "", s)))
	var hints []string
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
		hints = append(hints, fmt.Sprint(code, " ", header.Get("Link"), header.Get("X-Rolter-Target")))
		return nil
	}})
	resp, err := testClient.Do(newRequest(ctx, http.MethodPost, g.URL+chatPath, strings.NewReader(asks("m", "hi"))))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || string(body) != "{}" || resp.Header.Get("X-Rolter-Target") != "a" {
		t.Errorf("status %d, %v, body %q from %q", resp.StatusCode, err, body, resp.Header.Get("X-Rolter-Target"))
	}
	if want := []string{"103 </a>"}; !slices.Equal(hints, want) {
		t.Errorf("early answers %q, want %q", hints, want)
	}
	if got := resp.Trailer.Get("X-Sum"); got != "7" {
		t.Errorf("trailer %q, want 7", got)
	}
	g.idle()
	if n := g.state().promptsOf("m", s.addr); n != 1 {
		t.Errorf("%d prompts are recorded, want 1", n)
	}
}

func TestDecisionHeadersCanBeTurnedOff(t *testing.T) {
	stubs := newStubs(t, 2, nil)
	g := startGateway(t, rolterFor(stubs, "decision_headers off", route("m", "", stubs...)))
	answer := g.served(chatPath, asks("m", "hi"))
	if answer.target != "" || answer.reason != "" {
		t.Errorf("decision headers say %q and %q, want none", answer.target, answer.reason)
	}
}

// A client that asks first and sends its body when it is told to must not wait for an engine that never tells.
func TestExpectContinue(t *testing.T) {
	stubs := newStubs(t, 1, nil)
	g := startGateway(t, rolterFor(stubs, route("m", "", stubs...)))
	conn, err := net.Dial("tcp", g.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body := asks("m", "hi")
	_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", chatPath, g.Addr, len(body))
	in := bufio.NewReader(conn)
	line, err := in.ReadString('\n')
	if err != nil || !strings.Contains(line, " 100 ") {
		t.Fatalf("%q, %v; want 100 Continue", line, err)
	}
	if _, err := in.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(conn, body)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK || stubs[0].only().body != body {
		t.Errorf("status %d, the engine received %q", resp.StatusCode, stubs[0].only().body)
	}
}

// Requests that are none of the API are not ours.
func TestOtherRequestsGoToTheNextHandler(t *testing.T) {
	stubs := newStubs(t, 1, nil)
	g := startGateway(t, "route {\n"+rolterFor(stubs, route("m", "", stubs...))+"respond \"next handler\" 200\n}\n")
	for _, c := range []struct{ method, path string }{
		{http.MethodGet, "/"},
		{http.MethodGet, "/health"},
		{http.MethodPost, "/login"},
		{http.MethodOptions, chatPath},
	} {
		answer, err := do(testClient, newRequest(context.Background(), c.method, g.URL+c.path, nil))
		if err != nil {
			t.Fatal(err)
		}
		if answer.body != "next handler" {
			t.Errorf("%s %s: %d %q, want the next handler's answer", c.method, c.path, answer.status, answer.body)
		}
	}
	if n := stubs[0].count(); n != 0 {
		t.Errorf("the engine received %d requests, want none", n)
	}
}

// noFails says that Caddy remembers no failure of any upstream: nobody rests.
func (g *gateway) noFails() bool {
	answer, err := g.admin(http.MethodGet, "/reverse_proxy/upstreams", "", "")
	return err == nil && !strings.Contains(strings.ReplaceAll(answer, `"fails":0`, ""), `"fails":`)
}
