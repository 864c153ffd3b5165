"""M2M-100 and NLLB-200 models with random weights, made and saved by Transformers."""

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentencepiece
import torch

from mtrain.data.reading.files import toy_pairs
from mtrain.decoding.translate import Translator
from tests.support.marian import transformers

if TYPE_CHECKING:
    from transformers import M2M100ForConditionalGeneration

CODES = ["eng_Latn", "fra_Latn", "deu_Latn", "zho_Hans", "zho_Hant"]
PAIRS = toy_pairs("train")[:1000]
MAX_LENGTH = 30  # of translations, including the start token


def learn(texts: list[str], size: int) -> bytes:
    """A SentencePiece model like the ones of M2M-100 and NLLB-200."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=size,
        model_type="bpe",
        character_coverage=0.995,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


@cache
def spm() -> bytes:
    """A small model of the toy corpus."""
    return learn([text for pair in PAIRS for text in pair], 300)


def write_nllb_tokenizer(folder: Path, new: bool, **names: Any) -> int:
    """Write the files of an NllbTokenizer: with `new`, as Transformers 5 saves them, `tokenizer.json` alone.
    Returns the size of the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentencepiece.bpe.model").write_bytes(spm())
    first = len(sentencepiece.SentencePieceProcessor(model_proto=spm())) + 1  # id of a code
    listed = {"additional_special_tokens": CODES}
    (folder / "special_tokens_map.json").write_text(json.dumps(listed))
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False) | {"special": True}
    added = {i: {"content": token, **plain} for i, token in enumerate([*CODES, "<mask>"], first)}
    names |= {"tokenizer_class": "NllbTokenizer", "added_tokens_decoder": added, **listed}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if new:
        tokenizer = transformers().NllbTokenizer.from_pretrained(folder)
        for file in folder.iterdir():
            file.unlink()
        tokenizer.save_pretrained(folder)
    return first + len(CODES) + 3  # with <mask> and two made-up words


def write_m2m_tokenizer(folder: Path) -> int:
    """Write the files of an M2M100Tokenizer, whose ids have another order than SentencePiece's, and which
    lacks some of its pieces. Returns the size of the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentencepiece.bpe.model").write_bytes(spm())
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm())
    pieces = [processor.id_to_piece(i) for i in range(3, len(processor) - 2)]
    random.Random(1).shuffle(pieces)
    ids = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    (folder / "vocab.json").write_text(json.dumps(ids))
    names = {"tokenizer_class": "M2M100Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return len(ids) + 100 + 8


@torch.no_grad()
def make(
    folder: Path, size: int, shards: int = 1, seed: int = 1, **config: Any
) -> "M2M100ForConditionalGeneration":
    """Save an M2M100ForConditionalGeneration in `folder`, with weights that give widely different logits."""
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    sizes |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")}
    torch.manual_seed(seed)
    settings = transformers().M2M100Config(**{**sizes, "vocab_size": size, **config})
    model = transformers().M2M100ForConditionalGeneration(settings).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = 1.0 if "shared" in name else 1.3
            parameter.normal_(0, scale * parameter.size(1) ** -0.5)
        elif "norm" not in name or "bias" in name:
            parameter.normal_(0, 0.3)
    model.generation_config.update(max_length=MAX_LENGTH, num_beams=1)
    save(model, folder, shards)
    return model


def save(model: "M2M100ForConditionalGeneration", folder: Path, shards: int) -> None:
    """Save a model in a number of files."""
    total = sum(parameter.numel() for parameter in model.parameters()) * 4
    model.save_pretrained(folder, max_shard_size=int(1.15 * total / shards))
    assert len([*folder.glob("model*.safetensors")]) == shards


def train(
    model: "M2M100ForConditionalGeneration",
    translator: Translator,
    folder: Path,
    shards: int,
    steps: int = 300,
) -> None:
    """Train a model for a moment from English to French, with the tokenizer of an import; save it."""
    tokenizer = translator.tokenizer
    splitter = translator.between("en", "fr").splitter
    pairs = [
        *zip(
            splitter.encode([a for a, _ in PAIRS]), splitter.encode_target([b for _, b in PAIRS]), strict=True
        )
    ]
    generator, optimizer = random.Random(1), torch.optim.AdamW(model.parameters(), 3e-3)
    torch.manual_seed(1)
    model.train()
    for _ in range(steps):
        batch = generator.sample(pairs, 32)
        ids, labels = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(pair[side]) for pair in batch], True, padding)
            for side, padding in ((0, tokenizer.special.pad), (1, -100))
        )
        model(input_ids=ids, attention_mask=ids != tokenizer.special.pad, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model.eval(), folder, shards)
