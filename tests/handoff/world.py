"""One prefill and one decode in a single process, driven by the commands of a transcript.

A command is `who verb key=value ...`; what it answers is everything that changed, line by line. `t=` sets the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from pd_common.errors import PdError, PeerLost, RoomAborted, TransferFailed
from pd_common.handoff.chunk import ChunkPlanner, TransferKVChunk, pages_to_transfer
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.destination import Offer
from pd_common.handoff.digest import digest_prompt
from pd_common.handoff.metadata import HandoffMetadata, MetadataBuffers, Slot
from pd_common.handoff.quarantine import Quarantine, Writer
from pd_common.handoff.receiver import KVReceiver
from pd_common.handoff.sender import KVSender
from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.transport.base import WriteReceipt
from pd_common.types import BootstrapRoom, Instance, PageIndices, ProcessProof, Role
from tests.handoff.memory import GatedChannel, MemoryPool, make_destination, owned
from tests.handoff.overdue import expire, next_deadline

Args = dict[str, str]

ITEM_LENS = (8, 24)
PAGE_SIZE = 4
NUM_PAGES = 8
NUM_SLOTS = 2
RETENTION_S = 30.0
TIMEOUTS = Timeouts(bootstrap_s=100.0, waiting_s=80.0)
LIFE_SEQUENCES = 1000
"""Where the numbers of a second life begin."""
PREFILL_PROCESS = ProcessProof("host-a", 4711, 99)


@dataclass
class PrefillLeg:
    """What prefill has of one room besides its record."""

    planner: ChunkPlanner
    sender: KVSender
    slot: Slot
    offer: Offer
    table: tuple[int, ...]


class World:
    """Commands are methods named `<who>_<verb>`. Every line said goes into the transcript."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.channels: list[GatedChannel] = []
        self.prefill = Instance("prefill-0", 1)
        self.source = MemoryPool(ITEM_LENS, NUM_PAGES, PAGE_SIZE, seed=1)
        self.source_rows = MetadataBuffers(NUM_SLOTS)
        self.prefill_table = self._table(Role.PREFILL)
        self.legs: dict[BootstrapRoom, PrefillLeg] = {}
        self.sends: dict[asyncio.Task[WriteReceipt], tuple[BootstrapRoom, TransferKVChunk]] = {}
        self._start_decode(Instance("decode-0", 1))

    def _start_decode(self, instance: Instance) -> None:
        self.decode = instance
        self.channel = GatedChannel()
        self.channels.append(self.channel)
        self.pool = MemoryPool(ITEM_LENS, NUM_PAGES, PAGE_SIZE)
        self.rows = MetadataBuffers(NUM_SLOTS)
        self.free_pages = list(range(NUM_PAGES))
        self.decode_table = self._table(Role.DECODE)
        self.receivers: dict[int, KVReceiver] = {}
        self.offers: dict[BootstrapRoom, Offer] = {}
        self.quarantine = Quarantine(self._release, host_id="host-a")

    def _table(self, role: Role) -> TransferTable:
        sequence = (self.prefill.epoch - 1) * LIFE_SEQUENCES if role is Role.PREFILL else 0
        table = TransferTable(role, RETENTION_S, 4, TIMEOUTS, sequence=sequence)
        table.listeners.append(self._say_change)
        return table

    async def run(self, command: str) -> list[str]:
        """Executes one command; gives the lines it said. `more=1` keeps a chunk from being the last."""
        who, verb, *words = command.split()
        args = dict(word.split("=", 1) for word in words)
        self.now = float(args.pop("t", self.now))
        self.lines = []
        verb_of: Callable[[Args], Awaitable[None]] = getattr(self, f"{who}_{verb}")
        try:
            await verb_of(args)
        except PdError as error:
            self.say(f"refused: {error.reason}: {error.message}")
        return self.lines or ["nothing"]

    async def close(self) -> None:
        """Lets every write land, so that nothing is left behind."""
        for channel in self.channels:
            channel.gate.set()
        for leg in self.legs.values():
            await leg.sender.abort()

    def say(self, line: str) -> None:
        self.lines.append(line)

    def _say_change(self, transfer: Transfer) -> None:
        done = transfer.progress
        progress = f" {done.pages_done} pages" if done.pages_done else ""
        failure = f" {transfer.failure.reason}: {transfer.failure.message}" if transfer.failure else ""
        self.say(f"#{transfer.sequence} {transfer.role} {transfer.room} {transfer.state.name}{progress}{failure}")

    # --- decode ---

    async def decode_request(self, args: Args) -> None:
        room, prompt = _room(args), _prompt(args)
        self.decode_table.open(room, rid="r", prompt_digest=prompt, deadline_s=_deadline(args), now=self.now)

    async def decode_publish(self, args: Args) -> None:
        room, tokens, prefix = _room(args), int(args["prompt"]), int(args.get("prefix", "0"))
        count = pages_to_transfer(tokens, prefix, PAGE_SIZE)
        slot = self.rows.alloc()
        if slot is None or len(self.free_pages) < count:
            self.say("no room in memory")
            return
        pages, self.free_pages = tuple(self.free_pages[:count]), self.free_pages[count:]
        offer = Offer(self.decode, pages, slot, prefix, tokens, _prompt(args))
        self.offers[room] = offer
        self.receivers[room] = KVReceiver(room, offer, self.pool.buffers, self.rows, self.pool.new_digest())
        peer = None if "unanswered" in args else self.prefill
        self.decode_table.advance(room, TransferState.WAITING_FOR_INPUT, self.now, peer=peer)
        self.say(f"offers pages {_ids(pages)}, slot {_slot(slot)}")

    async def decode_accepted(self, args: Args) -> None:
        """The answer to the offer arrives: from now on the room is between these two."""
        room = _room(args)
        self.decode_table.advance(room, self.decode_table.get(room).state, self.now, peer=self.prefill)

    async def decode_report(self, args: Args) -> None:
        room, progress = _room(args), Progress(pages_done=int(args.get("pages", "0")))
        reporter = replace(self.prefill, epoch=int(args.get("epoch", self.prefill.epoch)))
        if not self.decode_table.heard(room, reporter, int(args["seq"])):
            self.say("already heard or over")
            return
        self.decode_table.advance(room, TransferState[args["state"]], self.now, progress=progress)

    async def decode_commit(self, args: Args) -> None:
        room = _room(args)
        if room not in self.receivers:
            self.say("nothing to take over")
            return
        try:
            metadata = await self.receivers[room].commit()
        except PdError as error:
            self.decode_table.fail(room, error, self.now)
            self._hold(room)
            return
        if self.decode_table.advance(room, TransferState.SUCCESS, self.now):
            self.say(f"first token {metadata.first_token}, {metadata.covered_tokens} tokens covered")

    async def decode_finish(self, args: Args) -> None:
        """The answer is complete: pages and slot of a committed room go back."""
        offer = self.receivers.pop(_room(args)).offer
        self._release(_room(args), offer.pages, offer.slot)

    async def decode_abort(self, args: Args) -> None:
        room = _room(args)
        if self.decode_table.abort(room, RoomAborted("asked to stop"), self.now):
            self._hold(room)

    async def decode_expire(self, _: Args) -> None:
        for transfer in expire(self.decode_table, self.now):
            self._hold(transfer.room)

    async def decode_lost(self, args: Args) -> None:
        """Prefill does not answer any more, or says that it is another life."""
        peer = replace(self.prefill, epoch=int(args.get("epoch", self.prefill.epoch)))
        for transfer in self.decode_table.fail_peer(peer, PeerLost("prefill is gone"), self.now):
            self._hold(transfer.room)

    async def decode_query(self, args: Args) -> None:
        """What prefill is told when it asks, or repeats its last report."""
        known = self.decode_table.get(_room(args))
        self.say(f"{known.state.name}" + (f" {known.failure.reason}" if known.failure else ""))

    async def decode_drained(self, args: Args) -> None:
        epoch = int(args.get("epoch", self.prefill.epoch))
        self.quarantine.drained(_room(args), replace(self.prefill, epoch=epoch))

    async def decode_fenced(self, _: Args) -> None:
        for held in self.quarantine.held:
            for writer in held.missing:
                self.quarantine.fenced(held.room, writer.instance)

    async def decode_gone(self, _: Args) -> None:
        self.quarantine.process_gone(PREFILL_PROCESS)

    async def decode_memory(self, _: Args) -> None:
        held = f"held {self.quarantine.held_pages} pages {self.quarantine.held_slots} slots"
        self.say(f"free {len(self.free_pages)} pages {self.rows.free_slots} slots, {held}")
        for hold in self.quarantine.held:
            for writer, missing in hold.missing.items():
                names = " ".join(sorted(proof.value for proof in missing))
                self.say(f"room {hold.room} waits for {writer.instance.instance_id}: drained, or {names}")

    async def decode_damage(self, args: Args) -> None:
        self.pool.arrays[0][int(args["page"]), 0] ^= 1

    async def decode_restart(self, _: Args) -> None:
        self._start_decode(replace(self.decode, epoch=self.decode.epoch + 1))

    def _hold(self, room: BootstrapRoom) -> None:
        receiver = self.receivers.pop(room, None)
        if receiver is None:
            return
        peer = self.decode_table.get(room).peer or self.prefill
        writers = [Writer(peer, "host-a:8998", PREFILL_PROCESS)]
        self.quarantine.hold(room, writers, receiver.offer.pages, receiver.offer.slot, self.now)
        self.say(f"quarantined pages {_ids(receiver.offer.pages)}, slot {_slot(receiver.offer.slot)}")

    def _release(self, _: BootstrapRoom, pages: PageIndices, slot: Slot) -> None:
        self.free_pages[:0] = pages
        self.rows.free(slot)
        self.say(f"released pages {_ids(pages)}, slot {_slot(slot)}")

    # --- prefill ---

    async def prefill_request(self, args: Args) -> None:
        deadline_s = _deadline(args)
        room = _room(args)
        self.prefill_table.join_request(room, rid="r", prompt_digest=_prompt(args), deadline_s=deadline_s, now=self.now)
        self._start_leg(room)

    async def prefill_offer(self, args: Args) -> None:
        """Decode's offer arrives; any part of it can be replaced by an argument."""
        room = _room(args)
        known = self.offers[room]
        offer = replace(
            known,
            pages=tuple(int(page) for page in args["pages"].split(",")) if "pages" in args else known.pages,
            receiver=replace(known.receiver, epoch=int(args.get("epoch", known.receiver.epoch))),
        )
        make_destination(offer, self.pool, self.rows, self.channel)
        self.prefill_table.join_offer(room, offer, deadline_s=_deadline(args), now=self.now)
        self._start_leg(room)

    def _start_leg(self, room: BootstrapRoom) -> None:
        transfer = self.prefill_table.get(room)
        offer = transfer.offer
        if transfer.state is not TransferState.WAITING_FOR_INPUT or offer is None or room in self.legs:
            return
        slot = owned(self.source_rows)
        destination = make_destination(offer, self.pool, self.rows, self.channel)
        sender = KVSender(room, self.source.buffers, destination, self.source_rows, slot, self.source.new_digest())
        planner = ChunkPlanner(room, offer.prompt_tokens, PAGE_SIZE, offer.decode_prefix_len)
        self.legs[room] = PrefillLeg(planner, sender, slot, offer, tuple(range(NUM_PAGES)))

    async def prefill_compute(self, args: Args) -> None:
        room, tokens = _room(args), int(args["tokens"])
        leg = self.legs.get(room)
        if leg is None:
            self.say("computed; may not send, there is no destination")
            return
        is_last = tokens == leg.offer.prompt_tokens and "more" not in args
        chunk = leg.planner.next_chunk(tokens, leg.table, is_last=is_last)
        if chunk is None:
            self.say("no new whole page")
            return
        metadata = HandoffMetadata(
            first_token=int(args.get("token", "42")), covered_tokens=int(args.get("covered", tokens))
        )
        send = leg.sender.finish(chunk, metadata) if chunk.is_last else leg.sender.send_kv_chunk(chunk)
        task = asyncio.create_task(send)
        self.sends[task] = (room, chunk)
        blocked = asyncio.create_task(self.channel.blocked.wait())
        await asyncio.wait({task, blocked}, return_when=asyncio.FIRST_COMPLETED)
        blocked.cancel()
        if not task.done():
            self.say(f"chunk {chunk.index} is not written yet")
        self._tell_sends()

    def _tell_sends(self) -> None:
        for task in [task for task in self.sends if task.done()]:
            room, chunk = self.sends.pop(task)
            error = task.exception()
            if isinstance(error, PdError):
                self.say(f"chunk {chunk.index} failed: {error.reason}")
                self.prefill_table.fail(room, error, self.now)
                continue
            what = f"pages {_ids(chunk.src_pages.tolist())}" if len(chunk.src_pages) else "no pages"
            last = ", then the row, then its seal" if chunk.is_last else ""
            self.say(f"chunk {chunk.index} written: {what}{last}, {task.result().bytes} bytes")
            progress = self.legs[room].sender.progress
            self.prefill_table.advance(room, TransferState.TRANSFERRING, self.now, progress=progress)

    async def prefill_conclude(self, args: Args) -> None:
        """Decode has answered that it took the room over."""
        if self.prefill_table.advance(_room(args), TransferState.SUCCESS, self.now):
            self._drop_leg(_room(args))

    async def prefill_learn(self, args: Args) -> None:
        """Asks decode how the room stands there, and follows it if it has failed."""
        room = _room(args)
        failure = self.decode_table.get(room).failure
        if failure is not None:
            self.prefill_table.fail(room, failure, self.now)
            await self.legs[room].sender.abort()
            self._drop_leg(room)

    async def prefill_abort(self, args: Args) -> None:
        room = _room(args)
        self.prefill_table.abort(room, RoomAborted("asked to stop"), self.now)
        leg = self.legs.get(room)
        if leg is None:
            self.say("drained: nothing was ever posted")
            return
        drain = asyncio.create_task(leg.sender.abort())
        await asyncio.sleep(0)
        if not leg.sender.quiet:
            self.say("draining: a write is in flight")
            return
        await drain
        self._drop_leg(room)
        self.say("drained")

    def _drop_leg(self, room: BootstrapRoom) -> None:
        leg = self.legs.pop(room)
        assert leg.sender.quiet
        self.source_rows.free(leg.slot)

    async def prefill_expire(self, _: Args) -> None:
        for transfer in expire(self.prefill_table, self.now):
            if transfer.room in self.legs:
                await self.legs[transfer.room].sender.abort()
                self._drop_leg(transfer.room)

    async def prefill_lost(self, _: Args) -> None:
        """Decode does not answer any more."""
        self.prefill_table.fail_peer(self.decode, PeerLost("decode is gone"), self.now)

    async def prefill_restart(self, _: Args) -> None:
        """What the earlier life had posted ends with it."""
        self.prefill = replace(self.prefill, epoch=self.prefill.epoch + 1)
        self.prefill_table = self._table(Role.PREFILL)
        self.source_rows = MetadataBuffers(NUM_SLOTS)
        self.legs = {}

    async def prefill_changes(self, args: Args) -> None:
        self.prefill_table.require_resumable(int(args["since"]))
        for transfer in self.prefill_table.changes_since(int(args["since"])):
            self.say(f"#{transfer.sequence} {transfer.room} {transfer.state.name}")

    async def prefill_timeline(self, args: Args) -> None:
        for step in self.prefill_table.get(_room(args)).timeline:
            done = f" {step.progress.pages_done} pages" if step.progress.pages_done else ""
            why = f" {step.reason}" if step.reason else ""
            self.say(f"#{step.sequence} {step.at_s:g} s {step.state.name}{done}{why}")

    # --- both, and what lies between ---

    async def all_sweep(self, _: Args) -> None:
        for table, role in ((self.prefill_table, "prefill"), (self.decode_table, "decode")):
            swept = table.sweep(self.now)
            if swept:
                self.say(f"{role} forgets {_ids(swept)}")

    async def all_deadline(self, _: Args) -> None:
        self.say(f"prefill {next_deadline(self.prefill_table)}, decode {next_deadline(self.decode_table)}")

    async def network_hold(self, _: Args) -> None:
        self.channel.gate.clear()

    async def network_break(self, _: Args) -> None:
        self.channel.fault = TransferFailed("the link is down")

    async def network_land(self, _: Args) -> None:
        """Everything in flight arrives."""
        for channel in self.channels:
            channel.gate.set()
        if self.sends:
            await asyncio.wait(self.sends)
        self._tell_sends()


def _room(args: Args) -> BootstrapRoom:
    return BootstrapRoom(int(args["room"]))


def _prompt(args: Args) -> bytes:
    """A prompt is its length here; `other=1` is another prompt of the same length."""
    return digest_prompt([int(args.get("other", "0"))] * int(args["prompt"]))


def _deadline(args: Args) -> float:
    return float(args.get("deadline", "60"))


def _ids(ids: PageIndices | list[int] | list[BootstrapRoom]) -> str:
    return " ".join(str(value) for value in ids) or "none"


def _slot(slot: Slot) -> str:
    return f"{slot.index}.{slot.generation}"
