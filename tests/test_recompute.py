"""Recompute changes memory and nothing else: gradients, routing and communication are those of a plain backward."""

import copy
import gc
import weakref
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_moe_strategy import FSDPCPEPStrategy, MoELanguageModel
from lightning_moe_strategy._torch_compat import in_backward
from lightning_moe_strategy.expert_parallel.all_to_all import AllToAllDispatcher
from lightning_moe_strategy.expert_parallel.dispatch import LocalDispatcher
from lightning_moe_strategy.expert_parallel.experts import attach, find_experts, routing_observers
from lightning_moe_strategy.expert_parallel.splits import SplitMemory
from lightning_moe_strategy.kernels import key_selection
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.transformer import MoETransformer
from lightning_moe_strategy.recompute import recompute_blocks
from lightning_moe_strategy.units import find_blocks, find_routers
from tests import test_communication
from tests.modules import VOCABULARY, HuggingFaceLanguageModel, PlainDecoder, PlainLanguageModel, loader
from tests.parity import LAYOUTS_OF_4, fit

CP2_EP2, CP4_EP4, NO_CP_EP4 = LAYOUTS_OF_4[2], LAYOUTS_OF_4[4], LAYOUTS_OF_4[0]
BLOCK = {"recompute": "block"}

make_ours = partial(MoELanguageModel, {"preset": "tiny-mla", "vocab_size": VOCABULARY, "hidden": 32}, warmup_steps=0)
# As many index heads as experts: the indexer's head weights are a product of the router's shape.
DSA = {"preset": "tiny-dsa", "vocab_size": VOCABULARY, "hidden": 32, "index_heads": 8, "index_top_k": 5}
make_dsa = partial(MoELanguageModel, DSA, warmup_steps=0)
make_qwen = partial(HuggingFaceLanguageModel, "qwen3_moe")
make_deepseek = partial(HuggingFaceLanguageModel, "deepseek_v3", topk_group=2, n_group=2, num_hidden_layers=3)


class Dropping(PlainLanguageModel):
    """Draws random numbers in every block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.decoder.blocks:
            block.out = nn.Sequential(block.out, nn.Dropout(0.5))


MODELS = {
    "ours": (make_ours, "module"),
    "dsa": (make_dsa, "module"),
    "qwen3_moe": (make_qwen, "model"),
    "deepseek_v3": (make_deepseek, "model"),
    "plain": (PlainLanguageModel, "module"),
    "dropout": (Dropping, "module"),
}


def gradients(degrees: dict[str, Any], model: str, precision: str = "32-true") -> list[dict[str, Tensor]]:
    make_model, shift = MODELS[model]
    _, _, keep = fit(degrees, make_model, lambda dp: loader(16, 24, 8 // dp), shift=shift, max_steps=2,
                     precision=precision)  # fmt: skip
    return keep.steps


def unequal_gradients(degrees: dict[str, Any], model: str, precision: str) -> list[str]:
    kept = gradients(degrees, model, precision)
    recomputed = gradients(degrees | BLOCK, model, precision)
    assert len(kept) == len(recomputed) == 2
    return different(kept, recomputed)


def different(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> list[str]:
    names = []
    for ours, theirs in zip(some, others, strict=True):
        assert ours.keys() == theirs.keys()
        names += [name for name in ours if not torch.equal(ours[name], theirs[name])]
    return names


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ("ours", CP2_EP2),
        ("ours", NO_CP_EP4),
        ("dsa", CP4_EP4),
        ("dsa", NO_CP_EP4),
        ("qwen3_moe", CP2_EP2),
        ("deepseek_v3", CP4_EP4),
        ("plain", CP2_EP2),
        ("dropout", NO_CP_EP4),
    ],
)
def test_gradients_are_bitwise_those_of_kept_activations(model, degrees, precision, ranks4):
    assert ranks4(unequal_gradients, degrees, model, precision) == [[]] * 4


class NoisyReplays:
    """A router's forward that sees noise in place of its input whenever it runs inside a backward pass."""

    hits = 0

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Any:
        if in_backward():
            NoisyReplays.hits += 1
            x = x + torch.randn_like(x)
        return self.forward(x)


def with_noisy_replays(make_model: Any) -> Any:
    model = make_model()
    for router in find_routers(model, find_experts(model)).values():
        router.forward = NoisyReplays(router.forward)
    return model


def changed_by_noise(degrees: dict[str, Any], model: str) -> tuple[list[str], int]:
    calm = gradients(degrees | BLOCK, model)
    NoisyReplays.hits = 0
    MODELS["noisy"] = (partial(with_noisy_replays, MODELS[model][0]), MODELS[model][1])
    # The first step: from there on the router weights themselves differ.
    return different(calm[:1], gradients(degrees | BLOCK, "noisy")[:1]), NoisyReplays.hits


@pytest.mark.parametrize("model", ["ours", "qwen3_moe", "deepseek_v3", "plain"])
def test_noise_in_a_routers_recompute_changes_nothing_but_its_own_weights_gradient(model, ranks4):
    """That gradient is a product with the router's input, which is too large to keep (D numbers per token)."""
    for changed, hits in ranks4(changed_by_noise, CP2_EP2, model):
        assert hits > 0
        assert changed and all(name.endswith(("router.weight", "gate.weight")) for name in changed)


def routing_of_a_fit(degrees: dict[str, Any]) -> tuple[int, int, int]:
    """Rows routed, observed forwards, and all-to-alls of counts and of ids, of two steps."""
    rows, count_exchanges = [], []
    all_to_all = dist.all_to_all_single

    def watched(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not sent.dtype.is_floating_point:
            count_exchanges.append(1)
        return all_to_all(received, sent, *args, **kwargs)

    class Observe(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            for module in find_experts(pl_module).values():
                routing_observers(module).append(lambda ids_TK: rows.append(ids_TK.numel()))

    dist.all_to_all_single = watched
    try:
        fit(degrees, make_qwen, lambda dp: loader(16, 24, 8 // dp), shift="model", max_steps=2,
            callbacks=(Observe(),))  # fmt: skip
    finally:
        dist.all_to_all_single = all_to_all
    return sum(rows), len(rows), len(count_exchanges)


def test_routing_is_counted_and_agreed_upon_once(ranks4):
    num_layers, num_steps, tokens_per_rank, top_k = 2, 2, 8 * 24 // 4, 2
    forwards = num_steps * num_layers
    expected = (forwards * tokens_per_rank * top_k, forwards, 2 * forwards)
    assert ranks4(routing_of_a_fit, CP2_EP2) == [expected] * 4
    assert ranks4(routing_of_a_fit, CP2_EP2 | BLOCK) == [expected] * 4


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_each_unit_is_gathered_once_in_each_pass_that_reads_it_and_reduced_once(precision, ranks4):
    for result in ranks4(test_communication.train, CP2_EP2 | BLOCK, test_communication.make_plain, precision):
        for step in result["steps"]:
            test_communication.assert_gathered_and_reduced_once(step, result["units"])
        assert result["left"] == [] and result["validated"] == []


class NewStorages(TorchDispatchMode):
    """What was computed and is still in memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.weights:
                    self.storages[storage._cdata] = weakref.ref(storage)
        return result

    def num_bytes(self) -> int:
        alive = (reference() for reference in self.storages.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


def bytes_kept_per_layer(recompute: bool, num_tokens: int) -> float:
    """Bytes a block more keeps between forward and backward, in one process."""

    def kept(num_layers: int) -> int:
        model = PlainDecoder(num_layers=num_layers, length=num_tokens)
        if recompute:
            experts = find_experts(model)
            for module in experts.values():
                attach(module, LocalDispatcher(4))
            recompute_blocks(model, find_blocks(model), experts)
        with NewStorages(model) as storages:
            loss = model(torch.zeros(1, num_tokens, dtype=torch.int64)).sum()
            num_bytes = storages.num_bytes()
        loss.backward()
        return num_bytes

    return kept(3) - kept(2)


def test_a_recomputed_block_keeps_its_input_logits_and_choice_alone():
    width, num_experts, top_k, num_tokens = 16, 4, 2, 64
    block_input = num_tokens * width * 4
    routing = num_tokens * (4 * num_experts + (4 + 8) * top_k)
    assert bytes_kept_per_layer(True, num_tokens) == block_input + routing
    assert bytes_kept_per_layer(False, num_tokens) > 10 * (block_input + routing)


def make_recomputed_dsa(**changes: Any) -> MoETransformer:
    torch.manual_seed(0)
    model = MoETransformer(ModelConfig.resolve(DSA | changes))
    experts = find_experts(model)
    for module in experts.values():
        attach(module, LocalDispatcher(8))
    recompute_blocks(model, find_blocks(model), experts)
    return model


def test_keys_are_selected_in_the_first_pass_alone(monkeypatch):
    selections, select = [], key_selection._select_by_blocks
    monkeypatch.setattr(
        key_selection, "_select_by_blocks", lambda *args: (selections.append(in_backward()), select(*args))[1]
    )
    model, plain = make_recomputed_dsa(), MoETransformer(ModelConfig.resolve(DSA))
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, VOCABULARY, (2, 12))
    for each in (model, plain):
        selections.clear()
        loss = each(ids).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert selections == [False, False]  # layers 0 and 2
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad) if mine.requires_grad else mine.grad is theirs.grad is None
    with torch.no_grad():
        assert torch.equal(model(ids), plain(ids))


HF_DSA = dict(
    index_n_heads=4, index_head_dim=16, index_topk=5, q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1, num_key_value_heads=4, num_hidden_layers=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes", "num_indexers"),
    [
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense"] * 3}, 2),
        ("deepseek_v32", {"first_k_dense_replace": 3}, 3),
    ],
)
def test_hugging_face_indexers_select_in_the_first_pass_alone(model_type, changes, num_indexers):
    torch.manual_seed(0)
    plain = HuggingFaceLanguageModel(model_type, **HF_DSA, **changes)
    model = copy.deepcopy(plain)
    selections: list[bool] = []
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            module.k_norm.register_forward_hook(lambda *args: selections.append(in_backward()))
    recompute_blocks(model, find_blocks(model), {})
    batch = {"input_ids": torch.randint(VOCABULARY, (2, 24)), "labels": torch.randint(VOCABULARY, (2, 24))}
    for each in (model, plain):
        each.model(**batch, use_cache=False).loss.backward()
    assert selections == [False] * num_indexers
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is theirs.grad is None or torch.equal(mine.grad, theirs.grad)


class BusierReplays:
    """An indexer that a replay of its block would call twice."""

    def __init__(self, attention: nn.Module) -> None:
        self.attention, self.forward = attention, attention.forward

    def __call__(self, *args: Any) -> Any:
        if in_backward():
            self.attention.indexer(*args[:1], *args[:2])
        return self.forward(*args)


def test_a_replay_that_selects_more_often_is_an_error():
    torch.manual_seed(0)
    model = MoETransformer(ModelConfig.resolve(DSA | {"dense_first_layers": 4}))
    attention: Any = model.layers[0].attention
    attention.forward = BusierReplays(attention)
    recompute_blocks(model, find_blocks(model), {})
    with pytest.raises(RuntimeError, match=r"A recompute routed more often than the first pass did \(select_keys\)"):
        model(torch.zeros(1, 12, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize(("every", "num_indexers"), [(2, 2), (4, 1), (1, 4)])
def test_one_tensor_of_keys_is_kept_per_indexer_and_none_by_layers_that_share(every, num_indexers):
    model = make_recomputed_dsa(index_every=every)
    num_tokens, top_k = 40, DSA["index_top_k"]
    with NewStorages(model) as storages:
        loss = model(torch.zeros(1, num_tokens, dtype=torch.int64)).sum()
        gc.collect()
        sizes = [s.nbytes() for s in (reference() for reference in storages.storages.values()) if s is not None]
    # No other tensor has this size: hidden states have 128 bytes a token, logits of 8 experts 32, ids and scores 24.
    assert sizes.count(num_tokens * top_k * 4) == num_indexers
    loss.backward()


def test_only_a_block_that_draws_has_its_generator_wound_back():
    torch.manual_seed(0)
    block = Draws()
    recompute_blocks(nn.ModuleList([block]), {"0": block}, {})
    first = block(torch.ones(8, requires_grad=True))
    after_forward = torch.get_rng_state()
    first.sum().backward()
    assert torch.equal(torch.get_rng_state(), after_forward)
    assert torch.equal(*block.masks), "the replay drew other numbers"


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(8)
        self.masks.append(mask)
        return (x * self.weight).sin() * mask


def test_a_retained_graph_is_replayed_by_every_backward():
    torch.manual_seed(0)
    model, plain = PlainDecoder(), PlainDecoder()
    plain.load_state_dict(model.state_dict())
    recompute_blocks(model, find_blocks(model), find_experts(model))
    ids = torch.randint(0, VOCABULARY, (2, 12))
    for each in (model, plain):
        loss = each(ids).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def changed_counts() -> str:
    dispatcher = AllToAllDispatcher(4, dist.group.WORLD)
    memory = SplitMemory()
    ids = torch.zeros(3, 1, dtype=torch.int64)
    with dispatcher.remember_splits(memory, replaying=False):
        dispatcher.plan(ids)
    with dispatcher.remember_splits(memory, replaying=True):
        dispatcher.plan(ids)
    try:
        with dispatcher.remember_splits(memory, replaying=True):
            dispatcher.plan(ids + 1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_replay_that_chose_other_experts_is_an_error_and_not_a_wrong_result(ranks2):
    assert all("A recompute chose other experts" in error for error in ranks2(changed_counts))


def test_a_wrong_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"recompute\('blocks'\) must be one of 'none', 'block'"):
        FSDPCPEPStrategy(recompute="blocks")


def test_a_model_that_checkpoints_itself_is_refused():
    model = make_qwen()
    model.model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing on and recompute is 'block'"):
        recompute_blocks(model, find_blocks(model), find_experts(model))


def fit_again_without_recompute() -> str:
    make_loader = partial(_half, 8)
    _, model, _ = fit(CP2_EP2 | BLOCK, PlainLanguageModel, make_loader, shift="module")
    try:
        fit(CP2_EP2, lambda: model, make_loader, shift="module")
    except ValueError as error:
        return str(error)
    return ""


def _half(num_samples: int, dp: int) -> Any:
    return loader(num_samples, 24, 8 // dp)


def test_a_second_trainer_with_another_recompute_is_refused(ranks4):
    assert all("with recompute 'block', now 'none'" in error for error in ranks4(fit_again_without_recompute))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_a_hugging_face_model_fills_no_cache_that_a_replay_would_fill_again(model_type):
    batch = {"input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None]}
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = HuggingFaceLanguageModel(model_type).model
        if recompute:
            recompute_blocks(model, {f"layers.{i}": layer for i, layer in enumerate(model.model.layers)}, {})
        model(**batch).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert not different(*([each] for each in found))
