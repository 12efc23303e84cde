"""Ten faults, planted into the ranks' own code: ``verify`` fails, and names the module and the cause of each."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_moe_strategy.placement as placement
import lightning_moe_strategy.summed_gradients as summed_gradients
import lightning_moe_strategy.token_mean as token_mean
from lightning_moe_strategy import ZigZagContextParallel, verify
from lightning_moe_strategy.callbacks import zigzag
from lightning_moe_strategy.context_parallel import batch, softmax
from lightning_moe_strategy.context_parallel.layout import take_segments
from lightning_moe_strategy.context_parallel.visible import ONE_DOCUMENT
from lightning_moe_strategy.expert_parallel import experts
from lightning_moe_strategy.sharding import local_tensor
from lightning_moe_strategy.verifying import check
from tests.flavour import LightningDataModule
from tests.modules import HuggingFaceLanguageModel, RandomTokens

CP2_EP2 = dict(fsdp=1, cp=2, e_fsdp=1, ep=2)
E_FSDP2 = dict(fsdp=2, cp=1, e_fsdp=2, ep=1)
D_REP2 = dict(d_rep=2, fsdp=1, cp=1, e_fsdp=2, ep=1)
LENGTH = 22
STARTS = (0, 5, 13)


class Texts(LightningDataModule):
    def __init__(self, *, packed: bool = False) -> None:
        super().__init__()
        self.data = Packed() if packed else RandomTokens(16, LENGTH, ragged=False)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=2)


class Packed(Dataset):
    """Three documents in a row: their positions start again."""

    def __init__(self) -> None:
        self.tokens = RandomTokens(16, LENGTH, ragged=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ends = (*STARTS[1:], LENGTH)
        positions = torch.cat([torch.arange(end - start) for start, end in zip(STARTS, ends, strict=True)])
        return {**self.tokens[index], "position_ids": positions}


@contextlib.contextmanager
def no_reduce_in_backward():
    """A gather that hands every rank the gradient of its own tokens, without what others made of them."""

    def own_part(grad, dim, layout, group):
        return take_segments(grad, dim, layout.segments[group.rank()])

    with mock.patch.object(softmax, "reduce_scatter_natural", own_part):
        yield


@contextlib.contextmanager
def labels_shifted_after_the_split():
    original = zigzag.split_items

    def split(items, fields, **options):
        local, sequence, counts = original(items, fields, **options | dict(shift="none"))
        shifted = batch._shifted(local["labels"], -100)
        counts = batch.replace(counts, num_loss_tokens=(shifted != -100).sum())
        sequence = batch.replace(sequence, shift="model", shift_labels_BL=shifted)
        return local, sequence, counts

    with mock.patch.object(zigzag, "split_items", split):
        yield


@contextlib.contextmanager
def positions_counted_on_the_rank():
    original = zigzag.split_items

    def split(items, fields, **options):
        local, sequence, counts = original(items, fields, **options)
        positions = torch.arange(local["input_ids"].shape[1]).expand_as(local["input_ids"])
        local["position_ids"] = positions
        return local, batch.replace(sequence, position_ids_BL=positions), counts

    with mock.patch.object(zigzag, "split_items", split):
        yield


@contextlib.contextmanager
def a_mean_over_cp():
    original = token_mean._over_ranks
    with mock.patch.object(token_mean, "_over_ranks", lambda *args: original(*args) * 2):
        yield


@contextlib.contextmanager
def experts_divided_by_e_fsdp():
    original = summed_gradients.SummedGradients._mean_over_tokens

    def divide(self):
        is_due = bool(self._token_mean._micro_batches)
        original(self)
        for module in self.experts.values() if is_due else ():
            for parameter in module.parameters():
                local_tensor(parameter.grad).div_(self.dims.e_fsdp)

    with mock.patch.object(summed_gradients.SummedGradients, "_mean_over_tokens", divide):
        yield


@contextlib.contextmanager
def routers_in_bf16():
    original = placement.plan_units

    def plan(*args, separate_routers, **options):
        return original(*args, separate_routers=False, **options)

    with mock.patch.object(placement, "plan_units", plan):
        yield


@contextlib.contextmanager
def an_expert_without_gradient():
    original = experts._local_parameters

    def local(module, num_local_experts):
        parts = original(module, num_local_experts)
        if torch.distributed.get_rank() == 1:
            parts = {name: torch.cat([p[:1].detach(), p[1:]]) for name, p in parts.items()}
        return parts

    with mock.patch.object(experts, "_local_parameters", local):
        yield


@contextlib.contextmanager
def a_replica_that_takes_no_step():
    original = summed_gradients.SummedGradients.optimizer_step

    def step(self, optimizer, closure, model=None, **options):
        if torch.distributed.get_rank() == 1:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        return original(self, optimizer, closure, model, **options)

    with mock.patch.object(summed_gradients.SummedGradients, "optimizer_step", step):
        yield


@contextlib.contextmanager
def documents_that_see_one_another():
    original = zigzag.split_items

    def split(items, fields, **options):
        local, sequence, counts = original(items, fields, **options)
        return local, batch.replace(sequence, documents=ONE_DOCUMENT), counts

    with mock.patch.object(zigzag, "split_items", split):
        yield


@contextlib.contextmanager
def counted_again_under_recompute():
    with mock.patch.object(experts, "in_backward", lambda: False):
        yield


LAYER = "model.model.layers"
FAULTS = {
    "missing gather in backward": (no_reduce_in_backward, CP2_EP2, {}, f"{LAYER}.1.self_attn.v_proj", "its reduce"),
    "labels shifted after the split": (labels_shifted_after_the_split, CP2_EP2, {}, "training_step", "labels shifted"),
    "local positions": (positions_counted_on_the_rank, CP2_EP2, {}, "model.model.rotary_emb", "Positions counted"),
    "mean over cp": (a_mean_over_cp, CP2_EP2, {}, "model.lm_head", "1/2 of what they should be: a mean over cp(2)"),
    "experts divided by e_fsdp": (
        experts_divided_by_e_fsdp, E_FSDP2, {}, f"{LAYER}.1.mlp.experts",
        "gradients of all experts are 1/2 of what they should be: a mean over e_fsdp(2)",
    ),
    "router in bf16": (
        routers_in_bf16, CP2_EP2, dict(precision="bf16-mixed"), f"{LAYER}.0.mlp.gate", "router that is not in FP32"
    ),
    "dropped expert gradient": (
        an_expert_without_gradient, CP2_EP2, {}, f"{LAYER}.1.mlp.experts", "dropped: those of expert 2"
    ),
    "stale replica": (
        a_replica_that_takes_no_step, D_REP2, {}, "model.model.embed_tokens", "stale replica: ranks of d_rep(2)"
    ),
    "document leak": (
        documents_that_see_one_another, CP2_EP2, dict(packed=True), f"{LAYER}.0.self_attn", "document leak"
    ),
    "double count": (
        counted_again_under_recompute, CP2_EP2, dict(strategy=dict(recompute="block")), f"{LAYER}.0.mlp.experts",
        "counted twice",
    ),
}  # fmt: skip
FAST = ("missing gather in backward", "experts divided by e_fsdp", "document leak")
NAMES = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in FAULTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_found_by_module_and_cause(name):
    plant, layout, options, module, cause = FAULTS[name]
    result = verified(layout, plant, **options)
    assert not result.passed, result.text
    assert result.first_wrong_module == module, result.text
    assert cause in str(result.likely_cause), result.text
    assert result.rows[0].is_wrong and result.rows[0].severity >= result.rows[-1].severity
    for part in (f"First wrong module: {result.first_wrong_module}.", f"Likely cause: {result.likely_cause}"):
        assert part in result.text


def verified(layout, plant=None, *, packed=False, **options):
    """Of a small model of transformers; the fault is in the ranks alone."""
    run_rank = check.run_rank

    def planted(*args):
        with plant():
            run_rank(*args)

    torch.manual_seed(0)
    # Without a cache, which a training does not need, transformers keeps packed documents apart.
    module, data = HuggingFaceLanguageModel(initializer_range=0.1, use_cache=False), Texts(packed=packed)
    with mock.patch.object(check, "run_rank", planted if plant else run_rank):
        return verify(module, data, layout, zigzag=ZigZagContextParallel(), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (CP2_EP2, {}),
        (CP2_EP2, dict(packed=True)),
        (CP2_EP2, dict(precision="bf16-mixed")),
        (D_REP2, dict(precision="bf16-true")),
        (E_FSDP2, dict(strategy=dict(recompute="block"))),
    ],
)
def test_without_a_fault_the_same_passes(layout, options):
    result = verified(layout, **options)
    assert result.passed, result.text
