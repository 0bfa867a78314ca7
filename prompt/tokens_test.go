package prompt

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestParseTokenIDs(t *testing.T) {
	for header, want := range map[string][]uint32{
		"1":                             {1},
		"1,2,3":                         {1, 2, 3},
		" 1 ,\t2 , 3 ":                  {1, 2, 3},
		"0,4294967295":                  {0, 4294967295},
		"007":                           {7},
		"":                              {},
		" \t":                           {},
		",":                             nil,
		"1,":                            nil,
		"1,,2":                          nil,
		"1 2":                           nil,
		"-1":                            nil,
		"+1":                            nil,
		"1.0":                           nil,
		"1e3":                           nil,
		"0x1":                           nil,
		"4294967296":                    nil,
		"99999999999999999999999999999": nil,
		"1,a":                           nil,
		"1;2":                           nil,
		"１":                             nil,
	} {
		before := []uint32{42}
		got, err := ParseTokenIDs(before, header)
		if (err == nil) != (want != nil) || !slices.Equal(got, append(before, want...)) {
			t.Errorf("%q: %d, %v", header, got, err)
		}
	}
	if _, err := ParseTokenIDs(nil, "1,secret"); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("error %v", err)
	}
	if _, err := ParseTokenIDs(nil, strings.Repeat("1,", MaxTokenIDs)+"1"); err == nil {
		t.Error("too many are taken")
	}
}

// TestTokenIDPrompts has numbers of every length with every usual separator, near the end of the body too.
func TestTokenIDPrompts(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	for range 2000 {
		var ids []uint32
		var json strings.Builder
		separator := []string{",", ", ", " , ", ",\n  "}[r.IntN(4)]
		for i := range 1 + r.IntN(20) {
			id := r.Uint32() >> r.IntN(32)
			if i > 0 {
				json.WriteString(separator)
			}
			fmt.Fprint(&json, id)
			ids = append(ids, id)
		}
		b := parse(t, Completions, `{"prompt":[`+json.String()+`]}`)
		if !slices.Equal(b.TokenIDs, ids) {
			t.Fatalf("%s: %d", json.String(), b.TokenIDs)
		}
		if b.Lead != markLen || len(counted(b)) != 4*len(ids) {
			t.Fatalf("lead %d, %d bytes count", b.Lead, len(counted(b)))
		}
	}
}
