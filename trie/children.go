package trie

// children maps the first bytes of the edges below a node to the nodes that they lead to. It takes one of three forms,
// by how many there are: inline, a short list that is searched, a table with a place for each byte.
type children struct {
	count int32
	only  child // the child, where there is one
	many  []child
}

// child is a node and the first byte of its edge; zero is none.
type child uint64

func newChild(first byte, node uint32) child { return child(node)<<8 | child(first) }

func (c child) first() byte  { return byte(c) }
func (c child) node() uint32 { return uint32(c >> 8) }

const (
	childBytes = 8
	tableSize  = 256
	// A list grows up to longestList, and a table shrinks down to half of that: apart, so that a prompt that comes and
	// goes does not make them change in turns.
	longestList = 16
)

// get returns the node whose edge starts with first, 0 where there is none.
func (c *children) get(first byte) uint32 {
	switch {
	case c.count == 0:
	case c.count == 1:
		if c.only.first() == first {
			return c.only.node()
		}
	case len(c.many) == tableSize:
		return c.many[first].node()
	default:
		for _, o := range c.many {
			if o.first() == first {
				return o.node()
			}
		}
	}
	return 0
}

// all yields the nodes.
func (c *children) all(yield func(uint32) bool) {
	if c.count == 1 {
		yield(c.only.node())
		return
	}
	for _, o := range c.many {
		if o != 0 && !yield(o.node()) {
			return
		}
	}
}

// add adds a child, none of which may have the same first byte.
func (c *children) add(n child) {
	c.count++
	switch {
	case c.count == 1:
		c.only = n
	case c.count == 2:
		c.many = append(make([]child, 0, 4), c.only, n)
	case len(c.many) == tableSize:
		c.many[n.first()] = n
	case c.count <= longestList:
		c.many = append(c.many, n)
	default:
		table := make([]child, tableSize)
		for _, o := range append(c.many, n) {
			table[o.first()] = o
		}
		c.many = table
	}
}

// remove takes a child away.
func (c *children) remove(n child) {
	c.count--
	switch {
	case c.count == 0:
		return
	case len(c.many) == tableSize:
		c.many[n.first()] = 0
		if c.count > longestList/2 {
			return
		}
		list := make([]child, 0, longestList)
		for _, o := range c.many {
			if o != 0 {
				list = append(list, o)
			}
		}
		c.many = list
	default:
		for i, o := range c.many {
			if o == n {
				c.many[i] = c.many[c.count]
				c.many = c.many[:c.count]
				break
			}
		}
	}
	if c.count == 1 {
		c.only, c.many = c.many[0], nil
	}
}

// heapBytes returns the size of what is not inline.
func (c *children) heapBytes() int64 { return int64(cap(c.many)) * childBytes }
