"""Events for TensorBoard."""

import logging
import time

import pytest

from mtrain.training.records.tensorboard import TensorBoard
from tests.support.training import fit_on_cpu, read_metrics


def scalars_of(run):
    """The steps and values of each scalar, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_fit_writes_the_records_of_metrics_jsonl(make_config):
    run = fit_on_cpu(make_config())
    lines, scalars = read_metrics(run), scalars_of(run)
    for tag, values in scalars.items():
        group, _, name = tag.partition("/")
        records = [
            (line["step"], line["validation"] if group == "validation" else line)
            for line in lines
            if ("validation" in line) == (group == "validation")
        ]
        expected = [(step, pytest.approx(record[name], rel=1e-6)) for step, record in records]
        assert values == expected
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "validation/bleu"} <= scalars.keys()


def wait_for_the_next_second() -> None:
    """Names of event files, and so the order in which they are read, have the time in seconds."""
    time.sleep(1 - time.time() % 1)


def test_a_resumed_run_repeats_no_step(make_config):
    run = fit_on_cpu(make_config())
    wait_for_the_next_second()
    later = TensorBoard(run)  # steps after the checkpoint that were lost in a crash
    later.start(8)
    for step in (10, 12, 14):
        later.write(step, 0.0, {"step": step, "loss": -1.0})
    later.close()
    wait_for_the_next_second()
    fit_on_cpu(make_config(training={"max_steps": 12}))
    expected = [(line["step"], pytest.approx(line["loss"])) for line in read_metrics(run) if "loss" in line]
    assert scalars_of(run)["train/loss"] == expected and expected[-1][0] == 12


def test_without_the_extra_a_message_says_what_to_install(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("mtrain.training.records.tensorboard.find_spec", lambda _: None)
    caplog.set_level(logging.INFO, "mtrain")
    board = TensorBoard(tmp_path)
    board.start(0)
    board.write(1, 0.0, {"loss": 1.0})
    board.close()
    board.start(1)  # after a validation that was repeated
    assert (
        caplog.text.count("pip install 'mtrain[tensorboard]'") == 1
        and not (tmp_path / "tensorboard").exists()
    )


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("")
    board = TensorBoard(tmp_path)
    board.start(0)
    board.write(1, 0.0, {"loss": 1.0})
    board.close()
    assert "cannot write" in caplog.text
