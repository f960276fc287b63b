"""Web server and pages with slow clients, broken connections, vanishing runs, and restarts of the server."""

import http.client
import resource
import shutil
import socket
import time
from contextlib import ExitStack

import numpy
import pytest
from dashboard_runs import toy_run
from factories import RunFactory
from web_server import Client, serving

from tapscope.run_format.index_limits import MIN_RECORDS


def session(client, link):
    return client(f"/login?{link.partition('?')[2]}")[2]["set-cookie"].partition(";")[0]


def run_id(client, cookie):
    (run,) = client.json("/api/runs", cookie=cookie)["runs"]
    return run["id"]


def test_slow_and_silent_clients_delay_nobody(tmp_path):
    toy_run(tmp_path / "runs" / "run")
    with serving(tmp_path / "runs") as (url, link, _), ExitStack() as stack:
        client = Client(url)
        cookie = session(client, link)
        for i in range(40):
            half = stack.enter_context(socket.create_connection((client.host, int(client.port))))
            half.sendall(b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n" if i % 2 else b"")
        begun = time.monotonic()
        assert client("/api/runs", cookie=cookie)[0] == 200
        assert time.monotonic() - begun < 5


def test_half_closed_event_streams_are_given_up(tmp_path):
    toy_run(tmp_path / "runs" / "run")
    with serving(tmp_path / "runs") as (url, link, _):
        client = Client(url)
        cookie = session(client, link)
        path = f"/api/runs/{run_id(client, cookie)}/live"
        for _ in range(70):  # more than the limit of open streams
            stream = http.client.HTTPConnection(client.host, int(client.port), timeout=20)
            stream.request("GET", path, headers={"cookie": cookie})
            stream.sock.shutdown(socket.SHUT_WR)
            stream.close()
        for _ in range(100):
            stream = http.client.HTTPConnection(client.host, int(client.port), timeout=20)
            stream.request("GET", path, headers={"cookie": cookie})
            response = stream.getresponse()
            status = response.status
            stream.close()
            if status == 200:
                break
            time.sleep(0.2)
        assert status == 200


def test_runs_that_vanish_or_are_replaced_are_answered_with_a_sentence(tmp_path):
    run = toy_run(tmp_path / "runs" / "run")
    with serving(tmp_path / "runs") as (url, link, _):
        client = Client(url)
        cookie = session(client, link)
        known = run_id(client, cookie)
        words = "site=lm_head:out&step=0"
        paths = [f"/api/runs/{known}{rest}" for rest in ("", f"/tensor?{words}", f"/table/tile?{words}", "/series")]
        assert [client(path, cookie=cookie)[0] for path in paths] == [200] * 4
        for file in run.glob("rank-*/seg-*"):
            file.unlink()
        shutil.rmtree(run)
        for path in paths:
            status, body, _ = client(path, cookie=cookie)
            assert (status, "no such run; it may have been removed" in body) == (404, True)
        (tmp_path / "runs" / "run").mkdir()
        (tmp_path / "runs" / "run" / "run.json").write_text("{")
        status, body, _ = client(paths[0], cookie=cookie)
        assert status in (400, 404)
        assert "Traceback" not in body
        shutil.rmtree(run)
        toy_run(run)
        assert client(paths[1], cookie=cookie)[0] == 200


def test_a_page_under_a_restarted_server_leads_to_the_login(chromium, tmp_path):
    toy_run(tmp_path / "runs" / "run")
    context = chromium.new_context()
    page = context.new_page()
    with serving(tmp_path / "runs") as (url, link, _):
        page.goto(link)
        page.click("td a:text-is('steps and metrics')")
        page.wait_for_selector(".state:has-text('closed')")
    with serving(tmp_path / "runs", "--listen", url.removeprefix("http://")) as (_, again, _):
        page.wait_for_url("**/login")
        assert "Log in: " in page.locator("body").inner_text()
        page.goto(again)
        page.wait_for_selector("td a:text-is('steps and metrics')")
    context.close()


def test_pages_of_a_server_that_has_ended_and_of_a_removed_run_say_so(chromium, tmp_path):
    toy_run(tmp_path / "runs" / "run")
    context = chromium.new_context()
    list_of_runs, live, run = (context.new_page() for _ in range(3))
    with serving(tmp_path / "runs") as (url, link, _):
        list_of_runs.goto(link)
        run.goto(url + list_of_runs.locator("td a").first.get_attribute("href"))
        run.wait_for_selector("canvas")
        live.goto(run.url.replace("/run/", "/live/"))
        live.wait_for_selector("h1:text-is('run: steps and metrics')")
        live.wait_for_selector(".state")
        shutil.rmtree(tmp_path / "runs" / "run")
        run.select_option("select[aria-label=Measure]", label="zeros")
        run.wait_for_selector("text=no such run; it may have been removed")
    live.wait_for_selector("text=The connection is lost; trying again.")
    list_of_runs.click("text=Refresh")
    list_of_runs.wait_for_selector("text=The server does not respond. Is tapscope web still running?")
    context.close()


def test_a_page_whose_session_has_ended_leads_to_the_login(chromium, tmp_path):
    toy_run(tmp_path / "runs" / "run")
    context = chromium.new_context()
    with serving(tmp_path / "runs") as (_, link, _):
        page = context.new_page()
        page.goto(link)
        page.wait_for_selector("text=Refresh")
        context.clear_cookies()
        page.click("text=Refresh")
        page.wait_for_url("**/login")
        assert "restart tapscope web and open the new link" in page.locator("main").inner_text()
    context.close()


def large_run(path):
    """Create a closed run that is just large enough for an index, but has none."""
    with RunFactory(path) as run:
        run.step()
        run.put("site-0:out", numpy.ones((2, 2), numpy.float32))
    (file,) = path.glob("rank-*/records.jsonl")
    lines = file.read_bytes().splitlines(True)
    (record,) = [line for line in lines if b'"record"' in line]
    more = [record.replace(b"site-0", b"site-%d" % i) for i in range(1, MIN_RECORDS)]
    at = lines.index(record)
    file.write_bytes(b"".join([*lines[: at + 1], *more, *lines[at + 1 :]]))


@pytest.mark.soak
def test_a_full_disk_costs_the_index_alone(tmp_path):
    """A server that cannot write creates no index; runs and comparisons still work."""
    for name in ("free", "full"):
        large_run(tmp_path / "runs" / name)
    with serving(tmp_path / "runs") as (url, link, process):
        client = Client(url)
        cookie = session(client, link)
        known = {run["name"]: run["id"] for run in client.json("/api/runs", cookie=cookie)["runs"]}
        paths = [f"/api/runs/{{}}{rest}" for rest in ("/records?step=0", "/series?site=site-7:out", "/live?poll=true")]
        assert [client(path.format(known["free"]), cookie=cookie)[0] for path in paths] == [200] * 3
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
        assert [client(path.format(known["full"]), cookie=cookie)[0] for path in paths] == [200] * 3
        assert process.poll() is None
    assert [file.parts[-3] for file in (tmp_path / "runs").rglob("*.index*")] == ["free"]


def test_readers_that_never_read_delay_nobody(tmp_path):
    """Event streams and large responses that clients do not read stay in the sockets of those clients."""
    toy_run(tmp_path / "runs" / "run")
    with serving(tmp_path / "runs") as (url, link, _), ExitStack() as stack:
        client = Client(url)
        cookie = session(client, link)
        known = f"/api/runs/{run_id(client, cookie)}"
        for path in (known, f"{known}/live") * 20:
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect((client.host, int(client.port)))
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\n\r\n"
            slow.sendall(head.encode() * 20)  # twenty responses in a row; the client does not read the first one
        begun = time.monotonic()
        assert client(known, cookie=cookie)[0] == 200
        assert time.monotonic() - begun < 5
