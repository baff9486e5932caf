"""Calls to other processes: one channel per address, typed errors out, the room's trace context along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar

import grpc
from opentelemetry.context import Context
from pd.v1 import (
    abort_pb2,
    abort_pb2_grpc,
    bootstrap_pb2,
    bootstrap_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    page_allocation_pb2,
    page_allocation_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
)

from pd_common.control import convert, convert_generation
from pd_common.control.server import KEEPALIVE, MAX_MESSAGE_BYTES
from pd_common.control.status import from_rpc_error, from_status, to_status
from pd_common.errors import PdError, PeerLost
from pd_common.generation import ChatMessage, GenerationRequest, ModelInfo, Output
from pd_common.handoff.destination import Offer
from pd_common.handoff.state import Progress, TransferState
from pd_common.telemetry import spans
from pd_common.types import BootstrapRoom, Instance, KvLayout, ProcessProof, RankInfo, Role

_T = TypeVar("_T")

CALL_TIMEOUT_S = 5.0
"""For calls that only look something up or note something down."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also the time that one attempt gets
    ("grpc.max_reconnect_backoff_ms", 1000),
    *KEEPALIVE,
)


class Connection:
    """A channel to one address, shared by the clients below. Connects on the first call and again after each break."""

    def __init__(self, address: str, channel: grpc.aio.Channel | None = None) -> None:
        self.address = address
        self.channel = channel or grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Cancels running calls."""
        await self.channel.close(grace=None)

    async def call(self, method: Callable[..., Awaitable[_T]], request: object, **options: Any) -> _T:
        """One unary call; a failure becomes the PdError that the other side raised, or what its status means."""
        with self.typed_errors():
            return await method(request, **{"timeout": CALL_TIMEOUT_S, **options})

    async def stream(self, method: Callable[..., Any], request: object) -> AsyncGenerator[Any, None]:
        """The responses of a server stream; closing the generator ends the call."""
        with self.typed_errors():
            call = method(request)
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    @contextmanager
    def typed_errors(self) -> Iterator[None]:
        """The border: no gRPC exception leaves this block."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self.address) from error
        except grpc.aio.UsageError as error:
            raise PeerLost(f"{self.address}: the connection is closed", peer=self.address) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled the caller: the connection was closed under the call.
            raise PeerLost(f"{self.address}: the connection was closed", peer=self.address) from error


class Dial(Protocol):
    """Makes connections as this process is configured to; `role` is what the process at the address must be."""

    def __call__(self, address: str, role: Role) -> Connection: ...


def dial_plain(address: str, role: Role) -> Connection:  # noqa: ARG001  without TLS nobody can prove a role
    """Without TLS."""
    return Connection(address)


class BootstrapClient:
    """Bootstrap, as ranks and decode use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub: Any = bootstrap_pb2_grpc.BootstrapStub(connection.channel)

    async def register_rank(self, rank: RankInfo) -> float:
        """Gives the lease in seconds."""
        request = bootstrap_pb2.RegisterRankRequest(rank=convert.rank_to(rank))
        response = await self._connection.call(self._stub.RegisterRank, request)
        return convert.duration_from(response.lease)

    async def renew_lease(self, instance: Instance) -> float:
        """Gives the lease in seconds."""
        request = bootstrap_pb2.RenewLeaseRequest(instance=convert.instance_to(instance))
        response = await self._connection.call(self._stub.RenewLease, request)
        return convert.duration_from(response.lease)

    async def unregister_rank(self, instance: Instance) -> None:
        request = bootstrap_pb2.UnregisterRankRequest(instance=convert.instance_to(instance))
        await self._connection.call(self._stub.UnregisterRank, request)

    async def get_topology(self) -> tuple[RankInfo, ...]:
        request = bootstrap_pb2.GetTopologyRequest()
        response = await self._connection.call(self._stub.GetTopology, request)
        return tuple(convert.rank_from(rank) for rank in response.ranks)


class PeerClient:
    """What one rank asks of a rank on the other side: PageAllocation, TransferStatus and Abort."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pages: Any = page_allocation_pb2_grpc.PageAllocationStub(connection.channel)
        self._status: Any = transfer_status_pb2_grpc.TransferStatusStub(connection.channel)
        self._abort: Any = abort_pb2_grpc.AbortStub(connection.channel)

    async def register_receiver(
        self,
        *,
        receiver: Instance,
        sender: Instance,
        control_address: str,
        layout: KvLayout,
        data_address: bytes,
        buffer_bases: Sequence[int],
        num_pages: int,
        metadata_base: int,
        metadata_item_len_bytes: int,
        metadata_slots: int,
    ) -> tuple[ProcessProof, str]:
        """Gives the sender's process and the transport that will carry the pages."""
        request = page_allocation_pb2.RegisterReceiverRequest(
            receiver=convert.instance_to(receiver),
            sender=convert.instance_to(sender),
            control_address=control_address,
            layout=convert.layout_to(layout),
            data_address=data_address,
            buffer_bases=buffer_bases,
            num_pages=num_pages,
            metadata_base=metadata_base,
            metadata_item_len_bytes=metadata_item_len_bytes,
            metadata_slots=metadata_slots,
        )
        response = await self._connection.call(self._pages.RegisterReceiver, request)
        return convert.process_from(response.process), response.carrier

    async def hold_receiver(self, receiver: Instance, sender: Instance) -> AsyncIterator[float]:
        """Beats, each with the seconds until the next; raises when the sender is gone."""
        first = page_allocation_pb2.HoldReceiverRequest(
            receiver=convert.instance_to(receiver), sender=convert.instance_to(sender)
        )

        async def own_beats() -> AsyncIterator[page_allocation_pb2.HoldReceiverRequest]:
            yield first
            while True:
                await asyncio.sleep(0.5)
                yield page_allocation_pb2.HoldReceiverRequest()

        async with aclosing(self._connection.stream(self._pages.HoldReceiver, own_beats())) as beats:
            async for beat in beats:
                yield convert.duration_from(beat.interval)

    async def allocate_pages(
        self, room: BootstrapRoom, sender: Instance, offer: Offer, time_left_s: float, parent: Context
    ) -> TransferState:
        request = page_allocation_pb2.AllocatePagesRequest(
            bootstrap_room=room,
            receiver=convert.instance_to(offer.receiver),
            sender=convert.instance_to(sender),
            page_ids=offer.pages,
            metadata_slot={"index": offer.slot.index, "generation": offer.slot.generation},
            decode_prefix_len=offer.decode_prefix_len,
            prompt_tokens=offer.prompt_tokens,
            prompt_digest=offer.prompt_digest,
            ticket=offer.ticket,
            time_left=convert.duration_to(time_left_s),
        )
        response = await self._connection.call(self._pages.AllocatePages, request, metadata=spans.carried(parent))
        return convert.state_from(response.state)

    async def report_transfer(
        self,
        room: BootstrapRoom,
        *,
        reporter: Instance,
        recipient: Instance,
        sequence: int,
        state: TransferState,
        progress: Progress,
        ticket: bytes,
        failure: PdError | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> tuple[TransferState, PdError | None]:
        """Gives the room's state on the other side, and why it failed there."""
        request = transfer_status_pb2.ReportTransferRequest(
            bootstrap_room=room,
            reporter=convert.instance_to(reporter),
            recipient=convert.instance_to(recipient),
            sequence=sequence,
            state=convert.state_to(state),
            chunks_done=progress.chunks_done,
            pages_done=progress.pages_done,
            bytes_done=progress.bytes_done,
            failure=to_status(failure) if failure else None,
            ticket=ticket,
        )
        response = await self._connection.call(self._status.ReportTransfer, request, timeout=timeout_s)
        return convert.state_from(response.state), from_status(response.failure) if response.HasField(
            "failure"
        ) else None

    async def abort_room(
        self, room: BootstrapRoom, message: str, recipient: Instance, *, ticket: bytes, timeout_s: float
    ) -> None:
        """Returns when `recipient` will write nothing more of the room."""
        request = abort_pb2.AbortRoomRequest(
            bootstrap_room=room, message=message, recipient=convert.instance_to(recipient), ticket=ticket
        )
        await self._connection.call(self._abort.AbortRoom, request, timeout=timeout_s)


class GenerationClient:
    """Generation and Abort of an engine process, as the router uses them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub: Any = generation_pb2_grpc.GenerationStub(connection.channel)
        self._abort: Any = abort_pb2_grpc.AbortStub(connection.channel)

    async def get_model(self) -> ModelInfo:
        return convert_generation.model_from(
            await self._connection.call(self._stub.GetModel, generation_pb2.GetModelRequest())
        )

    async def tokenize_text(self, text: str) -> tuple[int, ...]:
        return await self._tokenize(generation_pb2.TokenizeRequest(text=text))

    async def tokenize_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        chat = generation_pb2.Chat(
            messages=[generation_pb2.ChatMessage(role=message.role, content=message.content) for message in messages]
        )
        return await self._tokenize(generation_pb2.TokenizeRequest(chat=chat))

    async def submit(self, request: GenerationRequest, subscriber: str, parent: Context) -> None:
        message = generation_pb2.SubmitRequest(request=convert_generation.request_to(request), subscriber=subscriber)
        await self._connection.call(self._stub.Submit, message, metadata=spans.carried(parent))

    async def stream_outputs(self, subscriber: str) -> AsyncGenerator[tuple[Output, ...], None]:
        """Outputs step by step; the first tuple is empty: the subscription stands."""
        request = generation_pb2.StreamOutputsRequest(subscriber=subscriber)
        async with aclosing(self._connection.stream(self._stub.StreamOutputs, request)) as responses:
            async for response in responses:
                yield tuple(convert_generation.output_from(output) for output in response.outputs)

    async def abort_room(self, room: BootstrapRoom, message: str, ticket: bytes = b"") -> None:
        request = abort_pb2.AbortRoomRequest(bootstrap_room=room, message=message, ticket=ticket)
        await self._connection.call(self._abort.AbortRoom, request)

    async def _tokenize(self, request: generation_pb2.TokenizeRequest) -> tuple[int, ...]:
        response = await self._connection.call(self._stub.Tokenize, request)
        return tuple(response.token_ids)
