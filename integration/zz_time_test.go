package integration
import ("testing";"time")
func TestZZ(t *testing.T) {
	binary(t)
	for range 3 {
	t0 := time.Now()
	g := startGateway(t, "respond ok")
	t1 := time.Now()
	g.stop()
	t.Log(t1.Sub(t0), time.Since(t1))
	_ = g
	}
}
