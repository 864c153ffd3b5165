"""Marks of tests that need a device, or need it to be absent."""

import pytest
import torch

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
