"""Models: a model of a family, with a size and a weight style, saved as a Hugging Face checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.verdict.families import family
from benchmarks.verdict.weights import STYLES, fill
from benchmarks.verdict.workload import VOCAB
from tapscope.core.errors import UsageError

_TRAINING_STEPS = 200
_BATCH, _LENGTH = 8, 48


@dataclass(frozen=True, slots=True)
class Model:
    """The model of a case."""

    family: str
    style: str = "spread"
    seed: int = 0
    """Added to the family's seed."""
    sizes: tuple[tuple[str, Any], ...] = ()
    """Config fields that differ from the family's."""

    @classmethod
    def of(cls, name: str, changes: Mapping[str, Any]) -> "Model":
        """Return a model of a family; ``changes`` may have ``weights`` (the style), ``seed``, and config fields.

        Raises UsageError for an unknown family, style or field.
        """
        sizes = {key: value for key, value in changes.items() if key not in ("weights", "seed")}
        style, seed = changes.get("weights", "spread"), changes.get("seed", 0)
        if style not in STYLES:
            raise UsageError(f"weights={style!r}: must be one of {', '.join(STYLES)}")
        if type(seed) is not int:
            raise UsageError(f"seed={seed!r}: expected an integer")
        if sizes:
            family(name).config(sizes)
        return cls(family(name).name, style, seed, tuple(sorted(sizes.items())))

    def save(self, folder: Path) -> Path:
        """Write the checkpoint; return its directory."""
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
        chosen = family(self.family)
        with torch.random.fork_rng():
            torch.manual_seed(chosen.seed + self.seed)
            model = transformers.AutoModelForCausalLM.from_config(chosen.config(dict(self.sizes)))
            fill(model, self.style, chosen.seed + self.seed)
            if self.style == "trained":
                _train(model, chosen.seed + self.seed)
        model.save_pretrained(folder)
        return folder


def _train(model: Any, seed: int) -> None:
    """Train on sequences whose second half repeats the first, long enough for attention to learn copying."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(_TRAINING_STEPS):
        first = torch.randint(1, VOCAB // 4, (_BATCH, _LENGTH // 2), generator=draw)
        ids = torch.cat([first, first], dim=1)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
