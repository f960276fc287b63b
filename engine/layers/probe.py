"""Probe, an identity module that makes a value tappable, and dims annotations shared by the layers.

Dims (see :mod:`tapscope.core.dims`): t packed tokens, h features, v vocabulary, d head dim.
"""

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

WHOLE = "t h # tp:replicated"
SHARD = "t h[tp]"
PARTIAL = "t h[tp:partial]"
TOKENS = "t # tp:replicated"
ANGLES = "t d # tp:replicated"
ANGLE_INPUTS = {"in[position_embeddings.0]": ANGLES, "in[position_embeddings.1]": ANGLES}


class Probe(nn.Module):
    """Identity module that gives a value a path in the module tree, so that forward hooks see it."""

    tap_ports = ("out",)
    """Only the output is tapped; the input is the same tensor."""

    def __init__(self, dims: str, rows: str | None = None) -> None:
        super().__init__()
        self.tap_dims = dict.fromkeys(("in[output]", "out"), dims)
        self.tap_rows = {} if rows is None else dict.fromkeys(("in[output]", "out"), rows)

    def forward(self, output: Tensor) -> Tensor:
        """``output`` itself."""
        return output


def is_watched(module: nn.Module) -> bool:
    """Whether a call of ``module`` is observable: it has hooks, there are global ones, or ``forward`` is replaced."""
    own = module._forward_hooks or module._forward_pre_hooks
    every = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return bool(own or every) or "forward" in module.__dict__
