"""Error bodies in the format of the requested path: OpenAI's, Anthropic's or the engine's."""

from typing import Any

from tapscope.core.errors import DataError, LiveError, RequestError, UsageError

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENAI = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_NOT_FOUND = "model_not_found"
_ID = "req_3423cee3970e41f0af847969c0269579"
_STATUSES = {
    400: ("The request is invalid, or can never run.", "temperature=-1.0: must be a number ≥ 0"),
    401: (
        "The API key is missing or wrong.",
        "this needs an API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
    ),
    403: (
        "The request comes from a web page of another origin.",
        "cross-origin request from 'http://a.example' refused; use a program such as curl",
    ),
    404: ("No such route or model.", "the model 'other' does not exist here; this server has 'tiny'"),
    405: ("The route does not support this method.", "GET is not allowed on /generate; use POST"),
    413: ("The body is too large.", "the body is longer than 33554432 bytes"),
    500: ("A step failed.", "the observer raised ValueError: no"),
    503: ("The server is starting, overloaded, or has lost a rank.", "the server is starting or has ended"),
}


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, RequestError) and error.code == _NOT_FOUND:
        return 404
    return 400 if isinstance(error, UsageError | DataError) else 503 if isinstance(error, LiveError) else 500


def error_body(
    path: str,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    request_id: str | None = None,
) -> Any:
    """Return the JSON body of an error response to ``path``; Anthropic's format includes ``request_id``."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    if path.startswith("/v1/"):
        kind = _OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return {"error": {"message": message}}


def error_responses(path: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of the error responses to ``path``: by status, each with an example."""
    return {
        status: {
            "description": text,
            "content": {"application/json": {"example": error_body(path, status, example, request_id=_ID)}},
        }
        for status, (text, example) in _STATUSES.items()
    }


def error_response_of(path: str, error: Exception, request_id: str | None = None) -> tuple[int, Any]:
    """Return (status, body) for an error raised while handling ``path`` in the HTTP request ``request_id``."""
    status = status_of(error)
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    return status, error_body(path, status, str(error), param=param, code=code, request_id=request_id)
