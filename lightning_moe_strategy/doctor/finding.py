"""One line of what the doctor says."""

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["fine", "advice", "broken"]
"""``advice``: training works, and something should be known. ``broken``: it would not work."""


@dataclass(frozen=True)
class Finding:
    subject: str
    found: str
    status: Status = "fine"
    remedy: str = ""
    """What to do; empty where all is fine."""

    def to_json(self) -> dict[str, str]:
        return asdict(self)
