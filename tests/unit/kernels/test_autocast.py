"""The effect of autocast on tensors, compared with the types of products."""

import pytest
import torch

from mtrain.kernels.autocast import product_dtype, without_autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_have_the_type_of_autocast_only_where_it_is_enabled(dtype):
    x = torch.ones(2, 2)
    assert product_dtype(x) == (x @ x).dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        assert product_dtype(x) == (x @ x).dtype == dtype
        with without_autocast(x):
            assert product_dtype(x) == (x @ x).dtype == torch.float32


def test_devices_without_autocast_are_supported():
    x = torch.ones(2, 2, device="meta")
    with without_autocast(x):
        assert product_dtype(x) == (x @ x).dtype == torch.float32
