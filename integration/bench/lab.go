package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
)

// variant is a way from the client to the upstreams.
type variant struct {
	name string
	site func(upstreams []string) string // the site's Caddyfile; nil is no Caddy
}

var variants = []variant{
	{"direct", nil},
	{plain, reverseProxy("")},
	{"buffered", reverseProxy("request_buffers 64MiB")},
	{"rolter", handler("cache_aware", "")},
	{"policy", reverseProxy("lb_policy rolter cache_aware")},
}

// plain is the name of the variant that the others are compared with.
const plain = "plain"

// memoryVariants are those whose memory is measured.
var memoryVariants = []variant{
	{plain, reverseProxy("")},
	{"rolter, max_bytes 2GiB", handler("cache_aware", "max_bytes 2GiB")},
	{"rolter, default max_bytes", handler("cache_aware", "")},
}

// reverseProxy is a site with Caddy's own proxy.
func reverseProxy(option string) func(upstreams []string) string {
	return func(upstreams []string) string {
		return fmt.Sprintf("reverse_proxy %s {\n%s\n}", strings.Join(upstreams, " "), option)
	}
}

// handler is a site with Rolter's handler; the strategy and the option are the route's.
func handler(strategy, option string) func(upstreams []string) string {
	return func(upstreams []string) string {
		var providers, targets strings.Builder
		for i, address := range upstreams {
			fmt.Fprintf(&providers, "provider replica-%d http://%s\n", i, address)
			fmt.Fprintf(&targets, "target replica-%d\n", i)
		}
		return fmt.Sprintf("rolter {\n%sroute %s {\nstrategy %s\n%s%s\n}\n}", &providers, model, strategy, &targets, option)
	}
}

// lab is everything that is up while it is measured.
type lab struct {
	dir       string
	processes []*process
	doors     []*door
}

// door is where a variant takes requests.
type door struct {
	variant
	addresses []string // one for Caddy, all upstreams where there is none
	admin     string   // URL of the Caddy's admin endpoint
}

// newLab starts the upstreams, by the role that serves them, and a Caddy for each variant that has one.
func newLab(ctx context.Context, variants []variant, role string, args ...string) (l *lab, err error) {
	l = new(lab)
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.dir, err = os.MkdirTemp("", "rolter-bench-"); err != nil {
		return l, err
	}
	addresses, err := l.startUpstreams(role, args)
	if err != nil {
		return l, fmt.Errorf("upstreams: %w", err)
	}
	for _, v := range variants {
		d := &door{variant: v, addresses: addresses}
		if v.site != nil {
			if err := l.startCaddy(ctx, d, v.site(addresses)); err != nil {
				return l, fmt.Errorf("caddy of %s: %w", v.name, err)
			}
		}
		l.doors = append(l.doors, d)
	}
	return l, nil
}

func (l *lab) startUpstreams(role string, args []string) (addresses []string, err error) {
	r, w := io.Pipe()
	p, err := startChild(role, l.dir, w, args...)
	if err != nil {
		return nil, err
	}
	l.processes = append(l.processes, p)
	go func() {
		<-p.done
		_ = w.CloseWithError(errors.New("they ended"))
	}()
	err = json.NewDecoder(r).Decode(&addresses)
	return addresses, err
}

// startCaddy starts a Caddy with one site and waits until it serves.
func (l *lab) startCaddy(ctx context.Context, d *door, site string) error {
	address, err := freeAddress()
	if err != nil {
		return err
	}
	admin, err := freeAddress()
	if err != nil {
		return err
	}
	d.addresses, d.admin = []string{address}, "http://"+admin
	config := fmt.Sprintf("{\nadmin %s\npersist_config off\nauto_https off\n}\nhttp://%s {\n%s\n}\n", admin, address, site)
	file := filepath.Join(l.dir, strings.TrimPrefix(admin, "127.0.0.1:")+".caddyfile")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return err
	}
	p, err := startChild("caddy", l.dir, nil, "run", "--config", file, "--adapter", "caddyfile")
	if err != nil {
		return err
	}
	l.processes = append(l.processes, p)
	return p.wait(ctx, func() bool {
		c, err := net.Dial("tcp", address)
		if err == nil {
			_ = c.Close()
			_, err = d.get(ctx, "/bench/cpu")
		}
		return err == nil
	})
}

// freeAddress is a loopback address on which nothing listens.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

func (l *lab) close() {
	for _, p := range l.processes {
		p.stop()
	}
	if l.dir != "" {
		_ = os.RemoveAll(l.dir)
	}
}

// get asks the admin endpoint of the door's Caddy.
func (d *door) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.admin+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", path, resp.Status, bytes.TrimSpace(body))
	}
	return body, err
}

// read asks the admin endpoint for a value.
func (d *door) read(ctx context.Context, path string, into any) error {
	body, err := d.get(ctx, path)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, into)
}
