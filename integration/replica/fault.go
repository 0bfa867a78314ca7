package replica

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// FaultKind is a way to fail.
type FaultKind string

// The faults. Where nothing else is said they concern requests to generate, and /health goes on answering 200, because
// that is how real replicas fail.
const (
	// NoFault is the absence of one.
	NoFault FaultKind = ""
	// Refuse closes the listener and the idle connections: new connections are refused until the fault is lifted.
	// Streams that run go on.
	Refuse FaultKind = "refuse"
	// Status503 answers what vLLM answers when its queue is full.
	Status503 FaultKind = "503"
	// Status500 answers what vLLM answers after SIGTERM.
	Status500 FaultKind = "500"
	// Unhealthy is Status500 with a /health of 503, as when vLLM's engine core has died.
	Unhealthy FaultKind = "unhealthy"
	// StreamError answers streams with status 200 and an error as the first event, as vLLM does when its queue fills
	// up in a burst; and other requests with 503.
	StreamError FaultKind = "stream-error"
	// Hang reads the request and never answers it.
	Hang FaultKind = "hang"
	// Reset reads the request and resets the connection.
	Reset FaultKind = "reset"
	// Die closes the connection after [Fault.After] events of a stream, without an end; other requests get no answer.
	Die FaultKind = "die"
	// Slow computes [Fault.Factor] times slower.
	Slow FaultKind = "slow"
)

// faultSet is the faults of one part of a replica.
type faultSet struct {
	counted []FaultKind // happen to one request (batch) after the other, so that Count can limit them
	lasting []FaultKind
}

var serverFaults = faultSet{
	counted: []FaultKind{Status503, Status500, StreamError, Hang, Reset, Die, Slow},
	lasting: []FaultKind{Refuse, Unhealthy},
}

func (s faultSet) String() string {
	var b strings.Builder
	for i, kind := range slices.Concat(s.lasting, s.counted) {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(string(kind))
	}
	return b.String()
}

// Fault is a way to fail, and for how long.
type Fault struct {
	Kind FaultKind
	// Count limits the fault to the next so many requests to generate (or what else meets it); 0 is until it is lifted.
	// Not for those that are not of a request, as Refuse and Unhealthy.
	Count int
	// For lifts the fault after so long in real time; 0 is never.
	For time.Duration
	// After is the number of events before Die. Default 3.
	After int
	// Factor is how much slower Slow is. Default 10.
	Factor float64
	// Share is how many of its messages LossyReplay loses, 0 to 1. Default 0.2.
	Share float64
	// Delay is by how much Late is late. Default 1 s.
	Delay time.Duration
}

// faultJSON is the form of a Fault on the admin path.
type faultJSON struct {
	Kind   FaultKind `json:"kind"`
	Count  int       `json:"count,omitempty"`
	For    string    `json:"for,omitempty"`
	After  int       `json:"after,omitempty"`
	Factor float64   `json:"factor,omitempty"`
	Share  float64   `json:"share,omitempty"`
	Delay  string    `json:"delay,omitempty"`
}

// MarshalJSON writes a fault as ParseFault reads it.
func (f Fault) MarshalJSON() ([]byte, error) {
	j := faultJSON{Kind: f.Kind, Count: f.Count, After: f.After, Factor: f.Factor, Share: f.Share}
	if f.For > 0 {
		j.For = f.For.String()
	}
	if f.Delay > 0 {
		j.Delay = f.Delay.String()
	}
	return json.Marshal(j)
}

// ParseFault reads a fault: its kind alone, or an object such as {"kind":"die","after":5,"count":2,"for":"30s"}. An empty
// kind is no fault. Whether there is such a kind, who is to have it finds out.
func ParseFault(s string) (Fault, error) {
	j := faultJSON{Kind: FaultKind(s)}
	if strings.HasPrefix(s, "{") {
		j = faultJSON{}
		if err := json.Unmarshal([]byte(s), &j); err != nil {
			return Fault{}, fmt.Errorf("fault: %w", err)
		}
	}
	f := Fault{Kind: j.Kind, Count: j.Count, After: j.After, Factor: j.Factor, Share: j.Share}
	for _, d := range []struct {
		name, text string
		into       *time.Duration
	}{{"for", j.For, &f.For}, {"delay", j.Delay, &f.Delay}} {
		if d.text == "" {
			continue
		}
		var err error
		if *d.into, err = time.ParseDuration(d.text); err != nil {
			return Fault{}, fmt.Errorf("fault %s: %w", d.name, err)
		}
	}
	return f, nil
}

func (f Fault) validate(of faultSet) error {
	lasting := slices.Contains(of.lasting, f.Kind)
	switch {
	case f.Kind != NoFault && !lasting && !slices.Contains(of.counted, f.Kind):
		return fmt.Errorf("fault kind %q: must be one of %s", f.Kind, of)
	case f.Count < 0:
		return fmt.Errorf("fault count %d: must not be negative", f.Count)
	case f.Count > 0 && lasting:
		return fmt.Errorf("fault count %d: %s is not of a request; limit it by time", f.Count, f.Kind)
	case f.For < 0:
		return fmt.Errorf("fault for %v: must not be negative", f.For)
	case f.After < 0:
		return fmt.Errorf("fault after %d: must not be negative", f.After)
	case !(f.Factor >= 0 && f.Factor <= 1e6):
		return fmt.Errorf("fault factor %v: must be at most 1e6", f.Factor)
	case !(f.Share >= 0 && f.Share <= 1):
		return fmt.Errorf("fault share %v: must be between 0 and 1", f.Share)
	case f.Delay < 0:
		return fmt.Errorf("fault delay %v: must not be negative", f.Delay)
	}
	return nil
}

// faults holds the fault in effect of one part of a replica.
type faults struct {
	kinds faultSet
	// apply makes a fault felt, or its end, where it is not met by a request. mu is held.
	apply func(FaultKind) error

	mu    sync.Mutex
	fault Fault
	lift  *time.Timer
	ended bool // nothing is applied any more
}

// set puts a fault into effect, in place of the one before it.
func (f *faults) set(fault Fault) error {
	if err := fault.validate(f.kinds); err != nil {
		return err
	}
	switch fault.Kind {
	case Die:
		setDefault(&fault.After, 3)
	case Slow:
		setDefault(&fault.Factor, 10)
	case LossyReplay:
		setDefault(&fault.Share, 0.2)
	case Late:
		setDefault(&fault.Delay, time.Second)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lift != nil {
		f.lift.Stop()
		f.lift = nil
	}
	if f.ended {
		return nil
	}
	f.fault = fault
	if fault.Kind == Restarted { // is over as soon as it has happened
		f.fault = Fault{}
	} else if fault.For > 0 {
		var lift *time.Timer
		lift = time.AfterFunc(fault.For, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.lift != lift { // another fault has taken its place
				return
			}
			f.fault, f.lift = Fault{}, nil
			if err := f.apply(NoFault); err != nil {
				log.Printf("replica: %v", err)
			}
		})
		f.lift = lift
	}
	return f.apply(fault.Kind)
}

// current returns the fault in effect.
func (f *faults) current() Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fault
}

// take returns the fault for a request (or what else it is that meets it), and counts it.
func (f *faults) take() Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	fault := f.fault
	if fault.Count > 0 {
		if f.fault.Count--; f.fault.Count == 0 {
			f.fault = Fault{}
		}
	}
	return fault
}

// end keeps the fault that is in effect for good.
func (f *faults) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	if f.lift != nil {
		f.lift.Stop()
		f.lift = nil
	}
}

// serve shows, sets and lifts the fault. It is the simulator's own, no engine has such a path.
func (f *faults) serve(w http.ResponseWriter, r *http.Request) {
	var err error
	switch r.Method {
	case "POST":
		var body []byte
		var fault Fault
		if body, err = io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<16)); err == nil {
			if fault, err = ParseFault(strings.TrimSpace(string(body))); err == nil {
				err = f.set(fault)
			}
		}
	case "DELETE":
		err = f.set(Fault{})
	}
	if err != nil {
		writeJSON(w, http.StatusBadRequest, obj("error", err.Error()))
		return
	}
	writeJSON(w, http.StatusOK, f.current())
}

// SetFault puts a fault into effect, in place of the one before it. An error says that the fault cannot be meant, or
// that the listener could not be opened again after Refuse.
func (s *Server) SetFault(f Fault) error { return s.faults.set(f) }

// ClearFault lifts whatever fault is in effect.
func (s *Server) ClearFault() error { return s.SetFault(Fault{}) }

// Fault returns the fault in effect.
func (s *Server) Fault() Fault { return s.faults.current() }
