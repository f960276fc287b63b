"""ModelCost: FLOPs and bytes per token of a model, from the tensor shapes in its checkpoint."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tapscope.core.dtypes import OF_SAFETENSORS, itemsize
from tapscope.core.errors import CheckpointError
from tapscope.engine.hf_config.family import EXPERTS, LINEAR, MLP
from tapscope.engine.hf_config.model_config import ModelConfig

_COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Cost of a whole model, assuming that each token is multiplied with every active weight once."""

    dtype: str
    """Torch name of the dtype of most weights."""
    active_weights: int
    """Number of weights that one token is multiplied with, without the embedding table and unselected experts."""
    weight_bytes: int
    """Bytes of weights read by a step with many tokens, which together select all experts."""
    kv_bytes: int
    """Bytes of one token's keys and values over all layers."""
    attention_flops: int
    """FLOPs of one token for each token that it attends to, over all layers; windows are ignored."""

    @classmethod
    def read(cls, folder: Path, *, kv_bytes: int = 0) -> "ModelCost":
        """Compute the cost from config.json and the headers of the weight files; raises CheckpointError.

        ``kv_bytes`` is the value that the engine reports; without it, :meth:`bytes_read` counts only weights.
        """
        config, sizes = ModelConfig.read(folder), _sizes(folder)
        kinds = {kind for _, kind in sizes.values()}
        kind = max(kinds, key=lambda one: sum(count for count, other in sizes.values() if other == one))
        is_tied = not any(name.startswith("lm_head") for name in sizes)
        share = 1.0 if config.moe is None else config.moe.top_k / config.moe.num_experts
        used = {name: entry for name, entry in sizes.items() if is_tied or "embed" not in name}
        active = sum(count * (share if ".experts." in name else 1) for name, (count, _) in used.items())
        return cls(
            dtype=kind if kind in _COMPUTE_DTYPES else "float32",
            active_weights=round(active),
            weight_bytes=sum(count * itemsize(kind) for count, kind in used.values()),
            kv_bytes=kv_bytes,
            attention_flops=2 * config.num_heads * sum(_head_features(config)),
        )

    def flops(self, num_tokens: float, num_pairs: float) -> float:
        """Return the FLOPs of ``num_tokens`` tokens with ``num_pairs`` attended (query, key) pairs in total."""
        return 2 * self.active_weights * num_tokens + self.attention_flops * num_pairs

    def bytes_read(self, num_steps: float, num_pairs: float) -> float:
        """Return the bytes read by ``num_steps`` steps that read the KV cache of ``num_pairs`` tokens in total."""
        return self.weight_bytes * num_steps + self.kv_bytes * num_pairs


def _head_features(config: ModelConfig) -> Iterator[int]:
    """Yield, for each layer with attention, the sum of one head's key and value dimensions."""
    for layer, kind in enumerate(config.layer_types):
        if kind not in (LINEAR, MLP, EXPERTS):
            mla = config.mla
            yield 2 * config.of_layer(layer).head_dim if mla is None else mla.head_dim + mla.value_dim


def _sizes(folder: Path) -> dict[str, tuple[int, str]]:
    """Return (number of elements, dtype) of every tensor in the checkpoint by name."""
    sizes: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    piece: Any = file.get_slice(name)
                    if (kind := OF_SAFETENSORS.get(piece.get_dtype())) is None:
                        raise CheckpointError(f"{name} in {path} has the unknown dtype {piece.get_dtype()}")
                    sizes[name] = (math.prod(piece.get_shape()), kind)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not sizes:
        raise CheckpointError(f"{folder} has no *.safetensors")
    return sizes
