// The charts of the report: curves by uPlot, with an axis choice and values at the cursor.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("curve-data").textContent);
  const axes = {
    steps: { label: "steps", digits: 0 },
    tokens: { label: "target tokens", digits: 0 },
    hours: { label: "hours", digits: 3 },
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Six colors; runs after the sixth have dashes. Curves of training are dotted beside those of validation.
  const dashes = [[], [10, 5]], dotted = [[2, 4], [10, 4, 2, 4]];
  const dashed = (s) => Math.floor(s.run / 6) % 2;
  let charts = [];

  const number = (value, digits) =>
    value == null ? "–" : digits === undefined
      ? Number(value.toPrecision(4)).toString()
      : value.toLocaleString("en", { maximumFractionDigits: digits });
  // Short labels on the axes: 20k, 3M.
  const short = (value) => {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
    return +value.toPrecision(4) + "";
  };

  // The curves have points at different places, where the others are undefined; a value that is not finite is
  // null. The value of a curve is that of its nearest point. Beyond its ends, it has none, except within the
  // distance of two points.
  function nearest(chart, series, index) {
    const values = chart.data[series], xs = chart.data[0];
    const next = (from, step) => {
      while (from >= 0 && from < values.length && values[from] === undefined) from += step;
      return from;
    };
    const left = next(index, -1), right = next(index, 1);
    if (left >= 0 && right < values.length) return xs[index] - xs[left] <= xs[right] - xs[index] ? left : right;
    const end = left >= 0 ? left : right, step = left >= 0 ? -1 : 1;
    return Math.abs(xs[index] - xs[end]) <= Math.abs(xs[end] - xs[next(end + step, step)]) ? end : null;
  }

  // Unless the cursor points at a chart, its legend shows the last value of each curve.
  function showLast(chart) {
    const last = (values) => values.findLastIndex((value) => value != null);
    chart.setLegend({ idxs: chart.data.map(last) });
  }

  // Of a logarithmic axis, only the powers of ten have grid lines.
  const powers = (chart, splits) => splits.map((value) => Number.isInteger(Math.log10(value)) ? value : null);

  function draw(place, chosen) {
    const spec = data.charts[place.dataset.chart];
    const axis = axes[chosen];
    const tables = spec.series.map((s) => [data.axes[s.axis][chosen], s.y]);
    const series = spec.series.map((s) => ({
      label: s.label,
      stroke: css(`--series-${s.run % 6}`),
      width: 2,
      dash: (s.dotted ? dotted : dashes)[dashed(s)],
      points: { show: s.points || s.y.length < 3, size: 6 },
      value: (chart, value) => number(value),
    }));
    const ink = { stroke: css("--text"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
    const chart = new uPlot({
      width: place.clientWidth,
      height: 240,
      scales: { x: { time: false }, y: { distr: spec.log ? 3 : 1 } },
      series: [{ label: axis.label, value: (c, value) => number(value, axis.digits) }, ...series],
      axes: [
        { ...ink, label: axis.label, labelSize: 22, size: 34, values: (c, ticks) => ticks.map(short) },
        { ...ink, grid: { ...ink.grid, ...(spec.log && { filter: powers }) }, size: 58,
          values: (c, ticks) => ticks.map(short) },
      ],
      // The border of the box before a label is drawn like the curve.
      legend: { markers: { dash: (c, index) => {
        const s = spec.series[index - 1];
        return s.dotted ? "dotted" : dashed(s) ? "dashed" : "solid";
      } } },
      hooks: { ready: [showLast], setCursor: [(c) => { if (c.cursor.left < 0) showLast(c); }] },
      cursor: { drag: { x: true, y: false }, dataIdx: nearest },
    }, uPlot.join(tables), place);
    place.querySelector(".u-wrap").setAttribute("aria-hidden", "true");
    return chart;
  }

  const choice = () => document.querySelector("input[name=axis]:checked")?.value ?? "steps";
  const places = [...document.querySelectorAll("[data-chart]")];
  function drawAll() {
    charts.forEach((chart) => chart.destroy());
    charts = places.map((place) => draw(place, choice()));
  }
  // The arrow keys move the cursor of the chart in focus.
  places.forEach((place, index) => place.addEventListener("keydown", (event) => {
    const chart = charts[index], [xs] = chart.data, { min, max } = chart.scales.x, now = chart.cursor.idx;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const first = xs.findIndex((x) => x >= min), last = xs.findLastIndex((x) => x <= max);  // that are visible
    if (first > last) return;
    const move = moves[event.key], to = now == null ? (move === Infinity ? last : first) : now + move;
    const next = Math.min(last, Math.max(first, to));
    const left = chart.valToPos(chart.data[0][next], "x");
    chart.setCursor({ left, top: chart.bbox.height / 2 / devicePixelRatio });
    place.querySelector("[role=status]").textContent = [...place.querySelectorAll(".u-series")]
      .map((row) => [...row.children].map((cell) => cell.textContent.trim()).join(": ")).join("; ");
  }));
  document.querySelectorAll("input[name=axis]").forEach((input) => input.addEventListener("change", drawAll));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  new ResizeObserver(() => charts.forEach((chart, index) => {
    const width = places[index].clientWidth;
    if (width && width !== chart.width) chart.setSize({ width, height: 240 });
  })).observe(document.querySelector("main"));
  drawAll();
})();
