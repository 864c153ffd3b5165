"""What ranks must have in common, and what each must have for itself."""

import pytest

from mtrain.distributed.store import require_equal_facts, require_own_gpus
from mtrain.errors import DistributedError


def test_a_difference_names_the_rank_and_the_key():
    facts = {"seed": "1", "data.folder": '"a"'}
    require_equal_facts([facts, facts])
    with pytest.raises(DistributedError, match=r'rank 2: data\.folder is "b", but "a" on rank 0; start all'):
        require_equal_facts([facts, facts, {**facts, "data.folder": '"b"'}])
    with pytest.raises(DistributedError, match="rank 1: seed is missing, but 1 on rank 0"):
        require_equal_facts([facts, {"data.folder": '"a"'}])


def test_two_ranks_must_not_use_the_same_gpu():
    require_own_gpus(["0 on a", "1 on a", "0 on b"])
    require_own_gpus([None, None])
    with pytest.raises(
        DistributedError, match=r"ranks 1 and 2 use the same GPU \(1 on a\); .* --nproc-per-node"
    ):
        require_own_gpus(["0 on a", "1 on a", "1 on a"])
