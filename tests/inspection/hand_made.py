"""Views of a system as a test wants them: times are seconds before NOW, by each process's own clock."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import duration_pb2, timestamp_pb2
from pd.v1 import bootstrap_pb2, inspection_pb2, transfer_status_pb2, types_pb2

from pd_common.control import convert
from pd_common.control.status import to_status
from pd_common.errors import PdError
from pd_common.inspection.diagnoses.finding import Finding, Kind
from pd_common.inspection.diagnosis import examine
from pd_common.inspection.views import ClusterView, ProcessView, RoomSide, RoomView
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapRoom, Role

NOW_S = 1_800_000_000
ROUTER, PREFILL, DECODE = "router:8001", "prefill:8998", "decode:8999"
PAGE_SIZE = 16

_ROOT = {Role.ROUTER: SpanName.ROUTE, Role.PREFILL: SpanName.PREFILL, Role.DECODE: SpanName.DECODE}
_ADDRESS = {Role.ROUTER: ROUTER, Role.PREFILL: PREFILL, Role.DECODE: DECODE}


def before(ago_s: float) -> timestamp_pb2.Timestamp:
    time = timestamp_pb2.Timestamp()
    time.FromNanoseconds(round((NOW_S - ago_s) * 1e9))
    return time


def lasting(seconds: float) -> duration_pb2.Duration:
    span = duration_pb2.Duration()
    span.FromNanoseconds(round(seconds * 1e9))
    return span


def instance(address: str) -> types_pb2.Instance:
    return types_pb2.Instance(instance_id=f"at-{address}", epoch=1)


def process(
    role: Role,
    *,
    address: str = "",
    trouble: PdError | None = None,
    workers: Iterable[inspection_pb2.Worker] = (),
    routes: Iterable[inspection_pb2.Route] = (),
    **fields: object,
) -> ProcessView:
    """One that answers, unless it is in trouble."""
    address = address or _ADDRESS[role]
    if trouble is not None:
        return ProcessView(address, role, trouble=trouble)
    said = inspection_pb2.GetProcessResponse(
        instance=instance(address), role=convert.role_to(role), now=before(0), workers=workers, routes=routes
    )
    return ProcessView(address, role, process=said, **fields)  # type: ignore[arg-type]


def pool(total: int = 100, free: int = 100, **fields: int) -> transfer_status_pb2.GetPoolResponse:
    return transfer_status_pb2.GetPoolResponse(pages_total=total, pages_free=free, **fields)


def topology(*addresses: str, item_len_bytes: int = 1024) -> bootstrap_pb2.GetTopologyResponse:
    """Ranks of pools with one buffer."""
    layout = types_pb2.KvLayout(page_size=PAGE_SIZE, buffers=[types_pb2.BufferSpec(item_len_bytes=item_len_bytes)])
    ranks = [
        bootstrap_pb2.RankInfo(instance=instance(address), control_address=address, layout=layout)
        for address in addresses
    ]
    return bootstrap_pb2.GetTopologyResponse(ranks=ranks)


def peer(address: str = PREFILL, *, canary_ago_s: float = 1.0, took_s: float = 0.001) -> transfer_status_pb2.Peer:
    return transfer_status_pb2.Peer(
        instance=instance(address),
        role=convert.role_to(Role.PREFILL),
        control_address=address,
        carrier="tcp/eth0",
        since=before(500),
        canary_time=before(canary_ago_s),
        canary_took=lasting(took_s),
    )


def sound(*others: ProcessView) -> ClusterView:
    """A prefill and a decode with which nothing is wrong, unless others take their place."""
    roles = {view.role for view in others}
    usual = (
        process(Role.PREFILL, pool=pool(), topology=topology(PREFILL)),
        process(Role.DECODE, pool=pool(), peers=(peer(),)),
    )
    return ClusterView((*others, *(view for view in usual if view.role not in roles)))


def span(
    name: SpanName, began_ago_s: float, ended_ago_s: float | None = None, **attributes: object
) -> inspection_pb2.Span:
    """Without an end it lasts."""
    return inspection_pb2.Span(
        name=name.value,
        start=before(began_ago_s),
        end=None if ended_ago_s is None else before(ended_ago_s),
        attributes={key.replace("__", "."): str(value) for key, value in attributes.items()},
    )


def write(
    began_ago_s: float, ended_ago_s: float, *, pages: int = 4, descriptors: int = 1, size: int = 4096
) -> inspection_pb2.Span:
    """A chunk that has been written."""
    attributes = {"pages": pages, "descriptors": descriptors, "bytes": size, "carrier": "tcp/eth0"}
    return span(SpanName.CHUNK_TRANSFER, began_ago_s, ended_ago_s, **attributes)


def side(
    role: Role,
    states: Iterable[tuple[int, float]] = (),
    *stages: inspection_pb2.Span,
    room: int = 7,
    rid: str = "chat-7",
    failure: PdError | None = None,
    prompt_tokens: int = 64,
    address: str = "",
    peer_at: str = "",
) -> RoomSide:
    """`states` with how long ago they were entered, oldest first; a router has none."""
    address = address or _ADDRESS[role]
    timeline = [types_pb2.TransferTransition(state=state, time=before(ago_s)) for state, ago_s in states]  # type: ignore[arg-type]
    record = types_pb2.Transfer(
        bootstrap_room=room,
        rid=rid,
        role=convert.role_to(role),
        state=timeline[-1].state if timeline else 0,  # type: ignore[arg-type]
        timeline=timeline,
        failure=None if failure is None else to_status(failure),
        peer=instance(peer_at) if peer_at else None,
    )
    root = span(_ROOT[role], 1.0, prompt_tokens=prompt_tokens)
    if failure is not None and not timeline:
        root.failure = failure.reason.value
    legs = (inspection_pb2.RoomSpans(trace_id="0" * 32, root=root, stages=stages),) if rid else ()
    return RoomSide(address, role, record if timeline else None, legs)


def room_of(cluster: ClusterView, *sides: RoomSide, number: int = 7) -> RoomView:
    return RoomView(BootstrapRoom(number), sides, cluster)


def found(cluster: ClusterView, *rooms: RoomView, room: int | None = None) -> dict[Kind, Finding]:
    findings = examine(cluster, rooms, None if room is None else BootstrapRoom(room))
    return {finding.kind: finding for finding in findings}
