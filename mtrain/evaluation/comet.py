"""COMET (Rei et al. 2020), run in an environment of its own, as its requirements clash with ours."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter
from sacrebleu.metrics.base import Score, Signature

from mtrain.errors import StorageError, UsageError
from mtrain.evaluation import comet_process
from mtrain.evaluation.metrics import References, require_equal_counts
from mtrain.paths import path_of
from mtrain.processes.pool import describe_end, reporting_silence
from mtrain.progress_bar import ProgressBar

log = logging.getLogger(__name__)
VARIABLE = "MTRAIN_COMET"
DEFAULT_MODEL = "Unbabel/wmt22-comet-da"
PACKAGE = "unbabel-comet"
_WITH = "setuptools<81"  # torchmetrics 0.10, which COMET 2.2 needs, imports pkg_resources
_ISOLATED = "-I"  # from PYTHONPATH, and from the folder of a program: ours has a comet.py
_OF_TORCHRUN = re.compile(
    r"(RANK|(LOCAL|GROUP|ROLE)_RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+)$"
)
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
GROUP = 512  # sentences that are sent at a time, so that their number can be shown
_KEYS = ("src", "mt", "ref")  # of a sentence
_SHOWN = 200  # characters of an unexpected answer
_HAS_COMET = "import importlib.util, sys; sys.exit(importlib.util.find_spec('comet') is None)"


def comet_python(folder: Path | None) -> Path:
    """The Python of the environment `folder`, by default the one that MTRAIN_COMET names.

    Raises UsageError if there is none, or if it does not have COMET.
    """
    named = folder or (path_of(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    cure = "`mtrain evaluate --setup-comet FOLDER` makes one"
    if named is None:
        problem = f"--metrics comet needs an environment with {PACKAGE}"
        raise UsageError(f"{problem}; give --comet FOLDER or set {VARIABLE}; {cure}")
    python = _python_of(named)
    if not python.is_file():
        raise UsageError(f"{named}: not a virtual environment (it has no {python}); {cure}")
    if subprocess.run([python, _ISOLATED, "-c", _HAS_COMET], capture_output=True, check=False).returncode:
        raise UsageError(f"{named}: {PACKAGE} is not installed in this environment; {cure}")
    return python


def set_up_comet(folder: Path) -> None:
    """Make a virtual environment with COMET. pip writes its progress to stderr.

    Raises UsageError if the folder exists, and StorageError if an installation fails.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--setup-comet {folder}: already exists; give a new folder")
    commands = (
        [sys.executable, _ISOLATED, "-m", "venv", str(folder)],
        [str(_python_of(folder)), _ISOLATED, "-m", "pip", "install", PACKAGE, _WITH],
        [str(_python_of(folder)), _ISOLATED, "-c", "import comet"],
    )
    try:
        for command in commands:
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                failed = f"failed: {' '.join(command)}; see the output above"
                raise StorageError(f"--setup-comet {folder}: {failed}")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # so that the same command can be repeated
        raise


class CometProcess:
    """A process that scores translations with COMET. It starts with the first sentences and scores all later
    ones too, because loading a model takes long. It ends with the context."""

    def __init__(self, python: Path, model: str = DEFAULT_MODEL, device: str = "auto"):
        """`device` is `cpu`, `cuda:N` for the GPU with this number, or another name for any GPU there is."""
        self.model, self.version = model, ""
        self._gpu = re.fullmatch("cuda:([0-9]+)", device)
        gpus = "0" if device == "cpu" else "1" if self._gpu else "auto"
        self._command = [str(python), _ISOLATED, str(Path(comet_process.__file__).resolve()), model, gpus]
        self._process: subprocess.Popen[str] | None = None

    def score(
        self, sources: Sequence[str], translations: Sequence[str], references: Sequence[str]
    ) -> list[float]:
        """The score of each sentence. Raises StorageError if the process fails or answers something else."""
        process = self._process or self._start()
        rows = list(zip(sources, translations, references, strict=True))
        scores: list[float] = []
        with ProgressBar("comet: scored", "sentences", len(rows)) as bar:
            for start in range(0, len(rows), GROUP):
                group = [dict(zip(_KEYS, row, strict=True)) for row in rows[start : start + GROUP]]
                with reporting_silence(process.pid, "the process of COMET"):
                    assert process.stdin is not None
                    with suppress(BrokenPipeError):  # it has ended; reading its answer reports that
                        print(json.dumps(group), file=process.stdin, flush=True)
                    scores += self._answer(process, "scores", _scores_of(len(group)))
                bar.add(len(group))
        return scores

    def __enter__(self) -> "CometProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        log.info("comet: loading %s", self.model)
        # Under torchrun, COMET would take itself for one of several ranks, and wait for the others.
        environment = {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.match(name)}
        if self._gpu:  # if it does not exist, COMET fails
            number, visible = int(self._gpu[1]), environment.get(_VISIBLE_GPUS)
            chosen = [self._gpu[1]] if visible is None else visible.split(",")[number : number + 1]
            environment[_VISIBLE_GPUS] = "".join(chosen)
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="backslashreplace",
            env=environment,
            start_new_session=True,  # only this process handles Ctrl-C
        )
        self._process = process
        with reporting_silence(process.pid, "the process of COMET"):
            self.version = self._answer(process, "a version", str)
        return process

    def _answer(self, process: "subprocess.Popen[str]", expected: str, type_: Any) -> Any:
        """The next line, JSON of a type. Raises StorageError if the line is anything else."""
        assert process.stdout is not None
        line = process.stdout.readline()
        with suppress(ValueError):
            return TypeAdapter(type_).validate_json(line, strict=True)
        if line:
            shown = ascii(line.strip()[:_SHOWN])
            raise StorageError(f"comet: {self.model}: expected {expected}, but its process printed {shown}")
        end = describe_end(process.wait())
        raise StorageError(f"comet: {self.model}: its process {end}; see its messages above")


def _scores_of(sentences: int) -> Any:
    """The type of a list with a score for each sentence."""
    return Annotated[list[FiniteFloat], Field(min_length=sentences, max_length=sentences)]


class Comet:
    """COMET as one of sacreBLEU's metrics for one list of sources, so that sacreBLEU's significance tests
    apply to it: the score of a corpus is the mean of the scores of its sentences. COMET uses only the first
    non-blank reference of a sentence."""

    def __init__(self, process: CometProcess, sources: Sequence[str]):
        self._process, self._sources = process, sources
        self._known: dict[tuple[str, ...], list[float]] = {}

    def sentence_scores(self, hypotheses: Sequence[str], references: References) -> list[float]:
        """The score of each sentence, computed once. Raises DataError if numbers of lines differ,
        StorageError if the process of COMET fails."""
        require_equal_counts(hypotheses, [self._sources, *references])
        key = tuple(hypotheses)
        if key not in self._known:
            first = [next(filter(None, row), "") for row in zip(*references, strict=True)]
            self._known[key] = self._process.score(self._sources, hypotheses, first)
        return self._known[key]

    def corpus_score(self, hypotheses: Sequence[str], references: References) -> Score:
        """The mean of the scores of the sentences."""
        return self._aggregate_and_compute(self._extract_corpus_statistics(hypotheses, references))

    def get_signature(self) -> Signature:
        """What makes scores comparable: the model and the version of COMET."""
        signature = Signature({"num_refs": 1})
        signature.update("model", self._process.model)
        signature.update("version", self._process.version)
        return signature

    # The methods that sacreBLEU's `PairedTest` calls: statistics of each sentence, their sum, and a score.

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[str], references: References
    ) -> list[list[float]]:
        return [[score, 1.0] for score in self.sentence_scores(hypotheses, references)]

    def _aggregate_and_compute(self, statistics: Sequence[Sequence[float]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*statistics, strict=True)])

    def _compute_score_from_stats(self, sums: Sequence[float]) -> Score:
        return Score("COMET", float(sums[0]) / float(sums[1]))


def _python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
