"""What every scenario is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pd_common.cli.bench.compare.setups import Starter
from pd_common.cli.bench.compare.sizes import Sizes

Progress = Callable[[str], object]
"""Takes a line that says what is going on."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that the options say."""

    starter: Starter
    sizes: Sizes
    rounds: int
    seed: int
    progress: Progress
