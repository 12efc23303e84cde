"""A dispatcher that writes copies of tokens straight into the memory of other ranks: no split sizes on the host.

First all ranks tell each other how many copies go where; then each knows, on the device, at which place its own begin.
A copy's ids travel ahead with the slot that wants its result, and the rank they come to sorts them by expert.

How much memory that takes the host reads, once per layer, or bounds: of ``ep_chunks`` parts of the tokens, one can
bring a rank no more than a copy of every token in it. See symmetric_memory.py for what an exchange is, one_sided_way.py
for what travels in it.

Shapes: T tokens of this rank, K experts per token, E experts in all, L experts of this rank, P ranks of the ep group, J
of them at most that a token goes to, C copies that this rank has room for, R rows that it computes at the most, G
pieces that tokens are counted in. A copy's slots are its (copy, k) pairs, a token's its (token, j) pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy._torch_compat import assert_later
from lightning_moe_strategy.expert_parallel.assumed_routing import AssumedRouting
from lightning_moe_strategy.expert_parallel.dispatch import Plan, SpreadDispatcher
from lightning_moe_strategy.expert_parallel.one_sided_way import (
    Arrived,
    Index,
    OneSidedSplits,
    Room,
    Way,
    returned,
    sent,
)
from lightning_moe_strategy.expert_parallel.splits import (
    Chunk,
    Pieces,
    Splits,
    check_ids,
    count_pieces,
    piece_bounds,
    piece_of_token,
)
from lightning_moe_strategy.expert_parallel.symmetric_memory import Array, Workspace, workspace_of
from lightning_moe_strategy.kernels.peer_copy import put_copies
from lightning_moe_strategy.kernels.routing import Routing, sort_by_expert


@dataclass(kw_only=True)
class OneSidedPlan(Plan):
    """A plan whose ``routing`` is that of the copies on this rank."""

    way: Way
    index: Index
    ticket: Tensor | None = None
    """An empty tensor that ties the exchanges of one forward together; see `sent`."""


class OneSidedDispatcher(SpreadDispatcher):
    """Four exchanges of one-sided writes forward (counts, ids, tokens, results), two backward.

    What came is kept as rows: the memory it came to is the next layer's. On a CPU the ranks are processes of one host.
    """

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, assumed_routing: AssumedRouting | None = None
    ) -> None:
        super().__init__(num_experts, group, assumed_routing)
        if dist.get_backend(group) == "fake":
            raise ValueError(
                "dispatcher('symm_mem') cannot be simulated: it makes no collective that could be counted. Simulate "
                "'all_to_all', which moves the same copies, and let `plan` say what the memory of 'symm_mem' takes."
            )
        self.workspace = workspace_of(group)
        # The next to run is the first layer of a model.
        self._most_tokens = _most_tokens.setdefault(self.workspace, _MostTokens())
        self._most_tokens.most = None

    def count(self, expert_ids_TK: Tensor, num_pieces: int, *, count_most: bool) -> Pieces:
        counts = self._exchange_counts(expert_ids_TK, num_pieces)
        to_rank_GP = torch.cat([counts.copies_PGP.sum(0), counts.rows_PGP.sum(0)])
        num_sent, most_tokens = counts.sent_PGL.sum(), counts.tokens_P.max()
        # The layer's one host sync.
        *to_rank, on_host_sent, on_host_tokens = torch.cat(
            [to_rank_GP.view(-1), torch.stack([num_sent, most_tokens])]
        ).tolist()
        check_ids(on_host_sent, expert_ids_TK.numel(), self.num_experts)
        pieces = [to_rank[start : start + self.num_ranks] for start in range(0, len(to_rank), self.num_ranks)]
        copies_GP, rows_GP = pieces[:num_pieces], pieces[num_pieces:]

        def join(start: int, stop: int) -> Chunk:
            copies_P, rows_P = (
                [sum(of_rank) for of_rank in zip(*of_pieces[start:stop], strict=True)]
                for of_pieces in (copies_GP, rows_GP)
            )
            room = Room(
                most_copies=max(copies_P),
                most_tokens=-(-on_host_tokens * (stop - start) // num_pieces),
                num_copies=copies_P[self.workspace.rank],
                num_rows=rows_P[self.workspace.rank],
                is_bound=False,
            )
            return self._chunk(counts, start, stop, room)

        return Pieces(
            most_rows_G=[max(rows_P) for rows_P in rows_GP],
            most_rows=max(map(sum, zip(*rows_GP, strict=True))),
            most_tokens=on_host_tokens,
            join=join,
        )

    def bound(self, expert_ids_TK: Tensor, num_pieces: int) -> Pieces:
        """`count` with what pieces can bring at the most, for which the host waits in one layer of a micro-batch."""
        counts, (num_tokens, top_k) = self._exchange_counts(expert_ids_TK, num_pieces), expert_ids_TK.shape
        most_tokens = self._most_tokens.known(self, num_tokens, lambda: int(counts.tokens_P.max()))
        assert_later(
            counts.sent_PGL.sum() == expert_ids_TK.numel(),
            f"Expert ids are not below num_experts({self.num_experts}): the router must return ids of this layer's.",
        )
        tokens_of_piece = -(-most_tokens // num_pieces)
        num_copies = self.num_ranks * tokens_of_piece
        room = Room(
            most_copies=num_copies,
            most_tokens=tokens_of_piece,
            num_copies=num_copies,
            num_rows=num_copies * min(top_k, self.num_local_experts),
            is_bound=True,
        )
        return Pieces(
            most_rows_G=[room.num_rows] * num_pieces,
            most_rows=room.num_rows * num_pieces,
            most_tokens=most_tokens,
            join=lambda start, stop: self._chunk(counts, start, stop, room),
        )

    def plan(self, expert_ids_TK: Tensor, splits: Splits | None = None) -> OneSidedPlan:
        if splits is None:
            (chunk,) = self.once(lambda: [self.count(expert_ids_TK, 1, count_most=False).join(0, 1)])
            splits = chunk.splits
        assert isinstance(splits, OneSidedSplits)
        if self._is_replaying:
            # Copies sent by counts that are not theirs would land on others' places without a word.
            counts_E = count_pieces(expert_ids_TK, self.num_experts, self.num_ranks, 1).view(-1)
            assert_later(
                (counts_E == splits.sent_E).all(),
                "A recompute chose other experts than the first pass: its router is not deterministic. "
                "Set recompute='none'.",
            )
        rank_TJ, place_TJ = self._destinations(expert_ids_TK, splits)
        if not splits.arrived:
            splits.arrived.append(self._exchange_ids(expert_ids_TK, rank_TJ, place_TJ, splits))
        (arrived,) = splits.arrived
        row_of_slot_CK = _row_of_slot(arrived, splits.room.num_copies, expert_ids_TK.shape[1])
        routing = Routing(
            arrived.slot_of_row_R,
            arrived.slot_of_row_R // expert_ids_TK.shape[1],
            row_of_slot_CK,
            arrived.offsets_L,
        )
        index = Index(rank_TJ, place_TJ, arrived.rank_C, arrived.slot_C, row_of_slot_CK, arrived.slot_of_row_R)
        room = splits.room
        return OneSidedPlan(routing=routing, way=Way(self.workspace, room), index=index, rows_end_early=room.is_bound)

    def dispatch(
        self, x_TD: Tensor, probs_TK: Tensor, plan: Plan, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(plan, OneSidedPlan)
        probs_TK = probs_TK.to(torch.promote_types(probs_TK.dtype, torch.float32))
        plan.ticket, rows_RD, probs_R = sent(plan.way, plan.index, x_TD, probs_TK, meanwhile)
        return rows_RD, probs_R, plan.routing.offsets_E

    def combine(self, rows_RD: Tensor, plan: Plan) -> Tensor:
        assert isinstance(plan, OneSidedPlan) and plan.ticket is not None
        ticket, plan.ticket = plan.ticket, None
        return returned(plan.way, plan.index, ticket, rows_RD)

    def _exchange_counts(self, expert_ids_TK: Tensor, num_pieces: int) -> "_Counts":
        """What each rank sends to each, piece by piece."""
        device, num_ranks, num_tokens = expert_ids_TK.device, self.num_ranks, len(expert_ids_TK)
        sent_PGL = count_pieces(expert_ids_TK, self.num_experts, num_ranks, num_pieces)
        rank_TJ = self._ranks(expert_ids_TK)
        # One place more, for what is no copy.
        piece_T = piece_of_token(num_tokens, num_pieces, device)
        place_TJ = torch.where(rank_TJ < num_ranks, piece_T[:, None] * num_ranks + rank_TJ, num_pieces * num_ranks)
        copies = torch.zeros(num_pieces * num_ranks + 1, dtype=torch.int32, device=device)
        copies.scatter_add_(0, place_TJ.view(-1), torch.ones_like(place_TJ, dtype=torch.int32).view(-1))
        # The place is that of the number of tokens, which is not known before.
        copies[-1:].fill_(num_tokens)
        mine_1N = torch.cat([sent_PGL.sum(2, dtype=torch.int32).t().reshape(-1), copies]).unsqueeze(0)
        every_rank_1P = torch.arange(num_ranks, dtype=torch.int32, device=device).unsqueeze(0)
        here_1P = torch.full_like(every_rank_1P, self.workspace.rank)
        arrays = [Array(num_ranks, mine_1N.shape[1], torch.int32)]
        exchange = self.workspace.start(
            device, arrays, lambda peers, begins: put_copies(mine_1N, peers, begins[0], every_rank_1P, here_1P)
        )
        # A copy: what an exchange brings is overwritten by the next but one.
        of_ranks_PN = exchange.wait()[0].clone()
        rows_PN, copies_PN = of_ranks_PN[:, :-1].chunk(2, dim=1)
        shape = (num_ranks, num_pieces, num_ranks)
        return _Counts(sent_PGL, rows_PN.view(shape), copies_PN.view(shape), of_ranks_PN[:, -1], num_tokens)

    def _chunk(self, counts: "_Counts", start: int, stop: int, room: Room) -> Chunk:
        bounds = piece_bounds(counts.num_tokens, counts.sent_PGL.shape[1])
        copies_PP = counts.copies_PGP[:, start:stop].sum(1, dtype=torch.int32)
        splits = OneSidedSplits(
            sent_E=counts.sent_PGL[:, start:stop].sum(1, dtype=torch.int32).view(-1),
            first_place_P=(copies_PP.cumsum(0, dtype=torch.int32) - copies_PP)[self.workspace.rank].clone(),
            end_of_copies_P=copies_PP[:, self.workspace.rank].cumsum(0, dtype=torch.int32),
            room=room,
        )
        return Chunk(tokens=slice(bounds[start], bounds[stop]), splits=splits)

    def _destinations(self, expert_ids_TK: Tensor, splits: OneSidedSplits) -> tuple[Tensor, Tensor]:
        """``rank_TJ`` and ``place_TJ`` of this rank's copies."""
        rank_TJ = self._ranks(expert_ids_TK)
        by_rank = sort_by_expert(rank_TJ, self.num_ranks)
        ends_P = by_rank.offsets_E
        begins_P = torch.cat([ends_P.new_zeros(1), ends_P[:-1]])
        is_copy_TJ = rank_TJ < self.num_ranks
        shift_TJ = (splits.first_place_P - begins_P)[rank_TJ.clamp(max=self.num_ranks - 1)]
        return torch.where(is_copy_TJ, rank_TJ, -1), torch.where(is_copy_TJ, by_rank.row_of_slot_TK + shift_TJ, -1)

    def _ranks(self, expert_ids_TK: Tensor) -> Tensor:
        """``rank_TJ`` (int32): those that a token's experts are on, ascending and each once; behind them P."""
        ids_TK = expert_ids_TK.int()
        is_expert_TK = (ids_TK >= 0) & (ids_TK < self.num_experts)
        rank_TK = torch.where(is_expert_TK, ids_TK // self.num_local_experts, self.num_ranks).sort(1).values
        is_again_TK = torch.nn.functional.pad(rank_TK[:, 1:] == rank_TK[:, :-1], (1, 0))
        return torch.where(is_again_TK, self.num_ranks, rank_TK).sort(1).values[:, : self.num_ranks]

    def _exchange_ids(
        self, expert_ids_TK: Tensor, rank_TJ: Tensor, place_TJ: Tensor, splits: OneSidedSplits
    ) -> Arrived:
        """What the copies that come are, from the ids that are sent ahead of them."""
        top_k, num_slots, device = expert_ids_TK.shape[1], rank_TJ.numel(), rank_TJ.device
        slot_TJ = torch.arange(num_slots, dtype=torch.int32, device=device).view_as(rank_TJ)
        ids_TJK = expert_ids_TK.int().unsqueeze(1).expand(-1, rank_TJ.shape[1], -1)
        ids_and_slot_SN = torch.cat([ids_TJK, slot_TJ.unsqueeze(2)], 2).view(num_slots, top_k + 1)
        to_S1 = rank_TJ.view(-1, 1), place_TJ.view(-1, 1)
        exchange = self.workspace.start(
            device,
            [Array(splits.room.most_copies, top_k + 1, torch.int32)],
            lambda peers, begins: put_copies(ids_and_slot_SN, peers, begins[0], *to_S1),
        )
        arrived_CN = exchange.wait()[0][: splits.room.num_copies]
        position_C = torch.arange(len(arrived_CN), dtype=torch.int32, device=device)
        rank_C = torch.searchsorted(splits.end_of_copies_P, position_C, right=True, out_int32=True)
        is_copy_C = rank_C < self.num_ranks
        local_CK = arrived_CN[:, :top_k] - self.workspace.rank * self.num_local_experts
        is_here_CK = (local_CK >= 0) & (local_CK < self.num_local_experts) & is_copy_C.unsqueeze(1)
        by_expert = sort_by_expert(torch.where(is_here_CK, local_CK, self.num_local_experts), self.num_local_experts)
        if splits.room.is_bound:
            assert_later(
                by_expert.offsets_E[-1] <= splits.room.num_rows,
                "A router gave a token the same expert twice, for which rows bounded by ep_chunks have no room. "
                "Make it choose different ones, or leave ep_chunks out.",
            )
        return Arrived(
            rank_C=torch.where(is_copy_C, rank_C, -1),
            slot_C=arrived_CN[:, top_k].clone(),
            # A copy: what is kept for a replay is 4 bytes a row, not a slot.
            slot_of_row_R=by_expert.slot_of_row_R[: splits.room.num_rows].clone(),
            offsets_L=by_expert.offsets_E,
        )


class _Counts(NamedTuple):
    sent_PGL: Tensor
    """This rank's rows for each expert."""
    rows_PGP: Tensor
    """From each rank, of each piece, to each rank."""
    copies_PGP: Tensor
    tokens_P: Tensor
    num_tokens: int


class _MostTokens:
    """Tokens of the rank that has most: the first layer of a micro-batch learns them, and the others rely on it."""

    def __init__(self) -> None:
        self.most: int | None = None
        self.layers: WeakSet[OneSidedDispatcher] = WeakSet()

    def known(self, layer: OneSidedDispatcher, num_tokens: int, learn: Callable[[], int]) -> int:
        """Calls ``learn`` on all ranks alike.

        Raises:
            RuntimeError: this rank has more tokens than were known of.
        """
        # A layer that comes again begins the next micro-batch.
        if self.most is None or layer in self.layers:
            self.most = learn()
            self.layers.clear()
        self.layers.add(layer)
        if num_tokens > self.most:
            raise RuntimeError(
                f"A layer has {num_tokens} tokens, but the first layer of the micro-batch had {self.most} at the most "
                "on any rank of ep, which dispatcher='symm_mem' with ep_chunks makes room for. Leave ep_chunks out: "
                "each layer then asks for numbers of its own."
            )
        return self.most


_most_tokens: WeakKeyDictionary[Workspace, _MostTokens] = WeakKeyDictionary()


def _row_of_slot(arrived: Arrived, num_copies: int, top_k: int) -> Tensor:
    """``row_of_slot_CK``: -1 for a slot whose expert is elsewhere."""
    num_slots, num_rows = num_copies * top_k, len(arrived.slot_of_row_R)
    row_R = torch.arange(num_rows, dtype=torch.int32, device=arrived.slot_of_row_R.device)
    # One slot more, for rows that are not filled.
    slot_R = torch.where(row_R < arrived.offsets_L[-1], arrived.slot_of_row_R, num_slots)
    row_of_slot = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=row_R.device)
    row_of_slot[slot_R.long()] = row_R
    return row_of_slot[:num_slots].view(num_copies, top_k)
