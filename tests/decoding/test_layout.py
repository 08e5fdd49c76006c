"""Slots, columns, masks and trees against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from foredraft.decoding.layout import ancestors, causal_mask, fed_columns, fed_slots, tree_mask
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.tree import Tree, balanced_paths, chain_tree, rank_dynamic, static_tree
from foredraft.decoding.types import Draft
from torch import Tensor

from .tiny import TARGET, UNEQUAL, begin


def random_parents(rows: int, nodes: int, seed: int) -> Tensor:
    """Trees whose parents stand before their children, one per row."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(-1, max(node, 1), (rows,), generator=generator).clamp(max=node - 1) for node in range(nodes)]
    return torch.stack(columns, 1)


def line(parents: list[int], node: int) -> list[int]:
    """A node and its ancestors."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 20])
def test_tree_against_brute_force(nodes):
    """Ancestors, depth, sibling order, children, levels: a tree per row."""
    parents = random_parents(6, nodes, nodes)
    tree = Tree(parents)
    assert torch.equal(tree.seen, ancestors(parents))
    for row, above in enumerate(parents.tolist()):
        for node in range(nodes):
            path = line(above, node)
            assert tree.seen[row, node].nonzero()[:, 0].tolist() == sorted(path)
            assert int(tree.depth[row, node]) == len(path)
            assert int(tree.order[row, node]) == above[:node].count(above[node])
        for node in range(-1, nodes):
            mine = [child for child in range(nodes) if above[child] == node]
            listed = tree.children[row, node + 1].tolist()
            assert listed[: len(mine)] == mine and set(listed[len(mine) :]) <= {-1}
    assert tree.levels == int(tree.depth.max())


def test_deep_chain_and_empty_tree():
    """Doubling reaches the root of a chain of any length."""
    for nodes in (1, 2, 31, 64, 100):
        seen = ancestors(torch.arange(-1, nodes - 1)[None])[0]
        assert torch.equal(seen, torch.ones(nodes, nodes).tril().bool())
        assert chain_tree(nodes).levels == nodes
    empty = Tree(torch.zeros(1, 0, dtype=torch.long))
    assert empty.levels == 0 and empty.children.shape == (1, 1, 0) and empty.depth.shape == (1, 0)


def test_static_trees():
    """Nodes in order of depth, parents before children, siblings in test order."""
    tree = static_tree([(1, 0), (0,), (0, 0), (1,), (0, 1), (0, 0, 0)])
    assert tree.parents.tolist() == [[-1, -1, 0, 0, 1, 2]]
    assert tree.depth.tolist() == [[1, 1, 2, 2, 2, 3]] and tree.levels == 3
    assert tree.order.tolist() == [[0, 1, 0, 1, 0, 0]]
    assert balanced_paths((2, 1)) == [(0,), (1,), (0, 0), (1, 0)]
    assert static_tree(balanced_paths((3, 2, 1))).parents.shape == (1, 3 + 6 + 6)
    with pytest.raises(ValueError, match=r"\(0, 1, 0\) has no parent \(0, 1\)"):
        static_tree([(0,), (0, 0), (0, 1, 0)])
    with pytest.raises(ValueError, match=r"\(2,\) skips its sibling \(1,\)"):
        static_tree([(0,), (2,)])


def test_ranking_keeps_the_best_and_their_parents():
    """EAGLE-2's re-ranking, against sorting by hand; ties between parent and child included."""
    generator = torch.Generator().manual_seed(0)
    for seed, total in itertools.product(range(20), (1, 3, 6, 12, 30)):
        parents = random_parents(4, 12, seed)
        # Confidences of 1 make a child tie with its parent.
        step = torch.rand(4, 12, generator=generator).log() * (torch.rand(4, 12, generator=generator) < 0.5)
        scores = step.clone()
        for node in range(12):
            above = parents[:, node]
            parent = scores.gather(1, above.clamp(min=0)[:, None])[:, 0]
            scores[:, node] = step[:, node] + torch.where(above >= 0, parent, 0.0)
        kept, new = rank_dynamic(scores, parents, total)
        assert kept.shape == new.shape == (4, min(total, 12))
        assert (kept.diff(dim=1) > 0).all()
        for row in range(4):
            chosen, above = kept[row].tolist(), parents[row].tolist()
            worst = min(float(scores[row, node]) for node in chosen)
            left = [float(scores[row, node]) for node in range(12) if node not in chosen]
            assert all(value <= worst for value in left)
            for node, parent in zip(chosen, new[row].tolist(), strict=True):
                assert parent == (chosen.index(above[node]) if above[node] >= 0 else -1)


def test_ranking_survives_impossible_nodes():
    """Scores of -inf (a one-hot draft) tie too: parents stay before children."""
    scores = torch.tensor([[0.0, -torch.inf, -torch.inf, 0.0, -torch.inf, -torch.inf]])
    parents = torch.tensor([[-1, -1, -1, 0, 0, 1]])
    for total in range(1, 7):
        kept, new = rank_dynamic(scores, parents, total)
        assert (new < torch.arange(total)).all()
        assert kept[0, 0] == 0


def test_fed_columns_and_slots():
    """Pending columns end at length - 1; node k sits at slot prompt + length + k and column length - 1 + depth."""
    length, depth = torch.tensor([1, 5, 3]), torch.tensor([[1, 1, 2]])
    assert fed_columns(length, 2, depth).tolist() == [[0, 0, 1, 1, 2], [3, 4, 5, 5, 6], [1, 2, 3, 3, 4]]
    assert fed_slots(length, 2, 3, 10).tolist() == [[10, 10, 11, 12, 13], [13, 14, 15, 16, 17], [11, 12, 13, 14, 15]]
    assert fed_columns(length, 1, torch.zeros(1, 0, dtype=torch.long)).tolist() == [[0], [4], [2]]
    assert fed_slots(length, 1, 0, 0).tolist() == [[0], [4], [2]]


def test_causal_mask():
    slots, pad = torch.tensor([[3, 4], [6, 7]]), torch.tensor([0, 2])
    mask = causal_mask(slots, pad, 9, torch.float64)[:, 0]
    for row, query, key in itertools.product(range(2), range(2), range(9)):
        seen = int(pad[row]) <= key <= int(slots[row, query])
        assert float(mask[row, query, key]) == (0.0 if seen else -torch.inf)


def test_tree_mask():
    """A node sees the prompt without pads, everything committed, its ancestors and itself."""
    parents = random_parents(3, 6, 1)
    length, pad, prompt, pending = torch.tensor([4, 7, 2]), torch.tensor([0, 3, 1]), 5, 2
    slots = fed_slots(length, pending, 6, prompt)
    mask = tree_mask(slots, pad, 20, torch.float64, length + prompt, ancestors(parents))[:, 0]
    for row in range(3):
        first = prompt + int(length[row])
        for query, key in itertools.product(range(pending + 6), range(20)):
            if query < pending:
                seen = int(pad[row]) <= key <= int(slots[row, query])
            else:
                branch = [first + node for node in line(parents[row].tolist(), query - pending)]
                seen = int(pad[row]) <= key < first or key in branch
            assert float(mask[row, query, key]) == (0.0 if seen else -torch.inf)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("lengths", [[4, 4, 4, 4], [1, 6, 3, 13], [12, 12, 13, 11]], ids=["even", "ragged", "end"])
@pytest.mark.parametrize("kind", ["none", "chain", "tree"])
@pytest.mark.parametrize("pending", [1, 3])
def test_the_whole_plan_of_a_forward(kind, lengths, guided, pending):
    """What each fed token may read and where it is written, from first principles: rows, pads, pending columns, idle rows."""
    sampling = Sampling(guidance_scale=2.0 if guided else 1.0)
    sequence = begin(TARGET, UNEQUAL, (3, 4), sampling)
    sequence.length = torch.tensor(lengths)
    sequence.cached = (sequence.length - pending).clamp(min=0)
    sequence._uneven = True
    sequence.refresh()
    nodes = 0 if kind == "none" else 5
    tree = Tree(random_parents(4, 5, 3)) if kind == "tree" else None
    depth = tree.depth if tree is not None else torch.arange(1, nodes + 1).expand(4, -1)
    valid = sequence.length[:, None] - 1 + depth < sequence.limit
    draft = Draft(torch.zeros(4, nodes, dtype=torch.long), tree=tree, valid=None if bool(valid.all()) else valid)
    layout = TARGET.layout(sequence, draft)
    cache = sequence.cache
    assert cache is not None and sequence.pad is not None
    fed = sequence.pending + nodes
    slots = layout.flat.view(cache.rows, fed) - torch.arange(cache.rows)[:, None] * cache.slots
    assert layout.tier <= cache.slots and layout.mask.shape[-1] == layout.tier
    mask = layout.mask.expand(cache.rows, -1, -1, -1)[:, 0]
    for row in range(cache.rows):
        image = row % 4
        length = lengths[image]
        if length >= sequence.limit:
            assert (slots[row] == cache.trash).all()
            continue
        for token in range(fed):
            node = token - sequence.pending
            column = max(0, length + node) if node < 0 else length - 1 + int(depth[image, node])
            if node >= 0 and not valid[image, node]:
                assert int(slots[row, token]) == cache.trash
                continue
            assert int(layout.columns.expand(4, -1)[image, token]) == column
            assert int(slots[row, token]) == sequence.prompt + (column if node < 0 else length + node)
            allowed = set(range(int(sequence.pad[row]), sequence.prompt + min(length, column + 1)))
            if node >= 0:
                above = tree.parents[image].tolist() if tree is not None else list(range(-1, nodes - 1))
                allowed |= {sequence.prompt + length + k for k in line(above, node)}
            assert set((mask[row, token] == 0).nonzero()[:, 0].tolist()) == allowed
            assert ((mask[row, token] == 0) | (mask[row, token] == -torch.inf)).all()
