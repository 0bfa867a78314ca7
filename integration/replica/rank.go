package replica

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// rank is one of a replica's data-parallel engines, with its own cache and its own stream of events. What it has is
// guarded by the server's mu.
type rank struct {
	engine    *Engine
	metrics   metrics
	events    *eventBatch // of the step that is going on; nil without KV events
	publisher *publisher
}

// The most ranks of a replica.
const maxRanks = 256

func (s *Server) newRank(number int) *rank {
	blockSize := s.cfg.BlockSize
	cache := NewCache(s.cfg.CacheBlocks)
	cache.KeepCopies()
	r := &rank{metrics: newMetrics()}
	r.engine = NewEngine(s.cfg.Timing, cache, func(residentBlocks, promptTokens int) int {
		return CachedTokens(blockSize, residentBlocks, promptTokens)
	})
	if k := &s.cfg.KVEvents; k.Endpoint != "" {
		r.events = newEventBatch(k.Form, number)
		r.publisher = newPublisher(k, &s.eventFaults)
		cache.OnRemove(r.events.removed)
		r.engine.OnStep(func() {
			if payload := r.events.take(time.Now()); payload != nil {
				r.publisher.publish(payload)
			}
		})
	}
	return r
}

// reset empties the cache, unless running requests hold some of it. As on vLLM, the event goes out with the next step,
// and not before.
func (r *rank) reset() bool {
	if r.engine.Cache().Pinned() > 0 {
		return false
	}
	r.engine.Cache().forget()
	if r.events != nil {
		r.events.cleared()
	}
	return true
}

// chooseRank returns the rank that a request goes to: the one that its header names, else they take turns.
func (s *Server) chooseRank(r *http.Request) (*rank, *apiError) {
	if n, err := strconv.Atoi(strings.TrimSpace(r.Header.Get("X-Data-Parallel-Rank"))); err == nil {
		if n < 0 || n >= len(s.ranks) {
			return nil, badRequest("data_parallel_rank", "data_parallel_rank %d is out of range [0, %d).", n, len(s.ranks))
		}
		return s.ranks[n], nil
	}
	return s.ranks[int(s.turn.Add(1)-1)%len(s.ranks)], nil
}

// resetPrefixCache is there on a vLLM with VLLM_SERVER_DEV_MODE=1.
func (s *Server) resetPrefixCache(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	s.advance()
	success := true
	for _, r := range s.ranks {
		success = r.reset() && success
	}
	s.mu.Unlock()
	writeJSON(w, http.StatusOK, obj("success", success))
}

// eventSources says where each rank publishes its events.
func (s *Server) eventSources(w http.ResponseWriter, _ *http.Request) {
	sources := object{}
	for i, r := range s.ranks {
		if r.publisher != nil {
			sources = sources.with(fmt.Sprint(i), r.publisher.source())
		}
	}
	writeJSON(w, http.StatusOK, sources)
}

// serverInfo is SGLang's, as far as it is about KV events.
func (s *Server) serverInfo(w http.ResponseWriter, _ *http.Request) {
	var events any
	if p := s.ranks[0].publisher; p != nil {
		_, port, _ := parseEndpoint(endpoint("*", p.pub))
		events = obj("publisher", "zmq", "endpoint_host", "*", "endpoint_port_base", port, "topic", s.cfg.KVEvents.Topic,
			"block_size", s.cfg.BlockSize, "dp_size", len(s.ranks))
	}
	writeJSON(w, http.StatusOK, obj("model_path", s.names[0], "served_model_name", s.names[0], "page_size", s.cfg.BlockSize,
		"dp_size", len(s.ranks), "kv_events", events))
}

// CachedBlocks is how many blocks the caches of all ranks hold, copies not counted.
func (s *Server) CachedBlocks() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.ranks {
		n += len(r.engine.Cache().blocks)
	}
	return n
}
