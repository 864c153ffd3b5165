"""Reading Hugging Face model folders, from disk or from the Hub. Their files are not trusted."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrain.checkpoint.tensors import load_tensors
from mtrain.errors import ModelError
from mtrain.paths import path_of
from mtrain.regular_files import MAX_JSON_BYTES
from mtrain.storage.manifest import read_json

SENTENCEPIECE = "sentencepiece.bpe.model"  # of all tokenizers but Marian's
_FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "vocab.json", "target_vocab.json"]
_FILES += ["source.spm", "target.spm", SENTENCEPIECE, "tokenizer.json", "special_tokens_map.json"]
_FILES += ["added_tokens.json", "tokenization_*.py", "README.md"]
_OF_MARIAN = ["*.npz", "model*.bin*", "*.spm", "*vocab*.yml", "model_info.json"]  # of the program
_MODEL_TYPES = ("marian", "m2m_100", "pegasus")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in order of preference
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_POINTER = b"version https://git-lfs"  # the beginning of a file that Git LFS has not fetched
_INDEX = ".index.json"  # in place of the weights: names the file of each tensor, if there are several


def source_folder(source: str) -> Path:
    """A local folder, or a downloaded copy of a model on the Hugging Face Hub. Raises ModelError."""
    if source and (local := path_of(source)).exists():
        if not local.is_dir():
            is_archive = local.suffix in (".zip", ".argosmodel", ".tar", ".tgz", ".gz", ".zst", ".bz2")
            raise ModelError(f"{source}: not a folder" + "; unpack it, and give the folder" * is_archive)
        return local
    from huggingface_hub import snapshot_download

    def fetch(*names: str) -> Path:
        return Path(snapshot_download(source, allow_patterns=[*_FILES, *names]))

    try:
        folder = fetch()
        if not (folder / "config.json").exists():
            return fetch(*_OF_MARIAN)
        read_config(folder)  # before the weights, which take long
        for name in WEIGHTS:
            fetch(name, name + _INDEX, f"{Path(name).stem}-*{Path(name).suffix}")
            if (folder / name).exists() or (folder / (name + _INDEX)).exists():
                break
    except ModelError:
        raise
    except Exception as error:  # huggingface_hub and its network library raise many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        problem = "no such folder, and not available from the Hugging Face Hub"
        raise ModelError(f"{source}: {problem}: {reason}") from None
    return folder


def read_object(file: Path, optional: bool = False, most: int | None = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `most` bytes (None: as any JSON file); empty if the file is
    `optional` and missing. Raises ModelError."""
    if not file.exists():
        if optional:
            return {}
        raise ModelError(f"{file}: missing")
    try:
        value = read_json(file, most)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model of a supported type. Raises ModelError."""
    config = read_object(folder / "config.json")
    if config.get("model_type") not in _MODEL_TYPES:
        known = "neither a MarianMT, M2M-100 or NLLB-200 model, nor a Pegasus model of mtrain"
        raise ModelError(f"{folder}: {known}; model_type in config.json is {config.get('model_type')!r}")
    return config


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The weights file of a folder, or the index of several, and the tensors. No pickled code is executed.

    Raises ModelError if there is no such file, if one is missing or damaged, or if a value is not a dense
    tensor of floating-point numbers that are all stored in the file.
    """
    candidates = [folder / (name + end) for name in WEIGHTS for end in ("", _INDEX)]
    file = next(filter(Path.is_file, candidates), None)
    if file is None:
        names = " nor ".join(WEIGHTS)
        raise ModelError(f"{folder}: contains neither {names}, nor the index of several such files")
    tensors = _read_shards(file) if file.name.endswith(_INDEX) else _read_file(file)
    for name, tensor in tensors.items():
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        if not plain or tensor.dtype not in _DTYPES:
            raise ModelError(f"{file}: {name} is not a dense tensor of fp64, fp32, fp16 or bf16 numbers")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise ModelError(f"{file}: {name} has fewer numbers than its shape requires")
    return file, tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ModelError(f"{file}: is only a pointer of Git LFS; run `git lfs pull` in its folder")
    return load_tensors(file) if file.suffix == ".safetensors" else _unpickled(file)


def _read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors that an index lists, each from the file that it names."""
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{index}: weight_map does not map the names of tensors to files")
    kind = Path(index.name.removesuffix(_INDEX)).suffix
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(map(str, listed.values())):
        if Path(name).name != name or Path(name).suffix != kind:
            raise ModelError(f"{index}: {name}: not the name of a {kind} file in the same folder")
        if not (file := index.with_name(name)).is_file():
            raise ModelError(f"{file}: missing, but {index.name} lists it; copy or download all shards")
        stored = _read_file(file)
        wanted = [tensor for tensor, place in listed.items() if place == name]
        if absent := sorted(set(wanted) - stored.keys()):
            raise ModelError(f"{file}: has no tensor {absent[0]}, which {index.name} lists")
        tensors |= {tensor: stored[tensor] for tensor in wanted}
    return tensors


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        mapped = zipfile.is_zipfile(file)  # files from PyTorch versions before 1.6 are not
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # damaged files raise errors of many types
        problem = f"damaged, or contains objects other than weights ({type(error).__name__})"
        raise ModelError(f"{file}: {problem}") from None
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise ModelError(f"{file}: expected a mapping of names to tensors")
    return tensors
