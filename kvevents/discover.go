package kvevents

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// MaxRanks is the most data-parallel ranks that an engine is taken to have.
const MaxRanks = 1024

const (
	maxAdapters    = 4096
	maxProblems    = 8
	maxTopic       = 1 << 10 // bytes
	maxDescription = 4 << 20 // bytes of an answer; SGLang's has all of its arguments in it
)

// What an engine is started with so that it can be listened to. With data parallelism each rank adds its number to both ports.
const (
	vllmFlag = `--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:6557"}'`
	sglFlag  = `--kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557"}'`
)

// Discovery is what an engine tells of its event streams.
type Discovery struct {
	// Ranks are the engine's data-parallel ranks in order; one without any has rank 0.
	Ranks []Rank

	// Problems say, one by one, what keeps ranks from being listened to or events from being replayed, and what to change in the engine's flags or
	// the router's configuration. They are for the operator to read.
	Problems []string

	// Adapters are the names of the LoRA adapters that the engine serves, and MaxModelLen is the longest context, in tokens, of the models beside
	// them; 0 is unknown. HasModels tells that the engine has listed its models.
	Adapters    []string
	MaxModelLen int
	HasModels   bool
}

// Rank is where one rank of an engine publishes.
type Rank struct {
	Rank     int
	Endpoint string // tcp://host:port to connect to; "" if the rank cannot be listened to
	Replay   string // the same of its replay socket; "" if there is none
	Topic    string // of its messages
}

// Discover asks the engine whose HTTP API is at base, an http or https URL without /v1, where it publishes: vLLM by GET /kv_event_sources, SGLang by
// GET /server_info. An engine that has neither, or that cannot be listened to, is no error but a problem. The host of base stands in for the wildcard that a
// publisher is bound to. An address without a wildcard is taken from vLLM only if its port is one that the system hands out, as then it is what tcp://*:0
// has become. Otherwise vLLM would connect to it instead of binding it, so that nobody listens.
//
// The client should have a time-out. Redirects are not followed. The endpoints are what the engine says: who connects to them must vet them.
func Discover(ctx context.Context, client *http.Client, base, apiKey string) (Discovery, error) {
	at, err := url.Parse(base)
	if err != nil || at.Hostname() == "" {
		return Discovery{}, errors.New("discovering KV events: the base is not a URL with a host")
	}
	a := asker{client: *client, base: strings.TrimRight(base, "/"), apiKey: apiKey, host: at.Hostname()}
	a.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

	var d Discovery
	answer, found, err := a.get(ctx, "/kv_event_sources")
	switch {
	case err != nil:
		return Discovery{}, err
	case found:
		err = d.readSources(answer, a.host)
	default:
		if answer, _, err = a.get(ctx, "/server_info"); err == nil {
			err = d.readServerInfo(answer, a.host)
		}
	}
	if err != nil {
		return Discovery{}, err
	}
	d.separate()
	if answer, found, err := a.get(ctx, "/v1/models"); err == nil && found {
		d.readModels(answer)
	}
	return d, nil
}

// asker asks an engine.
type asker struct {
	client             http.Client
	base, apiKey, host string
}

// get asks for a description. It is not found where the engine does not have it or keeps it to itself.
func (a *asker) get(ctx context.Context, path string) (answer []byte, found bool, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("GET %s: %w", path, err)
		}
	}()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.base+path, nil)
	if err != nil {
		return nil, false, err
	}
	if a.apiKey != "" {
		req.Header.Set("Authorization", "Bearer "+a.apiKey)
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return nil, false, err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented:
		return nil, false, nil
	default:
		return nil, false, fmt.Errorf("status %d", resp.StatusCode)
	}
	answer, err = io.ReadAll(io.LimitReader(resp.Body, maxDescription+1))
	if err == nil && len(answer) > maxDescription {
		err = fmt.Errorf("answer of more than %d bytes", maxDescription)
	}
	return answer, true, err
}

func (d *Discovery) problem(format string, args ...any) {
	if len(d.Problems) < maxProblems { // the others are alike
		d.Problems = append(d.Problems, fmt.Sprintf(format, args...))
	}
}

// readSources reads vLLM's /kv_event_sources, an object by rank.
func (d *Discovery) readSources(answer []byte, host string) error {
	var sources map[string]json.RawMessage
	switch err := json.Unmarshal(answer, &sources); {
	case err != nil:
		return errors.New("/kv_event_sources is not as expected: not an object")
	case len(sources) > MaxRanks:
		return fmt.Errorf("/kv_event_sources is not as expected: %d ranks", len(sources))
	case len(sources) == 0:
		d.problem("the engine publishes no KV events: start it with %s", vllmFlag)
	}
	for _, key := range slices.Sorted(maps.Keys(sources)) {
		rank, err := strconv.ParseUint(key, 10, 16)
		if err != nil || rank >= MaxRanks || strconv.FormatUint(rank, 10) != key {
			d.problem("the engine names a data-parallel rank %.40q, which is not a number in 0..%d", key, MaxRanks-1)
			continue
		}
		d.Ranks = append(d.Ranks, d.readSource(int(rank), sources[key], host))
	}
	slices.SortFunc(d.Ranks, func(a, b Rank) int { return cmp.Compare(a.Rank, b.Rank) })
	return nil
}

func (d *Discovery) readSource(number int, raw json.RawMessage, host string) Rank {
	var source struct {
		Enabled   *bool   `json:"enable_kv_cache_events"`
		Publisher *string `json:"publisher"`
		Endpoint  string  `json:"endpoint"`
		Replay    string  `json:"replay_endpoint"`
		Topic     string  `json:"topic"`
	}
	rank := Rank{Rank: number}
	if json.Unmarshal(raw, &source) != nil || len(source.Topic) > maxTopic {
		d.problem("rank %d: its description in /kv_event_sources is not as expected", number)
		return rank
	}
	if source.Enabled != nil && !*source.Enabled || source.Publisher != nil && *source.Publisher != "zmq" {
		d.problem("rank %d publishes no KV events: start the engine with %s", number, vllmFlag)
		return rank
	}
	rank.Topic = source.Topic

	at, port, err := ParseEndpoint(source.Endpoint)
	addr, notAddress := netip.ParseAddr(at)
	switch {
	case err != nil:
		d.problem("rank %d publishes at %.100q, where no other machine can listen: start the engine with %s", number, source.Endpoint, vllmFlag)
	case at == "*" || at == "::":
		rank.Endpoint = endpointAt(host, port)
	case notAddress == nil && !addr.IsUnspecified() && reaches(host, at) && (strings.Contains(at, "::") || handedOut(port)):
		rank.Endpoint = endpointAt(at, port)
	default:
		d.problem("rank %d publishes at %.100q, where a router cannot listen, as the engine binds only with a * for the host and connects otherwise: "+
			"start it with \"endpoint\":\"tcp://*:%s\" in --kv-events-config", number, source.Endpoint, port)
	}
	if source.Replay != "" {
		d.readReplay(&rank, source.Replay, host)
	}
	return rank
}

// readReplay sets the replay endpoint of a rank. An engine always binds it.
func (d *Discovery) readReplay(rank *Rank, endpoint, host string) {
	at, port, err := ParseEndpoint(endpoint)
	addr, notAddress := netip.ParseAddr(at)
	switch {
	case err != nil || notAddress == nil && !addr.IsUnspecified() && !reaches(host, at):
		d.problem("rank %d replays events at %.100q, which no other machine reaches: start the engine with a \"replay_endpoint\" like tcp://*:6557 in --kv-events-config",
			rank.Rank, endpoint)
	case notAddress != nil || addr.IsUnspecified(): // "*", or the name of an interface
		rank.Replay = endpointAt(host, port)
	default:
		rank.Replay = endpointAt(at, port)
	}
}

// readServerInfo reads SGLang's /server_info, which has a description of the publishers under kv_events. There is no answer where neither engine's
// description was found.
func (d *Discovery) readServerInfo(answer []byte, host string) error {
	var info struct {
		Events json.RawMessage `json:"kv_events"`
	}
	if answer != nil && json.Unmarshal(answer, &info) != nil {
		return errors.New("/server_info is not as expected: not an object")
	}
	if info.Events == nil {
		d.problem("the engine does not tell where it publishes KV events (older versions do not): configure kv_events with an endpoint like tcp://%s",
			net.JoinHostPort(host, "5557"))
		return nil
	}
	var events struct {
		Publisher  string `json:"publisher"`
		Host       string `json:"endpoint_host"`
		Port       int    `json:"endpoint_port_base"`
		ReplayHost string `json:"replay_endpoint_host"`
		ReplayPort int    `json:"replay_endpoint_port_base"`
		Topic      string `json:"topic"`
		Ranks      *int   `json:"dp_size"`
	}
	if json.Unmarshal(info.Events, &events) != nil || len(events.Topic) > maxTopic {
		return errors.New("/server_info is not as expected: kv_events")
	}
	if events.Publisher != "zmq" {
		d.problem("the engine publishes no KV events, or not over TCP: start it with %s", sglFlag)
		return nil
	}
	ranks := 1
	if events.Ranks != nil {
		ranks = *events.Ranks
	}
	if ranks < 1 || ranks > MaxRanks {
		return fmt.Errorf("/server_info is not as expected: %d ranks", ranks)
	}
	for number := range ranks {
		rank := Rank{Rank: number, Topic: events.Topic}
		if rank.Endpoint = advertised(events.Host, events.Port, number, host); rank.Endpoint == "" {
			d.problem("rank %d publishes at host %.100q and port %d + %d, which no other machine reaches: start the engine with %s",
				number, events.Host, events.Port, number, sglFlag)
		}
		if events.ReplayPort != 0 {
			if rank.Replay = advertised(cmp.Or(events.ReplayHost, events.Host), events.ReplayPort, number, host); rank.Replay == "" {
				d.problem("rank %d replays events at port %d + %d, which no other machine reaches", number, events.ReplayPort, number)
			}
		}
		d.Ranks = append(d.Ranks, rank)
	}
	return nil
}

// advertised is the endpoint of a rank whose host and first port SGLang advertises; "" if it cannot be one. Unlike vLLM, SGLang binds 0.0.0.0 too.
func advertised(at string, port, rank int, host string) string {
	at = strings.TrimSuffix(strings.TrimPrefix(at, "["), "]")
	addr, notAddress := netip.ParseAddr(at)
	if at == "*" || notAddress == nil && addr.IsUnspecified() {
		at = host
	}
	if port < 1 || port > 65535-rank || !isHost(at) || !reaches(host, at) {
		return ""
	}
	return endpointAt(at, strconv.Itoa(port+rank))
}

// separate takes endpoints away that are those of another rank or socket: of these only one can have been bound.
func (d *Discovery) separate() {
	taken := make(map[string]int)
	for i := range d.Ranks {
		r := &d.Ranks[i]
		if other, twice := taken[r.Endpoint]; twice {
			d.problem("ranks %d and %d are said to publish at the same endpoint %s: check \"endpoint\" in the engine's --kv-events-config", other, r.Rank, r.Endpoint)
			r.Endpoint = ""
		}
		if r.Endpoint != "" {
			taken[r.Endpoint] = r.Rank
		}
	}
	for i := range d.Ranks {
		r := &d.Ranks[i]
		if other, twice := taken[r.Replay]; twice {
			d.problem("rank %d is said to replay events at %s, which rank %d has for another socket: the ports of \"endpoint\" and \"replay_endpoint\" in "+
				"--kv-events-config must be further apart than there are ranks", r.Rank, r.Replay, other)
			r.Replay = ""
		}
		if r.Replay != "" {
			taken[r.Replay] = r.Rank
		}
	}
}

// readModels reads /v1/models. Adapters are those with a parent.
func (d *Discovery) readModels(answer []byte) {
	var models struct {
		Data []json.RawMessage `json:"data"`
	}
	if json.Unmarshal(answer, &models) != nil || models.Data == nil {
		return
	}
	d.HasModels = true
	for _, raw := range models.Data {
		var model struct {
			ID     string  `json:"id"`
			Parent *string `json:"parent"`
			Length int     `json:"max_model_len"`
		}
		switch {
		case json.Unmarshal(raw, &model) != nil || model.ID == "":
		case model.Parent == nil:
			d.MaxModelLen = max(d.MaxModelLen, model.Length)
		case len(d.Adapters) < maxAdapters:
			d.Adapters = append(d.Adapters, model.ID)
		}
	}
}

func endpointAt(host, port string) string { return "tcp://" + net.JoinHostPort(host, port) }

// handedOut says whether a port is one that systems choose when they are asked for any (Linux from 32768 on, others from 49152).
func handedOut(port string) bool {
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n >= 32768
}

// isHost says whether s is an address, or has only what names of hosts are made of.
func isHost(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	return s != "" && len(s) <= 253 && !strings.ContainsFunc(s, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '.' && c != '-' && c != '_'
	})
}

// reaches says whether what the engine calls at can be the engine, seen from a router that finds it at host: a loopback address is another machine to the
// router, unless that finds the engine at one.
func reaches(host, at string) bool { return !isLoopback(at) || isLoopback(host) }

func isLoopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback() || strings.EqualFold(strings.TrimSuffix(host, "."), "localhost")
}
