"""What transfers cost the engine: step time of a computing thread alone, and with transfers back to back beside it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from pd_common.cli.bench.children import Child
from pd_common.cli.bench.ends import EndSettings
from pd_common.cli.bench.pair import Options, Pair
from pd_common.cli.bench.paths import Place
from pd_common.cli.bench.spec import Side, Spec
from pd_common.cli.bench.work import Case, Work

_WINDOW_S = 1.5


@dataclass(frozen=True, slots=True)
class EngineRow:
    """Mean step times in milliseconds; growth in percent over the step alone."""

    path: str
    backend: str
    carrier: str
    layout: str
    order: str
    alone_ms: float
    """In a process without a transport, while no process of a transfer runs."""
    idle_growth: float
    """In the sender's process, connected, nothing moves."""
    sender_growth: float
    """In the sender's process while it writes back to back."""
    receiver_growth: float
    """In the receiver's process meanwhile (measured separately: one engine at a time)."""
    sender_gb_per_s: float
    """Speed of the transfers beside the engine in the sender's process."""
    receiver_gb_per_s: float


class BesideEngine:
    """An engine in a process of its own, to which those beside transfers are compared; ended by `end`."""

    def __init__(self, work: Work, options: Options) -> None:
        self._alone = Child(Spec(Side.ENGINE, EndSettings("none", "", **asdict(options)), work, 0), Place())
        self._products = 0

    def calibrate(self) -> None:
        """Finds out how much work a step is; comes before everything else."""
        self._alone.opened()
        self._products = self._alone.ask("calibrate")["products"]

    def row(self, pair: Pair, case: Case) -> EngineRow:
        """Measures one pair."""
        alone_s = _step(self._alone, self._products)
        with pair.running():
            for child in (pair.sender, pair.receiver):
                _step(child, self._products)  # the first call loads PyTorch
            idle_s = _step(pair.sender, self._products)
            sender_s, sender_rate = _step_beside_transfers(pair, pair.sender, self._products, case)
            receiver_s, receiver_rate = _step_beside_transfers(pair, pair.receiver, self._products, case)
        return EngineRow(
            path=pair.path.name.value,
            backend=pair.contender,
            carrier=pair.carrier,
            layout=case.layout.value,
            order=case.order.value,
            alone_ms=alone_s * 1e3,
            idle_growth=(idle_s / alone_s - 1) * 100,
            sender_growth=(sender_s / alone_s - 1) * 100,
            receiver_growth=(receiver_s / alone_s - 1) * 100,
            sender_gb_per_s=sender_rate,
            receiver_gb_per_s=receiver_rate,
        )

    def end(self) -> None:
        """Ends the process."""
        self._alone.end()


def _step(child: Child, products: int) -> float:
    child.ask("engine_begin", products=products)
    time.sleep(_WINDOW_S)
    step_s: float = child.ask("engine_end")["step_s"]
    return step_s


def _step_beside_transfers(pair: Pair, child: Child, products: int, case: Case) -> tuple[float, float]:
    pair.sender.ask("stream_begin", **asdict(case))
    step_s = _step(child, products)
    return step_s, pair.sender.ask("stream_end")["bytes_per_s"] / 1e9
