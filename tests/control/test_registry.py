from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from pd_common.control.registry import Registry
from pd_common.errors import InvalidRequest, LayoutMismatch, PdError, StaleInstance, TopologyIncomplete
from pd_common.types import BootstrapRoom, Instance, KvLayout, RankInfo, RankPosition, Role
from tests.control.serving import DATA_PLANE, LAYOUT

LEASE_S = 10.0
DP_ENTRY_S = 120.0

OTHER_LAYOUT = replace(LAYOUT, page_size=64)
ALONE = RankPosition()
TP0, TP1 = RankPosition(tp_rank=0, tp_size=2), RankPosition(tp_rank=1, tp_size=2)
DP0 = RankPosition(dp_rank=0, dp_size=2)


def rank(name: str, epoch: int = 1, position: RankPosition = ALONE, layout: KvLayout = LAYOUT) -> RankInfo:
    return RankInfo(Instance(name, epoch), Role.PREFILL, position, f"{name}:8998", layout, DATA_PLANE)


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
    return tuple(shown.instance.instance_id for shown in registry.topology(now))


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
    registry = Registry(LEASE_S, DP_ENTRY_S)
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
        Registry().register(rank("a", 1, position), 0.0)
    assert raised.value.metadata["field"] == f"{axis}_rank"


def test_ranks_are_shown_in_the_order_of_their_positions() -> None:
    grid = [
        RankPosition(dp_rank=dp, dp_size=2, tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2)
        for dp in range(2)
        for tp in range(2)
        for pp in range(2)
    ]
    registry = Registry()
    for number, position in reversed(list(enumerate(grid))):
        assert registry.complete_or_empty(0.0) == ()
        registry.register(rank(f"r{number}", 1, position), 0.0)
    assert [shown.position for shown in registry.topology(0.0)] == grid


def test_what_differs_and_what_is_missing_is_said() -> None:
    registry = Registry()
    registry.register(TP_A, 0.0)
    with pytest.raises(LayoutMismatch) as mismatch:
        registry.register(replace(TP_B, layout=OTHER_LAYOUT), 0.0)
    assert mismatch.value.metadata == {"field": "page_size", "mine": "64", "theirs": "16"}
    with pytest.raises(TopologyIncomplete) as incomplete:
        registry.topology(0.0)
    assert incomplete.value.metadata == {"registered": "1", "expected": "2"}
    registry.register(TP_B, 0.0)
    with pytest.raises(StaleInstance) as stale:
        registry.register(replace(TP_B, instance=Instance("old", 0)), 0.0)
    assert stale.value.metadata == {"expected": "1", "got": "0"}


def test_an_entry_of_a_data_parallel_rank_expires() -> None:
    registry = Registry(LEASE_S, DP_ENTRY_S)
    first, second, unknown = BootstrapRoom(1), BootstrapRoom(2), BootstrapRoom(3)
    registry.register_dp_rank(first, 4, 0.0)
    registry.register_dp_rank(second, 5, 60.0)
    assert registry.query_dp_ranks([first, second, unknown], 119.0) == {first: 4, second: 5}
    assert registry.query_dp_ranks([first, second, unknown], 120.0) == {second: 5}
    registry.register_dp_rank(second, 6, 130.0)
    assert registry.query_dp_ranks([second], 249.0) == {second: 6}
    assert registry.query_dp_ranks([second], 250.0) == {}
