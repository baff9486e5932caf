"""One request, two legs: a new room, the same request to prefill and decode, decode's answer back, one end for both."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context

from pd_common.errors import ClientCancelled, NoWorkers, PdError, RoomInUse
from pd_common.generation import ChatMessage, ClientRequest, GenerationRequest, ModelInfo, Output
from pd_common.telemetry import spans
from pd_common.telemetry.spans import RoomTrace, SpanName
from pd_common.types import BootstrapRoom, Role
from services.router.policy import LeastRooms, Pair, why_none
from services.router.worker import Sink, Worker

_log = logging.getLogger(__name__)

_ROOM_BITS = 53
"""Rooms that the router makes are exact in a JSON number."""


class Dispatcher:
    """Every room that is open here ends in one of: its last output, an error, an abort of both legs."""

    def __init__(self, policy: LeastRooms) -> None:
        self._policy = policy
        self._open: set[BootstrapRoom] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    # --- what the fronts use (services/router/backend.py) ---

    @property
    def is_ready(self) -> bool:
        """A request that came now would find a pair through which a real room has gone."""
        return any(w.is_usable for w in self._policy.prefills) and any(w.is_usable for w in self._policy.decodes)

    def not_ready_reason(self) -> str:
        return why_none([*self._policy.prefills, *self._policy.decodes])

    async def tokenize_text(self, text: str) -> tuple[int, ...]:
        return await self._any_worker().tokenize_text(text)

    async def tokenize_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return await self._any_worker().tokenize_chat(tuple(messages))

    async def model(self) -> ModelInfo:
        model = self._any_worker().model
        if model is None:
            raise NoWorkers(self.not_ready_reason())
        return model

    async def generate(self, request: ClientRequest) -> AsyncGenerator[Output, None]:
        pair = self._policy.pick(request.bootstrap)
        async with aclosing(self.generate_through(pair, request)) as outputs:
            async for output in outputs:
                yield output

    # --- one request ---

    async def generate_through(self, pair: Pair, request: ClientRequest) -> AsyncGenerator[Output, None]:
        """The answer of one pair; closing the generator aborts both legs."""
        room = self._claim(request.room)
        trace = RoomTrace(
            SpanName.ROUTE, room, _parent(room), prefill=pair.prefill.address.target, decode=pair.decode.address.target
        )
        arrivals: asyncio.Queue[tuple[Role, Output]] = asyncio.Queue()
        legs = (pair.prefill, pair.decode)
        for leg in legs:
            leg.open(room, _sink(arrivals, leg.role))
        leg_request = _leg_request(room, pair, request)
        error: PdError | None = None
        ended = False
        try:
            await self._submit(legs, leg_request, trace)
            while not ended:
                role, output = await arrivals.get()
                if output.error is not None:
                    raise output.error
                if role is Role.DECODE:
                    ended = output.is_last
                    trace.first_token()
                    yield output
        except PdError as failed:
            error = failed
            raise
        finally:
            for leg in legs:
                leg.close(room)
            self._open.discard(room)
            if not ended:
                error = error or ClientCancelled("the client went away", room=room)
                self._abort(legs, leg_request, error)
            trace.end(error)

    async def _submit(self, legs: Sequence[Worker], request: GenerationRequest, trace: RoomTrace) -> None:
        stage = trace.enter(SpanName.DISPATCH)
        answers = await asyncio.gather(
            *(leg.submit(request, spans.inside(stage)) for leg in legs), return_exceptions=True
        )
        for answer in reversed(answers):  # decode's word first: it knows the whole answer's needs
            if answer is not None:
                raise answer
        trace.leave()

    def _abort(self, legs: Sequence[Worker], request: GenerationRequest, error: PdError) -> None:
        """Ends both legs without keeping the client waiting; the tasks are held until they are done."""
        for leg in legs:
            task = asyncio.create_task(leg.abort(request.room, error.message, request.ticket))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Waits for aborts that are under way."""
        await asyncio.gather(*self._aborts)

    def _claim(self, wanted: BootstrapRoom | None) -> BootstrapRoom:
        room = wanted if wanted is not None else BootstrapRoom(secrets.randbelow(2**_ROOM_BITS - 1) + 1)
        if room in self._open:
            raise RoomInUse(f"room {room} is in use", room=room)
        self._open.add(room)
        return room

    def _any_worker(self) -> Worker:
        for worker in (*self._policy.decodes, *self._policy.prefills):
            if worker.is_live:
                return worker
        raise NoWorkers(f"no worker is connected: {self.not_ready_reason()}")


def _sink(arrivals: asyncio.Queue[tuple[Role, Output]], role: Role) -> Sink:
    return lambda output: arrivals.put_nowait((role, output))


def _leg_request(room: BootstrapRoom, pair: Pair, request: ClientRequest) -> GenerationRequest:
    return GenerationRequest(
        rid=request.rid or uuid.uuid4().hex,
        room=room,
        bootstrap=pair.prefill.address,
        prompt=request.prompt,
        sampling=request.sampling,
        return_logprob=request.return_logprob,
        top_logprobs=request.top_logprobs,
        timeout_s=request.timeout_s,
    )


def _parent(room: BootstrapRoom) -> Context:
    """The client's trace, or one that follows from the room."""
    current = otel_context.get_current()
    has_trace = otel_trace.get_current_span(current).get_span_context().is_valid
    return current if has_trace else spans.of_room(room)
