"""Rotary position embedding (RoPE), arXiv:2104.09864: frequencies of all rope types, and the rotation.

Formulas and order of operations follow transformers' `modeling_rope_utils.py`, so that frequencies are bit-identical.
Feature i is rotated with feature i + dim/2 (NeoX style).
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.hf_config.rope_config import Rope
from tapscope.engine.layers.fused import fused_for
from tapscope.engine.layers.probe import ANGLES, TOKENS, WHOLE

_FEW_TOKENS = 16


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the step's positions, shared by all layers."""

    inv_freq: Tensor
    is_float32: ClassVar[bool] = False
    """Whether cosines and sines are float32 instead of the input's dtype."""

    def __init__(self, rope: Rope, dim: int) -> None:
        super().__init__()
        self.rope = rope
        self.register_buffer("inv_freq", inverse_frequencies(rope, dim), persistent=False)
        self.attention_scaling = attention_scaling(rope)
        self.tap_dims = {"in[x]": WHOLE, "in[position_ids]": TOKENS, "out[0]": ANGLES, "out[1]": ANGLES}

    def forward(self, x: Tensor, position_ids: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin [tokens, dim] of positions [tokens], or of [3, tokens] with sections.

        The dtype is that of ``x``, or float32. Dynamic rope needs ``lengths`` [tokens], the request length of each row
        (see :func:`stretched`).
        """
        dtype = torch.float32 if self.is_float32 else x.dtype
        fused = fused_for(x) if position_ids.ndim == 1 and self.rope.kind not in ("dynamic", "longrope") else None
        if fused is not None:
            cos, sin = fused.rope.angles(position_ids, self.inv_freq, self.attention_scaling, dtype)
            return cos, sin
        return cos_sin(self.rope, self.inv_freq, self.attention_scaling, dtype, position_ids, lengths)


def cos_sin(
    rope: Rope,
    inv_freq: Tensor,
    scaling: float,
    dtype: torch.dtype,
    position_ids: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [tokens, dim] in float32 from frequencies [dim / 2], then cast to ``dtype``."""
    if rope.kind in ("dynamic", "longrope"):
        assert lengths is not None or not rope.depends_on_length, f"{rope.kind} rope needs the rows' lengths"
        if lengths is not None:
            change = stretched if rope.kind == "dynamic" else long_or_short
            inv_freq = change(rope, 2 * len(inv_freq), lengths)
    positions = position_ids.float()
    if position_ids.ndim == 1:
        angles = positions[:, None] * inv_freq
    else:
        angles = positions[_axes(rope, inv_freq.device)].T * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [tokens, heads, dim] by cos and sin [tokens, rotated dim]; features past the rotated dim are unchanged."""
    if cos.shape[-1] < states.shape[-1]:
        head, rest = torch.split(states, [cos.shape[-1], states.shape[-1] - cos.shape[-1]], dim=-1)
        return torch.cat((rotate(head, cos, sin), rest), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if states.is_cuda:  # fewer kernels
        first, second = states.chunk(2, dim=-1)
        return states * cos + torch.cat((-second, first), dim=-1) * sin
    half = states.shape[-1] // 2  # bit-identical, with fewer memory writes
    rotated = states * cos
    rotated[..., :half].sub_(states[..., half:] * sin[..., :half])
    rotated[..., half:].add_(states[..., :half] * sin[..., half:])
    return rotated


def rotate_to_halves(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent features and return them as halves; transformers' `apply_rotary_pos_emb_interleave`.

    Shapes are those of :func:`rotate`.
    """
    cos, sin = cos.chunk(2, dim=-1)[0].unsqueeze(1), sin.chunk(2, dim=-1)[0].unsqueeze(1)
    first, second = states[..., 0::2], states[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent features (GPT-J style) by cos and sin [tokens, rotated dim / 2]; otherwise as :func:`rotate`."""
    size = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = states[..., 0:size:2], states[..., 1:size:2]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return rotated if size == states.shape[-1] else torch.cat((rotated, states[..., size:]), dim=-1)


def rotate_complex(states: Tensor, rotations: Tensor) -> Tensor:
    """Multiply adjacent features, as complex numbers, by ``rotations`` [tokens, dim / 2], in float32."""
    pairs = torch.view_as_complex(states.float().reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations.unsqueeze(1)).flatten(-2).to(states.dtype)


def rotate_both(query: Tensor, key: Tensor, rotation: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Apply ``rotation`` to [tokens, heads, dim] and [tokens, kv_heads, dim], in one call if that is faster."""
    if len(query) > _FEW_TOKENS and not query.is_cuda:  # memory-bound: concatenation would cost more than a second call
        return rotation(query), rotation(key)
    rotated = rotation(torch.cat((query, key), dim=1))
    return rotated[:, : query.shape[1]], rotated[:, query.shape[1] :]


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """Return theta^(-2i/dim) [dim / 2] float32, scaled according to ``rope.kind``; unscaled for dynamic rope.

    Computed on the CPU, so that frequencies are bit-identical on every device.
    """
    with torch.device("cpu"):
        freq = _frequencies(rope, dim)
    return freq.to(torch.get_default_device())


def _frequencies(rope: Rope, dim: int) -> Tensor:
    freq = 1.0 / (rope.theta ** _exponents(dim))
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, freq)
    if rope.kind == "longrope":
        return _longrope(rope, rope.short_factor, dim)
    if rope.kind == "proportional":  # pairs past the partial dim are not rotated
        freq[int(rope.partial * dim // 2) :] = 0
        return freq / rope.factor
    return _yarn(rope, dim) if rope.kind == "yarn" else freq


def attention_scaling(rope: Rope) -> float:
    """Return the factor of cosines and sines: 1, yarn's (arXiv:2309.00071 section 3.4) or longrope's (2402.13753)."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        if rope.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 mscale ln(factor) + 1, or 1 for a factor of at most 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def stretched(rope: Rope, dim: int, lengths: Tensor) -> Tensor:
    """Return dynamic NTK frequencies [tokens, dim / 2] of rows with request lengths ``lengths`` [tokens].

    transformers' `_compute_dynamic_ntk_parameters` uses the maximum position of the call. Here the length of a row is
    max(prompt length, position + 1). This is equal for a single request, and independent of other requests, chunking
    and preemption.
    """
    reach = lengths.clamp(min=rope.original_max_positions)
    growth = rope.factor * reach / rope.original_max_positions - (rope.factor - 1)
    theta = rope.theta * growth ** (dim / (dim - 2))
    return 1.0 / (theta[:, None] ** _exponents(dim).to(lengths.device))


def long_or_short(rope: Rope, dim: int, lengths: Tensor) -> Tensor:
    """Return LongRoPE frequencies [tokens, dim / 2] of rows with request lengths ``lengths`` [tokens].

    arXiv:2402.13753. Requests longer than ``original_max_positions`` use the long factors. As for dynamic rope, the
    length of a row is that of its own request, not of the call as in transformers.
    """
    factors = (rope.short_factor, rope.long_factor)
    short, long = (_longrope(rope, each, dim).to(lengths.device) for each in factors)
    return torch.where((lengths > rope.original_max_positions)[:, None], long, short)


def _longrope(rope: Rope, factors: tuple[float, ...], dim: int) -> Tensor:
    scale = torch.tensor(factors, dtype=torch.float32, device="cpu")
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    return 1.0 / (scale * rope.theta**exponents)


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _llama3(rope: Rope, freq: Tensor) -> Tensor:
    """Scale frequencies as Llama 3.1 (arXiv:2407.21783): divide low ones by factor, keep high ones, blend between."""
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    wavelength = 2 * math.pi / freq
    scaled = torch.where(wavelength > low, freq / rope.factor, freq)
    band = rope.high_freq_factor - rope.low_freq_factor
    blend = (rope.original_max_positions / wavelength - rope.low_freq_factor) / band
    between = (wavelength >= high) & (wavelength <= low)
    return torch.where(between, (1 - blend) * scaled / rope.factor + blend * scaled, scaled)


def _yarn(rope: Rope, dim: int) -> Tensor:
    """Scale frequencies as YaRN (arXiv:2309.00071): keep high-frequency dims, divide low-frequency dims by factor."""

    def dimension_of(turns: float) -> float:
        """Return the dimension that makes ``turns`` rotations within the original context."""
        span = rope.original_max_positions / (turns * 2 * math.pi)
        return (dim * math.log(span)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = rope.theta ** _exponents(dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _axes(rope: Rope, device: torch.device) -> Tensor:
    """Return the position axis (0 temporal, 1 height, 2 width) that each frequency uses, [dim / 2] int64."""
    temporal, height, width = rope.sections
    if not rope.interleaved:
        sizes = torch.tensor(rope.sections, device=device)
        return torch.arange(3, device=device).repeat_interleave(sizes, output_size=sum(rope.sections))
    axes = torch.zeros(temporal + height + width, dtype=torch.int64, device=device)
    axes[1 : 3 * height : 3] = 1
    axes[2 : 3 * width : 3] = 2
    return axes
