"""Rope: settings of rotary position embedding in config.json, in both of transformers' formats."""

from dataclasses import dataclass, replace
from typing import Any

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.params.validators import is_number

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "mrope")
"""Values of ``rope_type`` that :mod:`tapscope.engine.layers.rope` supports; ``mrope`` is ``default`` with sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Settings of rotary position embedding, named as in transformers' `modeling_rope_utils.py`.

    Each kind uses only some of the fields.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    """Factor by which the context is extended (linear, dynamic, llama3, yarn, proportional)."""
    original_max_positions: int = 0
    """Context length before extension (dynamic, llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    """yarn: factor of cosines and sines; None: derived from ``factor`` and the two mscales."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    """yarn: whether the bounds of the interpolation ramp are rounded to whole dimensions."""
    sections: tuple[int, ...] = ()
    """Number of frequencies for the temporal, height and width position (Qwen2-VL, arXiv:2409.12191); empty: all
    frequencies use one position."""
    interleaved: bool = False
    """Whether the frequencies of the sections alternate (Qwen3-VL) or are contiguous (Qwen2-VL)."""
    partial: float = 1.0
    """Fraction of a head's features that is rotated (``partial_rotary_factor``): the first features or, with kind
    ``proportional``, the first pairs (i, i + head size / 2)."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """longrope: divisors of the frequencies for requests up to ``original_max_positions``, and for longer requests."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the rotation of a position depends on the length of its request."""
        return self.kind == "dynamic" or (self.kind == "longrope" and self.short_factor != self.long_factor)

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated features of a head."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial)

    def reach(self, max_positions: int) -> int:
        """Return the context length of the model, where ``max_positions`` is ``max_position_embeddings``.

        Dynamic RoPE extends the context beyond ``max_positions``; YaRN may have been enabled without raising this
        value. For linear RoPE and llama3, published configs contain the extended length.
        """
        if self.kind == "dynamic":
            return max(max_positions, int(max_positions * self.factor))
        if self.kind == "yarn":
            return max(max_positions, int(self.original_max_positions * self.factor))
        return max_positions


def read_rope(reader: ConfigReader, head_dim: int, max_positions: int, theta: float = 10000.0) -> Rope:
    """Read ``rope_parameters`` (transformers 5), or ``rope_scaling`` with ``rope_theta`` (earlier versions).

    As in transformers, `rope_scaling` takes precedence if both are given. ``theta`` is the family's default. Raises
    CheckpointError.
    """
    _whole_heads_only(reader)
    name = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    settings = reader.section(name) or ConfigReader(reader.path, {})
    for layer_type in ("full_attention", "sliding_attention"):
        settings.refuse(layer_type, (), f"this architecture has one rope for all layers; put it into {name} itself")
    if reader.get("original_max_position_embeddings"):  # a top-level value takes precedence
        original = reader.count("original_max_position_embeddings")
        settings = ConfigReader(reader.path, settings.values | {"original_max_position_embeddings": original})
    return rope_of(settings, head_dim, max_positions, reader.number("rope_theta", theta))


def partial_rope(
    reader: ConfigReader, head_dim: int, max_positions: int, default: float, theta: float = 10000.0
) -> Rope:
    """Read RoPE settings like :func:`read_rope`, for the fraction ``partial_rotary_factor`` of each head.

    ``default`` is the default fraction. Raises CheckpointError.
    """
    key = "partial_rotary_factor"
    name = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    settings = reader.section(name) or ConfigReader(reader.path, {})
    partial = settings.number(key, reader.number(key, default))
    dim = int(head_dim * partial)
    if partial > 1 or dim < 2 or dim % 2:
        raise reader.fail(key, f"it gives {dim} rotated features of {head_dim}; expected an even count")
    whole = {key: 1.0}
    inner = ConfigReader(reader.path, reader.values | whole | {name: settings.values | whole})
    return replace(read_rope(inner, dim, max_positions, theta), partial=partial)


def rope_of(settings: ConfigReader, head_dim: int, max_positions: int, theta: float) -> Rope:
    """Parse one JSON object of RoPE settings; ``theta`` and ``max_positions`` are defaults. Raises CheckpointError."""
    _whole_heads_only(settings)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in KINDS:
        key = "rope_type" if settings.get("rope_type") else "type"
        raise settings.fail(key, f"supported rope types: {', '.join(KINDS)}")
    return Rope(
        theta=settings.number("rope_theta", theta),
        kind="default" if kind == "mrope" else kind,
        sections=_sections(settings, kind, head_dim),
        interleaved=settings.flag("mrope_interleaved"),
        **_SCALINGS.get(kind, _unscaled)(settings, max_positions),
    )


def _unscaled(settings: ConfigReader, max_positions: int) -> dict[str, Any]:
    return {}


def _linear(settings: ConfigReader, max_positions: int) -> dict[str, Any]:
    return {"factor": settings.number("factor"), "original_max_positions": max_positions}


def _llama3(settings: ConfigReader, max_positions: int) -> dict[str, Any]:
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if not low < high:
        raise settings.fail("low_freq_factor", f"it must be below high_freq_factor {high}")
    return {
        "factor": settings.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_positions": settings.count("original_max_position_embeddings", max_positions),
    }


def _yarn(settings: ConfigReader, max_positions: int) -> dict[str, Any]:
    original = settings.count("original_max_position_embeddings", max_positions)
    ratio = max_positions / original
    return {
        "factor": settings.number("factor", ratio if ratio > 1 else None),
        "original_max_positions": original,
        "attention_factor": settings.optional_number("attention_factor"),
        "beta_fast": settings.number("beta_fast", 32.0),
        "beta_slow": settings.number("beta_slow", 1.0),
        "mscale": settings.optional_number("mscale") or 0.0,
        "mscale_all_dim": settings.optional_number("mscale_all_dim") or 0.0,
        "truncate": settings.flag("truncate", True),
    }


_SCALINGS = {"linear": _linear, "dynamic": _linear, "llama3": _llama3, "yarn": _yarn}


def _sections(settings: ConfigReader, kind: str, head_dim: int) -> tuple[int, ...]:
    sections = settings.get("mrope_section", [])
    if kind == "mrope" and not sections:
        raise settings.fail("mrope_section", "rope type 'mrope' needs the three section sizes")
    is_list = isinstance(sections, list) and all(type(size) is int and size > 0 for size in sections)
    if not is_list or (sections and (len(sections) != 3 or sum(sections) != head_dim // 2)):
        rule = f"it must be three sizes that sum to half of head_dim, {head_dim // 2}"
        raise settings.fail("mrope_section", rule)
    return tuple(sections)


def _whole_heads_only(settings: ConfigReader) -> None:
    settings.refuse("partial_rotary_factor", (1, 1.0), "only whole heads are rotated (1.0)")


def read_phi3_rope(reader: ConfigReader, head_dim: int, max_positions: int) -> Rope:
    """Read the RoPE settings of a Phi3Config, for the fraction ``partial_rotary_factor`` of each head.

    Supports ``default`` and ``longrope`` (formerly ``su`` and ``yarn``). Raises CheckpointError.
    """
    name = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    settings = reader.section(name) or ConfigReader(reader.path, {})
    partial = settings.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * partial)
    if partial > 1 or dim % 2:
        raise reader.fail(
            "partial_rotary_factor", f"it gives {dim} rotated features of {head_dim}; expected an even count"
        )
    theta = settings.number("rope_theta", reader.number("rope_theta", 10000.0))
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta, partial=partial)
    if kind not in ("longrope", "su", "yarn"):
        raise settings.fail(
            "rope_type" if settings.get("rope_type") else "type", "supported rope types: default, longrope"
        )
    original = reader.count("original_max_position_embeddings", settings.get("original_max_position_embeddings", 4096))
    short_factor = _factors(settings, "short_factor", dim // 2)
    long_factor = _factors(settings, "long_factor", dim // 2)
    return Rope(
        theta=theta,
        kind="longrope",
        partial=partial,
        factor=settings.number("factor", max_positions / original),
        original_max_positions=original,
        attention_factor=settings.optional_number("attention_factor"),
        short_factor=short_factor,
        long_factor=long_factor if max_positions > original else short_factor,  # no request exceeds ``original`` then
    )


def _factors(settings: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    values = settings.get(name)
    if not isinstance(values, list) or len(values) != count or not all(is_number(each) and each > 0 for each in values):
        raise settings.fail(name, f"expected a list of {count} numbers above 0")
    return tuple(float(each) for each in values)
