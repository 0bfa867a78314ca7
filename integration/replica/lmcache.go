package replica

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// LMCacheKind is which of LMCache's HTTP interfaces a server has.
type LMCacheKind string

// The interfaces, as in LMCache 0.5.6.
const (
	// LMCacheContract is an operator's adapter: any path answers {"occupancy":0.5,"cache_available":true}.
	LMCacheContract LMCacheKind = "contract"
	// LMCacheServer is the multiprocess server: /status, /healthcheck, /metrics.
	LMCacheServer LMCacheKind = "server"
	// LMCacheCoordinator knows many of these: /instances/usage, /directory/lookup.
	LMCacheCoordinator LMCacheKind = "coordinator"
	// LMCacheController knows many engines with LMCache in their process: /lookup, /health, /query_worker_info.
	LMCacheController LMCacheKind = "controller"
	// LMCacheInProcess is the internal API server of one such engine: /metrics, /conf.
	LMCacheInProcess LMCacheKind = "in-process"
)

var lmcacheKinds = []LMCacheKind{LMCacheContract, LMCacheServer, LMCacheCoordinator, LMCacheController, LMCacheInProcess}

// The faults of an LMCache, beside Hang and Status500. All but Flapping are of a request, whichever it is.
const (
	// Redirect answers 302, to where it came from.
	Redirect FaultKind = "redirect"
	// NotANumber says that the occupancy is NaN, as Python's JSON does.
	NotANumber FaultKind = "nan"
	// Overfull says that the occupancy is 1.4.
	Overfull FaultKind = "overfull"
	// Negative says that the occupancy is -0.3.
	Negative FaultKind = "negative"
	// Huge sends 10 MiB of white space before what it has to say.
	Huge FaultKind = "huge"
	// NotJSON answers with a page for people.
	NotJSON FaultKind = "not-json"
	// HalfClosed sends half of an answer, closes its side of the connection, and goes on reading.
	HalfClosed FaultKind = "half-closed"
	// Flapping is unhealthy every other time.
	Flapping FaultKind = "flapping"
)

var lmcacheFaults = faultSet{counted: []FaultKind{Hang, Status500, Redirect, NotANumber, Overfull, Negative, Huge, NotJSON, HalfClosed, Flapping}}

// LMCacheConfig is how an [LMCache] is to behave. Zero fields mean the defaults.
type LMCacheConfig struct {
	// Kind is the interface. Default LMCacheContract.
	Kind LMCacheKind
	// Instance is the instance that there is from the start. Default "inst-1".
	Instance string
	// Model is the path of the model, by which a coordinator knows it. Default "/models/sim".
	Model string
	// ChunkTokens and ChunkBytes are the sizes of a chunk. Default 256 and 1 MiB.
	ChunkTokens int
	ChunkBytes  int64
	// CapacityBytes is what each instance holds. Default 512 MiB.
	CapacityBytes int64
	// Fault is in effect from the start.
	Fault Fault
	// Listen is where [Run] has it listen; "" is no LMCache. Only Run looks at it.
	Listen string
}

func (c LMCacheConfig) withDefaults() LMCacheConfig {
	setDefault(&c.Kind, LMCacheContract)
	setDefault(&c.Instance, "inst-1")
	setDefault(&c.Model, "/models/sim")
	setDefault(&c.ChunkTokens, 256)
	setDefault(&c.ChunkBytes, 1<<20)
	setDefault(&c.CapacityBytes, 512<<20)
	return c
}

// Validate reports the first value that cannot be meant.
func (c LMCacheConfig) Validate() error {
	c = c.withDefaults()
	switch {
	case !slices.Contains(lmcacheKinds, c.Kind):
		return fmt.Errorf("lmcache kind %q: must be one of %v", c.Kind, lmcacheKinds)
	case c.ChunkTokens < 0:
		return fmt.Errorf("lmcache chunk tokens %d: must not be negative", c.ChunkTokens)
	case c.ChunkBytes < 0 || c.CapacityBytes < c.ChunkBytes:
		return fmt.Errorf("lmcache capacity bytes %d: must hold a chunk of %d", c.CapacityBytes, c.ChunkBytes)
	}
	return c.Fault.validate(lmcacheFaults)
}

// LMCache is a simulated LMCache server. It holds what it is given, chunk by chunk, and says how full it is and what it
// has. Its methods may be called at any time.
type LMCache struct {
	cfg    LMCacheConfig
	routes map[string]lmcacheAnswer // method and path
	http   *http.Server
	faults faults
	born   time.Time
	closed chan struct{}
	once   sync.Once
	active sync.RWMutex   // requests hold it for reading
	serve  sync.WaitGroup // the goroutine that accepts connections

	mu        sync.Mutex
	listener  net.Listener
	unhealthy bool
	flips     int // requests that met Flapping
	instances map[string]*lmcacheInstance
}

type lmcacheInstance struct {
	chunks    *Cache
	occupancy *float64 // as set, in place of what the chunks take
	reported  bool     // there has been something to report
}

// NewLMCache returns a server that does not listen yet. A configuration that cannot be meant is reported by Start.
func NewLMCache(cfg LMCacheConfig) *LMCache {
	cfg = cfg.withDefaults()
	l := &LMCache{cfg: cfg, born: time.Now(), closed: make(chan struct{}), instances: make(map[string]*lmcacheInstance)}
	l.instance(cfg.Instance)
	l.routes = l.newRoutes()
	l.http = &http.Server{Handler: l, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0)}
	l.faults.kinds, l.faults.apply = lmcacheFaults, func(FaultKind) error { return nil }
	_ = l.faults.set(cfg.Fault) // a nonsensical one is reported by Start
	return l
}

// instance returns an instance, a new one where the name is new; "" is the first one. The caller holds mu, or nobody else
// knows l.
func (l *LMCache) instance(name string) *lmcacheInstance {
	name = cmp.Or(name, l.cfg.Instance)
	i := l.instances[name]
	if i == nil {
		i = &lmcacheInstance{chunks: NewCache(int(l.cfg.CapacityBytes / max(l.cfg.ChunkBytes, 1)))}
		l.instances[name] = i
	}
	return i
}

// Start listens on addr, such as "127.0.0.1:0", and serves until Close.
func (l *LMCache) Start(addr string) error {
	if err := l.cfg.Validate(); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listener != nil {
		listener.Close()
		return errors.New("replica: lmcache started before")
	}
	l.listener = listener
	l.serve.Go(func() { l.http.Serve(listener) })
	return nil
}

// URL returns the base URL, without a slash at the end.
func (l *LMCache) URL() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listener == nil {
		return ""
	}
	return "http://" + l.listener.Addr().String()
}

// Close ends the server at once and returns when nothing of it runs any more.
func (l *LMCache) Close() error {
	var err error
	l.once.Do(func() {
		close(l.closed)
		l.faults.end()
		if err = l.http.Close(); errors.Is(err, net.ErrClosed) {
			err = nil
		}
	})
	l.serve.Wait()
	l.active.Lock()
	defer l.active.Unlock()
	return err
}

// SetFault puts a fault into effect, in place of the one before it. POST /sim/fault does the same.
func (l *LMCache) SetFault(f Fault) error { return l.faults.set(f) }

// SetHealthy says whether the cache can be used. It can until somebody says otherwise.
func (l *LMCache) SetHealthy(healthy bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unhealthy = !healthy
}

// SetOccupancy says how full an instance is, whatever it holds; "" is the first one.
func (l *LMCache) SetOccupancy(instance string, occupancy float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := l.instance(instance)
	i.occupancy, i.reported = &occupancy, true
}

// Store gives an instance the full chunks of tokens to hold; "" is the first one. The least recently used make room.
func (l *LMCache) Store(instance string, tokens []uint32, salt string) {
	keys := BlockKeys(tokens, l.cfg.ChunkTokens, salt)
	l.mu.Lock()
	defer l.mu.Unlock()
	i := l.instance(instance)
	i.chunks.Insert(keys)
	i.reported = i.reported || len(keys) > 0
}

// lmcacheView is what a request sees of the cache.
type lmcacheView struct {
	healthy   bool
	instances []lmcacheUsage // by name; the first one is the one that there is from the start
}

type lmcacheUsage struct {
	name      string
	occupancy float64
	objects   int
	reported  bool
}

// used is the number of bytes, as JSON or nearly so: NaN where the occupancy is.
func (u lmcacheUsage) used(capacity int64) string {
	if math.IsNaN(u.occupancy) {
		return "NaN"
	}
	return fmt.Sprint(int64(u.occupancy * float64(capacity)))
}

func (l *LMCache) view(fault FaultKind) lmcacheView {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := lmcacheView{healthy: !l.unhealthy}
	if fault == Flapping {
		l.flips++
		v.healthy = l.flips%2 == 0
	}
	names := slices.SortedFunc(maps.Keys(l.instances), func(a, b string) int {
		if first := l.cfg.Instance; a == first || b == first {
			return cmp.Compare(b2i(b == first), b2i(a == first))
		}
		return strings.Compare(a, b)
	})
	for _, name := range names {
		i := l.instances[name]
		u := lmcacheUsage{name: name, objects: i.chunks.Len(), reported: i.reported}
		switch {
		case fault == NotANumber:
			u.occupancy = math.NaN()
		case fault == Overfull:
			u.occupancy = 1.4
		case fault == Negative:
			u.occupancy = -0.3
		case i.occupancy != nil:
			u.occupancy = *i.occupancy
		default:
			u.occupancy = float64(u.objects) / float64(i.chunks.Capacity())
		}
		u.reported = u.reported || fault == NotANumber || fault == Overfull || fault == Negative
		v.instances = append(v.instances, u)
	}
	return v
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// ServeHTTP implements [http.Handler].
func (l *LMCache) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	l.active.RLock()
	defer l.active.RUnlock()
	if r.URL.Path == "/sim/fault" {
		l.faults.serve(w, r)
		return
	}
	switch fault := l.faults.take(); fault.Kind {
	case Hang:
		select {
		case <-r.Context().Done():
		case <-l.closed:
		}
		panic(http.ErrAbortHandler)
	case Status500:
		writeJSON(w, http.StatusInternalServerError, obj("detail", "Internal Server Error"))
	case Redirect:
		http.Redirect(w, r, r.URL.RequestURI(), http.StatusFound)
	case NotJSON:
		writeText(w, "text/html; charset=utf-8", "<html><body>Welcome to nginx!</body></html>")
	case HalfClosed:
		l.halfClose(w)
	default:
		if fault.Kind == Huge {
			io.WriteString(w, strings.Repeat(" ", 10<<20))
		}
		l.answer(w, r, l.view(fault.Kind))
	}
}

// halfClose sends the beginning of an answer and the end of the connection in this direction.
func (l *LMCache) halfClose(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"occupancy\":")
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.CloseWrite()
	}
	gone := make(chan struct{})
	go func() {
		io.Copy(io.Discard, conn)
		close(gone)
	}()
	select {
	case <-gone:
	case <-l.closed:
	}
	conn.Close()
	<-gone
}

func writeText(w http.ResponseWriter, contentType, text string) {
	w.Header().Set("Content-Type", contentType)
	io.WriteString(w, text)
}

func writeJSONText(w http.ResponseWriter, text string) { writeText(w, "application/json", text) }

// lmcacheAnswer writes what the path says of the cache.
type lmcacheAnswer func(w http.ResponseWriter, r *http.Request, v lmcacheView)

func (l *LMCache) newRoutes() map[string]lmcacheAnswer {
	switch l.cfg.Kind {
	case LMCacheServer:
		return map[string]lmcacheAnswer{"GET /status": l.status, "GET /healthcheck": l.healthcheck, "GET /metrics": l.serverMetrics}
	case LMCacheCoordinator:
		return map[string]lmcacheAnswer{"GET /instances/usage": l.instancesUsage, "GET /healthz": l.healthcheck, "POST /directory/lookup": l.directoryLookup}
	case LMCacheController:
		return map[string]lmcacheAnswer{"POST /lookup": l.lookup, "POST /health": l.workerHealth, "POST /query_worker_info": l.workerInfo}
	case LMCacheInProcess:
		return map[string]lmcacheAnswer{"GET /metrics": l.inProcessMetrics, "GET /conf": l.conf}
	default:
		return nil
	}
}

func (l *LMCache) answer(w http.ResponseWriter, r *http.Request, v lmcacheView) {
	if l.cfg.Kind == LMCacheContract {
		writeJSONText(w, fmt.Sprintf(`{"occupancy":%s,"cache_available":%t}`, float(v.instances[0].occupancy), v.healthy))
		return
	}
	if answer := l.routes[r.Method+" "+r.URL.Path]; answer != nil {
		answer(w, r, v)
		return
	}
	writeJSON(w, http.StatusNotFound, obj("detail", "Not Found"))
}

//go:embed lmcache_status.json
var lmcacheStatus string

func (l *LMCache) status(w http.ResponseWriter, _ *http.Request, v lmcacheView) {
	u := v.instances[0]
	writeJSONText(w, strings.NewReplacer(
		"HEALTHY", fmt.Sprint(v.healthy),
		"CHUNK", fmt.Sprint(l.cfg.ChunkTokens),
		"OBJECTS", fmt.Sprint(u.objects),
		"USED", u.used(l.cfg.CapacityBytes),
		"TOTAL", fmt.Sprint(l.cfg.CapacityBytes),
		"RATIO", float(u.occupancy),
		"MODEL", string(encode(l.cfg.Model)),
	).Replace(strings.TrimSpace(lmcacheStatus)))
}

func (l *LMCache) healthcheck(w http.ResponseWriter, _ *http.Request, v lmcacheView) {
	if v.healthy {
		writeJSON(w, http.StatusOK, obj("status", "healthy"))
		return
	}
	writeJSON(w, http.StatusServiceUnavailable, obj("status", "unhealthy", "reason", "simulated"))
}

const prometheusText = "text/plain; version=1.0.0; charset=utf-8"

func (l *LMCache) serverMetrics(w http.ResponseWriter, _ *http.Request, v lmcacheView) {
	u := v.instances[0]
	var b strings.Builder
	for _, m := range []struct{ name, help, value string }{
		{"lmcache_mp_l1_memory_usage_bytes", "Bytes currently held in L1 cache", float(u.occupancy * float64(l.cfg.CapacityBytes))},
		{"lmcache_mp_l1_usage_ratio", "L1 used/total ratio (0.0–1.0)", float(u.occupancy)},
		{"lmcache_mp_l1_staging_bytes", "Bytes held by L1 staging objects (write-reserved, not admitted)", "0.0"},
	} {
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %[1]s gauge\n%[1]s{backend=\"dram\",l1_tag=\"_default\"} %[3]s\n", m.name, m.help, m.value)
	}
	writeText(w, prometheusText, b.String())
}

func (l *LMCache) instancesUsage(w http.ResponseWriter, _ *http.Request, v lmcacheView) {
	var instances []string
	for _, u := range v.instances {
		modules := ""
		if u.reported {
			modules = fmt.Sprintf(`{"tier":"l1","backend":"dram","shared":false,"used_bytes":%s,"capacity_bytes":%d,"usage_ratio":%s}`,
				u.used(l.cfg.CapacityBytes), l.cfg.CapacityBytes, float(u.occupancy))
		}
		instances = append(instances, fmt.Sprintf(`{"instance_id":%s,"registered":%t,"declared_capacity":false,"modules":[%s]}`,
			encode(u.name), v.healthy, modules))
	}
	writeJSONText(w, fmt.Sprintf(`{"instances":[%s],"shared_modules":[]}`, strings.Join(instances, ",")))
}

// readLookup reads the body of a look-up; false where it has been answered already.
func readLookup(w http.ResponseWriter, r *http.Request, into any) bool {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 64<<20))
	if err == nil {
		err = json.Unmarshal(body, into)
	}
	if err != nil {
		writeJSON(w, http.StatusUnprocessableEntity, obj("detail", []any{obj("type", "json_invalid", "loc", []any{"body", 0}, "msg", "JSON decode error")}))
	}
	return err == nil
}

// directoryLookup says where each chunk of a prompt is. A model by any other name than its path is nowhere.
func (l *LMCache) directoryLookup(w http.ResponseWriter, r *http.Request, v lmcacheView) {
	var in struct {
		TokenIDs  []uint32 `json:"token_ids"`
		ModelName string   `json:"model_name"`
		CacheSalt string   `json:"cache_salt"`
	}
	if !readLookup(w, r, &in) {
		return
	}
	keys := BlockKeys(in.TokenIDs, l.cfg.ChunkTokens, in.CacheSalt)
	results := []any{}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys {
		placements := []any{}
		for _, u := range v.instances {
			if in.ModelName == l.cfg.Model && l.instances[u.name].chunks.Lookup([]uint64{key}) > 0 {
				placements = append(placements, obj("instance_id", u.name, "incarnation", l.born.Unix(), "tier", "l1", "backend", "dram",
					"size_bytes", l.cfg.ChunkBytes, "shared", false))
			}
		}
		hash := fmt.Sprintf("%016x%016x%016x%016x", key, mix(key), mix(mix(key)), mix(mix(mix(key))))
		results = append(results, obj(
			"key", obj("chunk_hash_hex", hash, "model_name", in.ModelName, "kv_rank", 16777472, "object_group_id", 0, "cache_salt", in.CacheSalt),
			"placements", placements, "token_ids", []any{}, "access_count", len(placements)))
	}
	writeJSON(w, http.StatusOK, obj("chunks", len(keys), "results", results))
}

// lookup says how long a prefix of a prompt each engine has.
func (l *LMCache) lookup(w http.ResponseWriter, r *http.Request, v lmcacheView) {
	var in struct {
		Tokens []uint32 `json:"tokens"`
	}
	if !readLookup(w, r, &in) {
		return
	}
	keys := BlockKeys(in.Tokens, l.cfg.ChunkTokens, "")
	layout := object{}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, u := range v.instances {
		if n := l.instances[u.name].chunks.Lookup(keys); n > 0 {
			layout = layout.with(u.name, []any{"LocalCPUBackend", n * l.cfg.ChunkTokens})
		}
	}
	writeJSON(w, http.StatusOK, obj("event_id", "Lookup"+randomID(), "layout_info", layout))
}

// ofInstance reads a body that names an instance, and reports whether there is one by that name.
func ofInstance(w http.ResponseWriter, r *http.Request, v lmcacheView) (name string, known, ok bool) {
	var in struct {
		InstanceID string `json:"instance_id"`
	}
	ok = readLookup(w, r, &in)
	return in.InstanceID, slices.ContainsFunc(v.instances, func(u lmcacheUsage) bool { return u.name == in.InstanceID }), ok
}

// workerHealth answers 200 and no worker for an instance that nobody knows.
func (l *LMCache) workerHealth(w http.ResponseWriter, r *http.Request, v lmcacheView) {
	_, known, ok := ofInstance(w, r, v)
	if !ok {
		return
	}
	codes := object{}
	if known {
		codes = codes.with("0", b2i(!v.healthy))
	}
	writeJSON(w, http.StatusOK, obj("event_id", "health"+randomID(), "error_codes", codes))
}

func (l *LMCache) workerInfo(w http.ResponseWriter, r *http.Request, v lmcacheView) {
	name, known, ok := ofInstance(w, r, v)
	if !ok {
		return
	}
	infos := []any{}
	if known {
		infos = append(infos, obj("instance_id", name, "worker_id", 0, "ip", "127.0.0.1", "port", 8001, "peer_init_url", nil,
			"registration_time", float64(l.born.UnixMilli())/1e3, "last_heartbeat_time", float64(time.Now().UnixMilli())/1e3))
	}
	writeJSON(w, http.StatusOK, obj("event_id", "QueryWorkerInfo"+randomID(), "worker_infos", infos))
}

// inProcessMetrics has no sample of the usage until the engine has worked.
func (l *LMCache) inProcessMetrics(w http.ResponseWriter, _ *http.Request, v lmcacheView) {
	u := v.instances[0]
	labels := fmt.Sprintf(`{model_name=%q,role="worker",served_model_name="sim",worker_id="0"}`, l.cfg.Model)
	var b strings.Builder
	b.WriteString("# HELP lmcache:local_cache_usage Local cache usage (bytes) of lmcache\n# TYPE lmcache:local_cache_usage gauge\n")
	if u.reported {
		fmt.Fprintf(&b, "lmcache:local_cache_usage%s %s\n", labels, float(u.occupancy*float64(l.cfg.CapacityBytes)))
	}
	fmt.Fprintf(&b, "# HELP lmcache:lmcache_is_healthy The health status of LMCache (1=healthy, 0=unhealthy)\n"+
		"# TYPE lmcache:lmcache_is_healthy gauge\nlmcache:lmcache_is_healthy%s %s\n", labels, float(float64(b2i(v.healthy))))
	writeText(w, prometheusText, b.String())
}

// conf tells the settings that are asked for by name, of those that matter.
func (l *LMCache) conf(w http.ResponseWriter, r *http.Request, _ lmcacheView) {
	settings := object{}
	for _, f := range obj("chunk_size", l.cfg.ChunkTokens, "local_cpu", true, "max_local_cpu_size", float64(l.cfg.CapacityBytes)/(1<<30)) {
		if names := r.URL.Query().Get("names"); names == "" || slices.Contains(strings.Split(names, ","), f.key) {
			settings = append(settings, f)
		}
	}
	text, _ := json.MarshalIndent(settings, "", "  ") // all its types can be encoded
	writeText(w, "text/plain; charset=utf-8", string(text))
}

var _ http.Handler = (*LMCache)(nil)
