"""Levels of a heat map: layers, their modules and submodules, and sites."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tapscope.core.errors import ConfigError
from tapscope.core.site import module_of
from tapscope.dashboard.model.grid import AnyGrid, GridRow, PackedGrid, joined_row, layer_grid

MAX_CELLS = 200_000
"""Maximum number of cells in a level; columns are merged by maximum if there are more."""


@dataclass(frozen=True, slots=True)
class GridLevel:
    """One level of a heat map, as the web page shows it."""

    grid: PackedGrid
    names: tuple[str, ...]
    """Module or site of each row; the number of a layer."""
    sites: tuple[int | None, ...]
    """Index of each row's site among all sites; None for a row with several sites."""
    around: tuple[str, ...]
    """Labels of the enclosing rows, outermost first; empty for the layers."""
    path: str = ""
    """Innermost module that contains the whole level; empty for the layers."""


def grid_level(sites: AnyGrid, at: Sequence[int], max_columns: int, within: tuple[int, int] | None = None) -> GridLevel:
    """Return the level at path ``at``: row indices of successive levels, starting at the layers; empty for the layers.

    ``within`` restricts the columns to an inclusive range of steps, ranks or tokens. Raises ConfigError for a row or a
    range of columns that does not exist.
    """
    layers = layer_grid(sites)
    rows, around, path = layers.rows, list[str](), ""
    for place in at:
        if not 0 <= place < len(rows):
            raise ConfigError(f"no row {place} here: {' › '.join(around) or 'the heat map'} has {len(rows)}")
        around.append(rows[place].label)
        path = _common_path(sites.rows[i].name for i in rows[place].orders)
        rows = inner_rows(sites.rows, rows[place]) or tuple(sites.rows[i] for i in rows[place].orders)
    shown = sites.grouped(rows) if at else layers
    if within is not None:
        shown = shown.within(*within)
    return GridLevel(
        shown.binned(max(min(max_columns, MAX_CELLS // max(len(rows), 1)), 1)).packed(),
        tuple(row.name for row in rows),
        tuple(row.orders[0] if at and len(row.orders) == 1 else None for row in rows),
        tuple(around),
        path,
    )


def inner_rows(sites: Sequence[GridRow], row: GridRow) -> tuple[GridRow, ...]:
    """Return the level below a row: its submodules and own sites, in order of first execution; empty for a site.

    ``sites`` are the rows of all sites; the ``orders`` of every row are indices of ``sites``. A module with a single
    site is represented by the site, and a module with all sites in one submodule by the submodule.
    """
    if len(row.orders) < 2:
        return ()
    around = _common_path(sites[i].name for i in row.orders)
    members: dict[tuple[str, int], list[int]] = {}
    for i in row.orders:
        path = module_of(sites[i].name)
        inner = path[len(around) :].lstrip(".").partition(".")[0]
        members.setdefault((inner, -1) if inner else ("", i), []).append(i)
    return tuple(_row(sites, around, own) for own in members.values())


def module_grid(sites: AnyGrid) -> AnyGrid:
    """Return the combined level below all layers: a row per direct submodule, and per site of a layer itself."""
    rows: list[GridRow] = []
    for layer in layer_grid(sites).rows:
        inner = inner_rows(sites.rows, layer) or tuple(sites.rows[i] for i in layer.orders)
        rows += (replace(row, label=row.name) for row in inner)
    return sites.grouped(rows)


def _row(sites: Sequence[GridRow], around: str, own: Sequence[int]) -> GridRow:
    name = sites[own[0]].name if len(own) == 1 else _common_path(sites[i].name for i in own)
    return joined_row(sites, name, name[len(around) :].lstrip("."), own)


def _common_path(names: Iterable[str]) -> str:
    """Return the innermost module that contains all of these sites; empty for the model itself."""
    paths = [module_of(name).split(".") for name in names]
    # all paths between the smallest and the largest share the common prefix of the two
    pairs = zip(min(paths), max(paths), strict=False)
    return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
