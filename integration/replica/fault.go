package replica

import (
	"encoding/json"
	"fmt"
	"log"
	"slices"
	"strings"
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

var allFaults = []FaultKind{Refuse, Status503, Status500, Unhealthy, StreamError, Hang, Reset, Die, Slow}

func faultKinds() string {
	var b strings.Builder
	for i, kind := range allFaults {
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
	// Count limits the fault to the next so many requests to generate; 0 is until it is lifted. Not for Refuse and
	// Unhealthy, which are not of a request.
	Count int
	// For lifts the fault after so long in real time; 0 is never.
	For time.Duration
	// After is the number of events before Die. Default 3.
	After int
	// Factor is how much slower Slow is. Default 10.
	Factor float64
}

// faultJSON is the form of a Fault on the admin path.
type faultJSON struct {
	Kind   FaultKind `json:"kind"`
	Count  int       `json:"count,omitempty"`
	For    string    `json:"for,omitempty"`
	After  int       `json:"after,omitempty"`
	Factor float64   `json:"factor,omitempty"`
}

// MarshalJSON writes a fault as ParseFault reads it.
func (f Fault) MarshalJSON() ([]byte, error) {
	j := faultJSON{Kind: f.Kind, Count: f.Count, After: f.After, Factor: f.Factor}
	if f.For > 0 {
		j.For = f.For.String()
	}
	return json.Marshal(j)
}

// ParseFault reads a fault: its kind alone, or an object such as {"kind":"die","after":5,"count":2,"for":"30s"}. An empty
// kind is no fault.
func ParseFault(s string) (Fault, error) {
	j := faultJSON{Kind: FaultKind(s)}
	if strings.HasPrefix(s, "{") {
		j = faultJSON{}
		if err := json.Unmarshal([]byte(s), &j); err != nil {
			return Fault{}, fmt.Errorf("fault: %w", err)
		}
	}
	f := Fault{Kind: j.Kind, Count: j.Count, After: j.After, Factor: j.Factor}
	if j.For != "" {
		d, err := time.ParseDuration(j.For)
		if err != nil {
			return Fault{}, fmt.Errorf("fault for: %w", err)
		}
		f.For = d
	}
	return f, f.validate()
}

func (f Fault) validate() error {
	switch {
	case f.Kind != NoFault && !slices.Contains(allFaults, f.Kind):
		return fmt.Errorf("fault kind %q: must be one of %s", f.Kind, faultKinds())
	case f.Count < 0:
		return fmt.Errorf("fault count %d: must not be negative", f.Count)
	case f.Count > 0 && (f.Kind == Refuse || f.Kind == Unhealthy):
		return fmt.Errorf("fault count %d: %s is not of a request; limit it by time", f.Count, f.Kind)
	case f.For < 0:
		return fmt.Errorf("fault for %v: must not be negative", f.For)
	case f.After < 0:
		return fmt.Errorf("fault after %d: must not be negative", f.After)
	case !(f.Factor >= 0 && f.Factor <= 1e6):
		return fmt.Errorf("fault factor %v: must be at most 1e6", f.Factor)
	}
	return nil
}

// SetFault puts a fault into effect, in place of the one before it. An error says that the fault cannot be meant, or
// that the listener could not be opened again after Refuse.
func (s *Server) SetFault(f Fault) error {
	if err := f.validate(); err != nil {
		return err
	}
	if f.Kind == Die {
		setDefault(&f.After, 3)
	}
	if f.Kind == Slow {
		setDefault(&f.Factor, 10)
	}
	s.faultMu.Lock()
	defer s.faultMu.Unlock()
	if s.lift != nil {
		s.lift.Stop()
		s.lift = nil
	}
	s.fault = f
	if f.For > 0 {
		var lift *time.Timer
		lift = time.AfterFunc(f.For, func() {
			s.faultMu.Lock()
			defer s.faultMu.Unlock()
			if s.lift != lift { // another fault has taken its place
				return
			}
			s.fault, s.lift = Fault{}, nil
			if err := s.applyListening(); err != nil {
				log.Printf("replica: %v", err)
			}
		})
		s.lift = lift
	}
	return s.applyListening()
}

// ClearFault lifts whatever fault is in effect.
func (s *Server) ClearFault() error { return s.SetFault(Fault{}) }

// Fault returns the fault in effect.
func (s *Server) Fault() Fault {
	s.faultMu.Lock()
	defer s.faultMu.Unlock()
	return s.fault
}

// takeFault returns the fault for a request to generate, and counts the request.
func (s *Server) takeFault() Fault {
	s.faultMu.Lock()
	defer s.faultMu.Unlock()
	f := s.fault
	if f.Count > 0 {
		if s.fault.Count--; s.fault.Count == 0 {
			s.fault = Fault{}
		}
	}
	return f
}
