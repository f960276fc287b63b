"""Map file: the user's additions to the built-in matching of two runs: names, fused tensors, dims, rules.

A YAML file with any of these sections (docs/guide/matching.md)::

    rename:                                  # regular expressions over sites, in order
      - {from: '^transformer\\.h\\.', to: 'model.layers.', side: target}
    split:                                   # one fused tensor matches the other run's parts
      'layers.*.attn.qkv': {into: ['layers.*.attn.q', 'layers.*.attn.k', 'layers.*.attn.v'], heads: [32, 8]}
    join:                                    # joined parts match the other run's fused tensor
      'layers.*.mlp.w13': {from: ['layers.*.mlp.w1', 'layers.*.mlp.w3']}
    dims:                                    # globs; the first match applies
      - {site: 'layers.*.mlp:out', dims: 's b h[tp:partial]', side: target}
    rules:                                   # regular expressions over sites; the first match applies
      - {site: 'lm_head:out', require: 'rel < 1e-3'}
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from tapscope.comparator.options import map_member
from tapscope.core.errors import ConfigError
from tapscope.expr.safe_regex import MAX_SUBJECT

SECTIONS = ("rename", "split", "join", "dims", "rules")
ORDERS = ("plain", "grouped")
MAX_STARS = 3
"""Maximum number of ``*`` in one ``split`` or ``join`` pattern: each one multiplies the number of possible matches."""


class RenameEntry(Struct, frozen=True):
    """A rename of sites of one side."""

    where: str
    """File and key of the entry, for messages."""
    pattern: re.Pattern[str]
    to: str
    side: str = "both"

    def apply(self, site: str) -> str:
        """Return the site with the first match replaced; a site without a match, or too long to search, is
        unchanged."""
        return self.pattern.sub(self.to, site, count=1) if len(site) <= MAX_SUBJECT else site


class FuseEntry(Struct, frozen=True):
    """A fused tensor whose ``parts`` are concatenated, or interleaved by group."""

    where: str
    whole: str
    """Glob of module paths, or of sites if it contains ``:``. A ``*`` in the parts stands for the text that the ``*``
    here matched."""
    parts: tuple[str, ...]
    order: str = ""
    """``plain``: q q k k v v; ``grouped``: q q k v q q k v as in Megatron's linear_qkv; empty: derived from the
    name."""
    sizes: tuple[int, ...] = ()
    """Features of each part in the fused tensor; empty: inferred from the other side."""
    heads: tuple[int, int] | None = None
    """(attention heads, key/value heads) if the parts are q, k and v."""
    joins: bool = False
    """Whether the parts are joined to match the fused tensor, instead of splitting the fused tensor."""


class DimsEntry(Struct, frozen=True):
    """Dims that replace the recorded dims of the matching sites."""

    where: str
    site: str
    """Glob of sites."""
    dims: str
    side: str = "both"


class RuleEntry(Struct, frozen=True):
    """A condition that sites must satisfy instead of the noise floor."""

    where: str
    site: str
    """Regular expression over sites."""
    require: str
    """Expression over metrics, see :mod:`tapscope.expr.expression`."""


class MapFile(Struct, frozen=True):
    """One map file, or several merged in the order given."""

    rename: tuple[RenameEntry, ...] = ()
    fuse: tuple[FuseEntry, ...] = ()
    """The entries of ``split`` and ``join``."""
    dims: tuple[DimsEntry, ...] = ()
    rules: tuple[RuleEntry, ...] = ()
    files: tuple[str, ...] = ()
    """The files that were read."""


def read_maps(paths: Iterable[str | Path]) -> MapFile:
    """Read map files and merge them in order.

    Raises ConfigError, naming file and key, for invalid content. An entry that matches no site is detected only when
    two runs are compared.
    """
    files = [_parse(Path(path)) for path in paths]
    return MapFile(
        tuple(entry for file in files for entry in file.rename),
        tuple(entry for file in files for entry in file.fuse),
        tuple(entry for file in files for entry in file.dims),
        tuple(entry for file in files for entry in file.rules),
        tuple(name for file in files for name in file.files),
    )


def _parse(path: Path) -> MapFile:
    from tapscope.core.yaml_file import read_yaml  # imported here because yaml loads slowly

    content = read_yaml(path)
    map_member.check_keys(str(path), content, SECTIONS)
    fuse = [
        _fuse(f"{path}: {section}[{whole!r}]", section, whole, entry)
        for section in ("split", "join")
        for whole, entry in map_member.mapping(f"{path}: {section}", content.get(section)).items()
    ]
    rename, dims = _entries(path, content, "rename", _rename), _entries(path, content, "dims", _dims)
    rules = _entries(path, content, "rules", _rule)
    if not any((rename, fuse, dims, rules)):
        raise ConfigError(f"{path} has no entries: expected any of {', '.join(SECTIONS)}")
    return MapFile(rename, tuple(fuse), dims, rules, (str(path),))


_Entry = TypeVar("_Entry")


def _entries(
    path: Path, content: Mapping[str, Any], section: str, build: Callable[[str, dict[str, Any]], _Entry]
) -> tuple[_Entry, ...]:
    given = [] if content.get(section) is None else content[section]
    if not isinstance(given, list):
        raise ConfigError(f"{path}: {section} must be a list of entries (lines that begin with '-')")
    return tuple(
        build(f"{path}: {section}[{i}]", map_member.mapping(f"{path}: {section}[{i}]", e)) for i, e in enumerate(given)
    )


def _rename(where: str, entry: dict[str, Any]) -> RenameEntry:
    map_member.check_keys(where, entry, ("from", "to", "side"))
    pattern, to = (
        map_member.regex(f"{where}.from", map_member.text(where, entry, "from")),
        map_member.text(where, entry, "to", empty=True),
    )
    try:
        pattern.sub(to, "")
        re.compile(pattern.pattern + "|").sub(to, "")  # matches the empty string: do the groups in `to` exist?
    except (re.error, IndexError) as error:
        raise ConfigError(f"{where}.to: {to!r} does not fit {pattern.pattern!r}: {error}") from None
    return RenameEntry(where, pattern, to, map_member.side(where, entry))


def _fuse(where: str, section: str, whole: str, entry: Any) -> FuseEntry:
    key = "into" if section == "split" else "from"
    entry = map_member.mapping(where, entry)
    map_member.check_keys(where, entry, (key, "order", "sizes", "heads"))
    parts = entry.get(key)
    if not isinstance(parts, list) or len(parts) < 2 or not all(isinstance(p, str) and p for p in parts):
        raise ConfigError(f"{where}.{key} must be a list of two or more sites or module paths")
    for part in parts:
        if part.count("*") not in (0, whole.count("*")) or ((":" in part) != (":" in whole)):
            raise ConfigError(
                f"{where}.{key}: {part!r} must have one '*' for each in {whole!r}, and a port only if that has one"
            )
    if whole.count("*") > MAX_STARS:
        raise ConfigError(f"{where}: at most {MAX_STARS} '*' in one pattern")
    order, sizes = entry.get("order", ""), map_member.counts(where, entry, "sizes")
    if order not in ("", *ORDERS):
        raise ConfigError(f"{where}.order={order!r} is unknown; use {' or '.join(ORDERS)}")
    if sizes and len(sizes) != len(parts):
        raise ConfigError(f"{where}.sizes has {len(sizes)} numbers for {len(parts)} parts")
    heads = _heads(where, entry, len(parts))
    if order == "grouped" and len(parts) != 3:
        raise ConfigError(f"{where}.order: grouped applies to the three parts q, k and v, not to {len(parts)}")
    return FuseEntry(where, whole, tuple(parts), order, sizes, heads, section == "join")


def _heads(where: str, entry: Mapping[str, Any], num_parts: int) -> tuple[int, int] | None:
    heads = map_member.counts(where, entry, "heads")
    if not heads:
        return None
    if len(heads) != 2 or heads[0] % heads[1] or num_parts != 3:
        raise ConfigError(
            f"{where}.heads must be [attention heads, key/value heads], one divided by the other, for q, k, v"
        )
    return heads[0], heads[1]


def _dims(where: str, entry: dict[str, Any]) -> DimsEntry:
    map_member.check_keys(where, entry, ("site", "dims", "side"))
    return DimsEntry(
        where,
        map_member.text(where, entry, "site"),
        map_member.text(where, entry, "dims"),
        map_member.side(where, entry),
    )


def _rule(where: str, entry: dict[str, Any]) -> RuleEntry:
    map_member.check_keys(where, entry, ("site", "require"))
    site = map_member.text(where, entry, "site")
    map_member.regex(f"{where}.site", site)
    return RuleEntry(where, site, map_member.text(where, entry, "require"))
