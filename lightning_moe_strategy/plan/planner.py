"""Plan one run: ``plan(PlanRequest(...))`` returns a ``Plan`` whose ``to_json`` has the keys of docs/planning.md.

GB is 1e9 bytes, MB 1e6; memory, traffic and seconds are those of the busiest GPU.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, get_args

from lightning_moe_strategy.plan import figures_json
from lightning_moe_strategy.plan.assumptions import Seed, seed_cluster
from lightning_moe_strategy.plan.cluster import Cluster, load_cluster
from lightning_moe_strategy.plan.differences import Difference, differences
from lightning_moe_strategy.plan.errors import PlanError, require, unknown
from lightning_moe_strategy.plan.evaluate import Arithmetic, Exact
from lightning_moe_strategy.plan.layout import resolve
from lightning_moe_strategy.plan.model_files import load_model
from lightning_moe_strategy.plan.search import Degrees, Evaluation, best, price, ranked
from lightning_moe_strategy.plan.verdict import verdict
from lightning_moe_strategy.plan.workload import (
    Assumptions,
    Balance,
    Dispatcher,
    EPChunks,
    Optimizer,
    Recompute,
    Workload,
)

JsonValue: TypeAlias = "str | int | float | bool | None | list[JsonValue] | dict[str, JsonValue]"
Json: TypeAlias = dict[str, JsonValue]

DEGREES = tuple(field.name for field in dataclasses.fields(Degrees))
"""d_rep, fsdp, cp, cp_inter, e_rep, e_fsdp, ep."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned; the fields are the options of ``lightning-moe plan``. A degree of None is chosen."""

    model: str
    """A preset's name, or the path of a Hugging Face ``config.json`` (or its folder) or of a YAML of ours."""
    cluster: str = "gb200-nvl72"
    """A preset's name or the path of a YAML with the fields of ``Cluster``."""
    gpus: int = 256
    context: int = 1_048_576
    """Tokens of one sequence."""
    d_rep: int | None = None
    fsdp: int | None = None
    cp: int | None = None
    cp_inter: int | None = None
    e_rep: int | None = None
    e_fsdp: int | None = None
    ep: int | None = None
    micro_batch: int = 1
    """Sequences of one micro-batch in each cp group."""
    recompute: Recompute = "block"
    """``selective`` keeps the output of the attention as well, ``none`` everything."""
    dispatcher: Dispatcher = "all_to_all"
    balance: Balance | None = None
    """Routing to provide memory for; time is that of even routing.

    ``redundant``: any, with ``balance="redundant"`` of the strategy: even rows, and weights of experts that move. None:
    ``worst`` under the seed's assumptions, else ``balanced``.
    """
    ep_chunks: EPChunks = "none"
    """Parts of a layer's tokens that go through its experts one after the other, as the strategy's ``ep_chunks``.

    ``adaptive``: as many as the rows of ``balance`` need. Even routing needs one, and time is that of even routing.
    """
    ep_chunk_bytes: int | None = None
    """Of expert rows, what ``adaptive`` stays below. None: 1.5 times the rows of even routing."""
    optimizer: Optimizer = "adamw"
    assumptions: Assumptions = "exact"
    achieved_tflops: float | None = None
    """FLOP/s that a GPU reaches in the linear layers, in 1e12. None: the cluster's, from published runs."""
    tokens: float | None = None
    """Tokens of the whole training run, for its days."""
    fa4_pr_2816: bool | None = None
    """Sparse MLA kernels that neither keep P nor materialise dS (FlashAttention pull request 2816, and our own).

    None: False under the seed's assumptions, else True.
    """
    fa4_token_chunk: int | None = None
    """Tokens whose dS that pull request's backward pass has in memory at a time; 0 is those of a whole sequence.

    None: none, as our own kernel.
    """


class Plan:
    """One layout with all that follows from it. Made by ``plan`` and ``search``."""

    def __init__(self, request: PlanRequest, evaluation: Evaluation) -> None:
        dense, experts = evaluation.dense.side, evaluation.experts.side
        self.request = dataclasses.replace(request, **vars(dense), **vars(experts))
        """The request with every degree filled in."""
        self.evaluation = evaluation

    @property
    def workload(self) -> Workload:
        """Model, machines and settings."""
        return self.evaluation.arithmetic.workload

    @property
    def fits(self) -> bool:
        """Peak memory is at most the device's."""
        return self.evaluation.fits

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """What ``search`` ranks by."""
        return self.evaluation.times.tokens_per_second

    @cached_property
    def verdict(self) -> str:
        """One sentence: fits or not, hidden or not, what breaks first, the one change that helps most."""
        return verdict(self.evaluation)

    @cached_property
    def differences(self) -> list[Difference]:
        """Seed against exact dimensions on this layout; empty for models the seed does not price."""
        return _differences(self)

    @property
    def warnings(self) -> list[str]:
        """What the layout puts on the critical path over RDMA, in the strategy's own words."""
        work, evaluation = self.workload, self.evaluation
        return resolve(evaluation.dense.side, evaluation.experts.side, work.gpus, work.cluster).warnings()

    def to_json(self) -> Json:
        """The stable keys of docs/planning.md; every value is a plain JSON value."""
        return figures_json.to_json(self)


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One quantity of two plans."""

    quantity: str
    """Path of the JSON key, for example ``memory_gb.total``."""
    unit: str
    first: float
    second: float

    @property
    def ratio(self) -> float | None:
        """Second over first; None where the first is zero."""
        return self.second / self.first if self.first else None


def plan(request: PlanRequest) -> Plan:
    """The plan of one layout; degrees left None are chosen as ``search`` ranks them.

    Raises:
        PlanError: unknown model or cluster, sizes below one, degrees that do not multiply to the world, a
            context that the cp ranks cannot share.
    """
    return Plan(request, best(arithmetic(request), _degrees(request)))


def search(request: PlanRequest, *, limit: int | None = 20) -> list[Plan]:
    """Layouts of the world, best first: those that fit by tokens/s/GPU, then the others by peak memory.

    Degrees given in the request are kept. ``limit=None`` returns every layout.
    """
    if limit is not None:
        require("limit", limit, limit >= 1, "at least 1", "Leave it out for the 20 best.")
    found = ranked(arithmetic(request), _degrees(request))
    return [Plan(request, evaluation) for evaluation in found[:limit]]


def compare(first: Plan, second: Plan) -> list[ComparisonRow]:
    """Two plans quantity by quantity, in the order of the JSON: every number that both have."""
    numbers, others = (dict(figures_json.numbers(plan.to_json())) for plan in (first, second))
    return [
        ComparisonRow(quantity=path, unit=figures_json.unit(path), first=value, second=others[path])
        for path, value in numbers.items()
        if path in others
    ]


def parse_layout(text: str) -> dict[str, int]:
    """Degrees from ``d_rep,fsdp,cp/e_fsdp,ep`` or ``d_rep,fsdp,cp/e_rep,e_fsdp,ep``; cp may be ``8x8`` (inter x intra).

    ``dataclasses.replace(request, **parse_layout("4,1,64/4,64"))`` is what ``--compare`` plans.
    """
    pattern = r"(\d+),(\d+),(?:(\d+)x)?(\d+)/(?:(\d+),)?(\d+),(\d+)"
    match = re.fullmatch(pattern, re.sub(r"[\s()]", "", text))
    if match is None:
        raise PlanError(
            f"layout({text!r}) is not d_rep,fsdp,cp/e_fsdp,ep. Write for example 4,1,64/4,64, or 4,1,8x8/32,8 for "
            "a cp of two dimensions."
        )
    d_rep, fsdp, inter, cp, e_rep, e_fsdp, ep = (int(part) if part else 1 for part in match.groups())
    return {
        "d_rep": d_rep,
        "fsdp": fsdp,
        "cp": cp * inter,
        "cp_inter": inter,
        "e_rep": e_rep,
        "e_fsdp": e_fsdp,
        "ep": ep,
    }


def arithmetic(request: PlanRequest) -> Arithmetic:
    """What prices the layouts of a request; every field but the degrees is checked here."""
    _check(request)
    is_seed = request.assumptions == "seed"
    cluster = load_cluster(request.cluster)
    if is_seed:
        cluster = seed_cluster(cluster)
    work = Workload(
        model=load_model(request.model),
        cluster=cluster,
        gpus=request.gpus,
        context=request.context,
        micro_batch=request.micro_batch,
        recompute=request.recompute,
        dispatcher=request.dispatcher,
        balance=request.balance or ("worst" if is_seed else "balanced"),
        ep_chunks=request.ep_chunks,
        ep_chunk_bytes=request.ep_chunk_bytes,
        optimizer=request.optimizer,
        fa4_pr_2816=not is_seed if request.fa4_pr_2816 is None else request.fa4_pr_2816,
        achieved_flops=_achieved(request, cluster),
        fa4_token_chunk=request.fa4_token_chunk,
    )
    _check_token_chunk(work)
    return Seed(workload=work) if is_seed else Exact(workload=work)


def _achieved(request: PlanRequest, cluster: Cluster) -> float:
    if request.achieved_tflops is None:
        return cluster.achieved_flops
    achieved = request.achieved_tflops * 1e12
    require(
        "achieved_tflops",
        request.achieved_tflops,
        achieved <= cluster.peak_flops,
        f"at most the {cluster.peak_flops / 1e12:g} of a {cluster.gpu}",
        "Give dense bf16 TFLOP/s of one GPU.",
    )
    return achieved


def _check(request: PlanRequest) -> None:
    for name in ("gpus", "context", "micro_batch", *DEGREES):
        value = getattr(request, name)
        if value is None and name in DEGREES:
            continue
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        require(name, value, is_count, "a whole number of at least 1", "Correct it or leave it out.")
    for name in ("achieved_tflops", "tokens"):
        value = getattr(request, name)
        if value is not None:
            require(name, value, math.isfinite(value) and value > 0, "above 0", "Correct it or leave it out.")
    _check_chunks(request)
    kinds = {"recompute": Recompute, "dispatcher": Dispatcher, "optimizer": Optimizer, "assumptions": Assumptions}
    if request.balance == "redundant":
        rule = "left out where balance is redundant: every GPU computes as many rows, whatever the routing"
        require("ep_chunks", request.ep_chunks, request.ep_chunks in ("none", 1), rule, "Leave it out.")
    if request.balance is not None:
        kinds["balance"] = Balance
    for name, kind in kinds.items():
        value, known = getattr(request, name), get_args(kind)
        if value not in known:
            raise unknown(name, str(value), known, remedy="Choose one of them.")


def _check_token_chunk(work: Workload) -> None:
    chunk = work.fa4_token_chunk
    if chunk is None:
        return
    is_count = isinstance(chunk, int) and not isinstance(chunk, bool) and chunk >= 0
    require("fa4_token_chunk", chunk, is_count, "a whole number of at least 0", "Correct it or leave it out.")
    rule, remedy = "left out where attention is not sparse", "Leave it out."
    require("fa4_token_chunk", chunk, work.model.is_sparse, rule, remedy)
    rule, remedy = "left out without fa4_pr_2816, whose option it is", "Say fa4_pr_2816, or leave it out."
    require("fa4_token_chunk", chunk, work.fa4_pr_2816, rule, remedy)


def _check_chunks(request: PlanRequest) -> None:
    chunks, size = request.ep_chunks, request.ep_chunk_bytes
    is_count = isinstance(chunks, int) and not isinstance(chunks, bool) and chunks >= 1
    rule = "'none', 'adaptive' or a whole number of at least 1"
    require("ep_chunks", chunks, is_count or chunks in ("none", "adaptive"), rule, "Choose one of them.")
    if size is not None:
        is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        require("ep_chunk_bytes", size, is_size, "a whole number of at least 1", "Correct it or leave it out.")
        rule = "left out unless ep_chunks is adaptive: a plan takes other chunks as they are"
        require("ep_chunk_bytes", size, chunks == "adaptive", rule, "Leave it out.")


def _degrees(request: PlanRequest) -> Degrees:
    return Degrees(**{name: getattr(request, name) for name in DEGREES})


def _differences(made: Plan) -> list[Difference]:
    seed_request = dataclasses.replace(
        made.request,
        assumptions="seed",
        recompute="block",
        dispatcher="all_to_all",
        balance=None,
        ep_chunks="none",
        ep_chunk_bytes=None,
        optimizer="adamw",
        achieved_tflops=None,
        fa4_token_chunk=None,
    )
    dense, experts = made.evaluation.dense.side, made.evaluation.experts.side
    exact = price(Exact(workload=made.workload), dense, experts)
    if made.request.assumptions == "seed":
        exact_request = dataclasses.replace(made.request, assumptions="exact", balance=None)
        exact = price(arithmetic(exact_request), dense, experts)
    try:
        seed = price(arithmetic(seed_request), dense, experts)
    except PlanError:
        return []
    return differences(seed, exact)
