"""Lines of a run report: metrics, anomalous sites and events, each as text and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tapscope.core.formatting import plural
from tapscope.render.anomalies import Anomaly
from tapscope.run_format.index import Event


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One metric over the steps of one rank."""

    name: str
    rank: int
    num_steps: int
    mean: float
    min: float
    max: float
    """Mean, min and max are over finite values; NaN if no value is finite."""
    last: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        spread = "  ".join(f"{name} {getattr(self, name):.4g}" for name in ("mean", "min", "max", "last"))
        return f"{self.name}  {spread}  ({plural(self.num_steps, 'step')}, rank {self.rank})"


@dataclass(frozen=True, slots=True)
class AnomalousSite:
    """A site with records that have the same kind of anomaly."""

    site: str
    oddity: Anomaly
    """Anomaly of the first record; ``step`` and ``rank`` are those of the same record."""
    num_records: int
    step: int
    rank: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {
            "site": self.site,
            "kind": self.oddity.kind,
            "detail": self.oddity.detail,
            "num_records": self.num_records,
            "step": self.step,
            "rank": self.rank,
        }

    def __str__(self) -> str:
        where = f"first at step {self.step}, rank {self.rank}"
        return (
            f"{self.oddity.glyph} {self.site}  {self.oddity.kind} in {plural(self.num_records, 'record')}, "
            f"{where}: {self.oddity.detail}"
        )


@dataclass(frozen=True, slots=True)
class EventLine:
    """An event other than the opening or closing of a rank."""

    event: Event
    before: Mapping[str, Any] = field(default_factory=dict)
    """For a ``config`` event: the configuration it replaced."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as recorded."""
        return {"kind": self.event.kind, "rank": self.event.rank, "fields": self.event.fields}

    def __str__(self) -> str:
        if self.event.kind == "crash":
            return self._crash()
        # Show only changed settings; --json prints the whole configuration.
        new = {k: v for k, v in self.event.fields.items() if k not in self.before or self.before[k] != v}
        fields = " ".join(f"{k}={v}" for k, v in new.items() if k != "time")
        return f"{self.event.kind}  rank {self.event.rank}  {fields}".rstrip()

    def _crash(self) -> str:
        """Format the exception without its traceback, which --json includes."""
        fields = self.event.fields
        step = "" if fields.get("step") is None else f"step {fields['step']}  "
        message = str(fields.get("message", "")).partition("\n")[0]
        where = f"  ({fields['where']})" if fields.get("where") else ""
        return f"crash  rank {self.event.rank}  {step}{fields.get('exception')}: {message}{where}"
