"""schemathesis finds no status 500 with requests that the server's OpenAPI description allows or forbids."""

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from checkpoints import make_llama
from engine_http import Served
from hypothesis import HealthCheck, Phase, example, given, settings
from jobs import LIMIT_S
from openapi_fields import fields_of
from schemathesis import GenerationMode
from soak_cases import mostly_soak

from tapscope.engine import LLM
from tapscope.engine.server.app import build_app
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.server_settings import ServerSettings

FIXED = settings(
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
PLAIN = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
OPERATIONS = {
    "POST /generate",
    "GET /health",
    "GET /health_generate",
    "POST /tokenize",
    "POST /detokenize",
    "GET /get_model_info",
    "GET /get_server_info",
    "GET /model_info",
    "GET /server_info",
    "POST /abort_request",
    "POST /flush_cache",
    "POST /update_weights_from_disk",
    "POST /update_weights_from_tensor",
    "POST /weights_digest",
    "GET /metrics",
}


NOT_TRIED = {"POST /init_weights_update_group", "POST /release_memory_occupation", "POST /pause_generation"}
"""Operations that would block: they wait for a trainer, or make later requests fail or wait."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, max_position_embeddings=64)
    with LLM(path) as llm:
        made = Served(llm, [])
        yield made
        made.close()


@pytest.mark.parametrize("num_examples", mostly_soak([4, 40], default=[4]))
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "not-allowed"])
def test_openapi_requests_never_return_500(served: Served, mode: GenerationMode, num_examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{served.client.base_url}/openapi.json")
    statuses: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.label in NOT_TRIED:
            continue
        if mode is GenerationMode.POSITIVE or operation.body or operation.query:
            statuses[operation.label] = _ask(operation, mode, num_examples, str(served.client.base_url))
    assert {label: found for label, found in statuses.items() if any(status >= 500 for status in found)} == {}
    if mode is GenerationMode.POSITIVE:
        assert statuses.keys() >= OPERATIONS
    assert {200, 400} <= statuses["POST /generate"]
    assert served.client.get("/health").status_code == 200
    assert served.info()["num_running"] == 0


def _ask(operation: schemathesis.schemas.APIOperation, mode: GenerationMode, num_examples: int, url: str) -> set[int]:
    """Send generated requests; check that all response statuses are in the description, and return them."""
    found: set[int] = set()
    documented = {int(status) for status in operation.definition.raw["responses"]}

    @settings(FIXED, max_examples=num_examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        response = case.call(base_url=url, timeout=LIMIT_S)
        found.add(response.status_code)
        if response.status_code >= 500:
            print(operation.label, case.body, case.query, response.text)

    if operation.label == "POST /generate":  # a generated combination of fields is rarely valid as a whole
        ask = example(case=operation.Case(body=PLAIN, media_type="application/json"))(ask)
    ask()
    assert found <= documented, operation.label
    return found


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    document: dict[str, Any] = build_app(AppState("model", ServerSettings()), None).openapi()
    return document


def test_openapi_describes_every_request_field(description: dict[str, Any]) -> None:
    fields = dict(_request_fields(description))
    assert {path.split(" ")[0] for path in fields} >= {"/generate", "/v1/chat/completions", "/pause_generation"}
    kinds = {"type", "role"}  # discriminators of objects, whose schemas have the description
    assert [path for path, text in fields.items() if not text and path.rpartition(".")[2] not in kinds] == []
    assert [text for text in fields.values() if "None" in text or "``" in text] == []
    assert "null: true for a prompt" in fields["/tokenize .add_special_tokens"]
    assert fields["/v1/chat/completions .messages.reasoning_content"] == "Reasoning of an assistant message."
    text = "The called function and its arguments."
    assert fields["/v1/chat/completions .messages.tool_calls.function"] == text, "a description next to a $ref"
    assert "MODEL:ADAPTER" in fields["/v1/chat/completions .model"], "inherited"
    assert fields["/v1/messages .top_p"] == fields["/generate .sampling_params.top_p"]


def _request_fields(description: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path, methods in description["paths"].items():
        for route in methods.values():
            for each in route.get("parameters", []):
                yield f"{path} .{each['name']}", each.get("description", "")
            for content in route.get("requestBody", {}).get("content", {}).values():
                if "example" in content:
                    jsonschema_rs.validate(content["schema"], content["example"])
                yield from fields_of(content["schema"], f"{path} ")
