"""SchedulerConfig: limits and rules of the scheduler, derived from EngineConfig once the cache is sized."""

from dataclasses import dataclass

from tapscope.engine.params.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of one scheduler; see :class:`EngineConfig` for those that users set."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_tokens: int = 512
    """Rows per step."""
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    window: int | None = None
    """Positions that any layer looks back at most, the row's own included; None when a layer sees everything."""
    windowed_pools: tuple[tuple[int, int], ...] = ()
    """(pages, window) of each further cache group: layers that look back less far."""
    num_state_slots: int = 0
    """Slots of recurrent states; 0 for a model without."""
    state_interval: int = 256
    """Positions between checkpoints of recurrent states; rounded up to pages."""
    num_adapter_slots: int = 0
    """LoRA adapters that a step may compute; 0 for none."""
    watermark: float = 0.01
    priority_aging_steps: int = 256
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    check_invariants: bool = False

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        num_pages: int,
        max_tokens: int,
        eos_token_ids: tuple[int, ...],
        window: int | None,
        windowed_pools: tuple[tuple[int, int], ...] = (),
        num_state_slots: int = 0,
        shareable: bool = True,
    ) -> "SchedulerConfig":
        """From the settings of ``config`` and properties of the loaded model and its cache.

        ``shareable``: whether equal prefixes have equal keys and values in this model.
        """
        names = ("page_size", "max_num_seqs", "watermark", "priority_aging_steps", "check_invariants")
        times = ("waiting_timeout_s", "running_timeout_s")
        return cls(
            num_pages=num_pages,
            max_tokens=max_tokens,
            eos_token_ids=eos_token_ids,
            window=window,
            windowed_pools=windowed_pools,
            num_state_slots=num_state_slots,
            state_interval=config.state_checkpoint_interval,
            num_adapter_slots=config.max_loras_per_batch if config.has_lora else 0,
            prefix_cache=config.prefix_cache and shareable,
            **{name: getattr(config, name) for name in names + times},
        )

    @property
    def has_timeouts(self) -> bool:
        """Whether a timeout is set."""
        return self.waiting_timeout_s is not None or self.running_timeout_s is not None

    def timeout_reason(self, submitted_s: float, started_s: float | None, now_s: float) -> str | None:
        """Why a live request, first admitted at ``started_s``, has timed out; None while it has not."""
        if started_s is None:
            limit_s, took_s, state = self.waiting_timeout_s, now_s - submitted_s, "waiting"
        else:
            limit_s, took_s, state = self.running_timeout_s, now_s - started_s, "running"
        if limit_s is None or took_s <= limit_s:
            return None
        return f"timed out after {state} for {took_s:.3g} s; {state}_timeout_s is {limit_s:g}"
