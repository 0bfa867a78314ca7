package trie

// list is a doubly linked list of prompts in the order of their insertion, the links of which are in the prompts. Each
// prompt is in two: the tree's and its slot's.
type list struct {
	oldest, newest uint32
}

type links struct {
	older, newer uint32
}

// link makes prompt i, which is p, the newest of both its lists.
func (t *Tree) link(i uint32, p *prompt) {
	t.slots[p.slot].inserts++
	p.number = t.slots[p.slot].inserts
	own := &t.slots[p.slot].recent
	p.inTree = links{older: t.recent.newest}
	p.inSlot = links{older: own.newest}
	if t.recent.newest == 0 {
		t.recent.oldest = i
	} else {
		t.prompts.at(t.recent.newest).inTree.newer = i
	}
	if own.newest == 0 {
		own.oldest = i
	} else {
		t.prompts.at(own.newest).inSlot.newer = i
	}
	t.recent.newest, own.newest = i, i
}

// unlink takes prompt i, which is p, out of both its lists.
func (t *Tree) unlink(i uint32, p *prompt) {
	own := &t.slots[p.slot].recent
	if p.inTree.older == 0 {
		t.recent.oldest = p.inTree.newer
	} else {
		t.prompts.at(p.inTree.older).inTree.newer = p.inTree.newer
	}
	if p.inTree.newer == 0 {
		t.recent.newest = p.inTree.older
	} else {
		t.prompts.at(p.inTree.newer).inTree.older = p.inTree.older
	}
	if p.inSlot.older == 0 {
		own.oldest = p.inSlot.newer
	} else {
		t.prompts.at(p.inSlot.older).inSlot.newer = p.inSlot.newer
	}
	if p.inSlot.newer == 0 {
		own.newest = p.inSlot.older
	} else {
		t.prompts.at(p.inSlot.newer).inSlot.older = p.inSlot.older
	}
}
