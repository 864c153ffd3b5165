"""Validation: the loss on the references, and the scores of the decoded text."""

import logging
import math
from collections.abc import Callable, Sequence
from itertools import compress
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

from mtrain.config.languages import Direction, LanguageTags, changed_bleu_tokenizers, has_spaces
from mtrain.config.schema import Config
from mtrain.data.epochs.loader import make_batch
from mtrain.data.epochs.packed_batch import AnyBatch
from mtrain.data.prepare import PreparedData
from mtrain.data.text.writing_systems import main_script
from mtrain.decoding.alignment_layer import choose_alignment_layer
from mtrain.decoding.batches import in_batches
from mtrain.decoding.decode import Ensemble
from mtrain.decoding.search.constraints import check_forbidden_ids
from mtrain.decoding.split import Splitter
from mtrain.decoding.translate import Translator
from mtrain.device import autocast, resolve_precision
from mtrain.distributed.ranks import JsonValue, Ranks
from mtrain.evaluation.metrics import make_metrics, score
from mtrain.model.build import AnyModel, evaluating
from mtrain.model.transformer import Transformer
from mtrain.progress_bar import ProgressBar
from mtrain.storage.manifest import sha256_of_json
from mtrain.tokenizer.rows import Rows
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Scores(NamedTuple):
    """Scores of a model on the validation set."""

    nll: float  # nats/token, unsmoothed
    perplexity: float  # e ** nll
    bleu: float  # the mean over the directions, if there are several
    chrf: float
    by_direction: dict[str, tuple[float, float]]  # BLEU and chrF of each; empty for one direction

    def record(self) -> dict[str, float]:
        """The scores by name, for metrics.jsonl."""
        known = self._asdict()
        for name, (bleu, chrf) in known.pop("by_direction").items():
            known |= {f"bleu_{name}": bleu, f"chrf_{name}": chrf}
        return known

    def headline(self) -> str:
        """The most important score, for the progress bar."""
        return f"BLEU {self.bleu:.2f}"

    def describe(self) -> list[str]:
        """The scores for the log, in lines."""
        quality = f"BLEU {self.bleu:.2f}, chrF {self.chrf:.2f}"
        lines = [f"nll {self.nll:.3f}, perplexity {self.perplexity:.2f}, {quality}"]
        if self.by_direction:
            each = (f"{name} {bleu:.2f}" for name, (bleu, _) in self.by_direction.items())
            lines.append(f"BLEU by direction: {', '.join(each)}")
        return lines


class Validator:
    """Scores models on the validation set, which is encoded once. If there are several ranks, each has a
    share of its pairs."""

    def __init__(
        self, data: PreparedData, config: Config, tokenizer: Tokenizer, micro_batch_tokens: int, ranks: Ranks
    ):
        """The sources are given language tags, if the model has any. Codes are added to ids."""
        self.ranks = ranks
        tags = config.data.language_tags
        self.codes: LanguageTags = tags if tags.startswith("codes") else "none"
        self.directions = data.directions
        texts = [direction.tag(tags) for direction in data.directions]
        sources = [pair.source for pair in data.validation]
        self.sources = [f"{tag} {text}" if tag else text for tag, text in zip(texts, sources, strict=True)]
        self.references = [pair.target for pair in data.validation]
        self.texts: dict[str, list[str]] = {}  # with the translations by the model that was scored last
        self.config = config
        self.tokenizer = tokenizer
        self.device = ranks.device
        languages = {direction.target for direction in data.directions}
        self.metrics = {language: make_metrics(("bleu", "chrf"), language) for language in languages}
        # The other search settings come from the `decoding` section.
        search = {"beam_size": config.training.validation_beam_size, "samples": None, "mbr": None}
        self.decoding = config.decoding.model_copy(update=search)
        check_forbidden_ids(self.decoding, tokenizer.target_vocab_size)  # before training
        self.leading_metric, self.reason = self._choose_metric()
        self.batches = self._encode(micro_batch_tokens)

    def _choose_metric(self) -> tuple[str, str]:
        """The metric that selects the best model, and the reason if it is chrF although that is not
        configured. `auto` is chrF if a target language does not separate words: its BLEU depends on how a
        tokenizer divides the text. BLEU becomes chrF if no reference has four tokens: then even the BLEU of
        perfect translations is 0."""
        metric = self.config.training.best_metric
        directions = dict.fromkeys(self.directions)
        if metric == "auto":
            for direction in directions:
                if not has_spaces(direction.target, main_script(self._of(direction, self.references))):
                    return "chrf", f"{direction.target} is written without spaces between words"
            metric = "bleu"
        if metric != "bleu" or any(len(text.split()) >= 4 for text in self.references):
            return metric, ""
        perfect = (self._bleu_and_chrf(each, self.references) for each in directions)
        if any(bleu for bleu, _ in perfect):
            return metric, ""
        return "chrf", "BLEU is 0 if no validation reference has four tokens"

    def fingerprint(self) -> str:
        """SHA-256 of the pairs, the vocabulary and the search settings.

        Scores are comparable only if their fingerprints are equal.
        """
        irrelevant = {"batch_tokens", "workers", "precision", "seed", "temperature", "top_k", "top_p"}
        irrelevant |= {"alignment_layer"}  # fingerprints of earlier versions lack it
        if self.decoding.beam_size == 1:
            irrelevant |= {"length_penalty", "stop"}
        search = self.decoding.model_dump(mode="json", exclude=irrelevant)
        if self.config.training.best_metric == "nll":  # does not depend on the search
            search = {}
        value: list[object] = [self.sources, self.references, self.tokenizer.fingerprint, search]
        if self.codes != "none":
            value.append([*map(str, self.directions)])
        if changed := changed_bleu_tokenizers(self.metrics):
            value.append(changed)
        return sha256_of_json(value)

    def _encode(self, micro_batch_tokens: int) -> list[AnyBatch]:
        """Batches for the loss; pairs longer than `data.max_length` are truncated."""
        special, longest = self.tokenizer.special, self.config.data.max_length
        found: list[tuple[list[int], list[int]]] = [([], [])] * len(self.sources)
        for direction in dict.fromkeys(self.directions):
            rows = [row for row, each in enumerate(self.directions) if each == direction]
            tags = self.tokenizer.tags_of(direction, self.codes)
            splitter = Splitter(self.tokenizer, longest, direction.source, tags=tags)
            sources = splitter.encode([self.sources[row] for row in rows], most=longest)
            targets = splitter.encode_target([self.references[row] for row in rows], longest)
            for row, pair in zip(rows, zip(sources, targets, strict=True), strict=True):
                found[row] = pair
        source, target = (Rows.from_lists([pair[side] for pair in found]) for side in (0, 1))
        lengths = np.maximum(source.lengths, target.lengths).tolist()
        return [
            make_batch(self.device, source.take(rows), target.take(rows), special.pad, special.bos, rows)
            for rows in in_batches(lengths, micro_batch_tokens)
        ]

    def scores(self, shares: Sequence[JsonValue]) -> Scores:
        """The scores, given what `share` returns on all ranks."""
        nll = sum(share["nll"] for share in shares) / sum(batch.target_tokens for batch in self.batches)
        translations = [""] * len(self.sources)
        for rank, share in enumerate(shares):
            translations[rank :: len(shares)] = share["translations"]
        self.texts = {"source": self.sources, "reference": self.references, "translation": translations}
        targets = [direction.target for direction in self.directions]
        if {*targets} != {self.config.data.target_lang}:
            self.texts["target_lang"] = targets
        found = {each: self._bleu_and_chrf(each, translations) for each in dict.fromkeys(self.directions)}
        bleu, chrf = (fmean(scores) for scores in zip(*found.values(), strict=True))
        by_direction = {str(direction): scores for direction, scores in found.items()}
        perplexity = math.exp(min(nll, 700.0))
        return Scores(nll, perplexity, bleu, chrf, by_direction if len(found) > 1 else {})

    def _bleu_and_chrf(self, direction: Direction, translations: list[str]) -> tuple[float, float]:
        """BLEU and chrF of the translations of one direction, given the translations of all."""
        hypotheses, references = (self._of(direction, texts) for texts in (translations, self.references))
        bleu, chrf = score(hypotheses, [references], self.metrics[direction.target])
        return bleu.score, chrf.score

    def _of(self, direction: Direction, texts: Sequence[str]) -> list[str]:
        """The texts of one direction, given those of all pairs."""
        return list(compress(texts, (each == direction for each in self.directions)))

    def share(self, model: AnyModel) -> JsonValue:
        """The summed negative log-likelihood and the translations of the pairs of this rank. The model is in
        evaluation mode meanwhile."""
        assert isinstance(model, Transformer)
        rows = range(self.ranks.rank, len(self.sources), self.ranks.size)
        with evaluating(model):
            nll = self._nll(model, self.batches[self.ranks.rank :: self.ranks.size])
            with ProgressBar("validated", "sentences", len(rows)) as progress:
                return {"nll": nll, "translations": self._translate(model, rows, progress.add)}

    def _translate(
        self, model: Transformer, rows: Sequence[int], progress: Callable[[int, int], object]
    ) -> list[str]:
        found: dict[int, str] = {}
        directions = dict.fromkeys(self.directions[row] for row in rows)
        for direction in directions:  # its languages matter where lines are split
            ensemble, longest = Ensemble([model], self.tokenizer, self.device), self.config.data.max_length
            # Without processes, because the weights change.
            translator = Translator(
                ensemble, self.decoding, direction, longest, processes=False, language_tags=self.codes
            )
            chosen = [row for row in rows if self.directions[row] == direction]
            sources = [self.sources[row] for row in chosen]
            translations = translator.stream(sources, scored=False, progress=progress)
            found |= {row: each.text for row, each in zip(chosen, translations, strict=True)}
        return [found[row] for row in rows]

    def alignment_layer(self, model: AnyModel) -> int | None:
        """The decoder layer to take word alignments from; None if it is configured or unknown, or if the
        model has codes of languages, which the choice does not support."""
        if self.config.decoding.alignment_layer is not None or self.codes != "none":
            return None
        assert isinstance(model, Transformer)
        pairs = list(zip(self.sources, self.references, strict=True))
        try:
            with autocast(self.device, resolve_precision(self.device, self.config.training.precision)):
                return choose_alignment_layer(model, self.tokenizer, pairs, self.device)
        except Exception as error:  # training can continue without it
            log.warning("the layer for word alignments could not be chosen: %s", error)
            return None

    @torch.no_grad()
    def _nll(self, model: Transformer, batches: list[AnyBatch]) -> float:
        total = 0.0
        precision = resolve_precision(self.device, self.config.training.precision)
        for batch in batches:
            moved = batch.to(self.device)
            with autocast(self.device, precision):
                sums = model.loss(model.forward(*moved.inputs()), moved.labels, 0.0)
            total += sums.nll.item()
        return total
