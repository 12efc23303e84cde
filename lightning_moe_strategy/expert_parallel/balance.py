"""Balance experts by a bias that only the choice of experts sees, without an auxiliary loss.

DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664. A router adds the bias to its scores when
it picks and leaves it out of the weights. After every step the bias of an expert with less than the mean load goes up
and that of one with more goes down, by a fixed rate.

Shapes: E experts of a layer, A experts of all layers together, T tokens of this rank, K experts per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.expert_parallel.experts import RoutingObserver, routing_observers
from lightning_moe_strategy.units import sparse_layer_of

Balance = Literal["none", "bias", "redundant"]

# Our own; DeepSeek-V3 and whoever follows it; LFM2 and AFMoE; Zaya. Nothing in transformers updates any of them.
BIAS_NAMES = ("balance_bias", "e_score_correction_bias", "expert_bias", "balancing_biases")


@dataclass(frozen=True, kw_only=True)
class BalanceOptions:
    """How the strategy keeps experts evenly loaded. Coefficients of 0 leave a loss out."""

    balance: Balance = "none"
    max_imbalance: float = 1.0
    """Of ``redundant``: rows of the busiest rank over the mean, up to which no expert moves."""
    bias_rate: float = 1e-3
    """What a bias changes by in a step."""
    sequence_loss: float = 0.0
    batch_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.balance not in get_args(Balance):
            raise ValueError(f"balance({self.balance!r}) must be one of {', '.join(map(repr, get_args(Balance)))}.")
        if not 1.0 <= self.max_imbalance < float("inf"):
            raise ValueError(
                f"max_imbalance({self.max_imbalance}) must be at least 1: rows of the busiest rank over the mean. "
                "1.0 is exact balance."
            )
        if self.max_imbalance != 1.0 and self.balance != "redundant":
            raise ValueError(
                f"max_imbalance({self.max_imbalance}) is what balance='redundant' allows, and balance is "
                f"{self.balance!r}. Leave it out, or set balance='redundant'."
            )
        if not self.bias_rate > 0.0:
            raise ValueError(f"balance_bias_rate({self.bias_rate}) must be above 0. Set balance='none' to keep biases.")
        named = {
            "sequence_balance_loss": self.sequence_loss,
            "batch_balance_loss": self.batch_loss,
            "router_z_loss": self.z_loss,
        }
        for name, coefficient in named.items():
            if not 0.0 <= coefficient < float("inf"):
                raise ValueError(f"{name}({coefficient}) must be a coefficient of at least 0; 0 leaves it out.")

    @property
    def has_losses(self) -> bool:
        return self.sequence_loss > 0.0 or self.batch_loss > 0.0 or self.z_loss > 0.0

    @property
    def is_on(self) -> bool:
        return self.balance == "bias" or self.has_losses

    @property
    def redundancy(self) -> float | None:
        """The imbalance up to which experts stay at home; None where they always do."""
        return self.max_imbalance if self.balance == "redundant" else None


def biases_as_buffers(root: nn.Module, experts: Mapping[str, nn.Module], *, required: bool) -> None:
    """Make every balance bias of ``root`` an FP32 buffer, under the name it has. In place, before anything is sharded.

    Some models hold it as a parameter without a gradient, which would be sharded, and rounded with the weights: steps
    of 1e-3 vanish in bf16.

    Raises:
        ValueError: biases are ``required``, and no layer has one, or one has another number of values than its layer
            has experts.
    """
    biases = _find_biases(root, experts)
    if required:
        _refuse_biases(biases, experts)
    for bias in biases.values():
        tensor = bias.tensor
        if bias.leaf in bias.owner._parameters:
            del bias.owner._parameters[bias.leaf]
            bias.owner.register_buffer(bias.leaf, tensor.detach().float())
        elif tensor.dtype != torch.float32:
            bias.owner._buffers[bias.leaf] = tensor.float()


class BalanceBias:
    """Counts where tokens go during a fit, and after every optimizer step moves the biases of all layers.

    What counts are the tokens whose backward pass has run since the last step: no padding, no evaluation, no forward
    without gradients, no recompute. All ranks hold the same biases, from one sum of the counts of all layers.
    """

    def __init__(self, root: nn.Module, experts: Mapping[str, nn.Module], *, rate: float, device: torch.device) -> None:
        self.rate = rate
        self.has_seen_tokens = False
        self._biases = _find_biases(root, experts)
        for name, bias in self._biases.items():
            if isinstance(bias.tensor, nn.Parameter):
                raise ValueError(
                    f"{bias.leaf} beside {name} is a parameter, which an earlier Trainer without balance='bias' has "
                    "sharded. Build the model anew, or use balance='bias' in every Trainer."
                )
        self._sizes = [bias.tensor.numel() for bias in self._biases.values()]
        self._seen_A = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self._counted_A = torch.zeros_like(self._seen_A)
        self._micro_batch: MicroBatch | None = None
        self._observed: list[tuple[list[RoutingObserver], RoutingObserver]] = []
        for name, seen_E in zip(self._biases, torch.split(self._seen_A, self._sizes), strict=True):
            observer = self._observer(seen_E)
            self._observed.append((routing_observers(experts[name]), observer))
            self._observed[-1][0].append(observer)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BalanceBias":
        return self  # a copy of a model (an averaged one) is not trained

    def start_step(self) -> None:
        """Forget what no optimizer step followed: gradients of a skipped step are dropped, and so are its counts."""
        self._counted_A.zero_()

    def start_micro_batch(self, micro_batch: MicroBatch) -> None:
        self._micro_batch = micro_batch
        self._seen_A.zero_()

    def end_micro_batch(self) -> None:
        self._micro_batch = None

    def before_backward(self) -> None:
        """What was routed since the last backward pass counts."""
        self._counted_A += self._seen_A
        self._seen_A.zero_()

    def update(self) -> None:
        """Move every bias by the loads of the step. Every rank calls it once after each optimizer step."""
        dist.all_reduce(self._counted_A)
        for bias, load_E in zip(self._biases.values(), torch.split(self._counted_A, self._sizes), strict=True):
            # sign(mean - load) in integers: exact, so an even load moves nothing.
            delta_E = (load_E.sum() - load_E * load_E.numel()).sign().float()
            # A common part would move all scores alike and only make the bias drift.
            delta_E = (delta_E - delta_E.mean()) * self.rate
            with torch.no_grad():
                bias.tensor.add_(delta_E.view_as(bias.tensor))
        self._counted_A.zero_()

    def close(self) -> None:
        """Count no more."""
        for observers, observer in self._observed:
            observers.remove(observer)
        self._observed = []

    def _observer(self, seen_E: Tensor) -> RoutingObserver:
        def observe(expert_ids_TK: Tensor) -> None:
            if self._micro_batch is None or not torch.is_grad_enabled():
                return
            self.has_seen_tokens = True
            ids = expert_ids_TK.detach().reshape(-1).long()
            real_T = self._micro_batch.real_tokens_T(expert_ids_TK.shape[0])
            ones = torch.ones_like(ids) if real_T is None else real_T.long().repeat_interleave(expert_ids_TK.shape[1])
            seen_E.scatter_add_(0, ids, ones)

        return observe


class _Bias(NamedTuple):
    """Where a layer's bias is held. It is looked up each time: a checkpoint or a device may bind another tensor."""

    owner: nn.Module
    leaf: str

    @property
    def tensor(self) -> Tensor:
        tensor = getattr(self.owner, self.leaf)
        assert isinstance(tensor, Tensor)
        return tensor


def _find_biases(root: nn.Module, experts: Mapping[str, nn.Module]) -> dict[str, _Bias]:
    """By the name of the layer's experts: beside them, in their router or in the module that holds both."""
    found = {}
    for name in experts:
        parent = root.get_submodule(sparse_layer_of(name))
        held = (_Bias(owner, leaf) for owner in parent.modules() for leaf in BIAS_NAMES if _holds(owner, leaf))
        if (bias := next(held, None)) is not None:
            found[name] = bias
    return found


def _holds(owner: nn.Module, leaf: str) -> bool:
    return owner._buffers.get(leaf) is not None or owner._parameters.get(leaf) is not None


def _refuse_biases(biases: Mapping[str, _Bias], experts: Mapping[str, nn.Module]) -> None:
    if not biases:
        raise ValueError(
            f"balance='bias' needs routers with a bias per expert, and none of {len(experts)} layers with experts has "
            f"one of the names {', '.join(BIAS_NAMES)}. Choose such a model (ModelConfig(balance_bias=True), "
            "DeepSeek-V3, GLM-4.5, ...), or balance with batch_balance_loss."
        )
    for name, bias in biases.items():
        num_experts, num_values = experts[name].num_experts, bias.tensor.numel()
        if num_values != num_experts:
            raise ValueError(
                f"{bias.leaf} beside {name} has {num_values} values for num_experts({num_experts}): some of its "
                "choices are no experts, and their load is not known. Set balance='none'."
            )
