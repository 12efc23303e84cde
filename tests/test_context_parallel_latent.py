"""Attention to latents of a split sequence: values and gradients of one process, no keys and values of all heads."""

import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy._torch_compat import OperationMode, tensors_in
from lightning_moe_strategy.collectives import TwoStepGroup
from lightning_moe_strategy.context_parallel.gather import gather_sequence
from lightning_moe_strategy.context_parallel.latent import EXPANDED_BYTES, _Call, attend_to_latents
from lightning_moe_strategy.context_parallel.layout import contiguous, zigzag
from lightning_moe_strategy.context_parallel.softmax import causal_attention_on_gathered
from tests.test_context_parallel_softmax import visible
from tests.traffic import noted_traffic

B, H, N, R, V, C = 2, 5, 8, 4, 7, 6
SHAPES = ["query", "latent", "rope key", "weight"]

TOLERANCE = {
    torch.float64: 1e-12,  # rounding of sums of 48 terms
    torch.float32: 1e-6,
    torch.bfloat16: 2e-2,  # 8 bits: latents, what is expanded from them, and probabilities are each rounded to 2**-9
}
"""Norm of the error over norm of the reference in float64."""


def bytes_of(heads, num_tokens, dtype):
    """Of the keys and values of so many heads."""
    return heads * B * num_tokens * (N + R + V) * dtype.itemsize


def group_called(kind):
    if kind == "one step":
        return dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("inter", "intra"))
    return TwoStepGroup(whole=dist.group.WORLD, inter=mesh.get_group("inter"), intra=mesh.get_group("intra"))


def expand(latent, rope_key, weight):
    expanded = F.linear(latent, weight).unflatten(-1, (H, N + V)).transpose(1, 2)
    return torch.cat([expanded[..., :N], rope_key[:, None].expand(-1, H, -1, -1)], -1), expanded[..., N:]


def tensors(num_tokens, dtype):
    shapes = [(B, H, num_tokens, N + R), (B, num_tokens, C), (B, num_tokens, R), (H * (N + V), C)]
    whole = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    whole[3] /= C**0.5
    return [x.to(dtype) for x in whole], torch.randn(B, H, num_tokens, V, dtype=torch.float64).to(dtype)


def sequence_dim(name):
    return 2 if name == "query" else 1


def old_way(query, latent, rope_key, weight, *, layout, group, **options):
    """All heads are expanded from the gathered latents, in autograd's sight."""
    key, value = expand(gather_sequence(latent, 1, layout, group), gather_sequence(rope_key, 1, layout, group), weight)
    return causal_attention_on_gathered(query, key, value, layout=layout, rank=group.rank(), **options)


def errors(dtype, heads, documents=((0,),), window=None, with_sinks=False, tail=False, in_steps="one step", way="new"):
    """Relative errors of the output and of every gradient on this rank, by name."""
    num_tokens, group, scale = 48, group_called(in_steps), 0.4
    layout = zigzag(num_tokens, group.size()) if heads != 2 else contiguous(num_tokens, group.size())
    whole, grad_out = tensors(num_tokens, dtype)
    sinks = torch.randn(H, dtype=torch.float64).requires_grad_() if with_sinks else None
    query, *rest = exact = [x.double().clone().requires_grad_() for x in whole]
    key, value = expand(*rest)
    scores = (query @ key.mT * scale).masked_fill(~visible(num_tokens, documents, window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(B, -1, num_tokens, 1)], -1)
    expected = scores.softmax(-1)[..., :num_tokens] @ value
    (expected * grad_out.double()).sum().backward()

    mine = layout.token_ids(group.rank())
    local = [x.index_select(sequence_dim(name), mine) for name, x in zip(SHAPES[:3], whole, strict=False)] + [whole[3]]
    if tail:
        layout = layout.with_tail_token()
        dims = [sequence_dim(name) for name in SHAPES[:3]]
        dummies = [torch.full_like(x.narrow(dim, 0, 1), 3.0) for x, dim in zip(local, dims, strict=False)]
        local = [*(torch.cat(pair, dim) for *pair, dim in zip(local, dummies, dims, strict=False)), local[3]]
    local = [x.clone().requires_grad_() for x in local]
    own_sinks = None if sinks is None else sinks.detach().to(dtype).requires_grad_()
    options = dict(scale=scale, documents=documents, window=window, sinks_H=own_sinks)
    if way == "new":
        options["expanded_bytes"] = bytes_of(heads, num_tokens + tail * group.size(), dtype)
    attend = attend_to_latents if way == "new" else old_way
    out = attend(*local, layout=layout, group=group, **options)[:, :, : len(mine)]
    (out * grad_out[:, :, mine]).sum().backward()
    found = {"out": _error(out, expected[:, :, mine])}
    for name, x, y in zip(SHAPES[:3], local, exact, strict=False):
        dim = sequence_dim(name)
        found[name] = _error(x.grad.narrow(dim, 0, len(mine)), y.grad.index_select(dim, mine))
    for name, x, y in (("weight", local[3], exact[3]), ("sinks", own_sinks, sinks)):
        if x is not None:
            dist.all_reduce(total := x.grad.double())
            found[name] = _error(total, y.grad)
    return found


def _error(got, want):
    return float((got.double() - want).norm() / want.norm())


def worst(ranks, *args):
    return max(max(found.values()) for found in ranks(errors, *args))


@pytest.mark.parametrize("heads", [1, 2, H])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values_and_gradients_equal_one_process_however_many_heads_are_expanded_at_a_time(ranks2, dtype, heads):
    assert worst(ranks2, dtype, heads) < TOLERANCE[dtype]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("documents", [((0,),), ((0, 5, 6, 30),), ((0, 11), (0, 24, 37))])
def test_documents_windows_and_sinks_equal_a_mask_in_one_process(ranks2, documents, window, with_sinks):
    """Windows shorter and longer than a segment; documents alike and different in a batch."""
    assert worst(ranks2, torch.float32, 2, documents, window, with_sinks) < 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("window", [None, 5])
def test_dummies_and_two_steps_on_four_ranks(ranks4, dtype, window):
    assert worst(ranks4, dtype, 1, ((0, 7, 29),), window, True, True, "two steps") < 3 * TOLERANCE[dtype]


def test_bf16_is_as_exact_as_expanding_all_heads_in_autograd(ranks2):
    new, old = (
        ranks2(errors, torch.bfloat16, 1, ((0,),), None, False, False, "one step", way) for way in ("new", "old")
    )
    for rank in range(2):
        for name, error in new[rank].items():
            assert error < 1.1 * old[rank][name], (name, error, old[rank][name])


class Traffic:
    """Channels and dtype of everything that is gathered and reduced."""

    def __enter__(self):
        self.gathered, self.reduced = [], []
        self.noted = noted_traffic(partial(self.note, self.gathered), partial(self.note, self.reduced))
        self.noted.__enter__()
        return self

    def __exit__(self, *error):
        self.noted.__exit__(*error)

    @staticmethod
    def note(calls, x):
        calls.append((x.shape[2:].numel(), x.dtype))


def saved_bytes_and_traffic(checkpointed, reentrant, dtype=torch.float32):
    """Bytes that autograd keeps in between; traffic of the forward and of the backward pass; whether a plain pass has
    the same gradients."""
    group, layout = dist.group.WORLD, zigzag(32, 2)
    whole, _ = tensors(16, dtype)
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    attend = partial(attend_to_latents, layout=layout, group=group, expanded_bytes=1)
    x = [t.clone().requires_grad_() for t in whole]
    with Traffic() as forward:
        if checkpointed:
            out = checkpoint(attend, *x, use_reentrant=reentrant)
        else:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = attend(*x)
    with Traffic() as backward:
        out.square().sum().backward()
    y = [t.clone().requires_grad_() for t in whole]
    attend(*y).square().sum().backward()
    equal = all(torch.equal(a.grad, b.grad) for a, b in zip(x, y, strict=True))
    return sum(storages.values()), forward.gathered, backward.gathered, backward.reduced, equal


def test_only_tensors_of_this_rank_are_kept_and_latents_travel_as_they_are(ranks2):
    numbers = B * 16 * (H * (N + R) + C + R + H * V) + H * (N + V) * C  # query, latent and rope key, out; weight
    lse = B * 16 * H
    for dtype in (torch.float32, torch.bfloat16):
        latents, sums = [(C + R, dtype)], [(C + R, torch.float32)]
        kept = numbers * dtype.itemsize + lse * 4
        expected = (kept, latents, latents, sums, True)
        assert ranks2(saved_bytes_and_traffic, False, False, dtype) == [expected] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_exact_and_gathers_once(ranks2, reentrant):
    latents = [(C + R, torch.float32)]
    assert ranks2(saved_bytes_and_traffic, True, reentrant) == [(0, latents, latents, latents, True)] * 2


class LargestTensor(OperationMode):
    numbers = 0

    def run(self, operation, args, kwargs):
        result = operation(*args, **kwargs)
        for tensor in tensors_in(result):
            # Of what lies in memory: a view of many heads may be one head expanded.
            held = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.numbers = max(self.numbers, min(held, tensor.numel()))
        return result


def largest_tensors(heads, dtype, documents):
    """Numbers in the largest tensor of a forward and backward pass, local ones aside."""
    num_tokens, group = 64, dist.group.WORLD
    whole, _ = tensors(num_tokens // 4, dtype)
    local = [x.requires_grad_() for x in whole]
    with LargestTensor() as largest:
        out = attend_to_latents(
            *local,
            layout=zigzag(num_tokens, 4),
            group=group,
            documents=documents,
            expanded_bytes=bytes_of(heads, num_tokens, dtype),
        )
        out.sum().backward()
    return largest.numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [((0,),), ((0, 5), (0, 40))], ids=["one document", "packed"])
def test_no_tensor_holds_the_keys_or_values_of_more_heads_than_are_expanded_at_a_time(ranks4, dtype, documents):
    key = B * 64 * (N + R)
    local = B * 16 * H * (N + R)
    # Heads come in even groups: of 5 in at most 3 at a time, 3 and 2.
    for heads in (1, 3, H):
        # A product of what is expanded, N + V numbers a head, is the largest.
        largest = heads * B * 64 * (N + V)
        for numbers in ranks4(largest_tensors, heads, dtype, documents):
            assert heads * key <= max(numbers, local) <= max(largest, B * 64 * (C + R), local)


class LivingKeys(OperationMode):
    """How many times keys of one head were expanded, and how many of them were in memory at a time."""

    def __init__(self):
        super().__init__()
        self.made, self.most = [], 0

    def run(self, operation, args, kwargs):
        result = operation(*args, **kwargs)
        if operation is torch.ops.aten.cat.default and result.shape == (B, 1, 32, N + R):
            self.made.append(weakref.ref(result))
            self.most = max(self.most, sum(made() is not None for made in self.made))
        return result


def living_keys():
    whole, _ = tensors(16, torch.float64)
    local = [x.requires_grad_() for x in whole]
    with LivingKeys() as keys:
        attend_to_latents(*local, layout=zigzag(32, 2), group=dist.group.WORLD, expanded_bytes=1).sum().backward()
    return len(keys.made), keys.most


def test_keys_are_freed_before_those_of_the_next_heads_are_expanded(ranks2):
    assert ranks2(living_keys) == [(2 * H, 1)] * 2


def test_the_bound_on_what_is_expanded_at_a_time_is_a_head_of_glm_at_a_million_tokens():
    call = _Call(keys=None, sight=None, scale=1.0, expanded_bytes=EXPANDED_BYTES)
    with torch.device("meta"):
        glm, million = torch.empty(64, 192 + 256, 512), torch.empty(1, 2**20, 512 + 64, dtype=torch.bfloat16)
        deepseek, short = torch.empty(128, 128 + 128, 512), torch.empty(1, 2**17, 512 + 64, dtype=torch.bfloat16)
    assert call.head_groups(million, glm) == [slice(i, i + 1) for i in range(64)]
    assert [heads.stop - heads.start for heads in call.head_groups(short, deepseek)] == [12] * 10 + [8]
    assert call.head_groups(short[:, :64], deepseek) == [slice(0, 128)]


class Products(OperationMode):
    count = 0

    def run(self, operation, args, kwargs):
        self.count += operation is torch.ops.aten.mm.default
        return operation(*args, **kwargs)


def without_gradient_of_the_weight():
    """Whether the other gradients stay the same, and how many products fewer there are."""
    whole, _ = tensors(16, torch.float32)
    attend = partial(attend_to_latents, layout=zigzag(32, 2), group=dist.group.WORLD, expanded_bytes=1)
    results, counts = [], []
    for is_frozen in (False, True):
        x = [t.clone().requires_grad_() for t in whole[:3]]
        out = attend(*x, whole[3].clone().requires_grad_(not is_frozen))
        with Products() as products:
            out.square().sum().backward()
        results.append([t.grad for t in x])
        counts.append(products.count)
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True)), counts[0] - counts[1]


def test_a_frozen_weight_costs_no_products_and_the_others_get_their_gradients(ranks2):
    assert ranks2(without_gradient_of_the_weight) == [(True, H)] * 2


class Group:
    """Two ranks, of which this process is the first: enough for what is refused before anything is gathered."""

    def rank(self):
        return 0

    def size(self):
        return 2


def shorter(index, dim):
    def change(x):
        x[index] = x[index].narrow(dim, 0, x[index].shape[dim] - 1)

    return change


def other_dtype(x):
    x[1] = x[1].double()


def flat(x):
    x[0] = x[0].flatten(0, 1)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (shorter(0, 2), {}, r"query \(2, 5, 3, 12\), latent \(2, 4, 6\).*Cross attention cannot be split"),
        (shorter(1, 0), {}, "the batch must agree"),
        (shorter(3, 0), {}, r"up_weight \(74, 6\).*heads\(5\) \* \(key channels without position\(8\)"),
        (shorter(3, 1), {}, "rows of 6 channels"),
        (other_dtype, {}, r"query is torch\.float32, latent torch\.float64, up_weight torch\.float32: cast"),
        (flat, {}, r"want \[batch, heads, tokens, channels\]"),
        (lambda x: None, {"documents": ((0,),) * 3}, "documents are given for 3 sequences, but the batch has 2"),
        (lambda x: None, {"window": 0}, r"window\(0\) must be at least 1"),
        (lambda x: None, {"layout": zigzag(12, 2)}, "4 tokens along its sequence dim"),
    ],
)
def test_errors_name_what_disagrees(change, options, message):
    x, _ = tensors(4, torch.float32)
    change(x)
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        attend_to_latents(*x, **(dict(layout=zigzag(8, 2), group=Group()) | options))
