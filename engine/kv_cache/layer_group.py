"""LayerGroup: layers with the same attention window, which therefore share a pool of pages and page tables."""

from dataclasses import dataclass

from tapscope.engine.hf_config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one cache group."""

    layers: tuple[int, ...]
    window: int | None
    """Largest number of positions that a row attends to, its own included; None: all."""


def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """Return the cache groups of a model, the one with the largest window first.

    A window that covers the model's maximum positions counts as no window. A model without attention has one group
    without layers. Its pages take no memory and only identify the prefixes whose states are checkpoints.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer in config.attention_layers:
        window = config.window(layer)
        by_window.setdefault(None if window is None or window >= config.max_positions else window, []).append(layer)
    furthest_first = sorted(by_window.items(), key=lambda item: (item[0] is not None, -(item[0] or 0)))
    return tuple(LayerGroup(tuple(layers), window) for window, layers in furthest_first) or (LayerGroup((), None),)
