"""Flags: the command-line arguments that repeat a comparison."""

from collections.abc import Iterable, Iterator

from tapscope.comparator.options import fail_on
from tapscope.comparator.options.options import MARGIN, CompareOptions
from tapscope.core.site import compact_ranges


def flags(options: CompareOptions, *, sites: bool = True) -> list[str]:
    """Return the flags of `tapscope diff` and `view` for these options, without ``--site`` if ``sites`` is false.

    Values are not quoted: use ``shlex.join`` to build a shell command.
    """
    return [*_selection(options, sites), *_matching(options), *_judgement(options)]


def _selection(options: CompareOptions, sites: bool) -> Iterator[str]:
    yield from _repeated("--site", options.sites if sites else ())
    yield from _repeated("--skip", options.skip)
    for name in ("layers", "steps", "ranks"):
        numbers = getattr(options, name)
        if numbers is not None:
            yield from (f"--{name}", compact_ranges(numbers))
    if options.concat_steps:
        yield "--concat-steps"
    if options.shift_steps:
        yield from ("--shift-steps", str(options.shift_steps))


def _matching(options: CompareOptions) -> Iterator[str]:
    yield from _repeated("--map", options.mapping.files)
    yield from _repeated("--strip-prefix", options.strip_prefix)
    yield from _repeated("--dims", (f"{_side(e.side)}{e.site}={e.dims}" for e in options.dims))
    meshes = (f"{_side(e.side)}{','.join(f'{axis}={size}' for axis, size in e.sizes)}" for e in options.mesh)
    yield from _repeated("--mesh", meshes)


def _judgement(options: CompareOptions) -> Iterator[str]:
    # A tolerance takes precedence over a noise run.
    for name in ("rtol", "atol") if options.tolerance is not None else ("noise_run",):
        value = getattr(options, name)
        if value is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))
    if options.tolerance is None and options.noise_run is not None and options.margin != MARGIN:
        yield from ("--margin", str(options.margin))
    yield from _repeated("--rule", (f"{rule.site}={rule.require}" for rule in options.rules))
    yield from _repeated("--allow-differ", options.allow_differ)
    yield from _repeated("--allow-missing", options.allow_missing)
    if options.fail_on != fail_on.DEFAULT:
        yield from ("--fail-on", fail_on.format_fail_on(options.fail_on))
    yield from (
        f"--{name.replace('_', '-')}" for name in ("verify", "detail", "allow_partial") if getattr(options, name)
    )


def _repeated(flag: str, values: Iterable[str]) -> Iterator[str]:
    for value in values:
        yield from (flag, value)


def _side(side: str) -> str:
    return "" if side == "both" else f"{side}:"
