import numpy as np
import pytest
from dashboard_runs import toy_run
from factories import RunFactory

from tapscope.dashboard import browse_source
from tapscope.dashboard.browse_source import Query, RunSource
from tapscope.dashboard.module_tree import contains, modules_of, relative
from tapscope.render.anomalies import anomaly_of
from tapscope.sources import open_run


@pytest.fixture
def source(tmp_path):
    found = RunSource(open_run(toy_run(tmp_path / "base")))
    yield found
    found.close()


def test_run_source_counts_agree_with_counting_one_by_one(source):
    for step in source.steps:
        for rank in source.ranks:
            here = [r for r in source.run.records if (r.key.step, r.key.rank) == (step, rank)]
            counts = source.counts(step, rank)
            for path, module in source.modules.items():
                under = [r for r in here if contains(path, r.key.site)]
                assert counts.of(module) == (len(under), sum(bool(anomaly_of(r)) for r in under))


def test_run_source_visits_every_anomaly_once_and_wraps_around(source):
    odd = [r for r in source.run.records if anomaly_of(r)]
    assert len(odd) > 2
    for direction in (1, -1):
        at, seen = (0, 0, -1), []
        for _ in odd:
            found = source.next_anomaly(*at, direction)
            seen.append(found.key)
            at = (found.key.step, found.key.rank, found.seq)
        assert set(seen) == {r.key for r in odd}
        assert source.next_anomaly(*at, direction).key == seen[0]


def test_run_source_selects_by_module_substring_and_pattern(source):
    assert {r.key.site for r in source.records(Query(0, 0, path="model.layers.1.mlp"))} == {
        "model.layers.1.mlp.down_proj:out",
        "model.layers.1.mlp.gate_proj:out",
    }
    assert len(source.records(Query(0, 0, find="O_PROJ"))) == 8
    assert len(source.records(Query(0, 0, find="layers.1*o_proj:in[input]"))) == 1
    assert source.records(Query(0, 0, find="nothing of the kind")) == []
    assert source.records(Query(9, 0)) == []


def test_run_source_sorts_nonfinite_first_and_keeps_the_set(source):
    plain = source.records(Query(1, 0))
    by_max = source.records(Query(1, 0, sort="by |max|"))
    by_size = source.records(Query(1, 0, sort="by size"))
    assert by_max[0].stats.nonfinite
    finite = [r.stats.absmax for r in by_max if not r.stats.nonfinite]
    assert finite == sorted(finite, reverse=True)
    assert [r.nbytes for r in by_size] == sorted((r.nbytes for r in plain), reverse=True)
    assert {r.key for r in plain} == {r.key for r in by_max} == {r.key for r in by_size}


def test_run_source_caches_the_latest_32_digests(tmp_path):
    with RunFactory(tmp_path / "many") as run:
        run.step()
        for i in range(40):
            run.put(f"m.{i}:out", np.ones((2, 2), np.float32))
    source = RunSource(open_run(tmp_path / "many"))
    for record in source.run.records:
        source.digest(record)
    kept = [r for r in source.run.records if source.cached_digest(r)]
    assert [r.key.site for r in kept] == [f"m.{i}:out" for i in range(40 - browse_source.CACHED_DIGESTS, 40)]
    source.close()


def test_run_source_header_reports_missing_data(tmp_path):
    with RunFactory(tmp_path / "gone", mesh={"tp": 2}) as run:
        run.step()
        run.put("m:out", {0: np.ones(3), 1: np.ones(3)})
    index = tmp_path / "gone" / "rank-00001" / "records.jsonl"
    lines = [
        line for line in index.read_bytes().splitlines(keepends=True) if b'"close"' not in line and b'"end"' not in line
    ]
    index.write_bytes(b"".join(lines))
    header = RunSource(open_run(tmp_path / "gone")).header
    assert header.state == "OPEN · INCOMPLETE"
    assert any("killed" in sentence for sentence in header.missing)


def test_run_source_command_is_quoted_for_the_shell(source):
    record = source.records(Query(0, 0, find="layers.2.self_attn.o_proj:in"))[0]
    command = source.command(record, Query(0, 0))
    assert "'model.layers.2.self_attn.o_proj:in[input]' --step 0 --rank 0 --occurrence 0" in command


def test_module_tree_orders_numbered_modules_by_number(tmp_path):
    with RunFactory(tmp_path / "r") as run:
        run.step()
        for layer in (10, 9, 0, 11, 2):
            run.put(f"layers.{layer}:out", np.ones(2))
    tree = RunSource(open_run(tmp_path / "r")).modules[""]
    assert list(tree.children["layers"].children) == ["0", "2", "9", "10", "11"]


def test_module_tree_relates_paths_and_sites():
    assert list(modules_of(["a.b.c:out"])) == ["", "a", "a.b", "a.b.c"]
    assert list(modules_of([":out"])) == [""]
    assert contains("a.b", "a.b:out")
    assert contains("a.b", "a.b.c:out")
    assert not contains("a.b", "a.bc:out")
    assert relative("a.b", "a.b.c:out") == "c:out"
    assert relative("a.b", "a.b:out") == "b:out"
    assert relative("", "a:out") == "a:out"
