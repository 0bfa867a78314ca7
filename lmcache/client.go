package lmcache

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"time"
)

// Bounds of an answer, in bytes.
const (
	maxJSON = 64 << 10 // the contract's; LMCache's status has about 4 KiB
	maxList = 1 << 20  // metrics, and lists of instances and of placements
)

// client asks once: one request, one connection, within the timeout.
type client struct {
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	refusal error
	timeout time.Duration
}

// do returns the answer to a request; a body makes it a POST. No redirect is followed. Only the statuses 200 and those that are accepted besides are no errors.
func (c *client) do(ctx context.Context, url string, body []byte, limit int64, accept ...int) (status int, answer []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	defer func() {
		if err != nil && ctx.Err() == context.DeadlineExceeded {
			err = failed(Timeout, "no answer within %v", c.timeout)
		}
	}()
	dial := c.dial
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	// A name is resolved and vetted for each request, so connections are not kept.
	hc := http.Client{
		Transport: &http.Transport{
			// A transport goes on dialling when its request has ended, if it is not bound to it.
			DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
				return dial(ctx, network, address)
			},
			MaxResponseHeaderBytes: maxJSON,
			DisableKeepAlives:      true,
			DisableCompression:     true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	method := http.MethodGet
	if body != nil {
		method = http.MethodPost
	}
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return 0, nil, failed(Unreachable, "%w", err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := hc.Do(req)
	if err != nil {
		if c.refusal != nil && errors.Is(err, c.refusal) {
			return 0, nil, failed(Denied, "%w", err)
		}
		return 0, nil, failed(Unreachable, "%w", err)
	}
	defer resp.Body.Close()
	accepted := resp.StatusCode == http.StatusOK
	for _, status := range accept {
		accepted = accepted || resp.StatusCode == status
	}
	if !accepted {
		return 0, nil, failed(BadStatus, "status %d", resp.StatusCode)
	}
	answer, err = io.ReadAll(io.LimitReader(resp.Body, limit+1))
	switch {
	case err != nil:
		return 0, nil, failed(Unreachable, "the answer breaks off: %w", err)
	case int64(len(answer)) > limit:
		return 0, nil, failed(TooLarge, "an answer of more than %d bytes", limit)
	}
	return resp.StatusCode, answer, nil
}

// answered says whether an error is about an answer, and not about there being none.
func answered(err error) bool {
	if err == nil {
		return false
	}
	switch causeOf(err) {
	case Denied, Unreachable, Timeout:
		return false
	}
	return true
}
