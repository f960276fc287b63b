"""Steering: what control requests do, and the one change of configuration that may be under way."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.dumper.config import RUNTIME_FIELDS, DumperConfig
from tapscope.dumper.transaction import Transaction
from tapscope.errors import RecorderError, TapscopeError
from tapscope.site import Glob
from tapscope.wire import Message
from tapscope.writer import create_run, remove_empty_run

if TYPE_CHECKING:
    from tapscope.dumper.recorder import Peer, Recorder

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


class Steering:
    """The recorder's answers to ``state``, ``configure``, ``capture``, ``reset`` and ``sites``."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._manifest: dict[str, Any] = {}
        self._modules: list[list[Any]] = []
        self._change: Transaction | None = None
        self._last_epoch = 0
        self.epoch = 0
        """The newest epoch that every rank accepted."""
        self.config: dict[str, Any] = {}
        self.run_path = recorder.path

    def welcome(self, peer: "Peer", hello: Message) -> None:
        """The first rank to come brings manifest, module list and configuration."""
        if not self.config:
            self._manifest, self.config = hello["manifest"], hello["config"]
            self._modules = hello["modules"]

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._change is not None

    def in_force(self) -> dict[str, Any]:
        """What a rank that comes late must know."""
        return {"epoch": self.epoch, "config": self.config, "run": str(self.run_path)}

    def request(self, identity: bytes, message: Message) -> None:
        """A control client asks; most answers go out at once, a change answers when ranks have."""
        verb, body = message["verb"], message.fields.get("body") or {}
        handler = getattr(self, f"_do_{verb}", None)
        if handler is None:
            self._reply(identity, message["id"], 404, {"error": f"no such request: {verb}"})
            return
        try:
            answer = handler(identity, message["id"], body)
        except TapscopeError as error:
            self._reply(identity, message["id"], 400, {"error": str(error)})
            return
        if answer is not None:
            self._reply(identity, message["id"], *answer)

    def from_rank(self, peer: "Peer", message: Message) -> None:
        """``accept`` answers a prepare; ``applied`` says from which step."""
        if message.kind == "accept" and self._change and message["epoch"] == self._change.epoch:
            self._change.answer(peer.rank, message.fields.get("problem"))
        elif message.kind == "applied":
            peer.epoch = message["epoch"]
            if self._change and peer.epoch == self._change.epoch:
                self._change.applied[peer.rank] = message["step"]
        self.advance()

    def rank_left(self, peer: "Peer") -> None:
        """A rank that is gone is waited for no longer."""
        if self._change:
            self._change.forget(peer.rank)

    def advance(self) -> None:
        """Send the commit when all accepted, answer when there is an outcome."""
        change = self._change
        if change is None:
            return
        if change.accepted:
            self._commit(change)
        outcome = change.outcome()
        if outcome is None:
            return
        if change.committed_at is None:
            self._broadcast(Message("cancel", {"epoch": change.epoch}))
            if "run" in change.payload:
                remove_empty_run(Path(change.payload["run"]))
        self._change = None
        self._reply(change.reply_to, change.request_id, *outcome)

    def _commit(self, change: Transaction) -> None:
        peers = self._recorder.present()
        step = max((peer.step for peer in peers), default=-1) + 1
        if "run" in change.payload:
            self.run_path = Path(change.payload["run"])
        self.epoch = change.epoch
        if "config" in change.payload and change.payload["config"].get("capture_steps") is None:
            self.config = change.payload["config"]
        change.commit(step)
        self._broadcast(Message("commit", {"epoch": change.epoch, "step": step}))

    def _propose_config(self, identity: bytes, request: Any, config: DumperConfig) -> tuple[int, dict[str, Any]] | None:
        content = config.to_json()
        # The base travels along: a rank that was idle may never have applied what a capture falls back to.
        payload = {"config": content, "base": self.config}
        shown = {name: content[name] for name in (*RUNTIME_FIELDS, "capture_steps")}
        return self._propose(identity, request, payload, {"config": shown})

    def _propose(
        self, identity: bytes, request: Any, payload: dict[str, Any], shown: dict[str, Any]
    ) -> tuple[int, dict[str, Any]] | None:
        if (refusal := self._unready()) is not None:
            return refusal
        peers = self._recorder.present()
        self._last_epoch += 1  # never used twice: an answer to a cancelled change must not count for the next
        epoch = self._last_epoch
        self._change = Transaction(epoch, payload, shown, identity, request, {peer.rank for peer in peers})
        self._broadcast(Message("prepare", {"epoch": epoch, **payload}))
        return None

    def _unready(self) -> tuple[int, dict[str, Any]] | None:
        if self._change is not None:
            return 409, {"error": "another change is under way; try again in a second"}
        if not self._recorder.present():
            return 409, {"error": "no rank is connected; start the model first"}
        return None

    def _do_state(self, identity: bytes, request: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ranks = [
            {
                "rank": peer.rank,
                "pid": peer.pid,
                "step": peer.step,
                "epoch": peer.epoch,
                "capture_left": peer.capture_left,
                "records": peer.writer.lines_written,
                "bytes": peer.writer.bytes_written,
                "status": peer.gone or "connected",
            }
            for _, peer in sorted(self._recorder.peers.items())
        ]
        state = {"run": str(self.run_path), "epoch": self.epoch, "config": self.config, "ranks": ranks}
        return 200, state | {"live": self._recorder.live_address, "change_under_way": self._change is not None}

    def _do_configure(self, identity: bytes, request: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if not body:
            return 400, {"error": f"nothing to configure; set any of {', '.join(RUNTIME_FIELDS)}"}
        config = self._current().updated(body, allowed=RUNTIME_FIELDS)
        return self._propose_config(identity, request, config)

    def _do_capture(self, identity: bytes, request: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        steps = body.get("steps", 1)
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            return 400, {"error": f"steps={steps!r}: must be a whole number of at least 1"}
        changes = {"enabled": True, "keep": "full", "rules": []} | {k: v for k, v in body.items() if k != "steps"}
        config = self._current().updated(changes, allowed=RUNTIME_FIELDS).updated({"capture_steps": steps})
        return self._propose_config(identity, request, config)

    def _do_reset(self, identity: bytes, request: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        unknown = set(body) - {"run"}
        if unknown:
            return 400, {"error": f"{min(unknown)!r} is no field of reset; the only one is run (a name)"}
        name = body.get("run") or self._next_name()
        if not isinstance(name, str) or not _RUN_NAME.fullmatch(name):
            return 400, {"error": f"run={name!r}: must be a plain name beside the present run, without '/'"}
        path = self._recorder.path.parent / name
        if path.exists():
            return 400, {"error": f"run={name!r}: exists; choose another name"}
        if (refusal := self._unready()) is not None:
            return refusal
        try:
            create_run(path, self._manifest | {"config": self.config})
        except OSError as error:
            return 400, {"error": f"run={name!r}: {path} cannot be created: {error.strerror}"}
        return self._propose(identity, request, {"run": str(path)}, {"run": str(path)})

    def _do_sites(self, identity: bytes, request: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        glob = Glob(body["glob"]) if body.get("glob") else None
        modules = [
            {"path": path, "class": cls, "ports": shown}
            for path, cls, ports in self._modules
            if (shown := [port for port in ports if glob is None or glob.matches(f"{path}:{port}")])
        ]
        if not modules and glob is not None:
            return 400, {"error": f"no site matches {glob.text!r}; GET /dumper/sites lists all"}
        return 200, {"num_sites": sum(len(m["ports"]) for m in modules), "modules": modules}

    def _current(self) -> DumperConfig:
        if not self.config:
            raise RecorderError("no rank is connected; start the model first")
        return DumperConfig().updated(self.config)

    def _next_name(self) -> str:
        base = self._recorder.path
        return next(f"{base.name}-{n}" for n in range(2, 1_000_000) if not (base.parent / f"{base.name}-{n}").exists())

    def _broadcast(self, message: Message) -> None:
        for peer in self._recorder.present():
            self._recorder.send(peer.identity, message)

    def _reply(self, identity: bytes, request: Any, status: int, body: dict[str, Any]) -> None:
        self._recorder.send(identity, Message("reply", {"id": request, "status": status, "body": body}))
