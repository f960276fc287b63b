"""What was dealt out over a mesh comes back as it was, and what cannot come back says why."""

import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from shard_tensors import LENGTHS, Array, MemoryRun, assembled, deal, places, write

from tapscope.comparator import Verdict
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.pieces import is_partition
from tapscope.comparator.assembly.read import read
from tapscope.comparator.pair_analysis.replicas import check_replicas
from tapscope.core.axes import Dim, Dims, Section, Shard, Size
from tapscope.core.dims import parse
from tapscope.core.errors import NothingInCommonError

Case = tuple[Array, Dims, dict[str, int], tuple[int, ...]]
KINDS = ("plain", "sections", "sized", "groups", "copies", "padded")


@st.composite
def feature_axes(draw: st.DrawFn, name: str, shards: tuple[Shard, ...], sizes: list[int]) -> tuple[int, Dim]:
    """(size of the whole, dim) of an axis that is not of tokens, over mesh axes of these ``sizes``."""
    ranks, kind = math.prod(sizes), draw(st.sampled_from(KINDS))
    names = (name, f"{name}k", f"{name}v")
    if kind == "sections":
        return 3 * 2 * ranks, Dim(names, shards, sections=tuple(map(Section, names)))
    if kind in ("sized", "groups"):
        sections = tuple(Section(part, Size(6 * ranks * n)) for part, n in zip(names, (2, 1, 1), strict=True))
        return 24 * ranks, Dim(names, shards, sections=sections, groups=3 * ranks if kind == "groups" else 0)
    if kind == "copies" and sizes and sizes[-1] > 1:
        copies = draw(st.sampled_from([n for n in (2, sizes[-1]) if sizes[-1] % n == 0]))
        size = ranks // copies * draw(st.integers(1, 3))
        return size, Dim((name,), shards, Size(size, copies))
    size = draw(st.integers(1, 9)) if kind == "padded" else ranks * draw(st.integers(1, 3))
    return size, Dim((name,), shards, Size(size) if kind == "padded" else None)


@st.composite
def dealt(draw: st.DrawFn) -> Case:
    """(whole, dims, mesh, lengths of packed sequences)."""
    mesh = {
        axis: draw(st.sampled_from([1, 1, 2, 2, 3, 4])) for axis in draw(st.permutations(("tp", "cp", "ep", "dp")))[:3]
    }
    free, lengths = list(mesh), ()
    tokens = draw(st.sampled_from("ts"))
    mine = [free.pop()] if draw(st.booleans()) else []
    ranks = math.prod(mesh[axis] for axis in mine)
    order = draw(st.sampled_from([None, "zigzag", "natural"])) if mine else None
    if tokens == "t" and (order == "zigzag" or mine == ["cp"]):
        lengths = tuple(n * ranks for n in LENGTHS)
    sizes, dims = [sum(lengths) or 2 * ranks * 3], [Dim((tokens,), tuple(Shard(axis, order) for axis in mine))]
    for name in ("h", "w"):
        mine = [free.pop() for _ in range(draw(st.integers(0, len(free))))]
        shards = tuple(map(Shard, mine))
        size, dim = draw(feature_axes(name, shards, [mesh[axis] for axis in mine]))
        sizes, dims = [*sizes, size], [*dims, dim]
    if free and draw(st.booleans()):
        copied = any(s and s.copies > 1 for s in (dims[-1].size, *(part.size for part in dims[-1].sections)))
        if not copied:
            dims[-1] = replace(dims[-1], shards=(*dims[-1].shards, Shard(free.pop(), partial=True)))
    whole = np.random.default_rng(draw(st.integers(0, 9))).integers(-99, 99, sizes).astype(np.float32)
    return whole, Dims(tuple(dims), tuple(free)), mesh, lengths


@given(dealt())
@settings(max_examples=60)
def test_shards_of_any_dims_are_assembled(case: Case) -> None:
    whole, dims, mesh, lengths = case
    run = MemoryRun(deal(whole, dims, mesh, lengths), str(dims), mesh, lengths)
    found = assembled(run)
    assert (found.problem, found.shape) == ("", whole.shape)
    assert found.piece is not None
    np.testing.assert_array_equal(read(found.piece, run), whole)
    assert not found.replicas
    assert check_replicas([found]) == ("", "", None, None)


def whole_of(
    path: Path, parts: Mapping[int, Array], dims: str | None, mesh: dict[str, int], **more: object
) -> AssembledTensor:
    with write(path / "r", parts, dims, mesh, **more) as run:  # type: ignore[arg-type]
        return assembled(run)


def columns(width: int = 8, rows: int = 4) -> Array:
    return np.arange(rows * width, dtype=np.float32).reshape(rows, width)


@pytest.mark.parametrize(("length", "size"), [(7, 2), (9, 2), (13, 3), (5, 4), (1, 2)])
@pytest.mark.parametrize("split", ["torch.chunk", "numpy.array_split"])
def test_shards_zigzag_of_an_indivisible_length(tmp_path: Path, length: int, size: int, split: str) -> None:
    whole = columns(3, length)
    chunk = -(-length // (2 * size))
    cuts = [min(i * chunk, length) for i in range(1, 2 * size)]
    chunks = np.split(whole, cuts) if split == "torch.chunk" else np.array_split(whole, 2 * size)
    parts = {r: np.concatenate([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)}
    with write(tmp_path / "r", parts, "s[cp:zigzag] h", {"cp": size}) as run:
        found = assembled(run)
        assert found.piece is not None, found.problem
        np.testing.assert_array_equal(read(found.piece, run), whole)


def test_shards_padding_after_packed_sequences_stays_at_the_end(tmp_path: Path) -> None:
    lengths, whole = (4, 8), columns(2, 12)
    parts = deal(whole, parse("t[cp:zigzag] h"), {"cp": 2}, lengths)
    padded = {rank: np.concatenate([part, np.full((3, 2), 7, np.float32)]) for rank, part in parts.items()}
    with write(tmp_path / "r", padded, "t[cp:zigzag] h", {"cp": 2}, lengths=lengths) as run:
        found = assembled(run)
        assert found.piece is not None
        np.testing.assert_array_equal(read(found.piece, run), np.concatenate([whole, np.full((6, 2), 7, np.float32)]))


def test_shards_dependent_coordinates_are_one_axis(tmp_path: Path) -> None:
    """tp = attn_dp x attn_tp on SGLang; etp = tp and sp = tp on Megatron."""
    whole = columns()
    mesh = {"tp": 4, "attn_dp": 2, "attn_tp": 2, "sp": 4}
    coords = {r: {"tp": r, "attn_dp": r // 2, "attn_tp": r % 2, "sp": r} for r in range(4)}
    batch = {r: np.split(np.split(whole, 2)[r // 2], 2, axis=1)[r % 2] for r in range(4)}
    for name, parts, dims in (
        ("declared", batch, "t h[attn_tp] # dp:=attn_dp"),
        ("sharded", batch, "t[attn_dp] h[attn_tp]"),
        ("one name", dict(enumerate(np.split(whole, 4))), "t[sp] h # tp:replicated"),
        ("both replicated", dict.fromkeys(range(4), whole), "t h # tp:replicated sp:replicated"),
    ):
        with write(tmp_path / name, parts, dims, mesh_of(4), coords=coords) as run:
            run.manifest["mesh"] = mesh
            found = assembled(run)
            assert found.piece is not None, (name, found.problem)
            np.testing.assert_array_equal(read(found.piece, run), whole)


def mesh_of(world: int) -> dict[str, int]:
    return {"tp": world}


def test_shards_replicas_are_checked_when_two_axes_cover_the_same_ranks(tmp_path: Path) -> None:
    whole, other = columns(), columns() + 1
    coords = {r: {"tp": r, "etp": r} for r in range(2)}
    found = whole_of(tmp_path, {0: whole, 1: other}, "t h # etp:replicated tp:replicated", mesh_of(2), coords=coords)
    assert len(found.replicas) == 1


def test_shards_empty_replication_is_reported(tmp_path: Path) -> None:
    coords = {r: {"tp": r, "sp": r} for r in range(2)}
    parts = dict(enumerate(np.split(columns(), 2)))
    found = whole_of(tmp_path, parts, "t[sp] h # tp:replicated", mesh_of(2), coords=coords)
    assert found.notes == ("'tp:replicated' was not checked: another axis already distinguishes its ranks",)


def test_shards_idle_data_parallel_rank_adds_nothing(tmp_path: Path) -> None:
    whole = columns()
    found = whole_of(tmp_path, {0: whole[:0], 1: whole}, "t h", {"dp": 2})
    assert (found.shape, found.problem, found.notes) == ((4, 8), "", ("1 ranks of dp hold no rows",))
    empty = whole_of(tmp_path / "both", {0: whole[:0], 1: whole[:0]}, "t h", {"dp": 2})
    assert (empty.shape, empty.problem) == ((0, 8), "")


def test_shards_experts_hold_uneven_numbers_of_rows(tmp_path: Path) -> None:
    whole = columns(rows=7)
    parts = dict(enumerate(np.split(whole, [1, 1, 5])))
    with write(tmp_path / "r", parts, "t[ep] h", {"ep": 4}) as run:
        found = assembled(run)
        assert found.piece is not None
        np.testing.assert_array_equal(read(found.piece, run), whole)


def test_shards_layer_of_a_single_stage_is_whole(tmp_path: Path) -> None:
    halves = np.split(columns(), 2, axis=1)
    found = whole_of(tmp_path, {2: halves[0], 3: halves[1]}, "t h[tp]", {"pp": 2, "tp": 2})
    assert (found.shape, found.notes) == ((4, 8), ())
    both = dict.fromkeys(range(4), columns())
    assert whole_of(tmp_path / "all", both, "t h # pp:replicated tp:replicated", {"pp": 2, "tp": 2}).problem == ""


@pytest.mark.parametrize(
    ("parts", "dims", "mesh", "coords", "reason"),
    [
        ({1: (4, 4)}, "t h[tp]", {"tp": 2}, None, "shard 0 is missing"),
        ({0: (4, 4), 1: (4, 4), 3: (4, 4)}, "t h[tp]", {"tp": 4}, None, "shard 2 is missing"),
        ({0: (4, 4), 1: (4, 5)}, "t[tp] h", {"tp": 2}, None, "have incompatible shapes: (4, 4), (4, 5)"),
        ({0: (4, 4), 1: (3, 4)}, "t h[tp:partial]", {"tp": 2}, None, "summands over tp have incompatible shapes"),
        ({0: (4, 4), 1: (4, 4)}, "t h[tp]", {"tp": 2}, {0: {"tp": 0}, 1: {"tp": 0}}, "same mesh coordinates"),
        (
            {0: (4, 4), 1: (4, 4)},
            "t h[tp]",
            {"tp": 2},
            {0: {"tp": 0}, 1: {"tp": 4}},
            "shard 1 is missing; the coordinates of the ranks are 0, 4",
        ),
        ({0: (4, 4), 1: (4, 4), 2: (4, 4)}, "t h[tp]", {"tp": 3}, {2: {}}, "shard 2 is missing"),
        ({0: (4, 4), 1: (4, 4)}, "t h", {"tp": 2}, None, "do not mention tp"),
        ({0: (4, 4), 1: (4, 4)}, "t h[ep]", {"tp": 2}, None, "a mesh of tp=2 has no ep"),
        ({0: (4, 4), 1: (4, 4)}, None, {"tp": 2}, None, "annotate e.g. 't h[tp]'"),
        ({0: (4, 4), 1: (4, 4)}, "t h", {"pp": 2}, None, "layer numbers start at 0"),
        ({0: (4, 4), 1: (4, 4)}, "t h", {"tp": 2}, {0: {}, 1: {}}, "--mesh tp=2"),
        ({0: (4, 4), 1: (4, 4)}, "h w[tp:zigzag]", {"tp": 2}, None, "zigzag order applies to the axes s and t"),
        ({0: (4, 4), 1: (4, 4)}, "t[cp:zigzag] h", {"cp": 2}, None, "no row table"),
        ({0: (4, 4), 1: (7, 4)}, "s[cp:zigzag] h", {"cp": 2}, None, "no way of distributing a sequence of 11"),
        ({0: (4, 4), 1: (4, 4)}, "t h=9[tp]", {"tp": 2}, None, "has size 9, but its shards have 8 in total"),
        ({0: (4, 4), 1: (4, 4)}, "t (q=4+k=2+v=3)[tp]", {"tp": 2}, None, "does not divide into the sections"),
        ({0: (4, 4), 1: (4, 4)}, "t (q=8+k=4+v=4)[tp]", {"tp": 2}, None, "has size 16"),
        ({0: (4, 4), 1: (4, 4)}, "t (q+k)/3[tp]", {"tp": 2}, None, "3 groups"),
        ({0: (4, 4), 1: (4, 4)}, "t h=2x3[tp]", {"tp": 2}, None, "3 copies"),
        ({0: (4, 4), 1: (4, 4)}, "t h x", {"tp": 2}, None, "name 3 axes"),
        ({0: (4, 4), 1: (4, 4)}, "n h # dp:=tp", {"tp": 2}, None, "name no axis t or b"),
    ],
)
def test_shards_that_cannot_be_assembled_state_why(
    tmp_path: Path,
    parts: dict[int, tuple[int, ...]],
    dims: str | None,
    mesh: dict[str, int],
    coords: dict[int, dict[str, int]] | None,
    reason: str,
) -> None:
    arrays = {rank: np.random.default_rng(rank).standard_normal(shape) for rank, shape in parts.items()}
    found = whole_of(tmp_path, arrays, dims, mesh, coords=coords)
    assert found.piece is None
    assert reason in found.problem


def test_shards_unequal_copies_are_found(tmp_path: Path) -> None:
    heads = columns(2)
    parts = {r: heads[:, [r // 2]].copy() for r in range(4)}
    parts[3] += 1
    with write(tmp_path / "r", parts, "t kv=2x2[tp]", {"tp": 4}) as run:
        found = assembled(run)
        assert len(found.replicas) == 1
        assert "ranks 2, 3" in check_replicas([found]).problem


def test_shards_padding_is_reported_and_ignored(tmp_path: Path) -> None:
    parts = dict(enumerate(np.split(columns(8), 2, axis=1)))
    found = whole_of(tmp_path, parts, "t v=6[tp]", {"tp": 2})
    assert found.notes == ("2 of 8 along 'v=6[tp]' are padding and were left out",)
    assert found.piece is not None
    assert not is_partition(found.piece)
    assert found.multiset_hash is None


@pytest.mark.parametrize(
    ("kind", "wide"),
    [(ml_dtypes.bfloat16, np.float32), (np.float16, np.float32), (np.float32, np.float64), (np.int32, np.int64)],
)
def test_shards_partial_sums_are_added_in_a_wider_dtype(tmp_path: Path, kind: type, wide: type) -> None:
    rng = np.random.default_rng(0)
    parts = {r: rng.integers(-1000, 1000, (4, 8)).astype(kind) for r in range(8)}
    with write(tmp_path / "r", parts, "t h[tp:partial]", {"tp": 8}) as run:
        found = assembled(run)
        assert found.piece is not None
        total = read(found.piece, run)
        assert total.dtype == wide
        np.testing.assert_array_equal(total, sum(p.astype(np.float64) for p in parts.values()))


def test_shards_helper_gives_every_rank_its_own_coordinates() -> None:
    assert len({tuple(p.items()) for p in places({"tp": 2, "cp": 3})}) == 6


_words = st.sampled_from(
    ["t", "h", "s", "b", "1", "t[tp]", "h[tp]", "h[ep]", "h[tp:partial]", "t[cp:zigzag]", "s[tp:zigzag]", "h=3[tp]",
     "h=2x2[tp]", "(a+c)[tp]", "(a=2+c=1)[tp]", "(a+c)/2[tp]", "(n*d)[tp]", "(b*s)", "h[tp,ep]", "t[dp]"]
)  # fmt: skip
_declared = st.sampled_from(["", "# tp:replicated", "# ep:replicated", "# dp:=tp", "# rows:=out[1]", "# pp:replicated"])


@given(
    st.lists(_words, min_size=1, max_size=3),
    _declared,
    st.lists(_words, min_size=1, max_size=3) | st.none(),
    st.lists(st.sampled_from([0, 1, 2, 4, 6]), min_size=1, max_size=3),
    st.sampled_from([{"tp": 2}, {"tp": 2, "ep": 2}, {"dp": 2}, {"cp": 2}, {}]),
)
@settings(max_examples=40)
def test_shards_any_dims_and_shapes_give_a_result_or_one_error(
    tmp_path_factory: pytest.TempPathFactory,
    words: list[str],
    declared: str,
    others: list[str] | None,
    shape: list[int],
    mesh: dict[str, int],
) -> None:
    path = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(0)
    parts = {rank: rng.standard_normal(shape).astype(np.float32) for rank in range(len(places(mesh)))}
    sides = [" ".join(words) + f" {declared}", None if others is None else " ".join(others)]
    try:
        (found,) = diff(
            write(path / "b", parts, sides[0], mesh, lengths=(6,)),
            write(path / "t", dict.fromkeys(range(1), parts[0]), sides[1], {}, lengths=(6,)),
        ).findings
    except NothingInCommonError:
        return
    assert found.verdict is not Verdict.SHAPE or found.notes[0]
