"""Imported and exported MarianMT models give the same ids, logits, loss and translations."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from mtrain.checkpoint.model_folder import LoadedModel, load_model
from mtrain.decoding.search.forced import forced_log_probs
from mtrain.decoding.search.search import search
from mtrain.interop.export import export_model
from mtrain.interop.import_model import import_model
from mtrain.model.incremental import DecodingTransformer
from tests.support.marian import (
    AWKWARD,
    MAX_LENGTH,
    batch,
    liveliness,
    make,
    texts_for,
    transformers,
    translations,
)
from tests.support.transformer import hidden_states

if TYPE_CHECKING:
    from transformers import MarianMTModel

SHAPES: dict[str, dict[str, Any]] = {
    "opus": {
        "seed": 38,
        "generation": {"num_beams": 4, "renormalize_logits": True},
        "activation_function": "swish",
    },
    "separate": {
        "seed": 25,
        "separate": True,
        "generation": {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True},
        "activation_function": "gelu",
        "encoder_layers": 1,
        "decoder_layers": 3,
    },
    "own": {
        "seed": 63,
        "own": True,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "generation": {"num_beams": 4, "early_stopping": "never", "no_repeat_ngram_size": 3, "min_length": 5},
        "activation_function": "relu",
        "d_model": 24,
    },
}


@pytest.fixture(
    scope="module",
    params=["opus", *(pytest.param(name, marks=pytest.mark.slow) for name in ("separate", "own"))],
)
def made(request, tmp_path_factory) -> tuple["MarianMTModel", Path, Path]:
    """A model of transformers, its folder, and the folder of the imported model."""
    folder = tmp_path_factory.mktemp("marian") / request.param
    model = make(folder, **SHAPES[request.param])
    import_model(str(folder), folder.with_name("imported"))
    return model, folder, folder.with_name("imported")


@pytest.fixture(scope="module", params=["import", "export"])
def pair(request, made) -> tuple["MarianMTModel", Path, LoadedModel]:
    """A model of transformers, its folder, and the same model in mtrain, imported or exported."""
    model, folder, imported = made
    if request.param == "export":
        exported = folder.with_name("exported")
        [summary] = export_model(imported, exported, "marian", overrides=["decoding.precision=fp32"])
        assert "16 translations identical (beam 4)" in summary
        model, folder = transformers().MarianMTModel.from_pretrained(exported).eval(), exported
    return model, folder, load_model(imported)


def rows_of(loaded: LoadedModel, texts: list[str]) -> list[list[int]]:
    return [[*ids, loaded.tokenizer.special.eos] for ids in loaded.tokenizer.encode_source(texts)]


def test_texts_are_encoded_and_decoded_as_by_transformers(pair) -> None:
    _, folder, loaded = pair
    theirs = transformers().MarianTokenizer.from_pretrained(folder)
    tagged = loaded.tokenizer.source.ids is not None
    for text in [*texts_for(folder), *AWKWARD]:
        if text.startswith(">>") and not tagged:  # a MarianTokenizer always takes it for a tag
            continue
        assert rows_of(loaded, [text])[0] == theirs(text).input_ids, text
        target = loaded.tokenizer.encode_target([text])[0]
        assert [*target, loaded.tokenizer.special.eos] == theirs(text_target=text).input_ids, text
        if "\u2581" in text or loaded.tokenizer.special.unk in target:  # we restore U+2581
            continue
        decoded = theirs.decode(target).replace("\t", " ")  # we write translations as lines
        assert loaded.tokenizer.decode([target]) == [decoded]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param(torch.float32, 1e-4, marks=pytest.mark.slow), (torch.float64, 1e-9)]
)
def test_logits_and_loss_equal_those_of_transformers(pair, dtype, tolerance) -> None:
    model, folder, loaded = pair
    theirs, ours = model.to(dtype), loaded.model.to(dtype)
    if folder.name == "exported":  # its embeddings have been shifted and rounded
        tolerance = max(tolerance, 1e-4)
    given = batch(folder, texts_for(folder))
    said = [[loaded.model.config.bos_id, *row] for row in translations(model.float(), folder, num_beams=1)]
    model.to(dtype)
    target = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in said], True, 1)
    with torch.inference_mode():
        expected = theirs(**given, decoder_input_ids=target).logits
        keep = given["attention_mask"].bool()
        sources = given["input_ids"].masked_fill(~keep, ours.config.pad_id)
        logits = ours.project(hidden_states(ours, sources, keep, target))
        assert expected.std() > 2
        if folder.name == "exported":  # logits are shifted, and there may be an additional start token
            logits, expected = logits.log_softmax(-1), expected.log_softmax(-1)[..., : logits.size(-1)]
        assert (model.final_logits_bias != 0).all() and (model.model.encoder.layers[0].fc1.bias != 0).all()
        assert len({len(row) for row in said}) > 5 and (~keep).any()
        assert (logits - expected).abs().max() < tolerance
        loss = theirs(**given, labels=target[:, 1:].contiguous()).loss
        steps = forced_log_probs([DecodingTransformer(ours)], sources, keep, target[:, 1:])
        assert -steps.mean() == pytest.approx(float(loss), abs=tolerance)
    theirs.float(), ours.float()


@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_translations_equal_those_of_generate(pair, beams) -> None:
    model, folder, loaded = pair
    model.double(), loaded.model.double()  # in fp64, no two scores are equal
    rows = translations(model, folder, num_beams=beams)
    assert min(liveliness(rows)) >= 30  # of 50
    given = batch(folder, texts_for(folder))
    config = loaded.config.decoding
    assert config.beam_size == 4 and config.max_length_offset == MAX_LENGTH - 1
    found = search(
        [DecodingTransformer(loaded.model)],
        given["input_ids"].masked_fill(given["attention_mask"] == 0, loaded.model.config.pad_id),
        given["attention_mask"].bool(),
        config.model_copy(update={"beam_size": beams}),
    )
    model.float(), loaded.model.float()
    assert [hypotheses[0].ids for hypotheses in found] == rows


def test_step_by_step_greedy_decoding_equals_generate(pair) -> None:
    """With the model alone, without mtrain's search: the most probable token in each step."""
    model, folder, loaded = pair
    plain = {"no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1}
    forbidden = loaded.config.decoding.forbidden_ids
    for text, row in list(zip(texts_for(folder), translations(model, folder, **plain), strict=True))[:2]:
        source = torch.tensor(rows_of(loaded, [text]))
        ids, said = loaded.model.config, []
        with torch.inference_mode():
            while len(said) < MAX_LENGTH - 2 and ids.eos_id not in said:
                target = torch.tensor([[ids.bos_id, *said]])
                logits = loaded.model.project(hidden_states(loaded.model, source, source >= 0, target))[0, -1]
                logits[forbidden] = -torch.inf
                said.append(int(logits.argmax()))
        assert [i for i in said if i != ids.eos_id] == row
