"""What every block is made of: linear maps, RMSNorm, rotary embedding, SwiGLU MLP.

Each module that owns parameters has a ``reset_parameters`` that sets its own and no other's, so a model built
on the meta device can be given values module by module, in any order.

Shapes: B batch, S sequence (of this process), H heads, N channels of a head, D hidden, I intermediate.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_STD = 0.02


class Linear(nn.Linear):
    """A linear map without bias, initialised as the published models are."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class Embedding(nn.Embedding):
    """A token table [V, D], initialised as the published models are."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class RMSNorm(nn.Module):
    """Scale the last dim to unit mean square; the statistic is FP32 whatever comes in."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        normed = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``: the MLP of dense layers and of shared experts."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        hidden_BSD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return hidden_BSD


def rotary_angles(position_ids_BS: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each token's rotation, FP32, [B, 1, S, rotary_dim / 2].

    Computed from integer positions where they are used, with no table and no buffer: a token keeps its angle
    in whatever process it lands, and no cast of a model or of a module's inputs to bf16 can round an angle
    (at position one million by hundreds of turns).
    """
    # FP32 by name: under a bf16 default dtype arange would round the exponents.
    channels = torch.arange(0, rotary_dim, 2, device=position_ids_BS.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (channels / rotary_dim)
    angles = position_ids_BS[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BHSN: Tensor, angles: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """Turn pairs of channels by the token's angles, in FP32.

    ``interleaved`` pairs channel 2i with 2i+1 (DeepSeek), otherwise i with i + N/2 (Llama, Qwen). The result
    is laid out in halves either way: queries and keys agree, and only their products are used.
    """
    cos, sin = angles
    first, second = (x_BHSN[..., ::2], x_BHSN[..., 1::2]) if interleaved else x_BHSN.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x_BHSN.dtype)
