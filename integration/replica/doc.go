// Package replica is a simulated vLLM replica, for people without a GPU: it behaves as vLLM 0.32 does as far as a
// router can tell, and generates nonsense.
//
// It has two layers. The model ([Cache], [Timing], [Engine]) knows neither HTTP nor the wall clock: every call is told
// what time it is, so that a trace replay can drive it in virtual time. The server ([Server]) drives the same model in
// real time behind vLLM's HTTP interface, and can be told to fail in the ways real replicas fail ([Fault]).
//
// What is simplified: requests are prefilled one at a time, in the order of [Scheduling], where vLLM mixes chunks of
// several; decoding does not slow down with the number of running requests; there is no preemption, not even by
// priority; a block is never held in two copies.
package replica
