"""A running `tapscope web`, and requests to it."""

import http.client
import json
import os
import re
import signal
import subprocess
from contextlib import contextmanager

from forkserver_pool import WarmWeb


@contextmanager
def serving(*words, password=""):
    """Yield (base URL, link, process) of a running `tapscope web`."""
    environment = {name: value for name, value in os.environ.items() if name != "TAPSCOPE_WEB_PASSWORD"}
    environment |= {"TAPSCOPE_WEB_PASSWORD": password} if password else {}
    command = ["-m", "tapscope", "web", *map(str, words)]
    process = WarmWeb(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        link = process.stdout.readline().strip()
        yield re.match(r"http://[\d.]+:\d+", link)[0], link, process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


class Client:
    """HTTP client with custom headers; stateless."""

    def __init__(self, url):
        self.host, _, self.port = url.removeprefix("http://").partition(":")

    def __call__(self, path, method="GET", body=None, **headers):
        connection = http.client.HTTPConnection(self.host, int(self.port), timeout=30)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        found = response.status, response.read().decode(), response.headers
        connection.close()
        return found

    def json(self, path, method="GET", **headers):
        status, body, _ = self(path, method, **headers)
        assert status == 200, body
        return json.loads(body)
