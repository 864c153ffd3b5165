"""What the tests of exports share."""

from pathlib import Path
from types import ModuleType

import pytest

from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.data.reading.files import toy_pairs
from mtrain.tokenizer.learn import train_tokenizer


@pytest.fixture(scope="session")
def ctranslate2() -> ModuleType:
    """The module, which imports Transformers: only the process of these tests needs it."""
    import ctranslate2

    return ctranslate2


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory) -> dict[bool, Path]:
    """Folders of a joint vocabulary and of two, with byte pieces and a symbol."""
    pairs, folders = toy_pairs("train")[:1000], {}
    for joint in (True, False):
        folders[joint] = tmp_path_factory.mktemp("tokenizer")
        config = TokenizerConfig(vocab_size=360, joint=joint, symbols=["<bt>"])
        train_tokenizer(
            config, lambda: (p.source for p in pairs), lambda: (p.target for p in pairs), folders[joint], 1
        )
    return folders
