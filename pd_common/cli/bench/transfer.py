"""One run of `pdctl bench transfer`: opens paths and pairs, measures, and ends every process it began."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path as FilePath

from pd_common.cli.bench.beside_engine import BesideEngine, EngineRow
from pd_common.cli.bench.ends import BACKENDS, SOCKET
from pd_common.cli.bench.machine import Machine
from pd_common.cli.bench.memcpy import Memcpy
from pd_common.cli.bench.pair import Options, Pair
from pd_common.cli.bench.paths import Path, PathName, open_paths
from pd_common.cli.bench.result import Result
from pd_common.cli.bench.rounds import Progress, Rounds
from pd_common.cli.bench.rows import Row, with_ratios
from pd_common.cli.bench.staging import StagingRow, staging_rows
from pd_common.cli.bench.work import Case, Layout, Order, Work
from pd_common.errors import CapacityExceeded, PdError

_STAGING_SHARE = 4
"""Staging moves a quarter of the pool: at 1 KiB a piece the whole would be a million puts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    work: Work
    contenders: tuple[str, ...]
    paths: tuple[PathName, ...]
    layouts: tuple[Layout, ...]
    orders: tuple[Order, ...]
    rounds: int
    options: Options
    staging: bool
    beside_engine: bool

    @property
    def staging_bytes(self) -> int:
        """How much staging moves; 0 when it is not asked for."""
        return self.work.total_bytes // _STAGING_SHARE if self.staging else 0

    @property
    def staged_contender(self) -> str | None:
        """The first of this project's backends: staging is measured with it."""
        return next((contender for contender in self.contenders if contender in BACKENDS), None)

    @property
    def cases(self) -> list[Case]:
        """Every layout with every order."""
        return [Case(layout, order) for layout in self.layouts for order in self.orders]


def run(plan: Plan, progress: Progress) -> Result:
    """Measures what the plan says. Backends and paths that are not there become rows with the reason.

    Raises:
        CapacityExceeded: the pools would not fit into memory.

    """
    _check_memory(plan)
    load = os.getloadavg()[0]
    with open_paths(plan.paths) as paths, ExitStack() as stack:
        memcpy = Memcpy(plan.work)
        run = _Run(plan, progress, memcpy, {case: memcpy.digest(case) for case in plan.cases})
        if plan.beside_engine:
            run.engine = BesideEngine(plan.work, plan.options)
            stack.callback(run.engine.end)
            run.engine.calibrate()
        for path in paths.open:
            run.measure(path)
    run.rows += [Row(name.value, "all", skipped=reason) for name, reason in paths.skipped.items()]
    return Result(Machine.here(load, run.libraries), plan.work, with_ratios(run.rows), run.staging, run.beside)


@dataclass(slots=True)
class _Run:
    """What was found so far, path by path: the pools of all pairs of all paths would be too much memory."""

    plan: Plan
    progress: Progress
    memcpy: Memcpy
    digests: dict[Case, int]
    engine: BesideEngine | None = None
    rows: list[Row] = field(default_factory=list)
    staging: list[StagingRow] = field(default_factory=list)
    beside: list[EngineRow] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)

    def measure(self, path: Path) -> None:
        """All rows of one path."""
        pairs: list[Pair] = []
        try:
            for contender in self.plan.contenders:
                if contender != SOCKET or path.name is not PathName.HOST:  # there a socket is what it is on tcp
                    self._open(path, contender, pairs)
            rounds = Rounds(path, self.memcpy, self.digests, pairs, self.progress)
            rounds.run(self.plan.rounds)
            self.rows += rounds.rows()
            self.libraries += [pair.library for pair in pairs]
            self._measure_more(rounds.working())
        finally:
            for pair in pairs:
                pair.end()

    def _open(self, path: Path, contender: str, pairs: list[Pair]) -> None:
        self.progress(f"{path.name}: opening {contender}")
        staging_bytes = self.plan.staging_bytes if contender == self.plan.staged_contender else 0
        try:
            pairs.append(Pair(path, contender, self.plan.work, self.plan.options, staging_bytes))
        except PdError as error:
            self.rows.append(Row(path.name.value, contender, skipped=error.message))

    def _measure_more(self, pairs: list[Pair]) -> None:
        """What has a table of its own; a failure there is a row, and leaves the others alone."""
        for pair in pairs:
            try:
                self._measure_staging(pair)
                self._measure_engine(pair)
            except PdError as error:
                self.rows.append(Row(pair.path.name.value, pair.contender, failed=error.message))

    def _measure_staging(self, pair: Pair) -> None:
        if self.plan.staging_bytes and pair.contender == self.plan.staged_contender:
            self.staging += staging_rows(pair, self.plan.staging_bytes, self.plan.rounds, self.progress)

    def _measure_engine(self, pair: Pair) -> None:
        """A socket is left out: it cannot write without the receiver's word before each write."""
        if self.engine is not None and pair.contender != SOCKET:
            self.progress(f"{pair.path.name}: {pair.contender} beside the engine")
            self.beside.append(self.engine.row(pair, self.plan.cases[0]))


def _check_memory(plan: Plan) -> None:
    """Refuses what would drive the machine out of memory."""
    needed = (2 * len(plan.contenders) + 2) * plan.work.total_bytes + 2 * plan.staging_bytes
    fields = dict(line.split(":") for line in FilePath("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    if needed > available:
        raise CapacityExceeded(
            f"two pools for each backend and two more need {needed / 1e9:.1f} GB, of which {available / 1e9:.1f} GB "
            "are free: name fewer backends or fewer pages"
        )
