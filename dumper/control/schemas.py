"""Schemas of the control routes' request bodies and responses, for the OpenAPI description.

The models only describe the bodies. :class:`~tapscope.dumper.config.DumperConfig` and the recorder's control handler
validate them, because these also serve callers without HTTP.
"""

import types
import typing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from tapscope.core.field_docs import field_docs
from tapscope.dumper.config import DEPRECATED, RUNTIME_FIELDS, DumperConfig


class Strict(BaseModel):
    """Base model that forbids additional members."""

    model_config = ConfigDict(extra="forbid")


class ErrorAnswer(Strict):
    """An error message, with a suggestion where possible."""

    error: str
    ranks: dict[str, Any] | None = Field(None, description="rank -> its answer, if ranks were asked")
    past: int | None = None


class RankState(BaseModel):
    """State of one rank. Additional members are counters of its pipeline (``queue_bytes``, ``dropped``, ...)."""

    rank: int = Field(description="global rank")
    host: str | None = Field(description="host name")
    pid: int = Field(description="process id")
    step: int = Field(description="current step; -1 before the first")
    epoch: int = Field(description="configuration epoch applied by the rank")
    capture_steps_left: int | None = Field(description="steps left of a capture")
    capture_left: int | None = Field(description="capture_steps_left", deprecated=True)
    records: int = Field(description="records written into this run")
    bytes: int = Field(description="payload bytes written into this run")
    total_records: int = Field(description="records written into all runs of this recorder")
    total_bytes: int = Field(description="payload bytes written into all runs of this recorder")
    status: Literal["connected", "silent", "closed", "died", "disk", "stopped"] = Field(
        description="connection status, or the reason why the rank does not record"
    )
    stopped: str | None = Field(description="the trigger or budget that stopped capture; null while capturing")
    idle_s: float = Field(description="seconds since the step number last increased")


class StateAnswer(Strict):
    """State of the run, its configuration, and every rank that ever joined."""

    run: str = Field(description="directory of the run")
    epoch: int = Field(description="configuration epoch, incremented by each change")
    config: dict[str, Any] = Field(description="the configuration")
    world_size: int = Field(description="number of ranks of the job")
    ranks: list[RankState] = Field(description="every rank that ever joined")
    hints: list[str] = Field(description="signs that the ranks do not all make the same calls")
    live: str = Field(description="address of the live record lines")
    change_under_way: bool = Field(description="whether a change is still being applied")
    capture_under_way: str | None = Field(description="the capture in progress")
    write_s: dict[str, float] = Field(description="rank -> seconds spent writing")


class LiveDivergence(BaseModel):
    """The first site of a step that differs from the reference by more than rounding explains."""

    step: int = Field(description="step of the divergence")
    rank: int = Field(description="rank that detected the divergence")
    site: str = Field(description="site of the divergence")
    test: Literal["median_row", "worst_row", "scale", "tolerance", "nonfinite", "unequal"] = Field(
        description="the test that failed"
    )
    error: float | None = Field(description="relative error of a row, or the number of elements")
    limit: float | None = Field(description="largest error that passes the test")
    request: str | None = Field(None, description="request of the worst token row")
    position: int | None = Field(None, description="position of that row in its request")
    last_step: int = Field(description="the last step that diverged")


class RankVerdict(Strict):
    """One rank's comparison with the reference run."""

    rank: int = Field(description="global rank")
    step: int = Field(description="last step of the rank")
    num_compared: int = Field(description="tensors compared")
    num_not_compared: int = Field(description="tensors without a counterpart of the same shape and tokens")
    num_diverged_steps: int = Field(description="steps with a divergence")
    first_divergence: LiveDivergence | None = Field(description="divergence in the rank's earliest diverged step")


class VerdictAnswer(Strict):
    """The comparison of all ranks with the reference run."""

    run: str = Field(description="directory of the run")
    against: str = Field(description="the reference run")
    verdict: Literal["differs", "agrees", "unknown"] = Field(description="`unknown` until a tensor has been compared")
    first_divergence: LiveDivergence | None = Field(description="divergence in the earliest diverged step of all ranks")
    ranks: list[RankVerdict] = Field(description="the comparison of each rank")


class ChangeAnswer(Strict):
    """A change that every rank accepted."""

    epoch: int = Field(description="configuration epoch, incremented by each change")
    config: dict[str, Any] = Field(description="the new configuration")
    ranks: dict[str, int | str] = Field(
        description="rank -> first step with the change, `pending` if the rank is idle, or why the rank was not asked"
    )
    unmatched: dict[str, list[str]] | None = Field(None, description="rank -> rules that match no site of its model")
    ended: str | None = Field(None, description="the capture that this change ended")
    warning: str | None = Field(None, description="why nothing would be captured: the disk of the run is almost full")


class ReleaseAnswer(Strict):
    """Result of writing the flight recorders' steps."""

    past: int = Field(description="number of steps requested")
    ranks: dict[str, dict[str, int] | str] = Field(
        description="rank -> steps and bytes written, or why none were written"
    )


class ResetAnswer(Strict):
    """The new run."""

    epoch: int = Field(description="configuration epoch, incremented by each change")
    run: str = Field(description="directory of the new run")
    ranks: dict[str, int | str] = Field(
        description="rank -> step from which the reset applies, or why the rank was not asked"
    )


class Module(Strict):
    """A module that can be tapped."""

    path: str = Field(description="path of the module")
    cls: str = Field(alias="class", description="class name of the module")
    ports: list[str] = Field(description="inputs and outputs of the module, such as in[0] and out")


class SitesAnswer(Strict):
    """Modules and their ports; a site is `PATH:PORT`."""

    num_sites: int = Field(description="number of sites")
    modules: list[Module] = Field(description="modules, in the order of the model")


class RankDump(Strict):
    """One rank, in SGLang's format."""

    config: dict[str, Any] = Field(description="the configuration")
    dump_index: int = Field(description="records written into this run")
    step: int = Field(description="current step")


class ResetBody(Strict):
    """All members are optional."""

    run: str | None = Field(
        None, description="a plain name for the new run, created next to the current one", examples=["second"]
    )


def _documented(names: tuple[str, ...]) -> dict[str, Any]:
    hints, docs = typing.get_type_hints(DumperConfig), field_docs(DumperConfig)
    fields = {name: (_json_type(hints[name]) | None, Field(None, description=docs.get(name))) for name in names}
    former = {old: new for old, new in DEPRECATED.items() if new in names}
    return fields | {
        old: (_json_type(hints[new]) | None, Field(None, description=f"former name of {new}", deprecated=True))
        for old, new in former.items()
    }


def _json_type(hint: Any) -> Any:
    """Return the JSON counterpart of a type hint: tuples become lists of strings or objects, other types are kept."""
    if typing.get_origin(hint) is tuple:
        return list[str | dict[str, Any]]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.Union[tuple(_json_type(each) for each in typing.get_args(hint))]  # noqa: UP007 - of a tuple
    return hint


_runtime = _documented(RUNTIME_FIELDS)
ConfigureBody: type[BaseModel] = create_model(
    "ConfigureBody", __base__=Strict, __doc__="The settings to change; all others are kept.", **_runtime
)
CaptureBody: type[BaseModel] = create_model(
    "CaptureBody",
    __base__=Strict,
    __doc__="Settings for the next steps (default: keep everything in full), or a number of past steps to write.",
    **_runtime,
    steps=(int, Field(1, ge=1, description="number of steps; then the previous configuration is restored")),
    past=(
        int | None,
        Field(None, ge=1, description="write the flight recorder's last N steps; excludes other fields"),
    ),
    replace=(bool, Field(False, description="replace a capture in progress")),
)
