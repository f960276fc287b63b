"""Activation: the MLP's elementwise function, by its name in transformers."""

from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.layers.probe import SHARD


class Activation(nn.Module):
    """``silu``, ``gelu``, ``gelu_pytorch_tanh``, ``relu`` or ``relu2`` (its square), on this rank's features."""

    tap_dims: dict[str, str] = {"in[input]": SHARD, "out": SHARD}  # noqa: RUF012  (read-only by contract)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        """[..., features], elementwise, in the input's dtype."""
        if self.name == "silu":
            return functional.silu(input)
        if self.name == "relu":
            return functional.relu(input)
        if self.name == "relu2":
            return functional.relu(input).square()
        return functional.gelu(input, approximate="tanh" if self.name == "gelu_pytorch_tanh" else "none")

    def extra_repr(self) -> str:
        """The name, for the module's repr."""
        return self.name
