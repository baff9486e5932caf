"""Every place where a room can stand still, each made so that the next room does: for tests that end it there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from pd.v1 import transfer_status_pb2, types_pb2

from pd_common.engine.batch import Batch
from pd_common.engine.sampler import SampledToken
from tests.services.byte_engine import Gate
from tests.services.lives import USUAL, Growth
from tests.services.pair import Node, Pair, soon, until
from tests.services.tap import answer_held, held


@dataclass(frozen=True, slots=True)
class Hold:
    """Whether the room has come to where it stands still, and what lets it go on."""

    there: Callable[[], bool]
    go_on: Callable[[], None]


Arrange = Callable[[Pair], Hold]


def at(gate: Gate) -> Hold:
    return Hold(gate.reached.is_set, gate.set)


def both(first: Hold, second: Hold) -> Hold:
    def go_on() -> None:
        first.go_on()
        second.go_on()

    return Hold(lambda: first.there() and second.there(), go_on)


def message_held(node: Node, method: str) -> Hold:
    gate = Gate()
    node.tap.rules[method] = held(gate)
    return at(gate)


def call_held(owner: Any, name: str) -> Hold:
    gate, call = Gate(), getattr(owner, name)

    async def late(*args: Any) -> Any:
        await gate.wait()
        return await call(*args)

    setattr(owner, name, late)
    return at(gate)


def is_success(report: transfer_status_pb2.ReportTransferRequest) -> bool:
    return report.state == types_pb2.TRANSFER_STATE_SUCCESS


# --- on its way from prefill ---


def asking_where_prefill_is(pair: Pair) -> Hold:
    pair.decode.prefills._directory.forget(pair.prefill.instance)
    return message_held(pair.at_prefill, "GetTopology")


def pairing(pair: Pair) -> Hold:
    return message_held(pair.at_prefill, "RegisterReceiver")


def waiting_for_memory(pair: Pair) -> Hold:
    give_back = pair.decode.fill()
    return Hold(lambda: pair.decode.queue.waiting == 1, give_back)


def offer_on_its_way(pair: Pair) -> Hold:
    return message_held(pair.at_prefill, "AllocatePages")


def computing_before_the_offer(pair: Pair) -> Hold:
    pair.prefill.service._optimistic_attempts = 2
    return both(offer_on_its_way(pair), computing(pair))


def parked_before_the_offer(pair: Pair) -> Hold:
    pair.prefill.service._optimistic_attempts = 2
    offer, scheduler = offer_on_its_way(pair), pair.prefill.scheduler
    return Hold(lambda: offer.there() and any(job.sequence.output for job in scheduler._running), offer.go_on)


def offer_answered_late(pair: Pair) -> Hold:
    gate = Gate()
    pair.at_prefill.tap.rules["AllocatePages"] = answer_held(gate)
    return both(at(gate), computing(pair))


def offer_before_the_request(pair: Pair) -> Hold:
    """Prefill's leg never comes."""
    return Hold(lambda: bool(pair.prefill.service._offered), lambda: None)


def waiting_to_be_computed(pair: Pair) -> Hold:
    give_back, scheduler = pair.prefill.fill(), pair.prefill.scheduler
    return Hold(lambda: any(job.promised for job in scheduler._waiting), give_back)


def waiting_for_a_slot(pair: Pair) -> Hold:
    """Of prefill; it has pages there and is offered some."""
    service = pair.prefill.service
    handovers = service._handovers
    taken, handovers._free_slots = handovers._free_slots._value, asyncio.Semaphore(0)

    def give_back() -> None:
        for _ in range(taken):
            handovers._free_slots.release()

    def waits() -> bool:
        return any(room.has_turn and room.offered.done() for room in service._rooms.values())

    return Hold(waits, give_back)


def computing(pair: Pair) -> Hold:
    return at(pair.prefill.engine.shut())


def first_write(pair: Pair) -> Hold:
    gate = pair.faults.hold = Gate()
    return at(gate)


def last_write(pair: Pair) -> Hold:
    """Half done."""
    gate = pair.faults.hold_group = Gate()
    return at(gate)


def blind(pair: Pair) -> None:
    """Decode does not see what has been written; it has to be told."""
    pair.decode.lookout._look = lambda: None  # type: ignore[method-assign]


def success_on_its_way(pair: Pair) -> Hold:
    """Decode is told nothing, and has not looked."""
    gate = Gate()
    blind(pair)
    pair.at_decode.tap.rules["ReportTransfer"] = held(gate, applies=is_success)
    return at(gate)


def committing(pair: Pair) -> Hold:
    return call_held(pair.decode.handoff, "_commit")


# --- answered ---


def success_answered_late(pair: Pair) -> Hold:
    gate = Gate()
    pair.at_decode.tap.rules["ReportTransfer"] = answer_held(gate, applies=is_success)
    return both(at(gate), decoding(pair))


def waiting_to_run(pair: Pair) -> Hold:
    scheduler = pair.decode.scheduler
    answers = scheduler._answers
    most, answers._max_running = answers._max_running, 0

    def go_on() -> None:
        answers._max_running = most
        scheduler._work.set()

    return Hold(lambda: len(answers._answers) == 1, go_on)


def computing_the_prompt(pair: Pair) -> Hold:
    """Decode, alone."""
    return at(pair.decode.engine.shut())


def decoding(pair: Pair) -> Hold:
    gate, engine = Gate(), pair.decode.engine
    step = engine.step

    async def late(batch: Batch) -> tuple[SampledToken, ...]:
        if any(item.sequence.output for item in batch.items):
            await gate.wait()
        return await step(batch)

    engine.step = late  # type: ignore[method-assign]
    return at(gate)


def being_copied(pair: Pair) -> Hold:
    return call_held(pair.decode.engine, "save_pages")


def copy_being_loaded(pair: Pair) -> Hold:
    return call_held(pair.decode.engine, "load_pages")


class Phase(Enum):
    """What either side still has to do with a room."""

    UNMET = auto()
    """Decode does not know the prefill."""
    WAITS = auto()
    """Decode has not offered memory; prefill can be told of its end."""
    HALF = auto()
    """Prefill has the offer, and not the request."""
    SHARED = auto()
    DECIDED = auto()
    """Decode has the pages; prefill has no part in it any more."""
    AGAIN = auto()
    """As `DECIDED`, but for a room of its own with which prefill sends again what was lost."""
    ALONE = auto()


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a room stands still. `retracted`: only when it has lost its pages after the first step of its answer."""

    arrange: Arrange
    phase: Phase
    alone: bool = False
    retracted: bool = False
    growth: Growth = USUAL

    @property
    def name(self) -> str:
        words = ["alone" * self.alone, "retracted" * self.retracted, "no copy" * (self.growth is NO_COPIES)]
        return " ".join([*filter(None, words), self.arrange.__name__])

    async def reached(self, pair: Pair, submit: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Submits the room; returns when it stands still, and gives what lets it go on."""
        if not self.retracted:
            hold = self.arrange(pair)
            await submit()
        else:
            stepping = pair.decode.engine.shut()
            await submit()
            await soon(stepping.reached.wait())
            hold = self.arrange(pair)
            pair.decode.scheduler._retract_every = 1
            stepping.set()
        await until(hold.there)
        pair.decode.scheduler._retract_every = 0
        return hold.go_on


NO_COPIES = Growth(host_pages=0)
_SHARED = (
    computing_before_the_offer,
    parked_before_the_offer,
    offer_on_its_way,
    offer_answered_late,
    waiting_to_be_computed,
    waiting_for_a_slot,
    computing,
    first_write,
    last_write,
    success_on_its_way,
    committing,
)
_COPIED = (being_copied, waiting_for_memory, copy_being_loaded)

STAGES = (
    Stage(asking_where_prefill_is, Phase.UNMET),
    Stage(pairing, Phase.UNMET),
    Stage(waiting_for_memory, Phase.WAITS),
    Stage(offer_before_the_request, Phase.HALF),
    *(Stage(arrange, Phase.SHARED) for arrange in _SHARED),
    *(Stage(arrange, Phase.DECIDED) for arrange in (success_answered_late, waiting_to_run, decoding)),
    *(Stage(arrange, Phase.DECIDED, retracted=True) for arrange in _COPIED),
    *(
        Stage(arrange, Phase.AGAIN, retracted=True, growth=NO_COPIES)
        for arrange in (asking_where_prefill_is, waiting_for_memory, *_SHARED)
    ),
    Stage(waiting_for_memory, Phase.WAITS, alone=True),
    *(Stage(arrange, Phase.ALONE, alone=True) for arrange in (computing_the_prompt, waiting_to_run, decoding)),
    *(Stage(arrange, Phase.ALONE, alone=True, retracted=True) for arrange in _COPIED),
    Stage(waiting_for_memory, Phase.ALONE, alone=True, retracted=True, growth=NO_COPIES),
)
