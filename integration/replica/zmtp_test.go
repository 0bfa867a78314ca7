package replica

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// raw connects to a publisher and shakes hands by hand.
func raw(t *testing.T, s *Server, ready []byte) net.Conn {
	t.Helper()
	pub, _ := s.EventEndpoints(0)
	conn, err := net.Dial("tcp", strings.TrimPrefix(pub, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	conn.Write(slices.Concat(greeting, ready))
	theirs := make([]byte, len(greeting))
	if _, err := io.ReadFull(conn, theirs); err != nil || !bytes.Equal(theirs, greeting) {
		t.Fatalf("greeting %x, %v", theirs, err)
	}
	return conn
}

var subReady = appendFrame(nil, zmtpCommand, appendProperty([]byte("\x05READY"), "Socket-Type", "SUB"))

func TestCommandsOfZMTP31(t *testing.T) {
	s := publishing(t, Config{})
	conn := raw(t, s, subReady)
	in := &zmtpConn{Conn: conn, in: bufio.NewReader(conn)}
	if flags, body, err := in.readFrame(); err != nil || flags != zmtpCommand || property(bytes.TrimPrefix(body, []byte("\x05READY")), "socket-type") != "PUB" {
		t.Fatalf("%d %q %v", flags, body, err)
	}
	for _, command := range []string{"\x09SUBSCRIBEkv@", "\x09SUBSCRIBEx", "\x06CANCELx", "\x07UNKNOWN", "\x04PING\x00\x0ahello"} {
		conn.Write(appendFrame(nil, zmtpCommand, []byte(command)))
	}
	if flags, body, err := in.readFrame(); err != nil || flags != zmtpCommand || string(body) != "\x04PONGhello" { // all before it has been read
		t.Fatalf("%d %q %v", flags, body, err)
	}
	ask(t, s, 0, 32)
	if parts, err := in.readMessage(); err != nil || len(parts) != 3 || string(parts[0]) != "kv@sim" {
		t.Errorf("%q %v", parts, err)
	}
}

// Whatever a peer sends, the publisher closes the connection or ignores it, and goes on with others.
func TestHostilePeers(t *testing.T) {
	s := publishing(t, Config{})
	tooMany := make([]byte, 0, 1<<16)
	for i := range maxTopics + 1 {
		tooMany = appendFrame(tooMany, 0, binary.BigEndian.AppendUint16([]byte{1}, uint16(i)))
	}
	for name, bytes := range map[string][]byte{
		"a publisher":             appendFrame(nil, zmtpCommand, appendProperty([]byte("\x05READY"), "Socket-Type", "PUB")),
		"no READY":                appendFrame(nil, zmtpCommand, []byte("\x05HELLO")),
		"a message for READY":     appendFrame(nil, 0, []byte("\x05READY")),
		"a property too long":     appendFrame(nil, zmtpCommand, []byte("\x05READY\x0bSocket-Type\xff\xff\xff\xffSUB")),
		"a name too long":         appendFrame(nil, zmtpCommand, []byte("\x05READY\xffSocket-Type")),
		"a frame of 2^62 bytes":   append(slices.Clone(subReady), 2, 0x40, 0, 0, 0, 0, 0, 0, 0),
		"a message without end":   append(slices.Clone(subReady), bytes.Repeat([]byte{1, 0}, 1000)...),
		"too many subscriptions":  append(slices.Clone(subReady), tooMany...),
		"a READY of 2^62 bytes":   {6, 0x40, 0, 0, 0, 0, 0, 0, 0},
		"an end in the handshake": {4},
	} {
		t.Run(name, func(t *testing.T) {
			conn := raw(t, s, bytes)
			if name == "an end in the handshake" {
				conn.(*net.TCPConn).CloseWrite()
			}
			if _, err := io.ReadAll(conn); err != nil && !strings.Contains(err.Error(), "reset") {
				t.Errorf("it is still open: %v", err)
			}
		})
	}
	for _, start := range []string{"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + strings.Repeat("x", 64), "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x01" + strings.Repeat("\x00", 64)} {
		pub, _ := s.EventEndpoints(0)
		conn, err := net.Dial("tcp", strings.TrimPrefix(pub, "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		io.WriteString(conn, start)
		if got, err := io.ReadAll(conn); len(got) > len(greeting) || err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%q, %v", got, err)
		}
	}
	sub := subscribe(t, s, 0, "")
	ask(t, s, 0, 32)
	sub.wait(t, 1)
}

// FuzzReadMessage: whatever comes is read within bounds or refused.
func FuzzReadMessage(f *testing.F) {
	f.Add(appendMessage(nil, nil, make([]byte, 8)))
	f.Add(appendFrame(nil, zmtpCommand, []byte("\x04PING\x00\x00abc")))
	f.Add(appendFrame(nil, zmtpCommand, []byte("\x09SUBSCRIBEtopic")))
	f.Add([]byte{2, 0, 0, 0, 0, 0, 1, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		server, client := net.Pipe()
		defer client.Close()
		go func() { // what PINGs are answered with
			io.Copy(io.Discard, client)
		}()
		c := &zmtpConn{Conn: server, in: bufio.NewReader(bytes.NewReader(data))}
		defer server.Close()
		for {
			parts, err := c.readMessage()
			if err != nil {
				return
			}
			size := 0
			for _, part := range parts {
				size += len(part)
			}
			if len(parts) == 0 || len(parts) > zmtpMaxParts || size > len(data)+1 {
				t.Fatalf("%d parts, %d bytes of %d", len(parts), size, len(data))
			}
		}
	})
}
