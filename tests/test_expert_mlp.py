"""Shapes: T tokens, K experts per token, E experts, D hidden, I intermediate, R = T*K rows."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_strategy.kernels import expert_mlp as kernel
from lightning_moe_strategy.kernels import grouped_products
from lightning_moe_strategy.kernels.expert_mlp import expert_mlp
from lightning_moe_strategy.kernels.routing import gather_rows, sort_by_expert, sum_rows

# fp32: products are summed in another order than in float64. bf16: 8 bits of mantissa, three roundings.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def test_sort_by_expert_is_stable_and_its_maps_are_inverse():
    ids_TK = torch.tensor([[3, 0], [0, 3], [2, 0]])
    routing = sort_by_expert(ids_TK, 5)
    assert routing.slot_of_row_R.tolist() == [1, 2, 5, 4, 0, 3]
    assert routing.token_of_row_R.tolist() == [0, 1, 2, 2, 0, 1]
    assert routing.row_of_slot_TK.tolist() == [[4, 0], [1, 5], [3, 2]]
    assert routing.offsets_E.tolist() == [3, 3, 4, 6, 6]
    assert {index.dtype for index in routing} == {torch.int32}


def test_gather_and_sum_are_transposes_of_each_other():
    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.randint(0, 6, (7, 3), generator=generator)
    _, tokens, rows, _ = sort_by_expert(ids_TK, 6)
    x_TD = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    y_RD = torch.randn(21, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    torch.testing.assert_close(
        (gather_rows(x_TD, tokens, rows) * y_RD).sum(), (x_TD * sum_rows(y_RD, tokens, rows)).sum()
    )
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, tokens, rows), x_TD)
    assert torch.autograd.gradcheck(lambda y: sum_rows(y, tokens, rows), y_RD)


def test_sum_of_rows_is_fp32_in_the_order_of_k_and_cast_once():
    # bf16 keeps 8 bits: 256 + 1 is 256, so adding in bf16 loses every one of the ones.
    rows_RD = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    _, tokens, row_of_slot_TK, _ = sort_by_expert(torch.arange(5)[None], 5)
    assert sum_rows(rows_RD, tokens, row_of_slot_TK).item() == 260
    # In FP32 1e8 + 1 - 1e8 + 1 is 1 in this order and 0 or 2 in others.
    rows_RD = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    _, tokens, row_of_slot_TK, _ = sort_by_expert(torch.arange(4)[None], 4)
    assert sum_rows(rows_RD, tokens, row_of_slot_TK).item() == 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gathered", [False, True])
def test_values_and_gradients_equal_a_float64_loop(dtype: torch.dtype, gathered: bool):
    case = _Case(dtype, hidden=16, intermediate=8)
    _assert_close(case.run(_kernel(gathered)), case.run(_loop_over_experts, torch.float64), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unaligned_sizes_work_and_say_that_they_are_slow(dtype: torch.dtype):
    grouped_products._warn_once.cache_clear()
    case = _Case(dtype, hidden=15, intermediate=7)
    with pytest.warns(UserWarning, match=r"one product per expert.*15 torch\.\w+ are no multiple of 16 bytes"):
        actual = case.run(_kernel(gathered=True))
    _assert_close(actual, case.run(_loop_over_experts, torch.float64), TOLERANCE[dtype])


def test_aligned_sizes_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _Case(torch.float32, hidden=16, intermediate=8).run(_kernel(gathered=True))


def test_gradients_pass_gradcheck():
    case = _Case(torch.float64, hidden=4, intermediate=3, num_tokens=3)
    assert torch.autograd.gradcheck(lambda *inputs: _kernel(True)(case.ids_TK, *inputs), case.leaves(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_expert_without_rows_gets_exact_zeros(dtype: torch.dtype):
    case = _Case(dtype, hidden=16, intermediate=8)
    case.ids_TK = case.ids_TK % 3 + 1  # experts 0, 4 and 5 have no rows
    *_, grad_gate_up, grad_down = case.run(_kernel(gathered=True))
    for grad in (grad_gate_up, grad_down):
        assert grad.dtype == dtype
        assert grad[[0, 4, 5]].eq(0).all()
        assert grad[1:4].ne(0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_rows_at_all_give_an_empty_result_and_zero_gradients(dtype: torch.dtype):
    case = _Case(dtype, hidden=16, intermediate=8, num_tokens=0)
    y, grad_x, grad_probs, grad_gate_up, grad_down = case.run(_kernel(gathered=True))
    assert (y.shape, grad_x.shape, grad_probs.shape) == ((0, 16), (0, 16), (0, 2))
    assert grad_gate_up.eq(0).all() and grad_down.eq(0).all()


@pytest.mark.parametrize("hidden", [16, 15])
def test_rows_past_the_last_offset_are_never_read(hidden: int):
    torch.manual_seed(0)
    offsets_E = torch.tensor([2, 2, 5], dtype=torch.int32)
    weights = [(torch.randn(3, *shape) * 0.3).requires_grad_() for shape in ((16, hidden), (hidden, 8))]
    rows_RD, probs_R, grad_RD = torch.randn(5, hidden), torch.rand(5), torch.randn(5, hidden)

    def run(num_padding: int) -> list[Tensor]:
        rows, probs, grad = (
            torch.cat([live, torch.full((num_padding, *live.shape[1:]), float("nan"))])
            for live in (rows_RD, probs_R, grad_RD)
        )
        inputs = [rows.requires_grad_(), probs.requires_grad_(), *weights]
        y = expert_mlp(*inputs, offsets_E)
        grad_rows, grad_probs, *grad_weights = torch.autograd.grad(y, inputs, grad)
        return [y[:5], grad_rows[:5], grad_probs[:5], *grad_weights]

    for padded, tight in zip(run(4), run(0), strict=True):
        assert torch.equal(padded, tight)


def test_an_expanded_gradient_is_taken():
    case = _Case(torch.float32, hidden=16, intermediate=8)
    leaves = case.leaves(torch.float32)
    rows = leaves[0].detach()[:4].requires_grad_()
    offsets_E = torch.tensor([1, 1, 2, 3, 4, 4], dtype=torch.int32)
    expert_mlp(rows, torch.ones(4), leaves[2], leaves[3], offsets_E).sum().backward()
    expanded = rows.grad.clone()
    rows.grad = None
    expert_mlp(rows, torch.ones(4), leaves[2], leaves[3], offsets_E).backward(torch.ones(4, 16))
    assert torch.equal(rows.grad, expanded)


def test_grouped_and_looped_products_agree_bitwise_in_fp32(monkeypatch: pytest.MonkeyPatch):
    case = _Case(torch.float32, hidden=32, intermediate=16)
    grouped = case.run(_kernel(gathered=True))
    monkeypatch.setattr(grouped_products, "GROUPED_MM_DTYPES", ())
    for a, b in zip(case.run(_kernel(gathered=True)), grouped, strict=True):
        assert torch.equal(a, b)


def test_probabilities_act_in_fp32_under_bf16_rows(monkeypatch: pytest.MonkeyPatch):
    case = _Case(torch.bfloat16, hidden=16, intermediate=8)
    seen: list[Tensor] = []

    def spy(h_RH: Tensor, probs_R: Tensor, **options: Tensor) -> Tensor:
        seen.append(probs_R)
        return swiglu_prob(h_RH, probs_R, **options)

    swiglu_prob = kernel.swiglu_prob
    monkeypatch.setattr(kernel, "swiglu_prob", spy)
    _, _, grad_probs, *_ = case.run(_kernel(gathered=True))
    assert seen[0].dtype == grad_probs.dtype == torch.float32
    assert not torch.equal(grad_probs, grad_probs.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_at_most_a_third_of_what_transformers_grouped_mm_keeps(dtype: torch.dtype):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=8)
    config._experts_implementation = "grouped_mm"
    experts = Qwen3MoeExperts(config).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    case = _Case(dtype, hidden=64, intermediate=32, num_tokens=64, num_experts=8, top_k=4)
    x_TD, probs_TK = case.leaves(dtype)[:2]
    weights = experts.gate_up_proj, experts.down_proj
    theirs = _bytes_kept(lambda: experts(x_TD, case.ids_TK, probs_TK), weights)
    ours = _bytes_kept(lambda: _kernel(gathered=True)(case.ids_TK, x_TD, probs_TK, *weights), weights)
    assert ours <= 0.34 * theirs
    rows_kept = _bytes_kept(lambda: _kernel(gathered=False)(case.ids_TK, x_TD, probs_TK, *weights), weights)
    assert rows_kept <= 0.52 * theirs


def test_frozen_weights_keep_no_rows_and_get_no_gradient():
    case = _Case(torch.float32, hidden=64, intermediate=32, num_tokens=64)
    x_TD, probs_TK, *weights = case.leaves(torch.float32)
    frozen = [weight.detach() for weight in weights]
    assert (
        _bytes_kept(lambda: _kernel(False)(case.ids_TK, x_TD, probs_TK, *frozen), frozen)
        < _bytes_kept(lambda: _kernel(False)(case.ids_TK, x_TD, probs_TK, *weights), weights) - x_TD.nbytes
    )
    y = _kernel(False)(case.ids_TK, x_TD, probs_TK, *frozen)
    grads = torch.autograd.grad(y.square().sum(), (x_TD, probs_TK))
    wanted = torch.autograd.grad(_kernel(False)(case.ids_TK, x_TD, probs_TK, *weights).square().sum(), (x_TD, probs_TK))
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_errors_name_the_shapes_and_the_remedy():
    offsets_E = torch.tensor([1, 2], dtype=torch.int32)
    rows, probs, gate_up, down = torch.ones(2, 8), torch.ones(2), torch.ones(2, 8, 8), torch.ones(2, 8, 4)
    with pytest.raises(ValueError, match=r"gate_up \(2, 8, 8\) does not go with down \(2, 8, 5\)"):
        expert_mlp(rows, probs, gate_up, torch.ones(2, 8, 5), offsets_E)
    with pytest.raises(ValueError, match=r"offsets \(2,\) torch.int64 must be int32"):
        expert_mlp(rows, probs, gate_up, down, offsets_E.long())
    with pytest.raises(ValueError, match=r"rows \(2, 9\).*D\(8\)"):
        expert_mlp(torch.ones(2, 9), probs, gate_up, down, offsets_E)
    with pytest.raises(ValueError, match=r"cast the rows"):
        expert_mlp(rows.bfloat16(), probs, gate_up, down, offsets_E)


class _Case:
    """Random routing in which an expert may be chosen by no token, and the gradient that comes back."""

    def __init__(
        self,
        dtype: torch.dtype,
        hidden: int,
        intermediate: int,
        num_tokens: int = 11,
        num_experts: int = 6,
        top_k: int = 2,
    ) -> None:
        generator = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        scores_TE = torch.rand(num_tokens, num_experts, generator=generator)
        self.probs_TK, self.ids_TK = scores_TE.topk(top_k)
        self.x_TD, self.grad_TD = randn(num_tokens, hidden), randn(num_tokens, hidden)
        self.gate_up_EHD = randn(num_experts, 2 * intermediate, hidden) * 0.3
        self.down_EDI = randn(num_experts, hidden, intermediate) * 0.3
        self.dtype = dtype

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        probs_TK = self.probs_TK.to(torch.promote_types(dtype, torch.float32))
        values = self.x_TD.to(dtype), probs_TK, self.gate_up_EHD.to(dtype), self.down_EDI.to(dtype)
        return [value.clone().requires_grad_() for value in values]

    def run(self, function: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        leaves = self.leaves(dtype or self.dtype)
        y_TD = function(self.ids_TK, *leaves)
        return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, self.grad_TD.to(y_TD.dtype))]


def _kernel(gathered: bool) -> Callable[..., Tensor]:
    def run(ids_TK: Tensor, x_TD: Tensor, probs_TK: Tensor, gate_up_EHD: Tensor, down_EDI: Tensor) -> Tensor:
        slots, tokens, row_of_slot_TK, offsets_E = sort_by_expert(ids_TK, down_EDI.shape[0])
        rows_RD = gather_rows(x_TD, tokens, row_of_slot_TK)
        probs_R = probs_TK.reshape(-1)[slots]
        source = (x_TD, tokens) if gathered else None
        y_RD = expert_mlp(rows_RD, probs_R, gate_up_EHD, down_EDI, offsets_E, gathered_from=source)
        return sum_rows(y_RD, tokens, row_of_slot_TK)

    return run


def _loop_over_experts(ids_TK: Tensor, x_TD: Tensor, probs_TK: Tensor, gate_up_EHD: Tensor, down_EDI: Tensor) -> Tensor:
    y_TD = torch.zeros_like(x_TD)
    for expert in range(down_EDI.shape[0]):
        token, k = torch.where(ids_TK == expert)
        gate, up = F.linear(x_TD[token], gate_up_EHD[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, down_EDI[expert]) * probs_TK[token, k, None]
        y_TD = y_TD.index_add(0, token, rows)
    return y_TD


def _assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    names = ("y", "grad_x", "grad_probs", "grad_gate_up", "grad_down")
    for name, a, b in zip(names, actual, expected, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error <= tolerance, f"{name}: {error:.1e}"


def _bytes_kept(forward: Callable[[], Tensor], weights: object) -> int:
    """Storages that autograd keeps for the backward, the weights aside."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    del y
    return sum(kept.values())
