"""`data.folder`: several runs share encoded pairs, read-only and without the raw files too."""

import errno
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.config.yaml_io import to_yaml
from mtrain.data.prepare import open_data
from mtrain.data.preparing.encode_folder import locked_data_folder
from mtrain.data.preparing.inputs import require_same_inputs
from mtrain.data.store.folder import DataFolder, Inputs, Summary, read_summary
from mtrain.errors import DataError, ModelError, StorageError, UsageError
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.training.setup.prepare_run import prepare_only
from mtrain.training.setup.resolve import Resolved, resolve_config
from mtrain.training.setup.tokenizer import tokenize
from tests.support.faults.file_operations import Operation, on_file_operation
from tests.support.training import PAIRS, fit_on_cpu, losses, same_weights

TSV = "".join(f"{source}\t{target}\n" for source, target in PAIRS)
Make = Callable[..., Config]


@pytest.fixture
def make(make_config: Make, tmp_path: Path) -> Make:
    """Make a config with `data.folder: shared`, and a corpus of its own, whose last pair is held out."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/train.tsv").write_text(TSV, encoding="utf-8")

    def make(run: str = "run", seed: int = 1, data: dict | None = None, **sections: dict) -> Config:
        train = {"tsv": str(tmp_path / "raw/train.tsv")}
        given = {"folder": str(tmp_path / "shared"), "train": train, "validation": {"holdout": 2}, "test": {}}
        config = make_config(run, data={**given, **(data or {})}, **sections)
        return config.model_copy(update={"seed": seed})

    return make


def contents_of(folder: Path) -> dict[str, bytes]:
    """The contents of all files in a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def flipped(content: bytes, at: int) -> bytes:
    """Contents with one changed bit."""
    damaged = bytearray(content)
    damaged[at] ^= 1
    return bytes(damaged)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder of a read-only file system."""

    def refuse(operation: Operation) -> None:
        if operation.path.is_relative_to(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(operation.path))

    with on_file_operation(refuse):
        yield


def test_runs_share_a_copy_of_the_folder_without_the_raw_files(make, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mtrain")
    assert prepare_only(make("first")) == tmp_path / "shared"
    assert not (tmp_path / "first/data").exists()
    own = fit_on_cpu(make("own", data={"folder": None}))
    shutil.move(tmp_path / "shared", tmp_path / "copy")
    shutil.rmtree(tmp_path / "raw")
    shutil.rmtree(tmp_path / "first")
    copy = {"folder": str(tmp_path / "copy"), "test": {"t": {"toy": "test"}, "gone": {"tsv": "gone.tsv"}}}
    before = contents_of(tmp_path / "copy")
    caplog.clear()
    with read_only(tmp_path / "copy"):
        same, other = fit_on_cpu(make("same", data=copy)), fit_on_cpu(make("other", 2, data=copy))
        assert losses(same) == losses(own) and same_weights(same, own)
        assert losses(same) != losses(other)
        fit_on_cpu(make("same", data=copy, training={"max_steps": 10}))
    assert losses(same)[-1][0] == 10
    assert contents_of(tmp_path / "copy") == before
    assert caplog.text.count(f"using the pairs in {tmp_path / 'copy'} without the raw files") == 3
    assert "gone.tsv: no such file; `mtrain evaluate` needs it for data.test.gone" in caplog.text
    assert "learning" not in caplog.text and "encoding" not in caplog.text and "checked" not in caplog.text
    for run in (same, other):
        learned = (tmp_path / "copy/tokenizer/joint.model").read_bytes()
        assert (run / "tokenizer/joint.model").read_bytes() == learned


def test_a_finished_run_does_not_fail_because_a_test_set_is_missing(mtrain, make, tmp_path):
    prepare_only(make("first"))
    config = make("own", data={"test": {"gone": {"tsv": "gone.tsv"}}})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    shutil.rmtree(tmp_path / "raw")
    code, _, err = mtrain("fit", tmp_path / "config.yaml", "--device", "cpu")
    assert code == 0 and "the test sets were not scored: gone.tsv: no such file" in err


def test_a_copied_run_folder_needs_no_raw_files(make, tmp_path):
    run = fit_on_cpu(make(data={"folder": None}))
    shutil.rmtree(tmp_path / "raw")
    fit_on_cpu(make(data={"folder": None}, training={"max_steps": 10}))
    assert losses(run)[-1][0] == 10
    (run / "data/shard-00000.safetensors").unlink()
    message = r"shard-00000\.safetensors: missing; to repair it, restore the corpus \(.*tsv: no such file"
    with pytest.raises(DataError, match=message):
        fit_on_cpu(make(data={"folder": None}, training={"max_steps": 12}))


def test_other_settings_without_the_raw_files_leave_the_folder_usable(make, tmp_path):
    prepare_only(make(data={"folder": None}))
    shutil.rmtree(tmp_path / "raw")
    before = contents_of(tmp_path / "run/data")
    with pytest.raises(DataError, match=r"train\.tsv: no such file"):
        fit_on_cpu(make(data={"folder": None, "max_length": 32}))
    assert contents_of(tmp_path / "run/data") == before
    fit_on_cpu(make(data={"folder": None}))


def test_a_missing_validation_set_leaves_the_folder_usable(make, tmp_path):
    """Another tokenizer and other pairs are needed, but the validation set is gone."""
    validation = tmp_path / "valid.tsv"
    validation.write_text(TSV, encoding="utf-8")
    data = {"folder": None, "validation": {"tsv": str(validation)}, "check": False}
    prepare_only(make(data=data))
    before = contents_of(tmp_path / "run/data")
    shutil.move(tmp_path / "run/tokenizer", tmp_path / "tokenizer")
    validation.unlink()
    with pytest.raises(DataError, match=r"valid\.tsv: no such file"):
        prepare_only(make(data={**data, "bad_lines": "skip"}, tokenizer={"vocab_size": 331}))
    assert contents_of(tmp_path / "run/data") == before


def test_the_data_of_a_run_can_be_shared(make, tmp_path):
    first = fit_on_cpu(make(data={"folder": None}))
    before = contents_of(first / "data")
    fit_on_cpu(make("second", 2, data={"folder": str(first / "data"), "subword_sampling": 0.1}))
    assert contents_of(first / "data") == before


def test_the_shared_tokenizer_may_be_learned_with_other_settings(make, tmp_path, caplog):
    """Nobody could learn it again, as the warning for a run of its own advises."""
    prepare_only(make("first"))
    shared = {"augment": {"uppercase": 0.5}}
    for _ in range(2):
        prepare_only(make("second", data=shared))
    assert "has changed since the tokenizer was learned" not in caplog.text


def test_a_tokenizer_that_another_run_makes_meanwhile_is_used(make, monkeypatch):
    real = resolve_config

    def slow(config: Config) -> Resolved:
        found = real(config)
        prepare_only(make("other", tokenizer={"vocab_size": 331}))
        return found

    monkeypatch.setattr(
        "mtrain.training.setup.tokenizer.resolve_config", lambda config, *_, **__: slow(config)
    )
    raw = make().model_dump(mode="json", exclude_unset=True)
    config = validate(Config, {**raw, "model": {"preset": "auto"}, "tokenizer": {}}, "test")
    assert tokenize(config).source_vocab_size == 331


def test_a_run_may_move_to_a_data_folder(make, tmp_path):
    run = fit_on_cpu(make(data={"folder": None}))
    shutil.move(run / "data", tmp_path / "moved")
    fit_on_cpu(make(data={"folder": str(tmp_path / "moved")}, training={"max_steps": 10}))
    assert losses(run)[-1][0] == 10


def test_the_paths_of_the_corpora_may_differ(make, tmp_path):
    prepare_only(make("first"))
    before = contents_of(tmp_path / "shared")
    (tmp_path / "raw").rename(tmp_path / "moved")
    moved = {"tsv": str(tmp_path / "moved/train.tsv"), "weight": 2.0}
    prepare_only(make("second", data={"train": moved}))
    assert contents_of(tmp_path / "shared") == before
    shutil.rmtree(tmp_path / "moved")
    message = "train.tsv: no such file; to use .*shared without the raw files, give the path that it was "
    with pytest.raises(DataError, match=rf"moved/{message}prepared from, .*raw/train\.tsv$"):
        prepare_only(make("third", data={"train": moved}))
    with pytest.raises(DataError, match=r"moved/train\.tsv: no such file$"):  # it has another column as well
        prepare_only(make("third", data={"train": {**moved, "source_column": 1, "target_column": 0}}))
    with pytest.raises(DataError, match=r"typing_error\.tsv: no such file"):
        prepare_only(make("third", data={"train": {"tsv": "typing_error.tsv"}}))


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"data": {"max_length": 32}}, UsageError, "was prepared with data.max_length 64, not 32"),
        ({"data": {"bad_lines": "skip"}}, UsageError, "was prepared with data.bad_lines error, not skip"),
        ({"data": {"train": [{"toy": "train"}]}}, UsageError, "was prepared with another data.train"),
        ({"data": {"validation": {"holdout": 1}}}, UsageError, "was prepared with another data.validation"),
        ({"tokenizer": {"vocab_size": 331}}, UsageError, "learned with tokenizer.vocab_size 330, not 331"),
        ({}, DataError, r"was prepared from other contents of .*raw/train\.tsv"),
    ],
)
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "begun"])
def test_other_inputs_are_an_error_and_change_nothing(make, tmp_path, sections, error, message, complete):
    prepare_only(make("first"))
    if not complete:
        write_unfinished(tmp_path / "shared")
    if not sections:
        (tmp_path / "raw/train.tsv").write_text(TSV.replace("cat", "cow"), encoding="utf-8")
    before = contents_of(tmp_path / "shared")
    with pytest.raises(error, match=f"{message}; restore it, or give another data.folder"):
        prepare_only(make("second", **sections))
    assert contents_of(tmp_path / "shared") == before


def test_a_changed_test_set_of_sacrebleu_is_named():
    data = {"train": [{"tsv": "a.tsv"}], "validation": [{"sacrebleu": "wmt19", "langs": "en-de"}]}
    before, now = (
        Inputs({"data": {**data, "max_length": 9, "bad_lines": "error"}, "tokenizer": {}}, contents)
        for contents in (("a", "b"), ("a", "c"))
    )
    with pytest.raises(DataError, match="was prepared from other contents of wmt19; "):
        require_same_inputs(Path("data"), before, now)


def write_unfinished(folder: Path) -> None:
    """Replace the summary by one that an interrupted encoding leaves."""
    ended = ("complete", "kept", "dropped", "shards")
    DataFolder(folder, folder).write_summary(
        {key: value for key, value in read_summary(folder).items() if key not in ended}
    )


def test_an_encoding_begun_with_another_seed_is_completed_with_that_seed(make, tmp_path):
    prepare_only(make("first", 1))
    expected = contents_of(tmp_path / "shared")
    write_unfinished(tmp_path / "shared")
    (tmp_path / "shared/shard-00000.safetensors").unlink()
    prepare_only(make("second", 2))
    assert contents_of(tmp_path / "shared") == expected


def test_a_damaged_shard_of_a_shared_folder_is_encoded_again(make, tmp_path, caplog):
    prepare_only(make("first"))
    before, file = contents_of(tmp_path / "shared"), tmp_path / "shared/shard-00000.safetensors"
    for content in (before[file.name][:-1], flipped(before[file.name], -1), None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        message = rf"cannot write: Read-only file system \({file}: {'damaged' if content else 'missing'}"
        with read_only(tmp_path / "shared"), pytest.raises(StorageError, match=message):
            prepare_only(make("second", 2))
    prepare_only(make("second", 2))
    assert contents_of(tmp_path / "shared") == before
    assert "encoding this shard again" in caplog.text


@pytest.mark.parametrize("place", [0.01, 0.2, 0.5, 0.8, 0.97])
def test_a_damaged_summary_of_a_shared_folder_is_an_error_and_changes_nothing(make, tmp_path, place):
    prepare_only(make("first"))
    file = tmp_path / "shared/summary.json"
    file.write_bytes(flipped(file.read_bytes(), int(place * file.stat().st_size)))
    before = contents_of(tmp_path / "shared")
    for _ in ("with", "without the raw files"):
        message = rf"{file}: damaged \(.*\); restore it, or give another data\.folder"
        with pytest.raises(ModelError, match=message):
            prepare_only(make("second", 2))
        shutil.rmtree(tmp_path / "raw", ignore_errors=True)
    assert contents_of(tmp_path / "shared") == before


def test_another_rank_names_a_damaged_summary(make, tmp_path):
    config = make(data={"folder": None})
    prepare_only(config)
    file = tmp_path / "run/data/summary.json"
    file.write_bytes(file.read_bytes()[:-9])
    folder, tokenizer = (
        DataFolder.of_run(config.data, tmp_path / "run"),
        Tokenizer(tmp_path / "run/tokenizer"),
    )
    with pytest.raises(ModelError, match=rf"{file}: damaged"):
        open_data(config.data, tokenizer, folder, config.seed)


def test_a_summary_that_cannot_be_read_is_not_replaced(make, tmp_path, monkeypatch):
    prepare_only(make("first"))
    before, really_open = contents_of(tmp_path / "shared"), Path.open

    def fail(file: Path, *arguments: Any, **options: Any) -> Any:
        if file.name == "summary.json":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really_open(file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        with pytest.raises(StorageError, match=r"summary\.json: cannot read: Too many open files"):
            prepare_only(make("second", 2))
    assert contents_of(tmp_path / "shared") == before


def test_a_damaged_summary_is_named_if_the_raw_files_are_gone(make, tmp_path):
    prepare_only(make(data={"folder": None}))
    file = tmp_path / "run/data/summary.json"
    file.write_bytes(file.read_bytes()[:-9])
    shutil.rmtree(tmp_path / "raw")
    before = contents_of(tmp_path / "run/data")
    message = rf"{file}: damaged .*; to encode the corpus, restore its files \(.*tsv: no such file\)"
    with pytest.raises(DataError, match=message):
        prepare_only(make(data={"folder": None}))
    assert contents_of(tmp_path / "run/data") == before


@pytest.mark.parametrize("damage", ["flipped", "missing"])
@pytest.mark.parametrize("validation", [{"holdout": 2}, {"toy": "test"}])
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "begun"])
def test_damaged_validation_pairs_are_drawn_again_with_the_seed_of_the_folder(
    make, tmp_path, caplog, damage, validation, complete
):
    prepare_only(make("first", 1, data={"validation": validation}))
    before, file = contents_of(tmp_path / "shared"), tmp_path / "shared/validation.jsonl"
    shard = tmp_path / "shared/shard-00000.safetensors"
    written = shard.stat().st_mtime_ns
    if not complete:
        write_unfinished(tmp_path / "shared")
    file.unlink()
    if damage == "flipped":
        file.write_bytes(flipped(before[file.name], 9))
    prepare_only(make("second", 2, data={"validation": validation}))
    assert contents_of(tmp_path / "shared") == before and shard.stat().st_mtime_ns == written
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    [warning] = [text for text in warnings if "validation.jsonl" in text]
    assert re.fullmatch(rf"{file}: (damaged .*|missing); drawing the validation pairs again", warning)


def test_an_incomplete_folder_is_named_if_the_raw_files_are_gone(make, tmp_path):
    """For example, because it was copied before `mtrain prepare` had ended."""
    prepare_only(make("first"))
    write_unfinished(tmp_path / "shared")
    shutil.rmtree(tmp_path / "raw")
    message = r"shared: is not complete; to encode the corpus, restore its files \(.*tsv: no such file\)"
    for command in (prepare_only, fit_on_cpu):
        with pytest.raises(DataError, match=message):
            command(make("second"))


def test_damaged_validation_pairs_are_named_if_the_raw_files_are_gone(make, tmp_path):
    prepare_only(make("first"))
    file = tmp_path / "shared/validation.jsonl"
    file.write_bytes(b"")
    shutil.rmtree(tmp_path / "raw")
    before = contents_of(tmp_path / "shared")
    message = rf"{file}: damaged .*; to repair it, restore the corpus \(.*tsv: no such file\)"
    with pytest.raises(DataError, match=message):
        prepare_only(make("second"))
    assert contents_of(tmp_path / "shared") == before


def start_while_locked(config: Config, folder: Path, caplog, change: Callable[[], None]) -> list[Exception]:
    """Prepare in a thread, and change something while it waits for the lock of the folder. Returns the error
    that it raises, if any."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            prepare_only(config)
        except Exception as error:
            errors.append(error)

    with locked_data_folder(DataFolder(folder, folder, shared=True)):
        thread = threading.Thread(target=run)
        thread.start()
        end = time.monotonic() + 30
        while "waiting" not in caplog.text and time.monotonic() < end:
            time.sleep(0.01)
        change()
    thread.join()
    return errors


def test_a_shard_that_another_process_has_repaired_is_not_encoded_again(make, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mtrain")
    prepare_only(make("first"))
    before, file = contents_of(tmp_path / "shared"), tmp_path / "shared/shard-00000.safetensors"
    file.write_bytes(flipped(before[file.name], -1))
    caplog.clear()
    repaired = tmp_path / "repaired"
    repaired.write_bytes(before[file.name])
    written = repaired.stat().st_mtime_ns
    assert not start_while_locked(make("second"), file.parent, caplog, lambda: repaired.replace(file))
    assert contents_of(tmp_path / "shared") == before and file.stat().st_mtime_ns == written
    assert "encoding" not in caplog.text


def test_a_folder_that_another_process_prepares_from_other_inputs_is_not_repaired(make, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mtrain")
    prepare_only(make("first"))
    file = tmp_path / "shared/shard-00000.safetensors"
    file.write_bytes(flipped(file.read_bytes(), -1))
    before = file.read_bytes()

    def change() -> None:
        summary = read_summary(tmp_path / "shared")
        summary["inputs"]["contents"][0] = "other"
        DataFolder(tmp_path / "shared", tmp_path / "shared").write_summary(summary)

    [error] = start_while_locked(make("second"), tmp_path / "shared", caplog, change)
    assert "shared: has been prepared again from other inputs; run again" in str(error)
    assert isinstance(error, DataError) and file.read_bytes() == before


def test_a_dataset_of_the_hub_that_has_changed_does_not_repair_a_shard(make, tmp_path, monkeypatch):
    import datasets

    def publish(pairs: list[tuple[str, str]]) -> None:
        table = datasets.Dataset.from_list([{"en": source, "de": target} for source, target in pairs])
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)

    publish(PAIRS)
    train = {"train": {"hub": "some/dataset", "source_field": "en", "target_field": "de"}}
    prepare_only(make("first", data=train))
    before, file = contents_of(tmp_path / "shared"), tmp_path / "shared/shard-00000.safetensors"
    file.write_bytes(flipped(before[file.name], -1))
    damaged = file.read_bytes()
    publish(PAIRS[::-1])
    message = rf"{file}: damaged .*\(some/dataset has other contents than were encoded\)"
    with pytest.raises(DataError, match=message):
        prepare_only(make("second", data=train))
    assert file.read_bytes() == damaged
    publish(PAIRS)
    prepare_only(make("second", data=train))
    assert contents_of(tmp_path / "shared") == before


def test_what_a_folder_lacks_is_logged_before_its_lock_is_waited_for(make, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mtrain")
    prepare_only(make("first"))
    assert "is not prepared yet" not in caplog.text
    file = tmp_path / "shared/shard-00000.safetensors"
    file.unlink()
    caplog.clear()
    logged: list[bool] = []
    assert not start_while_locked(
        make("second"),
        file.parent,
        caplog,
        lambda: logged.append(f"data: {file}: missing" in caplog.messages),
    )
    assert logged == [True]


def test_the_folder_of_another_version_is_kept(make, tmp_path):
    prepare_only(make("first"))
    summary = json.loads((tmp_path / "shared/summary.json").read_text())
    DataFolder(tmp_path / "shared", tmp_path / "shared").write_summary({**summary, "layout": 2})
    before = contents_of(tmp_path / "shared")
    with pytest.raises(UsageError, match=r"another version of mtrain; give another data\.folder"):
        prepare_only(make("second"))
    assert contents_of(tmp_path / "shared") == before


@pytest.mark.parametrize(
    "name", ["validation.jsonl", "tokenizer/notes", "summary.json", "check.json", "shard-00000.safetensors"]
)
def test_a_folder_with_foreign_files_is_not_a_data_folder(make, tmp_path, name):
    file = tmp_path / "shared" / name
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(UsageError, match="shared: is not a data folder, and would be overwritten"):
        prepare_only(make())
    assert [path for path in (tmp_path / "shared").rglob("*") if path.is_file()] == [file]


def test_other_files_in_a_data_folder_are_kept(make, tmp_path):
    names = ("train.en", "manifest.json", "train.arrow", ".mine.tmp")
    (tmp_path / "shared").mkdir()
    for name in names:
        (tmp_path / "shared" / name).write_text("precious")
    prepare_only(make("first"))
    prepare_only(make("second"))
    assert {(tmp_path / "shared" / name).read_text() for name in names} == {"precious"}


def test_a_second_process_waits_until_the_folder_is_complete(make, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mtrain")
    with locked_data_folder(DataFolder(tmp_path / "shared", tmp_path, shared=True)):
        runs = [threading.Thread(target=prepare_only, args=[make(name)]) for name in ("a", "b")]
        for run in runs:
            run.start()
        end = time.monotonic() + 30
        while caplog.text.count("waiting") < 2 and time.monotonic() < end:
            time.sleep(0.01)
    for run in runs:
        run.join()
    owner = f"process {os.getpid()} on "
    assert caplog.text.count(f"{tmp_path / 'shared'}: in use by {owner}") == 2
    assert caplog.text.count("tokenizer: learning") == caplog.text.count("encoding the corpus into") == 1
    assert (tmp_path / "a/tokenizer/joint.model").exists() and (tmp_path / "b/tokenizer/joint.model").exists()


def test_a_process_reads_the_summary_of_a_complete_folder_once(make, tmp_path, monkeypatch):
    prepare_only(make("first"))
    found: list[Path] = []

    def read(folder: Path) -> Summary:
        found.append(folder)
        return read_summary(folder)

    monkeypatch.setattr("mtrain.data.store.folder.read_summary", read)
    prepare_only(make("second"))
    assert found == [tmp_path / "shared"]


def test_the_tokenizer_of_a_shared_folder_is_not_replaced(make, tmp_path):
    prepare_only(make("first"))
    before = contents_of(tmp_path / "shared")
    with pytest.raises(UsageError, match="shared/tokenizer: may be in use by other runs"):
        tokenize(make("second"), force=True)
    assert tokenize(make("second")).fingerprint == tokenize(make("first")).fingerprint
    own = tokenize(make("third", data={"folder": None}, tokenizer={"vocab_size": 331}))
    with pytest.raises(UsageError, match="was prepared with another tokenizer"):
        prepare_only(make("third", tokenizer={"vocab_size": 331}))
    assert own.source_vocab_size == 331
    assert contents_of(tmp_path / "shared") == before


def test_a_reused_tokenizer_is_part_of_the_folder(make, tmp_path):
    own = {"folder": None}
    tokenize(make("model", data=own))
    reused = {"tokenizer": {"path": str(tmp_path / "model")}}
    prepare_only(make("first", **reused))
    prepare_only(make("second", **reused))
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    prepare_only(make("third", tokenizer={"path": str(tmp_path / "other")}))  # the same tokenizer
    shutil.rmtree(tmp_path / "model")
    prepare_only(make("fourth", **reused))
    tokenize(make("different", data=own, tokenizer={"vocab_size": 340}))
    with pytest.raises(UsageError, match=f"is not the tokenizer of {tmp_path / 'different'}; give another"):
        prepare_only(make("fifth", tokenizer={"path": str(tmp_path / "different"), "vocab_size": 340}))
    with pytest.raises(ModelError, match="no such model or run folder"):
        prepare_only(make("sixth", tokenizer={"path": str(tmp_path / "nowhere")}, data=own))


def test_an_automatic_vocabulary_size_is_that_of_the_folder(make, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mtrain")
    automatic = {"tokenizer": {}, "model": {"preset": "auto"}, "training": {"max_steps": 4}}
    raw = [make(name).model_dump(mode="json") for name in ("first", "second")]
    configs = [Config.model_validate({**each, **automatic}) for each in raw]
    prepare_only(configs[0])
    (tmp_path / "raw/train.tsv").unlink()
    caplog.clear()
    prepare_only(configs[1])
    assert "learning" not in caplog.text
    sizes = [(tmp_path / name / "tokenizer/config.yaml").read_text() for name in ("first", "second")]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("raw_files", [True, False])
def test_a_run_folder_is_not_a_data_folder(make, tmp_path, raw_files):
    prepare_only(make("base", data={"folder": None}))
    before = contents_of(tmp_path / "base")
    if not raw_files:
        shutil.rmtree(tmp_path / "raw")
    base = tmp_path / "base"
    message = f"{base}: is a run folder, not a data folder; its data folder is {base / 'data'}"
    for command in (prepare_only, tokenize, fit_on_cpu):
        with pytest.raises(UsageError, match=message):
            command(make("other", data={"folder": str(base)}))
    assert contents_of(tmp_path / "base") == before
    shutil.rmtree(base / "data")
    (base / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="is a run folder, not a data folder; give another"):
        prepare_only(make("other", data={"folder": str(base)}))


def test_the_lock_of_another_program_does_not_make_a_data_folder(make, tmp_path):
    (tmp_path / "shared/tokenizer").mkdir(parents=True)
    (tmp_path / "shared/.lock").touch()
    with pytest.raises(UsageError, match="shared: is not a data folder, and would be overwritten"):
        prepare_only(make())


def test_the_data_folder_is_not_the_run_folder(make, tmp_path):
    with pytest.raises(UsageError, match=r"data\.folder must differ from run_dir"):
        make(data={"folder": f"{tmp_path}/./run"})


def test_a_later_start_writes_nothing_but_a_record_of_changed_times(make, tmp_path):
    os.utime(tmp_path / "raw/train.tsv", (2**33, 2**33))  # in the future: it may be written again
    for data in ({"folder": None}, {}):
        folder = prepare_only(make("own" if data else "run", data=data))
        with read_only(folder):
            prepare_only(make("own" if data else "run", data=data))
    assert not (tmp_path / "run/data/sources.json").exists()
    os.utime(tmp_path / "raw/train.tsv", (1, 1))
    time.sleep(0.05)
    with read_only(tmp_path / "shared"):
        prepare_only(make())
    assert list(json.loads((tmp_path / "run/data/sources.json").read_text())) == [
        str(tmp_path / "raw/train.tsv")
    ]
