package replica

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"time"
)

// Config is how a [Server] is to behave. Zero fields mean the defaults.
type Config struct {
	// Timing is the speed of the replica and its limits.
	Timing
	// Model is the served model name, or several separated by commas, of which the first is the one in the metrics.
	// Default "sim".
	Model string
	// BlockSize is the number of tokens of a cache block. Default 16, as vLLM's.
	BlockSize int
	// CacheBlocks is the capacity of the prefix cache in blocks; 0 is unbounded.
	CacheBlocks int
	// ClaimedBlocks is the capacity that /metrics claims in vllm:cache_config_info, for a router that must cope with a
	// false one, as it gets from replicas of hybrid models. Default 0: the truth.
	ClaimedBlocks int
	// MaxModelLen is the longest prompt and answer together, in tokens. Default 131072; never more than the cache holds,
	// as vLLM does not start with less.
	MaxModelLen int
	// AnswerTokens is the length of an answer to a request that does not limit it. Default 64.
	AnswerTokens int
	// TimeScale lets the replica live so many times faster than real time, at most 10,000. Default 1.
	TimeScale float64
	// KeepAlive is how long an idle connection stays open; then the server closes it without a word, as uvicorn does.
	// Default 5 s, vLLM's.
	KeepAlive time.Duration
	// ShutdownTimeout is vLLM's --shutdown-timeout: how long Shutdown lets running requests go on. Default 0.
	ShutdownTimeout time.Duration
	// ShutdownLinger is how long a server that shuts down answers 500 after its last request has ended. Default 200 ms,
	// which was seen on vLLM 0.32.
	ShutdownLinger time.Duration
	// APIKey, where set, is demanded as a bearer token on /v1 paths, as by vLLM's --api-key.
	APIKey string
	// RefusePriority answers 400 to a request with a priority other than 0, as old versions of vLLM without priority
	// scheduling do; newer ones ignore the field. It contradicts Scheduling ByPriority.
	RefusePriority bool
	// NoPromptTokensDetails leaves cached_tokens out of the OpenAI usage objects, as a vLLM without
	// --enable-prompt-tokens-details does.
	NoPromptTokensDetails bool
	// Seed varies the generated text.
	Seed uint64
	// MaxBodyBytes limits a request's body. Default 64 MiB.
	MaxBodyBytes int64
	// KeepRequests is how many of the last requests [Server.Requests] remembers. Default 0: none.
	KeepRequests int
	// Fault is in effect from the start.
	Fault Fault
	// Listen is the address that [Run] listens on. Default ":8001".
	Listen string
}

func (c Config) withDefaults() Config {
	c.Timing = c.Timing.WithDefaults()
	setDefault(&c.Model, "sim")
	setDefault(&c.BlockSize, 16)
	setDefault(&c.MaxModelLen, 131072)
	if c.CacheBlocks > 0 {
		c.MaxModelLen = min(c.MaxModelLen, c.CacheBlocks*c.BlockSize)
	}
	setDefault(&c.AnswerTokens, 64)
	setDefault(&c.TimeScale, 1)
	setDefault(&c.KeepAlive, 5*time.Second)
	setDefault(&c.ShutdownLinger, 200*time.Millisecond)
	setDefault(&c.MaxBodyBytes, 64<<20)
	setDefault(&c.Listen, ":8001")
	return c
}

// Validate reports the first value that cannot be meant.
func (c Config) Validate() error {
	if err := c.Timing.Validate(); err != nil {
		return err
	}
	for _, n := range []struct {
		name  string
		value int64
	}{
		{"block size", int64(c.BlockSize)},
		{"cache blocks", int64(c.CacheBlocks)},
		{"claimed blocks", int64(c.ClaimedBlocks)},
		{"max model len", int64(c.MaxModelLen)},
		{"answer tokens", int64(c.AnswerTokens)},
		{"keep-alive", int64(c.KeepAlive)},
		{"shutdown timeout", int64(c.ShutdownTimeout)},
		{"shutdown linger", int64(c.ShutdownLinger)},
		{"max body bytes", c.MaxBodyBytes},
		{"keep requests", int64(c.KeepRequests)},
	} {
		if n.value < 0 {
			return fmt.Errorf("%s %d: must not be negative", n.name, n.value)
		}
	}
	if !(c.TimeScale >= 0 && c.TimeScale <= 1e4) {
		return fmt.Errorf("time scale %v: must be more than 0 and at most 10000", c.TimeScale)
	}
	if c.RefusePriority && c.Scheduling == ByPriority {
		return errors.New("refuse priority: a replica with priority scheduling does not")
	}
	return c.Fault.validate()
}

// models returns the served names.
func (c Config) models() []string {
	names := strings.Split(c.Model, ",")
	for i := range names {
		names[i] = strings.TrimSpace(names[i])
	}
	return names
}

// RegisterFlags defines the flags of the replica command and returns the configuration that they fill.
func RegisterFlags(fs *flag.FlagSet) *Config {
	c := new(Config)
	*c = c.withDefaults()
	fs.StringVar(&c.Listen, "listen", c.Listen, "address to listen on")
	fs.StringVar(&c.Model, "model", c.Model, "served model name, or several separated by commas")
	fs.IntVar(&c.CacheBlocks, "cache-blocks", c.CacheBlocks, "capacity of the prefix cache in blocks, 0 for unbounded")
	fs.IntVar(&c.ClaimedBlocks, "claimed-blocks", c.ClaimedBlocks, "capacity that /metrics claims in blocks, 0 for the truth")
	fs.IntVar(&c.BlockSize, "block-size", c.BlockSize, "tokens of a cache block")
	fs.IntVar(&c.MaxModelLen, "max-model-len", c.MaxModelLen, "longest prompt and answer together, in tokens")
	fs.Float64Var(&c.PrefillRate, "prefill-rate", c.PrefillRate, "prefill speed in tokens per second")
	fs.Func("decode-ms", "time of a generated token in milliseconds (default 30)", func(s string) error {
		d, err := time.ParseDuration(s + "ms")
		c.DecodeTime = d
		return err
	})
	fs.IntVar(&c.MaxRunning, "max-running", c.MaxRunning, "most requests computed at the same time (vLLM: --max-num-seqs)")
	fs.IntVar(&c.MaxQueued, "max-queued", c.MaxQueued, "most requests in flight, running ones included, 0 for unlimited (vLLM: --max-num-queued-reqs)")
	fs.StringVar((*string)(&c.Scheduling), "scheduling", string(c.Scheduling), "order of waiting requests: fifo, or priority for lowest \"priority\" first (vLLM: --scheduling-policy)")
	fs.BoolVar(&c.RefusePriority, "refuse-priority", false, "answer 400 to requests with a priority, as old versions without priority scheduling do")
	fs.IntVar(&c.AnswerTokens, "answer-tokens", c.AnswerTokens, "length of an answer that the request does not limit, in tokens")
	fs.Float64Var(&c.TimeScale, "time-scale", c.TimeScale, "how many times faster than life")
	fs.DurationVar(&c.KeepAlive, "keep-alive", c.KeepAlive, "how long an idle connection stays open")
	fs.DurationVar(&c.ShutdownTimeout, "shutdown-timeout", c.ShutdownTimeout, "how long running requests may go on after an interrupt")
	fs.StringVar(&c.APIKey, "api-key", c.APIKey, "bearer token to demand on /v1 paths")
	fs.BoolVar(&c.NoPromptTokensDetails, "no-prompt-tokens-details", false, "leave cached_tokens out of the usage objects")
	fs.Uint64Var(&c.Seed, "seed", c.Seed, "varies the generated text")
	fs.Func("fault", "fault from the start: "+faultKinds()+`, or as JSON, such as {"kind":"503","count":3}`, func(s string) (err error) {
		c.Fault, err = ParseFault(s)
		return err
	})
	return c
}

// Run serves on cfg.Listen until ctx is done, then shuts down as vLLM does on SIGTERM.
func Run(ctx context.Context, cfg Config, logf func(format string, args ...any)) error {
	s := New(cfg)
	if err := s.Start(s.cfg.Listen); err != nil {
		return err
	}
	logf("replica of %s on %s", s.cfg.Model, s.URL())
	<-ctx.Done()
	return s.Shutdown(context.WithoutCancel(ctx))
}
