from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from pd_common.control import registry as registry_module
from pd_common.control.registry import MAX_RANKS, Registry
from pd_common.errors import InvalidRequest, LayoutMismatch, PdError, StaleInstance, TopologyIncomplete
from pd_common.types import BootstrapRoom, Instance, KvLayout, RankInfo, RankPosition, Role
from tests.control.serving import DATA_PLANE, LAYOUT

LEASE_S = 10.0
DP_ENTRY_S = 120.0
FIRST_EPOCH = 1_000

OTHER_LAYOUT = replace(LAYOUT, page_size=64)
ALONE = RankPosition()
TP0, TP1 = RankPosition(tp_rank=0, tp_size=2), RankPosition(tp_rank=1, tp_size=2)
DP0 = RankPosition(dp_rank=0, dp_size=2)


def rank(name: str, epoch: int = 1, position: RankPosition = ALONE, layout: KvLayout = LAYOUT) -> RankInfo:
    return RankInfo(Instance(name, epoch), Role.PREFILL, position, f"{name}:8998", layout, DATA_PLANE)


def new_registry() -> Registry:
    return Registry(Role.PREFILL, FIRST_EPOCH, lease_s=LEASE_S, dp_entry_s=DP_ENTRY_S)


Act = Callable[[Registry, float], object]
Outcome = type[PdError] | tuple[str, ...] | None


def register(who: RankInfo) -> Act:
    return lambda registry, now: registry.register(who, now)


def renew(who: RankInfo) -> Act:
    return lambda registry, now: registry.renew(who.instance, now)


def unregister(who: RankInfo) -> Act:
    return lambda registry, _: registry.unregister(who.instance)


def look(registry: Registry, now: float) -> tuple[str, ...]:
    """Names of the ranks in the topology."""
    return tuple(shown.instance.instance_id for shown in registry.complete_topology(now).ranks)


@dataclass(frozen=True)
class Step:
    """At `now` somebody does something; what comes of it is the topology's names, an error, or nothing."""

    now: float
    act: Act
    outcome: Outcome = None


A, B = rank("a"), rank("b")
A_AGAIN = rank("a", epoch=2)
TP_A, TP_B = rank("a", 1, TP0), rank("b", 1, TP1)
TP_A_AGAIN, TP_B_AGAIN = rank("c", 2, TP0), rank("d", 2, TP1)
A_MOVED = replace(A, control_address="elsewhere:8998")
AT_A, AT_A_BEFORE = (
    replace(rank("c", 3, TP1), control_address="a:8998"),
    replace(rank("c", 0, TP1), control_address="a:8998"),
)

STORIES: dict[str, list[Step]] = {
    "nobody is there": [Step(0, look, TopologyIncomplete)],
    "one rank is a whole grid": [Step(0, register(A)), Step(0, look, ("a",))],
    "a lease ends at its time": [
        Step(0, register(A)),
        Step(9.9, look, ("a",)),
        Step(10, look, TopologyIncomplete),
        Step(10, renew(A), StaleInstance),
        Step(10, register(A)),
        Step(10, look, ("a",)),
    ],
    "a renewed lease counts from the renewal": [
        Step(0, register(A)),
        Step(9, renew(A)),
        Step(18.9, look, ("a",)),
        Step(19, look, TopologyIncomplete),
    ],
    "registering again renews": [Step(0, register(A)), Step(9, register(A)), Step(18, look, ("a",))],
    "a stranger cannot renew": [
        Step(0, register(A)),
        Step(0, renew(B), StaleInstance),
        Step(10, look, TopologyIncomplete),
    ],
    "incomplete until the last rank has come": [
        Step(0, register(TP_B)),
        Step(0, look, TopologyIncomplete),
        Step(1, register(TP_A)),
        Step(1, look, ("a", "b")),
    ],
    "incomplete again when one lease ends": [
        Step(0, register(TP_A)),
        Step(5, register(TP_B)),
        Step(9, look, ("a", "b")),
        Step(10, look, TopologyIncomplete),
        Step(11, register(TP_A)),
        Step(11, look, ("a", "b")),
    ],
    "a restart replaces its earlier life at once": [
        Step(0, register(A)),
        Step(1, register(A_AGAIN)),
        Step(1, look, ("a",)),
        Step(1, renew(A), StaleInstance),
        Step(1, renew(A_AGAIN)),
    ],
    "an earlier life is refused, and changes nothing": [
        Step(0, register(A_AGAIN)),
        Step(1, register(A), StaleInstance),
        Step(1, renew(A_AGAIN)),
    ],
    "an earlier life cannot unregister its successor": [
        Step(0, register(A)),
        Step(1, register(A_AGAIN)),
        Step(1, unregister(A)),
        Step(1, look, ("a",)),
    ],
    "of two processes that claim one position at once the first stays": [
        Step(0, register(A)),
        Step(0, register(B), StaleInstance),
        Step(0, renew(A)),
        Step(0, look, ("a",)),
    ],
    "a process may change its address": [
        Step(0, register(A)),
        Step(1, register(A_MOVED)),
        Step(1, renew(A)),
        Step(1, look, ("a",)),
    ],
    "a process has one position": [
        Step(0, register(TP_A)),
        Step(1, register(replace(TP_A, position=TP1)), InvalidRequest),
        Step(1, register(replace(TP_A, position=TP1, control_address="other:1")), InvalidRequest),
        Step(1, register(TP_B)),
        Step(1, look, ("a", "b")),
    ],
    "a restart at the same address takes another position, and its earlier life is gone": [
        Step(0, register(TP_A)),
        Step(1, register(AT_A)),
        Step(1, look, TopologyIncomplete),
        Step(1, renew(TP_A), StaleInstance),
        Step(1, register(TP_A), StaleInstance),
        Step(2, register(replace(TP_A, instance=Instance("d", 2), control_address="d:1"))),
        Step(2, look, ("d", "c")),
    ],
    "an earlier life at the same address is refused wherever it stands": [
        Step(0, register(TP_A)),
        Step(0, register(AT_A_BEFORE), StaleInstance),
        Step(0, register(TP_B)),
        Step(0, look, ("a", "b")),
    ],
    "a directory of prefill takes no decode": [
        Step(0, register(replace(A, role=Role.DECODE)), InvalidRequest),
        Step(0, look, TopologyIncomplete),
    ],
    "ranks restart one after the other": [
        Step(0, register(TP_A)),
        Step(0, register(TP_B)),
        Step(1, register(TP_A_AGAIN)),
        Step(1, look, ("c", "b")),
        Step(2, register(TP_B_AGAIN)),
        Step(2, look, ("c", "d")),
    ],
    "ranks of one service have one layout": [
        Step(0, register(TP_A)),
        Step(0, register(replace(TP_B, layout=OTHER_LAYOUT)), LayoutMismatch),
        Step(0, look, TopologyIncomplete),
        Step(0, register(TP_B)),
        Step(0, look, ("a", "b")),
    ],
    "a layout is forgotten with the last lease": [
        Step(0, register(TP_A)),
        Step(10, register(replace(TP_B, layout=OTHER_LAYOUT))),
    ],
    "a restart may bring a new layout when it is alone": [
        Step(0, register(A)),
        Step(1, register(replace(A_AGAIN, layout=OTHER_LAYOUT))),
    ],
    "ranks of one service have one grid": [Step(0, register(TP_A)), Step(0, register(B), LayoutMismatch)],
    "two grids of the same size are two grids": [
        Step(0, register(rank("a", 1, DP0))),
        Step(0, register(TP_B), LayoutMismatch),
        Step(0, look, TopologyIncomplete),
    ],
    "who unregisters is gone, twice is no error": [
        Step(0, register(A)),
        Step(0, unregister(A)),
        Step(0, look, TopologyIncomplete),
        Step(0, unregister(A)),
        Step(0, renew(A), StaleInstance),
    ],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_story(story: list[Step]) -> None:
    registry = new_registry()
    for number, step in enumerate(story):
        outcome: object
        try:
            outcome = step.act(registry, step.now)
        except PdError as error:
            outcome = type(error)
        assert outcome == step.outcome, f"step {number} at {step.now}"


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
@pytest.mark.parametrize(("place", "size"), [(1, 1), (2, 2), (0, 0), (-1, 1)])
def test_a_position_outside_its_grid_is_refused_by_its_axis(axis: str, place: int, size: int) -> None:
    position = RankPosition(**{f"{axis}_rank": place, f"{axis}_size": size})
    with pytest.raises(InvalidRequest) as raised:
        new_registry().register(rank("a", 1, position), 0.0)
    assert raised.value.metadata["field"] == f"{axis}_rank"


def test_ranks_are_shown_in_the_order_of_their_positions() -> None:
    grid = [
        RankPosition(dp_rank=dp, dp_size=2, tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2)
        for dp in range(2)
        for tp in range(2)
        for pp in range(2)
    ]
    registry = new_registry()
    for number, position in reversed(list(enumerate(grid))):
        assert registry.topology(0.0).ranks == ()
        registry.register(rank(f"r{number}", 1, position), 0.0)
    assert [shown.position for shown in registry.topology(0.0).ranks] == grid


def test_what_differs_and_what_is_missing_is_said() -> None:
    registry = new_registry()
    registry.register(TP_A, 0.0)
    with pytest.raises(LayoutMismatch) as mismatch:
        registry.register(replace(TP_B, layout=OTHER_LAYOUT), 0.0)
    assert mismatch.value.metadata == {"field": "page_size", "mine": "64", "theirs": "16"}
    with pytest.raises(TopologyIncomplete) as incomplete:
        registry.complete_topology(0.0)
    assert incomplete.value.metadata == {"registered": "1", "expected": "2"}
    registry.register(TP_B, 0.0)
    with pytest.raises(StaleInstance) as stale:
        registry.register(replace(TP_B, instance=Instance("old", 0)), 0.0)
    assert stale.value.metadata == {"expected": "1", "got": "0"}
    assert "b:8998 is registered as dp_rank 0, tp_rank 1, pp_rank 0; processes that run" in stale.value.message


@pytest.mark.parametrize("address", ["", "a", "a:0", "a:65536", "0.0.0.0:1", "[::]:1", "http://a:1", "a:1 "])
def test_an_address_that_nobody_can_connect_to_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        new_registry().register(replace(A, control_address=address), 0.0)
    assert raised.value.metadata == {"field": "rank.control_address"}


def test_another_role_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidRequest, match="directory of prefill") as raised:
        new_registry().register(replace(A, role=Role.DECODE), 0.0)
    assert raised.value.metadata == {"field": "rank.role"}


def test_a_grid_has_an_end() -> None:
    sizes = {"dp_size": 2**16, "tp_size": 2**16}
    with pytest.raises(InvalidRequest, match=f"more than {MAX_RANKS} ranks"):
        new_registry().register(rank("a", 1, RankPosition(**sizes)), 0.0)


CHANGES: dict[str, tuple[Act, bool]] = {
    "a rank comes again": (register(TP_B), False),
    "a lease is renewed": (renew(TP_A), False),
    "somebody looks": (look, False),
    "a rank goes": (unregister(TP_A), True),
    "a rank is replaced": (register(TP_A_AGAIN), True),
    "a rank has another address": (register(replace(TP_A, control_address="elsewhere:1")), True),
    "who is not there goes": (unregister(A_AGAIN), False),
}


@pytest.mark.parametrize(("act", "changes"), CHANGES.values(), ids=CHANGES.keys())
def test_the_epoch_of_the_topology_rises_with_the_set_of_ranks_and_only_then(act: Act, changes: bool) -> None:
    registry = new_registry()
    seen = [registry.topology(0.0).epoch]
    for who in (TP_A, TP_B):
        registry.register(who, 0.0)
        seen.append(registry.topology(0.0).epoch)
    assert seen == sorted(set(seen))
    assert seen[0] >= FIRST_EPOCH
    act(registry, 1.0)
    assert (registry.topology(1.0).epoch > seen[-1]) is changes


def test_the_end_of_a_lease_is_a_change_and_foretold() -> None:
    registry = new_registry()
    assert registry.next_end() is None
    registry.register(TP_A, 0.0)
    registry.register(TP_B, 5.0)
    assert registry.next_end() == LEASE_S
    complete = registry.topology(9.9)
    assert registry.topology(LEASE_S).epoch > complete.epoch
    assert registry.next_end() == 5.0 + LEASE_S
    registry.renew(TP_B.instance, 12.0)
    assert registry.next_end() == 12.0 + LEASE_S


def test_what_is_refused_changes_nothing() -> None:
    registry = new_registry()
    registry.register(TP_A, 0.0)
    registry.register(TP_B, 0.0)
    before = registry.topology(0.0)
    for wrong in (replace(TP_A_AGAIN, layout=OTHER_LAYOUT), rank("e", 9, DP0), rank("e", 0, TP0)):
        with pytest.raises(PdError):
            registry.register(wrong, 1.0)
    assert registry.topology(1.0) == before


GRID_OF_8 = rank("a", 1, RankPosition(dp_rank=0, dp_size=8))


def dp_registry() -> Registry:
    """A grid of eight data-parallel ranks, of which the first renews its lease for ever."""
    registry = new_registry()
    registry.lease_s = 1e9
    registry.register(GRID_OF_8, 0.0)
    return registry


def test_an_entry_of_a_data_parallel_rank_expires() -> None:
    registry = dp_registry()
    first, second, unknown = BootstrapRoom(1), BootstrapRoom(2), BootstrapRoom(3)
    registry.register_dp_rank(first, 4, 0.0)
    registry.register_dp_rank(second, 5, 60.0)
    assert registry.query_dp_ranks([first, second, unknown], 119.0) == {first: 4, second: 5}
    assert registry.query_dp_ranks([first, second, unknown], 120.0) == {second: 5}
    registry.register_dp_rank(second, 6, 130.0)
    assert registry.query_dp_ranks([second], 249.0) == {second: 6}
    assert registry.query_dp_ranks([second], 250.0) == {}


def test_a_data_parallel_rank_lies_in_the_grid() -> None:
    room, registry = BootstrapRoom(1), new_registry()
    with pytest.raises(TopologyIncomplete):
        registry.register_dp_rank(room, 0, 0.0)
    registry.register(GRID_OF_8, 0.0)
    with pytest.raises(InvalidRequest) as raised:
        registry.register_dp_rank(room, 8, 0.0)
    assert raised.value.metadata == {"field": "dp_rank"}
    assert registry.query_dp_ranks([room], 0.0) == {}
    registry.register_dp_rank(room, 7, 0.0)
    assert registry.query_dp_ranks([room], 0.0) == {room: 7}


def test_the_oldest_entries_are_dropped_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_DP_ENTRIES", 3)
    registry = dp_registry()
    first, *later = rooms = [BootstrapRoom(number) for number in range(1, 5)]
    for room in (first, *later[:2], first):  # told again it is the youngest
        registry.register_dp_rank(room, 0, 0.0)
    registry.register_dp_rank(later[2], 0, 0.0)
    assert set(registry.query_dp_ranks(rooms, 0.0)) == {first, *later[1:]}
