"""Quantised checkpoints: finding the scales of each weight, and dequantisation.

Reference dequantisation: a weight is multiplied by its scales in fp32 when it is read, and rounded to the engine's
dtype; activations are not quantised. The formats, by `quantization_config` of config.json:

- ``fp8``: block-wise e4m3 with `NAME_scale_inv` [ceil(out / block), ceil(in / block)] (DeepSeek-V3, arXiv:2412.19437;
  transformers' integrations/finegrained_fp8.py);
- ``compressed-tensors``: int8 (W8A8) or e4m3 with `NAME_scale`, one per tensor or one per output channel;
- ``modelopt``: e4m3 with `NAME_scale`, one per tensor (also in hf_quant_config.json);
- ``mxfp4``: experts of gpt-oss as `NAME_blocks` and `NAME_scales` (:mod:`tapscope.engine.checkpoint.mxfp4`).
"""

import fnmatch
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapscope.core.errors import CheckpointError

KINDS = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8"}
"""dtypes of quantised weights, and their names in safetensors."""
_METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp4")
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "dense", None)
_SUFFIXES = ("_scale_inv", "_scale")
_METADATA = re.compile(r"\.(input_scale|output_scale|k_scale|v_scale|q_scale|kv_scale|weight_zero_point)$")
_CACHE_SCALE = re.compile(r"\.self_attn\.((attn\.|[kv]_proj\.)?(k_scale|v_scale)|kv_scale|[kv]_proj\.output_scale)$")
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How a checkpoint's config.json asks for the quantisation of a layer's input."""

    dtype: torch.dtype
    group: int | None
    """Features of a token that share a scale; None: all."""
    is_static: bool = False
    """Whether the one scale is in the checkpoint (``NAME.input_scale``)."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization format of a checkpoint."""

    method: str
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, if config.json has a weight_block_size."""
    inputs: tuple[tuple[tuple[str, ...], ActivationScheme], ...] = ()
    """Targets of compressed-tensors' groups (class names, module paths, ``re:`` and an expression) and their schemes;
    no targets: every quantised layer."""

    def activations(self, tensor: str, dtype: torch.dtype) -> ActivationScheme | None:
        """How the input of the layer with weight ``tensor``, quantised to ``dtype``, is quantised; None: not at all.

        Inputs of another dtype than the weight stay as they are.
        """
        path = tensor.removesuffix(".weight")
        for targets, scheme in self.inputs:
            if scheme.dtype == dtype and (not targets or any(_is_target(path, target) for target in targets)):
                return scheme
        return None

    @classmethod
    def read(cls, folder: Path) -> "Quantization | None":
        """From config.json or hf_quant_config.json; None if the checkpoint is not quantised.

        Raises CheckpointError for an unsupported format.
        """
        path, values = next(sections(folder), (folder, None))
        if values is None:
            return None
        method = values.get("quant_method")
        if method not in _METHODS:
            raise CheckpointError(f"{path}: quant_method {method!r} is not supported; supported: {', '.join(_METHODS)}")
        if method == "compressed-tensors" and values.get("format") not in _FORMATS:
            known = ", ".join(name for name in _FORMATS if name)
            raise CheckpointError(f"{path}: format {values['format']!r} is not supported; supported: {known}")
        algorithm = values.get("quant_algo", "FP8")
        if method == "modelopt" and algorithm not in ("FP8", None):
            raise CheckpointError(f"{path}: quant_algo {algorithm!r} is not supported; supported: FP8")
        block = _block(path, values.get("weight_block_size"))
        return cls(method, block, tuple(_input_schemes(path, method, values, block)))


def sections(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """(file, quantization section) of config.json, then of hf_quant_config.json; raises CheckpointError."""
    path = folder / "config.json"
    if values := _member(path, "quantization_config"):
        yield path, values
    path = folder / "hf_quant_config.json"
    if values := _member(path, "quantization"):
        yield path, {"quant_method": "modelopt", **values}


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a KV cache scale, which checkpoints without quantised weights may have too."""
    return _CACHE_SCALE.search(name) is not None


def scale_of(name: str, names: Collection[str]) -> str | None:
    """Name of the tensor with the scales of weight ``name``; None if there is none."""
    return next((name + suffix for suffix in _SUFFIXES if name + suffix in names), None)


def is_quantization_metadata(name: str, names: Collection[str]) -> bool:
    """Whether a tensor of a quantised checkpoint is a scale or a zero point of another."""
    if _METADATA.search(name):
        return True
    return any(name.endswith(suffix) and name.removesuffix(suffix) in names for suffix in _SUFFIXES)


def block_of(shape: tuple[int, int], scales: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns of a weight of ``shape`` that share a scale, by the shape ``scales``; None if they mismatch."""
    rows, columns = shape
    if scales in ((), (1,), (1, 1)):
        return shape
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    high, wide = block or (128, 128)
    return (high, wide) if scales == (-(-rows // high), -(-columns // wide)) else None


def dequantize(stored: Tensor, scales: Tensor, block: tuple[int, int], corner: tuple[int, int]) -> Tensor:
    """``stored`` [rows, columns] times its scales, in fp32.

    ``stored`` is the part of a weight that begins at ``corner``; ``scales`` are those of the whole weight.
    """
    grid = scales.float().reshape(scales.shape[0] if scales.ndim else 1, -1)
    rows = torch.arange(corner[0], corner[0] + stored.shape[0]) // block[0]
    columns = torch.arange(corner[1], corner[1] + stored.shape[1]) // block[1]
    return stored.float() * grid[rows][:, columns]


def quantize_to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> (codes in e4m3, scales [rows, 1] in fp32: absmax / 448 of each output channel)."""
    scales = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _FP8_MAX
    return (weight.float() / scales).to(torch.float8_e4m3fn), scales


@dataclass(frozen=True, slots=True)
class OnlineQuantizer:
    """Quantises linear layers while a checkpoint is read (``quantization="fp8"``)."""

    excluded: tuple[str, ...] = ()
    """Globs of module paths that are not quantised."""

    def covers(self, tensor: str) -> bool:
        """Whether the weight ``tensor`` is quantised."""
        path = tensor.removesuffix(".weight")
        return not any(fnmatch.fnmatchcase(path, glob) for glob in self.excluded)

    def unmatched(self, tensors: Collection[str]) -> list[str]:
        """Globs that match none of ``tensors``."""
        paths = [tensor.removesuffix(".weight") for tensor in tensors]
        return [glob for glob in self.excluded if not fnmatch.filter(paths, glob)]


def _member(path: Path, name: str) -> Mapping[str, Any] | None:
    """Member ``name``, an object, of a JSON file; None if the file or the member does not exist."""
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if values is not None and not isinstance(values, dict):
        raise CheckpointError(f"{path}: {name} is {values!r}; it must be a JSON object")
    return values


def _is_target(path: str, target: str) -> bool:
    if target.startswith("re:"):
        try:
            return re.match(target[3:], path) is not None
        except re.error:
            return False
    return target in ("Linear", path) or path.endswith("." + target)


def _input_schemes(
    path: Path, method: str, values: Mapping[str, Any], block: tuple[int, int] | None
) -> Iterator[tuple[tuple[str, ...], ActivationScheme]]:
    """How a quantization section asks for the quantisation of inputs; raises CheckpointError."""
    fp8 = torch.float8_e4m3fn
    if method == "modelopt":
        yield (), ActivationScheme(fp8, None, is_static=True)
    elif method == "fp8" and (scheme := values.get("activation_scheme")) is not None:
        if scheme not in ("dynamic", "static"):
            raise CheckpointError(f"{path}: activation_scheme {scheme!r} is not supported; supported: dynamic, static")
        is_static = scheme == "static"
        yield (), ActivationScheme(fp8, block[1] if block and not is_static else None, is_static)
    elif method == "compressed-tensors":
        groups = values.get("config_groups") or {}
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise CheckpointError(f"{path}: config_groups is {groups!r}; it must be an object of objects")
        for name, group in groups.items():
            if (inputs := group.get("input_activations")) is not None:
                targets = group.get("targets") or ()
                if not isinstance(targets, list | tuple) or not all(isinstance(target, str) for target in targets):
                    raise CheckpointError(f"{path}: targets of {name} are {targets!r}; they must be a list of strings")
                yield tuple(targets), _compressed_scheme(path, name, inputs)


def _compressed_scheme(path: Path, group: str, inputs: Any) -> ActivationScheme:
    """From ``input_activations`` of compressed-tensors; raises CheckpointError."""
    where = f"{path}: input_activations of {group}"
    if not isinstance(inputs, dict):
        raise CheckpointError(f"{where} is {inputs!r}; it must be an object")
    kind, bits = inputs.get("type", "int"), inputs.get("num_bits", 8)
    dtype = {("int", 8): torch.int8, ("float", 8): torch.float8_e4m3fn}.get((kind, bits))
    strategy, is_static = inputs.get("strategy", "tensor"), inputs.get("dynamic", False) is False
    if dtype is None or (strategy == "tensor") is not is_static or strategy not in ("tensor", "token", "group"):
        raise CheckpointError(
            f"{where}: {bits}-bit {kind}, strategy {strategy!r}, dynamic {not is_static} is not supported; supported: "
            "8-bit int or float, dynamic per token or group, or static per tensor"
        )
    size = inputs.get("group_size") if strategy == "group" else None
    if strategy == "group" and (type(size) is not int or size < 1):
        raise CheckpointError(f"{where}: group_size is {size!r}; it must be an integer above 0")
    return ActivationScheme(dtype, size, is_static)


def _block(path: Path, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise CheckpointError(f"{path}: weight_block_size is {value!r}; it must be two integers above 0")
    return value[0], value[1]
