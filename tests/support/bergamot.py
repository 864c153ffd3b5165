"""Marian's binary format and its Transformer in NumPy, independent of mtrain, and the real engine."""

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

Arrays = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="session")
def engine() -> Path:
    """The folder of the npm package @browsermt/bergamot-translator, which MTRAIN_BERGAMOT names."""
    folder = os.environ.get("MTRAIN_BERGAMOT")
    if not folder or shutil.which("node") is None:
        pytest.skip("needs Node, and MTRAIN_BERGAMOT with the folder of @browsermt/bergamot-translator")
    return Path(folder)


def read_binary(file: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of a model, of which those in int8 are restored, and its options."""
    data = file.read_bytes()
    version, count = struct.unpack_from("<QQ", data)
    assert version == 1
    headers = [struct.unpack_from("<QQQQ", data, 16 + 32 * i) for i in range(count)]
    at, names, shapes, arrays = 16 + 32 * count, [], [], {}
    for length, *_ in headers:
        names.append(data[at : at + length - 1].decode())
        at += length
    for _, _, dimensions, _ in headers:
        shapes.append(struct.unpack_from(f"<{dimensions}i", data, at))
        at += 4 * dimensions
    at += 8 + struct.unpack_from("<Q", data, at)[0]
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        assert at % 256 == 0 and size % 256 == 0
        number = int(np.prod(shape))
        if kind == 0x0404:
            arrays[name] = np.frombuffer(data, "<f4", number, at).reshape(shape)
        elif kind == 0x4101:
            integers = np.frombuffer(data, "i1", number, at).astype("f4")
            integers = integers / struct.unpack_from("<f", data, at + number)[0]
            arrays[name] = integers.reshape(shape) if "Wemb" in name else integers.reshape(shape[::-1]).T
        else:
            assert (name, kind) == ("special:model.yml", 0x0101)
            options = yaml.safe_load(data[at : at + number].rstrip(b"\0"))
        at += size
    assert at == len(data)
    return arrays, options


def log_probs(arrays: Arrays, options: dict[str, Any], source: list[int], target: list[int]) -> Any:
    """The log-probabilities (T, V) after each prefix of target ids, for source ids that end in EOS."""
    width, heads = options["dim-emb"], options["transformer-heads"]
    tied, everything = options["tied-embeddings"], options["tied-embeddings-all"]
    tables = [arrays["Wemb" if everything else f"{side}_Wemb"] for side in ("encoder", "decoder")]
    output = tables[1] if tied or everything else arrays["decoder_ff_logit_out_Wt"]

    def norm(x: Any, name: str) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        x = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        return x * arrays[f"{name}_ln_scale"] + arrays[f"{name}_ln_bias"]

    def attend(x: Any, memory: Any, name: str, mask: Any = 0.0) -> Any:
        q, k, v = (
            (y @ arrays[f"{name}_W{c}"] + arrays[f"{name}_b{c}"]).reshape(len(y), heads, -1).swapaxes(0, 1)
            for y, c in ((x, "q"), (memory, "k"), (memory, "v"))
        )
        scores = q @ k.swapaxes(1, 2) / np.sqrt(width // heads) + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        joined = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(x), width)
        return norm(x + joined @ arrays[f"{name}_Wo"] + arrays[f"{name}_bo"], f"{name}_Wo")

    def feed(x: Any, name: str) -> Any:
        inner = np.maximum(x @ arrays[f"{name}_W1"] + arrays[f"{name}_b1"], 0)
        return norm(x + inner @ arrays[f"{name}_W2"] + arrays[f"{name}_b2"], f"{name}_ffn")

    def positions(length: int) -> Any:
        half = width // 2
        angles = np.arange(length)[:, None] * 1e-4 ** (np.arange(half) / (half - 1))
        return np.concatenate([np.sin(angles), np.cos(angles)], 1)

    memory = tables[0][source] * np.sqrt(width) + positions(len(source))
    for i in range(1, options["enc-depth"] + 1):
        memory = feed(attend(memory, memory, f"encoder_l{i}_self"), f"encoder_l{i}_ffn")
    embedded = np.concatenate([np.zeros((1, width)), tables[1][target] * np.sqrt(width)])
    x = embedded + positions(len(embedded))
    mask = np.triu(np.full((len(x), len(x)), -1e9), 1)
    for i in range(1, options["dec-depth"] + 1):
        x = attend(attend(x, x, f"decoder_l{i}_self", mask), memory, f"decoder_l{i}_context")
        x = feed(x, f"decoder_l{i}_ffn")
    logits = x @ output.T + arrays["decoder_ff_logit_out_b"]
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
