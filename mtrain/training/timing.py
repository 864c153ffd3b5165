"""Measures the speed of training, to plan how many steps fit in `training.max_minutes`."""

import gc
import time

import torch

from mtrain.config.schema import Config
from mtrain.data.loader import Loader
from mtrain.data.prepare_data import PreparedData
from mtrain.device import should_compile
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer, model_config
from mtrain.training.micro_batch import micro_batch_tokens
from mtrain.training.step import Learner, make_learner

UNTIMED_STEPS = 2  # which allocate memory, and compile
TIMED_STEPS, TIMED_SECONDS = 6, 4.0  # at least both
MAX_SECONDS = 20.0  # then fewer steps suffice


def measure_speed(config: Config, tokenizer: Tokenizer, data: PreparedData, device: torch.device) -> float:
    """The target tokens/s of training with a config on `device`, from some steps of the first epoch.

    Trains a temporary model. PyTorch's random generators change.
    """
    network = model_config(config.model, tokenizer, config.data.max_length)
    learner = make_learner(Transformer(network).to(device).train(), config.training)
    try:
        return _time_steps(learner, config, tokenizer, data)
    finally:
        del learner
        if should_compile(device, config.training.compile):
            torch.compiler.reset()  # the number of compiled variants of a function is limited
        gc.collect()  # a compiled model refers to itself
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _time_steps(learner: Learner, config: Config, tokenizer: Tokenizer, data: PreparedData) -> float:
    sizes = micro_batch_tokens(config, data.train, learner), len(learner.replicas)
    steps = Loader(data.train, config, tokenizer.special, learner.device, *sizes).steps()
    tokens, count, first = 0, 0, time.perf_counter()
    start = first
    for number, step in enumerate(steps, start=1):
        metrics = learner.step(step.batches, step.tokens, rate=1e-5)
        if number <= UNTIMED_STEPS:
            metrics.values.tolist()  # waits for the device
            start = time.perf_counter()
            continue
        tokens, count = tokens + step.tokens, count + 1
        if count >= TIMED_STEPS or time.perf_counter() - first >= MAX_SECONDS:
            metrics.values.tolist()
            if time.perf_counter() - start >= TIMED_SECONDS:
                break
    return tokens / (time.perf_counter() - start)
