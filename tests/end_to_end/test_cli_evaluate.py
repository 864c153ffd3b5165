"""`mtrain evaluate` as a user runs it."""

import json
import os
import shutil
import subprocess
import sys
from operator import ne
from pathlib import Path

import pytest
import yaml

from mtrain.storage.manifest import write_manifest
from tests.support.cli import changed, one_line, run_forked


def test_evaluate_prints_scores_with_signatures(mtrain, run_dir, corpus):
    code, out, _ = mtrain("evaluate", run_dir, "--device", "cpu")
    assert code == 0 and out.startswith("seen (8 sentences)\n")
    for signature in ("BLEU|nrefs:1|case:mixed|eff:no|tok:13a", "chrF2|", "TER|"):
        assert signature in out
    files = [
        "--source",
        corpus / "train.en",
        "--reference",
        corpus / "train.de",
        "--reference",
        corpus / "train.en",
    ]
    code, out, _ = mtrain(
        "evaluate", run_dir, *files, "--metrics", "bleu", "--lowercase", "--json", "--device", "cpu"
    )
    result = json.loads(out)["train.en"]
    assert code == 0 and result["sentences"] == 8
    assert [s["metric"] for s in result["scores"]] == ["bleu"] and result["scores"][0][
        "score"
    ] == pytest.approx(100)
    assert "nrefs:2|case:lc" in result["scores"][0]["signature"]


def test_the_validation_set_can_be_scored_to_choose_settings(mtrain, run_dir, corpus):
    code, out, _ = mtrain("evaluate", run_dir, "--validation", "--beam-size", 2, "--device", "cpu", "--json")
    assert code == 0 and json.loads(out)["validation"]["sentences"] == 8
    files = "--source", corpus / "train.en", "--reference", corpus / "train.de"
    code, _, err = mtrain("evaluate", run_dir, "--validation", *files)
    assert code == 2 and "--validation has no effect with --reference" in one_line(err)


@pytest.mark.usefixtures("few_trials")
def test_translations_that_may_be_wrong_are_counted(mtrain, run_dir, corpus, tmp_path):
    cut = ["--set", "decoding.max_length_ratio=0", "--set", "decoding.max_length_offset=2", "--device", "cpu"]
    code, out, _ = mtrain("evaluate", run_dir, "--metrics", "bleu", *cut)
    assert code == 0 and out.splitlines()[2:] == [
        "  problems: 0 empty, 8 looping, 0 extreme length, 0 broken characters"
    ]
    (tmp_path / "other").write_text("\n".join(["", "Hund Hund Hund Hund Hund", *"abcdef"]) + "\n")
    compared = ["--compare", tmp_path / "other", "--metrics", "chrf", "--device", "cpu"]
    code, out, _ = mtrain("evaluate", run_dir, *compared)
    counts = {"empty": 1, "looping": 1, "extreme_length": 3, "broken_characters": 0}
    assert (
        code == 0
        and f"  problems: 0 empty, 0 looping, 0 extreme length, 0 broken characters; {run_dir}\n" in out
    )
    assert f"  problems: 1 empty, 1 looping, 3 extreme length, 0 broken characters; {tmp_path}/other\n" in out
    code, out, _ = mtrain("evaluate", run_dir, *compared, "--json")
    none = dict.fromkeys(counts, 0)
    assert json.loads(out)["seen"]["problems"] == {str(run_dir): none, str(tmp_path / "other"): counts}
    files = ["--hypotheses", tmp_path / "other", "--reference", corpus / "train.de", "--metrics", "chrf"]
    code, out, _ = mtrain("evaluate", *files, "--json")
    assert "problems" not in json.loads(out)["other"]  # the sources are not known
    code, out, _ = mtrain("evaluate", *files, "--by-length", "--source", corpus / "train.en", "--json")
    assert json.loads(out)["other"]["problems"] == {str(tmp_path / "other"): counts}


def test_set_replaces_the_test_sets_of_the_run(mtrain, run_dir, corpus):
    moved = f"data.test={{moved: {{source: {corpus}/train.en, target: {corpus}/train.de}}}}"
    code, out, _ = mtrain("evaluate", run_dir, "--set", moved, "--metrics", "bleu", "--device", "cpu")
    assert code == 0 and out.startswith("moved (8 sentences)\n")


def test_the_test_sets_of_the_run_are_not_replaced(mtrain, run_dir):
    data = yaml.safe_load((run_dir / "config.yaml").read_text())["data"]  # maybe of another process of xdist
    reference = Path(data["test"]["seen"]["target"])
    before = reference.read_bytes()
    code, _, err = mtrain("evaluate", run_dir, "--sentence-scores", reference, "--device", "cpu")
    assert code == 2 and "train.de: this file is also an input" in one_line(err)
    assert reference.read_bytes() == before


def test_changed_copies_of_a_test_set_are_scored(mtrain, run_dir, corpus, tmp_path):
    names = "uppercase, titlecase,typos,drop_final_punctuation"
    arguments = ["--metrics", "bleu,chrf", "--device", "cpu", "--beam-size", 1]
    code, out, err = mtrain("evaluate", run_dir, "--augment", names, *arguments)
    assert code == 0, err
    sets = ["seen", *(f"seen, {name.strip()}" for name in names.split(","))]
    lines = out.splitlines()
    assert [line for line in lines if "(8 sentences)" in line] == [f"{name} (8 sentences)" for name in sets]
    assert lines[-6].split() == ["test", "set", "bleu", "chrf"]
    table = [line.strip().rsplit(maxsplit=2) for line in lines[-5:]]
    assert [name for name, *_ in table] == sets and table[0][1] == "100.00"

    # Each copy is scored like files with the same changes.
    changed = {
        "uppercase": str.upper,
        "titlecase": lambda text: " ".join(word[:1].upper() + word[1:] for word in text.split(" ")),
        "drop_final_punctuation": lambda text: text.rstrip("."),
    }
    code, out, _ = mtrain("evaluate", run_dir, "--augment", names, *arguments, "--json")
    report = json.loads(out)
    assert list(report) == sets
    for name, change in changed.items():
        for language in ("en", "de"):
            lines = (corpus / f"train.{language}").read_text().splitlines()
            (tmp_path / language).write_text("".join(f"{change(line)}\n" for line in lines))
        files = ["--source", tmp_path / "en", "--reference", tmp_path / "de"]
        _, out, _ = mtrain("evaluate", run_dir, *files, *arguments, "--json")
        assert json.loads(out)["en"] == report[f"seen, {name}"], name


def test_copies_that_would_not_differ_are_left_out(mtrain, run_dir, tmp_path):
    (tmp_path / "a").write_text("猫\n")
    (tmp_path / "b").write_text("Katze\n")
    files = ["--source", tmp_path / "a", "--reference", tmp_path / "b", "--augment", "uppercase"]
    code, out, err = mtrain("evaluate", run_dir, *files, "--metrics", "chrf", "--device", "cpu", "--json")
    assert code == 0 and list(json.loads(out)) == ["a"]
    assert "a: uppercase changes no sentence; the copy is left out" in err


def test_hypotheses_are_scored_without_a_model(mtrain, run_dir, corpus):
    files = ["--hypotheses", corpus / "train.en", "--reference", corpus / "train.de", "--quiet"]
    alone, with_model = mtrain("evaluate", *files), mtrain("evaluate", run_dir, *files)
    assert alone == with_model and alone[0] == 0 and alone[1].startswith("train.en (8 sentences)\n")
    assert "tok:13a" in alone[1]
    options = ["--metrics", "bleu,ter", "--bleu-tokenize", "char", "--lowercase"]
    code, out, err = mtrain("evaluate", *files[:-1], *options)
    assert "TER" in out and "TER" not in err
    assert code == 0 and "tok:char" in out and "case:lc" in out and "tokenizer: char (--bleu-tokenize)" in err


def test_the_language_of_hypotheses_is_that_of_a_model_whose_weights_are_not_read(
    mtrain, run_copy, model_copy, corpus, tmp_path
):
    files = ["--hypotheses", corpus / "train.en", "--reference", corpus / "train.de", "--metrics", "bleu"]
    changed(run_copy / "config.yaml", "data", target_lang="zh")
    checkpoint = next((run_copy / "checkpoints").glob("step-*"))
    for file in (*run_copy.rglob("*.safetensors"), model_copy / "model.safetensors"):
        file.unlink()
    for model, tokenizer in ((model_copy, "13a"), (run_copy, "13a"), (checkpoint, "zh")):
        code, out, err = mtrain("evaluate", model, *files)
        assert code == 0 and f"tok:{tokenizer}" in out, err
        language = "zh" if tokenizer == "zh" else "de"
        assert err.count(f"BLEU tokenizer: {tokenizer} (target language {language})") == 1
    shutil.rmtree(run_copy / "model")  # as before the first validation
    assert "tok:zh" in mtrain("evaluate", run_copy, *files)[1]
    for model, message in ((tmp_path / "none", "no such model"), (corpus, "not a run or model folder")):
        code, out, err = mtrain("evaluate", model, *files)
        assert (code, out) == (4, "") and message in one_line(err)


def test_ter_without_spaces_between_words_is_a_warning(mtrain, tmp_path):
    (tmp_path / "test.th").write_text("สุนัขกินข้าว\n", encoding="utf-8")
    files = ["--hypotheses", tmp_path / "test.th", "--reference", tmp_path / "test.th"]
    code, _, err = mtrain("evaluate", *files, "--metrics", "chrf,ter")
    assert (code, err) == (0, "warning: test.th: TER counts text without spaces as one word; rely on chrF\n")


def test_hypotheses_are_read_from_stdin(mtrain, stdin, corpus):
    files = ["--hypotheses", "-", "--reference", corpus / "train.de", "--json"]
    stdin((corpus / "train.de").read_bytes())
    code, out, _ = mtrain("evaluate", *files)
    result = json.loads(out)["<stdin>"]
    assert code == 0 and result["sentences"] == 8 and result["scores"][0]["score"] == pytest.approx(100)
    stdin(b"Es regnet.\n")
    code, _, err = mtrain("evaluate", *files)
    assert code == 3 and f"<stdin> has 1 lines but {corpus}/train.de has 8" in one_line(err)
    stdin(b"caf\xe9\n")
    code, _, err = mtrain("evaluate", *files)
    assert code == 3 and "<stdin>:1: not valid UTF-8" in one_line(err)
    stdin(b"")
    code, _, err = mtrain("evaluate", "--hypotheses", "-", "--reference", "/dev/null")
    assert code == 3 and "nothing to score" in one_line(err)


def test_sources_are_read_from_stdin(mtrain, stdin, run_dir, corpus):
    stdin((corpus / "train.en").read_bytes())
    files = ["--source", "-", "--reference", corpus / "train.de", "--metrics", "bleu"]
    code, out, _ = mtrain("evaluate", run_dir, *files, "--device", "cpu")
    assert code == 0 and out.startswith("<stdin> (8 sentences)\n") and "= 100" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing MODEL; only --hypotheses can be scored without it"),
        (["--source", "a", "--reference", "b"], "missing MODEL"),
        (["--hypotheses", "a"], "give --reference with either --source or --hypotheses"),
        (["m", "--source", "a"], "give --reference with either --source or --hypotheses"),
        (["m", "--reference", "a"], "give --reference with either --source or --hypotheses"),
        (
            ["--hypotheses", "a", "--reference", "b", "--reference", "-"],
            "--reference -: reading references from stdin is not supported; give a file",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--beam-size", "2"],
            "--beam-size has no effect with --hypo",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--device", "cpu"],
            "--device has no effect with --hypotheses",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--set", "data.x=1"],
            "--set has no effect with --hypotheses",
        ),
        (
            ["m", "--source", "a", "--reference", "b", "--set", "data.x=1"],
            "--set data.x=1 has no effect with --ref",
        ),
        (
            ["m", "--metrics", "chrf", "--bleu-tokenize", "char"],
            "--bleu-tokenize has no effect on --metrics chrf",
        ),
        (["m", "--setup-comet", "c"], "--setup-comet only makes an environment; leave out MODEL"),
        (["--setup-comet", "c", "--html", "a"], "--setup-comet only makes an environment; leave out MODEL"),
        (["--setup-comet", "c", "--reference", "a"], "--setup-comet only makes an environment"),
        (["m", "--metrics", "ter", "--lowercase"], "--lowercase has no effect on --metrics ter; add bleu or"),
        (
            ["m", "--metrics", "comet,comet", "--by-length"],
            "--by-length has no effect on --metrics comet; add",
        ),
        (["m", "--metrics", "rouge"], "--metrics rouge: choose from bleu, chrf, chrf++, ter, comet"),
        (["m", "--bleu-tokenize", "moses"], "--bleu-tokenize moses: choose from"),
        (["m", "--comet", "c"], "--comet has no effect on --metrics bleu,chrf,ter; add comet"),
        (["m", "--comet-model", "c"], "--comet-model has no effect on --metrics bleu,chrf,ter; add comet"),
        (["m", "--html", "x"], "--html has no effect without --compare"),
        (
            ["m", "--augment", "uppercase,shout"],
            "--augment shout: choose from uppercase, titlecase, drop_final_punctuation, typos",
        ),
        (["m", "--augment", "typos,typos"], "--augment typos,typos: give each name once"),
        (
            ["m", "--augment", "typos", "--compare", "/dev/null"],
            "--augment needs models to translate with; /dev/null is a file",
        ),
        (
            [
                *("--hypotheses", "a", "--source", "s", "--reference", "b"),
                "--compare",
                ".",
                "--augment",
                "typos",
            ],
            "--augment needs models to translate with; a is a file",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--augment", "typos"],
            "--augment has no effect with --hypotheses",
        ),
        (
            ["a", "--compare", "/dev/null", "--html", "x", "--sentence-scores", "./x"],
            "--html x: --sentence-scores names the same file; give another one",
        ),
        (["/dev/null", "--compare", "/dev/null"], "--compare /dev/null: given twice"),
        (
            ["--hypotheses", "-", "--reference", "b", "--compare", "-"],
            "stdin (-) was given more than once; give a file",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--compare", "."],
            "--compare . needs the source sentences; give --source",
        ),
        (
            [".", "--hypotheses", "a", "--reference", "b", "--compare", "."],
            "--compare . needs the source sentences; give --source",
        ),
        (
            ["m", "--hypotheses", "a", "--reference", "b", "--to", "de"],
            "MODEL m has no effect, because --to or --compare gives the language of --hypotheses",
        ),
        (
            ["m", "--hypotheses", "a", "--reference", "b", "--source", "c", "--compare", "."],
            "MODEL m has no effect, because --to or --compare gives the language of --hypotheses",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--by-length"],
            "--by-length needs the source sentences; give --source",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--metrics", "comet"],
            "--metrics comet needs the source sentences; give --source",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_combinations_that_make_no_sense_are_errors(mtrain, arguments, message):
    code, out, err = mtrain("evaluate", *arguments)
    assert (code, out) == (2, "") and message in one_line(err)


# The command line of sacreBLEU, which cannot print all scores of paired tests as JSON: some are float32.
SACREBLEU = """
import functools, json
from sacrebleu.sacrebleu import main
json.dumps = functools.partial(json.dumps, default=float)
main()
"""


@pytest.fixture
def systems(tmp_path, monkeypatch):
    """Translations of three systems, with the reference and the source, in the current folder."""
    monkeypatch.chdir(tmp_path)
    references = [f"Der Hund Nummer {n} rennt heute im Park ." for n in range(12)]
    files = {
        "ref": references,
        "other": [line.replace("heute", "jetzt") for line in references],
        "src": [f"Dog number {n} runs in the park today" + " , really ." * (n % 3) for n in range(12)],
        "a": [line.replace("Hund", "Wolf") if n % 2 else line for n, line in enumerate(references)],
        "b": [line.replace("im Park", "<b>") if n % 5 else line for n, line in enumerate(references)],
        "c": references,
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def test_a_comparison_is_printed_as_a_table(mtrain, systems):
    code, out, _ = mtrain(
        "evaluate", "--hypotheses", "a", "--compare", "c", "--reference", "ref", "--metrics", "bleu"
    )
    first, signature, header, baseline, compared, note = out.splitlines()
    assert (
        code == 0 and first == "a (12 sentences)" and signature.startswith("  BLEU|nrefs:1|bs:1000|ar:10000")
    )
    assert header.split() == ["score", "mean", "95%", "interval", "p", "(bootstrap)", "p", "(randomization)"]
    assert baseline.split()[:2] == ["a", "(baseline)"] and len(baseline.split()) == 6
    assert compared.split()[:2] == ["c", "100.00"] and compared.count("*") == 2 and "p < 0.05" in note


@pytest.mark.usefixtures("few_trials")
def test_a_comparison_is_written_as_a_page(mtrain, systems):
    files = ["--hypotheses", "a", "--compare", "b", "--reference", "ref", "--source", "src"]
    code, _, _ = mtrain("evaluate", *files, "--html", "page.html", "--metrics", "chrf")
    page = (systems / "page.html").read_text()
    assert code == 0 and "b compared with a" in page and "Dog number 3" in page
    assert "chrF2|nrefs:1|bs:1000|" in page  # the name that sacreBLEU gives it
    assert "<b>" not in page and "&lt;b" in page
    code, _, err = mtrain("evaluate", *files[:6], "--html", "b")
    assert code == 2 and one_line(err).startswith("error: b: this file is also an input; give another")
    code, _, err = mtrain("evaluate", *files[:6], "--html", "src/page.html")
    assert code == 6 and "src/page.html: cannot write: no such folder" in one_line(err)


@pytest.mark.usefixtures("few_trials")
def test_models_and_files_are_compared(mtrain, run_dir, corpus, stdin):
    """The model translates the test set of its run; the other translations are read."""
    stdin((corpus / "train.de").read_bytes())
    options = ["--metrics", "bleu", "--json", "--device", "cpu"]
    code, out, _ = mtrain("evaluate", run_dir, "--compare", run_dir / "model", "--compare", "-", *options)
    result = json.loads(out)["seen"]
    names = [score["system"] for score in result["comparisons"][0]["scores"]]
    assert code == 0 and names == [str(run_dir), str(run_dir / "model"), "<stdin>"]
    assert [round(score["score"]) for score in result["comparisons"][0]["scores"]] == [100] * 3
    files = ["--hypotheses", corpus / "train.en", "--reference", corpus / "train.de"]
    model = ["--source", corpus / "train.en", "--compare", run_dir]
    code, out, _ = mtrain("evaluate", *files, *model, *options)
    scores = json.loads(out)["train.en"]["comparisons"][0]["scores"]
    assert code == 0 and scores[0]["score"] < 50 and scores[1]["score"] == pytest.approx(100)


def test_compared_files_must_fit_the_test_set(mtrain, run_dir, corpus, tmp_path):
    (tmp_path / "short").write_text("Es regnet.\n")
    code, _, err = mtrain("evaluate", run_dir, "--compare", tmp_path / "short", "--device", "cpu")
    assert code == 3 and f"seen has 8 lines but {tmp_path}/short has 1" in one_line(err)
    code, _, err = mtrain("evaluate", run_dir, "--compare", tmp_path / "none")
    assert code == 3 and f"--compare {tmp_path}/none: no such model or file of translations" in one_line(err)
    side = f"{{source: {corpus}/train.en, target: {corpus}/train.de}}"
    several = ["--set", f"data.test={{one: {side}, two: {side}}}"]
    code, _, err = mtrain("evaluate", run_dir, "--compare", corpus / "train.de", *several, "--device", "cpu")
    assert code == 2 and "has several test sets (one, two); give --source and --reference" in one_line(err)
    files = ["--hypotheses", corpus / "train.de", "--reference", corpus / "train.de"]
    code, _, err = mtrain("evaluate", *files, "--source", tmp_path / "short", "--by-length")
    assert code == 3 and f"train.de has 8 lines but {tmp_path}/short has 1" in one_line(err)


def test_sources_of_files_serve_to_count_problems(mtrain, corpus, tmp_path):
    lines = (corpus / "train.de").read_text().splitlines()
    (tmp_path / "out").write_text("\n".join(["", *lines[1:], ""]))
    files = ["--hypotheses", tmp_path / "out", "--reference", corpus / "train.de", "--metrics", "chrf"]
    code, out, _ = mtrain("evaluate", *files)
    assert code == 0 and "problems" not in out
    code, out, _ = mtrain("evaluate", *files, "--source", corpus / "train.en")
    assert code == 0 and "problems: 1 empty" in out


def test_all_models_are_checked_before_the_first_translates(mtrain, run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain.evaluation.evaluate.translate_set", None)
    (tmp_path / "empty").mkdir()
    code, _, err = mtrain("evaluate", run_dir, "--compare", tmp_path / "empty", "--device", "cpu")
    assert code == 4 and f"{tmp_path}/empty: " in one_line(err)


def test_models_of_different_languages_are_not_compared(mtrain, run_dir, tmp_path):
    model = Path(shutil.copytree(run_dir / "model", tmp_path / "model"))
    raw = yaml.safe_load((model / "config.yaml").read_text())
    (model / "config.yaml").write_text(yaml.safe_dump({**raw, "target_lang": "fr"}))
    write_manifest(model)
    code, _, err = mtrain("evaluate", run_dir, "--compare", model, "--device", "cpu")
    assert code == 2 and "the model translates into fr, not de" in one_line(err)


@pytest.mark.usefixtures("few_trials")
def test_scores_by_length_and_of_sentences(mtrain, systems):
    files = ["--hypotheses", "a", "--compare", "b", "--reference", "ref", "--source", "src", "--by-length"]
    job = ["evaluate", *files, "--metrics", "BLEU, ter", "--sentence-scores", "scores.tsv"]
    code, out, _ = mtrain(*job)
    assert code == 0 and "by words of the source, b" in out and "    0-10           4" in out
    header, *rows = (line.split("\t") for line in (systems / "scores.tsv").read_text().splitlines())
    assert header == ["test", "system", "line", "bleu", "ter"] and len(rows) == 24
    assert rows[0] == ["a", "a", "1", "100.0000", "0.0000"] and rows[23][:3] == ["a", "b", "12"]
    code, out, _ = mtrain(*job, "--json")
    [first, second] = json.loads(out)["a"]["by_length"]["b"]
    assert (first["shortest"], first["longest"], first["sentences"]) == (0, 10, 4)
    assert second["scores"].keys() == {"bleu", "ter"}


@pytest.mark.usefixtures("few_trials")
def test_files_are_complete_although_the_reader_of_stdout_exits(systems):
    reader, writer = os.pipe()
    os.close(reader)
    files = ["--hypotheses", "a", "--compare", "b", "--reference", "ref", "--metrics", "bleu"]
    job = ["evaluate", *files, "--sentence-scores", "scores.tsv", "--html", "page.html"]
    code, _, err = run_forked(*job, stdout=writer)
    os.close(writer)
    assert (code, err) == (0, "BLEU tokenizer: 13a (the target language is not known)\n")
    assert len((systems / "scores.tsv").read_text().splitlines()) == 25
    assert (systems / "page.html").read_text().endswith("</html>\n")


@pytest.mark.usefixtures("few_trials")
def test_a_file_name_that_is_not_utf8_is_written_as_far_as_possible(mtrain, systems):
    name = "hyp\udce9.de"
    (systems / name).write_text((systems / "b").read_text())
    files = ["--hypotheses", "a", "--compare", name, "--reference", "ref", "--metrics", "chrf"]
    code, _, err = mtrain("evaluate", *files, "--sentence-scores", "s.tsv", "--html", "d.html")
    assert code == 0, err
    assert "hyp?.de" in (systems / "s.tsv").read_text() and (systems / "d.html").exists()


@pytest.mark.usefixtures("few_trials")
def test_comet_scores_translations_in_its_environment(mtrain, systems, comet_environment):
    files = ["--hypotheses", "a", "--compare", "c", "--reference", "ref", "--source", "src"]
    comet = ["--metrics", "comet,bleu", "--comet", comet_environment, "--comet-model", "own/model"]
    code, out, err = mtrain("evaluate", *files, *comet, "--device", "cpu", "--html", "page.html")
    assert code == 0 and "COMET|nrefs:1|bs:1000|" in out and "model:own/model|version:0.0" in out
    assert "COMET +0.0" in (systems / "page.html").read_text()
    code, out, err = mtrain("evaluate", *files, "--metrics", "comet", "--comet", "src")
    assert (code, out) == (2, "") and "src: not a virtual environment" in one_line(err)


def test_setting_up_comet_names_a_folder_that_exists(mtrain, systems):
    code, out, err = mtrain("evaluate", "--setup-comet", systems)
    assert (code, out) == (2, "") and "already exists; give a new folder" in one_line(err)


def test_a_seed_is_checked_before_anything_is_translated(mtrain, run_dir, systems, monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "0")
    monkeypatch.setattr("mtrain.cli.evaluate.evaluate.evaluate_models", None)
    code, _, err = mtrain("evaluate", run_dir, "--compare", run_dir / "model")
    assert code == 2 and "SACREBLEU_SEED=0: not a seed" in one_line(err)


@pytest.mark.parametrize(
    ("seed", "metrics", "trials"),
    [
        (None, ["bleu", "chrf"], 200),
        pytest.param(None, ["bleu", "chrf", "ter"], 10_000, marks=pytest.mark.slow),
        pytest.param("7", ["chrf"], 10_000, marks=pytest.mark.slow),
    ],
)
def test_comparisons_agree_with_the_command_line_of_sacrebleu(
    mtrain, systems, monkeypatch, request, seed, metrics, trials
):
    if trials == 200:
        request.getfixturevalue("few_trials")
    if seed is not None:
        monkeypatch.setenv("SACREBLEU_SEED", seed)
    ours = ["--hypotheses", "a", "--compare", "b", "--compare", "c"]
    ours += ["--metrics", ",".join(["chrf++", *metrics])]
    code, out, _ = mtrain("evaluate", *ours, "--reference", "ref", "--reference", "other", "--json")
    result = json.loads(out)["a"]
    assert code == 0 and result["baseline"] == "a"
    names = {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER"}
    names = {metric: names[metric] for metric in metrics}
    comparisons = {item["metric"]: item for item in result["comparisons"]}
    for test in ("bs", "ar") if seed is None else ("bs",):
        options = [*["ref", "other", "-i", "a", "b", "c", "-m"], *metrics, f"--paired-{test}", "-f", "json"]
        options += ["--paired-ar-n", str(trials)]
        command = [sys.executable, "-c", SACREBLEU, *options]
        theirs = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        for number, system in enumerate(theirs):
            for metric, name in names.items():
                own = comparisons[metric]["scores"][number]
                p, expected = "bootstrap_p" if test == "bs" else "randomization_p", system[name]["p_value"]
                if test == "ar" and number:  # see `compare_systems`
                    texts = [(systems / each).read_text().splitlines() for each in ("a", "abc"[number])]
                    expected = max(expected, 2.0 ** (1 - sum(map(ne, *texts))))
                assert (own["score"], own[p]) == (system[name]["score"], expected)
                if test == "bs":
                    assert (own["mean"], own["confidence"]) == (system[name]["mean"], system[name]["ci"])
    assert [score["bootstrap_p"] is None for score in comparisons["chrf++"]["scores"]] == [True, False, False]
    assert f"bs:1000|ar:{trials}|seed:{seed or 12345}" in comparisons["chrf++"]["signature"]


def test_search_options_take_effect(mtrain, run_dir):
    job = [
        "evaluate",
        run_dir,
        "--beam-size",
        2,
        "--length-penalty",
        0.5,
        "--batch-tokens",
        64,
        "--device",
        "cpu",
    ]
    code, out, err = mtrain(*job, "--metrics", "bleu", "--set", "decoding.stop=exact")
    assert code == 0 and "= 100" in out and f"mtrain translate {run_dir} -i FILE -o FILE" in err


def test_a_beam_size_for_a_model_that_samples_is_an_error(mtrain, run_dir, tmp_path):
    """As for `mtrain translate`."""
    model = Path(shutil.copytree(run_dir / "model", tmp_path / "model"))
    changed(model / "config.yaml", "decoding", samples=2)
    write_manifest(model)
    files = ["--source", tmp_path / "source", "--reference", tmp_path / "reference", "--device", "cpu"]
    for name in ("source", "reference"):
        (tmp_path / name).write_text("It rains.\n")
    code, out, err = mtrain("evaluate", model, *files, "--beam-size", 4)
    assert (code, out) == (2, "")
    assert "--beam-size has no effect on sampling (decoding.samples is 2)" in one_line(err)
    code, out, _ = mtrain("evaluate", model, *files, "--beam-size", 4, "--set", "decoding.samples=null")
    assert code == 0 and "BLEU" in out


def test_an_empty_test_set_is_an_error_before_any_translation(mtrain, run_copy, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("")
    config = run_copy / "config.yaml"
    config.write_text(
        config.read_text().replace("  test:\n", f"  test:\n    a_b: {{source: {empty}, target: {empty}}}\n")
    )
    code, out, err = mtrain("evaluate", run_copy, "--device", "cpu", "--json")
    assert (code, out) == (3, "") and "a_b: has no sentences; there is nothing to score" in one_line(err)
