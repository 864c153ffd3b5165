"""What happens before training: the run folder, its tokenizer and its encoded data."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mtrain.checkpoint.checkpoint import Checkpoint
from mtrain.checkpoint.model_folder import Loaded
from mtrain.checkpoint.state import NO_HEAD, TrainState
from mtrain.config.choices import Choice
from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.config.sections.data import DataConfig
from mtrain.data.epochs.batching import batch_order
from mtrain.data.prepare import PreparedData, make_scanner, open_data, prepare_data
from mtrain.data.preparing.check_report import log_warnings
from mtrain.data.preparing.encode_folder import locked_unless_complete
from mtrain.data.preparing.inputs import check_corpora, has_same_text
from mtrain.data.store.folder import DataFolder, shared_tokenizer
from mtrain.device import keep_freed_memory
from mtrain.distributed.ranks import JsonValue
from mtrain.errors import StorageError, UsageError
from mtrain.evaluation.metrics import make_metrics
from mtrain.interop.formats import require_exports
from mtrain.model.build import AnyModel
from mtrain.tokenizer.tokenizer import Tokenizer, model_config
from mtrain.training.setup.resolve import inherit_settings, resolve_config
from mtrain.training.setup.run_folder import locked_run_folder, open_run, record_initial_model, write_config
from mtrain.training.setup.tokenizer import (
    existing_tokenizer,
    learns_tokenizer,
    prepare_tokenizer,
    tokenizer_normalizers,
    vocab_size_choice,
    vocab_size_is_automatic,
    with_learned_vocab_size,
)

log = logging.getLogger(__name__)


class PreparedRun(NamedTuple):
    """Everything that a trainer starts from."""

    config: Config
    tokenizer: Tokenizer
    data: PreparedData
    checkpoint: Checkpoint | None = None  # to resume from
    initial_model: Loaded[AnyModel] | None = None  # whose weights a new run starts from
    choices: Sequence[Choice] = ()  # of `model.preset: auto`

    def describe(self) -> JsonValue:
        """What `open_prepared_run` needs to open the run in another process."""
        checkpoint = self.checkpoint and [str(self.checkpoint.folder), self.checkpoint.state.to_json()]
        return {"config": self.config.model_dump(mode="json"), "checkpoint": checkpoint}

    def with_inputs(self, state: TrainState) -> TrainState:
        """A state of training with the fingerprints of this run's tokenizer and data, and its batch order."""
        return replace(
            state,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            data_fingerprint=self.data.fingerprint,
            batch_order=batch_order(self.config.data),
            window_layout=self.data.train.layout(state.position.starts),
        )


def open_prepared_run(description: JsonValue) -> PreparedRun:
    """Open a run that rank 0 has prepared and described, without writing to it. The weights of
    `initial_model` come from rank 0.

    Raises StorageError or ModelError if this rank sees other folders than rank 0.
    """
    config = validate(Config, description["config"], "the config of rank 0")
    run_dir = Path(config.run_dir)
    if not run_dir.is_dir():
        raise StorageError(f"{run_dir}: no such folder; all machines must use the same file system for it")
    tokenizer = Tokenizer(run_dir / "tokenizer")
    data = open_data(config.data, tokenizer, DataFolder.of_run(config.data, run_dir), config.seed)
    if description["checkpoint"] is None:
        return PreparedRun(config, tokenizer, data)
    path, values = description["checkpoint"]
    checkpoint = Checkpoint(Path(path), TrainState.from_json(values))
    return PreparedRun(config, tokenizer, data, checkpoint)


def prepare_only(config: Config, workers: int | None = None) -> Path:
    """Create the run folder, its tokenizer and its encoded data. Returns the path of the data folder.

    `workers` is as in `CorpusScanner`. Raises the errors of `mtrain.errors`.
    """
    check_exports(config)
    folder = DataFolder.of_run(config.data, Path(config.run_dir))
    check_corpora(config.data, folder)
    require_metrics(config)
    if not learns_tokenizer(config):  # which takes much memory that encoding does not need
        keep_freed_memory()  # reading and encoding take 5 % less time
    with locked_run_folder(folder.run_dir):
        write_config(prepare_run(config, folder, workers=workers).config)
    return folder.path


def check_exports(config: Config) -> None:
    """Raise UsageError if the model rules out a format in `export.require`, also if another model, from which
    settings or the tokenizer come, does."""
    if config.export.require:  # else, the other model may be missing by now
        require_exports(inherit_settings(config).config, existing_tokenizer(config))


def require_metrics(config: Config) -> None:
    """Raise UsageError if a dependency of the metrics of validation is not installed. A pair classifier needs
    none."""
    if config.model.is_classifier:
        return
    for language in config.data.target_languages:
        make_metrics(("bleu", "chrf"), language)


def prepare_run(
    config: Config,
    folder: DataFolder | None = None,
    resume: str = "auto",
    allow_data_change: bool = False,
    workers: int | None = None,
    speed: float | None = None,
) -> PreparedRun:
    """Resolve the config, create or open the run folder, learn or open the tokenizer, and encode or open the
    data. The data `folder` is opened unless it is given. The run folder is not locked. The config of a new
    run is written as far as it is known; `make_trainer` and `prepare_only` write the final one.

    For `speed`, see `resolve_config`; for the other arguments and the errors, see `fit` and
    `prepare_only`.
    """
    folder = folder or DataFolder.of_run(config.data, Path(config.run_dir))
    adapt_vocab_size = vocab_size_is_automatic(config)
    with locked_unless_complete(folder):
        scanner = make_scanner(config.data, folder, config.seed)
        # A folder that was begun from the same text has been checked.
        scanner.check = config.data.check and not has_same_text(config.data, folder, scanner.files)
        scanner.workers = workers
        scanner.for_tokenizer = learns_tokenizer(config)
        scanner.normalizers = partial(tokenizer_normalizers, config)
        config, initial_model, saved = resolve_config(config, scanner, speed=speed)
        checkpoint = open_run(config, saved, resume, allow_data_change)
        tokenizer = prepare_tokenizer(config, scanner, adapt_vocab_size=adapt_vocab_size)
        config = with_learned_vocab_size(config)
        if checkpoint is None:
            _require_languages(config.data, tokenizer)
            model_config(config.model, tokenizer, config.data.max_length)  # an error now, not after encoding
            write_config(config)  # now: encoding may be interrupted
        if workers:  # then each process is to use one core
            tokenizer.set_threads(1)
        if initial_model and initial_model.tokenizer.fingerprint != tokenizer.fingerprint:
            reason = f"its tokenizer is not the one of {config.training.init_from}"
            cure = "replace it with `mtrain tokenize CONFIG --force`"
            if shared_tokenizer(config.data):  # which --force would not replace
                cure = "give another --run-dir and another data.folder"
            raise UsageError(f"{config.run_dir}: {reason}; {cure}")
        if checkpoint is None:
            record_initial_model(folder.run_dir, initial_model, config.training.init_from)
        if scanner.check:
            log_warnings(config.data, tokenizer, scanner)
        trained_on = checkpoint.state.data_fingerprint if checkpoint and not allow_data_change else None
        data = prepare_data(config.data, tokenizer, folder, scanner, config.seed, trained_on)
    choices = vocab_size_choice(config) if adapt_vocab_size else []
    run = PreparedRun(config, tokenizer, data, checkpoint, initial_model, choices)
    if checkpoint is None:
        return run
    state = _accept_changes(checkpoint.state, run.with_inputs(checkpoint.state))
    if saved and config.model.alignment_head and not saved.model.alignment_head:
        state = replace(state, validation_fingerprint=NO_HEAD)
    return run._replace(checkpoint=checkpoint._replace(state=state))


def _require_languages(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise UsageError if the vocabulary, which may be another model's, lacks a language of the data."""
    directions = {f"data.{name}": data.direction_of(corpus) for name, corpus in data.all_corpora.items()}
    for name, direction in {"data": data.direction, **directions}.items():
        try:
            if name == "data" and data.language_tags.startswith("codes"):
                tokenizer.complete(direction, data.language_tags)  # of the model, which may be unknown
            else:
                tokenizer.tags_of(direction, data.language_tags)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None


def _accept_changes(state: TrainState, adapted: TrainState) -> TrainState:
    """The state of a checkpoint, `adapted` to the inputs of the run. If the data or the order of its batches
    has changed since the checkpoint, the epoch begins again."""
    if state.tokenizer_fingerprint != adapted.tokenizer_fingerprint:
        log.warning("the tokenizer has changed; the model was trained with another vocabulary")
    reason = None
    if state.data_fingerprint != adapted.data_fingerprint:
        reason = "the training data has changed"
    elif state.batch_order != adapted.batch_order:
        cause = "another version of mtrain, or data.subword_sampling"
        reason = f"data: the order of batches has changed ({cause})"
    elif state.window_layout != adapted.window_layout:
        reason = "data: the windows of an epoch have changed (data.window_pairs)"
    if reason is None:
        return adapted
    is_in_epoch = bool(state.position.window or state.position.step)
    if is_in_epoch or state.data_fingerprint != adapted.data_fingerprint:
        log.warning("%s; restarting epoch %d", reason, state.epoch + 1)
    position = state.position._replace(window=0, step=0)
    since = (state.step, state.epoch)  # for `allowed_steps`: earlier epochs had other lengths
    return replace(adapted, position=position, steps_in_first_epoch=None, data_since=since)
