"""Unchanged Hugging Face models with linear attention on split sequences, against one process."""

import sys
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from threading import Thread
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.integrations import use_kernel_func_from_hub_with_fallback

from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel import hugging_face_linear
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.hugging_face_linear import is_linear_attention
from lightning_moe_strategy.context_parallel.layout import zigzag
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.recompute import recompute_blocks
from tests.test_context_parallel_linear import delta_rule
from tests.test_zigzag import LATENT, TINY, VOCABULARY, attach

TOLERANCE = 1e-6
"""Norm of a gradient's error over its norm, FP32."""
TOLERANCE_OF_DECAYS = 4e-6
"""Of ``A_log`` and ``dt_bias``: one number per head, the sum of what all tokens give, which largely cancels."""
TOLERANCE_IN_FLOAT64 = 1e-13
"""Of every parameter: what the tolerances above leave room for is rounding."""

SMALL = TINY | dict(num_hidden_layers=2, max_position_embeddings=512)
GATED_DELTA_NET = SMALL | dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    shared_expert_intermediate_size=16,
    layer_types=["linear_attention", "full_attention"],
)
KIMI_DELTA_ATTENTION = (
    SMALL
    | LATENT
    | dict(
        q_lora_rank=None,
        num_experts_per_token=2,
        linear_attn_config=dict(
            head_dim=8, num_heads=4, short_conv_kernel_size=4, kda_layers=[1], full_attn_layers=[2]
        ),
        mlp_layer_types=["sparse", "sparse"],
    )
)
CONFIGS = {"qwen3_next": GATED_DELTA_NET, "qwen3_5_moe_text": GATED_DELTA_NET, "kimi_linear": KIMI_DELTA_ATTENTION}
KINDS = list(CONFIGS)
NUM_TOKENS = 37  # 2 * cp does not divide it
DOCUMENTS = (0, 9, 10, 30)


def make_model(kind):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).to(torch.get_default_dtype()).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5, -2)  # a state lives for tens of tokens: longer than a chunk
    return model, {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}


def adapt(model, blocks, cp):
    adapt_attention(model, blocks, cp)


@contextmanager
def everything_in_float64():
    """The code of transformers as it is, with float64 wherever it asks for float32."""
    before = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32 = torch.float = before[0]
        torch.Tensor.float = before[1]
        torch.set_default_dtype(torch.float32)


def whole_batch(documents=(0,), marked_by=None, num_padding=0):
    """Ids and labels of two rows, what marks their documents, and a mask where the second row is padded."""
    ids = torch.randint(1, VOCABULARY, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[:, documents] = -100
    batch = {"input_ids": ids, "labels": labels}
    lengths = [end - start for start, end in pairwise([*documents, NUM_TOKENS])]
    if marked_by == "position_ids":
        batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    if marked_by == "cu_seq_lens_q":
        batch["cu_seq_lens_q"] = torch.tensor([0, *lengths, *lengths]).cumsum(0)
    if num_padding:
        batch["attention_mask"] = torch.ones(2, NUM_TOKENS, dtype=torch.int64)
        batch["attention_mask"][1, -num_padding:] = 0
        labels[1, -num_padding:] = -100
    return batch


def reference_of(kind, batch, documents):
    """Logits, mean loss and gradients of one process, where every document is a sequence of its own."""
    model, _ = make_model(kind)
    logits, losses, labels = [], [], batch["labels"]
    for start, end in pairwise([*documents, NUM_TOKENS]):
        mask = batch["attention_mask"][:, start:end] if "attention_mask" in batch else None
        logits.append(model(input_ids=batch["input_ids"][:, start:end], attention_mask=mask, use_cache=False).logits)
        of_next = labels[:, start + 1 : end].flatten()
        losses.append(F.cross_entropy(logits[-1][:, :-1].flatten(0, 1), of_next, reduction="sum"))
    loss = sum(losses) / (labels[:, 1:] != -100).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(logits, 1).detach(), float(loss.detach()), gradients


def relative(got, want):
    return float((got - want).norm() / want.norm().clamp(min=1e-12))


def parity(kind, recompute="none", documents=(0,), marked_by=None, num_padding=0):
    """Relative errors of the loss, of the logits and, by name, of the gradients summed over the ranks."""
    batch = whole_batch(documents, marked_by, num_padding)
    expected_logits, expected_loss, expected = reference_of(kind, batch, documents)
    model, blocks = make_model(kind)
    if recompute == "hugging face":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    callback = ZigZagContextParallel()
    strategy = attach(callback, model)
    cp = strategy.context_parallel
    adapt(model, blocks, cp)
    adapt(model, blocks, cp)  # a second Trainer changes nothing
    if recompute == "block":
        recompute_blocks(model, blocks, {})
    for _ in range(2):  # the watched step, and one after it
        model.zero_grad()
        local = callback.split(batch, "train")
        with cp.step("train"):
            out = model(**local)
        count = strategy.micro_batch.num_loss_tokens
        # As on a GPU, where the engine recomputes in a thread of its own.
        backward = Thread(target=(out.loss * count).backward)
        backward.start()
        backward.join()
    sums = torch.stack([count.to(out.loss.dtype), out.loss.detach() * count])
    dist.all_reduce(sums)
    found = {}
    for name, parameter in model.named_parameters():
        if name in expected:
            grad = torch.zeros_like(expected[name]) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            found[name] = relative(grad / sums[0], expected[name])
    real = (batch["labels"] != -100) if num_padding else torch.ones_like(batch["labels"], dtype=torch.bool)
    return (
        abs(float(sums[1] / sums[0]) / expected_loss - 1),
        relative(callback.restore(out.logits)[real], expected_logits[real]),
        found,
    )


def parity_in_float64(*args):
    with everything_in_float64():
        return parity(*args)


def check(per_rank):
    for loss_error, logits_error, gradient_errors in per_rank:
        assert loss_error < TOLERANCE and logits_error < TOLERANCE
        for name, error in gradient_errors.items():
            is_decay = name.endswith(("A_log", "dt_bias"))
            assert error < (TOLERANCE_OF_DECAYS if is_decay else TOLERANCE), name


def check_in_float64(per_rank):
    for loss_error, logits_error, gradient_errors in per_rank:
        assert max(loss_error, logits_error, *gradient_errors.values()) < TOLERANCE_IN_FLOAT64


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_process(ranks2, kind):
    check(ranks2(parity, kind))
    check_in_float64(ranks2(parity_in_float64, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_and_recompute_in_another_thread_equal_one_process(ranks4, kind):
    check(ranks4(parity, kind))
    check_in_float64(ranks4(parity_in_float64, kind, "block"))


def test_checkpointing_by_transformers_equals_one_process(ranks2):
    check_in_float64(ranks2(parity_in_float64, "qwen3_next", "hugging face"))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_sequences_of_their_own(ranks2, kind):
    check_in_float64(ranks2(parity_in_float64, kind, "block", DOCUMENTS, "position_ids"))


def test_packed_documents_by_their_lengths_on_four_ranks(ranks4):
    check_in_float64(ranks4(parity_in_float64, "qwen3_next", "none", DOCUMENTS, "cu_seq_lens_q"))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_right_equals_one_process(ranks2, kind):
    check_in_float64(ranks2(parity_in_float64, kind, "none", (0,), None, 5))


def change_behind(kind, documents):
    """How far the logits behind token 29 change with token 3."""
    with everything_in_float64():
        model, blocks = make_model(kind)
        callback = ZigZagContextParallel()
        strategy = attach(callback, model)
        adapt(model, blocks, strategy.context_parallel)
        batch, found = whole_batch(documents, "position_ids"), []
        for token in (5, 6):
            batch["input_ids"][:, 3] = token
            with torch.no_grad():
                found.append(callback.restore(model(**callback.split(batch, "train")).logits)[:, 30:])
        return relative(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_reaches_the_end_of_its_document_and_no_further(ranks2, kind):
    assert min(ranks2(change_behind, kind, (0,))) > 1e-5
    assert max(ranks2(change_behind, kind, (0, 30))) < 1e-15


def modeling_of(model):
    return sys.modules[type(model).__module__]


SCANS = {"qwen3_next": "torch_chunk_gated_delta_rule", "kimi_linear": "chunk_kimi_delta_attention"}


def chunk_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    **kwargs,
):
    """With the arguments that flash-linear-attention's chunk_gated_delta_rule and chunk_kda take."""
    assert scale is None and cu_seqlens is None and use_qk_l2norm_in_kernel and not kwargs
    assert initial_state is None or (initial_state.dtype == torch.float64 and initial_state.is_contiguous())
    if initial_state is None:
        initial_state = v.new_zeros((len(v), v.shape[2], k.shape[-1], v.shape[-1]))
    return delta_rule(q, k, v, initial_state=initial_state, output_final_state=output_final_state, g=g, beta=beta)


def causal_convolution(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """With the arguments of causal-conv1d's causal_conv1d_fn."""
    assert seq_idx is None and initial_states is None and not return_final_states and activation == "silu"
    return F.silu(F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight[:, None], bias, groups=len(weight)))


def parity_with_installed_kernels(kind):
    """As if flash-linear-attention and causal-conv1d were installed when transformers was imported."""
    fla, ops, conv = ModuleType("fla"), ModuleType("fla.ops"), ModuleType("causal_conv1d")
    fla.ops, ops.gated_delta_rule, ops.kda = ops, ModuleType("fla.ops.gated_delta_rule"), ModuleType("fla.ops.kda")
    ops.gated_delta_rule.chunk_gated_delta_rule = ops.kda.chunk_kda = chunk_rule
    conv.causal_conv1d_fn = causal_convolution
    sys.modules.update({"fla": fla, "fla.ops": ops, "causal_conv1d": conv})
    modeling, name = modeling_of(make_model(kind)[0]), SCANS[kind]
    before = getattr(modeling, name), modeling.causal_conv1d_fn
    in_fla = "chunk_kda" if "kimi" in name else "chunk_gated_delta_rule"
    try:
        setattr(modeling, name, use_kernel_func_from_hub_with_fallback(in_fla, "fla")(before[0]))
        modeling.causal_conv1d_fn = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")(
            before[1]
        )
        return parity_in_float64(kind, "block", DOCUMENTS, "position_ids")
    finally:
        setattr(modeling, name, before[0])
        modeling.causal_conv1d_fn = before[1]
        for module in ("fla", "fla.ops", "causal_conv1d"):
            del sys.modules[module]


@pytest.mark.parametrize("kind", list(SCANS))
def test_installed_kernels_are_called_with_their_own_arguments(ranks2, kind):
    per_rank = ranks2(parity_with_installed_kernels, kind)
    for loss_error, logits_error, gradient_errors in per_rank:
        # F.normalize has an epsilon of its own.
        assert max(loss_error, logits_error, *gradient_errors.values()) < 1e-12


class Group:
    """Two ranks, of which this process is the first: enough for what is refused before anything is gathered."""

    def rank(self):
        return 0

    def size(self):
        return 2


def split_for(cp, num_tokens=8):
    layout = zigzag(num_tokens, cp.degree)
    own = layout.token_ids(cp.rank)[None]
    cp.sequence = LocalSequence(
        layout=layout, num_tokens=num_tokens, position_ids_BL=own, shift="model", shift_labels_BL=own
    )
    return own


def adapted(kind="qwen3_next"):
    model, blocks = make_model(kind)
    cp = ContextParallel(Group())
    adapt(model, blocks, cp)
    return model, cp


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_layers_of_linear_attention_are_adapted(kind):
    model, _ = adapted(kind)
    mixers = [name for name, module in model.named_modules() if is_linear_attention(module)]
    attribute = "self_attn" if kind == "kimi_linear" else "linear_attn"
    assert mixers == [f"model.layers.0.{attribute}"]
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == mixers


def others_after_an_adapted_model(kind):
    """Whether models that were not adapted, older and newer, compute what they did."""
    model, ids = make_model(kind)[0], whole_batch()["input_ids"]
    before = model(input_ids=ids).logits
    parity(kind)
    return torch.equal(model(input_ids=ids).logits, before), torch.equal(
        make_model(kind)[0](input_ids=ids).logits, before
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_not_adapted_computes_what_it_did(ranks2, kind):
    assert ranks2(others_after_an_adapted_model, kind) == [(True, True)] * 2


def without_gathers(monkeypatch):
    """What the functions are replaced with, where a test is not about their results."""
    monkeypatch.setitem(hugging_face_linear._KNOWN, "causal_conv1d_fn", lambda call, original, x, *args, **kwargs: x)


def test_a_function_that_was_not_called_by_its_name_is_an_error(monkeypatch):
    model, cp = adapted()
    split_for(cp)
    without_gathers(monkeypatch)
    scan = "torch_chunk_gated_delta_rule"
    monkeypatch.setattr(modeling_of(model), scan, getattr(modeling_of(model), scan).original)
    with pytest.raises(RuntimeError, match=rf"model\.layers\.0 did not call {scan} by the name.*rank's tokens only"):
        model.model.layers[0].linear_attn(torch.randn(1, 4, 32))


def test_a_copy_of_an_adapted_model_works_on_the_same_sequence():
    model, cp = adapted()
    copied = deepcopy(model)
    layer = copied.model.layers[0].linear_attn
    assert layer.forward.cp is cp and layer.forward.forward.__self__ is layer


def test_a_cache_that_remembers_is_refused(monkeypatch):
    model, cp = adapted()
    split_for(cp)
    without_gathers(monkeypatch)
    with pytest.raises(ValueError, match=r"Linear attention in model\.layers\.0: a state from or for a cache"):
        model.model.layers[0].linear_attn(torch.randn(1, 4, 32), DynamicCache(config=model.config))


def test_document_marks_that_the_batch_does_not_have_are_refused():
    model, cp = adapted()
    ids = split_for(cp)
    with pytest.raises(ValueError, match=r"Linear attention in model\.layers\.0: cu_seq_lens_q is given"):
        model(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 8]))


def test_a_model_outside_of_a_step_says_what_is_missing():
    model, _ = adapted()
    with pytest.raises(RuntimeError, match=r"no batch was split.*ZigZagContextParallel"):
        model.model.layers[0].linear_attn(torch.randn(1, 4, 32))
