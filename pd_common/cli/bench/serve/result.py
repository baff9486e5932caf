"""All that one run found, and its JSON form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pd_common.cli.bench.machine import Machine
from pd_common.cli.bench.serve.exchange import Exchange, Log
from pd_common.cli.bench.serve.figures import Figures, Slo, Spread
from pd_common.cli.bench.serve.plan import Plan


@dataclass(frozen=True, slots=True)
class Result:
    """What was sent to whom, and what became of it."""

    machine: Machine
    """The client's."""
    url: str
    model: str
    plan: Plan
    slo: Slo | None
    figures: Figures

    def write_json(self, path: Path, log: Log) -> None:
        """One object with the fields of this class, and a row for each request that was measured."""
        rows = [_row(exchange, log.prompts[0].sent_s) for exchange in log.prompts]
        path.write_text(json.dumps({**asdict(self), "rows": rows}, indent=1) + "\n")


def _row(exchange: Exchange, began_s: float) -> dict[str, Any]:
    return {
        "number": exchange.number,
        "sent_s": round(exchange.sent_s - began_s, 6),
        "ttft_ms": round(1e3 * exchange.ttft_s, 3) if exchange.arrived_s else None,
        "itl": None if (itl := Spread.of(exchange.gaps_s)) is None else asdict(itl),
        "e2e_ms": round(1e3 * (exchange.done_s - exchange.sent_s), 3) if exchange.done_s is not None else None,
        "usage": None if exchange.usage is None else asdict(exchange.usage),
        "failure": None if exchange.failure is None else asdict(exchange.failure),
    }
