"""StepPlan: what rank 0 decided that every rank computes in one step, and its form on the wire."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from tapscope.observe import RowRun, StepInfo
from tapscope.wire import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One request's share of a step: neighbouring positions from ``position`` on."""

    request: str
    position: int
    visit: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    """All pages of the request, in order of position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step; equal on all ranks. Rows are packed in the order of ``shares``."""

    step: int
    phase: str
    shares: tuple[Share, ...]
    all_logits: bool
    """Whether lm_head sees every row or only each share's last."""
    kv_pages_used: int
    epoch: int | None = None
    """Configuration epoch that rank 0's observer wants, for every rank's observer."""

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(len(share.tokens) for share in self.shares)

    @property
    def slots(self) -> tuple[int, ...]:
        """First row of each share."""
        return (0, *accumulate(len(share.tokens) for share in self.shares))[:-1]

    @property
    def logit_rows(self) -> tuple[int, ...]:
        """Rows whose logits are computed, ascending."""
        return tuple(range(self.num_tokens)) if self.all_logits else self.sampled_rows

    @property
    def sampled_rows(self) -> tuple[int, ...]:
        """The last row of each share."""
        return tuple(slot + len(share.tokens) - 1 for slot, share in zip(self.slots, self.shares, strict=True))

    def info(self) -> StepInfo:
        """The step as observers see it."""
        rows = (
            RowRun(share.request, share.position, len(share.tokens), share.visit, slot)
            for slot, share in zip(self.slots, self.shares, strict=True)
        )
        return StepInfo(
            step=self.step,
            phase=self.phase,
            grid=(self.num_tokens,),
            rows=tuple(rows),
            token_ids=tuple(token for share in self.shares for token in share.tokens),
            row_sets={"logits": self.logit_rows},
            epoch=self.epoch,
        )

    def to_message(self) -> Message:
        """For :meth:`from_message` on another rank."""
        shares = [[s.request, s.position, s.visit, s.tokens, s.pages] for s in self.shares]
        fields = {name: getattr(self, name) for name in ("step", "phase", "all_logits", "kv_pages_used", "epoch")}
        return Message("plan", fields | {"shares": shares})

    @classmethod
    def from_message(cls, message: Message) -> "StepPlan":
        """The inverse of :meth:`to_message`; raises RecorderError when a field is missing."""
        shares = tuple(
            Share(request=request, position=position, visit=visit, tokens=tuple(tokens), pages=tuple(pages))
            for request, position, visit, tokens, pages in message["shares"]
        )
        names = ("step", "phase", "all_logits", "kv_pages_used", "epoch")
        return cls(shares=shares, **{name: message[name] for name in names})


def phase_of(is_prefill: Iterable[bool]) -> str:
    """``prefill``, ``decode`` or ``mixed``, from whether each share still computes its prompt."""
    kinds = set(is_prefill)
    return "mixed" if len(kinds) > 1 else "prefill" if True in kinds else "decode"
