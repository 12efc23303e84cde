"""Routers as the losses read them: which module it is, and what function makes scores of its logits.

Shapes: T tokens, E experts, K experts per token.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_moe_strategy.models.moe import Router
from lightning_moe_strategy.units import find_routers, sparse_layer_of

Scoring = Literal["softmax", "sigmoid"]


def routed_layers(root: nn.Module, experts: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module, nn.Module]]:
    """Of every layer with experts: its router's name, its router, and the module that holds both."""
    routers = find_routers(root, experts)
    layers, without = [], []
    for name in experts:
        parent = sparse_layer_of(name)
        own = [path for path in routers if path.rpartition(".")[0] == parent]
        # A linear layer alone says nothing of what is chosen from its logits, and how.
        own = [path for path in own if type(routers[path]).forward is not nn.Linear.forward]
        if len(own) == 1:
            layers.append((own[0], routers[own[0]], root.get_submodule(parent)))
        else:
            without.append(name)
    if without or not layers:
        listed = ", ".join(without[:4]) or "no experts at all"
        raise ValueError(
            f"sequence_balance_loss, batch_balance_loss and router_z_loss need a router beside every layer's experts: "
            f"one module with one row per expert that returns (logits, weights, ids). Without one: {listed}. Set them "
            "to 0, or write the router as such a module."
        )
    return layers


def scoring_of(router: nn.Module) -> Scoring | None:
    """Of our own routers, which say so; None where their forward has to show it."""
    return router.scoring if isinstance(router, Router) else None


def shares(logits: Tensor, scoring: Scoring) -> Tensor:
    """Each expert's share of a token's scores; they add up to 1."""
    if scoring == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def shares_backward(grad: Tensor, logits: Tensor, scoring: Scoring) -> Tensor:
    """The gradient of ``shares`` for the logits; ``grad`` is broadcast against them."""
    share = shares(logits, scoring)
    centred = grad - (grad * share).sum(-1, keepdim=True)
    # d log(sigmoid) = 1 - sigmoid; of exp, the score of softmax, it is 1.
    return share * centred if scoring == "softmax" else share * centred * (-logits).sigmoid()


class SeenScoring(TorchFunctionMode):
    """Which function makes scores of a router's logits: transformers has it in the code of each family alone."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[Scoring, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        scoring: Scoring
        for scoring in get_args(Scoring):
            if getattr(func, "__name__", "") == scoring:
                self.results.append((scoring, result))
        return result

    def scoring_behind(self, outputs: Any, where: str) -> Scoring:
        """RuntimeError when what the router returned or called is not what the losses are made of."""
        if not _is_routing(outputs):
            raise RuntimeError(
                f"{where} returns no (logits [tokens, experts], weights [tokens, top_k], ids [tokens, top_k]), which "
                "router losses are computed from. Set sequence_balance_loss, batch_balance_loss and router_z_loss to 0."
            )
        scorings = {scoring for scoring, _ in self.results}
        if len(scorings) != 1 or any(result is outputs[0] for _, result in self.results):
            raise RuntimeError(
                f"{where} makes scores of its logits by neither a softmax nor a sigmoid alone, or returns scores in "
                "their place. Set sequence_balance_loss, batch_balance_loss and router_z_loss to 0."
            )
        return scorings.pop()


def _is_routing(outputs: Any) -> bool:
    if not isinstance(outputs, tuple) or len(outputs) < 3 or not all(isinstance(x, Tensor) for x in outputs[:3]):
        return False
    logits_TE, weights_TK, ids_TK = outputs[:3]
    floats = logits_TE.is_floating_point() and weights_TK.is_floating_point() and not ids_TK.is_floating_point()
    return bool(floats and weights_TK.shape == ids_TK.shape and logits_TE.shape[:-1] == ids_TK.shape[:-1])
