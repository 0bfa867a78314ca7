// Package integration holds the tests that run a real Caddy process, with Rolter built in, between real sockets: clients on one side,
// simulated replicas (package replica) or real engines on the other.
package integration
