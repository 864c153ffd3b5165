"""`Translator`: segments, splits, batches, translates and detokenizes lines of text.

`mtrain translate`, `mtrain evaluate` and the validation in `mtrain fit` use it.
"""

import copy
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import torch

from mtrain.checkpoint.model_folder import load_ensemble
from mtrain.config.languages import Direction, LanguageTags, is_same_language
from mtrain.config.load import validate
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.batches import position_limit
from mtrain.decoding.decode import DecodingTask, Ensemble, Search
from mtrain.decoding.join import join_texts
from mtrain.decoding.overlap import Pauses, Results, Window, numbered, overlapped, overlaps
from mtrain.decoding.search.constraints import check_forbidden_ids
from mtrain.decoding.search.mbr import sentence_metric
from mtrain.decoding.shared_workers import SharedWorkers
from mtrain.decoding.split import WINDOW, Part, Splitter, windows
from mtrain.decoding.translation import Translation
from mtrain.decoding.workers import Workers
from mtrain.device import default_worker_count, resolve_device, resolve_precision
from mtrain.distributed.ranks import Ranks
from mtrain.errors import UsageError
from mtrain.model.incremental import Models
from mtrain.model.transformer import Transformer
from mtrain.paths import path_of


class Translator:
    """Translates lines in bounded memory. Lines that are too long for the model are translated in parts, or
    all lines sentence by sentence (`decoding.split`). A translator is thread-safe. As a context manager, it
    calls `close` on exit.
    """

    def __init__(
        self,
        ensemble: Ensemble[Transformer],
        decoding: DecodingConfig,
        direction: Direction,
        max_length: int,
        fingerprint: str = "",
        processes: bool = True,
        language_tags: LanguageTags = "none",
    ):
        """`max_length` is the maximum length of a part in tokens. Without `processes`, no worker processes
        are started, regardless of `decoding.workers`. With `language_tags`, the models know the languages
        from tags, and `between` chooses others than `direction`."""
        self.tokenizer = ensemble.tokenizer
        self.device = ensemble.device
        self.language_tags = language_tags
        self.chosen = (False, False)  # whether `between` chose the language of the source, of the target
        self.max_length = max_length
        self.fingerprint = fingerprint
        self._originals = ensemble
        self._processes = processes
        self._workers: Workers | None = None
        self._ranks: Ranks | None = None  # that share the decoding; see `lead`
        self._loaded: tuple[str, list[str]] | None = None  # the arguments of `load`: device and folders
        self._use(decoding, direction)
        self.own_direction = self.direction  # of the models; `between` does not change it

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | torch.device = "auto",
        overrides: str | Sequence[str] = (),
        ensemble: str | Path | Sequence[str | Path] = (),
        workers: int | None = None,
    ) -> Self:
        """Load a model folder or run folder, and the other folders of an ensemble. A leading `~` in a string
        is expanded. `overrides` are `decoding.key=value`.

        Loading changes one setting of the process: on a GPU, attention by cuDNN is disabled (see
        `resolve_device`). Allocator, number of threads, environment, and current CUDA device stay the same.

        On a CPU with several cores, worker processes are started after a few seconds of translation, each
        with its own copy of the models. Their number is `workers` (default: `decoding.workers` in the config)
        minus one. They end with this process, after a minute without work, and when the translator is closed
        or garbage collected. `workers=1` disables them.

        Raises ModelError if a folder is missing or damaged or the vocabularies of an ensemble differ,
        UsageError for an unavailable device or an invalid override.
        """
        if isinstance(device, torch.device):  # those of the CPU and of MPS may have the useless index 0
            device = device.type if device.type in ("cpu", "mps") else str(device)
        torch_device = resolve_device(device)
        others = [ensemble] if isinstance(ensemble, str | Path) else ensemble
        folders = [path_of(folder) for folder in (path, *others)]
        assignments = [overrides] if isinstance(overrides, str) else [*overrides]
        if workers is not None:
            assignments.append(f"decoding.workers={workers}")
        first, *_ = loaded = load_ensemble(folders, tuple(assignments))
        translator = cls(
            Ensemble([one.model.to(torch_device) for one in loaded], first.tokenizer, torch_device),
            first.config.decoding,
            first.config.direction,
            min(one.config.max_length for one in loaded),
            "+".join(one.fingerprint for one in loaded),
            language_tags=first.config.language_tags,
        )
        translator._loaded = device, [str(folder.absolute()) for folder in folders]
        return translator

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...], tuple[Any, ...]]:
        """Pickles and deep copies contain the folders and the settings, and load the models again. Raises
        TypeError if the translator was not made by `load`, ValueError if it is closed."""
        self.workers  # noqa: B018  # an error if it is closed
        if self._loaded is None:
            raise TypeError("only a Translator that was made by Translator.load can be pickled")
        device, (first, *others) = self._loaded
        state = self.decoding.model_dump(mode="json"), self.direction, self.chosen
        return type(self).load, (first, device, (), others), state

    def __setstate__(self, state: tuple[dict[str, object], Direction, tuple[bool, bool]]) -> None:
        """Take the settings of the translator that was pickled; `load` has made this one."""
        decoding, direction, self.chosen = state
        self._use(validate(DecodingConfig, decoding, "decoding"), direction)

    def __copy__(self) -> Self:
        """A translator that shares the models and worker processes, as `with_settings` does."""
        self.workers  # noqa: B018  # an error if this one is closed
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def _use(self, decoding: DecodingConfig, direction: Direction) -> None:
        """Decode with these settings, in this direction. Weights, threads and processes are reused where
        possible. Raises UsageError if the models have no tags or codes for the languages, or if a forbidden
        id is not in the vocabulary."""
        self.direction = self.tokenizer.complete(direction, self.language_tags)
        if "und" not in self.direction or not self.tokenizer.source.codes:  # which `splitter` would miss
            self.tokenizer.tags_of(self.direction, self.language_tags)
        if decoding.mbr is not None:
            sentence_metric(decoding.mbr, self.target_lang)  # raises an error now if it is not installed
        check_forbidden_ids(decoding, self.tokenizer.target_vocab_size)
        precision = resolve_precision(self.device, decoding.precision)
        count = default_worker_count(self.device) if decoding.workers == "auto" else decoding.workers
        if (old := self._workers) is None or (precision, count) != (old.precision, old.count):
            self._workers = Workers(self._originals, precision, count, self._processes)
        self.decoding = decoding

    def with_settings(self, **decoding: object) -> Self:
        """A translator with the same models and other `decoding` settings.

        It shares the models and, unless `precision` or `workers` change, the worker processes. They are freed
        when the last translator that uses them is closed or garbage collected. Raises UsageError for an
        unknown setting or an invalid value.
        """
        config = validate(DecodingConfig, {**self.decoding.model_dump(mode="json"), **decoding}, "decoding")
        other = copy.copy(self)
        other._use(config, self.direction)
        return other

    def with_search(self, search: Search) -> Self:
        """A translator with the same settings that leaves the search to another program: a function that is
        thread-safe. It cannot be pickled."""
        other = copy.copy(self)
        other._originals, other._workers, other._loaded = self._originals._replace(search=search), None, None
        other._use(self.decoding, self.direction)
        return other

    def between(self, source_lang: str | None = None, target_lang: str | None = None) -> Self:
        """A translator with the same models for other languages. None and `und` keep the current language.
        If the models have codes of languages, `de` stands for `deu_Latn` unless several codes fit; if they
        have tags, `deu_Latn` for `de`.
        Once the source or target language is chosen, a line whose tag names another one is an error. The
        translator shares what `with_settings` shares. Raises UsageError if the models have no tags for these
        languages. Models without language tags translate from any language, but only into one.
        """
        given = [None if code == "und" else code for code in (source_lang, target_lang)]
        direction = Direction(given[0] or self.direction.source, given[1] or self.direction.target)
        is_free = self.language_tags != "none" or self.target_lang == "und"  # imported without languages
        if not is_free and not is_same_language(direction.target, self.target_lang):
            cure = "it has no language tags"
            if tags := self.tokenizer.source.marian_tags:
                cure = f"begin each line with a tag of the model, such as {tags[0]}"
            raise UsageError(f"the model translates into {self.target_lang}, not {direction.target}; {cure}")
        other = copy.copy(self)
        other._use(self.decoding, direction)
        other.chosen = (self.chosen[0] or given[0] is not None, self.chosen[1] or given[1] is not None)
        return other

    @property
    def target_lang(self) -> str:
        """The language code of the translations."""
        return self.direction.target

    def close(self) -> None:
        """Free the models and end the worker processes, unless other translators made by `with_settings`
        still use them. A closed translator raises ValueError when it is used."""
        self._workers = None
        self._originals = self._originals._replace(models=())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def workers(self) -> Workers:
        """The threads and processes that decode. Raises ValueError if the translator is closed."""
        if self._workers is None:
            raise ValueError("this Translator is closed")
        return self._workers

    @property
    def models(self) -> Models:
        """The model, or the models of an ensemble, prepared for decoding."""
        return self.workers.ensemble.models

    def lead(self, ranks: Ranks, work: Callable[[], object]) -> None:
        """On rank 0, do `work`; what it translates with this object is shared among all ranks. The other
        ranks, which call this with the same model, translate their shares until rank 0 has finished.

        Raises DistributedError if a rank has another model or is lost.
        """
        ranks.require_equal({"the model": self.fingerprint})
        self._ranks = ranks if ranks.size > 1 else None
        try:
            SharedWorkers(self.workers, ranks).lead(work)
        finally:
            self._ranks = None

    def translate(
        self,
        texts: Iterable[str],
        n_best: int = 1,
        alignments: bool = False,
        prefixes: Iterable[str] | None = None,
        scored: bool = True,
    ) -> list[Translation]:
        """Return the best translation of each text, in order; the translation of an empty text is empty.

        The lines of a text, which end at LF or CRLF, are translated like separate texts, and joined by the
        same line breaks. Scores, tokens and alignments then refer to the whole text, and the k-th
        best translation consists of the k-th best of each line. Unpaired surrogates are replaced by U+FFFD.
        If the model has language tags, a line may begin with one; otherwise it is added.

        If `n_best` is greater than 1, `Translation.n_best` contains that many translations; it must not
        exceed the beam size or number of samples. With `alignments`, `Translation.alignment` is set.
        `prefixes` are the texts that the translations begin with. Their tokens have probability 1: scores
        and log-probabilities count only the tokens after them. Without `scored`, greedy search is faster,
        and scores and log-probabilities are NaN.

        On a CPU, a translation depends neither on the other texts nor on `decoding.batch_tokens`, in fp32 and
        in bf16 (for parts of more than about 190 tokens, scores may differ in the last digits). It can depend
        on the number of threads and, on a GPU, on the batch, because sums are computed in a different order:
        either of two hypotheses with nearly equal scores may win. With several workers, a single batch is
        decoded with all threads, and each of several batches with some of them. The random numbers of
        sampling depend only on `decoding.seed` and on the indices of the line and of the sample.

        Raises UsageError if `n_best` is too large, if there are more or fewer prefixes than texts, or if a
        line begins with the tag of another language than `between` chose, and DataError if a prefix is too
        long, or if its text is translated in parts.
        """
        return list(self.stream(texts, n_best, alignments, prefixes, scored=scored))

    def stream(
        self,
        lines: Iterable[str],
        n_best: int = 1,
        alignments: bool = False,
        prefixes: Iterable[str] | None = None,
        first: int = 0,
        scored: bool = True,
        progress: Callable[[int, int], object] = lambda lines, tokens: None,
        paused: Callable[[float], bool] = lambda waited: False,
    ) -> Generator[Translation, None, None]:
        """Like `translate`, but yields translations, in bounded memory: reads at most 4,096 lines at a time,
        or 2,048 for each of more than two workers. On a CUDA device, it reads at most two windows, of more
        lines, ahead of the one that is decoded.

        `first` is the index of the first line in the whole input. It makes sampling independent of where an
        interrupted translation was resumed. `progress` is called with the number of lines and of target
        tokens whenever some are translated, which is before they can be yielded in order. `paused` is
        called after each line that does not complete a window, with the time in seconds since the first line
        of the window was read. If it returns True, the lines read so far are translated before the next one
        is read; on a GPU, translations can then depend on when lines arrive.
        """
        lines = [lines] if isinstance(lines, str) else lines
        prefixes = [prefixes] if isinstance(prefixes, str) else prefixes
        workers = self.workers if self._ranks is None else SharedWorkers(self.workers, self._ranks)
        self.decoding.require_hypotheses(n_best)
        most, pauses = max(WINDOW, self.workers.lines_needed(self.decoding) * workers.count), Pauses(paused)
        given = numbered(windows(lines, prefixes, most, pauses), first)

        def split(window: Window) -> DecodingTask:
            parts = self.splitter.parts_of(window.texts, window.prefixes, window.first, alignments)
            return DecodingTask(self.decoding, parts, self.target_lang, n_best, alignments, scored)

        def decoded(part: Part, found: list[Translation]) -> None:
            progress(int(part.key[1] == 0), found[0].tokens)  # a line is counted with its first part

        tasks = ((window, split(window)) for window in given)
        results: Results = ((window, task, workers.decode(task, decoded)) for window, task in tasks)
        if self._ranks is None and overlaps(self.device, lines, most):
            results = overlapped(given, split, workers.decode, decoded, pauses, self.device)
        with closing(results):
            for window, task, translations in results:
                progress(window.lines - len({part.line for part in task.parts}), 0)  # the empty lines
                yield from join_texts(window.texts, task, translations)

    @property
    def splitter(self) -> Splitter:
        """Splits texts into lines, and lines into parts. Raises UsageError if the model has codes of
        languages, but not for the current direction."""
        language, mode = self.direction.source, self.decoding.split
        longest = self.decoding.longest_source(self.max_length, self.language_tags)
        tags = self.tokenizer.tags_of(self.direction, self.language_tags)
        positions = position_limit(self.models)
        return Splitter(self.tokenizer, longest, language, mode, tags, self.chosen, positions)
