"""Multi-head attention, rotary embeddings and the cache, against plain loops and nn.MultiheadAttention."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from mtrain.kernels.attention.dispatch import attention_weights, causal_mask, fused_attention, recording
from mtrain.model.cache import KeyValueCache, LayerCache
from mtrain.model.incremental import memory_keys_and_values, self_attention_step
from mtrain.model.transformer import Dropout, MultiHeadAttention, rotate
from tests.support.transformer import attend, torch_attention

torch.set_num_threads(1)
DOUBLE = {"rtol": 0, "atol": 1e-12}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(d_model: int, heads: int, rotary: bool = False) -> MultiHeadAttention:
    torch.manual_seed(1)
    return MultiHeadAttention(d_model, heads, rotary).double().eval()


def keep(lengths: list[int], longest: int) -> Tensor:
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


def reference(
    layer: MultiHeadAttention, x: Tensor, memory: Tensor, allowed: Tensor
) -> tuple[Tensor, list[list[list[list[float]]]]]:
    """Attention by loops over numbers: output and weights[sentence][head][query][key]. `allowed` (B, T, S) is
    True where a query may attend."""
    width, heads = x.size(-1), layer.heads
    size = width // heads
    w, b = layer.query_key_value.weight, layer.query_key_value.bias
    q = x @ w[:width].T + b[:width]
    k = memory @ w[width : 2 * width].T + b[width : 2 * width]
    v = memory @ w[2 * width :].T + b[2 * width :]
    out, weights = torch.zeros_like(q), []
    for i in range(len(x)):
        weights.append([])
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            weights[i].append([])
            for t in range(q.size(1)):
                powers = [
                    math.exp(float(q[i, t, part] @ k[i, s, part]) / math.sqrt(size))
                    if allowed[i, t, s]
                    else 0.0
                    for s in range(k.size(1))
                ]
                weights[i][h].append([power / sum(powers) for power in powers])
                out[i, t, part] = sum(p * v[i, s, part] for s, p in enumerate(weights[i][h][t]))
    return out @ layer.output.weight.T + layer.output.bias, weights


# ------------------------------------------------------------------------------------------- equivalence


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_self_attention_equals_the_formula(heads: int, causal: bool, masked: bool) -> None:
    layer, x, kept = attention(12, heads), random(3, 5, 12), keep([5, 2, 3], 5)
    out = attend(layer, x, None, kept if masked else None, causal)
    allowed = torch.tensor(
        [
            [[(s <= t or not causal) and (s < n or not masked) for s in range(5)] for t in range(5)]
            for n in (5, 2, 3)
        ]
    )
    torch.testing.assert_close(out, reference(layer, x, x, allowed)[0], **DOUBLE)


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_cross_attention_equals_the_formula(heads: int, masked: bool) -> None:
    layer, x, memory = attention(12, heads), random(3, 4, 12), random(3, 6, 12, seed=1)
    kept = keep([6, 1, 4], 6) if masked else torch.ones(3, 6, dtype=torch.bool)
    mask = kept if masked else None
    expected, expected_weights = reference(layer, x, memory, kept[:, None].expand(3, 4, 6))
    torch.testing.assert_close(attend(layer, x, memory, mask), expected, **DOUBLE)
    with recording() as weights:
        shown = attend(layer, x, memory, mask)
    torch.testing.assert_close(shown, expected, **DOUBLE)
    torch.testing.assert_close(weights[0], torch.tensor(expected_weights, dtype=torch.float64), **DOUBLE)


@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
@pytest.mark.parametrize("with_weights", [False, True])
@torch.no_grad()
def test_output_and_weights_equal_torch(kind: str, with_weights: bool) -> None:
    layer = attention(16, 4)
    x, source_keep = random(3, 5, 16), keep([5, 1, 4], 5)
    memory = random(3, 5, 16, seed=1) if kind == "cross" else x
    other = memory if kind == "cross" else None
    with recording() if with_weights else nullcontext() as weights:
        out = attend(layer, x, other, source_keep, kind == "causal")
    mask = ~causal_mask(5) if kind == "causal" else None
    expected, expected_weights = torch_attention(layer)(
        x, memory, memory, key_padding_mask=~source_keep, attn_mask=mask, average_attn_weights=False
    )
    torch.testing.assert_close(out, expected, **DOUBLE)
    if weights is not None:
        torch.testing.assert_close(weights, [expected_weights], **DOUBLE)


def test_causal_mask_is_true_up_to_the_diagonal() -> None:
    assert causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


# ----------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_dropout_applies_to_the_weights_and_has_its_own_generator(causal: bool, masked: bool) -> None:
    layer, x = MultiHeadAttention(8, 2, dropout=0.4).double(), random(3, 5, 8)
    kept = keep([5, 2, 3], 5) if masked else torch.ones(3, 5, dtype=torch.bool)
    allowed = kept[:, None, None] & causal_mask(5) if causal else kept[:, None, None]
    q, k, v = layer.query_key_value(x).view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    weights = attention_weights(q, k, allowed)

    def out_of(weights: Tensor) -> Tensor:
        return layer.output((weights @ v).transpose(1, 2).flatten(2))

    Dropout.seed(layer, 3)
    expected = out_of(layer.dropout(weights))
    Dropout.seed(layer, 3)
    state = torch.get_rng_state()
    out = attend(layer, x, None, kept if masked else None, causal)
    torch.testing.assert_close(out, expected, **DOUBLE)
    assert torch.equal(torch.get_rng_state(), state)  # PyTorch's default generator was not used
    assert (attend(layer, x, None, kept, causal) - expected).abs().max() > 1e-3  # the next mask differs
    torch.testing.assert_close(attend(layer.eval(), x, None, kept, causal), out_of(weights), **DOUBLE)


def test_the_mean_over_dropout_masks_is_attention_without_dropout() -> None:
    layer, x = MultiHeadAttention(12, 3, dropout=0.3).double(), random(1, 4, 12)
    with torch.no_grad():
        mean = attend(layer, x.expand(20_000, -1, -1), causal=True).mean(0, keepdim=True)
        torch.testing.assert_close(mean, attend(layer.eval(), x, causal=True), rtol=0, atol=0.02)


def test_dropout_under_bf16_autocast_draws_the_same_masks_as_in_fp32() -> None:
    layer, x, memory = MultiHeadAttention(12, 3, dropout=0.3), random(4, 5, 12).float(), random(4, 6, 12)

    def both(mixed: bool) -> tuple[Tensor, ...]:
        Dropout.seed(layer, 5)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = attend(layer, x, causal=True), attend(layer, x, memory.float())
        gradient = torch.autograd.grad(sum(part.float().square().sum() for part in out), layer.output.weight)
        return *out, *gradient

    for rough, exact in zip(both(True), both(False), strict=True):
        assert (rough.float() - exact).norm() < 0.02 * exact.norm()


# -------------------------------------------------------------------------------- published check values


def check_layer(heads: int, size: int) -> tuple[MultiHeadAttention, nn.Linear]:
    """Each head has separate q, k, v weights for its slice of x, drawn head by head."""
    torch.manual_seed(0)
    drawn = [[nn.Linear(size, size) for _ in "qkv"] for _ in range(heads)]
    output = nn.Linear(heads * size, heads * size)
    layer = MultiHeadAttention(heads * size, heads)
    rows = [torch.block_diag(*(head[i].weight for head in drawn)) for i in range(3)]
    layer.query_key_value.weight.copy_(torch.cat(rows))
    layer.query_key_value.bias.copy_(torch.cat([head[i].bias for i in range(3) for head in drawn]))
    nn.init.eye_(layer.output.weight)
    nn.init.zeros_(layer.output.bias)
    return layer, output


TWO, THREE = [[1, 2], [3, 4]], [[1, 2], [3, 4], [5, 6]]
CHECK_VALUES = {  # seed 0, nn.Linear(2, 2) for q, k, v in that order; x, causal, memory, attention's output
    "self": (TWO, False, None, [[-2.5449, -0.0960], [-2.6525, -0.1210]]),
    "causal": (THREE, True, None, [[-1.3326, 0.1852], [-2.6525, -0.1210], [-4.3539, -0.5156]]),
    "cross": (
        THREE,
        False,
        [[6, 5], [4, 3], [2, 1]],
        [[-4.0098, -0.7054], [-4.2934, -0.7711], [-4.5612, -0.8332]],
    ),
}


@pytest.mark.parametrize(
    ("x", "causal", "memory", "expected"), CHECK_VALUES.values(), ids=CHECK_VALUES.keys()
)
@torch.no_grad()
def test_published_check_values_one_head(
    x: list[list[int]], causal: bool, memory: list[list[int]] | None, expected: list[list[float]]
) -> None:
    layer, _ = check_layer(1, 2)
    inputs = torch.tensor([x]).float()
    other = None if memory is None else torch.tensor([memory]).float()
    out = attend(layer, inputs, other, causal=causal)
    torch.testing.assert_close(out[0], torch.tensor(expected), rtol=0, atol=6e-5)


@torch.no_grad()
def test_published_check_values_two_heads() -> None:
    layer, output = check_layer(2, 2)
    layer.output.load_state_dict(output.state_dict())
    out = attend(layer, torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]]]))[0]
    expected = torch.tensor([[0.3529, 2.5714, 0.9558, -1.3315], [0.4814, 2.6746, 1.2625, -1.2092]])
    torch.testing.assert_close(out, expected, rtol=0, atol=6e-5)


@pytest.mark.parametrize("length", [1, 6, 8, 9, 10, 11, 15, 16, 27])
@pytest.mark.parametrize("kind", ["causal", "padding", "both", "none"])
def test_the_fused_kernel_gives_the_values_and_gradients_of_the_formula(length: int, kind: str) -> None:
    shape = (2, 3, length, 4)
    queries, keys, values = inputs = [random(*shape, seed=seed).requires_grad_() for seed in range(3)]
    mask = keep([length, max(1, length - 2)], length)[:, None, None] if kind in ("padding", "both") else None
    causal = kind in ("causal", "both")
    allowed = causal_mask(length) if causal else torch.ones(length, length, dtype=torch.bool)
    out = fused_attention(queries, keys, values, mask, causal, 0.0)
    expected = attention_weights(queries, keys, allowed if mask is None else mask & allowed) @ values
    torch.testing.assert_close(out, expected, **DOUBLE)
    cotangent = random(*shape, seed=3)
    gradients = torch.autograd.grad(out, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent)
    torch.testing.assert_close(*gradients, **DOUBLE)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 12])  # up to 8, twice the width of a head: the eager kernel
@pytest.mark.parametrize("kind", ["self", "causal", "causal with padding", "cross", "rotary"])
def test_training_gives_the_values_and_gradients_of_the_formula(length: int, kind: str) -> None:
    """Recorded weights are computed by the plain formula."""
    layer, x = attention(12, 3, kind == "rotary"), random(2, 5, 12).requires_grad_()
    other = random(2, length, 12, seed=1).requires_grad_()
    mask = None if kind == "causal" else keep([length, max(1, length - 2)], length)

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        if kind == "cross":
            out, inputs = attend(layer, x, other, mask), (x, other)
        else:
            out, inputs = attend(layer, other, None, mask, kind.startswith("causal")), (other,)
        cotangent = random(*out.shape, seed=3)
        return out, torch.autograd.grad(out, (*inputs, *layer.parameters()), cotangent)

    out, gradients = run()
    with recording():
        expected, expected_gradients = run()
    torch.testing.assert_close(out, expected, **DOUBLE)
    torch.testing.assert_close(gradients, expected_gradients, **DOUBLE)


@pytest.mark.parametrize(("keys", "stored"), [(8, True), (9, False), (64, False)])
def test_weights_are_stored_for_few_keys_only(keys: int, stored: bool) -> None:
    layer, sizes = attention(12, 3), []

    def store(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(store, lambda x: x):
        attend(layer, random(2, keys, 12))
    assert (2 * 3 * keys * keys in sizes) == stored


def test_maps_are_recorded_in_the_order_of_calls_and_in_one_thread_only() -> None:
    layer, x = attention(12, 3), random(2, 4, 12)

    def call() -> None:
        attend(layer, x, causal=True)
        attend(layer, x, x)

    with recording() as outer:
        call()
        with recording(cross_from=0) as inner:
            call()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()
        call()
    call()
    assert (len(outer), len(inner)) == (4, 1)
    assert (outer[0].triu(1) == 0).all() and (outer[1] > 0).all()
    torch.testing.assert_close(inner[0], outer[1])


# ------------------------------------------------------------------------------------------------ rotary


def test_rotary_rotates_each_pair_by_position_times_frequency() -> None:
    x, size = random(7, 6), 6
    for position, row in enumerate(x):
        for i in range(size // 2):
            turn = complex(row[i], row[i + size // 2]) * math.e ** (1j * position / 10000 ** (2 * i / size))
            got = rotate(x, torch.arange(x.size(-2)))[position]
            assert complex(got[i], got[i + size // 2]) == pytest.approx(turn, abs=1e-12)


@pytest.mark.parametrize("distance", [-40, -1, 0, 3, 500])
def test_rotary_scores_depend_only_on_the_distance(distance: int) -> None:
    q, k = random(1, 8), random(1, 8, seed=1)
    at = [torch.tensor([p]) for p in (40, 41, 97, 5000)]
    scores = [float(rotate(q, p) @ rotate(k, p + distance).T) for p in at]
    assert scores == pytest.approx([scores[0]] * 4, abs=1e-10)
    if distance:
        assert scores[0] != pytest.approx(float(q @ k.T), abs=1e-3)  # which does matter


def test_rotary_keeps_norms_and_continues_from_an_offset() -> None:
    x = random(2, 3, 9, 8)
    whole, rest = rotate(x, torch.arange(9)), rotate(x[..., 4:, :], torch.arange(4, 9))
    torch.testing.assert_close(whole.norm(dim=-1), x.norm(dim=-1), **DOUBLE)
    torch.testing.assert_close(whole[..., 4:, :], rest, **DOUBLE)


@torch.no_grad()
def test_rotary_attention_depends_on_order_but_not_on_absolute_position() -> None:
    layer, x = attention(8, 2, rotary=True), random(1, 4, 8)
    swapped = attend(layer, x[:, [1, 0, 2, 3]])[:, [1, 0, 2, 3]]
    assert (attend(layer, x) - swapped).abs().max() > 1e-3
    padded = torch.cat([random(1, 3, 8, seed=2), x], dim=1)  # the same words, three positions later
    mask = (torch.arange(7) >= 3)[None]
    torch.testing.assert_close(attend(layer, padded, None, mask)[:, 3:], attend(layer, x), **DOUBLE)


# --------------------------------------------------------------------------------- weights and the cache


@torch.no_grad()
def test_weights_sum_to_one_are_zero_at_padding_and_explain_the_output() -> None:
    layer, x, memory = attention(12, 3), random(4, 2, 12), random(2, 6, 12, seed=1)  # two beams of two
    kept = keep([6, 2], 6)
    _, values = memory_keys_and_values(layer, memory)
    with recording() as weights:
        out = attend(layer, x, memory, kept)
    (shown,) = weights
    assert shown.shape == (4, 3, 2, 6)
    torch.testing.assert_close(shown.sum(-1), torch.ones(4, 3, 2).double(), **DOUBLE)
    padding = ~kept.repeat_interleave(2, 0)[:, None, None].expand_as(shown)
    assert (shown[padding] == 0).all()
    assert (shown[~padding] > 0).all()
    heads = torch.einsum("nhts,nhsd->nthd", shown, values.repeat_interleave(2, 0)).flatten(2)
    torch.testing.assert_close(out, layer.output(heads), **DOUBLE)


@pytest.mark.parametrize("beams", [1, 2, 5])
@torch.no_grad()
def test_beams_that_share_a_memory_equal_copies_of_it(beams: int) -> None:
    layer, x, memory = attention(12, 3), random(3 * beams, 2, 12), random(3, 6, 12, seed=1)
    kept = keep([6, 2, 3], 6)
    with recording() as shared:
        out = attend(layer, x, memory, kept)
    copies, copied_kept = memory.repeat_interleave(beams, 0), kept.repeat_interleave(beams, 0)
    with recording() as copied:
        expected = attend(layer, x, copies, copied_kept)
    torch.testing.assert_close(out, expected, **DOUBLE)
    torch.testing.assert_close(shared[0], copied[0], **DOUBLE)


@pytest.mark.parametrize("rotary", [False, True])
@torch.no_grad()
def test_cached_self_attention_equals_causal(rotary: bool) -> None:
    layer, x, memory = attention(12, 3, rotary), random(2, 6, 12), random(2, 1, 12)
    of_layer = LayerCache(*memory_keys_and_values(layer, memory), 1, max_length=6)
    cache = KeyValueCache([of_layer], keep([1, 1], 1), beams=1)
    parts = [self_attention_step(layer, x[:, t], of_layer, t, cache.extend()) for t in range(6)]
    torch.testing.assert_close(torch.stack(parts, dim=1), attend(layer, x, causal=True), **DOUBLE)


def test_append_returns_all_so_far_and_keeps_earlier_positions() -> None:
    keys, values = torch.zeros(2, 3, 2, 3, 4)
    cache = LayerCache(keys, values, beams=1, max_length=5)
    first, then = torch.randn(2, 3, 2, 2, 4), torch.randn(2, 3, 2, 1, 4)
    cache.append(first)
    keys, values = cache.append(then)
    keys = keys.transpose(1, 2).unflatten(0, (3, 2))
    assert torch.equal(keys[:, :, :3], torch.cat([first[0], then[0]], dim=2))
    assert torch.equal(values.view(3, 2, -1, 4)[:, :, :3], torch.cat([first[1], then[1]], dim=2))


def test_slots_that_no_beam_needs_are_dropped() -> None:
    """All four beams always continue the first one, so that each position leaves one slot in use."""
    layer = LayerCache(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 4, max_length=40)
    cache = KeyValueCache([layer], keep([1, 3], 3), beams=4)
    for position in range(40):
        cache.extend()
        layer.append(torch.full((2, 2, 1, 4, 4), float(position)))
        cache.reorder(torch.zeros(2, 4, dtype=torch.long))
    assert layer.slots == cache.past_keep_bias.size(2) == 48  # 40 in use, filled up to whole registers
    bias = cache.extend()
    keys, _ = layer.append(torch.full((2, 2, 1, 4, 4), 40.0))
    assert bias is not None
    assert keys[1, 0, bias[1, 2] == 0].tolist() == list(range(41))


@pytest.mark.parametrize("sentences", [None, [1, 2], [0], [2, 0], [2]])
def test_reorder_selects_the_past_of_each_beam_and_drops_sentences(sentences: list[int] | None) -> None:
    """Three sentences of two beams; sentence s stores 10 s + 2 t + k for its beam k at position t."""
    numbers = torch.arange(3.0)[:, None, None, None]
    memory = numbers.expand(3, 2, 3, 4)
    layers = [LayerCache(memory, -memory, 2, max_length=7) for _ in range(2)]
    cache = KeyValueCache(layers, keep([1, 2, 3], 3), beams=2)
    for t in range(2):
        assert cache.extend() is not None
        for layer in layers:
            keys = 10 * numbers + 2 * t + torch.arange(2.0)[:, None]
            layer.append(torch.stack([keys, -keys]).expand(2, 3, 2, 2, 4))
        if t == 0:
            cache.reorder(torch.tensor([[0, 1], [1, 0], [1, 1]]))
    left = sentences if sentences is not None else [0, 1, 2]
    crossed = torch.tensor([[1, 0]] * len(left))
    cache.reorder(crossed, None if sentences is None else torch.tensor(sentences))
    bias = cache.extend()
    assert bias is not None and cache.length == 3 and cache.source_keep_bias is not None
    past = {0: [[1, 3], [0, 2]], 1: [[0, 3], [1, 2]], 2: [[1, 3], [1, 2]]}  # of beams 0 and 1
    for layer in layers:
        assert layer.slots == 4
        assert layer.memory_keys[1::2, 3, 2].tolist() == left
        assert layer.memory_values[1::2, 2, 3].tolist() == [-s for s in left]
        new = torch.tensor([70.0, 71.0])[:, None].expand(len(left), 2, 2, 4)
        keys, values = layer.append(torch.stack([new, -new]))
        keys = keys.transpose(1, 2)
        assert torch.equal(keys, -values)
        for row, sentence in enumerate(left):
            for head in range(2):
                for beam in range(2):
                    seen = keys[2 * row + head, bias[2 * row + head, beam] == 0, 2].tolist()
                    assert seen == [*(10.0 * sentence + slot for slot in past[sentence][beam]), 70.0 + beam]
                assert (cache.source_keep_bias[2 * row + head] == 0).sum() == sentence + 1
