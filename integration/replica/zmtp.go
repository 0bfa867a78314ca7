package replica

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

// ZMTP 3 (rfc.zeromq.org/spec/23 and 37), the server's side with the NULL mechanism. It announces 3.1 as libzmq does, so
// that libzmq's clients send subscriptions as commands; older ones send them as messages.

const (
	zmtpMore    = 1
	zmtpLong    = 2
	zmtpCommand = 4

	zmtpMaxFrame  = 64 << 10 // what a subscriber or a replay client sends is short
	zmtpMaxParts  = 8
	zmtpHandshake = 10 * time.Second // longest
)

// zmtpSocket is a bound socket: it accepts connections and hands those whose handshake succeeds to serve.
type zmtpSocket struct {
	kind  string   // its type, as READY names it
	peers []string // the types that may connect
	// greet is called before the greeting, and may block.
	greet func()
	// serve returns when the connection is of no use any more.
	serve func(*zmtpConn)

	mu       sync.Mutex
	addr     string
	listener net.Listener // nil while it is closed
	conns    map[net.Conn]struct{}
	handlers sync.WaitGroup
}

// open serves on l.
func (z *zmtpSocket) open(l net.Listener) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.addr, z.listener, z.conns = l.Addr().String(), l, make(map[net.Conn]struct{})
	z.handlers.Go(func() { z.accept(l) })
}

// reopen listens again where it did before it was closed. One that is open, or never was, is left alone.
func (z *zmtpSocket) reopen() error {
	z.mu.Lock()
	addr, closed := z.addr, z.listener == nil
	z.mu.Unlock()
	if addr == "" || !closed {
		return nil
	}
	l, err := net.Listen("tcp", addr)
	if err == nil {
		z.open(l)
	}
	return err
}

// close cuts all connections and refuses new ones. It does not wait for those who serve them.
func (z *zmtpSocket) close() {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.listener == nil {
		return
	}
	z.listener.Close()
	z.listener = nil
	for conn := range z.conns {
		conn.Close()
	}
}

// address returns where it listens, or did before it was closed; "" before it has been opened.
func (z *zmtpSocket) address() string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.addr
}

func (z *zmtpSocket) accept(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		z.mu.Lock()
		if z.listener != l {
			conn.Close()
		} else {
			conns := z.conns
			conns[conn] = struct{}{}
			z.handlers.Go(func() {
				defer func() {
					conn.Close()
					z.mu.Lock()
					delete(conns, conn)
					z.mu.Unlock()
				}()
				z.greet()
				c := &zmtpConn{Conn: conn, in: bufio.NewReader(conn)}
				if c.handshake(z.kind, z.peers) == nil {
					z.serve(c)
				}
			})
		}
		z.mu.Unlock()
	}
}

// zmtpConn is a connection. Each Write to it must be of whole frames.
type zmtpConn struct {
	net.Conn
	in *bufio.Reader
}

// greeting is what both sides begin with: the signature, the version, the mechanism, and that none is a server.
var greeting = slices.Concat([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1}, []byte("NULL"), make([]byte, 48))

func (c *zmtpConn) handshake(kind string, peers []string) error {
	c.SetDeadline(time.Now().Add(zmtpHandshake))
	if _, err := c.Write(greeting); err != nil {
		return err
	}
	theirs := make([]byte, len(greeting))
	if _, err := io.ReadFull(c.in, theirs); err != nil {
		return err
	}
	if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || !bytes.Equal(theirs[12:32], greeting[12:32]) {
		return errors.New("zmtp: not version 3 with NULL")
	}
	ready := appendProperty([]byte("\x05READY"), "Socket-Type", kind)
	if kind == "ROUTER" {
		ready = appendProperty(ready, "Identity", "")
	}
	if _, err := c.Write(appendFrame(nil, zmtpCommand, ready)); err != nil {
		return err
	}
	flags, body, err := c.readFrame()
	if err != nil {
		return err
	}
	properties, ok := bytes.CutPrefix(body, []byte("\x05READY"))
	if flags&zmtpCommand == 0 || !ok || !slices.Contains(peers, property(properties, "Socket-Type")) {
		return errors.New("zmtp: no READY of a socket that fits")
	}
	return c.SetDeadline(time.Time{})
}

func appendProperty(dst []byte, name, value string) []byte {
	dst = append(append(dst, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(dst, uint32(len(value))), value...)
}

// property returns a property's value, "" where it is missing or what is there is not well formed.
func property(list []byte, name string) string {
	for len(list) > 0 {
		n := int(list[0])
		if len(list) < 1+n+4 {
			break
		}
		key := list[1 : 1+n]
		size := binary.BigEndian.Uint32(list[1+n:])
		list = list[1+n+4:]
		if uint64(size) > uint64(len(list)) {
			break
		}
		if bytes.EqualFold(key, []byte(name)) {
			return string(list[:size])
		}
		list = list[size:]
	}
	return ""
}

func (c *zmtpConn) readFrame() (flags byte, body []byte, err error) {
	if flags, err = c.in.ReadByte(); err != nil {
		return 0, nil, err
	}
	var size [8]byte
	length := size[7:]
	if flags&zmtpLong != 0 {
		length = size[:]
	}
	if _, err := io.ReadFull(c.in, length); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint64(size[:])
	if n > zmtpMaxFrame {
		return 0, nil, fmt.Errorf("zmtp: a frame of %d bytes", n)
	}
	body = make([]byte, n)
	_, err = io.ReadFull(c.in, body)
	return flags, body, err
}

// readMessage returns the parts of the next message. Subscriptions that come as commands are turned into the messages
// that they were in ZMTP 3.0; heartbeats are answered.
func (c *zmtpConn) readMessage() (parts [][]byte, err error) {
	for {
		flags, body, err := c.readFrame()
		switch {
		case err != nil:
			return nil, err
		case flags&zmtpCommand == 0:
			if parts = append(parts, body); len(parts) > zmtpMaxParts {
				return nil, errors.New("zmtp: a message of too many parts")
			}
			if flags&zmtpMore == 0 {
				return parts, nil
			}
			continue
		}
		if topic, ok := bytes.CutPrefix(body, []byte("\x09SUBSCRIBE")); ok {
			return [][]byte{append([]byte{1}, topic...)}, nil
		}
		if topic, ok := bytes.CutPrefix(body, []byte("\x06CANCEL")); ok {
			return [][]byte{append([]byte{0}, topic...)}, nil
		}
		if ping, ok := bytes.CutPrefix(body, []byte("\x04PING")); ok && len(ping) >= 2 {
			pong := append([]byte("\x04PONG"), ping[2:]...) // without the time to live
			if _, err := c.Write(appendFrame(nil, zmtpCommand, pong)); err != nil {
				return nil, err
			}
		}
	}
}

func appendFrame(dst []byte, flags byte, body []byte) []byte {
	if len(body) < 256 {
		dst = append(dst, flags, byte(len(body)))
	} else {
		dst = binary.BigEndian.AppendUint64(append(dst, flags|zmtpLong), uint64(len(body)))
	}
	return append(dst, body...)
}

func appendMessage(dst []byte, parts ...[]byte) []byte {
	for i, part := range parts {
		flags := byte(zmtpMore)
		if i == len(parts)-1 {
			flags = 0
		}
		dst = appendFrame(dst, flags, part)
	}
	return dst
}
