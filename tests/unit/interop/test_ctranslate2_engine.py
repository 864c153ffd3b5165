"""Decoding by CTranslate2, with the text, the parts and the joining of mtrain."""

import dataclasses
import json
import shutil

import pytest

from mtrain import Translator
from mtrain.errors import UsageError
from mtrain.interop.ctranslate2_engine import with_ctranslate2
from mtrain.storage.manifest import write_manifest
from tests.support.cli import one_line
from tests.support.random_models import SOURCES, random_model
from tests.support.training import PAIRS
from tests.support.translation import interrupt_third_window

pytest.importorskip("ctranslate2")
ENGINES = ("mtrain", "ctranslate2")
SOURCE = "ctranslate2-cache/source.json"


@pytest.fixture(scope="module")
def model(run_dir, tmp_path_factory):
    """A copy of a model folder, in which the converted model may be kept."""
    return shutil.copytree(run_dir / "model", tmp_path_factory.mktemp("model") / "model")


@pytest.mark.parametrize("beams", [1, 3])
def test_translate_writes_what_mtrain_writes(mtrain, model, beams):
    job = ["translate", model, *(text for text, _ in PAIRS), ""]
    job += ["--device", "cpu", "--json", "--alignments", "--beam-size", beams, "--n-best", beams]
    job += ["--prefix", model / "prefixes"] if beams == 1 else []
    (model / "prefixes").write_text("Eine\n" + "\n" * len(PAIRS))
    answers = [mtrain(*job, "--set", "decoding.stop=first_k", "--engine", engine) for engine in ENGINES]
    ours, theirs = ([json.loads(line) for line in out.splitlines()] for _, out, _ in answers)
    assert [code for code, *_ in answers] == [0, 0] and len(ours) == len(PAIRS) + 1
    for one, other in zip(ours, theirs, strict=True):
        scores = [(each.pop("score"), each.pop("log_prob")) for each in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
        ranked = [[each["text"] for each in best.pop("n_best", ())] for best in (one, other)]
        assert ranked[0] == ranked[1] and one == other


@pytest.mark.parametrize(
    "settings",
    [{}, {"force_eos": True}, {"min_length_offset": 4, "renormalize": True}, {"forbidden_ids": [7]}],
)
def test_limits_of_lengths_are_those_of_each_sentence(tokenizers, tmp_path, settings):
    """A random model hardly ever ends a translation."""
    random_model(tmp_path, tokenizers[True])
    short = {"max_length_ratio": 1.0, "max_length_offset": 4, "beam_size": 1, **settings}
    overrides = [f"decoding.{name}={json.dumps(value)}" for name, value in short.items()]
    with Translator.load(tmp_path, "cpu", overrides, workers=1) as translator:
        ours = translator.translate(SOURCES)
        theirs = with_ctranslate2(tmp_path, translator).translate(SOURCES)
    assert len({one.tokens for one in ours}) > 2
    for one, other in zip(ours, theirs, strict=True):
        assert other == dataclasses.replace(one, score=other.score, log_prob=other.log_prob)
        if not settings.get("forbidden_ids"):
            assert other.score == pytest.approx(one.score, abs=1e-4)


def test_a_model_is_converted_again_only_if_it_has_changed(run_dir, tmp_path, monkeypatch):
    run = shutil.copytree(run_dir, tmp_path / "run")

    def convert(*settings: str) -> bool:
        """Whether the model was converted."""
        before = (run / SOURCE).stat().st_mtime_ns if (run / SOURCE).exists() else None
        with Translator.load(run, "cpu", settings, workers=1) as translator:
            [found] = with_ctranslate2(run, translator).translate(["It rains."])
        assert found.text == "Es regnet."
        return (run / SOURCE).stat().st_mtime_ns != before

    assert [convert(), convert(), convert("decoding.beam_size=2")] == [True, False, False]
    assert convert("decoding.forbidden_ids=[5]") and convert()
    with (run / "ctranslate2-cache" / "model.bin").open("ab") as file:
        file.write(b"damage")
    assert convert() and not convert()
    (run / "model" / "LICENSE").touch()
    write_manifest(run / "model")
    assert convert()
    monkeypatch.setattr("mtrain.interop.ctranslate2_engine.__version__", "1.2.3")  # another conversion
    assert convert()


def test_settings_that_the_engine_lacks_are_also_refused_later(model):
    with Translator.load(model, "cpu", [], workers=1) as translator:
        changed = with_ctranslate2(model, translator).with_settings(coverage_penalty=0.2)
        with pytest.raises(UsageError, match=r"coverage_penalty: not supported by --engine"):
            changed.translate(["It rains."])


def test_a_folder_that_cannot_be_written_is_no_error(mtrain, run_dir, tmp_path):
    model = shutil.copytree(run_dir / "model", tmp_path / "model")
    (model / ".ctranslate2-cache.lock").mkdir()
    code, out, err = mtrain("translate", model, "It rains.", "--engine", "ctranslate2", "--device", "cpu")
    assert (code, out) == (0, "Es regnet.\n") and not (model / "ctranslate2-cache").exists()
    assert "warning: the model converted for CTranslate2 cannot be kept: " in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--sample"],
            "decoding.samples: not supported by --engine ctranslate2; leave it out, or use --engine",
        ),
        (["--set", "decoding.stop=exact"], "decoding.stop: not supported by --engine ctranslate2"),
        (["--set", "decoding.min_length_ratio=0.5"], "decoding.min_length_ratio: not supported"),
        (["--set", "decoding.coverage_penalty=0.2"], "decoding.coverage_penalty: not supported"),
        (
            [
                f"--set=decoding.{key}"
                for key in ("max_length_ratio=0", "max_length_offset=1", "force_eos=true")
            ],
            "--engine ctranslate2: The maximum decoding length must be > 0; use --engine mtrain",
        ),
        (["--ensemble", "other"], "--ensemble: not supported by --engine ctranslate2; use --engine mtrain"),
        (
            ["--set", "decoding.precision=fp16"],
            "--engine ctranslate2 has no fp16 here; set decoding.precision",
        ),
    ],
)
def test_what_the_engine_lacks_is_named(mtrain, model, options, message):
    job = ["translate", model, "It rains.", "--engine", "ctranslate2", "--device", "cpu", *options]
    code, out, err = mtrain(*job)
    assert (code, out) == (2, "") and message in one_line(err)


@pytest.mark.slow
def test_a_prefix_that_is_too_long_for_the_engine_is_an_error(mtrain, model):
    (model / "long").write_text("Eine Katze. " * 400)
    job = ["translate", model, "It rains.", "--engine", "ctranslate2", "--device", "cpu"]
    code, _, err = mtrain(*job, "--prefix", model / "long")
    assert code == 2 and "--engine ctranslate2: " in one_line(err) and "use --engine mtrain" in err


def test_a_server_uses_the_engine(model):
    batcher = pytest.importorskip("mtrain.serve.batching", exc_type=ImportError).Batcher()
    with Translator.load(model, "cpu", workers=1) as translator:
        texts = [source for source, _ in PAIRS] + ["", "It rains.\nThe sun shines."]
        found = batcher.submit(with_ctranslate2(model, translator), texts, 2, alignments=True).result()
    batcher.close()
    expected = [*(target for _, target in PAIRS), "", "Es regnet.\nDie Sonne scheint."]
    assert [one.text for one in found] == expected
    assert all(len(one.n_best) == 2 for one in found[:8])
    for text, one in zip(texts, found, strict=True):
        assert all(i < len(text.split()) and j < len(one.text.split()) for i, j in one.alignment)
        assert bool(one.alignment) == bool(text)


def test_an_output_is_resumed_only_by_the_same_engine(mtrain, model, corpus, tmp_path, monkeypatch):
    interrupt_third_window(monkeypatch)
    job = ["translate", model, "-i", corpus / "train.en", "-o", tmp_path / "out", "--device", "cpu"]
    assert mtrain(*job, "--engine", "ctranslate2")[0] == 130
    code, _, err = mtrain(*job, "--continue")
    assert code == 2 and "another model or other settings" in one_line(err)
    assert mtrain(*job, "--engine", "ctranslate2", "--continue")[0] == 0
    assert (tmp_path / "out").read_text() == "".join(f"{target}\n" for _, target in PAIRS)
