package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/rolter-ai/caddy-rolter/integration/replica"
)

// setup is what the Caddyfile is made of.
type setup struct {
	model           string
	replicas        []string // base URLs
	host            string   // of the address that Caddy listens on; empty is all
	port, adminPort int
	verbose         bool
}

func (s *setup) caddyfile(strategy string) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("{")
	line("\tadmin localhost:%d", s.adminPort)
	if !s.verbose {
		line("\tlog {")
		line("\t\tlevel ERROR")
		line("\t}")
	}
	line("}")
	line("")
	line(":%d {", s.port)
	if s.host != "" {
		line("\tbind %s", s.host)
	}
	line("\trolter {")
	for i, url := range s.replicas {
		line("\t\tprovider vllm-%d %s", i+1, url)
	}
	line("\t\troute %s {", quote(s.model))
	line("\t\t\tstrategy %s", strategy)
	for i := range s.replicas {
		line("\t\t\ttarget vllm-%d", i+1)
	}
	line("\t\t}")
	line("\t}")
	line("}")
	return b.String()
}

// quote makes a model name one token of a Caddyfile.
func quote(model string) string {
	if strings.ContainsAny(model, " \t\"#{}\\") {
		return "`" + model + "`"
	}
	return model
}

func (s *setup) url() string {
	host := s.host
	if ip := net.ParseIP(host); host == "" || ip.IsUnspecified() {
		host = "localhost"
	}
	return "http://" + net.JoinHostPort(host, fmt.Sprint(s.port))
}

func (s *setup) curl() string {
	model, _ := json.Marshal(s.model) // strings always can be marshalled
	body := fmt.Sprintf(`{"model": %s, "messages": [{"role": "user", "content": "Hello! What can you do?"}]}`, model)
	return fmt.Sprintf("curl -i %s/v1/chat/completions -H 'Content-Type: application/json' -d '%s'",
		s.url(), strings.ReplaceAll(body, "'", `'\''`))
}

// prepare starts or finds the replicas and chooses the ports.
func (d *demo) prepare(ctx context.Context) (*setup, error) {
	s := &setup{replicas: d.real, verbose: d.verbose}
	var err error
	if len(d.real) > 0 {
		for i, url := range s.replicas {
			s.replicas[i] = strings.TrimSuffix(strings.TrimSuffix(url, "/"), "/v1")
		}
		s.model, err = commonModel(ctx, s.replicas)
	} else {
		s.model = simulated.Model
		s.replicas, err = d.simulate(3)
	}
	if err != nil {
		return nil, err
	}

	var front, admin net.Listener
	if d.listen != "" {
		front, err = listen(d.listen)
	} else {
		front, err = listenFrom("", 8080, d.say)
	}
	if err != nil {
		return nil, err
	}
	defer front.Close()
	if admin, err = listenFrom("localhost", 2019, d.say); err != nil {
		return nil, err
	}
	defer admin.Close()
	host, _, _ := net.SplitHostPort(d.listen)
	s.host, s.port, s.adminPort = host, portOf(front), portOf(admin)
	return s, nil
}

// simulate starts so many replicas, which live as long as the process.
func (d *demo) simulate(count int) ([]string, error) {
	var urls []string
	for port := 8001; len(urls) < count; port++ {
		l, err := listenFrom("127.0.0.1", port, d.say)
		if err != nil {
			return nil, err
		}
		port = portOf(l)
		go replica.New(simulated).Serve(l) // ends with the process
		urls = append(urls, "http://"+l.Addr().String())
	}
	return urls, nil
}

// commonModel asks the first replica which model it serves and the others whether they serve it too.
func commonModel(ctx context.Context, replicas []string) (string, error) {
	var model string
	for _, url := range replicas {
		served, err := servedModels(ctx, url)
		if err != nil {
			return "", fmt.Errorf("--real %s: %w", url, err)
		}
		if model == "" {
			model = served[0]
		}
		if !slices.Contains(served, model) {
			return "", fmt.Errorf("--real %s: does not serve %q, which %s does, but %q", url, model, replicas[0], served)
		}
	}
	return model, nil
}

// servedModels returns at least one name.
func servedModels(ctx context.Context, url string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/v1/models", nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("/v1/models answered %s", resp.Status)
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&list); err != nil {
		return nil, fmt.Errorf("/v1/models: %w", err)
	}
	var names []string
	for _, m := range list.Data {
		names = append(names, m.ID)
	}
	if len(names) == 0 || names[0] == "" {
		return nil, errors.New("/v1/models names no model")
	}
	return names, nil
}
