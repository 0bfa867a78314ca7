package rolter

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/rolter-ai/caddy-rolter/selection"
	"github.com/rolter-ai/caddy-rolter/trie"
)

// What is known of replicas outlives configurations: it is keyed by the stable identity of a replica, shared by all configurations that
// name it, and goes when the last of them is unloaded.
var (
	// loads are the requests in flight at every address.
	loads = selection.NewLoads(nil)

	// prefixPools holds a *prefixPool for each route, and one for all policies that stand alone.
	prefixPools = caddy.NewUsagePool()
)

// prefixPool is who was sent what, for one route.
type prefixPool struct {
	*selection.Prefixes
	tree     *trie.Tree // only inside Prefixes.Do
	sessions *selection.Sessions

	maxTokens atomic.Int64 // that may be recorded for a replica; 0 is as many as its engine has room for

	mu     sync.Mutex
	groups []*group // those that are open, the latest last
}

// Destruct implements [caddy.Destructor].
func (*prefixPool) Destruct() error { return nil }

// bytes is the memory of the record.
func (p *prefixPool) bytes() (n int64) {
	p.Do(func(selection.PrefixIndex) { n = p.tree.Bytes() })
	return n
}

func newPrefixPool() *prefixPool {
	tree := trie.New()
	p := &prefixPool{Prefixes: selection.NewPrefixes(tree), tree: tree, sessions: selection.NewSessions(nil)}
	p.Capacity = func(key string) int64 {
		id := identityOf(key)
		return cmp.Or(p.maxTokens.Load(), engines.capacity(id.address)/int64(max(id.ranks, 1)))
	}
	return p
}

// group is the replicas of one route or policy, in one configuration: what it took of the shared state.
type group struct {
	name     string
	prefixes *prefixPool
	inherit  bool // what a closed group had goes to the next one

	mu      sync.RWMutex
	members map[string]*member // by key; nil once closed
	view    atomic.Pointer[view]
	limited atomic.Bool
	static  atomic.Bool // the pool is always the same: what it does not have is gone
}

// member is one replica of a group.
type member struct {
	key      string
	identity identity
	load     *selection.Load
	recorded *selection.Member // nil when nothing can be recorded for it
	lastSeen atomic.Int64      // Unix seconds
}

// view is the members of a pool of upstreams that was seen before, by the identity of the upstreams: with a static pool, which is the
// usual case, nothing needs to be looked up.
type view struct {
	pool    reverseproxy.UpstreamPool
	members []*member
}

// Names of groups: that of the policies that stand alone, and that of a route, before its model.
const (
	policyGroup = "policy"
	routeGroup  = "route\x00"
)

// newGroup takes the shared state of this name. It must be closed. A policy does not know its upstreams before its first request: its group inherits
// those of the configuration before.
func newGroup(name string) (*group, error) {
	pooled, _, err := prefixPools.LoadOrNew(name, func() (caddy.Destructor, error) { return newPrefixPool(), nil })
	if err != nil {
		return nil, err
	}
	g := &group{name: name, prefixes: pooled.(*prefixPool), inherit: name == policyGroup, members: make(map[string]*member)}
	g.prefixes.mu.Lock()
	g.prefixes.groups = append(g.prefixes.groups, g)
	g.prefixes.mu.Unlock()
	return g, nil
}

// Bounds of a group whose upstreams are dynamic: those that no request has seen for memberExpiry go, and past maxMembers those that were not seen for
// longest, down to keepMembers.
const (
	maxMembers   = 4096
	keepMembers  = 3072
	memberExpiry = time.Hour // as long as Caddy remembers a dynamic upstream
)

// identity is what stays the same of a replica of a group from one configuration to the next.
type identity struct {
	address string
	model   string // upstream; "" is the request's own
	// Of an engine with several data-parallel ranks: each has a cache and a queue of its own.
	rank, ranks int
}

func (id identity) key() string {
	switch {
	case id.ranks > 1:
		return fmt.Sprintf("%s\x00%s\x00%d/%d", id.address, id.model, id.rank, id.ranks)
	case id.model != "":
		return id.address + "\x00" + id.model
	}
	return id.address
}

// place is the address, and the rank where there are several: what a load is counted by.
func (id identity) place() string {
	if id.ranks > 1 {
		return placeOf(id.address, strconv.Itoa(id.rank))
	}
	return id.address
}

func placeOf(address, rank string) string { return address + "#" + rank }

func identityOf(key string) (id identity) {
	id.address, key, _ = strings.Cut(key, "\x00")
	id.model, key, _ = strings.Cut(key, "\x00")
	rank, ranks, _ := strings.Cut(key, "/")
	id.rank, _ = strconv.Atoi(rank)
	id.ranks, _ = strconv.Atoi(ranks)
	return id
}

// get returns the member with this identity, which joins the shared state when it is new. After close it returns members that
// count load and record nothing: requests outlive their configuration.
func (g *group) get(id identity) *member {
	key := id.key()
	g.mu.RLock()
	m := g.members[key]
	g.mu.RUnlock()
	if m != nil {
		return m
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if m := g.members[key]; m != nil {
		return m
	}
	m = &member{key: key, identity: id, load: loads.Acquire(id.place())}
	if g.members == nil {
		loads.Release(m.load)
		return m
	}
	m.lastSeen.Store(time.Now().Unix())
	// An address with a placeholder in it stands for many replicas: there is no cache to speak of.
	if !strings.Contains(id.address, "{") {
		m.recorded = g.prefixes.Join(key)
	}
	g.members[key] = m
	g.sweep(time.Now())
	return m
}

// sweep drops members that have not been in any pool for long. It is called when the group grows: seldom. The caller holds g.mu.
func (g *group) sweep(now time.Time) {
	if v := g.view.Load(); v != nil {
		for _, m := range v.members {
			m.lastSeen.Store(now.Unix())
		}
	}
	for _, m := range g.members {
		if m.lastSeen.Load() < now.Add(-memberExpiry).Unix() {
			g.drop(m)
		}
	}
	if len(g.members) <= maxMembers {
		return
	}
	latestFirst := slices.SortedFunc(maps.Values(g.members), func(a, b *member) int { return cmp.Compare(b.lastSeen.Load(), a.lastSeen.Load()) })
	for _, m := range latestFirst[keepMembers:] {
		g.drop(m)
	}
}

func (g *group) drop(m *member) {
	delete(g.members, m.key)
	g.giveBack(m)
}

func (g *group) giveBack(m *member) {
	if m.recorded != nil {
		g.prefixes.Leave(m.recorded)
	}
	loads.Release(m.load)
}

// of returns the members of a pool of upstreams, in its order.
func (g *group) of(pool reverseproxy.UpstreamPool) []*member {
	if v := g.view.Load(); v != nil && samePool(v.pool, pool) {
		if !g.static.Load() && !g.static.Swap(true) {
			g.keepOnly(v.members)
		}
		return v.members
	}
	members := make([]*member, len(pool))
	now := time.Now().Unix()
	for i, up := range pool {
		members[i] = g.get(identity{address: normalDial(up.Dial)})
		members[i].lastSeen.Store(now)
	}
	g.view.Store(&view{pool, members})
	return members
}

func samePool(a, b reverseproxy.UpstreamPool) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// keepOnly drops what is not among the members.
func (g *group) keepOnly(members []*member) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.members {
		if !slices.Contains(members, m) {
			g.drop(m)
		}
	}
}

// close gives back what the group took. It may be called again.
func (g *group) close() {
	if g == nil {
		return
	}
	g.prefixes.mu.Lock()
	defer g.prefixes.mu.Unlock()
	at := slices.Index(g.prefixes.groups, g)
	if at < 0 {
		return
	}
	g.prefixes.groups = slices.Delete(g.prefixes.groups, at, at+1)

	g.mu.Lock()
	g.sweep(time.Now())
	members := g.members
	g.members = nil
	g.mu.Unlock()
	for _, m := range members {
		// Each of the others takes what it does not know to be another's.
		for _, heir := range g.prefixes.groups {
			if g.inherit && !heir.static.Load() {
				heir.get(m.identity)
			}
		}
		g.giveBack(m)
	}
	_, _ = prefixPools.Delete(g.name)
}

// limit bounds the shared state of the group, once. It is called with the first request: a configuration that never serves must not change what is
// shared with the one that does.
func (g *group) limit(t *Tuning) {
	if g.limited.Load() || g.limited.Swap(true) {
		return
	}
	g.prefixes.Do(func(selection.PrefixIndex) {
		g.prefixes.tree.SetLimits(trie.Limits{MaxNodes: t.MaxNodes, MaxBytes: t.MaxBytes})
	})
	g.prefixes.maxTokens.Store(int64(t.MaxTokens))
	g.prefixes.Resize()
	sessions := t.MaxSessions
	if sessions == 0 {
		sessions = selection.DefaultSessions
	}
	g.prefixes.sessions.SetLimits(sessions, time.Duration(or(t.SessionTTL, caddy.Duration(selection.DefaultSessionTTL))))
}

// normalDial is the stable identity of an upstream: its dial address with the network left out when it is tcp, and in lower case.
func normalDial(dial string) string {
	if strings.Contains(dial, "{") {
		return dial
	}
	addr, err := caddy.ParseNetworkAddress(dial)
	if err != nil {
		return dial
	}
	if addr.IsUnixNetwork() {
		return dial
	}
	hostPort := net.JoinHostPort(strings.ToLower(addr.Host), strconv.Itoa(int(addr.StartPort)))
	if addr.Network == "tcp" {
		return hostPort
	}
	return addr.Network + "/" + hostPort
}
