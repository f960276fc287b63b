"""ControlHandler: answer control requests from HTTP and from ``tapscope ctl``."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tapscope.core.errors import ConfigError, RecorderError, TapscopeError
from tapscope.core.formatting import size
from tapscope.core.site import Glob
from tapscope.core.wire import Message
from tapscope.dumper.config import RUNTIME_FIELDS, DumperConfig, with_former_names
from tapscope.dumper.recorder import recorder_state
from tapscope.dumper.recorder.config_change import NO_RANK, Answer, ConfigChange, Reply
from tapscope.dumper.recorder.disk_space_guard import free_bytes
from tapscope.dumper.recorder.rank_registry import RankRegistry
from tapscope.run_format.directory import create_run

MAX_STEPS = 1_000_000_000
MAX_RULES = 1000
"""Maximum number of rules or triggers; each rank matches all of them against its sites while the model runs."""
_EVERYTHING = {"enabled": True, "mode": "all", "keep": "full", "rules": [], "filter": None}
_NUMBERED_RUN = re.compile(r"(.+)-[1-9][0-9]{0,5}")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


class ControlHandler:
    """Dispatcher of control requests.

    A handler returns its answer, or None if the answer follows later because it depends on the ranks.
    """

    def __init__(self, run: Path, ranks: RankRegistry, change: ConfigChange, *, reply: Reply, live: str) -> None:
        """``run`` is the recorder's first run, ``live`` the address of the PUB socket with live record lines."""
        self._run = run
        self._ranks = ranks
        self._change = change
        self._reply = reply
        self._live = live
        self._manifest: dict[str, Any] = {}
        self._modules: dict[str, list[Any]] = {}
        self._handlers: dict[str, Callable[[bytes, Any, dict[str, Any]], Answer | None]] = {
            "state": self._do_state,
            "get_state": self._do_get_state,
            "sites": self._do_sites,
            "verdict": self._do_verdict,
            "configure": self._do_configure,
            "capture": self._do_capture,
            "reset": self._do_reset,
        }

    def joined(self, join: Message) -> dict[str, Any]:
        """Return the fields of the reply to a joining rank; adopt manifest and configuration of the first rank."""
        change = self._change
        if not change.config:
            self._manifest, change.config = join["manifest"], join["config"]
        self.add_modules(join["modules"])
        return {"epoch": change.epoch, "config": change.config, "run": str(change.run)}

    def add_modules(self, modules: list[Any]) -> None:
        """Register tapped modules, each ``[path, class, ports]``; pipeline stages have different modules."""
        for module in modules:
            self._modules.setdefault(module[0], module)

    def request(self, identity: bytes, message: Message) -> None:
        """Handle a control request; the reply to a change is sent once the ranks have answered."""
        verb, body, request = message["verb"], message.fields.get("body") or {}, message["id"]
        handler = self._handlers.get(verb) if isinstance(verb, str) else None
        if handler is None:
            self._reply(identity, request, 404, {"error": f"unknown request: {verb}"})
            return
        try:
            if not isinstance(body, dict):
                raise RecorderError("the body must be a JSON object")
            answer = handler(identity, request, body)
        except TapscopeError as error:
            answer = 400, {"error": str(error)}
        if answer is not None:
            self._reply(identity, request, *answer)

    # ---- queries

    def _do_state(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer:
        ranks, change = self._ranks, self._change
        return 200, {
            "run": str(change.run),
            "epoch": change.epoch,
            "config": with_former_names(change.config),
            "world_size": ranks.world_size,
            "ranks": recorder_state.rank_states(ranks),
            "hints": recorder_state.hints(ranks),
            "live": self._live,
            "change_under_way": change.busy,
            "capture_under_way": change.running_capture(),
            "write_s": {str(rank.rank): round(rank.write_s, 6) for rank in ranks.ranks.values()},
        }

    def _do_get_state(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer:
        _allow_fields(body, "get_state", ())
        config = with_former_names(self._change.config)
        ranks = [
            {"config": config, "dump_index": rank.writer.records_written, "step": rank.step}
            for _, rank in sorted(self._ranks.ranks.items())
        ]
        return 200, {"ranks": ranks}

    def _do_sites(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer:
        text = body.get("glob")
        if text is not None and not isinstance(text, str):
            return 400, {"error": f"glob={text!r}: must be a string"}
        glob = None if text is None else Glob(text)
        modules = [
            {"path": path, "class": cls, "ports": shown}
            for path, cls, ports in self._modules.values()
            if (shown := [port for port in ports if glob is None or glob.matches(f"{path}:{port}")])
        ]
        if not modules and glob is not None:
            return 400, {"error": f"no site matches {glob.text!r}; GET /dumper/sites lists all"}
        return 200, {"num_sites": sum(len(module["ports"]) for module in modules), "modules": modules}

    def _do_verdict(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer:
        _allow_fields(body, "verdict", ())
        against = self._current().against
        if against is None:
            return 400, {"error": "nothing is compared: start with against=RUN, or TAPSCOPE_AGAINST=RUN"}
        return 200, {"run": str(self._change.run), "against": against, **recorder_state.verdict(self._ranks)}

    # ---- changes

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
            return 400, {"error": f"steps={steps!r}: must be an integer from 1 to {MAX_STEPS}"}
        if not isinstance(replace, bool):
            return 400, {"error": f"replace={replace!r}: must be true or false"}
        changes = {name: value for name, value in body.items() if name not in ("steps", "replace")}
        config = self._current().updated(_EVERYTHING)
        allowed = ("steps", "replace", "past", *RUNTIME_FIELDS)
        config = config.updated(changes, allowed=allowed).updated({"capture_steps": steps})
        running = self._change.running_capture()
        if running is not None and not replace:
            text = f'{running} is in progress; wait until it ends, or send "replace": true to end it now'
            return 409, {"error": text}
        if reason := self._lack_of_space(config):
            return 409, {"error": reason}
        return self._propose_config(identity, request, config)

    def _do_release(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer | None:
        _allow_fields(body, "capture with past", ("past",))
        past = body["past"]
        if not _is_count(past):
            return 400, {"error": f"past={past!r}: must be an integer from 1 to {MAX_STEPS}"}
        if not self._current().flight_recorder_steps:
            return 400, {"error": "no flight recorder is on; configure flight_recorder_steps first"}
        return self._change.release(identity, request, past)

    def _do_reset(self, identity: bytes, request: Any, body: dict[str, Any]) -> Answer | None:
        path = next_run(self._run, body)
        if (refusal := self._change.refusal()) is not None:
            return refusal
        try:
            create_run(path, self._manifest | {"config": self._change.config})
        except OSError as error:
            return 400, {"error": f"run={path.name!r}: cannot create {path}: {error.strerror}"}
        return self._change.propose(identity, request, {"run": str(path)}, {"run": str(path)})

    def _propose_config(self, identity: bytes, request: Any, config: DumperConfig) -> Answer | None:
        for name in ("rules", "triggers"):
            if len(getattr(config, name)) > MAX_RULES:
                number = len(getattr(config, name))
                return 400, {"error": f"{name}: {number} given, at most {MAX_RULES} allowed; use globs"}
        content = config.to_json()
        # Includes the base configuration, to which a capture falls back: an idle rank may never have applied it.
        payload = {"config": content, "base": self._change.config}
        shown: dict[str, Any] = {"config": {name: content[name] for name in (*RUNTIME_FIELDS, "capture_steps")}}
        if (running := self._change.running_capture()) is not None:
            shown["ended"] = running
        if config.enabled and (reason := self._lack_of_space(config)):
            shown["warning"] = reason
        return self._change.propose(identity, request, payload, shown)

    def _lack_of_space(self, config: DumperConfig) -> str:
        """Return why a lack of disk space would prevent the capture; empty if there is enough space."""
        free, minimum = free_bytes(self._change.run), config.min_free_bytes or 0
        if free is None or free >= minimum:
            return ""
        return (
            f"nothing would be captured: {size(free)} are free on the disk of the run, min_free_bytes is "
            f"{size(minimum)}; free disk space or lower min_free_bytes"
        )

    def _current(self) -> DumperConfig:
        if not self._change.config:
            raise RecorderError(NO_RANK)
        return DumperConfig().updated(self._change.config)


def next_run(base: Path, body: Mapping[str, Any]) -> Path:
    """Return the directory of the run that a reset opens: ``run`` of the body, or ``base`` with the next free number.

    Raises ConfigError for an unknown field, and for a name that is invalid or taken.
    """
    if unknown := set(body) - {"run"}:
        raise ConfigError(f"unknown field {min(unknown)!r} of reset; the only valid field is run")
    name = body.get("run")
    if name is None:
        first = _unnumbered(base)
        numbered = (first.with_name(f"{first.name}-{number}") for number in range(2, 1_000_000))
        return next(path for path in numbered if not path.exists())
    if not (isinstance(name, str) and _RUN_NAME.fullmatch(name)):
        raise ConfigError(f"run={name!r}: must be a plain name without '/'; the run is created next to the current one")
    if (path := base.with_name(name)).exists():
        raise ConfigError(f"run={name!r}: a run of this name exists; choose another name")
    return path


def _unnumbered(run: Path) -> Path:
    """Return the run NAME if ``run`` is NAME-2 and NAME exists, else ``run``.

    A recorder started for NAME-2 does not know whether the number was added by a reset.
    """
    numbered = _NUMBERED_RUN.fullmatch(run.name)
    first = None if numbered is None else run.with_name(numbered[1])
    return run if first is None or not first.is_dir() else first


def _allow_fields(body: dict[str, Any], verb: str, known: tuple[str, ...]) -> None:
    if unknown := set(body) - set(known):
        valid = f"the only valid field is {known[0]}" if known else "it takes no fields"
        raise RecorderError(f"unknown field {min(unknown)!r} of {verb}; {valid}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_STEPS
