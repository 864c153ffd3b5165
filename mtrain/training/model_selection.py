"""Model selection: validate the weights during training, and publish the best ones in `RUN/model`."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from mtrain.checkpoint.checkpoint import TrainState, record_validation
from mtrain.config.schema import Config
from mtrain.device import release_cached_memory
from mtrain.distributed.ranks import Ranks
from mtrain.errors import DistributedError, DivergedError, ModelError, MtrainError, is_out_of_memory
from mtrain.model.build import AnyModel
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.training.records.best_model import publish_best
from mtrain.training.records.progress import Progress
from mtrain.training.setup.prepare import PreparedRun
from mtrain.training.validation.classifier import ClassifierScores, ClassifierValidator
from mtrain.training.validation.samples import record_translations
from mtrain.training.validation.translation import Scores, Validator

log = logging.getLogger(__name__)

MAX_FAILED_VALIDATIONS = 3  # in a row
DECIMALS = {"bleu": 2, "chrf": 2, "nll": 3, "auc": 4}  # of the scores that are shown
# Below this BLEU, a model that is learning may translate worse than an untrained model.
LOW_BLEU = 1.0


def is_better(scores: Mapping[str, float], best: Mapping[str, float], leading: str) -> bool:
    """Whether a validation is better than the `best` one so far, given the finite scores of both by name.
    `best` is empty if there is none.

    The `leading` metric decides, rounded unless it is the nll. Ties are broken by chrF, then the nll: weak
    models have a BLEU of 0. A missing score is the worst; without the leading one, a validation never wins.
    """
    if leading not in scores:
        return False
    names = [leading, "chrf", "nll"]
    if len(best) == 1 and best.get(leading):
        names = [leading]  # an earlier version recorded only this score, so a tie does not win
    ours, theirs = ([_merit(each, name, leading) for name in names] for each in (scores, best))
    return not best or ours > theirs


def _merit(scores: Mapping[str, float], name: str, leading: str) -> float:
    """A number that is higher for a better score."""
    if name not in scores:
        return -math.inf
    value = -scores[name] if name == "nll" else scores[name]
    return value if name == leading == "nll" else round(value, DECIMALS[name])


class ModelSelection:
    """Validates the model of a run, keeps the best score in `state`, and publishes the best weights."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        validator: Validator | ClassifierValidator,
        state: TrainState,
        progress: Progress,
    ):
        self.config, self.tokenizer, self.run_dir = config, tokenizer, Path(config.run_dir)
        self.validator, self.state, self.progress = validator, state, progress
        self.failures = 0  # in a row
        if config.training.best_metric != validator.leading_metric:
            log.info("chrF selects the best model: BLEU is 0 if no validation reference has four tokens")
        # Earlier versions recorded one score, with the sign of `_value_of`.
        if state.best_score is not None:
            state.best_scores.setdefault(config.training.best_metric, abs(state.best_score))
        if state.initial_score is not None:
            state.initial_scores.setdefault(config.training.best_metric, abs(state.initial_score))

    def validate(self, model: AnyModel, saved: bool, last: bool = False) -> None:
        """Validate a model, and publish the best weights so far.

        `saved` says whether a checkpoint has its weights; weights without one never become the best.
        A failure does not end training: it is logged, and the next validation tries again. The `last`
        validation is repeated instead. Raises the error after MAX_FAILED_VALIDATIONS failures in a row.
        """

        def score() -> None:
            if self.state.validation_due:  # not if only publishing has failed
                self._score(model, saved)

        self._attempt({"validation": score, "publishing": self._publish}, last)

    def score_initial_model(self, model: AnyModel) -> None:
        """Score the model that a new run starts from, which shows what training gains. It never becomes the
        best one, because no checkpoint has its weights. A failure is logged, as in `validate`."""

        def score() -> None:
            scores = self.validator(model)
            value = self._value_of(scores)
            self.progress.update_time()
            self.state.initial_score = value if math.isfinite(value) else None
            self.state.initial_scores = _comparable(scores)
            log.info("initial model: %s", scores.describe()[0])

        self._attempt({"validation": score}, last=False)

    def review(self) -> None:
        """Warn, at the end of training, if no validation was better than that of the initial model, or if
        the BLEU of the best model is 0."""
        initial, best = self.state.initial_scores, self.state.best_scores
        if initial and best and not is_better(best, initial, self.validator.leading_metric):
            log.warning(
                "no validation was better than that of the initial model, training.init_from; try a lower "
                "training.learning_rate or a smaller training.validate_every"
            )
        if round(best.get("bleu", LOW_BLEU), DECIMALS["bleu"]) == 0:
            log.warning(
                "the validation BLEU of the best model is 0.00%s; if the references have fewer than four "
                "tokens, judge it by chrF; otherwise, train longer, or look for errors in the corpus with "
                "`mtrain check`",
                f" (chrF {best['chrf']:.2f})" if "chrf" in best else "",
            )

    def publish(self, last: bool) -> None:
        """Publish the best weights of a run that was interrupted, unless the published files are valid and up
        to date. For failures, and `last`, see `validate`."""
        self._attempt({"publishing": lambda: self._publish(verify=True)}, last)

    def _publish(self, verify: bool = False) -> None:
        if not publish_best(self.run_dir, self.state, self.config, self.tokenizer, verify):
            log.warning(
                "the best weights, of step %d, are lost; their score is discarded", self.state.best_step
            )
            self._discard_best()

    def _attempt(self, activities: Mapping[str, Callable[[], None]], last: bool) -> None:
        """Do some activities, given by name, and count their failures; see `validate`."""
        while not self._try(activities) and last:
            pass

    def _try(self, activities: Mapping[str, Callable[[], None]]) -> bool:
        """Whether all activities have succeeded."""
        for activity, work in activities.items():
            try:
                work()
            except DistributedError:  # without that rank, no later validation can succeed
                raise
            except (MtrainError, RuntimeError, MemoryError) as error:
                self.count_failure(error, activity)
                return False
        self.failures = 0
        return True

    def count_failure(self, error: Exception, activity: str = "validation") -> None:
        """Log that a validation, or an `activity` that belongs to it, has failed. Raises the error if
        training cannot continue after it, or after MAX_FAILED_VALIDATIONS failures in a row."""
        if not isinstance(error, MtrainError) and not is_out_of_memory(error):
            raise error
        self.failures += 1
        if self.failures >= MAX_FAILED_VALIDATIONS:
            if isinstance(error, ModelError):  # the outputs are not finite
                raise DivergedError(f"{self.failures} validations in a row failed: {error}") from None
            raise error
        log.warning("step %d: %s failed: %s", self.state.step, activity, error)
        release_cached_memory(self.validator.device)

    def _score(self, model: AnyModel, saved: bool) -> None:
        """Score a model, and record the outcome on disk and in the state."""
        state, scores = self.state, self.validator(model)
        compared = _comparable(scores)
        improved = is_better(compared, state.best_scores, self.validator.leading_metric)
        is_best = improved and saved
        layer = self.validator.alignment_layer(model) if is_best else None
        self.progress.update_time()
        outcome, best = replace(state, validation_due=False), state.best_scores
        nll = round(compared.get("nll", math.inf), DECIMALS["nll"])
        is_lowest = nll < (math.inf if state.lowest_nll is None else state.lowest_nll)
        if is_lowest:
            outcome.lowest_nll = nll
        still_learns = is_lowest and "nll" in best and best.get("bleu", LOW_BLEU) < LOW_BLEU
        if improved or still_learns or self._another_stage_follows:
            outcome.validations_without_improvement = 0
        else:
            outcome.validations_without_improvement += 1
        if is_best:
            outcome.best_step, outcome.best_alignment_layer = state.step, layer
            outcome.best_score, outcome.best_scores = self._value_of(scores), compared
        if saved:
            record_validation(self.run_dir, outcome)  # if this fails, the state does not change
        vars(state).update(vars(outcome))
        self.progress.log_validation(scores, is_best)
        validator = self.validator
        if validator.translations:
            texts = validator.sources, validator.references, validator.translations
            record_translations(self.run_dir, state.step, *texts, best=is_best)

    def _value_of(self, scores: Scores | ClassifierScores) -> float:
        """The score of `training.best_metric`; higher is better."""
        metric = self.config.training.best_metric
        value: float = -scores.nll if metric == "nll" else getattr(scores, metric)
        return value

    @property
    def _another_stage_follows(self) -> bool:
        """Whether the stage of the last step is not the last one, in which alone the patience applies."""
        begun = len(self.state.stage_starts)
        if begun > 1 and self.state.stage_step == 0:  # the state is at the start of the next stage
            begun -= 1
        return begun < len(self.config.data.stages or ())

    def check_fingerprint(self) -> None:
        """Discard the best score if the validation pairs or the search settings have changed."""
        state, fingerprint = self.state, self.validator.fingerprint()
        if state.validation_fingerprint not in ("", fingerprint):
            state.initial_score, state.initial_scores = None, {}
        if state.best_score is not None and state.validation_fingerprint != fingerprint:
            log.warning("the validation pairs or the search have changed; the best score is discarded")
            self._discard_best()
        state.validation_fingerprint = fingerprint

    def _discard_best(self) -> None:
        state = self.state
        state.best_step = state.best_score = state.best_alignment_layer = state.lowest_nll = None
        state.best_scores, state.validations_without_improvement = {}, 0


def _comparable(scores: Scores | ClassifierScores) -> dict[str, float]:
    """The finite scores that are used to compare validations, by name."""
    return {
        name: value for name, value in scores.record().items() if name in DECIMALS and math.isfinite(value)
    }


def make_validator(
    run: PreparedRun, micro_batch_tokens: int, ranks: Ranks
) -> Validator | ClassifierValidator:
    """The validator of a run, for its kind of model."""
    settings = run.config, run.tokenizer, ranks.device, micro_batch_tokens, ranks
    if run.config.model.is_classifier:
        return ClassifierValidator(run.data.validation, *settings)
    return Validator(run.data.validation, run.data.directions, *settings)
