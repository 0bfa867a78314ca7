package rolter

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/rolter-ai/caddy-rolter/prompt"
)

// responseWriter watches the answer on its way to the client: it adds the decision headers, and settles what was recorded for the
// target that answers.
type responseWriter struct {
	*caddyhttp.ResponseWriterWrapper
	request *request
	headers bool // add the decision headers

	status  int          // 0 until it is written
	begun   bool         // the first byte of the body has come
	settled bool         // the request's record is settled
	event   []byte       // what has come of a stream's first event
	tail    *prompt.Tail // the end of the answer, where it says what was cached; nil when that is not to be known
}

func newResponseWriter(w http.ResponseWriter, q *request, headers bool) *responseWriter {
	rw := &responseWriter{ResponseWriterWrapper: &caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, request: q, headers: headers}
	if q.parser != nil && q.asked.Text != nil && q.parsed.N <= 1 && !q.parsed.PromptLogprobs {
		rw.tail = tails.Get().(*prompt.Tail)
	}
	return rw
}

var tails = sync.Pool{New: func() any { return new(prompt.Tail) }}

// maxFirstEvent bounds how much of a stream is looked at for its first event.
const maxFirstEvent = 4096

func (w *responseWriter) WriteHeader(status int) {
	if w.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) {
		w.status = status
		if status == http.StatusOK {
			w.request.lease.Taken()
		}
		header := w.Header()
		if d := w.request.said.Load(); w.headers && d != nil {
			d.setHeaders(header)
		}
		// Nobody is to guess a type that the replica did not give.
		if _, set := header["Content-Type"]; !set {
			header["Content-Type"] = nil
		}
		// An engine whose queue is full may have said 200 before it knows, and says so in the first event of the stream.
		if status != http.StatusOK || !strings.HasPrefix(header.Get("Content-Type"), "text/event-stream") {
			w.settle(status)
		}
	}
	w.ResponseWriterWrapper.WriteHeader(status)
}

func (w *responseWriter) settle(status int) {
	w.settled = true
	w.request.answered(status)
}

func (w *responseWriter) Write(p []byte) (int, error) {
	w.look(p)
	return w.ResponseWriterWrapper.Write(p)
}

// ReadFrom implements [io.ReaderFrom].
func (w *responseWriter) ReadFrom(r io.Reader) (int64, error) {
	if w.status == 0 || !w.settled || !w.begun || w.tail != nil {
		return io.Copy(struct{ io.Writer }{w}, r) // by Write, so that the beginning is seen
	}
	return w.ResponseWriterWrapper.ReadFrom(r)
}

// ended says that the answer came to its end. A stream without any event is an answer too.
func (w *responseWriter) ended() {
	if w.status != 0 && !w.settled {
		w.settle(w.status)
	}
	if w.tail != nil && w.status == http.StatusOK {
		if usage, ok := w.tail.Usage(w.request.api); ok && usage.CachedKnown {
			w.request.delivered(usage)
		}
	}
}

// close gives back what the writer holds.
func (w *responseWriter) close() {
	if w.tail != nil {
		w.tail.Reset()
		tails.Put(w.tail)
		w.tail = nil
	}
}

// look takes in a piece of the answer, until it is known what its first event is.
func (w *responseWriter) look(p []byte) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if len(p) == 0 {
		return
	}
	if !w.begun {
		w.begun = true
		w.request.lease.FirstByte()
	}
	if w.tail != nil {
		_, _ = w.tail.Write(p)
	}
	if w.settled {
		return
	}
	event := p
	if w.event != nil {
		event = append(w.event, p[:min(len(p), maxFirstEvent)]...)
	}
	status, complete := eventStatus(event)
	if complete || len(event) >= maxFirstEvent {
		w.event = nil
		w.settle(status)
		return
	}
	w.event = bytes.Clone(event)
}

// eventStatus reads the first event of a stream as a status: 200, or what its error object says. complete is false when
// the event has not ended yet.
func eventStatus(stream []byte) (status int, complete bool) {
	named := false
	for len(stream) > 0 {
		line, rest, ended := bytes.Cut(stream, []byte("\n"))
		if !ended {
			return http.StatusOK, false
		}
		stream = rest
		line = bytes.TrimSuffix(line, []byte("\r"))
		if name, ok := bytes.CutPrefix(line, []byte("event:")); ok {
			named = string(bytes.TrimSpace(name)) == "error"
			continue
		}
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue // a comment, an id or the blank line before the first event
		}
		data = bytes.TrimSpace(data)
		if !named && !bytes.Contains(data, []byte(`"error"`)) {
			return http.StatusOK, true
		}
		var failure struct {
			Error json.RawMessage `json:"error"`
		}
		if json.Unmarshal(data, &failure) != nil || !named && !bytes.HasPrefix(failure.Error, []byte("{")) && !bytes.HasPrefix(failure.Error, []byte(`"`)) {
			return http.StatusOK, true
		}
		var object struct {
			Code json.Number `json:"code"`
		}
		if json.Unmarshal(failure.Error, &object) == nil {
			if code, err := object.Code.Int64(); err == nil && code >= 400 && code <= 599 {
				return int(code), true
			}
		}
		return http.StatusInternalServerError, true
	}
	return http.StatusOK, false
}

var _ io.ReaderFrom = (*responseWriter)(nil)
