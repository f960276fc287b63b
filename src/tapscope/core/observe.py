"""The protocol between a host (the engine, a training loop) and an observer (the dumper).

The host calls a :class:`StepObserver` around every step. A module may describe its ports through optional attributes,
read by observers:

``tap_dims: dict[str, str]``
    port -> dims annotation, e.g. ``{"in[input]": "t h[tp]", "out": "t h"}``.
``tap_ports: tuple[str, ...]``
    the kinds of port to tap, a subset of ``("in", "out")``; an identity module that only names a value has
    ``("out",)``.
``tap_rows: dict[str, str]``
    port -> name of a row set in :attr:`StepInfo.row_sets`, for ports that hold only some of the step's rows.
``tap_is_optional: bool``
    True if the module may legitimately never be called, e.g. the LoRA matrices of a layer without an adapter.
``tap_name: str``
    the output of this module is recorded as the site ``tap[NAME]`` of the parent, for a value that no module returns.
``tap_values_final: bool``
    on the root: values seen by hooks are not modified in place later in the same call. An observer may then read all
    values in one pass when the call ends.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct, field, structs


class RowSpan(Struct, frozen=True):
    """A span of consecutive token rows of one request."""

    request: str
    """Request id; equal ids are matched between runs."""
    position: int
    """Position of the first row in the request, from 0."""
    count: int
    """Number of rows; position and slot both increase by 1 per row."""
    visit: int
    """How many times these positions were computed before (preemption, recompute)."""
    slot: int
    """Index of the first row in the flattened token grid."""
    branch: int = 0
    """For a tree draft, in draft steps and in the verify step: a hash of the tokens on the path to the row. It
    distinguishes siblings at the same position. 0 for any other row."""


def row_label(request: str, position: int | str, branch: int = 0) -> str:
    """Format a token row: ``0:5`` for position 5 of request 0; ``0:5/2f19ac03`` in a draft tree, see
    :attr:`RowSpan.branch`."""
    return f"{request}:{position}/{branch:08x}" if branch else f"{request}:{position}"


def again_words(visit: int, branch: int) -> str:
    """Format the suffix of a row label: ``, visit 1`` if not the first visit, ``, branch 2f19ac03`` in a draft tree."""
    return (f", visit {visit}" if visit else "") + (f", branch {branch:08x}" if branch else "")


class StepInfo(Struct, frozen=True, kw_only=True):
    """Description of one step; equal on all ranks of a tensor-parallel group."""

    step: int
    """Scheduler step or optimizer iteration, from 0, never reset within a run."""
    phase: str = "forward"
    """Open string: ``prefill``, ``decode``, ``mixed``, ``verify`` (draft tokens), ``draft``, ``train``, ..."""
    grid: tuple[int, ...] = ()
    """Shape of the token axes: ``(tokens,)`` packed or ``(batch, sequence)`` padded; empty if unknown."""
    rows: tuple[RowSpan, ...] = ()
    """The valid rows, without padding, in slot order."""
    token_ids: Sequence[int] = ()
    """Token id of every valid row, in the order of :attr:`rows`; empty if unknown."""
    row_sets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Named subsets of slots, e.g. ``{"logits": (6, 11)}``: the rows whose logits are computed."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Request id -> seed, for requests whose next token is drawn at random (not greedily) in this step."""
    micro: int = 0
    """Microbatch of the firings in this step; an observer that groups several calls into one step may override it."""
    drafts: Mapping[str, int] = field(default_factory=dict)
    """Request id -> number of its last rows that are draft tokens, verified in this step."""
    kind: str | None = None
    """``warmup`` or ``dummy`` for a step whose values are meaningless; None for an ordinary step."""
    epoch: int | None = None
    """Configuration epoch that every rank must apply before this step; None lets each observer decide."""

    num_padding: int = 0
    """Number of padding rows after the rows of the grid in packed tensors; observers drop them.

    Tensors with one row per (token, expert) pair (``pair``) end with padding rows too, as many per padding row as per
    token.
    """

    adapters: Mapping[str, str] = field(default_factory=dict)
    """Request id -> name of the LoRA adapter, for requests that use one."""

    asked: Mapping[str, str] = field(default_factory=dict)
    """Request id -> ``stats`` or ``full``: requests that ask for capture of their own rows, independent of the
    rules."""

    def __repr__(self) -> str:
        requests = len({run.request for run in self.rows})
        about = f", {self.num_rows:,} rows of {requests:,} requests" if self.rows else ""
        return f"<StepInfo {self.step} {self.phase}{about}>"

    @property
    def num_rows(self) -> int:
        """Number of valid rows."""
        return sum(run.count for run in self.rows)


DRAFT_PHASE = "draft"
"""Phase of the steps of a draft model."""


def with_draft_names(info: StepInfo) -> StepInfo:
    """Return the step; in a step of a draft model, requests are renamed to ``draft/NAME``, separate from the
    target's."""
    if info.phase != DRAFT_PHASE:
        return info
    return structs.replace(info, rows=tuple(structs.replace(r, request=f"draft/{r.request}") for r in info.rows))


class ArmedState(Protocol):
    """Observer state that the host reads before each step."""

    @property
    def epoch(self) -> int:
        """Configuration epoch that rank 0 applies from the next step on."""
        ...

    @property
    def armed(self) -> bool:
        """True if any tap is installed; otherwise the host may replay a CUDA graph without taps."""
        ...


class StepObserver(ArmedState, Protocol):
    """Observer that the host calls on every rank, in the forward thread."""

    def before_step(self, info: StepInfo) -> None:
        """Begin a step; implementations apply ``info.epoch`` first."""
        ...

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """End the step; ``metrics`` maps names to values for the whole step."""
        ...

    def close(self) -> None:
        """Flush and release the model; called when the host shuts down."""
        ...


@runtime_checkable
class GraphObserver(Protocol):
    """An observer whose taps record inside CUDA graphs and detect replays by themselves."""

    @property
    def tap_state(self) -> str:
        """Identifier of the installed taps and their capture levels; a change requires a new graph capture."""
        ...

    def rehearsal(self) -> AbstractContextManager[None]:
        """Return a context in which taps do not record: the host warms up the next graph to capture."""
        ...

    def all_taps(self) -> AbstractContextManager[Any]:
        """Return a context in which every tap is installed, regardless of the configuration, and nothing is recorded.

        Used by a host that compiles the kernels of tapped steps at startup.
        """
        ...


@runtime_checkable
class ModelObserver(Protocol):
    """An observer that can observe further models of the host, such as a draft model."""

    def attach(self, model: Any, *, name: str = "") -> Any:
        """Observe ``model`` as well; ``name`` distinguishes its sites."""
        ...


@runtime_checkable
class DraftObserver(Protocol):
    """An observer that records which draft tokens of a step were accepted."""

    def accept_drafts(self, accepted: Mapping[str, int], branches: Mapping[str, Sequence[int]]) -> None:
        """Record the accepted drafts; called before ``after_step``.

        ``accepted``: request id -> number of accepted :attr:`StepInfo.drafts`. ``branches``: request id -> indices,
        from 0, of the accepted drafts, for requests with a draft tree.
        """
        ...


@runtime_checkable
class StepsAheadObserver(Protocol):
    """An observer that accepts a step before its token ids are known, so that the host can launch it early."""

    def before_step_ahead(self, info: StepInfo) -> Callable[[StepInfo], None]:
        """Like :meth:`StepObserver.before_step`, with a preliminary ``info`` that lacks token ids.

        The host calls the returned function once with the complete ``info``. It may have fewer rows: requests that have
        ended in the meantime are removed.
        """
        ...


@runtime_checkable
class RunReopener(Protocol):
    """An observer that can open another run after the recorder has ended."""

    def reopen(self, run: str) -> None:
        """Continue in the directory ``run``; called on every rank between the same two steps. Raises TapscopeError."""
        ...


class RankInfo(Struct, frozen=True, kw_only=True):
    """The position of this process within the job."""

    rank: int = 0
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axis -> size, e.g. ``{"tp": 2}``; axes of size 1 may be omitted."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """Axis -> this rank's coordinate, e.g. ``{"tp": 1}``."""
    own_steps: tuple[str, ...] = ()
    """Axes along which ranks step independently (serving replicas): step numbers of different ranks do not
    correspond."""
    framework: str = "torch"
    model: str = ""
    """Name or path of the model, for the manifest."""
    dtype: str = ""
    kv_cache_dtype: str = ""
    """Dtype of the KV cache, if the host has one: keys and values may be rounded to this dtype."""
    model_config: Mapping[str, int | float] = field(default_factory=dict)
    """Hyperparameters of the whole model under Hugging Face names, e.g. ``num_key_value_heads``."""


ObserverFactory = Callable[[Any, RankInfo], StepObserver]
"""Factory called once on each rank with the built model; must be picklable for spawned ranks."""
