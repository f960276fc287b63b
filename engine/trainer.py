"""Trainer: client for a training process that sends weights to a server and compares them.

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
"""Seconds to wait for broadcasts in flight after the server has rejected an update."""
GROUP = "weight_update_group"


class Trainer:
    """Client of one server, and rank 0 of the process group that broadcasts weights. Not thread-safe."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None
        self._rejoin: Callable[[], None] | None = None
        """Creates the process group again after a rejected update."""

    def join(self, address: str = "127.0.0.1", port: int = 0, *, backend: str = "gloo", name: str = GROUP) -> None:
        """Create a process group of this process and all ranks of the server; port 0 selects a free port.

        ``address`` is the address at which the server reaches this host. Raises UsageError, UnreachableError.
        """
        info = self._answer("GET", "/get_server_info")
        world_size = 1 + info["tp"] * info["dp"]
        given_port, port = port, port or _free_port(address)
        body = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        body |= {"group_name": name, "backend": backend}
        request = _Call(partial(self._answer, "POST", "/init_weights_update_group", body))
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def create_group() -> WeightGroup:
            if device is not None:
                torch.cuda.set_device(device)  # the current device is per thread
            options: dict[str, Any] = {"rank": 0, "world_size": world_size, "name": name, "backend": backend}
            return WeightGroup(address, port, timeout_s=self._timeout_s, **options)

        creation = _Call(create_group)
        request.result()  # first: if the server rejects the request, no rank joins the rendezvous
        self._group = creation.result()
        self._rejoin = partial(self.join, address, given_port, backend=backend, name=name)

    def update(self, tensors: Iterable[tuple[str, Tensor]], *, version: str | None = None) -> dict[str, Any]:
        """Broadcast tensors, given with their Hugging Face names, to the server; return the server's response.

        ``version`` names the new weights. Raises UsageError without :meth:`join` or for tensors that the model does not
        have; the weights are then unchanged, and the next update creates a new process group. Raises UnreachableError.
        """
        if self._group is None and self._rejoin is not None:
            self._rejoin()
        if self._group is None:
            raise UsageError("call join() first: it creates the process group that update() broadcasts in")
        group, sent = self._group, {name: tensor.detach() for name, tensor in tensors}
        body: dict[str, Any] = {"names": list(sent), "shapes": [list(tensor.shape) for tensor in sent.values()]}
        body |= {"dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in sent.values()]}
        body |= {"group_name": group.name} | ({} if version is None else {"weight_version": version})
        request = _Call(partial(self._answer, "POST", "/update_weights_from_distributed", body))

        def send() -> None:
            if group.device.type == "cuda":
                torch.cuda.set_device(group.device)  # the current device is per thread
            for tensor in sent.values():
                group.broadcast(tensor.to(group.device).contiguous())

        sending = _Call(send)
        both: list[Future[Any]] = [request.future, sending.future]
        wait(both, return_when=FIRST_EXCEPTION)
        if not request.future.done():
            sending.result()  # raises the error that stopped the broadcasts
        # After a rejected update the group is unusable: ranks that did not receive these tensors would mistake the next
        # ones for them.
        if request.future.exception() is not None:
            self._group = None
            with suppress(TapscopeError):
                self._answer("POST", "/destroy_weights_update_group", {"group_name": group.name})
            if sending.is_done_within(_GRACE_S):
                group.close()
        return request.result()

    def compare(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Compare ``tensors`` with the server's weights; return a description of each difference by name.

        Empty if all are equal. Tensors are cast to the server's dtype, and only digests are transferred. Raises
        UsageError, UnreachableError.
        """
        given = dict(tensors)
        server_weights: Mapping[str, Any] = self._answer("POST", "/weights_digest", {"names": list(given)})["weights"]
        differences = {name: "the server does not have it" for name in given if name not in server_weights}
        differences |= {name: "only the server has it" for name in server_weights if name not in given}
        for name, tensor in given.items():
            if (remote := server_weights.get(name)) is None:
                continue
            if list(tensor.shape) != remote["shape"]:
                differences[name] = f"shape {list(tensor.shape)}, and {remote['shape']} in the server"
            elif tensor_digest(tensor.detach().to(getattr(torch, remote["dtype"]))) != remote["digest"]:
                differences[name] = "other values"
        return differences

    def release_memory(self, *tags: str) -> None:
        """Make the server release the memory of ``weights``, ``kv_cache`` or both (default); raises UsageError."""
        self._answer("POST", "/release_memory_occupation", {"tags": list(tags)} if tags else {})

    def resume_memory(self, *tags: str) -> None:
        """Undo :meth:`release_memory`."""
        self._answer("POST", "/resume_memory_occupation", {"tags": list(tags)} if tags else {})

    def pause_generation(self, mode: str = "abort") -> int:
        """Pause generation on the server and return the number of live requests over all replicas, which wait.

        ``mode``, for live requests: ``abort``, ``retract`` or ``in_place`` (docs/guide/rl.md). Raises UsageError,
        UnreachableError.
        """
        return int(self._answer("POST", "/pause_generation", {"mode": mode})["num_live"])

    def continue_generation(self) -> int:
        """Undo :meth:`pause_generation`; return the number of live requests, which continue."""
        return int(self._answer("POST", "/continue_generation", {})["num_live"])

    def close(self) -> None:
        """Destroy the process group, on the server and in this process, and close the connection."""
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
    """A function call in a daemon thread, which does not keep the process alive while it blocks."""

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
