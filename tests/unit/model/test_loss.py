"""The training loss of whole batches, and R-Drop over two forward passes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.config.sections.model import ModelConfig
from mtrain.data.epochs.batching import collate
from mtrain.kernels.cross_entropy import IGNORE
from mtrain.model.loss import r_drop_loss, translation_loss
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.rows import Rows

torch.set_num_threads(1)
B, T, E, V = 4, 6, 5, 11


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and labels, some of which, and one whole sentence, are padding."""
    torch.manual_seed(2)
    hidden, weight, bias = (torch.randn(*shape).double() for shape in ((B, T, E), (V, E), (V,)))
    labels = torch.randint(V, (B, T))
    labels[0, 4:] = labels[2] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    return F.cross_entropy(
        logits, labels.flatten(), label_smoothing=smoothing, ignore_index=IGNORE, reduction="sum"
    )


def test_r_drop_is_half_of_the_paper_s_sum() -> None:
    """Section 2 of the paper: two cross-entropies plus alpha times the mean of two KL divergences."""
    hidden, weight, bias, labels = inputs()
    hidden = torch.cat([hidden, hidden + 0.3 * torch.randn_like(hidden)]).detach().requires_grad_()
    p, q = F.linear(hidden, weight, bias).log_softmax(-1).chunk(2)
    divergence = F.kl_div(p, q, reduction="none", log_target=True)
    divergence = divergence + F.kl_div(q, p, reduction="none", log_target=True)
    both = sum(cross_entropy(half, weight, bias, labels, 0.1) for half in hidden.chunk(2))
    expected = (both + 5 * divergence.sum(-1)[labels != IGNORE].sum() / 2) / 2
    sums = r_drop_loss(hidden, weight, bias, labels, 0.1, 5.0)
    nll = sum(cross_entropy(half, weight, bias, labels, 0.0) for half in hidden.chunk(2)) / 2
    torch.testing.assert_close((sums.loss, sums.nll), (expected, nll.detach()))
    trained = (hidden, weight, bias)
    torch.testing.assert_close(
        torch.autograd.grad(sums.loss, trained), torch.autograd.grad(expected, trained)
    )


@pytest.mark.parametrize("with_bias", [False, True])
def test_r_drop_of_many_tokens_is_the_sum_over_its_tokens(with_bias: bool) -> None:
    """A CPU processes few of them at a time."""
    torch.manual_seed(5)
    hidden, weight, bias = torch.randn(2 * 90, 5, 6), torch.randn(1000, 6), torch.randn(1000)
    hidden, weight, bias = (each.double().requires_grad_() for each in (hidden, weight, bias))
    labels = torch.randint(0, 1000, (90, 5))
    labels[::7, 2:] = IGNORE
    arguments = weight, bias if with_bias else None
    trained = (hidden, weight, bias) if with_bias else (hidden, weight)
    whole = r_drop_loss(hidden, *arguments, labels, 0.1, 5.0)
    parts = [r_drop_loss(hidden[[row, 90 + row]], *arguments, labels[[row]], 0.1, 5.0) for row in range(90)]
    loss, nll = sum(part.loss for part in parts), sum(part.nll for part in parts)
    torch.testing.assert_close((whole.loss, whole.nll), (loss, nll))
    torch.testing.assert_close(torch.autograd.grad(whole.loss, trained), torch.autograd.grad(loss, trained))


def test_r_drop_in_low_precision_is_precise_where_labels_are_likely() -> None:
    """There, most of the gradient of a logit cancels."""
    labels = torch.arange(16)[None]
    hidden = 9 * torch.eye(16) + torch.randint(-1, 2, (2, 16, 16), generator=torch.Generator().manual_seed(1))
    gradients = []
    for dtype, low in ((torch.float64, False), (torch.float32, True)):
        logits, weight = hidden.to(dtype).requires_grad_(), torch.eye(16, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = r_drop_loss(logits, weight, None, labels, 0.0, 5.0).loss
        gradients.append(torch.autograd.grad(loss, logits)[0].double())
    expected, found = gradients
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_r_drop_of_equal_passes_is_the_ordinary_loss() -> None:
    hidden, weight, bias, labels = inputs()
    ordinary = translation_loss(hidden, weight, bias, labels, 0.1)
    twice = r_drop_loss(torch.cat([hidden, hidden]), weight, bias, labels, 0.1, 5.0)
    torch.testing.assert_close(twice, ordinary, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(sums.loss, (hidden, weight, bias)) for sums in (ordinary, twice)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


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
        sums = translation_loss(hidden, *model.projection(), batch.labels, 0.1)
        sums.loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return sums.loss.detach(), sums.nll, *gradients

    together, separate = loss([0, 1, 2]), [loss([row]) for row in range(3)]
    for whole, *parts in zip(together, *separate, strict=True):
        torch.testing.assert_close(whole, sum(parts), rtol=1e-10, atol=1e-10)
