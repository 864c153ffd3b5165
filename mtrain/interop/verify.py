"""Whether an exported model says what mtrain says, by the program that it was exported to."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mtrain.checkpoint.model_folder import LoadedModel
from mtrain.config.schema import DecodingConfig
from mtrain.decoding.search import search
from mtrain.errors import ModelError
from mtrain.interop.ctranslate2 import barred_projection
from mtrain.interop.formats import needed
from mtrain.interop.generation import kept, limit_of
from mtrain.tokenizer.tokenizer import LINE_BREAKERS, Tokenizer

TOLERANCE = 1e-3  # nats; what fp32 rounds differently is a hundredth of it
_SENTENCES = 16  # where none are given
# Means something in a text to a MarianTokenizer, whatever its vocabulary.
_SPECIAL = re.compile("^>>|</s>|<unk>|<pad>")


class Exported(NamedTuple):
    """An exported model, loaded by the program that it is for. Ids are mtrain's, without BOS and EOS."""

    decoding: DecodingConfig  # how `translate` searches
    translate: Callable[[list[int], int], list[int]]  # of source ids and the most tokens, EOS counted
    log_probs: Callable[[list[int], list[int]], list[float]]  # of target ids and EOS, by source ids
    encode: Callable[[str], list[int]] | None = None  # where it has a tokenizer
    decode: Callable[[list[int]], str] | None = None


def open_ctranslate2(folder: Path, loaded: LoadedModel, quantization: str | None) -> Exported:
    """What `write_ctranslate2` wrote. Its beam search stops by another rule, so it is compared by greedy."""
    ctranslate2, tokenizer = needed("ctranslate2"), loaded.tokenizer
    arithmetic = "int8_float32" if quantization and "int8" in quantization else "float32"
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type=arithmetic)
    source, target = tokenizer.source.pieces, tokenizer.target.pieces
    ids = {piece: i for i, piece in enumerate(target)}

    def translate(row: list[int], limit: int) -> list[int]:
        options = {"beam_size": 1, "max_decoding_length": limit, "max_input_length": 0}
        [found] = translator.translate_batch([[source[i] for i in row]], **options)
        return [ids[piece] for piece in found.hypotheses[0]]

    def log_probs(row: list[int], said: list[int]) -> list[float]:
        pieces = [source[i] for i in row], [target[i] for i in said]
        [scored] = translator.score_batch([pieces[0]], [pieces[1]], max_input_length=0)
        return list(scored.log_probs)

    decoding = DecodingConfig(beam_size=1, forbidden_ids=loaded.config.decoding.forbidden_ids)
    return Exported(decoding, translate, log_probs)


def open_marian(folder: Path, loaded: LoadedModel) -> Exported:
    """What `write_marian` wrote."""
    transformers, ids = needed("transformers"), loaded.model.config
    transformers.utils.logging.disable_progress_bar()
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    forbidden = loaded.config.decoding.forbidden_ids

    def translate(row: list[int], limit: int) -> list[int]:
        model.generation_config.max_length = limit + 1
        said: list[int] = model.generate(torch.tensor([[*row, ids.eos_id]]))[0].tolist()[1:]
        return said[: said.index(ids.eos_id)] if ids.eos_id in said else said

    @torch.inference_mode()
    def log_probs(row: list[int], said: list[int]) -> list[float]:
        target = torch.tensor([[ids.bos_id, *said]])
        logits = model(torch.tensor([[*row, ids.eos_id]]), decoder_input_ids=target).logits[0]
        logits[:, forbidden] = -torch.inf
        return _of(logits, [*said, ids.eos_id])

    return Exported(
        kept(loaded.config.decoding),
        translate,
        log_probs,
        lambda text: tokenizer(text).input_ids[:-1],
        lambda said: tokenizer.decode(said, skip_special_tokens=True),
    )


def _of(logits: torch.Tensor, said: list[int]) -> list[float]:
    """Log-probabilities of the tokens that were said, by logits (T, V)."""
    return logits.log_softmax(dim=-1)[torch.arange(len(said)), said].tolist()


@torch.inference_mode()
def _log_probs(loaded: LoadedModel, row: list[int], said: list[int]) -> list[float]:
    """As `Exported.log_probs`, by mtrain; what is forbidden has no probability."""
    ids = loaded.model.config
    source = torch.tensor([[*row, ids.eos_id]])
    hidden = loaded.model(
        source, torch.ones_like(source, dtype=torch.bool), torch.tensor([[ids.bos_id, *said]])
    )
    logits = F.linear(hidden[0], *barred_projection(loaded.model, loaded.config.decoding.forbidden_ids))
    return _of(logits, [*said, ids.eos_id])


def verify(loaded: LoadedModel, exported: Exported, texts: Sequence[str], exact: bool) -> list[str]:
    """Translate and score the same texts, or some made of the vocabulary's pieces, by both: a summary, and
    the texts whose translations differ. Where `exact`, raises ModelError if they do for no reason."""
    encoded = zip(texts, loaded.tokenizer.encode_source(list(texts)), strict=True)
    given = [(text, ids) for text, ids in encoded if ids]
    if not given:
        samples = sample_texts(loaded.tokenizer)
        given = list(zip(samples, loaded.tokenizer.encode_source(samples), strict=True))
    largest, lines = 0.0, []
    for text, ids in given:
        row = ids[: loaded.config.max_length - 1]
        if exported.encode is not None and row == ids and not _SPECIAL.search(text):
            _same_ids(text, ids, exported.encode(text))
        source = torch.tensor([[*row, loaded.model.config.eos_id]])
        keep = torch.ones_like(source, dtype=torch.bool)
        [[best, *_]] = search([loaded.model], source, keep, exported.decoding)
        limit = limit_of(exported.decoding, len(row) + 1)
        if loaded.model.config.positions == "learned":
            limit = min(limit, loaded.model.config.max_positions)
        ours = best.ids[: limit - 1]  # beyond, programs differ in whether EOS counts
        theirs = exported.translate(row, limit)[: limit - 1]
        pairs = zip(_log_probs(loaded, row, ours), exported.log_probs(row, ours), strict=True)
        largest = max([largest, *(abs(a - b) for a, b in pairs)])
        said = loaded.tokenizer.decode([ours, theirs])
        if exported.decode is not None:
            _same_text(loaded, ours, exported.decode)
        if ours != theirs:
            lines += [f"source: {text}", f"mtrain: {said[0]}", f"export: {said[1]}"]
            if exact and not _is_tie(loaded, exported.decoding, row, ours, theirs):
                raise ModelError(f"the export is not exact: {'; '.join(lines[-3:])}")
    if exact and not largest <= TOLERANCE:
        raise ModelError(f"the export is not exact: log-probabilities differ by up to {largest:.2g} nats")
    same = len(given) - len(lines) // 3
    search_by = f"beam {exported.decoding.beam_size}" if exported.decoding.beam_size > 1 else "greedy"
    summary = f"{len(given)} sentences: {same} translations identical ({search_by})"
    return [f"{summary}; log-probabilities of tokens differ by up to {largest:.2g} nats", *lines]


def sample_texts(tokenizer: Tokenizer) -> list[str]:
    """Texts of pieces drawn at random, always the same, half of them with a tag if there are any."""
    vocabulary, generator = tokenizer.source, random.Random(1)
    learnt = [i for i, score in enumerate(vocabulary.scores()) if score]
    tags = [[i] for i in range(len(vocabulary)) if vocabulary.tag([i])] or [[]]
    rows = [[*tags[0][: n % 2], *generator.choices(learnt, k=n + 2)] for n in range(_SENTENCES) if learnt]
    return vocabulary.decode(rows)


def _same_ids(text: str, ours: list[int], theirs: list[int]) -> None:
    if ours != theirs:
        raise ModelError(f"the export is not exact: the ids of {text!r} are {ours}, exported {theirs}")


def _same_text(loaded: LoadedModel, said: list[int], decode: Callable[[list[int]], str]) -> None:
    ids = [i for i in said if i != loaded.model.config.unk_id]  # which others leave out
    [ours], theirs = loaded.tokenizer.decode([ids]), decode(ids).translate(LINE_BREAKERS)
    if ours.strip() != theirs.strip():
        raise ModelError(f"the export is not exact: {ids} is {ours!r}, exported {theirs!r}")


def _is_tie(
    loaded: LoadedModel, decoding: DecodingConfig, row: list[int], ours: list[int], theirs: list[int]
) -> bool:
    """Whether two translations that differ are as good as each other, to within what rounding may do: by the
    token where they part for greedy search, by their scores for beam search."""
    a, b = _log_probs(loaded, row, ours), _log_probs(loaded, row, theirs)
    if decoding.beam_size == 1:
        parting = next(
            i for i, pair in enumerate(zip([*ours, -1], [*theirs, -1], strict=False)) if len({*pair}) > 1
        )
        return abs(a[parting] - b[parting]) <= TOLERANCE
    scores = [sum(each) / float(len(each) ** decoding.length_penalty) for each in (a, b)]
    return abs(scores[0] - scores[1]) <= TOLERANCE
