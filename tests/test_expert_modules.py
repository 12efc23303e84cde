"""Shapes: T tokens of a rank, K experts per token, E experts, D hidden size."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy.expert_parallel import local_math
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.dispatch import LocalDispatcher
from lightning_moe_strategy.expert_parallel.experts import (
    attach,
    find_experts,
    require_experts,
    routing_observers,
    unknown_experts,
)
from lightning_moe_strategy.models.moe import Experts

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 16, 8
# fp32: the probability acts before the down projection, theirs after it; sums over ranks are regrouped.
TOLERANCE = 2e-6


class LoopExperts(nn.Module):
    """Written by a user: other names, a bias, a loop that skips experts without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.w_in = nn.Parameter(torch.empty(NUM_EXPERTS, INTERMEDIATE, HIDDEN))
        self.b_in = nn.Parameter(torch.empty(NUM_EXPERTS, INTERMEDIATE))
        self.w_out = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN, INTERMEDIATE))

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, k = torch.where(ids == expert)
            if len(token):
                rows = F.gelu(F.linear(hidden[token], self.w_in[expert], self.b_in[expert]))
                out = out.index_add(0, token, F.linear(rows, self.w_out[expert]) * weights[token, k, None].to(hidden))
            self.weights_dtype = weights.dtype
        return out


class ClampedExperts(Experts):
    """Our parameters, another forward."""

    def forward(self, hidden_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return super().forward(hidden_TD, expert_ids_TK, weights_TK.clamp(max=0.5))


def hugging_face(family: str, class_name: str, config_name: str, **sizes: Any) -> nn.Module:
    import importlib

    config_module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(config_module, config_name)(hidden_size=HIDDEN, num_hidden_layers=1, **sizes)
    config._experts_implementation = "eager"
    return getattr(modeling, class_name)(config)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: Experts(NUM_EXPERTS, HIDDEN, INTERMEDIATE),
    "ours with another forward": lambda: ClampedExperts(NUM_EXPERTS, HIDDEN, INTERMEDIATE),
    "hand-written": LoopExperts,
    "qwen3_moe": lambda: hugging_face(
        "qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig", num_experts=NUM_EXPERTS, moe_intermediate_size=INTERMEDIATE
    ),
    "mixtral": lambda: hugging_face(
        "mixtral", "MixtralExperts", "MixtralConfig", num_local_experts=NUM_EXPERTS, intermediate_size=INTERMEDIATE
    ),
    "deepseek_v3": lambda: hugging_face(
        "deepseek_v3",
        "DeepseekV3Experts",
        "DeepseekV3Config",
        n_routed_experts=NUM_EXPERTS,
        moe_intermediate_size=INTERMEDIATE,
    ),
    "gpt_oss": lambda: hugging_face(
        "gpt_oss", "GptOssExperts", "GptOssConfig", num_local_experts=NUM_EXPERTS, intermediate_size=INTERMEDIATE
    ),
    "nemotron_h": lambda: hugging_face(
        "nemotron_h",
        "NemotronHExperts",
        "NemotronHConfig",
        n_routed_experts=NUM_EXPERTS,
        moe_intermediate_size=INTERMEDIATE,
    ),
    "unaligned gpt_oss": lambda: hugging_face(
        "gpt_oss", "GptOssExperts", "GptOssConfig", num_local_experts=NUM_EXPERTS, intermediate_size=7
    ),
}
USES_KERNEL = {"ours", "qwen3_moe", "mixtral", "deepseek_v3"}


def make(variant: str) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    experts = MAKERS[variant]()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return experts


def inputs_of_rank(routing: str, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden_TD, expert_ids_TK, weights_TK and the gradient that comes back."""
    generator = torch.Generator().manual_seed(rank)
    ids_TK = torch.rand(5, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    if routing == "last_rank_idle":
        ids_TK = ids_TK % 2
    hidden_TD = torch.randn(5, HIDDEN, generator=generator)
    weights_TK = torch.rand(5, TOP_K, generator=generator)
    return hidden_TD, ids_TK, weights_TK, torch.randn(5, HIDDEN, generator=generator)


def run(experts: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs
    hidden_TD, weights_TK = (t.clone().requires_grad_() for t in (hidden_TD, weights_TK))
    experts.zero_grad()
    y_TD = experts(hidden_TD, ids_TK, weights_TK)
    y_TD.backward(grad_TD)
    grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"y": y_TD.detach(), "hidden": hidden_TD.grad, "weights": weights_TK.grad, **grads}


def spread(experts: nn.Module, mesh: Any, as_dtensor: bool) -> None:
    for name, parameter in list(experts.named_parameters()):
        local = parameter.data.chunk(mesh.size())[mesh.get_local_rank()].clone()
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False) if as_dtensor else local
        setattr(experts, name, nn.Parameter(whole))


def run_on_ranks(variant: str, routing: str, as_dtensor: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    experts = make(variant)
    attach(experts, AllToAllDispatcher(NUM_EXPERTS, mesh.get_group()))
    spread(experts, mesh, as_dtensor)
    result = run(experts, inputs_of_rank(routing, dist.get_rank()))
    assert experts.num_experts == NUM_EXPERTS
    assert all(isinstance(parameter, nn.Parameter) for parameter in experts.parameters())
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in result.items()}


def assert_close(actual: Tensor, expected: Tensor, name: str) -> None:
    error = (actual - expected).norm() / (expected.norm() + 1e-12)
    assert error <= TOLERANCE, f"{name}: {error:.1e}"


@pytest.mark.parametrize("variant", MAKERS)
def test_attached_experts_compute_what_the_module_did(variant: str):
    inputs = inputs_of_rank("random", 0)
    expected = run(make(variant), inputs)
    experts = make(variant)
    undo = attach(experts, LocalDispatcher(NUM_EXPERTS))
    actual = run(experts, inputs)
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, name)
    undo()
    assert "forward" not in experts.__dict__
    assert all(torch.equal(a, b) for a, b in zip(run(experts, inputs).values(), expected.values(), strict=True))


@pytest.mark.parametrize("routing", ["random", "last_rank_idle"])
@pytest.mark.parametrize("variant", MAKERS)
def test_two_ranks_equal_one_process(ranks2: Any, variant: str, routing: str):
    results = ranks2(run_on_ranks, variant, routing, True)
    both = tuple(torch.cat(parts) for parts in zip(*(inputs_of_rank(routing, rank) for rank in range(2)), strict=True))
    expected = run(make(variant), both)
    for name, tensor in expected.items():
        if name in ("y", "hidden", "weights"):
            assert_close(torch.cat([result[name] for result in results]), tensor, name)
        else:
            assert all(torch.equal(result[name], results[0][name]) for result in results)
            assert_close(results[0][name], tensor, name)
            if routing == "last_rank_idle":
                assert results[0][name][2:].eq(0).all()


def test_plain_local_parameters_work_like_dtensors(ranks2: Any):
    whole = ranks2(run_on_ranks, "qwen3_moe", "random", True)
    for rank, local in enumerate(ranks2(run_on_ranks, "qwen3_moe", "random", False)):
        assert torch.equal(local["y"], whole[rank]["y"])
        assert torch.equal(local["down_proj"], whole[rank]["down_proj"].chunk(2)[rank])


@pytest.mark.parametrize("variant", MAKERS)
def test_standard_swiglu_experts_and_no_others_use_the_kernel(variant: str):
    assert local_math.is_gated_swiglu(make(variant)) == (variant in USES_KERNEL)


@pytest.mark.parametrize("flag", ["has_bias", "is_transposed", "has_post_expert_norm"])
def test_a_flag_or_an_activation_that_differs_keeps_the_own_math(flag: str):
    experts = make("qwen3_moe")
    setattr(experts, flag, True)
    assert not local_math.is_gated_swiglu(experts)
    experts = make("qwen3_moe")
    experts.act_fn = nn.GELU()
    assert not local_math.is_gated_swiglu(experts)


def run_under_fsdp() -> tuple[float, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("e_fsdp", "ep"))
    experts = make("qwen3_moe")
    attach(experts, AllToAllDispatcher(NUM_EXPERTS, mesh["ep"].get_group()))
    spread(experts, mesh["ep"], as_dtensor=True)
    fully_shard(experts, mesh=mesh["e_fsdp"], reshard_after_forward=True)
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(1.0)
    experts.set_force_sum_reduction_for_comms(True)
    result = run(experts, inputs_of_rank("random", dist.get_rank()))
    everybody = tuple(
        torch.cat(parts) for parts in zip(*(inputs_of_rank("random", rank) for rank in range(4)), strict=True)
    )
    expected = run(make("qwen3_moe"), everybody)
    worst = max(
        float((result[name].full_tensor() - expected[name]).norm() / expected[name].norm())
        for name in ("gate_up_proj", "down_proj")
    )
    return worst, torch.allclose(result["y"], expected["y"].chunk(4)[dist.get_rank()], atol=1e-5)


def test_fully_sharded_spread_experts_equal_one_process(ranks4: Any):
    assert all(worst <= TOLERANCE and same for worst, same in ranks4(run_under_fsdp))


def mistakes_on_ranks() -> str:
    experts = make("hand-written")
    attach(experts, AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD))
    try:
        run(experts, inputs_of_rank("random", 0))
    except RuntimeError as error:
        return str(error)
    return ""


def test_parameters_that_were_not_spread_are_an_error(ranks2: Any):
    for text in ranks2(mistakes_on_ranks):
        assert "LoopExperts.w_in holds 4 experts on this rank, but it is sent rows of 2" in text


def test_attach_errors_say_what_to_do():
    experts = make("ours")
    with pytest.raises(ValueError, match=r"num_experts\(8\) must be the module's \(4\)"):
        attach(experts, LocalDispatcher(8))
    undo = attach(experts, LocalDispatcher(NUM_EXPERTS))
    with pytest.raises(RuntimeError, match="undo the first"):
        attach(experts, LocalDispatcher(NUM_EXPERTS))
    with pytest.raises(ValueError, match="flatten batch and sequence first"):
        experts(torch.ones(2, 3, HIDDEN), torch.zeros(6, 2, dtype=torch.int64), torch.ones(6, 2))
    undo()
    attach(experts, LocalDispatcher(NUM_EXPERTS))


def test_a_deep_copy_runs_its_own_parameters_and_is_not_observed():
    experts = make("ours")
    attach(experts, LocalDispatcher(NUM_EXPERTS))
    seen: list[Tensor] = []
    routing_observers(experts).append(seen.append)
    twin = copy.deepcopy(experts)
    with torch.no_grad():
        twin.down_proj.zero_()
    hidden_TD, ids_TK, weights_TK, _ = inputs_of_rank("random", 0)
    assert twin(hidden_TD, ids_TK, weights_TK).eq(0).all() and not seen
    assert experts(hidden_TD, ids_TK, weights_TK).ne(0).any() and len(seen) == 1


def test_observers_do_not_keep_a_model_alive():
    experts = make("ours")
    undo = attach(experts, LocalDispatcher(NUM_EXPERTS))
    routing_observers(experts).append(print)
    alive = weakref.ref(experts)
    undo()
    del experts, undo
    import gc

    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("variant", ["ours", "hand-written"])
def test_observers_see_a_forward_once_and_its_recompute_never(variant: str, use_reentrant: bool):
    experts = make(variant)
    attach(experts, LocalDispatcher(NUM_EXPERTS))
    seen: list[Tensor] = []
    routing_observers(experts).append(seen.append)
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs_of_rank("random", 0)
    hidden_TD.requires_grad_()
    y_TD = checkpoint(experts, hidden_TD, ids_TK, weights_TK, use_reentrant=use_reentrant)
    y_TD.backward(grad_TD)
    assert len(seen) == 1 and torch.equal(seen[0], ids_TK)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", MAKERS)
def test_weights_of_a_token_come_in_fp32_or_bf16(variant: str, weights_dtype: torch.dtype):
    experts = make(variant).bfloat16()
    attach(experts, LocalDispatcher(NUM_EXPERTS))
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs_of_rank("random", 0)
    weights_TK = weights_TK.to(weights_dtype)
    result = run(experts, (hidden_TD.bfloat16(), ids_TK, weights_TK, grad_TD.bfloat16()))
    assert result["y"].dtype == torch.bfloat16 and result["weights"].dtype == weights_dtype
    if isinstance(experts, LoopExperts):
        assert experts.weights_dtype == weights_dtype
    exact = run(make(variant).bfloat16().float(), (hidden_TD.bfloat16().float(), ids_TK, weights_TK.float(), grad_TD))
    for name in ("y", "hidden", "weights"):
        error = (result[name].float() - exact[name]).norm() / exact[name].norm()
        assert error <= 1.5e-2, f"{name}: {error:.1e}"  # bf16: 8 bits, a few roundings in a row


def test_experts_in_fp32_take_bf16_tokens():
    experts = make("ours")
    attach(experts, LocalDispatcher(NUM_EXPERTS))
    hidden_TD, ids_TK, weights_TK, grad_TD = inputs_of_rank("random", 0)
    result = run(experts, (hidden_TD.bfloat16(), ids_TK, weights_TK, grad_TD.bfloat16()))
    assert result["y"].dtype == torch.bfloat16 and result["down_proj"].dtype == torch.float32
    exact = run(make("ours"), (hidden_TD.bfloat16().float(), ids_TK, weights_TK, grad_TD))
    torch.testing.assert_close(result["y"].float(), exact["y"], rtol=1e-2, atol=1e-2)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.weight = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN))


class ListBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.expert_router = Router()
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_EXPERTS)])


class NamelessExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN, HIDDEN))

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return hidden


class ExpertsWithSharedNorm(LoopExperts):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)


class GatedExpertBlock(nn.Module):
    """A block with experts that are fine, shared experts and a router: nothing of it is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.expert_router = Router()
        self.experts = LoopExperts()
        self.shared_experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3)


def legacy(family: str, class_name: str, config_name: str, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return hugging_face(family, class_name, config_name, **sizes)


def test_finds_experts_by_name_and_nothing_else():
    model = nn.ModuleDict({"a": GatedExpertBlock(), "b": nn.Linear(2, 2), "c": make("qwen3_moe")})
    assert list(find_experts(model)) == ["a.experts", "c"]
    assert unknown_experts(model) == []
    assert list(require_experts(model, ep=2)) == ["a.experts", "c"]


@pytest.mark.parametrize(
    "make_block, name, reason",
    [
        (ListBlock, "layer.experts", "its 4 experts are separate modules in a ModuleList"),
        (NamelessExperts, "layer", "it has no attribute num_experts"),
        (ExpertsWithSharedNorm, "layer", "its parameter norm.weight belongs to a submodule"),
        (
            lambda: legacy("llama4", "Llama4TextExperts", "Llama4TextConfig", num_local_experts=4),
            "layer",
            "its forward takes (hidden_states)",
        ),
    ],
)
def test_experts_that_cannot_be_spread_are_named_with_the_reason(make_block: Any, name: str, reason: str):
    model = nn.ModuleDict({"layer": make_block()})
    ((found, why),) = unknown_experts(model)
    assert found == name and why.startswith(reason)
    assert require_experts(model, ep=1) == {}
    with pytest.raises(ValueError, match=r"(?s)ep\(4\).*" + name.replace(".", r"\.") + r": .*Set ep=1") as raised:
        require_experts(model, ep=4)
    assert reason in str(raised.value)


def test_dbrx_is_refused():
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts

    config = DbrxFFNConfig(ffn_hidden_size=8, moe_num_experts=4)
    config.hidden_size = HIDDEN
    ((name, reason),) = unknown_experts(nn.ModuleDict({"experts": DbrxExperts(config)}))
    assert name == "experts" and "not stacked in one tensor" in reason


def test_one_error_lists_every_problem():
    model = nn.ModuleDict({"a": ListBlock(), "b": make("ours"), "c": NamelessExperts()})
    with pytest.raises(ValueError, match=r"(?s)a\.experts: .*\n  c: .*\n  b: num_experts\(4\) is no multiple of ep"):
        require_experts(model, ep=3)
    with pytest.raises(ValueError, match="no experts were found"):
        require_experts(nn.Linear(2, 2), ep=2)
    assert require_experts(nn.Linear(2, 2), ep=1) == {}
