"""Setup: the settings of one side of a case: framework, dtype, batching, schedule."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tapscope.core.errors import ConfigError

_CHOICES = {
    "framework": ("transformers", "engine", "megatron"),
    "device": ("cpu", "cuda"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "attention": ("eager", "sdpa"),
    "batch": ("left", "right", "separate", "packed"),
    "order": ("given", "reversed"),
    "schedule": ("decode", "whole", "chunks"),
    "workload": ("short", "long", "one", "longest", "token", "many", "shared"),
    "autocast": ("", "bfloat16", "float16"),
    "optimizer": ("", "adamw", "sgd"),
    "update": ("loop", "foreach", "fused"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings of one run; raises ConfigError with the field, the value and the rule."""

    framework: str = "transformers"
    device: str = "cpu"
    """``cpu``, or ``cuda`` for one GPU."""
    dtype: str = "float32"
    attention: str = "eager"
    """transformers: ``eager`` or ``sdpa``."""
    tp: int = 1
    """Tensor-parallel ranks; the engine's are threads of this process, Megatron's are processes."""
    sequence_parallel: bool = False
    """Megatron: norms run on a shard of the sequence."""
    batch: str = "left"
    """transformers: requests padded on the ``left`` or ``right``, ``separate`` (one forward per request), or
    ``packed`` into one row. The engine always packs; with ``separate`` it runs one request after the other."""
    order: str = "given"
    """Order of the requests in the batch."""
    schedule: str = "decode"
    """``decode``: the prompts, then one forced token per step; ``whole``: all tokens in one forward without a cache;
    ``chunks``: prompts in chunks of five tokens, then as ``decode``."""
    workload: str = "short"
    """The requests: three ``short`` ones, ``one``, one ``long`` or very long (``longest``) among others, a single
    ``token``, ``many`` (eight), or three with a common prefix (``shared``)."""
    greedy: bool = False
    """Greedy decoding instead of the workload's tokens: two runs may diverge."""
    autocast: str = ""
    """transformers: forwards under ``torch.autocast`` of this dtype."""
    seed: int = 0
    """Seed of the requests' tokens."""
    train: bool = False
    """Run forward and backward of a cross-entropy and capture gradients too. Needs schedule ``whole``."""
    optimizer: str = ""
    """``adamw`` or ``sgd``: three training steps; parameters are captured after each. Needs ``train``."""
    update: str = "foreach"
    """Implementation of the parameter update: ``loop`` (one by one), ``foreach`` or ``fused``."""
    micros: int = 1
    """Batches whose gradients are accumulated per optimizer step."""
    master: bool = False
    """The optimizer works on float32 copies of the parameters."""
    named: bool = True
    """False: the dumper is not given requests and positions; it infers them from the model's arguments."""
    fused: bool = False
    """q, k, v and gate, up run as one linear layer each, named ``qkv_proj`` and ``gate_up_proj``."""
    page_size: int = 16
    """Positions per KV page of the engine."""
    processes: bool = False
    """The engine's ranks are real processes."""
    engine: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    """Other engine settings, by the names of EngineConfig, e.g. ``{"max_num_batched_tokens": 8}``; ``prefix_cache``
    is off unless set."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", tuple(sorted(dict(self.engine).items())))  # setups are dict keys
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        for name in ("tp", "page_size", "micros"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be an integer above 0")
        if self.train and self.schedule != "whole":
            raise ConfigError("train needs schedule='whole'")
        if self.optimizer and not (self.train and self.framework == "transformers" and self.batch in ("left", "right")):
            raise ConfigError("optimizer needs train=True, framework='transformers' and a padded batch")
        if (self.micros > 1 or self.master) and not self.optimizer:
            raise ConfigError("micros and master need an optimizer")
        if self.batch == "packed" and self.schedule != "whole":
            raise ConfigError("batch='packed' needs schedule='whole'")
        if self.greedy and (self.schedule != "decode" or self.batch not in ("left", "separate")):
            raise ConfigError("greedy needs schedule='decode' and batch='left' or 'separate'")
        if self.autocast and self.framework != "transformers":
            raise ConfigError("autocast is for framework='transformers'")
        if self.dtype == "float64" and self.framework != "transformers":
            raise ConfigError(f"dtype='float64': {self.framework} does not compute in it, transformers does")
        if self.engine:
            _check_engine({"tp": self.tp} | dict(self.engine), self.framework)
        if self.device != "cpu" and not self.fits_one_gpu:
            raise ConfigError(f"device={self.device!r}: one GPU holds one rank of transformers or of the engine")
        if self.framework == "transformers" and self.tp > 1:
            raise ConfigError("tp: transformers runs on one rank here; use framework engine or megatron")

    @property
    def fits_one_gpu(self) -> bool:
        """Whether this setup can run with device ``cuda``."""
        return self.tp == 1 and self.framework != "megatron"

    def but(self, changes: dict[str, Any]) -> "Setup":
        """Return this setup with some fields changed; raises ConfigError for an unknown field."""
        known = [field.name for field in fields(self)]
        unknown = [name for name in changes if name not in known]
        if unknown:
            raise ConfigError(f"a setup has no {unknown[0]!r}; it has {', '.join(known)}")
        return replace(self, **changes)


def _check_engine(settings: Mapping[str, Any], framework: str) -> None:
    from tapscope.engine.params.engine_config import EngineConfig

    if framework != "engine":
        raise ConfigError(f"engine={dict(settings)!r}: needs framework='engine'")
    EngineConfig.build("", settings)
