"""Row kernels: the reference against a mask, a split sequence against one process, what the packages are handed."""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_moe_strategy._torch_compat import OperationMode, tensors_in
from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel import softmax
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.latent import attend_to_latents
from lightning_moe_strategy.context_parallel.layout import Segment, zigzag
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.context_parallel.softmax import causal_attention_on_gathered
from lightning_moe_strategy.kernels import attention, attention_rows, flash_attention
from lightning_moe_strategy.kernels.attention import attention_kernel_for
from lightning_moe_strategy.kernels.attention_rows import REFERENCE, RowKernel, Rows
from tests import test_context_parallel_functions as in_functions
from tests import test_context_parallel_hugging_face as in_hugging_face
from tests import test_context_parallel_softmax as one_process
from tests import test_zigzag as in_zigzag
from tests.flash_stand_ins import install
from tests.test_context_parallel_softmax import TOLERANCE

H, G = 4, 2
FLASH = ["flash_attention_4", "flash_attention_3", "flash_attention_2", "torch"]


@pytest.fixture(autouse=True)
def forget_what_is_installed():
    flash_attention.flash_kernel.cache_clear()
    yield
    flash_attention.flash_kernel.cache_clear()


def is_visible(rows):
    """bool [T, U], as a mask would say it."""
    blocks = []
    for num_queries, num_keys in zip(rows.query_lengths, rows.key_lengths, strict=True):
        own = torch.arange(num_queries)[:, None] + num_keys - num_queries
        keys = torch.arange(num_keys)
        blocks.append((keys <= own) & (keys > own - (rows.window or num_keys)))
    return torch.block_diag(*blocks).bool()


def attend_with_mask(query_THD, key_UGD, value_UGE, rows, scale):
    query, key, value = (x.transpose(0, 1) for x in (query_THD, key_UGD, value_UGE))
    key, value = (x.repeat_interleave(H // G, 0) for x in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~is_visible(rows), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1), scores.logsumexp(-1)


@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("lengths", [((9,), (9,)), ((5,), (21,)), ((3, 1, 10), (12, 1, 10)), ((1, 2), (4, 2))])
def test_the_reference_equals_a_mask(monkeypatch, lengths, window):
    """Blocks of four queries and keys: several of a row, whole and cut by the diagonal and by the window."""
    monkeypatch.setattr(attention_rows, "REFERENCE_BLOCK", 4)
    rows = Rows(*lengths, window)
    shapes = [(sum(lengths[0]), H, 12), (sum(lengths[1]), G, 12), (sum(lengths[1]), G, 8)]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    expected, expected_lse = attend_with_mask(*tensors, rows, 0.3)
    grad_out = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, tensors, grad_out)
    query, key, value = (x.detach() for x in tensors)
    out, lse = REFERENCE.forward(query, key, value, rows, 0.3)
    grads = REFERENCE.backward((grad_out, query, out, lse), key, value, rows, 0.3)
    for got, want in zip((out, lse, *grads), (expected, expected_lse, *expected_grads), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)


class Largest(OperationMode):
    def __init__(self):
        super().__init__()
        self.numbers = 0

    def run(self, operation, args, kwargs):
        result = operation(*args, **kwargs)
        self.numbers = max([self.numbers, *(x.numel() for x in tensors_in(result))])
        return result


def test_no_tensor_of_the_reference_is_as_large_as_queries_times_keys(monkeypatch):
    monkeypatch.setattr(attention_rows, "REFERENCE_BLOCK", 8)
    query, key, value = (torch.randn(128, heads, 2) for heads in (H, G, G))
    rows = Rows((128,), (128,))
    with Largest() as largest:
        out, lse = REFERENCE.forward(query, key, value, rows, 1.0)
        REFERENCE.backward((out, query, out, lse), key, value, rows, 1.0)
    assert largest.numbers == query.numel() == 128 * H * 2 < 128 * 128


def counted_calls(patch):
    """Of the reference from now on, forward and backward."""
    calls = [0, 0]

    def counted(index, function, *inputs):
        calls[index] += 1
        return function(*inputs)

    kernel = RowKernel("reference", partial(counted, 0, REFERENCE.forward), partial(counted, 1, REFERENCE.backward))
    patch.setattr(attention, "REFERENCE", kernel)
    return calls


def with_the_reference(name, *args):
    """What a function of the softmax tests says of this rank, and its calls of the row kernel, forward and backward."""
    with pytest.MonkeyPatch.context() as patch:
        calls = counted_calls(patch)
        patch.setattr(attention_rows, "REFERENCE_BLOCK", 5)
        for function in ("causal_attention", "causal_attention_on_gathered"):
            patch.setattr(one_process, function, partial(getattr(softmax, function), kernel="reference"))
        return getattr(one_process, name)(*args), calls


def largest_error(got, calls):
    assert [calls_of_rank for _, calls_of_rank in got] == [calls] * len(got)
    return max(max(found) for found, _ in got)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize("documents", [((0,),), ((0, 5, 6, 30),), ((0, 11), (0, 24, 37))])
def test_rows_of_documents_windows_and_sinks_equal_one_process(ranks2, documents, window, with_sinks):
    """One call for each of the two segments of 12 tokens, whatever they see. Windows up to 13 gather halos."""
    got = ranks2(with_the_reference, "errors_of_patterns", documents, window, with_sinks, torch.float32)
    assert largest_error(got, [2, 2]) < 2 * TOLERANCE[torch.float32]  # sinks: a sum over all queries


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 5])
def test_rows_in_every_dtype_with_dummies_and_in_two_steps(ranks4, dtype, window):
    """The dummy is a segment of one token."""
    got = ranks4(with_the_reference, "errors_of_patterns", ((0, 7, 29),), window, True, dtype, True, True)
    assert largest_error(got, [3, 3]) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize(("kind", "num_segments"), [("zigzag", 2), ("contiguous", 1), ("one_token_segments", 10)])
def test_rows_of_every_layout_equal_one_process(ranks4, kind, num_segments):
    got = ranks4(with_the_reference, "errors", kind, torch.float32, 40, (16, 16))
    assert largest_error(got, [num_segments] * 2) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("on_gathered", [False, True])
def test_rows_of_latent_head_dims_equal_one_process(ranks2, on_gathered):
    got = ranks2(with_the_reference, "errors", "zigzag", torch.float32, 20, (192, 128), False, on_gathered)
    assert largest_error(got, [2, 2]) < TOLERANCE[torch.float32]


def latent_results(kernel, window):
    torch.manual_seed(0)
    whole = [torch.randn(shape) for shape in ((2, 3, 24, 12), (2, 24, 6), (2, 24, 4), (3 * (8 + 7), 6))]
    layout = zigzag(24, dist.get_world_size())
    mine = layout.token_ids(dist.get_rank())
    local = [whole[0][:, :, mine], whole[1][:, mine], whole[2][:, mine], whole[3]]
    local = [x.clone().requires_grad_() for x in local]
    options = dict(documents=((0, 9),), window=window, kernel=kernel, expanded_bytes=1)
    with pytest.MonkeyPatch.context() as patch:
        calls = counted_calls(patch)
        out = attend_to_latents(*local, layout=layout, group=dist.group.WORLD, **options)
        out.sin().sum().backward()
    return [out.detach(), *(x.grad for x in local)], calls


@pytest.mark.parametrize("window", [None, 4])
def test_rows_and_pieces_of_expanded_latents_agree(ranks2, window):
    """Two segments for each of the three heads, which are expanded one at a time."""
    by_kernel = (ranks2(latent_results, name, window) for name in ("reference", "pieces"))
    for (rows, calls), (pieces, no_calls) in zip(*by_kernel, strict=True):
        assert (calls, no_calls) == ([6, 6], [0, 0])
        torch.testing.assert_close(rows, pieces, rtol=1e-5, atol=1e-5)


def calls_behind(kind, kernel):
    """Of the reference, in an adapted model, when the callback chose ``kernel``."""
    group = dist.group.WORLD
    if kind == "qwen3_moe" or kind == "deepseek_v3":
        model, cp = in_hugging_face.adapted(kind, group=group)
        ids = in_hugging_face.split_for(cp)
        run = partial(model, input_ids=ids)
    elif kind == "function":
        model, cp, _, local = in_functions.adapted(in_functions.causal, group=group)
        run = partial(model, local)
    else:
        model, cp = in_functions.LatentModel(), ContextParallel(group)
        if kind == "latents that hooks expand":
            for module in model.modules():
                module.register_forward_hook(lambda *args: None)
        adapt_attention(model, {"blocks.0": model.blocks[0]}, cp)
        layout = zigzag(8, cp.degree)
        own = layout.token_ids(cp.rank)[None]
        cp.sequence = LocalSequence(layout=layout, num_tokens=8, position_ids_BL=own)
        run = partial(model.blocks[0], torch.randn(1, 4, 16), own)
    with pytest.MonkeyPatch.context() as patch:
        calls = counted_calls(patch)
        cp.attention_kernel = in_zigzag.attach(
            ZigZagContextParallel(attention_kernel=kernel), model, group
        ).context_parallel.attention_kernel
        run()
        return calls[0]


@pytest.mark.parametrize(
    ("kind", "num_layers"),
    [("function", 1), ("latents", 1), ("latents that hooks expand", 1), ("qwen3_moe", 2), ("deepseek_v3", 2)],
)
def test_the_kernel_that_the_callback_names_attends_in_every_kind_of_model(ranks2, kind, num_layers):
    assert ranks2(calls_behind, kind, "reference") == [2 * num_layers] * 2
    assert ranks2(calls_behind, kind, "pieces") == ranks2(calls_behind, kind, "auto") == [0, 0]


def test_the_callback_refuses_a_kernel_that_is_not_installed_before_any_step():
    with pytest.raises(ValueError, match=r"attention_kernel\('flash_attention_3'\) cannot be loaded"):
        in_zigzag.attach(ZigZagContextParallel(attention_kernel="flash_attention_3"), None, in_functions.Group())
    with pytest.raises(ValueError, match=r"attention_kernel\('fast'\) must be one of"):
        in_zigzag.attach(ZigZagContextParallel(attention_kernel="fast"), None, in_functions.Group())


def on_gpu(patch, major):
    patch.setattr(attention, "capability", lambda device: (major, 0))


def attended(kernel, documents, window, head_dims=(16, 16), batch=2):
    torch.manual_seed(0)
    shapes = ((H, head_dims[0]), (G, head_dims[0]), (G, head_dims[1]))
    tensors = [torch.randn(batch, h, 32, d).bfloat16().requires_grad_() for h, d in shapes]
    out = causal_attention_on_gathered(
        *tensors,
        layout=zigzag(32, 1),
        rank=0,
        documents=documents,
        window=window,
        sinks_H=torch.linspace(-1, 1, H),
        kernel=kernel,
    )
    out.sin().sum().backward()
    return [out.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("documents", [((0,),), ((0, 5, 20), (0, 16))])
@pytest.mark.parametrize("name", FLASH)
def test_every_package_is_handed_what_the_reference_is(monkeypatch, name, documents, window, deterministic):
    """Its own signature, with the reference behind it: results are equal bit for bit but for gradients in BF16."""
    install(monkeypatch, name)
    on_gpu(monkeypatch, 9)
    expected = attended("reference", documents, window)
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = attended(name, documents, window)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found[0], expected[0])
    for got, want in zip(found[1:], expected[1:], strict=True):
        assert (got - want).norm() < TOLERANCE[torch.bfloat16] * want.norm()


@pytest.mark.parametrize("name", FLASH)
def test_head_dims_that_a_package_does_not_have_are_widened_with_zeros(monkeypatch, name):
    install(monkeypatch, name)
    on_gpu(monkeypatch, 9)
    assert attention_kernel_for(*of_width(20, 12), name).head_dims(20, 12) == (24, 24)
    for got, want in zip(
        attended(name, ((0, 7),), 6, (20, 12)), attended("reference", ((0, 7),), 6, (20, 12)), strict=True
    ):
        assert (got - want).norm() < TOLERANCE[torch.bfloat16] * want.norm()


def test_keys_of_one_sequence_are_not_copied(monkeypatch):
    storages = []

    def forward(query, key, value, rows, scale):
        storages.append([x.untyped_storage().data_ptr() for x in (query, key, value)])
        return REFERENCE.forward(query, key, value, rows, scale)

    monkeypatch.setattr(attention, "REFERENCE", RowKernel("reference", forward, REFERENCE.backward))
    query, key, value = (torch.randn(1, 32, heads, 8).transpose(1, 2) for heads in (H, G, G))
    causal_attention_on_gathered(query, key, value, layout=zigzag(32, 1), rank=0, window=4, kernel="reference")
    assert storages == [[x.untyped_storage().data_ptr() for x in (query, key, value)]] * 2


def of_width(head_dim_qk, head_dim_v, dtype=torch.bfloat16):
    return torch.empty(1, H, 4, head_dim_qk, dtype=dtype), torch.empty(1, G, 4, head_dim_v, dtype=dtype)


def chosen(head_dims, *, name="auto", dtype=torch.bfloat16, window=None):
    return attention_kernel_for(*of_width(*head_dims, dtype), name, window=window)


def test_the_first_package_that_is_installed_is_taken(monkeypatch):
    on_gpu(monkeypatch, 9)
    found = [chosen((128, 128)).name]
    for name in reversed(FLASH[:-1]):
        install(monkeypatch, name)
        flash_attention.flash_kernel.cache_clear()
        found.append(chosen((128, 128)).name)
    assert found == FLASH[::-1]


@pytest.mark.parametrize(
    ("major", "head_dims", "options", "name", "wanted"),
    [
        (9, (128, 128), {}, "flash_attention_4", (128, 128)),
        (9, (192, 128), {}, "flash_attention_4", (192, 128)),
        (9, (160, 160), {"window": 8}, "flash_attention_4", (160, 160)),
        (10, (192, 128), {"window": 8}, "flash_attention_4", (192, 128)),
        (10, (160, 160), {}, "flash_attention_4", (256, 256)),
        (10, (256, 256), {"window": 8}, "flash_attention_2", (256, 256)),
        (8, (192, 128), {}, "flash_attention_2", (192, 192)),
        (12, (64, 64), {}, "flash_attention_2", (64, 64)),
        (9, (320, 128), {}, "pieces", None),
        (7, (64, 64), {}, "pieces", None),
        (9, (64, 64), {"dtype": torch.float32}, "pieces", None),
        (0, (64, 64), {}, "pieces", None),
    ],
)
def test_limits_of_the_packages_lead_to_the_next_one(monkeypatch, major, head_dims, options, name, wanted):
    for each in FLASH:
        install(monkeypatch, each)
    on_gpu(monkeypatch, major)
    kernel = chosen(head_dims, **options)
    assert kernel.name == name
    if wanted is not None:
        assert kernel.head_dims(*head_dims) == wanted


def test_a_backward_pass_in_any_order_is_not_taken_where_it_must_be_fixed(monkeypatch):
    install(monkeypatch, "flash_attention_3")
    on_gpu(monkeypatch, 9)
    torch.use_deterministic_algorithms(True)
    try:
        assert [chosen((dim, dim)).name for dim in (192, 256)] == ["flash_attention_3", "torch"]
        with pytest.raises(ValueError, match=r"'flash_attention_3'\) is not deterministic with heads of 256"):
            chosen((256, 256), name="flash_attention_3")
    finally:
        torch.use_deterministic_algorithms(False)


def too_old(q, k, v, window_size=(-1, -1)):
    raise AssertionError("called")


def test_a_package_that_is_too_old_is_passed_over(monkeypatch):
    on_gpu(monkeypatch, 9)
    install(monkeypatch, "flash_attention_2", _flash_attn_varlen_forward=too_old)
    install(monkeypatch, "flash_attention_4", _flash_attn_fwd=too_old)
    vars(sys.modules["flash_attn.cute.interface"]).pop("_flash_attn_bwd")
    assert chosen((64, 64)).name == "torch"


def test_what_is_asked_for_by_name_and_cannot_be_had_is_an_error(monkeypatch):
    on_gpu(monkeypatch, 9)
    with pytest.raises(
        ValueError, match=r"^attention_kernel\('flash_attention_3'\) cannot be loaded: flash_attn_inter"
    ):
        chosen((64, 64), name="flash_attention_3")
    install(monkeypatch, "flash_attention_2", _flash_attn_varlen_forward=too_old)
    with pytest.raises(ValueError, match="_flash_attn_varlen_forward of .* does not take window_size_left"):
        chosen((64, 64), name="flash_attention_2")
    for options, words in (
        ({"head_dims": (320, 64)}, "has no heads of 320 and 64 channels: at most 256"),
        ({"head_dims": (64, 64), "dtype": torch.float32}, "in FP16 and BF16, and the query is torch.float32"),
    ):
        with pytest.raises(ValueError, match=rf"attention_kernel\('torch'\).*{words}.*'auto'"):
            chosen(name="torch", **options)
    with pytest.raises(ValueError, match=r"attention_kernel\('fast'\) must be one of"):
        chosen((64, 64), name="fast")
    on_gpu(monkeypatch, 7)
    with pytest.raises(ValueError, match="needs a CUDA GPU of compute capability 8 or 9 or 10 or 11 or 12.x"):
        chosen((64, 64), name="torch")


def test_a_cpu_computes_pieces():
    assert attention.capability(torch.device("cpu")) == (0, 0)
    assert chosen((64, 64)).name == "pieces"


@pytest.mark.parametrize("window", [None, 8])
def test_fake_tensors_of_a_gpu_pass_through_the_kernel_in_torch(window):
    """Shapes and schemas of a machine that is not here."""
    kernel, rows = flash_attention.flash_kernel("torch"), Rows((3, 5), (7, 5), window)
    with FakeTensorMode():
        shapes = (8, H, 24), (12, G, 24), (12, G, 24)
        query, key, value = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        out, lse = kernel.forward(query, key, value, rows, 0.2)
        assert out.shape == query.shape and lse.shape == (H, 8) and lse.dtype == torch.float32
        grads = kernel.backward((out, query, out, lse), key, value, rows, 0.2)
        assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def test_rows_know_where_documents_begin():
    queries, keys = Rows((3, 5), (7, 5)).bounds(torch.device("cpu"))
    assert (queries.tolist(), keys.tolist()) == ([0, 3, 8], [0, 7, 12])
    assert Rows((3, 5), (7, 5)).longest == (5, 7)
    assert zigzag(16, 1).segments[0][1] == Segment(8, 8)
