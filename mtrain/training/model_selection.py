"""Model selection: validate the weights during training, and publish the best ones in `RUN/model`."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import clear_frames

from mtrain.checkpoint.checkpoint import record_validation
from mtrain.checkpoint.state import TrainState
from mtrain.device import release_cached_memory
from mtrain.distributed.ranks import Ranks
from mtrain.errors import DivergedError, ModelError, StorageError
from mtrain.evaluation.metrics import TITLES
from mtrain.model.build import AnyModel
from mtrain.training.records.best_model import publish_best
from mtrain.training.records.progress import Progress
from mtrain.training.setup.prepare_run import PreparedRun
from mtrain.training.step.average import WeightAverage
from mtrain.training.validation.classifier import ClassifierScores, ClassifierValidator
from mtrain.training.validation.comparison import DECIMALS, LOW_BLEU, comparable, is_better
from mtrain.training.validation.samples import record_translations
from mtrain.training.validation.translation import Scores, Validator

log = logging.getLogger(__name__)

MAX_FAILED_VALIDATIONS = 3  # in a row


class ModelSelection:
    """Validates the model of a run, keeps the best score in `state`, and publishes the best weights.

    All ranks call these methods together. Rank 0 decides which model is the best one, and writes files.
    """

    def __init__(
        self, run: PreparedRun, state: TrainState, progress: Progress, average: WeightAverage, ranks: Ranks
    ):
        self.config, self.tokenizer = run.config, run.tokenizer
        self.run_dir = Path(run.config.run_dir)
        self.state, self.progress = state, progress
        self.average, self.ranks = average, ranks
        assert state.micro_batch_tokens is not None
        validator = ClassifierValidator if run.config.model.is_classifier else Validator
        data = run.data.with_sampled_validation(run.config.training.validation_pairs, run.config.seed)
        self.validator = validator(data, run.config, run.tokenizer, state.micro_batch_tokens, ranks)
        self.failures = 0  # in a row
        leading, reason = self.validator.leading_metric, self.validator.reason
        why = f": {reason}" if reason else ""
        configured = run.config.training.best_metric
        self.least_bleu = LOW_BLEU if configured == "auto" else 0.0  # for `is_better`
        if leading == "bleu" and self.least_bleu:
            why = f"; chrF does while the BLEU is below {LOW_BLEU:g}"
        log.info("%s selects the best model%s", TITLES.get(leading, leading), why)
        # Earlier versions recorded one score, of this metric; that of nll was negative.
        recorded = leading if configured == "auto" else configured
        if state.best_score is not None:
            state.best_scores.setdefault(recorded, abs(state.best_score))
        if state.initial_score is not None:
            state.initial_scores.setdefault(recorded, abs(state.initial_score))
        state.best_score = state.initial_score = None

    def validate(self, saved: Callable[[], bool], last: bool = False) -> None:
        """Validate the weights or their average, if a validation is due, and publish the best weights so far.

        `saved` says whether a checkpoint has the weights; weights without one never become the best. It is
        called once the weights are scored, and may wait for the checkpoint.
        A failure does not end training: it is logged, and the next validation tries again. The `last`
        validation is repeated instead. Raises the error after MAX_FAILED_VALIDATIONS failures in a row.
        """
        self._complete(lambda: self._validate_if_due(saved) and self._publish(), last)

    def publish(self, last: bool) -> None:
        """Publish the best weights of a run that was interrupted, unless the published files are valid and up
        to date. For failures, and `last`, see `validate`."""
        self._complete(lambda: self._publish(verify=True), last)

    def _complete(self, work: Callable[[], bool], last: bool) -> None:
        """Do `work` once, or until it succeeds if this is the `last` time."""
        while not work():
            if not last:
                return
        self.failures = 0

    def scores_of(self, model: AnyModel) -> Scores | ClassifierScores | None:
        """The scores of a model on the validation set, on rank 0; None on the others. Raises MtrainError or
        MemoryError on all ranks if one fails."""
        with self.ranks.agreed():
            share = self.validator.share(model)
        shares = self.ranks.gather(share)
        with self.ranks.agreed():
            return self.validator.scores(shares) if self.ranks.is_first else None

    def score_initial_model(self) -> None:
        """Score the model that a new run starts from, which shows what training gains. It never becomes the
        best one, because no checkpoint has its weights. A failure is logged, as in `validate`."""
        with self._tolerated("validation"):
            with self.average.applied(self.ranks) as model:
                scores = self.scores_of(model)
            if scores is not None:
                self.state.initial_scores = comparable(scores)
                log.info("initial model: %s", scores.describe()[0])
            self.state.initial_scores = self.ranks.broadcast(self.state.initial_scores)
            self.failures = 0
        self.state.seconds += self.progress.elapsed()  # also if it has failed

    def review(self) -> None:
        """Warn, at the end of training, if no validation was better than the initial model's, or if
        the BLEU of the best model is 0."""
        if not self.ranks.is_first:
            return
        initial, best = self.state.initial_scores, self.state.best_scores
        leading = self.validator.leading_metric
        if initial and best and not is_better(best, initial, leading, self.least_bleu):
            log.warning(
                "no validation was better than the initial model, training.init_from; try a lower "
                "training.learning_rate or a smaller training.validate_every"
            )
        if round(best.get("bleu", LOW_BLEU), DECIMALS["bleu"]) == 0:
            log.warning(
                "the validation BLEU of the best model is 0.00%s; if the references have fewer than four "
                "tokens, judge it by chrF; otherwise, train longer, or look for errors in the corpus with "
                "`mtrain check`",
                f" (chrF {best['chrf']:.2f})" if "chrf" in best else "",
            )

    @contextmanager
    def _tolerated(self, activity: str) -> Iterator[None]:
        """Log and count an error that ends the block, if all ranks have the same error: training can then
        continue. After MAX_FAILED_VALIDATIONS failures in a row, rank 0 raises the error, and the other ranks
        fail because rank 0 is gone."""
        try:
            yield
        except Exception as error:
            if not self.ranks.is_agreed(error):
                raise
            if self.ranks.is_first:
                self._count_failure(error, activity)
            self._share_outcome()

    def _share_outcome(self) -> None:
        """Let all ranks have what rank 0 knows after a validation."""
        known = [self.failures, self.state.outcome_of_validation()]
        self.failures, outcome = self.ranks.broadcast(known)
        self.state.adopt_validation(outcome)

    def _count_failure(self, error: Exception, activity: str) -> None:
        self.failures += 1
        if self.failures >= MAX_FAILED_VALIDATIONS:
            if isinstance(error, ModelError):  # the outputs are not finite
                raise DivergedError(f"{self.failures} validations in a row failed: {error}") from None
            raise error
        log.warning("step %d: %s failed: %s", self.state.step, activity, error)
        clear_frames(error.__traceback__)  # which may hold tensors
        release_cached_memory(self.ranks.device)

    def _publish(self, verify: bool = False) -> bool:
        """Publish the best weights so far. Returns whether this has succeeded."""
        with self._tolerated("publishing"):
            lost = False
            with self.ranks.agreed():
                if self.ranks.is_first:
                    lost = not publish_best(self.state, self.config, self.tokenizer, verify)
            if self.ranks.broadcast(lost):
                lost_weights = f"the best weights, of step {self.state.best_step}, are lost"
                self._discard_best(f"{lost_weights}; their score is discarded")
            return True
        return False

    def _validate_if_due(self, saved: Callable[[], bool]) -> bool:
        """Score the weights if a validation is due, and record the outcome on disk and in the state. Returns
        whether this has succeeded."""
        if not self.state.validation_due:  # only publishing has failed
            return True
        with self._tolerated("validation"):
            with self.average.applied(self.ranks) as model:
                scores = self.scores_of(model)
                with self.ranks.agreed():
                    if scores is not None:
                        is_saved = saved()
                        self._record(scores, self._compare(scores, model, is_saved), is_saved)
            self._share_outcome()
            return True
        return False

    def _compare(self, scores: Scores | ClassifierScores, model: AnyModel, saved: bool) -> TrainState:
        """The state after a validation. The weights can only be the best ones if they are `saved`."""
        state, compared = self.state, comparable(scores)
        leading = self.validator.leading_metric
        improved = is_better(compared, state.best_scores, leading, self.least_bleu)
        is_best = improved and saved
        layer = self.validator.alignment_layer(model) if is_best else None
        state.seconds += self.progress.elapsed()
        outcome = replace(state, validation_due=False)
        nll = round(compared.get("nll", math.inf), DECIMALS["nll"])
        is_lowest = nll < (math.inf if state.lowest_nll is None else state.lowest_nll)
        if is_lowest:
            outcome.lowest_nll = nll
        best = state.best_scores
        still_learns = is_lowest and "nll" in best and best.get("bleu", LOW_BLEU) < LOW_BLEU
        resets = improved or still_learns or self._another_stage_follows
        outcome.validations_without_improvement = 0 if resets else state.validations_without_improvement + 1
        if is_best:
            outcome.best_step, outcome.best_alignment_layer = state.step, layer
            outcome.best_metric = "chrf" if compared.get("bleu", LOW_BLEU) < self.least_bleu else leading
            outcome.best_scores = compared
        return outcome

    def _record(self, scores: Scores | ClassifierScores, outcome: TrainState, saved: bool) -> None:
        """Log a validation, record its translations, then its outcome, and adopt that. Rank 0 does this
        before it waits for others.

        Once the outcome is on disk, a resumed run does not repeat the validation, so it comes last. If it
        cannot be written, the validation has failed, and its line of metrics is removed.
        """
        is_best = outcome.best_step == outcome.step
        self.progress.log_validation(scores, is_best)
        if self.validator.texts:
            record_translations(self.run_dir, outcome.step, self.validator.texts, is_best)
        if saved:
            try:
                record_validation(self.run_dir, outcome)
            except StorageError:
                self.progress.remove_later_records()
                raise
        self.state.adopt_validation(outcome.outcome_of_validation())

    @property
    def _another_stage_follows(self) -> bool:
        """Whether the stage of the last step is not the last one, in which alone the patience applies."""
        begun = len(self.state.position.starts)
        if begun > 1 and self.state.position.stage_step == 0:  # the state is at the start of the next stage
            begun -= 1
        return begun < len(self.config.data.stages or ())

    @property
    def is_comparable(self) -> bool:
        """Whether new scores can be compared with the best ones, if there are any."""
        state = self.state
        return not state.best_scores or state.validation_fingerprint == self.validator.fingerprint()

    def check_fingerprint(self) -> None:
        """Discard the best score if the validation pairs, the search settings or `alignment_head` have
        changed."""
        state, fingerprint = self.state, self.validator.fingerprint()
        if state.validation_fingerprint not in ("", fingerprint):
            state.initial_scores = {}
        if not self.is_comparable:
            changed = "the validation pairs, the search or model.alignment_head changed"
            self._discard_best(f"{changed}; the best score is discarded")
        state.validation_fingerprint = fingerprint

    def _discard_best(self, reason: str) -> None:
        """Return to the outcome of no validation, with a warning."""
        if self.ranks.is_first:
            log.warning("%s", reason)
        state = self.state
        fresh = TrainState(step=state.step, seconds=state.seconds, validation_due=state.validation_due)
        state.adopt_validation(fresh.outcome_of_validation())
