"""SchedulerConfig: limits and policies of the scheduler, derived from EngineConfig once the cache is sized."""

from dataclasses import dataclass

from tapscope.engine.params.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of one scheduler. The user-facing settings are documented in :class:`EngineConfig`."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_tokens: int = 512
    """Maximum number of token rows per step."""
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    window: int | None = None
    """Attention window of the primary group in positions, including the row itself; None for full attention."""
    windowed_pools: tuple[tuple[int, int], ...] = ()
    """(pages, window) of each further cache group, whose layers have smaller windows."""
    num_state_slots: int = 0
    """Number of slots for recurrent states; 0 for models without recurrent layers."""
    state_interval: int = 256
    """Positions between checkpoints of recurrent states; rounded up to a multiple of the page size."""
    num_adapter_slots: int = 0
    """Maximum number of distinct LoRA adapters per step; 0 disables LoRA."""
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
        """Build a SchedulerConfig from ``config`` and properties of the loaded model and its cache.

        ``shareable``: whether equal token prefixes have equal keys and values in this model, as the prefix cache
        requires.
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
        """Whether a waiting or running timeout is set."""
        return self.waiting_timeout_s is not None or self.running_timeout_s is not None

    def timeout_reason(self, submitted_s: float, started_s: float | None, now_s: float) -> str | None:
        """Return a message if a live request has timed out, else None.

        ``started_s`` is the time of the first admission; None while the request has not been admitted.
        """
        if started_s is None:
            limit_s, took_s, state = self.waiting_timeout_s, now_s - submitted_s, "waiting"
        else:
            limit_s, took_s, state = self.running_timeout_s, now_s - started_s, "running"
        if limit_s is None or took_s <= limit_s:
            return None
        return f"timed out after {state} for {took_s:.3g} s; {state}_timeout_s is {limit_s:g}"
