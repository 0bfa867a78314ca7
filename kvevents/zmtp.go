package kvevents

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/go-zeromq/zmq4"
	nullsecurity "github.com/go-zeromq/zmq4/security/null"
)

// Engines publish over ZeroMQ, whose protocol is ZMTP 3.0 (https://rfc.zeromq.org/spec/23/). Of go-zeromq only the protocol is used, not the sockets:
// these never return from a peer that accepts and is silent, give up reconnecting after a while, and leak a goroutine for each subscription that is closed
// while a message waits. Nor does the library look at a length before it allocates, so it reads through a guard that does.

// What a peer may send. A batch that stores 131,072 tokens has less than 1 MiB.
const (
	maxMessage = 16 << 20 // bytes of a message, and so of each of its frames
	maxFrames  = 8        // of a message
	maxCommand = 8 << 10  // bytes of a command: READY names a socket type and an identity
)

const (
	writeTime  = 5 * time.Second // for what little is written
	readBuffer = 64 << 10
)

// handshakeTime is for connecting, and again for greeting and READY. Tests shorten it.
var handshakeTime = 5 * time.Second

// keepAlive finds out within half a minute that a publisher's machine is gone. An idle engine sends nothing at all.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}

// DialFunc connects to host:port.
type DialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

// ParseEndpoint takes apart an endpoint as engines and their configurations write it: tcp://host:port, where the host is a name, an IPv4 address or an
// IPv6 address in brackets. It may be "*", as an engine says of itself; one cannot connect to that.
func ParseEndpoint(endpoint string) (host, port string, err error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", "", fmt.Errorf("endpoint %q is not of the form tcp://host:port", endpoint)
	}
	host, port, err = net.SplitHostPort(address)
	if err != nil {
		return "", "", fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", "", fmt.Errorf("endpoint %q: port %q is not in 1..65535", endpoint, port)
	}
	if host == "" {
		return "", "", fmt.Errorf("endpoint %q has no host", endpoint)
	}
	return host, port, nil
}

// addressOf is what to dial for an endpoint.
func addressOf(endpoint string) (string, error) {
	host, port, err := ParseEndpoint(endpoint)
	if err == nil && host == "*" {
		err = fmt.Errorf("endpoint %q: * is not a host to connect to", endpoint)
	}
	return net.JoinHostPort(host, port), err
}

// conn is a connection to a ZMTP peer. It is closed when the context that it was made with ends.
type conn struct {
	zmtp  *zmq4.Conn
	guard *guard
	stop  func() bool // ends the watch over the context
}

// subscribe connects to a publisher and subscribes to the topics that begin with topic: to all if it is "". The publisher may send before, and may still
// leave out what it publishes a moment after.
func subscribe(ctx context.Context, dial DialFunc, address, topic string) (*conn, error) {
	return connect(ctx, dial, address, zmq4.Sub, zmq4.NewMsg(append([]byte{1}, topic...)))
}

// connect makes a connection and sends one message on it.
func connect(ctx context.Context, dial DialFunc, address string, kind zmq4.SocketType, first zmq4.Msg) (*conn, error) {
	dialCtx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	raw, err := dial(dialCtx, "tcp", address)
	if err != nil {
		return nil, err
	}
	if tcp, ok := raw.(interface {
		SetKeepAliveConfig(net.KeepAliveConfig) error
	}); ok {
		_ = tcp.SetKeepAliveConfig(keepAlive) // without it a publisher that vanishes is noticed later
	}
	c := &conn{guard: newGuard(raw), stop: context.AfterFunc(ctx, func() { raw.Close() })}
	if err := c.open(kind, first); err != nil {
		c.close()
		return nil, fmt.Errorf("%s does not speak as a %s's peer: %w", address, kind, err)
	}
	return c, nil
}

func (c *conn) open(kind zmq4.SocketType, first zmq4.Msg) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("malformed READY: %.200v", v) // the library does not look at the lengths in it
		}
	}()
	if err := c.guard.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return err
	}
	if c.zmtp, err = zmq4.Open(c.guard, nullsecurity.Security(), kind, nil, false, nil); err != nil {
		return err
	}
	c.guard.ready = true
	if err := c.zmtp.SendMsg(first); err != nil {
		return err
	}
	return c.guard.SetDeadline(time.Time{})
}

// receive returns the frames of the next message. Those that the peer sends to the connection itself are dealt with and left out. After an error there is
// nothing more.
func (c *conn) receive() ([][]byte, error) {
	for {
		msg, err := c.zmtp.RecvMsg()
		if err != nil {
			return nil, err
		}
		if msg.Type == zmq4.UsrMsg {
			return msg.Frames, nil
		}
	}
}

// receiveWithin is receive for a peer that may have nothing to say. The error wraps os.ErrDeadlineExceeded if it has not said it by then; it may have begun.
func (c *conn) receiveWithin(wait time.Duration) ([][]byte, error) {
	if err := c.guard.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return nil, err
	}
	return c.receive()
}

func (c *conn) close() {
	c.stop()
	c.guard.Close()
}

// guard is a connection that follows the framing of what it reads, and fails before a frame that must not be read.
type guard struct {
	net.Conn
	r      *bufio.Reader
	ready  bool // messages may come
	left   int  // bytes until the next frame begins
	frames int  // of the message that is being read
	total  int  // bytes of them
}

const greetingSize = 64

func newGuard(raw net.Conn) *guard {
	return &guard{Conn: raw, r: bufio.NewReaderSize(raw, readBuffer), left: greetingSize}
}

func (g *guard) Read(p []byte) (int, error) {
	if g.left == 0 {
		if err := g.next(); err != nil {
			return 0, err
		}
	}
	n, err := g.r.Read(p[:min(len(p), g.left)])
	g.left -= n
	return n, err
}

// The flags of a frame.
const (
	moreFlag = 1 << iota
	longFlag
	commandFlag
)

// next looks at the header of the next frame.
func (g *guard) next() error {
	header, err := g.r.Peek(2)
	if err != nil {
		return err
	}
	flags, size := header[0], uint64(header[1])
	if flags&longFlag != 0 {
		if header, err = g.r.Peek(9); err != nil {
			return err
		}
		size = binary.BigEndian.Uint64(header[1:])
	}
	switch {
	case flags&^(moreFlag|longFlag|commandFlag) != 0:
		return fmt.Errorf("frame with flags %#x", flags)
	case flags&commandFlag != 0:
		if flags&moreFlag != 0 || g.frames > 0 {
			return errors.New("command within a message")
		}
		if size > maxCommand {
			return fmt.Errorf("command of %d bytes", size)
		}
	case !g.ready:
		return errors.New("message before READY")
	case g.frames == maxFrames:
		return fmt.Errorf("message of more than %d frames", maxFrames)
	case size > uint64(maxMessage-g.total):
		return fmt.Errorf("message of more than %d bytes", maxMessage)
	case flags&moreFlag != 0:
		g.frames++
		g.total += int(size)
	default:
		g.frames, g.total = 0, 0
	}
	g.left = len(header) + int(size)
	return nil
}

func (g *guard) Write(p []byte) (int, error) {
	if err := g.SetWriteDeadline(time.Now().Add(writeTime)); err != nil {
		return 0, err
	}
	return g.Conn.Write(p)
}

// message is what an engine has published once.
type message struct {
	kind    messageKind
	seq     uint64
	payload []byte
}

type messageKind uint8

const (
	msgBatch  messageKind = iota
	msgFirst              // the first batch that the engine has ever published
	msgBad                // something that has no sequence number
	msgLost               // no batch: those before the next one cannot be had
	msgReborn             // no batch: the next ones are of another process than the last ones
)

// endSeq is the sequence number of what ends a replay. No batch has it.
const endSeq = math.MaxUint64

// parse finds the sequence number and the payload. Both are looked for from the end, for what comes before them differs between engines and their
// versions.
func parse(frames [][]byte) message {
	n := len(frames)
	if n < 2 || len(frames[n-2]) != 8 {
		return message{kind: msgBad}
	}
	return message{seq: binary.BigEndian.Uint64(frames[n-2]), payload: frames[n-1]}
}
