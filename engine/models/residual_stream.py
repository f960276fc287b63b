"""ResidualStream: the hidden states passed between decoder layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from tapscope.engine.layers.fused import fused_for
from tapscope.engine.layers.norm import RMSNorm, add_norm
from tapscope.engine.layers.probe import notify_inputs, notify_output

OnSum = Callable[[Tensor], None]
"""Callback that receives the sum of residual and states, [tokens, hidden]."""


class ResidualStream:
    """Hidden states [tokens, hidden], or two summands of them, which the next norm adds in its kernel.

    With fused kernels, ``layer.summands`` runs instead of the layer itself and leaves its final sum uncomputed. Once
    the next norm computes the sum, the taps of the layer before and after it are notified.
    """

    def __init__(self, hidden_states: Tensor) -> None:
        self._states, self._residual = hidden_states, None
        self._notify_last: OnSum | None = None

    @property
    def hidden_states(self) -> Tensor:
        """The hidden states [tokens, hidden]; adds pending summands."""
        return self._states if self._residual is None else self._residual + self._states

    def enter(self, layer: Any, **inputs: Any) -> None:
        """Run decoder layer ``layer`` on the stream; ``inputs`` are the remaining arguments of its ``forward``."""
        if fused_for(self._states, layer) is not None:
            on_input = partial(_enter_layer, self._notify_last, layer, inputs)
            cache, rotation = inputs["past_key_values"], inputs["position_embeddings"]
            self._states, self._residual = layer.summands(self._states, self._residual, cache, rotation, on_input)
            self._notify_last = partial(notify_output, layer)
            return
        hidden_states = self.hidden_states
        if self._notify_last is not None:
            self._notify_last(hidden_states)
        self._states, self._residual, self._notify_last = layer(hidden_states, **inputs), None, None

    def normalised(self, norm: RMSNorm) -> Tensor:
        """Apply the final norm ``norm`` and return the hidden states."""
        return add_norm(norm, self._states, self._residual, on_sum=self._notify_last)[0]


def _enter_layer(notify_last: OnSum | None, layer: nn.Module, inputs: dict[str, Any], hidden_states: Tensor) -> None:
    """Notify the output taps of the previous layer and the input taps of ``layer`` of ``hidden_states``."""
    if notify_last is not None:
        notify_last(hidden_states)
    notify_inputs(layer, hidden_states, **inputs)
