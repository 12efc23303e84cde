"""Does a document see another? One token of the first is changed, and nothing of the others may change by a bit.

Shapes: R sequences, L tokens of this rank, T tokens of the whole sequence.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from lightning_moe_strategy._lightning_compat import LightningModule, Trainer, is_param_in_hook_signature
from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel.batch import items_of, with_items
from lightning_moe_strategy.context_parallel.visible import Documents
from lightning_moe_strategy.rehearsal import rehearsal
from lightning_moe_strategy.token_watch import RoutingWatch, TokenPlaces
from lightning_moe_strategy.verifying.outputs import as_tokens, first_outputs


def probe(
    trainer: Trainer,
    module: LightningModule,
    batch: Any,
    zigzag: ZigZagContextParallel,
    documents: Documents,
    places: TokenPlaces,
    batch_idx: int,
) -> dict[str, float] | None:
    """Per module the largest change at tokens of other documents on this rank; None without token ids to change.

    Every rank calls it. Training goes on as if it had not been called.
    """
    changed = _with_one_token_changed(batch, documents[0][1])
    if changed is None:
        return None
    strategy: Any = trainer.strategy
    cp = strategy.context_parallel
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    further = (batch_idx,) if takes_index else ()
    before = strategy.micro_batch, cp.sequence
    first, second = dict[str, Tensor](), dict[str, Tensor]()
    # The same experts both times: products of other sizes may round otherwise.
    here = TokenPlaces(place_RL=places.place_RL, real_RT=torch.ones(places.shape, dtype=torch.bool))
    routing = RoutingWatch(module, strategy.experts, here)
    try:
        for outputs, asked in ((first, batch), (second, changed)):
            local = zigzag.split(asked, "train")
            picks: Mapping[str, Any] = {name: iter(list(of_layer)) for name, of_layer in routing.picks.items()}
            with ExitStack() as stack:
                stack.enter_context(rehearsal(trainer, module, strategy.experts))
                stack.enter_context(torch.no_grad())
                stack.enter_context(cp.uncounted_steps())
                stack.enter_context(routing.first_run() if outputs is first else routing.repeating(picks))
                stack.enter_context(first_outputs(module, _into(outputs)))
                strategy.training_step(local, *further)
    finally:
        strategy.micro_batch, cp.sequence = before
    is_other_RL = (places.place_RL >= documents[0][1]) | (torch.arange(len(places.place_RL)) > 0)[:, None]
    is_other_RL = is_other_RL & (places.place_RL >= 0)
    differences = {name: _difference(x, second.get(name), is_other_RL) for name, x in first.items()}
    return {name: difference for name, difference in differences.items() if difference is not None}


def _into(outputs: dict[str, Tensor]) -> Callable[[str, Tensor], None]:
    def see(name: str, output: Tensor) -> None:
        outputs[name] = output.clone()

    return see


def _difference(one: Tensor, other: Tensor | None, is_other_RL: Tensor) -> float | None:
    if other is None or one.shape != other.shape:
        return None
    pair = [as_tokens(x, *is_other_RL.shape) for x in (one, other)]
    if pair[0] is None or pair[1] is None or pair[0].shape[0] != len(is_other_RL):
        return None
    mask = is_other_RL[:, : pair[0].shape[1]]
    first, second = pair[0][mask], pair[1][mask]
    if torch.equal(first, second):
        return 0.0
    return float((first.double() - second.double()).abs().max().nan_to_num(nan=torch.inf))


def _with_one_token_changed(batch: Any, end_of_first: int) -> Any:
    """The last token of the first document, which even a short convolution of the next would see."""
    items = items_of(batch)
    key = next((key for key in ("input_ids", 0) if isinstance(items.get(key), Tensor)), None)
    if key is None or items[key].dim() != 2 or items[key].is_floating_point():
        return None
    ids_RT = items[key].clone()
    others = ids_RT[ids_RT != ids_RT[0, end_of_first - 1]]
    if not len(others):
        return None
    ids_RT[0, end_of_first - 1] = others[0]
    return with_items(batch, {**items, key: ids_RT})
