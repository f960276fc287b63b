"""WeightControl: update and digest the weights of a running engine, and release its memory, on all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tapscope.core.errors import CheckpointError, LiveError, RankLostError, UsageError
from tapscope.core.wire import Message
from tapscope.engine.checkpoint.weight_digest import ShardDigest, joined_digests
from tapscope.engine.distributed.weight_group import BACKENDS, check_metadata
from tapscope.engine.execution.memory_occupation import TAGS
from tapscope.engine.execution.rank_group import RankGroup
from tapscope.engine.execution.resolved_settings import resolve_length
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.scheduling.scheduler import Scheduler

_GROUP_TIMEOUTS = 5  # timeout for joining a group, in units of rank_timeout_s; the limit of a loading rank is ten


class WeightControl:
    """Weight and memory commands, executed between two steps; all raise RankLostError once the engine is unusable."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        ranks: RankGroup,
        scheduler: Scheduler,
        *,
        drain: Callable[[], None],
        is_paused: Callable[[], bool],
    ) -> None:
        """``drain`` collects the launched steps; ``is_paused`` returns whether generation is paused."""
        self._config, self._model_config, self._ranks, self._scheduler = config, model_config, ranks, scheduler
        self._drain, self._is_paused = drain, is_paused
        self._groups: set[str] = set()
        self._released: list[str] = []

    def require_memory(self) -> None:
        """Raise LiveError while the memory of the weights or the KV cache is released."""
        if self._released:
            raise LiveError(f"the memory of {' and '.join(self._released)} is released; resume it first")

    def check(self, folder: Path | None, *, partial: bool) -> None:
        """Raise the error that :meth:`update` would raise, without changing any weights."""
        config = self._config
        self._ranks.require_usable()
        if "weights" in self._released:
            raise UsageError("the memory of weights is released; resume it before an update")
        if folder is not None and not partial:
            difference = _difference(resolve_length(config, ModelConfig.read(folder)), self._model_config)
            if difference:
                file = folder / "config.json"
                raise UsageError(f"{file} describes a different model than {config.model}: {difference}")
        self._ranks.run_command(_weights(folder, partial=partial, apply=False), CheckpointError)

    def update(self, folder: Path | None, *, partial: bool) -> None:
        """Replace the weights on every rank with those in ``folder``; None: with those from :meth:`receive`.

        With ``partial``, the source may contain only some of the tensors. Live requests continue after their cached
        tokens are recomputed. Raises CheckpointError, or UsageError for the config.json of another model, with the old
        weights in place; RankLostError if reading fails halfway, after which the engine is unusable.
        """
        self.check(folder, partial=partial)
        self._drain()
        try:
            self._ranks.run_command(_weights(folder, partial=partial, apply=True), CheckpointError)
        except CheckpointError as error:
            lost = RankLostError(f"the weights are partly replaced; restart the engine: {error}")
            raise self._ranks.mark_lost(lost) from error
        self._scheduler.recompute()

    def join_group(self, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str) -> None:
        """Join a trainer's process group, in which rank r of the server has rank ``rank_offset`` + r.

        Waits until all ``world_size`` ranks have joined. Raises UsageError.
        """
        self._ranks.require_usable()
        config = self._config
        if group in self._groups:
            raise UsageError(
                f"group {group!r} exists; end it with POST /destroy_weights_update_group, or use another name"
            )
        if backend not in BACKENDS:
            raise UsageError(f"unknown backend {backend!r}; supported: {', '.join(BACKENDS)}")
        if backend == "nccl" and self._ranks.runner.device.type != "cuda":
            raise UsageError("backend 'nccl' needs GPUs, and this engine runs on a CPU; use 'gloo'")
        last = rank_offset + config.dp * config.tp
        if rank_offset < 1 or last > world_size:
            ranks = f"ranks {rank_offset} to {last - 1} of a group of {world_size}"
            raise UsageError(f"{ranks}: they must be from 1 to {world_size - 1}; rank 0 is the trainer's")
        message = {"address": address, "port": port, "world_size": world_size, "group": group, "backend": backend}
        message |= {"first_rank": rank_offset + config.dp_rank * config.tp}
        message |= {"timeout_s": _GROUP_TIMEOUTS * config.rank_timeout_s}
        try:
            self._ranks.run_command(Message("join_group", message), UsageError)
        except UsageError:
            self._leave(group)  # on the ranks that have joined
            raise
        self._groups.add(group)

    def leave_group(self, group: str) -> None:
        """Leave a trainer's process group; raises UsageError."""
        self._require_group(group)
        self._leave(group)

    def receive(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str) -> None:
        """Receive the tensors that a trainer broadcasts on every rank, and check them; :meth:`update` loads them.

        Unknown tensors are received too, so that the trainer does not block, and rejected afterwards. Raises
        UsageError, CheckpointError.
        """
        self._require_group(group)
        plain = check_metadata(names, dtypes, shapes)
        message = {"names": list(names), "dtypes": plain, "shapes": [list(shape) for shape in shapes], "group": group}
        self._drain()
        self._ranks.run_command(Message("receive_weights", message), UsageError)
        try:
            self.check(None, partial=True)
        except (CheckpointError, UsageError):
            self.forget_received()
            raise

    def forget_received(self) -> None:
        """Discard the tensors from :meth:`receive` on every rank."""
        self._ranks.run_command(Message("receive_weights", {"names": []}), UsageError)

    def digests(self, names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
        """Return dtype, shape and digest of each full weight by name (:mod:`.checkpoint.weight_digest`).

        ``names`` are the caller's weight names, which select a naming scheme where a module has several. Raises
        UsageError for quantized weights, and CheckpointError if ranks differ in a replicated part.
        """
        self._ranks.require_usable()
        if "weights" in self._released:
            raise UsageError("the memory of weights is released; resume it first")
        given = None if names is None else list(names)
        ranks = self._ranks.query(Message("digest_weights", {"names": given}))
        return joined_digests([[_shard(shard) for shard in rank] for rank in ranks])

    def release_memory(self, tags: Sequence[str] | None) -> list[str]:
        """Release the memory of ``tags`` (None: all) on every rank; return all tags that are now released.

        Raises UsageError for an unknown tag, and while requests are live, except for requests that wait in a paused
        engine.
        """
        given = self._tags(tags)
        num_live = len(self._scheduler.running) if self._is_paused() else len(list(self._scheduler.live()))
        if num_live:
            raise UsageError(
                f"{num_live} requests are live; before releasing memory, wait for them, abort them, or retract them "
                "with POST /pause_generation"
            )
        if "kv_cache" in given:
            self._drain()
            self._scheduler.flush()
        try:
            self._ranks.run_command(Message("memory", {"release": True, "tags": given}), UsageError)
        except UsageError:  # undo on the ranks that have released the memory
            fresh = [tag for tag in given if tag not in self._released]
            self._ranks.run_command(Message("memory", {"release": False, "tags": fresh}), UsageError)
            raise
        self._released = [tag for tag in TAGS if tag in {*self._released, *given}]
        return list(self._released)

    def resume_memory(self, tags: Sequence[str] | None) -> list[str]:
        """Undo :meth:`release_memory`; return the tags that are still released. Raises UsageError."""
        given = self._tags(tags)
        self._ranks.run_command(Message("memory", {"release": False, "tags": given}), UsageError)
        self._released = [tag for tag in self._released if tag not in given]
        return list(self._released)

    def _tags(self, tags: Sequence[str] | None) -> list[str]:
        self._ranks.require_usable()
        unknown = next((tag for tag in tags or () if tag not in (*TAGS, "cuda_graph")), None)
        if unknown is not None:
            raise UsageError(f"unknown tag {unknown!r}; supported: {', '.join(TAGS)}")
        return [tag for tag in TAGS if tags is None or tag in tags]

    def _require_group(self, group: str) -> None:
        self._ranks.require_usable()
        if group not in self._groups:
            raise UsageError(f"unknown group {group!r}: create it with POST /init_weights_update_group")

    def _leave(self, group: str) -> None:
        self._groups.discard(group)
        self._ranks.run_command(Message("leave_group", {"group": group}), UsageError)


def _shard(values: Sequence[Any]) -> ShardDigest:
    name, shape, dtype, region, count, digest = values
    return ShardDigest(name, tuple(shape), dtype, tuple(region), count, digest)


def _weights(folder: Path | None, *, partial: bool, apply: bool) -> Message:
    source = None if folder is None else str(folder.absolute())
    return Message("weights", {"folder": source, "partial": partial, "apply": apply})


def _difference(new: ModelConfig, old: ModelConfig) -> str:
    """Describe the first setting of ``new`` that differs from ``old``; empty if the models have the same weights.

    The dtype may differ, as weights are cast, and so may the end tokens: the engine keeps its own.
    """
    for name, value in new.facts().items():
        if value != old.facts().get(name):
            return f"{name} is {value} instead of {old.facts().get(name)}"
    for each in fields(ModelConfig):
        pair = getattr(new, each.name), getattr(old, each.name)
        if pair[0] != pair[1] and each.name not in ("dtype", "eos_token_ids"):
            return f"{each.name} is {pair[0]} instead of {pair[1]}"
    return ""
