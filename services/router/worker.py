"""One engine process as the router sees it: a lasting output stream, its rooms, and whether it can be used."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

from opentelemetry.context import Context

from pd_common.control import beats
from pd_common.control.connection import Dial
from pd_common.control.generation_client import GenerationClient
from pd_common.errors import DeadlineExceeded, NoWorkers, PdError, PeerLost
from pd_common.generation import ChatMessage, GenerationRequest, Load, ModelInfo, Output
from pd_common.telemetry.logs import fields
from pd_common.types import BootstrapAddress, BootstrapRoom, Role

_log = logging.getLogger(__name__)

_RECONNECT_S = 0.2
_ABORTS = 10
"""So often an abort is said to a worker that lives and does not answer."""

Sink = Callable[[Output], None]


class Worker:
    """Live while its output stream stands and beats.

    When it breaks every room that has not had its last output gets one with the error, and the stream is opened again.
    `changed` is set whenever it comes or goes, and when it begins to stop.
    """

    def __init__(self, role: Role, address: BootstrapAddress, changed: asyncio.Event, dial: Dial) -> None:
        self.role = role
        self.address = address
        self.model: ModelInfo | None = None
        self.load: Load | None = None
        """What it has said last; None while it is not live."""
        self.why_not = "not connected yet"
        self.changed = changed
        self._dial = dial
        self._connection = dial(address.target, role)
        self._client = GenerationClient(self._connection)
        self._subscriber: str | None = None
        self._sinks: dict[BootstrapRoom, Sink] = {}
        self._was_to_end = False

    @property
    def is_live(self) -> bool:
        """Its output stream stands."""
        return self._subscriber is not None

    @property
    def is_stopping(self) -> bool:
        """It is live, and takes no new request."""
        return self.load is not None and self.load.stopping

    @property
    def life(self) -> str | None:
        """A name for the time in which one output stream stands; None when there is none."""
        return self._subscriber

    @property
    def bootstrap(self) -> BootstrapAddress:
        """Where decode finds this prefill: in the directory that it names, else in its own."""
        named = None if self.model is None else self.model.bootstrap
        return self.address if named is None else named

    @property
    def open_rooms(self) -> int:
        """Rooms of this router that it has not ended yet."""
        return len(self._sinks)

    def open(self, room: BootstrapRoom, sink: Sink) -> None:
        """Sends the room's outputs to `sink`, up to the last one or until `close`."""
        self._sinks[room] = sink

    def close(self, room: BootstrapRoom) -> None:
        """The room's outputs are no longer of interest."""
        self._sinks.pop(room, None)

    async def submit(self, request: GenerationRequest, parent: Context) -> None:
        """Raises the worker's own PdError when it refuses, NoWorkers when it is not live."""
        if self._subscriber is None:
            raise NoWorkers(f"{self} is not connected: {self.why_not}")
        await self._client.submit(request, self._subscriber, parent)

    async def abort(self, room: BootstrapRoom, message: str, ticket: bytes) -> None:
        """Ends the room there, said again while there is no answer; a worker that is gone has ended it already."""
        for left in reversed(range(_ABORTS)):
            try:
                await self._client.abort_room(room, message, ticket)
            except PdError as error:
                if not self.is_live:
                    return
                heard = not isinstance(error, PeerLost | DeadlineExceeded)
                if heard or not left:
                    _log.info("room not aborted at %s: %s", self, self._reason(error), extra=fields(room))
                    return
                await asyncio.sleep(_RECONNECT_S)
            else:
                return

    async def tokenize_text(self, text: str) -> tuple[int, ...]:
        return await self._client.tokenize_text(text)

    async def tokenize_chat(self, messages: tuple[ChatMessage, ...]) -> tuple[int, ...]:
        return await self._client.tokenize_chat(messages)

    async def run(self) -> None:
        """Keeps the output stream open; ends only by cancellation."""
        while True:
            try:
                await self._stream()
                error: PdError = PeerLost("it has ended the stream")
            except TimeoutError:
                error = PeerLost(f"no beat for {beats.patience_s():.1f} s")
            except PdError as broken:
                error = broken
            self._lost(error)
            await asyncio.sleep(_RECONNECT_S)
            await self._dial_again()

    async def stop(self) -> None:
        await self._connection.close()

    async def _dial_again(self) -> None:
        """A connection keeps the certificates of its making; a new one has those of the day."""
        broken = self._connection
        self._connection = self._dial(self.address.target, self.role)
        self._client = GenerationClient(self._connection)
        await broken.close()

    async def _stream(self) -> None:
        subscriber = f"router-{uuid.uuid4()}"
        model = await self._client.get_model()
        async with beats.Patience() as patience:
            async for outputs in self._client.stream_outputs(subscriber, self._note_load):
                patience.heard()
                if self._subscriber is None:
                    self.model, self._subscriber = model, subscriber
                    _log.info("%s is connected", self)
                    self.changed.set()
                for output in outputs:
                    self._hand_over(output)

    def _note_load(self, load: Load) -> None:
        is_news = load.stopping and not self.is_stopping
        self.load = load
        if is_news:
            _log.info("%s is stopping: it gets no new requests", self)
            self.changed.set()

    def _hand_over(self, output: Output) -> None:
        """After its last output a room does not need this worker: what prefill has handed off survives its end."""
        sink = self._sinks.get(output.room)
        if sink is None:
            return
        if output.is_last:
            self.close(output.room)
        sink(output)

    def _lost(self, error: PdError) -> None:
        why_not = self._reason(error)
        if self.is_live:
            self._was_to_end = self.is_stopping
            _log.log(self._severity, "%s is lost: %s", self, why_not)
        elif why_not != self.why_not:  # said once, not at every attempt
            _log.log(self._severity, "%s cannot be reached, trying again: %s", self, why_not)
        self._subscriber, self.load, self.why_not = None, None, why_not
        self.changed.set()
        lost = PeerLost(f"{self} is gone: {why_not}", peer=self.address.target)
        for room, sink in tuple(self._sinks.items()):
            sink(Output(room, error=lost))

    @property
    def _severity(self) -> int:
        """Of its absence: nobody has to look into that of one that has said it."""
        return logging.INFO if self._was_to_end else logging.WARNING

    def _reason(self, error: PdError) -> str:
        """Without the address that failed calls begin with: whoever says this says the address as well."""
        return error.message.removeprefix(f"{self.address.target}: ")

    def __str__(self) -> str:
        return f"{self.role.value} {self.address.target}"
