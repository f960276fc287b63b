"""Options of a comparison: the records to compare, and the standards to judge them by."""

import math
import warnings
from pathlib import Path

from msgspec import Struct, field, structs

from tapscope.comparator.options import fail_on
from tapscope.comparator.options.map_file import DimsEntry, MapFile, RuleEntry
from tapscope.comparator.options.overrides import MeshEntry
from tapscope.core.errors import ConfigError

MAX_JOBS = 256
MARGIN = 3.0
"""Default margin. Two samples of the same rounding agree within about 20 % in their medians and a factor of 3 in their
worst rows."""

_JUDGING = frozenset(
    ("rtol", "atol", "margin", "rules", "allow_differ", "noise_run", "explain_floor", "fail_on", "allow_partial")
)
"""Options that affect how measurements are judged, but not the measurements."""


class CompareOptions(Struct, frozen=True, kw_only=True):
    """Options of a comparison; selections apply to both runs. Raises ConfigError for invalid values."""

    sites: tuple[str, ...] = ()
    """Globs; a pair is compared if either run's site matches any of them. Empty selects every site."""
    skip: tuple[str, ...] = ()
    """Globs of sites to exclude."""
    layers: frozenset[int] | None = None
    """Layers to compare; if given, sites outside of layers are excluded."""
    steps: frozenset[int] | None = None
    """Steps to compare, in the baseline's numbering."""
    shift_steps: int = 0
    """Target step number minus baseline step number of corresponding steps."""
    concat_steps: bool = False
    """Concatenate the steps of each site, for runs that do not record the token rows of their steps."""
    ranks: frozenset[int] | None = None
    """Ranks whose records are compared."""
    rtol: float | None = None
    """With ``atol``: every element must satisfy abs(target - baseline) <= atol + rtol * abs(baseline)."""
    atol: float | None = None
    """See ``rtol``; giving either one replaces the noise floor, and the other one defaults to 0."""
    mapping: MapFile = field(default_factory=MapFile)
    """Names, fused tensors, dims and rules of the user's map files, see :func:`.map_file.read_maps`."""
    strip_prefix: tuple[str, ...] = ()
    """``[baseline:|target:]PREFIX``: prefix to remove from site names before matching."""
    dims: tuple[DimsEntry, ...] = ()
    """Dims that replace the recorded ones. They precede the dims of the map files; the first entry that matches a site
    applies."""
    mesh: tuple[MeshEntry, ...] = ()
    """Meshes for runs that do not record one."""
    noise_run: Path | None = None
    """A repeat of the baseline whose distance to the baseline is the noise floor; None: the rounding model."""
    floor: Path | None = None
    """Deprecated alias of ``noise_run``."""
    margin: float = MARGIN
    """The noise floor as a multiple of the distance between noise run and baseline."""
    rules: tuple[RuleEntry, ...] = ()
    """Conditions that replace the floor for matching sites. They precede the rules of the map files."""
    allow_differ: tuple[str, ...] = ()
    """Globs of sites that may differ: they are compared and reported, but do not fail the comparison."""
    allow_missing: tuple[str, ...] = ()
    """Globs of sites, or of records of a site, that one run may lack: reported, but not counted as partial data."""
    verify: bool = False
    """Read every payload and check it against its recorded hash first; otherwise, equal hashes count as equal
    values."""
    tokenizer: Path | None = None
    """A ``tokenizer.json``, or a directory with one, that decodes the tokens at divergences; by default, the tokenizer
    of the local checkpoint that either run names."""
    detail: bool = False
    """Measure unequal sites in detail: ULPs, percentiles, histogram, channels, agreement of logits and routers."""
    explain_floor: tuple[str, ...] = ()
    """Globs of sites whose findings list the effects that make up their noise floor."""
    disabled: frozenset[str] = frozenset()
    """Names of noise floor effects and detectors to disable, to determine the contribution of each."""
    allow_partial: bool = False
    """Let a comparison of partial data pass if everything that could be compared agrees."""

    jobs: int = 1
    """Number of processes that measure the pairs; the report does not depend on it. 1: this process, with threads for
    large tensors."""
    ray: str | None = None
    """Address of a Ray cluster whose tasks measure the pairs, in the form that ``ray.init`` accepts; the report does
    not depend on it."""

    fail_on: frozenset[str] = fail_on.DEFAULT
    """Conditions that make the exit code 1, see :data:`.fail_on.CONDITIONS`."""

    def __post_init__(self) -> None:
        for name in ("sites", "skip", "strip_prefix", "allow_differ", "allow_missing", "explain_floor"):
            if isinstance(value := getattr(self, name), str):
                raise ConfigError(f"{name}={value!r}: must be a tuple of strings, e.g. ({value!r},)")
        for name in ("layers", "steps", "ranks"):
            if isinstance(value := getattr(self, name), int | str):
                raise ConfigError(f"{name}={value!r}: must be a set of integers, e.g. {{0, 1}}")
        if unknown := sorted(self.fail_on - fail_on.CONDITIONS.keys()):
            raise ConfigError(f"unknown condition {unknown[0]!r} in fail_on; use {', '.join(fail_on.CONDITIONS)}")
        if self.floor is not None:
            warnings.warn("'floor' is deprecated, use 'noise_run'", FutureWarning, stacklevel=3)
            structs.force_setattr(self, "noise_run", self.noise_run or self.floor)
            structs.force_setattr(self, "floor", None)
        if not 1.0 <= self.margin < math.inf:
            raise ConfigError(f"invalid margin {self.margin}: expected a finite number ≥ 1")
        if not 1 <= self.jobs <= MAX_JOBS:
            raise ConfigError(f"invalid number of jobs {self.jobs}: expected 1 to {MAX_JOBS}")
        if self.ray is not None and self.jobs > 1:
            raise ConfigError("jobs and ray exclude each other: Ray runs a task on each CPU of its cluster")
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not (0.0 <= value < math.inf):
                raise ConfigError(f"invalid tolerance {name}={value}: expected a finite number ≥ 0")

    def measures_as(self, other: "CompareOptions") -> bool:
        """Return whether both options select and measure the same values, so that measurements of one can be judged by
        the other."""
        names = (name for name in self.__struct_fields__ if name not in _JUDGING)
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def tolerance(self) -> tuple[float, float] | None:
        """(atol, rtol) if the user gave either, otherwise None: the noise floor decides."""
        if self.rtol is None and self.atol is None:
            return None
        return self.atol or 0.0, self.rtol or 0.0

    def steps_of(self, side: int) -> frozenset[int] | None:
        """Return the selected steps in the numbering of the baseline (``side`` 0) or the target (1)."""
        shift = self.shift_steps if side else 0
        return None if self.steps is None else frozenset(step + shift for step in self.steps)
