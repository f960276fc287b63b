"""DumpAPI: the methods of a dumper that record values by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tapscope.dumper.config import DumperConfig
from tapscope.dumper.job.compiled_regions import is_compiling, warn_skipped
from tapscope.dumper.job.fork_guard import ForkGuard
from tapscope.dumper.job.rank_identity import RankIdentity
from tapscope.dumper.pipeline.in_memory_sink import InMemorySink
from tapscope.dumper.recording.explicit_dump import attributes
from tapscope.dumper.recording.model_registry import ModelRegistry
from tapscope.dumper.recording.recording import Recording
from tapscope.dumper.selection.selection import Selection
from tapscope.dumper.steps import tag_context
from tapscope.dumper.taps.parameter_taps import capture_model, gradient_of

_FOREIGN = frozenset({"step", "get_grad", "grafter_extras"})
"""Arguments of SGLang's calls that have no meaning in ``dump`` and would be taken for tags."""


class DumpAPI:
    """``dump`` and its variants, tags, and capture in memory."""

    _config: DumperConfig
    _identity: RankIdentity
    _models: ModelRegistry
    _recording: Recording | None
    _forked: ForkGuard | None

    set_ctx = staticmethod(tag_context.set_ctx)
    ctx = tag_context.ctx

    def dump(
        self,
        name: str,
        value: Any,
        *,
        dims: str | None = None,
        dims_grad: str | None = None,
        grad: bool | None = None,
        save: bool = True,
        **tags: Any,
    ) -> None:
        """Record a value at ``layers.N:tap[name]``, with N from the tag ``layer_id`` or ``layer``, else at
        ``:tap[name]``.

        ``value`` is a tensor, an array, a number, a string or a container of these; a function without arguments is
        called once, and only if its value is selected. ``dims`` names the axes, ``dims_grad`` those of the gradient
        (default: the same). ``grad``: None captures the gradient if a rule names it, True also if only the value is
        kept, False never. ``save`` False records nothing. ``tags`` are recorded with the value and override the
        context. ``step`` and SGLang's ``get_grad`` and ``grafter_extras`` are not tags: they are ignored and reported
        in the run. Never raises.
        """
        if is_compiling():
            warn_skipped(name)
            return
        if not save:
            return
        recording = self._recording
        if not _FOREIGN.isdisjoint(tags):
            tags = _without_foreign(name, tags, recording)
        if recording is not None and recording.active.explicit_dump is not None:
            recording.active.explicit_dump.dump(name, value, dims, dims_grad, grad, tags)
        elif self._forked is not None:
            self._forked.warn()
        elif recording is None:
            self._warn_unopened()

    def _warn_unopened(self) -> None:
        """A value came while the dumper is closed."""

    def dump_dict(self, prefix: str, data: Any, *, save: bool = True, **tags: Any) -> None:
        """Dump every value of a mapping, or of an object's public attributes except methods, as ``prefix.KEY``."""
        if not save:
            return
        if is_compiling():
            warn_skipped(prefix)
            return
        recording = self._recording
        if recording is None or recording.active.explicit_dump is None:
            return
        try:
            values, failed = attributes(data)
        except Exception as error:  # noqa: BLE001 - it may run in a model's forward
            values, failed = {}, [f"{type(error).__name__}: {error}"]
        for key, value in values.items():
            self.dump(f"{prefix}.{key}", value, **tags)
        if failed:
            recording.collector.counters.report(f":tap[{prefix}]", f"could not be read: {', '.join(failed)}")

    def dump_model(
        self,
        model: nn.Module,
        *,
        step: int | None = None,
        prefix: str = "",
        save: bool = True,
        get_grad: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        **tags: Any,
    ) -> int:
        """Record the parameters, their gradients (Megatron's ``main_grad`` first) and the buffers of ``model`` now.

        The rules for ``PATH:param[..]``, ``PATH:param[..].grad`` and ``PATH:buffer[..]`` decide, else ``keep``.
        ``prefix`` is put before the paths, with or without a dot. ``step`` must be the open step or the one that ended
        last; another number is only recorded as a tag, and reported. ``get_grad`` returns the gradient of a parameter
        instead. ``save`` False records nothing. Returns the number of values. Never raises.
        """
        recording = self._recording
        if (
            not save
            or recording is None
            or not (recording.active.config.enabled or recording.collector.capturer.memory_sinks)
        ):
            return 0
        where, info = recording.steps.current(), recording.info
        if step is not None and step != where.info.step:
            text = f"dump_model(step={step}) came in step {where.info.step}, and is recorded there, with the tag step"
            recording.collector.counters.report(f"{prefix}:param[..]", text)
            tags = {"step": step, **tags}
        config = recording.collector.selection.config.updated(
            {"params": True, "grads": True, "buffers": True, "mode": "all"}
        )
        selection = Selection(config, rank=info.rank, coords=info.coords)
        all_tags = tag_context.merged(tag_context.current(), tags)
        try:
            return capture_model(
                recording.collector,
                model,
                where,
                selection,
                prefix=prefix,
                micro=where.micro,
                tags=all_tags,
                get_grad=get_grad or gradient_of,
            )
        except Exception as error:  # noqa: BLE001 - the model must go on
            recording.collector.counters.fail(where, f"{prefix}:param[..]", error)
            return 0

    @contextmanager
    def capture_output(self, **settings: Any) -> Iterator[InMemorySink]:
        """Collect the records of this block in memory instead of the run: every occurrence, as copies.

        Works with no run open, and may be nested: the outer block gets the records, too. Rules and filter apply, with
        ``settings`` on top of the configuration; the dumper counts as enabled.
        """
        captures = InMemorySink()
        temporary = None
        if self._recording is None:
            temporary = self._recording = Recording(self._config, self._identity, self._models, None)
            temporary.start(select=False)
        try:
            with self._recording.active.capture(captures, settings):
                yield captures
        finally:
            if temporary is not None:
                self._recording = None
                temporary.close(None)


def _without_foreign(name: Any, tags: dict[str, Any], recording: Recording | None) -> dict[str, Any]:
    """The actual tags; the others are reported."""
    foreign = ", ".join(sorted(_FOREIGN & tags.keys()))
    if recording is not None:
        recording.collector.counters.report(f":tap[{name}]", f"dump() takes no {foreign}: left out")
    return {name: value for name, value in tags.items() if name not in _FOREIGN}
