"""Dumper: taps models, accepts explicit ``dump()`` values, and streams the values selected by its rules into a run."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from tapscope.core.errors import ConfigError, RecorderError, RuleError, StepError
from tapscope.core.observe import RankInfo
from tapscope.dumper.config import RUNTIME_FIELDS, DumperConfig, current_names, with_former_names
from tapscope.dumper.device import cuda_graphs
from tapscope.dumper.dump_api import DumpAPI
from tapscope.dumper.job import open_dumpers, rank_identity
from tapscope.dumper.job.fork_guard import ForkGuard
from tapscope.dumper.pipeline.recorder_client import RecorderClient
from tapscope.dumper.pipeline.recorder_process import require_free
from tapscope.dumper.recording.model_registry import AttachHandle, ModelRegistry
from tapscope.dumper.recording.recording import Recording
from tapscope.dumper.reference.live_comparison import LiveComparison
from tapscope.dumper.retention.flight_recorder import ReleaseResult
from tapscope.dumper.step_api import StepAPI

_log = logging.getLogger("tapscope")


class Dumper(DumpAPI, StepAPI):
    """Records the values selected by its rules into a run while the context is open.

    ::

        with Dumper(model, out="run", keep="full") as dumper:
            with dumper.step(phase="prefill"):
                logits = model(input_ids=ids).logits
                dumper.dump("top", logits.topk(5).values)

    A call of the model outside ``step()`` counts as its own step. Each rank of a job creates its own Dumper with
    the same ``out``; the first one starts the recorder process. A Dumper also implements
    :class:`~tapscope.core.observe.StepObserver`, for hosts that drive an observer.

    Opening raises RunExistsError, RuleError (a rule matches no site), ConfigError, ListenError or RecorderError.
    The hooks in the model's forward never raise.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module] | None = None,
        out: str | Path | None = None,
        *,
        config: DumperConfig | None = None,
        force: bool = False,
        info: RankInfo | None = None,
        **settings: Any,
    ) -> None:
        """Create a closed dumper; :meth:`open` or ``with`` opens it.

        ``model`` is one module, a mapping of names to modules, a list of the virtual pipeline stages of one model
        (Megatron's model chunks), or None for explicit values only. ``settings`` are fields of :class:`DumperConfig`.
        ``force`` replaces an existing run at ``out``. ``info`` describes this rank if the host knows better than
        torch.distributed.
        """
        self._models = ModelRegistry(model)
        self._config = (config or DumperConfig()).updated(settings)
        self._out = None if out is None else Path(out)
        self._identity = rank_identity.RankIdentity(info, lambda: self._models.modules)
        self._force = force
        self._recording: Recording | None = None
        self._forked: ForkGuard | None = None  # set in a child that was forked while this dumper was open
        self._latest: Recording | None = None  # the last recording, kept after it has ended
        self._warned_unopened = False
        self._unused = object()  # registered with open_dumpers until this dumper is opened
        if model is not None or out is not None:
            open_dumpers.note_created(self._unused)

    # ---- opening and closing ----------------------------------------------------------------------------

    def open(self) -> "Dumper":
        """Connect to the recorder, starting it if necessary, and place the taps; returns the dumper itself."""
        self._open()
        return self

    def _open(self, *, later: bool = False, lenient: bool = False) -> None:
        open_dumpers.note_opened(self._unused)
        if self._recording is not None:
            raise StepError("this Dumper is already open")
        if self._forked is not None:
            self._forked.mute()
        recording = Recording(self._config, self._identity, self._models, RecorderClient(self._config))
        recording.open(lambda: self._run_directory(recording.info), force=self._force, later=later, lenient=lenient)
        self._recording = self._latest = recording
        open_dumpers.opened(self)

    def _abandon(self) -> None:
        """Drop the inherited recording in a forked child, which must open its own dumper to record."""
        recording, self._recording, self._latest = self._recording, None, None
        if recording is not None:
            recording.stop()
            self._forked = recording.fork_guard
            self._models.warn_if_called(recording.fork_guard)

    def _run_directory(self, info: RankInfo) -> Path:
        """Return the directory of the run; may wait until another rank has named the run."""
        if self._out is None:
            raise ConfigError("out: a Dumper needs the directory of its run, e.g. Dumper(model, out='run')")
        return self._out

    def close(self) -> None:
        """Remove the taps, flush pending records and log what is missing from the run.

        With ``strict`` backpressure, raises RecorderError if the recorder did not acknowledge everything.
        """
        lost = self._close()
        if lost and self.config.backpressure == "strict":
            raise RecorderError(f"{self.out} is incomplete: {lost}")

    def _close(self, interrupted: str | None = None) -> str | None:
        recording, self._recording = self._recording, None
        open_dumpers.closed(self)
        if recording is None:
            return None
        return recording.close(interrupted)

    def __enter__(self) -> "Dumper":
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close(kind.__name__)  # do not mask the caller's exception

    def __repr__(self) -> str:
        state = "closed" if self._recording is None else f"open, next step {self.next_step}"
        return f"<{type(self).__name__} {self.out}: {state}>"

    def _warn_unopened(self) -> None:
        if self._latest is None and not self._warned_unopened:
            self._warned_unopened = True
            open_dumpers.note_opened(self._unused)
            _log.warning(
                "tapscope: dump() of a Dumper that was never opened records nothing; use it in `with`, or open()"
            )

    @property
    def config(self) -> DumperConfig:
        """The active configuration; when closed, the configuration of the next run."""
        return self._recording.active.config if self._recording is not None else self._config

    @property
    def out(self) -> Path | None:
        """Directory of the run."""
        return (self._latest.run if self._latest is not None else None) or self._out

    @property
    def info(self) -> RankInfo:
        """This rank within its job."""
        recording = self._recording or self._latest
        return recording.info if recording is not None else self._identity.resolve()

    @property
    def http(self) -> str | None:
        """``HOST:PORT`` of the HTTP control server; None when HTTP is disabled."""
        return self._latest.http if self._latest is not None else None

    @property
    def comparison(self) -> LiveComparison | None:
        """The live comparison with the reference run (setting ``against``); None without a reference run."""
        recording = self._recording or self._latest
        return recording.collector.capturer.comparison if recording is not None else None

    def get_state(self) -> dict[str, Any]:
        """Return the current state as JSON types.

        Keys: config, open, run, rank, world_size, step (the next step's number), http, problem.
        """
        recording = self._recording
        client = recording.client if recording is not None else None
        return {
            "config": with_former_names(self.config.to_json()),
            "open": recording is not None,
            "run": None if recording is None or recording.run is None else str(recording.run),
            "rank": self.info.rank,
            "world_size": self.info.world_size,
            "step": self.next_step,
            "http": self.http,
            "problem": None if client is None else client.queue.dead,
        }

    # ---- changes ----------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, *, name: str = "") -> AttachHandle:
        """Attach another model; returns a handle with ``remove()``. ``name`` distinguishes several models.

        Raises ConfigError if ``model`` is not a module or is already attached, or if ``name`` is taken; RuleError if
        a rule matches no site.
        """
        attached = self._models.add(model, name)
        recording = self._recording
        if recording is not None:
            if unmatched := recording.active.refusal(self.config):
                self._models.remove(attached)
                raise RuleError(unmatched)
            recording.join(attached)
        return AttachHandle(self._models, attached)

    def configure(self, **changes: Any) -> None:
        """Change settings of this rank: immediately between steps, otherwise before the next step.

        Call it on every rank with the same arguments; HTTP control does that for you. Raises ConfigError or RuleError.
        """
        recording = self._recording
        changes = current_names(changes)
        if recording is None:
            self._config = self._config.updated(changes)
            return
        for name in changes:
            if hasattr(self._config, name) and name not in RUNTIME_FIELDS:
                fixed = ", ".join(RUNTIME_FIELDS)
                raise ConfigError(f"{name!r} is fixed when the dumper starts; at run time set {fixed}")
        recording.configure(changes)

    def reset(self, name: str | None = None) -> None:
        """Start a new run next to the current one and restart step numbers at 0; taps and tag context are kept.

        Without ``name``, the new run is named after the first one with the suffix ``-2``, ``-3``, ... Call it on every
        rank with the same argument. If the recorder has died, a new one is started. Raises RunExistsError if the run
        exists, StepError inside a step, RecorderError or ListenError if no recorder starts (which closes the dumper).
        """
        if name is not None and (not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name):
            raise ConfigError(
                f"reset: {name!r} must be a plain name without '/'; the run is created next to the current one"
            )
        recording = self._require("reset()")
        if recording.is_lost:
            self._continue_in(recording, recording.next_run(name))
        else:
            recording.reset(name)

    def reopen(self, run: str | Path) -> None:
        """Continue in the directory ``run`` with a new recorder and the same configuration; for hosts, between steps.

        Call it on every rank with the same argument. Raises StepError if the dumper was never open, and the errors of
        :meth:`open`; after such an error, recording is off until the next call.
        """
        if self._latest is None:
            raise StepError("reopen(): this Dumper was never open")
        self._continue_in(self._latest, Path(run))

    def _continue_in(self, lost: Recording, run: Path) -> None:
        """Continue in ``run`` with a new recorder and the current configuration of ``lost``."""
        config = lost.active.base
        if lost.info.rank == 0:
            require_free(run, force=False)
        self._close()
        recording = Recording(config, self._identity, self._models, RecorderClient(config))
        recording.take_over(lost, run)
        self._recording = self._latest = recording
        open_dumpers.opened(self)

    def release(self, past: int | None = None, reason: str = "requested by the program") -> ReleaseResult:
        """Write the last ``past`` steps of the flight recorder (None: all) and the rest of the open step to disk.

        Raises ConfigError if the flight recorder is off (``flight_recorder_steps``), or if a budget or low disk space
        has stopped capture.
        """
        return self._require("release()").collector.retention.release(past, reason)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the recorder has written everything captured so far; returns False after ``timeout_s`` seconds."""
        return self._require("flush()").collector.flush(timeout_s)

    # ---- state ------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The configuration epoch that this rank will apply at its next step."""
        return self._recording.active.epochs.latest if self._recording is not None else 0

    @property
    def armed(self) -> bool:
        """Whether any tap is in place or any value is being overwritten (``inject``)."""
        return self._models.armed or (self._recording is not None and self._recording.active.is_injecting)

    @property
    def tap_state(self) -> str:
        """Fingerprint of the taps in place and their capture levels; a CUDA graph is only valid for the taps it was
        captured with."""
        return "".join(attached.state for attached in self._models)

    def rehearsal(self) -> AbstractContextManager[None]:
        """Context manager for the warm-up before a CUDA graph capture: taps behave as during capture.

        The values are meaningless and are not recorded, but the taps' kernels are compiled.
        """
        return cuda_graphs.rehearsal()

    def all_taps(self) -> AbstractContextManager[Any]:
        """Context manager: place statistics taps on every input and output, without recording to the run.

        For hosts that compile kernels at startup, including those that a later configuration will launch. Also compiles
        the sketch kernels, which need no model. Call it between two steps.
        """
        self._require("all_taps()").active.compile_kernels(sketches=True)
        return self.capture_output(
            mode="all", keep="stats", rules=(), filter=None, triggers=(), inject=(), console=False
        )
