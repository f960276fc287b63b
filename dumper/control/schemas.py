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
    host: str | None = Field(description="its host")
    pid: int = Field(description="its process")
    step: int = Field(description="the step it is in; -1 before the first")
    epoch: int = Field(description="the configuration it has applied")
    capture_steps_left: int | None = Field(description="steps left of a capture")
    capture_left: int | None = Field(description="capture_steps_left", deprecated=True)
    records: int = Field(description="records written into this run")
    bytes: int = Field(description="payload bytes written into this run")
    total_records: int = Field(description="records written into all runs of this recorder")
    total_bytes: int = Field(description="payload bytes written into all runs of this recorder")
    status: Literal["connected", "silent", "closed", "died", "disk", "stopped"] = Field(
        description="its connection, or why it records nothing"
    )
    stopped: str | None = Field(description="why it stopped capturing: a trigger or a budget")
    idle_s: float = Field(description="seconds since its step last grew")


class StateAnswer(Strict):
    """State of the run, its configuration, and every rank that ever joined."""

    run: str = Field(description="directory of the run")
    epoch: int = Field(description="number of the configuration; grows with each change")
    config: dict[str, Any] = Field(description="the configuration")
    world_size: int = Field(description="number of ranks of the job")
    ranks: list[RankState] = Field(description="every rank that ever joined")
    hints: list[str] = Field(description="what suggests that not all ranks make the same calls")
    live: str = Field(description="address of the live record lines")
    change_under_way: bool = Field(description="whether ranks still apply a change")
    capture_under_way: str | None = Field(description="the capture in progress")
    write_s: dict[str, float] = Field(description="rank -> seconds spent in writing")


class LiveDivergence(BaseModel):
    """The first site of a step that differs from the reference by more than rounding explains."""

    step: int = Field(description="step in which they differ")
    rank: int = Field(description="rank that compared")
    site: str = Field(description="the site")
    test: Literal["median_row", "worst_row", "scale", "tolerance", "nonfinite", "unequal"] = Field(
        description="the test that failed"
    )
    error: float | None = Field(description="relative error of a row, or the number of elements")
    limit: float | None = Field(description="the largest error that passes")
    request: str | None = Field(None, description="request of the worst token row")
    position: int | None = Field(None, description="position of that row in its request")
    last_step: int = Field(description="the last step that diverged")


class RankVerdict(Strict):
    """One rank's comparison with the reference run."""

    rank: int = Field(description="global rank")
    step: int = Field(description="its last step")
    num_compared: int = Field(description="tensors compared")
    num_not_compared: int = Field(description="tensors without a counterpart, or of other shapes or tokens")
    num_diverged_steps: int = Field(description="steps with a divergence")
    first_divergence: LiveDivergence | None = Field(description="of its earliest step")


class VerdictAnswer(Strict):
    """The comparison of all ranks with the reference run."""

    run: str = Field(description="directory of the run")
    against: str = Field(description="the reference run")
    verdict: Literal["differs", "agrees", "unknown"] = Field(description="`unknown` while nothing was compared")
    first_divergence: LiveDivergence | None = Field(description="of the earliest step")
    ranks: list[RankVerdict] = Field(description="the comparison of each rank")


class ChangeAnswer(Strict):
    """A change that every rank accepted."""

    epoch: int = Field(description="number of the configuration; grows with each change")
    config: dict[str, Any] = Field(description="the new configuration")
    ranks: dict[str, int | str] = Field(
        description="rank -> step from which it applies, `pending` where it is idle, or why it was not asked"
    )
    unmatched: dict[str, list[str]] | None = Field(None, description="rank -> rules that match no site of its model")
    ended: str | None = Field(None, description="the capture that this change ended")
    warning: str | None = Field(None, description="why nothing would be captured: the disk of the run is almost full")


class ReleaseAnswer(Strict):
    """Result of writing the flight recorders' steps."""

    past: int = Field(description="number of steps that were asked for")
    ranks: dict[str, dict[str, int] | str] = Field(description="rank -> steps and bytes, or why there are none")


class ResetAnswer(Strict):
    """The new run."""

    epoch: int = Field(description="number of the configuration; grows with each change")
    run: str = Field(description="directory of the new run")
    ranks: dict[str, int | str] = Field(description="rank -> step from which it applies, or why it was not asked")


class Module(Strict):
    """A module that can be tapped."""

    path: str = Field(description="name of the module")
    cls: str = Field(alias="class", description="its class")
    ports: list[str] = Field(description="its inputs and outputs, such as in[0] and out")


class SitesAnswer(Strict):
    """Modules and their ports; a site is `PATH:PORT`."""

    num_sites: int = Field(description="number of sites")
    modules: list[Module] = Field(description="modules, in the order of the model")


class RankDump(Strict):
    """One rank, in SGLang's format."""

    config: dict[str, Any] = Field(description="the configuration")
    dump_index: int = Field(description="records written into this run")
    step: int = Field(description="the step it is in")


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
    "ConfigureBody", __base__=Strict, __doc__="What is to change; the rest stays.", **_runtime
)
CaptureBody: type[BaseModel] = create_model(
    "CaptureBody",
    __base__=Strict,
    __doc__="What to record of the next steps (default: everything in full), or which past ones to write.",
    **_runtime,
    steps=(int, Field(1, ge=1, description="number of steps; then the previous configuration is restored")),
    past=(
        int | None,
        Field(None, ge=1, description="write the flight recorder's last N steps; excludes other fields"),
    ),
    replace=(bool, Field(False, description="replace a capture in progress")),
)
