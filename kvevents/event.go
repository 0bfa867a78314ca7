package kvevents

// Batch is the events of one step of an engine.
type Batch struct {
	Time   float64 // when, by the engine's clock, in Unix seconds; 0 where the engine does not say
	Rank   int     // data-parallel rank; -1 where the engine does not say
	Events []Event
	// Skipped counts the events of the batch that were left out because they are of an unknown kind or malformed, one by one.
	Skipped int
}

// Kind is what an event says.
type Kind uint8

// The kinds of events.
const (
	Stored  Kind = iota // blocks have become resident
	Removed             // copies of blocks are gone
	Cleared             // everything is gone
)

// Medium is where a block is held.
type Medium uint8

// The media. What is unknown is none that a prompt can be served from.
const (
	GPU           Medium = iota // also what engines call so on a CPU, and what says nothing
	CPU                         // memory of the host
	Disk                        // of the replica's own
	Remote                      // shared with other replicas, or not said to be the replica's own: it says nothing about this one
	UnknownMedium               // such as a connector's own name
)

// tiers is how many media, the first ones, a prompt can be served from.
const tiers = 3

// Attention is the kind of layers that a block is of. Only the blocks of main attention tell how long a prefix is cached.
type Attention uint8

// The kinds of attention.
const (
	Unspecified    Attention = iota // an engine that does not say
	MainAttention                   // full attention, MLA and their variants with sinks
	Mamba                           // recurrent layers: an engine with such can resume within a block
	OtherAttention                  // sliding windows and whatever else
)

// Event is one event, in the same form whatever the engine and its version. Its slices belong to the decoder and are valid until the next batch is decoded.
type Event struct {
	Kind Kind

	// Hashes name the blocks, as the engine does: 64 bits, of a longer hash the last 8 bytes.
	Hashes []uint64

	// Parent is the hash of the block before the first one, where there is one.
	Parent    uint64
	HasParent bool

	// Tokens are the ids of the tokens in the blocks, BlockSize for each. It is empty where the engine names blocks that it has described before. Of blocks
	// that are not of main attention, some may be left out of Hashes, but not out of Tokens.
	Tokens    []uint32
	BlockSize int

	LoRA   string // name of the adapter, or "#" and its number where the engine says no name; "" is none
	Medium Medium

	// Extra is a digest for each block of whatever else the engine's hash depends on: media, salts, embeddings; 0 is nothing. nil is nothing at all. See
	// [SaltDigest].
	Extra []uint64

	Group     int // KV cache group; -1 where the engine does not say
	Attention Attention

	// Remaining is how many copies of each block are left, in a removal; nil where the engine does not say.
	Remaining []int
}
