"""A small corpus, a model that has memorized it, and functions that train and compare runs."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from filelock import FileLock
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from mtrain.checkpoint.model_folder import load_model
from mtrain.checkpoint.state import TrainState
from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.data.epochs.loader import make_batch
from mtrain.model.transformer import Transformer
from mtrain.training.fit import fit
from mtrain.training.model_selection import ModelSelection
from mtrain.training.records.progress import Progress
from mtrain.training.validation.translation import Scores
from tests.support.configs import MINIMAL
from tests.support.encoding import prepare_data

PAIRS = [
    ("A cat sleeps.", "Eine Katze schläft."),
    ("The dog runs in the park.", "Der Hund rennt im Park."),
    ("Two women are talking.", "Zwei Frauen reden."),
    ("A man reads a newspaper on a bench.", "Ein Mann liest auf einer Bank eine Zeitung."),
    ("Children play with a ball.", "Kinder spielen mit einem Ball."),
    ("The sun shines.", "Die Sonne scheint."),
    ("She rides a red bicycle to work.", "Sie fährt mit einem roten Fahrrad zur Arbeit."),
    ("It rains.", "Es regnet."),
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with eight pairs in `train.en` and `train.de`."""
    folder = tmp_path_factory.mktemp("corpus")
    for index, language in enumerate(("en", "de")):
        text = "".join(f"{pair[index]}\n" for pair in PAIRS)
        (folder / f"train.{language}").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def raw_config(corpus: Path) -> dict[str, Any]:
    """The config of a small run on that corpus as a dictionary, without `run_dir`."""
    files = {"source": str(corpus / "train.en"), "target": str(corpus / "train.de")}
    return {
        "data": {
            "source_lang": "en",
            "target_lang": "de",
            "train": files,
            "validation": files,
            "test": {"seen": files},
            "max_length": 64,
        },
        "tokenizer": {"vocab_size": 330},
        "model": {"d_model": 32, "ffn_dim": 64, "heads": 2, "encoder_layers": 1, "decoder_layers": 1},
        "training": {
            "max_steps": 8,
            "batch_tokens": 64,
            "schedule": "constant",
            "learning_rate": 0.005,
            "warmup_steps": 4,
            "validate_every": 4,
            "checkpoint_every": 4,
            "log_every": 2,
            "precision": "fp32",  # `auto` differs between machines
        },
        "decoding": {"precision": "fp32"},
    }


@pytest.fixture
def make_config(raw_config: dict[str, Any], tmp_path: Path) -> Callable[..., Config]:
    """Make that config with changed sections: `make_config(training={"max_steps": 4})`."""

    def make(run: str = "run", **sections: dict[str, Any]) -> Config:
        raw = merged(raw_config, str(tmp_path / run), **sections)
        # Untrained models rarely end a sentence.
        raw["decoding"] = {"max_length_ratio": 0.5, **raw["decoding"]}
        return validate(Config, raw, "test")

    return make


def make_progress(run_dir: Path, step: int = 0) -> Progress:
    """The progress of a run with a minimal config."""
    config = validate(Config, {**yaml.safe_load(MINIMAL), "run_dir": str(run_dir)}, "test")
    return Progress(config, TrainState(step=step), 200, "fp32", is_first=True)


@pytest.fixture
def config_file(raw_config: dict[str, Any], tmp_path: Path) -> Path:
    """That config as a YAML file; its run folder is `run/` beside it."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(merged(raw_config, str(tmp_path / "run"))))
    return file


@pytest.fixture(scope="session")
def run_dir(raw_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose model has memorized the eight pairs.

    It is trained once for all processes of pytest-xdist, so a test that changes it has to copy it first.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "by-heart"
    with FileLock(f"{folder}.lock"):
        if not folder.with_suffix(".done").exists():
            _memorize(raw_config, folder)
            folder.with_suffix(".done").touch()
    return folder


def _memorize(raw_config: dict[str, Any], folder: Path) -> None:
    recipe = {"max_steps": 200, "batch_tokens": 512, "validate_every": 100, "checkpoint_every": 100}
    model = {"d_model": 64, "dropout": 0.0, "encoder_layers": 2, "decoder_layers": 2}
    raw = merged(raw_config, str(folder), training={**recipe, "label_smoothing": 0.0}, model=model)
    fit(validate(Config, raw, "test"), device="cpu")


def merged(raw: dict[str, Any], run: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A copy of `raw` with a run folder and changed sections."""
    raw = copy.deepcopy(raw)
    raw["run_dir"] = run
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return raw


def read_metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple]:
    """Step, epoch, loss, nll and gradient norm of each logged step."""
    return [
        (line["step"], line["epoch"], line["loss"], line["nll"], line["grad_norm"])
        for line in read_metrics(run)
        if "loss" in line
    ]


def last_checkpoint(run: Path) -> Path:
    """The folder of the newest checkpoint."""
    return run / "checkpoints" / json.loads((run / "checkpoints/index.json").read_text())["last"]


def same_weights(one: Path, other: Path) -> bool:
    """Whether weights and optimizer of two runs are equal in every byte."""
    names = ("model.safetensors", "optimizer.safetensors")
    folders = last_checkpoint(one), last_checkpoint(other)
    return all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)


def fit_on_cpu(config: Config, resume: str = "auto") -> Path:
    """Train on the CPU and return the run folder."""
    fit(config, resume, device="cpu")
    return Path(config.run_dir)


class Poisoned(nn.Module):
    """A model whose hidden states are NaN if `poison` is set."""

    def __init__(self, model):
        super().__init__()
        self.model, self.poison = model, False
        self.config = model.config

    def forward(self, *inputs):
        hidden = self.model(*inputs)
        return hidden * float("nan") if self.poison else hidden

    def loss(self, *inputs):
        return self.model.loss(*inputs)


@pytest.fixture
def parts(make_config, run_dir):
    """A config without dropout and clipping, a model in fp64, its data, and its tokenizer."""
    config = make_config(model={"dropout": 0.0}, training={"clip_norm": 0.0})
    loaded = load_model(run_dir)
    data = prepare_data(config.data, loaded.tokenizer, Path(config.run_dir) / "data", config.seed)
    return config, loaded.model.double().train(), data, loaded.tokenizer


def batches_of(rows_of_each, data, tokenizer, device="cpu"):
    """A batch for each list of rows of the training data, of the kind that suits the device."""
    special, device = tokenizer.special, torch.device(device)
    corpus = data.train.encoded()
    sides = [(*corpus.fetch(rows), rows) for rows in rows_of_each]
    return [
        make_batch(device, source, target, special.pad, special.bos, rows) for source, target, rows in sides
    ]


def weights(model) -> dict[str, torch.Tensor]:
    """Copies of the parameters of a model."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def on_training_forward() -> Iterator[Callable[[Callable[[Tensor, Tensor], Tensor | None]], None]]:
    """Register a function that is called after each forward pass of a Transformer in training mode.

    It gets the source ids (B, S) and the hidden states, and may raise or return other hidden states.
    """
    handles = []

    def register(change: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        def hook(module: nn.Module, inputs: tuple[Any, ...], hidden: Tensor) -> Tensor | None:
            training = isinstance(module, Transformer) and module.training
            return change(inputs[1].by_row(inputs[0]), hidden) if training else None

        handles.append(register_module_forward_hook(hook))

    yield register
    for handle in handles:
        handle.remove()


@pytest.fixture
def scripted_scores(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let validations report the given scores in turn instead of decoding."""

    def script(*scores: Scores) -> None:
        remaining = iter(scores)
        monkeypatch.setattr(ModelSelection, "scores_of", lambda *_: next(remaining))

    return script


def with_bleu(bleu: float) -> Scores:
    """Scores of a validation that differ in BLEU alone."""
    return Scores(1.0, 3, bleu, 20, {})


@pytest.fixture
def set_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let PyTorch report a number of threads; training uses a worker for each of up to four."""

    def set_(threads: int) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))

    return set_


@pytest.fixture
def set_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the operating system report a size of the machine's memory in bytes."""
    sysconf, page = os.sysconf, os.sysconf("SC_PAGE_SIZE")

    def set_memory(size: int) -> None:
        monkeypatch.setattr(
            os, "sysconf", lambda name: size // page if name == "SC_PHYS_PAGES" else sysconf(name)
        )

    return set_memory
