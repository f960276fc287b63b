"""Quantized checkpoints: formats, the scales of each weight, and dequantization.

Reference dequantization multiplies a weight by its scales in fp32 when the weight is read, and rounds the result to the
engine's dtype; activations are not quantized. Formats, by `quantization_config` in config.json:

- ``fp8``: block-wise e4m3 with `NAME_scale_inv` [ceil(out / block), ceil(in / block)] (DeepSeek-V3, arXiv:2412.19437;
  transformers' integrations/finegrained_fp8.py);
- ``compressed-tensors``: int8 (W8A8) or e4m3 with `NAME_scale`, one per tensor or per output channel, or int4;
- ``gptq`` and ``awq``: int4 with a scale and a zero point per output and group of input features
  (:mod:`tapscope.tensor_files.int4`);
- ``modelopt``: e4m3 with one `NAME_scale` per tensor (the section may be in hf_quant_config.json);
- ``mxfp4``: experts of gpt-oss as `NAME_blocks` and `NAME_scales` (:mod:`tapscope.engine.checkpoint.mxfp4`).
"""

import fnmatch
import json
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapscope.core.errors import CheckpointError
from tapscope.engine.params.json_file import read_object
from tapscope.tensor_files import int4
from tapscope.tensor_files.int4 import Int4Format

CODES = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8"}
"""Dtypes of 8-bit weights -> safetensors names."""
INT4 = torch.uint8
"""Dtype of 4-bit weights in memory: two codes per byte, with the even input feature in the low bits."""
KINDS = CODES | {INT4: "I4"}
"""Dtypes of weights that stay quantized -> names in messages."""
_METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp4", "gptq", "awq")
_PACKED = "pack-quantized"
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", _PACKED, "mixed-precision", "dense", None)
_VALUES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "gptq": {
        "bits": (4,),
        "checkpoint_format": ("gptq", "gptq_v2", None),
        "format": ("gptq", "gptq_v2", None),
        "is_marlin_format": (False, None),
        "pack_dtype": ("int32", None),
    },
    "awq": {"bits": (4,), "version": ("gemm", "GEMM", None), "format": ("gemm", "GEMM", None)},
    "modelopt": {"quant_algo": ("FP8", None)},
    "fp8": {"expert_dtype": ("fp8", None), "scale_fmt": ("ue8m0", "float", None)},
}
"""Supported values of a quantization section, by method."""
_FORMER_KEYS = {"w_bit": "bits", "q_group_size": "group_size"}
"""Key names of early AutoAWQ versions -> current names."""
_SUFFIXES = ("_scale_inv", "_scale")
_METADATA = re.compile(r"\.(input_scale|output_scale|k_scale|v_scale|q_scale|kv_scale|weight_zero_point)$")
_CACHE_SCALE = re.compile(r"\.self_attn\.((attn\.|[kv]_proj\.)?(k_scale|v_scale)|kv_scale|[kv]_proj\.output_scale)$")
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """Quantization of a layer's input, as specified in config.json."""

    dtype: torch.dtype
    group: int | None
    """Number of features of a token that share a scale; None: all features."""
    is_static: bool = False
    """Whether a single static scale is stored in the checkpoint (``NAME.input_scale``)."""
    is_ue8m0: bool = False
    """Whether dynamic scales are rounded up to powers of two (``scale_fmt``, DeepSeek-V3.1)."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization format of a checkpoint."""

    method: str
    block: tuple[int, int] | None = None
    """Rows and columns of a scale's block (``weight_block_size`` in config.json), if any."""
    inputs: tuple[tuple[tuple[str, ...], ActivationScheme], ...] = ()
    """Input schemes by targets: class names, module paths, or ``re:`` and a regular expression, as in the groups of
    compressed-tensors; no targets: every quantized layer."""
    int4: Int4Format | None = None
    """Packing format of 4-bit weights."""
    groups: tuple[int | None, ...] = ()
    """Group sizes (input features per scale) of 4-bit weights, one for each config group; None: all features."""

    def activations(self, tensor: str, dtype: torch.dtype) -> ActivationScheme | None:
        """Return the input scheme of the layer whose weight ``tensor`` is quantized to ``dtype``.

        None if the input is not quantized; schemes of a dtype other than that of the weight are ignored.
        """
        path = tensor.removesuffix(".weight")
        for targets, scheme in self.inputs:
            if scheme.dtype == dtype and (not targets or any(_is_target(path, target) for target in targets)):
                return scheme
        return None

    @classmethod
    def read(cls, folder: Path) -> "Quantization | None":
        """Read the format of a checkpoint from its config files (see :func:`sections`); None if it is not quantized.

        Raises CheckpointError for an unsupported format.
        """
        path, values = next(sections(folder), (folder, None))
        if values is None:
            return None
        method = values.get("quant_method")
        if method not in _METHODS:
            raise CheckpointError(f"{path}: quant_method {method!r} is not supported; supported: {', '.join(_METHODS)}")
        values = {_FORMER_KEYS.get(key, key): value for key, value in values.items()} if method == "awq" else values
        for key, supported in _VALUES.get(method, {}).items():
            _check_value(path, key, values.get(key), supported)
        if method == "mxfp4":
            _check_value(path, "quant_method 'mxfp4' with model_type", _model_type(path), ("gpt_oss",))
        if method == "gptq":
            _check_overrides(path, values.get("dynamic"))
        groups = list(_compressed_groups(path, values)) if method == "compressed-tensors" else []
        if method in ("gptq", "awq"):
            groups.append(_group_size(path, values.get("group_size")))
        block = _block(path, values.get("weight_block_size"))
        inputs = tuple(_input_schemes(path, method, values, block))
        return cls(method, block, inputs, int4.format_of(method, values), tuple(groups))


def sections(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield (file, quantization section) of config.json, hf_quant_config.json and GPTQ's quantize_config.json.

    Raises CheckpointError.
    """
    path = folder / "config.json"
    if values := _member(path, "quantization_config"):
        yield path, values
    path = folder / "hf_quant_config.json"
    if values := _member(path, "quantization"):
        yield path, {"quant_method": "modelopt", **values}
    path = folder / "quantize_config.json"
    if values := _object(path):
        yield path, {"quant_method": "gptq", **values}


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor is a KV cache scale; checkpoints with unquantized weights may have them too."""
    return _CACHE_SCALE.search(name) is not None


def scale_of(name: str, names: Container[str]) -> str | None:
    """Return the name of the tensor with the scales of weight ``name``; None if there is none in ``names``."""
    return next((name + suffix for suffix in _SUFFIXES if name + suffix in names), None)


def is_quantization_metadata(name: str, names: Container[str]) -> bool:
    """Return whether a tensor of a quantized checkpoint is a scale or zero point rather than a weight."""
    if _METADATA.search(name):
        return True
    return any(name.endswith(suffix) and name.removesuffix(suffix) in names for suffix in _SUFFIXES)


def check_scales(scales: Tensor, where: str) -> None:
    """Raise CheckpointError unless ``scales`` are finite floats; other scales would make every output garbage."""
    if not scales.is_floating_point():
        kind = str(scales.dtype).removeprefix("torch.")
        raise CheckpointError(f"{where} has dtype {kind}; the scales of a quantized weight must be floats")
    if not bool(scales.float().isfinite().all()):
        raise CheckpointError(f"{where} has values that are NaN or infinite; the scales of a weight must be finite")


def block_of(shape: tuple[int, int], scales: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the block shape (rows, columns per scale) of a weight of ``shape`` with scales of shape ``scales``.

    ``block`` is the configured block shape, by default 128 x 128. None if the shapes do not match.
    """
    rows, columns = shape
    if scales in ((), (1,), (1, 1)):
        return shape
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    high, wide = block or (128, 128)
    return (high, wide) if scales == (-(-rows // high), -(-columns // wide)) else None


def block_spans(start: Sequence[int], counts: Sequence[int], block: tuple[int, int]) -> tuple[slice, slice]:
    """Return the rows and columns of the scales that cover elements [start, start + count) of each axis."""
    rows, columns = (
        slice(first // size, (first + count - 1) // size + 1 if count else first // size)
        for first, count, size in zip(start, counts, block, strict=True)
    )
    return rows, columns


def dequantize(
    stored: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    corner: tuple[int, int],
    *,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Return (``stored`` - ``zeros``) * ``scales`` in fp32, [rows, columns].

    ``stored`` is the part of a weight that begins at (row, column) ``corner``, while ``scales`` and ``zeros`` belong to
    the whole weight. ``groups`` [all columns] maps each column of the weight to a column of the scales if groups are
    not consecutive.
    """
    rows = torch.arange(corner[0], corner[0] + stored.shape[0]) // block[0]
    columns = torch.arange(corner[1], corner[1] + stored.shape[1])
    columns = columns // block[1] if groups is None else groups[columns]
    wide, grid = stored.float(), scales.float().reshape(scales.shape[0] if scales.ndim else 1, -1)
    if zeros is not None:
        wide = wide - zeros.float()[rows][:, columns]
    return wide * grid[rows][:, columns]


def quantize_to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [rows, columns] per output channel; return e4m3 codes and fp32 scales [rows, 1], absmax / 448."""
    scales = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _FP8_MAX
    return (weight.float() / scales).to(torch.float8_e4m3fn), scales


@dataclass(frozen=True, slots=True)
class OnlineQuantizer:
    """Selection of the linear layers to quantize while a checkpoint is read (``quantization="fp8"``)."""

    excluded: tuple[str, ...] = ()
    """Globs of module paths that are not quantized."""

    def covers(self, tensor: str) -> bool:
        """Return whether the weight ``tensor`` is to be quantized."""
        path = tensor.removesuffix(".weight")
        return not any(fnmatch.fnmatchcase(path, glob) for glob in self.excluded)

    def unmatched(self, tensors: Collection[str]) -> list[str]:
        """Return the globs that match none of ``tensors``."""
        paths = [tensor.removesuffix(".weight") for tensor in tensors]
        return [glob for glob in self.excluded if not fnmatch.filter(paths, glob)]


def _object(path: Path) -> Mapping[str, Any] | None:
    """Read the object in a JSON file; None if the file does not exist."""
    return read_object(path) if path.exists() else None


def _member(path: Path, name: str) -> Mapping[str, Any] | None:
    """Read the object under the key ``name`` of a JSON file; None if the file or the key does not exist."""
    values = (_object(path) or {}).get(name)
    if values is not None and not isinstance(values, dict):
        raise CheckpointError(f"{path}: {name} is {values!r}; it must be a JSON object")
    return values


def _model_type(path: Path) -> Any:
    return (_object(path) or {}).get("model_type")


def _check_value(path: Path, key: str, value: Any, supported: tuple[Any, ...]) -> None:
    """Raise CheckpointError unless ``value`` is one of ``supported``; None represents an absent key."""
    if not any(value == one and type(value) is type(one) for one in supported):
        known = ", ".join(str(one) for one in supported if one is not None)
        raise CheckpointError(f"{path}: {key} {value!r} is not supported; supported: {known}")


def _check_overrides(path: Path, dynamic: Any) -> None:
    """Raise CheckpointError if GPTQModel's ``dynamic`` overrides settings; patterns with ``-:`` exclude modules."""
    for pattern in dynamic if isinstance(dynamic, dict) else ():
        if not pattern.startswith("-:"):
            raise CheckpointError(f"{path}: dynamic {pattern!r} is not supported; supported: exclusions, '-:PATTERN'")


def _group_size(path: Path, value: Any, key: str = "group_size") -> int | None:
    if value in (None, -1):
        return None
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be -1 or an integer above 0")
    return value


def _compressed_groups(path: Path, values: Mapping[str, Any]) -> Iterator[int | None]:
    """Yield the group size of 4-bit weights in each config group of compressed-tensors; raises CheckpointError."""
    _check_value(path, "format", values.get("format"), _FORMATS)
    for key, member in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        setting = values.get(key)
        value = setting.get(member) if isinstance(setting, dict) else setting
        if value not in (None, {}, "dense"):
            raise CheckpointError(f"{path}: {key} with {member} {json.dumps(value)[:80]} is not supported")
    for name, group in _config_groups(path, values).items():
        form = group.get("format") or values.get("format")
        _check_value(path, f"format of {name}", form, _FORMATS)
        weights = group.get("weights")
        if form == _PACKED:
            where = f"weights of {name}"
            if not isinstance(weights, dict):
                raise CheckpointError(f"{path}: {where} are {weights!r}; they must be an object")
            for key, supported in {"num_bits": (4,), "type": ("int", None)}.items():
                _check_value(path, f"{key} of the {where}, format {_PACKED!r},", weights.get(key), supported)
            if group.get("input_activations") is not None:
                raise CheckpointError(f"{path}: input_activations of {name} are not supported with 4-bit weights")
            yield _group_size(path, weights.get("group_size"), f"group_size of the {where}")


def _config_groups(path: Path, values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    groups = values.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{path}: config_groups is {groups!r}; it must be an object of objects")
    return groups


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
    """Yield (targets, input scheme) as specified by a quantization section; raises CheckpointError."""
    fp8 = torch.float8_e4m3fn
    if method == "modelopt":
        yield (), ActivationScheme(fp8, None, is_static=True)
    elif method == "fp8" and (scheme := values.get("activation_scheme")) is not None:
        if scheme not in ("dynamic", "static"):
            raise CheckpointError(f"{path}: activation_scheme {scheme!r} is not supported; supported: dynamic, static")
        is_static = scheme == "static"
        is_ue8m0 = values.get("scale_fmt") == "ue8m0" and not is_static
        yield (), ActivationScheme(fp8, block[1] if block and not is_static else None, is_static, is_ue8m0)
    elif method == "compressed-tensors":
        for name, group in _config_groups(path, values).items():
            if (inputs := group.get("input_activations")) is not None:
                targets = group.get("targets") or ()
                if not isinstance(targets, list | tuple) or not all(isinstance(target, str) for target in targets):
                    raise CheckpointError(f"{path}: targets of {name} are {targets!r}; they must be a list of strings")
                yield tuple(targets), _compressed_scheme(path, name, inputs)


def _compressed_scheme(path: Path, group: str, inputs: Any) -> ActivationScheme:
    """Parse ``input_activations`` of compressed-tensors; raises CheckpointError."""
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
