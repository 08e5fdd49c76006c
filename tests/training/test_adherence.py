"""The adherence feature: tolerant of the augmentation, sensitive to the name."""

import pytest
import torch
from foredraft.training import adherence
from foredraft.training.common import seeded
from foredraft.training.data import Augmentation, colour_table, premultiply, render
from foredraft.training.names import COLOURS, NAMES
from PIL import Image


@pytest.fixture(scope="module")
def shown(tmp_path_factory, pictures):
    """Augmented pictures, the indices of their names and colours, and the reference file."""
    path = tmp_path_factory.mktemp("reference") / "reference.safetensors"
    straight = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    adherence.save_reference(straight, path)
    names = torch.arange(0, len(NAMES), 7)
    colours = torch.arange(len(names)) % len(COLOURS)
    pixels = render(premultiply(straight)[names], colour_table()[colours], Augmentation(), seeded(1))
    return pixels, names.tolist(), colours.tolist(), path


def test_reference_is_small(shown):
    assert shown[3].stat().st_size <= 400_000


def test_augmented_pictures_keep_name_and_colour(shown):
    pixels, names, colours, path = shown
    assert adherence.nearest_name(pixels, path) == [NAMES[index] for index in names]
    assert adherence.background_colour(pixels) == [list(COLOURS)[index] for index in colours]


def test_pil_images_of_another_size_are_read(shown):
    pixels, names, _, path = shown
    array = ((pixels[:3] + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    images = [Image.fromarray(picture).resize((128, 128)) for picture in array]
    assert adherence.nearest_name(images, path) == [NAMES[index] for index in names[:3]]


def test_a_scrambled_picture_is_far_from_its_name(shown):
    pixels, names, _, path = shown
    whole = adherence.distances(pixels[:4], path)
    blocks = pixels[:4].unflatten(2, (4, 16)).unflatten(4, (4, 16)).flip(2)[:, :, :, :, [2, 0, 3, 1]]
    scrambled = adherence.distances(blocks.flatten(4, 5).flatten(2, 3), path)
    own = torch.tensor(names[:4])[:, None]
    assert (scrambled.gather(1, own) > 3 * whole.gather(1, own)).all()


def test_lab_of_known_colours():
    rgb = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])[:, :, None, None]
    expected = torch.tensor([[100.0, 0.0, 0.0], [53.24, 80.09, 67.20], [0.0, 0.0, 0.0]])
    assert torch.allclose(adherence.to_lab(rgb)[:, :, 0, 0], expected, atol=0.1)
