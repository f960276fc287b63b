"""ModelConfig: what config.json of a Hugging Face Llama checkpoint says, checked."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapscope.errors import CheckpointError, UsageError

ARCHITECTURES = ("LlamaForCausalLM",)
"""What this engine can build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding; the scaling fields are those of Llama 3.1 (arXiv:2407.21783)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one model; all counts are of the whole model, not of a rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: Rope
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """Type the weights were saved in, as config.json names it."""

    def facts(self) -> dict[str, int | float]:
        """The numbers that tell how tensors are made up, under the names of config.json."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
        }

    def check_split(self, tp: int) -> None:
        """Raise UsageError when ``tp`` ranks cannot share heads and features evenly; the vocabulary may be uneven."""
        for name, count in (("key/value heads", self.num_kv_heads), ("intermediate features", self.intermediate_size)):
            if count % tp:
                raise UsageError(f"tp={tp} does not divide the model's {count} {name}; use a divisor of {count}")

    @classmethod
    def read(cls, folder: Path) -> "ModelConfig":
        """Read ``folder/config.json`` (and end tokens from generation_config.json); raises CheckpointError."""
        if not folder.is_dir():
            raise CheckpointError(f"no model directory at {folder}; give a folder with config.json and *.safetensors")
        reader = _Reader(folder / "config.json")
        architecture = _architecture(reader)
        if reader.get("quantization_config") is not None:
            raise CheckpointError(f"{reader.path}: quantised weights are not supported; use float32 or bfloat16 ones")
        if reader.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"{reader.path}: hidden_act is {reader.get('hidden_act')!r}; supported: silu")
        num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
        num_kv_heads = reader.count("num_key_value_heads", num_heads)
        head_dim = reader.count("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(f"{reader.path}: {num_kv_heads} key/value heads do not divide {num_heads} heads")
        if head_dim % 2:
            raise CheckpointError(f"{reader.path}: head_dim is {head_dim}; rotary embedding needs an even one")
        max_positions = reader.count("max_position_embeddings", 2048)
        return cls(
            architecture=architecture,
            vocab_size=reader.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.count("intermediate_size"),
            num_layers=reader.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            max_positions=max_positions,
            rope=_rope(reader, max_positions),
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            attention_bias=reader.flag("attention_bias"),
            mlp_bias=reader.flag("mlp_bias"),
            eos_token_ids=_eos(reader, folder),
            dtype=reader.get("dtype") or reader.get("torch_dtype"),
        )


class _Reader:
    """Typed look-ups in one JSON object; every complaint names the file and the field."""

    def __init__(self, path: Path, values: dict[str, Any] | None = None) -> None:
        self.path = path
        self.values = _load(path) if values is None else values

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self.path}: {name} is {value!r}; it must be a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"{self.path}: {name} is {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name} is {value!r}; it must be true or false")
        return value


def _load(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a Hugging Face checkpoint has one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}; it must be a JSON object")
    return values


def _architecture(reader: _Reader) -> str:
    named = reader.get("architectures") or []
    if not named and reader.get("model_type") == "llama":
        return ARCHITECTURES[0]
    name = named[0] if isinstance(named, list) and named else reader.get("model_type")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{reader.path}: architecture {name!r} is not supported; supported: {known}")
    return str(name)


def _rope(reader: _Reader, max_positions: int) -> Rope:
    """From ``rope_parameters`` (transformers 5) or ``rope_scaling`` with ``rope_theta`` (before it)."""
    values = reader.get("rope_parameters") or reader.get("rope_scaling") or {}
    if not isinstance(values, dict):
        raise CheckpointError(f"{reader.path}: the rope settings are {values!r}; they must be a JSON object")
    settings = _Reader(reader.path, {"rope_theta": reader.get("rope_theta", 10000.0)} | values)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    theta = settings.number("rope_theta")
    if settings.number("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{reader.path}: partial_rotary_factor is not supported; only whole heads are rotated")
    if kind == "default":
        return Rope(theta=theta)
    if kind != "llama3":
        raise CheckpointError(f"{reader.path}: rope type {kind!r} is not supported; supported: default, llama3")
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if not low < high:
        raise CheckpointError(f"{reader.path}: low_freq_factor {low} must be below high_freq_factor {high}")
    return Rope(
        theta=theta,
        kind=kind,
        factor=settings.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=settings.count("original_max_position_embeddings", max_positions),
    )


def _eos(reader: _Reader, folder: Path) -> tuple[int, ...]:
    """End tokens; generation_config.json, where there is one, overrides config.json as in transformers."""
    path = folder / "generation_config.json"
    value = _Reader(path).get("eos_token_id") if path.exists() else None
    value = reader.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise CheckpointError(f"{reader.path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(ids)
