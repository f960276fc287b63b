"""Which linear layers keep quantised weights: chosen from a checkpoint's headers before weights are allocated."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tapscope.engine.checkpoint.mxfp4 import BLOCKS
from tapscope.engine.checkpoint.quantization import KINDS, ActivationScheme, OnlineQuantizer
from tapscope.engine.checkpoint.weight_loader import WeightSlice
from tapscope.engine.layers.clamped_experts import ClampedExperts
from tapscope.engine.layers.linear import Linear
from tapscope.engine.layers.quantized import ScaleLayout, ScalePart
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
    """Allocate the weights of linear layers that were made within ``deferred_linear_weights``.

    A layer keeps codes where all its tensors in ``folder`` are quantised alike, or where ``quantizer`` covers them; it
    then quantises its input where config.json says so and ``quantizes_inputs``. All layers are dense if ``folder`` is
    None. Raises CheckpointError.
    """
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, Linear)]
    _allocate_experts(model, folder, device)
    without_scale: list[str] = []
    if folder is not None:
        with open_checkpoint(folder, getattr(model, "checkpoint_prefixes", {})) as checkpoint:
            for path, module in linears:
                if module.may_stay_quantized:
                    scheme = _keep_quantized(checkpoint, path, module, device, quantizer)
                    if (
                        scheme is not None
                        and quantizes_inputs
                        and not _quantize_input(checkpoint, path, module, scheme)
                    ):
                        without_scale.append(path)
    if without_scale and model.tp.rank == 0:
        _log.warning(
            "%d linear layers do not quantise their input, as config.json asks: the checkpoint has no input_scale of "
            "all their parts (first: %s)", len(without_scale), without_scale[0],
        )  # fmt: skip
    for _, module in linears:
        if module.weight.is_meta:
            module.weight = nn.Parameter(torch.empty_like(module.weight, device=device), requires_grad=False)


def _allocate_experts(model: CausalLM, folder: Path | None, device: torch.device) -> None:
    """Weights of ClampedExperts, in MXFP4 where ``folder`` has them so."""
    modules = [(path, module) for path, module in model.named_modules() if isinstance(module, ClampedExperts)]
    held: set[str] = set()
    if modules and folder is not None:
        with open_checkpoint(folder) as checkpoint:
            held = set(checkpoint.names)
    for path, module in modules:
        module.allocate(device, keeps_mxfp4=f"{path}.gate_up_proj{BLOCKS}" in held)


def _keep_quantized(
    checkpoint: Checkpoint, path: str, module: Linear, device: torch.device, quantizer: OnlineQuantizer | None
) -> ActivationScheme | None:
    """Allocate codes and scales if the layer keeps them; returns how config.json asks for its input."""
    held = set(checkpoint.names)
    slices = [part for part in module.weight_slices(path) if part.is_matrix]
    if not all(part.name in held for part in slices):
        return None
    if quantizer is not None:
        if checkpoint.quantization is None and all(quantizer.covers(part.name) for part in slices):
            layout = ScaleLayout.of([_part(part, (1, part.shape[1])) for part in slices])
            assert layout is not None, "scales per output channel always fit"
            module.keep_quantized(torch.float8_e4m3fn, layout, device)
        return None
    kinds = {checkpoint.kind(part.name) for part in slices}
    dtype = next((dtype for dtype, kind in KINDS.items() if kinds == {kind}), None)
    if dtype is None or checkpoint.quantization is None:
        return None
    schemes = {checkpoint.quantization.activations(part.name, dtype) for part in slices}
    try:
        layout = ScaleLayout.of([_part(part, checkpoint.scales(part.name, part.shape)[1]) for part in slices])
    except CheckpointError:
        return None  # reading the weight raises it again, after the check of all names
    if layout is None or len(schemes) > 1:  # parts of a fused layer share one input
        return None
    module.keep_quantized(dtype, layout, device)
    return schemes.pop()


def _quantize_input(checkpoint: Checkpoint, path: str, module: Linear, scheme: ActivationScheme) -> bool:
    """Quantise the layer's input by ``scheme``; False, with nothing changed, if a static scale is missing."""
    scales = _static_scales(checkpoint, path, module) if scheme.is_static else ()
    if None in scales:
        return False
    module.quantize_input(scheme, [scale for scale in scales if scale is not None])
    return True


def _static_scales(checkpoint: Checkpoint, path: str, module: Linear) -> Sequence[float | None]:
    return [checkpoint.input_scale(part.name) for part in module.weight_slices(path) if part.is_matrix]


def load_input_scales(model: nn.Module, folder: Path, *, apply: bool = True) -> None:
    """Replace the static input scales of the layers whose weights are in ``folder``; without ``apply`` only check.

    Raises CheckpointError if such a layer has no scale there.
    """
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, Linear)]
    static = [(path, m, q) for path, m in linears if (q := m.input_quantizer) is not None and q.scheme.is_static]
    if not static:
        return
    with open_checkpoint(folder, getattr(model, "checkpoint_prefixes", {})) as checkpoint:
        held = set(checkpoint.names)
        for path, module, quantizer in static:
            names = [part.name for part in module.weight_slices(path) if part.is_matrix]
            scales = list(quantizer.part_scales)
            for index, name in enumerate(names):
                if name in held:
                    scales[index] = _input_scale(checkpoint, name)
            if apply:
                quantizer.set_part_scales(scales)


def _input_scale(checkpoint: Checkpoint, name: str) -> float:
    scale = checkpoint.input_scale(name)
    if scale is None:
        raise CheckpointError(
            f"{name} in {checkpoint.file_of(name)} has no input_scale, with which the model quantises the layer's "
            "input: start the engine with this checkpoint, or with quantized_layers='weight_only'"
        )
    return scale


def _part(part: WeightSlice, block: tuple[int, int]) -> ScalePart:
    rows, columns = part.into.shape
    start = (part.start, 0) if part.dim == 0 else (0, part.start)
    return ScalePart((rows, columns), start, block)


def quantized_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the quantised weights of linear layers and experts with their scales, and of the same in bf16."""
    layers = [m for m in model.modules() if isinstance(m, Linear) and m.weight_scale is not None]
    stored = sum(t.numel() * t.element_size() for m in layers for t in (m.weight, m.weight_scale) if t is not None)
    dense = sum(2 * module.weight.numel() for module in layers)
    for module in model.modules():
        if isinstance(module, ClampedExperts) and module.scales is not None:
            blocks = module.gate_up_proj.numel() + module.down_proj.numel()
            stored += blocks + sum(scales.numel() for scales in module.scales.values())
            dense += 4 * blocks  # two values in a byte
    return stored, dense
