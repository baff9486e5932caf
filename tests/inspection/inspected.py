"""What the doctor says of a running system; and a pair in one process, over real gRPC, that it can look at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from pd_common.control.connection import dial_plain
from pd_common.control.inspection_servicer import InspectionServicer, describe
from pd_common.inspection.diagnoses.finding import Finding, Kind
from pd_common.inspection.diagnosis import examine, look
from pd_common.inspection.inspector import Inspector
from pd_common.types import BootstrapRoom, Role
from tests.services.pair import Node, Pair


async def diagnosed(
    entries: Sequence[tuple[str, Role]], room: int | None = None, patience_s: float = 0.0
) -> dict[Kind, Finding]:
    """What the doctor says of the system that begins there, by kind and in order."""
    number = None if room is None else BootstrapRoom(room)
    inspector = Inspector(entries, dial_plain)
    try:
        cluster, rooms = await look(inspector, number)
    finally:
        await inspector.close()
    return {finding.kind: finding for finding in examine(cluster, rooms, number, patience_s)}


class InspectedPair(Pair):
    """Each side answers Inspection too, as its process does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for life, role in ((self.prefill, Role.PREFILL), (self.decode, Role.DECODE)):
            said = partial(describe, life.instance, role, "bytes")
            life.servicers["inspection"] = InspectionServicer(said, life.service._tracing)
        self.at_prefill, self.at_decode = Node(self.prefill), Node(self.decode)

    async def findings(self, room: int | None = None, patience_s: float = 0.0) -> dict[Kind, Finding]:
        """What the doctor says; without patience it calls everything stuck that has not ended."""
        sides = (self.at_prefill.address.target, Role.PREFILL), (self.at_decode.address.target, Role.DECODE)
        return await asyncio.wait_for(diagnosed(sides, room, patience_s), 10)
