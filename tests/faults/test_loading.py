"""Faults of what is loaded, each named by its number in the list of faults that mtrain answers for."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.errors import ModelError
from mtrain.modelfolder import load_model
from mtrain.storage import write_manifest


@pytest.fixture
def folder(run_dir, tmp_path) -> Path:
    return Path(shutil.copytree(run_dir / "model", tmp_path / "model"))


def rewritten(folder: Path, change) -> None:
    """Change the tensors of a model folder, and make its manifest right again."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    write_manifest(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"d_model: \d+", "d_model: 16384"),
        (r"ffn_dim: \d+", "ffn_dim: 65536"),
        (r"encoder_layers: \d+", "encoder_layers: 256"),
        (r"max_positions: \d+", "max_positions: 1000000000"),
    ],
)
def test_25_sizes_that_disagree_with_the_weights_take_no_memory(folder, old, new):
    """The process may take no more than it has taken for importing and loading what is right."""
    config = (folder / "config.yaml").read_text()
    changed = re.sub(old, new, config)
    assert changed != config
    good = shutil.copytree(folder, folder.with_name("good"))
    (folder / "config.yaml").write_text(changed)
    write_manifest(folder)
    code = f"""if True:
        import resource
        from pathlib import Path
        from mtrain.errors import ModelError
        from mtrain.modelfolder import load_model
        load_model(Path({str(good)!r}))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            load_model(Path({str(folder)!r}))
            print("loaded")
        except ModelError as error:
            print(error)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    message, grown = done.stdout.strip().split("\n")
    assert int(grown) < 100_000  # KiB
    assert "the model has" in message or "tensors missing" in message or message == "loaded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["encoder_norm.bias"].fill_(float("nan")), "encoder_norm.bias holds NaN"),
        (lambda t: t["encoder_norm.bias"].fill_(float("-inf")), "encoder_norm.bias holds NaN"),
        (lambda t: t.pop("encoder_norm.bias"), r"tensors missing: \['encoder_norm.bias'\]"),
        (lambda t: t.update(extra=torch.ones(3)), r"not expected: \['extra'\]"),
        (
            lambda t: t.update({"encoder_norm.bias": torch.ones(3)}),
            r"encoder_norm.bias is \[3\]; the model has",
        ),
        (lambda t: t.update({"encoder_norm.bias": torch.ones(64).long()}), "or integers"),
    ],
)
def test_26_tensors_that_are_not_right_are_named(folder, change, message):
    rewritten(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_26_weights_in_fewer_bits_are_widened(folder):
    rewritten(folder, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    model = load_model(folder).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("contents", [b"", b"\x00" * 7, b"\xff" * 64, (2**60).to_bytes(8, "little") + b"{}"])
def test_25_a_header_that_lies_is_an_error(folder, contents):
    (folder / "model.safetensors").write_bytes(contents)
    write_manifest(folder)
    with pytest.raises(ModelError, match="cannot read"):
        load_model(folder)


def test_25_a_huge_manifest_is_an_error(folder):
    (folder / "manifest.json").write_text(json.dumps({"a": {"size": 1}}) + " " * 100 + "]")
    with pytest.raises(ModelError, match="damaged"):
        load_model(folder)
