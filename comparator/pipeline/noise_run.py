"""Noise run: a repeat of the baseline, whose distance to the baseline is the measured noise floor."""

from pathlib import Path

from msgspec import structs

from tapscope.comparator.noise_floor.measured_floor import MeasuredFloor, measure_floor
from tapscope.comparator.options.map_file import MapFile
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.options.overrides import SIDES, baseline_entries, side_entries
from tapscope.comparator.pipeline.detect_reroutes import detect_reroutes
from tapscope.comparator.pipeline.match_runs import match_runs
from tapscope.comparator.pipeline.measure_pairs import measure_pairs
from tapscope.comparator.pipeline.open_runs import open_runs
from tapscope.comparator.runs.corrupt_records import CorruptRecords
from tapscope.comparator.runs.pipeline_stages import number_across_ranks
from tapscope.core.errors import ConfigError
from tapscope.run_format.run import Run
from tapscope.sources import open_run


def measure_noise_run(baseline: Run, target: Run, options: CompareOptions) -> MeasuredFloor | None:
    """Measure the noise floor from ``options.noise_run``; return None if the option is not set.

    Raises ConfigError if the noise run is one of the two compared runs, and NothingInCommonError if it does not repeat
    the baseline.
    """
    if options.noise_run is None:
        return None
    with open_run(options.noise_run) as run:
        for other, what in ((baseline, "the baseline"), (target, "the target")):
            if Path(run.path).resolve() == Path(other.path).resolve():
                path = options.noise_run
                raise ConfigError(f"--noise-run {path} is {what} itself; give a repeat of the baseline")
        # A noise run has the names and step numbers of the baseline.
        every = (*options.dims, *options.mapping.dims)
        dims = baseline_entries(every, number_across_ranks(baseline, side_entries(every, SIDES[0])))
        if baseline.mesh and not run.mesh and run.world_size == baseline.world_size:
            run.assume_mesh(baseline.mesh)
        own = structs.replace(options, mapping=MapFile(), dims=dims, shift_steps=0)
        opened = open_runs(baseline, run, own, (CorruptRecords(baseline), CorruptRecords(run)))
        screened = detect_reroutes(measure_pairs(match_runs(opened))).without_rerouted_rows()
        return measure_floor(str(options.noise_run), screened.judged, options.margin)
