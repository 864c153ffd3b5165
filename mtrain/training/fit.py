"""`mtrain fit`: prepare the run folder, the tokenizer and the data, then train."""

import logging
from pathlib import Path

from mtrain.checkpoint.checkpoint import Checkpoint
from mtrain.config.recipe import Choice
from mtrain.config.schema import Config
from mtrain.data.batching import BATCH_ORDER
from mtrain.data.check_report import log_warnings
from mtrain.data.encode import PreparedData, check_corpora, is_prepared, prepare_data
from mtrain.data.scan import CorpusScanner
from mtrain.data.sources import read_digests
from mtrain.device import keep_freed_memory, limit_onednn_cache, make_current, resolve_device
from mtrain.errors import UsageError
from mtrain.evaluation.metrics import make_metrics
from mtrain.interop.formats import require_exports
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.training.loop import Trainer
from mtrain.training.plan import complete_config, is_incomplete
from mtrain.training.prepare_tokenizer import (
    prepare_tokenizer,
    use_learned_vocab_size,
    vocab_size_is_automatic,
)
from mtrain.training.resolve_config import resolve_config
from mtrain.training.run_folder import locked_run_folder, open_run, record_initial_model, write_config
from mtrain.training.signals import StopSignal

log = logging.getLogger(__name__)


def fit(
    config: Config,
    resume: str = "auto",
    device: str = "auto",
    quiet: bool = False,
    allow_data_change: bool = False,
) -> None:
    """Train the model of a config and publish the best weights in `RUN/model`.

    `resume`: `auto` resumes from the newest valid checkpoint, if there is one; `never` requires a new run
    folder; a path resumes from that checkpoint. With `allow_data_change`, a run may resume with a changed
    corpus, from the start of an epoch. Raises the errors of `mtrain.errors`; Interrupted after SIGINT or
    SIGTERM, once the state is saved.
    """
    resolve_device(device)
    if config.training.init_from is None:  # otherwise, the sizes are not known yet
        require_exports(config)
    check_corpora(config.data)
    make_metrics(("bleu", "chrf"), config.data.target_lang)  # missing dependencies are reported at startup
    with locked_run_folder(Path(config.run_dir)):
        trainer = make_trainer(config, resume, device, quiet, allow_data_change)
        with StopSignal() as stop:
            trainer.run(stop)


def make_trainer(
    config: Config,
    resume: str = "auto",
    device: str = "auto",
    quiet: bool = False,
    allow_data_change: bool = False,
) -> Trainer:
    """Create or open the run folder, prepare its tokenizer and data, and make a trainer.

    Arguments and errors are those of `fit`. The run folder is not locked.
    """
    torch_device = resolve_device(device)
    make_current(torch_device)
    keep_freed_memory()
    limit_onednn_cache()
    run_dir = Path(config.run_dir)
    is_encoded, reduce_vocab_size = is_prepared(run_dir / "data"), vocab_size_is_automatic(config)
    digests = read_digests(run_dir / "data")
    scanner = CorpusScanner(config.data, config.seed, run_dir, check=not is_encoded, digests=digests)
    config, initial_model = resolve_config(config, scanner)
    require_exports(config)
    checkpoint = open_run(config, resume)
    tokenizer = prepare_tokenizer(config, scanner, reduce_vocab_size=reduce_vocab_size)
    if reduce_vocab_size:
        config = use_learned_vocab_size(config)
    if initial_model and initial_model.tokenizer.fingerprint() != tokenizer.fingerprint():
        reason = f"its tokenizer differs from that of {config.training.init_from}"
        raise UsageError(f"{run_dir}: {reason}; replace it with `mtrain tokenize CONFIG --force`")
    if checkpoint is None:
        record_initial_model(run_dir, initial_model, config.training.init_from)
    if not is_encoded:
        log_warnings(config.data, tokenizer, scanner)
    expected = checkpoint.state.data_fingerprint if checkpoint and not allow_data_change else None
    data = prepare_data(config.data, tokenizer, run_dir / "data", config.seed, expected, scanner)
    if checkpoint:
        _accept_changes(checkpoint, tokenizer, data)
    if is_incomplete(config):
        earlier = []
        if reduce_vocab_size and config.tokenizer.path is None:
            earlier = [
                Choice("tokenizer.vocab_size", config.tokenizer.vocab_size, "the corpus and the budget")
            ]
        config = complete_config(config, tokenizer, data, torch_device, earlier)
        write_config(config)
    return Trainer(config, tokenizer, data, torch_device, checkpoint, quiet, initial_model)


def _accept_changes(checkpoint: Checkpoint, tokenizer: Tokenizer, data: PreparedData) -> None:
    """Adapt the state of a checkpoint to a tokenizer, data or order of batches that has changed since."""
    state = checkpoint.state
    if state.tokenizer_fingerprint != tokenizer.fingerprint():
        log.warning("the tokenizer has changed; the model was trained with another vocabulary")
        state.tokenizer_fingerprint = tokenizer.fingerprint()
    if state.data_fingerprint != data.fingerprint:
        log.warning("the training data has changed; restarting epoch %d", state.epoch + 1)
        state.data_fingerprint, state.next_batch, state.steps_in_first_epoch = data.fingerprint, 0, None
    if state.batch_order != BATCH_ORDER:
        if state.next_batch:
            message = "data: this version of mtrain orders batches differently; restarting epoch %d"
            log.warning(message, state.epoch + 1)
        state.batch_order, state.next_batch, state.steps_in_first_epoch = BATCH_ORDER, 0, None
