"""Trainer: the training side of a served engine: sends it weights and compares them.

trainer = Trainer("http://127.0.0.1:8000")
trainer.join()
trainer.update(model.named_parameters(), version="step-1")
assert not trainer.compare(model.named_parameters())
"""

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import httpx
import torch
from torch import Tensor

from tapscope.core.errors import LiveError, TapscopeError, UnreachableError, UsageError
from tapscope.engine.checkpoint.weight_digest import tensor_digest
from tapscope.engine.distributed.weight_group import WeightGroup

T = TypeVar("T")
_GRACE_S = 2.0
"""How long to wait for tensors that are on their way when the server has refused them."""
GROUP = "weight_update_group"


class Trainer:
    """Client of one server for one thread; rank 0 of the process group in which weights are sent."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None
        self._rejoin: Callable[[], None] | None = None
        """Makes the process group again after an update was refused."""

    def join(self, address: str = "127.0.0.1", port: int = 0, *, backend: str = "gloo", name: str = GROUP) -> None:
        """Make the process group of this process and all ranks of the server; port 0 selects a free one.

        ``address`` is this host's, as the server reaches it. Raises UsageError, UnreachableError.
        """
        info = self._answer("GET", "/get_server_info")
        world_size = 1 + info["tp"] * info["dp"]
        given_port, port = port, port or _free_port(address)
        body = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        body |= {"group_name": name, "backend": backend}
        asked = _Call(partial(self._answer, "POST", "/init_weights_update_group", body))
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def meet() -> WeightGroup:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has a current device of its own
            options: dict[str, Any] = {"rank": 0, "world_size": world_size, "name": name, "backend": backend}
            return WeightGroup(address, port, timeout_s=self._timeout_s, **options)

        met = _Call(meet)
        asked.result()  # first: nobody would come to a rendezvous that the server refuses
        self._group = met.result()
        self._rejoin = partial(self.join, address, given_port, backend=backend, name=name)

    def update(self, tensors: Iterable[tuple[str, Tensor]], *, version: str | None = None) -> dict[str, Any]:
        """Send tensors by Hugging Face's names; returns the server's answer.

        Raises UsageError without :meth:`join` or for tensors that the model does not have; the weights are then
        unchanged, and the next update makes a new process group. Raises UnreachableError.
        """
        if self._group is None and self._rejoin is not None:
            self._rejoin()
        if self._group is None:
            raise UsageError("call join() first: it creates the process group that update() broadcasts in")
        group, sent = self._group, {name: tensor.detach() for name, tensor in tensors}
        body: dict[str, Any] = {"names": list(sent), "shapes": [list(tensor.shape) for tensor in sent.values()]}
        body |= {"dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in sent.values()]}
        body |= {"group_name": group.name} | ({} if version is None else {"weight_version": version})
        asked = _Call(partial(self._answer, "POST", "/update_weights_from_distributed", body))

        def send() -> None:
            if group.device.type == "cuda":
                torch.cuda.set_device(group.device)  # each thread has a current device of its own
            for tensor in sent.values():
                group.broadcast(tensor.to(group.device).contiguous())

        sending = _Call(send)
        both: list[Future[Any]] = [asked.future, sending.future]
        wait(both, return_when=FIRST_EXCEPTION)
        if not asked.future.done():
            sending.result()  # raises what kept the tensors from being sent
        if asked.future.exception() is not None:  # ranks that never received would take the next tensors for these
            self._group = None
            with suppress(TapscopeError):
                self._answer("POST", "/destroy_weights_update_group", {"group_name": group.name})
            if sending.is_done_within(_GRACE_S):
                group.close()
        return asked.result()

    def compare(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Name -> how the server's weight differs from the given one, converted to its dtype; empty if all are equal.

        Only digests are transferred. Raises UsageError, UnreachableError.
        """
        given = dict(tensors)
        held: Mapping[str, Any] = self._answer("POST", "/weights_digest", {"names": list(given)})["weights"]
        differences = {name: "the server does not have it" for name in given if name not in held}
        differences |= {name: "only the server has it" for name in held if name not in given}
        for name, tensor in given.items():
            if (theirs := held.get(name)) is None:
                continue
            if list(tensor.shape) != theirs["shape"]:
                differences[name] = f"shape {list(tensor.shape)}, and {theirs['shape']} in the server"
            elif tensor_digest(tensor.detach().to(getattr(torch, theirs["dtype"]))) != theirs["digest"]:
                differences[name] = "other values"
        return differences

    def release_memory(self, *tags: str) -> None:
        """Make the server give back the memory of ``weights``, ``kv_cache`` or both; raises UsageError."""
        self._answer("POST", "/release_memory_occupation", {"tags": list(tags)} if tags else {})

    def resume_memory(self, *tags: str) -> None:
        """Undo :meth:`release_memory`."""
        self._answer("POST", "/resume_memory_occupation", {"tags": list(tags)} if tags else {})

    def pause_generation(self, mode: str = "abort") -> int:
        """Make the server stop computing: ``abort``, ``retract`` or ``in_place`` live requests (docs/guide/rl.md).

        Returns how many requests are live and wait, over all replicas. Raises UsageError, UnreachableError.
        """
        return int(self._answer("POST", "/pause_generation", {"mode": mode})["num_live"])

    def continue_generation(self) -> int:
        """Undo :meth:`pause_generation`; returns how many requests continue."""
        return int(self._answer("POST", "/continue_generation", {})["num_live"])

    def close(self) -> None:
        """Leave the process group, on both sides."""
        group, self._group, self._rejoin = self._group, None, None
        if group is not None:
            self._answer("POST", "/destroy_weights_update_group", {"group_name": group.name})
            group.close()
        self._client.close()

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self._client.base_url}{path} did not respond: {error!r}") from None
        if response.is_success:
            return dict(response.json())
        try:
            text = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = response.text[:300]
        raise (UsageError if response.status_code < 500 else LiveError)(text)


class _Call(Generic[T]):
    """A function call in a daemon thread, which ends with the process even if it waits for others."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()

        def run() -> None:
            try:
                self.future.set_result(function())
            except Exception as error:  # noqa: BLE001  (raised by result())
                self.future.set_exception(error)

        threading.Thread(target=run, name="tapscope-trainer", daemon=True).start()

    def result(self) -> T:
        return self.future.result()

    def is_done_within(self, seconds: float) -> bool:
        return bool(wait([self.future], timeout=seconds).done)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as one:
        return int(one.getsockname()[1])
