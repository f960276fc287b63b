"""BatchInvariant: a row's result is bit-identical in any batch, with any chunking and after any prefix hit.

Results otherwise vary because libraries choose the summation order of GEMMs and attention by the number of rows. In
this mode every GEMM computes blocks of ROWS rows, padded with zeros. Attention computes blocks of ROWS queries against
blocks of KEYS keys that begin at multiples of KEYS. Shapes therefore do not depend on the batch. (He et al., "Defeating
Nondeterminism in LLM Inference", 2025, has the same goal.) Norms and softmax are unchanged: torch computes them row by
row.

On a GPU, Triton kernels whose blocks do not depend on the batch compute GEMMs, attention and norms. Operations that
these kernels do not support, such as heads of more than 256 features, run as on a CPU. Kernels of quantized products
choose their launch config by the number of rows, so :func:`~tapscope.engine.layers.fused.product_kernels` withholds
them while a mode is active, and weights are dequantized for each product.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tapscope.engine.kv_cache.step_cache import Segment, StepCache, StepMasks
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.fused import Kernels, kernels, may_run_on
from tapscope.engine.layers.grouped_linear import grouped_linear, is_one_launch
from tapscope.engine.layers.indexer import Indexer, index_scores
from tapscope.engine.layers.mla import LatentAttention, attend_chosen
from tapscope.engine.layers.paged_attention import (
    MAX_HEAD_DIM,
    AttentionSpec,
    attend,
    attend_branches,
    attend_chunks,
    attend_one,
    attend_prompts,
    attend_tree,
)
from tapscope.engine.layers.recurrent_layer import RecurrentLayer
from tapscope.engine.layers.vector_stable_ops import vector_stable
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.models.deepseek import DeepseekAttention

ROWS = 16
KEYS = 128
_KERNEL_DTYPES = torch.float32, torch.float16, torch.bfloat16
_NEED_HOST = {DeepseekAttention: "latent attention (MLA)", RecurrentLayer: "a recurrent state"}


class BatchInvariant(TorchFunctionMode):
    """Torch function mode that replaces functions of torch and of the attention layer by batch-invariant ones."""

    allows_fused = True
    """True because rows of fused kernels are independent (:func:`~tapscope.engine.layers.fused.fused_for`)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the replacement of ``func``, or ``func`` itself; called by torch."""
        replaced: Callable[..., Any] = _REPLACED.get(func, func)
        return replaced(*args, **(kwargs or {}))


def make_batch_invariant(model: CausalLM) -> None:
    """Fix the choices that a model otherwise makes per batch: MLA absorption and the order of all-reduce."""
    model.tp.ordered = True
    for module in model.modules():
        if isinstance(module, DeepseekAttention):
            module.absorb = False
        elif isinstance(module, Indexer | RecurrentLayer):
            module.is_batch_invariant = True


def what_needs_host(model: CausalLM) -> str | None:
    """Return the part of a GPU decode step that waits for the host in this mode, which prevents CUDA graph capture.

    None if no part does.
    """
    if model.tp.size > 1:
        return f"tp={model.tp.size}"
    for module in model.modules():
        if isinstance(module, SelfAttention) and module.head_dim > MAX_HEAD_DIM:
            return f"heads of {module.head_dim} features"
        if isinstance(module, Experts) and module.scales is not None:
            return "quantized experts"
        for kind, name in _NEED_HOST.items():
            if isinstance(module, kind):
                return name
    return None


def _by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` to blocks of ROWS rows along the first axis of ``x``."""
    padding = [0] * (2 * x.ndim - 1) + [-len(x) % ROWS]
    blocks = torch.split(functional.pad(x, padding), ROWS)
    return torch.cat([function(block) for block in blocks])[: len(x)]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    if (triton_kernels := _kernels(rows)) is not None:
        output: Tensor = triton_kernels.matmul.invariant_linear(rows, weight, bias)
        return output.view(*input.shape[:-1], len(weight))
    output = _by_rows(lambda block: functional.linear(block, weight, bias), rows)
    return output.view(*input.shape[:-1], len(weight))


def _kernels(states: Tensor) -> Kernels | None:
    """Return the Triton kernels that support ``states``; None if there are none."""
    return kernels(states.device) if may_run_on(states.device) and states.dtype in _KERNEL_DTYPES else None


def _grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if (triton_kernels := _kernels(input)) is not None and is_one_launch(len(input)):
        output: Tensor = triton_kernels.matmul.grouped_invariant_linear(input, weight, ends)
        return output
    output = input.new_zeros(len(input), weight.shape[1])
    start = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        if end > start:
            output[start:end] = _linear(input[start:end], matrix)
        start = end
    return output


def _attend(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> Tensor:
    """Compute `attend`, reading the cache from a multiple of KEYS on, or with the prefill kernel for all rows."""
    if spec.chunk is not None:
        return attend_chunks(query, layer, cache, spec, _attend_one)
    paged = attend_prompts(query, layer, cache, spec, is_batch_invariant=True)
    if paged is not None:
        return paged
    outputs = []
    for segment in cache.segments:
        start = segment.first_seen(spec.window) // KEYS * KEYS
        keys, values = cache.read(layer, segment, start)
        if spec.value_dim is not None:
            values = keys[..., : spec.value_dim]
        rows = slice(segment.slot, segment.slot + segment.count)
        if segment.tree:
            outputs.append(_attend_tree(query[rows], keys, values, segment, start, spec))
        else:
            outputs.append(_attend_one(query[rows], keys, values, segment.position - start, spec))
    return torch.cat(outputs)


def _attend_tree(
    query: Tensor, keys: Tensor, values: Tensor, segment: Segment, start: int, spec: AttentionSpec, *_: StepCache
) -> Tensor:
    """Compute `attend_tree` one branch at a time."""
    return attend_branches(query, keys, values, segment, start, spec, _attend_one)


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, diagonal: int, spec: AttentionSpec, _: StepMasks | None = None
) -> Tensor:
    """Compute `attend_one` in float32; key 0 is at a multiple of KEYS."""
    if query.shape[-1] <= MAX_HEAD_DIM and (triton_kernels := _kernels(query)) is not None:
        return _attend_copied(triton_kernels.prefill, query, keys, values, diagonal + len(query), spec)
    padding = (0, 0, 0, 0, 0, -len(keys) % KEYS)
    k, v = (functional.pad(x.float(), padding).transpose(0, 1) for x in (keys, values))
    parts = []
    for first in range(0, len(query), ROWS):
        block = query[first : first + ROWS]
        padded = functional.pad(block.float(), (0, 0, 0, 0, 0, ROWS - len(block)))
        parts.append(_attend_block(padded, k, v, diagonal + first, diagonal + first + len(block), spec)[: len(block)])
    return torch.cat(parts).to(query.dtype)


def _attend_copied(
    prefill: Callable[..., Tensor], query: Tensor, keys: Tensor, values: Tensor, length: int, spec: AttentionSpec
) -> Tensor:
    """Attend with the last rows of ``length`` positions in the paged prefill kernel, after a copy to pages."""
    pages = -(-length // ROWS)
    padding = (0, 0, 0, 0, 0, pages * ROWS - length)
    pools = [functional.pad(x[:length], padding).reshape(pages, ROWS, *x.shape[1:]) for x in (keys, values)]
    table, starts, lengths = (
        torch.arange(*bounds, dtype=torch.int32, device=query.device)
        for bounds in ((pages,), (0, len(query) + 1, len(query)), (length, length + 1))
    )
    options = {"window": spec.window, "softcap": spec.softcap, "sinks": spec.sinks}
    return prefill(query, *pools, table[None], starts, lengths, spec.scale, is_batch_invariant=True, **options)


def _attend_block(query: Tensor, keys: Tensor, values: Tensor, first: int, end: int, spec: AttentionSpec) -> Tensor:
    """Attend with ROWS queries from position ``first`` on to [kv_heads, length, dim] -> [ROWS, heads, value dim].

    Online softmax over blocks with a running maximum (arXiv:2205.14135). A fully masked block does not change a row's
    bits: its sums are multiplied by one and zero is added.
    """
    kv_heads = len(keys)
    folded = query.view(ROWS, kv_heads, -1, query.shape[-1]).permute(1, 2, 0, 3).flatten(1, 2)
    group = folded.shape[1] // ROWS
    position = torch.arange(first, first + ROWS, device=query.device).repeat(group).unsqueeze(1)
    begin = 0 if spec.window is None else max(0, first - spec.window + 1) // KEYS
    if spec.sinks is None:
        top = folded.new_full((*folded.shape[:2], 1), -torch.inf)
        total = torch.zeros_like(top)
    else:  # sinks act as a first score without a value
        top = spec.sinks.float().view(kv_heads, group).repeat_interleave(ROWS, dim=1).unsqueeze(-1)
        total = torch.ones_like(top)
    mixed = folded.new_zeros(*folded.shape[:2], values.shape[-1])
    for start in range(begin * KEYS, end, KEYS):
        scores = torch.bmm(folded, keys[:, start : start + KEYS].mT) * spec.scale
        if spec.softcap is not None:
            scores = vector_stable(torch.tanh, scores / spec.softcap) * spec.softcap
        key_position = torch.arange(start, start + KEYS, device=query.device)
        visible = key_position <= position
        if spec.window is not None:
            visible &= key_position > position - spec.window
        scores = scores.masked_fill(~visible, -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -torch.inf, 0.0)
        weights, kept = vector_stable(torch.exp, scores - base), vector_stable(torch.exp, top - base)
        total = total * kept + weights.sum(-1, keepdim=True)
        mixed = mixed * kept + torch.bmm(weights, values[:, start : start + KEYS])
        top = higher
    return (mixed / total).view(kv_heads, group, ROWS, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Compute `index_scores` in blocks of ROWS rows and KEYS keys."""
    length = keys.shape[1]
    blocks = torch.split(functional.pad(keys, (0, -length % KEYS)), KEYS, dim=1)
    rows = []
    for first in range(0, len(query), ROWS):
        missing = max(0, first + ROWS - len(query))
        part = functional.pad(query[first : first + ROWS], (0, 0, 0, 0, 0, missing))
        factors = functional.pad(weights[first : first + ROWS], (0, 0, 0, missing))
        rows.append(torch.cat([index_scores(part, block.contiguous(), factors) for block in blocks], dim=1))
    return torch.cat(rows)[: len(query), :length]


def _attend_chosen(query: Tensor, latents: Tensor, ids: Tensor, core: LatentAttention) -> Tensor:
    """Compute `attend_chosen` in blocks of ROWS rows; padding rows attend to the first position."""
    parts = []
    for first in range(0, len(query), ROWS):
        missing = max(0, first + ROWS - len(query))
        part = functional.pad(query[first : first + ROWS], (0, 0, 0, 0, 0, missing))
        parts.append(attend_chosen(part, latents, functional.pad(ids[first : first + ROWS], (0, 0, 0, missing)), core))
    return torch.cat(parts)[: len(query)]


def _made_stable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: vector_stable(lambda part: function(part, *args, **kwargs), x)


_ELEMENTWISE: tuple[Callable[..., Tensor], ...] = (
    functional.silu,
    functional.gelu,
    functional.softplus,
    torch.Tensor.tanh,
    torch.Tensor.sigmoid,
    torch.Tensor.cos,
    torch.Tensor.sin,
    torch.Tensor.exp,
    torch.Tensor.log,
    torch.tanh,
    torch.sigmoid,
    torch.cos,
    torch.sin,
    torch.exp,
    torch.log,
)
_MIXING: dict[Any, Callable[..., Tensor]] = {
    functional.linear: _linear,
    grouped_linear: _grouped_linear,
    attend: _attend,
    attend_one: _attend_one,
    attend_tree: _attend_tree,
    attend_chosen: _attend_chosen,
    index_scores: _index_scores,
}
_REPLACED: dict[Any, Callable[..., Tensor]] = _MIXING | {one: _made_stable(one) for one in _ELEMENTWISE}
