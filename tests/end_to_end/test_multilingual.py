"""One model for several languages: tags in the data, in `fit`, `translate`, `evaluate` and `score`."""

import json
import pickle
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from mtrain import Translator
from mtrain.config.load import load_config, validate
from mtrain.config.schema import Config
from mtrain.errors import ModelError, UsageError
from mtrain.evaluation import evaluate
from mtrain.report.attention import attention_maps
from mtrain.report.report import report_page
from mtrain.storage.manifest import write_manifest
from mtrain.training.fit import fit, make_trainer
from mtrain.training.validation import translation as training_validate
from tests.support.cli import one_line
from tests.support.training import PAIRS, merged, read_metrics
from tests.support.translation import interrupt_third_window

ENGLISH, GERMAN = ([pair[side] for pair in PAIRS] for side in (0, 1))
ON_CPU = ["--device", "cpu"]


@pytest.fixture(scope="module")
def raw(raw_config, corpus):
    """A config of both directions, with a test set of each."""
    files = {"source": str(corpus / "train.en"), "target": str(corpus / "train.de")}
    reverse = {"source": files["target"], "target": files["source"], "source_lang": "de", "target_lang": "en"}
    data = {
        "train": [files, reverse],
        "validation": [files, reverse],
        "test": {"there": files, "back": reverse},
        "language_tags": "target",
    }
    return merged(raw_config, "", data=data, tokenizer={"type": "bpe"})


@pytest.fixture(scope="module")
def both(raw, tmp_path_factory):
    """A run whose model has memorized both directions."""
    folder = tmp_path_factory.mktemp("multilingual") / "run"
    recipe = {"max_steps": 200, "batch_tokens": 512, "validate_every": 100, "checkpoint_every": 100}
    model = {"d_model": 64, "dropout": 0.0, "encoder_layers": 2, "decoder_layers": 2}
    config = merged(raw, str(folder), training={**recipe, "label_smoothing": 0.0}, model=model)
    fit(validate(Config, config, "test"), device="cpu")
    return folder


def test_a_tag_chooses_the_language(mtrain, both):
    lines = ENGLISH[:3]
    assert mtrain("translate", both, *lines, *ON_CPU)[1].splitlines() == GERMAN[:3]  # data.target_lang
    assert (
        mtrain("translate", both, *GERMAN[:3], "--from", "de", "--to", "en", *ON_CPU)[1].splitlines() == lines
    )
    assert mtrain("translate", both, "", " ", "\u200b", "--to", "en", *ON_CPU)[1] == "\n\n\n"
    code, _, err = mtrain("translate", both, "Hello.", "--to", "fr", *ON_CPU)
    assert code == 2 and "the vocabulary has no language tag <2fr>; its symbols are <2de>, <2en>" in one_line(
        err
    )
    code, _, err = mtrain("translate", both, "Hello.", "--to", "\udcff", *ON_CPU)  # a byte that is not UTF-8
    assert code == 2 and "the vocabulary has no language tag <2\\udcff>; its symbols" in one_line(err)


def test_a_line_may_begin_with_a_language_tag(mtrain, both, corpus, tmp_path):
    """Input for other programs does."""
    tagged = tmp_path / "tagged"
    tagged.write_text(f"<2de> {ENGLISH[0]}\n{ENGLISH[1]}\n<2en> {GERMAN[2]}\n")
    job = ["translate", both, "-i", tagged, *ON_CPU]
    assert mtrain(*job)[1].splitlines() == [*GERMAN[:2], ENGLISH[2]]
    code, _, err = mtrain(*job, "--to", "de")
    message = "line 3 begins with <2en>, but <2de> was chosen; remove the tag of the line"
    assert code == 2 and message in err and err.count("error") == 1
    assert mtrain(*job, "--from", "en")[1].splitlines() == [*GERMAN[:2], ENGLISH[2]]  # leaves the target open
    same = tmp_path / "same"
    same.write_text("".join(f"<2en> {line}\n" for line in GERMAN))
    job = ["--to", "en", "--json", *ON_CPU]
    scored = [
        mtrain("score", both, "-i", file, "--target", corpus / "train.en", *job)
        for file in (same, corpus / "train.de")
    ]
    assert scored[0] == scored[1] and scored[0][0] == 0
    code, _, err = mtrain("score", both, "-i", same, "--target", corpus / "train.en", "--to", "de")
    assert code == 2 and "line 1 begins with <2en>, but <2de> was chosen" in one_line(err)
    given = ["--reference", corpus / "train.en", "--metrics", "chrf", "--json", "--to", "en", *ON_CPU]
    [test] = json.loads(mtrain("evaluate", both, "--source", same, *given)[1]).values()
    assert test["scores"][0]["score"] > 95
    without = [value for value in given if value not in ("--to", "en")]
    out = mtrain("evaluate", both, "--compare", both / "model", "--source", same, *without)[1]
    [comparison] = json.loads(out)["same"]["comparisons"]
    assert [system["score"] > 95 for system in comparison["scores"]] == [True, True]


def test_a_language_may_have_another_code_than_its_tag(mtrain, both):
    """As with models that have codes of languages, which may be compared with this one."""
    with Translator.load(both, "cpu", workers=1) as translator:
        for code in ("de", "deu", "deu_Latn", "de-AT"):
            assert translator.between(None, code).translate(ENGLISH[:1])[0].text == GERMAN[0]
    code, _, err = mtrain("translate", both, "Hello.", "--to", "fra_Latn", *ON_CPU)
    assert code == 2 and "the vocabulary has no language tag <2fra_Latn>" in one_line(err)


def test_a_copy_of_a_translator_knows_which_languages_were_chosen(both):
    tagged = f"<2de> {ENGLISH[0]}"
    with Translator.load(both, "cpu", workers=1) as translator:
        source, target = translator.between("en"), translator.between(None, "en")
        for copied in (pickle.loads(pickle.dumps(source)), source.with_settings(beam_size=1)):
            assert copied.translate([tagged])[0].text == GERMAN[0]
        for copied in (pickle.loads(pickle.dumps(target)), target.with_settings(beam_size=1)):
            with pytest.raises(UsageError, match="but <2en> was chosen"):
                copied.translate([tagged])


def test_the_words_of_a_given_tag_count_in_alignments(both):
    translator = Translator.load(both, "cpu", workers=1)
    [plain, tagged] = translator.translate([ENGLISH[0], f"<2de> {ENGLISH[0]}"], alignments=True)
    assert plain.text == tagged.text and plain.score == tagged.score
    moved = {(i + 1, j) for i, j in plain.alignment}
    assert moved <= set(tagged.alignment) and {i for i, _ in set(tagged.alignment) - moved} <= {0}


def test_an_interrupted_output_is_not_continued_in_another_language(
    mtrain, both, corpus, tmp_path, monkeypatch
):
    job = ["translate", both, "-i", corpus / "train.en", "-o", tmp_path / "out", *ON_CPU]
    interrupt_third_window(monkeypatch)
    assert mtrain(*job, "--to", "de")[0] == 130
    code, _, err = mtrain(*job, "--to", "en", "--continue")
    assert code == 2 and "another model or other settings" in one_line(err)
    assert mtrain(*job, "--continue")[0] == 0  # into data.target_lang, which is de
    assert (tmp_path / "out").read_text().splitlines() == GERMAN


def test_attention_is_drawn_with_one_tag(both):
    translator = Translator.load(both, "cpu", workers=1)
    for language, text, translation in (("de", ENGLISH[0], GERMAN[0]), ("en", GERMAN[0], ENGLISH[0])):
        [drawn] = attention_maps(translator.between(None, language), [text], [translation])
        assert [piece for piece in drawn.source if "<2" in piece] == [f"<2{language}>"]
        assert attention_maps(translator, [f"<2{language}> {text}"], [translation])[0].source == drawn.source
    sources = re.findall(r'"encoder":\{"name":"Encoder","rows":\[(.*?)\]', report_page([both]))
    assert [source.count("c2de") for source in sources] == [1] * 3  # short sentences of the validation set


def test_the_report_has_bleu_by_length_of_each_target_language(both):
    """Language tags do not count as words."""
    table = re.search(
        "<table[^>]*><caption[^>]*>BLEU \\(number of sentences\\).*?</table>", report_page([both])
    )
    assert table is not None
    cells = re.findall("<t[hd](?: [^>]*)?>(.*?)</t[hd]>", table[0])
    assert cells[:3] == ["words of the source", "run, de", "run, en"] and cells[3] == "0-10"
    assert [cell.split()[1] for cell in cells[4:6]] == [f"({len(ENGLISH)})", f"({len(GERMAN)})"]


def test_validation_knows_the_languages_of_each_direction(both, monkeypatch):
    """The languages matter where lines are split and joined."""
    directions = []

    class Recorded(Translator):
        def __init__(self, ensemble, decoding, direction, *others, **settings):
            directions.append(str(direction))
            super().__init__(ensemble, decoding, direction, *others, **settings)

    monkeypatch.setattr(training_validate, "Translator", Recorded)
    trainer = make_trainer(load_config(both / "config.yaml"), device="cpu")
    scores = trainer.selection.scores_of(trainer.model)
    assert directions == ["en-de", "de-en"] and scores.bleu > 95


def test_a_model_without_tags_translates_into_one_language(mtrain, run_dir):
    assert mtrain("translate", run_dir, "It rains.", "--to", "de-AT", *ON_CPU)[1] == "Es regnet.\n"
    code, _, err = mtrain("translate", run_dir, "It rains.", "--to", "fr", *ON_CPU)
    assert code == 2
    assert "the model translates into de, not fr; it has no language tags" in one_line(err)


def test_the_run_states_the_tags_and_scores_each_direction(both):
    config = yaml.safe_load((both / "config.yaml").read_text())
    assert config["tokenizer"]["symbols"] == ["<2de>", "<2en>"]
    scores = [line["validation"] for line in read_metrics(both) if "validation" in line][-1]
    bleu, chrf = ([scores[f"{name}_{each}"] for each in ("en-de", "de-en")] for name in ("bleu", "chrf"))
    assert (scores["bleu"], scores["chrf"]) == pytest.approx((sum(bleu) / 2, sum(chrf) / 2))
    assert min(bleu) > 95
    sources = json.loads((both / "samples.jsonl").read_text().splitlines()[-1])["sentences"]
    assert sources[0]["source"] == f"<2de> {ENGLISH[0]}" and sources[0]["target_lang"] == "de"


def test_the_languages_are_described(mtrain, both):
    assert re.search("languages +en to de, en\n", mtrain("info", both)[1])
    card = (both / "model/README.md").read_text()
    assert "into several languages (`de`, `en`): a source begins with a tag such as `<2de>`" in card


@pytest.mark.usefixtures("few_trials")
def test_evaluate_translates_each_test_set_into_its_language(mtrain, both, run_dir, corpus):
    code, out, _ = mtrain("evaluate", both, "--metrics", "bleu", *ON_CPU)
    assert code == 0
    assert "there (en-de, 8 sentences)" in out and "back (de-en, 8 sentences)" in out
    sets = json.loads(mtrain("evaluate", both, "--metrics", "bleu", "--json", *ON_CPU)[1])
    assert [test["direction"] for test in sets.values()] == ["en-de", "de-en"]
    assert all(test["scores"][0]["score"] > 95 for test in sets.values())
    given = ["--source", corpus / "train.de", "--reference", corpus / "train.en", "--metrics", "bleu"]
    code, out, _ = mtrain("evaluate", both, *given, "--from", "de", "--to", "en", "--json", *ON_CPU)
    assert json.loads(out)["train.de"]["scores"] == sets["back"]["scores"]
    code, _, err = mtrain("evaluate", both, "--to", "en", *ON_CPU)
    assert code == 2 and "--to has no effect on the test sets of MODEL" in one_line(err)
    code, _, err = mtrain("evaluate", both, "--compare", run_dir, *ON_CPU)
    assert code == 2 and f"{run_dir}: the model translates into de, not en" in one_line(err)
    code, out, _ = mtrain("evaluate", run_dir, "--compare", both, "--metrics", "bleu", *ON_CPU)
    assert code == 0 and "seen (8 sentences)" in out


@pytest.mark.usefixtures("few_trials")
def test_a_model_is_compared_on_test_sets_of_another_direction_than_its_own(
    mtrain, both, run_dir, corpus, tmp_path
):
    run = Path(shutil.copytree(both, tmp_path / "run"))
    settings = yaml.safe_load((run / "model/config.yaml").read_text())
    settings |= {"source_lang": "de", "target_lang": "en"}
    (run / "model/config.yaml").write_text(yaml.safe_dump(settings))
    write_manifest(run / "model")
    test = f"data.test={{there: {{source: {corpus}/train.en, target: {corpus}/train.de}}}}"
    given = ["--set", test, "--metrics", "bleu", "--json", *ON_CPU]
    code, out, err = mtrain("evaluate", run, "--compare", run_dir, *given)
    assert code == 0, err
    [comparison] = json.loads(out)["there"]["comparisons"]
    assert [system["score"] > 95 for system in comparison["scores"]] == [True, True]


def test_score_uses_both_directions_of_one_model(mtrain, both, tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    code, out, _ = mtrain("score", both, "--tsv", pairs, "--reverse", both, *ON_CPU)
    assert code == 0 and min(float(line.split("\t")[2]) for line in out.splitlines()) > 0.8
    right = mtrain("score", both, "--tsv", pairs, *ON_CPU)[1].splitlines()
    code, out, _ = mtrain("score", both, "--tsv", pairs, "--to", "en", *ON_CPU)
    sums = [sum(float(line.split("\t")[2]) for line in lines) for lines in (out.splitlines(), right)]
    assert code == 0 and sums[0] < sums[1] - 0.1


def test_score_with_a_model_of_unknown_languages(mtrain, both, run_dir, tmp_path):
    """As imported ones may be."""
    model = Path(shutil.copytree(run_dir / "model", tmp_path / "model"))
    raw = yaml.safe_load((model / "config.yaml").read_text())
    (model / "config.yaml").write_text(yaml.safe_dump({**raw, "source_lang": "und", "target_lang": "und"}))
    write_manifest(model)
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    job = ["score", model, "--tsv", tmp_path / "pairs.tsv", "--reverse", run_dir]
    code, out, err = mtrain(*job, *ON_CPU)
    assert code == 0 and len(out.splitlines()) == len(PAIRS), err


def test_rerank_by_another_direction(mtrain, both, corpus, tmp_path):
    n_best = mtrain("translate", both, "-i", corpus / "train.en", "--json", "--n-best", 3, "--beam-size", 3)[
        1
    ]
    (tmp_path / "n-best").write_text(n_best)
    given = [tmp_path / "n-best", "-i", corpus / "train.en", "--from", "de", "--to", "en", *ON_CPU]
    assert mtrain("rerank", both, *given)[1].splitlines() == GERMAN


def test_alignments_count_the_words_of_the_line(both):
    with Translator.load(both, "cpu") as translator:
        tagged = translator.between("de", "en")
        found = tagged.translate(GERMAN, alignments=True)
        words = [len(line.split()) for line in GERMAN]
        assert all(0 <= i < count for one, count in zip(found, words, strict=True) for i, _ in one.alignment)
        short = tagged.with_settings()
        short.max_length = 8
        [parts] = short.translate([" ".join(GERMAN[:3])], alignments=True)
        assert max(i for i, _ in parts.alignment) < sum(words[:3])
        assert len(parts.text.split()) > 6


def test_every_part_of_a_long_line_has_the_tag(both):
    with Translator.load(both, "cpu") as translator:
        tagged = translator.between("de", "en")
        line = " ".join(GERMAN)
        translated = " ".join(ENGLISH)
        longest = (
            max(len(row) for row in translator.tokenizer.encode_source(GERMAN))
            + len(tagged.splitter.tags.source)
            + 1
        )
        tagged.max_length = longest
        assert tagged.translate([line])[0].text == translated


def test_an_ensemble_has_the_same_tags(both, tmp_path, raw):
    """The model without tags has the same vocabulary."""
    data = {"language_tags": "none", "train": raw["data"]["train"][0], "test": {}}
    config = merged(raw, str(tmp_path / "run"), data={**data, "validation": raw["data"]["validation"][0]})
    config |= {"tokenizer": {"path": str(both)}, "training": {**config["training"], "max_steps": 4}}
    config["model"] |= yaml.safe_load((both / "config.yaml").read_text())["model"]
    fit(validate(Config, config, "test"), device="cpu")
    with pytest.raises(ModelError, match=r"its language tags \(none, not target\) are not the same as in"):
        Translator.load(both, "cpu", ensemble=[tmp_path / "run"])


def test_a_fine_tuned_model_inherits_the_tags(mtrain, both, tmp_path, raw):
    """The new run may train on fewer directions."""
    data = {"train": raw["data"]["train"][1], "validation": raw["data"]["validation"][1], "test": {}}
    config = merged(raw, str(tmp_path / "run"), data={**data, "source_lang": "de", "target_lang": "en"})
    del config["data"]["language_tags"], config["tokenizer"], config["model"], config["decoding"]
    config["training"] |= {"init_from": str(both), "max_steps": 4}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    code, _, err = mtrain("fit", file, *ON_CPU)
    assert code == 0, err
    tuned = tmp_path / "run"
    assert yaml.safe_load((tuned / "model/config.yaml").read_text())["language_tags"] == "target"
    assert mtrain("translate", tuned, ENGLISH[0], "--to", "de", *ON_CPU)[0] == 0
    code, _, err = mtrain(
        "fit", file, "--run-dir", tmp_path / "o", "--set", "data.language_tags=both", *ON_CPU
    )
    assert code == 2 and "data.language_tags: both was given, but training.init_from" in one_line(err)


def test_a_model_is_fine_tuned_in_several_directions(mtrain, both, tmp_path, raw):
    """`init_from` and the data suffice; a new direction needs a tag that the vocabulary has."""
    config = merged(raw, str(tmp_path / "run"), data={"source_lang": "en", "target_lang": "de"})
    del config["data"]["language_tags"], config["tokenizer"], config["model"], config["decoding"]
    config["training"] = {"init_from": str(both), "max_steps": 1, "learning_rate": 1e-6}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    assert mtrain("plan", file, "--hardware", "cpu")[0] == 0
    code, _, err = mtrain("fit", file, *ON_CPU)
    assert code == 0, err
    with Translator.load(tmp_path / "run", "cpu") as translator:
        assert [one.text for one in translator.between("de", "en").translate(GERMAN)] == ENGLISH
        assert [one.text for one in translator.between("en", "de").translate(ENGLISH)] == GERMAN
    config["data"]["train"][1]["target_lang"] = "fr"
    file.write_text(yaml.safe_dump(config))
    code, _, err = mtrain("fit", file, "--run-dir", tmp_path / "new", *ON_CPU)
    message = "error: data.train.1: the vocabulary has no language tag <2fr>"
    assert code == 2 and err.splitlines()[-1].startswith(message)
    config["data"]["train"][1]["target_lang"], config["data"]["target_lang"] = "en", "fr"
    file.write_text(yaml.safe_dump(config))
    code, _, err = mtrain("fit", file, "--run-dir", tmp_path / "new", *ON_CPU)  # no file need be read
    assert code == 2 and "error: data: the vocabulary has no language tag <2fr>" in err


@pytest.mark.usefixtures("few_trials")
def test_a_model_of_unknown_languages_is_compared(mtrain, run_dir, corpus, tmp_path, monkeypatch):
    """As an imported one may be."""
    unknown = tmp_path / "unknown"
    shutil.copytree(run_dir / "model", unknown)
    config = yaml.safe_load((unknown / "config.yaml").read_text())
    config |= {"source_lang": "und", "target_lang": "und"}
    (unknown / "config.yaml").write_text(yaml.safe_dump(config))
    write_manifest(unknown)
    files = [
        "--source",
        corpus / "train.en",
        "--reference",
        corpus / "train.de",
        "--metrics",
        "chrf",
        *ON_CPU,
    ]
    assert mtrain("evaluate", unknown, "--compare", run_dir, *files)[0] == 0
    assert mtrain("evaluate", run_dir, "--compare", unknown, *files)[0] == 0
    if find_spec("MeCab") is None:  # an error before the translation
        monkeypatch.setattr(evaluate, "translate_set", lambda *_: pytest.fail("translated"))
        code, _, err = mtrain("evaluate", unknown, "--to", "ja", *files, "--metrics", "bleu")
        assert code == 2 and "the BLEU tokenizer ja-mecab is not installed" in one_line(err)


def test_validation_keeps_spaces_of_sources_without_tags(make_config, tmp_path):
    for language, text in (("en", "\u3000A cat."), ("de", "Eine Katze.")):
        (tmp_path / f"val.{language}").write_text(f"{text}\n")
    files = {"source": str(tmp_path / "val.en"), "target": str(tmp_path / "val.de")}
    trainer = make_trainer(make_config(data={"validation": files}), device="cpu")
    assert trainer.selection.validator.sources == ["\u3000A cat."]


@pytest.mark.skipif(find_spec("MeCab") is not None, reason="MeCab is installed")
def test_a_tokenizer_of_any_target_language_is_required_at_startup(mtrain, raw, tmp_path):
    japanese = {"toy": "train", "target_lang": "ja"}
    config = merged(raw, str(tmp_path / "run"), data={"train": [*raw["data"]["train"], japanese]})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    code, _, err = mtrain("fit", tmp_path / "config.yaml", *ON_CPU)
    assert code == 2 and "the BLEU tokenizer ja-mecab is not installed" in one_line(err)
    assert not (tmp_path / "run").exists()


def test_the_language_of_existing_translations_is_given(mtrain, corpus):
    files = ["--hypotheses", corpus / "train.de", "--reference", corpus / "train.de", "--metrics", "bleu"]
    assert "tok:13a" in mtrain("evaluate", *files)[1]
    assert "tok:zh" in mtrain("evaluate", *files, "--to", "zh")[1]
    code, _, err = mtrain("evaluate", *files, "--from", "de")
    assert code == 2 and "--from has no effect with --hypotheses" in one_line(err)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"language_tags": "none"}, "train.1 has the target language en, but target_lang is de; set"),
        (
            {"target_lang": "fr", "train": {"toy": "train", "target_lang": "de"}},
            "data has the direction en-fr, but no",
        ),
        (
            {"test": {"x": {"toy": "test", "target_lang": "fr"}}},
            "test.x has the direction en-fr, but no corpus in train",
        ),
        ({"source_lang": "e n", "language_tags": "both"}, "data: the language code 'e n' cannot be a tag"),
    ],
)
def test_languages_that_do_not_fit(mtrain, raw, tmp_path, keys, message):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(merged(raw, str(tmp_path / "run"), data=keys)))
    code, _, err = mtrain("check", file)
    assert code == 2 and message in one_line(err)
