"""What attention will read of every token of the sequence, said as soon as this process has its part."""

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def announce_keys(keys_BSX: Tensor) -> Tensor:
    """``keys_BSX`` itself, to be handed to the attention or the selection of keys in place of it.

    In one process that is all. Whoever splits the sequence over processes replaces this call, and lets the keys travel
    while queries are computed. Call it once for each ``select_keys`` and ``sparse_attention`` that reads them.
    """
    if has_torch_function((keys_BSX,)):
        taken_over: Tensor = handle_torch_function(announce_keys, (keys_BSX,), keys_BSX)
        return taken_over
    return keys_BSX
