"""The curves of runs: data for uPlot, and the same as text."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from mtrain.report.page import html_radios, html_table, json_script
from mtrain.runs.metrics import Curve, Floats
from mtrain.runs.records import RunRecords

_ROWS = 10  # of the table of a chart
_DIGITS = {"steps": 9, "tokens": 9, "hours": 6}  # significant digits of the places on each axis


class Chart(NamedTuple):
    """A chart of one or two metrics of each run."""

    key: str
    title: str
    unit: str
    metrics: tuple[str, ...]  # of `RunRecords.curves`; of two, the first one is dotted
    factor: float = 1.0  # from the recorded unit
    log: bool = False  # a logarithmic vertical axis


CHARTS = (
    Chart("loss", "Training loss", "nats/token, label-smoothed", ("loss",)),
    Chart("nll", "Negative log-likelihood", "nats/token", ("nll", "validation_nll")),
    Chart("perplexity", "Perplexity", "of the next token", ("perplexity", "validation_perplexity"), log=True),
    Chart("bleu", "BLEU", "on the validation set", ("validation_bleu",)),
    Chart("chrf", "chrF", "on the validation set", ("validation_chrf",)),
    Chart("auc", "AUC", "on the validation set", ("validation_auc",)),
    Chart("rate", "Learning rate", "", ("learning_rate",)),
    Chart("norm", "Gradient norm", "before clipping", ("grad_norm",)),
    Chart("speed", "Speed", "target tokens/s", ("target_tokens_per_second",)),
    Chart("waiting", "Waiting for data", "ms/step", ("data_seconds",), 1000.0),
)


def html_curves(runs: Sequence[RunRecords]) -> str:
    """The charts with the choice of their axis, their tables, and the data of charts.js."""
    used = [chart for chart in CHARTS if any(_known(run, chart) for run in runs)]
    axis_choices = {"steps": "steps", "tokens": "target tokens", "hours": "hours"}
    axes: list[dict[str, Any]] = []
    charts = {chart.key: {"log": chart.log, "series": _series(runs, chart, axes)} for chart in used}
    sections = "".join(_section(runs, chart) for chart in used)
    data = json_script({"axes": axes, "charts": charts}, "curve-data")
    return (
        f"{html_radios('Horizontal axis', 'axis', axis_choices, 'steps')}"
        '<p class="muted">Point at a chart to read its values, or focus it and use the arrow keys. Drag '
        "to zoom; double-click to zoom out. Where a chart has curves of training and of validation, "
        f'training is dotted.</p><div class="charts">{sections}</div>{data}'
    )


def _known(run: RunRecords, chart: Chart) -> list[tuple[str, Curve]]:
    """The curves of a run in a chart that have values."""
    if run.is_classifier and chart.key == "perplexity":  # it predicts no tokens
        return []
    found = [(metric, run.curves[metric]) for metric in chart.metrics]
    return [(metric, curve) for metric, curve in found if np.isfinite(curve.values).any()]


def _series(runs: Sequence[RunRecords], chart: Chart, axes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a chart. Their places on the axes, which several charts share, are added to `axes`."""
    series = []
    for number, run in enumerate(runs):
        for metric, curve in _known(run, chart):
            axis = {name: _numbers(getattr(curve, name), digits) for name, digits in _DIGITS.items()}
            if axis not in axes:
                axes.append(axis)
            kind = "validation" if metric.startswith("validation") else "training"
            both = len(chart.metrics) > 1
            series.append(
                {
                    "label": f"{run.name}, {kind}" if both else run.name,
                    "run": number,
                    "points": kind == "validation" and len(curve.values) <= 50,
                    "axis": axes.index(axis),
                    "y": _numbers(chart.factor * curve.values, 4),
                    "dotted": both and kind == "training",
                }
            )
    return series


def _numbers(values: Floats, digits: int) -> list[float | int | None]:
    """Numbers for JSON with that many significant digits."""
    rounded = (float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values)
    return [int(value) if value is not None and value.is_integer() else value for value in rounded]


def _section(runs: Sequence[RunRecords], chart: Chart) -> str:
    unit = chart.unit
    if all(run.is_classifier for run in runs):  # classifiers label pairs, not tokens
        unit = unit.replace("target tokens", "pairs").replace("nats/token", "nats/pair")
    title = chart.title + (f" ({unit})" if unit else "")
    return (
        f'<section><h3 id="chart-{chart.key}">{escape(title)}</h3>'
        f'<div data-chart="{chart.key}" tabindex="0" role="application"'
        f' aria-label="{escape(_summary(runs, chart))}"><div role="status"></div></div>'
        f"<details><summary>Values</summary>{_table(runs, chart, title)}</details></section>"
    )


def _summary(runs: Sequence[RunRecords], chart: Chart) -> str:
    """A chart in words, for screen readers."""
    parts = []
    for run in runs:
        for metric, curve in _known(run, chart):
            kind = " (validation)" if metric.startswith("validation_") and len(chart.metrics) > 1 else ""
            values = chart.factor * curve.values[np.isfinite(curve.values)]
            parts.append(
                f"{run.name}{kind}: from {values[0]:.4g} to {values[-1]:.4g}, between {values.min():.4g} and "
                f"{values.max():.4g}"
            )
    return f"{chart.title}. {'; '.join(parts)}. Arrow keys read the values."


def _table(runs: Sequence[RunRecords], chart: Chart, title: str) -> str:
    columns, rows = ["run", "step"], []
    columns += ["validation" if metric.startswith("validation_") else "training" for metric in chart.metrics]
    for run in runs:
        known = dict(_known(run, chart))
        if not known:
            continue
        steps = max((curve.steps for curve in known.values()), key=lambda steps: steps[-1])
        chosen = steps[np.unique(np.linspace(0, len(steps) - 1, _ROWS).round().astype(int))]
        for step in chosen:
            cells = [_value_at(known.get(metric), step, chart.factor) for metric in chart.metrics]
            rows.append([run.name, f"{step:,.0f}", *cells])
    return html_table(title, columns, rows)


def _value_at(curve: Curve | None, step: float, factor: float) -> str:
    """The last value up to a step, as text."""
    index = -1 if curve is None else int(np.searchsorted(curve.steps, step, side="right")) - 1
    if curve is None or index < 0:
        return ""
    value = factor * curve.values[index]
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
