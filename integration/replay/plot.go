package replay

import (
	"bytes"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// plotFormat is the format of a picture by the name of its file; empty when there is none.
func plotFormat(name string) string {
	switch extension := strings.ToLower(filepath.Ext(name)); extension {
	case ".svg", ".png":
		return extension[1:]
	}
	return ""
}

// Sizes of the picture. It is as wide as the names of the runs need, and grows with their number.
const (
	plotTimesWidth = 6.5 * vg.Inch
	plotReuseWidth = 3.5 * vg.Inch
	plotHeight     = 4.5 * vg.Inch
	plotRow        = 0.25 * vg.Inch
	plotTitle      = 0.95 * vg.Inch
	plotMargin     = 0.15 * vg.Inch
	plotSample     = 0.4 * vg.Inch // of a line, in the legend
	plotFontSize   = 12
)

// runColors are those of Okabe and Ito that stand out on white: people with any kind of colour blindness can tell them apart.
var runColors = []color.Color{
	color.RGBA{0x00, 0x72, 0xb2, 0xff},
	color.RGBA{0xd5, 0x5e, 0x00, 0xff},
	color.RGBA{0x00, 0x9e, 0x73, 0xff},
	color.RGBA{0xcc, 0x79, 0xa7, 0xff},
	color.RGBA{0xe6, 0x9f, 0x00, 0xff},
	color.RGBA{0x56, 0xb4, 0xe9, 0xff},
	color.RGBA{0x00, 0x00, 0x00, 0xff},
}

// runDashes tell runs with the same colour apart.
var runDashes = [][]vg.Length{nil, {7, 3}, {2, 3}}

// runLine is how the line of a run looks.
func runLine(i int) draw.LineStyle {
	return draw.LineStyle{
		Color:  runColors[i%len(runColors)],
		Width:  vg.Points(2),
		Dashes: runDashes[i/len(runColors)%len(runDashes)],
	}
}

// writePlot draws the runs into a file: on the left the distributions of the times, on the right a legend that goes on in bars.
func writePlot(name string, t *Trace, opts Options, report Report) error {
	times, err := plotTimes(report.Runs)
	if err != nil {
		return err
	}
	reuse, err := plotReuse(report.Runs)
	if err != nil {
		return err
	}
	plain, title := textStyle(plotFontSize), textStyle(16)
	legend := vg.Length(0)
	for _, r := range report.Runs {
		legend = max(legend, plain.Width(rowName(r)))
	}
	legend += plotSample + 4*plotMargin
	canvas, err := draw.NewFormattedCanvas(
		plotTimesWidth+legend+plotReuseWidth, plotHeight+plotRow*vg.Length(len(report.Runs)), plotFormat(name))
	if err != nil {
		return err
	}
	whole := draw.New(canvas)
	whole.SetColor(color.White)
	whole.Fill(whole.Rectangle.Path())
	whole = draw.Crop(whole, plotMargin, -plotMargin, plotMargin, -plotMargin)

	plain.YAlign, title.YAlign = draw.YTop, draw.YTop
	whole.FillText(title, vg.Point{X: whole.Min.X, Y: whole.Max.Y}, "Time to first token and reuse of cached prompts")
	whole.FillText(plain, vg.Point{X: whole.Min.X, Y: whole.Max.Y - 24}, strings.ReplaceAll(Setup(t, opts), "; ", "\n"))
	whole = draw.Crop(whole, 0, 0, 0, -plotTitle)
	times.Draw(draw.Crop(whole, 0, plotTimesWidth-(whole.Max.X-whole.Min.X), 0, 0))
	bars := draw.Crop(whole, plotTimesWidth+legend, 0, 0, 0)
	reuse.Draw(bars)

	data := reuse.DataCanvas(bars)
	_, y := reuse.Transforms(&data)
	plain.YAlign, plain.XAlign = draw.YCenter, draw.XRight
	for i, r := range report.Runs {
		at := vg.Point{X: data.Min.X - plotMargin/2, Y: y(row(report.Runs, i))}
		whole.FillText(plain, at, rowName(r))
		left := whole.Min.X + plotTimesWidth + 2*plotMargin
		whole.StrokeLine2(runLine(i), left, at.Y, left+plotSample, at.Y)
	}

	var picture bytes.Buffer
	if _, err := canvas.WriteTo(&picture); err != nil {
		return err
	}
	// An SVG names its font only. Where that is missing, Arial has the same widths.
	return os.WriteFile(name, bytes.ReplaceAll(picture.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,sans-serif;")), 0o666)
}

func textStyle(size vg.Length) text.Style {
	return text.Style{Color: color.Black, Font: font.From(font.Font{Typeface: "Liberation", Variant: "Sans"}, size), Handler: plot.DefaultTextHandler}
}

// newPlot returns an empty plot in the style of the picture.
func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.Padding = vg.Points(8)
	for _, style := range []*text.Style{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label} {
		style.Font = textStyle(plotFontSize).Font
	}
	p.X.Label.Padding, p.Y.Label.Padding = vg.Points(6), vg.Points(6)
	return p
}

// plotTimes draws which share of the requests had their first token after which time.
func plotTimes(runs []Result) (*plot.Plot, error) {
	// Times of nothing have no place on a logarithmic axis; what is below the least is drawn there.
	const least, points = 0.01, 500
	p := newPlot("Time to first token", "seconds", "% of requests")
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	p.Y.Tick.Marker = plot.ConstantTicks{{Value: 0, Label: "0"}, {Value: 25, Label: "25"}, {Value: 50, Label: "50"}, {Value: 75, Label: "75"}, {Value: 100, Label: "100"}}
	p.Add(grid())
	most := 1.0
	for i, r := range runs {
		n := len(r.ttft)
		var line plotter.XYs
		for k := range min(n, points) + 1 {
			at := k * n / min(n, points) // so many requests
			time := least
			if at > 0 {
				time = max(least, r.ttft[at-1])
			}
			line = append(line, plotter.XY{X: time, Y: 100 * float64(at) / float64(n)})
		}
		most = max(most, line[len(line)-1].X)
		l, err := plotter.NewLine(line)
		if err != nil {
			return nil, err
		}
		l.LineStyle, l.StepStyle = runLine(i), plotter.PostStep
		p.Add(l)
	}
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = least, most, 0, 100
	return p, nil
}

// share is a part in percent.
func share(part, whole int64) float64 { return 100 * float64(part) / float64(whole) }

// rowName is what the row of a run says.
func rowName(r Result) string {
	return fmt.Sprintf("%s  %.1f %%", r.name(), share(r.CachedTokens, r.PromptTokens))
}

// row is where a run is on the axis of the bars: the first is the uppermost.
func row(runs []Result, i int) float64 { return float64(len(runs) - 1 - i) }

// plotReuse draws the cached share of each run.
func plotReuse(runs []Result) (*plot.Plot, error) {
	ceiling := share(runs[0].CeilingTokens, runs[0].PromptTokens)
	p := newPlot("Prompt tokens found in a cache", fmt.Sprintf("%%; dashed: one infinite cache, %.1f %%", ceiling), "")
	p.HideY()
	p.Add(grid())
	for i, r := range runs {
		bar, err := plotter.NewBarChart(plotter.Values{share(r.CachedTokens, r.PromptTokens)}, plotRow*0.7)
		if err != nil {
			return nil, err
		}
		bar.Horizontal, bar.XMin, bar.Color, bar.LineStyle.Width = true, row(runs, i), runLine(i).Color, 0
		p.Add(bar)
	}
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, max(1.1*ceiling, 1), -0.6, float64(len(runs))-0.4
	limit, err := plotter.NewLine(plotter.XYs{{X: ceiling, Y: p.Y.Min}, {X: ceiling, Y: p.Y.Max}})
	if err != nil {
		return nil, err
	}
	limit.LineStyle = draw.LineStyle{Color: color.Black, Width: vg.Points(1.5), Dashes: []vg.Length{4, 3}}
	p.Add(limit)
	return p, nil
}

func grid() *plotter.Grid {
	g := plotter.NewGrid()
	g.Vertical = draw.LineStyle{Color: color.Gray{0xd8}, Width: vg.Points(0.5)}
	g.Horizontal = g.Vertical
	return g
}
