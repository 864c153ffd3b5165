"""Steps of DDP and FSDP on a GPU, with one rank: NCCL is called, though nothing is communicated.

torchrun starts this module, which prints whether the metrics equal those without ranks.
"""

import os

import torch
from torch import distributed

from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.packed_batch import pack
from mtrain.distributed.launch import read_launch
from mtrain.distributed.many_ranks import ManyRanks, abort_gpu_communication
from mtrain.distributed.store import RankStore
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.rows import Rows
from mtrain.training.step.ddp import ParallelLearner
from mtrain.training.step.fsdp import ShardedLearner
from mtrain.training.step.graph_learner import GraphLearner
from mtrain.training.step.learner import Learner

SIZES = {"d_model": 64, "ffn_dim": 128, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
VOCABULARY = {"source_vocab_size": 200, "target_vocab_size": 200, "max_positions": 64}


def main() -> None:
    """Take the same four steps with each learner."""
    launch, device = read_launch(), torch.device("cuda", 0)
    store = RankStore(launch)
    with store.answering():
        ranks = ManyRanks(device, launch, store)
        ranks.expect_steps()
        assert distributed.get_backend() == "nccl"
        expected = metrics_of(Learner, device)
        for kind in (ParallelLearner, ShardedLearner, GraphLearner):
            found = metrics_of(lambda model, recipe: kind(model, recipe, ranks), device)  # noqa: B023
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        ranks.barrier()
        abort_gpu_communication()
    print("DDP and FSDP are right", flush=True)
    os._exit(0)  # as after an error: nothing may wait for the GPU


def metrics_of(make, device: torch.device) -> torch.Tensor:
    """The metrics of four steps, (4, 4)."""
    torch.manual_seed(1)
    side = Rows.from_lists(torch.randint(4, 200, (6, 9)).tolist())
    model = Transformer(ModelConfig(**SIZES, **VOCABULARY)).to(device).train()
    learner = make(model, TrainingConfig(max_steps=4, clip_norm=1.0))
    batch = pack(side, side, 2, list(range(6)))
    tokens = 2 * batch.target_tokens
    return torch.stack([learner.step([batch, batch], tokens, 1e-3).values for _ in range(4)]).cpu()


if __name__ == "__main__":
    main()
