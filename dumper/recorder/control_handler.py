"""Steering: what control requests do, and the one change of configuration that may be under way."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapscope.core.errors import RecorderError, TapscopeError
from tapscope.core.site import Glob
from tapscope.core.wire import Message
from tapscope.dumper.config import RUNTIME_FIELDS, DumperConfig
from tapscope.dumper.recorder import recorder_state
from tapscope.dumper.recorder.config_change import NO_RANK, Answer, Changes
from tapscope.dumper.recorder.reset_run_path import fresh_run
from tapscope.run_format.directory import create_run

if TYPE_CHECKING:
    from tapscope.dumper.recorder.recorder import Recorder

MAX_STEPS = 1_000_000_000
MAX_RULES = 1000
"""Every rank tries each rule on each of its sites, beside a model that runs."""
_EVERYTHING = {"enabled": True, "mode": "all", "keep": "full", "rules": [], "filter": None}


class Steering:
    """The recorder's answers to control requests.

    A handler gives its answer at once, or None when it must hear the ranks first.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._manifest: dict[str, Any] = {}
        self._modules: dict[str, list[Any]] = {}
        self.changes = Changes(recorder)
        self._handlers: dict[str, Callable[[bytes, Any, dict[str, Any]], Answer | None]] = {
            "state": self._do_state,
            "get_state": self._do_get_state,
            "sites": self._do_sites,
            "configure": self._do_configure,
            "capture": self._do_capture,
            "reset": self._do_reset,
        }

    def welcome(self, hello: Message) -> dict[str, Any]:
        """What a rank that comes must know; the first one brings manifest and configuration."""
        changes = self.changes
        if not changes.config:
            self._manifest, changes.config = hello["manifest"], hello["config"]
        self.add_modules(hello["modules"])
        return {"epoch": changes.epoch, "config": changes.config, "run": str(changes.run_path)}

    def add_modules(self, modules: list[Any]) -> None:
        """[path, class, ports] of modules with a tap; stages of a pipeline hold different ones."""
        for module in modules:
            self._modules.setdefault(module[0], module)

    def request(self, identity: bytes, message: Message) -> None:
        """A control client asks; most answers go out at once, a change answers when ranks have."""
        verb, body, request = message["verb"], message.fields.get("body") or {}, message["id"]
        handler = self._handlers.get(verb) if isinstance(verb, str) else None
        if handler is None:
            self._reply(identity, request, 404, {"error": f"no such request: {verb}"})
            return
        try:
            if not isinstance(body, dict):
                raise RecorderError("the body must be a JSON object")
            answer = handler(identity, request, body)
        except TapscopeError as error:
            answer = 400, {"error": str(error)}
        if answer is not None:
            self._reply(identity, request, *answer)

    def _do_state(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer:
        recorder = self._recorder
        return 200, {
            "run": str(self.changes.run_path),
            "epoch": self.changes.epoch,
            "config": self.changes.config,
            "world_size": recorder.roll.world_size,
            "ranks": recorder_state.rank_states(recorder.roll),
            "hints": recorder_state.hints(recorder.roll),
            "live": recorder.doors.live_address,
            "change_under_way": self.changes.busy,
            "capture_under_way": self.changes.running_capture(),
            "write_s": {str(peer.rank): round(peer.write_s, 6) for peer in recorder.roll.peers.values()},
        }

    def _do_get_state(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer:
        _only(body, "get_state", ())
        ranks = [
            {"config": self.changes.config, "dump_index": peer.writer.lines_written, "step": peer.step}
            for _, peer in sorted(self._recorder.roll.peers.items())
        ]
        return 200, {"ranks": ranks}

    def _do_configure(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer | None:
        if not body:
            return 400, {"error": f"nothing to configure; set any of {', '.join(RUNTIME_FIELDS)}"}
        config = self._current().updated(body, allowed=RUNTIME_FIELDS)
        return self._propose_config(identity, request, config)

    def _do_capture(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer | None:
        if "past" in body:
            return self._do_release(identity, request, body)
        steps, replace = body.get("steps", 1), body.get("replace", False)
        if not _is_count(steps):
            return 400, {"error": f"steps={steps!r}: must be a whole number of at least 1 (and at most {MAX_STEPS})"}
        if not isinstance(replace, bool):
            return 400, {"error": f"replace={replace!r}: must be true or false"}
        changes = {name: value for name, value in body.items() if name not in ("steps", "replace")}
        config = self._current().updated(_EVERYTHING)
        config = config.updated(changes, allowed=RUNTIME_FIELDS).updated({"capture_steps": steps})
        running = self.changes.running_capture()
        if running is not None and not replace:
            return 409, {"error": f'{running} is under way; wait for its end, or send "replace": true to end it now'}
        return self._propose_config(identity, request, config)

    def _do_release(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer | None:
        _only(body, "capture with past", ("past",))
        past = body["past"]
        if not _is_count(past):
            return 400, {"error": f"past={past!r}: must be a whole number of at least 1 (and at most {MAX_STEPS})"}
        if not self._current().to_json().get("past_steps"):
            return 400, {"error": "no flight recorder is on; configure past_steps first"}
        return self.changes.release(identity, request, past)

    def _do_reset(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer | None:
        path = fresh_run(self._recorder.path, body)
        if (refusal := self.changes.refusal()) is not None:
            return refusal
        try:
            create_run(path, self._manifest | {"config": self.changes.config})
        except OSError as error:
            return 400, {"error": f"run={path.name!r}: {path} cannot be created: {error.strerror}"}
        return self.changes.propose(identity, request, {"run": str(path)}, {"run": str(path)})

    def _do_sites(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer:
        text = body.get("glob")
        if text is not None and not isinstance(text, str):
            return 400, {"error": f"glob={text!r}: must be a text"}
        glob = None if text is None else Glob(text)
        modules = [
            {"path": path, "class": cls, "ports": shown}
            for path, cls, ports in self._modules.values()
            if (shown := [port for port in ports if glob is None or glob.matches(f"{path}:{port}")])
        ]
        if not modules and glob is not None:
            return 400, {"error": f"no site matches {glob.text!r}; GET /dumper/sites lists all"}
        return 200, {"num_sites": sum(len(m["ports"]) for m in modules), "modules": modules}

    def _propose_config(self, identity: bytes, request: Any, config: DumperConfig) -> Answer | None:
        for name in ("rules", "triggers"):
            if len(getattr(config, name)) > MAX_RULES:
                return 400, {"error": f"{name}: at most {MAX_RULES}, not {len(getattr(config, name))}; globs say more"}
        content = config.to_json()
        # The base travels along: a rank that was idle may never have applied what a capture falls back to.
        payload = {"config": content, "base": self.changes.config}
        shown: dict[str, Any] = {"config": {name: content[name] for name in (*RUNTIME_FIELDS, "capture_steps")}}
        if (running := self.changes.running_capture()) is not None:
            shown["ended"] = running
        return self.changes.propose(identity, request, payload, shown)

    def _current(self) -> DumperConfig:
        if not self.changes.config:
            raise RecorderError(NO_RANK)
        return DumperConfig().updated(self.changes.config)

    def _reply(self, identity: bytes, request: Any, status: int, body: dict[str, Any]) -> None:
        self._recorder.send(identity, Message("reply", {"id": request, "status": status, "body": body}))


def _only(body: dict[str, Any], verb: str, known: tuple[str, ...]) -> None:
    if unknown := set(body) - set(known):
        fields = f"the only one is {known[0]}" if known else "it takes none"
        raise RecorderError(f"{min(unknown)!r} is no field of {verb}; {fields}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_STEPS
