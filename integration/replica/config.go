package replica

import (
	"cmp"
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
	// Adapters are the names of LoRA adapters that are served beside the model, separated by commas. Their requests share
	// no blocks with others.
	Adapters string
	// Ranks is the number of data-parallel engines, of which each has a cache of CacheBlocks. Default 1.
	Ranks int
	// KVEvents publishes what the caches hold.
	KVEvents KVEvents
	// ScaleOut is vLLM's --enable-scale-out: the paths that end in /render are there; without, they answer 403.
	ScaleOut bool
	// SGLangInfo serves GET /server_info in SGLang's form.
	SGLangInfo bool
	// LMCache, where set, is given the prompts that are prefilled, as its instance LMCacheInstance; "" is its first one. It
	// changes nothing for the replica.
	LMCache         *LMCache
	LMCacheInstance string
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
	// RunLMCache is the LMCache that [Run] serves beside the replica, where it has an address.
	RunLMCache LMCacheConfig
}

func (c Config) withDefaults() Config {
	c.Timing = c.Timing.WithDefaults()
	setDefault(&c.Model, "sim")
	setDefault(&c.Ranks, 1)
	c.KVEvents.setDefaults()
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
		{"ranks", int64(c.Ranks)},
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
	if c.Ranks > maxRanks {
		return fmt.Errorf("ranks %d: must be at most %d", c.Ranks, maxRanks)
	}
	if err := c.KVEvents.validate(); err != nil {
		return err
	}
	if err := c.RunLMCache.Validate(); err != nil {
		return err
	}
	return c.Fault.validate(serverFaults)
}

func splitNames(list string) []string {
	names := strings.Split(list, ",")
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
	faultFlag(fs, &c.Fault, "fault", "fault from the start", serverFaults)
	fs.StringVar(&c.Adapters, "adapters", "", "names of LoRA adapters, separated by commas")
	fs.IntVar(&c.Ranks, "ranks", c.Ranks, "data-parallel engines; a request chooses one by X-data-parallel-rank, else they take turns")
	fs.BoolVar(&c.ScaleOut, "scale-out", false, "serve the paths that end in /render (vLLM: --enable-scale-out)")
	fs.BoolVar(&c.SGLangInfo, "sglang-info", false, "serve GET /server_info in SGLang's form")

	k := &c.KVEvents
	fs.StringVar(&k.Endpoint, "kv-events", "", "where to publish KV events, such as tcp://*:5557; rank r publishes r ports above")
	fs.StringVar(&k.ReplayEndpoint, "kv-replay", "", "where to answer requests for past KV events, such as tcp://*:5657")
	fs.StringVar(&k.Topic, "kv-topic", "", "topic of the KV events")
	fs.IntVar(&k.BufferSteps, "kv-buffer-steps", k.BufferSteps, "batches that a replay can have")
	fs.IntVar(&k.HighWater, "kv-high-water", k.HighWater, "batches that wait for a slow subscriber before it loses some")
	fs.StringVar((*string)(&k.Form), "kv-form", string(k.Form), "form of an event: map, or array as before vLLM 0.24")
	fs.BoolVar(&k.ReplayWithoutTopic, "kv-replay-without-topic", false, "leave the topic out of replays, as before vLLM 0.26")
	fs.Uint64Var(&k.FirstSeq, "kv-first-seq", 0, "number of the first batch")
	fs.DurationVar(&k.Delay, "kv-delay", 0, "longest random delay of events after what they are about")
	fs.BoolVar(&k.NoSources, "no-kv-event-sources", false, "answer 404 to GET /kv_event_sources, as older engines do")
	faultFlag(fs, &k.Fault, "kv-fault", "fault of the KV events from the start", eventFaults)

	l := &c.RunLMCache
	*l = l.withDefaults()
	fs.StringVar(&l.Listen, "lmcache", "", "address to serve an LMCache on that holds the prompts that were prefilled")
	fs.StringVar((*string)(&l.Kind), "lmcache-kind", string(l.Kind), fmt.Sprint("interface of the LMCache, one of ", lmcacheKinds))
	fs.StringVar(&l.Instance, "lmcache-instance", l.Instance, "name of the replica in the LMCache")
	fs.StringVar(&l.Model, "lmcache-model", l.Model, "path of the model, by which an LMCache coordinator knows it")
	fs.IntVar(&l.ChunkTokens, "lmcache-chunk-tokens", l.ChunkTokens, "tokens of a chunk")
	fs.Int64Var(&l.CapacityBytes, "lmcache-capacity", l.CapacityBytes, "bytes that the LMCache holds, at 1 MiB a chunk")
	faultFlag(fs, &l.Fault, "lmcache-fault", "fault of the LMCache from the start", lmcacheFaults)
	return c
}

func faultFlag(fs *flag.FlagSet, into *Fault, name, usage string, of faultSet) {
	fs.Func(name, usage+": "+of.String()+`, or as JSON, such as {"kind":"`+string(of.counted[0])+`","count":3}`, func(s string) (err error) {
		if *into, err = ParseFault(s); err == nil {
			err = into.validate(of)
		}
		return err
	})
}

// Run serves on cfg.Listen until ctx is done, then shuts down as vLLM does on SIGTERM. Where cfg.RunLMCache listens too, the
// replica's prompts go there.
func Run(ctx context.Context, cfg Config, logf func(format string, args ...any)) error {
	if cfg.RunLMCache.Listen != "" {
		cfg.LMCache = NewLMCache(cfg.RunLMCache)
		if err := cfg.LMCache.Start(cfg.RunLMCache.Listen); err != nil {
			return err
		}
		defer cfg.LMCache.Close()
		logf("LMCache (%s) on %s", cfg.RunLMCache.Kind, cfg.LMCache.URL())
	}
	s := New(cfg)
	if err := s.Start(s.cfg.Listen); err != nil {
		return err
	}
	logf("replica of %s on %s", s.cfg.Model, s.URL())
	for i := range s.ranks {
		if pub, replay := s.EventEndpoints(i); pub != "" {
			logf("KV events of rank %d on %s, replays on %s", i, pub, cmp.Or(replay, "none"))
		}
	}
	<-ctx.Done()
	return s.Shutdown(context.WithoutCancel(ctx))
}
