"""What ``self.log`` averages, weighed by the labels behind it: over ranks, micro-batches and an epoch.

Lightning weighs a logged mean by samples. The ranks of a cp group hold parts of the same samples, with more labels or
fewer, or none at all (the prompt's part), so a mean over ranks would depend on the layout and one empty part would make
it NaN. Here the weight of a step's value is the number of its labels that count, and ``self.log(..., sync_dist=True)``
is the mean per label, the same on every layout. A ``batch_size`` that the user passes stays what it is, and so does
the weight of a batch without one label per token.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_strategy._lightning_compat import weigh_logged_means
from lightning_moe_strategy.context_parallel.batch import MicroBatch
from lightning_moe_strategy.placed_strategy import PlacedStrategy


class LoggedMeans(PlacedStrategy):
    """A strategy under which the means that a step logs are means per label."""

    micro_batch: MicroBatch
    _weight_of_log: Tensor | None = None
    """Of the value that is being logged now."""

    def weigh_logs(self) -> None:
        """Once a batch, after Lightning has taken it up and before the user's step logs anything."""
        assert self.lightning_module is not None
        results = self.lightning_module.trainer._results
        count = self.micro_batch.num_loss_tokens
        if results is not None and count is not None:
            # FP64: an epoch of 1e9 labels added up in FP32 loses the third digit.
            weigh_logged_means(results, count.to(torch.float64), self._logging)

    @contextmanager
    def _logging(self, weight: Tensor) -> Generator[None, None, None]:
        self._weight_of_log = weight
        try:
            yield
        finally:
            self._weight_of_log = None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning's, but a mean of values that a step logs is weighed."""
        weight = self._weight_of_log
        if weight is None or reduce_op not in ("mean", "avg") or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        sums = torch.stack([tensor * weight, weight])
        dist.all_reduce(sums, group=group or dist.group.WORLD)
        return (sums[0] / sums[1].clamp(min=1)).to(tensor.dtype)
