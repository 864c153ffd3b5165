"""Faults between two runs of `fit`: damage, kills, changed data, other hardware, signals."""

import json
import os
import pty
import re
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
import yaml

from mtrain.checkpoint.checkpoint import checkpoint_folders, open_checkpoint
from mtrain.config import recipe
from mtrain.config.load import load_config, validate
from mtrain.config.schema import Config
from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.data.reading.files import toy_pairs
from mtrain.errors import Interrupted, ModelError
from mtrain.storage.manifest import write_manifest
from mtrain.tokenizer.learn import train_tokenizer
from mtrain.training import loop
from mtrain.training.fit import fit, make_trainer
from mtrain.training.model_selection import ModelSelection
from mtrain.training.step.learner import Learner
from tests.support.cli import handling, start_forked
from tests.support.faults.damage import damaged_copies
from tests.support.faults.file_operations import Operation, on_file_operation
from tests.support.faults.processes import wait, wait_until
from tests.support.faults.saves import Killed, fail_writes, save_in_background
from tests.support.training import fit_on_cpu, last_checkpoint, losses, read_metrics, same_weights, with_bleu


@pytest.mark.parametrize("every", [499, pytest.param(1, marks=pytest.mark.slow)])
def test_05_a_byte_flipped_or_a_file_cut_anywhere_is_detected(make_config, every):
    folder = last_checkpoint(fit_on_cpu(make_config(training={"max_steps": 2, "ema_decay": 0.9})))
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for at in {0, *range(0, len(whole), every if len(whole) < 10_000 else 50 * every), len(whole) - 1}:
            for damaged in damaged_copies(whole, at):
                file.write_bytes(damaged)
                with pytest.raises(ModelError, match=r"damaged|missing|does not list"):
                    open_checkpoint(folder)
        file.write_bytes(whole)
    open_checkpoint(folder)


def test_05_a_changed_byte_of_the_manifest_is_detected_if_it_means_the_same(make_config):
    """A line break in the place of a space leaves the same JSON."""
    folder = last_checkpoint(fit_on_cpu(make_config(training={"max_steps": 2})))
    manifest = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(manifest.replace(b" ", b"\n", 1))
    with pytest.raises(ModelError, match="damaged"):
        open_checkpoint(folder)


def test_05_a_damaged_checkpoint_is_detected_and_the_one_before_it_is_used(make_config, caplog):
    run = fit_on_cpu(make_config(training={"max_steps": 12}))
    damaged = last_checkpoint(run) / "model.safetensors"
    contents = bytearray(damaged.read_bytes())
    contents[len(contents) // 2] ^= 1
    damaged.write_bytes(contents)
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        fit_on_cpu(make_config(training={"max_steps": 14}), resume=str(damaged.parent))
    fit_on_cpu(make_config(training={"max_steps": 14}))
    assert "trying the previous checkpoint" in caplog.text
    assert last_checkpoint(run).name == "step-00000014"
    assert [step for step, *_ in losses(run)] == [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize(
    ("at", "workers", "extra"),
    [
        pytest.param(3, 1, {}, marks=pytest.mark.slow),
        (3, 2, {"ema_decay": 0.9}),
        (5, 2, {"optimizer": "muon"}),
        pytest.param(5, 1, {"average_checkpoints": 3}, marks=pytest.mark.slow),
        pytest.param(8, 2, {"average_checkpoints": 3}, marks=pytest.mark.slow),
        pytest.param(5, 2, {"precision": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_08_resumed_equals_uninterrupted_bit_for_bit(make_config, set_threads, at, workers, extra):
    """With dropout and accumulation, interrupted inside an epoch; at steps 3 and 5 between two log lines."""
    set_threads(workers)
    recipe = {
        **extra,
        "best_metric": "nll",
        "batch_tokens": 128,
        "micro_batch_tokens": 64,
        "validate_every": 4,
        "checkpoint_every": 4,
        "log_every": 2,
    }
    model = {"dropout": 0.3}
    whole = fit_on_cpu(make_config("whole", model=model, training={**recipe, "max_steps": 12}))
    parts = make_config("parts", model=model, training={**recipe, "max_steps": at, "validate_every": 100})
    fit_on_cpu(parts)
    resumed = fit_on_cpu(make_config("parts", model=model, training={**recipe, "max_steps": 12}))
    assert losses(resumed) == losses(whole)
    assert same_weights(whole, resumed)
    published = [(run / "model/model.safetensors").read_bytes() for run in (whole, resumed)]
    assert published[0] == published[1]


def test_08_a_run_killed_at_any_step_takes_the_same_steps(make_config, monkeypatch):
    """`scripts/torture.sh` sends the real signal."""
    taken: dict[int, tuple] = {}  # the rows of each step, by micro-batch, and the position after it
    real, kills = loop.train_step, iter((2, 6, 11, 15))
    dies = 0

    def train_step(self, step):
        key, rows = self.state.step + 1, [batch.rows for batch in step.batches]
        assert taken.setdefault(key, (rows, step.next)) == (rows, step.next)
        sums = real(self, step)
        if key == dies:
            raise Killed
        return sums

    monkeypatch.setattr(loop, "train_step", train_step)
    recipe = {"max_steps": 16, "batch_tokens": 128, "micro_batch_tokens": 64, "log_every": 1}
    recipe |= {"checkpoint_every": 3, "keep_checkpoints": 9, "validate_every": 8}
    keys = {"model": {"dropout": 0.3}, "training": recipe}
    whole = fit_on_cpu(make_config("whole", **keys))
    for dies in kills:  # noqa: B007
        with pytest.raises(Killed):
            fit_on_cpu(make_config("parts", **keys))
    dies = 0
    parts = fit_on_cpu(make_config("parts", **keys))
    assert losses(parts) == losses(whole) and same_weights(whole, parts)
    assert any(len(rows) > 1 for rows, _ in taken.values())  # accumulation
    saved = [open_checkpoint(folder).state for folder in checkpoint_folders(parts)]
    assert sum(state.position.step > 0 for state in saved) > 1  # in the middle of an epoch


def test_08_a_checkpoint_with_the_earlier_order_of_batches_restarts_its_epoch(
    make_config, monkeypatch, caplog
):
    """Otherwise some pairs would be trained on twice in the epoch, and others never."""
    recipe = {"batch_tokens": 64, "max_steps": 1}
    folder = last_checkpoint(fit_on_cpu(make_config(training=recipe)))
    state = json.loads((folder / "state.json").read_text())
    assert state["next_batch"] == 1
    del state["batch_order"]  # as an earlier version wrote it
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder)
    epochs, real = Counter(), loop.train_step

    def train_step(self, step):
        epochs.update((step.epoch, row) for batch in step.batches for row in batch.rows)
        return real(self, step)

    monkeypatch.setattr(loop, "train_step", train_step)
    run = fit_on_cpu(make_config(training={"batch_tokens": 64, "max_steps": None, "max_epochs": 2}))
    assert epochs == Counter((epoch, row) for epoch in (1, 2) for row in range(8))
    assert "the order of batches has changed (another version of mtrain" in caplog.text
    assert "; restarting epoch 1" in caplog.text
    caplog.clear()
    fit_on_cpu(make_config(training={"batch_tokens": 64, "max_steps": None, "max_epochs": 3}))
    assert "order of batches" not in caplog.text
    assert open_checkpoint(last_checkpoint(run)).state.batch_order > 0


def test_08_sampled_segmentations_of_an_earlier_version_restart_the_epoch(make_config, caplog):
    recipe, sampling = {"batch_tokens": 64, "max_steps": 1}, {"subword_sampling": 0.2}
    folder = last_checkpoint(fit_on_cpu(make_config(training=recipe, data=sampling)))
    state = json.loads((folder / "state.json").read_text())
    state["batch_order"] = 1  # as an earlier version wrote it
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder)
    later = {**recipe, "max_steps": 2}
    run = fit_on_cpu(make_config(training=later, data=sampling))
    assert "the order of batches has changed" in caplog.text
    assert open_checkpoint(last_checkpoint(run)).state.position.step == 1


def remove_part(folder: Path, part: str) -> None:
    """Remove a part of a checkpoint, or add "novel" to its state; the manifest matches the state."""
    if part.endswith(".safetensors"):
        (folder / part).unlink()
        return
    state = json.loads((folder / "state.json").read_text())
    if part == "cpu":
        del state["rng"]["cpu"]
    elif part == "novel":
        state["novel"] = 1
    else:
        del state[part]
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder)


def test_09_an_incomplete_checkpoint_is_an_error_if_named_and_skipped_otherwise(make_config, caplog):
    run = fit_on_cpu(make_config())
    newest, later = last_checkpoint(run), {"max_steps": 10}
    for part, message in (  # one after the other
        ("cpu", "the state of the random generator is missing"),
        ("rng", "the state of the random generator is missing"),
        ("novel", "unknown: novel; another version of mtrain may have written it"),
        ("optimizer.safetensors", "optimizer.safetensors: missing"),
    ):
        remove_part(newest, part)
        with pytest.raises(ModelError, match=message):
            fit_on_cpu(make_config(training=later), resume=str(newest))
    fit_on_cpu(make_config(training=later))
    assert "trying the previous checkpoint" in caplog.text
    assert [step for step, *_ in losses(run)] == [2, 4, 6, 8, 10]
    for folder in checkpoint_folders(run):
        remove_part(folder, part)
    with pytest.raises(ModelError, match="no checkpoint is valid"):
        fit_on_cpu(make_config(training={"max_steps": 14}))


def test_10_a_corpus_that_changed_under_a_run_is_an_error(mtrain, make_config, tmp_path, corpus, caplog):
    files = {"source": str(tmp_path / "t.en"), "target": str(tmp_path / "t.de")}
    for side, language in (("source", "en"), ("target", "de")):
        Path(files[side]).write_bytes((corpus / f"train.{language}").read_bytes())
    fit_on_cpu(make_config(data={"train": files}))
    Path(files["source"]).write_bytes(Path(files["source"]).read_bytes().replace(b"cat", b"cow"))
    config = make_config(data={"train": files}, training={"max_steps": 10})
    with pytest.raises(ModelError, match=r"changed since the checkpoints .* --allow-data-change"):
        fit_on_cpu(config)
    file = tmp_path / "changed.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    code, _, err = mtrain("fit", file, "--allow-data-change", "--device", "cpu")
    assert code == 0 and "the training data has changed" in err
    assert last_checkpoint(Path(config.run_dir)).name == "step-00000010"
    caplog.clear()
    fit_on_cpu(
        make_config(data={"train": files}, training={"max_steps": 12})
    )  # the changed corpus is the run's now
    assert "the training data has changed" not in caplog.text


@pytest.mark.parametrize("before", [2, 5])
def test_10_the_rate_decays_until_the_last_epoch_on_data_of_another_size(
    make_config, tmp_path, corpus, before
):
    """The steps of the earlier epochs differ from those of the later ones."""
    files = {"source": str(tmp_path / "t.en"), "target": str(tmp_path / "t.de")}

    def config(epochs: int, copies: int):
        for side, language in (("source", "en"), ("target", "de")):
            Path(files[side]).write_bytes(copies * (corpus / f"train.{language}").read_bytes())
        limits = {"max_steps": None, "max_epochs": epochs, "schedule": "linear", "log_every": 1}
        return make_config(data={"train": files}, training=limits)

    run = fit_on_cpu(config(before, copies=4))
    fit(config(6, copies=1), device="cpu", allow_data_change=True)
    fit_on_cpu(config(6, copies=1))  # the state knows when the data changed
    fit_on_cpu(config(7, copies=1))
    rates = [line["learning_rate"] for line in read_metrics(run) if "learning_rate" in line]
    epochs = [line["epoch"] for line in read_metrics(run) if "learning_rate" in line]
    of_last = [rate for rate, epoch in zip(rates, epochs, strict=True) if epoch == max(epochs)]
    assert max(epochs) == 7 and len(of_last) < epochs.count(1)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    later = rates[epochs.index(before + 1) : -1]
    zeros = [epoch for rate, epoch in zip(rates, epochs, strict=True) if rate == 0]
    assert set(zeros) <= {before, 6, 7} and len(zeros) == 3  # the last step of each call of `fit`
    assert max(later) > 0


@pytest.mark.parametrize("trained", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_10_a_tokenizer_that_changed_under_a_run(make_config, tmp_path, trained, caplog):
    """An error if something was trained with it; otherwise the corpus is encoded again."""
    config = make_config()

    def encoded():
        corpus = make_trainer(config, device="cpu").planner.corpus.encoded()
        return corpus.fetch(list(range(8)))[0].to_lists()

    first = encoded()
    if trained:
        fit_on_cpu(make_config(training={"max_steps": 4}))
    source, target = (lambda side=side: (pair[side] for pair in toy_pairs("train")[:500]) for side in (0, 1))
    train_tokenizer(TokenizerConfig(vocab_size=330), source, target, tmp_path / "run/tokenizer", 1)
    if trained:
        with pytest.raises(ModelError, match="the corpus or the tokenizer changed"):
            fit_on_cpu(config)
        fit(config, device="cpu", allow_data_change=True)
        assert "the tokenizer has changed" in caplog.text
    else:
        assert encoded() != first
        fit_on_cpu(config)


def test_10_a_lost_tokenizer_is_not_learned_again_under_checkpoints(make_config):
    run = fit_on_cpu(make_config())
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(ModelError, match="tokenizer: missing, but the checkpoints need it"):
        fit(make_config(training={"max_steps": 10}), device="cpu", allow_data_change=True)


@pytest.mark.parametrize(
    ("pairs", "decoding", "head", "best"),
    [
        (True, {}, False, 12),
        (False, {}, True, 12),
        pytest.param(False, {"max_length_ratio": 1.4}, False, 12, marks=pytest.mark.slow),
        # Without effect on the text of greedy search:
        (False, {"length_penalty": 0.5, "beam_size": 3, "batch_tokens": 99, "alignment_layer": 0}, False, 8),
    ],
)
def test_10_the_best_score_of_another_validation_is_discarded(
    make_config, corpus, tmp_path, scripted_scores, caplog, pairs, decoding, head, best
):
    scripted_scores(*map(with_bleu, (10, 40, 20)))
    files = {side: str(tmp_path / f"v.{side}") for side in ("source", "target")}
    for language, file in zip(("en", "de"), files.values(), strict=True):
        Path(file).write_bytes((corpus / f"train.{language}").read_bytes())
    run = fit_on_cpu(make_config(data={"validation": files}))
    if pairs:
        Path(files["target"]).write_bytes(Path(files["target"]).read_bytes().replace(b"Katze", b"Maus"))
    config = make_config(
        data={"validation": files},
        decoding=decoding,
        model={"alignment_head": head},
        training={"max_steps": 12},
    )
    fit(config, device="cpu", allow_data_change=pairs)
    assert ("the best score is discarded" in caplog.text) == (best == 12)
    assert json.loads((run / "checkpoints/index.json").read_text())["best"] == f"step-{best:08d}"


def test_10_with_preset_auto_a_run_keeps_its_sizes_when_the_corpus_grows(
    make_config, corpus, tmp_path, monkeypatch
):
    vocabularies = (9, 330), (99, 340)
    monkeypatch.setattr(recipe, "VOCABULARIES", vocabularies)
    files = {side: str(tmp_path / f"t.{side}") for side in ("source", "target")}
    for language, file in zip(("en", "de"), files.values(), strict=True):
        Path(file).write_bytes((corpus / f"train.{language}").read_bytes())

    def config(steps: int) -> Config:
        made = make_config(data={"train": files}, training={"max_steps": steps})
        raw = made.model_dump(mode="json", exclude_unset=True)
        return validate(Config, {**raw, "model": {"preset": "auto"}, "tokenizer": {}}, "test")

    fit_on_cpu(config(4))
    for file in files.values():
        Path(file).write_bytes(Path(file).read_bytes() + b"One more.\n")
    with pytest.raises(ModelError, match="the corpus or the tokenizer changed"):
        fit_on_cpu(config(8))
    fit(config(8), device="cpu", allow_data_change=True)
    assert last_checkpoint(tmp_path / "run").name == "step-00000008"


def test_10_a_corpus_that_changed_before_anything_was_trained_is_encoded_again(make_config, tmp_path, corpus):
    files = {"source": str(tmp_path / "t.en"), "target": str(corpus / "train.de")}
    text = (corpus / "train.en").read_bytes()
    encoded = []
    for contents in (text, text, text.replace(b"cat", b"cow")):
        Path(files["source"]).write_bytes(contents)
        trainer = make_trainer(make_config(data={"train": files}), device="cpu")
        encoded.append(trainer.planner.corpus.encoded().fetch([0])[0].to_lists())
    assert encoded[0] == encoded[1] != encoded[2]


def test_11_a_changed_number_of_threads_is_logged_and_every_pair_still_occurs_once(
    make_config, monkeypatch, set_threads, caplog
):
    rows, real = {}, loop.train_step

    def train_step(self, step):
        rows[self.state.step + 1] = step.epoch, [row for batch in step.batches for row in batch.rows]
        return real(self, step)

    monkeypatch.setattr(loop, "train_step", train_step)
    fit_on_cpu(make_config(training={"max_steps": 3}))
    set_threads(2)
    fit_on_cpu(make_config(training={"max_steps": 12}))
    sizes = "micro-batches of 64 tokens"
    assert re.search(f" 2 workers, {sizes}; before: .* 1 worker, {sizes}", caplog.text)
    epochs = [epoch for epoch, _ in rows.values()]
    assert epochs.count(epochs[0]) > 3  # the threads changed within the first epoch
    for epoch in sorted(set(epochs))[:-1]:
        assert sorted(row for e, some in rows.values() for row in some if e == epoch) == list(range(8))


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_12_a_signal_at_any_time_saves_at_the_end_of_the_step(make_config, monkeypatch, number, code):
    real = Learner.step

    for at in (1, 3, 6):

        def step(self, *arguments):
            sums = real(self, *arguments)
            done.append(1)  # noqa: B023
            if len(done) == at:  # noqa: B023
                os.kill(os.getpid(), number)
            return sums

        done: list[int] = []
        monkeypatch.setattr(Learner, "step", step)
        with pytest.raises(Interrupted) as stopped:
            fit_on_cpu(make_config(f"run{at}", training={"max_steps": 50}))
        assert stopped.value.exit_code == code and len(done) == at
        run = Path(make_config(f"run{at}").run_dir)
        assert last_checkpoint(run).name == f"step-{at:08d}"


def test_12_a_signal_in_the_last_validation_ends_the_command_afterwards(make_config, monkeypatch):
    """It would otherwise translate the test sets, until a batch system kills it."""
    scores = ModelSelection.scores_of

    def validate(self, model):
        os.kill(os.getpid(), signal.SIGTERM)
        return scores(self, model)

    monkeypatch.setattr(ModelSelection, "scores_of", validate)
    config = make_config(training={"max_steps": 2})
    with pytest.raises(Interrupted, match="stopped by SIGTERM; training has finished") as stopped:
        fit_on_cpu(config)
    assert stopped.value.exit_code == 143 and (Path(config.run_dir) / "model/model.safetensors").exists()


def send_in_step(monkeypatch: pytest.MonkeyPatch, at: int, *numbers: signal.Signals) -> None:
    """Let this process receive signals in step `at` of each run."""
    real, done = Learner.step, []

    def step(self, *arguments):
        done.append(1)
        for number in numbers if len(done) == at else ():
            os.kill(os.getpid(), number)
        return real(self, *arguments)

    monkeypatch.setattr(Learner, "step", step)


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGHUP, signal.SIGHUP],  # by a shell that ends, and by the kernel
        [signal.SIGUSR1],
        [signal.SIGUSR2],
        [signal.SIGXCPU, signal.SIGXCPU],  # each second
        [signal.SIGTERM, signal.SIGHUP],  # when a machine is shut down
    ],
)
def test_47_signals_of_closed_terminals_and_batch_systems_save(make_config, monkeypatch, numbers):
    send_in_step(monkeypatch, 2, *numbers)
    message = f"stopped by {numbers[0].name}; saved at step 2"
    with (
        handling(dict.fromkeys(numbers, signal.SIG_DFL)),
        pytest.raises(Interrupted, match=message) as stopped,
    ):
        fit_on_cpu(make_config(training={"max_steps": 50}))
    assert stopped.value.exit_code == 128 + numbers[0]
    assert last_checkpoint(Path(make_config().run_dir)).name == "step-00000002"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_47_an_ignored_signal_stays_ignored(make_config, monkeypatch, number):
    """For example, SIGHUP under nohup."""
    send_in_step(monkeypatch, 1, number)
    with handling({number: signal.SIG_IGN}):
        run = fit_on_cpu(make_config(training={"max_steps": 4}))
        assert signal.getsignal(number) is signal.SIG_IGN
    assert last_checkpoint(run).name == "step-00000004"


def test_47_a_closed_terminal_saves_although_nothing_can_be_shown(config_file, tmp_path):
    """The kernel sends SIGHUP, and writing to the terminal fails."""
    reader, terminal = pty.openpty()
    job = ["fit", config_file, "--device", "cpu", "--set", "training.max_steps=100000"]
    with handling({signal.SIGHUP: signal.SIG_DFL}):  # the tests may run under nohup
        child = start_forked(*job, "--set", "training.patience=null", streams=[terminal] * 3)
    os.close(terminal)
    assert wait_until(child, (tmp_path / "run/metrics.jsonl").exists) is None
    os.close(reader)
    os.kill(child, signal.SIGHUP)  # this terminal is not the controlling one
    assert wait(child).exit_code == 129 and checkpoint_folders(tmp_path / "run")


def test_12_a_signal_during_a_save_that_fails_saves_at_the_next_step(make_config):
    fail, attempts = fail_writes("model.safetensors", {1, 2})

    def handle(operation: Operation) -> None:
        if not attempts and operation.name == "write tensors":
            os.kill(os.getpid(), signal.SIGTERM)
        fail(operation)

    config = make_config(training={"max_steps": 50, "checkpoint_every": 2})
    with on_file_operation(handle), pytest.raises(Interrupted, match="saved at step 3"):
        fit_on_cpu(config)
    steps = [int(path.parent.name.removesuffix(".tmp")[-8:]) for path in attempts]
    assert steps == [2, 2, 3] and last_checkpoint(Path(config.run_dir)).name == "step-00000003"


def test_12_a_second_signal_acts_at_once(make_config, monkeypatch):
    class Ended(BaseException):
        pass

    def end(*_):
        raise Ended

    before = signal.signal(signal.SIGTERM, end)  # replaces the default, which ends the process
    real = Learner.step

    def step(self, *arguments):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments)

    monkeypatch.setattr(Learner, "step", step)
    try:
        with pytest.raises(Ended):
            fit_on_cpu(make_config())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not checkpoint_folders(Path(make_config().run_dir))


def test_12_a_second_signal_does_not_wait_for_a_checkpoint_that_is_being_written(
    config_file, tmp_path, monkeypatch
):
    save_in_background(monkeypatch)

    def block(operation: Operation) -> None:
        if operation.name == "write tensors":
            (tmp_path / "writing").touch()
            threading.Event().wait()

    job = ["fit", config_file, "--device", "cpu", "--set", "training.checkpoint_every=1"]
    with (
        Path(os.devnull).open("r+") as null,
        (tmp_path / "stderr").open("w") as log,
        on_file_operation(block),
    ):
        child = start_forked(*job, streams=[null.fileno(), null.fileno(), log.fileno()])
    assert wait_until(child, (tmp_path / "writing").exists) is None
    os.kill(child, signal.SIGTERM)
    os.kill(child, signal.SIGINT)
    assert wait(child, timeout=20).exit_code in (130, 143)  # either may be handled first
    assert (tmp_path / "stderr").read_text().splitlines()[-1] in ("stopped by SIGINT", "stopped by SIGTERM")
    assert not checkpoint_folders(tmp_path / "run")


def test_12_sigterm_saves_and_the_next_run_resumes(config_file, tmp_path, make_config):
    job = ["fit", config_file, "--device", "cpu", "--set", "training.max_steps=100000"]
    with Path(os.devnull).open("r+") as null, (tmp_path / "stderr").open("w") as log:
        streams = [null.fileno(), null.fileno(), log.fileno()]
        child = start_forked(*job, "--set", "training.patience=null", streams=streams)
    assert wait_until(child, (tmp_path / "run/metrics.jsonl").exists) is None
    os.kill(child, signal.SIGTERM)
    code, stderr = wait(child).exit_code, (tmp_path / "stderr").read_text()
    assert code == 143 and "stopped by SIGTERM; saved at step" in stderr
    step = int(last_checkpoint(tmp_path / "run").name.removeprefix("step-"))
    assert f"saved at step {step};" in stderr and step < 100000
    fit_on_cpu(load_config(config_file, [f"training.max_steps={step + 2}"]))
    assert last_checkpoint(tmp_path / "run").name == f"step-{step + 2:08d}"
