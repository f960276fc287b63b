"""Policy: what the scheduler goes by, in one place; worked out from EngineConfig once the cache is sized."""

from dataclasses import dataclass

from tapscope.engine.params.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits and rules of one scheduler; see :class:`EngineConfig` for those that are settings."""

    num_pages: int
    page_size: int
    max_running: int
    max_tokens: int = 512
    """Rows of one step."""
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    window: int | None = None
    """No layer looks further back than so many positions, a row's own included; None when one sees everything."""
    watermark: float = 0.01
    ageing_steps: int = 256
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    check: bool = False

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        num_pages: int,
        max_tokens: int,
        eos_token_ids: tuple[int, ...],
        window: int | None,
        shareable: bool = True,
    ) -> "Policy":
        """The settings of ``config``, and what the loaded model and its cache add to them.

        ``shareable``: whether equal prefixes have equal keys and values in this model.
        """
        names = ("page_size", "max_running", "watermark", "ageing_steps", "check")
        times = ("waiting_timeout_s", "running_timeout_s")
        return cls(
            num_pages=num_pages,
            max_tokens=max_tokens,
            eos_token_ids=eos_token_ids,
            window=window,
            prefix_cache=config.prefix_cache and shareable,
            **{name: getattr(config, name) for name in names + times},
        )

    @property
    def has_timeouts(self) -> bool:
        """Whether a request can be overdue."""
        return self.waiting_timeout_s is not None or self.running_timeout_s is not None

    def overdue(self, submitted_s: float, started_s: float | None, now_s: float) -> str | None:
        """Why a live request that was first admitted at ``started_s`` has had its time; None while it has not."""
        if started_s is None:
            limit_s, took_s, doing = self.waiting_timeout_s, now_s - submitted_s, "waited"
        else:
            limit_s, took_s, doing = self.running_timeout_s, now_s - started_s, "run"
        if limit_s is None or took_s <= limit_s:
            return None
        return f"it had {doing} for {took_s:.3g} s; the limit is {limit_s:g} s"
