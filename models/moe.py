"""The mixture of experts: a router that is always FP32, stacked experts, shared experts.

Shapes: B batch, S sequence (of this process), T = B * S tokens, D hidden, I intermediate of one expert, E
experts, K experts per token, R = T * K rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_strategy.kernels.expert_mlp import expert_mlp
from lightning_moe_strategy.kernels.router import choose_experts
from lightning_moe_strategy.kernels.routing import gather_rows, sort_by_expert, sum_rows
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.layers import INITIAL_STD, SwiGLU


class Router(nn.Module):
    """Choose ``top_k`` experts for each token.

    Returns logits_TE, weights_TK and expert_ids_TK (int64). Everything is FP32, whatever the precision around
    it: a rounded score picks another expert, and two layouts would train two different models.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.scoring = config.top_k, config.scoring
        self.normalize_top_k, self.routed_scaling = config.normalize_top_k, config.routed_scaling
        self.num_groups, self.top_k_groups = config.num_groups, config.top_k_groups
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden))
        self.balance_bias: Tensor | None
        bias_E = torch.empty(config.num_experts, dtype=torch.float32) if config.balance_bias else None
        self.register_buffer("balance_bias", bias_E)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)
        if self.balance_bias is not None:
            nn.init.zeros_(self.balance_bias)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.float(), self.weight.float())
        weights_TK, expert_ids_TK = choose_experts(
            logits_TE,
            self.balance_bias,
            top_k=self.top_k,
            scoring=self.scoring,
            normalize_top_k=self.normalize_top_k,
            routed_scaling=self.routed_scaling,
            num_groups=self.num_groups,
            top_k_groups=self.top_k_groups,
        )
        return logits_TE, weights_TK, expert_ids_TK


class Experts(nn.Module):
    """``num_experts`` SwiGLU MLPs, stacked: ``gate_up_proj`` [E, 2I, D] and ``down_proj`` [E, D, I]."""

    def __init__(self, num_experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.act = "silu"
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=INITIAL_STD)
        nn.init.normal_(self.down_proj, std=INITIAL_STD)

    def forward(self, hidden_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Each token through its experts, weighted and summed in FP32: y_TD in the dtype of ``hidden_TD``."""
        slots, tokens, row_of_slot_TK, offsets_E = sort_by_expert(expert_ids_TK, self.num_experts)
        x_TD = hidden_TD.to(self.gate_up_proj.dtype)
        rows_RD = gather_rows(x_TD, tokens, row_of_slot_TK)
        probs_R = weights_TK.float().flatten().index_select(0, slots)
        rows_RD = expert_mlp(
            rows_RD, probs_R, self.gate_up_proj, self.down_proj, offsets_E, gathered_from=(x_TD, tokens)
        )
        return sum_rows(rows_RD, tokens, row_of_slot_TK).to(hidden_TD.dtype)


class MixtureOfExperts(nn.Module):
    """The MLP of a sparse layer: routed experts plus, where the model has them, shared ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.hidden, config.moe_intermediate)
        shared = config.shared_experts * config.moe_intermediate
        self.shared_experts = SwiGLU(config.hidden, shared) if shared else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        _, weights_TK, expert_ids_TK = self.router(x_TD)
        y_BSD: Tensor = self.experts(x_TD, expert_ids_TK, weights_TK).view_as(x_BSD)
        return y_BSD if self.shared_experts is None else y_BSD + self.shared_experts(x_BSD)
