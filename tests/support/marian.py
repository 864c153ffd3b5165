"""MarianMT models with random weights and trained SentencePiece vocabularies."""

import io
import itertools
import json
import random
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import sentencepiece
import torch

from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.data.reading.files import toy_pairs
from mtrain.tokenizer.learn import train_tokenizer
from mtrain.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import MarianMTModel

PAIRS = toy_pairs("train")[:1000]
TAGS = [">>fra<<", ">>deu<<"]
MAX_LENGTH = 40  # of translations, including the start token


@cache
def transformers() -> ModuleType:
    """The module, whose import takes seconds: only the process of the tests that use it needs it."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return transformers


def sentences(tagged: bool = True) -> list[str]:
    """50 texts of 1 to 12 random words, some with a tag."""
    generator = random.Random(1)
    words = sorted({word for pair in PAIRS for word in pair.source.split()})
    texts = [" ".join(generator.choices(words, k=1 + i % 12)) for i in range(50)]
    return [f"{TAGS[i % 2]} {text}" if tagged and i % 5 == 0 else text for i, text in enumerate(texts)]


AWKWARD = [
    "", " ", ">>fra<< ", ">>fra<<Rice.", " >>fra<< rice", ">>xyz<< rice", ">> rice", "a>>fra<< b",
    "日本 rice", "ﬁ Ⅳ  a \u00a0b", "rice\tfish", "<0x0A> <b>", "e\u0301 😀", "\u2581rice",
]  # fmt: skip


@cache
def spm(side: int, size: int = 100) -> bytes:
    """A SentencePiece model of one side of the toy corpus, with the same special pieces as OPUS-MT."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([pair[side] for pair in PAIRS]),
        model_writer=model,
        vocab_size=size,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


def pieces(side: int) -> list[str]:
    """The learned vocabulary of that model, without special pieces."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm(side))
    return [processor.id_to_piece(i) for i in range(3, len(processor))]


def write_own_tokenizer(folder: Path) -> int:
    """Write a MarianTokenizer with the ids of a model that mtrain learned; returns the vocabulary size."""
    config = TokenizerConfig(vocab_size=420, symbols=["<bt>", "@@"])
    source, target = (lambda side=side: (pair[side] for pair in PAIRS) for side in (0, 1))
    train_tokenizer(config, source, target, folder, 1)
    words = Tokenizer(folder).source.pieces
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes((folder / "joint.model").read_bytes())
    (folder / "joint.model").unlink()
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "fr"}))
    return len(words)


def write_tokenizer(folder: Path, separate: bool = False) -> tuple[int, int]:
    """Write the files of a MarianTokenizer; returns the sizes of both vocabularies."""
    folder.mkdir(parents=True, exist_ok=True)
    sides = [pieces(0), pieces(1)] if separate else [[*pieces(0), *pieces(1), *TAGS]]
    sizes = []
    for name, words in zip(("vocab.json", "target_vocab.json"), sides, strict=False):
        vocabulary = ["</s>", "<unk>", *dict.fromkeys(words), "<pad>"]
        (folder / name).write_text(json.dumps({word: i for i, word in enumerate(vocabulary)}))
        sizes.append(len(vocabulary))
    for side, name in enumerate(("source.spm", "target.spm")):
        (folder / name).write_bytes(spm(side))
    names = {"source_lang": "en", "target_lang": "fr", "separate_vocabs": separate}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer", **names}))
    return sizes[0], sizes[-1]


@torch.no_grad()
def randomize(model: "MarianMTModel", seed: int) -> None:
    """Draw weights that give widely different logits and an EOS that becomes more likely with the length."""
    torch.manual_seed(seed)
    config = model.config
    for name, parameter in model.named_parameters():
        if "embed_positions" in name:
            continue
        if parameter.dim() > 1:
            scale = 0.8 if "embed" in name or "shared" in name else 0.5 if "encoder_attn" in name else 1.5
            parameter.normal_(0, scale * parameter.size(1) ** -0.5)
        elif "norm" not in name or "bias" in name:
            parameter.normal_(0, 0.3)
    model.model.decoder.layers[-1].final_layer_norm.weight.fill_(3)
    words, sizes = model.lm_head.weight, (config.vocab_size, model.lm_head.out_features)
    if not config.tie_word_embeddings:
        words.normal_(0, 0.8 * words.size(1) ** -0.5)
    source = torch.randint(2, sizes[0] - 1, (64, 8))
    target = torch.randint(2, sizes[1] - 1, (64, 32))
    target[:, 0] = config.decoder_start_token_id
    hidden = model.model(source, decoder_input_ids=target).last_hidden_state
    mean = hidden.mean(0)
    later = mean[24:].mean(0) - mean[:6].mean(0)
    words[config.eos_token_id] = later / later.norm()
    model.final_logits_bias.normal_(0, 0.5)
    others = (mean @ words.T).std()
    model.final_logits_bias[0, 0] = 2.5 * others - mean[16] @ words[config.eos_token_id]


def make(
    folder: Path,
    generation: dict[str, Any],
    separate: bool = False,
    own: bool = False,
    seed: int = 0,
    **config: Any,
) -> "MarianMTModel":
    """Save a MarianMTModel in `folder` with a tokenizer like OPUS-MT's, or with mtrain's `own`.

    It takes the first random seed from `seed` on with which most of 50 translations are different and end
    before the limit.
    """
    if own:
        source_size = target_size = write_own_tokenizer(folder)
        special = {"pad_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 3}
    else:
        source_size, target_size = write_tokenizer(folder, separate)
        start = target_size - 1
        special = {"pad_token_id": start, "decoder_start_token_id": start, "eos_token_id": 0}
        generation = {"forced_eos_token_id": 0, "bad_words_ids": [[start]], **generation}
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    sizes |= {
        f"{side}_{key}": n
        for side in ("encoder", "decoder")
        for key, n in (("attention_heads", 4), ("ffn_dim", 64))
    }
    sizes |= {"vocab_size": source_size, "decoder_vocab_size": target_size, **special}
    sizes |= {"scale_embedding": True, "share_encoder_decoder_embeddings": not separate, **config}
    model = transformers().MarianMTModel(transformers().MarianConfig(**sizes)).eval()
    model.generation_config.update(max_length=MAX_LENGTH, **{"forced_eos_token_id": None, **generation})
    numbers = itertools.count(seed)
    randomize(model, next(numbers))
    while min(liveliness(translations(model, folder, num_beams=1))) < 38:
        randomize(model, next(numbers))
    model.save_pretrained(folder)
    return model


def batch(folder: Path, texts: list[str]) -> Any:
    """The padded batch that a MarianTokenizer makes of texts."""
    return transformers().MarianTokenizer.from_pretrained(folder)(texts, return_tensors="pt", padding=True)


def texts_for(folder: Path) -> list[str]:
    """`sentences()`, with tags only if the vocabulary has them."""
    return sentences(TAGS[0] in json.loads((folder / "vocab.json").read_text()))


def translations(model: Any, folder: Path, **settings: Any) -> list[list[int]]:
    """The translations of `texts_for(folder)` by a MarianMTModel in one batch, as ids before EOS."""
    rows = model.generate(**batch(folder, texts_for(folder)), **settings).tolist()
    eos = model.config.eos_token_id
    return [row[1 : row.index(eos, 1) if eos in row[1:] else None] for row in rows]


def liveliness(rows: list[list[int]]) -> tuple[int, int]:
    """The number of different translations, and of those that end before the limit."""
    return len({tuple(row) for row in rows}), sum(len(row) < MAX_LENGTH - 2 for row in rows)
