"""Selection of linear layers that keep quantized weights, by a checkpoint's headers, before weight allocation."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tapscope.engine.checkpoint.mxfp4 import BLOCKS
from tapscope.engine.checkpoint.quantization import INT4, KINDS, ActivationScheme, OnlineQuantizer
from tapscope.engine.checkpoint.received_weights import WeightSource
from tapscope.engine.checkpoint.weight_loader import WeightSlice
from tapscope.engine.layers.clamped_experts import ClampedExperts
from tapscope.engine.layers.experts import Experts, UngatedExperts
from tapscope.engine.layers.linear import Linear
from tapscope.engine.layers.quantized import InputQuantizer, QuantizedWeight, ScaleLayout, ScalePart
from tapscope.engine.models.decoder import CausalLM

_log = logging.getLogger(__name__)


def allocate_linear_weights(
    model: CausalLM,
    folder: Path | None,
    device: torch.device,
    *,
    quantizer: OnlineQuantizer | None = None,
    quantizes_inputs: bool = True,
) -> None:
    """Allocate the weights of linear layers that were created within ``deferred_linear_weights``.

    A layer stays quantized if all its tensors in ``folder`` have the same quantization, or if ``quantizer`` covers
    them. It then also quantizes its input if config.json specifies so and ``quantizes_inputs`` is set. All layers are
    dense if ``folder`` is None. Raises CheckpointError.
    """
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, Linear)]
    experts = [(path, module) for path, module in model.named_modules() if isinstance(module, Experts)]
    if folder is not None:
        with open_checkpoint(folder, getattr(model, "checkpoint_prefixes", {})) as checkpoint:
            choice = _Choice(checkpoint, quantizer, frozenset(checkpoint.names))
            for path, module in linears:
                _keep_linear(choice, path, module, device, quantizes_inputs=quantizes_inputs)
            for path, moe in experts:
                _keep_experts(choice, path, moe, device, quantizes_inputs=quantizes_inputs)
            if model.tp.rank == 0:
                choice.report()
    allocated: dict[int, nn.Parameter] = {}  # modules that share a weight keep sharing it
    for _, module in linears:
        if (weight := module.weight).is_meta:
            if id(weight) not in allocated:
                allocated[id(weight)] = _allocated(weight, device)
            module.weight = allocated[id(weight)]
    for _, moe in experts:
        for name in moe.stacks:
            if getattr(moe, name).is_meta:
                setattr(moe, name, _allocated(getattr(moe, name), device))


def _allocated(weight: torch.Tensor, device: torch.device) -> nn.Parameter:
    # empty_like would import sympy (0.3 s of startup) for a meta tensor.
    data = torch.empty_strided(weight.size(), weight.stride(), dtype=weight.dtype, device=device)
    return nn.Parameter(data, requires_grad=False)


def _keep_linear(choice: "_Choice", path: str, module: Linear, device: torch.device, *, quantizes_inputs: bool) -> None:
    """Keep a linear layer quantized if all its tensors have the same quantization."""
    if not module.may_stay_quantized:
        return
    slices = [part for part in module.weight_slices(path) if part.is_matrix]
    if (kept := choice.kept(slices)) is None:
        return
    module.keep_quantized(kept, device)
    scheme = choice.scheme(slices, kept)
    if quantizes_inputs and scheme is not None and choice.has_scales(path, scheme, slices):
        module.quantize_input(scheme, choice.static_scales(scheme, slices))


def _keep_experts(
    choice: "_Choice", path: str, module: Experts, device: torch.device, *, quantizes_inputs: bool
) -> None:
    """Keep experts quantized if all of this rank's matrices have the same quantization."""
    if isinstance(module, UngatedExperts):
        return
    if isinstance(module, ClampedExperts):
        if f"{path}.gate_up_proj{BLOCKS}" in choice.held:
            module.keep_mxfp4(device)
        return
    layout = max(module.layouts(path), key=lambda each: sum(part.name in choice.held for part in each))
    stacks: dict[str, list[Sequence[WeightSlice]]] = {}
    for one in module.slices_of_stacks(layout):
        for name, slices in one.items():
            stacks.setdefault(name, []).append(slices)
    kept = {name: choice.kept_alike(matrices) for name, matrices in stacks.items()}
    formats = {name: one for name, one in kept.items() if one is not None}
    if not formats or len(formats) < len(kept) or not module.down_proj.numel():
        return
    module.keep_quantized(formats, device)
    parts = {name: [part for slices in matrices for part in slices] for name, matrices in stacks.items()}
    every = [part for slices in parts.values() for part in slices]
    scheme = choice.scheme(every, next(iter(formats.values())))
    if quantizes_inputs and scheme is not None and choice.has_scales(path, scheme, every):
        module.quantize_inputs(scheme, {name: choice.static_scales(scheme, slices) for name, slices in parts.items()})


@dataclass
class _Choice:
    """Selection of the weights that stay quantized, from the headers and scales of a checkpoint."""

    checkpoint: Checkpoint
    quantizer: OnlineQuantizer | None
    held: frozenset[str]
    """Tensor names in the checkpoint."""
    without_scale: list[str] = field(default_factory=list)
    """Layers without the static input scale that config.json requires."""
    reordered: list[str] = field(default_factory=list)
    """4-bit weights whose groups are not consecutive features."""

    def kept(self, slices: Sequence[WeightSlice]) -> QuantizedWeight | None:
        """Return the quantized format of a weight with ``slices`` stacked along the rows; None for a dense weight."""
        checkpoint = self.checkpoint
        if not all(part.name in self.held for part in slices):
            return None
        if self.quantizer is not None:
            if checkpoint.quantization is None and all(self.quantizer.covers(part.name) for part in slices):
                layout = ScaleLayout.of([_part(part, (1, part.shape[-1])) for part in slices])
                assert layout is not None, "scales per output channel always fit"
                return QuantizedWeight(torch.float8_e4m3fn, layout)
            return None
        kinds = {checkpoint.kind(part.name) for part in slices}
        dtype = next((dtype for dtype, kind in KINDS.items() if kinds == {kind}), None)
        if dtype is None or checkpoint.quantization is None or not all(part.into.stride(-1) == 1 for part in slices):
            return None
        try:
            stored = [checkpoint.scales(part.name, part.shape, part.index) for part in slices]
            if dtype == INT4:
                return self._kept_int4(slices, stored)
        except CheckpointError:
            return None  # loading the weight raises the error again, after all names were checked
        layout = ScaleLayout.of([_part(part, block) for part, (_, block) in zip(slices, stored, strict=True)])
        return None if layout is None or self._schemes(slices, dtype) is None else QuantizedWeight(dtype, layout)

    def _kept_int4(
        self, slices: Sequence[WeightSlice], stored: Sequence[tuple[torch.Tensor, tuple[int, int]]]
    ) -> QuantizedWeight | None:
        checkpoint, dtypes = self.checkpoint, {scales.dtype for scales, _ in stored}
        reordered = [p.name for p in slices if checkpoint.feature_groups(p.name, p.shape[1]) is not None]
        self.reordered += reordered
        layout = ScaleLayout.of([_part(part, block) for part, (_, block) in zip(slices, stored, strict=True)])
        is_even = all(part.into.shape[1] % 2 == 0 and (part.dim == 0 or part.start % 2 == 0) for part in slices)
        if reordered or layout is None or len(dtypes) > 1 or not is_even:
            return None
        has_zeros = any(checkpoint.zeros(part.name, part.shape[0]) is not None for part in slices)
        return QuantizedWeight(INT4, layout, dtypes.pop(), has_zeros)

    def kept_alike(self, matrices: Sequence[Sequence[WeightSlice]]) -> QuantizedWeight | None:
        """Return the quantized format that all ``matrices`` share; None if formats differ or a matrix is dense."""
        found = [kept for slices in matrices if (kept := self.kept(slices)) is not None]
        if len(found) < len(matrices) or not found:
            return None
        has_zeros = any(one.has_zeros for one in found)
        first = replace(found[0], has_zeros=has_zeros)
        return first if all(first.equals(replace(one, has_zeros=has_zeros)) for one in found) else None

    def scheme(self, slices: Sequence[WeightSlice], kept: QuantizedWeight) -> ActivationScheme | None:
        """Return how config.json quantizes the input of a weight that stays quantized; None if it does not."""
        if self.quantizer is not None or kept.dtype == INT4:
            return None
        schemes = self._schemes(slices, kept.dtype)
        return None if schemes is None else next(iter(schemes))

    def _schemes(self, slices: Sequence[WeightSlice], dtype: torch.dtype) -> frozenset[ActivationScheme | None] | None:
        """Return the one scheme of the parts, which share one input; None if their schemes differ."""
        assert self.checkpoint.quantization is not None, "the weights are quantized"
        schemes = frozenset(self.checkpoint.quantization.activations(part.name, dtype) for part in slices)
        return schemes if len(schemes) == 1 else None

    def has_scales(self, path: str, scheme: ActivationScheme, slices: Sequence[WeightSlice]) -> bool:
        """Return whether the scales of a static scheme exist; a layer without them is recorded for :meth:`report`."""
        is_missing = scheme.is_static and any(self.checkpoint.input_scale(part.name) is None for part in slices)
        if is_missing:
            self.without_scale.append(path)
        return not is_missing

    def static_scales(self, scheme: ActivationScheme, slices: Sequence[WeightSlice]) -> list[float]:
        """Return the scale of each part's input; empty if the scheme is dynamic."""
        names = [part.name for part in slices] if scheme.is_static else []
        return [scale for name in names if (scale := self.checkpoint.input_scale(name)) is not None]

    def report(self) -> None:
        """Log the layers that are not computed as their checkpoint specifies."""
        if self.without_scale:
            _log.warning(
                "%d linear layers do not quantize their input, as config.json asks: the checkpoint has no input_scale "
                "of all their parts (first: %s)", len(self.without_scale), self.without_scale[0],
            )  # fmt: skip
        if self.reordered:
            _log.warning(
                "%d weights are dequantized, because their groups are not consecutive features (desc_act; first: %s)",
                len(self.reordered), self.reordered[0],
            )  # fmt: skip


def load_input_scales(model: nn.Module, folder: WeightSource, *, apply: bool = True) -> None:
    """Replace the static input scales of layers whose weights are in ``folder``; with ``apply=False`` only check.

    Raises CheckpointError if a layer with static scales has no scale there.
    """
    static = [found for found in _quantizers(model) if found[0].scheme.is_static]
    if not static:
        return
    with open_checkpoint(folder, getattr(model, "checkpoint_prefixes", {})) as checkpoint:
        held = set(checkpoint.names)
        for quantizer, names in static:
            scales = list(quantizer.part_scales)
            for index, name in enumerate(names):
                if name in held:
                    scales[index] = _input_scale(checkpoint, name)
            if apply:
                quantizer.set_part_scales(scales)


def _quantizers(model: nn.Module) -> Iterator[tuple[InputQuantizer, list[str]]]:
    """Yield every input quantizer and the names of the weights that use its output."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.input_quantizer is not None:
            yield module.input_quantizer, [part.name for part in module.weight_slices(path) if part.is_matrix]
        elif isinstance(module, Experts) and module.gate_up_input_quantizer and module.down_input_quantizer:
            experts = list(module.slices_of_stacks(next(iter(module.layouts(path)))))
            for name, quantizer in (
                ("gate_up_proj", module.gate_up_input_quantizer), ("down_proj", module.down_input_quantizer)
            ):  # fmt: skip
                yield quantizer, [part.name for one in experts for part in one[name]]


def _input_scale(checkpoint: Checkpoint, name: str) -> float:
    scale = checkpoint.input_scale(name)
    if scale is None:
        raise CheckpointError(
            f"{name} in {checkpoint.file_of(name)} has no input_scale, with which the model quantizes the layer's "
            "input: start the engine with this checkpoint, or with quantized_layers='weight_only'"
        )
    return scale


def _part(part: WeightSlice, block: tuple[int, int]) -> ScalePart:
    rows, columns = part.extent
    start = (part.start, 0) if part.dim == 0 else (0, part.start)
    return ScalePart((rows, columns), start, block)


def quantized_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of quantized linear and expert weights with their scales, and of the same weights in bf16."""
    stored = dense = 0
    for module in model.modules():
        weights: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        if isinstance(module, Linear) and module.weight_scale is not None:
            weights = [module.weight]
            others = [module.weight_scale, *([] if module.weight_zero is None else [module.weight_zero])]
        elif isinstance(module, Experts) and module.scales is not None:
            weights = [module.gate_up_proj, module.down_proj]
            others = [*module.scales.values(), *module.zeros.values()]
        stored += sum(tensor.numel() * tensor.element_size() for tensor in (*weights, *others))
        dense += sum(2 * weight.numel() * (2 if weight.dtype == INT4 else 1) for weight in weights)
    return stored, dense
