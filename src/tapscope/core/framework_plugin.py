"""FrameworkPlugin: what a framework knows about its models and batches, and torch does not.

A plugin is a class with a public no-argument constructor. Register it as an entry point of the group
``tapscope.frameworks``, under the import name of the framework. It is loaded once that package was imported::

    [project.entry-points."tapscope.frameworks"]
    myserver = "myserver_tapscope:MyServerPlugin"

Every method has a default, so a plugin overrides only what its framework needs::

    class MyServerPlugin(FrameworkPlugin):
        name = "myserver"

        def module_dims(self, module, parent):
            return {"out": "t h[tp]"} if type(module).__name__ == "ShardedLinear" else {}

A plugin that raises is reported once per method, and the capture continues without its answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapscope.core.observe import StepInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """The place of this process within the job."""

    mesh: Mapping[str, int]
    """Axis -> size, e.g. ``{"tp": 2}``."""
    coords: Mapping[str, int]
    """Axis -> this process's coordinate."""
    own_steps: tuple[str, ...] = ()
    """Axes along which processes take steps of their own: replicas of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The token rows of a step, as read from a batch object."""

    info: StepInfo
    """The step with its grid, rows and row sets. Its token ids are ignored where ``token_ids`` is given."""
    token_ids: Any = None
    """Integer tensor with one id per slot of the grid, on any device; None if unknown or stated in ``info``."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Integer tensors, on any device, whose values determine the rows."""
    complete: "Callable[[StepInfo, Mapping[str, Any]], StepInfo] | None" = None
    """Makes the step of ``info`` and the values of :attr:`tensors` (NumPy arrays), once they are on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """A plugin's facts about one module."""

    dims: Mapping[str, str] = field(default_factory=dict)
    """Port -> dims."""
    row_sets: Mapping[str, str] = field(default_factory=dict)
    """Port -> name of the row set of the step that its rows follow."""
    forward: Callable[..., Any] | None = None
    """The function whose parameters name the arguments of the module's ``forward``."""
    is_called: bool = True
    """False for a module that only holds parameters, although it has a ``forward``."""
    is_optional: bool = False
    """Whether it is normal that it is never called, as ``tap_is_optional`` of the module itself."""
    methods: Mapping[str, str] = field(default_factory=dict)
    """Method that the module calls itself -> NAME: what it returns is the site ``tap[NAME]`` of the module. Compiled
    code does not record it."""


class FrameworkPlugin:
    """Answers the dumper's questions about one framework. Override what torch alone cannot answer."""

    name = "torch"
    """Name of the framework in ``run.json``."""
    oldest = ""
    """Oldest version that was tested, e.g. ``0.9``; empty for any. Older versions are used with a warning."""

    def owns(self, model: Any) -> bool:
        """Whether ``model`` is a model of this framework, when its class was defined in another package."""
        return False

    def layout(self) -> ProcessLayout | None:
        """The parallel layout of this process; None before its groups exist. Must not use a collective."""
        return None

    def module_facts(self, path: str, module: Any, parent: Any) -> ModuleFacts:
        """Facts about the module at ``path``; ``parent`` is the module that holds it, None for the root."""
        return ModuleFacts(
            dims=dict(self.module_dims(module, parent)),
            row_sets=dict(self.module_row_sets(module)),
            forward=self.module_forward(module),
        )

    def module_dims(self, module: Any, parent: Any) -> Mapping[str, str]:
        """Port -> dims of a parallel layer, e.g. ``{"out": "t h[tp]", "param[weight]": "h[tp] d"}``."""
        return {}

    def module_row_sets(self, module: Any) -> Mapping[str, str]:
        """Port -> row set, for ports that hold only some rows of the step, e.g. ``{"out": "logits"}``."""
        return {}

    def module_forward(self, module: Any) -> Callable[..., Any] | None:
        """The function whose signature names the arguments, where ``forward`` takes only ``*args``."""
        return None

    def step_rows(
        self, model: Any, info: StepInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepRows | None:
        """The token rows of a call of the root module; None if the framework's batch object is not in sight.

        ``info`` is the open step. The result may also set ``phase`` and ``kind`` (``dummy`` for a profiling run).
        """
        return None

    def module_number(self, module: Any) -> int | None:
        """The number, from 0, of a module of a list within the whole model, where this process holds a part of the
        list: a layer of a pipeline stage. Its sites carry this number. None: the module's place in the list."""
        return None

    def microbatch(self, model: Any) -> int | None:
        """The number, from 0, of the microbatch for which a schedule of the framework calls ``model`` now; None if
        unknown. ``Dumper.micro()`` takes precedence."""
        return None

    def opaque_classes(self) -> Sequence[str]:
        """Names of dataclasses that modules pass on, such as a batch; their fields are not captured in any model."""
        return ()

    def step_modules(self, model: Any) -> Sequence[str]:
        """Paths of modules that the host may call in place of the root: such a call is a step, as the root's is."""
        return ()

    def step_methods(self, model: Any) -> Sequence[str]:
        """Methods of the root that the host may call in place of its forward, such as ``decode``: such a call is a
        step, as a call of a step module is."""
        return ()
