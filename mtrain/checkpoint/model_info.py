"""What is known about a model besides its settings: `info.json` in a model folder, or in an exported one.

The file is not part of the manifest, and no command but `mtrain info` depends on it. Nothing here imports
PyTorch.
"""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from mtrain.config.load import read_config, validate
from mtrain.config.schema import Format, ModelFolderConfig
from mtrain.errors import ModelError
from mtrain.regular_files import read_file
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import INFO, MANIFEST, read_json
from mtrain.version import __version__

Text = Annotated[str, Field(max_length=1000)]
Total = Annotated[int, Field(ge=0, lt=2**63)]
Value = Annotated[float, Field(allow_inf_nan=False)]
_IMPORT = "can be imported with `mtrain import`"
RUN_HEADER = "# Written by mtrain: the resolved config of this run.\n"  # of RUN/config.yaml


class _Part(BaseModel):
    """A part of info.json. Keys of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Score(_Part):
    """The score of a model on a validation or test set."""

    set: Text  # its name
    split: Literal["validation", "test"]
    sentences: Total | None = None
    metric: Text  # such as `bleu`
    title: Text  # such as `BLEU`
    value: Value
    signature: Text | None = None  # of sacreBLEU

    @property
    def rounded(self) -> str:
        """The value as text."""
        return f"{self.value:.{3 if self.metric in ('nll', 'auc') else 2}f}"


class CorpusInfo(_Part):
    """A corpus, as it was when it was encoded."""

    name: Text  # without the folders of a local file
    pairs: Total | None = None  # that were trained on
    sha256: Text | None = None  # of its contents
    hub: Text | None = None  # the name of a dataset on the Hugging Face Hub


class DataInfo(_Part):
    """The data of a training."""

    fingerprint: Text | None = None  # SHA-256 of the contents of all corpora and the settings of encoding
    train: list[CorpusInfo] = []
    validation: list[CorpusInfo] = []


class TrainingInfo(_Part):
    """How long a model was trained."""

    steps: Total
    epochs: Total | None = None  # that were complete
    target_tokens: Total | None = None
    seconds: Value | None = None


class Ancestor(_Part):
    """A model that another one was made from."""

    name: Text  # on the Hugging Face Hub, or of a local folder
    hub: bool = False
    fingerprint: Text | None = None  # SHA-256 of its manifest
    origin: "Origin | None" = None
    repeated: Literal[True] | None = None  # its origin is left out: an earlier ancestor is the same model


class Origin(_Part):
    """How a model was made."""

    kind: Literal["trained", "imported", "averaged"]
    ancestors: list[Ancestor] = []  # of a trained model: the one that training started from
    license: Text | None = None  # of an imported model


class ExportInfo(_Part):
    """What a model was exported to. Its folder has no config.yaml."""

    format: Format
    folder: Text | None = None  # its name
    quantization: Text | None = None
    parameters: Total
    config: ModelFolderConfig
    changed: bool = False  # whether settings of the model were changed for the export


class ModelInfo(_Part):
    """The contents of info.json."""

    mtrain: Text | None = None  # version
    name: Text | None = None
    origin: Origin | None = None
    training: TrainingInfo | None = None
    data: DataInfo | None = None
    scores: list[Score] = []
    export: ExportInfo | None = None


def new_info(name: str, origin: Origin, **parts: Any) -> ModelInfo:
    """What this version of mtrain writes about a new model."""
    return ModelInfo(mtrain=__version__, name=name, origin=_without_repetitions(origin, set()), **parts)


def _without_repetitions(origin: Origin, seen: set[str]) -> Origin:
    """An origin that has the origin of each ancestor only once. Otherwise its size would grow exponentially
    with rounds of training and averaging. The fingerprints of its ancestors are added to `seen`."""
    ancestors = []
    for ancestor in origin.ancestors:
        if ancestor.fingerprint in seen:
            ancestor = ancestor.model_copy(update={"origin": None, "repeated": True})
        elif ancestor.origin is not None:
            kept = _without_repetitions(ancestor.origin, seen)
            ancestor = ancestor.model_copy(update={"origin": kept})
        if ancestor.fingerprint is not None:
            seen.add(ancestor.fingerprint)
        ancestors.append(ancestor)
    return origin.model_copy(update={"ancestors": ancestors})


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder with checkpoints or, if these were removed, with the best model."""
    return (path / "checkpoints").is_dir() or (has_run_config(path) and (path / "model" / MANIFEST).is_file())


def has_run_config(path: Path) -> bool:
    """Whether the config.yaml of a folder belongs to a run."""
    with suppress(OSError):
        return read_file(path / "config.yaml").startswith(RUN_HEADER.encode())
    return False


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of a run."""
    return bool(_runs_around(path)) and (path / "state.json").is_file()


def _runs_around(path: Path) -> list[Path]:
    """The folders of which `path` is a checkpoint by its name, as it is given and without links; those with a
    config first, because other folders may be named `checkpoints`, too."""
    places = [place for place in (path.absolute(), path.resolve()) if place.parent.name == "checkpoints"]
    return sorted((place.parents[1] for place in places), key=lambda run: not (run / "config.yaml").exists())


def run_folder_of(path: Path) -> Path | None:
    """The run folder that `path` is, or whose model folder or checkpoint it is; None for other models."""
    if is_run(path):
        return path
    if is_checkpoint(path):
        return _runs_around(path)[0]
    places = (path.absolute(), path.resolve())
    return next((each.parent for each in places if each.name == "model" and is_run(each.parent)), None)


def model_folder_of(path: Path) -> Path:
    """The model folder of a run folder; `path` itself if it is not a run folder."""
    return path / "model" if is_run(path) else path


def require_folder(path: Path) -> None:
    """Raise ModelError if a path is no folder."""
    if not path.is_dir():
        hint = "" if path.exists() or path.parent.exists() else f"; a model of the Hugging Face Hub {_IMPORT}"
        problem = "not a folder" if path.exists() else "no such model or run folder"
        raise ModelError(f"{path}: {problem}{hint}")


def require_model(path: Path) -> None:
    """Raise ModelError if a path is no folder, or a model of another program."""
    require_folder(path)
    if has_run_config(path) and not is_run(path):
        raise ModelError(f"{path}: this run has no model yet; `mtrain fit` saves the first one")
    if (path / "state.json").exists() and not is_checkpoint(path):
        cure = "give the run folder, or a copy of its folder model"
        raise ModelError(f"{path}: is a checkpoint outside of its run; {cure}")
    if not (path / "config.yaml").exists() and not is_run(path):
        if (path / "model.bin").exists():
            kind = "a model for CTranslate2 or Bergamot"
            raise ModelError(f"{path}: is {kind}; give the model that it was exported from")
        if (path / "config.json").exists() and not is_checkpoint(path):
            raise ModelError(f"{path}: is not a model of mtrain; a Hugging Face model {_IMPORT}")


def read_info(folder: Path) -> ModelInfo:
    """What info.json says; nothing if the folder has none. Raises ModelError if it is damaged."""
    file = folder / INFO
    if not file.exists():
        return ModelInfo()
    try:
        return ModelInfo.model_validate(read_json(file))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ModelError(f"{file}: damaged, or of another version: {place}: {first['msg']}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: damaged: {error}") from None


def write_info(folder: Path, info: ModelInfo) -> None:
    """Write info.json. Raises StorageError."""
    text = json.dumps(info.model_dump(mode="json", exclude_none=True), indent=1, ensure_ascii=False)
    write_atomically(folder / INFO, text + "\n")


def describe_ancestor(path: Path, fingerprint: str | None = None) -> Ancestor:
    """A model (run or model folder, or checkpoint) that another one is made from."""
    info = ModelInfo()
    with suppress(ModelError):
        info = read_known_info(path)
    name = info.name or name_of(model_folder_of(path))
    return Ancestor(name=name, fingerprint=fingerprint, origin=info.origin)


def read_known_info(path: Path) -> ModelInfo:
    """The info.json of a run or model folder; for a checkpoint, or a run without an info.json, only the
    origin. Raises ModelError if the info.json is damaged."""
    folder, run = model_folder_of(path), run_folder_of(path)
    if run is None or (folder / INFO).exists():
        return read_info(folder)
    return ModelInfo(origin=Origin(kind="trained", ancestors=ancestors_of_run(run)))


def ancestors_of_run(run_dir: Path) -> list[Ancestor]:
    """The model that a run started from, if any."""
    with suppress(ValueError, KeyError, TypeError):  # also of pydantic
        recorded = read_json(run_dir / "origin.json")
        return [Ancestor.model_validate({"name": name_of(Path(recorded["init_from"])), **recorded})]
    return []


class Description(NamedTuple):
    """A model folder, or an exported model, without its weights."""

    folder: Path
    name: str
    config: ModelFolderConfig
    info: ModelInfo
    parameters: int | None  # None if the weights cannot be read
    data_type: str | None  # of the weights, such as F32
    problem: str | None  # of info.json


def describe_model(folder: Path) -> Description:
    """Read a model folder, or an exported model, without loading the weights or verifying the manifest.

    Raises ModelError if it is neither, or if its settings cannot be read. A damaged info.json is only noted.
    """
    info, problem = ModelInfo(), None
    try:
        info = read_info(folder)
    except ModelError as error:
        if not (folder / "config.yaml").exists():
            raise
        problem = str(error)
    name = info.name or name_of(folder)
    if info.export is not None and not (folder / "config.yaml").exists():
        export = info.export
        return Description(folder, name, export.config, info, export.parameters, export.quantization, None)
    config = read_model_config(folder)
    return Description(folder, name, config, info, *_weights(folder / "model.safetensors"), problem)


def read_model_config(folder: Path) -> ModelFolderConfig:
    """The settings of a model folder. Raises ModelError if they cannot be read."""
    require_model(folder)
    file = folder / "config.yaml"
    if not file.exists():
        raise ModelError(f"{folder}: not a run or model folder: config.yaml is missing")
    return validate(ModelFolderConfig, read_config(file, ModelError), str(file), ModelError)


def name_of(folder: Path) -> str:
    """The name of a run or model folder. A model folder in a run folder has the name of the run. A
    checkpoint has the name of the run, followed by its own name."""
    name = (run_folder_of(folder) or folder).resolve().name
    if is_checkpoint(folder):
        name += f", {folder.resolve().name}"
    return os.fsencode(name).decode("utf-8", "replace") or "model"


def _weights(file: Path) -> tuple[int | None, str | None]:
    """The number of parameters in a safetensors file, and the data type of the first."""
    if file.is_file():
        with suppress(OSError, SafetensorError, MemoryError), safe_open(file, "numpy") as stored:
            slices = [stored.get_slice(name) for name in stored.keys()]  # noqa: SIM118
            sizes = [math.prod(part.get_shape()) for part in slices]
            return sum(sizes), slices[0].get_dtype() if slices else None
    return None, None
