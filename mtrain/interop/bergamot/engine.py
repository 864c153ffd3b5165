"""The Bergamot engine of the npm package, run by Node: WebAssembly, as in browsers."""

import json
import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sacrebleu import corpus_chrf

from mtrain.checkpoint.model_folder import LoadedModel
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.search.search import best_ids
from mtrain.errors import ModelError, UsageError
from mtrain.interop.bergamot.write import MAX_TOKENS, MODEL, arithmetic, vocabularies_in
from mtrain.model.incremental import DecodingTransformer
from mtrain.tokenizer.tokenizer import SPACES

PACKAGE = "@browsermt/bergamot-translator"
VERSION = "0.4.9"  # that exports were tested with
_WORKER = "translator-worker.js"
FILES = (_WORKER, "bergamot-translator-worker.js", "bergamot-translator-worker.wasm")  # in `worker`
_HALF_A_CHARACTER = "\ufffd"
_MOST_DIFFERENT = 0.01  # the share of translations that may differ in fp32, because of ties; at least one
_LEAST_CHRF = 50.0  # of translations in int8, with those of mtrain as references


def find_package(folder: Path) -> Path:
    """The folder of the npm package: `folder` itself, or a folder in its node_modules. Raises UsageError if
    the package is missing or incomplete."""
    for place in (folder, folder / "node_modules" / PACKAGE):
        if all((place / "worker" / name).is_file() for name in FILES):
            return place
    install = f"npm install {PACKAGE}@{VERSION}"
    raise UsageError(f"--engine {folder}: does not contain {PACKAGE}; run {install}")


def find_engine(folder: Path | None) -> Path | None:
    """As `find_package`, but Node is required as well. If `folder` is None, the working directory is
    searched, and None is returned where UsageError would be raised."""
    try:
        found = find_package(folder or Path())
        if not shutil.which("node"):
            raise UsageError(f"--engine {folder}: needs Node, which is not installed; leave it out")
    except UsageError:
        if folder is not None:
            raise
        return None
    return found


def translate_with_engine(
    engine: Path, folder: Path, texts: Sequence[str], int8: bool, html: bool = False
) -> list[str]:
    """The translations of texts by the engine with the model that `write_bergamot` has written to a folder.
    Each is one sentence. Raises ModelError if the engine fails."""
    request = {
        "model": str(folder / MODEL),
        "vocabs": [str(folder / name) for name in vocabularies_in(folder)],
        "config": {"gemm-precision": arithmetic(int8), "ssplit-mode": "sentence"},
        "texts": texts,
        "html": html,
    }
    command = ["node", str(Path(__file__).with_name("engine.cjs")), str(engine / "worker" / _WORKER)]
    ended = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, check=False)
    try:
        found: list[str] = json.loads(ended.stdout)
    except ValueError:
        message = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        problem = message or f"Node ended with {ended.returncode}"
        raise ModelError(f"the Bergamot engine failed: {problem}") from None
    return found


def compare_with_engine(
    engine: Path, folder: Path, loaded: LoadedModel, given: Sequence[tuple[str, list[int]]], int8: bool
) -> str:
    """Translate texts, of which the source ids are given, with mtrain and with the engine. Returns a summary.

    Texts that the engine would split, or of which mtrain reads only the beginning, are left out. Of
    translations that reach the length limit, which the engine may set higher, only the beginning is compared.
    Raises ModelError if too many translations differ or, with `int8`, if the chrF of all is too low.
    """
    model, forbidden = DecodingTransformer(loaded.model), loaded.config.decoding.forbidden_ids
    settings = DecodingConfig(beam_size=1, max_length_ratio=2.0, max_length_offset=1)
    settings = settings.model_copy(update={"forbidden_ids": [*forbidden, loaded.model.config.unk_id]})
    longest = min(MAX_TOKENS + 1, loaded.config.max_length)  # rows that long may be cut
    given = [(text, row) for text, row in given if len(row) < longest]
    theirs = translate_with_engine(engine, folder, [text for text, _ in given], int8)
    ours, different = list[str](), list[str]()
    for (text, row), found in zip(given, theirs, strict=True):
        ids = best_ids(model, row, settings)[: 2 * len(row) - 1]
        own, found = (each.translate(SPACES).strip() for each in (*loaded.tokenizer.decode([ids]), found))
        ours.append(own)
        begin = own.rstrip(_HALF_A_CHARACTER) if len(ids) == 2 * len(row) - 1 else ""
        if own != found and not (begin and found.startswith(begin)):
            different.append(f"source: {text}; mtrain: {own}; engine: {found}")
    chrf = corpus_chrf(theirs, [ours]).score if different else 100.0
    same = f"{len(given) - len(different)} translations identical, chrF {chrf:.1f}"
    summary = f"Bergamot engine, {len(given)} sentences: {same}"
    most = math.inf if int8 else max(1, _MOST_DIFFERENT * len(given))
    if len(different) > most or (int8 and chrf < _LEAST_CHRF):
        raise ModelError(f"{summary}; {different[0]}")
    return summary
