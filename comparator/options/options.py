"""What a comparison is asked for: which records, and by which tolerance."""

import math
import warnings
from pathlib import Path

from msgspec import Struct, field, structs

from tapscope.comparator.options.map_file import DimsEntry, MapFile, RuleEntry
from tapscope.comparator.options.overrides import MeshEntry
from tapscope.core.errors import ConfigError

MARGIN = 3.0
"""Two draws of the same rounding: their medians agree within some 20 %, their worst rows within a factor of 2 to 3."""


class CompareOptions(Struct, frozen=True, kw_only=True):
    """Selections apply to both runs. Raises ConfigError for a tolerance that cannot be meant."""

    sites: tuple[str, ...] = ()
    """Globs; a pair is compared when either run's site matches any of them. Empty selects every site."""
    skip: tuple[str, ...] = ()
    """Globs of sites to leave out."""
    layers: frozenset[int] | None = None
    """Layers to compare; sites outside every layer are left out then."""
    steps: frozenset[int] | None = None
    """Steps of either run whose records are compared."""
    shift_steps: int = 0
    """How much higher the target's step numbers are; ``steps`` are the baseline's then."""
    concat_steps: bool = False
    """Lay the steps of each site one behind the other, where the runs do not say which token rows they hold."""
    ranks: frozenset[int] | None = None
    """Ranks whose records are compared."""
    rtol: float | None = None
    """With ``atol``: every element must obey abs(target - baseline) <= atol + rtol * abs(baseline)."""
    atol: float | None = None
    """See ``rtol``; giving either replaces the noise floor, and the other one is then 0."""
    mapping: MapFile = field(default_factory=MapFile)
    """What the user's map files say of names, fused tensors, dims and rules, see :func:`.mapfile.read_maps`."""
    strip_prefix: tuple[str, ...] = ()
    """``[baseline:|target:]PREFIX``: removed from the names of sites before they are matched."""
    dims: tuple[DimsEntry, ...] = ()
    """Dims that count in place of the recorded ones, before those of the map files; the first that matches a site."""
    mesh: tuple[MeshEntry, ...] = ()
    """Meshes of runs that do not say their own."""
    noise_run: Path | None = None
    """A second run of the baseline, whose distance to it is the noise floor; None: a model of rounding."""
    floor: Path | None = None
    """Deprecated alias of ``noise_run``."""
    margin: float = MARGIN
    """How many times the noise run's distance counts as rounding."""
    rules: tuple[RuleEntry, ...] = ()
    """Conditions that sites must obey instead of the floor; those of the map files come behind these."""
    allow_differ: tuple[str, ...] = ()
    """Globs of sites that may differ: they are compared and reported, and do not count against the target."""
    allow_missing: tuple[str, ...] = ()
    """Globs of sites, or of records of a site, that one run may lack: reported, and the data are not partial for it."""
    verify: bool = False
    """Read every payload and check it against its recorded hash first; else equal hashes are taken for equal values."""
    detail: bool = False
    """Measure unequal sites once more: ULPs, percentiles, histogram, channels, agreement of logits and routers."""
    explain_floor: tuple[str, ...] = ()
    """Globs of sites whose findings list the effects that made their noise floor."""
    disabled: frozenset[str] = frozenset()
    """Names of effects of the noise floor and of detectors to leave out, to see what each is worth."""
    allow_partial: bool = False
    """Let a comparison of partial data pass when everything that could be compared agrees."""

    def __post_init__(self) -> None:
        if self.floor is not None:
            warnings.warn("'floor' is deprecated, use 'noise_run'", FutureWarning, stacklevel=3)
            structs.force_setattr(self, "noise_run", self.noise_run or self.floor)
            structs.force_setattr(self, "floor", None)
        if not 1.0 <= self.margin < math.inf:
            raise ConfigError(f"invalid margin {self.margin}: expected a finite number ≥ 1")
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not (0.0 <= value < math.inf):
                raise ConfigError(f"invalid tolerance {name}={value}: expected a finite number ≥ 0")

    @property
    def tolerance(self) -> tuple[float, float] | None:
        """(atol, rtol) where the user gave either, else None: the noise floor decides."""
        if self.rtol is None and self.atol is None:
            return None
        return self.atol or 0.0, self.rtol or 0.0

    def steps_of(self, side: int) -> frozenset[int] | None:
        """The selected steps in the baseline's (0) or the target's (1) own numbers."""
        shift = self.shift_steps if side else 0
        return None if self.steps is None else frozenset(step + shift for step in self.steps)
