"""`tapscope convert`: quantize a checkpoint."""

import argparse
import shlex
from pathlib import Path

from tapscope.cli import compare_flags, diagnostics, output

_LABEL = 10
SCHEMA = "tapscope.convert/1"


class ConvertCommand:
    """Quantize the linear layers of a checkpoint to FP8, int8 or int4.

      $ tapscope convert model model-int4 --to int4 --ignore '*.down_proj'
      $ tapscope diff model model-int4 --sqnr 5

    Weights are rounded to nearest, without calibration data. fp8-block: 128 x 128 blocks, as DeepSeek-V3.
    fp8-channel, int8: a scale per output channel, inputs quantized per token. int4: a scale per channel and group,
    weights only. vLLM, SGLang, transformers and the engine read the output. Embeddings, heads, routers and vision
    towers are kept. One shard is mapped at a time, and OUT appears when it is complete.

    Exit codes: 0 converted, 2 usage, 3 unreadable checkpoint or no space.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("source", metavar="IN", type=Path, help="directory of a safetensors checkpoint")
        parser.add_argument("out", metavar="OUT", type=Path, help="new or empty directory")
        formats = ("fp8-block", "fp8-channel", "int8", "int4")
        parser.add_argument("--to", choices=formats, required=True, help="format of the weights")
        parser.add_argument(
            "--group-size", metavar="N", type=int, default=None,
            help="input features that share a scale, int4 only (default: 128)",
        )  # fmt: skip
        parser.add_argument(
            "--ignore", metavar="GLOB", action="append", default=[], help="modules to keep as they are (repeatable)"
        )
        parser.add_argument(
            "--top", metavar="N", type=compare_flags.row_count, default=5,
            help="weights with the lowest signal-to-quantization-noise ratio to list (default: 5)",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="one JSON object, with the ratio of every weight")

    def run(self, args: argparse.Namespace) -> int:
        """Convert the checkpoint and print a summary. Raises UsageError, CheckpointError or OutputError."""
        from tapscope.comparator.facts import sqnr_of
        from tapscope.comparator.report.sqnr_ranking import SiteSqnr, ranking_lines
        from tapscope.core.errors import UsageError
        from tapscope.core.formatting import plural, size
        from tapscope.engine.checkpoint.convert import Converter

        group = args.group_size
        if group is not None and (args.to != "int4" or group < 8 or group % 8):
            raise UsageError(f"--group-size {group}: expected a multiple of 8, with --to int4")
        converter = Converter(args.to, group or 128, tuple(args.ignore))
        with diagnostics.progress(converter.count(args.source), "converting") as advance:
            conversion = converter.convert(args.source, args.out, advance)
        ratios = {tensor.name: sqnr_of(tensor.rel_l2) for tensor in conversion.tensors}
        before, after = conversion.nbytes
        if args.json:
            sizes = {"bytes_before": before, "bytes_after": after}
            tensors = [{"name": name, "sqnr": ratio if ratio < 1e9 else None} for name, ratio in ratios.items()]
            output.write_json({"type": "summary", "schema": SCHEMA, "to": args.to, **sizes, "tensors": tensors})
        else:
            what = f"{plural(len(ratios), 'weight')} to {args.to} in {args.out}"
            output.write_line(f"{'converted':<{_LABEL}}{what} ({size(before)} to {size(after)}, {after / before:.2f})")
            ranked = sorted((SiteSqnr(name, ratio, None) for name, ratio in ratios.items()), key=lambda one: one.sqnr)
            for line in ranking_lines(ranked[: args.top]):
                output.write_line(line)
        if conversion.stacked:
            count = plural(len(conversion.stacked), "tensor")
            diagnostics.warn(f"{count} of stacked experts kept as they are (first: {conversion.stacked[0]})")
        source, out = (shlex.quote(str(path)) for path in (args.source, args.out))
        diagnostics.note(f"next: tapscope diff {source} {out}")
        return diagnostics.ExitCode.OK
