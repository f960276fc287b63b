"""The pair of runs in most dashboard tests: in the target, the first row of one site is 1.5 times as large."""

from pathlib import Path

import numpy as np
from comparator_toy import Toy, weights

PROMPTS = {"0": list(range(3, 20)), "1": list(range(40, 51))}
SITE = "model.layers.2.mlp.down_proj:out"


def scaled(values: np.ndarray) -> np.ndarray:
    """Multiply the first row by 1.5."""
    values = values.copy()
    values[0] *= 1.5
    return values


def toy_pair(root: Path) -> Path:
    """Write the runs ``base`` and ``target`` of three steps each, which differ from :data:`SITE` on."""
    tables = weights()
    Toy(tables).write(root / "base", PROMPTS, steps=(11, 14)).close()
    Toy(tables, hooks={SITE: scaled}).write(root / "target", PROMPTS, steps=(11, 14)).close()
    return root
