"""FrameworkPlugin: a framework's knowledge about its models and batches that torch does not have.

A plugin is a class with a public no-argument constructor. Register it as an entry point of the group
``tapscope.frameworks``, under the import name of the framework. The plugin is loaded after that package has been
imported::

    [project.entry-points."tapscope.frameworks"]
    myserver = "myserver_tapscope:MyServerPlugin"

Every method has a default, so a plugin overrides only what its framework needs::

    class MyServerPlugin(FrameworkPlugin):
        name = "myserver"

        def module_dims(self, module, parent):
            return {"out": "t h[tp]"} if type(module).__name__ == "ShardedLinear" else {}

If a plugin method raises, the error is reported once per method, and the capture continues without the result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapscope.core.observe import StepInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """The position of this process within the job."""

    mesh: Mapping[str, int]
    """Axis -> size, e.g. ``{"tp": 2}``."""
    coords: Mapping[str, int]
    """Axis -> this process's coordinate."""
    own_steps: tuple[str, ...] = ()
    """Axes along which processes step independently, such as replicas of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The token rows of a step, as read from a batch object."""

    info: StepInfo
    """The step with its grid, rows and row sets. Its token ids are ignored if ``token_ids`` is given."""
    token_ids: Any = None
    """Integer tensor with one id per slot of the grid, on any device; None if unknown or given in ``info``."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Integer tensors, on any device, whose values determine the rows."""
    complete: "Callable[[StepInfo, Mapping[str, Any]], StepInfo] | None" = None
    """Return the final step from ``info`` and the values of :attr:`tensors` (NumPy arrays), once they are on the
    host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """A plugin's facts about one module."""

    dims: Mapping[str, str] = field(default_factory=dict)
    """Port -> dims."""
    row_sets: Mapping[str, str] = field(default_factory=dict)
    """Port -> name of the row set of the step that contains the rows of this port."""
    forward: Callable[..., Any] | None = None
    """Function whose signature provides the names of the arguments of the module's ``forward``."""
    is_called: bool = True
    """False for a module that only holds parameters and is never called, although it defines ``forward``."""
    is_optional: bool = False
    """True if the module may legitimately never be called, like ``tap_is_optional`` on the module itself."""
    methods: Mapping[str, str] = field(default_factory=dict)
    """Method that the module calls on itself -> NAME: the return value is the site ``tap[NAME]`` of the module. Not
    recorded inside compiled code."""


class FrameworkPlugin:
    """Framework-specific knowledge for the dumper. Override the methods that torch alone cannot answer."""

    name = "torch"
    """Name of the framework in ``run.json``."""
    oldest = ""
    """Oldest tested version, e.g. ``0.9``; empty for any. Older versions are used with a warning."""

    def owns(self, model: Any) -> bool:
        """Return whether ``model`` belongs to this framework although its class is defined in another package."""
        return False

    def layout(self) -> ProcessLayout | None:
        """Return the parallel layout of this process; None before its process groups exist. Must not call a
        collective."""
        return None

    def module_facts(self, path: str, module: Any, parent: Any) -> ModuleFacts:
        """Return facts about the module at ``path``; ``parent`` is the enclosing module, None for the root."""
        return ModuleFacts(
            dims=dict(self.module_dims(module, parent)),
            row_sets=dict(self.module_row_sets(module)),
            forward=self.module_forward(module),
        )

    def module_dims(self, module: Any, parent: Any) -> Mapping[str, str]:
        """Return port -> dims of a parallel layer, e.g. ``{"out": "t h[tp]", "param[weight]": "h[tp] d"}``."""
        return {}

    def module_row_sets(self, module: Any) -> Mapping[str, str]:
        """Return port -> row set for ports that hold only some rows of the step, e.g. ``{"out": "logits"}``."""
        return {}

    def module_forward(self, module: Any) -> Callable[..., Any] | None:
        """Return a function whose signature names the arguments if ``forward`` takes only ``*args``; otherwise None."""
        return None

    def step_rows(
        self, model: Any, info: StepInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepRows | None:
        """Return the token rows of a call of the root module; None if the framework's batch object is not accessible.

        ``info`` is the open step. The result may also set ``phase`` and ``kind`` (``dummy`` for a profiling run).
        """
        return None

    def module_number(self, module: Any) -> int | None:
        """Return the global index, from 0, of a module in a module list of which this process holds only a part.

        Example: a layer of a pipeline stage. The sites of the module carry this number. None: use the local index in
        the list.
        """
        return None

    def microbatch(self, model: Any) -> int | None:
        """Return the number, from 0, of the microbatch for which the framework's schedule calls ``model`` now.

        None if unknown. ``Dumper.micro()`` takes precedence.
        """
        return None

    def opaque_classes(self) -> Sequence[str]:
        """Return names of dataclasses passed between modules, such as a batch, whose fields are not captured in any
        model."""
        return ()

    def step_modules(self, model: Any) -> Sequence[str]:
        """Return paths of modules that the host may call in place of the root; each such call is a step."""
        return ()

    def step_methods(self, model: Any) -> Sequence[str]:
        """Return methods of the root that the host may call in place of ``forward``, such as ``decode``; each such call
        is a step."""
        return ()
