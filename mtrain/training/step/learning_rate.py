"""What changes during training, as pure functions of the step."""

import math

from mtrain.config.sections.training import TrainingConfig


def r_drop_weight(step: int, config: TrainingConfig) -> float:
    """The weight alpha of R-Drop in optimizer step `step`, counted from 1; 0 in a step without R-Drop."""
    return config.r_drop if step > config.r_drop_after else 0.0


def encoder_share(step: float, config: TrainingConfig) -> float:
    """The share of the learning rate with which optimizer step `step`, counted from 1, trains the encoder; by
    the clock, `step` is a position between steps. The encoder is frozen for `encoder_after` steps, and then
    has a warm-up of its own: large updates would change its output faster than the decoder can follow."""
    if not config.encoder_after:
        return 1.0
    return min(1.0, max(0.0, step - config.encoder_after) / max(1, config.warmup_steps or 0))


def learning_rate(step: float, config: TrainingConfig, total_steps: int | None) -> float:
    """The learning rate of optimizer step `step`, counted from 1; by the clock, of a position between steps.

    It increases linearly to the peak over `warmup_steps`. Then `inverse_sqrt` decays with the inverse square
    root of the step (Vaswani et al. 2017, section 5.3, scaled to the peak), `cosine` and `linear` decay to
    zero at `total_steps`, and `constant` does not decay. `wsd` (warm-up, stable, decay) is constant for the
    first half of the steps after warm-up, and then decays to zero as 1 - sqrt (Hägele et al., "Scaling Laws
    and Compute-Optimal Training Beyond Fixed Training Durations", 2024, section 3). `constant` and
    `inverse_sqrt` do not require `total_steps`.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    assert peak is not None and warmup is not None, "`choose_values` fills in these values"
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / step)
    assert total_steps is not None
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.schedule == "linear":
        return peak * (1 - progress)
    if config.schedule == "wsd":
        return peak * (1 - math.sqrt(max(0.0, 2 * progress - 1)))
    return peak * (1 + math.cos(math.pi * progress)) / 2
