"""The dumper as a :class:`~tapscope.core.observe.StepObserver` of a host, such as the engine."""

import sys

from torch import nn

from tapscope.core.observe import RankInfo
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.dumper import Dumper


class HostedDumper(Dumper):
    """A dumper that the host closes explicitly, possibly while an exception is being handled."""

    def close(self) -> None:
        """Close as :meth:`Dumper.close` does, or, while an exception is being handled, as an interrupted ``with``."""
        error = sys.exc_info()[0]
        if error is None:
            super().close()
        else:
            self._close(error.__name__)


def make_observer(
    model: nn.Module, info: RankInfo, *, out: str, config: DumperConfig | None = None, force: bool = False
) -> Dumper:
    """Open a dumper of ``model`` for a host; raises the errors of :meth:`Dumper.open`.

    With ``out`` and ``config`` bound (functools.partial), this is an :data:`~tapscope.core.observe.ObserverFactory`.
    """
    return HostedDumper(model, out, config=config, force=force, info=info).open()
