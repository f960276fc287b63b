"""The routes conform to their description: responses match the models, errors are one sentence, no status is 500."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from control_http import TOKEN, bearer, send
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import Job, wait_until
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, TypeAdapter
from rank_worker import build

from tapscope.dumper import Dumper
from tapscope.dumper.config import RUNTIME_FIELDS
from tapscope.dumper.control import schemas
from tapscope.dumper.control.control_app import ControlServer, Guard, make_app, make_router
from tapscope.dumper.control.control_client import ControlClient
from tapscope.dumper.pipeline.recorder_process import find
from tapscope.http.listen import listen
from tapscope.sources import open_run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("http") / "run", 2, keep="stats", control="127.0.0.1:0") as job:
        yield job


def _send(job: Job, path: str, body: Any = None, **options: Any) -> tuple[int, Any, dict[str, str]]:
    assert job.http is not None
    return send(job.http, path, body, **options)


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/dumper/state", None, schemas.StateAnswer),
        ("/dumper/sites", None, schemas.SitesAnswer),
        ("/dumper/sites?glob=layers.0", None, schemas.SitesAnswer),
        ("/dumper/get_state", {}, list[schemas.RankDump]),
        ("/dumper/configure", {"keep": "stats"}, schemas.ChangeAnswer),
        ("/dumper/capture", {"steps": 1}, schemas.ChangeAnswer),
        ("/dumper/reset", {}, schemas.ResetAnswer),
        ("/dumper/reset", {"run": "named"}, schemas.ResetAnswer),
        ("/dumper/configure", {"keep": "some"}, schemas.ErrorAnswer),
        ("/dumper/configure", {"rules": ["layers.9=full"]}, schemas.ErrorAnswer),
        ("/dumper/capture", {"past": 1}, schemas.ErrorAnswer),
    ],
)
def test_control_http_every_answer_fits_the_model_that_describes_it(job: Job, path: str, body: Any, model: Any) -> None:
    wait_until(lambda: job.ask("state")[1]["capture_under_way"] is None, "no capture runs")
    status, answer, headers = _send(job, path, body)
    assert (status == 400) is (model is schemas.ErrorAnswer), answer
    assert headers["content-type"] == "application/json"
    TypeAdapter(model).validate_python(answer)


def test_control_http_description_names_every_route_its_bodies_and_its_errors(job: Job) -> None:
    status, described, _ = _send(job, "/openapi.json")
    assert status == 200
    routes = {(path, method) for path, methods in described["paths"].items() for method in methods}
    changing = {("/dumper/configure", "post"), ("/dumper/capture", "post"), ("/dumper/reset", "post")}
    looking = {("/dumper/state", "get"), ("/dumper/sites", "get"), ("/dumper/get_state", "post"), ("/metrics", "get")}
    looking.add(("/dumper/verdict", "get"))
    assert routes == changing | looking
    for path, method in routes:
        responses = described["paths"][path][method]["responses"]
        assert "422" not in responses
        assert {"200", "401", "403", "503"} <= set(responses)
    for path, method in changing:
        operation = described["paths"][path][method]
        assert {"400", "409", "413", "504"} <= set(operation["responses"])
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"]["additionalProperties"] is False
        assert content["example"]
    schema = described["paths"]["/dumper/configure"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {*RUNTIME_FIELDS, "past_steps", "past_bytes"}
    assert all(property.get("description") for property in schema["properties"].values())


@pytest.mark.parametrize("model", [schemas.ConfigureBody, schemas.CaptureBody, schemas.ResetBody])
def test_control_http_examples_in_the_description_work(job: Job, model: type[BaseModel]) -> None:
    path = {"ConfigureBody": "configure", "CaptureBody": "capture", "ResetBody": "reset"}[model.__name__]
    described = _send(job, "/openapi.json")[1]["paths"][f"/dumper/{path}"]["post"]
    example = described["requestBody"]["content"]["application/json"]["example"]
    model.model_validate(example)
    # The example's rules name layer 3, but this model has two layers.
    example = {name: [] if name == "rules" else value for name, value in example.items()}
    assert _send(job, f"/dumper/{path}", example)[0] == 200
    wait_until(lambda: job.ask("state")[1]["capture_under_way"] is None, "no capture runs")


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/dumper/state", 405, "POST is not allowed on /dumper/state; use GET"),
        ("PUT", "/dumper/configure", 405, "PUT is not allowed on /dumper/configure; use POST"),
        ("GET", "/dumper/capture", 405, "use POST"),
        ("DELETE", "/metrics", 405, "use GET"),
        ("GET", "/dumper/states", 404, "unknown route /dumper/states; routes: /dumper/capture, /dumper/configure, "),
        ("POST", "/dumper/", 404, "unknown route /dumper/; "),
        ("GET", "/", 404, "unknown route /; routes: "),
        ("GET", "/dumper/%2e%2e/metrics", 404, "unknown route "),
        ("GET", "/dumper/state/", 404, "unknown route /dumper/state/"),
        ("GET", "/dumper/state?verbose=1", 400, "'verbose' is not a query parameter of /dumper/state; it takes none"),
        ("GET", "/dumper/sites?globe=x", 400, "'globe' is not a query parameter of /dumper/sites; it takes glob"),
        ("POST", "/dumper/configure?keep=full", 400, "'keep' is not a query parameter"),
    ],
)
def test_control_http_what_is_not_there_is_one_sentence_too(
    job: Job, method: str, path: str, status: int, says: str
) -> None:
    found, answer, headers = _send(job, path, method=method, raw=b"" if method != "GET" else None)
    assert (found, list(answer)) == (status, ["error"])
    assert says in answer["error"]
    assert (status == 405) is ("allow" in headers)


def test_control_http_capture_lists_its_own_fields_too(job: Job) -> None:
    status, answer, _ = _send(job, "/dumper/capture", {"step": 2})
    assert status == 400
    assert "unknown setting 'step' (did you mean steps?); settings are steps, replace, past, enabled" in answer["error"]


def test_control_http_get_state_is_sglangs_list(job: Job) -> None:
    def have_dumped() -> bool:
        """Return whether both ranks have dumped, in a run that an earlier test may have opened."""
        status, ranks, _ = _send(job, "/dumper/get_state", {})
        assert status == 200
        assert [set(rank) for rank in ranks] == [{"config", "dump_index", "step"}] * 2
        return all(rank["dump_index"] > 0 and rank["step"] >= 0 for rank in ranks)

    wait_until(have_dumped, "both ranks dump")
    assert _send(job, "/dumper/get_state", raw=b"")[0] == 200
    assert _send(job, "/dumper/get_state", {"x": 1})[0] == 400


def test_control_http_metrics_are_prometheus_text_and_grow(job: Job) -> None:
    _send(job, "/dumper/configure", {"enabled": True, "keep": "full", "rules": []})
    before = _metrics(job)
    wait_until(
        lambda: _metrics(job)["tapscope_payload_bytes", "0"] > before["tapscope_payload_bytes", "0"], "bytes come"
    )
    wait_until(lambda: all(("tapscope_values_dropped", rank) in _metrics(job) for rank in "01"), "each tells its load")
    now = _metrics(job)
    for rank in "01":
        assert now["tapscope_rank_up", rank] == 1
        assert now["tapscope_values_dropped", rank] == now["tapscope_values_failed", rank] == 0
        assert now["tapscope_records", rank] == now["tapscope_lines", rank] > 0
        assert now["tapscope_step", rank] > 0
        assert now["tapscope_queue_bytes", rank] >= 0
        assert now["tapscope_write_bytes_per_second", rank] > 0
    assert now["tapscope_agreed_epoch", ""] == job.ask("state")[1]["epoch"]
    assert now["tapscope_world_size", ""] == 2
    _send(job, "/dumper/configure", {"keep": "stats"})


def _metrics(job: Job) -> dict[tuple[str, str], float]:
    status, text, headers = _send(job, "/metrics")
    assert (status, headers["content-type"].startswith("text/plain; version=0.0.4")) == (200, True)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["tapscope_payload_bytes"].type == "counter"
    return {(name, s.labels.get("rank", "")): s.value for name, f in families.items() for s in f.samples}


def test_control_http_counters_outlive_a_reset(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full", control="127.0.0.1:0") as dumper:
        address = str(dumper.http)

        def total() -> float:
            lines = send(address, "/metrics")[1].splitlines()
            return float(next(line for line in lines if line.startswith("tapscope_payload_bytes_total{")).split()[1])

        model(torch.ones(64, 8))
        wait_until(lambda: total() > 0, "bytes come")
        before = total()
        assert send(address, "/dumper/reset", {})[0] == 200
        model(torch.zeros(64, 8))
        wait_until(lambda: total() > before, "more bytes come")
        assert dumper.flush()
        state = send(address, "/dumper/state")[1]
    (rank,) = state["ranks"]
    assert rank["total_bytes"] == rank["bytes"] + before
    first, second = (len(open_run(run).records) for run in (tmp_path / "run", state["run"]))
    assert (rank["records"], rank["total_records"]) == (second, first + second), "records, not lines"


def test_control_http_losses_reach_state_and_metrics(tmp_path: Path) -> None:
    model = build()
    with Dumper(
        model, tmp_path / "run", keep="full", backpressure="drop", queue_bytes=4096, control="127.0.0.1:0"
    ) as dumper:
        address = str(dumper.http)
        with torch.no_grad():
            for _ in range(50):
                model(torch.ones(64, 8))
        wait_until(lambda: send(address, "/dumper/state")[1]["ranks"][0].get("dropped", 0) > 0, "losses are reported")
        text = send(address, "/metrics")[1]
    dropped = [line for line in text.splitlines() if line.startswith("tapscope_values_dropped_total{")]
    assert float(dropped[0].split()[1]) > 0


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[Dumper, str]]:
    """A third-party FastAPI app with our routes next to its own."""
    with Dumper(build(), tmp_path / "run", keep="off") as dumper:
        client = ControlClient(find(tmp_path / "run")["address"])
        app = FastAPI()

        @app.get("/health")
        def health() -> dict[str, str]:
            return {"status": "fine"}

        app.include_router(make_router(client))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            yield dumper, f"127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True
            thread.join()


def test_control_http_routes_work_inside_another_app(host: tuple[Dumper, str]) -> None:
    dumper, address = host
    assert send(address, "/health")[1] == {"status": "fine"}
    assert send(address, "/dumper/state")[1]["run"] == str(dumper.out)
    assert send(address, "/dumper/configure", {"keep": "full"})[1]["epoch"] == 1
    assert send(address, "/dumper/capture", {"past": 2})[0] == 400
    assert send(address, "/dumper/configure", {"kep": 1})[1]["error"].startswith("unknown setting 'kep' ")
    assert send(address, "/dumper/configure", raw=b"{")[0] == 400
    assert send(address, "/dumper/configure")[:2] == (
        405,
        {"error": "GET is not allowed on /dumper/configure; use POST"},
    )
    assert send(address, "/dumper/nothing")[0] == 404
    assert send(address, "/nothing")[:2] == (404, {"detail": "Not Found"})  # answered by the host
    assert "tapscope_step" in send(address, "/metrics")[1]
    assert send(address, "/dumper/state", headers={"Origin": "http://elsewhere"})[0] == 403
    assert send(address, "/openapi.json")[1]["paths"].keys() >= {"/health", "/dumper/state"}
    dumper.close()
    wait_until(lambda: send(address, "/dumper/state")[0] == 503, "the recorder ends")
    status, answer, _ = send(address, "/dumper/state")
    assert (status, answer) == (503, {"error": "the recorder has ended; its run is closed (see: tapscope info RUN)"})


def test_control_http_host_may_keep_its_own_metrics_and_ask_for_a_token(tmp_path: Path) -> None:
    with Dumper(build(), tmp_path / "run", keep="off"):
        client = ControlClient(find(tmp_path / "run")["address"])
        app = FastAPI()
        app.include_router(make_router(lambda: client, Guard(TOKEN), metrics=False))
        listener = listen("127.0.0.1", 0)
        server = ControlServer(lambda: app, listener)
        server.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert send(address, "/metrics")[:2] == (404, {"detail": "Not Found"})
        assert send(address, "/dumper/state")[0] == 401
        assert send(address, "/dumper/state", headers=bearer())[0] == 200
        server.stop()


def test_control_http_recorder_that_is_no_recorder_is_an_error_and_no_500() -> None:
    listener = listen("127.0.0.1", 0)
    server = ControlServer(lambda: make_app(ControlClient("ipc:///nowhere/at/all")), listener)
    server.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    for path, body in (("/dumper/state", None), ("/metrics", None), ("/dumper/capture", {"steps": 1})):
        status, answer, _ = send(address, path, body)
        assert (status, "the recorder has ended" in answer["error"]) == (503, True)
    server.stop()


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_rule = st.sampled_from(
    ["*=off", "layers.0:out=full", "*=stats steps=0-9", "x=full when=step <", "=", "*" * 60 + "x=off"]
)
_names = st.sampled_from(
    [*RUNTIME_FIELDS, "steps", "past", "replace", "run", "capture_steps", "control_token", "network"]
)
_fitting = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.booleans(),
        "keep": st.sampled_from(["off", "stats", "full", "none"]),
        "rules": st.lists(_rule, max_size=3),
        "steps": st.integers(-1, 3),
        "replace": st.booleans(),
        "filter": st.none() | st.text(max_size=10),
    },
)
_bodies = _fitting | st.dictionaries(_names, _json, max_size=4) | _json


@pytest.mark.parametrize("verb", ["configure", "capture", "reset", "get_state"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=_bodies)
def test_control_http_no_body_is_a_500(job: Job, verb: str, body: Any) -> None:
    if verb == "reset" and (not isinstance(body, dict) or not set(body) - {"run"}):
        body = {"run": body, "noise": 1}  # do not open hundreds of runs
    status, answer, _ = _send(job, f"/dumper/{verb}", raw=json.dumps(body).encode())
    assert status in ((200, 400, 409) if verb != "get_state" else (200, 400)), answer
    if status == 400:
        assert list(answer)[:1] == ["error"]
        assert "\n" not in answer["error"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=200), glob=st.text(max_size=40))
def test_control_http_no_bytes_and_no_glob_are_a_500(job: Job, raw: bytes, glob: str) -> None:
    from urllib.parse import quote

    assert _send(job, "/dumper/configure", raw=raw)[0] in (200, 400)
    status, answer, _ = _send(job, "/dumper/sites?glob=" + quote(glob, errors="replace"))
    assert status in (200, 400), answer


def test_control_http_job_has_survived_all_of_it(job: Job) -> None:
    before = job.steps()
    wait_until(lambda: min(job.steps()) > max(before) + 2, "the ranks step")
    assert job.ask("state")[1]["ranks"][0]["status"] == "connected"
    log = job.run / "recorder.log"
    assert not log.exists() or log.read_text() == ""
