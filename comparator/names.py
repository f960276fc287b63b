"""Names: how one family of models spells the modules and ports that another spells differently.

A family is a list of rewrites to a common spelling; two sites meet when their common spellings are equal. The table
grows by adding families; nothing else needs to know.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

PARTIAL = ".partial"
"""Last path component of the probe that shows a row-parallel layer's summands before the all-reduce."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One spelling turned into the common one; ``pattern`` must match a prefix or suffix by its own anchors."""

    pattern: re.Pattern[str]
    common: str

    def apply(self, site: str) -> str:
        """``site`` in the common spelling, or as it was."""
        return self.pattern.sub(self.common, site, count=1)


@dataclass(frozen=True, slots=True)
class Family:
    """The rewrites that belong together, applied in order."""

    name: str
    rewrites: tuple[Rewrite, ...]

    def common(self, site: str) -> str:
        """The site in the common spelling."""
        for rewrite in self.rewrites:
            site = rewrite.apply(site)
        return site


def _family(name: str, *pairs: tuple[str, str]) -> Family:
    return Family(name, tuple(Rewrite(re.compile(pattern), common) for pattern, common in pairs))


FAMILIES: tuple[Family, ...] = (
    # A tuple of one tensor and None flattens to out[0]; the same module of another framework returns the tensor.
    _family("hf port", (r":out\[0\](?=$|\.grad$)", ":out")),
    # The decoder hangs under `model.` in a causal LM, under `model.language_model.` in a multimodal one, and is
    # the root when it was captured alone.
    _family(
        "hf root",
        (r":out\[0\](?=$|\.grad$)", ":out"),
        (r"^(?:model\.language_model|language_model\.model|model)(?=[.:])\.?", ""),
    ),
)
"""The passes of the name map, from the least to the most generous."""


def is_partial(site: str) -> bool:
    """Whether the site shows summands before an all-reduce."""
    return site.rpartition(":")[0].endswith(PARTIAL)


def reduced(site: str) -> str:
    """The site whose value the summands at ``site`` add up to."""
    path, _, port = site.rpartition(":")
    return f"{path.removesuffix(PARTIAL)}:{port}"


def unique(sites: Iterable[str], family: Family) -> dict[str, str]:
    """Common spelling -> site, leaving out spellings that several sites share: which is meant cannot be known."""
    found: dict[str, list[str]] = {}
    for site in sites:
        found.setdefault(family.common(site), []).append(site)
    return {common: names[0] for common, names in found.items() if len(names) == 1}
