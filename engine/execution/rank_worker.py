"""Obey: what the processes of ranks 1 and up run: load, compute the plans of rank 0, end with it."""

import multiprocessing
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import zmq

from tapscope.core.errors import CheckpointError, TapscopeError
from tapscope.core.observe import ObserverFactory, RunReopener
from tapscope.core.wire import Message, decode, encode
from tapscope.engine.distributed.heartbeat import Doing, Pulse, pulse_in
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.distributed.watchdog import stack_in, tell_stack
from tapscope.engine.execution.model_runner import Runner
from tapscope.engine.execution.resolved_settings import device_of
from tapscope.engine.execution.worker_processes import (
    address_in,
    clean_up_after_parent,
    identity,
    leave_signals_to_parent,
)
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.step_plan import StepPlan


def rank_main(
    rank: int, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, folder: str
) -> None:
    """Body of a spawned rank: load, obey plans, end with rank 0. What goes wrong is told to rank 0."""
    leave_signals_to_parent()
    tell_stack(stack_in(Path(folder), rank))
    torch.set_num_threads(1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.identity = identity(rank)
        socket.connect(address_in(Path(folder)))
        try:
            obey(partial(_meet, rank, config, Path(folder)), config, model_config, observer, socket)
        except BaseException:  # noqa: BLE001  (told to rank 0, which raises it)
            socket.send_multipart(encode(Message("failed", {"traceback": traceback.format_exc()})))
            raise SystemExit(1) from None
        finally:
            clean_up_after_parent(Path(folder))


def _meet(rank: int, config: EngineConfig, folder: Path) -> TensorParallel:
    device = device_of(config, rank)
    tp = TensorParallel.connect(folder / "store", rank, config.tp, config.rank_timeout_s, device, is_watched=True)
    tp.pulse = Pulse(pulse_in(folder, rank))
    parent = multiprocessing.parent_process()
    tp.watch([] if parent is None else [parent.sentinel])
    return tp


def obey(
    meet: Callable[[], TensorParallel],
    config: EngineConfig,
    model_config: ModelConfig,
    observer: ObserverFactory | None,
    socket: "zmq.Socket[bytes]",
    rank_0_ended: "zmq.Socket[bytes] | None" = None,
) -> None:
    """Load this rank's part and compute the plans of rank 0 until it says close or is no more.

    ``rank_0_ended`` becomes readable when the connection is lost; a rank that rank 0 spawned sees its parent end.
    """
    socket.send_multipart(encode(Message("up")))
    runner = Runner(config, model_config, meet(), observer)
    try:
        socket.send_multipart(encode(Message("ready")))
        while (message := _next_message(socket, rank_0_ended, runner.pulse)) is not None:
            if (act := DEEDS.get(message.kind)) is not None:
                socket.send_multipart(encode(Message("done", {"error": act(runner, message)})))
                continue
            plan = StepPlan.from_message(message)
            runner.execute(plan)
            runner.finish(plan)
    finally:
        runner.close()


def change_weights(runner: Runner, message: Message) -> str | None:
    """Check or load what ``message`` names; what is wrong with it, or None. The same on every rank."""
    act = runner.load_weights if message["apply"] else runner.check_weights
    try:
        act(Path(message["folder"]), partial=message["partial"])
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{message['folder']} cannot be read: {error}"
    return None


def reopen(runner: Runner, message: Message) -> str | None:
    """Have this rank's observer go on in another run; what is wrong, or None."""
    if not isinstance(runner.observer, RunReopener):
        return "nothing records here; serve with `tapscope serve`"
    runner.pulse.now(Doing.LOADING)  # what it reports to may take a while to start
    try:
        runner.observer.reopen(message["run"])
    except TapscopeError as error:
        return str(error)
    finally:
        runner.pulse.now(Doing.WORKING)
    return None


DEEDS: dict[str, Callable[[Runner, Message], str | None]] = {"weights": change_weights, "reopen": reopen}
"""What every rank does between two steps when it is told to, by the kind of the message; it gives what went wrong."""


def _next_message(
    socket: "zmq.Socket[bytes]", rank_0_ended: "zmq.Socket[bytes] | None", pulse: Pulse
) -> Message | None:
    """The next plan; None when rank 0 says close or is no more."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        poller.register(parent.sentinel, zmq.POLLIN)
    if rank_0_ended is not None:
        poller.register(rank_0_ended, zmq.POLLIN)
    pulse.now(Doing.ASLEEP)
    ready = dict(poller.poll())
    pulse.now(Doing.WORKING)
    if socket not in ready:
        return None
    message = decode(socket.recv_multipart())
    return None if message.kind == "close" else message
