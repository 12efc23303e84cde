"""Named in config.yaml by class path."""

import json
from pathlib import Path
from typing import Any

import lightning as L


class WriteLosses(L.Callback):
    """A line per step, in the Trainer's directory."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        path = Path(trainer.default_root_dir) / f"losses_{trainer.global_rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps({name: float(x) for name, x in trainer.callback_metrics.items()}) + "\n")
