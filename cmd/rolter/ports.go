package main

import (
	"errors"
	"fmt"
	"net"
	"strconv"
)

// listen takes address, a host (which may be empty) and a port.
//
// It is also how a port is tried before Caddy listens on it: Caddy shares ports with other processes (SO_REUSEPORT),
// so a second one would start without an error and get half of the first one's connections.
func listen(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w", address, errors.Unwrap(err))
	}
	return l, nil
}

// listenFrom takes the first free port of a hundred from port on. When it is not the first, it tells note.
func listenFrom(host string, port int, note func(format string, args ...any)) (net.Listener, error) {
	for candidate := port; ; candidate++ {
		l, err := listen(net.JoinHostPort(host, strconv.Itoa(candidate)))
		if err == nil {
			if candidate != port {
				note("Port %d is taken, using %d.", port, candidate)
			}
			return l, nil
		}
		if candidate == port+100 {
			return nil, fmt.Errorf("no free port from %d on: %w", port, err)
		}
	}
}

func portOf(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }
