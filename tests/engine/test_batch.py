from __future__ import annotations

import pytest

from pd_common.engine.batch import Batch, BatchItem
from pd_common.engine.request import Sequence
from pd_common.errors import InternalError
from tests.engine.loop import make_request


def sequence(prompt: list[int], computed: int = 0, output: tuple[int, ...] = ()) -> Sequence:
    made = Sequence(make_request(prompt, seed=1, top_logprobs=2))
    made.computed = computed
    for token_id in output:
        made.append(token_id)
    made.pages.extend([9, 4])
    return made


def test_items_are_flattened_in_order() -> None:
    chunk = sequence([10, 11, 12, 13, 14], computed=1)
    decoding = sequence([20, 21], computed=2, output=(22,))
    last_chunk = sequence([30, 31, 32], computed=1)

    batch = Batch(
        [
            BatchItem(chunk, 1, 3, samples=False),
            BatchItem(decoding, 2, 3, samples=True),
            BatchItem(last_chunk, 1, 3, samples=True),
        ]
    )

    assert batch.input_ids.tolist() == [11, 12, 22, 31, 32]
    assert batch.positions.tolist() == [1, 2, 2, 1, 2]
    assert batch.logits_rows.tolist() == [2, 4]
    assert [(rows.first, rows.start, rows.end) for rows in batch.rows] == [(0, 1, 3), (2, 2, 3), (3, 1, 3)]
    assert [(draw.position, draw.generated, draw.top_logprobs) for draw in batch.draws] == [(3, 1, 2), (3, 0, 2)]


def test_a_batch_is_a_snapshot() -> None:
    """The event loop goes on while the engine thread computes: what it changes must not reach the step."""
    running = sequence([1, 2, 3])
    batch = Batch([BatchItem(running, 0, 3, samples=True)])
    running.pages.clear()
    running.append(4)
    assert batch.rows[0].pages.tolist() == [9, 4]
    assert batch.input_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("start", "end", "samples"),
    [(0, 2, False), (2, 3, False), (1, 1, False), (1, 6, False), (1, 3, True)],
    ids=["already computed", "leaves a gap", "empty", "beyond the end", "samples before the end"],
)
def test_spans_that_would_corrupt_the_pool_are_refused(start: int, end: int, *, samples: bool) -> None:
    with pytest.raises(InternalError):
        Batch([BatchItem(sequence([10, 11, 12, 13, 14], computed=1), start, end, samples)])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InternalError):
        Batch([])
