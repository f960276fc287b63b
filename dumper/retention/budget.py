"""Budget: how much one rank may still record in a run."""

import threading

from tapscope.dumper.config import DumperConfig


class Budget:
    """Counts what goes to disk. A limit is reached by what meets or passes it, which is still kept whole."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Payload bytes, shared ones once."""
        self.num_records = 0
        self.num_steps = 0
        """Steps of which something was kept."""
        self._limits: dict[str, int] = {}
        self._lock = threading.Lock()

    def limit(self, config: DumperConfig) -> None:
        """Other limits, from now on; what was counted stays."""
        limits = {"max_bytes": config.max_bytes, "max_records": config.max_records, "max_steps": config.max_steps}
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}

    def restart(self) -> None:
        """A new run."""
        with self._lock:
            self.nbytes = self.num_records = self.num_steps = 0

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return bool(self._limits)

    def charge(self, *, num_records: int = 0, nbytes: int = 0, num_steps: int = 0) -> None:
        """Count what goes to disk."""
        with self._lock:
            self.num_records += num_records
            self.nbytes += nbytes
            self.num_steps += num_steps

    def reached(self) -> tuple[str, int] | None:
        """The first limit that is reached, as setting and value; None while there is room."""
        used = {"max_bytes": self.nbytes, "max_records": self.num_records, "max_steps": self.num_steps}
        return next(((name, limit) for name, limit in self._limits.items() if used[name] >= limit), None)
