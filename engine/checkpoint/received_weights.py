"""ReceivedWeights: in-memory tensors that are loaded like a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tapscope.core.dtypes import to_safetensors

_NAME = "the received weights"


class ReceivedWeights:
    """Unquantized in-memory tensors by Hugging Face name: an alternative weight source to a directory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def files(self) -> dict[str, str]:
        """Tensor name -> name of this source, in place of a file name."""
        return dict.fromkeys(self._tensors, _NAME)

    @property
    def handles(self) -> dict[str, Any]:
        """Name of this source -> this object, which has the methods of an open safetensors file."""
        return {_NAME: self}

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """Return one tensor."""
        return self._tensors[name]

    def get_slice(self, name: str) -> "_Slice":
        """Return one tensor with the slice interface of safetensors."""
        return _Slice(self._tensors[name])

    def __str__(self) -> str:
        return _NAME


class _Slice:
    """An in-memory tensor with the slice interface of safetensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return to_safetensors(str(self._tensor.dtype).removeprefix("torch."))

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensor[part]


WeightSource = Path | ReceivedWeights
"""Source of new weights: a checkpoint directory, or tensors in memory."""
