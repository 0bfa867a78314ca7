// Package replica is a simulated vLLM replica, for people without a GPU: it behaves as vLLM 0.32 does as far as a
// router can tell, and generates nonsense.
//
// It has three parts. The model ([Cache], [Timing], [Engine]) knows neither HTTP nor the wall clock: every call is told
// what time it is, so that a trace replay can drive it in virtual time. The server ([Server]) drives the same model in
// real time behind vLLM's HTTP interface, and can be told to fail in the ways real replicas fail ([Fault]). What its
// caches hold it publishes as vLLM does ([KVEvents]): over ZMTP, in vLLM's encodings, with replays, one stream for each
// data-parallel rank, and with the faults of real publishers. [LMCache] stands for the servers of LMCache.
//
// What is simplified: requests are prefilled one at a time, in the order of [Scheduling], where vLLM mixes chunks of
// several, so all blocks of a prompt become resident (and are published) at once, and its evictions happen then;
// decoding does not slow down with the number of running requests; there is no preemption, not even by priority; block
// hashes are of the simulation's own, and the same in every process. In virtual time a block is held once, unless
// [Cache.KeepCopies] says that it is as on vLLM.
package replica
