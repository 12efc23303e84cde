"""The load of experts over a fit: windows between two figures, appended to a file and kept as skews.

Shapes: E experts of a layer.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from lightning_moe_strategy._lightning_compat import rank_zero_warn
from lightning_moe_strategy.report.expert_series import (
    MAX_WINDOWS,
    Window,
    append_window,
    continue_series,
    halve_series,
)
from lightning_moe_strategy.report.load_arithmetic import skew


class ExpertLoadHistory:
    """What `ExpertLoadMonitor` logged since the fit began, step by step.

    Every rank keeps it alike, so that any of them may save it; one writes the file. A window is what was counted since
    the last one. Once there are `MAX_WINDOWS` of them neighbours are added up, and every further one spans twice as
    many figures. After a resume it goes on where the checkpoint was: the file loses what came after it.

    Attributes:
        skews: (step, skew of each layer) of every window that this rank has seen or read.
    """

    def __init__(self) -> None:
        self.skews: list[tuple[int, list[float]]] = []
        self._path: Path | None = None
        self._since, self._is_resumed = 0, False
        self._base: Mapping[str, Tensor] = {}
        self._figures: list[Mapping[str, float]] = []
        self._logs_per_window, self._num_windows = 1, 0

    def start(self, path: Path | None, num_experts: Mapping[str, int], *, step: int) -> None:
        """At the first step of a fit, or the first after a resume. ``path``: None on ranks that do not write."""
        self._path = path
        if not self._is_resumed:
            self._since = step
        if path is None:
            return
        with _OrWithoutFile(self):
            path.parent.mkdir(parents=True, exist_ok=True)
            series = continue_series(path, num_experts, step=step)
            self.skews = [(window.step, [skew(layer) for layer in window.tokens]) for window in series.windows]

    def add(self, step: int, tokens: Mapping[str, Tensor], ep: int, figures: Mapping[str, float]) -> None:
        """Tokens of the fit so far by layer, [E] each, as they were logged at ``step``, and what balancing did."""
        self._figures.append(figures)
        if len(self._figures) >= self._logs_per_window:
            self._end_window(step, tokens, ep)

    def finish(self, step: int, tokens: Mapping[str, Tensor], ep: int, figures: Mapping[str, float]) -> None:
        """The end of a fit: what was counted since the last window is one more."""
        if self._figures or step > self._since:
            self._figures.append(figures)
            self._end_window(step, tokens, ep)

    def state(self) -> dict[str, Any]:
        """What a resume needs, for `load_state`."""
        return {
            "since": self._since,
            "base": dict(self._base),
            "figures": [dict(figures) for figures in self._figures],
            "logs_per_window": self._logs_per_window,
            "num_windows": self._num_windows,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._is_resumed = True
        self._since, self._base, self._figures = state["since"], dict(state["base"]), list(state.get("figures", []))
        self._logs_per_window, self._num_windows = state.get("logs_per_window", 1), state.get("num_windows", 0)

    def _end_window(self, step: int, tokens: Mapping[str, Tensor], ep: int) -> None:
        counts = {name: tokens_E - self._base.get(name, 0) for name, tokens_E in tokens.items()}
        window = Window(
            since=self._since,
            step=step,
            num_logs=len(self._figures),
            ep=ep,
            tokens=tuple(tokens_E.numpy() for tokens_E in counts.values()),
            figures=_means(self._figures),
        )
        self._since, self._base, self._figures = step, tokens, []
        self._num_windows += 1
        self.skews.append((step, [skew(layer) for layer in window.tokens]))
        if self._path is not None:
            with _OrWithoutFile(self):
                append_window(self._path, window)
        if self._num_windows >= MAX_WINDOWS:
            self._halve()

    def _halve(self) -> None:
        self._num_windows = -(-self._num_windows // 2)
        self._logs_per_window *= 2
        self.skews = self.skews[1::2] if len(self.skews) % 2 == 0 else self.skews[::2]
        if self._path is not None:
            with _OrWithoutFile(self):
                halve_series(self._path)


class _OrWithoutFile:
    """A disk that is full, or gone, is told once and ends the file, not the training."""

    def __init__(self, history: ExpertLoadHistory) -> None:
        self.history = history

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, OSError):
            return False
        rank_zero_warn(
            f"{self.history._path} cannot be written ({error.strerror or error}): training goes on without a record "
            "of the expert load. Free space, or set default_root_dir to a folder you may write to."
        )
        self.history._path = None
        return True


def _means(figures: list[Mapping[str, float]]) -> dict[str, float]:
    names = {name for each in figures for name in each}
    return {name: fmean(each[name] for each in figures if name in each) for name in sorted(names)}
