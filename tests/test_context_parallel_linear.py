"""Linear attention and its convolution over a split sequence against one process: outputs and every gradient."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from lightning_moe_strategy.collectives import TwoStepGroup
from lightning_moe_strategy.context_parallel import halo, linear
from lightning_moe_strategy.context_parallel.convolution import _BehindHalo, convolve_over_chunks
from lightning_moe_strategy.context_parallel.layout import Segment, SequenceLayout, contiguous, zigzag
from lightning_moe_strategy.context_parallel.linear import affine_over_chunks

TOLERANCE = {
    torch.float64: 1e-13,  # rounding of sums of 48 terms
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,  # 8 bits: inputs and outputs are rounded to 2**-9, the state is FP32
}
"""Norm of the error over norm of the reference in float64."""

S = 48
B, G, H, D, E = 2, 2, 4, 6, 5
ONE_DOCUMENT = ((0,),)
DOCUMENTS = [
    ONE_DOCUMENT,
    ((0, 5, 6, 30),),  # inside of chunks, of one token, over several chunks
    ((0, 12, 24, 36),),  # at every second edge of four ranks' chunks
    ((0, 11), (0, 24, 37)),
    ((0,), (0, 1, 2, 3, 4, 47)),
]


def delta_rule(query, key, value, /, *, initial_state, output_final_state, g, beta):
    """Token by token. g [B, T, H] is Gated DeltaNet's decay, [B, T, H, D] that of Kimi Delta Attention."""
    dtype = query.dtype
    wide = torch.promote_types(dtype, torch.float32)
    query, key, value, g, beta = (x.to(wide) for x in (query, key, value, g, beta))
    query, key = (F.normalize(x, dim=-1).repeat_interleave(value.shape[2] // x.shape[2], 2) for x in (query, key))
    decay = (g if g.dim() == 4 else g[..., None]).exp()[..., None]
    state, outputs = initial_state, []
    for t in range(query.shape[1]):
        state = state * decay[:, t]
        change = (value[:, t] - (state * key[:, t, ..., None]).sum(-2)) * beta[:, t, :, None]
        state = state + key[:, t, ..., None] * change[..., None, :]
        outputs.append((state * query[:, t, ..., None]).sum(-2))
    return torch.stack(outputs, 1).to(dtype), state if output_final_state else None


def layout_called(kind, degree):
    if kind == "one_token_segments":
        ids = [range(rank, S, degree) for rank in range(degree)]
        return SequenceLayout(segments=tuple(tuple(Segment(i, 1) for i in owned) for owned in ids))
    return {"zigzag": zigzag, "contiguous": contiguous}[kind](S, degree)


def group_of(in_two_steps):
    whole = dist.group.WORLD
    if not in_two_steps:
        return whole
    mesh = init_device_mesh("cpu", (2, whole.size() // 2), mesh_dim_names=("inter", "intra"))
    return TwoStepGroup(whole=whole, inter=mesh.get_group("inter"), intra=mesh.get_group("intra"))


def inputs_of_scan(decay, dtype):
    shapes = [(G, D), (G, D), (H, E), (H, D) if decay == "per channel" else (H,), (H,)]
    query, key, value, g, beta = (torch.randn(B, S, *shape, dtype=torch.float64) for shape in shapes)
    # A state lives for tokens enough to be seen two chunks on.
    return [x.to(dtype) for x in (query, key, value, -F.softplus(g) / 20, beta.sigmoid())]


def scan_documents(query, key, value, g, beta, documents):
    """In one process, each document from a zero state."""
    rows = []
    for row in range(len(query)):
        starts = documents[row % len(documents)]
        outputs = []
        for start, end in pairwise([*starts, query.shape[1]]):
            x = [x[row : row + 1, start:end] for x in (query, key, value, g, beta)]
            state = query.new_zeros((1, value.shape[2], key.shape[-1], value.shape[-1]))
            outputs.append(delta_rule(*x[:3], initial_state=state, output_final_state=False, g=x[3], beta=x[4])[0])
        rows.append(torch.cat(outputs, 1))
    return torch.cat(rows)


def relative(got, want):
    return float((got.double() - want).norm() / want.norm())


def with_dummy(x, dim):
    return torch.cat([x, torch.full_like(x.narrow(dim, 0, 1), 3.0)], dim)


def errors(kind, dtype, documents=ONE_DOCUMENT, decay="per head", tail=False, in_two_steps=False):
    """Relative errors of the output and of the gradients of query, key, value, g and beta on this rank."""
    group = group_of(in_two_steps)
    layout = layout_called(kind, group.size())
    mine = layout.token_ids(group.rank())
    whole = inputs_of_scan(decay, dtype)
    weight = torch.randn(B, S, H, E, dtype=torch.float64)
    reference = [x.to(torch.float64, copy=True).requires_grad_() for x in whole]
    expected = scan_documents(*reference, documents)
    (expected * weight).sum().backward()

    local = [x[:, mine] for x in whole]
    if tail:
        layout, local = layout.with_tail_token(), [with_dummy(x, 1) for x in local]
    query, key, value, g, beta = local = [x.requires_grad_() for x in local]
    out = affine_over_chunks(
        delta_rule,
        *(query, key, value),
        gates={"g": g, "beta": beta},
        layout=layout,
        group=group,
        documents=documents,
    )
    assert out.dtype == dtype and bool(out.isfinite().all())
    (out[:, : len(mine)].double() * weight[:, mine]).sum().backward()
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(local, reference, strict=True))]
    return [relative(got[:, : len(mine)], want[:, mine]) for got, want in pairs]


def worst(per_rank):
    return max(map(max, per_rank))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("decay", ["per head", "per channel"])
def test_linear_attention_and_gradients_equal_one_process(ranks2, dtype, decay):
    assert worst(ranks2(errors, "zigzag", dtype, ONE_DOCUMENT, decay)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "one_token_segments"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_layout_on_four_ranks(ranks4, kind, dtype):
    assert worst(ranks4(errors, kind, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("documents", DOCUMENTS[1:])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_a_state_never_crosses_the_start_of_a_document(ranks4, kind, documents):
    assert worst(ranks4(errors, kind, torch.float64, documents)) < TOLERANCE[torch.float64]
    assert worst(ranks4(errors, kind, torch.float32, documents)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_dummies_at_the_tail_change_nothing(ranks2, documents):
    got = ranks2(errors, "zigzag", torch.float32, documents, "per head", True)
    assert worst(got) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_in_two_steps_the_states_are_the_same(ranks4, documents):
    got = ranks4(errors, "zigzag", torch.float64, documents, "per channel", True, True)
    assert worst(got) < TOLERANCE[torch.float64]


def states_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        return errors("zigzag", torch.float32)


def test_states_are_combined_in_full_precision_under_autocast(ranks2):
    assert worst(ranks2(states_under_autocast)) < TOLERANCE[torch.float32]


def other_document_when_one_overflows(kind, documents):
    """Whether the first row's outputs and gradients behind token 20 are the same when values before it overflow."""
    group = dist.group.WORLD
    layout = layout_called(kind, group.size())
    mine = layout.token_ids(group.rank())
    behind = mine >= 20
    whole, found = inputs_of_scan("per head", torch.float32), []
    for overflows in (False, True):
        query, key, value, g, beta = (x.clone() for x in whole)
        if overflows:
            value[:, 3] = float("inf")
        local = [x[:, mine].requires_grad_() for x in (query, key, value, g, beta)]
        out = affine_over_chunks(
            delta_rule,
            *local[:3],
            gates={"g": local[3], "beta": local[4]},
            layout=layout,
            group=group,
            documents=documents,
        )
        out[0, behind].sum().backward()
        found.append([x[0, behind] for x in (out, *(x.grad for x in local))])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("documents", [((0, 20),), ((0, 20), (0,)), ((0, 12, 20), (0, 20))])
def test_a_document_that_overflows_leaves_the_next_one_bitwise_as_it_was(ranks4, kind, documents):
    assert ranks4(other_document_when_one_overflows, kind, documents) == [True] * 4


class Sent:
    """Bytes that a rank gives to the gathers of one module."""

    def __init__(self, module):
        self.module, self.original, self.num_bytes = module, module.all_gather_in_steps, []

    def __enter__(self):
        self.module.all_gather_in_steps = self.spy
        return self.num_bytes

    def __exit__(self, *error):
        self.module.all_gather_in_steps = self.original

    def spy(self, x, group):
        self.num_bytes.append(x.nbytes)
        return self.original(x, group)


def bytes_sent(num_tokens, heads, channels, dtype=torch.float32):
    group = dist.group.WORLD
    layout = zigzag(num_tokens, group.size())
    length = layout.tokens_per_rank
    tokens = [torch.randn(1, length, heads, channels, dtype=dtype, requires_grad=True) for _ in range(3)]
    gates = {"g": -torch.rand(1, length, heads), "beta": torch.rand(1, length, heads)}
    with Sent(linear) as num_bytes:
        affine_over_chunks(delta_rule, *tokens, gates=gates, layout=layout, group=group).sum().backward()
    return num_bytes


def test_what_travels_does_not_grow_with_the_sequence(ranks2):
    per_direction = 2 * 8 * 4 * (4 + 4) * 4  # chunks, heads, D, D + E, bytes of FP32
    for num_tokens in (8, 64):
        for dtype in (torch.float32, torch.bfloat16):
            assert ranks2(bytes_sent, num_tokens, 8, 4, dtype) == [[per_direction] * 2] * 2


def test_a_chunk_sends_4_2_mb_for_32_heads_of_128_x_128(ranks2):
    assert ranks2(bytes_sent, 4, 32, 128) == [[2 * 4_194_304] * 2] * 2


def fused_convolution(weight_CW, bias_C):
    def convolve(x_BCT):
        padded = F.pad(x_BCT, (weight_CW.shape[-1] - 1, 0))
        return F.silu(F.conv1d(padded, weight_CW[:, None], bias_C, groups=len(weight_CW)))

    return convolve


def convolve_documents(x, weight, bias, documents):
    rows = []
    for row in range(len(x)):
        edges = pairwise([*documents[row % len(documents)], x.shape[2]])
        convolve = fused_convolution(weight, bias)
        rows.append(torch.cat([convolve(x[row : row + 1, :, start:end]) for start, end in edges], 2))
    return torch.cat(rows)


def errors_of_convolution(kind, dtype, documents=ONE_DOCUMENT, width=4, tail=False, in_two_steps=False):
    """Relative errors of the output and of the gradients of x, weight and bias; those two summed over the ranks."""
    channels, group = 3, group_of(in_two_steps)
    layout = layout_called(kind, group.size())
    mine = layout.token_ids(group.rank())
    shapes = [(B, channels, S), (channels, width), (channels,)]
    whole = [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]
    weight_of_out = torch.randn(B, channels, S, dtype=torch.float64)
    reference = [x.to(torch.float64, copy=True).requires_grad_() for x in whole]
    expected = convolve_documents(*reference, documents)
    (expected * weight_of_out).sum().backward()

    x = whole[0][..., mine]
    if tail:
        layout, x = layout.with_tail_token(), with_dummy(x, 2)
    x, weight, bias = (t.detach().requires_grad_() for t in (x, *whole[1:]))
    out = convolve_over_chunks(
        fused_convolution(weight, bias), x, width=width, layout=layout, group=group, documents=documents
    )
    assert out.shape == x.shape and bool(out.isfinite().all())
    (out[..., : len(mine)].double() * weight_of_out[..., mine]).sum().backward()
    for parameter in (weight, bias):
        dist.all_reduce(parameter.grad)
    found = [relative(out[..., : len(mine)], expected[..., mine])]
    found.append(relative(x.grad[..., : len(mine)], reference[0].grad[..., mine]))
    return [*found, *(relative(t.grad, want.grad) for t, want in zip((weight, bias), reference[1:], strict=True))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "one_token_segments"])
def test_a_convolution_sees_the_tokens_before_its_segment(ranks4, kind, dtype):
    assert worst(ranks4(errors_of_convolution, kind, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_kernels_up_to_and_beyond_the_length_of_a_segment(ranks4, width):
    assert worst(ranks4(errors_of_convolution, "zigzag", torch.float64, ONE_DOCUMENT, width)) < 1e-13


@pytest.mark.parametrize("documents", DOCUMENTS[1:])
def test_a_convolution_never_sees_the_document_before(ranks4, documents):
    assert worst(ranks4(errors_of_convolution, "zigzag", torch.float64, documents)) < 1e-13


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_a_convolution_with_dummies_and_in_two_steps(ranks4, documents):
    assert worst(ranks4(errors_of_convolution, "zigzag", torch.float64, documents, 4, True, True)) < 1e-13


def gradient_that_is_handed_in():
    """Whether it is what it was after the backward pass."""
    layout, group = zigzag(16, dist.get_world_size()), dist.group.WORLD
    x = torch.randn(1, 3, layout.tokens_per_rank, requires_grad=True)
    seen = _BehindHalo.apply(x, halo.Halo(layout, group, 3))
    grad = torch.ones_like(seen)
    seen.backward(grad)
    return bool((grad == 1).all())


def test_a_gradient_that_is_handed_in_is_not_written_to(ranks2):
    assert ranks2(gradient_that_is_handed_in) == [True, True]


def bytes_of_halo(num_tokens):
    group, channels = dist.group.WORLD, 5
    layout = zigzag(num_tokens, group.size())
    x = torch.randn(1, channels, layout.tokens_per_rank)
    with Sent(halo) as num_bytes:
        convolve_over_chunks(fused_convolution(torch.randn(channels, 4), None), x, width=4, layout=layout, group=group)
    return num_bytes


def test_a_convolution_gathers_the_tails_of_the_segments_only(ranks2):
    for num_tokens in (16, 64):
        assert ranks2(bytes_of_halo, num_tokens) == [[2 * 3 * 5 * 4]] * 2


class Group:
    """The first of two ranks: enough for what is refused before anything is gathered."""

    def rank(self):
        return 0

    def size(self):
        return 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key=torch.zeros(1, 4, 2, 3)), r"query \(1, 4, 1, 3\), key \(1, 4, 2, 3\).*key heads"),
        (dict(value=torch.zeros(1, 8, 2, 5)), r"value \(1, 8, 2, 5\).*this rank's tokens of all"),
        (dict(beta=torch.zeros(1, 3, 2)), r"beta \(1, 3, 2\).*this rank's tokens of all"),
        (dict(documents=((0,), (0,))), "documents are given for 2 sequences, but the batch has 1"),
    ],
)
def test_tokens_that_do_not_fit_together_are_refused(change, message):
    query = torch.zeros(1, 4, 1, 3)
    fits = dict(key=query, value=torch.zeros(1, 4, 2, 5), beta=torch.zeros(1, 4, 2), documents=ONE_DOCUMENT) | change
    with pytest.raises(ValueError, match=message):
        affine_over_chunks(
            delta_rule,
            *(query, fits["key"], fits["value"]),
            gates={"beta": fits["beta"]},
            layout=zigzag(8, 2),
            group=Group(),
            documents=fits["documents"],
        )


def test_a_length_that_no_rank_holds_is_refused():
    with pytest.raises(ValueError, match="6 tokens along its sequence dim"):
        convolve_over_chunks(lambda x: x, torch.zeros(1, 2, 6), width=4, layout=zigzag(8, 2), group=Group())
