"""Lines to translations in the same order: segment, batch by length, search, detokenize.

The one path by which `fit` validates, `translate` translates and `evaluate` scores.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Self

from mtrain.checkpoint.model_folder import load_model
from mtrain.config.languages import base_language
from mtrain.config.load import validate
from mtrain.config.schema import DecodingConfig
from mtrain.decoding.decode import Decoder
from mtrain.decoding.split import WINDOW, Part, parts_of, windows
from mtrain.decoding.translation import EMPTY, Translation, join, with_n_best
from mtrain.device import keep_freed_memory, resolve_device
from mtrain.errors import ModelError, UsageError

_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "km", "my")  # languages that put none between sentences


class Translator:
    """Lines to translations by a `Decoder`: in windows, so that memory is bounded, and long lines in parts.

    Threads may share it: what changes while it translates is guarded.
    """

    def __init__(self, decoder: Decoder, max_length: int, fingerprint: str = ""):
        self.decoder, self.max_length, self.fingerprint = decoder, max_length, fingerprint
        self.tokenizer, self.decoding = decoder.tokenizer, decoder.config
        self.target_lang, self.device = decoder.target_lang, decoder.device

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "auto",
        overrides: Sequence[str] = (),
        ensemble: Sequence[str | Path] = (),
    ) -> Self:
        """Load a model or run folder, and those of an ensemble. `overrides` are `decoding.key=value`.

        Raises ModelError if a folder is missing or damaged or the vocabularies differ, UsageError for a
        device that is not there or a wrong key.
        """
        place = resolve_device(device)
        keep_freed_memory()
        first, *others = [load_model(Path(folder), tuple(overrides)) for folder in (path, *ensemble)]
        for folder, other in zip(ensemble, others, strict=True):
            if other.tokenizer.fingerprint() != first.tokenizer.fingerprint():
                raise ModelError(f"{folder}: its vocabulary is not that of {path}, as an ensemble needs")
            ours, theirs = (
                tuple(map(base_language, (one.config.source_lang, one.config.target_lang)))
                for one in (first, other)
            )
            if ours != theirs and "und" not in (*ours, *theirs):  # of a model imported without languages
                pair = f"translates {'-'.join(theirs)}, and {path} {'-'.join(ours)}"
                raise ModelError(f"{folder}: {pair}; an ensemble needs the same languages")
        loaded = [first, *others]
        models = [one.model.to(place) for one in loaded]
        longest = min(one.config.max_length for one in loaded)
        config, prints = first.config, "+".join(one.fingerprint for one in loaded)
        decoder = Decoder(config.decoding, models, first.tokenizer, config.target_lang, place)
        return cls(decoder, longest, prints)

    def with_settings(self, **decoding: object) -> Self:
        """The same models with other keys of `decoding`. Raises UsageError for a wrong key or value."""
        raw = {**self.decoding.model_dump(mode="json"), **decoding}
        config = validate(DecodingConfig, raw, "decoding")
        return type(self)(self.decoder.with_config(config), self.max_length, self.fingerprint)

    def translate(
        self,
        texts: Iterable[str],
        n_best: int = 1,
        alignments: bool = False,
        prefixes: Iterable[str] | None = None,
        scored: bool = True,
    ) -> list[Translation]:
        """The best translation of each text, in order; an empty text gives an empty translation.

        `n_best` asks for as many alternatives in `Translation.n_best`, up to as many as are decoded;
        `alignments` for `Translation.alignment`. `prefixes` are what the translations are to begin with.
        If they need not be `scored`, greedy search is faster, and scores and log-probabilities are NaN.
        Raises UsageError if more are asked for than are decoded, or the prefixes are not as many.
        """
        return list(self.stream(texts, n_best, alignments, prefixes, scored=scored))

    def stream(
        self,
        lines: Iterable[str],
        n_best: int = 1,
        alignments: bool = False,
        prefixes: Iterable[str] | None = None,
        first: int = 0,
        window: int = WINDOW,
        scored: bool = True,
    ) -> Iterator[Translation]:
        """As `translate`, for any number of lines in bounded memory: `window` of them at most at a time.
        `first` is the number of the first line, which tells the random numbers of samples apart."""
        lines = [lines] if isinstance(lines, str) else lines
        if n_best < 1:
            raise UsageError(f"{n_best} translations of each line: ask for 1 or more")
        if n_best > self.decoding.hypotheses:
            found = f"only {self.decoding.hypotheses} are decoded"
            advice = "raise decoding.beam_size or decoding.samples"
            raise UsageError(f"{n_best} translations of each line: {found}; {advice}")
        for texts, begins in windows(lines, prefixes, window):
            parts = parts_of(texts, begins, self.tokenizer, self.max_length, first)
            translated = zip(parts, self.decoder(parts, n_best, alignments, scored), strict=True)
            by_line = {line: list(group) for line, group in groupby(translated, lambda pair: pair[0].line)}
            for line in range(len(texts)):
                if line in by_line:
                    yield self._joined(by_line[line], n_best)
                else:
                    yield with_n_best([replace(EMPTY, alignment=() if alignments else None)], n_best)
            first += len(texts)

    def _joined(self, parts: list[tuple[Part, list[Translation]]], n_best: int) -> Translation:
        """The translation of a line out of those of its parts; its k-th best is of each part's k-th."""
        if len(parts) == 1:
            return with_n_best(parts[0][1], n_best)
        words = [sum(self.tokenizer.word_starts(part.source[:-1])) for part, _ in parts]
        tag = len(self.tokenizer.source.tag(parts[0][0].source))  # each part begins with it
        space = "" if base_language(self.target_lang) in _WITHOUT_SPACES else " "
        penalty, count = self.decoding.length_penalty, max(len(found) for _, found in parts)
        ways = [
            join([found[min(k, len(found) - 1)] for _, found in parts], words, tag, space, penalty)
            for k in range(count)
        ]
        return with_n_best(ways, n_best)
