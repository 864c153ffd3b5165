"""`mtrain fit`: prepare the run folder, the tokenizer and the data, then train."""

import json
from contextlib import nullcontext
from pathlib import Path

from mtrain.config.schema import Config
from mtrain.data.preparing.inputs import check_corpora
from mtrain.data.store.folder import DataFolder
from mtrain.device import keep_freed_memory, limit_onednn_cache, resolve_device
from mtrain.distributed.launch import read_launch, require_torchrun
from mtrain.distributed.many_ranks import joined_ranks
from mtrain.distributed.ranks import Ranks
from mtrain.errors import Interrupted
from mtrain.kernels.reproducible import fix_workspaces
from mtrain.processes.stop_signals import REPEATED, STOP_SIGNALS, Handler, StopSignal
from mtrain.runs.json_records import leaves
from mtrain.training.loop import train
from mtrain.training.setup.complete import assumed_speed_of, complete_config
from mtrain.training.setup.prepare_run import check_exports, open_prepared_run, prepare_run, require_metrics
from mtrain.training.setup.run_folder import locked_run_folder, write_config
from mtrain.training.trainer import Trainer


def fit(
    config: Config,
    resume: str = "auto",
    device: str = "auto",
    allow_data_change: bool = False,
    on_second_signal: Handler | None = None,
) -> None:
    """Train the model of a config and publish the best weights in `RUN/model`.

    If torchrun has started several processes, each is given a device and a share of the work. Rank 0 writes
    the files of the run.

    `resume`: `auto` resumes from the newest valid checkpoint, if there is one; `never` requires a run
    folder without checkpoints; a path resumes from that checkpoint. When torchrun restarts the processes, it
    is always `auto`.
    With `allow_data_change`, a run may resume with a changed corpus, from the start of an epoch.
    `on_second_signal` handles a second stop signal; by default, the handler that was set before does. Among
    several ranks, further signals are ignored.

    Raises the errors of `mtrain.errors`; Interrupted after a stop signal, once the state is saved.
    """
    require_torchrun()
    fix_workspaces()
    with joined_ranks(device) as ranks:
        given = {"--resume": resume, "--allow-data-change": str(allow_data_change)}
        keys = {key: json.dumps(value) for key, value in leaves(config.model_dump(mode="json"))}
        ranks.require_equal(keys | given)
        # The maximum of all, because torchrun on a new machine counts from zero.
        [restarts] = ranks.all_reduce_max(read_launch().restarts)
        if restarts:
            resume = "auto"
        run_dir, folder = Path(config.run_dir), None
        if ranks.is_first:
            check_exports(config)
            folder = DataFolder.of_run(config.data, run_dir)
            check_corpora(config.data, folder)
        require_metrics(config)
        with locked_run_folder(run_dir) if ranks.is_first else nullcontext():
            trainer = make_trainer(config, resume, device, allow_data_change, ranks, folder)
            # torchrun forwards what the system sends to all processes. It kills those that take long.
            repeated = STOP_SIGNALS if ranks.size > 1 else REPEATED
            with StopSignal(on_second_signal, repeated) as stop:
                train(trainer, stop)
            if stop.received is not None:  # in the last validation
                raise Interrupted(f"stopped by {stop.received.name}; training has finished", stop.received)


def make_trainer(
    config: Config,
    resume: str = "auto",
    device: str = "auto",
    allow_data_change: bool = False,
    ranks: Ranks | None = None,
    folder: DataFolder | None = None,
) -> Trainer:
    """Prepare the run and complete its config on rank 0, open it on the other ranks, and make a trainer.

    For arguments and errors, see `fit`; `ranks` have the device already, and `folder` is the data folder
    of the run, which rank 0 has opened. The run folder is not locked.
    """
    ranks = ranks or Ranks(resolve_device(device))
    limit_onednn_cache()
    run = None
    if ranks.is_first:
        run = prepare_run(config, folder, resume, allow_data_change, speed=assumed_speed_of(ranks))
    keep_freed_memory()  # only now, so that the memory for learning the tokenizer was returned to the system
    if run:
        completed = complete_config(run.config, run.tokenizer, run.data, ranks, run.choices)
        run = run._replace(config=completed)
        write_config(run.config)  # only now: if the data cannot be used, a resumed run keeps its config
    description = ranks.broadcast(run and run.describe(), preparing=True)
    run = run or open_prepared_run(description)
    fingerprints = {"the tokenizer": run.tokenizer.fingerprint, "the training data": run.data.fingerprint}
    ranks.require_equal(fingerprints)
    return Trainer(run, ranks)
