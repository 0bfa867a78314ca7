// Package kvevents knows what the KV caches of engines hold, because it listens to the events that they publish.
//
// A [Stream] is subscribed to the publisher of one engine (of one rank, where an engine has several) over ZMTP, keeps the order of what comes, fills
// gaps from the engine's replay buffer and says how far what it has passed on can be relied on. A [Decoder] reads the payloads of all known versions of
// vLLM, SGLang and TensorRT-LLM. An [Index] holds what all engines hold, and answers in one walk how much of a prompt each of them will not have to
// compute. [Discover] asks an engine where it publishes.
//
// Everything that comes from an engine is taken to be hostile: lengths are checked before anything is allocated, nothing recurses, and everything that is
// kept is bounded.
package kvevents
