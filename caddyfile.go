package rolter

import (
	"math"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/dustin/go-humanize"
)

func parseHandler(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	handler := new(Handler)
	if err := handler.UnmarshalCaddyfile(h.Dispenser); err != nil {
		return nil, err
	}
	for _, rt := range handler.Routes {
		if rt.ReverseProxy != nil {
			if err := rt.ReverseProxy.FinalizeUnmarshalCaddyfile(h); err != nil {
				return nil, err
			}
		}
	}
	return handler, nil
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	rolter [<matcher>] {
//	    provider <name> <api_base> {
//	        kind      openai_compatible
//	        api_key   <key>
//	        metrics   auto|off
//	        engine_priority on|off|trust_client
//	        kv_events <endpoint>|auto {
//	            topic      <prefix>
//	            replay     <endpoint>
//	            ranks      <number>
//	            max_blocks <number>
//	        }
//	        lmcache <url> {
//	            kind     auto|json|mp|prometheus|controller|coordinator
//	            refresh  <duration>
//	            stale    <duration>
//	            timeout  <duration>
//	            capacity <size>
//	            instance <name>
//	            lookup   on|off
//	            model    <path>
//	            chunk    <tokens>
//	        }
//	    }
//	    route <model> {
//	        strategy <name> [<args...>]
//	        target   <provider> [<model>] [weight <weight>]
//	        threshold       <share>
//	        overload_margin <requests>
//	        overload_ratio  <factor>
//	        w               <factor>
//	        score_weights {
//	            session <weight>
//	            weight  <weight>
//	            load    <weight>
//	            prefix  <weight>
//	            lmcache <weight>
//	        }
//	        session_header  <name>
//	        session_ttl     <duration>
//	        max_sessions    <number>
//	        max_tokens      auto|<number>
//	        max_nodes       <number>
//	        max_bytes       <size>
//	        tokenize         on|off
//	        tokenize_timeout <duration>
//	        reverse_proxy {
//	            # every subdirective of reverse_proxy but to, dynamic and lb_policy
//	        }
//	    }
//	    egress {
//	        block_link_local on|off
//	        block_metadata   on|off
//	        block_private    on|off
//	        block_loopback   on|off
//	        allow_hosts      <hosts...>
//	    }
//	    max_body         <size>
//	    decision_headers on|off
//	}
//
// `provider`, `route` and `target` may be repeated.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the directive's name
	if d.NextArg() {
		return d.ArgErr()
	}
	seen := make(once)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		var err error
		switch key := d.Val(); key {
		case "provider":
			err = h.parseProvider(d)
		case "route":
			err = h.parseRoute(d)
		case "egress":
			if err = seen.check(d, key); err == nil {
				h.Egress, err = parseEgress(d)
			}
		case "max_body":
			if err = seen.check(d, key); err == nil {
				h.MaxBody, err = sizeArg(d)
			}
		case "decision_headers":
			if err = seen.check(d, key); err == nil {
				h.DecisionHeaders, err = switchArg(d)
			}
		default:
			err = d.Errf("unrecognized subdirective '%s'", key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (h *Handler) parseProvider(d *caddyfile.Dispenser) error {
	p := new(Provider)
	if !d.AllArgs(&p.Name, &p.APIBase) {
		return d.ArgErr()
	}
	h.Providers = append(h.Providers, p)
	seen := make(once)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		key := d.Val()
		err := seen.check(d, key)
		if err != nil {
			return err
		}
		switch key {
		case "kind":
			p.Kind, err = arg(d)
		case "api_key":
			p.APIKey, err = arg(d)
		case "metrics":
			p.Metrics, err = arg(d)
		case "engine_priority":
			p.EnginePriority, err = arg(d)
		case "kv_events":
			p.KVEvents = new(KVEvents)
			p.KVEvents.Endpoint, err = arg(d)
			if err == nil {
				err = p.KVEvents.parse(d)
			}
		case "lmcache":
			p.LMCache = new(LMCache)
			p.LMCache.Endpoint, err = arg(d)
			if err == nil {
				err = p.LMCache.parse(d)
			}
		default:
			err = d.Errf("provider %s: unrecognized subdirective '%s'", p.Name, key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (k *KVEvents) parse(d *caddyfile.Dispenser) error {
	seen := make(once)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		key := d.Val()
		err := seen.check(d, key)
		if err != nil {
			return err
		}
		switch key {
		case "topic":
			k.Topic, err = arg(d)
		case "replay":
			k.Replay, err = arg(d)
		case "ranks":
			k.Ranks, err = integerArg(d)
		case "max_blocks":
			k.MaxBlocks, err = integerArg(d)
		default:
			err = d.Errf("kv_events: unrecognized subdirective '%s'", key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (l *LMCache) parse(d *caddyfile.Dispenser) error {
	seen := make(once)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		key := d.Val()
		err := seen.check(d, key)
		if err != nil {
			return err
		}
		switch key {
		case "kind":
			l.Kind, err = arg(d)
		case "refresh":
			l.Refresh, err = durationArg(d)
		case "stale":
			l.Stale, err = durationArg(d)
		case "timeout":
			l.Timeout, err = durationArg(d)
		case "capacity":
			l.Capacity, err = sizeArg(d)
		case "instance":
			l.Instance, err = arg(d)
		case "lookup":
			var lookup *bool
			lookup, err = switchArg(d)
			l.Lookup = *lookup
		case "model":
			l.Model, err = arg(d)
		case "chunk":
			l.Chunk, err = integerArg(d)
		default:
			err = d.Errf("lmcache: unrecognized subdirective '%s'", key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (h *Handler) parseRoute(d *caddyfile.Dispenser) error {
	rt := new(Route)
	if !d.AllArgs(&rt.Model) {
		return d.ArgErr()
	}
	h.Routes = append(h.Routes, rt)
	seen := make(once)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		key := d.Val()
		if key == "target" {
			if err := rt.parseTarget(d); err != nil {
				return err
			}
			continue
		}
		if err := seen.check(d, key); err != nil {
			return err
		}
		known, err := rt.Tuning.parse(d, key)
		switch {
		case known:
		case key == "strategy":
			err = rt.parseStrategy(d)
		case key == "tokenize":
			rt.Tokenize, err = switchArg(d)
		case key == "tokenize_timeout":
			rt.TokenizeTimeout, err = durationArg(d)
		case key == "reverse_proxy":
			rt.ReverseProxy = new(reverseproxy.Handler)
			err = rt.ReverseProxy.UnmarshalCaddyfile(d.NewFromNextSegment())
		default:
			err = d.Errf("route %s: unrecognized subdirective '%s'", rt.Model, key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (rt *Route) parseTarget(d *caddyfile.Dispenser) error {
	t := new(Target)
	if !d.Args(&t.Provider) {
		return d.ArgErr()
	}
	args := d.RemainingArgs()
	if n := len(args); n >= 2 && args[n-2] == "weight" {
		weight, err := parseNumber(args[n-1])
		if err != nil {
			return d.Errf("target %s: invalid weight '%s'", t.Provider, args[n-1])
		}
		t.Weight, args = &weight, args[:n-2]
	}
	switch {
	case len(args) > 1:
		return d.ArgErr()
	case len(args) == 1 && args[0] == "weight":
		return d.Errf("target %s: weight has no number", t.Provider)
	case len(args) == 1:
		t.Model = args[0]
	}
	rt.Targets = append(rt.Targets, t)
	return nil
}

// parseStrategy reads the name of a strategy. A policy of Caddy's reads its own arguments and block.
func (rt *Route) parseStrategy(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	rt.Strategy = d.Val()
	if _, own := strategies[rt.Strategy]; own || rt.Strategy == "weighted_round_robin" && d.CountRemainingArgs() == 0 {
		if d.NextArg() {
			return d.Errf("strategy %s takes no arguments", rt.Strategy)
		}
		if d.NextBlock(d.Nesting()) {
			return d.Errf("strategy %s takes no block: its parameters stand in the route", rt.Strategy)
		}
		return nil
	}
	if _, err := caddy.GetModule(policyNamespace + "." + rt.Strategy); err != nil {
		return d.Errf("strategy '%s': unknown; there are %s", rt.Strategy, strings.Join(strategyNames(), ", "))
	}
	module, err := caddyfile.UnmarshalModule(d, policyNamespace+"."+rt.Strategy)
	if err != nil {
		return err
	}
	rt.SelectionPolicyRaw = caddyconfig.JSONModuleObject(module, "policy", rt.Strategy, nil)
	return nil
}

// parse reads one of the parameters; known is false when key is none of them.
func (t *Tuning) parse(d *caddyfile.Dispenser, key string) (known bool, err error) {
	switch key {
	case "threshold":
		t.Threshold, err = numberArg(d)
	case "overload_ratio":
		t.OverloadRatio, err = numberArg(d)
	case "overload_margin":
		var margin int
		margin, err = integerArg(d)
		t.OverloadMargin = &margin
	case "w":
		t.W, err = numberArg(d)
	case "score_weights":
		t.ScoreWeights = new(ScoreWeights)
		err = t.ScoreWeights.parse(d)
	case "session_header":
		t.SessionHeader, err = arg(d)
	case "session_ttl":
		var ttl caddy.Duration
		ttl, err = durationArg(d)
		t.SessionTTL = &ttl
	case "max_sessions":
		t.MaxSessions, err = integerArg(d)
	case "max_tokens":
		t.MaxTokens, err = parsed(d, "number of tokens (or auto)", parseMaxTokens)
	case "max_nodes":
		t.MaxNodes, err = integerArg(d)
	case "max_bytes":
		t.MaxBytes, err = sizeArg(d)
	default:
		return false, nil
	}
	return true, err
}

func (w *ScoreWeights) parse(d *caddyfile.Dispenser) error {
	if d.NextArg() {
		return d.ArgErr()
	}
	seen := make(once)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		key := d.Val()
		err := seen.check(d, key)
		known := false
		w.each(func(name string, weight **float64) {
			if name == key && err == nil {
				known = true
				*weight, err = numberArg(d)
			}
		})
		if err == nil && !known {
			err = d.Errf("score_weights: unrecognized score '%s'", key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func parseEgress(d *caddyfile.Dispenser) (*Egress, error) {
	e := new(Egress)
	if d.NextArg() {
		return nil, d.ArgErr()
	}
	seen := make(once)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		key := d.Val()
		if key == "allow_hosts" {
			hosts := d.RemainingArgs()
			if len(hosts) == 0 {
				return nil, d.ArgErr()
			}
			e.AllowHosts = append(e.AllowHosts, hosts...)
			continue
		}
		err := seen.check(d, key)
		if err != nil {
			return nil, err
		}
		switch key {
		case "block_link_local":
			e.BlockLinkLocal, err = switchArg(d)
		case "block_metadata":
			e.BlockMetadata, err = switchArg(d)
		case "block_private":
			e.BlockPrivate, err = switchArg(d)
		case "block_loopback":
			e.BlockLoopback, err = switchArg(d)
		default:
			err = d.Errf("egress: unrecognized subdirective '%s'", key)
		}
		if err != nil {
			return nil, err
		}
	}
	return e, nil
}

// once finds subdirectives that are given twice.
type once map[string]bool

func (o once) check(d *caddyfile.Dispenser, key string) error {
	if o[key] {
		return d.Errf("%s already specified", key)
	}
	o[key] = true
	return nil
}

// arg reads the one argument of a subdirective.
func arg(d *caddyfile.Dispenser) (string, error) {
	var s string
	if !d.AllArgs(&s) {
		return "", d.ArgErr()
	}
	return s, nil
}

// parsed reads one argument by parse; what is named in the error.
func parsed[T any](d *caddyfile.Dispenser, what string, parse func(string) (T, error)) (v T, err error) {
	key := d.Val()
	s, err := arg(d)
	if err != nil {
		return v, err
	}
	if v, err = parse(s); err != nil {
		return v, d.Errf("%s: invalid %s '%s'", key, what, s)
	}
	return v, nil
}

func numberArg(d *caddyfile.Dispenser) (*float64, error) {
	v, err := parsed(d, "number", parseNumber)
	return &v, err
}

// parseNumber reads a finite number: JSON, which a Caddyfile is turned into, has no other.
func parseNumber(s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err == nil && (math.IsNaN(v) || math.IsInf(v, 0)) {
		err = strconv.ErrRange
	}
	return v, err
}

func integerArg(d *caddyfile.Dispenser) (int, error) {
	return parsed(d, "number", strconv.Atoi)
}

func sizeArg(d *caddyfile.Dispenser) (int64, error) {
	return parsed(d, "size", func(s string) (int64, error) {
		n, err := humanize.ParseBytes(s)
		if err == nil && n > 1<<50 {
			err = strconv.ErrRange
		}
		return int64(n), err
	})
}

func durationArg(d *caddyfile.Dispenser) (caddy.Duration, error) {
	return parsed(d, "duration", func(s string) (caddy.Duration, error) {
		v, err := caddy.ParseDuration(s)
		return caddy.Duration(v), err
	})
}

func switchArg(d *caddyfile.Dispenser) (*bool, error) {
	v, err := parsed(d, "value (on or off)", func(s string) (bool, error) {
		if s != "on" && s != "off" {
			return false, strconv.ErrSyntax
		}
		return s == "on", nil
	})
	return &v, err
}

// Interface guards
var _ caddyfile.Unmarshaler = (*Handler)(nil)
