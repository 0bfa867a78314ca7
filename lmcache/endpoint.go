package lmcache

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// endpoint is a way to ask what a kind serves.
type endpoint struct {
	kind Kind
	path string // after that of the base; "" is the URL itself
	// fallback marks what is asked when the kind's other endpoints fail: it cannot tell occupancy, and is not settled for.
	fallback bool
	ask      func(ctx context.Context, p *Poller, instances []string) (func(instance string) answer, error)
}

// answer is what was told of one instance.
type answer struct {
	available bool
	occupancy float64 // in [0, 1]
	told      bool    // whether occupancy is known
	err       error
}

// endpoints are all there are, in the order in which they are tried.
var endpoints = []endpoint{
	{kind: JSON, ask: forAll("", maxJSON, parseContract)},
	{kind: MP, path: "/status", ask: forAll("/status", maxJSON, parseStatus)},
	{kind: MP, path: "/status/memory-pressure", ask: forAll("/status/memory-pressure", maxJSON, parsePressure)},
	{kind: MP, path: "/healthcheck", fallback: true, ask: askHealthcheck},
	{kind: Coordinator, path: "/instances/usage", ask: askCoordinator},
	{kind: Prometheus, path: "/metrics", ask: askMetrics},
	{kind: Controller, path: "/health", ask: askController},
}

// baseOf is the URL without the path of an endpoint.
func baseOf(rawURL string) (*url.URL, error) {
	u, err := url.Parse(rawURL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return nil, errors.New("must be an http or https URL")
	}
	base := &url.URL{Scheme: u.Scheme, User: u.User, Host: u.Host, Path: strings.TrimRight(u.Path, "/")}
	// The longest first: one path ends in another.
	for _, path := range []string{"/status/memory-pressure", "/instances/usage", "/directory/lookup", "/healthcheck", "/metrics", "/status", "/health", "/lookup"} {
		if trimmed, ok := strings.CutSuffix(base.Path, path); ok {
			base.Path = trimmed
			break
		}
	}
	return base, nil
}

// get asks an endpoint.
func (p *Poller) get(ctx context.Context, path string, limit int64, accept ...int) (status int, body []byte, err error) {
	at := p.cfg.URL
	if path != "" {
		at = p.base.String() + path
	}
	return p.client.do(ctx, at, nil, limit, accept...)
}

// forAll is how to ask an endpoint that tells of one cache, which is that of all instances.
func forAll(path string, limit int64, parse func([]byte) answer) func(context.Context, *Poller, []string) (func(string) answer, error) {
	return func(ctx context.Context, p *Poller, _ []string) (func(string) answer, error) {
		_, body, err := p.get(ctx, path, limit)
		if err != nil {
			return nil, err
		}
		return same(parse(body))
	}
}

// same is one answer for all instances, unless it was not understood.
func same(a answer) (func(string) answer, error) {
	if a.err != nil && causeOf(a.err) == Malformed {
		return nil, a.err
	}
	return func(string) answer { return a }, nil
}

// full is the answer of a cache that works and has so much in use of so much.
func full(used, total float64) answer {
	if !(used >= 0) || !(total > 0) || math.IsInf(used, 0) || math.IsInf(total, 0) {
		return answer{err: failed(NoValue, "%v bytes of %v tell no occupancy", used, total)}
	}
	return answer{available: true, told: true, occupancy: min(used/total, 1)}
}

func malformed(format string, args ...any) answer {
	return answer{err: failed(Malformed, format, args...)}
}

// parseContract reads {"occupancy": 0..1, "cache_available": bool}. The occupancy is required; the other is true where it is absent.
func parseContract(body []byte) answer {
	var told struct {
		Occupancy *float64 `json:"occupancy"`
		Available *bool    `json:"cache_available"`
	}
	// JSON has no NaN and no infinity, and what does not fit a float64 is an error.
	if err := json.Unmarshal(body, &told); err != nil {
		return malformed("not the contract's JSON: %w", err)
	}
	if told.Occupancy == nil {
		return malformed("the answer has no occupancy")
	}
	return answer{available: told.Available == nil || *told.Available, occupancy: min(max(*told.Occupancy, 0), 1), told: true}
}

// parseStatus reads /status of the multiprocess server: what the managers of the first tier have in use, over all tags.
func parseStatus(body []byte) answer {
	type manager struct {
		Used  float64 `json:"memory_used_bytes"`
		Total float64 `json:"memory_total_bytes"`
	}
	var told struct {
		Healthy *bool `json:"is_healthy"`
		Storage *struct {
			Managers map[string]manager `json:"l1_managers"`
			Manager  *manager           `json:"l1_manager"` // before there were tags
		} `json:"storage_manager"`
	}
	if err := json.Unmarshal(body, &told); err != nil {
		return malformed("not the status of a multiprocess server: %w", err)
	}
	switch {
	case told.Healthy == nil || told.Storage == nil:
		return malformed("not the status of a multiprocess server")
	case !*told.Healthy:
		return answer{}
	}
	var used, total float64
	for _, m := range told.Storage.Managers {
		used, total = used+m.Used, total+m.Total
	}
	if m := told.Storage.Manager; m != nil && len(told.Storage.Managers) == 0 {
		used, total = m.Used, m.Total
	}
	return full(used, total)
}

// parsePressure reads /status/memory-pressure, which other versions of the multiprocess server have.
func parsePressure(body []byte) answer {
	var told struct {
		Tiers []struct {
			Tier     string  `json:"tier"`
			Used     float64 `json:"used_bytes"`
			Capacity float64 `json:"capacity_bytes"`
			Health   string  `json:"health"` // ok, failed or unknown
		} `json:"tiers"`
	}
	if err := json.Unmarshal(body, &told); err != nil {
		return malformed("not a report of memory pressure: %w", err)
	}
	if told.Tiers == nil {
		return malformed("not a report of memory pressure")
	}
	var used, total float64
	for _, t := range told.Tiers {
		if !strings.EqualFold(t.Tier, "l1") {
			continue
		}
		if t.Health == "failed" {
			return answer{}
		}
		used, total = used+t.Used, total+t.Capacity
	}
	return full(used, total)
}

// askHealthcheck asks a multiprocess server whose status cannot be had. It says what it knows with status 503 where that is bad.
func askHealthcheck(ctx context.Context, p *Poller, _ []string) (func(string) answer, error) {
	status, body, err := p.get(ctx, "/healthcheck", maxJSON, http.StatusServiceUnavailable)
	if err != nil {
		return nil, err
	}
	var told struct {
		Status string `json:"status"`
	}
	switch err := json.Unmarshal(body, &told); {
	case err != nil:
		return nil, failed(Malformed, "not a health check: %w", err)
	case status == http.StatusServiceUnavailable && told.Status == "unhealthy":
		return same(answer{})
	}
	return nil, failed(NoValue, "it is %.40q, but does not tell how full it is", told.Status)
}

// usage is what the coordinator tells of one instance.
type usage struct {
	Instance   string `json:"instance_id"`
	Registered bool   `json:"registered"`
	Modules    []struct {
		Tier     string  `json:"tier"`
		Shared   bool    `json:"shared"`
		Used     float64 `json:"used_bytes"`
		Capacity float64 `json:"capacity_bytes"` // 0 where nobody declared it
	} `json:"modules"`
}

// answer is the occupancy of the instance's own first tier.
func (u *usage) answer(capacity int64) answer {
	if !u.Registered {
		return answer{err: failed(UnknownInstance, "instance %.80q is not registered", u.Instance)}
	}
	var used, total float64
	for _, m := range u.Modules {
		if m.Tier == "l1" && !m.Shared {
			used, total = used+m.Used, total+m.Capacity
		}
	}
	if total == 0 && len(u.Modules) > 0 {
		total = float64(capacity)
	}
	return full(used, total)
}

// askCoordinator asks once for all instances.
func askCoordinator(ctx context.Context, p *Poller, _ []string) (func(string) answer, error) {
	_, body, err := p.get(ctx, "/instances/usage", maxList)
	if err != nil {
		return nil, err
	}
	all, err := parseUsage(body)
	if err != nil {
		return nil, err
	}
	byID := make(map[string]*usage, len(all))
	for i := range all {
		byID[all[i].Instance] = &all[i]
	}
	return func(instance string) answer {
		u := byID[instance]
		if instance == "" && len(all) == 1 {
			u = &all[0]
		}
		switch {
		case u != nil:
			return u.answer(p.cfg.Capacity)
		case instance == "":
			return answer{err: failed(UnknownInstance, "the coordinator knows %d instances: say which one", len(all))}
		}
		return answer{err: failed(UnknownInstance, "the coordinator does not know instance %q", instance)}
	}, nil
}

func parseUsage(body []byte) ([]usage, error) {
	var told struct {
		Instances []usage `json:"instances"`
	}
	if err := json.Unmarshal(body, &told); err != nil {
		return nil, failed(Malformed, "not the usage of instances: %w", err)
	}
	if told.Instances == nil {
		return nil, failed(Malformed, "not the usage of instances")
	}
	return told.Instances, nil
}

// askController asks for the health of each instance. Of one that it does not know it says nothing, with status 200.
func askController(ctx context.Context, p *Poller, instances []string) (func(string) answer, error) {
	all := make(map[string]answer, len(instances))
	first, understood := failed(UnknownInstance, "a controller must be asked for an instance"), false
	for _, instance := range instances {
		if instance == "" {
			all[instance] = answer{err: first}
			continue
		}
		question, err := json.Marshal(map[string]string{"instance_id": instance})
		if err != nil {
			return nil, failed(Malformed, "%w", err)
		}
		_, body, err := p.client.do(ctx, p.base.String()+"/health", question, maxJSON)
		a := answer{err: err}
		if err == nil {
			a = parseHealth(instance, body)
		}
		switch all[instance] = a; {
		case a.err == nil, causeOf(a.err) == UnknownInstance:
			understood = true
		case !answered(a.err), causeOf(a.err) == Malformed:
			return nil, a.err // nor will it answer for the others
		default:
			first = a.err
		}
	}
	if !understood {
		return nil, first
	}
	return func(instance string) answer { return all[instance] }, nil
}

// parseHealth reads the error codes of an instance's workers.
func parseHealth(instance string, body []byte) answer {
	var told struct {
		EventID *string        `json:"event_id"`
		Codes   map[string]int `json:"error_codes"`
	}
	if err := json.Unmarshal(body, &told); err != nil {
		return malformed("not a controller's answer: %w", err)
	}
	if len(told.Codes) == 0 {
		if told.EventID == nil && string(bytes.TrimSpace(body)) != "{}" {
			return malformed("not a controller's answer")
		}
		return answer{err: failed(UnknownInstance, "the controller does not know instance %q", instance)}
	}
	for _, code := range told.Codes {
		if code != 0 {
			return answer{}
		}
	}
	return answer{available: true}
}

// capacityFor is for how long a capacity that a source told is not asked for again.
const capacityFor = 5 * time.Minute

// askMetrics reads Prometheus' text, and the capacity where that is told elsewhere.
func askMetrics(ctx context.Context, p *Poller, _ []string) (func(string) answer, error) {
	_, body, err := p.get(ctx, "/metrics", maxList)
	if err != nil {
		return nil, err
	}
	g, err := parseMetrics(body)
	if err != nil {
		return nil, err
	}
	capacity := float64(p.cfg.Capacity)
	if capacity == 0 && g.inProcess && g.workers > 0 {
		if p.capacity == 0 || time.Since(p.capacityAt) >= capacityFor {
			_, body, err := p.get(ctx, "/conf?names=max_local_cpu_size", maxJSON)
			if err == nil {
				p.capacity, err = parseConf(body)
			}
			p.capacityAt = time.Now()
			if err != nil && p.capacity == 0 {
				return same(answer{err: failed(NoValue, "the capacity is not known, and the engine does not tell it: %w", err)})
			}
		}
		capacity = p.capacity * float64(g.workers)
	}
	return same(g.answer(capacity))
}

// parseConf reads the capacity of one worker, in bytes, from the configuration of the LMCache inside an engine.
func parseConf(body []byte) (float64, error) {
	var told struct {
		GB float64 `json:"max_local_cpu_size"`
	}
	if err := json.Unmarshal(body, &told); err != nil {
		return 0, err
	}
	if !(told.GB > 0) {
		return 0, fmt.Errorf("max_local_cpu_size is %v", told.GB)
	}
	return told.GB * (1 << 30), nil
}
