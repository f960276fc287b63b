"""Overhead of the vLLM plugin per step with nothing selected: the wrapped worker against the plain one, on stubs.

    PYTHONPATH=tests/support python -m benchmarks.frameworks.plugin_cost [--requests 32]

Prints the microseconds per step of each, and of the difference. The stub's forward does nothing.
"""

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

STEPS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    count = parser.parse_args().requests
    settings = {"CONTROL": "127.0.0.1:0", "ENABLED": "0", "DIR": tempfile.mkdtemp(), "EXP_NAME": "idle"}
    os.environ.update({f"TAPSCOPE_{name}": value for name, value in settings.items()})

    import pytest
    from transformers import LlamaConfig
    from vllm_worker import FirstRunner, LlamaForCausalLM, Requests, SchedulerOutput, Worker, install

    from tapscope.dumper import api
    from tapscope.frameworks import vllm

    class Idle(FirstRunner):
        def execute_model(self, scheduled: SchedulerOutput) -> None:
            pass

        def sample_tokens(self, grammar: Any) -> None:  # type: ignore[override]
            pass

    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=97))
    with pytest.MonkeyPatch.context() as patch:
        wrapper = install(patch)
        vllm.register()
        plain, wrapped = (wrapper(Worker(model, Requests(), Idle)) for _ in range(2))
        plain.worker.load_model()
        wrapped.init_device()
        wrapped.load_model()
        scheduled = SchedulerOutput({str(i): 1 for i in range(count)})

        def step(worker: Any) -> float:
            began = time.perf_counter()
            for _ in range(STEPS):
                worker.execute_model(scheduled)
                worker.sample_tokens(None)
            return (time.perf_counter() - began) / STEPS * 1e6

        pairs = [(step(plain), step(wrapped)) for _ in range(7)]
        api.process.close()
    one, two = (statistics.median(each) for each in zip(*pairs, strict=True))
    print(f"plain {one:.1f} us, with the plugin {two:.1f} us, difference {two - one:.1f} us a step")


if __name__ == "__main__":
    main()
