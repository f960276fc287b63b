"""Arbitrary HTTP requests: any method, headers and bytes."""

import http.client
import json
import os
import subprocess
from typing import Any

import forkserver_pool as warm
from jobs import LIMIT_S

TOKEN = "correct-horse-battery"


def send(
    address: str,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any, dict[str, str]]:
    """Return status, body (parsed if JSON) and headers of the response; the default method with a body is POST."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers or {})
        reply = connection.getresponse()
        content = reply.read()
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        return reply.status, json.loads(content) if is_json else content.decode(), dict(reply.headers)
    finally:
        connection.close()


def bearer(token: str = TOKEN) -> dict[str, str]:
    """Return the authorization header with the token."""
    return {"Authorization": f"Bearer {token}"}


def ctl(*words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `tapscope ctl` in a process."""
    return warm.run("-m", "tapscope", "ctl", *words, env=os.environ | environment, cwd="/")
