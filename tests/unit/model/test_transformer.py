"""The whole model: positions, invariances, cached decoding, tied embeddings, and PyTorch's Transformer."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtrain.config.sections.model import ModelConfig
from mtrain.data.epochs.batching import collate
from mtrain.kernels.attention.dispatch import causal_mask, recording
from mtrain.kernels.sequences import Padded
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.transformer import Dropout, Transformer, sinusoidal_positions
from mtrain.tokenizer.rows import Rows
from tests.support.transformer import (
    KINDS,
    POSITIONS,
    build,
    copy_layer,
    decode_cached,
    hidden_states,
    ids,
    keep,
    logits,
    their_arguments,
    torch_attention,
)
from tests.support.undocumented import documented_only

torch.set_num_threads(1)
DOUBLE = {"rtol": 0, "atol": 1e-12}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))


# --------------------------------------------------------------------------------------------- positions


def test_sinusoids_at_position_zero() -> None:
    assert sinusoidal_positions(1, 2).tolist() == [[0, 1]]


@pytest.mark.parametrize("width", [2, 6, 64])
def test_sinusoids_equal_the_formula_in_both_layouts(width: int) -> None:
    halves = sinusoidal_positions(90, width)
    pairs = sinusoidal_positions(90, width, "sinusoidal_interleaved")
    for p, i in itertools.product((0, 1, 5, 89), range(width // 2)):
        angle = p / 10000 ** (2 * i / width)
        sine_and_cosine = pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-7)
        assert [halves[p, i], halves[p, width // 2 + i]] == sine_and_cosine
        assert [pairs[p, 2 * i], pairs[p, 2 * i + 1]] == sine_and_cosine


def test_sinusoids_of_marian_equal_its_formula_and_start_at_the_first_position() -> None:
    model = build(positions="sinusoidal_marian", first_position=2, max_positions=3)
    table = model.embed.positions(0, 3, None)
    for p, i in itertools.product(range(3), range(8)):
        angle = (p + 2) * math.exp(-i * math.log(10000) / 7)  # fairseq, SinusoidalPositionalEmbedding
        assert [float(table[p, i]), float(table[p, 8 + i])] == pytest.approx(
            [math.sin(angle), math.cos(angle)]
        )
    torch.testing.assert_close(model.embed.positions(1, 40, None)[:2], table[1:])  # the table has grown


@pytest.mark.parametrize("positions", ["sinusoidal", "sinusoidal_interleaved", "rotary"])
def test_sentences_may_be_longer_than_max_positions(positions: str) -> None:
    short, long = build(positions=positions, max_positions=4), build(positions=positions, max_positions=90)
    source, target = ids(2, 23), ids(2, 50)
    expected = logits(long, source, keep(23, 9), target)
    assert torch.equal(logits(short, source, keep(23, 9), target), expected)
    fresh = build(positions=positions, max_positions=4)
    torch.testing.assert_close(decode_cached(fresh, source, keep(23, 9), target, 1), expected, **DOUBLE)


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_matters_on_both_sides(positions: str) -> None:
    model, source, target = build(positions=positions), ids(1, 6), ids(1, 6)
    model_logits = logits(model, source, keep(6), target)[:, -1]
    for swapped in ((source[:, [1, 0, 2, 3, 4, 5]], target), (source, target[:, [1, 0, 2, 3, 4, 5]])):
        assert (logits(model, swapped[0], keep(6), swapped[1])[:, -1] - model_logits).abs().max() > 1e-4


def test_embeddings_are_scaled_by_the_root_of_the_width() -> None:
    model, seen = build(positions="rotary"), []
    model.encoder[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    source = ids(1, 3)
    logits(model, source, keep(3), ids(1, 1))
    torch.testing.assert_close(seen[0], model.source_embedding(source[0]) * 4, **DOUBLE)


# -------------------------------------------------------------------------------------- cached decoding


@pytest.mark.parametrize("compact_every", [1, 2, 8])
@pytest.mark.parametrize("positions", POSITIONS)
@torch.no_grad()
def test_cached_decoding_equals_full_decoding_after_reordering_and_dropping_sentences(
    monkeypatch, positions: str, compact_every: int
) -> None:
    monkeypatch.setattr("mtrain.model.cache.COMPACT_EVERY", compact_every)
    model, source, kept = build(positions=positions), ids(3, 5), keep(5, 1, 3)
    fast = DecodingTransformer(model)
    cache = fast.start_cache(model.encode(source, kept), kept, 2, 9)
    target = ids(6, 1)
    for parents, sentences in [
        ([[1, 1], [0, 1], [1, 0]], None),
        ([[1, 1], [0, 1]], [2, 0]),
        ([[1, 0]], [1]),
        ([[1, 1]], None),
    ]:
        hidden = fast.decode_next(target[:, -1], cache)
        full = model.decode(target, model.encode(source, kept), kept)
        torch.testing.assert_close(hidden, full[:, -1], **DOUBLE)
        cache.reorder(torch.tensor(parents), None if sentences is None else torch.tensor(sentences))
        left = sentences if sentences is not None else list(range(len(source)))
        source, kept = source[left], kept[left]
        rows = [2 * sentence + beam for sentence, pair in zip(left, parents, strict=True) for beam in pair]
        target = torch.cat([target[rows], ids(len(rows), 1)], dim=1)
    used = (cache.past_keep_bias == 0).any(dim=1)[0].tolist()
    assert (used == sorted(used, reverse=True)) == (
        compact_every < 8
    )  # unused slots fill up the last register


@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_a_cache_grows_with_the_decoded_length(monkeypatch, beams: int) -> None:
    monkeypatch.setattr("mtrain.model.cache.INITIAL_POSITIONS", 1)
    model, source, kept, target = build(), ids(2, 5), keep(5, 2), ids(2 * beams, 30)
    expected = logits(model, source, kept, target)
    torch.testing.assert_close(decode_cached(model, source, kept, target, beams), expected, **DOUBLE)


@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_cached_decoding_returns_the_same_cross_attention_weights(beams: int) -> None:
    model, source, kept, target = build(), ids(2, 5), keep(5, 2), ids(2 * beams, 4)
    memory = model.encode(source, kept)
    with recording(cross_from=0) as weights:
        model.decode(target, memory, kept)
    fast = DecodingTransformer(model)
    cache = fast.start_cache(memory, kept, beams, 4)
    for position in range(4):
        with recording() as step:
            fast.decode_next(target[:, position], cache)
        for layer in (0, 1):
            torch.testing.assert_close(step[layer][:, :, 0], weights[layer][:, :, position], **DOUBLE)


@torch.no_grad()
def test_a_low_precision_copy_shares_the_parameters_and_rounds_only_large_products(monkeypatch) -> None:
    model, source, kept, target = build(dtype=torch.float32), ids(3, 5), keep(5, 2, 4), ids(3, 6)
    low = DecodingTransformer(model, torch.bfloat16)
    assert all(a is b for a, b in zip(model.parameters(), low.transformer.parameters(), strict=True))
    assert list(model.state_dict()) == list(low.transformer.state_dict())
    full = logits(model, source, kept, target)
    assert torch.equal(logits(low, source, kept, target), full)  # all products here are small
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    low = DecodingTransformer(model, torch.bfloat16)
    rounded = logits(low, source, kept, target)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, full)
    assert (rounded - full).abs().max() < 0.05 * full.abs().max()
    assert torch.equal(logits(model, source, kept, target), full)  # which has no copies
    cached = decode_cached(low, source, kept, target, 1)
    torch.testing.assert_close(cached, rounded, rtol=0, atol=0.05 * float(full.abs().max()))
    with documented_only():
        plain = logits(DecodingTransformer(model, torch.bfloat16), source, kept, target)
    torch.testing.assert_close(plain, rounded, rtol=0, atol=0.02 * float(full.abs().max()))


@torch.no_grad()
def test_a_copy_without_a_type_packs_only_the_projection(monkeypatch) -> None:
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    model, source, kept, target = build(dtype=torch.float32), ids(3, 5), keep(5, 2, 4), ids(3, 6)
    packed = DecodingTransformer(model, None)
    hidden = hidden_states(model, source, kept, target)
    memory = packed.encode(source, kept)
    assert torch.equal(packed.decode(target, memory, kept), hidden)
    torch.testing.assert_close(packed.project(hidden), model.project(hidden))
    assert not packed.projects_in_low_precision()
    assert DecodingTransformer(model, torch.bfloat16).projects_in_low_precision()


@every_kind
@torch.no_grad()
def test_attention_and_its_cache_may_stay_in_low_precision(kind, monkeypatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    monkeypatch.setattr("mtrain.kernels.linear.PackedLinear.stays_low", True)
    model = build(dtype=torch.float32, **kind)
    source, kept, target = ids(3, 5), keep(5, 2, 4), ids(6, 6)
    low, full = DecodingTransformer(model, torch.bfloat16), logits(model, source, kept, target)
    rounded, close = logits(low, source, kept, target), {"rtol": 0, "atol": 0.06 * float(full.abs().max())}
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), full, **close)
    torch.testing.assert_close(decode_cached(low, source, kept, target, 2).float(), full, **close)
    cache = low.start_cache(low.encode(source, kept), kept, 2, 6)
    low.decode_next(target[:, 0], cache)
    assert cache.layers[0].memory_keys.dtype == cache.past_keep_bias.dtype == torch.bfloat16


def recorded_inputs(modules: Iterable[Any]) -> list[Tensor]:
    """The first input of each module's next call, in the order of the calls."""
    inputs: list[Tensor] = []
    for module in modules:
        module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    return inputs


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_attention_weights_of_every_layer_equal_torch(norm: str) -> None:
    model = build(norm=norm, encoder_layers=3)
    source, kept, target = ids(2, 5), keep(5, 2), ids(4, 6)  # two rows a sentence
    encoder = recorded_inputs(layer.self_attention for layer in model.encoder)
    decoder = recorded_inputs(layer.self_attention for layer in model.decoder)
    cross = recorded_inputs(layer.cross_attention for layer in model.decoder)
    with recording() as of_encoder:
        memory = model.encode(source, kept)
    with recording() as of_decoder:
        hidden = model.decode(target, memory, kept)
    rows, rows_kept = memory.repeat_interleave(2, 0), kept.repeat_interleave(2, 0)
    cases: list[tuple] = [(of_encoder, encoder, model.encoder, "self_attention", kept, None, None)]
    cases += [(of_decoder[0::2], decoder, model.decoder, "self_attention", None, ~causal_mask(6), None)]
    cases += [(of_decoder[1::2], cross, model.decoder, "cross_attention", rows_kept, None, rows)]
    for found, inputs, layers, name, key_keep, mask, key in cases:
        assert len(found) == len(inputs) == len(layers)
        for layer_weights, tokens, layer in zip(found, inputs, layers, strict=True):
            x = tokens.view(len(layer_weights), -1, 16)
            theirs = torch_attention(getattr(layer, name))
            padding = None if key_keep is None else ~key_keep
            other = x if key is None else key
            _, expected = theirs(
                x, other, other, key_padding_mask=padding, attn_mask=mask, average_attn_weights=False
            )
            torch.testing.assert_close(layer_weights, expected, **DOUBLE)
    torch.testing.assert_close(
        hidden, hidden_states(model, source.repeat_interleave(2, 0), rows_kept, target), **DOUBLE
    )


# -------------------------------------------------------------------------------------- building options


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("tie", "tables"), [("none", 3), ("decoder", 2), ("all", 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_tied_embeddings_are_one_parameter_under_one_name(tie: str, tables: int, bias: bool) -> None:
    model = build(tie_embeddings=tie, output_bias=bias)
    body = size_of(model.encoder) + size_of(model.decoder) + 4 * 16  # two final norms
    assert size_of(model) == body + tables * 30 * 16 + bias * 30
    stored = model.state_dict()
    assert sum(tensor.numel() for tensor in stored.values()) == size_of(model)
    assert len({tensor.data_ptr() for tensor in stored.values()}) == len(stored)
    other = build(tie_embeddings=tie, output_bias=bias)
    other.load_state_dict({name: tensor + 0.01 for name, tensor in stored.items()})
    assert other.projection()[0][3, 4] == model.projection()[0][3, 4] + 0.01


@pytest.mark.parametrize("tie", ["decoder", "all"])
def test_tied_gradient_is_the_sum_over_the_uses(tie: str) -> None:
    tied, free = build(tie_embeddings=tie), build(tie_embeddings="none")
    table = tied.source_embedding.weight
    own = {name: p for name, p in tied.state_dict().items() if "embedding" not in name}
    target_table = tied.target_embedding.weight if tie == "decoder" else table
    uses = {"source_embedding.weight": table, "target_embedding.weight": target_table}
    free.load_state_dict({**own, **uses, "output_weight": target_table})
    source, target, pull = ids(2, 4), ids(2, 3), torch.randn(2, 3, 30).double()
    for model in (tied, free):
        (model.project(hidden_states(model, source, keep(4, 3), target)) * pull).sum().backward()
    target_side = free.target_embedding.weight.grad + free.output_weight.grad
    if tie == "decoder":
        torch.testing.assert_close(tied.target_embedding.weight.grad, target_side)
    expected = free.source_embedding.weight.grad + (target_side if tie == "all" else 0)
    torch.testing.assert_close(table.grad, expected)


@pytest.mark.parametrize("tie", ["none", "decoder"])
def test_depths_and_vocabularies_may_differ(tie: str) -> None:
    model = build(
        source_vocab_size=50, target_vocab_size=20, encoder_layers=3, decoder_layers=1, tie_embeddings=tie
    )
    assert (len(model.encoder), len(model.decoder)) == (3, 1)
    source = torch.tensor([[49, 20, 3]])
    assert logits(model, source, keep(3), torch.tensor([[2, 19]])).shape == (1, 2, 20)


def test_output_bias_adds_to_the_logits() -> None:
    model, source, target = build(output_bias=True), ids(1, 3), ids(1, 2)
    with_bias = logits(model, source, keep(3), target)
    bias = model.output_bias.detach().clone()
    model.output_bias.data.zero_()
    torch.testing.assert_close(with_bias - bias, logits(model, source, keep(3), target), **DOUBLE)
    assert bias.abs().min() > 0
    assert build().projection()[1] is None


@pytest.mark.parametrize(("norm", "final_norms"), [("pre", 2), ("post", 0)])
def test_only_pre_norm_models_have_final_norms(norm: str, final_norms: int) -> None:
    model = build(norm=norm)
    norms = sum(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert norms == 2 * 2 + 2 * 3 + final_norms  # two in an encoder layer, three in a decoder layer


def test_bos_may_equal_pad() -> None:
    model, source = build(pad_id=5, bos_id=5, eos_id=0), ids(1, 4).expand(2, 4)
    target = torch.tensor([[5, 8, 9], [5, 8, 5]])  # the same start; then padding, whose id is BOS's
    out = logits(model, source, keep(4, 4), target)
    torch.testing.assert_close(out[0, :2], out[1, :2], **DOUBLE)
    other = logits(model, source[:1], keep(4), torch.tensor([[6, 8]]))
    assert (out[0, 1] - other[0, 1]).abs().max() > 1e-3  # the second token attends to BOS


@every_kind
def test_initial_logits_have_a_standard_deviation_near_one(kind: dict[str, str]) -> None:
    torch.manual_seed(0)
    words = {"source_vocab_size": 600, "target_vocab_size": 600, "max_positions": 64}
    model = Transformer(ModelConfig(d_model=64, dropout=0.0, **words, **kind)).eval()
    target = ids(8, 20, vocab=600)
    out = logits(model, ids(8, 20, vocab=600), keep(*[20] * 8), target)
    assert 0.5 < out.std(dim=-1).mean() < 2
    if kind["norm"] == "post" and kind["tie_embeddings"] != "none":
        # Sublayers are small, so that each token first predicts itself.
        assert (out.argmax(-1) == target).double().mean() > 0.9
        out = out.scatter(-1, target[..., None], 0.0)
    guess = nn.functional.cross_entropy(out.flatten(0, 1), ids(160, vocab=600))
    assert abs(guess.item() - math.log(600)) < 1.5  # nats/token


def test_forward_hooks_fire_in_training() -> None:
    model, fired = build().train(), set()
    blocks = {name: block for name, block in model.named_modules() if name}
    for name, block in blocks.items():
        block.register_forward_hook(lambda *_, name=name: fired.add(name))
    source, target = ids(2, 4), ids(2, 4)
    sources = Padded.of(source, keep(4, 3))
    model(source.flatten(), sources, target.flatten(), Padded.of(target))
    layers = {name for name in blocks if name.count(".") == 1 and "coder" in name}
    weighted = {name for name, block in blocks.items() if list(block.parameters(recurse=False))}
    sliced = {f"decoder.{layer}.cross_attention.query_key_value" for layer in (0, 1)}  # used in two parts
    assert len(layers) == 4 and (weighted | layers) - fired == sliced


def test_dropout_is_active_only_in_training() -> None:
    model, source, target = build(dropout=0.5), ids(1, 4), ids(1, 4)
    assert torch.equal(logits(model, source, keep(4), target), logits(model, source, keep(4), target))
    model.train()
    assert not torch.equal(logits(model, source, keep(4), target), logits(model, source, keep(4), target))


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_dropout_applies_to_embeddings(side: str) -> None:
    model, seen = build(dropout=0.5, d_model=64).train(), []
    getattr(model, side)[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits(model, ids(8, 20), keep(*[20] * 8), ids(8, 20))
    assert (seen[0] == 0).double().mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "activation_dropout", "word_dropout"])
def test_every_dropout_is_off_in_eval_and_reproducible_from_a_seed(kind: str) -> None:
    model, plain = build(**{"dropout": 0.0, kind: 0.4}), build(dropout=0.0)
    source, target = ids(2, 6), ids(2, 5)
    expected = logits(plain, source, keep(6, 4), target)
    assert torch.equal(logits(model, source, keep(6, 4), target), expected)
    outs = []
    for seed in (1, 1, 2):
        Dropout.seed(model.train(), seed)
        outs.append(logits(model, source, keep(6, 4), target))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], expected)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_word_dropout_drops_all_occurrences_of_a_word_but_not_positions(side: str) -> None:
    model, seen = build(dropout=0.0, word_dropout=0.25).train(), []
    getattr(model, side)[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    words = ids(400, 30)
    logits(model, words, keep(*[30] * 400), words)
    without_positions = seen[0].view(400, 30, 16) - sinusoidal_positions(30, 16)
    factors = without_positions / (model.source_embedding(words) * 4)
    assert (factors - factors[..., :1]).abs().max() < 1e-5  # whole vectors are dropped
    dropped = factors[..., 0].abs() < 1e-5
    torch.testing.assert_close(
        factors[~dropped], torch.full_like(factors[~dropped], 4 / 3), rtol=1e-5, atol=0
    )
    for word in range(4, 30):
        share = (words == word) & dropped
        there = (words == word).any(1)
        assert ((share.sum(1) == 0) | (share.sum(1) == (words == word).sum(1))).all()
        assert share.any(1)[there].double().mean().item() == pytest.approx(0.25, abs=0.12)
    assert dropped.double().mean().item() == pytest.approx(0.25, abs=0.02)


def test_each_projection_is_initialized_xavier_uniform() -> None:
    model = Transformer(ModelConfig(source_vocab_size=9, target_vocab_size=9, max_positions=9))
    attention: Any = model.decoder[0].cross_attention
    for weight in [*attention.query_key_value.weight.chunk(3), attention.output.weight]:
        bound = math.sqrt(6 / sum(weight.shape))
        assert weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert all((bias == 0).all() for name, bias in model.named_parameters() if name.endswith("bias"))


def test_norms_after_the_sublayers_scale_their_weights_but_queries_and_keys() -> None:
    """With one layer on each side, DeepNet has a = 0.81, b = 0.87 (encoder), a = 3^1/4, b = 12^-1/4."""
    models, sizes = [], {"source_vocab_size": 9, "target_vocab_size": 9, "max_positions": 9}
    for norm in ("pre", "post"):
        torch.manual_seed(1)
        config = ModelConfig.model_validate(sizes | {"norm": norm, "encoder_layers": 1, "decoder_layers": 1})
        models.append(Transformer(config).state_dict())
    factors = {"encoder": (0.87, 0.87 / 0.81), "decoder": (0.5373, 0.5373 / 1.3161)}
    for name, weight in models[0].items():
        if name.startswith(("encoder_norm", "decoder_norm")):  # of the first model only
            continue
        width = weight.size(-1)
        expected = torch.ones_like(weight)
        side, *module = name.split(".")
        if module[-2:] == ["query_key_value", "weight"]:
            expected[2 * width :] = factors[side][0]
        elif module[-2:] == ["inner", "weight"]:
            expected *= factors[side][0]
        elif module[-2:] in (["output", "weight"], ["outer", "weight"]):
            expected *= factors[side][1]
        torch.testing.assert_close(models[1][name], weight * expected, rtol=1e-4, atol=0)


# -------------------------------------------------------------------------------- PyTorch's Transformer


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@torch.no_grad()
def test_whole_model_equals_torch_transformer(norm: str, activation: str) -> None:
    ours = build(norm=norm, activation=activation, encoder_layers=3, dropout=0.0)
    options = their_arguments(ours.config)
    final = norm == "pre"

    def final_norm() -> nn.LayerNorm | None:
        return nn.LayerNorm(16, dtype=torch.float64) if final else None

    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**options), 3, final_norm(), enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 2, final_norm())
    theirs = nn.Transformer(
        d_model=16, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
    ).eval()
    for mine, other in zip([*ours.encoder, *ours.decoder], [*encoder.layers, *decoder.layers], strict=True):
        copy_layer(mine, other)
    if final:
        encoder.norm.load_state_dict(ours.encoder_norm.state_dict())
        decoder.norm.load_state_dict(ours.decoder_norm.state_dict())

    source, target, kept = ids(3, 6), ids(3, 5), keep(6, 1, 4)

    def embed(tokens: Tensor) -> Tensor:
        return ours.source_embedding(tokens) * math.sqrt(16) + sinusoidal_positions(tokens.size(1), 16)

    expected = theirs(
        embed(source),
        embed(target),
        tgt_mask=~torch.ones(5, 5, dtype=torch.bool).tril(),
        src_key_padding_mask=~kept,
        memory_key_padding_mask=~kept,
    )
    torch.testing.assert_close(hidden_states(ours, source, kept, target), expected, **DOUBLE)
    torch.testing.assert_close(
        logits(ours, source, kept, target), expected @ ours.source_embedding.weight.T, **DOUBLE
    )


@pytest.mark.parametrize("special", [{}, {"pad_id": 8, "bos_id": 8, "eos_id": 0}], ids=["usual", "bos=pad"])
def test_the_loss_of_a_batch_is_the_sum_over_its_sentences(special: dict[str, int]) -> None:
    torch.manual_seed(4)
    sizes = {"d_model": 8, "heads": 2, "ffn_dim": 12, "encoder_layers": 1, "decoder_layers": 2}
    words = {"source_vocab_size": 9, "target_vocab_size": 9, "max_positions": 16}
    model = Transformer(ModelConfig(dropout=0.0, **words, **sizes, **special)).double()
    end = model.config.eos_id
    sources = [[4, 5, end], [6, end], [7, 4, 4, 5, 6, end]]
    targets = [[5, end], [7, 8, 4, 4, end], [end]]  # 8 is a real token, even where padding has its id

    def loss(rows: list[int]) -> tuple[Tensor, ...]:
        model.zero_grad()
        source, target = (Rows.from_lists([side[row] for row in rows]) for side in (sources, targets))
        batch = collate(source, target, model.config.pad_id, model.config.bos_id, rows)
        hidden = model(*batch.inputs())
        sums = model.loss(hidden, batch.labels, 0.1)
        sums.loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return sums.loss.detach(), sums.nll, *gradients

    together, separate = loss([0, 1, 2]), [loss([row]) for row in range(3)]
    for whole, *parts in zip(together, *separate, strict=True):
        torch.testing.assert_close(whole, sum(parts), rtol=1e-10, atol=1e-10)
