"""Experts' weight gradients under bf16-mixed: FP32 sums of exact products of BF16 numbers, as far as the shard.

Shapes: R rows, T tokens, M and N the two sizes of a weight, E experts, L experts of this rank.
"""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_moe_strategy.kernels import expert_mlp as kernel
from lightning_moe_strategy.kernels.expert_mlp import expert_mlp
from lightning_moe_strategy.kernels.outer_products import outer_products, pass_fp32_gradients, takes_fp32_gradient
from tests.modules import HuggingFaceLanguageModel, PlainLanguageModel, loader
from tests.parity import fit, whole

FP32_SUMS = 1e-6
"""Relative: sums of a few hundred products in FP32. Rounded to BF16 once, they are 2e-3 away."""
INTERMEDIATE = 16
SHARDED = dict(fsdp=2, e_fsdp=2, ep=1)
SPREAD = dict(fsdp=2, e_fsdp=1, ep=2)


class Operands(Callback):
    """What a step's weight gradients are products of, and the gradients after its last backward pass.

    In float64, by name: of this rank's rows and experts ``exact``, of all rows and experts ``gradients``.
    """

    def __init__(self) -> None:
        self.exact: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def on_train_start(self, *args: Any) -> None:
        self.run, kernel._weight_gradient = kernel._weight_gradient, self.watched

    def watched(
        self, left_RM: Tensor, right_TN: Tensor, token_of_row_R: Tensor | None, offsets_L: Tensor, **options: Any
    ) -> Tensor:
        name = "down_proj" if right_TN.shape[1] == INTERMEDIATE else "gate_up_proj"
        right_RN = right_TN if token_of_row_R is None else right_TN[token_of_row_R]
        exact_LMN = products(left_RM, right_RN, offsets_L)
        self.exact[name] = self.exact.get(name, 0) + exact_LMN
        return self.run(left_RM, right_TN, token_of_row_R, offsets_L, **options)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        experts = pl_module.model.model.layers[0].mlp.experts
        self.gradients = {n: whole(p.grad).double() for n, p in experts.named_parameters() if p.grad is not None}

    def on_train_end(self, *args: Any) -> None:
        kernel._weight_gradient = self.run


def products(left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor) -> Tensor:
    ends = offsets_E.tolist()
    return torch.stack(
        [
            left_RM[start:end].double().t() @ right_RN[start:end].double()
            for start, end in zip([0, *ends], ends, strict=False)
        ]
    )


class OneSparseLayer(HuggingFaceLanguageModel):
    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        super().__init__("qwen3_moe", num_hidden_layers=1, num_experts=8, moe_intermediate_size=INTERMEDIATE)
        for name in frozen:
            self.model.model.layers[0].mlp.experts.get_parameter(name).requires_grad_(False)


def trained(
    degrees: dict[str, Any], num_micro_batches: int = 1, frozen: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    operands = Operands()
    fit(
        degrees,
        partial(OneSparseLayer, frozen),
        lambda dp: loader(4 * num_micro_batches, 24, 4 // dp),
        callbacks=(operands,),
        precision="bf16-mixed",
        accumulate_grad_batches=num_micro_batches,
    )
    return operands.exact, operands.gradients


def assert_exact(ranks2: Any, degrees: dict[str, Any], *args: Any, names: set[str] | None = None) -> None:
    results = ranks2(trained, degrees, *args)
    exact_of_ranks = [exact for exact, _ in results]
    for _, gradients in results:
        assert gradients.keys() == (names or {"gate_up_proj", "down_proj"})
        for name, gradient in gradients.items():
            parts = [exact[name] for exact in exact_of_ranks]
            expected = torch.cat(parts) if degrees["ep"] == 2 else sum(parts)
            error = (gradient - expected).norm() / expected.norm()
            assert expected.norm() > 0 and error < FP32_SUMS, f"{name}: {error:.1e}"


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("degrees", [SHARDED, SPREAD], ids=["e_fsdp", "ep"])
def test_a_sharded_gradient_is_the_fp32_sum_of_exact_products(degrees: Any, num_micro_batches: int, ranks2: Any):
    assert_exact(ranks2, degrees, num_micro_batches)


@pytest.mark.parametrize("options", [{"recompute": "block"}, {"ep_chunks": 3}, {"recompute": "block", "ep_chunks": 2}])
def test_neither_recompute_nor_chunks_round_it(options: dict[str, Any], ranks2: Any):
    assert_exact(ranks2, SPREAD | options)


def test_a_frozen_projection_gets_no_gradient_and_the_other_is_not_rounded(ranks2: Any):
    assert_exact(ranks2, SHARDED, 1, ("down_proj",), names={"gate_up_proj"})


class MathOfItsOwn(Callback):
    """The dtypes of experts' gradients at their reduction, where a module computes by itself."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parameters = [p for name, p in pl_module.named_parameters() if "experts" in name]
        assert all(torch.isfinite(whole(p.grad)).all() and whole(p.grad).abs().sum() > 0 for p in parameters)
        self.dtypes = {p.grad.dtype for p in parameters}


def trained_by_their_own_math() -> set[torch.dtype]:
    watch = MathOfItsOwn()
    fit(SPREAD, PlainLanguageModel, lambda dp: loader(4, 24, 4 // dp), callbacks=(watch,), precision="bf16-mixed")
    return watch.dtypes


def test_experts_with_math_of_their_own_train_as_before(ranks2: Any):
    assert ranks2(trained_by_their_own_math) == [{torch.float32}] * 2


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        part = weight.view_as(weight)
        pass_fp32_gradients(ctx, part)
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert grad.dtype == torch.float32
        return grad


def test_a_weight_says_whether_it_takes_an_fp32_gradient():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    assert not takes_fp32_gradient(weight) and not takes_fp32_gradient(weight.clone())
    assert takes_fp32_gradient(Passed.apply(weight))
    assert not takes_fp32_gradient(Passed.apply(weight).clone())
    weight.grad_dtype = torch.float32
    assert takes_fp32_gradient(weight) and not takes_fp32_gradient(weight.detach())
    assert not takes_fp32_gradient(nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("in_fp32", [True, False])
def test_only_a_weight_that_takes_it_gets_one(in_fp32: bool):
    torch.manual_seed(0)
    offsets_E = torch.tensor([3, 3, 12], dtype=torch.int32)
    gate_up, down = (nn.Parameter(torch.randn(3, *size).bfloat16()) for size in ((16, 8), (8, 8)))
    shown = []
    for weight in (gate_up, down):
        if in_fp32:
            weight.grad_dtype = torch.float32
        shown.append(Passed.apply(weight) if in_fp32 else weight)
    rows_RD = torch.randn(12, 8).bfloat16()
    expert_mlp(rows_RD, torch.rand(12), *shown, offsets_E).float().square().sum().backward()
    for weight in (gate_up, down):
        assert weight.grad.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
        assert torch.equal(weight.grad, weight.grad.bfloat16()) != in_fp32
        assert weight.grad[1].eq(0).all() and weight.grad[[0, 2]].ne(0).any()


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outer_products_are_exact_and_read_nothing_else(dtype: torch.dtype, is_gathered: bool):
    torch.manual_seed(0)
    offsets_E = torch.tensor([0, 21, 21, 38, 39], dtype=torch.int32)
    left_RM, right_TN = torch.randn(45, 24).to(dtype), torch.randn(45, 40).to(dtype)
    left_RM[39:] = float("nan")
    tokens_R = torch.randint(0, 10, (45,), dtype=torch.int32) if is_gathered else None
    right_TN[10 if is_gathered else 39 :] = float("nan")
    sums_EMN = outer_products(left_RM, right_TN, offsets_E, tokens_R)
    right_RN = right_TN if tokens_R is None else right_TN[tokens_R]
    torch.testing.assert_close(sums_EMN.double(), products(left_RM, right_RN, offsets_E), rtol=1e-6, atol=1e-5)
    assert sums_EMN.dtype == torch.float32 and sums_EMN[[0, 2]].eq(0).all()


def test_outer_products_of_no_rows_are_zeros():
    no_rows = torch.empty(0, 8, dtype=torch.bfloat16)
    assert outer_products(no_rows, no_rows, torch.zeros(2, dtype=torch.int32)).eq(0).all()


def test_fake_tensors_have_the_shape_of_outer_products_and_count_their_products():
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        left_RM, right_TN = (torch.empty(sizes, dtype=torch.bfloat16) for sizes in ((32, 24), (5, 40)))
        offsets_E, tokens_R = (torch.empty(size, dtype=torch.int32) for size in (3, 32))
        sums_EMN = outer_products(left_RM, right_TN, offsets_E, tokens_R)
    assert sums_EMN.shape == (3, 24, 40) and sums_EMN.dtype == torch.float32
    assert counter.get_total_flops() == 2 * 32 * 24 * 40
