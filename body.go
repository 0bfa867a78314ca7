package rolter

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
)

// errBodyTooLarge is returned when a request body exceeds its limit.
var errBodyTooLarge = errors.New("request body is larger than max_body")

// buffer is a request body in memory. It is recycled when the request and every reader of it are done: the transport may still be reading
// the body of an attempt when the attempt has failed, and even when the request has ended.
type buffer struct {
	data []byte
	refs atomic.Int32
}

var buffers = sync.Pool{New: func() any { return new(buffer) }}

const (
	// maxPooledBuffer bounds what is kept for reuse: a few huge prompts must not pin memory.
	maxPooledBuffer = 1 << 20
	// maxTrustedLength bounds what is allocated because a client says so, before it has sent anything.
	maxTrustedLength = 1 << 20
)

// readBody reads a body to its end. declared is its Content-Length, or negative. A longer body than limit is errBodyTooLarge. The buffer holds what was
// read, also with an error, and is the caller's to release.
func readBody(r io.Reader, declared, limit int64) (*buffer, error) {
	b := buffers.Get().(*buffer)
	b.refs.Store(1)
	// The spare room lets the last Read report the end.
	if size := int(min(max(declared, 4096), maxTrustedLength)) + bytes.MinRead; cap(b.data) < size {
		b.data = make([]byte, 0, size)
	}
	b.data = b.data[:0]
	for {
		if len(b.data) == cap(b.data) {
			b.data = append(b.data, 0)[:len(b.data)]
		}
		n, err := r.Read(b.data[len(b.data):cap(b.data)])
		b.data = b.data[:len(b.data)+n]
		if int64(len(b.data)) > limit {
			return b, errBodyTooLarge
		}
		if err == io.EOF {
			return b, nil
		}
		if err != nil {
			return b, err
		}
	}
}

// gunzip decodes a gzip body within the limit. The buffer is the caller's to release, if there is one.
func gunzip(b *buffer, limit int64) (*buffer, error) {
	zr, err := gzip.NewReader(bytes.NewReader(b.data))
	if err != nil {
		return nil, err
	}
	return readBody(zr, int64(4*len(b.data)), limit)
}

// retain takes a reference, unless the buffer has been given up already.
func (b *buffer) retain() bool {
	for {
		refs := b.refs.Load()
		if refs == 0 {
			return false
		}
		if b.refs.CompareAndSwap(refs, refs+1) {
			return true
		}
	}
}

// release gives back a reference.
func (b *buffer) release() {
	if b.refs.Add(-1) == 0 && cap(b.data) <= maxPooledBuffer+bytes.MinRead {
		buffers.Put(b)
	}
}

// reader returns a new reader of parts, which are slices of the buffer or of memory that nobody changes.
func (b *buffer) reader(parts [][]byte) (io.ReadCloser, error) {
	if !b.retain() {
		return nil, http.ErrBodyReadAfterClose
	}
	return &bodyReader{buffer: b, parts: parts}, nil
}

// bodyReader reads the parts of a body one after another. Close may come from another goroutine than Read.
type bodyReader struct {
	mu     sync.Mutex
	buffer *buffer // nil once closed
	parts  [][]byte
	offset int // in parts[0]
}

func (r *bodyReader) Read(p []byte) (n int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.buffer == nil {
		return 0, http.ErrBodyReadAfterClose
	}
	for n < len(p) && len(r.parts) > 0 {
		c := copy(p[n:], r.parts[0][r.offset:])
		n += c
		r.offset += c
		if r.offset == len(r.parts[0]) {
			r.parts, r.offset = r.parts[1:], 0
		}
	}
	if len(r.parts) == 0 && (n == 0 || len(p) > n) {
		err = io.EOF
	}
	return n, err
}

func (r *bodyReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.buffer != nil {
		r.buffer.release()
		r.buffer = nil
	}
	return nil
}

// onceBody is a body that is not kept, and so cannot be sent again once it has been read from.
type onceBody struct {
	io.ReadCloser
	begun atomic.Bool
}

func (b *onceBody) Read(p []byte) (int, error) {
	b.begun.Store(true)
	return b.ReadCloser.Read(p)
}
