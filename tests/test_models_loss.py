"""Chunked cross entropy equals the plain one, value and gradient, and holds FP32 for one chunk at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_moe_strategy.models.loss import IGNORE_INDEX, cross_entropy_sum, shift_labels

NUM_TOKENS, VOCABULARY = 37, 53


def logits_and_targets(dtype=torch.float64):
    torch.manual_seed(0)
    logits_TV = (4 * torch.randn(NUM_TOKENS, VOCABULARY, dtype=torch.float64)).to(dtype).requires_grad_()
    targets_T = torch.randint(VOCABULARY, (NUM_TOKENS,))
    targets_T[::4] = IGNORE_INDEX
    return logits_TV, targets_T


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # bf16: the gradient itself is rounded to bf16, half a step of 2^-8.
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-3)],
)
def test_chunks_change_neither_the_loss_nor_its_gradient(chunk_tokens, dtype, tolerance):
    logits_TV, targets_T = logits_and_targets(dtype)
    wide_TV = logits_TV.detach().double().requires_grad_()
    expected = F.cross_entropy(wide_TV, targets_T, reduction="sum", ignore_index=IGNORE_INDEX)
    loss = cross_entropy_sum(logits_TV, targets_T, chunk_tokens=chunk_tokens)
    (3 * expected).backward()
    (3 * loss).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=min(tolerance, 1e-5), atol=0)
    assert logits_TV.grad.dtype == dtype
    torch.testing.assert_close(logits_TV.grad.double(), wide_TV.grad, rtol=tolerance, atol=tolerance * 1e-2)


def test_no_counted_target_gives_a_zero_loss_and_a_zero_gradient():
    logits_TV, targets_T = logits_and_targets()
    loss = cross_entropy_sum(logits_TV, torch.full_like(targets_T, IGNORE_INDEX), chunk_tokens=8)
    loss.backward()
    assert loss.item() == 0.0
    assert logits_TV.grad.abs().max() == 0.0


class LargestFP32(TorchDispatchMode):
    """Remembers the number of elements of the largest FP32 tensor any operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.num_elements = max(self.num_elements, tensor.numel())
        return out


def test_fp32_never_covers_more_than_one_chunk():
    logits_TV, targets_T = logits_and_targets(torch.bfloat16)
    with LargestFP32() as seen:
        cross_entropy_sum(logits_TV, targets_T, chunk_tokens=8).backward()
    assert 0 < seen.num_elements <= 8 * VOCABULARY


def test_shifted_labels_pair_each_token_with_the_next():
    labels_BS = torch.tensor([[5, 6, IGNORE_INDEX, 8]])
    assert shift_labels(labels_BS).tolist() == [[6, IGNORE_INDEX, 8, IGNORE_INDEX]]
