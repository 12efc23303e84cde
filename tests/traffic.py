"""What attention gathers and reduces over the cp ranks, whether it waits for it at once or later."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from lightning_moe_strategy.context_parallel import ahead, gather


@contextmanager
def noted_traffic(
    gathered: Callable[[Tensor], Any], reduced: Callable[[Tensor], Any] = lambda x: None
) -> Generator[None, None, None]:
    """Call these with this rank's input of every gather and reduction that is issued inside, in order."""

    def noting(note: Callable[[Tensor], Any], collective: Callable[..., Any]) -> Callable[..., Any]:
        def noted(x: Tensor, group: Any) -> Any:
            note(x)
            return collective(x, group)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "all_gather_in_steps", noting(gathered, gather.all_gather_in_steps))
        patch.setattr(ahead, "start_gather_in_steps", noting(gathered, ahead.start_gather_in_steps))
        patch.setattr(gather, "reduce_scatter_in_steps", noting(reduced, gather.reduce_scatter_in_steps))
        patch.setattr(ahead, "start_reduce_scatter_in_steps", noting(reduced, ahead.start_reduce_scatter_in_steps))
        yield
