"""Whatever ends a room, and wherever it stands just then: everything that it had on both sides is back afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from pd_common.generation import GenerationRequest
from pd_common.types import Role
from tests.services.byte_engine import answer_tokens
from tests.services.lives import Life
from tests.services.pair import Client, Pair, forget_finished, running, soon, turns, until
from tests.services.stages import STAGES, Phase, Stage, waiting_for_memory, waiting_to_be_computed

ROOM, NEXT = 7, 8
DEADLINE_S = 30.0
"""Less than every other limit."""
PATIENCE_S = 1000.0
"""More than every other limit."""
LIMIT_S = 301.0
"""After that all limits but the deadline have passed."""


@dataclass(slots=True)
class Scene:
    """A room that stands still. `number` is that of the room between both sides: its own, or that of its refetch."""

    pair: Pair
    has_leg: bool
    number: int = ROOM
    clients: dict[Role, Client] = field(default_factory=dict)
    """Who submits each leg."""
    calls: list[asyncio.Future[None]] = field(default_factory=list)
    """What is answered only when the room goes on."""

    async def submit(self, request: GenerationRequest) -> None:
        if request.bootstrap is not None and self.has_leg:
            await self.clients[Role.PREFILL].submit(request)
        await self.clients[Role.DECODE].submit(request)

    def life(self, role: Role) -> Life:
        return self.pair.prefill if role is Role.PREFILL else self.pair.decode

    def is_live(self, role: Role) -> bool:
        """For the record of this side."""
        return any(transfer.room == self.number for transfer in self.life(role).transfers.live())


Act = Callable[[Scene], Awaitable[None]]
ANY = frozenset(Phase)
PAIRED = ANY - {Phase.UNMET, Phase.ALONE}
OFFERED = frozenset({Phase.HALF, Phase.SHARED})
BEFORE_THE_DECISION = frozenset({Phase.UNMET, Phase.WAITS, Phase.HALF, Phase.SHARED})
NONE = frozenset[Phase]()


@dataclass(frozen=True, slots=True)
class End:
    """What ends a room. The answer fails in some phases, may fail in others, and is complete in the rest.

    It `applies` in some phases, and only to what waits as in `waits_as`, if given. A `mortal` client has one room.
    """

    act: Act
    fails: frozenset[Phase]
    may_fail: frozenset[Phase] = NONE
    applies: frozenset[Phase] = ANY
    roles: tuple[Role, ...] = (Role.DECODE,)
    mortal: bool = False
    timeout_s: float = DEADLINE_S
    waits_as: object = None

    @property
    def name(self) -> str:
        return self.act.__name__

    def concerns(self, stage: Stage) -> bool:
        waits = self.waits_as is None or self.waits_as is stage.arrange
        return waits and stage.phase in self.applies and not (stage.alone and self.roles == (Role.PREFILL,))


async def decodes_client_leaves(scene: Scene) -> None:
    await leave(scene, Role.DECODE)


async def prefills_client_leaves(scene: Scene) -> None:
    await leave(scene, Role.PREFILL)
    await over_on_prefill(scene)


async def both_clients_leave(scene: Scene) -> None:
    """As when the router dies."""
    await asyncio.gather(decodes_client_leaves(scene), prefills_client_leaves(scene))


async def leave(scene: Scene, role: Role) -> None:
    await scene.clients[role].stop()
    await until(lambda: "mortal" not in scene.life(role).hub._queues)


async def aborted_on_decode(scene: Scene) -> None:
    await scene.pair.at_decode.client.abort(ROOM)


async def aborted_on_prefill(scene: Scene) -> None:
    """Whoever calls is answered when nothing is written any more."""
    calling = asyncio.ensure_future(scene.pair.at_prefill.client.abort(scene.number))
    scene.calls.append(calling)
    await until(lambda: calling.done() or not scene.is_live(Role.PREFILL))


async def aborted_on_both(scene: Scene) -> None:
    await asyncio.gather(aborted_on_prefill(scene), aborted_on_decode(scene))


async def deadline_passes(scene: Scene) -> None:
    now = time.monotonic() + DEADLINE_S + 1.0
    for role in Role.DECODE, Role.PREFILL:
        end_overdue(scene.life(role), now)
        await scene.life(role).service.tend(now)


async def decode_has_waited_too_long(scene: Scene) -> None:
    end_overdue(scene.pair.decode, time.monotonic() + LIMIT_S)


async def prefill_has_waited_too_long(scene: Scene) -> None:
    end_overdue(scene.pair.prefill, time.monotonic() + LIMIT_S)
    await over_on_prefill(scene)


async def over_on_prefill(scene: Scene) -> None:
    """Once everything is written it is decode that says how the room ends."""
    await until(lambda: not scene.is_live(Role.PREFILL))


def end_overdue(life: Life, now: float) -> None:
    for room, error in life.transfers.overdue(now).items():
        life.service.abandon(room, error)


async def decodes_queue_is_too_slow(scene: Scene) -> None:
    scene.pair.decode.service._send_overdue_away(time.monotonic() + LIMIT_S)


async def prefills_queue_is_too_slow(scene: Scene) -> None:
    scene.pair.prefill.service._send_overdue_away(time.monotonic() + LIMIT_S)


async def decodes_step_fails(scene: Scene) -> None:
    scene.pair.decode.engine.failure = RuntimeError("broken")


async def prefills_step_fails(scene: Scene) -> None:
    scene.pair.prefill.engine.failure = RuntimeError("broken")


async def prefill_is_lost(scene: Scene) -> None:
    prefills = scene.pair.decode.prefills
    for prefill in tuple(prefills._paired.values()):
        await prefills.forget(prefill, "no beat")


async def decode_is_lost(scene: Scene) -> None:
    receivers = scene.pair.prefill.receivers
    for receiver in tuple(receivers._by_instance.values()):
        await receivers.drop(receiver, "no beat")


BOTH, OF_PREFILL = (Role.DECODE, Role.PREFILL), (Role.PREFILL,)
IN_TIME = BEFORE_THE_DECISION | {Phase.AGAIN}
HAS_LEG = ANY - {Phase.HALF, Phase.AGAIN}
ENDS = (
    End(decodes_client_leaves, fails=ANY, mortal=True),
    End(prefills_client_leaves, BEFORE_THE_DECISION, applies=HAS_LEG, roles=OF_PREFILL, mortal=True),
    End(both_clients_leave, fails=ANY, applies=HAS_LEG - {Phase.ALONE}, roles=BOTH, mortal=True),
    End(aborted_on_decode, fails=ANY),
    End(aborted_on_prefill, fails=BEFORE_THE_DECISION, roles=OF_PREFILL),
    End(aborted_on_both, fails=ANY, roles=BOTH, applies=ANY - {Phase.ALONE}),
    End(deadline_passes, fails=ANY, roles=BOTH),
    End(decode_has_waited_too_long, BEFORE_THE_DECISION, applies=IN_TIME, timeout_s=PATIENCE_S),
    End(prefill_has_waited_too_long, BEFORE_THE_DECISION, applies=IN_TIME, roles=OF_PREFILL, timeout_s=PATIENCE_S),
    End(decodes_queue_is_too_slow, ANY, applies=BEFORE_THE_DECISION, waits_as=waiting_for_memory, timeout_s=PATIENCE_S),
    End(
        prefills_queue_is_too_slow,
        BEFORE_THE_DECISION,
        roles=OF_PREFILL,
        waits_as=waiting_to_be_computed,
        timeout_s=PATIENCE_S,
    ),
    End(decodes_step_fails, fails=NONE, may_fail=ANY, applies=ANY - {Phase.HALF}),
    End(
        prefills_step_fails,
        fails=NONE,
        may_fail=BEFORE_THE_DECISION,
        applies=ANY - {Phase.HALF},
        roles=OF_PREFILL,
    ),
    End(prefill_is_lost, OFFERED, may_fail=frozenset({Phase.WAITS}), applies=PAIRED, roles=OF_PREFILL),
    End(decode_is_lost, NONE, may_fail=BEFORE_THE_DECISION, applies=PAIRED, roles=OF_PREFILL),
)
TABLE = [
    pytest.param(stage, end, id=f"{stage.name}-{end.name}") for stage in STAGES for end in ENDS if end.concerns(stage)
]


@pytest.mark.parametrize(("stage", "end"), TABLE)
async def test_nothing_is_left(stage: Stage, end: End) -> None:
    async with running(Pair(growth=stage.growth)) as pair:
        scene = Scene(pair, has_leg=stage.phase is not Phase.HALF)
        for role, node in (Role.PREFILL, pair.at_prefill), (Role.DECODE, pair.at_decode):
            mortal = end.mortal and role in end.roles
            scene.clients[role] = await node.new_client("mortal") if mortal else node.client
        request = pair.request(ROOM, prompt_tokens=20, new_tokens=20, timeout_s=end.timeout_s)
        request = replace(request, bootstrap=None) if stage.alone else request
        go_on = await stage.reached(pair, lambda: scene.submit(request))
        await ended(scene, stage, end, go_on)
        await pair.settled()
        if not (end.mortal and Role.DECODE in end.roles):
            await assert_outcome(scene, stage, end)
        pair.prefill.engine.failure = pair.decode.engine.failure = None
        await pair.serve(NEXT)
        await pair.settled()
        for life in pair.prefill, pair.decode:
            forget_finished(life.transfers)


async def ended(scene: Scene, stage: Stage, end: End, go_on: Callable[[], None]) -> None:
    """It is ended where it stands; then whatever stood still goes on."""
    pair = scene.pair
    if stage.phase is Phase.AGAIN:
        (scene.number,) = (number for number in pair.decode.service._rooms if number != ROOM)
    await soon(end.act(scene))
    if Role.DECODE in end.roles and stage.phase in end.fails:  # it does not wait for what stands still
        await until(lambda: not scene.is_live(Role.DECODE))
    await turns()
    if stage.phase is Phase.UNMET and not scene.is_live(Role.DECODE):  # nobody but the router can tell prefill
        await soon(pair.at_prefill.client.abort(ROOM))
    go_on()
    await soon(asyncio.gather(*scene.calls))


async def assert_outcome(scene: Scene, stage: Stage, end: End) -> None:
    """The whole answer, or how far it came and why no further."""
    *_, last = outputs = await scene.pair.at_decode.client.outputs(ROOM)
    tokens = tuple(token for output in outputs for token in output.token_ids)
    expected = answer_tokens(20, 20)
    if last.error is None:
        assert tokens == expected
        assert stage.phase not in end.fails
    else:
        assert tokens == expected[: len(tokens)]
        assert stage.phase in end.fails | end.may_fail, last.error
