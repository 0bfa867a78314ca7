package replica

import "hash/fnv"

// CachedTokens is vLLM's rule: whole blocks only, and never the whole prompt, because the last prompt token must be
// computed to get the first generated one (v1/core/kv_cache_manager.py, get_computed_blocks).
func CachedTokens(blockSize, residentBlocks, promptTokens int) int {
	return blockSize * min(residentBlocks, max(promptTokens-1, 0)/blockSize)
}

// BlockKeys returns the chained keys of the full blocks of tokens. What else they are to depend on (vLLM's cache_salt, a
// LoRA adapter) goes into the first block, and through the chain into all. Equal tokens have equal keys on all replicas
// and across restarts, as in vLLM 0.32.
func BlockKeys(tokens []uint32, blockSize int, extra ...string) []uint64 {
	root := fnv.New64a()
	for _, text := range extra {
		root.Write(append([]byte(text), 0)) // never fails
	}
	return chain(root.Sum64(), tokens, blockSize)
}

// chain returns the keys of full blocks of tokens behind a block with this key.
func chain(key uint64, tokens []uint32, blockSize int) []uint64 {
	keys := make([]uint64, 0, len(tokens)/blockSize)
	for len(tokens) >= blockSize {
		for _, token := range tokens[:blockSize] {
			key = mix(key ^ uint64(token))
		}
		keys = append(keys, key)
		tokens = tokens[blockSize:]
	}
	return keys
}

// mix is the finaliser of SplitMix64: a bijection whose output bits depend on all input bits.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
