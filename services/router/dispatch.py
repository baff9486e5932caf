"""One request on its route: a new room, the same request to every leg, decode's answer back, one end for all legs."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context

from pd_common.aio import Tasks
from pd_common.control import room_log
from pd_common.control.process import new_instance
from pd_common.control.tickets import TicketKeys
from pd_common.errors import (
    CapacityExceeded,
    ClientCancelled,
    NoWorkers,
    PdError,
    PeerLost,
    RoomAborted,
    RoomInUse,
    ShuttingDown,
    TopologyIncomplete,
    TransferFailed,
)
from pd_common.generation import ChatMessage, ClientRequest, GenerationRequest, ModelInfo, Output
from pd_common.handoff.state import TransferState
from pd_common.telemetry import logs, spans
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import Attribute, RoomTrace, Tracing
from pd_common.types import BootstrapRoom, Role, new_room
from services.router.policy import Choice, LeastLoaded
from services.router.rooms import OpenRoom, Rooms
from services.router.route import Lives, Route
from services.router.worker import Sink, Worker

_T = TypeVar("_T")

_REFUSALS = (CapacityExceeded, ShuttingDown, NoWorkers, PeerLost, TopologyIncomplete)
"""Why a worker does not take a request that another one may take."""

_TICKET_SLACK_S = 60.0
"""For clocks that differ, and for the last messages of a room that has run out of time."""


class Dispatcher:
    """Every room that is open here ends in one of: its last output, an error, an abort of its legs."""

    def __init__(self, policy: LeastLoaded, tracing: Tracing, keys: TicketKeys | None = None) -> None:
        """With `keys` the legs of each room carry its ticket."""
        self.instance = new_instance("router")
        self._policy = policy
        self._tracing = tracing
        self._keys = keys
        self._rooms = Rooms()
        self._aborts = Tasks()
        self._withdrawn = False

    @property
    def open_rooms(self) -> int:
        """Rooms that have not ended here."""
        return len(self._rooms)

    # --- what the fronts use (services/router/backend.py) ---

    @property
    def is_ready(self) -> bool:
        return not self._withdrawn and self._policy.is_ready

    def not_ready_reason(self) -> str:
        return "this router is stopping" if self._withdrawn else self._policy.why_not_ready()

    async def tokenize_text(self, text: str) -> tuple[int, ...]:
        return await self._ask_any(lambda worker: worker.tokenize_text(text))

    async def tokenize_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return await self._ask_any(lambda worker: worker.tokenize_chat(tuple(messages)))

    async def model(self) -> ModelInfo:
        for worker in self._live_workers():
            if worker.model is not None:
                return worker.model
        raise NoWorkers(self.not_ready_reason())

    async def generate(self, request: ClientRequest) -> AsyncGenerator[Output, None]:
        """On the best route; if workers there do not take it in, in a new room on the best one without them.

        Not if the client has chosen the room: it may look for it where it was first.
        """
        ends_s, refused = time.monotonic() + request.timeout_s, set[Worker]()
        choice = self._policy.choose(request)
        while True:
            room = self._room(choice.routes[0], request)
            try:
                async with aclosing(self._answer(room, choice.reason)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except _REFUSALS:
                refused |= room.refused
                again = self._without(refused, request) if room.refused and request.room is None else None
                left_s = ends_s - time.monotonic()
                if again is None or left_s <= 0:
                    raise
            choice, request = again, replace(request, timeout_s=left_s)

    def _without(self, refused: set[Worker], request: ClientRequest) -> Choice | None:
        """What there is to choose from now; None: nothing, and what the last worker has said is the answer."""
        try:
            choice = self._policy.choose(request)
        except PdError:
            return None
        routes = tuple(route for route in choice.routes if refused.isdisjoint(route.workers))
        return Choice(routes, choice.reason) if routes else None

    # --- one request ---

    def generate_through(self, route: Route, request: ClientRequest, reason: str) -> AsyncGenerator[Output, None]:
        """The answer of this route; closing the generator aborts all legs. `reason`: why this route, for the trace."""
        return self._answer(self._room(route, request), reason)

    def _room(self, route: Route, request: ClientRequest) -> OpenRoom:
        """A room that is not open yet."""
        number = request.room or new_room()
        return OpenRoom(_leg_request(number, route, request, self._ticket(number, request.timeout_s)), route)

    async def _answer(self, room: OpenRoom, reason: str) -> AsyncGenerator[Output, None]:
        number, lives = room.number, room.route.lives
        self._rooms.add(room, time.monotonic())
        trace = self._trace(room, reason)
        room_log.say(trace, "request accepted")
        logs.note_prompt(number, room.request.rid, room.request.prompt)
        for leg in room.legs:
            leg.open(number, _sink(room.arrivals, leg.role))
        error: PdError | None = None
        try:
            await self._submit(room, trace)
            while not room.answered:
                role, output = await room.arrivals.get()
                if output.error is not None:
                    raise output.error
                if role is Role.DECODE:
                    room.answered = output.is_last
                    if trace.first_token_ns is None:
                        trace.first_token()
                        trace.enter(SpanName.STREAM)
                        room_log.say(trace, "first token")
                    yield output
        except PdError as failed:
            error = failed
            _learn(room, lives, failed, begun=trace.first_token_ns is not None)
            raise
        finally:
            for leg in room.legs:
                leg.close(number)
            if not room.answered:
                error = error or ClientCancelled("the client went away", room=number)
                self._end(room, error)
                self._trace_abort(room, trace, error)
            room.left = True
            self._rooms.remove_if_over(room)
            trace.end(error)

    async def _submit(self, room: OpenRoom, trace: RoomTrace) -> None:
        trace.enter(SpanName.DISPATCH)
        answers = await asyncio.gather(
            *(leg.submit(room.request, trace.context) for leg in room.legs), return_exceptions=True
        )
        room.foreign = _who_said((RoomInUse,), room.legs, answers)
        if not room.aborts:
            room.refused = _who_said(_REFUSALS, room.legs, answers)
        for answer in reversed(answers):  # decode's word first: it knows the whole answer's needs
            if answer is not None:
                raise answer
        trace.enter(SpanName.FIRST_TOKEN_WAIT)

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        known = self._rooms.find(room)
        if known is None:
            self._rooms.refuse(room, time.monotonic())
            return None
        if known.answered:
            return TransferState.SUCCESS
        self._end(known, error)
        await asyncio.wait(known.aborts)
        return TransferState.FAILED

    async def abort_rid(self, rid: str, message: str) -> Sequence[BootstrapRoom]:
        numbers = [room.number for room in self._rooms.with_rid(rid)]
        await asyncio.gather(*(self.abort(number, RoomAborted(message, room=number)) for number in numbers))
        return numbers

    def _end(self, room: OpenRoom, error: PdError) -> None:
        """Ends its legs, once, without keeping the client waiting; the tasks are held until they are done."""
        if room.aborts:
            return
        request = room.request
        room.arrivals.put_nowait((Role.DECODE, Output(room.number, error=error)))
        room.aborts = tuple(
            self._aborts.start(f"abort of room {room.number}", leg.abort(room.number, error.message, request.ticket))
            for leg in room.legs
            if leg not in room.foreign
        )
        for abort in room.aborts:
            abort.add_done_callback(lambda _: self._rooms.remove_if_over(room))

    def withdraw(self) -> None:
        """Not ready from now on, though whoever comes is served."""
        self._withdrawn = True

    def end_all(self, error: PdError) -> None:
        """Ends every open room with this error; does not wait."""
        for room in self._rooms:
            self._end(room, error)

    async def watch(self) -> None:
        """Raises InternalError when an abort has died. Otherwise it never returns."""
        await self._aborts.watch()

    async def close(self) -> None:
        """Waits for aborts that are under way."""
        await asyncio.gather(*self._aborts, return_exceptions=True)

    def _trace(self, room: OpenRoom, reason: str) -> RoomTrace:
        """Says which way the room takes, and why."""
        way: dict[str, Attribute] = {leg.role.value: leg.address.target for leg in room.legs}
        way |= {"pd.disaggregated": room.route.prefill is not None, "pd.route_reason": reason, "rid": room.request.rid}
        arrival_ns = spans.arrival_ns(otel_context.get_current())
        trace = self._tracing.begin(SpanName.ROUTE, room.number, _parent(room.number), start_ns=arrival_ns, **way)
        if arrival_ns is not None:
            trace.enter(SpanName.RECEIVE)
        return trace

    def _trace_abort(self, room: OpenRoom, trace: RoomTrace, error: PdError) -> None:
        """Until the legs have answered; the client does not wait for that."""

        async def until_ended() -> None:
            with trace.beside(SpanName.ABORT, **{"error.type": error.reason.value}):
                await asyncio.wait(room.aborts)

        if room.aborts:
            self._aborts.start(f"trace of the abort of room {room.number}", until_ended())

    def _ticket(self, room: BootstrapRoom, timeout_s: float) -> bytes:
        return b"" if self._keys is None else self._keys.sign(room, time.time() + timeout_s + _TICKET_SLACK_S)

    async def _ask_any(self, ask: Callable[[Worker], Awaitable[_T]]) -> _T:
        """The answer of the first worker that gives one: it does not matter whose it is."""
        error: PdError = NoWorkers(f"no worker is connected: {self.not_ready_reason()}")
        for worker in self._live_workers():
            try:
                return await ask(worker)
            except PeerLost as lost:
                error = lost
        raise error

    def _live_workers(self) -> Sequence[Worker]:
        """Those that are about to end come last."""
        workers = (*self._policy.decodes, *self._policy.prefills)
        return sorted((worker for worker in workers if worker.is_live), key=lambda worker: worker.is_stopping)


def _who_said(
    errors: tuple[type[PdError], ...], legs: Sequence[Worker], answers: Sequence[BaseException | None]
) -> frozenset[Worker]:
    return frozenset(leg for leg, answer in zip(legs, answers, strict=True) if isinstance(answer, errors))


def _learn(room: OpenRoom, lives: Lives | None, error: PdError, *, begun: bool) -> None:
    """What a failure says of the workers. `begun`: the client has a part of the answer."""
    if isinstance(error, ShuttingDown) and not begun and not room.aborts:
        room.refused |= {leg for leg in room.legs if leg.is_stopping}  # it was taken in, and their end came first
    if isinstance(error, TransferFailed | PeerLost | TopologyIncomplete) and not room.refused:
        room.route.doubt(lives, error.message)
    if isinstance(error, TopologyIncomplete) and room.route.prefill is not None and not begun and not room.aborts:
        room.refused |= {room.route.prefill}  # it is there, and a rank beside it is not


def _sink(arrivals: asyncio.Queue[tuple[Role, Output]], role: Role) -> Sink:
    return lambda output: arrivals.put_nowait((role, output))


def _leg_request(room: BootstrapRoom, route: Route, request: ClientRequest, ticket: bytes) -> GenerationRequest:
    return GenerationRequest(
        rid=request.rid or uuid.uuid4().hex,
        room=room,
        bootstrap=None if route.prefill is None else route.prefill.bootstrap,
        prompt=request.prompt,
        sampling=request.sampling,
        return_logprob=request.return_logprob,
        top_logprobs=request.top_logprobs,
        timeout_s=request.timeout_s,
        ticket=ticket,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def _parent(room: BootstrapRoom) -> Context:
    """The client's trace, or one that follows from the room."""
    current = otel_context.get_current()
    has_trace = otel_trace.get_current_span(current).get_span_context().is_valid
    return current if has_trace else spans.of_room(room)
