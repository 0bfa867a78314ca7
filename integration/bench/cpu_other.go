//go:build !unix

package main

import (
	"errors"
	"runtime"
	"time"
)

func cpuTime() (time.Duration, error) {
	return 0, errors.New("bench cannot read CPU times on " + runtime.GOOS)
}
