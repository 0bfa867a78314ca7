package replica

import (
	"bytes"
	"net/http"
)

// events writes server-sent events.
type events struct {
	w        http.ResponseWriter
	buf      bytes.Buffer
	count    int
	dieAfter int // 0: never
	err      error
}

func newEvents(w http.ResponseWriter, dieAfter int) *events {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	return &events{w: w, dieAfter: dieAfter}
}

// send adds an event, without a name where that is "".
func (e *events) send(name string, data any) { e.sendRaw(name, encode(data)) }

func (e *events) sendRaw(name string, data []byte) {
	if name != "" {
		e.buf.WriteString("event: " + name + "\n")
	}
	e.buf.WriteString("data: ")
	e.buf.Write(data)
	e.buf.WriteString("\n\n")
	if e.count++; e.count == e.dieAfter {
		e.flush()
		panic(http.ErrAbortHandler) // closes the connection without an end of the body
	}
}

func (e *events) done() { e.sendRaw("", []byte("[DONE]")) }

// flush sends what has been added, and the headers if they have not been sent.
func (e *events) flush() {
	if e.err == nil {
		_, e.err = e.w.Write(e.buf.Bytes())
	}
	if e.err == nil {
		e.err = http.NewResponseController(e.w).Flush()
	}
	e.buf.Reset()
}
