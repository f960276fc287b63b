"""PeftAdapter: a LoRA adapter in PEFT's format (adapter_config.json and adapter_model.safetensors)."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tapscope.engine.params.json_file import read_object

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # other values change the base model's weights
}
_REFUSED = (
    *("use_dora", "fan_in_fan_out", "modules_to_save", "lora_bias", "use_qalora", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "layer_replication", "use_bdlora", "kasa_config", "velora_config"),
    "monteclora_config",
)
"""Options that change the result and must be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """Configuration of a LoRA adapter, read without its weights."""

    folder: Path
    rank: int
    """Largest rank of any layer."""
    default_rank: int
    alpha: float
    is_rank_stabilized: bool
    """Whether updates are scaled by alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732) instead of alpha / rank."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Regular expression for the end of a module's path -> rank of the module."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Regular expression for the end of a module's path -> alpha of the module."""
    target_parameters: tuple[str, ...] = ()
    """Path suffixes of parameters that are adapted directly, such as stacked expert matrices."""

    @classmethod
    def read(cls, folder: Path) -> "PeftAdapter":
        """Read ``adapter_config.json``; raises CheckpointError if it is missing, malformed or unsupported."""
        path = folder / CONFIG
        try:
            values = read_object(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; expected the directory of a PEFT adapter") from None
        _check_supported(path, values)
        rank, patterns = _number(path, values, "r", 8, int), _pattern(path, values, "rank_pattern", int)
        return cls(
            folder=folder,
            rank=max([rank, *patterns.values()]),
            default_rank=rank,
            alpha=_number(path, values, "lora_alpha", 8, float),
            is_rank_stabilized=bool(values.get("use_rslora")),
            rank_pattern=patterns,
            alpha_pattern=_pattern(path, values, "alpha_pattern", float),
            target_parameters=_parameters(path, values),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of the module with this path."""
        return int(_match(self.rank_pattern, module, self.default_rank))

    def scaling_of(self, module: str) -> float:
        """Return the scaling factor of the module's low-rank update."""
        alpha, rank = _match(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def targets_parameter(self, path: str) -> bool:
        """Return whether the parameter with this path is adapted directly."""
        return any(path == end or path.endswith(f".{end}") for end in self.target_parameters)

    @contextmanager
    def open(self) -> Iterator["AdapterWeights"]:
        """Context manager: open the adapter's weights; the CheckpointError names the file and tensor."""
        with open_checkpoint(self.folder, file=WEIGHTS) as checkpoint:
            yield AdapterWeights(checkpoint)
            checkpoint.check_unchanged()


class AdapterWeights:
    """Open weights of an adapter, by adapted module."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError for a tensor other than lora_A and lora_B, and if one of a pair is missing."""
        self.checkpoint = checkpoint
        checkpoint.shape_source = "the model and the rank in adapter_config.json require"
        halves: dict[str, dict[str, str]] = {}
        for name in checkpoint.names:
            path = name.removeprefix(_PREFIX)
            suffix = next((suffix for suffix in (_DOWN, _UP) if path.endswith(suffix)), None)
            if suffix is None:
                raise CheckpointError(
                    f"{name} in {checkpoint.file_of(name)} is not supported: an adapter consists of lora_A.weight and "
                    "lora_B.weight of linear layers and experts"
                )
            halves.setdefault(path.removesuffix(suffix), {})[suffix] = name
        for path, held in halves.items():
            if len(held) == 1:
                (name,) = held.values()
                lost = "lora_B" if name.endswith(_DOWN) else "lora_A"
                raise CheckpointError(f"{checkpoint.file_of(name)} has no {lost}.weight of {path}")
        self.names = {path: (held[_DOWN], held[_UP]) for path, held in halves.items()}
        """Path of an adapted module -> names of lora_A [rank, ins] and lora_B [outs, rank]."""

    def where(self, path: str) -> str:
        """Return the name and file of the adapted module's lora_A, for messages."""
        name = self.names[path][0]
        return f"{name} in {self.checkpoint.file_of(name)}"


def _check_supported(path: Path, values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a method other than LoRA or an unsupported option."""
    method = values.get("peft_type", "LORA")
    if method != "LORA":
        raise CheckpointError(f"{path}: peft_type={method!r} is not supported; expected 'LORA'")
    for name, valid in _PLAIN.items():
        if values.get(name) is not None and values[name] not in valid:
            expected = " or ".join(map(repr, valid))
            raise CheckpointError(f"{path}: {name}={values[name]!r} is not supported; expected {expected}")
    given = next((name for name in _REFUSED if values.get(name)), None)
    if given is not None:
        raise CheckpointError(f"{path}: {given}={values[given]!r} is not supported; expected LoRA or rsLoRA without it")


def _number(path: Path, values: Mapping[str, Any], name: str, default: float, kind: type) -> Any:
    value = values.get(name, default)
    is_number = type(value) in ((int,) if kind is int else (int, float))
    if not is_number or not value > 0 or not math.isfinite(value):
        rule = "an integer ≥ 1" if kind is int else "a finite number above 0"
        raise CheckpointError(f"{path}: {name}={value!r} must be {rule}")
    return value


def _pattern(path: Path, values: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    given = values.get(name) or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{path}: {name} must be a JSON object of module names with numbers")
    for key in given:
        try:
            re.compile(key)
        except re.error as error:
            raise CheckpointError(f"{path}: {name} has the invalid regular expression {key!r}: {error}") from None
    return {key: _number(path, given, key, 0, kind) for key in given}


def _parameters(path: Path, values: Mapping[str, Any]) -> tuple[str, ...]:
    given = values.get("target_parameters") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise CheckpointError(f"{path}: target_parameters={given!r} must be a list of names")
    return tuple(given)


def _match(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of ``module``, as PEFT does, or ``default``."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
