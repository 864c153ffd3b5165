"""`mtrain web`: the folder that it writes. tests/end_to_end/test_cli_web.py looks at its page."""

import hashlib
import json
import re
import shutil
import tarfile
from io import BytesIO
from itertools import chain
from pathlib import Path

import pytest

from mtrain.checkpoint.model_folder import load_model
from mtrain.interop.bergamot.engine import PACKAGE, VERSION
from mtrain.interop.bergamot.write import name_for_firefox
from mtrain.web import engine
from mtrain.web.site import write_site
from tests.support.cli import one_line
from tests.support.random_models import random_model

SHAPE = {"d_model": 64, "ffn_dim": 64, "norm": "post", "positions": "sinusoidal_marian"}
FILES = ["translator-worker.js", "bergamot-translator-worker.js", "bergamot-translator-worker.wasm"]


@pytest.fixture(scope="module")
def model(run_dir, tmp_path_factory):
    """A model folder that the engine supports, with a vocabulary for each language."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "tokenizer").mkdir()
    for side in ("source", "target"):
        shutil.copy(run_dir / "tokenizer" / "joint.model", folder / "tokenizer" / f"{side}.model")
    return random_model(folder / "small", folder / "tokenizer", **SHAPE, tie_embeddings="none")


def site_of(folder: Path):
    """What the page in a folder knows about its models."""
    page = (folder / "index.html").read_text()
    return json.loads(re.search(r"^const site = (.*);$", page, re.MULTILINE)[1])


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder in which an npm package is installed that looks like the engine."""
    folder = tmp_path_factory.mktemp("installed")
    for name in FILES:
        (folder / "node_modules" / PACKAGE / "worker").mkdir(parents=True, exist_ok=True)
        (folder / "node_modules" / PACKAGE / "worker" / name).write_text(name)
    return folder


@pytest.fixture(scope="module")
def page(model, package, tmp_path_factory):
    """The folder of a page with the model."""
    folder = tmp_path_factory.mktemp("pages") / "page"
    write_site([model], folder, package)
    return folder


@pytest.fixture
def exported(page, tmp_path):
    """The model as it was exported for the page, but said to be in fp32."""
    folder = shutil.copytree(page / "models" / "en-fr", tmp_path / "exported")
    info = json.loads((folder / "info.json").read_text())
    info["export"].pop("quantization")
    (folder / "info.json").write_text(json.dumps(info))
    return folder


def test_the_folder_has_the_page_the_engine_and_the_model(page):
    assert {file.name for file in (page / "engine").iterdir()} == {*FILES, "LICENSE.txt"}
    assert all((page / "engine" / name).read_text() == name for name in FILES)
    license_text = (page / "engine" / "LICENSE.txt").read_text()
    assert "Mozilla Public License Version 2.0" in license_text
    assert "https://github.com/browsermt/bergamot-translator" in license_text and VERSION in license_text
    site = site_of(page)
    languages = [("en", "English", ["fr"]), ("fr", "French", [])]
    assert [tuple(each.values()) for each in site["languages"]] == languages
    [found] = site["models"]
    vocabularies = ["srcvocab.spm", "trgvocab.spm"]
    assert (found["vocabularies"], found["arithmetic"]) == (vocabularies, "int8shiftAll")
    model = (page / found["folder"] / "model.bin").read_bytes()
    assert hashlib.sha256(model).hexdigest().startswith(found["version"])  # in the addresses of the files
    assert {file.name for file in (page / found["folder"]).iterdir()} >= {"model.bin", *vocabularies}


def test_an_exported_model_is_copied(mtrain, exported, package, tmp_path):
    code, out, err = mtrain("web", exported, "-o", tmp_path / "page", "--engine", package)
    assert (code, out) == (0, f"{tmp_path / 'page'}\n")
    assert f"python -m http.server --bind 127.0.0.1 --directory {tmp_path / 'page'}" in err
    [found] = site_of(tmp_path / "page")["models"]
    assert found["arithmetic"] == "float32"
    for name in ("model.bin", "srcvocab.spm", "trgvocab.spm"):
        same = tmp_path / "page" / found["folder"] / name
        assert same.read_bytes() == (exported / name).read_bytes()


def test_several_models_make_several_directions(exported, package, tmp_path):
    back = shutil.copytree(exported, tmp_path / "back")
    info = json.loads((back / "info.json").read_text())
    info["export"]["config"] |= {"source_lang": "fr", "target_lang": "en"}
    (back / "info.json").write_text(json.dumps(info))
    write_site([exported, back], tmp_path / "page", package)
    site = site_of(tmp_path / "page")
    assert [tuple(each.values()) for each in site["languages"]] == [
        ("en", "English", ["fr"]),
        ("fr", "French", ["en"]),
    ]
    assert [each["folder"] for each in site["models"]] == ["models/en-fr", "models/fr-en"]


@pytest.mark.parametrize(
    ("models", "options", "code", "message"),
    [
        (["{run}"], [], 4, "bergamot does not support this model: model.norm must be post"),
        (["{tagged}"], [], 4, "; use `mtrain serve`"),
        (["{model}", "{model}"], [], 2, "MODEL: several models have the same direction; give one for each"),
        (
            ["{model}"],
            ["--engine", "."],
            2,
            "--engine .: does not contain @browsermt/bergamot-translator; run",
        ),
        (["{model}"], ["--engine", "incomplete"], 2, "--engine incomplete: does not contain @browsermt/"),
        (["missing"], [], 4, "missing: no such model or run folder"),
        (["{other}"], [], 4, "is exported in another format; give the model that it was exported from"),
        (["{firefox}"], [], 4, "is exported for Firefox; give the model that it was exported from"),
        (["{damaged}"], [], 4, "model.bin: damaged (its contents do not match manifest.json)"),
        (["{und}"], [], 4, "the languages of the model are en and und; use codes such as de"),
        (["{path}"], [], 4, "the languages of the model are en and ../../fr; use codes such as de"),
        (["{model}"], ["-o", "{model}"], 2, "already exists and is not overwritten; give another folder"),
    ],
)
def test_mistakes_are_one_line(
    mtrain, run_dir, model, exported, package, tmp_path, monkeypatch, models, options, code, message
):
    monkeypatch.chdir(tmp_path)
    folders = {
        "run": run_dir,
        "model": model,
        "other": tmp_path / "other",
        "firefox": tmp_path / "firefox",
        "damaged": exported,
        "und": tmp_path / "und",
        "path": tmp_path / "path",
        "tagged": tmp_path / "tagged",
    }
    if models == ["{tagged}"]:
        config = shutil.copytree(model, folders["tagged"]) / "config.yaml"
        config.write_text(config.read_text().replace("language_tags: none", "language_tags: target"))
    if models == ["{other}"]:
        info = shutil.copytree(exported, folders["other"]) / "info.json"
        info.write_text(info.read_text().replace('"bergamot"', '"ctranslate2"'))
    if models == ["{firefox}"]:
        name_for_firefox(load_model(model), shutil.copytree(exported, folders["firefox"]))
    if "incomplete" in options:
        shutil.copytree(package, "incomplete")
        next(Path("incomplete").rglob("*.wasm")).unlink()
    if models == ["{damaged}"]:
        with (exported / "model.bin").open("r+b") as file:
            file.write(b"\2")
    for language, name in (("und", "und"), ("../../fr", "path")):
        if models == [f"{{{name}}}"]:
            config = shutil.copytree(model, folders[name]) / "config.yaml"
            config.write_text(config.read_text().replace("target_lang: fr", f"target_lang: {language}"))
    given = {"-o": "page", "--engine": package, **dict(zip(options[::2], options[1::2], strict=True))}
    words = [str(word).format(**folders) for word in chain(models, *given.items())]
    found, out, err = mtrain("web", *words)
    assert (found, out) == (code, "") and message in one_line(err)
    assert not (tmp_path / "page").exists()


def test_the_engine_of_the_registry_is_verified(mtrain, model, tmp_path, monkeypatch):
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as written:
        for name in FILES:
            member = tarfile.TarInfo(f"package/worker/{name}")
            member.size = len(name)
            written.addfile(member, BytesIO(name.encode()))
    (tmp_path / "archive.tgz").write_bytes(archive.getvalue())
    monkeypatch.setattr(engine, "URL", (tmp_path / "archive.tgz").as_uri())
    code, _, err = mtrain("web", model, "-o", tmp_path / "page")
    assert code == 6 and "is not the file that was expected (its SHA-512 differs)" in one_line(err)
    monkeypatch.setattr(engine, "URL", (tmp_path / "missing.tgz").as_uri())
    code, _, err = mtrain("web", model, "-o", tmp_path / "page")
    assert code == 6 and "cannot be downloaded" in one_line(err) and "give --engine FOLDER" in err


@pytest.mark.slow
@pytest.mark.network
def test_the_registry_has_the_expected_engine(model, tmp_path):
    engine.copy_engine(tmp_path / "engine", None)
    assert {file.name for file in (tmp_path / "engine").iterdir()} == {*FILES, "LICENSE.txt"}
