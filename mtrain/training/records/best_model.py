"""Publishes the best weights of a run as its model folder, `RUN/model`."""

import logging
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from mtrain.checkpoint.checkpoint import evaluation_weights, rename_superseded, verify_checkpoint
from mtrain.checkpoint.model_folder import folder_config, save_model_folder
from mtrain.checkpoint.model_info import Origin, name_of, new_info, read_info
from mtrain.checkpoint.state import TrainState
from mtrain.config.schema import Config
from mtrain.config.yaml_io import to_yaml
from mtrain.errors import ModelError
from mtrain.regular_files import read_file
from mtrain.runs.describe import describe_run
from mtrain.storage.generated import is_unedited
from mtrain.storage.manifest import CARD, MANIFEST, read_json, verify_folder
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def publish_best(state: TrainState, config: Config, tokenizer: Tokenizer, verify: bool) -> bool:
    """Write the weights of the best checkpoint to the model folder `RUN/model`, unless it is up to date.

    If training has returned to an older checkpoint, a model from a later step is renamed to superseded-*,
    with its records. Returns False if the best weights are lost. Raises StorageError.
    """
    run_dir = Path(config.run_dir)
    folder, step = run_dir / "model", None  # the step of its weights, if it is recorded
    with suppress(ModelError):
        step = getattr(read_info(folder).training, "steps", None)
    if step is not None and step > state.step:
        found = (run_dir / name for name in ("model", "best_validation.json", "test_scores.json"))
        for path in filter(Path.exists, found):
            rename_superseded(path)
    if state.best_step is None:
        return True
    best = run_dir / "checkpoints" / f"step-{state.best_step:08d}"
    contents = to_yaml(folder_config(config, tokenizer, state.best_alignment_layer))
    if _is_published(folder, best, contents, verify):
        return True
    try:
        if not best.exists():
            raise ModelError(f"{best}: no longer exists")
        verify_checkpoint(best)
    except ModelError as error:
        log.warning("%s; model/ is not updated", error)
        return step == state.best_step
    try:
        info = describe_run(run_dir, config, state.best_step)
    except Exception as error:  # the model can be used without it, and training can continue
        log.warning("%s: cannot describe the run: %s", run_dir, error)
        info = new_info(name_of(run_dir), Origin(kind="trained"))
    write_weights = partial(shutil.copyfile, evaluation_weights(best))
    save_model_folder(folder, write_weights, contents, tokenizer, info)
    card = folder / CARD
    if not is_unedited(card):
        log.info("%s was edited and is kept; `mtrain info %s --card` prints a new one", card, run_dir)
    return True


def _is_published(folder: Path, best: Path, contents: str, verify: bool) -> bool:
    """Whether a model folder has the weights of the checkpoint `best` and the config `contents`. With
    `verify`, its files are read; otherwise, its manifest tells."""
    with suppress(OSError, ValueError, LookupError, TypeError, ModelError):
        old, new = (read_json(path / MANIFEST) for path in (folder, best))
        same = old["model.safetensors"] == new[evaluation_weights(best).name]
        if same and read_file(folder / "config.yaml") == contents.encode():
            if verify:
                verify_folder(folder, ["config.yaml", "model.safetensors"])
            return True
    return False
