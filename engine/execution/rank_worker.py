"""Rank worker: the loop of ranks 1 and up, which load the model, execute the plans of rank 0 and end with it."""

import multiprocessing
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq

from tapscope.core.errors import CheckpointError, OutputError, TapscopeError, UsageError
from tapscope.core.observe import ObserverFactory, RunReopener
from tapscope.core.wire import Message, decode, encode
from tapscope.engine.distributed.heartbeat import Activity, Heartbeat, heartbeat_path
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.distributed.watchdog import enable_stack_dumps, stack_path
from tapscope.engine.distributed.worker_processes import (
    ignore_signals,
    remove_orphaned_folder,
    worker_address,
    worker_identity,
)
from tapscope.engine.execution import weight_commands
from tapscope.engine.execution.draft_runner import load_runners
from tapscope.engine.execution.launched_step import LaunchedStep
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.execution.resolved_settings import resolve_device
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.kept_rows import KeptRows
from tapscope.engine.requests.step_plan import StepPlan

_POLL_MS = 1


def rank_main(
    rank: int, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, folder: str
) -> None:
    """Load a spawned rank and run :func:`worker_loop`, as its process entry point; report failures to rank 0."""
    ignore_signals()
    enable_stack_dumps(stack_path(Path(folder), rank))
    torch.set_num_threads(1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.identity = worker_identity(rank)
        socket.connect(worker_address(Path(folder)))
        try:
            worker_loop(partial(_connect, rank, config, Path(folder)), config, model_config, observer, socket)
        except BaseException:  # noqa: BLE001  (reported to rank 0, which raises it)
            socket.send_multipart(encode(Message("failed", {"traceback": traceback.format_exc()})))
            raise SystemExit(1) from None
        finally:
            remove_orphaned_folder(Path(folder))


def _connect(rank: int, config: EngineConfig, folder: Path) -> TensorParallel:
    device = resolve_device(config, rank)
    tp = TensorParallel.connect(
        folder / "store",
        rank,
        config.tp,
        config.rank_timeout_s,
        device,
        is_watched=True,
        custom_all_reduce=config.custom_all_reduce,
    )
    tp.heartbeat = Heartbeat(heartbeat_path(folder, rank))
    parent = multiprocessing.parent_process()
    tp.watch([] if parent is None else [parent.sentinel])
    return tp


def worker_loop(
    connect: Callable[[], TensorParallel],
    config: EngineConfig,
    model_config: ModelConfig,
    observer: ObserverFactory | None,
    socket: "zmq.Socket[bytes]",
    rank_0_lost: "zmq.Socket[bytes] | None" = None,
) -> None:
    """Load this rank's shard and execute the plans of rank 0 until rank 0 closes or ends.

    ``rank_0_lost`` becomes readable when the connection is lost; a spawned rank watches its parent process instead.
    """
    socket.send_multipart(encode(Message("up")))
    poller = _poller(socket, rank_0_lost)
    launched: LaunchedStep | None = None
    tp = connect()
    runner, draft_runner = load_runners(config, model_config, tp, observer)
    try:
        socket.send_multipart(encode(Message("ready")))
        while True:
            if launched is not None and _ends_before_a_message(launched, poller, runner.heartbeat):
                runner.collect(launched)
                launched = None
            if (message := _next_message(socket, poller, runner.heartbeat)) is None:
                break
            plan = None if message.kind in COMMANDS or message.kind in QUERIES else StepPlan.from_message(message)
            if launched is not None and (plan is None or not plan.has_pending):
                runner.collect(launched)
                launched = None
            if plan is None:
                error, value = answer_of(runner, message)
                socket.send_multipart(encode(Message("done", {"error": error, "value": value})))
            elif runner.overlaps_steps:
                previous, launched = launched, runner.launch(plan)
                if previous is not None:
                    runner.collect(previous)
            else:
                computing = runner if draft_runner is None or plan.model != "draft" else draft_runner
                computing.execute(plan)
                computing.finish(plan)
    finally:
        runner.close()


def _ends_before_a_message(step: LaunchedStep, poller: zmq.Poller, heartbeat: Heartbeat) -> bool:
    """Wait for the end of a launched step (True) or for a message, possibly the next step to launch (False)."""
    heartbeat.set_activity(Activity.WAITING)  # for the device, which runs the collectives
    while not step.is_done:
        if poller.poll(_POLL_MS):
            return False
    return True


def reopen(runner: ModelRunner, message: Message) -> str | None:
    """Continue this rank's observer in another run; return the error, or None."""
    if not isinstance(runner.observer, RunReopener):
        return "this engine has no recorder; start it with `tapscope serve`"
    try:
        with runner.heartbeat.during(Activity.LOADING):  # the recorder may take a while to start
            runner.observer.reopen(message["run"])
    except TapscopeError as error:
        return str(error)
    return None


def change_adapter(runner: ModelRunner, message: Message) -> str | None:
    """Load the LoRA adapter that ``message`` names, or unload it without a ``folder``; return the error, or None."""
    assert runner.adapters is not None, "rank 0 has checked that adapters are served"
    if message["folder"] is None:
        runner.adapters.drop(message["number"])
        return None
    try:
        with runner.heartbeat.during(Activity.LOADING):
            runner.adapters.load(message["number"], Path(message["folder"]))
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{message['folder']} cannot be read: {error}"
    return None


def change_profile(runner: ModelRunner, message: Message) -> str | None:
    """Start torch's profiler, or with a ``folder`` stop it and write the trace there; return the error, or None."""
    if message["folder"] is None:
        runner.profiler.start()
        return None
    file = trace_file(Path(message["folder"]), message["first_rank"] + runner.model.tp.rank)
    try:
        with runner.heartbeat.during(Activity.LOADING):  # writing a long trace takes a while
            runner.profiler.stop(file)
    except OutputError as error:
        return str(error)
    return None


def trace_file(folder: Path, rank: int) -> Path:
    """Return the trace file of one rank; ranks are numbered across all DP replicas."""
    return folder / f"rank-{rank}.json.gz"


def keep_rows(runner: ModelRunner, message: Message) -> None:
    """Move the rows of accepted branches of draft trees, see :meth:`ModelRunner.keep_rows`."""
    for values in message["kept"]:
        runner.keep_rows(KeptRows(*values))


COMMANDS: dict[str, Callable[[ModelRunner, Message], str | None]] = {
    "keep_rows": keep_rows,
    "weights": weight_commands.change_weights,
    "join_group": weight_commands.join_group,
    "leave_group": weight_commands.leave_group,
    "receive_weights": weight_commands.receive_weights,
    "memory": weight_commands.change_memory,
    "reopen": reopen,
    "adapter": change_adapter,
    "profile": change_profile,
}
"""Commands that every rank executes between two steps, by message kind; each returns an error message or None."""

QUERIES: dict[str, Callable[[ModelRunner, Message], list[Any]]] = {"digest_weights": weight_commands.digest_weights}
"""Commands without side effects; each returns a JSON value or raises UsageError."""


def answer_of(runner: ModelRunner, message: Message) -> tuple[str | None, list[Any] | None]:
    """Execute a command or a query; return its error, or None, and the value of a query."""
    if (command := COMMANDS.get(message.kind)) is not None:
        return command(runner, message), None
    try:
        return None, QUERIES[message.kind](runner, message)
    except UsageError as error:
        return str(error), None


def _poller(socket: "zmq.Socket[bytes]", rank_0_lost: "zmq.Socket[bytes] | None") -> zmq.Poller:
    """Return a poller that is ready when rank 0 has sent a message or has ended."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        poller.register(parent.sentinel, zmq.POLLIN)
    if rank_0_lost is not None:
        poller.register(rank_0_lost, zmq.POLLIN)
    return poller


def _next_message(socket: "zmq.Socket[bytes]", poller: zmq.Poller, heartbeat: Heartbeat) -> Message | None:
    """Return the next message; None if rank 0 closes or has ended."""
    heartbeat.set_activity(Activity.IDLE)
    ready = dict(poller.poll())
    heartbeat.set_activity(Activity.WORKING)
    if socket not in ready:
        return None
    message = decode(socket.recv_multipart())
    return None if message.kind == "close" else message
