"""Web page: login, access control and data over a real socket, and every page in Chromium."""

import gzip
import hashlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import quote, urlencode

import numpy
import pytest
from chromium import LOOKS, check_accessibility, check_looks, look_of, page_of
from comparator_toy import Toy, weights
from dashboard_runs import toy_run
from factories import RunFactory
from soak_cases import mostly_soak
from toy_pair import PROMPTS, SITE, toy_pair
from web_server import Client, serving

from tapscope.core.errors import ConfigError, RunNotFoundError
from tapscope.core.formatting import number
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.model.flow_lanes import flow_lanes, visible_modules
from tapscope.dashboard.model.grid import layer_grid
from tapscope.dashboard.model.magnitudes import MEASURES, magnitudes_of
from tapscope.dashboard.model.run import cell_records, magnitude_grid
from tapscope.dashboard.web.app import STATIC
from tapscope.dashboard.web.login import ATTEMPTS, COOKIE, PASSWORD, SESSION_S, Login, read_password
from tapscope.dashboard.web.roots import Roots
from tapscope.http.access import RequestRefused

EVIL = '</script><img src=x onerror="window.injected=1">'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = toy_pair(tmp_path_factory.mktemp("web"))
    with RunFactory(root / "hostile", model=EVIL) as run:
        run.step()
        run.put(f"layers.0.{EVIL}\x1b[31m\u202e:out", {0: next(iter(weights().values()))[:4]})
    outside = tmp_path_factory.mktemp("outside")
    Toy(weights(layers=1)).write(outside / "secret", PROMPTS).close()
    (root / "link").symlink_to(outside / "secret")
    return root


@pytest.fixture(scope="module")
def server(runs):
    with serving(runs) as (url, link, _):
        client = Client(url)
        token = link.partition("token=")[2]
        status, _, headers = client(f"/login?token={token}")
        assert status == 303
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        yield client, cookie.partition(";")[0], token, url


def ids(server):
    client, cookie, _, _ = server
    return {run["name"]: run["id"] for run in client.json("/api/runs", cookie=cookie)["runs"]}


def diff(server):
    client, cookie, _, _ = server
    known = ids(server)
    words = urlencode({"baseline": known["base"], "target": known["target"]})
    job = client.json(f"/api/diffs?{words}", "POST", cookie=cookie)
    for _ in range(600):
        if job["state"] != "running":
            break
        time.sleep(0.05)
        job = client.json(f"/api/diffs/{job['id']}", cookie=cookie)
    assert job["state"] == "done", job
    return job["id"], client.json(f"/api/diffs/{job['id']}/view", cookie=cookie)


# --- login and guards ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js", "/run/x", "/live/x"])
def test_web_refuses_requests_without_a_session(server, path):
    client, _, _, _ = server
    status, body, headers = client(path)
    assert (status, headers.get("location")) == (303, "/login") if "/api/" not in path else status == 401
    assert "base" not in body


def test_web_link_opens_one_session_only(server):
    client, _, token, _ = server
    status, body, headers = client(f"/login?token={token}")
    assert status == 403
    assert "has been used" in body
    assert "set-cookie" not in headers


@pytest.mark.parametrize("cookie", ["", f"{COOKIE}=", f"{COOKIE}=guess", f'{COOKIE}=""; a=b', "=;;;"])
def test_web_refuses_wrong_cookies(server, cookie):
    client, _, _, _ = server
    assert client("/api/runs", cookie=cookie)[0] == 401


def test_web_refuses_other_hosts_and_origins(server):
    client, cookie, _, url = server
    assert client("/api/runs", cookie=cookie, host="evil.example")[0] == 403
    assert client("/api/runs", cookie=cookie, origin="http://evil.example")[0] == 403
    assert client("/api/runs", cookie=cookie, origin="null")[0] == 403
    assert client("/logout", "POST", cookie=cookie, origin="http://evil.example")[0] == 403
    assert client("/api/runs", cookie=cookie, origin=url)[0] == 200


def test_web_sends_security_headers_with_every_response(server):
    client, cookie, _, _ = server
    for path, status in (("/", 200), ("/static/app.js", 200), ("/api/runs", 200), ("/api/none", 404), ("/login", 200)):
        found, _, headers = client(path, cookie=cookie)
        assert found == status
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/web/app.py",
        "/static/..%2f..%2fpyproject.toml",
        "/api/runs/..%2f..%2fetc",
        "/api/runs/%2fetc%2fpasswd",
        "/api/runs/0000000000000000",
        "/api/runs/0000000000000000/live?poll=true",
    ],
)
def test_web_reads_nothing_outside_the_given_paths(server, path):
    client, cookie, _, _ = server
    status, body, _ = client(path, cookie=cookie)
    assert status in (303, 404)
    assert "import" not in body
    assert "root:" not in body


def test_web_unknown_address_is_a_page_for_browsers_and_json_for_others(server):
    client, cookie, _, _ = server
    for path in ("/nope", f"/nope/{quote(EVIL)}", "/static/nope.js"):
        status, body, headers = client(path, cookie=cookie, accept="text/html,application/xhtml+xml,*/*;q=0.8")
        assert (status, headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "<title>Not found" in body
        assert f"no page at {path[:5]}" in body
        assert '<a href="/">' in body
        assert "<img" not in body
        status, body, _ = client(path, cookie=cookie, accept="*/*")
        assert (status, json.loads(body)["error"][:16]) == (404, f"no page at {path[:5]}")
    status, body, _ = client("/api/none", cookie=cookie, accept="text/html")
    assert (status, json.loads(body)) == (404, {"error": "no route at /api/none"})
    status, body, headers = client("/run/x", "POST", cookie=cookie)
    assert (status, json.loads(body), headers["allow"]) == (405, {"error": "POST /run/x: method not allowed"}, "GET")


def test_web_lists_no_symbolic_link(server):
    assert sorted(ids(server)) == ["base", "hostile", "target"]


def test_web_refuses_long_bodies(server):
    client, _, _, _ = server
    assert client("/login", "POST", "password=" + "a" * 100_000)[0] == 413


def test_web_logout_ends_the_session(runs):
    with serving(runs) as (url, link, _):
        client = Client(url)
        cookie = client(link.removeprefix(url))[2]["set-cookie"].partition(";")[0]
        assert client("/api/runs", cookie=cookie)[0] == 200
        assert client("/logout", "POST", cookie=cookie)[0] == 303
        assert client("/api/runs", cookie=cookie)[0] == 401


def test_web_says_when_there_is_no_run_yet(tmp_path):
    with serving(tmp_path) as (_, _, process):
        told = [process.stderr.readline().strip() for _ in range(2)]
    assert told[1] == f"no tapscope run in {tmp_path} yet; Refresh on the page lists new ones"


def test_web_needs_a_password_off_loopback(runs, tmp_path):
    command = [sys.executable, "-m", "tapscope", "web", str(runs), "--listen", "0.0.0.0:0"]
    environment = {name: value for name, value in os.environ.items() if name != "TAPSCOPE_WEB_PASSWORD"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert "it needs --password-file FILE or TAPSCOPE_WEB_PASSWORD" in done.stderr


def test_web_password_opens_a_session(runs):
    with serving(runs, password="correct horse") as (url, _, _):
        client = Client(url)
        form = {"content_type": "application/x-www-form-urlencoded"}
        assert client("/login", "POST", "password=wrong", **form)[0] == 403
        status, _, headers = client("/login", "POST", "password=correct+horse", **form)
        assert status == 303
        assert client("/api/runs", cookie=headers["set-cookie"].partition(";")[0])[0] == 200


def test_login_expires_idle_sessions():
    now = [0.0]
    login = Login(clock=lambda: now[0])
    cookie = {"cookie": f"{login.cookie}={login.by_link(login.link)}"}
    now[0] = SESSION_S - 1
    login.check(cookie)
    now[0] += SESSION_S + 1
    with pytest.raises(RequestRefused, match="not logged in"):
        login.check(cookie)


def test_login_limits_wrong_passwords():
    now = [0.0]
    login = Login("right", clock=lambda: now[0])
    for _ in range(ATTEMPTS):
        with pytest.raises(RequestRefused, match="wrong password"):
            login.by_password("wrong")
    with pytest.raises(RequestRefused, match="too many") as refused:
        login.by_password("right")
    assert refused.value.status == 429
    now[0] = 61.0
    assert login.by_password("right")


def test_read_password_is_the_first_line_of_the_file_else_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(PASSWORD, "from environment")
    file = tmp_path / "password"
    file.write_text("from file\nsecond line\n")
    assert (read_password(file), read_password(None)) == ("from file", "from environment")
    for text, message in (("", "expected a password on the first line"), (None, "cannot read --password-file")):
        file.write_text(text) if text is not None else file.unlink()
        with pytest.raises(ConfigError, match=message):
            read_password(file)


def test_login_keeps_a_password_and_sessions_as_digests_only():
    login = Login("correct horse")
    session = login.by_password("correct horse")
    kept = repr({name: getattr(login, name) for name in vars(login)})
    assert "correct horse" not in kept
    assert session not in kept
    assert Login("correct horse")._password != login._password  # salted


def test_web_answers_no_cross_origin_preflight(server, runs):
    client, cookie, _, _ = server
    asked = {"origin": "http://evil.example", "access_control_request_method": "POST"}
    status, _, headers = client("/api/diffs", "OPTIONS", cookie=cookie, **asked)
    assert status == 403
    assert not [name for name in headers if name.lower().startswith("access-control-")]


def test_roots_refuse_a_run_with_symbolic_links(runs, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_bytes((runs / "base" / "run.json").read_bytes())
    (run / "rank-00000").symlink_to(runs / "base" / "rank-00000")
    roots = Roots([tmp_path])
    (run_id,) = roots.paths()
    with pytest.raises(RunNotFoundError, match="symbolic link"):
        roots.source(run_id)


def test_a_view_is_made_once_for_all_viewers_until_the_run_changes(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("a:out", numpy.ones((2, 2), numpy.float32))
    roots, made = Roots([tmp_path / "run"]), []
    (run_id,) = roots.paths()

    def view(source):
        made.append(len(source.run.records))
        time.sleep(0.05)
        return source.steps

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: roots.json(run_id, "steps", view), range(8)))
    assert (found, made) == ({b"[0]"}, [1])
    lines = tmp_path / "run/rank-00000/records.jsonl"
    lines.write_bytes(lines.read_bytes() + lines.read_bytes().splitlines(True)[0])
    roots.json(run_id, "steps", view)
    assert len(made) == 2


def test_web_reuses_the_measurements_of_a_job_for_another_tolerance(server):
    client, cookie, _, _ = server
    first, _ = diff(server)
    known = ids(server)
    words = urlencode({"baseline": known["base"], "target": known["target"], "rtol": 1e9})
    job = client.json(f"/api/diffs?{words}", "POST", cookie=cookie)
    for _ in range(600):
        if job["state"] != "running":
            break
        time.sleep(0.05)
        job = client.json(f"/api/diffs/{job['id']}", cookie=cookie)
    assert (job["state"], job["done"]) == ("done", 0), "no site was measured again"
    assert job["id"] != first
    assert client.json(f"/api/diffs/{job['id']}/view", cookie=cookie)["view"]["exit_code"] == 0


def test_roots_name_a_path_that_is_no_directory(tmp_path):
    with pytest.raises(
        RunNotFoundError, match="none does not exist; give the directory of a run, or one that contains"
    ):
        Roots([tmp_path / "none"])
    (tmp_path / "file").touch()
    with pytest.raises(RunNotFoundError, match="file is a file; give the directory of a run"):
        Roots([tmp_path / "file"])


# --- data ------------------------------------------------------------------------------------------


def test_web_diff_holds_the_numbers_of_the_command(server, runs):
    _, page = diff(server)
    command = [sys.executable, "-m", "tapscope", "diff", str(runs / "base"), str(runs / "target"), "--json"]
    lines = [json.loads(line) for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]
    findings = {line["site"]: line for line in lines if line["type"] == "finding"}
    for each in page["view"]["findings"]:
        line = findings[each["site"]]
        assert each["verdict"] == line["verdict"]
        if each["ratio"]["value"] is not None:
            assert each["ratio"]["value"] == line["ratio"]
        if line["metrics"] is not None:
            assert each["max_abs"]["value"] == line["metrics"]["max_abs"]
    assert page["view"]["exit_code"] == lines[-1]["exit_code"]
    assert page["view"]["causes"][0]["site"] == SITE


def test_web_places_hold_the_errors_of_the_layers_by_token(server):
    client, cookie, _, _ = server
    job, view = diff(server)
    (grid,) = client.json(f"/api/diffs/{job}/places", cookie=cookie)["layers"]
    assert grid["axis"] == "token"
    assert grid["names"][:2] == ["0:0", "0:1"]
    assert [row["label"] for row in grid["rows"]] == [row["label"] for row in view["layers"]["rows"]]
    layer = next(row for row in grid["rows"] if row["label"] == "layer 2")
    assert layer["is_cause"]
    assert layer["glyphs"][0] in "123456789"  # the first row was scaled in every step
    at = grid["rows"].index(layer)
    level = client.json(f"/api/diffs/{job}/level?axis=token&at={at}", cookie=cookie)
    (mlp,) = [row for row in level["grid"]["rows"] if row["label"] == "mlp"]
    assert mlp["glyphs"][0] == layer["glyphs"][0]
    assert level["grid"]["names"] == grid["names"]


def test_web_diff_of_the_same_runs_is_computed_once(server):
    assert diff(server)[0] == diff(server)[0]


def test_web_pair_shows_the_values_around_its_largest_error(server):
    client, cookie, _, _ = server
    job, page = diff(server)
    order = page["view"]["causes"][0]["order"]
    pair = client.json(f"/api/diffs/{job}/pairs/{order}", cookie=cookie)
    assert pair["tile"]["num_columns"] == 64
    assert client(f"/api/diffs/{job}/pairs/99999", cookie=cookie)[0] == 400


def test_web_tensor_is_that_of_show(server, runs):
    client, cookie, _, _ = server
    words = urlencode({"site": SITE, "step": 0})
    view = client.json(f"/api/runs/{ids(server)['base']}/tensor?{words}", cookie=cookie)
    command = [sys.executable, "-m", "tapscope", "show", str(runs / "base"), SITE, "--step", "0"]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    for value in view["tile"]["values"][0][:6]:
        assert value in shown


def test_web_lists_are_paged_and_tell_their_length(server):
    client, cookie, _, _ = server
    run = ids(server)["base"]
    whole = client.json(f"/api/runs/{run}/records?step=0", cookie=cookie)
    part = client.json(f"/api/runs/{run}/records?step=0&offset=3&limit=2", cookie=cookie)
    assert part["num_records"] == whole["num_records"] == len(whole["records"])
    assert part["records"] == whole["records"][3:5]
    runs = client.json("/api/runs?offset=1", cookie=cookie)
    assert (len(runs["runs"]), runs["num_runs"]) == (2, 3)
    job, page = diff(server)
    found = client.json(f"/api/diffs/{job}/findings?offset=5&limit=4", cookie=cookie)
    assert found["num_findings"] == page["view"]["num_findings"]
    assert found["findings"] == page["view"]["findings"][5:9]
    assert client(f"/api/diffs/{job}/findings?offset=-1", cookie=cookie)[0] == 400


def test_web_pair_of_a_step_range_begins_at_its_worst_row(server):
    client, cookie, _, _ = server
    job, page = diff(server)
    order = page["view"]["causes"][0]["order"]
    whole = client.json(f"/api/diffs/{job}/pairs/{order}", cookie=cookie)
    last = client.json(f"/api/diffs/{job}/pairs/{order}?first=1&last=2", cookie=cookie)
    assert last["strip"] == whole["strip"]
    row = last["worst_row"] - last["tile"]["first_row"]
    assert last["tile"]["rows"][row]["step"] in (1, 2)


@pytest.mark.parametrize("measure", MEASURES)
def test_heat_map_of_a_run_is_the_largest_measure_of_the_records(measure, tmp_path):
    source = RunSource.open(toy_run(tmp_path / "run"))
    reading = {"|max|": lambda s: s.absmax, "rms": lambda s: s.rms, "not finite": lambda s: s.nonfinite,
               "zeros": lambda s: s.zeros}[measure]  # fmt: skip
    grid = magnitude_grid(source, None, 3, measure)
    assert [last - first for first, last in grid.columns].count(1) == 1  # two of four steps share a column
    for row in grid.rows:
        for (first, last), text in zip(grid.columns, row.cells.split(), strict=True):
            found = [r for r in source.of_site(row.label) if first <= r.key.step <= last and r.stats is not None]
            top = max(map(reading, (r.stats for r in found)), default=None)
            assert text == ("-" if top is None else number(float(top)) if measure in ("|max|", "rms") else f"{top:,}")
    odd = next(row for row in grid.rows if row.label == "model.layers.2.self_attn.o_proj:out")
    assert ("%" in odd.glyphs) == (measure in ("|max|", "rms"))
    with pytest.raises(ConfigError, match="invalid measure 'x': expected"):
        magnitude_grid(source, measure="x")


def test_masks_do_not_set_the_scale_of_the_heat_map(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        run.step()
        for site, top in (("attn:in[attention_mask]", 3.4e38), ("a:out", 1.0), ("b:out", 10.0), ("c:out", 100.0)):
            run.put(site, numpy.full((2, 2), top, numpy.float32))
    grid = magnitude_grid(RunSource.open(tmp_path / "run"))
    assert {row.label: row.glyphs for row in grid.rows} == {
        "attn:in[attention_mask]": "9", "a:out": "1", "b:out": "5", "c:out": "9",
    }  # fmt: skip


def test_integers_and_masks_count_in_no_line_of_several_sites(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        run.step()
        for layer, top in enumerate((1.0, 10.0, 100.0)):
            run.put(f"layers.{layer}:in[position_ids]", numpy.arange(5000).reshape(2, -1))
            run.put(f"layers.{layer}:in[attention_mask]", numpy.full((2, 2), 3.4e38, numpy.float32))
            run.put(f"layers.{layer}.mlp:out", numpy.full((2, 2), top, numpy.float32))
        run.put("ids:out", numpy.full((2, 2), 7))
        nan = numpy.full((2, 2), numpy.nan, numpy.float32)
        run.put("layers.1:in[other_mask]", nan)
    source = RunSource.open(tmp_path / "run")
    grid = magnitudes_of(source)
    layers = layer_grid(grid)
    assert [(row.label, layers.cell(i, 0).glyph, layers.cell(i, 0).text) for i, row in enumerate(layers.rows)] == [
        ("layer 0", "1", "1.0e+00"),
        ("layer 1", "%", "1.0e+01"),  # non-finite values of a mask count
        ("layer 2", "9", "1.0e+02"),
        ("ids", "4", "7.0e+00"),  # the row has no other sites
    ]
    assert grid.rows[grid.largest(layers.rows[2].orders)[0]].name == "layers.2.mlp:out"
    assert grid.cell(*grid.largest([0])).text == "5.0e+03"  # a single site shows its own measure
    zeros = layer_grid(magnitudes_of(source, measure="zeros"))
    assert zeros.cell(0, 0).text == "1"  # position 0


def test_run_cell_of_several_steps_opens_the_most_conspicuous_one(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        for top in (1.0, 7.0, 3.0):
            run.step()
            run.put("a:out", numpy.full((2, 2), top, numpy.float32))
    source = RunSource.open(tmp_path / "run")
    assert cell_records(source, "a:out", 0, 2).step == 1
    assert cell_records(source, "a:out", 2, 2).step == 2
    assert cell_records(source, "none:out", 0, 2).records == ()


def test_two_servers_on_one_host_keep_both_sessions():
    logins = Login(port=1000), Login(port=2000)
    cookies = "; ".join(f"{login.cookie}={login.by_link(login.link)}" for login in logins)
    for login in logins:
        login.check({"cookie": cookies})


def test_web_tables_answer_for_a_record_and_for_a_pair(server):
    client, cookie, _, _ = server
    job, page = diff(server)
    order = page["view"]["causes"][0]["order"]
    words = urlencode({"site": SITE, "step": 0})
    for base in (f"/api/runs/{ids(server)['base']}/table{{}}?{words}", f"/api/diffs/{job}/pairs/{order}/table{{}}?"):
        tile = client.json(base.format("/tile") + "&row=3&column=60&rows=2&columns=50", cookie=cookie)
        assert (tile["first_row"], tile["first_column"], len(tile["target"][0])) == (3, 60, 4)
        row, column = client.json(base.format("/largest"), cookie=cookie)
        cell = client.json(base.format("/cell") + f"&row={row}&column={column}", cookie=cookie)
        assert cell["link"].endswith(cell["index"])
        assert client.json(base.format("/place") + "&index=[2,5]", cookie=cookie) == [2, 5]
        assert client.json(base.format("/find") + "&more_than=0", cookie=cookie) is not None
        assert client.json(base.format("/find"), cookie=cookie) is None
        assert client.json(base.format(""), cookie=cookie)["channels"]
        assert client.json(base.format("/tokens") + "&order=error&limit=3", cookie=cookie)["order"] == "error"
        assert client(base.format("/place") + "&index=a", cookie=cookie)[0] == 400
    assert client(f"/api/diffs/{job}/pairs/99999/table", cookie=cookie)[0] == 400


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/tile&row=a", "invalid row 'a': "),
        ("/tile&rows=0", "invalid rows '0': "),
        ("/tile&row=-1", "row -1, column 0 is outside of 22 rows × 64 columns"),
        ("/cell&row=99", "row 99, column 0 is outside of 22 rows"),
        ("/cell&column=1e3", "invalid column '1e3': "),
        ("/find&direction=0", "invalid direction 0: expected 1 or -1"),
        ("/find&more_than=nan", "invalid more_than 'nan': "),
        ("/find&more_than=%E2%80%AE%1b", "invalid more_than '\\"),
        ("/find&column=64", "row 0, column 64 is outside of"),
        ("/tokens&order=size", "invalid order 'size': "),
        ("/tokens&limit=0", "invalid limit '0': "),
        ("/place", "missing parameter 'index'"),
    ],
)
def test_web_tables_refuse_an_invalid_parameter_in_a_sentence(server, path, sentence):
    client, cookie, _, _ = server
    path, _, words = path.partition("&")
    address = f"/api/runs/{ids(server)['base']}/table{path}?{urlencode({'site': SITE, 'step': 0})}&{words}"
    status, body, _ = client(address, cookie=cookie)
    assert status == 400
    assert list(json.loads(body)) == ["error"]
    assert json.loads(body)["error"].startswith(sentence)
    assert "\u202e" not in body


def test_web_series_cover_all_steps_of_a_site_and_a_finding(server):
    client, cookie, _, _ = server
    job, page = diff(server)
    order = page["view"]["causes"][0]["order"]
    run = client.json(f"/api/runs/{ids(server)['base']}/series?site={quote(SITE)}", cookie=cookie)
    assert [each["name"] for each in run["series"]] == ["rms", "|max|"]
    assert [point["step"] for point in run["series"][0]["points"]] == [0, 1, 2]
    pair = client.json(f"/api/diffs/{job}/pairs/{order}/series", cookie=cookie)
    assert pair["series"][0]["name"] == "error ÷ floor"
    assert client(f"/api/diffs/{job}/pairs/99999/series", cookie=cookie)[0] == 400


def test_web_escapes_names_in_json(server):
    client, cookie, _, _ = server
    view = client.json(f"/api/runs/{ids(server)['hostile']}", cookie=cookie)
    assert "\x1b" not in json.dumps(view, ensure_ascii=False)
    assert "\u202e" not in json.dumps(view, ensure_ascii=False)


# --- live runs -------------------------------------------------------------------------------------


def test_web_live_sends_events(server):
    client, cookie, _, _ = server
    connection = http.client.HTTPConnection(client.host, int(client.port), timeout=20)
    connection.request("GET", f"/api/runs/{ids(server)['base']}/live", headers={"cookie": cookie})
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    block = b""
    while b"data: " not in block:
        block += response.readline()
    assert json.loads(block.partition(b"data: ")[2])["view"]["num_records"] == 300
    connection.close()


# --- pages in a browser ----------------------------------------------------------------------------


@contextmanager
def logged_in(chromium, server, path, **context):
    _, cookie, _, url = server
    name, _, value = cookie.partition("=")
    state = {"cookies": [{"name": name, "value": value, "domain": "127.0.0.1", "path": "/", "expires": -1,
                          "httpOnly": True, "secure": False, "sameSite": "Strict"}], "origins": []}  # fmt: skip
    with page_of(chromium, url + path, storage_state=state, **context) as page:
        page.wait_for_selector("h1")
        yield page


def test_page_password_form_logs_in_and_out(chromium, runs):
    with serving(runs, password="correct horse") as (url, _, _), page_of(chromium, url + "/login") as page:
        page.fill("input[name=password]", "correct horse")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Diff")
        page.click("text=Log out")
        page.wait_for_selector("input[name=password]")
        page.goto(url + "/")
        page.wait_for_selector("input[name=password]")


def test_page_diff_from_the_list_of_runs_to_a_value(chromium, server):
    with logged_in(chromium, server, "/") as page:
        page.select_option("select[name=baseline]", label="base")
        page.select_option("select[name=target]", label="target")
        page.click("text=Diff")
        page.wait_for_selector("article.cause")
        assert page.locator(".state").inner_text() == "DIFFERS"
        assert "model.layers.2.mlp.down_proj" in page.locator(".answer").inner_text()
        page.keyboard.press("n")
        page.locator("article.cause button:text-is('Values')").click()
        page.wait_for_selector("table.tile")
        assert SITE in page.locator("section[aria-label=Values]").inner_text()
        assert page.url.rpartition("#")[2].isdecimal()
        page.reload()
        page.wait_for_selector("table.tile")  # the address opens the finding
        cause = int(page.url.rpartition("#")[2])
        page.keyboard.press("b")
        page.wait_for_function(f"Number(location.hash.slice(1)) > {cause}")
        page.keyboard.press("B")
        page.wait_for_function(f"Number(location.hash.slice(1)) === {cause}")
        everything = page.get_by_label("also what agrees")
        page.keyboard.press("d")
        expect(everything).to_be_checked()
        page.keyboard.press("d")
        expect(everything).not_to_be_checked()


def test_page_diff_sorts_the_findings_by_a_click_on_a_header(chromium, server):
    with logged_in(chromium, server, page_paths(server)["diff"]) as page:
        page.get_by_label("also what agrees").check()
        rows = page.locator("#findings tbody tr")
        usual = rows.all_inner_texts()
        header = page.locator("#findings th", has_text="rel l2")
        for order in ("descending", "ascending"):
            header.get_by_role("button").click()
            assert header.get_attribute("aria-sort") == order
            texts = page.locator("#findings tbody td:nth-child(5)").all_inner_texts()
            errors = [float("-inf") if text == "-" else float(text) for text in texts]
            assert len(set(errors)) > 3
            assert errors == sorted(errors, reverse=order == "descending")
        header.get_by_role("button").click()
        assert header.get_attribute("aria-sort") is None
        assert rows.all_inner_texts() == usual


IN_SIGHT = """() => {
  const [grid, here] = [".grid", "td.here"].map((name) => document.querySelector(name)?.getBoundingClientRect());
  const isInside = (first, last) => here[first] >= grid[first] && here[last] <= grid[last];
  return here && isInside("left", "right") && isInside("top", "bottom");
}"""


def test_page_diff_with_values_fits_a_phone(chromium, server):
    options = {"viewport": {"width": 390, "height": 800}, "bypass_csp": True}
    with logged_in(chromium, server, page_paths(server)["diff"], **options) as page:
        page.locator("article.cause button:text-is('Values')").click()
        page.wait_for_selector(".chart canvas")
        check_accessibility(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.wait_for_selector("td.here")
        page.locator("div.grid").focus()
        for key in ("End", "G", "Home", "g"):
            page.keyboard.press(key)
            page.wait_for_function(IN_SIGHT)


def test_page_heat_map_is_by_token_too(chromium, server):
    known = ids(server)
    with logged_in(chromium, server, f"/diff/?baseline={known['base']}&target={known['target']}") as page:
        page.get_by_role("button", name="ranks").click()
        page.get_by_text("The target has one rank.").wait_for()
        page.get_by_role("button", name="tokens").click()
        page.get_by_role("heading", name="Error ÷ floor, by token").wait_for()
        assert " · token 0:0 · " in page.locator(".heat-reading").inner_text()


def expect(locator):
    driver = pytest.importorskip("playwright.sync_api")
    driver.expect.set_options(timeout=30_000)  # same timeout as other waits for a page
    return driver.expect(locator)


def test_page_diff_opens_a_layer_into_modules_and_these_into_sites(chromium, server):
    client, cookie, _, _ = server
    job, view = diff(server)
    layer = next(i for i, row in enumerate(view["layers"]["rows"]) if row["label"] == "layer 2")
    inside = client.json(f"/api/diffs/{job}/level?at={layer}", cookie=cookie)
    assert inside["around"] == ["layer 2"]
    assert inside["path"] == "model.layers.2"
    mlp = inside["names"].index("model.layers.2.mlp")
    with logged_in(chromium, server, page_paths(server)["diff"], bypass_csp=True) as page:
        heat = page.locator("section[aria-label='Heat map']")  # the values of a site have a heat map, too
        trail, reading = page.locator("nav.trail"), heat.locator(".heat-reading")
        heat.locator("canvas").focus()
        assert reading.inner_text().startswith("layer 2 · step ")  # the layer of the cause
        page.keyboard.press("Enter")
        expect(trail).to_have_text("layers › layer 2")
        expect(reading).to_contain_text("mlp · step ")
        glyphs = inside["grid"]["rows"][mlp]["glyphs"]
        assert glyphs[0] in "123456789"
        page.keyboard.press("Enter")
        expect(trail).to_have_text("layers › layer 2 › mlp")
        expect(page.locator("input[type=search]")).to_have_value("model.layers.2.mlp")
        check_accessibility(page)
        page.keyboard.press("Backspace")
        expect(trail).to_have_text("layers › layer 2")
        expect(reading).to_contain_text("mlp · step ")  # the cursor's previous step
        page.keyboard.press("Enter")
        expect(trail).to_have_text("layers › layer 2 › mlp")
        page.keyboard.press("Enter")
        expect(trail).to_have_text("layers › layer 2 › mlp › down_proj")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"section[aria-label=Values] h2:text-is('{SITE}')")
        trail.get_by_role("button", name="layers").click()
        expect(trail).to_have_count(0)
        expect(reading).to_contain_text("layer 2 · step ")
        heat.locator("canvas").focus()
        page.keyboard.press("Enter")
        expect(page.locator("input[type=search]")).to_have_value("model.layers.2.")
        page.get_by_role("button", name="sites", exact=True).click()
        expect(trail).to_have_count(0)
        expect(page.locator("input[type=search]")).to_have_value("")


@pytest.fixture(scope="module")
def long_server(tmp_path_factory):
    """1100 steps; only the last differs."""
    root = tmp_path_factory.mktemp("long")
    for name in ("base", "target"):
        with RunFactory(root / name) as run:
            for step in range(1100):
                run.step()
                for layer in range(2):
                    is_off = layer == 1 and step == 1099 and name == "target"
                    run.put(f"model.layers.{layer}:out", {0: numpy.array([8.0 if is_off else 1.0], numpy.float32)})
    with serving(root) as (url, link, _):
        client = Client(url)
        _, _, headers = client(f"/login?token={link.partition('token=')[2]}")
        yield client, headers["set-cookie"].partition(";")[0], "", url


ZOOMED = [
    ("diff", "layers", "layer 1", "1098-1099", "1099"),
    ("diff", "sites", "model.layers.1:out", "1098-1099", "1099"),
    ("run", "layers", "layer 1", "1097-1099", "1098-1099"),
    ("run", "sites", "model.layers.1:out", "1097-1099", "1098-1099"),
]
"""Page, level, row, label of the last column with all steps, and with half of the steps."""


@pytest.mark.parametrize(
    ("kind", "level", "label", "last", "half"),
    mostly_soak(ZOOMED, default=ZOOMED[::3]),
)
def test_page_heat_map_is_zoomed_to_single_steps(chromium, long_server, kind, level, label, last, half):
    known = ids(long_server)
    diff_path = f"/diff/?baseline={known['base']}&target={known['target']}"
    with logged_in(chromium, long_server, diff_path if kind == "diff" else f"/run/{known['target']}") as page:
        reading, range_shown = page.locator(".heat-reading"), page.locator(".heat [role=status]")
        page.get_by_role("button", name=level, exact=True).click()
        expect(range_shown).to_have_text("all steps, neighbours joined by their maximum")
        page.locator(".heat canvas").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("End")
        expect(reading).to_contain_text(f"{label} · step {last} · ")
        page.keyboard.press("+")
        expect(range_shown).to_contain_text(f"to {half}")  # the first response has arrived; columns may still be joined
        page.keyboard.press("+")
        expect(range_shown).to_contain_text("to 1099")
        expect(range_shown).not_to_contain_text("joined")  # single steps were fetched from the server
        page.keyboard.press("End")
        expect(reading).to_contain_text(f"{label} · step 1099 · ")
        worst = reading.inner_text()
        page.keyboard.press("ArrowLeft")
        expect(reading).to_contain_text(f"{label} · step 1098 · ")
        assert worst.rpartition(" · ")[2] != reading.inner_text().rpartition(" · ")[2]
        page.keyboard.press("Home")
        first = int(re.search(r"step (\d+) ", reading.inner_text())[1])
        page.keyboard.press("ArrowLeft")  # moves past the visible columns
        expect(reading).to_contain_text(f"{label} · step {first - 1} · ")
        for _ in range(12):
            if page.get_by_role("button", name="Zoom out").is_disabled():
                break
            page.get_by_role("button", name="Zoom out").click()
        expect(range_shown).to_have_text("all steps, neighbours joined by their maximum")


def test_web_zoomed_columns_are_those_of_all_steps(long_server):
    client, cookie, _, _ = long_server
    job, view = diff(long_server)
    level = client.json(f"/api/diffs/{job}/level?first=1090&last=1099", cookie=cookie)["grid"]
    sites = client.json(f"/api/diffs/{job}/sites?first=1090&last=1099", cookie=cookie)
    assert level["columns"] == sites["columns"] == [[step, step] for step in range(1090, 1100)]
    assert [row["label"] for row in level["rows"]] == [row["label"] for row in view["layers"]["rows"]]
    assert [row["glyphs"][:-1] for row in sites["rows"]] == ["=" * 9] * 2
    target = ids(long_server)["target"]
    every = client.json(f"/api/runs/{target}", cookie=cookie)["magnitudes"]
    part = client.json(f"/api/runs/{target}/magnitudes?first=0&last=9", cookie=cookie)
    assert part["columns"] == [[step, step] for step in range(10)]
    assert [row["glyphs"] for row in part["rows"]] == [row["glyphs"][:1] * 10 for row in every["rows"]]  # one scale
    for path in (f"/api/diffs/{job}/sites", f"/api/diffs/{job}/level", f"/api/runs/{target}/magnitudes"):
        status, body, _ = client(f"{path}?first=2000&last=3000", cookie=cookie)
        assert status == 400
        assert json.loads(body)["error"].startswith("no step from 2000 to 3000 in the ")


def test_web_level_outside_the_heat_map_is_refused_in_a_sentence(server):
    client, cookie, _, _ = server
    job, view = diff(server)
    status, body, _ = client(f"/api/diffs/{job}/level?at=999", cookie=cookie)
    assert status == 400
    assert json.loads(body)["error"] == f"no row 999 here: the heat map has {len(view['layers']['rows'])}"
    assert client(f"/api/diffs/{job}/level?at=x", cookie=cookie)[0] == 400
    assert client(f"/api/diffs/{job}/level?axis=channel", cookie=cookie)[0] == 400


def test_page_run_opens_layers_down_to_the_records_of_a_site(chromium, server):
    client, cookie, _, _ = server
    known = ids(server)["base"]
    layers = client.json(f"/api/runs/{known}/level", cookie=cookie)
    assert "layer 1" in [row["label"] for row in layers["grid"]["rows"]]
    with logged_in(chromium, server, f"/run/{known}") as page:
        page.get_by_role("button", name="layers").click()
        page.get_by_role("heading", name="Layers by step").wait_for()
        page.locator(".heat canvas").focus()
        for _ in range([row["label"] for row in layers["grid"]["rows"]].index("layer 1")):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator("nav.trail")).to_have_text("layers › layer 1")
        page.get_by_label("Measure").select_option("rms")
        page.wait_for_selector(".heat-reading:has-text('rms ')")
        expect(page.locator("nav.trail")).to_have_text("layers › layer 1")
        page.locator(".heat canvas").focus()
        at = str(layers["names"].index("1"))
        inside = client.json(f"/api/runs/{known}/level?at={at}", cookie=cookie)
        page.keyboard.press("PageUp")
        site = next(i for i, each in enumerate(inside["sites"]) if each is not None)
        for _ in range(site):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Records of step").wait_for()
        expect(page.locator("[aria-label=Records] a").first).to_have_text(inside["names"][site])


def test_pages_show_the_module_graph(chromium, server):
    client, cookie, _, _ = server
    job, _ = diff(server)
    graph = client.json(f"/api/diffs/{job}/modules", cookie=cookie)
    (cause,) = [node for node in graph["nodes"] if node["is_cause"]]
    assert f"{cause['path']}:out" == SITE
    with logged_in(chromium, server, page_paths(server)["diff"], bypass_csp=True) as page:
        page.click("summary:text-is('Module graph')")
        page.wait_for_selector("section[aria-label=Modules] tr.producer")
        row = page.locator("section[aria-label=Modules] tr.producer").inner_text().split("\t")
        assert [row[1].strip(), row[3], row[6]] == [cause["name"], cause["shape"], cause["ratio"]["text"]]
        check_accessibility(page)
        page.locator("section[aria-label=Modules] tr.producer button").click()
        page.wait_for_selector(f"section[aria-label=Values] h2:text-is('{SITE}')")
    with logged_in(chromium, server, page_paths(server)["run"]) as page:
        page.click("summary:text-is('Module graph')")
        step = page.get_by_label("Step", exact=True)
        step.fill("999")
        step.press("Enter")
        page.get_by_text("No module was recorded here.").wait_for()
        last = int(step.get_attribute("max"))
        assert last > 0
        step.fill(str(last))
        step.press("Enter")
        page.locator("details tr", has_text="down_proj").first.locator("a").click()
        page.wait_for_selector("table.tile")
        assert f"step={last}&rank=0" in page.url


def _how(graph, visible, producer, consumer):
    """Return the page's description of the flows between two rows: proven functions, or inferred."""
    rows = {}
    for i in range(len(graph.nodes)):
        rows[i] = visible.index(i) if i in visible else rows[graph.nodes[i].parent]
    found = [f for f in graph.flows if (rows[f.producer], rows[f.consumer]) == (producer, consumer)]
    shown = list(dict.fromkeys(each.through for each in found if not each.is_inferred))
    if not shown:
        return " (through a function?)"
    return "" if "" in shown else f" ({' and '.join(shown)})"


@pytest.mark.parametrize("width", mostly_soak([390, 1280], default=[390]))
def test_page_draws_the_data_flow_of_the_view_model_and_folds_by_keys(chromium, server, runs, width):
    graph = RunSource.open(runs / "base").module_graph(0, 0)
    paths = page_paths(server)
    with logged_in(chromium, server, paths["run"], bypass_csp=True, viewport={"width": width, "height": 800}) as page:
        page.click("summary:text-is('Module graph')")
        rows = page.locator("#module-graph tbody tr")

        def check_lines(folded):
            visible = visible_modules(graph, folded)
            lanes = flow_lanes(graph, visible)
            assert rows.count() == len(visible)
            for at in range(len(visible)):
                received = [lane for lane in lanes if at in lane.consumers]
                assert rows.nth(at).locator("path.tip").count() == len(received)
                drawn = rows.nth(at).locator("path.tip.inferred").count()
                assert drawn == sum(lane.is_inferred for lane in received)
                wanted = {
                    graph.nodes[visible[lane.producer]].path + _how(graph, visible, lane.producer, at)
                    for lane in received
                }
                found = rows.nth(at).locator("td").nth(7).inner_text()
                assert set(filter(None, found.split(", "))) == wanted
            return lanes

        page.wait_for_selector("#module-graph")
        assert check_lines(graph.folded)
        page.click("text=Unfold all")
        assert check_lines(())
        check_accessibility(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        layer = next(i for i, node in enumerate(graph.nodes) if node.name == "layers.1")
        page.locator(f"button[data-fold='{layer}']").focus()
        page.keyboard.press("ArrowLeft")
        assert check_lines([layer])
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.innerText") in ("layers.2", "▾")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowRight")
        check_lines(())


def test_page_run_shows_other_measures(chromium, server):
    with logged_in(chromium, server, f"/run/{ids(server)['base']}") as page:
        page.locator(".heat canvas").focus()
        for measure in ("zeros", "rms"):
            page.select_option("select[aria-label=Measure]", label=measure)
            page.wait_for_selector(f".heat-reading:has-text('{measure} ')")
        page.select_option("select[aria-label=Rank]", label="0")
        page.locator(".heat canvas").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("td a")


def test_page_run_leads_to_a_tensor(chromium, server):
    with logged_in(chromium, server, f"/run/{ids(server)['base']}") as page:
        page.locator(".heat canvas").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.click("td a")
        page.wait_for_selector("table.tile")
        page.fill("input[aria-label='row, column']", "[3, 0]")
        page.click("text=Go")
        page.wait_for_selector("p.mono:has-text('[3] · 0:3')")  # token ids are integers, one per row
        assert page.url.endswith("#[3]")


def test_page_tensor_moves_a_cursor_and_keeps_its_place_in_the_address(chromium, server):
    path = f"/tensor/?run={ids(server)['base']}&site={quote(SITE)}&step=0"
    with logged_in(chromium, server, path) as page:
        page.wait_for_selector("table.tile")
        page.fill("input[aria-label='row, column']", "[3, 0]")
        page.click("button:text-is('Go')")
        page.wait_for_selector("p.mono:has-text('[3,0] ·')")
        page.locator("div.grid").focus()
        for key in ("ArrowRight", "ArrowDown", "End"):
            page.keyboard.press(key)
        page.wait_for_selector("p.mono:has-text('[4,63] ·')")
        page.keyboard.press("n")
        page.wait_for_selector("text=None after this value.")
        page.wait_for_selector("text=max |x| by channel")
        page.wait_for_selector(".chart-reading:has-text('step 2 · rank 0: ')")
        page.reload()  # the address opens the value
        page.wait_for_selector("p.mono:has-text('[4,63] ·')")


def test_page_tensor_map_leads_to_the_largest_value_of_a_cell(chromium, server):
    words = urlencode({"run": ids(server)["base"], "site": SITE, "step": 0})
    with logged_in(chromium, server, f"/tensor/?{words}") as page:
        page.locator(".heat canvas").focus()
        page.keyboard.press("End")
        reading = page.locator(".heat-reading").inner_text()
        assert reading.startswith("0:0 #3 · column 63 · max |x| ")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"#\[0,63\]$"))


class HeldRequests:
    """Holds the requests of a page until the test releases them, in any order."""

    def __init__(self, page, pattern):
        self._page, self._routes = page, []
        page.route(re.compile(pattern), lambda route: self._routes.append(route))

    def wait(self, num):
        """Wait until ``num`` requests are held."""
        for _ in range(6000):  # upper bound
            if len(self._routes) >= num:
                return
            self._page.wait_for_timeout(5)
        raise AssertionError(f"{len(self._routes)} of {num} requests")

    def answer(self, which=0):
        """Release one request and wait until the page has handled the response."""
        route = self._routes.pop(which)
        with self._page.expect_event("requestfinished", lambda request: request.url == route.request.url):
            route.continue_()
        self._page.evaluate("fetch('/api/runs').then((found) => found.text())")  # a later request has completed
        self._page.evaluate("new Promise(requestAnimationFrame)")


def test_page_run_shows_what_was_asked_last(chromium, server):
    with logged_in(chromium, server, f"/run/{ids(server)['base']}") as page:
        page.wait_for_selector(".heat-reading:has-text('|max| ')")
        views = HeldRequests(page, r"/api/runs/[^/]+\?")
        for num, measure in enumerate(("zeros", "rms"), 1):
            page.select_option("select[aria-label=Measure]", label=measure)
            views.wait(num)
        views.answer(1)
        page.wait_for_selector(".heat-reading:has-text('rms ')")
        views.answer()
        assert "rms " in page.locator(".heat-reading").inner_text()
        cells = HeldRequests(page, r"/cell\?")
        page.locator(".heat canvas").focus()
        page.keyboard.press("Enter")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        cells.wait(2)
        site = page.locator(".heat-reading").inner_text().split(" ")[0]
        cells.answer(1)
        page.wait_for_selector(f"td a:text-is('{site}')")
        cells.answer()
        assert page.locator("td a").first.inner_text() == site


def test_page_diff_shows_what_was_asked_last(chromium, server):
    with logged_in(chromium, server, page_paths(server)["diff"]) as page:
        heading = page.get_by_role("heading", name="Error ÷ floor, by")
        pressed = page.locator("section[aria-label='Heat map'] button[aria-pressed=true]")
        places = HeldRequests(page, r"/places$")
        page.get_by_role("button", name="tokens", exact=True).click()
        places.wait(1)
        page.get_by_role("button", name="sites", exact=True).click()
        places.answer()
        expect(heading).to_have_text("Error ÷ floor, by step")
        expect(pressed).to_have_text("sites")
        page.get_by_role("button", name="layers", exact=True).click()
        levels = HeldRequests(page, r"/level\?")
        page.locator(".heat canvas").focus()
        page.keyboard.press("Enter")
        levels.wait(1)
        page.get_by_role("button", name="sites", exact=True).click()
        levels.answer()
        expect(pressed).to_have_text("sites")
        assert page.locator("nav.trail").count() == 0
        page.get_by_label("also what agrees").check()
        pairs = HeldRequests(page, r"/pairs/\d+$")
        buttons = page.locator("#findings tbody button")
        for i in range(2):
            buttons.nth(i).click()
            pairs.wait(i + 1)
        shown = page.locator("section[aria-label=Values] h2").first
        pairs.answer(1)
        expect(shown).to_have_text(buttons.nth(1).inner_text())
        page.wait_for_selector(".chart canvas")
        pairs.answer()
        expect(shown).to_have_text(buttons.nth(1).inner_text())


def test_page_tensor_is_where_the_last_key_leads(chromium, server):
    with logged_in(chromium, server, page_paths(server)["tensor"]) as page:
        page.wait_for_selector("h3:text-is('Tokens')")
        reading = page.locator("div.grid + p.mono")
        tokens = HeldRequests(page, r"/tokens\?")
        page.get_by_role("button", name="by size").click()
        page.get_by_role("button", name="by position").click()
        tokens.wait(2)
        tokens.answer(1)
        tokens.answer()
        expect(page.get_by_role("button", name="by position")).to_have_attribute("aria-pressed", "true")
        tiles = HeldRequests(page, r"/tile\?")
        page.locator("div.grid").focus()
        page.keyboard.press("End")
        tiles.wait(1)
        page.keyboard.press("Home")
        expect(reading).to_contain_text("[0,0] ·")
        tiles.answer()
        page.keyboard.press("ArrowRight")
        expect(reading).to_contain_text("[0,1] ·")
        for _ in range(14):  # the tile ends after 12 columns
            page.keyboard.press("ArrowRight")
        tiles.wait(4)
        for which in (3, 0, 0, 0):
            tiles.answer(which)
        expect(reading).to_contain_text("[0,15] ·")


def test_page_live_shows_finished_steps(chromium, server):
    with logged_in(chromium, server, f"/live/{ids(server)['base']}") as page:
        page.wait_for_selector(".state:has-text('closed')")
        assert "finished steps\n3" in page.locator("dl.facts").inner_text()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A run of 80 layers with NaN from step 1 on, a run without records, and an unreadable run."""
    root = tmp_path_factory.mktemp("many")
    with RunFactory(root / "broken") as run:
        run.step()
    with RunFactory(root / "bare") as run:
        run.step()
    (root / "broken" / "run.json").write_text("{")
    with RunFactory(root / "good") as run:
        for step in range(3):
            run.step()
            for layer in range(80):
                for name in ("attn", "mlp", "norm"):
                    values = numpy.ones((2, 8), numpy.float32)
                    if step and layer >= 70:
                        values[1, 5] = numpy.nan
                    run.put(f"model.layers.{layer}.{name}:out", values)
    newest = [(root / name).stat().st_mtime for name in ("broken", "bare", "good")]
    for i, name in enumerate(("good", "bare", "broken")):
        os.utime(root / name, (max(newest) + i, max(newest) + i))
    with serving(root) as (url, link, _):
        client = Client(url)
        _, _, headers = client(f"/login?token={link.partition('token=')[2]}")
        yield client, headers["set-cookie"].partition(";")[0], "", url


def test_page_of_runs_tells_unusable_ones_and_does_not_offer_them_first(chromium, many):
    with logged_in(chromium, many, "/") as page:
        page.wait_for_selector("td a")
        rows = page.locator("tbody tr td:first-child").all_inner_texts()
        assert rows == ["broken unreadable", "bare no records", "good"]
        assert page.locator("select[name=target] option:checked").inner_text() == "good"


def test_page_of_a_large_run_begins_with_layers_and_names_the_first_nan(chromium, many):
    run = ids(many)["good"]
    with logged_in(chromium, many, f"/run/{run}") as page:
        expect(page.locator("button[aria-pressed=true]")).to_have_text("layers")
        expect(page.locator(".heat-reading")).to_have_text("layer 70 · step 1 · |max| 1.0e+00, not finite")
        canvas = page.locator(".scroll:has(canvas)")
        assert canvas.evaluate("each => each.scrollTop") > 0  # the map has scrolled to the cursor
        page.click("p.bad a")
        page.wait_for_selector("td.here")
        expect(page.locator("td.here")).to_have_text("nan")
        assert page.url.endswith("#[1,5]")
        assert "layers.70.attn" in page.locator("h1").inner_text()
    with logged_in(chromium, many, f"/live/{run}") as page:
        page.wait_for_selector(".charts canvas")
        assert "first model.layers.70.attn:out step 1 rank 0" in page.locator("dl.facts").inner_text()
        page.locator("[role=region] li a").last.click()
        page.wait_for_selector("td.here")


def test_page_that_fails_says_what_failed(chromium, many):
    known, origin = ids(many), many[-1]
    with logged_in(chromium, many, f"/run/{known['bare']}") as page:
        page.wait_for_selector(".heat-reading:has-text('Nothing was recorded.')")
        state = page.context.storage_state()
    page = chromium.new_page(storage_state=state)  # not one of `page_of`: Chromium logs the status 404
    page.goto(f"{origin}/run/{known['broken']}")
    page.wait_for_selector("[role=alert]")
    assert page.locator("h1").inner_text() == "This run cannot be shown"
    assert "This run cannot be shown" in page.title()
    page.close()


def test_page_copies_commands_and_links(chromium, server):
    with logged_in(
        chromium, server, page_paths(server)["diff"], permissions=["clipboard-read", "clipboard-write"]
    ) as page:
        page.wait_for_selector("article.cause")
        page.locator(".answer button.copy").click()
        expect(page.locator(".answer button.copy")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()").startswith("tapscope show ")
        page.locator("article.cause button.copy").click()
        expect(page.locator("article.cause button.copy")).to_have_text("Copied")
        link = page.evaluate("navigator.clipboard.readText()")
        assert link.startswith(f"target/{SITE}@")
        page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject(new Error('refused')))")
        page.locator("article.cause button.copy").click()
        expect(page.locator("article.cause button.copy")).to_have_text("Selected: Ctrl+C")
        assert page.evaluate("getSelection().toString()") == link
        page.locator("article.cause a").click()
        page.wait_for_selector("td.here")
        assert page.url.partition("#")[2] in link


def test_page_diff_shows_how_many_findings_are_left_out(chromium, tmp_path):
    for name, scale in (("base", 1.0), ("target", 2.0)):
        with RunFactory(tmp_path / name) as run:
            run.step()
            for i in range(620):
                run.put(f"layers.{i}.mlp:out", numpy.full((2, 2), scale, numpy.float32))
    with serving(tmp_path) as (_, link, _), page_of(chromium, link) as page:
        page.wait_for_selector("text=Diff")
        page.select_option("select[name=baseline]", label="base")
        page.select_option("select[name=target]", label="target")
        page.click("text=Diff")
        page.wait_for_selector("text=500 of 620 findings that match")
        page.click("text=Show more")
        page.wait_for_function("document.querySelectorAll('#findings tbody tr').length === 620")
        assert page.locator("p.more").count() == 0


def test_page_shows_hostile_names_as_text(chromium, server):
    with logged_in(chromium, server, f"/run/{ids(server)['hostile']}") as page:
        page.wait_for_selector("canvas")
        assert page.evaluate("window.injected") is None
        assert EVIL in page.locator("main").inner_text()


SHOWN = {"runs": "table", "run": "canvas", "tensor": "table.tile", "diff": "article", "live": "dl"}


def page_paths(server):
    """Return the address of every page."""
    known = ids(server)
    return {
        "runs": "/",
        "run": f"/run/{known['base']}",
        "tensor": f"/tensor/?run={known['base']}&site={quote(SITE)}&step=0",
        "diff": f"/diff/?baseline={known['base']}&target={known['target']}",
        "live": f"/live/{known['base']}",
    }


@pytest.mark.parametrize("looks", LOOKS)
@pytest.mark.parametrize("kind", SHOWN)
def test_page_with_all_that_it_loads_has_less_than_200_kb_and_is_accessible(chromium, server, kind, looks):
    with logged_in(chromium, server, page_paths(server)[kind], **look_of(*looks[0])) as page:
        page.wait_for_selector(SHOWN[kind])
        total = page.evaluate("performance.getEntries().reduce((sum, each) => sum + (each.encodedBodySize || 0), 0)")
        assert 20_000 < total < 100_000  # compressed, with the data
        check_looks(page, looks)


def test_static_files_are_small():
    assert sum(file.stat().st_size for file in STATIC.rglob("*") if file.suffix in (".js", ".css", ".svg")) < 200_000


def test_vendored_libraries_are_those_of_the_checksum_file_and_have_licences():
    vendor = STATIC / "vendor"
    known = dict(line.split()[::-1] for line in (vendor / "SHA256SUMS").read_text().splitlines())
    assert set(known) == {file.name for file in vendor.iterdir()} - {"SHA256SUMS", "README.md"}
    for name, digest in known.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
        if name.endswith(".js"):
            assert (vendor / name).with_suffix(".LICENSE").name in known


def test_web_compresses_pages_but_not_event_streams(server):
    client, cookie, _, _ = server
    known = f"/api/runs/{ids(server)['base']}"
    for path in ("/static/app.js", known):
        assert client(path, cookie=cookie)[2].get("content-encoding") is None
        connection = http.client.HTTPConnection(client.host, int(client.port), timeout=20)
        connection.request("GET", path, headers={"cookie": cookie, "accept-encoding": "gzip"})
        response = connection.getresponse()
        assert response.headers["content-encoding"] == "gzip"
        assert response.headers["content-security-policy"].startswith("default-src 'self'")
        assert gzip.decompress(response.read()).decode() == client(path, cookie=cookie)[1]
        connection.close()
    connection = http.client.HTTPConnection(client.host, int(client.port), timeout=20)
    connection.request("GET", f"{known}/live", headers={"cookie": cookie, "accept-encoding": "gzip"})
    assert connection.getresponse().headers.get("content-encoding") is None
    connection.close()
