"""Benchmark results of four tools over commits: formats, noise, comparison, CLI, page and report."""

import json
import math
import random
import zipfile
from pathlib import Path

import pytest
from chromium import LOOKS, check_accessibility, check_looks, look_of, page_of
from hypothesis import given, settings
from hypothesis import strategies as st
from web_server import Client, serving

from tapscope.cli import main
from tapscope.core.errors import DataError
from tapscope.dashboard.bench_source import MAX_FILE_BYTES, BenchSource
from tapscope.dashboard.model.bench_history import BenchTable
from tapscope.dashboard.model.bench_noise import ASSUMED, bench_noise
from tapscope.dashboard.model.bench_result import bench_results

SERVING = {"request_throughput": 8.0, "output_throughput": 900.0, "completed": 100, "duration": 12.5}
SGLANG = SERVING | {
    "backend": "sglang", "dataset_name": "random", "request_rate": math.inf, "max_concurrency": 16,
    "random_input_len": 1024, "random_output_len": 128, "total_throughput": 8000.0, "input_throughput": 7100.0,
    "mean_e2e_latency_ms": 1500.0, "median_e2e_latency_ms": 1400.0, "p99_e2e_latency_ms": 2100.0,
    "mean_ttft_ms": 80.0, "median_ttft_ms": 70.0, "p99_ttft_ms": 200.0, "median_itl_ms": 9.0, "accept_length": None,
    "server_info": {"model_path": "/models/org/llama", "tp_size": 2},
}  # fmt: skip
VLLM = SERVING | {
    "date": "20260125-222402", "backend": "vllm", "endpoint_type": "vllm", "model_id": "org/llama", "num_prompts": 100,
    "tokenizer_id": "org/llama", "request_rate": "inf", "max_concurrency": None, "total_input_tokens": 102_400,
    "total_output_tokens": 12_790, "total_token_throughput": 9200.0, "median_ttft_ms": 60.0, "mean_e2el_ms": 1300.0,
    "p99_itl_ms": 21.0, "commit": "deadbee", "tensor_parallel_size": "4",
}  # fmt: skip
TAPSCOPE = {
    "kind": "serving", "tapscope": "0.1.0", "date": "2026-01-25T10:00:00Z", "model": "tiny", "dataset": "random",
    "input_len": 64, "output_len": 32, "num_prompts": 10, "rate": 8.0, "max_concurrency": None,
    "output_tokens_per_s": 100.0, "ttft_ms": {"mean": 1.0, "p50": 0.9, "p99": 2.0}, "itl_ms": None,
    "metadata": {"commit": "c0ffee1", "hardware": "H100", "run_url": "https://ci.example/1", "branch": "main"},
}  # fmt: skip


def nightly(commit, day, factor=1.0, noise=0.01, seed=0):
    drawn = random.Random(f"{commit}{seed}")
    points = [
        {
            "batch_size": size, "input_len": 4096, "output_len": 512,
            "latency_ms": 2400 * drawn.gauss(1, noise) / factor,
            "output_throughput": factor * 231 * size * drawn.gauss(1, noise), "ttft_ms": 191 * drawn.gauss(1, noise),
        }
        for size in (1, 16)
    ]  # fmt: skip
    group = {"gpu_config": "8-gpu-h200", "partition": 0, "model": "org/big", "variant": "TP8+MTP", "benchmarks": points}
    about = {"run_id": str(day), "run_date": f"2026-01-{day:02}T22:24:02+00:00", "commit_sha": commit, "branch": "main"}
    return about | {"results": [group]}


def sha(number):
    return f"{random.Random(number).getrandbits(160):040x}"


@pytest.fixture
def folder(tmp_path):
    """Twelve nightly runs; from the tenth run on, the output throughput is 20 % lower."""
    for day in range(1, 13):
        item = nightly(sha(day), day, 0.8 if day >= 10 else 1.0)
        (tmp_path / f"consolidated-metrics-{day}.json").write_text(json.dumps(item))
    return tmp_path


def table(*paths):
    return BenchTable(BenchSource(paths).read())


# --- formats ---------------------------------------------------------------------------------------


def test_bench_results_reads_sglang_bench_serving():
    (result,) = bench_results(json.loads(json.dumps(SGLANG)))
    assert (result.config.tool, result.config.model, result.config.variant) == (
        "SGLang bench_serving", "org/llama", "TP 2"
    )  # fmt: skip
    assert (result.config.load, result.config.workload) == ("concurrency 16", "1024 in, 128 out, random, 100 prompts")
    assert result.metrics["total_tokens_per_s"] == 8000.0
    assert result.metrics["e2e_ms_p50"] == 1400.0
    assert result.metrics["ttft_ms_p99"] == 200.0
    assert "accept_length" not in result.metrics


def test_bench_results_reads_vllm_bench_serve():
    (result,) = bench_results(VLLM)
    assert (result.config.tool, result.config.variant, result.config.load) == (
        "vLLM bench serve",
        "TP 4",
        "all at once",
    )
    assert result.config.workload == "about 1000 in, 128 out, 100 prompts"
    assert (result.commit, result.date) == ("deadbee", "2026-01-25T22:24:02")
    assert result.metrics["e2e_ms_mean"] == 1300.0
    assert result.metrics["itl_ms_p99"] == 21.0


def test_bench_results_reads_vllm_throughput_and_latency():
    (found,) = bench_results(
        {"elapsed_time": 2.0, "num_requests": 8, "requests_per_second": 4.0, "tokens_per_second": 50.0}
    )
    assert found.metrics == {"requests_per_s": 4.0, "total_tokens_per_s": 50.0}
    (found,) = bench_results({"avg_latency": 0.5, "latencies": [0.5], "percentiles": {"50": 0.4, "99": 0.9}})
    assert found.metrics == {"e2e_ms_mean": 500.0, "e2e_ms_p50": 400.0, "e2e_ms_p99": 900.0}


def test_bench_results_reads_bench_one_batch_server():
    item = {
        "model_path": "org/big", "run_name": "default", "batch_size": 8, "input_len": 1024, "output_len": 16,
        "latency": 2.5, "input_throughput": 1e4, "output_throughput": 50.0, "overall_throughput": 3300.0,
        "last_ttft": 0.8, "acc_length": -1.0,
    }  # fmt: skip
    (result,) = bench_results([item])
    assert result.config.load == "batch 8"
    assert result.metrics["e2e_ms_mean"] == 2500.0
    assert result.metrics["ttft_ms_mean"] == 800.0
    assert "accept_length" not in result.metrics


def test_bench_results_reads_tapscope_bench():
    (result,) = bench_results(TAPSCOPE)
    assert (result.commit, result.branch, result.run_url) == ("c0ffee1", "main", "https://ci.example/1")
    assert result.config.hardware == "H100"
    assert result.metrics == {"output_tokens_per_s": 100.0, "ttft_ms_mean": 1.0, "ttft_ms_p50": 0.9, "ttft_ms_p99": 2.0}


def test_bench_results_keeps_web_addresses_only():
    (result,) = bench_results(TAPSCOPE | {"metadata": {"run_url": "javascript:alert(1)"}})
    assert result.run_url == ""


NAMES = [*SGLANG, *VLLM, *TAPSCOPE, "results", "run_id", "benchmarks", "x"]


@settings(deadline=None, max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*SGLANG, *VLLM, *TAPSCOPE, "results", "run_id", "benchmarks", "x"]), inner, max_size=8
            )
        ),
        max_leaves=12,
    ),
    st.sampled_from([SGLANG, VLLM, TAPSCOPE, nightly("a", 1), {}]),
)
def test_bench_results_survives_any_json(item, base):
    for each in (item, base | item if isinstance(item, dict) else item):
        for result in bench_results(each):
            assert all(0 < value < math.inf for value in result.metrics.values())
            assert isinstance(result.config.model, str)


# --- files -----------------------------------------------------------------------------------------


def test_bench_source_reads_lines_archives_and_folder_names(tmp_path):
    (tmp_path / "1a2b3c4").mkdir()
    (tmp_path / "1a2b3c4" / "serving.jsonl").write_text(json.dumps(SGLANG) + "\n" + json.dumps(SGLANG) + "\n")
    with zipfile.ZipFile(tmp_path / "artifact.zip", "w") as archive:
        archive.writestr("deep/vllm.json", json.dumps(VLLM))
        archive.writestr("notes.txt", "no JSON")
    (tmp_path / "other.json").write_text('{"a": 1}')
    found = BenchSource([tmp_path]).read()
    assert [(each.file, each.result.commit) for each in found.results] == [
        ("artifact.zip/deep/vllm.json", "deadbee"),
        ("1a2b3c4/serving.jsonl", "1a2b3c4"),
        ("1a2b3c4/serving.jsonl", "1a2b3c4"),
    ]
    assert (found.num_files, found.num_other, found.problems) == (3, 1, ())


def test_bench_source_reports_what_it_cannot_read(tmp_path):
    (tmp_path / "torn.jsonl").write_text(json.dumps(SGLANG) + '\n{"backend": "sgl')
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.zip").write_text("PK")
    (tmp_path / "link.json").symlink_to(tmp_path / "torn.jsonl")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", b" " * (MAX_FILE_BYTES + 1))
    found = BenchSource([tmp_path]).read()
    assert len(found.results) == 1
    assert len(found.problems) == 5
    for part in ("torn.jsonl: invalid JSON in 1 line", "bad.json: invalid JSON", "bad.zip: not a readable ZIP archive",
                 "large.json: it has", "bomb.zip: its JSON files have more than"):  # fmt: skip
        assert any(part in problem for problem in found.problems), part


def test_bench_source_reads_changed_files_only(folder, monkeypatch):
    source = BenchSource([folder])
    first = source.read()
    monkeypatch.setattr("tapscope.dashboard.bench_source.json.loads", None)
    assert source.read().results == first.results
    monkeypatch.undo()
    (folder / "new.json").write_text(json.dumps(nightly(sha(13), 13)))
    (folder / "consolidated-metrics-1.json").unlink()
    assert len(source.read().results) == len(first.results)


def test_bench_source_rejects_a_missing_path(tmp_path):
    with pytest.raises(DataError, match="no such file or directory"):
        BenchSource([tmp_path / "missing"])


# --- noise and comparison --------------------------------------------------------------------------


def test_bench_noise_prefers_repeats_then_history_then_assumes():
    drawn = random.Random(0)
    repeats = [[drawn.lognormvariate(5, 0.02) for _ in range(6)] for _ in range(8)]
    assert 0.015 < bench_noise(repeats).sigma < 0.025
    assert "repeats" in bench_noise(repeats).basis
    history = [[drawn.lognormvariate(5, 0.02) * (0.7 if i > 20 else 1)] for i in range(40)]
    assert 0.01 < bench_noise(history).sigma < 0.03  # the step of 30 % is ignored
    assert "differences" in bench_noise(history).basis
    assert bench_noise([[1.0], [2.0]]).sigma == ASSUMED


def test_bench_noise_marks_few_equal_commits():
    """Compare 2,000 pairs of equal commits: at most 2 % are reported as changes."""
    drawn, marked = random.Random(1), 0
    for _ in range(2000):
        values = [[drawn.lognormvariate(3, 0.03)] for _ in range(20)]
        ratio = values[-1][0] / values[-2][0]
        marked += max(ratio, 1 / ratio) - 1 > bench_noise(values).band(1, 1)
    assert marked <= 40


def test_bench_table_marks_regressions_beyond_the_noise(folder):
    found = table(folder).compare(sha(8), sha(11)[:9])
    assert {(row.metric.name, row.verdict) for row in found.rows} == {
        ("output_tokens_per_s", "regression"), ("e2e_ms_mean", "regression"), ("ttft_ms_mean", "within noise")
    }  # fmt: skip
    assert found.num_regressions == 4
    back = table(folder).compare(sha(11), sha(8))
    assert (back.num_regressions, back.num_improvements) == (0, 4)


def test_bench_table_orders_commits_by_date_and_joins_short_hashes(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(nightly("c0ffee1" + "0" * 33, 2)))
    (tmp_path / "b.json").write_text(json.dumps(nightly("c0ffee1", 2, seed=1)))
    (tmp_path / "z.json").write_text(json.dumps(nightly("deadbee", 1)))
    history = table(tmp_path).history()
    assert [commit.label for commit in history.commits] == ["deadbee", "c0ffee1000"]
    assert history.series[0].metrics[0].counts == (1, 2)
    assert [series.config.load for series in history.series] == ["batch 1", "batch 16"]


def test_bench_table_names_ambiguous_and_unknown_commits(tmp_path):
    for i, name in enumerate(("abc1111", "abc2222")):
        (tmp_path / f"{i}.json").write_text(json.dumps(nightly(name, i + 1)))
    found = table(tmp_path)
    with pytest.raises(DataError, match="ambiguous: abc1111, abc2222"):
        found.commit("abc")
    with pytest.raises(DataError, match="no benchmark result of commit 'abc1112' .*abc1111"):
        found.commit("abc1112")


def test_bench_table_shows_results_of_one_commit_only(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(nightly("abc1111", 1)))
    item = nightly("abc2222", 2)
    del item["results"][0]["benchmarks"][1]
    (tmp_path / "b.json").write_text(json.dumps(item))
    found = table(tmp_path).compare("abc1111", "abc2222")
    assert found.num_unpaired == 3
    assert {row.verdict for row in found.rows if row.config.load == "batch 16"} == {"only baseline"}


# --- command line ----------------------------------------------------------------------------------


def test_bench_history_prints_regressions_and_exits_with_1(folder, tmp_path, capsys):
    report = tmp_path / "out.html"
    assert (
        main(["bench", "history", str(folder), "--baseline", sha(8), "--target", sha(11), "--html", str(report)]) == 1
    )
    text = capsys.readouterr().out
    assert f"{sha(8)[:10]} to {sha(11)[:10]}: 4 regressions, 0 improvements, 2 within noise" in text
    assert "regression     output throughput" in text
    assert "TTFT" not in text
    assert "REGRESSED" in report.read_text()


def test_bench_history_compares_the_last_two_commits(folder, capsys):
    assert main(["bench", "history", str(folder), "--json"]) == 0
    history, compared = map(json.loads, capsys.readouterr().out.splitlines())
    assert (history["schema"], compared["type"]) == ("tapscope.bench-history/1", "comparison")
    assert (compared["baseline"]["commit"], compared["target"]["commit"]) == (sha(11), sha(12))
    assert history["num_results"] == 24


def test_bench_history_names_a_folder_without_results(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    assert main(["bench", "history", str(tmp_path)]) == 3
    assert "no benchmark result in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch", "a", "b"], "bench batch measures one target, not 2"),
        (["batch", "a", "--metadata", "x"], "invalid metadata 'x': expected KEY=VALUE"),
        (["history", "/no/such/folder"], "no such file or directory: /no/such/folder"),
    ],
)
def test_bench_rejects_invalid_history_arguments(words, message, capsys):
    assert main(["bench", *words]) in (2, 3)
    assert message in capsys.readouterr().err


# --- page and report -------------------------------------------------------------------------------


EVIL = '</script><img src=x onerror="window.injected=1">\u202e'


@pytest.mark.parametrize("looks", LOOKS)
def test_bench_report_is_accessible_and_shows_hostile_names_as_text(chromium, folder, looks):
    (folder / "evil.json").write_text(json.dumps(VLLM | {"model_id": EVIL, "commit": EVIL, "dataset_name": EVIL}))
    main(["bench", "history", str(folder), "--html", str(folder / "a.html")])
    with page_of(chromium, (folder / "a.html").as_uri(), offline=True, **look_of(*looks[0])) as page:
        page.wait_for_selector(".chart canvas")
        assert page.evaluate("window.injected") is None
        assert "onerror" in page.locator("main").inner_text()
        check_looks(page, looks)


def test_bench_report_charts_follow_the_keyboard(chromium, folder, capsys):
    main(["bench", "history", str(folder), "--html", str(folder / "a.html"), "--json"])
    series = json.loads(capsys.readouterr().out.splitlines()[0])["series"]
    one, many = (each["metrics"][0]["formatted"][0] for each in series)  # output throughput at the first commit
    with page_of(chromium, (folder / "a.html").as_uri(), offline=True) as page:
        charts, reading = page.locator("div.chart"), page.locator(".chart-reading").first
        shown = [f"{sha(first)[:10]} to {sha(last)[:10]}" for first, last in ((1, 12), (1, 3))]
        charts.first.focus()
        page.keyboard.press("Home")
        assert reading.inner_text() == f"{sha(1)[:10]} · batch 1: {one} · batch 16: {many}"
        page.keyboard.press("+")
        assert all(shown[1] in chart.get_attribute("aria-label") for chart in charts.all())  # the charts zoom together
        page.keyboard.press("0")
        assert all(shown[0] in chart.get_attribute("aria-label") for chart in charts.all())
        page.locator("select[aria-label=load]").select_option("batch 16")
        assert reading.inner_text() == f"{sha(1)[:10]} · batch 16: {many}"


def test_bench_report_charts_follow_the_mouse(chromium, folder):
    main(["bench", "history", str(folder), "--html", str(folder / "a.html")])
    with page_of(chromium, (folder / "a.html").as_uri(), offline=True) as page:
        over, chart = page.locator(".u-over").first, page.locator("div.chart").first
        room = page.evaluate(
            "[...document.querySelectorAll('.u-wrap canvas, .u-over')].map((e) => e.getBoundingClientRect().right)"
        )
        assert room[0] - room[1] >= 35  # half of the last commit's label
        box = over.bounding_box()
        page.mouse.move(box["x"] + 2, box["y"] + 20)
        assert page.locator(".chart-reading").first.inner_text().startswith(sha(1)[:10])
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 5 / 11, box["y"] + 20, steps=4)
        page.mouse.up()
        assert f"{sha(1)[:10]} to {sha(6)[:10]}" in chart.get_attribute("aria-label")
        over.dblclick(position={"x": 40, "y": 40})
        assert f"{sha(1)[:10]} to {sha(12)[:10]}" in chart.get_attribute("aria-label")


def test_page_benchmarks_compares_and_refreshes(chromium, folder):
    with serving("--benchmarks", folder) as (url, link, _), page_of(chromium, link) as page:
        page.goto(f"{url}/benchmarks/")
        page.wait_for_selector(".chart canvas")
        page.locator("select[aria-label=baseline]").select_option(sha(8))
        page.locator("select[aria-label=target]").select_option(sha(11))
        page.get_by_role("button", name="Compare").click()
        page.wait_for_selector("text=4 regressions, 0 improvements, 2 within noise")
        assert page.locator("#compared tr.bad").count() == 4
        (folder / "new.json").write_text(json.dumps(nightly(sha(13), 13)))
        page.get_by_role("button", name="Refresh").click()
        page.wait_for_selector("text=26 results of 2 configurations at 13 commits")
        assert page.locator("text=last updated").count() == 1
        check_accessibility(page)


def test_page_benchmarks_refreshes_in_an_interval_and_links_to_runs(chromium, folder):
    with serving("--benchmarks", folder) as (url, link, _), page_of(chromium, link) as page:
        page.clock.install()
        page.goto(f"{url}/benchmarks/")
        page.wait_for_selector(".chart canvas")
        result = VLLM | {"commit": sha(20), "run_url": "https://ci.example/runs/20", "date": "20270101-000000"}
        (folder / "new.json").write_text(json.dumps(result))
        page.select_option("select[aria-label='Refresh interval']", label="10 s")
        page.clock.run_for(11_000)
        page.wait_for_selector("text=at 13 commits")
        assert page.locator("td a").first.get_attribute("href") == "https://ci.example/runs/20"


def test_page_benchmarks_shows_that_a_refresh_failed(chromium, folder):
    with serving("--benchmarks", folder) as (url, link, process), browser_page(chromium, link, url) as page:
        process.terminate()
        process.wait(20)
        page.get_by_role("button", name="Refresh").click()
        page.wait_for_selector("[role=alert]:has-text('The last refresh failed')")
        assert page.locator(".chart canvas").count() > 0


class browser_page:
    """Context manager: a page whose console errors are expected, because its server is stopped."""

    def __init__(self, started, link, url):
        self.context, self.link, self.url = started.new_context(), link, url

    def __enter__(self):
        page = self.context.new_page()
        page.goto(self.link)
        page.goto(f"{self.url}/benchmarks/")
        page.wait_for_selector(".chart canvas")
        return page

    def __exit__(self, *exc):
        self.context.close()


def test_api_benchmarks_equals_the_command(folder, capsys):
    main(["bench", "history", str(folder), "--json"])
    printed = json.loads(capsys.readouterr().out.splitlines()[0])
    with serving("--benchmarks", folder) as (url, link, _):
        client = Client(url)
        cookie = client(f"/login?{link.partition('?')[2]}")[2]["set-cookie"].partition(";")[0]
        served = client.json("/api/benchmarks", cookie=cookie)
        assert {name: served[name] for name in ("commits", "series", "metrics")} == {
            name: printed[name] for name in ("commits", "series", "metrics")
        }
        assert client("/api/benchmarks")[0] == 401
        assert client("/api/benchmarks/compare?baseline=zzz&target=zzz", cookie=cookie)[0] == 404


@pytest.mark.soak
def test_report_of_100_configurations_and_200_commits_is_small(tmp_path):
    for i in range(200):
        item = nightly(sha(i), 1 + i % 28)
        item["results"] = [item["results"][0] | {"model": f"org/m{n}"} for n in range(50)]
        (tmp_path / f"{i}.json").write_text(json.dumps(item))
    main(["bench", "history", str(tmp_path), "--html", str(tmp_path / "a.html"), "--json"])
    assert Path(tmp_path / "a.html").stat().st_size < 6_000_000


def test_page_without_results_says_what_it_reads(chromium, tmp_path):
    with serving("--benchmarks", tmp_path) as (url, link, _), page_of(chromium, link) as page:
        page.goto(f"{url}/benchmarks/")
        page.wait_for_selector("text=No results yet: the page reads the JSON of tapscope bench")
        assert page.locator("table, select[name=baseline]").count() == 0
