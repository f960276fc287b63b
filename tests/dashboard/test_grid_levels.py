"""Levels of a heat map: from layers over modules to sites."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tapscope.comparator import Verdict
from tapscope.dashboard.model.grid import BY_SEVERITY, CODES, Grid, GridColumn, GridRow, layer_grid
from tapscope.dashboard.model.grid_levels import inner_rows, module_grid

NAMES = st.sampled_from(["model", "layers", "0", "1", "attn", "q", "mlp"])
SITES = st.builds(lambda path, port: f"{'.'.join(path)}:{port}", st.lists(NAMES, max_size=5), st.sampled_from("ab"))


def grid_of(names, codes):
    rows = tuple(GridRow(n, n, BY_SEVERITY[max(c)], (i,)) for i, (n, c) in enumerate(zip(names, codes, strict=True)))
    cells = np.array(codes, np.uint8)
    return Grid(rows, tuple(GridColumn(i, i) for i in range(cells.shape[1])), cells * 10.0, cells)


@given(st.lists(st.tuples(SITES, st.lists(st.integers(1, 7), min_size=3, max_size=3)), min_size=1, max_size=20))
def test_every_level_partitions_the_one_above_and_keeps_its_maxima(found):
    names, codes = zip(*found, strict=True)
    sites = grid_of(names, codes)
    rows = list(layer_grid(sites).rows)
    assert sorted(i for each in module_grid(sites).rows for i in each.orders) == list(range(len(names)))
    while rows:
        row = rows.pop()
        inner = inner_rows(sites.rows, row)
        assert bool(inner) == (len(row.orders) > 1)
        if not inner:
            continue
        assert sorted(i for each in inner for i in each.orders) == sorted(row.orders)
        assert len(inner) > 1
        grid = sites.grouped(inner)
        for at, each in enumerate(inner):
            assert all(names[i].startswith(each.name) for i in each.orders)
            assert each.name.endswith(each.label)
            assert grid.codes[at].tolist() == np.max([codes[i] for i in each.orders], axis=0).tolist()
            assert grid.ratios[at].tolist() == (grid.codes[at] * 10.0).tolist()
            assert CODES[each.verdict] == grid.codes[at].max()
        assert [min(each.orders) for each in inner] == sorted(min(each.orders) for each in inner)
        rows += inner


def test_modules_of_a_layer_are_named_by_their_place_in_it():
    names = [
        "model.layers.3:in[x]",
        "model.layers.3.norm:out",
        "model.layers.3.attn.q:in[x]",
        "model.layers.3.attn.q:out",
        "model.layers.3.attn:out",
        "model.layers.3.mlp.experts.0.up:out",
        "model.layers.3.mlp.experts.1.up:out",
        "model.layers.3:out",
    ]
    sites = grid_of(names, [[4]] * 4 + [[6]] + [[4]] * 3)
    (layer,) = layer_grid(sites).rows
    inner = inner_rows(sites.rows, layer)
    assert [each.label for each in inner] == [":in[x]", "norm:out", "attn", "mlp.experts", ":out"]
    assert [each.verdict for each in inner] == [Verdict.CLOSE] * 2 + [Verdict.DIFFERS] + [Verdict.CLOSE] * 2
    assert [each.label for each in inner_rows(sites.rows, inner[2])] == ["q", ":out"]
    assert [each.label for each in inner_rows(sites.rows, inner[3])] == ["0.up:out", "1.up:out"]
