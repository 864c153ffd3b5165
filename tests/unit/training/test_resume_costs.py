"""Resuming and validating do not repeat expensive work."""

import hashlib
from collections import Counter
from pathlib import Path

from mtrain.data.epochs.windows import WindowedCorpus
from tests.support.training import fit_on_cpu


def test_resuming_with_max_epochs_does_not_sample_the_first_epoch_again(make_config, monkeypatch):
    keys = {"data": {"subword_sampling": 0.2}}
    recipe = {"max_steps": None, "patience": None}
    fit_on_cpu(make_config(**keys, training={**recipe, "max_epochs": 2}))
    sampled, real = [], WindowedCorpus.open

    def open_window(self, position, cancelled):
        sampled.append(position.epoch)
        return real(self, position, cancelled)

    monkeypatch.setattr(WindowedCorpus, "open", open_window)
    fit_on_cpu(make_config(**keys, training={**recipe, "max_epochs": 3}))
    assert set(sampled) == {2}


def test_averaging_hashes_each_checkpoint_once(make_config, monkeypatch):
    hashed, real = Counter(), hashlib.file_digest

    def file_digest(stream, name):
        if Path(stream.name).name == "optimizer.safetensors" and Path(stream.name).parent.name[0] != ".":
            hashed[stream.name] += 1
        return real(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    recipe = {"average_checkpoints": 4, "checkpoint_every": 2, "validate_every": 2, "keep_checkpoints": 3}
    # The first checkpoint is the best, so that no other is verified for publishing.
    fit_on_cpu(make_config(training={**recipe, "max_steps": 12, "learning_rate": 1e-8, "patience": None}))
    assert len(hashed) >= 5 and max(hashed.values()) <= 2  # once to average, once to publish
