"""Shapes of drafts, and drafters over a draft head: what several methods set up alike."""

from __future__ import annotations

import torch

from ..decoding.drafters.head import HeadDrafter
from ..decoding.tree import Tree, spine_paths, static_tree
from ..models.head import DraftHead
from ..models.target import DiscreteTarget
from .base import Run

Paths = list[tuple[int, ...]]


def tree_shape(
    tree: str, length: int, branching: int, total_nodes: int, device: torch.device, paths: Paths | None = None
) -> tuple[Tree | None, tuple[int, int, int] | None]:
    """What a drafter's `tree` and `dynamic` are: both None for a chain.

    tree: "chain", "static" or "dynamic". paths: the nodes of a static tree, by default `spine_paths(length, branching)`.
    """
    if tree == "static":
        return static_tree(spine_paths(length, branching) if paths is None else paths, device), None
    return None, (total_nodes, length, branching) if tree == "dynamic" else None


def draft_nodes(tree: str, length: int, branching: int, total_nodes: int, paths: Paths | None = None) -> int:
    """How many nodes such a draft has at most: the scratch places the target needs."""
    if tree == "static":
        return length * branching if paths is None else len(paths)
    return total_nodes if tree == "dynamic" else length


def head_drafter(
    head: DraftHead,
    target: DiscreteTarget,
    run: Run,
    tree: str,
    length: int,
    branching: int = 3,
    total_nodes: int = 12,
    seeded: bool = False,
    stale: str = "recent",
    paths: Paths | None = None,
) -> HeadDrafter:
    """A drafter over a head for one call; arguments as in `tree_shape` and `HeadDrafter`."""
    shape, dynamic = tree_shape(tree, length, branching, total_nodes, run.device, paths)
    # Fed are the nodes that may have children: those of a dynamic tree are not known beforehand, but `branching` a level suffice.
    fed = branching * length if dynamic is not None else draft_nodes(tree, length, branching, total_nodes, paths)
    own = head.begin(target, run.conditioning, run.grid, run.sampling, fed)
    return HeadDrafter(head, target, own, length, shape, dynamic, seeded, stale)
