"""`tapscope mismatch`: compare the log-probabilities of a trainer with those of the rollout."""

import argparse
from typing import TYPE_CHECKING

from tapscope.cli import compare_flags, diagnostics, output
from tapscope.core.formatting import plural
from tapscope.core.gc_control import gc_paused
from tapscope.sources import open_run

if TYPE_CHECKING:
    from tapscope.comparator.mismatch import Mismatch, MismatchStats

SCHEMA = "tapscope.mismatch/1"
_TOP = 5


class MismatchCommand:
    """Compare log-probabilities of a trainer and a rollout of the same tokens.

      $ tapscope dump POLICY -o rollout --dtype bfloat16 --prompts prompts.txt
      $ tapscope dump POLICY -o trainer --backend hf --tokens-from rollout
      $ tapscope mismatch trainer rollout

    Both runs need full logits (lm_head:out). Prints differences of log-probabilities, importance ratios
    (trainer / rollout), estimates of KL(rollout || trainer) and routers that chose other experts. Then it names the
    first module that diverges, as diff does.

    Exit codes: the same as for diff.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("trainer", metavar="TRAINER", help="run of the trainer, the baseline")
        parser.add_argument("rollout", metavar="ROLLOUT", help="run of the inference engine")
        measure = parser.add_argument_group("mismatch")
        measure.add_argument("--clip", metavar="X", type=float, default=0.2, help="clip range 1 ± X (default: 0.2)")
        measure.add_argument(
            "--temperature", metavar="T", type=float, default=1.0, help="temperature of the rollout (default: 1)"
        )
        measure.add_argument("--prompt-tokens", action="store_true", help="count prompt tokens as well")
        measure.add_argument(
            "--top",
            metavar="N",
            type=compare_flags.row_count,
            default=_TOP,
            help=f"worst tokens to list (default: {_TOP})",
        )
        measure.add_argument("--json", action="store_true", help="one JSON object per line: request, token, summary")
        compare_flags.add_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Compare the runs and print the result; exit codes as in diff."""
        from tapscope.comparator.mismatch import mismatch

        options = compare_flags.options_of(args)
        with (
            gc_paused(),
            open_run(args.trainer) as trainer,
            open_run(args.rollout) as rollout,
            diagnostics.byte_progress("comparing") as advance,
        ):
            result = mismatch(
                trainer,
                rollout,
                options,
                clip=args.clip,
                temperature=args.temperature,
                prompt_tokens=args.prompt_tokens,
                progress=advance,
            )
        if args.json:
            _print_json(result)
        else:
            _print(result, args.clip, args.top)
        return result.report.exit_code


def _print(result: "Mismatch", clip: float, top: int) -> None:
    total = result.total
    what = plural(total.num_tokens, "generated token" if result.num_prompt else "token")
    without = f", without {plural(result.num_prompt, 'prompt token')}" if result.num_prompt else ""
    output.write_line(f"tokens    {what}{without}, of {plural(len(result.requests), 'request')}; {result.site}")
    output.write_line(f"log p     |trainer - rollout|: mean {_nats(total.mean_abs)}, max {_nats(total.max_abs)}")
    low, median, high = total.ratio_percentiles
    output.write_line(
        f"ratio     trainer / rollout: mean {total.ratio_mean:.4f}, p1 {low:.4f}, p50 {median:.4f}, p99 {high:.4f}, "
        f"from {total.ratio_min:.4f} to {total.ratio_max:.4f}"
    )
    output.write_line(f"clipped   {100 * total.clipped:.2g} % outside [{1 - clip:g}, {1 + clip:g}]")
    output.write_line(
        f"KL        k1 {_nats(total.k1)}, k3 {_nats(total.k3)}, of whole rows {_nats(total.kl)} nats per token"
    )
    for router in result.routing:
        share = f"{100 * router.agreement:.1f} % of {plural(router.num_rows, 'row')}"
        output.write_line(f"routing   {router.site}: {share} have the same experts")
    if result.num_nonfinite:
        output.write_line(f"skipped   {plural(result.num_nonfinite, 'row')} with logits that are not finite")
    if len(result.requests) > 1:
        worst = sorted(result.requests.items(), key=lambda item: -item[1].mean_abs)
        for name, one in worst[:top]:
            output.write_line(f"request   {name}: {_request(one)}")
        if len(worst) > top:
            output.write_line(f"request   … {len(worst) - top:,} more; --top {len(worst)} lists all")
    for token in sorted(result.tokens, key=lambda token: -abs(token.trainer - token.rollout))[:top]:
        output.write_line(
            f"token     {token.request}:{token.position} id {token.token}: trainer {token.trainer:.4f}, "
            f"rollout {token.rollout:.4f}, ratio {token.ratio:.4f}"
        )
    output.write_lines(str(result.report))


def _request(one: "MismatchStats") -> str:
    return (
        f"{plural(one.num_tokens, 'token')}, |Δ log p| mean {_nats(one.mean_abs)}, max {_nats(one.max_abs)}, "
        f"k3 {_nats(one.k3)}, log ratio of the sequence {one.log_ratio_sum:+.2e}"
    )


def _nats(value: float) -> str:
    return f"{value:.1e}"


def _print_json(result: "Mismatch") -> None:
    from msgspec import to_builtins

    for name, one in result.requests.items():
        output.write_json({"type": "request", "schema": SCHEMA, "request": name, **to_builtins(one)})
    for token in result.tokens:
        output.write_json({"type": "token", "schema": SCHEMA, **to_builtins(token)})
    first = result.report.first_divergence
    output.write_json(
        {
            "type": "summary",
            "schema": SCHEMA,
            "site": result.site,
            **to_builtins(result.total),
            "num_prompt_tokens": result.num_prompt,
            "num_rows_without_next_token": result.num_unknown,
            "num_rows_nonfinite": result.num_nonfinite,
            "routing": to_builtins(result.routing),
            "first_divergence": None if first is None else first.module,
            "exit_code": result.report.exit_code,
        }
    )
