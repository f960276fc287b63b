"""Linear-layer weights that stay quantized in memory, and matrix products with these weights.

An 8-bit weight is codes [outs, ins] in e4m3, e5m2 or int8, and scales [scale rows, groups] in float32:

    weight[o, i] = codes[o, i] * scale[row[o], (i + offset) // group]

A 4-bit weight has codes from 0 to 15, packed in pairs as uint8 [outs, ins / 2]. Zero points with the same layout as the
scales, or 8, are subtracted from the codes. One layout covers scales per tensor, per output channel and per block
(arXiv:2412.19437, section 3.3), fused layers whose parts have separate scales, and shards that begin within a block.
Activations are multiplied unquantized (weight-only formats), or are first quantized by an :class:`InputQuantizer`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.quantization import INT4, ActivationScheme, block_spans
from tapscope.engine.checkpoint.weight_loader import Scales
from tapscope.engine.layers.fused import Kernels, linear, product_kernels
from tapscope.engine.layers.probe import is_watched
from tapscope.kernels.quantization import quantize_reference, scaled_linear_reference

_KERNEL_GROUP = 128
"""Number of features that share a scale in the Triton kernels."""
_MOST_ROWS = 512
"""Largest number of rows for which a weight-only product uses the Triton kernel. With more rows, the weight is
dequantized and torch computes the product."""


@dataclass(frozen=True, slots=True)
class ScalePart:
    """Scales of one checkpoint tensor, of which this rank holds elements [start, start + shape) along each axis."""

    shape: tuple[int, int]
    """Number of rows and columns on this rank."""
    start: tuple[int, int]
    block: tuple[int, int]
    """Number of rows and columns of the tensor that share a scale."""

    @property
    def span(self) -> tuple[slice, slice]:
        """Rows and columns of this rank in the checkpoint's scales [blocks, blocks]."""
        return block_spans(self.start, self.shape, self.block)

    @property
    def num_scales(self) -> tuple[int, int]:
        """Number of rows and columns in :attr:`span`."""
        rows, columns = self.span
        return rows.stop - rows.start, columns.stop - columns.start


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """Mapping from each element of a weight [outs, ins] to its scale."""

    rows: Tensor
    """Scale row of each output, [outs] int32."""
    shape: tuple[int, int]
    """Shape of the scales: rows and groups."""
    parts: tuple[tuple[int, int], ...]
    """First scale row and number of scale rows of each part."""
    group: int | None
    """Number of features that share a scale; None: all."""
    offset: int
    """Offset of feature 0 within its group."""
    tile: int
    """Largest power of two up to 128 for which every aligned tile of outputs has a single scale row."""

    @property
    def sizes(self) -> tuple[object, ...]:
        """All fields except ``rows``."""
        return self.shape, self.parts, self.group, self.offset, self.tile

    @classmethod
    def of(cls, parts: Sequence[ScalePart]) -> "ScaleLayout | None":
        """Return the layout of a weight with ``parts`` stacked along the rows; None if their column groups differ."""
        columns = {(part.block[1], part.start[1] % part.block[1], part.num_scales[1]) for part in parts}
        if len({one if one[2] > 1 else 1 for one in columns}) != 1:
            return None
        width, offset, groups = next(iter(columns))
        rows, spans, first = [], [], 0
        for part in parts:
            begin, (high, _) = part.start[0], part.block
            rows.append(first + (begin + torch.arange(part.shape[0], device="cpu")) // high - begin // high)
            spans.append((first, part.num_scales[0]))
            first += part.num_scales[0]
        every = torch.cat(rows).int()
        tile = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if _is_uniform(every, size))
        group = width if groups > 1 else None
        return cls(every, (first, groups), tuple(spans), group, offset if group else 0, tile)

    def scales_of(self, scale: Tensor, zero: Tensor | None) -> list[Scales | None]:
        """Return the scales of each part, as views of [scale rows, groups]."""
        return [Scales(scale, zero).rows(slice(first, first + count)) for first, count in self.parts]

    def to(self, device: torch.device) -> "ScaleLayout":
        """Return a copy with ``rows`` on ``device``."""
        return ScaleLayout(self.rows.to(device), self.shape, self.parts, self.group, self.offset, self.tile)


def _is_uniform(rows: Tensor, size: int) -> bool:
    """Return whether each aligned tile of ``size`` outputs has a single scale row."""
    firsts = rows[::size].repeat_interleave(size)[: len(rows)]
    return bool((rows == firsts).all())


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Storage format of a weight that stays quantized: codes, scales and zero points."""

    dtype: torch.dtype
    """Dtype of the codes."""
    layout: ScaleLayout
    scale_dtype: torch.dtype = torch.float32
    has_zeros: bool = False

    def equals(self, other: "QuantizedWeight") -> bool:
        """Return whether ``other`` describes the same storage format."""
        kinds = [(one.dtype, one.scale_dtype, one.has_zeros, *one.layout.sizes) for one in (self, other)]
        return kinds[0] == kinds[1] and torch.equal(self.layout.rows, other.layout.rows)

    def allocate(
        self, shape: Sequence[int], device: torch.device
    ) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter | None]:
        """Allocate uninitialized codes, scales and zero points for weights of ``shape`` [..., outs, ins].

        Codes are [..., outs, ins] (4-bit: ins / 2), scales and zero points [..., scale rows, groups]. The zero points
        are None without ``has_zeros``.
        """
        *outer, outs, ins = shape
        scales = *outer, *self.layout.shape

        def empty(size: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size, dtype=dtype, device=device), requires_grad=False)

        codes = empty((*outer, outs, ins // 2 if self.dtype == INT4 else ins), self.dtype)
        return codes, empty(scales, self.scale_dtype), empty(scales, torch.uint8) if self.has_zeros else None


class InputQuantizer(nn.Module):
    """Module that quantizes the input of a linear layer; it returns (codes, scales), both of which are sites."""

    input_scale: Tensor | None

    def __init__(self, scheme: ActivationScheme, dims: str) -> None:
        super().__init__()
        self.scheme = scheme
        self.part_scales: list[float] = []
        """Static scales of the parts of a fused layer, which share one input."""
        scale = nn.Parameter(torch.ones((), dtype=torch.float32), requires_grad=False) if scheme.is_static else None
        self.register_parameter("input_scale", scale)
        self.tap_dims = {"in[input]": dims, "out[0]": dims, "out[1]": dims.replace(" h", " groups")}
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None

    def set_part_scales(self, scales: Sequence[float]) -> None:
        """Set the static input scale to the largest of the parts' ``scales``."""
        assert self.input_scale is not None, "the scheme is dynamic"
        self.part_scales = list(scales)
        with torch.no_grad():
            self.input_scale.fill_(max(scales))

    def fits_kernels(self, input: Tensor) -> bool:
        """Return whether the Triton kernels quantize ``input`` with this scheme's group size."""
        group = self.scheme.group
        return group is None or (group == _KERNEL_GROUP and input.shape[1] % _KERNEL_GROUP == 0)

    def offer(self, input: Tensor) -> Any:
        """Allocate codes and scales for a kernel that computes states like ``input`` [tokens, ins] and quantizes them.

        The kernel fills the returned :class:`~tapscope.kernels.triton.quantize.Quantized`, which :meth:`keep` then
        stores. None if the quantizer itself must quantize.
        """
        scheme, kernels = self.scheme, _kernels(input, self.scheme.dtype)
        if kernels is None or scheme.group != _KERNEL_GROUP or not self.fits_kernels(input) or is_watched(self):
            return None
        return kernels.quantize.Quantized.empty(*input.shape, scheme.dtype, input.device, scheme.is_ue8m0)

    def keep(self, input: Tensor, quantized: Any) -> None:
        """Store ``quantized``, which a kernel computed along with ``input``, for the layer call with this tensor."""
        self._kept = None if quantized is None else (input, quantized.codes, quantized.scales)

    def take(self, input: Tensor) -> tuple[Tensor, Tensor] | None:
        """Remove and return the codes and scales that :meth:`keep` stored for ``input``; None if there are none."""
        kept, self._kept = self._kept, None
        return kept[1:] if kept is not None and kept[0] is input else None

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize [tokens, ins] to codes [tokens, ins] of ``scheme.dtype`` and scales [tokens, groups] float32."""
        scheme = self.scheme
        kernels = _kernels(input, scheme.dtype)
        if kernels is not None and self.fits_kernels(input):
            quantized: tuple[Tensor, Tensor] = kernels.quantize.quantize(
                input, scheme.dtype, scheme.group, self.input_scale, is_ue8m0=scheme.is_ue8m0
            )
            return quantized
        return quantize_reference(input, scheme.dtype, scheme.group, self.input_scale, is_ue8m0=scheme.is_ue8m0)


def quantized_linear(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    layout: ScaleLayout,
    bias: Tensor | None = None,
    quantizer: InputQuantizer | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    """Multiply [tokens, ins] by the transposed quantized weight -> [tokens, outs], in the input's dtype.

    On a GPU the kernel that computed the input may have quantized it already (:meth:`InputQuantizer.keep`). Otherwise
    the kernel of the product quantizes a single row itself, with the same bits, unless ``quantizer`` has hooks. A
    weight-only product on a CPU is bit-identical to a layer with the dequantized weight.
    """
    kept = None if quantizer is None else quantizer.take(input)
    is_one_row = kept is None and len(input) == 1
    if is_one_row and quantizer is not None and quantizer.fits_kernels(input) and not is_watched(quantizer):
        kernels = _kernels_for(input, None, weight, layout)
        if kernels is not None:
            row: Tensor = kernels.scaled_linear.quantizing_linear(
                input, weight, scale, layout.rows, input_group=quantizer.scheme.group,
                input_scale=quantizer.input_scale, is_ue8m0=quantizer.scheme.is_ue8m0, group=layout.group,
                tile=layout.tile, bias=bias, is_constant=True,
            )  # fmt: skip
            return row
    codes, input_scale = kept or ((input, None) if quantizer is None else quantizer(input))
    input_group = None if quantizer is None else quantizer.scheme.group
    return scaled_product(
        codes, input_scale, weight, scale, layout, input.dtype,
        bias=bias, input_group=input_group, zero=zero, is_constant=True,
    )  # fmt: skip


def scaled_product(
    codes: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    layout: ScaleLayout,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    input_group: int | None = None,
    zero: Tensor | None = None,
    product: Callable[..., Tensor] = linear,
    is_constant: bool = False,
) -> Tensor:
    """Multiply [tokens, ins] by a quantized weight -> [tokens, outs] in ``dtype``.

    ``input_scale``: scales of quantized ``codes``, one per ``input_group`` features; None for unquantized rows.
    ``product`` multiplies operands that are dequantized first. ``is_constant``: the kernel launched before this one
    writes neither the weight nor its scales.
    """
    kernels = _kernels_for(codes, input_scale, weight, layout)
    if kernels is not None and (input_scale is not None or len(codes) <= _MOST_ROWS):
        output: Tensor = kernels.scaled_linear.scaled_linear(
            codes, input_scale, weight, scale, layout.rows, dtype,
            group=layout.group, tile=layout.tile, bias=bias, is_constant=is_constant,
        )  # fmt: skip
        return output
    return scaled_linear_reference(
        codes, input_scale, weight, scale, layout.rows, dtype,
        group=layout.group, offset=layout.offset, input_group=input_group, bias=bias, zero=zero, product=product,
    )  # fmt: skip


def grouped_scaled_product(
    codes: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    layout: ScaleLayout,
    dtype: torch.dtype,
    ends: Tensor,
    most: int,
) -> Tensor:
    """Compute :func:`scaled_product` per group, without waiting for the device; requires :func:`runs_grouped`.

    Rows [ends[e-1], ends[e]), at most ``most`` of them, are multiplied by weight[e] with scale[e].
    """
    kernels = _kernels(codes, weight.dtype)
    assert kernels is not None, "see runs_grouped"
    output: Tensor = kernels.scaled_linear.grouped_scaled_linear(
        codes, input_scale, weight, scale, layout.rows, ends, most, dtype, group=layout.group, tile=layout.tile
    )
    return output


def runs_grouped(codes: Tensor, input_scale: Tensor | None, weight: Tensor, layout: ScaleLayout) -> bool:
    """Return whether :func:`grouped_scaled_product` supports these operands."""
    return _kernels_for(codes, input_scale, weight, layout) is not None


def grouped_int4_product(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scale_rows: Tensor | None,
    ends: Tensor,
    most: int,
) -> Tensor:
    """Multiply groups of rows by 4-bit matrices, without waiting for the device; requires :func:`runs_int4`.

    Rows [ends[e-1], ends[e]), at most ``most`` of them, are multiplied by codes[e]; without ``scale_rows`` the matrices
    are MXFP4.
    """
    kernels = product_kernels(rows)
    assert kernels is not None, "see runs_int4"
    output: Tensor = kernels.int4.grouped_int4_linear(rows, codes, scales, zeros, scale_rows, ends, most)
    return output


def runs_int4(rows: Tensor, groups: int) -> bool:
    """Return whether :func:`grouped_int4_product` supports ``rows`` and matrices with ``groups`` groups of features."""
    kernels = product_kernels(rows)
    return kernels is not None and rows.stride(-1) == 1 and kernels.int4.why_not_int4(rows.shape[1], groups) is None


def _kernels(input: Tensor, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels if they support ``input`` and codes of ``dtype``; otherwise None."""
    fused = product_kernels(input) if dtype != INT4 else None
    if fused is None or (dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(input.device) < (8, 9)):
        return None
    return fused


def _kernels_for(codes: Tensor, input_scale: Tensor | None, weight: Tensor, layout: ScaleLayout) -> Kernels | None:
    """Return the kernels if they support the product of ``codes`` with the quantized weight; otherwise None.

    ``input_scale``: scales of quantized ``codes``; None for unquantized rows.
    """
    groups = 1 if input_scale is None else input_scale.shape[1]
    fits = (
        codes.ndim == 2
        and codes.stride(-1) == 1
        and layout.offset == 0
        and (layout.group is None or layout.group % _KERNEL_GROUP == 0)
        and groups in (1, codes.shape[1] / _KERNEL_GROUP)
    )
    return _kernels(codes, weight.dtype) if fits else None
