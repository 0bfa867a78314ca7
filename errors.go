package rolter

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// apiError is an error in the shape that clients of the OpenAI API expect.
type apiError struct {
	status  int
	kind    string // "type" in the API
	code    string
	param   string
	message string
}

func (e apiError) Error() string { return e.message }

// reject answers with an error. It never carries what another client or the operator would not want to be read.
func reject(w http.ResponseWriter, r *http.Request, e apiError) error {
	countRejected(e.status)
	if r.ProtoMajor == 1 && r.Header.Get("Expect") != "" {
		// The body was not read. The server would wait for some of it before it sends the answer, and the client waits for the answer.
		w.Header().Set("Connection", "close")
	}
	type object struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
	}
	answer := struct {
		Error object `json:"error"`
	}{object{Message: e.message, Type: e.kind, Code: e.code}}
	if e.param != "" {
		answer.Error.Param = &e.param
	}
	body, err := json.Marshal(answer)
	if err != nil {
		return err
	}
	writeJSON(w, r, e.status, append(body, '\n'))
	return nil
}

func writeJSON(w http.ResponseWriter, r *http.Request, status int, body []byte) {
	header := w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Content-Length", strconv.Itoa(len(body)))
	header.Set("Cache-Control", "no-store")
	if status == http.StatusServiceUnavailable {
		header.Set("Retry-After", "1")
	}
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body)
	}
}

// upstreamError is what the client is told when no target served its request. Addresses and the words of the transport stay in the log. ok is false
// when the error is another one, such as an operator's own in handle_response.
func upstreamError(err error) (e apiError, ok bool) {
	herr, _ := errors.AsType[caddyhttp.HandlerError](err)
	switch status := herr.StatusCode; status {
	case http.StatusBadGateway:
		return apiError{status, "upstream_error", "upstream_failed", "", "the replica could not be reached or broke the connection"}, true
	case http.StatusServiceUnavailable:
		return apiError{status, "service_unavailable_error", "no_target_available", "", "no replica can take the request now"}, true
	case http.StatusGatewayTimeout:
		return apiError{status, "timeout_error", "upstream_timeout", "", "the replica did not answer in time"}, true
	}
	return apiError{}, false
}

// quoted is a name from a client as it can be said back to it.
func quoted(name string) string {
	const most = 200
	if len(name) > most {
		name = strings.ToValidUTF8(name[:most], "") + "…"
	}
	return strconv.Quote(name)
}
