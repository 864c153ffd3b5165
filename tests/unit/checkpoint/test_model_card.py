"""The file of the model card: who writes it, and that an edited card is never overwritten."""

import json
import logging
import os
import re
import shlex
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from mtrain.checkpoint.model_card import stated_license, write_card
from mtrain.checkpoint.model_folder import load_model
from mtrain.checkpoint.model_info import read_info, write_info
from mtrain.decoding.translate import Translator
from mtrain.errors import ModelError
from mtrain.interop.import_model import import_model
from mtrain.runs.results import score_test_sets
from mtrain.storage.generated import is_unedited
from tests.support.marian import make
from tests.support.models import card_of
from tests.support.training import fit_on_cpu, with_bleu

MINE = b"\xef\xbb\xbf---\r\nlicense: cc-by-4.0\r\nlibrary_name: mtrain\r\n---\r\n# My model\r\n"


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """The folder of a model that was imported from Marian."""
    folder = tmp_path_factory.mktemp("marian")
    make(folder / "opus", {"num_beams": 2}, seed=31)
    import_model(str(folder / "opus"), folder / "imported", ["target_lang=fr"])
    return folder / "imported"


def test_a_generated_card_is_replaced_and_an_edited_one_is_kept(make_config, scripted_scores, caplog):
    caplog.set_level(logging.INFO, logger="mtrain")
    scripted_scores(*map(with_bleu, (10, 40, 50)))
    run = fit_on_cpu(make_config(training={"max_steps": 4}))
    card = run / "model/README.md"
    assert "| BLEU | 10.00 |" in card.read_text()
    fit_on_cpu(make_config(training={"max_steps": 8}))
    assert "| BLEU | 40.00 |" in card.read_text() and "was edited" not in caplog.text
    card.write_bytes(MINE)
    fit_on_cpu(make_config(training={"max_steps": 12}))
    assert card.read_bytes() == MINE and "was edited and is kept; `mtrain info" in caplog.text
    info = read_info(run / "model")
    assert info.training.steps == 12 and info.scores[1].value == 50


def test_training_goes_on_if_the_card_cannot_be_generated(make_config, monkeypatch, caplog):
    monkeypatch.setattr(huggingface_hub, "ModelCardData", None)
    run = fit_on_cpu(make_config(training={"max_steps": 4}))
    assert "the model card could not be generated" in caplog.text
    assert not (run / "model/README.md").exists() and load_model(run).config.source_lang == "en"


def test_test_scores_do_not_change_an_edited_card_or_another_model(scored_run, tmp_path):
    run = Path(shutil.copytree(scored_run, tmp_path / "run"))
    info = read_info(run / "model")
    write_info(run / "model", info.model_copy(update={"scores": []}))
    (run / "model/README.md").write_bytes(MINE)
    with Translator.load(run, "cpu") as translator:
        list(score_test_sets(run, translator))  # recorded ones
        assert [score.set for score in read_info(run / "model").scores] == ["seen", "seen"]
        assert (run / "model/README.md").read_bytes() == MINE
        write_info(run / "model", info.model_copy(update={"scores": []}))
        (run / "model/manifest.json").write_text("{}")  # as if another model had replaced it
        list(score_test_sets(run, translator))
        assert read_info(run / "model").scores == []


@pytest.mark.parametrize(
    "place",
    [
        lambda card: card.write_bytes(b"---\nlicense: [\n---\n\xff\xfe"),
        pytest.param(lambda card: card.symlink_to("/etc/hostname"), marks=pytest.mark.slow),
        os.mkfifo,
        pytest.param(lambda card: None, marks=pytest.mark.slow),
    ],
)
def test_commands_work_whatever_the_card_is(mtrain, model_copy, tmp_path, place):
    card = model_copy / "README.md"
    card.unlink()
    place(card)
    before = os.lstat(card) if os.path.lexists(card) else None
    cpu = ("--device", "cpu")
    assert mtrain("translate", model_copy, "It rains.", *cpu)[:2] == (0, "Es regnet.\n")
    assert mtrain("average", model_copy, model_copy, "-o", tmp_path / "mean")[0] == 0
    assert mtrain("export", model_copy, tmp_path / "served", "--format", "ctranslate2")[0] == 0
    code, out, _ = mtrain("info", model_copy)
    assert code == 0 and "en to de" in out
    for folder in (tmp_path / "mean", tmp_path / "served"):
        assert "README.md" not in json.loads((folder / "manifest.json").read_text())
        assert (folder / "README.md").read_text(encoding="utf-8") and not (folder / "README.md").is_symlink()
    if before is not None:
        after = os.lstat(card)
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_card_without_its_generated_text_is_not_written_over(model_copy):
    (model_copy / "README.md").write_text("")
    write_card(model_copy)
    assert (model_copy / "README.md").read_text() == ""


def code_in(card: Path) -> str:
    """The Python code in a card."""
    [code] = re.findall(r"```python\n(.*?)```", card.read_text(encoding="utf-8"), re.DOTALL)
    return code.replace("Hello.", "It rains.")


SLOW = [pytest.param(format, marks=pytest.mark.slow) for format in ("marian", "pegasus")]


@pytest.mark.parametrize("format", [*SLOW, "ctranslate2", None])
def test_the_code_in_the_card_translates(mtrain, format, run_dir, imported, tmp_path, monkeypatch, capsys):
    """In the folder of the model, whatever its name is."""
    model, place = imported if format == "marian" else run_dir, tmp_path / 'it\'s "mine"'
    wanted = mtrain("translate", model, "It rains.", "--device", "cpu")[1].strip()
    if format is None:
        shutil.copytree(run_dir / "model", place)
    else:
        assert mtrain("export", model, tmp_path / "written", "--format", format)[0] == 0
        (tmp_path / "written").rename(place)
    monkeypatch.chdir(place)
    exec(code_in(place / "README.md"), {})
    assert wanted in capsys.readouterr().out
    card = (place / "README.md").read_text()
    assert ("pip install" in card) == (format is not None) and "in the folder of the model" in card


def test_the_command_in_the_card_translates(mtrain, model_copy, monkeypatch):
    write_card(model_copy)
    [command] = re.findall(r"```bash\n(.*?)\n```", (model_copy / "README.md").read_text())
    monkeypatch.chdir(model_copy)
    arguments = shlex.split(command.replace("Hello.", "It rains."))
    assert arguments[0] == "mtrain" and mtrain(*arguments[1:])[:2] == (0, "Es regnet.\n")


def test_the_code_names_both_vocabularies_and_a_tag(mtrain, run_dir, tmp_path):
    """The card of an exported model without a joint vocabulary, or with language tags."""
    assert mtrain("export", run_dir, tmp_path / "out", "--format", "ctranslate2")[0] == 0
    joint, info = (tmp_path / "out/joint.model").rename(tmp_path / "joint"), read_info(tmp_path / "out")
    for name in ("source.model", "target.model"):
        shutil.copyfile(joint, tmp_path / "out" / name)
    config = info.export.config.model_copy(update={"language_tags": "target"})
    export = info.export.model_copy(update={"config": config})
    write_info(tmp_path / "out", info.model_copy(update={"export": export}))
    write_card(tmp_path / "out")
    code = code_in(tmp_path / "out/README.md")
    assert '(model_file="source.model")' in code and '(model_file="target.model")' in code
    assert 'source.encode("<2de> It rains.", out_type=str)' in code


def test_an_exported_model_has_a_card_of_its_own(mtrain, scored_run, tmp_path):
    export = ("export", scored_run, "--format", "ctranslate2")
    assert mtrain(*export[:2], tmp_path / "plain", *export[2:])[0] == 0
    assert mtrain(*export[:2], tmp_path / "int8", *export[2:], "--quantization", "int8")[0] == 0
    changed = (*export[2:], "--set", "decoding.beam_size=2")
    code, _, err = mtrain(*export[:2], tmp_path / "changed", *changed)
    assert code == 0 and "warning: models for ctranslate2 have no setting for decoding.beam_size" in err
    for name in ("plain", "int8", "changed"):
        card = card_of(tmp_path / name)
        assert card.data.library_name == "ctranslate2" and is_unedited(tmp_path / name / "README.md")
        assert (card.data.eval_results is not None) == (name == "plain")  # others may translate differently
        assert "The scores were measured before the model was exported." in card.text
        kind = " (int8)" if name == "int8" else ""
        assert f"Then it was exported to CTranslate2{kind}." in card.text


@pytest.mark.parametrize(("format", "kept"), [("ctranslate2", True), ("argos", False), ("bergamot", False)])
def test_formats_with_another_search_have_no_scores(mtrain, scored_run, tmp_path, format, kept):
    assert mtrain("export", scored_run, tmp_path / "out", "--format", "ctranslate2")[0] == 0
    info = read_info(tmp_path / "out")
    export = info.export.model_copy(update={"format": format})
    write_info(tmp_path / "out", info.model_copy(update={"export": export}))
    write_card(tmp_path / "out")
    assert (card_of(tmp_path / "out").data.eval_results is not None) == kept


def test_an_edited_card_is_exported_with_a_section_on_the_format(mtrain, model_copy, tmp_path):
    (model_copy / "README.md").write_bytes(MINE)
    code, _, err = mtrain("export", model_copy, tmp_path / "served", "--format", "ctranslate2")
    assert code == 0 and "was edited; the exported model has a copy" in err
    exported = (tmp_path / "served/README.md").read_bytes()
    start = MINE.replace(b"library_name: mtrain", b"library_name: ctranslate2").rstrip()
    assert exported.startswith(start + b"\n\n## Use with ctranslate2\n\n```python\nimport ctranslate2\n")
    assert (model_copy / "README.md").read_bytes() == MINE and not is_unedited(tmp_path / "served/README.md")
    assert ModelCard(exported.decode("utf-8-sig")).data.to_dict()["license"] == "cc-by-4.0"


def test_imported_and_averaged_models_say_what_they_were_made_from(mtrain, imported, tmp_path):
    assert mtrain("average", imported, imported, "-o", tmp_path / "mean")[0] == 0
    assert "converted from `opus` by [mtrain]" in (imported / "README.md").read_text()
    card = card_of(tmp_path / "mean")
    assert "made by averaging the weights of `imported`, `imported`" in card.text
    assert "The licenses of `opus` also apply." in card.text and card.data.base_model is None


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ("\ufeff---\r\nlicense: cc-by-4.0\r\n---\r\ntext", "cc-by-4.0"),
        ("---\nlicense: no\n---", "no"),
        ("---\nlicense:\n---\n", None),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\n- license\n---\n", None),
        ("license: mit\n", None),
        ("# text\n\n---\nlicense: mit\n---\n", None),
        ("", None),
    ],
)
def test_the_license_is_read_from_the_metadata(card, license):
    assert stated_license(card) == license


@pytest.mark.parametrize("block", ["license: [", "a: 1\na: 2", "\x01", "[" * 1500])
def test_metadata_that_is_not_valid_is_an_error(block):
    with pytest.raises(ModelError, match="the metadata block is not valid YAML"):
        stated_license(f"---\n{block}\n---\n")
