"""Decoding by CTranslate2 in place of mtrain, with the text, the parts and the joining of mtrain."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mtrain.checkpoint.model_folder import load_model
from mtrain.checkpoint.model_info import run_folder_of
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.decode import DecodingTask, Search
from mtrain.decoding.search.beam import Hypothesis
from mtrain.decoding.search.search import maximum_lengths
from mtrain.decoding.split import Part
from mtrain.decoding.translate import Translator
from mtrain.errors import ModelError, StorageError, UsageError, is_out_of_memory
from mtrain.interop.ctranslate2 import write_ctranslate2
from mtrain.interop.formats import import_optional
from mtrain.storage.atomic import write_folder, write_text
from mtrain.storage.locks import wait_for_lock
from mtrain.storage.manifest import read_json, verify_folder
from mtrain.version import __version__

log = logging.getLogger(__name__)

_FOLDER = "ctranslate2-cache"  # in a run or model folder
_SOURCE = "source.json"  # what a converted model was made from
_CONVERTED = ("forbidden_ids", "max_length_ratio", "max_length_offset")  # settings that the conversion uses
# Default values of settings that CTranslate2 lacks or interprets differently; others are refused. (Its greedy
# search crashes with a coverage penalty.) It also renormalizes probabilities after tokens are excluded, as
# `decoding.renormalize` does.
_NEUTRAL = {"samples": None, "min_length_ratio": 0.0, "coverage_penalty": 0.0}
_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def with_ctranslate2(path: Path, translator: Translator) -> Translator:
    """A translator that decodes by CTranslate2, given the translator of the model at `path`.

    The converted model is kept in the run or model folder, and made again if the model has changed. Raises
    UsageError if CTranslate2 is not installed, or lacks a setting, the device or the precision.
    """
    ctranslate2, device, workers = import_optional("ctranslate2"), translator.device, translator.workers
    _require_supported(translator.decoding)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--engine ctranslate2 does not run on {device.type}; give --device cpu")
    places = {"device": device.type, "device_index": device.index or 0}
    data_type, wanted = _TYPES[workers.precision], translator.decoding.precision
    if data_type not in ctranslate2.get_supported_compute_types(*places.values()):
        if wanted != "auto":
            raise UsageError(f"--engine ctranslate2 has no {wanted} here; set decoding.precision to auto")
        data_type = "float32"
    each = max(1, torch.get_num_threads() // workers.count)
    threads = {"inter_threads": workers.count, "intra_threads": each}

    def load(folder: Path) -> Any:
        return ctranslate2.Translator(str(folder), compute_type=data_type, **places, **threads)

    return translator.with_search(_search(_load_converted(path, translator, load), translator))


def _require_supported(decoding: DecodingConfig) -> None:
    """Raise UsageError if CTranslate2 lacks a setting."""
    lacking = [name for name, neutral in _NEUTRAL.items() if getattr(decoding, name) != neutral]
    lacking += ["stop"] if decoding.stop == "exact" else []
    if lacking:
        cure = "leave it out, or use --engine mtrain"
        raise UsageError(f"decoding.{lacking[0]}: not supported by --engine ctranslate2; {cure}")


def _load_converted(path: Path, translator: Translator, load: Callable[[Path], Any]) -> Any:
    """Call `load` with the folder of the converted model. If nothing can be written beside the model, it is
    converted to a temporary folder."""
    decoding = translator.decoding.model_dump(mode="json", include={*_CONVERTED})
    versions = {"mtrain": __version__, "ctranslate2": import_optional("ctranslate2").__version__}
    source = {"model": translator.fingerprint, **versions, **decoding}

    def fill(folder: Path) -> None:
        loaded = load_model(path, [f"decoding.{key}={json.dumps(value)}" for key, value in decoding.items()])
        if loaded.fingerprint != translator.fingerprint:
            raise ModelError(f"{path}: was replaced while it was loaded; try again")
        write_ctranslate2(loaded, folder, None)
        write_text(folder / _SOURCE, json.dumps(source))

    folder = (run_folder_of(path) or path) / _FOLDER
    try:
        with wait_for_lock(folder.with_name(f".{_FOLDER}.lock")):
            if not _is_made_from(folder, source):
                write_folder(folder, fill)
            return load(folder)  # before another process with other settings replaces it
    except (OSError, StorageError) as error:
        log.warning("the model converted for CTranslate2 cannot be kept: %s", error)
        with TemporaryDirectory() as temporary:
            fill(Path(temporary))
            return load(Path(temporary))


def _is_made_from(folder: Path, source: dict[str, Any]) -> bool:
    """Whether a folder has an undamaged model that was converted from this source."""
    with suppress(ModelError, ValueError):
        verify_folder(folder, ["model.bin", _SOURCE])
        return bool(read_json(folder / _SOURCE) == source)
    return False


def _search(engine: Any, translator: Translator) -> Search:
    """Search by CTranslate2, with the limits of lengths that mtrain has."""
    models, tokenizer = translator.models, translator.tokenizer
    source, target = tokenizer.source.pieces, tokenizer.target.pieces
    ids = {piece: i for i, piece in enumerate(target)}
    end = None if translator.language_tags == "codes_last" else -1  # before EOS, which CTranslate2 adds

    def search(task: DecodingTask) -> list[list[Hypothesis]]:
        config, parts = task.config, task.parts
        _require_supported(config)
        lengths = torch.tensor([len(part.source) for part in parts])
        longest = maximum_lengths(models, lengths, config, [part.prefix for part in parts])
        limits = [limit - config.force_eos for limit in longest.tolist()]
        options = {
            "beam_size": config.beam_size,
            # See docs/how-to/export.md.
            "patience": 2 if config.stop == "default" and config.beam_size > 1 else 1,
            "length_penalty": config.length_penalty,
            "no_repeat_ngram_size": config.no_repeat_ngram,
            "num_hypotheses": task.n_best if config.mbr is None else config.beam_size,
            "max_input_length": 0,
            "min_decoding_length": max(0, config.min_length_offset - 1),  # without EOS
            "return_scores": True,
        }

        def translate(some: list[Part], limit: int) -> list[Any]:
            sources = [[source[i] for i in part.source[:end]] for part in some]
            prefixes = [[target[i] for i in part.prefix] for part in some]
            try:
                return list(engine.translate_batch(sources, prefixes, max_decoding_length=limit, **options))
            except (RuntimeError, ValueError) as error:  # prefix of over 1,000 tokens, limit of 0
                if is_out_of_memory(error):
                    raise
                raise UsageError(f"--engine ctranslate2: {error}; use --engine mtrain") from None

        # A call has one limit. The parts that reach a lower limit of their own are translated again.
        highest = max(limits)
        results = translate(parts, highest)
        lengths_found = [max(map(len, result.hypotheses)) for result in results]
        for limit in {*limits} - {highest}:
            rows = [k for k, own in enumerate(limits) if own == limit and lengths_found[k] >= limit]
            for k, result in zip(rows, translate([parts[k] for k in rows], limit), strict=True):
                results[k] = result
        return [_hypotheses(*each, config, ids) for each in zip(results, limits, strict=True)]

    return search


def _hypotheses(result: Any, limit: int, config: DecodingConfig, ids: dict[str, int]) -> list[Hypothesis]:
    """What CTranslate2 has found for a part, with the scores that mtrain computes."""
    found = []
    for pieces, score in zip(result.hypotheses, result.scores, strict=True):
        finished, alpha = len(pieces) < limit, config.length_penalty
        log_prob = score * (len(pieces) + finished) ** alpha
        finished = finished or config.force_eos
        score = log_prob / (len(pieces) + finished) ** alpha
        found.append(Hypothesis([ids[piece] for piece in pieces], log_prob, score, finished))
    return found
