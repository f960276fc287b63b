"""Grid levels: what a row of a heat map consists of, from layers over modules down to sites."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tapscope.core.errors import ConfigError
from tapscope.core.site import module_of
from tapscope.dashboard.model.grid import AnyGrid, GridRow, PackedGrid, joined_row, layer_grid

MAX_CELLS = 200_000
"""Of a level; where there are more, columns are joined by their maximum."""


@dataclass(frozen=True, slots=True)
class GridLevel:
    """A level of a heat map as a page shows it."""

    grid: PackedGrid
    names: tuple[str, ...]
    """Of each row: its module or site; of a layer its number."""
    sites: tuple[int | None, ...]
    """Of each row: its place among all sites; None for what consists of several."""
    around: tuple[str, ...]
    """Labels of the rows that the level is in, outermost first; empty for the layers."""
    path: str = ""
    """The innermost module that holds the whole level; empty for the layers."""


def grid_level(sites: AnyGrid, at: Sequence[int], max_columns: int, within: tuple[int, int] | None = None) -> GridLevel:
    """The layers, or below them what is in the row that ``at`` leads to: rows of successive levels, from the layers on.

    ``within`` restricts the columns to those from the first to the last of its steps, ranks or tokens. Raises
    ConfigError for a row or a range of columns that does not exist.
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
    """The next level below a row: the modules in it and its own sites, in the order in which they run first.

    ``sites`` are the rows of all sites, and the ``orders`` of every row index them. A module with one site is that
    site, and one whose sites are all in one submodule is that submodule. A site has no rows below it.
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
    """The level below the layers, of all of them: a row per module that is directly in one, and per site of its own."""
    rows: list[GridRow] = []
    for layer in layer_grid(sites).rows:
        inner = inner_rows(sites.rows, layer) or tuple(sites.rows[i] for i in layer.orders)
        rows += (replace(row, label=row.name) for row in inner)
    return sites.grouped(rows)


def _row(sites: Sequence[GridRow], around: str, own: Sequence[int]) -> GridRow:
    name = sites[own[0]].name if len(own) == 1 else _common_path(sites[i].name for i in own)
    return joined_row(sites, name, name[len(around) :].lstrip("."), own)


def _common_path(names: Iterable[str]) -> str:
    """The innermost module that holds all of these sites; empty for the model itself."""
    paths = [module_of(name).split(".") for name in names]
    pairs = zip(min(paths), max(paths), strict=False)  # what the first and the last share, those between share too
    return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
