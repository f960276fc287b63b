"""MambaConfig and Mamba1Config: settings of Mamba-2 and Mamba layers in config.json."""

import math
from dataclasses import dataclass

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.params.validators import is_number


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Sizes and constants of Mamba-2 layers (arXiv:2405.21060)."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Number of groups of consecutive heads that share B and C."""
    state_dim: int
    kernel: int
    """Kernel size of the causal convolution in positions, including the current one."""
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    has_norm: bool = True
    """Whether the output passes through a gated norm instead of a plain gate."""
    norms_before_gate: bool = False
    step_limit: tuple[float, float] = (0.0, math.inf)
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    part_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of gate, x, B, C and time step (muP)."""

    @property
    def has_multipliers(self) -> bool:
        """Whether the input or a part of its projection has a factor other than 1."""
        return any(factor != 1.0 for factor in (self.in_multiplier, *self.part_multipliers))

    def facts(self) -> dict[str, int | float]:
        """Return the sizes that determine tensor layouts, under their keys in config.json."""
        return {
            "mamba_n_heads": self.num_heads,
            "mamba_d_head": self.head_dim,
            "mamba_n_groups": self.num_groups,
            "mamba_d_state": self.state_dim,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Config:
    """Sizes of Mamba layers with a selective scan (arXiv:2312.00752)."""

    channels: int
    state_dim: int
    step_rank: int
    """Rank of the projection to the time steps (``mamba_dt_rank``)."""
    kernel: int
    """Kernel size of the causal convolution in positions, including the current one."""
    conv_bias: bool
    bias: bool
    """Whether the projections into and out of the layer have biases."""

    def facts(self) -> dict[str, int | float]:
        """Return the sizes that determine tensor layouts, under their keys in config.json."""
        return {"mamba_d_state": self.state_dim, "mamba_dt_rank": self.step_rank}


def jamba_mamba(reader: ConfigReader, hidden_size: int) -> Mamba1Config:
    """Read the Mamba layers of a JambaConfig; raises CheckpointError."""
    is_derived = reader.get("mamba_dt_rank", "auto") == "auto"
    return Mamba1Config(
        channels=reader.count("mamba_expand", 2) * hidden_size,
        state_dim=reader.count("mamba_d_state", 16),
        step_rank=-(-hidden_size // 16) if is_derived else reader.count("mamba_dt_rank"),
        kernel=reader.count("mamba_d_conv", 4, minimum=2),
        conv_bias=reader.flag("mamba_conv_bias", default=True),
        bias=reader.flag("mamba_proj_bias"),
    )


def bamba_mamba(reader: ConfigReader, hidden_size: int) -> MambaConfig:
    """Read the Mamba-2 layers of a BambaConfig; raises CheckpointError."""
    heads, bias = reader.count("mamba_n_heads", 128), reader.flag("mamba_proj_bias")
    return MambaConfig(
        num_heads=heads,
        head_dim=_head_dim(reader, heads, reader.count("mamba_expand", 2) * hidden_size),
        num_groups=_groups(reader, "mamba_n_groups", 1, heads),
        state_dim=reader.count("mamba_d_state", 256),
        kernel=reader.count("mamba_d_conv", 4, minimum=2),
        conv_bias=reader.flag("mamba_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        step_limit=_step_limit(reader),
    )


def nemotron_h_mamba(reader: ConfigReader) -> MambaConfig:
    """Read the Mamba-2 layers of a NemotronHConfig, including its older keys; raises CheckpointError."""
    new = ("n_groups", "conv_kernel", "use_conv_bias", "time_step_min")
    old = ("mamba_n_groups", "mamba_d_conv", "mamba_conv_bias", "mamba_dt_min")
    groups, kernel, conv_bias, least = (o if o in reader.values else n for n, o in zip(new, old, strict=True))
    heads, bias = reader.count("mamba_num_heads", 128), reader.flag("use_bias")
    return MambaConfig(
        num_heads=heads,
        head_dim=reader.count("mamba_head_dim", 64),
        num_groups=_groups(reader, groups, 8, heads),
        state_dim=reader.count("ssm_state_size", 128),
        kernel=reader.count(kernel, 4, minimum=2),
        conv_bias=reader.flag(conv_bias, default=True),
        in_bias=bias,
        out_bias=bias,
        step_limit=(reader.number(least, 0.001), math.inf),
    )


def falcon_h1_mamba(reader: ConfigReader, hidden_size: int) -> MambaConfig:
    """Read the Mamba-2 layers of a FalconH1Config; raises CheckpointError."""
    heads = reader.count("mamba_n_heads", 128)
    size = reader.optional_count("mamba_d_ssm", 1024) or reader.count("mamba_expand", 2) * hidden_size
    return MambaConfig(
        num_heads=heads,
        head_dim=_head_dim(reader, heads, size),
        num_groups=_groups(reader, "mamba_n_groups", 1, heads),
        state_dim=reader.count("mamba_d_state", 256),
        kernel=reader.count("mamba_d_conv", 4, minimum=2),
        conv_bias=reader.flag("mamba_conv_bias", default=True),
        in_bias=reader.flag("mamba_proj_bias"),
        out_bias=reader.flag("projectors_bias"),
        has_norm=reader.flag("mamba_rms_norm"),
        norms_before_gate=reader.flag("mamba_norm_before_gate", default=True),
        step_limit=_step_limit(reader),
        in_multiplier=reader.number("ssm_in_multiplier", 1.0),
        out_multiplier=reader.number("ssm_out_multiplier", 1.0),
        part_multipliers=tuple(multipliers(reader, "ssm_multipliers", 5)),  # type: ignore[arg-type]
    )


def zamba2_mamba(reader: ConfigReader, hidden_size: int) -> MambaConfig:
    """Read the Mamba-2 layers of a Zamba2Config; raises CheckpointError.

    The convolution always has a bias, as in transformers: ``use_conv_bias`` is ignored.
    """
    heads, size = reader.count("n_mamba_heads", 8), int(reader.number("mamba_expand", 2) * hidden_size)
    if size % heads:
        raise reader.fail("n_mamba_heads", f"it must divide the {size} features of the Mamba layers")
    bias = reader.flag("add_bias_linear")
    return MambaConfig(
        num_heads=heads,
        head_dim=size // heads,
        num_groups=_groups(reader, "mamba_ngroups", 1, heads),
        state_dim=reader.count("mamba_d_state", 64),
        kernel=reader.count("mamba_d_conv", 4, minimum=2),
        conv_bias=True,
        in_bias=bias,
        out_bias=bias,
        step_limit=(reader.number("time_step_min", 0.001), math.inf),
    )


def mamba2_mamba(reader: ConfigReader, hidden_size: int) -> MambaConfig:
    """Read the layers of a Mamba2Config; raises CheckpointError."""
    heads, head_dim = reader.count("num_heads", 128), reader.count("head_dim", 64)
    if heads * head_dim != int(reader.number("expand", 2) * hidden_size):
        rule = f"times head_dim={head_dim} it must be expand={reader.number('expand', 2):g} times {hidden_size}"
        raise reader.fail("num_heads", rule)
    return MambaConfig(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=_groups(reader, "n_groups", 8, heads),
        state_dim=reader.count("state_size", 128),
        kernel=reader.count("conv_kernel", 4, minimum=2),
        conv_bias=reader.flag("use_conv_bias", default=True),
        in_bias=reader.flag("use_bias"),
        out_bias=reader.flag("use_bias"),
        step_limit=_step_limit(reader),
    )


def _head_dim(reader: ConfigReader, heads: int, size: int) -> int:
    """Read ``mamba_d_head``, which must be ``size / heads``; ``auto`` is the default. Raises CheckpointError."""
    given = reader.get("mamba_d_head", "auto")
    if size % heads or given not in ("auto", size // heads):
        raise reader.fail("mamba_d_head", f"{heads} heads must divide {size} features; expected {size / heads:g}")
    return size // heads


def _groups(reader: ConfigReader, name: str, default: int, heads: int) -> int:
    groups = reader.count(name, default)
    if heads % groups:
        raise reader.fail(name, f"it must divide the {heads} heads")
    return groups


def _step_limit(reader: ConfigReader) -> tuple[float, float]:
    limit = reader.get("time_step_limit", [0.0, math.inf])
    infinity = {"__float__": "Infinity"}  # as transformers writes it
    limit = [math.inf if value == infinity else value for value in limit] if isinstance(limit, list) else limit
    if not isinstance(limit, list) or len(limit) != 2 or not all(isinstance(value, int | float) for value in limit):
        raise reader.fail("time_step_limit", "expected two numbers")
    return float(limit[0]), float(limit[1])


def multipliers(reader: ConfigReader, name: str, count: int) -> list[float]:
    """Read a list of ``count`` numbers, by default all 1; raises CheckpointError."""
    values = reader.get(name, [1.0] * count)
    if not isinstance(values, list) or len(values) != count or not all(is_number(value) for value in values):
        raise reader.fail(name, f"expected {count} numbers")
    return [float(value) for value in values]
