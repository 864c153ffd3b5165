"""The translations that validation records for the report."""

import errno
import json
import os

import pytest

from mtrain.errors import StorageError
from mtrain.training.validation.samples import BEST, SAMPLES, record_translations
from tests.support.faults.file_operations import Operation, on_file_operation
from tests.support.training import PAIRS, fit_on_cpu, read_metrics


def record(folder, step, count, best=False, text="t"):
    kinds = {"source": "s", "reference": "r", "translation": text}
    texts = {name: [f"{kind}{row}" for row in range(count)] for name, kind in kinds.items()}
    record_translations(folder, step, texts, best)


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("count", [3, SAMPLES, 10 * BEST])
def test_the_record_is_bounded_and_its_sentences_are_spread_over_the_set(tmp_path, count):
    record(tmp_path, 5, count, best=True)
    for name, limit in (("samples.jsonl", SAMPLES), ("best_validation.json", BEST)):
        found = json.loads((tmp_path / name).read_text())
        rows = [int(sentence["source"][1:]) for sentence in found["sentences"]]
        assert found["step"] == 5 and len(rows) == min(count, limit) and rows == sorted({*rows})
        assert rows[0] == 0 and rows[-1] >= count - 1 - count // len(rows)
        for sentence, row in zip(found["sentences"], rows, strict=True):
            assert sentence == {"source": f"s{row}", "reference": f"r{row}", "translation": f"t{row}"}


def test_only_the_best_model_replaces_the_translations_of_the_best(tmp_path):
    record(tmp_path, 1, 2, best=True)
    record(tmp_path, 2, 2, best=False)
    assert json.loads((tmp_path / "best_validation.json").read_text())["step"] == 1
    assert steps_of(tmp_path) == [1, 2]


def test_steps_that_a_resumed_run_repeats_and_damaged_lines_are_replaced(tmp_path):
    for step in (10, 20, 30):
        record(tmp_path, step, 2)
    with (tmp_path / "samples.jsonl").open("a") as stream:
        stream.write('{"step": 4')
    record(tmp_path, 20, 2, text="new")
    assert steps_of(tmp_path) == [10, 20] and "new1" in (tmp_path / "samples.jsonl").read_text()


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    record(tmp_path / "missing", 1, 2, best=True)
    assert "the report will lack the translations of step 1" in caplog.text


def test_fit_records_the_translations_and_the_findings_of_the_check(make_config):
    run = fit_on_cpu(make_config())
    assert steps_of(run) == [line["step"] for line in read_metrics(run) if "validation" in line] == [4, 8]
    best = json.loads((run / "best_validation.json").read_text())
    assert [(each["source"], each["reference"]) for each in best["sentences"]] == PAIRS
    index = json.loads((run / "checkpoints/index.json").read_text())
    assert index["best"] == f"step-{best['step']:08d}"
    check = json.loads((run / "data/check.json").read_text())
    assert check["sets"]["train"]["usable"] == len(PAIRS)
    assert any("LEAK" in warning for warning in check["warnings"])  # the validation set is the training set


def test_the_findings_of_the_check_are_kept_if_the_encoding_is_interrupted(make_config):
    def fill_disk(operation: Operation) -> None:
        if "shard-" in operation.path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with on_file_operation(fill_disk), pytest.raises(StorageError, match="No space left"):
        fit_on_cpu(make_config())
    run = fit_on_cpu(make_config())
    check = json.loads((run / "data/check.json").read_text())
    assert check["sets"]["train"]["usable"] == len(PAIRS) and check["warnings"]
