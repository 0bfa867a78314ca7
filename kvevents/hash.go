package kvevents

import (
	"hash/maphash"
	"math/bits"
)

// Engines hash blocks in ways that differ by version and options, with seeds of their own. We do not repeat that: blocks are known by a hash of our own over
// all tokens from the start of the prompt to the end of the block, with a seed that is random for each process, so that nobody can make prompts collide.
//
// The hash goes token by token, wherever blocks begin and end: a prompt is hashed once for engines, and groups of layers, of all block sizes.
var (
	seed  = maphash.MakeSeed()
	start = maphash.String(seed, "start") // the hash of no tokens
	side  = maphash.String(seed, "side")  // sets digests apart from tokens
	left  = maphash.String(seed, "left")  // makes the factors in mix unforeseeable,
	right = maphash.String(seed, "right") // and 0 as unlikely as any
)

// mix folds the 128 bits of a product, as wyhash does.
func mix(h, v uint64) uint64 {
	hi, lo := bits.Mul64(h^left, v^right)
	return hi ^ lo
}

// hashTokens continues the hash of a prefix.
func hashTokens(prefix uint64, tokens []uint32) uint64 {
	for _, t := range tokens {
		prefix = mix(prefix, uint64(t))
	}
	return prefix
}

// hashExtra continues the hash of a prefix with a digest, which belongs before the tokens of its block.
func hashExtra(prefix, digest uint64) uint64 {
	if digest == 0 {
		return prefix
	}
	return mix(prefix^side, digest)
}

// namespace sets the blocks of adapters and of block sizes apart: xored with the hash of the prefix that a block ends, it makes the block's key.
func namespace(lora string, size int) uint64 {
	return maphash.Comparable(seed, struct {
		lora string
		size int
	}{lora, size})
}

// SaltDigest is the digest that the first block of a prompt has in [Event.Extra] when the request had that cache_salt, and nothing else went into the
// engine's hash: 0 for none.
func SaltDigest(salt string) uint64 {
	if salt == "" {
		return 0
	}
	return addDigest(0, maphash.String(seed, salt))
}

// addDigest adds an element to a digest; the result is never 0.
func addDigest(digest, element uint64) uint64 {
	return mix(digest^side, element) | 1
}
