package rolter

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
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
	Address string `json:"address"`
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
			address, upstreamModel, _ := strings.Cut(key, "\x00")
			rec.Replicas = append(rec.Replicas, replicaRecord{address, upstreamModel, prompts})
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

// serveState answers GET /rolter/state with the requests in flight by address, what the metrics of engines told, and the records by route.
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
	}{Loads: []inFlight{}, Records: records()}
	for _, load := range loads.Snapshot() {
		answer.Loads = append(answer.Loads, inFlight{load.Address, load.InFlight, load.Others, engines.capacity(load.Address)})
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(answer)
}

var _ caddy.AdminRouter = (*adminAPI)(nil)
