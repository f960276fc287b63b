"""Framework plugins: discovered by entry points, and loaded once their framework is imported.

Errors of a plugin are logged and never reach the model.
"""

import importlib
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from types import NoneType
from typing import Any, TypeVar

from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts, ProcessLayout, StepRows

_log = logging.getLogger("tapscope")
_T = TypeVar("_T")

GROUP = "tapscope.frameworks"
BUILT_IN = {
    "vllm": "tapscope.frameworks.vllm:VllmPlugin",
    "sglang": "tapscope.frameworks.sglang:SGLangPlugin",
    "megatron.core.parallel_state": "tapscope.frameworks.megatron:MegatronPlugin",
    "transformers": "tapscope.frameworks.hf:TransformersPlugin",
    "diffusers": "tapscope.frameworks.diffusers:DiffusersPlugin",
}
"""Import name of a framework -> its built-in plugin; an entry point of the same name replaces the plugin."""
_ANSWERS: dict[str, Any] = {
    "owns": bool,
    "layout": (ProcessLayout, NoneType),
    "module_facts": ModuleFacts,
    "module_number": (int, NoneType),
    "microbatch": (int, NoneType),
    "step_rows": (StepRows, NoneType),
    "opaque_classes": Sequence,
    "step_modules": Sequence,
    "step_methods": Sequence,
}
"""Plugin method -> required type of its result."""


class PluginRegistry:
    """Plugins of the frameworks that this process has imported."""

    def __init__(self) -> None:
        self._plugins: dict[str, FrameworkPlugin | None] = {}  # None: loading failed
        self._targets: dict[str, Callable[[], Any]] | None = None
        self._reported: set[tuple[str, str]] = set()

    def add(self, framework: str, plugin: FrameworkPlugin) -> None:
        """Register ``plugin`` for the framework with this import name, overriding an installed plugin."""
        self._plugins[framework] = plugin

    def active(self) -> list[FrameworkPlugin]:
        """Return the plugins whose framework has been imported, loading them if necessary."""
        if self._targets is None:
            self._targets = _targets()
        for name, load in self._targets.items():
            if name in sys.modules and name not in self._plugins:
                self._plugins[name] = self._load(name, load)
        return [plugin for name, plugin in self._plugins.items() if plugin is not None and name in sys.modules]

    @property
    def loaded(self) -> tuple[str, ...]:
        """Import names of the imported frameworks that have a plugin."""
        if self._targets is None:
            self._targets = _targets()
        return tuple(name for name in {**self._targets, **self._plugins} if name in sys.modules)

    def ask(self, plugin: FrameworkPlugin, method: str, default: _T, *args: Any) -> _T:
        """Call ``method`` of ``plugin``; return ``default`` if it raises or returns the wrong type.

        A failure is logged once per method.
        """
        try:
            answer: _T = getattr(plugin, method)(*args)
            if not isinstance(answer, _ANSWERS[method]):
                raise TypeError(f"it returned {type(answer).__name__}")
        except Exception as error:  # noqa: BLE001 - third-party code must not break the model
            self._report(plugin.name, method, error)
            return default
        return answer

    def owner_of(self, model: Any) -> FrameworkPlugin | None:
        """Return the plugin of the framework that ``model`` belongs to; None for a plain PyTorch model.

        Prefers the framework that defines the class of the model or one of its bases, then a plugin whose ``owns``
        accepts the model.
        """
        active = self.active()
        packages = [each.__module__.partition(".")[0] for each in type(model).__mro__]
        by_package = {name.partition(".")[0]: plugin for name, plugin in self._plugins.items() if plugin in active}
        plugin_of_package = next((by_package[package] for package in packages if package in by_package), None)
        return plugin_of_package or next((plugin for plugin in active if self.ask(plugin, "owns", False, model)), None)

    def _load(self, framework: str, load: Callable[[], Any]) -> FrameworkPlugin | None:
        try:
            plugin: FrameworkPlugin = load()()
            _warn_if_untested(framework, plugin)
        except Exception as error:  # noqa: BLE001 - third-party code must not break the model
            self._report(framework, "loading", error)
            return None
        return plugin

    def _report(self, name: str, what: str, error: Exception) -> None:
        if (name, what) not in self._reported:
            self._reported.add((name, what))
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            _log.warning(
                "tapscope: the %s plugin failed in %s (%s); capture continues without its answer", name, what, reason
            )


def _targets() -> dict[str, Callable[[], Any]]:
    targets: dict[str, Callable[[], Any]] = {name: _importer(target) for name, target in BUILT_IN.items()}
    return targets | {each.name: each.load for each in metadata.entry_points(group=GROUP)}


def _importer(target: str) -> Callable[[], Any]:
    module, _, name = target.partition(":")
    return lambda: getattr(importlib.import_module(module), name)


def _warn_if_untested(framework: str, plugin: FrameworkPlugin) -> None:
    if not plugin.oldest:
        return
    modules = (sys.modules.get(framework), sys.modules.get(framework.partition(".")[0]))
    version = next((str(stated) for each in modules if (stated := getattr(each, "__version__", ""))), "")
    numbers = _numbers(version)
    if version and numbers is None:
        text = "tapscope: %s has version %r, which has no number (tested: %s and later); rows or dims may be missing"
        _log.warning(text, framework, version, plugin.oldest)
    elif numbers is not None and numbers < (_numbers(plugin.oldest) or []):
        text = "tapscope: %s %s is older than the versions tested (%s and later); rows or dims may be missing"
        _log.warning(text, framework, version, plugin.oldest)


def _numbers(version: str) -> list[int] | None:
    """Return the release numbers of a version, e.g. ``[0, 9, 1]`` for ``0.9.1rc2+cpu``; None if there are none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return [int(part) for part in match[1].split(".")] if match else None


registry = PluginRegistry()
"""Registry of this process."""
