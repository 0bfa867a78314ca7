package rolter

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/rolter-ai/caddy-rolter/kvevents"
)

// adminAPI shows what Rolter knows, at the admin endpoint. The configuration itself is managed through /config/, as everything in Caddy.
type adminAPI struct{}

// CaddyModule returns the Caddy module information.
func (adminAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.rolter", New: func() caddy.Module { return new(adminAPI) }}
}

// Routes implements [caddy.AdminRouter].
func (a adminAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{Pattern: "/rolter/state", Handler: caddy.AdminHandlerFunc(a.serveState)}}
}

// record is who was sent how many prompts, for one route.
type record struct {
	Model    string          `json:"model"` // empty for lb_policy rolter
	Bytes    int64           `json:"bytes"`
	Replicas []replicaRecord `json:"replicas"`
}

type replicaRecord struct {
	Address string `json:"address"` // with #rank where the engine has several
	Model   string `json:"upstream_model,omitempty"`
	Prompts int    `json:"prompts"`
}

// records reads the shared state, sorted.
func records() []record {
	all := []record{}
	prefixPools.Range(func(name, value any) bool {
		pool, ok := value.(*prefixPool)
		if !ok {
			return true
		}
		model := strings.TrimPrefix(strings.TrimPrefix(name.(string), policyGroup), routeGroup)
		rec := record{Model: model, Bytes: pool.bytes(), Replicas: []replicaRecord{}}
		for key, prompts := range pool.Prompts() {
			id := identityOf(key)
			rec.Replicas = append(rec.Replicas, replicaRecord{id.place(), id.model, prompts})
		}
		slices.SortFunc(rec.Replicas, func(a, b replicaRecord) int {
			return strings.Compare(a.Address+"\x00"+a.Model, b.Address+"\x00"+b.Model)
		})
		all = append(all, rec)
		return true
	})
	slices.SortFunc(all, func(a, b record) int { return strings.Compare(a.Model, b.Model) })
	return all
}

// stream is the KV events of one engine, or of one of its ranks.
type stream struct {
	Address  string `json:"address"` // with #rank where the engine has several
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay,omitempty"`
	State    string `json:"state"`

	Blocks  int    `json:"blocks"`
	Orphans int    `json:"orphans,omitempty"` // blocks that wait for the one before them
	Refused uint64 `json:"blocks_refused,omitempty"`

	LastSeq     uint64 `json:"last_seq"`
	Batches     uint64 `json:"batches"`
	Undecodable uint64 `json:"undecodable_batches,omitempty"`
	Skipped     uint64 `json:"skipped_events,omitempty"`
	Duplicates  uint64 `json:"duplicate_batches,omitempty"`
	Gaps        uint64 `json:"gaps,omitempty"`
	Losses      uint64 `json:"losses,omitempty"`
	Restarts    uint64 `json:"restarts,omitempty"`
	Replays     uint64 `json:"replays,omitempty"`

	state kvevents.State
}

// streams reads the state of all KV events, sorted.
func streams() []stream {
	all := []stream{}
	seen := make(map[string]bool)
	for _, f := range feeds.all() {
		ranks := f.ranks()
		for i, r := range ranks {
			s := stream{Address: f.identity, Endpoint: r.endpoint.publisher, Replay: r.endpoint.replay, state: r.state()}
			if len(ranks) > 1 {
				s.Address = placeOf(f.identity, strconv.Itoa(i))
			}
			// While a configuration takes the place of another that says something else, both are there.
			if seen[s.Address] {
				continue
			}
			seen[s.Address] = true
			s.State = s.state.String()
			if r.stream != nil {
				held, met := r.residency.Stats(), r.stream.Stats()
				s.Blocks, s.Orphans, s.Refused = held.Blocks, held.Orphans, held.Refused
				s.LastSeq, s.Batches, s.Undecodable, s.Skipped, s.Duplicates = met.LastSeq, met.Batches, met.Undecodable, met.SkippedEvents, met.Duplicates
				s.Gaps, s.Losses, s.Restarts, s.Replays = met.Gaps, met.Losses, met.Restarts, met.Replays
			}
			all = append(all, s)
		}
	}
	return all
}

// serveState answers GET /rolter/state with the requests in flight by address, what the metrics of engines told, the records by route, the KV event streams, and the LMCaches.
func (adminAPI) serveState(w http.ResponseWriter, r *http.Request) error {
	if r.Method != http.MethodGet {
		return caddy.APIError{HTTPStatus: http.StatusMethodNotAllowed, Err: errors.New("method not allowed")}
	}
	type inFlight struct {
		Address  string `json:"address"`
		InFlight int    `json:"requests_in_flight"`
		Others   int    `json:"requests_of_others,omitempty"`
		Capacity int64  `json:"capacity_tokens,omitempty"`
	}
	answer := struct {
		Loads   []inFlight `json:"loads"`
		Records []record   `json:"records"`
		Streams []stream   `json:"kv_events"`

		Caches []outerState `json:"lmcache"`
	}{Loads: []inFlight{}, Records: records(), Streams: streams()}
	answer.Caches, _ = outers.states()
	for _, load := range loads.Snapshot() {
		answer.Loads = append(answer.Loads, inFlight{load.Address, load.InFlight, load.Others, engines.capacity(load.Address)})
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(answer)
}

var _ caddy.AdminRouter = (*adminAPI)(nil)
