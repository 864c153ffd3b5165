"""`mtrain fit`: prepare the run folder, the tokenizer and the data, then train."""

from pathlib import Path

from mtrain.config.schema import Config
from mtrain.data.data_folder import find_data_folder
from mtrain.data.same_inputs import check_corpora
from mtrain.device import keep_freed_memory, limit_onednn_cache, make_current, resolve_device
from mtrain.evaluation.metrics import make_metrics
from mtrain.interop.formats import require_exports
from mtrain.training.complete_config import complete_config, is_incomplete
from mtrain.training.loop import Trainer
from mtrain.training.prepare import prepare_run
from mtrain.training.run_folder import locked_run_folder, write_config
from mtrain.training.signals import StopSignal


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
    run_dir = Path(config.run_dir)
    check_corpora(config.data, find_data_folder(config.data, run_dir))
    make_metrics(("bleu", "chrf"), config.data.target_lang)  # missing dependencies are reported at startup
    with locked_run_folder(run_dir):
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
    config, tokenizer, data, checkpoint, initial_model, choices = prepare_run(
        config, resume, allow_data_change, quiet
    )
    if is_incomplete(config):
        config = complete_config(config, tokenizer, data, torch_device, choices)
        write_config(config)
    return Trainer(config, tokenizer, data, torch_device, checkpoint, quiet, initial_model)
