"""Muon on two meshes against the same class in one process, and against torch's where that applies."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_moe_strategy import MoELanguageModel, Muon, muon_groups
from lightning_moe_strategy.mesh import ParallelDims
from lightning_moe_strategy.optimizers import whole_matrices
from lightning_moe_strategy.optimizers.newton_schulz import KELLER_JORDAN, orthogonalize
from lightning_moe_strategy.optimizers.whole_matrices import Cut, Piece, share_out, transform_whole
from lightning_moe_strategy.simulate import simulate
from tests.modules import HuggingFaceLanguageModel, PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, fit, reference, whole

TOLERANCE = 1e-5
"""Relative, FP32, after 5 steps: gradients differ by 1e-6, and Newton-Schulz enlarges the smallest 485 times."""

NUM_STEPS, BATCH, LENGTH = 5, 8, 24
DENSE = "decoder.blocks.0."


class WithMuon(PlainLanguageModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = muon_groups(self, packed={"*.qkv.weight": 3})
        return Muon(groups, lr=0.02, adamw_lr=1e-3)


def batches(dp: int, *, accumulated: int = 1) -> DataLoader:
    return loader(NUM_STEPS * BATCH, LENGTH, BATCH // dp // accumulated)


def trained(degrees: dict[str, int], make_model: Any = WithMuon, accumulated: int = 1, **options: Any) -> Any:
    _, model, _ = fit(
        degrees, make_model, partial(batches, accumulated=accumulated), shift="module", max_steps=NUM_STEPS,
        accumulate_grad_batches=accumulated, **options,
    )  # fmt: skip
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def worst(parameters: dict[str, Tensor], model: nn.Module) -> tuple[float, str]:
    rows = [
        (float((parameters[name] - p.detach()).norm() / p.detach().norm()), name)
        for name, p in model.named_parameters()
    ]
    return max(rows)


OFTEN = [LAYOUTS_OF_4[index] for index in (2, 7, 9)]
"""Both meshes cut, both kinds of replicas, and both at once."""


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(d, id="-".join(f"{k}{v}" for k, v in d.items()), marks=() if d in OFTEN else pytest.mark.slow)
        for d in LAYOUTS_OF_4
    ],
)
def test_parameters_after_five_steps_equal_one_process_on_every_layout(degrees, ranks4):
    model, _, _ = reference(WithMuon, batches(1), num_steps=NUM_STEPS)
    first, *others = ranks4(trained, degrees)
    difference, name = worst(first, model)
    assert difference < TOLERANCE, name
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


class FewExperts(WithMuon):
    """Fewer than ranks of e_fsdp: each expert's columns lie on all of them."""

    def __init__(self) -> None:
        super().__init__(num_experts=2)


def test_experts_cut_by_columns_equal_one_process(ranks4):
    model, _, _ = reference(FewExperts, batches(1), num_steps=NUM_STEPS)
    for parameters in ranks4(trained, LAYOUTS_OF_4[5], FewExperts):
        difference, name = worst(parameters, model)
        assert difference < TOLERANCE, name


def test_clipping_and_accumulation_equal_one_process(ranks4):
    model, _, _ = reference(WithMuon, batches(1), num_steps=NUM_STEPS, clip=0.05)
    for parameters in ranks4(partial(trained, accumulated=2, gradient_clip_val=0.05), LAYOUTS_OF_4[2]):
        difference, name = worst(parameters, model)
        assert difference < TOLERANCE, name


BF16_TOLERANCE = 0.05
"""Gradients of BF16 products differ by 1e-2, and Newton-Schulz makes small singular values as large as the others."""


def test_bf16_mixed_equals_one_rank(ranks1, ranks4):
    run = partial(trained, precision="bf16-mixed")
    expected = ranks1(run, {})[0]
    for parameters in ranks4(run, LAYOUTS_OF_4[2]):
        assert {value.dtype for value in parameters.values()} == {torch.float32}
        # AdamW's first steps have the size of the rate and the sign of a gradient: of vectors, other numbers.
        for name, value in ((name, value) for name, value in expected.items() if value.ndim > 1):
            assert float((parameters[name] - value).norm() / value.norm()) < BF16_TOLERANCE, name


class CountSent:
    """Elements that leave this rank, by the all-to-alls of a step."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __enter__(self) -> "CountSent":
        self.patch = pytest.MonkeyPatch()
        start = whole_matrices.start_all_to_all_rows

        def counted(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Any:
            self.numbers.append((sum(send) - send[group.rank()]) * rows.element_size())
            return start(rows, send, receive, group)

        self.patch.setattr(whole_matrices, "start_all_to_all_rows", counted)
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.undo()


def bytes_sent(degrees: dict[str, int], make_model: Any = WithMuon) -> int:
    with CountSent() as sent:
        fit(degrees, make_model, batches, shift="module", max_steps=1)
    return sum(sent.numbers)


def test_each_cut_element_travels_to_its_owner_and_back_and_whole_experts_do_not(ranks4):
    cut = sum(p.numel() for name, p in WithMuon().named_parameters() if "qkv" in name or "out.weight" in name)
    for degrees, num_ranks in ((LAYOUTS_OF_4[2], 4), (LAYOUTS_OF_4[9], 2), (LAYOUTS_OF_4[8], 1)):
        replicas = 4 // num_ranks
        expected = replicas * 2 * 4 * cut * (num_ranks - 1) // num_ranks
        assert sum(ranks4(bytes_sent, degrees)) == expected


def saved_and_resumed(degrees: dict[str, int], path: str, *, resume: bool) -> dict[str, Any]:
    """State before the steps that follow a checkpoint, and the parameters after them."""

    class Before(Callback):
        momenta: dict[str, Tensor] = {}

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3 and not self.momenta:
                state, names = trainer.optimizers[0].state, dict(pl_module.named_parameters())
                self.momenta = {
                    f"{name} {key}": whole(value).clone()
                    for name, parameter in names.items()
                    for key, value in state[parameter].items()
                }

    before = Before()
    checkpoint = ModelCheckpoint(path, every_n_train_steps=3, filename="three", save_top_k=-1)
    # One batch an epoch: the loader of a run that resumes starts anew.
    _, model, _ = fit(
        degrees, WithMuon, lambda dp: loader(BATCH, LENGTH, BATCH // dp), shift="module", max_steps=NUM_STEPS,
        max_epochs=NUM_STEPS, callbacks=(before, checkpoint),
        enable_checkpointing=True, ckpt_path=f"{path}/three.ckpt" if resume else None,
    )  # fmt: skip
    return {"momenta": before.momenta, "weights": {name: whole(p.detach()) for name, p in model.named_parameters()}}


def test_a_checkpoint_resumes_on_another_layout(ranks4, tmp_path):
    expected = ranks4(partial(saved_and_resumed, resume=False), LAYOUTS_OF_4[2], str(tmp_path))[0]
    for resumed in ranks4(partial(saved_and_resumed, resume=True), LAYOUTS_OF_4[9], str(tmp_path)):
        assert resumed["momenta"].keys() == expected["momenta"].keys() and len(resumed["momenta"]) > 20
        for name, value in expected["momenta"].items():
            assert torch.equal(resumed["momenta"][name], value), name
        for name, value in expected["weights"].items():
            torch.testing.assert_close(resumed["weights"][name], value, rtol=TOLERANCE, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "momentum": 0.8}, {"adjust_lr_fn": "match_rms_adamw"}])
@pytest.mark.parametrize("shape", [(16, 24), (40, 16), (1, 5)])
def test_one_process_equals_torch_to_the_bit(shape, options):
    theirs, ours = (nn.Parameter(torch.arange(float(shape[0] * shape[1])).view(shape).sin()) for _ in range(2))
    optimizers = (
        torch.optim.Muon([theirs], lr=0.02, **options),
        Muon([ours], lr=0.02, ns_dtype=torch.bfloat16, **options),
    )
    for step in range(5):
        theirs.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        ours.grad = theirs.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("along", ["rows", "columns", "alternate columns"])
def test_packed_and_stacked_matrices_move_as_they_do_alone(along):
    gradients = [torch.randn(2, 6, 4) for _ in range(3)]  # gate and up of three experts
    weights = [torch.randn(2, 6, 4) for _ in range(3)]
    alone = [nn.Parameter(matrix) for weight in weights for matrix in weight.clone()]
    together = nn.Parameter(torch.stack([packed(pair, along) for pair in weights]))
    for parameter, gradient in zip(alone, (g for pair in gradients for g in pair), strict=True):
        parameter.grad = gradient
    together.grad = torch.stack([packed(pair, along) for pair in gradients])
    Muon(alone, lr=0.1).step()
    Muon([{"params": [together], "num_packed": 2, "packed_along": along}], lr=0.1).step()
    expected = [packed(torch.stack(alone[2 * i : 2 * i + 2]).detach(), along) for i in range(3)]
    torch.testing.assert_close(together.detach(), torch.stack(expected), rtol=1e-6, atol=1e-6)


def packed(pair: Tensor, along: str) -> Tensor:
    if along == "rows":
        return torch.cat([*pair])
    return torch.cat([*pair], dim=1) if along == "columns" else torch.stack([*pair], dim=-1).flatten(1)


def test_an_expert_that_was_never_hit_only_decays():
    experts = nn.Parameter(torch.randn(3, 4, 6))
    before = experts.detach().clone()
    optimizer = Muon([experts], lr=0.1, weight_decay=0.5)
    experts.grad = torch.randn(3, 4, 6)
    experts.grad[1] = 0
    optimizer.step()
    torch.testing.assert_close(experts[1].detach(), before[1] * 0.95)
    assert not torch.allclose(experts[0].detach(), before[0] * 0.95, atol=1e-2)


def test_newton_schulz_makes_singular_values_alike_and_keeps_directions():
    x = torch.randn(3, 12, 20, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    result = orthogonalize(x, coefficients=KELLER_JORDAN, num_steps=10, eps=1e-7)
    values = u.mT @ result @ vh.mT
    assert 0.6 < values.diagonal(dim1=-2, dim2=-1).min() and values.diagonal(dim1=-2, dim2=-1).max() < 1.3
    assert (values - torch.diag_embed(values.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-9


def transformed(round_numel: int, dim: int) -> None:
    """Stacks of several sizes, cut unevenly, ranks without a piece included."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shards",))
    stacks = [
        torch.randn(stack, rows, columns) for stack, rows, columns in [(1, 5, 6), (2, 3, 7), (3, 5, 6), (1, 9, 2)]
    ]
    results: list[DTensor] = []
    pieces = []
    for stack in stacks:
        shards = distribute_tensor(stack, mesh, [Shard(3 + dim)])
        result = DTensor.from_local(
            torch.empty_like(shards.to_local()), mesh, [Shard(3 + dim)], shape=stack.shape, stride=stack.stride()
        )
        results.append(result)

        cut = Cut(group=mesh.get_group(), dim=dim)
        pieces.append(Piece(shape=tuple(stack.shape), cut=cut, take=shards.to_local, put=result.to_local().copy_))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_matrices, "ROUND_NUMEL", round_numel)
        transform_whole(pieces, lambda x: x / x.square().sum(dim=(-2, -1), keepdim=True))
    for stack, result in zip(stacks, results, strict=True):
        expected = stack / stack.square().sum(dim=(-2, -1), keepdim=True)
        torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("round_numel", [1, 2**20], ids=["a-matrix-a-round", "one-round"])
def test_matrices_cut_unevenly_are_whole_where_they_are_transformed(round_numel, dim, ranks4):
    ranks4(transformed, round_numel, dim)


def test_ranks_share_matrices_by_their_cost():
    assert share_out([1.0] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]
    assert share_out([1.0, 5.0, 1.0, 1.0, 2.0], 2) == [1, 0, 1, 1, 1]


def kinds(module: nn.Module, **options: Any) -> dict[str, tuple[Any, ...]]:
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        names[id(p)]: (g["algorithm"], g.get("num_packed", 1), g.get("packed_along", "rows"), g.get("weight_decay", 1))
        for g in muon_groups(module, **options)
        for p in g["params"]
    }


MATRIX, GATE_UP, DECAYED, VECTOR = (
    ("muon", 1, "rows", 1), ("muon", 2, "rows", 1), ("adamw", 1, "rows", 1), ("adamw", 1, "rows", 0.0)
)  # fmt: skip


def test_groups_of_our_model_follow_where_a_weight_stands():
    found = kinds(MoELanguageModel("tiny"))
    assert found.keys() == dict(MoELanguageModel("tiny").named_parameters()).keys()
    layer = next(name for name in found if name.endswith("experts.gate_up_proj")).removesuffix("experts.gate_up_proj")
    assert found[layer + "experts.gate_up_proj"] == GATE_UP and found[layer + "experts.down_proj"] == MATRIX
    assert found[layer + "router.weight"] == DECAYED == found["model.embed.weight"] == found["model.head.weight"]
    assert found["model.norm.weight"] == VECTOR
    assert all(kind == MATRIX for name, kind in found.items() if name.endswith("o_proj.weight"))


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("qwen3_moe", GATE_UP), ("gpt_oss", ("muon", 2, "alternate columns", 1))],
)
def test_groups_of_hugging_face_models_know_how_experts_hold_gate_and_up(model_type, expected):
    found = kinds(HuggingFaceLanguageModel(model_type))
    assert {kind for name, kind in found.items() if name.endswith("gate_up_proj")} == {expected}
    assert {kind for name, kind in found.items() if "bias" in name} <= {VECTOR}
    assert all(found[name][0] == "adamw" for name in found if "embed" in name or "lm_head" in name)
    assert any(kind == MATRIX for name, kind in found.items() if "q_proj.weight" in name)


def test_patterns_give_weights_to_adamw_and_say_what_is_packed_and_frozen_ones_are_left_out():
    model = WithMuon()
    model.decoder.blocks[1].requires_grad_(False)
    found = kinds(model, exclude=["*.out.weight"], packed={"*.qkv.weight": 3})
    assert found[DENSE + "out.weight"] == DECAYED and found[DENSE + "qkv.weight"] == ("muon", 3, "rows", 1)
    assert not any(name.startswith("decoder.blocks.1.") for name in found)


class Reads(Muon):
    """``lr`` of its groups at every step."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [*getattr(self, "seen", []), [group["lr"] for group in self.param_groups]]
        return super().step(closure)


def test_a_schedule_scales_the_rates_of_both_kinds():
    model = WithMuon()
    optimizer = Reads(muon_groups(model), lr=0.02, adamw_lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert set(optimizer.seen[0]) == {0.02, 1e-3} and set(optimizer.seen[1]) == {0.01, 5e-4}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Muon([nn.Parameter(torch.ones(3))]), r"\(3,\) is no matrix.*muon_groups"),
        (lambda: Muon([{"params": [nn.Parameter(torch.ones(3, 2))], "num_packed": 2}]), r"num_packed\(2\) must divide"),
        (lambda: Muon([{"params": [nn.Parameter(torch.ones(3))], "algorithm": "adamw"}]), r"adamw_lr\(None\)"),
        (lambda: Muon([nn.Parameter(torch.ones(3, 2))], momentum=1.0), r"momentum\(1.0\) of Muon must be at least 0"),
        (lambda: Muon([nn.Parameter(torch.ones(3, 2))], adjust_lr_fn="none"), r"adjust_lr_fn\('none'\) must be one of"),
        (lambda: Muon([{"params": [nn.Parameter(torch.ones(3, 2))], "algorithm": "sgd"}]), r"algorithm\('sgd'\)"),
        (lambda: muon_groups(nn.Linear(2, 2)), "no repeated blocks"),
        (lambda: muon_groups(WithMuon(), exclude=["*.lora"]), r"'\*.lora' of muon_groups fits no parameter"),
    ],
)
def test_errors_name_what_was_given_and_what_to_do(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


class Ours(MoELanguageModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Muon(muon_groups(self), lr=0.02, adamw_lr=1e-3)


def test_the_simulated_state_is_the_planned_one_and_the_exchange_is_seen():
    sizes = {"preset": "qwen3-30b-a3b", "layers": 2}
    with torch.device("meta"):
        model = Ours(sizes)
    counts = {name: p.numel() for name, p in model.named_parameters()}
    ids = torch.zeros(8, 64, dtype=torch.int64)
    simulated = simulate(
        lambda: Ours(sizes), ParallelDims(fsdp=8, e_fsdp=2, ep=4), {"input_ids": ids, "shift_labels": ids},
        world_size=8, local_world_size=8,
    )  # fmt: skip
    assert simulated.notes == ()
    outer = sum(counts[name] for name in ("model.embed.weight", "model.head.weight"))
    planned = (4 * sum(counts.values()) + 4 * outer) / 8  # plan/memory.py
    assert simulated.phases["optimizer"].buckets["optimizer"] == pytest.approx(planned, rel=2e-3)
    # This rank owns one of the 8 matrices, a largest one: it comes in pieces and goes back in pieces, in BF16.
    largest = max(n for name, n in counts.items() if "attention" in name)
    assert simulated.num_bytes["fsdp_cp", "all_to_all"] == 2 * 2 * largest
