"""Shared: the tiny family on disk, and torch's threads put back."""

import pytest
import torch
from foredraft.bench.cases import Family

from .tiny import save_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("family"))


@pytest.fixture
def family(folder):
    threads = torch.get_num_threads()
    yield Family(folder)
    torch.set_num_threads(threads)
