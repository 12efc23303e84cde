"""Causal attention over a split sequence against one process: outputs and every gradient, on every rank."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_moe_strategy._torch_compat import OperationMode
from lightning_moe_strategy.collectives import TwoStepGroup
from lightning_moe_strategy.context_parallel import gather, halo
from lightning_moe_strategy.context_parallel.gather import gather_sequence
from lightning_moe_strategy.context_parallel.layout import Segment, SequenceLayout, contiguous, zigzag
from lightning_moe_strategy.context_parallel.softmax import causal_attention, causal_attention_on_gathered
from lightning_moe_strategy.kernels.attention_pieces import _CPU_FLASH, _CUDA_FLASH, _MATH, piece_kernel

TOLERANCE = {
    torch.float64: 1e-13,  # rounding of sums of 40 terms
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,  # 8 bits: inputs, probabilities and outputs of a piece are rounded to 2**-9
}
"""Norm of the error over norm of the reference in float64."""

B, H, G = 2, 4, 2


def layout_called(kind, num_tokens, degree):
    if kind == "one_token_segments":
        ids = [list(range(rank, num_tokens, degree)) for rank in range(degree)]
        return SequenceLayout(segments=tuple(tuple(Segment(i, 1) for i in owned) for owned in ids))
    return {"zigzag": zigzag, "contiguous": contiguous}[kind](num_tokens, degree)


def errors(kind, dtype, num_tokens, head_dims, tail=False, on_gathered=False, scale=None):
    """Relative errors of out, grad query, grad key, grad value on this rank."""
    group = dist.group.WORLD
    layout = layout_called(kind, num_tokens, group.size())
    head_dim, value_dim = head_dims
    shapes = [(H, head_dim), (G, head_dim), (G, value_dim), (H, value_dim)]
    whole = [torch.randn(B, h, num_tokens, d, dtype=torch.float64).to(dtype) for h, d in shapes]
    reference = [x.double().requires_grad_() for x in whole[:3]]
    expected = F.scaled_dot_product_attention(*reference, is_causal=True, enable_gqa=True, scale=scale)
    (expected * whole[3].double()).sum().backward()

    mine = layout.token_ids(group.rank())
    weight = whole[3][:, :, mine]
    # Not contiguous, as a projection reshaped to heads is.
    local = [x[:, :, mine].transpose(1, 2).contiguous().transpose(1, 2) for x in whole[:3]]
    if tail:
        layout = layout.with_tail_token()
        local = [torch.cat([x, torch.full_like(x[:, :, :1], 3.0)], 2) for x in local]
    local = [x.detach().requires_grad_() for x in local]
    if on_gathered:
        key, value = (gather_sequence(x, 2, layout, group) for x in local[1:])
        out = causal_attention_on_gathered(local[0], key, value, layout=layout, rank=group.rank(), scale=scale)
    else:
        out = causal_attention(*local, layout=layout, group=group, scale=scale)
    (out[:, :, : len(mine)] * weight).sum().backward()
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(local, reference, strict=True))]
    return [_error(got[:, :, : len(mine)], want[:, :, mine]) for got, want in pairs]


def _error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dims", [(16, 16), (24, 16), (8, 12)])
def test_attention_and_gradients_equal_one_process(ranks2, dtype, head_dims):
    assert max(map(max, ranks2(errors, "zigzag", dtype, 20, head_dims))) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "one_token_segments"])
def test_every_layout_on_four_ranks(ranks4, kind):
    assert max(map(max, ranks4(errors, kind, torch.float32, 40, (16, 16)))) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("num_tokens", [4, 12])
def test_dummies_at_the_tail_change_nothing(ranks2, num_tokens):
    got = ranks2(errors, "zigzag", torch.float32, num_tokens, (8, 8), True)
    assert max(map(max, got)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_on_gathered_keys_equals_one_process(ranks2, dtype):
    got = ranks2(errors, "zigzag", dtype, 20, (24, 16), False, True, 0.3)
    assert max(map(max, got)) < TOLERANCE[dtype]


def visible(num_tokens, documents, window):
    """bool [B or 1, 1, S, S], as a mask would say it."""
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    seen = (key <= query) & (key > query - (window or num_tokens))
    same = [torch.bucketize(torch.arange(num_tokens), torch.tensor(starts), right=True) for starts in documents]
    return torch.stack([seen & (ids[:, None] == ids[None]) for ids in same])[:, None]


def errors_of_patterns(documents, window, with_sinks, dtype, tail=False, in_two_steps=False):
    """Relative errors of out and of the gradients of query, key, value and sinks on this rank."""
    num_tokens, group = 48, dist.group.WORLD
    if in_two_steps:
        mesh = init_device_mesh("cpu", (2, group.size() // 2), mesh_dim_names=("inter", "intra"))
        group = TwoStepGroup(whole=group, inter=mesh.get_group("inter"), intra=mesh.get_group("intra"))
    layout = zigzag(num_tokens, group.size())
    whole = [torch.randn(B, h, num_tokens, 8, dtype=torch.float64).to(dtype) for h in (H, G, G, H)]
    sinks = torch.randn(H, dtype=torch.float64).requires_grad_() if with_sinks else None
    reference = [x.double().requires_grad_() for x in whole[:3]]
    query, key, value = reference[0], *(x.repeat_interleave(H // G, 1) for x in reference[1:])
    scores = (query @ key.mT * 8**-0.5).masked_fill(~visible(num_tokens, documents, window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(B, -1, num_tokens, 1)], -1)
    expected = scores.softmax(-1)[..., :num_tokens] @ value
    (expected * whole[3].double()).sum().backward()

    mine = layout.token_ids(group.rank())
    local = [x[:, :, mine] for x in whole[:3]]
    if tail:
        layout = layout.with_tail_token()
        local = [torch.cat([x, torch.full_like(x[:, :, :1], 3.0)], 2) for x in local]
    local = [x.detach().clone().requires_grad_() for x in local]
    own_sinks = None if sinks is None else sinks.detach().to(dtype).requires_grad_()
    out = causal_attention(*local, layout=layout, group=group, documents=documents, window=window, sinks_H=own_sinks)[
        :, :, : len(mine)
    ]
    (out * whole[3][:, :, mine]).sum().backward()
    found = [_error(out, expected[:, :, mine])]
    found += [_error(x.grad[:, :, : len(mine)], y.grad[:, :, mine]) for x, y in zip(local, reference, strict=True)]
    if own_sinks is not None:
        partial = own_sinks.grad.double()
        dist.all_reduce(partial)
        found.append(_error(partial, sinks.grad))
    return found


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 30])
@pytest.mark.parametrize("documents", [((0,),), ((0, 5, 6, 30),), ((0, 11), (0, 24, 37))])
def test_documents_windows_and_sinks_equal_a_mask_in_one_process(ranks2, documents, window, with_sinks):
    """Windows shorter and longer than a segment of 12 tokens; documents alike and different in a batch."""
    got = ranks2(errors_of_patterns, documents, window, with_sinks, torch.float32)
    assert max(map(max, got)) < 2 * TOLERANCE[torch.float32]  # sinks: a sum over all queries


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 5])
def test_documents_windows_and_sinks_in_every_dtype_with_dummies_and_in_two_steps(ranks4, dtype, window):
    got = ranks4(errors_of_patterns, ((0, 7, 29),), window, True, dtype, True, True)
    assert max(map(max, got)) < 3 * TOLERANCE[dtype]


def tokens_gathered(window):
    gathered, original = [], (gather.all_gather_in_steps, halo.all_gather_in_steps)
    spy = lambda x, group: (gathered.append(x.shape[0] * group.size()), original[0](x, group))[1]  # noqa: E731
    gather.all_gather_in_steps = halo.all_gather_in_steps = spy
    try:
        query, key, value = (torch.randn(1, h, 64, 8) for h in (H, G, G))
        causal_attention(query, key, value, layout=zigzag(128, 2), group=dist.group.WORLD, window=window)
    finally:
        gather.all_gather_in_steps, halo.all_gather_in_steps = original
    return gathered


@pytest.mark.parametrize(("window", "tokens"), [(5, 2 * 2 * 4), (33, 2 * 2 * 32), (34, 128), (None, 128)])
def test_a_window_gathers_the_tails_of_the_segments_alone(ranks2, window, tokens):
    """2 * cp segments of 32 tokens, window - 1 of each; keys and values."""
    assert ranks2(tokens_gathered, window) == [[tokens, tokens]] * 2


def saved_bytes_and_gathers(checkpointed, reentrant):
    """Bytes that autograd keeps between forward and backward, and all-gathers of each pass."""
    group, layout, gathers = dist.group.WORLD, zigzag(32, 2), []
    original = gather.all_gather_in_steps
    gather.all_gather_in_steps = lambda x, group: (gathers.append(tuple(x.shape)), original(x, group))[1]
    try:
        query, key, value = (torch.randn(B, h, 16, 8, requires_grad=True) for h in (H, G, G))
        storages = {}

        def pack(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        def attend(*args):
            return causal_attention(*args, layout=layout, group=group)

        if checkpointed:
            out = checkpoint(attend, query, key, value, use_reentrant=reentrant)
        else:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = attend(query, key, value)
        in_forward = len(gathers)
        out.square().sum().backward()
        plain = [x.detach().requires_grad_() for x in (query, key, value)]
        attend(*plain).square().sum().backward()
        equal = all(torch.equal(x.grad, y.grad) for x, y in zip((query, key, value), plain, strict=True))
        return sum(storages.values()), in_forward, len(gathers) - in_forward - 4, equal
    finally:
        gather.all_gather_in_steps = original


def test_only_tensors_of_this_rank_are_kept(ranks2):
    floats_per_token = H * 8 + 2 * G * 8 + H * 8 + H  # query, key and value, out, lse
    assert ranks2(saved_bytes_and_gathers, False, False) == [(B * 16 * floats_per_token * 4, 2, 2, True)] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_exact_and_gathers_once(ranks2, reentrant):
    assert ranks2(saved_bytes_and_gathers, True, reentrant) == [(0, 2, 2, True)] * 2


@pytest.mark.parametrize("is_causal", [False, True])
def test_pieces_of_flash_attention_equal_plain_arithmetic(is_causal):
    num_keys = 6 if is_causal else 9
    query, key, value = torch.randn(B, H, 6, 8), torch.randn(B, G, num_keys, 8), torch.randn(B, G, num_keys, 8)
    outs = [kernel.forward(query, key, value, is_causal, 0.2) for kernel in (_CPU_FLASH, _MATH)]
    torch.testing.assert_close(outs[0], outs[1])
    of_rows = (torch.randn(B, H, 6, 8), query, *outs[1])
    grads = [kernel.backward(of_rows, key, value, is_causal, 0.2) for kernel in (_CPU_FLASH, _MATH)]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize(("kernel", "device"), [(_CPU_FLASH, "cpu"), (_CUDA_FLASH, "cuda"), (_MATH, "cpu")])
@pytest.mark.parametrize("num_keys", [4, 9])
def test_fake_tensors_pass_through_every_kernel(kernel, device, num_keys):
    """Shapes and schemas of kernels, those of a machine that is not here included."""
    width, width_v = kernel.head_dims(20, 16)
    with FakeTensorMode():
        query = torch.empty(B, H, 4, width, device=device, dtype=torch.bfloat16)
        key = torch.empty(B, G, num_keys, width, device=device, dtype=torch.bfloat16)
        value = torch.empty(B, G, num_keys, width_v, device=device, dtype=torch.bfloat16)
        out, lse = kernel.forward(query, key, value, num_keys == 4, 0.2)
        assert out.shape == (B, H, 4, width_v) and lse.shape == (B, H, 4) and lse.dtype == torch.float32
        grads = kernel.backward((out, query, out, lse), key, value, num_keys == 4, 0.2)
        assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


@pytest.mark.parametrize(
    ("device", "dtype", "head_dims", "kernel", "padded"),
    [
        ("cpu", torch.float32, (24, 16), _CPU_FLASH, (24, 24)),
        ("cpu", torch.float64, (24, 16), _MATH, (24, 16)),
        ("cuda", torch.bfloat16, (20, 16), _CUDA_FLASH, (24, 24)),
        ("cuda", torch.float32, (20, 16), _MATH, (20, 16)),
        ("cuda", torch.bfloat16, (320, 16), _MATH, (320, 16)),
    ],
)
def test_the_kernel_and_its_head_dims_follow_device_and_dtype(device, dtype, head_dims, kernel, padded):
    with FakeTensorMode():
        query, value = (torch.empty(B, H, 4, dim, device=device, dtype=dtype) for dim in head_dims)
        assert piece_kernel(query, value) is kernel
    assert kernel.head_dims(*head_dims) == padded


def test_autocast_casts_as_sdpa_does():
    query, key, value = (torch.randn(B, H, 8, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = causal_attention_on_gathered(query, key, value.bfloat16(), layout=zigzag(8, 1), rank=0)
    assert out.dtype == torch.bfloat16


def test_errors_name_what_disagrees():
    query, key = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 8, 8)
    layout = zigzag(8, 2)
    with pytest.raises(ValueError, match="key has 4 tokens; .* has 8"):
        causal_attention_on_gathered(query, key[:, :, :4], key[:, :, :4], layout=layout, rank=0)
    with pytest.raises(ValueError, match="key torch.float64"):
        causal_attention_on_gathered(query, key.double(), key, layout=layout, rank=0)
    with pytest.raises(ValueError, match=r"key heads\(3\) must divide query heads\(4\)"):
        causal_attention_on_gathered(query, key[:, :3], key[:, :3], layout=layout, rank=0)
    for options, words in (
        ({"window": 0}, r"window\(0\) must be at least 1"),
        ({"documents": ((0,), (0,))}, "documents are given for 2 sequences, but the batch has 1"),
        ({"sinks_H": torch.zeros(3)}, "one score for each of 4 query heads"),
    ):
        with pytest.raises(ValueError, match=words):
            causal_attention_on_gathered(query, key, key, layout=layout, rank=0, **options)
    with pytest.raises(ValueError, match=r"\[batch, heads, tokens, channels\]"):
        causal_attention_on_gathered(query[0], key[0], key[0], layout=layout, rank=0)


class CountedCalls(OperationMode):
    def __init__(self):
        super().__init__()
        self.forward = 0

    def run(self, operation, args, kwargs):
        self.forward += operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return operation(*args, **kwargs)


def test_blocks_of_a_window_share_a_kernel_call():
    query, key, value = (torch.randn(1, h, 256, 8) for h in (H, G, G))
    with CountedCalls() as calls:
        causal_attention_on_gathered(query, key, value, layout=zigzag(256, 1), rank=0, window=8)
    assert calls.forward == 4  # two segments of 16 blocks: each block's own keys, and the window before it
