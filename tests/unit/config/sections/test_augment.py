"""The section `data.augment`, and what the tokenizer must be able to represent."""

import pytest

OFF = "data.augment={uppercase: 0, typos: 0.0}"


def test_augmentation_is_off_unless_a_probability_is_given(load_text):
    assert load_text().data.augment is None and not load_text().data.changes_pairs
    assert load_text(OFF).data.augment is None
    data = load_text("data.augment={uppercase: 0.07, merge: 1}").data
    assert data.augment.uppercase == 0.07 and data.augment.titlecase == 0 and data.changes_pairs
    assert load_text("data.subword_sampling=0.1").data.changes_pairs


@pytest.mark.parametrize("name", ["uppercase", "titlecase"])
def test_letter_case_needs_a_tokenizer_that_keeps_it(rejection, load_text, name: str):
    keys = f"data.augment={{{name}: 0.1}}", "tokenizer.normalization=nfkc_cf"
    assert rejection(*keys) == (
        f"data.augment.{name} has no effect with tokenizer.normalization: nfkc_cf, which lowercases all "
        "text; leave out one of the two"
    )
    # A reused tokenizer decides itself; its settings are compared later.
    assert load_text(*keys, "tokenizer.path=runs/other").data.augment is not None
    assert load_text("data.augment={typos: 0.1}", keys[1]).data.augment is not None


def test_noise_needs_bytes(rejection, load_text):
    keys = "data.augment={noise: 0.001}", "tokenizer.byte_fallback=false"
    assert rejection(*keys) == (
        "data.augment.noise needs tokenizer.byte_fallback: true, because the vocabulary lacks its characters"
    )
    assert load_text("data.augment={typos: 0.001}", keys[1]).data.augment is not None
