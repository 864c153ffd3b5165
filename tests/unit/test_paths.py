"""`~` is a home folder in every path that users give, also where no shell has expanded it."""

import pwd
import shutil
from pathlib import Path

import pytest
import yaml

from mtrain.config.load import load_config
from mtrain.data.reading.files import files_of
from mtrain.decoding.translate import Translator
from mtrain.errors import UsageError
from mtrain.paths import expand_home, path_of
from tests.support.cli import one_line


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home folder; the working directory is another one, in which nothing may be created."""
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path / "work")
    return folder


def test_a_tilde_at_the_beginning_is_a_home_folder(home, monkeypatch):
    assert [expand_home(path) for path in ("~", "~/a b/~c", "~root")] == [
        str(home),
        f"{home}/a b/~c",
        pwd.getpwnam("root").pw_dir,
    ]
    for path in ("", "a", "a/~", "./~a", "-", "/~", "wmt/wmt14", "a\0b"):
        assert expand_home(path) == path
    for path in ("~nobody9", "~nobody9/a"):
        with pytest.raises(UsageError, match=f"^{path}: no user has the name nobody9; .* write ./{path}$"):
            path_of(path)
    Path("~$a.docx").touch()
    assert path_of("~$a.docx") == Path("~$a.docx")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no HOME, and no entry for the user
    with pytest.raises(UsageError, match="~/a: the home folder is unknown"):
        path_of("~/a")


def test_every_path_of_a_config_may_begin_with_a_tilde(home):
    for name in ("1.en", "2.en", "1.de", "2.de"):
        (home / name).write_text("a\n")
    raw = {
        "run_dir": "~/run",
        "data": {
            "source_lang": "en",
            "target_lang": "de",
            "folder": "~/data",
            "train": [
                {"source": "~/*.en", "target": "~/*.de"},
                *({"tsv": "~/a.tsv"}, {"tsv": "./~a.tsv"}),
                *(
                    {kind: "~/a", "source_field": "s", "target_field": "t"}
                    for kind in ("jsonl", "parquet", "hub")
                ),
            ],
            "validation": {"source": "~/1.en", "target": "~/1.de"},
            "test": {"a": {"source": "~/1.en", "target": "~/1.de", "references": ["~/2.de"]}},
        },
        "tokenizer": {"path": "~/model"},
        "training": {"init_from": "~/model", "max_steps": 1},
    }
    (home / "base.yaml").write_text(yaml.safe_dump(raw))
    Path("c.yaml").write_text("extends: ~/base.yaml\n")
    config = load_config("c.yaml")
    assert "~" not in config.model_dump_json().replace("./~a.tsv", "")
    assert config.run_dir == f"{home}/run" and config.data.folder == f"{home}/data"
    assert {*files_of(config.data.train[0])} == {home / name for name in ("1.en", "1.de", "2.en", "2.de")}
    assert config.data.train[2].tsv == "./~a.tsv"
    assert load_config("~/base.yaml", ["run_dir=~/other"]).run_dir == f"{home}/other"
    Path("c.yaml").write_text("extends: ~nobody9/base.yaml\n")
    with pytest.raises(
        UsageError, match=r"c.yaml:1: extends: ~nobody9/base.yaml: no user has the name nobody9"
    ):
        load_config("c.yaml")
    with pytest.raises(
        UsageError, match=r"--set: run_dir: no user has the name nobody9; .*; got \"~nobody9\""
    ):
        load_config("~/base.yaml", ["run_dir=~nobody9"])


def test_every_path_of_a_command_may_begin_with_a_tilde(mtrain, home, run_dir, corpus):
    shutil.copytree(run_dir / "model", home / "model")
    shutil.copy(corpus / "train.en", home)
    shutil.copy(corpus / "train.de", home)
    cpu = ("--device", "cpu")
    wanted = (corpus / "train.de").read_text()
    for number, option in enumerate(("--output=~/{}", "-o~/{}", "-o=~/{}")):
        option = option.format(number)
        assert (
            mtrain("translate", "~/model", "--input=~/train.en", option, "--ensemble=~/model", *cpu)[0] == 0
        )
        assert (home / str(number)).read_text() == wanted
    code, _, err = mtrain("init", "~/train.en", "~/train.de", "--yes", "--output=~/c.yaml")
    assert code == 0, err
    assert f"source: {home}/train.en" in (home / "c.yaml").read_text()
    sides = ("--reference=~/train.de", "--hypotheses=~/1", "--compare=~/2")
    assert mtrain("evaluate", *sides, "--metrics", "bleu")[0] == 0
    assert mtrain("average", "~/model", "~/model", "--output=~/mean")[0] == 0
    code, _, err = mtrain("import", "~/model", "~/imported")
    assert code == 4 and f"{home}/model/config.json: missing" in one_line(err)
    code, _, err = mtrain(
        "fit", "~/c.yaml", "--run-dir=~/run", "--resume=~/none", "--set", "training.max_steps=1"
    )
    assert code == 4 and f"no such checkpoint in {home}/run" in one_line(err)
    assert not [*Path().iterdir()]
    code, _, err = mtrain("info", "~nobody9/x")
    assert code == 2 and "~nobody9/x: no user has the name nobody9" in one_line(err)


def test_a_file_whose_name_begins_with_a_tilde_can_be_named(mtrain, home, run_dir, corpus):
    shutil.copytree(run_dir / "model", "~")
    shutil.copy(corpus / "train.en", "~in")
    assert mtrain("translate", "./~", "-i", "./~in", "-o", "./~out", "--device", "cpu")[0] == 0
    assert Path("~out").read_text() == (corpus / "train.de").read_text() and not [*home.iterdir()]
    with Translator.load("./~", "cpu") as translator:
        assert translator.translate(["It rains."])[0].text == "Es regnet."
    shutil.move("~", home / "model")
    with Translator.load("~/model", "cpu", ensemble=["~/model"]) as translator:
        assert translator.translate(["It rains."])[0].text == "Es regnet."
