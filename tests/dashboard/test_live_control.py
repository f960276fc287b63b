"""Live runs of a real recorder: followed on the page and in the terminal, and controlled from both."""

import asyncio
import json
import re
import sys
import threading
import time

import numpy as np
import pytest
import torch
from chromium import LOOKS, check_looks, look_of, page_of
from dashboard_driver import Driver
from factories import RunFactory
from starlette.testclient import TestClient
from web_server import Client, serving

from tapscope import Dumper
from tapscope.cli import main
from tapscope.cli.ctl import control_of
from tapscope.core.errors import UsageError
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.capture_control import CaptureControl
from tapscope.dashboard.web import app as web_app
from tapscope.dashboard.web.login import Login
from tapscope.dashboard.web.roots import Roots
from tapscope.http.access import RequestRefused


@pytest.fixture
def job(tmp_path):
    """A model that runs in a loop, with a recorder and a control port; capture is off."""
    model, stop = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), threading.Event()
    dumper = Dumper(model, tmp_path / "live", enabled=False, keep="full", control="127.0.0.1:0").open()

    def loop():
        with torch.no_grad():
            while not stop.wait(0.02):
                with dumper.step(phase="decode"):
                    model(torch.ones(2, 8))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    yield tmp_path / "live", dumper.http
    stop.set()
    thread.join(10)
    dumper.close()


def wait_for(condition, seconds=30):
    for _ in range(int(seconds * 20)):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("timed out")


def records(path):
    with RunSource.open(path).run as run:
        return len(run.records)


def session_of(client, link):
    return client(f"/login?{link.partition('?')[2]}")[2]["set-cookie"].partition(";")[0]


def post(client, path, body, cookie):
    status, text, _ = client(path, "POST", json.dumps(body), cookie=cookie, content_type="application/json")
    return status, json.loads(text)


# --- read-only links -------------------------------------------------------------------------------


def headers_of(login, session):
    return {"cookie": f"{login.cookie}={session}"}


def test_read_only_link_opens_many_sessions_until_it_expires():
    now = [0.0]
    login = Login(clock=lambda: now[0])
    token = login.add_read_only_link(3600)
    first, second = login.by_link(token), login.by_link(token)
    for session in (first, second):
        login.check(headers_of(login, session))
        with pytest.raises(RequestRefused, match="read-only"):
            login.check_full(headers_of(login, session))
    now[0] = 3599.0
    login.check(headers_of(login, first))
    now[0] = 3601.0
    with pytest.raises(RequestRefused, match="not logged in"):
        login.check(headers_of(login, first))
    with pytest.raises(RequestRefused, match="expired"):
        login.by_link(token)


def test_read_only_link_leaves_the_one_time_link_alone():
    login = Login()
    login.by_link(login.add_read_only_link(60))
    session = login.by_link(login.link)
    login.check_full(headers_of(login, session))


def test_web_prints_a_read_only_link(job):
    path, address = job
    with serving(path.parent, "--read-only-link", "1h", "--control", address) as (url, link, process):
        client, shared = Client(url), process.stdout.readline().strip()
        full, reader = session_of(client, link), session_of(client, shared)
        assert client("/api/runs", cookie=reader)[0] == 200
        assert client("/api/control", cookie=reader)[0] == 403
        assert post(client, "/api/control", {"command": "on"}, reader) == (403, {"error": "this session is read-only"})
        assert post(client, "/api/links", {"seconds": 3600}, reader)[0] == 403
        status, made = post(client, "/api/links", {"seconds": 3600}, full)
        assert status == 200
        assert client("/api/runs", cookie=session_of(client, made["path"]))[0] == 200
        assert post(client, "/api/links", {"seconds": 1}, full)[0] == 400


def test_read_only_sessions_reach_no_changing_route(tmp_path, monkeypatch):
    apps = []

    class Recorded(web_app.FastAPI):
        def __init__(self, **options):
            super().__init__(**options)
            apps.append(self)

    monkeypatch.setattr(web_app, "FastAPI", Recorded)
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("a:out", np.ones((2, 2), np.float32))
    login = Login()
    control = CaptureControl(lambda verb, body: pytest.fail("a read-only session reached the job"))
    roots = Roots([tmp_path])
    app = web_app.create_app(roots, login, control=control)
    apps[0].add_api_route("/api/later", lambda: pytest.fail("reached"), methods=["POST", "PUT", "PATCH", "DELETE"])
    token = login.add_read_only_link(60)
    ids = {"run_id": roots.summaries(0, 1)[0].id, "job_id": "0" * 16, "order": "0", "rest": "x"}
    allowed, walked = {("/login", "POST"), ("/logout", "POST"), ("/api/diffs", "POST")}, 0
    with TestClient(app, base_url="http://127.0.0.1") as client:
        for route in apps[0].routes:
            path = re.sub(r"{(\w+)(?::path)?}", lambda found: ids[found[1]], route.path)
            for method in getattr(route, "methods", None) or ():
                walked += 1
                client.cookies.set(login.cookie, login.by_link(token))
                if method not in ("GET", "HEAD") and (path, method) not in allowed:
                    response = client.request(method, path, json={"command": "on", "seconds": 60})
                    assert (response.status_code, response.json()) == (403, {"error": "this session is read-only"})
                elif not path.endswith("/live"):  # a stream never ends
                    client.request(method, path, params={"site": "a:out", "step": "0"}, follow_redirects=False)
        client.cookies.set(login.cookie, login.by_link(token))
        assert client.get("/api/control").status_code == 403
    assert walked > 30


@pytest.mark.parametrize("text", ["0s", "x", "31d", "1", "-1h"])
def test_web_rejects_an_invalid_time_of_a_link(text, tmp_path, capsys):
    assert main(["web", str(tmp_path), f"--read-only-link={text}"]) == 2
    assert "expected a time from 1s to 30d" in capsys.readouterr().err


# --- control ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["address", "directory"])
def test_capture_control_switches_a_live_job(job, by):
    path, address = job
    control = CaptureControl(control_of(address if by == "address" else str(path)))
    assert not control.state().enabled
    assert control.command("4").startswith("capture of 4 steps, from step")
    wait_for(lambda: records(path) >= 4 * 2)
    assert control.command("rules 0:out=full").startswith("1 rule")
    assert control.command("on").startswith("capture on, from step")
    state = control.state()
    assert (state.enabled, state.rules, state.num_ranks) == (True, ("0:out=full",), 1)
    assert control.command("off").startswith("capture off")
    with pytest.raises(UsageError, match="no site matches"):
        control.command("rules nothing.here=full")


@pytest.mark.parametrize("text", ["", "dir=/tmp", "on now", "0", "99999999", "enabled=true", "keep"])
def test_capture_control_sends_only_known_commands(text):
    control = CaptureControl(lambda verb, body: pytest.fail("nothing is sent"))
    with pytest.raises(UsageError, match="expected on, off"):
        control.command(text)


def test_web_control_needs_its_flag(job):
    path, _ = job
    with serving(path.parent) as (url, link, _):
        client = Client(url)
        cookie = session_of(client, link)
        status, answer = post(client, "/api/control", {"command": "on"}, cookie)
        assert status == 404
        assert "--control" in answer["error"]
        assert "Capture" not in client("/", cookie=cookie)[1]


def test_control_of_an_idle_job_says_that_it_waits_for_a_step():
    def told(ranks):
        return CaptureControl(lambda verb, body: {"ranks": ranks}).command("on")

    assert told({"0": "pending", "1": "pending"}) == "capture on, from the next step"
    assert told({"0": 7, "1": "pending"}) == "capture on, from step 7"


# --- terminal --------------------------------------------------------------------------------------


def test_view_switches_capture_and_follows_the_run(job):
    path, address = job
    control = CaptureControl(control_of(address))
    control.command("2")
    wait_for(lambda: records(path) >= 4)

    async def check():
        app = TapscopeApp(lambda: RunSource.open(path), control=control)
        async with app.run_test(size=(120, 40)) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            screen = driver.screen

            async def until(condition):
                for _ in range(300):
                    await pilot.pause(0.1)
                    if condition():
                        return
                raise AssertionError("timed out")

            def bar():
                return str(screen.query_one("KeyBar").render())

            before = len(screen.source.steps)
            await driver.press("C")
            await pilot.press("o", "n", "enter")
            await driver.settle()
            assert "capture on, from step" in bar()
            await pilot.press("t")
            await until(lambda: len(screen.source.steps) > before + 3)
            assert "capture on" not in bar()
            await pilot.press("C", "x", "enter")
            await until(lambda: "invalid command 'x': expected on, off" in bar())
            for _ in range(2):
                source = screen.source
                await until(lambda source=source: screen.source is not source)
            assert "invalid command 'x': expected on, off" in bar()  # growth of the run does not hide the message
            for key in ("j", "k") * 10:  # the newest step may have one record so far, where the cursor cannot move
                await driver.press(key)
                if "expected on, off" not in bar():
                    break
            assert "expected on, off" not in bar()

    asyncio.run(check())


def test_view_live_says_how_to_switch_capture_on(job):
    path, address = job

    async def shown(control):
        app = TapscopeApp(lambda: RunSource.open(path), control=control, live=path)
        async with app.run_test(size=(120, 20)) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            pane, bar = (app.screen.query_one(name) for name in ("LivePane", "KeyBar"))
            while pane.shown is None:
                await pilot.pause(0.05)
            return "\n".join(line.plain for line in pane.lines(118, 18)), str(bar.render())

    text, bar = asyncio.run(shown(CaptureControl(control_of(address))))
    assert "If capture is off, C switches it on." in text
    assert "C capture" in bar
    text, bar = asyncio.run(shown(None))
    assert "If capture is off, start tapscope view with --control to switch it on." in text
    assert "C capture" not in bar


def test_view_of_an_address_without_live_says_so(job, monkeypatch, capsys):
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert main(["view", "localhost:7000"]) == 2
    assert capsys.readouterr().err == (
        "tapscope: error: localhost:7000 is not a run; to follow the job at this address: "
        "tapscope view --live localhost:7000\n"
    )


def test_view_live_takes_the_address_of_a_job(job, monkeypatch):
    path, address = job
    opened = []
    monkeypatch.setattr("tapscope.dashboard.app.browse", lambda path, **options: opened.append((path, options)) or 0)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert main(["view", "--live", address.rpartition(":")[2]]) == 0
    ((run, options),) = opened
    assert (run, options["live"]) == (path, True)
    assert options["control"].state().run == str(path)
    assert main(["view", "--live", str(path), str(path)]) == 2


def test_view_without_control_names_the_option(job):
    path, address = job
    CaptureControl(control_of(address)).command("2")
    wait_for(lambda: records(path) >= 4)

    async def check():
        app = TapscopeApp(lambda: RunSource.open(path))
        async with app.run_test(size=(120, 40)) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            await driver.press("C")
            assert "--control" in driver.screen.query_one("KeyBar").said

    asyncio.run(check())


# --- page ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", LOOKS)
def test_capture_and_login_pages_are_accessible(chromium, job, looks):
    path, address = job
    with (
        serving(path.parent, "--control", address, password="correct horse") as (url, _, _),
        page_of(chromium, url, **look_of(*looks[0])) as page,
    ):
        page.fill("input[name=password]", "correct horse")
        check_looks(page, looks)
        page.click("button:text-is('Log in')")
        page.click("text=Capture")
        page.wait_for_selector("textarea")
        check_looks(page, looks)
        page.click("button:text-is('On')")
        page.wait_for_selector("[role=status]:not(:empty)")
        check_looks(page, looks)


def test_page_switches_capture_and_follows_the_steps(chromium, job):
    path, address = job
    with serving(path.parent, "--control", address) as (url, link, _), page_of(chromium, link) as page:
        page.get_by_role("link", name="Capture").click()
        page.wait_for_selector("dd:text-is('off')")
        page.get_by_role("button", name="On", exact=True).click()
        page.wait_for_selector("text=capture on, from step")
        page.wait_for_selector("dd:text-is('on')")
        page.goto(f"{url}/")
        page.get_by_role("link", name="recording").click()
        page.wait_for_selector(".state:has-text('recording')")
        steps = "Number(document.querySelectorAll('dl.facts dd')[0].textContent.replaceAll(',', ''))"
        before = page.evaluate(steps)
        wait_for(lambda: page.evaluate(steps) > before + 3)
        for name in ("queue_bytes", "latency_s"):
            page.locator(f".charts > div:has(h3:text-is('{name}')) canvas").wait_for()
