"""One sentence on a layout: fits or not, hidden or not, what breaks first, the one change that helps most.

Each part is computed: the context is grown until something breaks, and every single change is priced.
"""

from collections.abc import Iterator

from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.layout import DenseSide, ExpertSide
from lightning_moe_strategy.plan.memory import RESIDENT, TRANSIENT
from lightning_moe_strategy.plan.search import Degrees, Evaluation, best, price, with_workload

WORTHWHILE = 1.01
"""Speed-up from which a change is worth naming."""
NOTHING_GAINS = "no single change gains 1 %"

_PLAIN_WORDS = {
    "masters": "FP32 weights",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "bf16_copy": "the resident bf16 copy",
    "optimizer_temporaries": "the optimizer's temporaries",
    "expert_units": "gathered experts",
    "dense_units": "gathered dense weights",
    "reduce_scatter_input": "gradients on their way",
    "block_inputs": "block inputs",
    "dsa_topk": "the indexers' top-k",
    "router_state": "routing decisions",
    "saved_activations": "activations kept for the backward",
    "ep_buffers": "dispatch buffers",
    "expert_rows": "rows of the experts' GEMMs",
    "recompute_backward": "one layer's recompute and backward",
    "gathered_kv": "gathered keys and values",
    "head_and_logits": "head and logits",
    "allocator_reserve": "allocator reserve",
}


def verdict(evaluation: Evaluation) -> str:
    """The sentence."""
    parts = [_memory(evaluation), _hiding(evaluation), breaks_first(evaluation), _change(evaluation)]
    return "; ".join(parts) + "."


def dynamic_bytes(evaluation: Evaluation) -> float:
    """Bytes at the peak that grow with the tokens of a GPU."""
    fixed = (*RESIDENT, "bf16_copy", *TRANSIENT, "allocator_reserve")
    return sum(size for name, size in evaluation.peak.buckets.items() if name not in fixed)


def _memory(evaluation: Evaluation) -> str:
    work, peak = evaluation.arithmetic.workload, evaluation.peak.total
    device = work.cluster.memory_bytes
    if evaluation.fits:
        return (
            f"Fits {work.gpus} {work.cluster.gpu} with {(device - peak) / 1e9:.1f} GB of {device / 1e9:.0f} GB to spare"
        )
    return f"Does not fit {work.gpus} {work.cluster.gpu}: {peak / 1e9:.1f} GB of {device / 1e9:.0f} GB"


def _hiding(evaluation: Evaluation) -> str:
    tokens, needed = evaluation.dense.tokens, evaluation.figures.min_tokens_to_hide
    if not needed:
        return "no shard is gathered"
    state = "hides" if evaluation.is_hidden else "does not hide"
    return f"eFSDP {state} behind compute ({tokens:,} tokens per GPU, {needed:,.0f} needed)"


def breaks_first(evaluation: Evaluation) -> str:
    """What fails now, or what fails first as the context grows on the same layout."""
    work = evaluation.arithmetic.workload
    device = work.cluster.memory_bytes
    if not evaluation.fits:
        dynamic = dynamic_bytes(evaluation)
        name, size = max(evaluation.peak.buckets.items(), key=lambda item: item[1])
        largest = f"most of it {_PLAIN_WORDS[name]}, {size / 1e9:.1f} GB"
        if dynamic > device:
            return f"dynamic memory breaks it: {dynamic / 1e9:.1f} GB alone exceed the device, {largest}"
        resident = sum(evaluation.peak.buckets.get(name, 0.0) for name in (*RESIDENT, "bf16_copy"))
        if resident > device:
            return f"resident state breaks it: {resident / 1e9:.1f} GB alone exceed the device, {largest}"
        kind = "dynamic memory" if dynamic > resident else "resident state"
        return f"{kind} breaks it: {max(dynamic, resident) / 1e9:.1f} GB, {largest}"
    if not evaluation.is_hidden:
        name = "experts" if evaluation.experts.links.hidden > evaluation.dense.links.hidden else "dense weights"
        return (
            f"the traffic of the {name} breaks first: {evaluation.times.exposed / evaluation.times.step:.1%} of a step"
        )
    longest = longest_context(evaluation)
    if longest is None:
        return "nothing breaks before a context of 64 times the length"
    return f"as the context grows, memory breaks first, above {longest:,} tokens"


def longest_context(evaluation: Evaluation) -> int | None:
    """The longest context that fits this layout, in steps of what its cp ranks can share; None above 64 times."""
    work, side = evaluation.arithmetic.workload, evaluation.dense.side
    step = 2 * side.cp if side.cp > 1 else 1

    def fits(context: int) -> bool:
        arithmetic = with_workload(evaluation.arithmetic, context=context)
        return price(arithmetic, side, evaluation.experts.side).fits

    low, high = work.context // step, 64 * work.context // step
    if fits(high * step):
        return None
    # A thousandth of the length is as fine as the arithmetic is.
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def _change(evaluation: Evaluation) -> str:
    changed = [change for change in changes(evaluation) if change[1].fits or not evaluation.fits]
    fitting = [change for change in changed if change[1].fits]
    before = evaluation.times.tokens_per_second
    if not evaluation.fits:
        if fitting:
            text, after = max(fitting, key=lambda change: change[1].times.tokens_per_second)
            return f"what helps most is to {text}: {after.peak.total / 1e9:.1f} GB, which fits"
        text, after = min(changed, key=lambda change: change[1].peak.total)
        if after.peak.total >= evaluation.peak.total:
            return "no single change lowers it"
        return f"what helps most is to {text}: {after.peak.total / 1e9:.1f} GB, still too much"
    if not fitting:
        return NOTHING_GAINS
    text, after = max(fitting, key=lambda change: change[1].times.tokens_per_second)
    gain = after.times.tokens_per_second / before
    if gain < WORTHWHILE:
        return NOTHING_GAINS
    return f"what helps most is to {text}: {gain - 1:.0%} more tokens per second"


def changes(evaluation: Evaluation) -> Iterator[tuple[str, Evaluation]]:
    """Every single change of the run, in words, and the run after it."""
    work, arithmetic = evaluation.arithmetic.workload, evaluation.arithmetic
    dense, experts = evaluation.dense.side, evaluation.experts.side
    other = best(arithmetic, Degrees())
    if (other.dense.side, other.experts.side) != (dense, experts):
        yield f"lay it out as {layout_text(other.dense.side, other.experts.side)}", other
    settings: list[tuple[str, dict[str, object]]] = [
        (f"raise the micro-batch to {2 * work.micro_batch}", {"micro_batch": 2 * work.micro_batch})
    ]
    if work.micro_batch > 1:
        settings.append((f"lower the micro-batch to {work.micro_batch // 2}", {"micro_batch": work.micro_batch // 2}))
    settings += [
        (f"recompute {how}", {"recompute": how}) for how in ("none", "selective", "block") if how != work.recompute
    ]
    if work.balance == "worst" and work.ep_chunks == "none":
        settings.append(("run experts in adaptive chunks", {"ep_chunks": "adaptive"}))
    if work.optimizer == "adamw":
        settings.append(("use Muon", {"optimizer": "muon"}))
    if work.model.is_sparse and not work.fa4_pr_2816:
        settings.append(("use the attention of FlashAttention pull request 2816", {"fa4_pr_2816": True}))
    for text, change in settings:
        try:
            yield text, price(with_workload(arithmetic, **change), dense, experts)
        except PlanError:  # the seed has no figure for it
            continue
    if not evaluation.fits:
        yield f"take {2 * work.gpus} GPUs", best(with_workload(arithmetic, gpus=2 * work.gpus), Degrees())


def layout_text(dense: DenseSide, experts: ExpertSide) -> str:
    """(d_rep, fsdp, cp)/(e_fsdp, ep) as the seed writes it; e_rep and a two-dimensional cp where they are used."""
    cp = f"{dense.cp_inter}x{dense.cp_intra}" if dense.cp_inter > 1 else str(dense.cp)
    replicas = f"{experts.e_rep}, " if experts.e_rep > 1 else ""
    return f"({dense.d_rep}, {dense.fsdp}, {cp})/({replicas}{experts.e_fsdp}, {experts.ep})"
