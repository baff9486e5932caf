"""What prefill and decode have before their roles differ: engine and pool, metadata slots, transport, tracing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from pd.v1.inspection_pb2 import GetProcessResponse
from prometheus_client.registry import Collector

from pd_common import config
from pd_common.control import ports, process
from pd_common.control.inspection_servicer import describe
from pd_common.control.outputs import OutputHub
from pd_common.control.transfer_metrics import TransferMetrics
from pd_common.engine.engine import Engine
from pd_common.handoff.canary import CanaryMemory
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.digest import PageDigest
from pd_common.handoff.metadata import METADATA_SCHEMA, MetadataBuffers
from pd_common.handoff.table import TransferTable
from pd_common.telemetry import spans
from pd_common.telemetry.metrics import RoomMetrics
from pd_common.telemetry.tracing import Tracing
from pd_common.transport.backends import open_transport
from pd_common.transport.base import MemoryRegion, Transport
from pd_common.types import DataPlane, Instance, Role

_MAX_FINISHED_ROOMS = 100_000


@dataclass(frozen=True, slots=True)
class Runtime:
    """One engine process's own things. `regions`, known to `transport`, are KV pool, metadata slots and canaries.

    `collectors` have counted all rooms from the start.
    """

    instance: Instance
    engine: Engine
    pool: PoolBuffers
    metadata: MetadataBuffers
    canaries: CanaryMemory
    transport: Transport
    regions: tuple[MemoryRegion, ...]
    transfers: TransferTable
    hub: OutputHub
    tracing: Tracing
    collectors: tuple[Collector, ...]
    exporting: TracerProvider | None

    @classmethod
    def start(cls, role: Role, options: Mapping[str, Any], metadata_slots: int) -> Runtime:
        """Loads the model and opens the data plane; takes as long as the weights take.

        Raises:
            InvalidRequest: the model or an option cannot be served, or a port is taken.
            TransportUnavailable: the library of the data plane cannot be loaded.
        """
        ports.require_free(options["host"], **{name: options[name] for name in ("port", "metrics_port", "health_port")})
        process.share_interpreter()
        instance = process.new_instance(role)
        exporting = spans.configure(f"pd-{role.value}", instance.instance_id)
        model, rooms = config.pick(config.ModelConfig, options), config.pick(config.RoomConfig, options)
        engine = _load(model)
        metadata = MetadataBuffers(metadata_slots)
        transport = open_transport(config.pick(config.TransportConfig, options))
        canaries = CanaryMemory(engine.layout.page_bytes)
        regions = (MemoryRegion(*engine.pool.region), metadata.region, canaries.region)
        for region in regions:
            transport.register(region)
        transfers, tracing, hub = _new_table(role, rooms, instance), Tracing(), OutputHub()
        legs, handoffs = RoomMetrics(), TransferMetrics()
        tracing.listeners.append(legs.note_leg)
        transfers.listeners.append(handoffs.note_change)
        process.spare_collector()
        return cls(
            instance,
            engine,
            _pool_of(engine),
            metadata,
            canaries,
            transport,
            regions,
            transfers,
            hub,
            tracing,
            (legs, handoffs, hub.answers),
            exporting,
        )

    def data_plane(self, host: str) -> DataPlane:
        """What others are told of how pages travel; `host` is where writes come from."""
        info = self.transport.info
        return DataPlane(info.backend, info.version, host, info.transports, info.devices)

    def describe(self, role: Role) -> GetProcessResponse:
        """Who this is, for whoever asks."""
        return describe(self.instance, role, self.engine.model_info.name)

    def new_digest(self) -> PageDigest:
        """A fresh digest over pages of this process's pool."""
        return PageDigest([self.engine.pool.read_pages])

    async def close(self) -> None:
        """Lets go of everything; nothing may use it any more."""
        await self.transport.close()
        await self.engine.close()
        if self.exporting is not None:
            await asyncio.to_thread(self.exporting.shutdown)


def _load(model: config.ModelConfig) -> Engine:
    return Engine.load(
        model.model,
        page_size=model.page_size,
        num_pages=model.num_pages,
        metadata_schema=METADATA_SCHEMA,
        software_version=process.SOFTWARE_VERSION,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        context_length=model.context_length,
    )


def _new_table(role: Role, rooms: config.RoomConfig, instance: Instance) -> TransferTable:
    """Numbered from the epoch on: microseconds rise faster than rooms change, so no earlier life came so far."""
    timeouts = Timeouts(rooms.bootstrap_timeout_s, rooms.waiting_timeout_s)
    return TransferTable(role, rooms.room_retention_s, _MAX_FINISHED_ROOMS, timeouts, sequence=instance.epoch)


def _pool_of(engine: Engine) -> PoolBuffers:
    """The engine's pool as the handoff sees it."""
    bases, _, item_lens = engine.pool.get_contiguous_buf_infos()
    return PoolBuffers(tuple(bases), tuple(item_lens), engine.pool.num_pages, engine.pool.page_size)
