"""ReceivedWeights: tensors in memory that are loaded like those of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tapscope.core.dtypes import to_safetensors

_NAME = "the received weights"


class ReceivedWeights:
    """Tensors by Hugging Face's names, none of them quantized; a source of weights besides a directory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def files(self) -> dict[str, str]:
        """Name of each tensor -> the name of the source, for messages."""
        return dict.fromkeys(self._tensors, _NAME)

    @property
    def handles(self) -> dict[str, Any]:
        """The source, with the methods of an open safetensors file."""
        return {_NAME: self}

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """One tensor."""
        return self._tensors[name]

    def get_slice(self, name: str) -> "_Slice":
        """One tensor, to read parts of."""
        return _Slice(self._tensors[name])

    def __str__(self) -> str:
        return _NAME


class _Slice:
    """A lazily read tensor, with the interface of safetensors' slices."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return to_safetensors(str(self._tensor.dtype).removeprefix("torch."))

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensor[part]


WeightSource = Path | ReceivedWeights
"""Where new weights come from: the directory of a checkpoint, or tensors in memory."""
