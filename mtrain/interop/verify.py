"""Comparison of an exported model, run by the program it was exported for, with the original."""

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mtrain.checkpoint.model_folder import LoadedModel, load_model
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.search.search import best_ids, maximum_lengths
from mtrain.decoding.split import Splitter
from mtrain.errors import ModelError
from mtrain.interop.ctranslate2 import masked_projection
from mtrain.interop.formats import import_optional
from mtrain.interop.generation_config import exportable
from mtrain.interop.import_model import import_model
from mtrain.model.incremental import DecodingTransformer
from mtrain.progress_bar import with_progress
from mtrain.tokenizer.tokenizer import SPACES, TagIds, Tokenizer
from mtrain.tokenizer.vocabulary import SPACE

TOLERANCE = 1e-3  # nats; rounding in fp32 causes differences of about a hundredth of this
_SENTENCES = 16  # number of sentences to generate if none are given
_TAG_OF_MARIAN = ">>"  # MarianTokenizer takes the beginning of a text for a tag, whatever its vocabulary is


class Exported(NamedTuple):
    """An exported model, loaded by the program it was exported for.

    Ids are mtrain's, with the codes of languages if the model has any; sources include EOS, targets do not.
    """

    decoding: DecodingConfig  # the settings that `translate` uses
    translate: Callable[[list[int], int], list[int]]  # from source ids and a length limit that includes EOS
    log_probs: Callable[[list[int], list[int]], list[float]]  # from source and target ids; EOS is appended
    encode: Callable[[str], list[int]] | None = None  # if the program has a tokenizer
    decode: Callable[[list[int]], str] | None = None


def open_ctranslate2(folder: Path, loaded: LoadedModel, quantization: str | None) -> Exported:
    """Load the output of `write_ctranslate2` for greedy search, because its beam search stops by another
    rule."""
    ctranslate2, tokenizer = import_optional("ctranslate2"), loaded.tokenizer
    arithmetic = "int8_float32" if quantization and "int8" in quantization else "float32"
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type=arithmetic)
    source, target = tokenizer.source.pieces, tokenizer.target.pieces
    target_ids = {piece: i for i, piece in enumerate(target)}
    prefix = [target[i] for i in _tags(loaded).target]

    def pieces_of(row: list[int]) -> list[str]:
        adds_eos = row[-1] == tokenizer.special.eos  # which CTranslate2 does, unless it is followed by a code
        return [source[i] for i in (row[:-1] if adds_eos else row)]

    def translate(row: list[int], limit: int) -> list[int]:
        # By default, the minimum is 1, which rules out empty translations.
        lengths = {"max_input_length": 0, "min_decoding_length": 0, "max_decoding_length": limit}
        [found] = translator.translate_batch([pieces_of(row)], target_prefix=[prefix], beam_size=1, **lengths)
        return [target_ids[piece] for piece in found.hypotheses[0]]

    def log_probs(row: list[int], output: list[int]) -> list[float]:
        outputs = [[target[i] for i in output]]
        [scored] = translator.score_batch([pieces_of(row)], outputs, max_input_length=0)
        return list(scored.log_probs)

    same = {"forbidden_ids", "max_length_ratio", "max_length_offset"}  # which the exported positions cover
    decoding = DecodingConfig(beam_size=1, **loaded.config.decoding.model_dump(include=same))
    return Exported(decoding, translate, log_probs)


def open_transformers(folder: Path, loaded: LoadedModel) -> Exported:
    """Load the output of `mtrain.interop.to_transformers`."""
    transformers, ids = import_optional("transformers"), loaded.model.config
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    forbidden = loaded.config.decoding.forbidden_ids
    if loaded.config.example:
        tokenizer.src_lang = loaded.config.example.source
        [model.generation_config.forced_bos_token_id] = _tags(loaded).target

    def translate(row: list[int], limit: int) -> list[int]:
        model.generation_config.max_length = limit + 1
        output: list[int] = model.generate(torch.tensor([row]))[0].tolist()[1:]
        return output[: output.index(ids.eos_id)] if ids.eos_id in output else output

    @torch.inference_mode()
    def log_probs(row: list[int], output: list[int]) -> list[float]:
        target = torch.tensor([[model.config.decoder_start_token_id, *output]])
        logits = model(torch.tensor([row]), decoder_input_ids=target).logits[0]
        logits[:, forbidden] = -torch.inf
        return _of_tokens(logits, [*output, ids.eos_id])

    is_different = type(tokenizer).__name__.startswith("Nllb") or loaded.config.normalizes_punctuation
    return Exported(
        exportable(loaded.config.decoding),
        translate,
        log_probs,
        # NllbTokenizer does not use SentencePiece, and segments a few texts in another way. No tokenizer of
        # Transformers normalizes punctuation.
        None if is_different else lambda text: tokenizer(text).input_ids,
        lambda output: tokenizer.decode(output, skip_special_tokens=True),
    )


def open_bergamot(folder: Path, loaded: LoadedModel) -> Exported:
    """Import the output of `write_bergamot`."""
    with tempfile.TemporaryDirectory() as temporary:
        languages = [f"{key}={getattr(loaded.config, key)}" for key in ("source_lang", "target_lang")]
        import_model(str(folder), Path(temporary) / "model", languages)
        again = load_model(Path(temporary) / "model")._replace(config=loaded.config)
    model, eos = DecodingTransformer(again.model), again.model.config.eos_id

    def translate(row: list[int], limit: int) -> list[int]:
        lengths = {"max_length_ratio": 0.0, "max_length_offset": limit}
        return best_ids(model, row, decoding.model_copy(update=lengths))

    forbidden = [*loaded.config.decoding.forbidden_ids, loaded.model.config.unk_id]
    decoding = DecodingConfig(beam_size=1, forbidden_ids=forbidden)
    return Exported(
        decoding,
        translate,
        lambda row, output: _log_probs(again, row, output),
        lambda text: [*again.tokenizer.encode_source([text])[0], eos],
        lambda output: again.tokenizer.decode([output])[0],
    )


def _tags(loaded: LoadedModel) -> TagIds:
    """The codes of the languages between which the models translate, if they have any."""
    example, tags = loaded.config.example, loaded.config.language_tags
    return loaded.tokenizer.tags_of(example, tags) if example else TagIds()


def _of_tokens(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    """The log-probabilities of T tokens, from logits (T, V)."""
    return logits.log_softmax(dim=-1)[torch.arange(len(tokens)), tokens].tolist()


@torch.inference_mode()
def _log_probs(loaded: LoadedModel, row: list[int], output: list[int]) -> list[float]:
    """Like `Exported.log_probs`, computed by mtrain. Forbidden tokens have probability zero."""
    ids = loaded.model.config
    source = torch.tensor([row])
    keep, target_in = torch.ones_like(source, dtype=torch.bool), torch.tensor([[ids.bos_id, *output]])
    hidden = loaded.model.decode(target_in, loaded.model.encode(source, keep), keep)
    weight, bias = masked_projection(loaded.model, loaded.config.decoding.forbidden_ids)
    return _of_tokens(F.linear(hidden[0], weight, bias), [*output, ids.eos_id])


def sentences_of(loaded: LoadedModel, texts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """The texts that are not empty, or generated ones if there are none, and their source ids."""
    longest = loaded.config.max_length
    splitter = Splitter(loaded.tokenizer, longest, loaded.config.source_lang, tags=_tags(loaded))
    [empty] = splitter.encode([""])
    texts = [text for text in texts if splitter.encode([text]) != [empty]] or sample_texts(loaded.tokenizer)
    return list(zip(texts, splitter.encode(texts, most=longest), strict=True))


def verify(
    loaded: LoadedModel, exported: Exported, given: Sequence[tuple[str, list[int]]], exact: bool
) -> list[str]:
    """Translate and score sentences, see `sentences_of`, with both models.

    Returns a summary, and three lines for each text whose translations differ. If `exact`, raises ModelError
    if translations that are not tied differ, or if log-probabilities differ by more than `TOLERANCE`.
    """
    model, tags, longest = DecodingTransformer(loaded.model), _tags(loaded), loaded.config.max_length
    largest, lines = 0.0, []
    for text, row in with_progress(given, "verified", "sentences", len(given)):
        if exported.encode is not None and len(row) < longest and not text.startswith(_TAG_OF_MARIAN):
            _require_same_ids(text, row, exported.encode(text))
        ours = best_ids(model, row, exported.decoding, tags.target)
        limit = int(maximum_lengths([model], torch.tensor([len(row)]), exported.decoding, [tags.target]))
        # Programs disagree about the last token, because not all of them count EOS.
        ours, theirs = ours[: limit - 1], exported.translate(row, limit)[: limit - 1]
        pairs = zip(_log_probs(loaded, row, ours), exported.log_probs(row, ours), strict=True)
        gaps = [largest, *(abs(a - b) for a, b in pairs)]
        largest = math.nan if any(map(math.isnan, gaps)) else max(gaps)
        if exported.decode is not None:
            _require_same_text(loaded, ours, exported.decode)
        if ours != theirs:
            decoded = loaded.tokenizer.decode([ours, theirs])
            lines += [f"source: {text}", f"mtrain: {decoded[0]}", f"export: {decoded[1]}"]
            if exact and not _is_tie(loaded, exported.decoding, row, ours, theirs):
                raise ModelError(f"the exported model differs: {'; '.join(lines[-3:])}")
    if exact and not largest <= TOLERANCE:
        raise ModelError(f"the exported model differs: log-probabilities differ by up to {largest:.2g} nats")
    same, beams = len(given) - len(lines) // 3, exported.decoding.beam_size
    search_method = f"beam {beams}" if beams > 1 else "greedy"
    summary = f"{len(given)} sentences: {same} translations identical ({search_method})"
    return [f"{summary}; log-probabilities of tokens differ by up to {largest:.2g} nats", *lines]


def sample_texts(tokenizer: Tokenizer) -> list[str]:
    """Texts made of random vocabulary entries, the same in each call; half of them have a tag if there is
    one."""
    vocabulary, generator = tokenizer.source, random.Random(1)
    learned = [i for i, score in enumerate(vocabulary.scores()) if score]
    tags = [[i] for i in range(len(vocabulary)) if vocabulary.tag([i])] or [[]]
    rows = [[*tags[0][: n % 2], *generator.choices(learned, k=n + 2)] for n in range(_SENTENCES) if learned]
    return vocabulary.decode(rows)


def _require_same_ids(text: str, ours: list[int], theirs: list[int]) -> None:
    if ours != theirs:
        raise ModelError(f"the exported tokenizer differs: the ids of {text!r} are {ours}, exported {theirs}")


def _require_same_text(loaded: LoadedModel, output: list[int], decode: Callable[[list[int]], str]) -> None:
    vocabulary = loaded.tokenizer.target
    omitted = {vocabulary.special.unk, *vocabulary.codes.values()}  # by other programs
    ids = [i for i in output if i not in omitted]
    [ours], theirs = loaded.tokenizer.decode([ids]), decode(ids).translate(SPACES)
    without_space = ours.replace(SPACE, " ")  # as MarianTokenizer decodes it
    if theirs.strip() not in (ours.strip(), without_space.strip()):
        texts = f"the text of {ids} is {ours!r}, exported {theirs!r}"
        raise ModelError(f"the exported tokenizer differs: {texts}")


def _is_tie(
    loaded: LoadedModel, decoding: DecodingConfig, row: list[int], ours: list[int], theirs: list[int]
) -> bool:
    """Whether two different translations are equally good, up to rounding.

    Greedy search compares the first tokens that differ, beam search the scores.
    """
    a, b = _log_probs(loaded, row, ours), _log_probs(loaded, row, theirs)
    if decoding.beam_size == 1:
        pairs = zip([*ours, -1], [*theirs, -1], strict=False)
        first = next(i for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return abs(a[first] - b[first]) <= TOLERANCE
    free = len(_tags(loaded).target)  # the code of the language has no part in the score
    scores = [sum(each[free:]) / float(len(each) ** decoding.length_penalty) for each in (a, b)]
    return abs(scores[0] - scores[1]) <= TOLERANCE
