// Package rolter is a Caddy plugin that routes requests to large language models: each one goes to the replica (vLLM, SGLang, …)
// whose KV cache already holds the beginning of its prompt, so that the engine reuses it instead of computing it again.
//
// It brings two ways in. The handler `rolter` (http.handlers.rolter) stands in front of all replicas of all models: it reads the model name,
// finds the route, chooses the replica and proxies. The policy `lb_policy rolter` (http.reverse_proxy.selection_policies.rolter)
// chooses among the upstreams of anybody's reverse_proxy. Caddy does all transport.
package rolter

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

func init() {
	caddy.RegisterModule(App{})
	caddy.RegisterModule(Handler{})
	caddy.RegisterModule(Policy{})
	caddy.RegisterModule(adminAPI{})
	httpcaddyfile.RegisterHandlerDirective("rolter", parseHandler)
	httpcaddyfile.RegisterDirectiveOrder("rolter", httpcaddyfile.Before, "reverse_proxy")
}

// App is where background work starts and stops with the configuration. It has no configuration of its own: handlers and policies bring it into being
// and tell it, when they are provisioned, what there is to do.
type App struct {
	sources []*source // of metrics
	feeds   []*feedSource
	outers  []*outerSource // LMCaches
}

// CaddyModule returns the Caddy module information.
func (App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rolter", New: func() caddy.Module { return new(App) }}
}

// Start implements [caddy.App].
func (a *App) Start() error {
	if err := outers.start(a.outers); err != nil {
		outers.stop(a.outers)
		return err
	}
	engines.start(a.sources)
	feeds.start(a.feeds)
	return nil
}

// Stop implements [caddy.App].
func (a *App) Stop() error {
	engines.stop(a.sources)
	outers.stop(a.outers)
	return nil
}

var _ caddy.App = (*App)(nil)
