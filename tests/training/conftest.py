"""Stand-in pictures, so that the tests need no network."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foredraft.training.names import NAMES


@pytest.fixture(scope="session")
def pictures() -> np.ndarray:
    """One blob of its own colours, place and shape per name: uint8 [names, 64, 64, 4], straight alpha."""
    generator = torch.Generator().manual_seed(0)
    rough = torch.rand(len(NAMES), 3, 4, 4, generator=generator)
    colours = F.interpolate(rough, (64, 64), mode="bicubic").clamp(0, 1)
    place = torch.linspace(-1, 1, 64)
    centres = (torch.rand(len(NAMES), 2, generator=generator) - 0.5) / 4
    x, y = place[None, None, :] - centres[:, :1, None], place[None, :, None] - centres[:, 1:, None]
    alpha = ((0.7 - (x.square() + y.square()).sqrt()) * 16).sigmoid()[:, None]
    rgba = torch.cat([colours, alpha], 1) * 255
    return rgba.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
