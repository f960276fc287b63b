"""AppState: state shared by the routes of one app."""

import asyncio
from dataclasses import dataclass, field

from tapscope.core.errors import LiveError
from tapscope.engine.runners.engine_client import EngineClient
from tapscope.engine.server.metrics import ServerMetrics
from tapscope.engine.server.server_settings import ServerSettings


@dataclass(slots=True, eq=False)
class AppState:
    """Shared state of one app, created before the app runs; ``client`` is available while it runs."""

    model_path: str
    settings: ServerSettings
    dp: int = 1
    """Number of replicas."""
    metrics: ServerMetrics = field(init=False)
    weight_version: str = "default"
    is_ready: bool = False
    """Whether every replica has responded."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Loaded LoRA adapters: name -> directory."""
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held during weight updates and other commands to all replicas, so that all execute them in the same order.
    """
    _client: EngineClient | None = None

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.model_name, self.dp)

    @property
    def model_name(self) -> str:
        """Model name that clients use."""
        return self.settings.model_name or self.model_path

    @property
    def client(self) -> EngineClient:
        """The engine client; raises LiveError outside the app's lifespan."""
        if self._client is None:
            raise LiveError("the server is starting or has ended")
        return self._client

    @client.setter
    def client(self, client: EngineClient) -> None:
        self._client = client

    def require_ready(self) -> None:
        """Raise LiveError with the reason unless the engine is ready."""
        self.client.require_usable()
        if not self.is_ready:
            raise LiveError("the engine is still loading")
