"""ResidualStream: the hidden states from one decoder layer to the next."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from tapscope.engine.layers.fused import fused_for
from tapscope.engine.layers.norm import RMSNorm, add_norm
from tapscope.engine.layers.probe import notify_inputs, notify_output

OnSum = Callable[[Tensor], None]
"""Called with a sum of residual and states, [tokens, hidden]."""


class ResidualStream:
    """Hidden states [tokens, hidden], or two summands of them that the next norm adds in its kernel.

    With fused kernels a layer is not called: its ``summands`` leave a sum that nobody has computed. Once the next norm
    has computed it, it is shown to the taps of the layer that it leaves and of the one that it enters.
    """

    def __init__(self, hidden_states: Tensor) -> None:
        self._states, self._residual = hidden_states, None
        self._notify_last: OnSum | None = None

    @property
    def hidden_states(self) -> Tensor:
        """[tokens, hidden]."""
        return self._states if self._residual is None else self._residual + self._states

    def enter(self, layer: Any, **inputs: Any) -> None:
        """Compute the decoder layer ``layer``, whose ``forward`` also takes ``inputs``."""
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
        """The hidden states after the last norm."""
        return add_norm(norm, self._states, self._residual, on_sum=self._notify_last)[0]


def _enter_layer(notify_last: OnSum | None, layer: nn.Module, inputs: dict[str, Any], hidden_states: Tensor) -> None:
    """Show ``hidden_states`` to the taps of the layer that has computed it, and to those of the layer that reads it."""
    if notify_last is not None:
        notify_last(hidden_states)
    notify_inputs(layer, hidden_states, **inputs)
