"""The protocol between a host (the engine, a training loop) and an observer (the dumper).

The host calls a :class:`StepObserver` around every step; a module may say what its ports look like through
optional attributes, read by observers:

``tap_dims: dict[str, str]``
    port -> dims annotation, e.g. ``{"in[input]": "t h[tp]", "out": "t h"}``.
``tap_ports: tuple[str, ...]``
    the kinds of port worth a tap, of ``("in", "out")``; an identity that only names a value has ``("out",)``.
``tap_rows: dict[str, str]``
    port -> name of a row set in :attr:`StepInfo.row_sets`, for ports that hold only some of the step's rows.
``tap_is_optional: bool``
    whether it is normal that it is never called, as the matrices of an adapter that does not adapt this layer.
``tap_name: str``
    its output is the site ``tap[NAME]`` of its parent module: a value that no module returns.
``tap_values_final: bool``
    on the root: no value that a hook sees is written to later in the same call. An observer may then read values
    together, when the call ends.
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
    """Position of the first row in its request, from 0."""
    count: int
    """Number of rows; positions and slots both go up by one."""
    visit: int
    """How many times these positions were computed before (preemption, recompute)."""
    slot: int
    """Index of the first row in the flattened token grid."""
    branch: int = 0
    """For a draft in a tree, in steps of the draft model and in the one that verifies it, which has siblings at its
    position: a hash of the tokens on the way to it. 0 for any other row."""


def row_label(request: str, position: int | str, branch: int = 0) -> str:
    """``0:5`` for position 5 of request 0; ``0:5/2f19ac03`` in a tree of drafts, see :attr:`RowSpan.branch`."""
    return f"{request}:{position}/{branch:08x}" if branch else f"{request}:{position}"


def again_words(visit: int, branch: int) -> str:
    """``, visit 1`` unless it is the first, and ``, branch 2f19ac03`` in a tree of drafts."""
    return (f", visit {visit}" if visit else "") + (f", branch {branch:08x}" if branch else "")


class StepInfo(Struct, frozen=True, kw_only=True):
    """The description of one step; equal on all ranks of a tensor-parallel group."""

    step: int
    """Scheduler step or optimiser iteration, from 0, never reset within a run."""
    phase: str = "forward"
    """Open string: ``prefill``, ``decode``, ``mixed``, ``verify`` (draft tokens), ``draft``, ``train``, ..."""
    grid: tuple[int, ...] = ()
    """Shape of the token axes: ``(tokens,)`` packed or ``(batch, sequence)`` padded; empty when unknown."""
    rows: tuple[RowSpan, ...] = ()
    """The valid rows, padding left out, in slot order."""
    token_ids: Sequence[int] = ()
    """Token id of every valid row, in the order of :attr:`rows`; empty when unknown."""
    row_sets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Named subsets of slots, e.g. ``{"logits": (6, 11)}``: the rows whose logits are computed."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Request id -> seed, of the requests whose next token is drawn at random in this step."""
    micro: int = 0
    """Microbatch of what fires in the step; observers that group several calls in a step may override it."""
    drafts: Mapping[str, int] = field(default_factory=dict)
    """Request id -> how many of its last rows are draft tokens that the step verifies."""
    kind: str | None = None
    """``warmup`` or ``dummy`` for a step whose values are meaningless; None for an ordinary step."""
    epoch: int | None = None
    """Configuration epoch every rank must apply before this step; None lets each observer decide."""

    num_padding: int = 0
    """Padding rows after those of the grid in packed tensors; observers omit them. So are the last rows of a tensor of
    pairs of token and expert (``pair``), as many for each padding row as for each token."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """Request id -> name of its LoRA adapter, of the requests that have one."""

    asked: Mapping[str, str] = field(default_factory=dict)
    """Request id -> ``stats`` or ``full``: requests whose own rows are captured, independent of the rules."""

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
    """The step; if it is of a draft model, its requests are ``draft/NAME``: its rows are not those of the target."""
    if info.phase != DRAFT_PHASE:
        return info
    return structs.replace(info, rows=tuple(structs.replace(r, request=f"draft/{r.request}") for r in info.rows))


class ArmedState(Protocol):
    """State of the observer that the host reads before each step."""

    @property
    def epoch(self) -> int:
        """Configuration epoch that rank 0 applies from its next step on."""
        ...

    @property
    def armed(self) -> bool:
        """Whether any tap is in place; if not, a host may run a graph without taps."""
        ...


class StepObserver(ArmedState, Protocol):
    """Called by the host on every rank, in its forward thread."""

    def before_step(self, info: StepInfo) -> None:
        """A step begins; apply ``info.epoch`` first."""
        ...

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """The step is over; ``metrics`` are its named numbers."""
        ...

    def close(self) -> None:
        """The host ends; flush and release the model."""
        ...


@runtime_checkable
class GraphObserver(Protocol):
    """An observer whose taps record inside CUDA graphs and detect replays by themselves."""

    @property
    def tap_state(self) -> str:
        """Identifies the taps in place and what they keep; a graph captured with other taps must be captured again."""
        ...

    def rehearsal(self) -> AbstractContextManager[None]:
        """Taps inside do not record: the host warms up the next graph to capture."""
        ...

    def all_taps(self) -> AbstractContextManager[Any]:
        """Every tap is in place inside, whatever the configuration, and nothing is recorded: for a host that compiles
        the kernels of tapped steps when it starts."""
        ...


@runtime_checkable
class ModelObserver(Protocol):
    """An observer that can watch further models of the host, such as a draft model."""

    def attach(self, model: Any, *, name: str = "") -> Any:
        """Watch ``model`` too; its sites are distinguished by ``name``."""
        ...


@runtime_checkable
class DraftObserver(Protocol):
    """An observer that records which draft tokens of a step were accepted."""

    def accept_drafts(self, accepted: Mapping[str, int], branches: Mapping[str, Sequence[int]]) -> None:
        """Called before ``after_step``: request id -> how many of its :attr:`StepInfo.drafts` were accepted.

        ``branches``: request id -> which ones, from 0, of the requests whose drafts were a tree.
        """
        ...


@runtime_checkable
class StepsAheadObserver(Protocol):
    """An observer that accepts a step before its tokens are known, so that a host may launch it while they are
    computed."""

    def before_step_ahead(self, info: StepInfo) -> Callable[[StepInfo], None]:
        """As :meth:`StepObserver.before_step`, with a preliminary ``info`` that lacks token ids.

        The host calls the result once with the whole one, whose rows may be fewer: a request that has ended has none.
        """
        ...


@runtime_checkable
class RunReopener(Protocol):
    """An observer that can open another run after its recorder has ended."""

    def reopen(self, run: str) -> None:
        """Continue in the directory ``run``; called on every rank between the same two steps. Raises TapscopeError."""
        ...


class RankInfo(Struct, frozen=True, kw_only=True):
    """The rank of this process within the job."""

    rank: int = 0
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axis -> size, e.g. ``{"tp": 2}``; axes of size 1 may be left out."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """Axis -> this rank's coordinate, e.g. ``{"tp": 1}``."""
    own_steps: tuple[str, ...] = ()
    """Axes along which ranks step independently (serving replicas): their step numbers do not correspond."""
    framework: str = "torch"
    model: str = ""
    """Name or path of the model, for the manifest."""
    dtype: str = ""
    kv_cache_dtype: str = ""
    """Type of the KV cache if the host has one: keys and values may be rounded to it."""
    model_config: Mapping[str, int | float] = field(default_factory=dict)
    """Hyperparameters of the whole model under Hugging Face's names, e.g. ``num_key_value_heads``."""


ObserverFactory = Callable[[Any, RankInfo], StepObserver]
"""Called once on each rank with the built model; must be picklable for spawned ranks."""
