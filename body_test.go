package rolter

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
)

func TestReadBody(t *testing.T) {
	content := strings.Repeat("0123456789", 1000)
	for name, tc := range map[string]struct {
		r        io.Reader
		declared int64
		limit    int64
		want     error
	}{
		"with its length":           {strings.NewReader(content), 10_000, 1 << 20, nil},
		"without a length":          {strings.NewReader(content), -1, 1 << 20, nil},
		"byte by byte":              {iotest.OneByteReader(strings.NewReader(content)), -1, 1 << 20, nil},
		"the end with the last":     {iotest.DataErrReader(strings.NewReader(content)), 10_000, 1 << 20, nil},
		"as long as is allowed":     {strings.NewReader(content), -1, 10_000, nil},
		"longer than is allowed":    {strings.NewReader(content), -1, 9_999, errBodyTooLarge},
		"longer than was said":      {strings.NewReader(content), 3, 1 << 20, nil},
		"a length that is a lie":    {strings.NewReader(content), 1 << 40, 1 << 20, nil},
		"broken off":                {io.MultiReader(strings.NewReader(content), iotest.ErrReader(io.ErrUnexpectedEOF)), 20_000, 1 << 20, io.ErrUnexpectedEOF},
		"nothing is read for a lie": {iotest.ErrReader(io.ErrUnexpectedEOF), 1 << 40, 1 << 41, io.ErrUnexpectedEOF},
	} {
		t.Run(name, func(t *testing.T) {
			b, err := readBody(tc.r, tc.declared, tc.limit)
			if !errors.Is(err, tc.want) {
				t.Fatalf("error %v, want %v", err, tc.want)
			}
			if err == nil && string(b.data) != content {
				t.Errorf("read %d bytes, want %d", len(b.data), len(content))
			}
			if cap(b.data) > 2*maxTrustedLength {
				t.Errorf("%d bytes were allocated on the client's word", cap(b.data))
			}
			b.release()
		})
	}
}

func TestGunzipIsBounded(t *testing.T) {
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	for range 100 {
		_, _ = zw.Write(make([]byte, 1<<20))
	}
	_ = zw.Close()
	if b, err := gunzip(&buffer{data: zipped.Bytes()}, 1<<20); !errors.Is(err, errBodyTooLarge) {
		t.Errorf("100 MiB of zeros: %v", err)
	} else {
		b.release()
	}
}

func TestReadersOfABody(t *testing.T) {
	b, err := readBody(strings.NewReader(`{"model":"a"}`), -1, 100)
	if err != nil {
		t.Fatal(err)
	}
	parts := [][]byte{b.data[:9], []byte(`"longer"`), nil, b.data[12:]}
	for range 3 { // each attempt has its own
		r, err := b.reader(parts)
		if err != nil {
			t.Fatal(err)
		}
		if err := iotest.TestReader(r, []byte(`{"model":"longer"}`)); err != nil {
			t.Error(err)
		}
		_, _ = r.Read(nil)
		_ = r.Close()
		_ = r.Close()
		if _, err := r.Read(make([]byte, 1)); err == nil {
			t.Error("a closed reader can be read")
		}
	}
	b.release()
	if _, err := b.reader(parts); err == nil {
		t.Error("a buffer that was given up can be read")
	}
}

// The transport may close a body from another goroutine while it reads it, after the request has ended.
func TestABufferIsNotReusedWhileItIsRead(t *testing.T) {
	content := bytes.Repeat([]byte("x"), 100_000)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				b, err := readBody(bytes.NewReader(content), -1, 1<<20)
				if err != nil {
					t.Error(err)
					return
				}
				r, _ := b.reader([][]byte{b.data})
				var both sync.WaitGroup
				both.Go(func() {
					piece := make([]byte, 1000)
					for {
						n, err := r.Read(piece)
						if !bytes.Equal(piece[:n], content[:n]) {
							t.Error("read what another request wrote")
						}
						if err != nil {
							return
						}
					}
				})
				both.Go(func() { _ = r.Close() })
				b.release()
				both.Wait()
			}
		})
	}
	wg.Wait()
}
