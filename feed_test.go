package rolter

import (
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/rolter-ai/caddy-rolter/egress"
	"github.com/rolter-ai/caddy-rolter/kvevents"
)

// What the configuration says goes before what the engine says.
func TestEndpointsOfRanks(t *testing.T) {
	one := []kvevents.Rank{{Endpoint: "tcp://h:5557", Replay: "tcp://h:5657"}}
	two := append(slices.Clone(one), kvevents.Rank{Rank: 1, Endpoint: "tcp://h:5558", Replay: "tcp://h:5658"})
	for _, tc := range []struct {
		name   string
		events KVEvents
		found  []kvevents.Rank
		want   []endpoint
	}{
		{"nobody says anything", KVEvents{Endpoint: "auto"}, nil, nil},
		{"the engine tells", KVEvents{Endpoint: "auto"}, one, []endpoint{{"tcp://h:5557", "tcp://h:5657"}}},
		{"of its ranks", KVEvents{Endpoint: "auto"}, two, []endpoint{{"tcp://h:5557", "tcp://h:5657"}, {"tcp://h:5558", "tcp://h:5658"}}},
		{"of more ranks than wanted", KVEvents{Endpoint: "auto", Ranks: 1}, two, []endpoint{{"tcp://h:5557", "tcp://h:5657"}}},
		{"one that cannot be listened to", KVEvents{Endpoint: "auto"}, []kvevents.Rank{{}, two[1]}, []endpoint{{}, {"tcp://h:5558", "tcp://h:5658"}}},
		{"a replay of one's own", KVEvents{Endpoint: "auto", Replay: "tcp://r:1000"}, two, []endpoint{{"tcp://h:5557", "tcp://r:1000"}, {"tcp://h:5558", "tcp://r:1001"}}},
		{"configured", KVEvents{Endpoint: "tcp://c:7000"}, nil, []endpoint{{"tcp://c:7000", ""}}},
		{"configured, another publisher than the engine's", KVEvents{Endpoint: "tcp://c:7000"}, two, []endpoint{{"tcp://c:7000", ""}}},
		{"configured, the engine's own", KVEvents{Endpoint: "tcp://c:5557"}, two, []endpoint{{"tcp://c:5557", "tcp://h:5657"}, {"tcp://c:5558", "tcp://h:5658"}}},
		{"configured with ranks", KVEvents{Endpoint: "tcp://c:7000", Replay: "tcp://c:8000", Ranks: 2}, nil, []endpoint{{"tcp://c:7000", "tcp://c:8000"}, {"tcp://c:7001", "tcp://c:8001"}}},
		{"IPv6", KVEvents{Endpoint: "tcp://[fd00::1]:7000", Ranks: 2}, nil, []endpoint{{"tcp://[fd00::1]:7000", ""}, {"tcp://[fd00::1]:7001", ""}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := &feed{events: tc.events}
			if got := f.endpoints(kvevents.Discovery{Ranks: tc.found}); !slices.Equal(got, tc.want) {
				t.Errorf("%v, want %v", got, tc.want)
			}
		})
	}
}

// Configurations that say the same share a feed, which is there until the last of them has gone.
func TestFeedsAreShared(t *testing.T) {
	source := func(endpoint string) *feedSource {
		p := &Provider{Name: "a", scheme: "http", dial: "feeds.test:1", KVEvents: &KVEvents{Endpoint: endpoint}}
		return newFeedSource(p, egress.Policy{BlockLoopback: true}, zap.NewNop())
	}
	// Nothing listens there, and nothing may be contacted.
	first, second, other := source("tcp://127.0.0.1:1"), source("tcp://127.0.0.1:1"), source("tcp://127.0.0.1:2")
	if first.feed != second.feed || first.feed == other.feed {
		t.Error("the feeds are not shared by what they say")
	}
	feeds.start([]*feedSource{first})
	feeds.start([]*feedSource{second, other})
	feed := second.feed
	feeds.leave(second)
	if feed.current.Load() != first {
		t.Error("the feed goes on as a configuration says that is unloaded")
	}
	select {
	case <-feed.done:
		t.Error("the feed ended with one of two configurations")
	default:
	}
	feeds.leave(first)
	<-feed.done
	unstarted := source("tcp://127.0.0.1:1")
	if unstarted.feed == feed {
		t.Error("a feed that has ended is used again")
	}
	feeds.leave(unstarted)
	feeds.leave(other)
	if n := len(feeds.all()); n != 0 {
		t.Errorf("%d feeds are left", n)
	}
}
