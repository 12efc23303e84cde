"""Copies of tokens by an all-to-all: no byte that is not needed, and split sizes that the host waits for.

Shapes: T tokens of this rank, K experts per token, D hidden size, P ranks of the ep group, J of them at most that a
token goes to (the smaller of K and P), S copies that this rank sends, C that it receives, G pieces that tokens are
counted in.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy.collectives import Transfer, start_all_to_all_rows
from lightning_moe_strategy.expert_parallel.assumed_copies import assumed_copies
from lightning_moe_strategy.expert_parallel.deduplicated import CopyDispatcher, CopyWay
from lightning_moe_strategy.expert_parallel.splits import Splits, piece_of_token
from lightning_moe_strategy.kernels.ragged_rows import add_ragged_rows, spread_ragged_rows
from lightning_moe_strategy.kernels.routing import sort_by_expert


@dataclass(frozen=True)
class AllToAllWay(CopyWay):
    """Each rank gets the tokens it has work for. ``slot_of_copy_S`` and ``copy_of_slot_TJ`` say which."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    @property
    def num_copies(self) -> int:
        return sum(self.received)

    def start_spread(self, x_TD: Tensor, *index: Tensor) -> Transfer:
        return start_all_to_all_rows(spread_ragged_rows(x_TD, *index), self.sent, self.received, self.group)

    def start_collect(self, x_CD: Tensor, *index: Tensor) -> Transfer:
        transfer = start_all_to_all_rows(x_CD, self.received, self.sent, self.group)
        return transfer.then(lambda results: add_ragged_rows(results, *index))


class AllToAllDispatcher(CopyDispatcher):
    """One all-to-all of counts with one host sync, one of ids; then tokens and probabilities out, results back."""

    def count_copies(self, expert_ids_TK: Tensor, num_pieces: int) -> Tensor:
        first_rank_TK = self._first_rank(expert_ids_TK)
        piece_T = piece_of_token(len(expert_ids_TK), num_pieces, expert_ids_TK.device)
        size = self.num_ranks * num_pieces
        place_TK = (first_rank_TK * num_pieces + piece_T[:, None]).clamp_(max=size)
        counted = torch.zeros(size + 1, dtype=torch.int32, device=expert_ids_TK.device)
        counted.scatter_add_(0, place_TK.view(-1), torch.ones_like(place_TK, dtype=torch.int32).view(-1))
        return counted[:size].view(self.num_ranks, num_pieces)

    def way(self, expert_ids_TK: Tensor, splits: Splits) -> tuple[CopyWay, tuple[Tensor, ...]]:
        way = AllToAllWay(splits.copies_sent, splits.copies_received, self.group)
        num_sent, most = sum(splits.copies_sent), min(expert_ids_TK.shape[1], self.num_ranks)
        # Copies by rank and, within one, by token; slots that send none stand behind them.
        copy_of_slot_TK = sort_by_expert(self._first_rank(expert_ids_TK), self.num_ranks).row_of_slot_TK
        # A token's copies in the order of their ranks, which is that of their numbers.
        copy_of_slot_TJ = copy_of_slot_TK.sort(1).values[:, :most]
        # Zeros: a simulation sends as many copies as it assumes, and not those of its ids.
        slot_of_copy = torch.zeros(num_sent + 1, dtype=torch.int32, device=expert_ids_TK.device)
        place = copy_of_slot_TJ.clamp(max=num_sent).reshape(-1).long()
        slot_of_copy[place] = torch.arange(len(place), dtype=torch.int32, device=expert_ids_TK.device)
        is_copy_TJ = copy_of_slot_TJ < num_sent
        return way, (slot_of_copy[:num_sent].clone(), torch.where(is_copy_TJ, copy_of_slot_TJ, -1).int())

    def assume_copies(
        self, num_tokens: int, rows_sent: list[int], rows_received: list[int]
    ) -> tuple[list[int], list[int]]:
        assert self.assumed_routing is not None
        return assumed_copies(
            self.assumed_routing,
            num_tokens,
            rows_sent,
            rows_received,
            rank=self.group.rank(),
            num_local_experts=self.num_local_experts,
        )

    def _first_rank(self, expert_ids_TK: Tensor) -> Tensor:
        """The rank each slot's expert is on; P where an earlier slot of the token is for the same rank, or none is."""
        ids_TK = expert_ids_TK.long()
        is_expert_TK = (ids_TK >= 0) & (ids_TK < self.num_experts)
        rank_TK = torch.where(is_expert_TK, ids_TK // self.num_local_experts, self.num_ranks)
        is_same_TKK = rank_TK.unsqueeze(2) == rank_TK.unsqueeze(1)
        return torch.where(is_same_TKK.tril(-1).any(2), self.num_ranks, rank_TK)
