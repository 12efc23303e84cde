"""Every token to every rank of ep: equal splits, whatever the routing, for more bytes than an all-to-all.

Its results are those of the all-to-all bit by bit in FP32, at the same ep: an oracle for it, and for whoever writes
another. Shapes: T tokens of this rank, M tokens of the rank that has most, K experts per token, D hidden size, P ranks
of the ep group, C = P * M copies on each rank, G pieces that tokens are counted in.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy.collectives import Transfer, start_all_to_all_rows, start_gather_in_steps
from lightning_moe_strategy.expert_parallel.deduplicated import CopyDispatcher, CopyWay
from lightning_moe_strategy.expert_parallel.splits import Splits, piece_of_token


@dataclass(frozen=True)
class AllGatherWay(CopyWay):
    """Each rank gets all tokens, and sends back a result for each of them: zeros where it had no work."""

    num_tokens: int
    most_tokens: int
    group: dist.ProcessGroup

    @property
    def num_copies(self) -> int:
        return self.group.size() * self.most_tokens

    def start_spread(self, x_TD: Tensor, *index: Tensor) -> Transfer:
        if self.num_tokens < self.most_tokens:
            fill = 0 if x_TD.is_floating_point() else -1
            padding = x_TD.new_full((self.most_tokens - self.num_tokens, *x_TD.shape[1:]), fill)
            x_TD = torch.cat([x_TD, padding])
        return start_gather_in_steps(x_TD, self.group)

    def start_collect(self, x_CD: Tensor, *index: Tensor) -> Transfer:
        # Not a reduce-scatter: it adds in the order of its algorithm, and in the dtype that travels.
        counts = [self.most_tokens] * self.group.size()
        return start_all_to_all_rows(x_CD, counts, counts, self.group).then(self._added)

    def _added(self, x_CD: Tensor) -> Tensor:
        of_ranks = x_CD.view(self.group.size(), self.most_tokens, -1)
        y_TD = torch.zeros_like(of_ranks[0, : self.num_tokens], dtype=torch.promote_types(x_CD.dtype, torch.float32))
        for of_rank_MD in of_ranks:
            y_TD += of_rank_MD[: self.num_tokens]
        return y_TD.to(x_CD.dtype)


class AllGatherDispatcher(CopyDispatcher):
    """An all-gather of tokens, ids and probabilities, and an all-to-all of equal parts back.

    Ranks tell each other how many tokens and rows they have, which is the layer's one host sync.
    """

    def count_copies(self, expert_ids_TK: Tensor, num_pieces: int) -> Tensor:
        piece_T = piece_of_token(len(expert_ids_TK), num_pieces, expert_ids_TK.device)
        tokens_G = torch.zeros(num_pieces, dtype=torch.int32, device=expert_ids_TK.device)
        tokens_G.scatter_add_(0, piece_T, torch.ones_like(piece_T, dtype=torch.int32))
        return tokens_G.repeat(self.num_ranks, 1)

    def way(self, expert_ids_TK: Tensor, splits: Splits) -> tuple[CopyWay, tuple[Tensor, ...]]:
        return AllGatherWay(len(expert_ids_TK), max(splits.copies_received), self.group), ()

    def assume_copies(
        self, num_tokens: int, rows_sent: list[int], rows_received: list[int]
    ) -> tuple[list[int], list[int]]:
        return [num_tokens] * self.num_ranks, [num_tokens] * self.num_ranks
