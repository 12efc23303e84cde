"""Lightning's names for the tests of the strategy, from the package under test.

``LIGHTNING_MOE_FLAVOUR=pytorch_lightning python -m pytest tests/test_strategy.py`` runs them on the other package;
without the variable it is ``lightning``. A process uses one of them.
"""

import importlib
import os
from typing import TYPE_CHECKING

from lightning_moe_strategy._autoload import FLAVOUR_VARIABLE

ROOTS = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
FLAVOUR = os.environ.get(FLAVOUR_VARIABLE, "lightning")

if TYPE_CHECKING:
    import lightning.fabric as FABRIC
    import lightning.pytorch as L
else:
    L, FABRIC = map(importlib.import_module, ROOTS[FLAVOUR])

Callback, Trainer = L.Callback, L.Trainer
LightningDataModule, LightningModule = L.LightningDataModule, L.LightningModule
