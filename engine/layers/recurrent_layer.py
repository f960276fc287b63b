"""RecurrentLayer: base class of layers with a recurrent state, which is a site as each step leaves it."""

from torch import nn

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.probe import STATES, TapProbe, is_watched


class RecurrentLayer(nn.Module):
    """Base class; ``tap[conv_state]`` and ``tap[recurrent_state]`` have one row for each request."""

    layer: int
    is_recurrent = False
    """Whether rows of prompts are computed one after the other, so that bits do not depend on chunks."""

    def add_state_taps(self, channels: dict[str, Shard], tp_size: int, matrix: str | None) -> None:
        """``channels``: the parts of the convolution window [requests, channels, positions]; ``matrix``: dims of the
        state after the requests' axis, None for a layer that has a window only.
        """
        if len(channels) == 1:
            axis = "h[tp]"
        else:
            sizes = {
                name: f"{part.total}x{tp_size}" if part.is_whole and tp_size > 1 else str(part.total)
                for name, part in channels.items()
            }
            axis = f"({'+'.join(f'{name}={size}' for name, size in sizes.items())})[tp]"
        self.conv_state = TapProbe("conv_state", f"t {axis} positions", STATES)
        self.recurrent_state = None if matrix is None else TapProbe("recurrent_state", f"t {matrix}", STATES)

    def groups(self, cache: StepCache) -> list[tuple[slice, slice]]:
        """Requests and rows that are computed together: the requests with one row, then each of the others.

        A layer that is recurrent computes each request alone.
        """
        single = 0 if self.is_recurrent else cache.num_single
        found = [(slice(0, single), slice(0, single))] if single else []
        for segment in cache.segments[single:]:
            own = slice(segment.index, segment.index + 1)
            found.append((own, slice(segment.slot, segment.slot + segment.count)))
        return found

    def show_states(self, cache: StepCache) -> None:
        """Pass the states after the step to their taps; nothing is read if there are none."""
        probes = [probe for probe in (self.conv_state, self.recurrent_state) if probe is not None]
        if not any(map(is_watched, probes)):
            return
        assert cache.states is not None, "the cache has no recurrent states"
        for probe, value in zip(probes, cache.states.written(self.layer), strict=False):
            probe(value)
