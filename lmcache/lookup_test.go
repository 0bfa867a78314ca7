package lmcache

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"testing"
	"time"
)

func TestLookup(t *testing.T) {
	const key, both = `{"key":{},"placements":[{"instance_id":"a"}]}`, `{"key":{},"placements":[{"instance_id":"a"},{"instance_id":"b"},{"instance_id":"b"}]}`
	for name, tc := range map[string]struct {
		kind   Kind
		answer string
		want   map[string]int
		fails  bool
	}{
		"controller":                       {kind: Controller, answer: `{"event_id":"l","layout_info":{"a":["LocalCPUBackend",512],"b":["LocalDiskBackend",256]}}`, want: map[string]int{"a": 512, "b": 256}},
		"a controller that knows nobody":   {kind: Controller, answer: string(recorded(t, "controller-lookup-unknown.json")), want: map[string]int{}},
		"a controller that exaggerates":    {kind: Controller, answer: `{"layout_info":{"a":["LocalCPUBackend",100000]}}`, want: map[string]int{"a": 600}},
		"a controller that is wrong":       {kind: Controller, answer: `{"layout_info":{"a":["LocalCPUBackend",-1]}}`, fails: true},
		"a controller with another shape":  {kind: Controller, answer: `{"layout_info":{"a":[512]}}`, fails: true},
		"coordinator":                      {kind: Coordinator, answer: string(recorded(t, "coordinator-lookup.json")), want: map[string]int{"inst-1": 600}},
		"a coordinator that knows nothing": {kind: Coordinator, answer: string(recorded(t, "coordinator-lookup-unknown.json")), want: map[string]int{}},
		"leading chunks":                   {kind: Coordinator, answer: `{"chunks":3,"results":[` + both + `,` + key + `,` + both + `]}`, want: map[string]int{"a": 600, "b": 256}},
		"two keys a chunk":                 {kind: Coordinator, answer: `{"chunks":2,"results":[` + both + `,` + both + `,` + both + `,` + key + `]}`, want: map[string]int{"a": 512, "b": 256}},
		"half a chunk":                     {kind: Coordinator, answer: `{"chunks":1,"results":[` + both + `,` + key + `]}`, want: map[string]int{"a": 256}},
		"a model that is not known":        {kind: Coordinator, answer: `{"chunks":2,"results":[{"placements":[]},{"placements":[]}]}`, want: map[string]int{}},
		"no chunks":                        {kind: Coordinator, answer: `{"chunks":0,"results":[]}`, want: map[string]int{}},
		"keys that do not add up":          {kind: Coordinator, answer: `{"chunks":2,"results":[` + key + `]}`, fails: true},
		"not JSON":                         {kind: Coordinator, answer: `<html>`, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSource(t, says(tc.answer))
			l, err := NewLookup(LookupConfig{URL: s.URL, Kind: tc.kind, Timeout: 10 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			got, err := l.Tokens(t.Context(), make([]uint32, 600))
			if (err != nil) != tc.fails || !maps.Equal(got, tc.want) {
				t.Errorf("%v, %v, want %v", got, err, tc.want)
			}
		})
	}
}

func TestWhatIsLookedUp(t *testing.T) {
	bodies := make(chan string, 2)
	s := newSource(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		bodies <- r.URL.Path + " " + string(body)
		_, _ = io.WriteString(w, "{}")
	})
	for kind, want := range map[Kind]string{
		Controller:  `/lookup {"tokens":[1,4294967295]}`,
		Coordinator: `/directory/lookup {"cache_salt":"","model_name":"/models/tiny","token_ids":[1,4294967295],"world_size":2}`,
	} {
		l, err := NewLookup(LookupConfig{URL: s.URL, Kind: kind, Model: "/models/tiny", WorldSize: 2, Timeout: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Tokens(t.Context(), []uint32{1, 1<<32 - 1}); err != nil {
			t.Error(err)
		}
		if got := <-bodies; got != want {
			t.Errorf("asked %s, want %s", got, want)
		}
	}
}

// After three failures nobody waits for it any more, until it has been tried again.
func TestTheBreaker(t *testing.T) {
	s := newSource(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // or the server would not see that the client has gone
		<-r.Context().Done()
	})
	l, err := NewLookup(LookupConfig{URL: s.URL, Kind: Controller, Timeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	tokens := make([]uint32, 10)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for range 5 { // a client that goes says nothing of the controller
		if _, err := l.Tokens(gone, tokens); err == nil || errors.Is(err, ErrBroken) {
			t.Fatal(err)
		}
	}
	for range 3 {
		if _, err := l.Tokens(t.Context(), tokens); err == nil || causeOf(err) != Timeout {
			t.Fatal(err)
		}
	}
	if _, err := l.Tokens(t.Context(), tokens); !errors.Is(err, ErrBroken) {
		t.Errorf("%v, want broken", err)
	}
	l.closed = time.Now()
	if _, err := l.Tokens(t.Context(), tokens); causeOf(err) != Timeout {
		t.Errorf("%v, want to have tried", err)
	}
	if _, err := l.Tokens(t.Context(), tokens); !errors.Is(err, ErrBroken) {
		t.Errorf("%v, want broken again", err)
	}
	s.serves(says(`{"layout_info":{}}`))
	l.closed, l.client.timeout = time.Now(), 10*time.Second
	for range 4 {
		if _, err := l.Tokens(t.Context(), tokens); err != nil {
			t.Error(err)
		}
	}
	if _, err := l.Tokens(t.Context(), make([]uint32, maxLookupTokens+1)); !errors.Is(err, ErrTooLong) {
		t.Errorf("%v, want too long", err)
	}
	if held, err := l.Tokens(t.Context(), nil); held != nil || err != nil {
		t.Errorf("%v, %v for no tokens", held, err)
	}
}

func TestWhoCannotBeAsked(t *testing.T) {
	for _, cfg := range []LookupConfig{{URL: "http://localhost", Kind: MP}, {URL: "http://localhost", Kind: Auto}, {URL: "localhost", Kind: Controller}} {
		if _, err := NewLookup(cfg); err == nil {
			t.Errorf("%+v was taken", cfg)
		}
	}
}
