"""Speeds and plans as a person reads them."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from pd_common.cli.plan.probe import Seen
from pd_common.planning.plan import Planned, Slo, Trial
from pd_common.planning.speeds import Speeds, burst_steps

_WIDTH = 120


def console() -> Console:
    """Standard output, wide enough for the tables."""
    return Console(width=max(_WIDTH, Console().width))


def show_speeds(seen: Seen, speeds: Speeds, to: Console) -> None:
    """What was measured beside what the speeds say of it: how far they can be believed."""
    table = _table("ms", "measured", "by the speeds", "off by")
    for single in seen.singles:
        _compare(table, f"TTFT, {single.tokens:,} tokens", single.ttft_s, speeds.ttft_s(single.tokens))
    for burst in seen.bursts:
        steps = burst_steps(burst.tokens, burst.count, speeds.settings)
        name = f"{burst.count} at once, {burst.tokens:,} tokens: first to last TTFT"
        _compare(table, name, burst.spread_s, sum(map(speeds.prefill.took_s, steps)))
    for gap in seen.gaps:
        each = f"{gap.context_tokens // gap.running:,}"
        name = f"ITL, {_count(gap.running, 'answer')}, {each} tokens each"
        _compare(table, name, gap.gap_s, speeds.decode.took_s(gap.running, gap.context_tokens))
    to.print(table)


def _compare(table: Table, name: str, seen_s: float, told_s: float) -> None:
    table.add_row(name, f"{1e3 * seen_s:,.1f}", f"{1e3 * told_s:,.1f}", f"{100 * (told_s / seen_s - 1):+.0f} %")


def show_plan(planned: Planned, slo: Slo, to: Console) -> None:
    """The fleet, those with one replica less, and a sentence for each."""
    percent = f"{100 * slo.share:g} %"
    limits = f"TTFT <= {1e3 * slo.ttft_s:g} ms and ITL p99 <= {1e3 * slo.itl_s:g} ms"
    to.print(f"SLO: {percent} of them with {limits}", highlight=False, soft_wrap=True)
    table = _table("prefills x decodes", "within the SLO", f"{percent}: TTFT, ms", f"{percent}: ITL p99, ms")
    for name in ("prefill busy", "answers in a step", "most pages"):
        table.add_column(name, justify="right")
    for trial in (planned.chosen, *planned.smaller):
        _add(table, trial)
    to.print(table)
    for line in _lines(planned, slo):
        to.print(line, highlight=False, soft_wrap=True)


def _add(table: Table, trial: Trial) -> None:
    outcome = trial.outcome
    table.add_row(
        str(trial.fleet),
        f"{100 * trial.good:.1f} %",
        f"{1e3 * trial.ttft_s:,.0f}",
        f"{1e3 * trial.itl_s:,.1f}",
        f"{100 * outcome.prefill_busy:.0f} %",
        f"{outcome.decode_answers:.1f}",
        f"{100 * outcome.pages_most:.0f} %",
    )


def _lines(planned: Planned, slo: Slo) -> list[str]:
    fleet, bound = planned.chosen.fleet, planned.bound
    enough = f"{_count(fleet.prefills, 'prefill')} and {_count(fleet.decodes, 'decode')} keep the SLO"
    lines = [f"{enough}; the work alone would need {bound.prefills} and {bound.decodes}"]
    for trial in planned.smaller:
        what = "prefill" if trial.fleet.prefills < fleet.prefills else "decode"
        lines.append(f"one {what} less: {_broken(trial, slo)}; the limit is {trial.limit}")
    if planned.chosen.outcome.retractions:
        lines.append(f"{planned.chosen.outcome.retractions} answers had to give their pages up for a while")
    return lines


def _broken(trial: Trial, slo: Slo) -> str:
    """Which limit it does not keep."""
    broken = []
    if trial.ttft_s > slo.ttft_s:
        broken.append(f"TTFT is {1e3 * trial.ttft_s:,.0f} ms instead of {1e3 * slo.ttft_s:,.0f}")
    if trial.itl_s > slo.itl_s:
        broken.append(f"ITL p99 is {1e3 * trial.itl_s:,.1f} ms instead of {1e3 * slo.itl_s:,.1f}")
    return " and ".join(broken) or f"only {100 * trial.good:.1f} % are within both limits"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table
