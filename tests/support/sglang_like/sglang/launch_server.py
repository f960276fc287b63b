"""The server: spawns a scheduler process that computes two prompts. ``--model-path`` is a torch.save file of its
model."""

import multiprocessing
import sys


def run_scheduler(path: str) -> None:
    import torch

    from sglang.srt.model_executor.model_runner import ModelRunner

    config, weights = torch.load(path, weights_only=False)
    runner = ModelRunner(config, weights)
    runner.load_model()
    runner.extend("0", list(range(3, 12)))
    runner.extend("1", list(range(40, 45)))


if __name__ == "__main__":
    from sglang.launch_server import run_scheduler as target

    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(sys.argv[sys.argv.index("--model-path") + 1],)
    )
    process.start()
    process.join()
    sys.exit(process.exitcode)
