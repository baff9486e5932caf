"""proto <-> domain, both ways, and nothing else. What comes in is checked here for presence and range (I11)."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf import duration_pb2, timestamp_pb2
from pd.v1 import bootstrap_pb2, types_pb2

from pd_common.control.status import to_status
from pd_common.errors import InvalidRequest
from pd_common.handoff.state import Transfer, TransferState
from pd_common.types import (
    MAX_ROOM,
    BootstrapRoom,
    BufferKind,
    BufferSpec,
    DataPlane,
    Instance,
    KvLayout,
    ProcessProof,
    RankInfo,
    RankPosition,
    Role,
    StateKind,
)

MAX_TIMEOUT_S = 1_000_000.0

_ROLE = {
    Role.PREFILL: types_pb2.ROLE_PREFILL,
    Role.DECODE: types_pb2.ROLE_DECODE,
    Role.ROUTER: types_pb2.ROLE_ROUTER,
}
_KIND = {
    BufferKind.KEY: types_pb2.BUFFER_KIND_KEY,
    BufferKind.VALUE: types_pb2.BUFFER_KIND_VALUE,
    BufferKind.KEY_VALUE: types_pb2.BUFFER_KIND_KEY_VALUE,
}
_STATE_KIND = {
    StateKind.RECURRENT: types_pb2.STATE_KIND_RECURRENT,
    StateKind.WINDOW: types_pb2.STATE_KIND_WINDOW,
}
_STATE = {
    TransferState.BOOTSTRAPPING: types_pb2.TRANSFER_STATE_BOOTSTRAPPING,
    TransferState.WAITING_FOR_INPUT: types_pb2.TRANSFER_STATE_WAITING_FOR_INPUT,
    TransferState.TRANSFERRING: types_pb2.TRANSFER_STATE_TRANSFERRING,
    TransferState.SUCCESS: types_pb2.TRANSFER_STATE_SUCCESS,
    TransferState.FAILED: types_pb2.TRANSFER_STATE_FAILED,
}
_ROLE_BACK = {value: key for key, value in _ROLE.items()}
_KIND_BACK = {value: key for key, value in _KIND.items()}
_STATE_KIND_BACK = {value: key for key, value in _STATE_KIND.items()}
_STATE_BACK = {value: key for key, value in _STATE.items()}


def room_from(value: int) -> BootstrapRoom:
    """A room number from the network.

    Raises:
        InvalidRequest: it is 0 (which protobuf also gives for a field that is not set).

    """
    if not 0 < value <= MAX_ROOM:
        raise InvalidRequest("bootstrap_room must be a non-zero unsigned 64-bit integer", field="bootstrap_room")
    return BootstrapRoom(value)


def instance_to(instance: Instance) -> types_pb2.Instance:
    return types_pb2.Instance(instance_id=instance.instance_id, epoch=instance.epoch)


def instance_from(message: types_pb2.Instance, field: str) -> Instance:
    if not message.instance_id or not message.epoch:
        raise InvalidRequest(f"{field} must name a process by instance_id and epoch", field=field)
    return Instance(message.instance_id, message.epoch)


def role_to(role: Role) -> types_pb2.Role:
    return _ROLE[role]


def process_to(proof: ProcessProof) -> types_pb2.ProcessProof:
    return types_pb2.ProcessProof(host_id=proof.host_id, pid=proof.pid, start_ticks=proof.start_ticks)


def process_from(message: types_pb2.ProcessProof) -> ProcessProof:
    return ProcessProof(message.host_id, message.pid, message.start_ticks)


def layout_to(layout: KvLayout) -> types_pb2.KvLayout:
    return types_pb2.KvLayout(
        model=layout.model,
        dtype=layout.dtype,
        page_size=layout.page_size,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        metadata_schema=layout.metadata_schema,
        software_version=layout.software_version,
        buffers=[
            types_pb2.BufferSpec(kind=_KIND[b.kind], layer_ids=b.layer_ids, item_len_bytes=b.item_len_bytes)
            for b in layout.buffers
        ],
        state_kinds=[_STATE_KIND[kind] for kind in layout.state_kinds],
    )


def layout_from(message: types_pb2.KvLayout) -> KvLayout:
    return KvLayout(
        model=message.model,
        dtype=message.dtype,
        page_size=message.page_size,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        metadata_schema=message.metadata_schema,
        software_version=message.software_version,
        buffers=tuple(_buffer_from(b) for b in message.buffers),
        state_kinds=tuple(_state_kind_from(kind) for kind in message.state_kinds),
    )


def _buffer_from(message: types_pb2.BufferSpec) -> BufferSpec:
    kind = _KIND_BACK.get(message.kind)
    if kind is None:
        raise InvalidRequest("layout.buffers holds a buffer of unknown kind", field="layout.buffers.kind")
    return BufferSpec(kind, tuple(message.layer_ids), message.item_len_bytes)


def _state_kind_from(value: types_pb2.StateKind) -> StateKind:
    kind = _STATE_KIND_BACK.get(value)
    if kind is None:
        raise InvalidRequest("layout.state_kinds holds an unknown kind", field="layout.state_kinds")
    return kind


def rank_to(rank: RankInfo) -> bootstrap_pb2.RankInfo:
    position = rank.position
    return bootstrap_pb2.RankInfo(
        instance=instance_to(rank.instance),
        role=role_to(rank.role),
        position=bootstrap_pb2.RankPosition(
            dp_rank=position.dp_rank,
            dp_size=position.dp_size,
            tp_rank=position.tp_rank,
            tp_size=position.tp_size,
            pp_rank=position.pp_rank,
            pp_size=position.pp_size,
        ),
        control_address=rank.control_address,
        layout=layout_to(rank.layout),
        data_plane=_data_plane_to(rank.data_plane),
    )


def rank_from(message: bootstrap_pb2.RankInfo) -> RankInfo:
    role = _ROLE_BACK.get(message.role)
    if role is None:
        raise InvalidRequest("rank.role must be ROLE_PREFILL or ROLE_DECODE", field="rank.role")
    if not message.control_address:
        raise InvalidRequest("rank.control_address must be host:port", field="rank.control_address")
    if not message.HasField("layout"):
        raise InvalidRequest("rank.layout is required", field="rank.layout")
    p = message.position
    return RankInfo(
        instance=instance_from(message.instance, "rank.instance"),
        role=role,
        position=RankPosition(p.dp_rank, p.dp_size or 1, p.tp_rank, p.tp_size or 1, p.pp_rank, p.pp_size or 1),
        control_address=message.control_address,
        layout=layout_from(message.layout),
        data_plane=_data_plane_from(message.data_plane),
    )


def _data_plane_to(plane: DataPlane) -> bootstrap_pb2.DataPlane:
    return bootstrap_pb2.DataPlane(
        backend=plane.backend,
        version=plane.version,
        host=plane.host,
        transports=plane.transports,
        devices=plane.devices,
    )


def _data_plane_from(message: bootstrap_pb2.DataPlane) -> DataPlane:
    if not message.backend:
        raise InvalidRequest("rank.data_plane.backend must name a library", field="rank.data_plane.backend")
    return DataPlane(message.backend, message.version, message.host, tuple(message.transports), tuple(message.devices))


def duration_to(seconds: float) -> duration_pb2.Duration:
    message = duration_pb2.Duration()
    message.FromNanoseconds(int(max(seconds, 0.0) * 1e9))
    return message


def duration_from(message: duration_pb2.Duration) -> float:
    """Seconds."""
    return message.ToNanoseconds() / 1e9


def timestamp_to(unix_s: float) -> timestamp_pb2.Timestamp:
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(datetime.fromtimestamp(unix_s, UTC))
    return message


def state_to(state: TransferState) -> types_pb2.TransferState:
    return _STATE[state]


def state_from(value: types_pb2.TransferState) -> TransferState:
    state = _STATE_BACK.get(value)
    if state is None:
        raise InvalidRequest("state must be one of the five transfer states", field="state")
    return state


def transfer_to(transfer: Transfer, clock_offset_s: float) -> types_pb2.Transfer:
    """One room for the wire; `clock_offset_s` added to the table's clock gives seconds since 1970."""
    progress = transfer.progress
    return types_pb2.Transfer(
        bootstrap_room=transfer.room,
        rid=transfer.rid or "",
        role=role_to(transfer.role),
        state=_STATE[transfer.state],
        sequence=transfer.sequence,
        chunks_done=progress.chunks_done,
        pages_done=progress.pages_done,
        bytes_done=progress.bytes_done,
        peer=instance_to(transfer.peer) if transfer.peer else None,
        failure=to_status(transfer.failure) if transfer.failure else None,
        timeline=[
            types_pb2.TransferTransition(
                state=_STATE[step.state],
                time=timestamp_to(step.at_s + clock_offset_s),
                sequence=step.sequence,
                chunks_done=step.progress.chunks_done,
                pages_done=step.progress.pages_done,
                bytes_done=step.progress.bytes_done,
                reason=step.reason or "",
            )
            for step in transfer.timeline
        ],
        deadline=timestamp_to(transfer.deadline_s + clock_offset_s),
    )


def time_limit_from(message: duration_pb2.Duration, field: str) -> float:
    """Seconds that something may take.

    Raises:
        InvalidRequest: not positive, or longer than any request can mean.
    """
    seconds = duration_from(message)
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"{field} must be positive and at most {MAX_TIMEOUT_S:.0f} s", field=field)
    return seconds
