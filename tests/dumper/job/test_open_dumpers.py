"""Dumpers that are still open when the process ends send what they hold."""

import subprocess
import sys

SCRIPT = """
from tapscope.dumper.job import open_dumpers

def send():
    import zmq
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.bind("inproc://here")
        two.connect("inproc://here")
        two.send(memoryview(bytes(1 << 20)), copy=False)
        print("sent", len(one.recv()))

class Sending:
    def _close(self, interrupted=None):
        send()

    def _abandon(self):
        pass

send()
open_dumpers.opened(Sending())
"""


def test_messages_without_a_copy_are_sent_when_the_process_ends() -> None:
    """pyzmq refuses them after its own exit handler, which would be registered by the first such message."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["sent 1048576"] * 2, done.stderr
