"""Auxiliary losses of routers, exact under every layout, that leave the user's loss as it is.

With f = E / (K T) * (how often each expert was chosen) and P = the mean of each expert's share of a token's scores:

* sequence balance: sum over experts of f P within every sequence, mean over sequences (DeepSeek-V3, arXiv 2412.19437,
  eq. 17-20);
* batch balance: the same over all tokens of a micro-batch (Switch Transformer, arXiv 2101.03961; Qwen);
* z: mean over tokens of the square of log-sum-exp of the logits (ST-MoE, arXiv 2202.08906).

Balance losses of even loads are 1. Padding does not count, and the losses of layers add up. f, P and T are of one
micro-batch: over the ranks of cp for a sequence, over all ranks for the batch and z. A step weighs its micro-batches by
their labels, as it does the loss, so accumulating four of them is not one of four times the size: f is another.

f has no gradient, so a token's gradient needs sums of other ranks and nothing else of them. Routers are watched in the
first pass through their layer, one collective before the backward pass (and one over cp, for sequences) sums what all
layers have counted, and each router adds its gradient when the backward pass comes by. A recompute neither counts nor
communicates.

Shapes: B sequences, L tokens of this rank in each, T = B * L tokens, E experts of a layer, K experts per token.
"""

from collections.abc import Mapping, Sequence
from functools import update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_strategy._torch_compat import in_backward, unseen_by_function_modes
from lightning_moe_strategy.collectives import AnyGroup, TwoStepGroup
from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.expert_parallel.balance import BalanceOptions
from lightning_moe_strategy.expert_parallel.routers import (
    Scoring,
    SeenScoring,
    routed_layers,
    scoring_of,
    shares,
    shares_backward,
)

LOSS_NAMES = ("sequence_balance", "batch_balance", "z")


class RouterLosses:
    """Adds the gradients of the losses to the routers of a model during a fit, and knows the losses' values.

    A router is a module beside its experts that returns ``(logits_TE, weights_TK, expert_ids_TK, ...)``, as ours do
    and those of transformers.

    Raises:
        ValueError: a layer has no such module.
    """

    def __init__(
        self, root: nn.Module, experts: Mapping[str, nn.Module], options: BalanceOptions, cp_group: AnyGroup
    ) -> None:
        self.options = options
        self.cp_group = cp_group.whole if isinstance(cp_group, TwoStepGroup) else cp_group
        self.micro_batch: MicroBatch | None = None
        self.outstanding: list[RouterCall] = []
        """Forwards of routers whose backward pass is to come, in the order of the model."""
        self._value_sums: Tensor | None = None
        self._forwards = [_WatchedForward(self, *pair) for pair in routed_layers(root, experts)]

    def __deepcopy__(self, memo: dict[int, Any]) -> "RouterLosses":
        return self  # a copy of a model (an averaged one) lives on the same ranks

    def start_step(self) -> None:
        """Forget the values of a step that was skipped."""
        self._value_sums = None

    def start_micro_batch(self, micro_batch: MicroBatch) -> None:
        self.micro_batch = micro_batch
        self.outstanding = []

    def end_micro_batch(self) -> None:
        self.micro_batch = None

    def before_backward(self, num_loss_tokens: Tensor | int, *, is_mean: bool = False) -> None:
        """Sum over ranks what routers counted since the last backward pass.

        Every rank calls it. ``num_loss_tokens`` of this rank are the micro-batch's weight in the gradient of the step;
        ``is_mean`` says that this backward pass is of a mean, which nothing divides by them afterwards.
        """
        calls, self.outstanding = self.outstanding, []
        if not calls:
            return
        device = calls[0].counts_BE.device
        num_loss_tokens = torch.as_tensor(num_loss_tokens, dtype=torch.float64, device=device)
        sizes = [call.counts_BE.shape[1] for call in calls]
        lengths = [1, *(2 * size + 2 for size in sizes)]
        summed, *of_calls = _summed([num_loss_tokens, *(call.of_batch() for call in calls)], lengths, None)
        of_sequences: Sequence[Tensor | None] = [None] * len(calls)
        if self.options.sequence_loss:
            parts = [torch.stack([call.counts_BE, call.probs_BE]) for call in calls]
            of_sequences = _summed(parts, [part.numel() for part in parts], self.cp_group)
        weight = summed[0].clamp(max=1.0) if is_mean else summed[0]  # without a single token still nothing
        values = [
            call.finish(self.options, weight, batch, sequences, self.cp_group.size())
            for call, batch, sequences in zip(calls, of_calls, of_sequences, strict=True)
        ]
        sums = torch.cat([torch.stack(values).mean(0) * summed, summed])
        self._value_sums = sums if self._value_sums is None else self._value_sums + sums

    def take_values(self, device: torch.device) -> dict[str, Tensor]:
        """Means over the layers and micro-batches of the step, before coefficients. Every rank calls it once a step."""
        sums = torch.zeros(4, dtype=torch.float64, device=device) if self._value_sums is None else self._value_sums
        self._value_sums = None
        dist.all_reduce(sums)
        values = sums[:3] / sums[3].clamp(min=1.0)
        options = self.options
        wanted = (options.sequence_loss, options.batch_loss, options.z_loss)
        return {name: value for name, value, used in zip(LOSS_NAMES, values, wanted, strict=True) if used}

    def close(self) -> None:
        """Give every router its own forward back."""
        for forward in self._forwards:
            forward.undo()
        self._forwards = []


class RouterCall:
    """What one forward of a router counted, and its losses' gradient once all ranks' counts are known. FP64 sums."""

    def __init__(self, logits_TE: Tensor, expert_ids_TK: Tensor, scoring: Scoring, real_BL: Tensor) -> None:
        """``real_BL``: which tokens are no padding."""
        self.scoring, self.real_BL = scoring, real_BL
        batch, num_experts, self.top_k = real_BL.shape[0], logits_TE.shape[-1], expert_ids_TK.shape[-1]
        logits_BLE, real_BL1 = _upcast(logits_TE).view(*real_BL.shape, num_experts), real_BL[..., None]
        ids = expert_ids_TK.reshape(batch, -1).long()
        counted = real_BL1.expand(*real_BL.shape, self.top_k).reshape(batch, -1).double()
        self.counts_BE = counted.new_zeros(batch, num_experts).scatter_add_(1, ids, counted)
        self.probs_BE = (shares(logits_BLE, scoring) * real_BL1).sum(1, dtype=torch.float64)
        self.z_sum = (logits_BLE.logsumexp(-1).square() * real_BL).sum(dtype=torch.float64)
        self.slope_BE: Tensor | None = None
        """d(loss)/d(share of a token's scores), the same for all tokens of a sequence. None before the sums."""
        self.z_slope: Tensor | None = None
        """d(loss)/d(square of a token's log-sum-exp)."""
        self.is_taken = False

    def of_batch(self) -> Tensor:
        """What is summed over all ranks: counts [E], shares [E], squares, sequences."""
        num_sequences = self.z_sum.new_full((1,), self.counts_BE.shape[0])
        return torch.cat([self.counts_BE.sum(0), self.probs_BE.sum(0), self.z_sum[None], num_sequences])

    def finish(
        self, options: BalanceOptions, weight: Tensor, batch: Tensor, sequences: Tensor | None, cp: int
    ) -> Tensor:
        """Take the sums over all ranks (``batch``) and over cp (``sequences``): slopes, scaled by ``weight``.

        Returns the three values; their mean over all ranks is that of the micro-batch.
        """
        num_experts = self.counts_BE.shape[1]
        (counts_E, probs_E), (z_sum, num_rows) = batch[:-2].view(2, num_experts), batch[-2:]
        num_choices = counts_E.sum().clamp(min=1.0)
        num_tokens = num_choices / self.top_k
        load_E = num_experts * counts_E / num_choices
        slope_BE = (options.batch_loss * weight / num_tokens * load_E).expand_as(self.counts_BE)
        self.z_slope = options.z_loss * weight / num_tokens
        sequence_value = torch.zeros_like(z_sum)
        if sequences is not None:
            counts_BE, probs_BE = sequences.view(2, -1, num_experts)
            num_choices_B1 = counts_BE.sum(1, keepdim=True).clamp(min=1.0)
            num_sequences = num_rows / cp
            # Of one sequence, divided by all: the loss is a mean over sequences.
            load_BE = num_experts * counts_BE / num_choices_B1 * (self.top_k / num_choices_B1) / num_sequences
            slope_BE = slope_BE + options.sequence_loss * weight * load_BE
            # Each of its ranks knows a sequence's whole value, and the mean over ranks is to be that over sequences.
            sequence_value = (load_BE * probs_BE).sum() * (dist.get_world_size() / cp)
        self.slope_BE = slope_BE
        return torch.stack([sequence_value, (load_E * probs_E).sum() / num_tokens, z_sum / num_tokens])

    def take_gradient(self, logits_TE: Tensor) -> Tensor | None:
        """Gradient for the logits; None after the first time: a retained graph's second backward adds none."""
        if self.slope_BE is None or self.z_slope is None:
            raise RuntimeError(
                "A router's losses were not summed over the ranks before its backward pass. Call "
                "self.manual_backward(loss) and not loss.backward(), once for each forward."
            )
        if self.is_taken:
            return None
        self.is_taken = True
        logits_BLE = _upcast(logits_TE).view(*self.real_BL.shape, logits_TE.shape[-1])
        slope_B1E = self.slope_BE[:, None].to(logits_BLE.dtype)
        grad_BLE = shares_backward(slope_B1E, logits_BLE, self.scoring)
        lse_BL1 = logits_BLE.logsumexp(-1, keepdim=True)
        grad_BLE += (2.0 * self.z_slope.to(logits_BLE.dtype)) * lse_BL1 * (logits_BLE - lse_BL1).exp()
        return grad_BLE.mul_(self.real_BL[..., None]).view_as(logits_TE).to(logits_TE.dtype)


class _AddRouterLosses(torch.autograd.Function):
    """The weights as they are, and the losses' gradient into the logits that they were made from."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, logits_TE: Tensor, call: RouterCall | None) -> Tensor:
        ctx.save_for_backward(logits_TE)
        # Of the first pass also under recompute, which makes saved tensors anew and no nodes.
        ctx.call = call
        return weights_TK.clone()  # and not a view: models scale their weights in place

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if ctx.call is None:
            raise RuntimeError(
                "Router losses need the first pass through a layer, which checkpointing with use_reentrant=True runs "
                "without a graph. Use recompute='block' of the strategy, or use_reentrant=False."
            )
        (logits_TE,) = ctx.saved_tensors
        return grad_outputs[0], ctx.call.take_gradient(logits_TE), None


class _WatchedForward:
    """A router's forward, whose weights carry the losses' gradient while it trains."""

    def __init__(self, losses: RouterLosses, name: str, router: nn.Module, layer: nn.Module) -> None:
        self.losses, self.name, self.router = losses, name, router
        self.forward = router.forward
        self.scoring: Scoring | None = scoring_of(router)
        self.sequences: tuple[int, int] | None = None
        """[B, L] of what the layer was given; routers are handed flat tokens."""
        self._had_forward = router.__dict__.get("forward")
        self._hook = layer.register_forward_pre_hook(self._note_sequences, with_kwargs=True)
        update_wrapper(self, self.forward, updated=())
        router.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        micro_batch = self.losses.micro_batch
        if micro_batch is None or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        logits_TE, weights_TK, expert_ids_TK, *others = self._routed(*args, **kwargs)
        if logits_TE.requires_grad != weights_TK.requires_grad:
            raise RuntimeError(
                f"{self.name} returns logits that its weights are not made from: router losses reach it through both. "
                "Set sequence_balance_loss, batch_balance_loss and router_z_loss to 0."
            )
        if logits_TE.requires_grad:
            call = None if in_backward() else self._count(micro_batch, logits_TE, expert_ids_TK)
            weights_TK = _AddRouterLosses.apply(weights_TK, logits_TE, call)  # type: ignore[no-untyped-call]
        return logits_TE, weights_TK, expert_ids_TK, *others

    def undo(self) -> None:
        self._hook.remove()
        del self.router.__dict__["forward"]
        if self._had_forward is not None:
            self.router.__dict__["forward"] = self._had_forward

    def _note_sequences(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        self.sequences = (x.shape[0], x.shape[1]) if x is not None and x.dim() == 3 else None

    @torch.no_grad()
    def _count(self, micro_batch: MicroBatch, logits_TE: Tensor, expert_ids_TK: Tensor) -> RouterCall:
        num_tokens = logits_TE.numel() // logits_TE.shape[-1]
        sequences = self.sequences
        if sequences is None or sequences[0] * sequences[1] != num_tokens:
            if self.losses.options.sequence_loss:
                raise ValueError(
                    f"sequence_balance_loss: {self.name} is given tokens of no known sequence. Give its layer hidden "
                    "states [batch, tokens, hidden], or use batch_balance_loss."
                )
            sequences = (1, num_tokens)
        real_T = micro_batch.real_tokens_T(num_tokens)
        real_T = torch.ones(num_tokens, dtype=torch.bool, device=logits_TE.device) if real_T is None else real_T
        assert self.scoring is not None
        with unseen_by_function_modes():  # cp refuses sums over tokens that a model makes; these are no model's
            call = RouterCall(logits_TE.detach(), expert_ids_TK, self.scoring, real_T.view(sequences))
        self.losses.outstanding.append(call)
        return call

    def _routed(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if self.scoring is not None:
            outputs: tuple[Any, ...] = self.forward(*args, **kwargs)
            return outputs
        with SeenScoring() as seen:
            outputs = self.forward(*args, **kwargs)
        self.scoring = seen.scoring_behind(outputs, f"{self.name} ({type(self.router).__name__.removeprefix('FSDP')})")
        return outputs


def _summed(parts: Sequence[Tensor], lengths: list[int], group: dist.ProcessGroup | None) -> Sequence[Tensor]:
    """Every part, flat and summed over the ranks of the group: one collective. None is the world."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=group)
    return torch.split(flat, lengths)


def _upcast(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
