"""Activation: the elementwise function of an MLP, selected by its name in transformers."""

from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.layers.probe import SHARD


class Activation(nn.Module):
    """``silu``, ``gelu``, ``gelu_pytorch_tanh``, ``relu`` or ``relu2`` (squared ReLU) of this rank's features."""

    tap_dims: dict[str, str] = {"in[input]": SHARD, "out": SHARD}  # noqa: RUF012  (read-only by contract)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function elementwise to [..., features], in the dtype of ``input``."""
        if self.name == "silu":
            return functional.silu(input)
        if self.name == "relu":
            return functional.relu(input)
        if self.name == "relu2":
            return functional.relu(input).square()
        return functional.gelu(input, approximate="tanh" if self.name == "gelu_pytorch_tanh" else "none")

    def extra_repr(self) -> str:
        """Return the name of the function, for the module's repr."""
        return self.name
