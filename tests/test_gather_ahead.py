"""What attention gathers travels while queries are computed: when it is issued and waited for; nothing else changes.

Every collective of a model whose MLPs are dense is one of attention.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_moe_strategy import collectives
from lightning_moe_strategy._torch_compat import OperationMode, is_asynchronous
from lightning_moe_strategy.collectives import (
    TwoStepGroup,
    all_gather_in_steps,
    observed_waits,
    reduce_scatter_in_steps,
    start_gather_in_steps,
    start_reduce_scatter_in_steps,
)
from lightning_moe_strategy.context_parallel import functions, hugging_face_sparse, latent
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.ahead import GatheredAhead
from lightning_moe_strategy.context_parallel.gather import all_gather_natural
from lightning_moe_strategy.context_parallel.layout import zigzag
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.transformer import MoETransformer
from lightning_moe_strategy.recompute import recompute_blocks
from lightning_moe_strategy.simulation.issue import AheadWait
from lightning_moe_strategy.units import find_blocks
from tests.families import make_model as make_hugging_face_model
from tests.test_simulation_timeline import collective, compute, run

TOKENS, BATCH = 16, 2
SIZES = {"vocab_size": 64, "hidden": 48, "heads": 3, "layers": 2, "dense_first_layers": 2}
SPARSE = SIZES | {"preset": "tiny-dsa", "index_heads": 2, "index_top_k": 5}
LATENT = SIZES | {"preset": "tiny-mla"}


class GatheredAtOnce(GatheredAhead):
    """As it was: gathered where it is read, the gradient summed where it is made."""

    def __init__(self, x, dim, layout, group):
        self.local, self.way_back = x, None
        self.arguments = dim, layout.for_local_length(x.shape[dim]), group

    def gathered(self):
        return all_gather_natural(self.local.detach(), *self.arguments)


def group_called(kind):
    if kind == "one step":
        return dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("inter", "intra"))
    return TwoStepGroup(whole=dist.group.WORLD, inter=mesh.get_group("inter"), intra=mesh.get_group("intra"))


def split(model, kind="one step", recompute=False):
    """The model over the ranks, and the tokens and positions of this one."""
    cp = ContextParallel(group_called(kind))
    adapt_attention(model, find_blocks(model), cp)
    own = zigzag(TOKENS, cp.degree).token_ids(cp.rank).expand(BATCH, -1)
    cp.sequence = LocalSequence(layout=zigzag(TOKENS, cp.degree), num_tokens=TOKENS, position_ids_BL=own)
    if recompute:
        recompute_blocks(model, find_blocks(model), {})
    return model, own


def make_ours(sizes):
    torch.manual_seed(3)
    model = MoETransformer(ModelConfig.resolve(sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


class Collectives(OperationMode):
    """Every collective below autograd: its name, bytes, and whether it is waited for at once."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def run(self, operation, args, kwargs):
        if operation.namespace == "c10d":
            self.seen.append((operation._opname, args[0].nbytes, str(args[0].dtype)))
        return operation(*args, **kwargs)


def gradients(make, way, kind, recompute):
    """Logits, gradients and collectives of one step; ``way``: whether gathers go ahead."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "at once":
            for module in (latent, functions, hugging_face_sparse):
                patch.setattr(module, "GatheredAhead", GatheredAtOnce)
        model, own = split(make(), kind, recompute)
        with Collectives() as collectives_seen:
            out = logits(model, own)
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], collectives_seen.seen


def logits(model, own):
    if isinstance(model, MoETransformer):
        return model(own % 64, own)
    return model(input_ids=own % 64, position_ids=own).logits


def make_sparse():
    return make_ours(SPARSE)


def make_latent():
    return make_ours(LATENT)


def make_glm():
    return make_hugging_face_model("glm_moe_dsa")


def make_deepseek():
    return make_hugging_face_model("deepseek_v3")


def same_both_ways(make, kind, recompute):
    (ahead, seen), (at_once, seen_at_once) = (gradients(make, way, kind, recompute) for way in ("ahead", "at once"))
    assert len(ahead) == len(at_once) > 5
    return all(map(torch.equal, ahead, at_once)), seen, sorted(seen) == sorted(seen_at_once)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [make_sparse, make_latent, make_glm, make_deepseek])
def test_results_are_bitwise_those_of_gathers_that_are_waited_for_at_once(ranks2, make, recompute):
    """And as many bytes are moved, by collectives in one order on all ranks."""
    results = ranks2(same_both_ways, make, "one step", recompute)
    assert all(equal and same_traffic for equal, _, same_traffic in results)
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("make", [make_sparse, make_latent, make_glm])
def test_two_steps_are_bitwise_the_same_too(ranks4, make):
    results = ranks4(same_both_ways, make, "two steps", True)
    assert all(equal and same_traffic for equal, _, same_traffic in results)
    assert all(seen == results[0][1] for _, seen, _ in results)


class Events(OperationMode):
    """When collectives start and are waited for, by what they carry, and what is computed in between."""

    def __init__(self, names):
        """``names`` by the number of channels."""
        super().__init__()
        self.names, self.seen, self.running = names, [], {}

    def run(self, operation, args, kwargs):
        result = operation(*args, **kwargs)
        if operation.namespace == "c10d":
            what = f"{'reduce' if 'reduce' in operation._opname else 'gather'} {self.names[args[0].shape[-1]]}"
            if is_asynchronous(args):
                self.running[id(args[0])] = what
            self.seen.append(f"{'start' if is_asynchronous(args) else 'do'} {what}")
        elif operation is torch.ops.lightning_moe.select_keys.default:
            self.seen.append("select")
        elif operation is torch.ops.lightning_moe.sparse_attention.default:
            self.seen.append("attend")
        return result

    def waited(self, result):
        self.seen.append(f"read {self.running.pop(id(result))}")


def events(make):
    """Of the forward and of the backward pass of two recomputed layers."""
    model, own = split(make(), recompute=True)
    config = model.config
    latents, index_key = (32 + 8, 16) if isinstance(model, MoETransformer) else (
        config.kv_lora_rank + config.qk_rope_head_dim, config.index_head_dim
    )  # fmt: skip
    events = Events({latents: "latent", index_key: "index key"})
    for name, module in model.named_modules():
        if name.endswith(("q_proj.up", "self_attn.q_b_proj")):
            module.register_forward_hook(lambda *_: events.seen.append("queries"))
            module.weight.register_post_accumulate_grad_hook(lambda _: events.seen.append("gradient of queries"))
    with events, observed_waits(events.waited):
        out = logits(model, own)
        forward, events.seen = events.seen, []
        out.square().sum().backward()
    assert not events.running
    return forward, events.seen


def test_index_keys_and_then_latents_travel_while_our_queries_are_computed(ranks2):
    """In a recompute, which has the chosen keys, the latents alone."""
    for forward, backward in ranks2(events, make_sparse):
        assert forward[:7] == [
            "start gather index key", "start gather latent", "queries",
            "read gather index key", "select", "read gather latent", "attend",
        ]  # fmt: skip
        assert backward[:4] == ["start gather latent", "queries", "read gather latent", "attend"]


def test_latents_of_ours_travel_while_queries_are_computed(ranks2):
    for passes in ranks2(events, make_latent):
        for seen in passes:
            assert seen[:3] == ["start gather latent", "queries", "read gather latent"]


def test_latents_of_hugging_face_travel_while_keys_are_selected_and_not_behind_queries(ranks2):
    """Their modules compute the queries first: what is left to travel behind is the choice of keys."""
    for forward, _ in ranks2(events, make_glm):
        assert forward[:7] == [
            "queries", "start gather index key", "start gather latent",
            "read gather index key", "select", "read gather latent", "attend",
        ]  # fmt: skip


@pytest.mark.parametrize("make", [make_sparse, make_latent])
def test_gradients_of_latents_travel_while_those_of_queries_are_computed(ranks2, make):
    for _, backward in ranks2(events, make):
        first = backward.index("start reduce latent")
        assert backward[first : first + 3] == ["start reduce latent", "gradient of queries", "read reduce latent"]


def steps_of_two(starts, at_once):
    group = group_called("two steps")
    x = torch.arange(8.0)[:, None] + dist.get_rank()
    with Collectives() as before:
        transfer = starts(x, group)
    with Collectives() as after:
        result = transfer.wait()
    return torch.equal(result, at_once(x, group)), len(before.seen), len(after.seen)


@pytest.mark.parametrize(
    ("starts", "at_once"),
    [(start_gather_in_steps, all_gather_in_steps), (start_reduce_scatter_in_steps, reduce_scatter_in_steps)],
)
def test_on_gloo_the_second_step_is_issued_where_the_result_is_read(ranks4, starts, at_once):
    assert ranks4(steps_of_two, starts, at_once) == [(True, 1, 1)] * 4


def failed_between():
    """An error in the queries, behind the issue of the gather: what is left, and whether the next step is right."""
    model, own = split(make_latent())
    expected = logits(model, own)
    queries = model.layers[0].attention.q_proj.up
    transfers = []
    begin = collectives.Transfer._begin

    def noted(self, x):
        transfers.append(weakref.ref(self))
        begin(self, x)

    def fail(*_):
        raise FloatingPointError("in the queries")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives.Transfer, "_begin", noted)
        handle = queries.register_forward_pre_hook(fail)
        for _ in range(3):
            with pytest.raises(FloatingPointError):
                logits(model, own)
        handle.remove()
    gc.collect()
    left = [transfer for transfer in transfers if transfer() is not None]
    return len(transfers), len(left), torch.equal(logits(model, own), expected)


def test_an_error_between_issue_and_wait_leaves_nothing_behind(ranks2):
    assert ranks2(failed_between) == [(3, 0, True)] * 2


def read_by_others_too():
    """The gradient of a sequence that somebody besides the attention reads, and whether two backward passes add up."""
    x = torch.randn(1, 8, 3, dtype=torch.float64, requires_grad=True)
    ahead = GatheredAhead(x, 1, zigzag(8 * dist.get_world_size(), dist.get_world_size()), dist.group.WORLD)
    whole = ahead.gathered()

    class Reader(torch.autograd.Function):
        @staticmethod
        def forward(ctx, local):
            ctx.way_back = ahead.way_back
            return whole.sum()

        @staticmethod
        def backward(ctx, grad):
            return ctx.way_back.start(torch.full_like(whole, float(grad)), whole.dtype)

    out = Reader.apply(ahead.local) + 5 * ahead.local.sum()
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    return bool((once == dist.get_world_size() + 5).all()), torch.equal(x.grad, 2 * once)


def test_other_gradients_of_the_same_tokens_and_a_second_backward_pass_add_up(ranks2):
    assert ranks2(read_by_others_too) == [(True, True)] * 2


def started(seconds: int, number: int, axis: str = "cp", **of: Any) -> Any:
    issue = collective("all_gather", axis, seconds, group=of.pop("group", axis))
    return type(issue)(phase="", moment=0, collective=issue.collective, number=number, **of)


def read(number: int) -> AheadWait:
    return AheadWait(phase="", moment=0, number=number)


def test_simulated_gathers_hide_behind_what_is_computed_before_they_are_read():
    hidden = run(started(3, 0), compute(4), read(0), compute(1))
    exposed = run(started(3, 0), compute(2), read(0), compute(1))
    assert (hidden.seconds.step, hidden.seconds.exposed) == (5, {})
    assert (exposed.seconds.step, exposed.seconds.exposed) == (4, {"cp": 1})


def test_a_simulated_second_step_starts_when_the_first_has_ended():
    first, second = started(2, 0, "e_fsdp", group="inter"), started(3, 1, "cp", follows=0, group="intra")
    timeline = run(first, second, compute(4), read(0), read(1), compute(1))
    assert timeline.seconds.step == 5 + 1 and timeline.seconds.exposed == {"cp": 1}


def test_simulated_gathers_of_one_group_run_in_the_order_of_issue():
    timeline = run(started(1, 0), started(4, 1), compute(2), read(0), compute(2), read(1))
    assert timeline.seconds.step == 5 and timeline.seconds.exposed == {"cp": 1}
