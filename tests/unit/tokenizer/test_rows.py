"""Rows of token ids."""

import numpy as np
import pytest

from mtrain.tokenizer.rows import Rows

LISTS = [[5, 6, 3], [], [8, 3], [9, 9, 9, 3]]


@pytest.mark.parametrize(
    "kept", [[True] * 4, [False] * 4, [True, False, False, True], [False, True, True, False]]
)
def test_selected_rows_stay_in_their_order(kept):
    rows, indices = Rows.from_lists(LISTS), np.flatnonzero(kept)
    selected, taken = rows.select(np.array(kept)), rows.take(indices)
    assert selected.to_lists() == taken.to_lists() == [LISTS[i] for i in indices]
    assert selected.ids.dtype == rows.ids.dtype and selected.lengths.dtype == rows.lengths.dtype
