"""Draft trees as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .layout import ancestors


@dataclass(frozen=True)
class Tree:
    """Shape of a draft tree over K nodes. parents [B or 1, K]: -1 = child of the last committed token; parents come first,
    siblings in the order in which they are tested. A static tree has one row and is planned once. height: no node is deeper than
    this, where it is known beforehand."""

    parents: Tensor
    height: int | None = None

    @cached_property
    def seen(self) -> Tensor:
        """bool [B or 1, K, K]: each node's ancestors and itself."""
        return ancestors(self.parents, self.height)

    @cached_property
    def depth(self) -> Tensor:
        """Depth of each node, counted from 1: long [B or 1, K]."""
        return self.seen.sum(-1)

    @cached_property
    def levels(self) -> int:
        """`height`, or the depth of the deepest node (a host integer)."""
        if self.height is not None:
            return self.height
        return int(self.depth.max()) if self.depth.numel() else 0

    @cached_property
    def order(self) -> Tensor:
        """Position of each node among its siblings, from 0: long [B or 1, K]."""
        same = self.parents[:, :, None] == self.parents[:, None, :]
        return same.tril(-1).sum(-1)

    @cached_property
    def children(self) -> Tensor:
        """Children in test order: long [B or 1, K + 1, C], padded with -1; row 0 the root's, row k + 1 node k's."""
        rows, nodes = self.parents.shape
        width = int(self.order.max()) + 1 if nodes else 0
        table = torch.full((rows, (nodes + 1) * width), -1, dtype=torch.long, device=self.parents.device)
        place = (self.parents + 1) * width + self.order
        table.scatter_(1, place, torch.arange(nodes, device=place.device).expand(rows, nodes))
        return table.view(rows, nodes + 1, width)

    @cached_property
    def families(self) -> Families:
        """The nodes by their parents, those that have any children first."""
        has = (self.children >= 0).any(2)
        at = has.sort(dim=1, descending=True, stable=True).indices[:, : int(has.sum(1).max())]
        kids = self.children.gather(1, at[..., None].expand(-1, -1, self.children.shape[2]))
        depth = torch.nn.functional.pad(self.depth, (1, 0)).gather(1, at) + 1
        return Families(at, kids, kids >= 0, kids.clamp(min=0), depth)


@dataclass(frozen=True)
class Families:
    """Siblings side by side: F families of up to C.

    at [B or 1, F]: the row of Scores that follows the parent (rows with fewer families are filled up with childless ones); kids
    [B or 1, F, C]: its children in test order, -1 beyond; exist: where there is one; nodes: `kids`, 0 beyond; depth [B or 1, F]:
    of the children.
    """

    at: Tensor
    kids: Tensor
    exist: Tensor
    nodes: Tensor
    depth: Tensor


def static_tree(paths: list[tuple[int, ...]], device: torch.device | str = "cpu") -> Tree:
    """A tree from its nodes written as child indices from the root, e.g. (0,), (1,), (0, 0): the notation of EAGLE and Medusa."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    index = {path: k for k, path in enumerate(ordered)}
    for path in ordered:
        if len(path) > 1 and path[:-1] not in index:
            raise ValueError(f"tree node {path} has no parent {path[:-1]}")
        if path[-1] and (*path[:-1], path[-1] - 1) not in index:
            raise ValueError(f"tree node {path} skips its sibling {(*path[:-1], path[-1] - 1)}")
    parents = [index.get(path[:-1], -1) for path in ordered]
    return Tree(torch.tensor([parents], dtype=torch.long, device=device))


def chain_tree(nodes: int, device: torch.device | str = "cpu") -> Tree:
    """A chain of K nodes written as a tree."""
    return Tree(torch.arange(-1, nodes - 1, device=device)[None])


def balanced_paths(branching: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every node of a tree whose depth-d nodes have branching[d] children."""
    level: list[tuple[int, ...]] = [()]
    paths: list[tuple[int, ...]] = []
    for width in branching:
        level = [(*path, child) for path in level for child in range(width)]
        paths += level
    return paths


def rank_dynamic(scores: Tensor, parents: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Keep the `total` best nodes of an expanded tree (EAGLE-2's re-ranking).

    scores [B, M]: cumulative log confidence, never above the parent's; parents [B, M]. A stable sort keeps a parent before a
    child that ties with it, so no kept node loses its parent. Returns the kept nodes [B, K] in their old order and their new
    parents [B, K].
    """
    total = min(total, scores.shape[1])
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :total]
    kept = best.sort(dim=1).values
    old = parents.gather(1, kept)
    place = kept.new_full((len(kept), scores.shape[1] + 1), -1)  # of the root, and of every node
    place.scatter_(1, kept + 1, torch.arange(total, device=kept.device).expand_as(kept))
    return kept, place.gather(1, old + 1)


def spine_paths(depth: int, width: int) -> list[tuple[int, ...]]:
    """A tree whose first child is grown further at each depth, with `width` children each time: depth * width nodes."""
    return [(0,) * level + (child,) for level in range(depth) for child in range(width)]


def ranked_paths(total: int, depth: int) -> list[tuple[int, ...]]:
    """The `total` most promising nodes of a fixed tree at most `depth` deep, if each sibling is kept with 0.4 times the chance of
    the one before it, and the first with 0.6: many children near the root, one line at the end, as in EAGLE-1's tree."""
    chances: list[tuple[float, tuple[int, ...]]] = [(0.6, (0,))]
    paths: list[tuple[int, ...]] = []
    while len(paths) < total:
        best = max(chances)
        chances.remove(best)
        chance, path = best
        paths.append(path)
        chances.append((chance * 0.4, (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            chances.append((chance * 0.6, (*path, 0)))
    return paths
