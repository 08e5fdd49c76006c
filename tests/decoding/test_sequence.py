"""Commits: ragged counts, the image's end, tree paths in the cache, forced columns, what is pending."""

from __future__ import annotations

import pytest
import torch
from foredraft.decoding.cache import Cache
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.sequence import Sequence

from .tabular import fresh_sequence


def cached_sequence(rows: int, count: int, repeat: int, prompt: int = 3, scratch: int = 6) -> Sequence:
    """A sequence whose cache holds its own slot numbers: key = value = hidden = 100 * row + slot."""
    cache = Cache(2, rows * repeat, prompt + count + 1 + scratch + 1, 1, 2, 2, torch.float64, torch.device("cpu"))
    slots = torch.arange(cache.slots, dtype=torch.float64)
    for row in range(rows * repeat):
        for plane in (cache.keys, cache.values):
            plane[:, row] = (100 * row + slots)[:, None, None]
        cache.hidden[row] = (100 * row + slots)[:, None]
    sequence = Sequence(
        tokens=torch.zeros(rows, count + 1, dtype=torch.long),
        length=torch.ones(rows, dtype=torch.long),
        cached=torch.zeros(rows, dtype=torch.long),
        cache=cache,
        grid=(1, count),
        sampling=Sampling(),
        prompt=prompt,
    )
    sequence.refresh()
    return sequence


def test_ragged_counts():
    """Every row appends its own number; what stood before stays; `cached` is what was fed and kept."""
    sequence = fresh_sequence(3, 6)
    sequence.grid = (1, 6)
    added = sequence.commit(torch.tensor([[1, 2, 1], [2, 9, 9], [1, 1, 9]]), torch.tensor([3, 1, 2]), torch.tensor([2, 0, 1]))
    assert added.tolist() == [3, 1, 2]
    assert sequence.length.tolist() == [4, 2, 3] and sequence.cached.tolist() == [3, 1, 2]
    sequence.refresh()
    assert (sequence.low, sequence.high, sequence.pending, sequence.done) == (2, 4, 1, False)
    sequence.commit(torch.tensor([[5, 5], [6, 7], [8, 9]]), torch.tensor([1, 2, 0]), torch.tensor([0, 1, 0]))
    sequence.refresh()
    assert sequence.length.tolist() == [5, 4, 3]
    assert sequence.tokens[0, 1:5].tolist() == [1, 2, 1, 5]
    assert sequence.tokens[1, 1:4].tolist() == [2, 6, 7]
    assert sequence.tokens[2, 1:3].tolist() == [1, 1]


def test_rows_stop_at_the_end():
    """Counts beyond the image are cut; a complete row takes nothing more and keeps its tokens."""
    sequence = fresh_sequence(2, 3)
    added = sequence.commit(torch.tensor([[1, 2, 1, 2, 1], [2, 9, 9, 9, 9]]), torch.tensor([5, 1]), torch.tensor([4, 0]))
    sequence.refresh()
    assert added.tolist() == [3, 1] and sequence.length.tolist() == [4, 2]
    assert sequence.active.tolist() == [False, True] and not sequence.done
    assert sequence.pending == 1
    for _ in range(2):
        added = sequence.commit(torch.tensor([[9, 9], [1, 9]]), torch.tensor([2, 1]), torch.tensor([1, 0]))
        sequence.refresh()
        assert added.tolist() == [0, 1]
    assert sequence.done and sequence.tokens.tolist() == [[0, 1, 2, 1], [0, 2, 1, 1]]
    assert (sequence.cached <= sequence.length - 1).all()


@pytest.mark.parametrize("repeat", [1, 2])
def test_the_accepted_path_moves_to_its_columns(repeat):
    """Path (1, 3, 4) of a tree at length 2: its nodes' slots are copied to slots of columns 2, 3, 4; overlaps included."""
    sequence = cached_sequence(3, 8, repeat)
    for _ in range(1):
        sequence.commit(torch.tensor([[7], [7], [7]]), torch.ones(3, dtype=torch.long), torch.zeros(3, dtype=torch.long))
        sequence.refresh()
    path = torch.tensor([[1, 3, 4], [0, -1, -1], [-1, -1, -1]])
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [8, 0, 0, 0]])
    before = sequence.cache.keys.clone() if sequence.cache is not None else torch.zeros(0)
    sequence.commit(tokens, torch.tensor([4, 2, 1]), torch.tensor([3, 1, 0]), path)
    sequence.refresh()
    assert sequence.length.tolist() == [6, 4, 3] and sequence.cached.tolist() == [5, 3, 2]
    cache = sequence.cache
    assert cache is not None
    base = sequence.prompt + 2
    moved = {0: [base + 1, base + 3, base + 4], 1: [base], 2: []}
    for row in range(3 * repeat):
        kept = moved[row % 3]
        expected = list(range(cache.slots - 1))
        expected[base : base + len(kept)] = kept
        wanted = 100.0 * row + torch.tensor(expected, dtype=torch.float64)
        for plane in (
            cache.keys[0, row, :, 0, 0],
            cache.keys[1, row, :, 0, 1],
            cache.values[1, row, :, 0, 0],
            cache.hidden[row, :, 1],
        ):
            assert torch.equal(plane[: cache.trash], wanted)
    assert not torch.equal(before, cache.keys)


def test_a_path_over_the_end_is_cut():
    """Three accepted nodes, room for two tokens: the copy does not reach past the image, the row is complete."""
    sequence = cached_sequence(1, 2, 1)
    sequence.commit(torch.tensor([[1, 2, 3, 4]]), torch.tensor([4]), torch.tensor([3]), torch.tensor([[1, 2, 4]]))
    sequence.refresh()
    assert sequence.done and sequence.length.tolist() == [3] and sequence.tokens.tolist() == [[0, 1, 2]]
    assert sequence.cached.tolist()[0] <= 2


def test_cache_move_reads_before_it_writes():
    """A chain of overlapping copies, and both directions at once."""
    cache = Cache(1, 2, 8, 1, 1, 1, torch.float64, torch.device("cpu"))
    cache.hidden[0, :, 0], cache.hidden[1, :, 0] = torch.arange(8.0), torch.arange(8.0) + 10
    cache.move(torch.tensor([[2, 3, 4], [5, 4, 7]]), torch.tensor([[1, 2, 3], [4, 5, 7]]))
    assert cache.hidden[0, :, 0].tolist() == [0, 2, 3, 4, 4, 5, 6, 7]
    assert cache.hidden[1, :, 0].tolist() == [10, 11, 12, 13, 15, 14, 16, 17]


def test_unscored_rows_keep_what_is_pending():
    """A skipped row's cache does not grow; several columns are pending until it is scored."""
    sequence = fresh_sequence(3, 6)
    ones = torch.ones(3, dtype=torch.long)
    sequence.commit(torch.tensor([[1], [2], [1]]), ones, ones * 0)
    sequence.refresh()
    scored = torch.tensor([True, False, False])
    sequence.commit(torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([1, 2, 0]), ones * 0, scored=scored)
    sequence.refresh()
    assert sequence.length.tolist() == [3, 4, 2] and sequence.cached.tolist() == [2, 1, 1]
    assert sequence.pending == 3
    sequence.commit(torch.tensor([[1], [1], [1]]), ones, ones * 0)
    sequence.refresh()
    assert sequence.cached.tolist() == [3, 4, 2] and sequence.pending == 1


def test_forced_columns_are_appended_at_once():
    """Directly after what was committed, as far as they run, never further; they are pending, not cached."""
    forced = torch.tensor([-1, 7, 8, -1, -1, 9])
    sequence = fresh_sequence(3, 6, forced)
    assert sequence.length.tolist() == [1, 1, 1]
    added = sequence.commit(torch.tensor([[1, 0, 0], [2, 7, 8], [3, 7, 0]]), torch.tensor([1, 3, 2]), torch.tensor([0, 2, 1]))
    sequence.refresh()
    assert added.tolist() == [3, 3, 3] and sequence.length.tolist() == [4, 4, 4]
    assert sequence.tokens[:, 1:4].tolist() == [[1, 7, 8], [2, 7, 8], [3, 7, 8]]
    assert sequence.cached.tolist() == [1, 3, 2] and sequence.pending == 3
    sequence.commit(torch.tensor([[4, 5], [4, 5], [4, 5]]), torch.tensor([2, 1, 2]), torch.tensor([1, 0, 1]))
    sequence.refresh()
    assert sequence.length.tolist() == [7, 5, 7]
    assert sequence.tokens[0].tolist() == [0, 1, 7, 8, 4, 5, 9]
    assert (sequence.low, sequence.high) == (5, 7)
    done = fresh_sequence(1, 3, torch.tensor([5, 5, 5]))
    assert done.done and done.tokens.tolist() == [[0, 5, 5, 5]]


def test_leading_forced_columns():
    sequence = fresh_sequence(2, 4, torch.tensor([3, 4, -1, -1]))
    assert sequence.length.tolist() == [3, 3] and sequence.pending == 3 and not sequence.done
    assert sequence.tokens[:, 1:3].tolist() == [[3, 4], [3, 4]]
