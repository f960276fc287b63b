"""Gemma3nConfig: settings in config.json for the additions of Gemma 3n to a decoder."""

from dataclasses import dataclass

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.params.validators import is_number


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsConfig:
    """Sizes of a second token embedding, with separate features for each layer."""

    vocab_size: int
    size: int
    """Number of features per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nConfig:
    """Settings of alternating updates (arXiv:2301.13310), learned augmented residuals and sparse activations."""

    num_streams: int
    active: int
    """Number of hidden states per token in alternating updates, and the index of the one that layers compute."""
    scales_output: bool
    laurel_rank: int
    intermediate_sizes: tuple[int, ...]
    sparsity: tuple[float, ...]
    """For each layer, the MLP's intermediate size, and the fraction of its gate activations that is set to zero."""


def gemma3n_parts(reader: ConfigReader, num_layers: int) -> Gemma3nConfig:
    """Read Gemma 3n's additions from a Gemma3nTextConfig; raises CheckpointError."""
    streams = reader.count("altup_num_inputs", 4)
    active = reader.count("altup_active_idx", 0, minimum=0, maximum=streams - 1)
    num_sparse = 10 if num_layers > 10 else 0
    sparsity = reader.get("activation_sparsity_pattern", [0.95] * num_sparse + [0.0] * (num_layers - num_sparse))
    if not isinstance(sparsity, list) or len(sparsity) != num_layers or not all(map(_is_share, sparsity)):
        raise reader.fail("activation_sparsity_pattern", f"expected {num_layers} numbers from 0 to below 1")
    return Gemma3nConfig(
        num_streams=streams,
        active=active,
        scales_output=reader.flag("altup_correct_scale", default=True),
        laurel_rank=reader.count("laurel_rank", 64),
        intermediate_sizes=tuple(reader.values["intermediate_sizes"]),
        sparsity=tuple(map(float, sparsity)),
    )


def gemma3n_layer_inputs(reader: ConfigReader) -> LayerInputsConfig:
    """Read the per-layer embedding sizes of a Gemma3nTextConfig; raises CheckpointError."""
    return LayerInputsConfig(
        vocab_size=reader.count("vocab_size_per_layer_input", 262144),
        size=reader.count("hidden_size_per_layer_input", 256),
    )


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and is_number(value) and 0 <= value < 1


def shared_kv_layers(reader: ConfigReader, kinds: tuple[str, ...], default: int) -> dict[int, int]:
    """Map each of the last ``num_kv_shared_layers`` layers to the layer whose keys and values it reads.

    That is the last earlier layer of the same type with its own cache. Raises CheckpointError if there is none.
    """
    count = reader.count("num_kv_shared_layers", default, minimum=0, maximum=len(kinds) - 1)
    first = len(kinds) - count
    sources = {kind: layer for layer, kind in enumerate(kinds[:first])}
    missing = set(kinds[first:]) - set(sources)
    if missing:
        raise reader.fail("num_kv_shared_layers", f"no layer of {missing.pop()} is left to take keys from")
    return {layer: sources[kinds[layer]] for layer in range(first, len(kinds))}
