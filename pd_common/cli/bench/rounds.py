"""The rounds of one path: each measures every row once, so that what else the machine does meets all rows alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pd_common.cli.bench.memcpy import Memcpy
from pd_common.cli.bench.pair import Pair, Sample
from pd_common.cli.bench.paths import Path
from pd_common.cli.bench.rows import MEMCPY, Row, row_of
from pd_common.cli.bench.work import Case
from pd_common.errors import PdError

Progress = Callable[[str], None]


@dataclass(slots=True)
class Rounds:
    """Samples of all rows so far; a pair that has failed is left alone from then on."""

    path: Path
    memcpy: Memcpy
    digests: Mapping[Case, int]
    """Digest of what each case delivers; these are all cases."""
    pairs: Sequence[Pair]
    progress: Progress
    samples: dict[tuple[str, Case], list[Sample]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, str] = field(default_factory=dict)

    def run(self, rounds: int) -> None:
        """One round to warm up, in which every byte is checked, then `rounds` that count; the last is checked too."""
        for number in range(rounds + 1):
            for case in self.digests:
                self.progress(f"{self.path.name}: round {number} of {rounds}, {case.layout}, {case.order}")
                self._add(number, MEMCPY, case, self.memcpy.transfer(case))
                for pair in self.working():
                    self._measure(number, pair, case, checked=number in {0, rounds})

    def working(self) -> list[Pair]:
        """The pairs that can still be asked."""
        return [pair for pair in self.pairs if pair.contender not in self.failures]

    def _measure(self, number: int, pair: Pair, case: Case, *, checked: bool) -> None:
        try:
            with pair.running():
                sample = pair.checked_transfer(case, self.digests[case]) if checked else pair.transfer(case)
        except PdError as error:
            self.failures[pair.contender] = f"{case.layout}, {case.order}: {error.message}"
        else:
            self._add(number, pair.contender, case, sample)

    def _add(self, number: int, contender: str, case: Case, sample: Sample) -> None:
        if number:
            self.samples[contender, case].append(sample)

    def rows(self) -> list[Row]:
        """All rows with figures, and a row for each pair that failed."""
        carriers = {pair.contender: pair.carrier for pair in self.pairs} | {MEMCPY: MEMCPY}
        path = self.path.name.value
        figures = [
            row_of(path, contender, carriers[contender], case, samples)
            for (contender, case), samples in self.samples.items()
            if contender not in self.failures
        ]
        return [*figures, *(Row(path, contender, failed=reason) for contender, reason in self.failures.items())]
