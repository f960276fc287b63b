"""The dumper as the observer of a host, such as the engine."""

import sys

from torch import nn

from tapscope.core.observe import RankInfo
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.dumper import Dumper


class HostedDumper(Dumper):
    """A dumper that a host closes, also while it handles a failure: only the current exception tells."""

    def close(self) -> None:
        """As :meth:`Dumper.close`; while an exception is being handled, as a context that it has left."""
        error = sys.exc_info()[0]
        if error is None:
            super().close()
        else:
            self._close(error.__name__)


def make_observer(
    model: nn.Module, info: RankInfo, *, out: str, config: DumperConfig | None = None, force: bool = False
) -> Dumper:
    """An :data:`~tapscope.core.observe.ObserverFactory` once ``out`` and ``config`` are bound (functools.partial).

    Raises as :meth:`Dumper.open`.
    """
    return HostedDumper(model, out, config=config, force=force, info=info).open()
