"""Tensors that are not a single block of ordinary memory: recorded as parts or shards, or reported with a reason."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import forkserver_pool as warm
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tapscope.core.errors import DimsError
from tapscope.dumper import Dumper
from tapscope.dumper.records.dtensor_dims import MeshAxis, dims_of
from tapscope.dumper.records.flatten import flatten
from tapscope.run_format.run import Run
from tapscope.sources import open_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Give(nn.Module):
    """Applies a function to its input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


def record(path: Path, make: Any, **settings: Any) -> Run:
    """Run the function once as a model, and record its output."""
    model = Give(make)
    with Dumper(model, path, **{"keep": "full", **settings}) as dumper, dumper.step():
        model(torch.eye(3))
    return open_run(path)


def outs(run: Run) -> dict[str, Any]:
    """Return port -> value of all recorded outputs."""
    found = {}
    for each in run.records:
        port = each.key.site.rpartition(":")[2]
        if port.startswith("out"):
            found[port] = run.array(each) if each.dtype else (each.value or {}).get("value")
    return found


def test_capture_sparse_tensor_is_kept_as_its_parts(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda x: {"coo": x.to_sparse(), "csr": x.to_sparse_csr()})
    found = outs(run)
    np.testing.assert_array_equal(found["out[coo.indices]"], [[0, 1, 2], [0, 1, 2]])
    np.testing.assert_array_equal(found["out[coo.values]"], [1, 1, 1])
    assert found["out[coo.shape]"] == [3, 3] == found["out[csr.shape]"]
    np.testing.assert_array_equal(found["out[csr.crow_indices]"], [0, 1, 2, 3])
    assert run.ledger().complete


@pytest.mark.parametrize("layout", [torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc])
def test_capture_every_compressed_layout_can_be_put_together_again(tmp_path: Path, layout: torch.layout) -> None:
    x = torch.arange(16.0).reshape(4, 4)
    size = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    found = outs(record(tmp_path / "run", lambda _: x.to_sparse(layout=layout, **size)))
    outer, inner = [torch.tensor(value) for port, value in found.items() if "indices" in port]
    whole = torch.sparse_compressed_tensor(
        outer, inner, torch.tensor(found["out[values]"]), found["out[shape]"], layout=layout
    )
    assert torch.equal(whole.to_dense(), x)


def test_capture_rules_of_the_whole_hold_for_its_parts(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda x: x.to_sparse(), keep="off", rules=[":out=stats"])
    assert {r.key.site for r in run.records} == {":out[indices]", ":out[values]", ":out[shape]"}
    assert not any(r.entry for r in run.records)


def test_capture_quantized_tensor_is_kept_as_integers_with_scale_and_zero_point(tmp_path: Path) -> None:
    def make(x: torch.Tensor) -> Any:
        scales, zeros = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0, 1, 2])
        return [
            torch.quantize_per_tensor(x, 0.25, 3, torch.quint8),
            torch.quantize_per_channel(x, scales, zeros, 1, torch.qint8),
        ]

    found = outs(record(tmp_path / "run", make))
    assert (found["out[0.scale]"], found["out[0.zero_point]"]) == ("0.25", 3)
    np.testing.assert_array_equal((found["out[0.int_repr]"].astype(float) - 3) * 0.25, np.eye(3))
    np.testing.assert_array_equal(found["out[1.zero_point]"], [0, 1, 2])
    assert found["out[1.axis]"] == 1
    assert found["out[1.int_repr]"].dtype == np.int8


def test_capture_nested_tensors_are_kept_as_values_and_their_offsets_or_sizes(tmp_path: Path) -> None:
    def make(x: torch.Tensor) -> Any:
        pieces = [x[:1], x]
        return {
            "jagged": torch.nested.nested_tensor(pieces, layout=torch.jagged),
            "strided": torch.nested.nested_tensor(pieces),
        }

    run = record(tmp_path / "run", make)
    found = outs(run)
    assert found["out[jagged.values]"].shape == (4, 3)
    np.testing.assert_array_equal(found["out[jagged.offsets]"], [0, 1, 4])
    np.testing.assert_array_equal(found["out[strided.values]"], [1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1])
    np.testing.assert_array_equal(found["out[strided.sizes]"], [[1, 3], [3, 3]])


class Scaled(torch.Tensor):
    """A quantized tensor like those of torchao: a subclass that wraps data and scale."""

    data_: torch.Tensor
    _scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_ = data
        self._scale = scale

    def __tensor_flatten__(self) -> Any:
        return ["data_", "_scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("nobody may compute with it here")


def test_capture_subclass_that_states_what_is_inside_is_kept_as_that(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda x: (Scaled(x.to(torch.int8), torch.tensor(0.5)),))
    found = outs(run)
    np.testing.assert_array_equal(found["out[0.data_]"], np.eye(3))
    assert found["out[0.scale]"] == 0.5
    assert run.ledger().complete


def test_capture_rare_dtypes_and_views_are_kept_exactly(tmp_path: Path) -> None:
    def make(x: torch.Tensor) -> Any:
        z = torch.tensor([[1 + 2j, 3 - 4j]])
        return {
            "conj": z.conj(),
            "neg": z.conj().imag,
            "c128": z.to(torch.complex128),
            "u16": torch.tensor([65535], dtype=torch.uint16),
            "bool": x > 0,
            "e5m2": x.to(torch.float8_e5m2),
            "e4m3fnuz": x.to(torch.float8_e4m3fnuz),
            "expanded": torch.arange(3.0).expand(2, 3),
            "zero_d": torch.tensor(7),
            "empty": torch.empty(0, 4),
        }

    run = record(tmp_path / "run", make)
    found = outs(run)
    assert (found["out[conj]"] == [[1 - 2j, 3 + 4j]]).all()
    assert (found["out[neg]"] == [[-2, 4]]).all()
    assert found["out[c128]"].dtype == np.complex128
    assert found["out[u16]"].tolist() == [65535]
    assert found["out[e5m2]"].dtype == ml_dtypes.float8_e5m2
    assert found["out[expanded]"].tolist() == [[0, 1, 2]] * 2
    assert (found["out[zero_d]"].shape, found["out[empty]"].shape) == ((), (0, 4))
    assert run.ledger().complete


def test_capture_element_type_without_a_name_is_kept_as_bytes(tmp_path: Path) -> None:
    raw = torch.arange(6, dtype=torch.uint8)
    run = record(tmp_path / "run", lambda _: raw.view(torch.float4_e2m1fn_x2))
    assert outs(run)["out[dtype]"] == "float4_e2m1fn_x2"
    assert outs(run)["out[bytes]"].tolist() == list(range(6))


def _fake(x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x: x.to("meta"), "meta tensor"),
        (_fake, "FakeTensor"),
        (lambda x: {"a": x, "b": Scaled(x.to("meta"), x)}, "meta tensor"),
    ],
)
def test_capture_counts_values_without_data_and_continues(tmp_path: Path, make: Any, reason: str) -> None:
    run = record(tmp_path / "run", make)
    account = run.ledger()
    assert (account.failed, account.complete) == (1, False)
    assert [reason in e.fields["reason"] for e in run.events() if e.kind == "failed"] == [True]
    assert any(r.key.site == ":in[x]" for r in run.records)


def test_capture_inside_torch_func_the_model_continues_and_the_reason_is_reported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    expected = torch.func.vmap(model)(torch.eye(3))
    with Dumper(model, tmp_path / "run", keep="full", grads=True) as dumper, dumper.step():
        assert torch.equal(torch.func.vmap(model)(torch.eye(3)), expected)
    run = open_run(tmp_path / "run")
    assert run.ledger().failed > 0
    assert any("torch.func" in e.fields["reason"] for e in run.events() if e.kind == "failed")


class Both(NamedTuple):
    left: Any
    right: Any


leaves = st.integers(0, 5) | st.booleans() | st.text("ab:[].", max_size=3) | st.just(torch.tensor([1.0]))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab:[]~2.", max_size=3) | st.integers(0, 2), inner, max_size=3)
        | st.builds(Both, inner, inner)
    ),
    max_leaves=12,
)


def _count(tree: Any) -> int:
    if isinstance(tree, dict):
        return sum(_count(child) for child in tree.values())
    if isinstance(tree, list | tuple):
        return sum(_count(child) for child in tree)
    return 1


@given(trees)
@example({1: 1, "1": 2, "1~2": 3, "~": {"": 1}})
def test_capture_every_leaf_of_any_tree_has_a_path_of_its_own_and_nothing_is_dropped(tree: Any) -> None:
    found = list(flatten(tree))
    assert len({path for path, _ in found}) == len(found) == _count(tree)
    assert not any(set("[]:") & set(path) for path, _ in found)


plain_keys = st.text("abc", min_size=1, max_size=3)
plain_trees = st.recursive(
    st.integers(0, 5),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(plain_keys, inner, min_size=1, max_size=3),
    max_leaves=12,
)


@given(plain_trees)
def test_capture_leaf_is_found_again_by_following_its_path(tree: Any) -> None:
    for path, leaf in flatten(tree):
        at = tree
        for part in path.split(".") if path else []:
            at = at[int(part)] if isinstance(at, list) else at[part]
        assert at is leaf


@pytest.mark.parametrize(
    ("annotation", "placed", "expected"),
    [
        (None, (MeshAxis("tp", "shard", 1),), "d0 d1[tp] d2"),
        ("b s h", (MeshAxis("tp", "shard", 1),), "b s[tp] h"),
        ("b s h", (MeshAxis("dp", "replicate"), MeshAxis("tp", "partial")), "b s h[tp:partial] # dp:replicated"),
        ("b s h", (MeshAxis("dp", "shard", 0), MeshAxis("tp", "shard", 0)), "b[dp,tp] s h"),
        ("b s h", (MeshAxis("dp", "inner", 0), MeshAxis("tp", "shard", 0)), "b[tp,dp] s h"),
        ("b s h[tp]", (MeshAxis("tp", "shard", 2), MeshAxis("cp", "shard", 1)), "b s[cp] h[tp]"),
    ],
)
def test_capture_placements_become_dims(annotation: str | None, placed: tuple[MeshAxis, ...], expected: str) -> None:
    assert dims_of(annotation, (2, 3, 4), placed) == expected


@pytest.mark.parametrize(
    ("axis", "reason"),
    [
        (MeshAxis(None, "shard", 0), "mesh_dim_names"),
        (MeshAxis("tp", "partial by max"), "partial by max"),
        (MeshAxis("rows", "shard", 0), "unknown mesh axis"),
    ],
)
def test_capture_placements_that_dims_cannot_state_are_refused_with_the_reason(axis: MeshAxis, reason: str) -> None:
    with pytest.raises(DimsError, match=reason):
        dims_of(None, (2, 3), (axis,))


class Rows(nn.Module):
    """Returns a tensor that a collective is still computing, like torch's row-parallel layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AsyncCollectiveTensor(x.detach() * 2)


class Net(nn.Module):
    """Uses the result of the collective, ignores it, or writes to it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second, self.last = nn.Linear(3, 3), Rows(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = self.second(self.first(x))
        if self.how == "unused":
            return self.last(x)
        if self.how == "written":
            summed += 1
        return self.last(summed + 1)


@pytest.mark.parametrize("how", ["used", "unused", "written"])
@pytest.mark.parametrize("keep", ["stats", "full"])
def test_capture_records_a_collectives_result_once_the_model_waited_for_it(tmp_path: Path, how: str, keep: str) -> None:
    model, x = Net(how), torch.ones(2, 3)
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep=keep) as dumper:
        for _ in range(2):
            with dumper.step():
                model(x)
        with dumper.capture_output(keep="full") as seen:
            model(x)
        expected = model.first(x) * 2
    run = open_run(tmp_path / "run")
    found = {(r.key.step, r.key.site): r for r in run.records}
    reasons = {e.fields["where"]: e.fields["reason"] for e in run.events() if e.kind == "failed"}
    if how != "used":
        word = {"unused": "has not completed", "written": "may have been written to"}[how]
        assert word in reasons["second:out"]
        assert (0, "second:out") not in found
        assert run.ledger().failed >= 2
        return
    sites = [r.key.site for r in run.records if r.key.step == 1]
    assert sites.index("first:out") < sites.index("second:out") < sites.index("last:in[input]")
    assert torch.equal(seen.values("second:out")[0], expected)
    if keep == "full":
        np.testing.assert_array_equal(run.array(found[1, "second:out"]), expected.numpy())
    assert len(sites) == len({r.seq for r in run.records if r.key.step == 1})
    assert run.ledger().complete


@pytest.mark.parametrize("how", ["used", "unused"])
def test_capture_what_an_inference_tensors_collective_computes_is_never_guessed(tmp_path: Path, how: str) -> None:
    """torch does not count writes to inference tensors, so later writes to the result cannot be detected."""
    with torch.inference_mode(), Dumper(model := Net(how), tmp_path / "run", keep="full"):
        model(torch.ones(2, 3))
    run = open_run(tmp_path / "run")
    assert "second:out" not in {r.key.site for r in run.records}
    assert run.ledger().failed == 1


WORKER = """
import os, sys, torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed._functional_collectives import all_reduce
from tapscope.dumper import Dumper
from tapscope.core.observe import RankInfo

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
whole = torch.arange(24.0).reshape(2, 4, 3)

class Model(nn.Module):
    tap_dims = {"out[named]": "b s h"}
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)]))
    def forward(self, x):
        shard = distribute_tensor(x, mesh, [Shard(1)])
        return {
            "named": shard, "plain": shard, "replicated": distribute_tensor(x, mesh, [Replicate()]),
            "partial": DTensor.from_local(x + rank, mesh, [Partial()]), "reduced": all_reduce(x, "sum", mesh),
            "squared": (self.weight * self.weight).sum(1),
        }

model = Model()
info = RankInfo(rank=rank, world_size=2, mesh={"tp": 2}, coords={"tp": rank})
with Dumper(model, sys.argv[1], keep="full", params=True, grads=True, info=info) as dumper:
    with dumper.step(phase="toy"):
        out = model(whole)
        out["squared"].sum().backward()
assert torch.equal(out["reduced"] + 0, whole * 2)
dist.barrier()
dist.destroy_process_group()
"""


def test_capture_dtensor_is_its_shard_with_its_placement_as_dims(tmp_path: Path) -> None:
    script, rendezvous = tmp_path / "worker.py", tmp_path / "rendezvous"
    script.write_text(WORKER)
    ranks = [
        warm.start(
            *(script, tmp_path / "run", rendezvous),
            env=os.environ | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    run = open_run(tmp_path / "run")
    records = {(r.key.site, r.key.rank): r for r in run.records}
    dims = {site: r.dims for (site, rank), r in records.items() if rank == 1 and r.dims}
    assert dims == {
        ":out[named]": "b s[tp] h",
        ":out[plain]": "d0 d1[tp] d2",
        ":out[replicated]": "d0 d1 d2 # tp:replicated",
        ":out[partial]": "d0 d1 d2[tp:partial]",
        ":out[squared]": "d0[tp]",
        ":out[squared].grad": "d0 # tp:replicated",
        ":param[weight]": "d0[tp] d1",
        ":param[weight].grad": "d0[tp] d1",
    }
    whole = np.arange(24.0).reshape(2, 4, 3)
    for rank in range(2):
        np.testing.assert_array_equal(run.array(records[":out[plain]", rank]), whole[:, 2 * rank : 2 * rank + 2])
    summands = [run.array(records[":out[partial]", rank]) for rank in range(2)]
    np.testing.assert_array_equal(sum(summands), 2 * whole + 1)
    weight = np.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(run.array(records[":param[weight].grad", 1]), 2 * weight[2:])
    failed = [json.dumps(e.fields) for e in run.events() if e.kind == "failed"]
    assert all(":out[reduced]" in text and "has not completed" in text for text in failed)
    assert len(failed) == 2 == run.ledger().failed
