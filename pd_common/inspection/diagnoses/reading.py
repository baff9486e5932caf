"""How a room is read: the leg of each side, where it stands, and since when by that side's own clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from google.protobuf import timestamp_pb2
from pd.v1 import inspection_pb2, types_pb2

from pd_common.control.status import from_status
from pd_common.errors import PdError, Reason
from pd_common.inspection.views import ClusterView, RoomSide, RoomView
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapRoom, Role

PATIENCE_S = 5.0
"""What lasts longer is worth a word: a peer that is gone is noticed after 3 s, and a sound handshake takes some ms."""

BOOTSTRAPPING = types_pb2.TRANSFER_STATE_BOOTSTRAPPING
WAITING_FOR_INPUT = types_pb2.TRANSFER_STATE_WAITING_FOR_INPUT
TRANSFERRING = types_pb2.TRANSFER_STATE_TRANSFERRING
SUCCESS = types_pb2.TRANSFER_STATE_SUCCESS
FAILED = types_pb2.TRANSFER_STATE_FAILED


@dataclass(frozen=True)  # without slots: what is read is read once
class Leg:
    """One side of a room; `now_s` is the time there, in seconds since 1970."""

    room: BootstrapRoom
    side: RoomSide
    now_s: float

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.side.role} {self.side.address}"

    @property
    def transfer(self) -> types_pb2.Transfer:
        """Its record; an empty one if there is none."""
        return self.side.transfer or types_pb2.Transfer()

    @property
    def state(self) -> types_pb2.TransferState:
        """UNSPECIFIED on a router, and where the record is forgotten."""
        return self.transfer.state

    @property
    def is_live(self) -> bool:
        """It has neither succeeded nor failed."""
        return self.state in (BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING)

    @property
    def has_request(self) -> bool:
        """The request itself came here; not only a word of the other side about it."""
        return bool(self.transfer.rid or self.side.legs)

    @cached_property
    def failure(self) -> PdError | None:
        """Why it has failed, as the record says."""
        return from_status(self.transfer.failure) if self.transfer.HasField("failure") else None

    @property
    def reason(self) -> Reason | None:
        """The same in one word; also of a router, which has no record."""
        if self.failure is not None:
            return self.failure.reason
        name = self.spans.root.failure
        return Reason(name) if name in Reason.__members__ else None

    @property
    def spans(self) -> inspection_pb2.RoomSpans:
        """Of the request's own leg; empty if nothing is noted."""
        own = (legs for legs in self.side.legs if legs.root.name != SpanName.REFETCH)
        return next(own, inspection_pb2.RoomSpans())

    @property
    def began_s(self) -> float:
        """When it was first heard of here."""
        if self.transfer.timeline:
            return seconds(self.transfer.timeline[0].time)
        return seconds(self.spans.root.start) if self.side.legs else self.now_s

    @property
    def changed_s(self) -> float:
        """When it entered the state that it is in."""
        return seconds(self.transfer.timeline[-1].time) if self.transfer.timeline else self.began_s

    @property
    def in_state_s(self) -> float:
        """For how long it has been in its state."""
        return max(self.now_s - self.changed_s, 0.0)

    @property
    def handoff_s(self) -> float:
        """From the beginning to the end of the handoff, or until now."""
        return (self.now_s if self.is_live else self.changed_s) - self.began_s

    def entered_s(self, state: types_pb2.TransferState) -> float | None:
        """When it came into this state, if it did."""
        return next((seconds(step.time) for step in self.transfer.timeline if step.state == state), None)

    def stages(self, name: SpanName) -> list[inspection_pb2.Span]:
        """Those of this name, in order."""
        return [stage for stage in self.spans.stages if stage.name == name]

    @property
    def resting(self) -> inspection_pb2.Span | None:
        """The stage in which it is, or in which it failed."""
        return next((s for s in self.spans.stages if not s.HasField("end") or s.failure), None)

    def rests_in(self, name: SpanName) -> bool:
        """It is, or has failed, in this stage."""
        return self.resting is not None and self.resting.name == name

    def took_s(self, stages: Iterable[inspection_pb2.Span]) -> float:
        """All of them together; one that lasts counts up to now."""
        return sum((seconds(s.end) if s.HasField("end") else self.now_s) - seconds(s.start) for s in stages)

    @property
    def state_in_words(self) -> str:
        """Its name."""
        return types_pb2.TransferState.Name(self.state).removeprefix("TRANSFER_STATE_")

    def in_words(self) -> str:
        """Where it stands."""
        record = self.transfer
        since = f"for {self.in_state_s:.1f} s" if self.is_live else f"{self.in_state_s:.1f} s ago"
        words = f"room {self.room}, {self.name}: {self.state_in_words} {since}"
        if self.is_live and self.resting is not None:
            words += f", in {self.resting.name} for {self.took_s([self.resting]):.1f} s"
        if record.pages_done:
            words += f", {record.pages_done} pages written"
        return words + (f": {self.failure.reason}: {self.failure.message}" if self.failure else "")


@dataclass(frozen=True, slots=True)
class Case:
    """A room under examination, in its system; `others` are rooms that it can be compared with."""

    room: BootstrapRoom
    router: Leg | None
    prefill: Leg | None
    decode: Leg | None
    cluster: ClusterView
    others: tuple[RoomView, ...]
    patience_s: float

    @property
    def legs(self) -> tuple[Leg, ...]:
        """Those of prefill and decode that there are."""
        return tuple(leg for leg in (self.prefill, self.decode) if leg is not None)

    @property
    def reasons(self) -> frozenset[Reason]:
        """Why it has failed, whoever says so: what the router ends, ends as aborted on the two sides."""
        return frozenset(leg.reason for leg in (self.router, *self.legs) if leg is not None and leg.reason is not None)

    def failure(self, *reasons: Reason) -> PdError | None:
        """The first failure of one of these reasons."""
        failures = (leg.failure for leg in self.legs)
        return next((failure for failure in failures if failure is not None and failure.reason in reasons), None)

    @property
    def in_words(self) -> tuple[str, ...]:
        """Where each side stands."""
        return tuple(leg.in_words() for leg in self.legs)


def case_of(view: RoomView, cluster: ClusterView, others: tuple[RoomView, ...], patience_s: float) -> Case:
    """The room as its sides tell it. Of several prefills that know it the one with the request is its own."""
    router, prefill, decode = (leg_of(view, role) for role in (Role.ROUTER, Role.PREFILL, Role.DECODE))
    return Case(view.number, router, prefill, decode, cluster, others, patience_s)


def leg_of(view: RoomView, role: Role) -> Leg | None:
    """The room's leg on a process of this role, if there is one."""
    legs = [Leg(view.number, side, _now_s(view.cluster, side.address)) for side in view.of_role(role)]
    return max(legs, key=lambda leg: leg.has_request, default=None)


def seconds(time: timestamp_pb2.Timestamp) -> float:
    """Since 1970."""
    return time.ToNanoseconds() / 1e9


def number_of(stage: inspection_pb2.Span, attribute: str) -> float:
    """0 if it is not noted."""
    return float(stage.attributes.get(attribute, "0"))


def _now_s(cluster: ClusterView, address: str) -> float:
    view = cluster.at(address)
    return seconds(view.process.now) if view is not None and view.process is not None else 0.0
