package replay

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// disturbances are what --slow, --fail and --join ask for. Replicas count from 0, as in the JSON.
type disturbances struct {
	slow    map[int]float64 // how fast a replica prefills, compared to the others
	joins   map[int]bool    // those that are not there at first
	changes []change        // by time
}

// change is a replica that comes or goes.
type change struct {
	at      time.Duration
	replica int
	comes   bool
	flag    string // that asks for it
}

// disturbances reads the flags. In what it returns only who is there goes and only who is away comes, and some replica is always there.
func (o Options) disturbances() (disturbances, error) {
	d := disturbances{slow: make(map[int]float64), joins: make(map[int]bool)}
	index := func(s string) (int, bool) {
		i, err := strconv.Atoi(s)
		return i, err == nil && i >= 0 && i < o.Replicas
	}
	moment := func(s string) (time.Duration, bool) {
		t, err := time.ParseDuration(s)
		return t, err == nil && t >= 0 && t <= milliseconds(maxTimestampMS)
	}
	wrong := func(flag, form string) error {
		return fmt.Errorf("%s: must be %s, with a replica from 0 to %d", flag, form, o.Replicas-1)
	}
	for _, value := range o.Slow {
		part := split(value, ":")
		i, known := index(part[0])
		factor, err := strconv.ParseFloat(part[1], 64)
		if !known || err != nil || !(factor >= 0.01 && factor <= 100) {
			return d, wrong("--slow "+value, "replica:factor, such as 0:0.5, a factor from 0.01 to 100")
		}
		d.slow[i] = factor
	}
	var comes, goes []change
	for _, value := range o.Fail {
		part, flag := split(value, "@+"), "--fail "+value
		i, known := index(part[0])
		at, okAt := moment(part[1])
		length, okLength := moment(part[2])
		if !known || !okAt || !okLength || length == 0 {
			return d, wrong(flag, "replica@time+time, such as 3@600s+120s")
		}
		goes = append(goes, change{at, i, false, flag})
		comes = append(comes, change{at + length, i, true, flag})
	}
	for _, value := range o.Join {
		part, flag := split(value, "@"), "--join "+value
		i, known := index(part[0])
		at, okAt := moment(part[1])
		if !known || !okAt {
			return d, wrong(flag, "replica@time, such as 7@900s")
		}
		d.joins[i] = true
		comes = append(comes, change{at, i, true, flag})
	}
	// At the same moment those that come are first.
	d.changes = append(comes, goes...)
	slices.SortStableFunc(d.changes, func(a, b change) int { return cmp.Compare(a.at, b.at) })

	away, left := make(map[int]bool), o.Replicas-len(d.joins)
	if left == 0 {
		return d, fmt.Errorf("--join %s: no replica is there at first", strings.Join(o.Join, ","))
	}
	for i := range d.joins {
		away[i] = true
	}
	for _, c := range d.changes {
		switch {
		case c.comes && !away[c.replica]:
			return d, fmt.Errorf("%s: the replica is there before %v", c.flag, c.at)
		case !c.comes && away[c.replica]:
			return d, fmt.Errorf("%s: the replica is away at %v", c.flag, c.at)
		}
		away[c.replica] = !c.comes
		if c.comes {
			left++
		} else if left--; left == 0 {
			return d, fmt.Errorf("%s: no other replica is there at %v", c.flag, c.at)
		}
	}
	return d, nil
}

// split cuts a value at the first of each of the separators in turn. What is missing is empty.
func split(value, separators string) []string {
	var parts []string
	for _, separator := range separators {
		part, rest, _ := strings.Cut(value, string(separator))
		parts, value = append(parts, part), rest
	}
	return append(parts, value)
}
