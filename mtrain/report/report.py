"""The page of `mtrain report`: what runs have recorded, side by side."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import yaml

from mtrain.decoding.translate import Translator
from mtrain.errors import ModelError, UsageError
from mtrain.evaluation.differences import words
from mtrain.evaluation.metrics import TITLES, named_signature
from mtrain.report.attention import HINT, html_attention
from mtrain.report.curves import html_curves
from mtrain.report.data_sections import html_data, html_extremes, html_lengths, html_samples
from mtrain.report.page import html_page, html_table
from mtrain.runs.records import RunRecords, differing_settings, names_of, read_run

log = logging.getLogger(__name__)

SENTENCES = 3  # whose attention is drawn, unless they are given
_WORDS = 13  # and punctuation marks, of a sentence that is easy to read in an attention map
_MARKS = (
    '<p class="muted">Words that the reference does not have, or has in another place, are '
    "<mark>marked</mark>.</p>"
)
_STYLES = ("uPlot.min.css", "report.css", "attention.css")
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "attention.js")


def report_page(
    folders: Sequence[Path], sentences: Sequence[str] = (), device: str = "cpu", overrides: Sequence[str] = ()
) -> str:
    """The report of one or more runs. It draws the attention of `sentences`, by default of short validation
    samples, which are translated with the `decoding.key=value` settings in `overrides`.

    A damaged model is left out, with a warning. Raises ModelError for a folder that is not a run, UsageError
    if a run has no steps or is given twice, or if the sentences or settings are for pair classifiers only.
    """
    runs = [read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    title = f"Training of {', '.join(run.name for run in runs[:2])}"
    if len(runs) > 2:
        title += f" and {len(runs) - 2} more run{'s' * (len(runs) > 3)}"
    if (sentences or overrides) and all(run.is_classifier for run in runs):
        option = "--sentence" if sentences else "--set"
        raise UsageError(f"{option} has no effect on pair classifiers; leave it out")
    maps = dict(_draw_models(runs, sentences, device, overrides))
    sampled, scored = [run for run in runs if run.samples], [run for run in runs if run.best]
    sections = {
        "Summary": _summary(runs),
        "Curves": html_curves(runs),
        "Settings": _settings(runs),
        "Data and tokenizer": _folded({run.name: html_data(run) for run in runs}),
    }
    if sampled:
        sections["Validation samples"] = _MARKS + _folded({run.name: html_samples(run) for run in sampled})
    if scored:
        sections["BLEU by length"] = html_lengths(scored)
        extremes = {run.name: html_extremes(run) for run in scored}
        sections["Best and worst sentences"] = _MARKS + _folded(extremes)
    if maps:
        sections["Attention"] = HINT + _folded(maps)
    links = "".join(f'<li><a href="#{_id(name)}">{name}</a></li>' for name in sections)
    body = "\n".join(
        f'<section aria-labelledby="{_id(name)}"><h2 id="{_id(name)}">{name}</h2>{html}</section>'
        for name, html in sections.items()
    )
    head = f"<header><h1>{escape(title)}</h1>"
    head += f'<nav aria-label="Contents"><ul>{links}</ul></nav></header>'
    return html_page(title, f'{head}\n<main id="main">{body}</main>', _STYLES, _SCRIPTS)


def _id(name: str) -> str:
    return name.lower().replace(" ", "-")


def _summary(runs: Sequence[RunRecords]) -> str:
    rows = []
    for run in runs:
        curves = run.curves["loss"], run.curves["validation_nll"]  # the last step may not be logged
        last = max((curve for curve in curves if len(curve.steps)), key=lambda x: (x.steps[-1], x.hours[-1]))
        nll, bleu = run.curves["validation_nll"].values, run.curves["validation_bleu"].values
        auc = run.curves["validation_auc"].values
        rows.append(
            [
                run.name,
                f"{last.steps[-1]:,.0f}",
                f"{last.tokens[-1] / 1e6:,.2f}",
                f"{60 * last.hours[-1]:,.1f}",
                f"{np.nanmin(nll):.3f}" if np.isfinite(nll).any() else "",
                f"{np.nanmax(bleu):.2f}" if np.isfinite(bleu).any() else "",
                f"{np.nanmax(auc):.4f}" if np.isfinite(auc).any() else "",
            ]
        )
    columns = ["run", "steps", "million target tokens", "minutes", "best nll", "best BLEU", "best AUC"]
    if not any(run.is_classifier for run in runs):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    parts = [html_table("Runs, with the best scores on the validation set", columns, rows)]
    tests = [(run.name, test) for run in runs for test in run.results]
    scores = [score for _, test in tests for score in test.scores]
    if tests:
        metrics = dict.fromkeys(score.metric for score in scores)
        rows = []
        for name, test in tests:
            known = {score.metric: f"{score.score:.2f}" for score in test.scores}
            rows.append([f"{name}, {test.name}", *(known.get(metric, "") for metric in metrics)])
        columns = ["run, test set", *(TITLES.get(metric, metric) for metric in metrics)]
        parts.append(html_table("Test sets", columns, rows))
    signatures = {named_signature(score.metric, score.signature) for score in scores}
    parts += [f'<p class="muted">{escape(signature)}</p>' for signature in sorted(signatures)]
    parts += [
        f"<p>{escape(run.name)} skipped {run.skipped_steps:,} step(s), whose loss or gradient was not finite."
        "</p>"
        for run in runs
        if run.skipped_steps
    ]
    lacking: dict[str, list[str]] = {}
    for run in runs:
        lacking.setdefault(", ".join(run.missing), []).append(run.name)
    parts += [
        f'<p class="muted">Not recorded by {escape(", ".join(names))}: {escape(missing)}.</p>'
        for missing, names in lacking.items()
        if missing
    ]
    return "".join(parts)


def _settings(runs: Sequence[RunRecords]) -> str:
    parts = []
    if len(runs) > 1:
        differing = differing_settings([run.config for run in runs])
        rows = [[key, *values] for key, values in differing.items()]
        names = [run.name for run in runs]
        table = html_table("Keys whose values differ", ["key", *names], rows)
        parts.append(table if rows else "<p>The configs of the runs do not differ.</p>")
    for run in runs:
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        parts.append(_details(f"Config of {run.name}", f'<pre tabindex="0">{escape(text)}</pre>', False))
    return "".join(parts)


def _folded(parts: Mapping[str, str]) -> str:
    """Parts by title, which can be folded; the first one is open."""
    return "".join(_details(title, html, number == 0) for number, (title, html) in enumerate(parts.items()))


def _details(title: str, html: str, is_open: bool) -> str:
    return f"<details{' open' * is_open}><summary>{escape(title)}</summary>{html}</details>"


def _draw_models(
    runs: Sequence[RunRecords], sentences: Sequence[str], device: str, overrides: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each run whose translation model can be loaded, and attention maps of the model."""
    for number, run in enumerate(runs):
        if not (run.folder / "model").is_dir() or run.is_classifier:
            continue
        try:
            with Translator.load(run.folder / "model", device, overrides, workers=1) as translator:
                if translator.tokenizer.source.codes and "und" in translator.direction:
                    run.missing.append("attention of the model, whose languages are not known")
                    continue
                chosen = list(sentences) or _short(run)
                translations = [found.text for found in translator.translate(chosen, scored=False)]
                yield run.name, html_attention(translator, chosen, translations, f"run-{number}", "h3")
        except ModelError as error:
            log.warning("%s; the report lacks its attention", error)
            run.missing.append("attention of the model, which is damaged")


def _short(run: RunRecords) -> list[str]:
    """A few validation sentences, preferably short ones."""
    return sorted(run.examples, key=lambda text: max(0, len(words(text)) - _WORDS))[:SENTENCES]
