"""Budget: how much one rank may still record in a run."""

import threading

from tapscope.dumper.config import DumperConfig


class Budget:
    """Counts what is written.

    A budget is exhausted by the record that reaches or exceeds it, which is still written.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        """Payload bytes; shared ones count once."""
        self.num_records = 0
        self.num_steps = 0
        """Steps with at least one record."""
        self._limits: dict[str, int] = {}
        self._lock = threading.Lock()

    def limit(self, config: DumperConfig) -> None:
        """Set other limits; counts are kept."""
        limits = {"max_bytes": config.max_bytes, "max_records": config.max_records, "max_steps": config.max_steps}
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}

    def restart(self) -> None:
        """A new run."""
        with self._lock:
            self.nbytes = self.num_records = self.num_steps = 0

    @property
    def is_limited(self) -> bool:
        """Whether any limit is set."""
        return bool(self._limits)

    def charge(self, *, num_records: int = 0, nbytes: int = 0, num_steps: int = 0) -> None:
        """Count what is written."""
        with self._lock:
            self.num_records += num_records
            self.nbytes += nbytes
            self.num_steps += num_steps

    def reached(self) -> tuple[str, int] | None:
        """The first exhausted limit, as setting and value; None when there is none."""
        used = {"max_bytes": self.nbytes, "max_records": self.num_records, "max_steps": self.num_steps}
        return next(((name, limit) for name, limit in self._limits.items() if used[name] >= limit), None)
