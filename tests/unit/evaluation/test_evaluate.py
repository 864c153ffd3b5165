"""Evaluation of models on test sets, and of files of translations."""

import json
import shutil
import subprocess
import sys

import pytest
import sacrebleu

from mtrain.config.yaml_io import to_yaml
from mtrain.decoding.translate import Translator
from mtrain.errors import DataError, UsageError
from mtrain.evaluation.evaluate import TestSet as Sentences
from mtrain.evaluation.evaluate import configured_test_sets, evaluate_set, validation_sets, with_augmented
from mtrain.evaluation.metrics import make_metrics, score
from tests.support.training import PAIRS, fit_on_cpu


def test_the_command_line_of_sacrebleu_gives_the_same_score(mtrain, run_dir, corpus, tmp_path):
    short = ["decoding.max_length_ratio=0", "decoding.max_length_offset=10"]  # so that BLEU is not 100
    options = f"--device cpu -i {corpus}/train.en --set {short[0]} --set {short[1]}".split()
    assert mtrain("translate", run_dir, *options, "-o", tmp_path / "out.de")[0] == 0
    options = f"{corpus}/train.de -i {tmp_path}/out.de -f json -w 6".split()
    command = [sys.executable, "-m", "sacrebleu", *options]
    theirs = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    translator = Translator.load(run_dir, "cpu", short)
    metrics = make_metrics(["bleu"], translator.target_lang)
    [ours] = evaluate_set(configured_test_sets(run_dir)[0], translator, metrics)
    assert 10 < ours.score < 99 and ours.score == pytest.approx(theirs["score"], abs=1e-6)
    assert theirs["signature"] in ours.signature
    hypotheses, reference = (
        file.read_text().splitlines() for file in (tmp_path / "out.de", corpus / "train.de")
    )
    assert score(hypotheses, [reference], metrics) == [ours]


def test_configured_test_sets_are_translated_and_scored(run_dir):
    [test] = configured_test_sets(run_dir)
    assert test.name == "seen" and test.sources == [pair[0] for pair in PAIRS]
    [result] = evaluate_set(test, Translator.load(run_dir, "cpu"), make_metrics(["bleu"], "de"))
    assert result.score == pytest.approx(100)
    checkpoint = next((run_dir / "checkpoints").glob("step-*"))
    assert configured_test_sets(run_dir / "model") == configured_test_sets(checkpoint) == [test]


def test_a_model_without_a_run_has_no_sets(run_dir, tmp_path):
    model = shutil.copytree(run_dir / "model", tmp_path / "model")
    with pytest.raises(UsageError, match=r"no test sets are configured; give --source and --reference$"):
        configured_test_sets(model)
    with pytest.raises(UsageError, match="does not belong to a run, so it has no validation set"):
        validation_sets(model)
    with pytest.raises(UsageError, match=r"give --source and --reference, or --validation$"):
        configured_test_sets(run_dir, ["data.test={}"])


def test_the_validation_set_of_a_run_is_that_of_its_files(run_dir):
    [found] = validation_sets(run_dir)
    sources, targets = map(list, zip(*PAIRS, strict=True))
    assert (found.name, found.sources, found.references) == ("validation", sources, [targets])


def test_a_validation_set_without_a_good_pair_is_an_error(run_dir, tmp_path):
    (tmp_path / "bad.tsv").write_text("one column\n")
    with pytest.raises(DataError, match=f"{run_dir}: data.validation has no pairs"):
        validation_sets(run_dir, [f"data.validation={{tsv: {tmp_path}/bad.tsv}}", "data.bad_lines=skip"])


def test_a_holdout_is_read_from_the_data_folder_of_the_run(make_config):
    run = fit_on_cpu(make_config(data={"validation": {"holdout": 2}}, training={"max_steps": 4}))
    [found] = validation_sets(run)
    held_out = [json.loads(line) for line in (run / "data/validation.jsonl").read_text().splitlines()]
    assert held_out == [list(pair) for pair in zip(found.sources, *found.references, strict=True)]
    assert set(map(tuple, held_out)) < set(PAIRS)
    shutil.rmtree(run / "data")
    with pytest.raises(DataError, match="the held-out pairs are missing; restore it, or give --source"):
        validation_sets(run)


def test_a_holdout_is_found_from_another_working_directory(make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"validation": {"holdout": 2}, "folder": "encoded"}
    run = fit_on_cpu(make_config(data=data, training={"max_steps": 4}))
    expected = validation_sets(run)
    monkeypatch.chdir(tmp_path.parent)
    assert validation_sets(run) == expected and len(expected[0].sources) == 2


def test_the_data_folder_replaces_missing_validation_files(make_config, corpus, tmp_path):
    files = {"source": tmp_path / "val.en", "target": tmp_path / "val.de"}
    for file in files.values():
        file.write_bytes((corpus / f"train.{file.suffix[1:]}").read_bytes())
    named = {side: str(file) for side, file in files.items()}
    run = fit_on_cpu(make_config(data={"validation": named}, training={"max_steps": 4}))
    before = validation_sets(run)
    files["source"].unlink()
    assert validation_sets(run) == before
    shutil.rmtree(run / "data")
    with pytest.raises(DataError, match=r"val\.en: no such file"):
        validation_sets(run)


def test_validation_sets_are_divided_by_direction(make_config, corpus, tmp_path):
    files = {"source": str(corpus / "train.en"), "target": str(corpus / "train.de")}
    back = {**files, "source": files["target"], "target": files["source"]}
    swapped = {**back, "source_lang": "de", "target_lang": "en"}
    data = {"train": [files, swapped], "validation": [files, swapped], "language_tags": "target"}
    config = make_config(data=data, tokenizer={"symbols": ["<2de>", "<2en>"]})
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(to_yaml(config))
    found = validation_sets(tmp_path / "run")
    assert [test.name for test in found] == ["validation en-de", "validation de-en"]
    assert [str(test.direction) for test in found] == ["en-de", "de-en"]
    assert found[1].sources == found[0].references[0]


def test_translations_are_scored_against_several_references():
    texts = [["a b c d", "e f g h"], ["a b c d", "x y z h"], ["a x c d", "e f g h"]]
    [one] = score(texts[0], texts[1:2], make_metrics(["bleu"]))
    [both] = score(texts[0], texts[1:], make_metrics(["bleu"]))
    assert one.score == sacrebleu.corpus_bleu(texts[0], texts[1:2]).score
    assert one.score < both.score == pytest.approx(100)


def test_a_configured_test_set_may_have_several_references(run_dir, corpus, tmp_path):
    (tmp_path / "short").write_text("x\n")
    pair = f"source: {corpus}/train.en, target: {corpus}/train.de"
    [test] = configured_test_sets(run_dir, [f"data.test={{a: {{{pair}, references: [{corpus}/train.en]}}}}"])
    assert test.references == [[target for _, target in PAIRS], [source for source, _ in PAIRS]]
    with pytest.raises(DataError, match="a has 8 pairs but reference 2 has 1 lines"):
        configured_test_sets(run_dir, [f"data.test={{a: {{{pair}, references: [{tmp_path}/short]}}}}"])
    with pytest.raises(DataError, match="none: no such file"):
        configured_test_sets(run_dir, [f"data.test={{a: {{{pair}, references: [{tmp_path}/none]}}}}"])


def test_each_file_of_a_further_reference_belongs_to_a_source_file(run_dir, tmp_path):
    for name, count in {"1.en": 2, "2.en": 3, "1.de": 2, "2.de": 3, "1.ref": 2, "2.ref": 3}.items():
        (tmp_path / name).write_text("".join(f"{name} {n}\n" for n in range(count)))
    test = f"{{source: '{tmp_path}/*.en', target: '{tmp_path}/*.de', references: ['{tmp_path}/*.ref']}}"
    [found] = configured_test_sets(run_dir, [f"data.test={{a: {test}}}"])
    assert found.references[1] == ["1.ref 0", "1.ref 1", "2.ref 0", "2.ref 1", "2.ref 2"]
    (tmp_path / "1.ref").rename(tmp_path / "0.ref")  # now the lines are those of other sources
    (tmp_path / "2.ref").rename(tmp_path / "1.ref")
    (tmp_path / "0.ref").rename(tmp_path / "2.ref")
    with pytest.raises(DataError, match=r"1\.en has 2 lines but .*1\.ref has 3"):
        configured_test_sets(run_dir, [f"data.test={{a: {test}}}"])


def test_a_changed_copy_has_other_sources_and_the_references_of_the_same_sentences(translator):
    sources = ["a dog runs in the park.", "It rains", "12"]
    references = [["ein Hund rennt.", "Es regnet", "12"], ["der Hund rennt!", "Regen.", "zwölf"]]
    test = Sentences("t", sources, references)
    names = ["typos", "uppercase", "drop_final_punctuation"]
    plain, typos, upper, dropped = with_augmented([test], names, translator)
    assert plain is test
    assert typos.name == "t, typos" and typos.references == references
    assert [one != other for one, other in zip(typos.sources, sources, strict=True)] == [True, True, False]
    assert list(with_augmented([test], ["typos"], translator))[1] == typos
    assert upper.sources == ["A DOG RUNS IN THE PARK.", "IT RAINS", "12"]
    assert upper.references[1] == ["DER HUND RENNT!", "REGEN.", "zwölf"]  # "12" is the same in upper case
    assert dropped.sources == ["a dog runs in the park", "It rains", "12"]
    assert dropped.references == [
        ["ein Hund rennt", "Es regnet", "12"],
        ["der Hund rennt", "Regen.", "zwölf"],
    ]
