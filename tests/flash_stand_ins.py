"""FlashAttention packages with the signatures of the real ones and our reference behind them.

Taken from flash-attn-4 4.0.0b36, flash-attn-3 of 2026-08-15, flash-attn 2.8.4 and torch 2.13; of flash-attn-4 the
parameters that something here could pass.
"""

import sys
import types

import torch

from lightning_moe_strategy.kernels.attention_rows import REFERENCE, Rows


def varlen_rows(handed):
    """What the cumulative lengths say, which must be int32 on the device of the query and fit the rest."""
    lengths = []
    for name, most, tensor in (("cu_seqlens_q", "max_seqlen_q", "q"), ("cu_seqlens_k", "max_seqlen_k", "k")):
        bounds = handed[name]
        assert bounds.dtype == torch.int32 and bounds.device == handed["q"].device and bounds.is_contiguous()
        assert handed[tensor].dim() == 3 and bounds[0] == 0 and bounds[-1] == handed[tensor].shape[0]
        assert handed[tensor].stride(-1) == 1
        lengths.append(tuple(bounds.diff().tolist()))
        assert handed[most] == max(lengths[-1])
    left, right = handed["window_size_left"], handed["window_size_right"]
    assert right == 0
    return Rows(*lengths, None if left in (None, -1) else left + 1)


def fake_forward(handed):
    assert handed["causal"] is True
    return REFERENCE.forward(handed["q"], handed["k"], handed["v"], varlen_rows(handed), handed["softmax_scale"])


def fake_backward(handed):
    assert handed["lse"].is_contiguous() and handed["lse"].dtype == torch.float32
    assert handed["lse"].shape == handed["q"].shape[1::-1] and handed["out"].shape == handed["dout"].shape
    assert handed["deterministic"] == torch.are_deterministic_algorithms_enabled()
    of_rows = (handed["dout"], handed["q"], handed["out"], handed["lse"])
    grads = REFERENCE.backward(of_rows, handed["k"], handed["v"], varlen_rows(handed), handed["softmax_scale"])
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, (handed["q"], handed["k"], handed["v"]), strict=True))


Maybe = torch.Tensor | None


def flash_attention_2_op_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Maybe = None,
    return_softmax: bool = False,
    block_table: Maybe = None,
    leftpad_k: Maybe = None,
    seqused_k: Maybe = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    assert dropout_p == softcap == 0.0 and not return_softmax
    return *fake_forward(locals()), torch.empty(0), torch.empty(0)


def flash_attention_2_op_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Maybe,
    dk: Maybe,
    dv: Maybe,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Maybe,
    deterministic: bool,
    rng_state: Maybe = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    assert causal and dropout_p == softcap == 0.0 and alibi_slopes is None
    for into, grad in zip((dq, dk, dv), fake_backward(locals() | {"lse": softmax_lse}), strict=True):
        into.copy_(grad)
    return torch.empty(0)


def flash_attention_3_op_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: Maybe = None,
    v_new: Maybe = None,
    qv: Maybe = None,
    out_: Maybe = None,
    cu_seqlens_q: Maybe = None,
    cu_seqlens_k: Maybe = None,
    cu_seqlens_k_new: Maybe = None,
    seqused_q: Maybe = None,
    seqused_k: Maybe = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Maybe = None,
    kv_batch_idx: Maybe = None,
    leftpad_k: Maybe = None,
    rotary_cos: Maybe = None,
    rotary_sin: Maybe = None,
    seqlens_rotary: Maybe = None,
    q_descale: Maybe = None,
    k_descale: Maybe = None,
    v_descale: Maybe = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Maybe = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    assert k_new is qv is out_ is None
    return *fake_forward(locals()), torch.empty(0), torch.empty(0)


def flash_attention_3_op_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: Maybe = None,
    cu_seqlens_k: Maybe = None,
    sequed_q: Maybe = None,
    sequed_k: Maybe = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Maybe = None,
    dk: Maybe = None,
    dv: Maybe = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    assert is_causal
    for into, grad in zip((dq, dk, dv), fake_backward(locals() | {"lse": softmax_lse}), strict=True):
        into.copy_(grad)
    return torch.empty(0)


def flash_attention_4_forward(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    learnable_sink=None,
    return_lse=False,
    out=None,
    lse=None,
    gather_kv_indices=None,
    gather_bwd_recompute_p=False,
):
    assert return_lse and q.dtype == torch.bfloat16
    return *fake_forward(locals()), None, None, None


def flash_attention_4_backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    m_block_size=64,
    n_block_size=128,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
):
    assert causal
    return fake_backward(locals())


def torch_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, debug, **options):
    assert dropout_p == 0.0 and debug is False and set(options) == {"scale", "window_size_left", "window_size_right"}
    handed = dict(q=query, k=key, v=value, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, max_seqlen_q=max_q)
    handed |= dict(max_seqlen_k=max_k, causal=is_causal, softmax_scale=options["scale"], **options)
    return *fake_forward(handed), None, None, None


def torch_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *rng,
    **options,
):
    assert dropout_p == 0.0 and is_causal and [x.dtype for x in rng] == [torch.uint64] * 2
    handed = dict(q=query, k=key, v=value, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, max_seqlen_q=max_q)
    handed |= dict(max_seqlen_k=max_k, dout=grad_out, out=out, lse=logsumexp, softmax_scale=options["scale"], **options)
    return fake_backward(handed | {"deterministic": torch.are_deterministic_algorithms_enabled()})


def as_op(function, *mutated):
    """As the packages register theirs, which hides the signature."""
    return torch.library.custom_op(f"fake_flash::{function.__name__}", function, mutates_args=mutated)


GRADIENTS = ("dq", "dk", "dv")
MODULES = {
    "flash_attention_4": {
        "flash_attn.cute.interface": {
            "_flash_attn_fwd": flash_attention_4_forward,
            "_flash_attn_bwd": flash_attention_4_backward,
        }
    },
    "flash_attention_3": {
        "flash_attn_interface": {
            "_flash_attn_forward": as_op(flash_attention_3_op_forward),
            "_flash_attn_backward": as_op(flash_attention_3_op_backward, *GRADIENTS),
        }
    },
    "flash_attention_2": {
        "flash_attn.flash_attn_interface": {
            "_flash_attn_varlen_forward": as_op(flash_attention_2_op_forward),
            "_flash_attn_varlen_backward": as_op(flash_attention_2_op_backward, *GRADIENTS),
        }
    },
}


def install(patch, name, **functions):
    """A stand-in for the package; ``functions`` in place of some of its own."""
    if name == "torch":
        patch.setattr(torch.ops.aten, "_flash_attention_forward", torch_forward)
        patch.setattr(torch.ops.aten, "_flash_attention_backward", torch_backward)
        return
    for path, contents in MODULES[name].items():
        packages = path.split(".")
        for length in range(1, len(packages) + 1):
            patch.setitem(sys.modules, ".".join(packages[:length]), types.ModuleType(path))
        vars(sys.modules[path]).update({**contents, **functions})
