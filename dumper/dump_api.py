"""DumpAPI: the dumper methods that record explicit values by name."""

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
"""Keyword arguments of SGLang's ``dump`` that have no meaning here and would otherwise become tags."""


class DumpAPI:
    """``dump`` and its variants, the tag context, and in-memory capture."""

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
        """Record ``value`` at the site ``layers.N:tap[name]``, or at ``:tap[name]`` if no layer is known.

        N is the tag ``layer_id`` or ``layer``. ``value`` is a tensor, an array, a number, a string or a container of
        these; a function without arguments is called once, and only if the rules select the site. ``dims`` names the
        axes, ``dims_grad`` those of the gradient (default: the same). ``grad=None`` captures the gradient if a rule
        names it, True whenever the value is kept, False never. ``save=False`` records nothing. ``tags`` are recorded
        with the value and override the tag context. ``step`` and SGLang's ``get_grad`` and ``grafter_extras`` are not
        tags: they are ignored and reported in the run. Never raises.
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
        """Handle a ``dump()`` while the dumper is closed; subclasses may warn."""

    def dump_dict(self, prefix: str, data: Any, *, save: bool = True, **tags: Any) -> None:
        """Dump every item of a mapping, or every public non-method attribute of an object, as ``prefix.KEY``."""
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
        """Record the current parameters, gradients and buffers of ``model``; returns the number of values recorded.

        Rules for ``PATH:param[..]``, ``PATH:param[..].grad`` and ``PATH:buffer[..]`` apply, otherwise ``keep``.
        ``prefix`` is prepended to the paths, with or without a trailing dot. ``step`` must be the open step or the one
        that ended last; any other number is only recorded as a tag, and reported. ``get_grad`` overrides how the
        gradient of a parameter is read (default: Megatron's ``main_grad``, then ``grad``). ``save=False`` records
        nothing. Never raises.
        """
        recording = self._recording
        if (
            not save
            or recording is None
            or not (recording.active.config.enabled or recording.collector.capturer.memory_sinks)
        ):
            return 0
        target_step, info = recording.steps.current(), recording.info
        if step is not None and step != (current := target_step.info.step):
            text = f"dump_model(step={step}) came in step {current}, and is recorded there, with the tag step"
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
                target_step,
                selection,
                prefix=prefix,
                micro=target_step.micro,
                tags=all_tags,
                get_grad=get_grad or gradient_of,
            )
        except Exception as error:  # noqa: BLE001 - the model must go on
            recording.collector.counters.fail(target_step, f"{prefix}:param[..]", error)
            return 0

    @contextmanager
    def capture_output(self, **settings: Any) -> Iterator[InMemorySink]:
        """Context manager: collect copies of all records, every occurrence included, in memory instead of in the run.

        No run needs to be open. Blocks may be nested; the outer block then receives the records as well. Rules and
        filter apply, with ``settings`` overriding the configuration; the dumper counts as enabled.
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
    """Return ``tags`` without SGLang's foreign arguments, which are reported in the run."""
    foreign = ", ".join(sorted(_FOREIGN & tags.keys()))
    if recording is not None:
        recording.collector.counters.report(f":tap[{name}]", f"dump() takes no {foreign}: left out")
    return {name: value for name, value in tags.items() if name not in _FOREIGN}
