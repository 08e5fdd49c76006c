"""Neighbour tables: right, clipped, and kept in a folder that nothing depends on."""

from __future__ import annotations

from pathlib import Path

import foredraft.models.neighbours as neighbours
import pytest
import torch
from foredraft.models.neighbours import cache_folder, nearest_codes, search
from torch import Tensor


def codebook(codes: int = 40, width: int = 3) -> Tensor:
    """Codes of unequal length."""
    return torch.randn(codes, width, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.5, 3, codes)[:, None]


def brute(points: Tensor, k: int) -> Tensor:
    """Word by word."""
    rows = []
    for own, point in enumerate(points.double()):
        far = [(float((point - other).square().sum()), code) for code, other in enumerate(points.double()) if code != own]
        rows.append([code for _, code in sorted(far)[:k]])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("k", [1, 5, 39])
def test_against_brute_force(tmp_path: Path, k: int) -> None:
    points = codebook()
    near = nearest_codes(points, k, cache=tmp_path)
    assert near.dtype == torch.int32 and torch.equal(near, brute(points, k))
    scaled = torch.nn.functional.normalize(points.double(), dim=-1)
    assert torch.equal(nearest_codes(points, k, "normalised", tmp_path), brute(scaled, k))
    if k < 39:
        assert not torch.equal(near, brute(scaled, k)), "the metric matters"


def test_k_is_clipped_and_a_prefix_of_a_longer_table(tmp_path: Path) -> None:
    points = codebook()
    every = nearest_codes(points, 10_000, cache=tmp_path)
    assert every.shape == (40, 39) and torch.equal(every[:, :7], nearest_codes(points, 7, cache=tmp_path))
    own = torch.arange(40)[:, None]
    assert not (every == own).any()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points = codebook().double()
    whole = search(points, 6)
    monkeypatch.setattr(neighbours, "CHUNK", 7)
    assert torch.equal(search(points, 6), whole)


def test_equal_codes_are_ordered_by_code(tmp_path: Path) -> None:
    near = nearest_codes(torch.zeros(5, 2), 3, cache=tmp_path)
    assert near[4].tolist() == sorted(near[4].tolist()) and near.shape == (5, 3)


def test_a_kept_table_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nearest_codes(codebook(), 4, cache=tmp_path / "deep" / "er")
    files = list((tmp_path / "deep" / "er").iterdir())
    assert [path.suffix for path in files] == [".safetensors"]
    monkeypatch.setattr(neighbours, "search", lambda points, k: pytest.fail("looked up again"))
    assert torch.equal(nearest_codes(codebook(), 4, cache=tmp_path / "deep" / "er"), first)
    monkeypatch.undo()
    for other in (codebook() * 1.0001, codebook()[:39], codebook(width=4)):
        nearest_codes(other, 4, cache=tmp_path / "deep" / "er")
    nearest_codes(codebook(), 5, cache=tmp_path / "deep" / "er")
    nearest_codes(codebook(), 4, "normalised", cache=tmp_path / "deep" / "er")
    assert len(list((tmp_path / "deep" / "er").iterdir())) == 6, "every question has a file of its own"


def test_damaged_or_foreign_files_are_replaced(tmp_path: Path) -> None:
    right = nearest_codes(codebook(), 4, cache=tmp_path)
    path = next(tmp_path.iterdir())
    for damage in (b"", b"nonsense", path.read_bytes()[:-7]):
        path.write_bytes(damage)
        assert torch.equal(nearest_codes(codebook(), 4, cache=tmp_path), right)
    neighbours.save_file({"near": right.long()}, path)
    assert torch.equal(nearest_codes(codebook(), 4, cache=tmp_path), right)
    neighbours.save_file({"near": right + 40}, path)
    assert torch.equal(nearest_codes(codebook(), 4, cache=tmp_path), right)


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert torch.equal(nearest_codes(codebook(), 4, cache=blocked / "tables"), brute(codebook(), 4))
    assert blocked.read_text() == "not a folder"


def test_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    assert cache_folder() == tmp_path / "assets" / "foredraft" / "neighbours" and not (tmp_path / "assets").exists()
    nearest_codes(codebook(), 2)
    assert len(list(cache_folder().glob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    ("points", "k", "metric"), [(codebook(), 0, "raw"), (torch.zeros(1, 2), 1, "raw"), (codebook(), 3, "l1")]
)
def test_bad_questions(tmp_path: Path, points: Tensor, k: int, metric: str) -> None:
    with pytest.raises(ValueError, match="neighbours|metric"):
        nearest_codes(points, k, metric, tmp_path)
