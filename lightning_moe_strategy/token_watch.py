"""What a step computes for every token: outputs of modules, and the experts that are chosen.

A first run of a step keeps what it computes for this rank's tokens; a second one computes all tokens, and what both
have is compared.

Shapes: R sequences of the batch, L tokens of this rank, T tokens of the whole sequence, K picks per token.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_strategy._torch_compat import OperationMode, tensors_in
from lightning_moe_strategy.collectives import AnyGroup, TwoStepGroup, all_gather_in_steps
from lightning_moe_strategy.units import sparse_layer_of

_PICKS = {torch.ops.aten.topk.default: 2, torch.ops.aten.max.dim: 1}
"""Operations that pick, and which of their arguments is the dim."""

_GROUPS_OF_EXPERTS = ("n_group", "num_groups", "num_expert_groups")


@dataclass(frozen=True, kw_only=True)
class TokenPlaces:
    """Which token of the whole each of this rank's is."""

    place_RL: Tensor
    """-1 for padding and dummies."""
    real_RT: Tensor
    """bool: no padding of the user's."""

    @property
    def shape(self) -> torch.Size:
        """R and L."""
        return self.place_RL.shape

    @property
    def whole_shape(self) -> torch.Size:
        """R and T."""
        return self.real_RT.shape

    def own(self, whole: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        """Of ``whole`` [R, T, ...] this rank's tokens [N, ...]; and which of its ``num_local`` tokens they are."""
        place = self.place_RL[:, :num_local]
        row = torch.arange(place.shape[0], device=place.device)[:, None].expand_as(place)
        found = (place >= 0) & (place < whole.shape[1])
        found &= self.real_RT[row, place.clamp(min=0)]
        return whole[row[found], place[found]], found


class OutputWatch:
    """Outputs [R, tokens, ...] of the blocks and of the modules that stand in none."""

    def __init__(self, root: nn.Module, blocks: Iterable[str], places: TokenPlaces) -> None:
        inside = tuple(f"{block}." for block in blocks)
        self.modules = {name: module for name, module in root.named_modules() if not name.startswith(inside)}
        self.places = places
        self.kept: dict[str, Tensor] = {}
        """Of the first run, in the order in which they were done."""
        self.differences: dict[str, tuple[Tensor, Tensor]] = {}
        """Per module the largest difference of an element, and the largest element, both of this rank's tokens."""

    @contextmanager
    def first_run(self) -> Generator[None, None, None]:
        with self._hooks(self._keep, self.places.shape):
            yield

    @contextmanager
    def second_run(self) -> Generator[None, None, None]:
        with self._hooks(self._compare, self.places.whole_shape):
            yield

    @contextmanager
    def _hooks(self, see: Callable[[str, Tensor], None], shape: torch.Size) -> Generator[None, None, None]:
        def hook(name: str) -> Callable[..., None]:
            def run(module: nn.Module, args: Any, output: Any) -> None:
                output = next((x for x in _outputs(output) if _is_of_tokens(x, shape)), None)
                if output is not None:
                    see(name, output.detach())

            return run

        handles = [module.register_forward_hook(hook(name)) for name, module in self.modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, name: str, output: Tensor) -> None:
        self.kept.setdefault(name, output)

    def _compare(self, name: str, output: Tensor) -> None:
        mine = self.kept.get(name)
        if mine is None or name in self.differences or mine.shape[2:] != output.shape[2:]:
            return
        theirs, found = self.places.own(output, mine.shape[1])
        self.differences[name] = largest(mine[found].double() - theirs.double()), largest(theirs.double())


def largest(x: Tensor) -> Tensor:
    """The largest absolute value, 0-dim float64; of nothing zero, and infinite if one is not finite."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float64)
    return x.detach().abs().max().double().nan_to_num(nan=torch.inf)


class RoutingWatch:
    """The experts of the first run, chosen in the second too.

    Two experts whose scores differ by rounding alone may change places, and the token is then another one: all that
    follows would differ, and say nothing. So the choice is kept, and what it costs is measured.
    """

    def __init__(self, root: nn.Module, experts: Mapping[str, nn.Module], places: TokenPlaces) -> None:
        names = {sparse_layer_of(name) for name in experts}
        self.sparse_layers = {name: root.get_submodule(name) for name in names}
        groups = (getattr(m, name, 1) for layer in self.sparse_layers.values() for m in layer.modules()
                  for name in _GROUPS_OF_EXPERTS)  # fmt: skip
        self.num_candidates = {int(module.num_experts) for module in experts.values()}  # type: ignore[arg-type]
        self.num_candidates |= {count for count in groups if isinstance(count, int) and count > 1}
        self.places = places
        self.layer: str | None = None
        """That which runs now."""
        self.picks: dict[str, list[Tensor]] = {name: [] for name in sorted(names)}
        self.num_choices = self.num_changed = 0
        zero = torch.zeros((), dtype=torch.float64, device=places.place_RL.device)
        self.nothing = zero, zero
        self.worst = zero, zero
        """The largest score that a repeated choice lost, and the largest score."""

    @contextmanager
    def first_run(self) -> Generator[None, None, None]:
        """Keep every pick [R, L, K]."""
        with self._layers(), _Picks(self, self._keep, self.places.shape):
            yield

    @contextmanager
    def second_run(self, group: AnyGroup) -> Generator[None, None, None]:
        """Pick for the whole what the ranks of ``group`` have picked for their parts."""
        with self.repeating(self._gathered(group)):
            yield

    @contextmanager
    def repeating(self, picks: Mapping[str, Iterator[Tensor]]) -> Generator[None, None, None]:
        """Pick for the whole, layer by layer, ``picks`` [R, T, K]; the natural ones where -1 stands or none is left."""

        def repeat(layer: str, scores: Tensor, natural: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self._repeat(next(picks[layer], None), scores, natural)

        with self._layers(), _Picks(self, repeat, self.places.whole_shape):
            yield

    def _keep(self, layer: str, scores: Tensor, natural: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, tokens = self.places.shape
        ids_RLK = natural[1].detach().clone().reshape(rows, scores.shape[:-1].numel() // rows, -1)
        if ids_RLK.shape[1] < tokens:  # the LightningModule dropped the last token of every row before its model
            ids_RLK = nn.functional.pad(ids_RLK, (0, 0, 0, tokens - ids_RLK.shape[1]), value=-1)
        self.picks[layer].append(ids_RLK)
        return natural

    def _gathered(self, group: AnyGroup) -> Mapping[str, "Generator[Tensor, None, None]"]:
        """Per layer the picks of the whole, [R, T, K], -1 where no rank has one."""
        whole = group.whole if isinstance(group, TwoStepGroup) else group
        counts = torch.tensor([len(picks) for picks in self.picks.values()], device=self.places.place_RL.device)
        both = torch.cat([counts, -counts])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=whole)
        if bool((both[: len(counts)] != -both[len(counts) :]).any()):
            # Ranks that picked more or less often than others have no common picks to gather.
            self.picks = {name: [] for name in self.picks}
        return {name: self._of_whole(picks, group) for name, picks in self.picks.items()}

    def _of_whole(self, picks: list[Tensor], group: AnyGroup) -> "Generator[Tensor, None, None]":
        rows, tokens = self.places.whole_shape
        gathered = []
        for ids_RLK in picks:
            local = torch.cat([self.places.place_RL[..., None], ids_RLK], -1)
            everyones = all_gather_in_steps(local[None].contiguous(), group)
            whole = ids_RLK.new_full((rows, tokens + 1, ids_RLK.shape[-1]), -1)
            row = torch.arange(rows, device=whole.device)[None, :, None]
            place = everyones[..., 0]
            whole[row.expand_as(place), torch.where(place < 0, tokens, place)] = everyones[..., 1:]
            gathered.append(whole[:, :tokens])
        return (ids for ids in gathered)

    def _repeat(self, ids_RTK: Tensor | None, scores: Tensor, natural: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        values, ids = natural
        rows, tokens = self.places.whole_shape
        flat = ids.reshape(rows, scores.shape[:-1].numel() // rows, -1)
        if ids_RTK is None or ids_RTK.shape[2] != flat.shape[2]:
            return natural
        first = ids_RTK[:, : flat.shape[1]]
        pinned = torch.where(first < 0, flat, first)
        scores_RTE = scores.reshape(rows, flat.shape[1], -1)
        of_pinned = scores_RTE.gather(-1, pinned)
        changed = (pinned.sort(-1).values != flat.sort(-1).values).any(-1) & self.places.real_RT[:, : flat.shape[1]]
        lost = (values.reshape(flat.shape).sum(-1) - of_pinned.sum(-1)).double()[changed]
        finite = scores_RTE.masked_fill(~scores_RTE.isfinite(), 0.0)
        self.worst = torch.maximum(self.worst[0], largest(lost)), torch.maximum(self.worst[1], largest(finite))
        self.num_changed += int(changed.sum())
        self.num_choices += int(self.places.real_RT[:, : flat.shape[1]].sum())
        return of_pinned.reshape(values.shape), pinned.reshape(ids.shape)

    @contextmanager
    def _layers(self) -> Generator[None, None, None]:
        def enter(name: str) -> Callable[..., None]:
            def run(*args: Any) -> None:
                self.layer = name

            return run

        def leave(*args: Any) -> None:
            self.layer = None

        with ExitStack() as stack:
            for name, module in self.sparse_layers.items():
                stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield


class _Picks(OperationMode):
    """Hands every choice among experts, or groups of them, to ``see``, and returns what that returns."""

    def __init__(
        self,
        watch: RoutingWatch,
        see: Callable[[str, Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]],
        shape: torch.Size,
    ) -> None:
        super().__init__()
        self.watch, self.see, self.shape = watch, see, shape

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        dim_at = _PICKS.get(operation)
        if self.watch.layer is None or dim_at is None or args[0].dim() < 2:
            return result
        rows, tokens = self.shape
        is_last_dim = [*args, -1][dim_at] in (-1, args[0].dim() - 1)
        is_of_tokens = args[0].shape[:-1].numel() in (rows * tokens, rows * (tokens - 1))
        if not is_last_dim or not is_of_tokens or args[0].shape[-1] not in self.watch.num_candidates:
            return result
        return self.see(self.watch.layer, args[0], result)


def _outputs(output: Any) -> Generator[Tensor, None, None]:
    """The logits of what has some, else the tensors of an output."""
    logits = getattr(output, "logits", None)
    if isinstance(output, Mapping):
        logits = output.get("logits", logits)
    if isinstance(logits, Tensor):
        yield logits
    yield from tensors_in(output)


def _is_of_tokens(x: Tensor, shape: torch.Size) -> bool:
    rows, tokens = shape
    return x.dim() >= 3 and x.is_floating_point() and x.shape[0] == rows and x.shape[1] in (tokens, tokens - 1)
