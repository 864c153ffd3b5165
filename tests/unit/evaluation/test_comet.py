"""COMET in an environment of its own. A stand-in for the `comet` package takes the place of the real one,
whose model is too large for tests; the program that calls it is the real one."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mtrain.errors import DataError, StorageError, UsageError
from mtrain.evaluation.comet import Comet, CometProcess, comet_python, set_up_comet
from mtrain.evaluation.compare import compare_systems
from mtrain.evaluation.metrics import make_metrics, score, score_sentences
from tests.support.comet import COMET, TORCH

SOURCES = ["a b", "c d", "é\u2028f"]
REFERENCES = ["A B", "C D", "E F"]
HYPOTHESES = ["A B", "C x", "e y"]


@pytest.fixture
def process(comet_environment):
    with CometProcess(comet_python(comet_environment)) as process:
        yield process


def test_sentences_are_scored_in_order_by_one_process(process, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    assert process.score(SOURCES, HYPOTHESES, REFERENCES) == [0.5, 0.25, 0]
    assert process.score(SOURCES[:1], ["a b A B"], REFERENCES[:1]) == [1]
    assert process.version == "0.0"


def test_comet_is_a_metric_like_those_of_sacrebleu(process):
    metrics = make_metrics(["bleu", "comet"], comet=lambda: Comet(process, SOURCES))
    bleu, comet = score(HYPOTHESES, [REFERENCES, SOURCES], metrics)
    assert bleu.metric == "bleu" and comet.score == pytest.approx(0.25)
    assert comet.signature == "nrefs:1|model:Unbabel/wmt22-comet-da|version:0.0"
    assert comet.detail == f"COMET|{comet.signature} = 0.2500"
    assert score_sentences(HYPOTHESES, [REFERENCES], metrics)["comet"] == [0.5, 0.25, 0]
    blank, others = ["", *REFERENCES[1:]], [REFERENCES[0], "", " "]
    fresh = Comet(process, SOURCES)
    assert score(HYPOTHESES, [blank, others], {"comet": fresh})[0].score == comet.score  # the first of each
    systems = {"a": HYPOTHESES, "b": [f"{s} {r}" for s, r in zip(SOURCES, REFERENCES, strict=True)]}
    comparison = compare_systems(systems, [REFERENCES], metrics)[1]
    assert comparison.scores[1].score == 1 and 0 < comparison.scores[1].bootstrap_p < 1
    with pytest.raises(DataError, match="reference 1 has 3 lines but there are 1 translations"):
        score(["x"], [["x"]], {"comet": metrics["comet"]})


def test_a_process_that_fails_is_an_error(comet_environment, capfd):
    with (
        CometProcess(comet_python(comet_environment), "missing/model") as process,
        pytest.raises(StorageError, match=r"^comet: missing/model: its process ended with exit code 1; see"),
    ):
        process.score(SOURCES, HYPOTHESES, REFERENCES)
    assert "Model 'missing/model' not supported by COMET" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "killed",
            "its process was killed by SIGKILL, perhaps because memory ran out; see its messages above",
        ),
        ("text", "expected scores, but its process printed 'Loading...'"),
        ("number", "expected scores, but its process printed '5'"),
        ("bytes", r"expected scores, but its process printed '\\xe9'"),
        ("other", r"""expected scores, but its process printed '{"loss": 1}'"""),
        ("words", r"""expected scores, but its process printed '["high"]'"""),
        ("nan", "expected scores, but its process printed '[NaN]'"),
        ("few", "expected scores, but its process printed '[]'"),
        ("end", "its process ended with exit code 0; see its messages above"),
    ],
)
def test_an_unexpected_answer_is_an_error_of_one_line(comet_environment, name, reason):
    """Each model of the stand-in fails in another way."""
    with CometProcess(comet_python(comet_environment), f"broken/{name}") as process:
        assert process.score(SOURCES, HYPOTHESES, REFERENCES) == [0.5, 0.25, 0]
        with pytest.raises(StorageError) as error:
            process.score(["break"], ["x"], ["y"])
    assert str(error.value) == f"comet: broken/{name}: {reason}"


def test_ranks_and_signals_do_not_reach_the_process(comet_environment, monkeypatch):
    """As rank 0 of several, COMET would wait for the others. Ctrl-C would make it print a traceback."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "/cache")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with CometProcess(comet_python(comet_environment), "own/environment") as process:
        assert process.score(SOURCES[:1], HYPOTHESES[:1], REFERENCES[:1]) == [0.5]
    assert process.version == "alone: True, HF_HOME=/cache, GPUs=None"


@pytest.mark.parametrize(
    ("visible", "given", "used"), [(None, 1, "1"), ("4,6", 1, "6"), ("4,6", 2, None), ("", 0, None)]
)
def test_the_gpu_of_the_option_is_the_only_one_for_the_process(
    comet_environment, monkeypatch, visible: str | None, given: int, used: str | None
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with CometProcess(comet_python(comet_environment), "own/environment", f"cuda:{given}") as process:
        if used is None:  # it has no such GPU
            with pytest.raises(StorageError):
                process.score(SOURCES[:1], HYPOTHESES[:1], REFERENCES[:1])
        else:
            process.score(SOURCES[:1], HYPOTHESES[:1], REFERENCES[:1])
            assert process.version.endswith(f"GPUs={used}")


def test_many_sentences_are_sent_in_groups(process, monkeypatch):
    monkeypatch.setattr("mtrain.evaluation.comet.GROUP", 2)
    assert process.score(SOURCES, HYPOTHESES, REFERENCES) == [0.5, 0.25, 0]
    assert process.score([], [], []) == []


def test_the_environment_is_found_or_one_line_says_how_to_make_it(comet_environment, tmp_path, monkeypatch):
    monkeypatch.delenv("MTRAIN_COMET", raising=False)
    make = "`mtrain evaluate --setup-comet FOLDER` makes one"
    with pytest.raises(UsageError, match=f"needs an environment.*set MTRAIN_COMET; {make}"):
        comet_python(None)
    with pytest.raises(UsageError, match=f"{tmp_path}: not a virtual environment.*; {make}"):
        comet_python(tmp_path)
    monkeypatch.setenv("MTRAIN_COMET", str(comet_environment))
    assert comet_python(None) == comet_environment / "bin" / "python"
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True)
    with pytest.raises(UsageError, match=f"{empty}: unbabel-comet is not installed.*; {make}"):
        comet_python(empty)


def test_an_existing_folder_is_not_replaced(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"--setup-comet {tmp_path}: already exists; give a new folder"):
        set_up_comet(tmp_path)


@pytest.mark.slow
def test_an_installation_that_fails_can_be_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for _ in range(2):
        with pytest.raises(StorageError, match=r"failed: .* pip install"):
            set_up_comet(tmp_path / "new")


def write_wheel(folder: Path, name: str, version: str, **modules: str) -> None:
    """A package that pip can install."""
    stem = f"{name.replace('-', '_')}-{version}"
    contents = {f"{module}.py": code for module, code in modules.items()} | {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in contents.items():
            wheel.writestr(file, text)


@pytest.mark.slow
def test_an_environment_is_made(tmp_path, monkeypatch):
    """pip installs stand-ins from a local folder."""
    write_wheel(tmp_path, "unbabel-comet", "0.0", comet=COMET, torch=TORCH)
    write_wheel(tmp_path, "setuptools", "80.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    set_up_comet(tmp_path / "environment")
    with CometProcess(comet_python(tmp_path / "environment")) as process:
        assert process.score(SOURCES, HYPOTHESES, REFERENCES) == [0.5, 0.25, 0]
    write_wheel(tmp_path, "unbabel-comet", "0.1", comet="raise ImportError('pkg_resources')")
    with pytest.raises(StorageError, match=r"failed: .*python -I -c import comet; see the output above"):
        set_up_comet(tmp_path / "broken")
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    with pytest.raises(StorageError, match=r"failed: .*pip install unbabel-comet.*; see the output above"):
        set_up_comet(tmp_path / "other")
