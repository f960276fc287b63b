"""Runs of tapscope's engine over a workload, captured in full on every rank."""

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.verdict.patching import Patch, applied
from benchmarks.verdict.setup import Setup
from benchmarks.verdict.workload import requests
from tapscope.core.errors import ConfigError
from tapscope.core.observe import RankInfo, StepObserver
from tapscope.dumper import DumperConfig, make_observer
from tapscope.engine import LLM
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.request import Request
from tapscope.engine.scheduling.scheduler import Scheduler
from tapscope.engine.scheduling.scheduler_config import SchedulerConfig

_TIMEOUT_S = 30.0


def run_engine(checkpoint: Path, setup: Setup, out: Path, patch: Patch | None = None) -> None:
    """Capture one run to ``out``; ``patch`` is called with the model of every rank."""
    if setup.schedule != "decode" or setup.train:
        raise ConfigError(f"schedule={setup.schedule!r}, train={setup.train}: the engine runs schedule 'decode' only")
    settings = {name: getattr(setup, name) for name in ("tp", "device", "dtype", "page_size")}
    settings |= {"logits": "all", "max_num_seqs": 1 if setup.batch == "separate" else 8, "prefix_cache": False}
    config = EngineConfig.build(checkpoint, settings | dict(setup.engine))
    observer = partial(make_observer, out=str(out), config=DumperConfig(keep="full"))
    if setup.processes:
        if patch is not None:
            raise ConfigError("processes=True: a patch can only reach ranks that are threads")
        _in_processes(config, setup, observer)
    else:
        _in_threads(config, setup, observer, patch)


def _in_processes(config: EngineConfig, setup: Setup, observer: Any) -> None:
    work = requests(setup.workload, setup.seed, setup.order)
    with LLM(config, observer=observer) as llm:
        for r in work:
            forced = () if setup.greedy else r.forced
            llm.submit(
                r.prompt, request_id=r.name, max_new_tokens=len(r.forced) + 1, forced_token_ids=forced, ignore_eos=True
            )
        while llm.has_work:
            llm.step()


def _in_threads(config: EngineConfig, setup: Setup, observer: Any, patch: Patch | None) -> None:
    """Run the ranks as threads of this process with gloo, so that a patch reaches all of them without spawning."""
    model_config = ModelConfig.read(Path(config.model))
    folder = Path(tempfile.mkdtemp(prefix="verdict-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        pool = stack.enter_context(ThreadPoolExecutor(config.tp))

        def build(rank: int) -> ModelRunner:
            alone = config.tp == 1
            group = TensorParallel() if alone else TensorParallel.connect(folder / "store", rank, config.tp, _TIMEOUT_S)
            return ModelRunner(config, model_config, group, None)

        runners = list(pool.map(build, range(config.tp)))
        for runner in runners:
            stack.enter_context(applied(patch, runner.model))
        stack.callback(lambda: list(pool.map(ModelRunner.close, runners)))
        list(pool.map(partial(_observe, observer, config, model_config), runners))
        _drive(config, setup, runners, pool.map)


def _observe(
    observer: Callable[[Any, RankInfo], StepObserver],
    config: EngineConfig,
    model_config: ModelConfig,
    runner: ModelRunner,
) -> None:
    """Attach the observer as Runner does, but after the patch."""
    runner.observer = observer(runner.model, runner.rank_info(config, model_config))


def _drive(config: EngineConfig, setup: Setup, runners: list[ModelRunner], each: Any) -> None:
    cache = runners[0].cache_config
    shareable = ModelConfig.read(Path(config.model)).is_prefix_shareable
    scheduler_config = SchedulerConfig.build(
        config,
        num_pages=cache.num_pages,
        max_tokens=runners[0].max_tokens,
        eos_token_ids=(),
        window=None,
        shareable=shareable,
        windowed_pools=cache.windowed_pools,
    )
    scheduler = Scheduler(scheduler_config)
    for r in requests(setup.workload, setup.seed, setup.order):
        params = SamplingParams(max_new_tokens=len(r.forced) + 1)
        scheduler.add(
            Request(id=r.name, prompt_ids=r.prompt, params=params, forced_token_ids=() if setup.greedy else r.forced)
        )
    while scheduler.has_work:
        plan = scheduler.plan(all_logits=True, epoch=None)
        tokens = list(each(lambda runner, plan=plan: runner.execute(plan), runners))
        scheduler.commit(tokens[0])
        list(each(lambda runner, plan=plan: runner.finish(plan), runners))
