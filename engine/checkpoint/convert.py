"""Convert a checkpoint to FP8, int8 or int4: weights are rounded to nearest, without calibration data.

The formats are readable by transformers, vLLM and SGLang:

- ``fp8-block``: e4m3, one scale per 128 x 128 block, inputs quantized per token and 128 features (DeepSeek-V3,
  arXiv:2412.19437, section 3.3; ``quant_method`` ``fp8``);
- ``fp8-channel``: e4m3, one scale per output channel, inputs quantized per token (compressed-tensors);
- ``int8``: like ``fp8-channel``, in int8 (W8A8);
- ``int4``: one scale per output channel and group of input features, weight-only (compressed-tensors
  ``pack-quantized``; scales are absmax / 7.5, as in its quantization/utils/helpers.py).

One shard is memory-mapped at a time, and its rows are read, rounded and written in chunks. The output directory is
renamed into place when complete.
"""

import fnmatch
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tapscope.core import dtypes
from tapscope.core.errors import CheckpointError, ConfigError, OutputError, RunExistsError
from tapscope.core.tempdirs import make_tempdir, remove_tempdir
from tapscope.engine.checkpoint.checkpoint import open_checkpoint
from tapscope.engine.checkpoint.stored_tensors import INDEX
from tapscope.engine.checkpoint.weight_quantizer import BLOCK, WeightQuantizer
from tapscope.engine.params.json_file import read_object

IGNORED = (
    "lm_head", "*.lm_head", "*embed*", "*.wte", "*.wpe", "*.gate", "*.router", "*router.*", "*shared_expert_gate",
    "*vision*", "*visual*", "*audio*", "*multi_modal_projector*",
)  # fmt: skip
"""Globs of modules that are never quantized: embeddings, heads, routers, and modules outside the text model."""
_STEP = 1 << 23
"""Maximum number of elements in a chunk."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.gguf", "*.index.json", "config.json")
"""Globs of files that are not copied to the output."""


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """One quantized weight and its rounding error."""

    name: str
    rel_l2: float
    """Relative L2 error: norm of the error divided by the norm of the weight."""


@dataclass(slots=True)
class Conversion:
    """Summary of a written checkpoint: tensors, errors and sizes."""

    tensors: list[ConvertedTensor] = field(default_factory=list)
    """The quantized weights, in file order."""
    kept: list[str] = field(default_factory=list)
    """Names of the tensors that were copied unchanged."""
    stacked: list[str] = field(default_factory=list)
    """Copied tensors that are stacks of experts, as these formats require separate experts."""
    nbytes: tuple[int, int] = (0, 0)
    """Total bytes of all tensors, before and after the conversion."""


@dataclass(frozen=True, slots=True)
class Converter:
    """Converter of checkpoints that rounds the weights of linear layers to one format."""

    to: str
    group: int = 128
    """Number of input features that share a scale, for ``int4``."""
    ignore: tuple[str, ...] = ()
    """Globs of module paths that are not quantized, in addition to :data:`IGNORED`."""

    @property
    def quantizer(self) -> WeightQuantizer:
        """Quantizer of single weights."""
        return WeightQuantizer(self.to, self.group)

    @staticmethod
    def count(source: Path) -> int:
        """Return the number of tensors in a checkpoint; raises CheckpointError."""
        with open_checkpoint(source) as checkpoint:
            return len(checkpoint.stored_names)

    def convert(self, source: Path, out: Path, advance: Callable[[int], None] = lambda count: None) -> Conversion:
        """Convert the checkpoint ``source`` to the new or empty directory ``out``.

        ``advance`` is called with the number of newly processed tensors. Raises CheckpointError if the checkpoint is
        unreadable or already quantized. Raises ConfigError if a glob matches no module, or if the group size does not
        divide the input features. Raises RunExistsError if ``out`` is not empty, OutputError if it cannot be written.
        """
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RunExistsError(f"{out} exists and is not an empty directory; choose another path")
        with open_checkpoint(source) as checkpoint:
            if checkpoint.quantization is not None:
                raise CheckpointError(f"{source} is already quantized ({checkpoint.quantization.method})")
            files: dict[str, list[str]] = {}
            for name in checkpoint.stored_names:
                files.setdefault(Path(checkpoint.file_of(name)).name, []).append(name)
        try:
            config = read_object(source / "config.json")
        except FileNotFoundError:
            raise CheckpointError(f"{source / 'config.json'} is missing; a Hugging Face checkpoint has one") from None
        plans = [_FilePlan.of(self, source, file, names) for file, names in files.items()]
        self._check_globs([tensor.path for plan in plans for tensor in plan.tensors])
        if not any(tensor.is_quantized for plan in plans for tensor in plan.tensors):
            raise ConfigError(f"{source} has no weight of a linear layer to quantize")
        try:
            folder = make_tempdir(out.absolute().parent)
        except OSError as error:
            raise OutputError(f"cannot write to {out.absolute().parent}: {error.strerror or error}") from None
        try:
            conversion = self._write(source, folder / "checkpoint", config, plans, advance)
            (folder / "checkpoint").rename(out)
            return conversion
        except OSError as error:
            raise OutputError(f"cannot write {out}: {error.strerror or error}") from None
        finally:
            remove_tempdir(folder)

    def covers(self, name: str, shape: Sequence[int], dtype: str) -> bool:
        """Return whether tensor ``name`` is the weight of a linear layer to be quantized."""
        path = name.removesuffix(".weight")
        is_weight = path != name and len(shape) == 2 and dtype in ("F32", "BF16", "F16") and 0 not in shape
        return is_weight and not any(fnmatch.fnmatchcase(path, glob) for glob in (*IGNORED, *self.ignore))

    def _check_globs(self, paths: Sequence[str]) -> None:
        for glob in self.ignore:
            if not fnmatch.filter(paths, glob):
                raise ConfigError(f"--ignore {glob!r} matches no module; an example is {min(paths)}")

    def _write(
        self, source: Path, folder: Path, config: dict[str, Any], plans: "Sequence[_FilePlan]",
        advance: Callable[[int], None],
    ) -> Conversion:  # fmt: skip
        folder.mkdir()
        conversion = Conversion()
        weight_map: dict[str, str] = {}
        for path in sorted(source.iterdir()):
            if path.is_file() and not any(fnmatch.fnmatchcase(path.name, glob) for glob in _WEIGHTS):
                shutil.copyfile(path, folder / path.name)
        for plan in plans:
            conversion.tensors += plan.write(self, source / plan.file, folder / plan.file, advance)
            weight_map |= dict.fromkeys((name for name, _, _ in plan.outputs), plan.file)
        tensors = [tensor for plan in plans for tensor in plan.tensors]
        conversion.kept = [tensor.name for tensor in tensors if not tensor.is_quantized]
        conversion.stacked = [t.name for t in tensors if "experts" in t.name and len(t.shape) == 3]
        sizes = [_nbytes(tensor.dtype, tensor.shape) for tensor in tensors]
        total = sum(_nbytes(dtype, shape) for plan in plans for _, dtype, shape in plan.outputs)
        conversion.nbytes = sum(sizes), total
        if (source / INDEX).exists():
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        ignored = sorted(t.path for t in tensors if t.is_linear and not t.is_quantized)
        values = config | {"quantization_config": self.quantizer.config(ignored)}
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        return conversion


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the source checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_quantized: bool

    @property
    def path(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def is_linear(self) -> bool:
        """Whether config.json must list the tensor if it is kept: readers expect all linear layers to be quantized."""
        return self.path != self.name and len(self.shape) == 2 and "embed" not in self.path


@dataclass(frozen=True, slots=True)
class _FilePlan:
    """The contents of one output file, derived from the headers of the source."""

    file: str
    tensors: tuple[_Tensor, ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(name, dtype, shape) of each output tensor, in file order."""

    @classmethod
    def of(cls, converter: Converter, source: Path, file: str, names: Sequence[str]) -> "_FilePlan":
        """Plan the file from the header of ``source / file``; raises CheckpointError, ConfigError."""
        tensors: list[_Tensor] = []
        outputs: list[tuple[str, str, tuple[int, ...]]] = []
        try:
            with safe_open(source / file, framework="pt") as stored:
                for name in names:
                    part = stored.get_slice(name)
                    dtype, shape = part.get_dtype(), tuple(part.get_shape())
                    if dtype not in dtypes.OF_SAFETENSORS:
                        raise CheckpointError(f"{name} in {source / file} has dtype {dtype}, which cannot be copied")
                    is_quantized = converter.covers(name, shape, dtype)
                    tensors.append(_Tensor(name, dtype, shape, is_quantized))
                    if is_quantized:
                        outputs += _outputs(converter, name, dtype, shape)
                    else:
                        outputs.append((name, dtype, shape))
        except SafetensorError as error:
            raise CheckpointError(f"{source / file} cannot be read: {error}") from None
        return cls(file, tuple(tensors), tuple(outputs))

    def write(
        self, converter: Converter, source: Path, path: Path, advance: Callable[[int], None]
    ) -> Iterator[ConvertedTensor]:
        """Write the file, yielding the quantized tensors. Raises OSError, CheckpointError."""
        with ExitStack() as stack:
            out = _SafetensorsWriter(stack.enter_context(path.open("wb")), self.outputs)
            stored = stack.enter_context(safe_open(source, framework="pt"))
            for tensor in self.tensors:
                if tensor.is_quantized:
                    yield _quantize(converter, source, stored, tensor, out)
                else:
                    for row, part in _rows(stored, tensor):
                        out.put(tensor.name, row, part)
                advance(1)
            out.sync()


class _SafetensorsWriter:
    """Writer of a safetensors file that accepts parts of tensors in any order."""

    def __init__(self, file: BinaryIO, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        """Write the header; ``tensors`` are (name, dtype, shape) in file order."""
        self._file, self._entries, end = file, dict[str, dict[str, Any]](), 0
        for name, dtype, shape in tensors:
            begin, end = end, end + _nbytes(dtype, shape)
            self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}).encode()
        header += b" " * (-len(header) % 8)
        self._data = 8 + len(header)
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(self._data + end)

    def put(self, name: str, row: int, part: Tensor) -> None:
        """Write ``part``, rows of tensor ``name`` that begin at ``row``."""
        if part.numel():
            entry = self._entries[name]
            per_row = math.prod(entry["shape"][1:]) * part.element_size()
            self._file.seek(self._data + entry["data_offsets"][0] + row * per_row)
            self._file.write(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def sync(self) -> None:
        """Flush the file to disk (fsync)."""
        self._file.flush()
        os.fsync(self._file.fileno())


def _quantize(
    converter: Converter, source: Path, stored: Any, tensor: _Tensor, out: _SafetensorsWriter
) -> ConvertedTensor:
    """Quantize a weight and write its codes and scales; raises CheckpointError if it has non-finite values."""
    signal = noise = 0.0
    for row, part in _rows(stored, tensor):
        if not part.isfinite().all():
            raise CheckpointError(f"{tensor.name} in {source} has values that are not finite")
        pieces, dequantized = converter.quantizer.quantize(part)
        for suffix, piece in pieces.items():
            out.put(tensor.name + suffix, row // BLOCK if suffix == "_scale_inv" else row, piece)
        signal += float(part.double().square().sum())
        noise += float((part.double() - dequantized).square().sum())
    if converter.to == "int4":
        out.put(f"{tensor.name}_shape", 0, torch.tensor(tensor.shape))
    return ConvertedTensor(tensor.name, math.sqrt(noise / signal) if signal else 0.0)


def _outputs(
    converter: Converter, name: str, dtype: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (name, dtype, shape) of each tensor that represents a quantized weight; raises ConfigError."""
    if converter.to == "int4" and shape[1] % converter.group:
        raise ConfigError(
            f"{name} has {shape[1]} input features, not a multiple of --group-size {converter.group}: choose another, "
            f"or --ignore {name.removesuffix('.weight')!r}"
        )
    weight = torch.empty(shape, dtype=getattr(torch, dtypes.OF_SAFETENSORS[dtype]), device="meta")
    pieces, _ = converter.quantizer.quantize(weight)
    for suffix, piece in pieces.items():
        yield name + suffix, dtypes.to_safetensors(str(piece.dtype).removeprefix("torch.")), tuple(piece.shape)
    if converter.to == "int4":
        yield f"{name}_shape", "I64", (2,)


def _rows(stored: Any, tensor: _Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) of a tensor in chunks of whole blocks; raises CheckpointError."""
    try:
        part = stored.get_slice(tensor.name)
        if not tensor.shape:
            yield 0, stored.get_tensor(tensor.name)
            return
        step = max(1, _STEP // max(1, math.prod(tensor.shape[1:])) // BLOCK) * BLOCK
        for row in range(0, tensor.shape[0], step):
            yield row, part[row : row + step]
    except SafetensorError as error:
        raise CheckpointError(f"{tensor.name} cannot be read: {error}") from None


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtypes.itemsize(dtypes.OF_SAFETENSORS[dtype])
