"""`mtrain info`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mtrain.cli.console.options import Json
from mtrain.cli.console.output import open_stdout
from mtrain.cli.console.tables import format_table
from mtrain.duration import format_duration
from mtrain.errors import ModelError, UsageError

if TYPE_CHECKING:
    from mtrain.checkpoint.model_info import Description, ModelInfo
    from mtrain.config.schema import Config, ModelFolderConfig
    from mtrain.config.sections.decoding import DecodingConfig
    from mtrain.runs.summary import Files, RunProgress, Summary

Rows = list[list[str]]
_TIED = {
    "all": "shared by source, target and output",
    "decoder": "shared by target and output",
    "none": "separate",
}
_LIMITS = ("max_steps", "max_epochs", "max_minutes", "patience")
_WITHOUT_CHECKPOINTS = "its checkpoints were removed, so it cannot be resumed"
_DATA_TYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_DIGITS = 16  # of a SHA-256; --json has all


def info(
    model: Annotated[
        Path, Argument(metavar="MODEL", help="Run folder, model folder, or folder of an exported model.")
    ],
    json_: Json = False,
    card: Annotated[
        bool, Option("--card", help="Print the model card that mtrain would write (Markdown).")
    ] = False,
) -> None:
    """Describe a model or a run.

    Prints languages, sizes, tokenizer, scores, training data, origin and license; for a run also its
    progress, the device, and what `model.preset: auto` chose. Verifies the files of the model.

    Examples:
    mtrain info runs/mine
    mtrain info models/en-de --json
    mtrain info runs/mine --card
    """
    if json_ and card:
        raise UsageError("--json and --card were both given; give one of them")
    from mtrain.runs.summary import summarize

    summary = summarize(model)
    with open_stdout() as out:
        if card:
            out.write(_card(summary))
        elif json_:
            print(json.dumps(_to_json(summary), indent=1), file=out)
        else:
            out.writelines(f"{line}\n" for line in _lines(summary))
    if summary.files is not None and summary.files.damage:
        raise ModelError(summary.files.damage)


def _card(summary: "Summary") -> str:
    from mtrain.checkpoint.card_text import model_card
    from mtrain.storage.generated import marked

    if summary.model is None:
        raise ModelError(f"{summary.path}: has no model yet")
    return marked(model_card(summary.model))


def _to_json(summary: "Summary") -> dict[str, Any]:
    values: dict[str, Any] = {"path": str(summary.path)}
    if summary.model is not None and summary.files is not None:
        model, files = summary.model, summary.files
        left_out: dict[str, Any] = {"name": True, "export": {"parameters", "config", "changed"}}
        values |= {
            "folder": str(model.folder),
            "name": model.name,
            "parameters": model.parameters,
            "data_type": model.data_type,
            "license": summary.license,
            "files": files._asdict(),
            "config": model.config.model_dump(mode="json"),
            **model.info.model_dump(mode="json", exclude=left_out),
        }
    if summary.progress is not None:
        training = summary.config.training if summary.config else None
        limits = training and training.model_dump(mode="json", include={*_LIMITS})
        values["progress"] = {**summary.progress.model_dump(mode="json"), "limits": limits}
        values["choices"] = [choice._asdict() for choice in summary.choices]
    return {**values, "notes": summary.notes}


def _lines(summary: "Summary") -> Iterator[str]:
    """The summary as text, in sections."""
    model = summary.model
    if model is None:
        yield _plain(f"{summary.path}: no model yet; the first validation saves one in model/")
    else:
        assert summary.files is not None
        yield _plain(f"{model.name} ({model.folder})")
        license_ = summary.license or "not stated; to state it, add `license:` to README.md"
        yield from _section("Model", [*_model(model), *_files(summary.files), ["license", license_]])
    if summary.progress is not None:
        if model is not None and not summary.progress.checkpoints:
            rows = [*_training(model.info), ["state", _WITHOUT_CHECKPOINTS], *_validations(summary.progress)]
        else:
            rows = _progress(summary.progress, summary.config)
        yield from _section("Training", rows)
    elif model is not None:
        yield from _section("Training", _training(model.info))
    choices = [[*map(str, choice)] for choice in summary.choices]
    yield from _section("Automatic recipe", choices, ("key", "value", "reason"), (0, 2))
    if model is not None:
        scores, title = model.info.scores, "Scores before the export" if model.info.export else "Scores"
        rows = [[score.set, _number(score.sentences), score.title, score.rounded] for score in scores]
        yield from _section(title, rows, ("set", "sentences", "metric", "score"), (0, 2))
        signatures = (f"{score.title}|{score.signature}" for score in scores if score.signature)
        yield from _section("Signatures", [[text] for text in dict.fromkeys(signatures)])
        columns = ("corpus", "use", "pairs", "SHA-256")
        yield from _section("Training data", _data(model.info), columns, (0, 1, 3))
    yield from _section("Notes", [[note] for note in summary.notes])


def _section(
    title: str, rows: Rows, header: Sequence[str] = (), left: Sequence[int] = (0, 1)
) -> Iterator[str]:
    """A title and a table; nothing if there are no rows."""
    if rows:
        yield from ("", title)
        yield from format_table([[*map(_plain, row)] for row in rows], header, left)


def _model(model: "Description") -> Rows:
    from mtrain.checkpoint.card_text import describe_origin

    config, info = model.config, model.info
    architecture = config.model
    size = "unknown; model.safetensors cannot be read"
    data_type = model.data_type or "fp32"
    if model.parameters is not None:
        size = f"{model.parameters / 1e6:,.2f} million, {_DATA_TYPES.get(data_type, data_type)}"
    kinds = f"{architecture.norm}-norm, {architecture.activation}, {architecture.positions} positions"
    attention = f"{architecture.heads} heads, {kinds}"
    made = describe_origin(info.origin) or "not recorded"
    longest = f"{config.decoding.longest_source(config.max_length, config.language_tags):,} tokens"
    if architecture.is_classifier:
        decoder = "a classifier of sentence pairs"
        embeddings: Rows = []
        limits = [["longest side", f"{longest}; longer pairs are not classified"]]
    else:
        decoder = f"{architecture.decoder_layers} decoder"
        embeddings = [["embeddings", _TIED[architecture.tie_embeddings]]]
        longest += "" if info.export else "; longer lines are split"
        limits = [["longest source", longest], ["decoding", _decoding(config.decoding)]]
    rows = [
        ["languages", _languages(config)],
        ["parameters", size],
        ["layers", f"{architecture.encoder_layers} encoder, {decoder}"],
        ["width", f"{architecture.d_model}, feed-forward {architecture.ffn_dim}, {attention}"],
        *embeddings,
        ["tokenizer", _tokenizer(model)],
        *limits,
        ["origin", f"{made} by mtrain {info.mtrain}" if info.mtrain else made],
    ]
    if info.export:
        rows.append(["format", " ".join(filter(None, (info.export.format, info.export.quantization)))])
    return rows


def _languages(config: "ModelFolderConfig") -> str:
    if not config.languages:
        return f"{config.source_lang} to {', '.join(config.target_languages)}"
    own = config.direction
    default = "" if "und" in own else f"{own.source} to {own.target} by default, "
    return f"{default}between {len(config.languages)}: {', '.join(config.languages)}"


def _tokenizer(model: "Description") -> str:
    from mtrain.checkpoint.card_text import vocabulary_size

    settings = model.config.tokenizer
    kind = "" if settings.path else f" {settings.type}"  # the type of a reused vocabulary is not recorded
    normalizes = ", normalizes punctuation" if model.config.normalizes_punctuation else ""
    return f"SentencePiece{kind}, {vocabulary_size(model)}{normalizes}"


def _decoding(settings: "DecodingConfig") -> str:
    if settings.samples is not None:
        return f"sampling, {settings.samples} samples, temperature {settings.temperature:g}"
    if settings.beam_size == 1:
        return "greedy search"
    return f"beam search, {settings.beam_size} beams, length penalty {settings.length_penalty:g}"


def _files(files: "Files") -> Rows:
    from rich.filesize import decimal

    state = "damaged" if files.damage else "verified"
    rows = [["files", f"{files.number}, {decimal(files.size)}, {state}"]]
    hashes = {"model": files.fingerprint, "tokenizer": files.tokenizer}
    shown = [f"{value[:_DIGITS]} ({name})" for name, value in hashes.items() if value]
    return [*rows, ["fingerprint", ", ".join(shown)]] if shown else rows


def _training(info: "ModelInfo") -> Rows:
    if (training := info.training) is None:
        return []
    amounts = _amounts(training.epochs, training.target_tokens, training.seconds)
    return [["steps", f"{training.steps:,}"], *amounts]


def _amounts(epochs: int | None, tokens: int | None, seconds: float | None) -> Rows:
    time = "" if seconds is None else f"{format_duration(seconds)}, with validation"
    rows = [["complete epochs", _number(epochs)], ["target tokens", _number(tokens)], ["time", time]]
    return [row for row in rows if row[1]]


def _progress(progress: "RunProgress", config: "Config | None") -> Rows:
    later = progress.logged_step > progress.step
    since = f", and {progress.logged_step - progress.step:,} since the last checkpoint" if later else ""
    rows = [["steps", f"{progress.step:,}{since}"]]
    if config is not None and config.data.stages:
        rows.append(["stage", f"{len(progress.stage_starts)} of {len(config.data.stages)}"])
    rows += _amounts(progress.epoch, progress.target_tokens, progress.seconds)
    if progress.arithmetic:
        rows.append(["device", progress.arithmetic])
    if config is not None:
        training = config.training
        limits = [f"{key} {value:,.15g}" for key in _LIMITS if (value := getattr(training, key)) is not None]
        if training.patience is not None:
            limits[-1] += f" validations ({progress.validations_without_improvement} so far)"
        rows.append(["limits", ", ".join(limits) or "none"])
        ending = f"finished: {progress.finished}" if progress.finished else ""
        rows.append(["state", ending or "not finished; `mtrain fit` resumes it"])
    return [*rows, ["checkpoints", f"{progress.checkpoints:,}"], *_validations(progress)]


def _validations(progress: "RunProgress") -> Rows:
    """The best and the last validation."""
    from mtrain.evaluation.metrics import TITLES

    rows, metric = [], progress.best_metric
    by = f", selected by {TITLES.get(metric, metric)}" if metric else ""
    for name, found, why in (("best validation", progress.best, by), ("last validation", progress.last, "")):
        if found is not None:
            scores = ", ".join(f"{score.title} {score.rounded}" for score in found.scores)
            rows.append([name, f"step {found.step:,}{why}: {scores}"])
    return rows


def _data(info: "ModelInfo") -> Rows:
    if (data := info.data) is None:
        return []
    rows: Rows = []
    for use, corpora in (("training", data.train), ("validation", data.validation)):
        rows += [[each.name, use, _number(each.pairs), (each.sha256 or "")[:_DIGITS]] for each in corpora]
    rows.append(["all, as encoded", "", "", (data.fingerprint or "")[:_DIGITS]])
    return rows


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _plain(text: str) -> str:
    """Text for one line."""
    return text.replace("\n", " ")
