"""Pictures: names, augmentation, fetching, the word table."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from foredraft.training import data as emoji
from foredraft.training.common import seeded
from foredraft.training.names import COLOURS, MAX_WORDS, NAMES, prompt_text, word_ids, word_table
from PIL import Image


def test_names_are_distinct_plain_and_short():
    assert len(NAMES) >= 250 and len(set(NAMES)) == len(NAMES)
    assert {"fox", "red apple"} <= set(NAMES)
    for name in NAMES:
        assert name == emoji.normalise_name(name)
        assert len(name.split()) <= 4


@pytest.mark.parametrize(
    ("raw", "plain"), [("T-Rex", "t-rex"), ("woman’s  hat", "woman's hat"), ("piñata", "pinata"), ("FOX", "fox")]
)
def test_names_are_normalised(raw, plain):
    assert emoji.normalise_name(raw) == plain


def test_every_prompt_fits_the_word_slots():
    words = word_table()
    for name in NAMES:
        for colour in COLOURS:
            ids = word_ids(prompt_text(name, colour), words)
            assert len(ids) == MAX_WORDS and ids[-1] > 0
    assert prompt_text("fox", "white") == "fox"
    assert prompt_text("red apple", "blue") == "red apple on blue"


def test_render_without_augmentation_is_plain_compositing(pictures):
    rgba = emoji.premultiply(torch.from_numpy(pictures[:5]).permute(0, 3, 1, 2))
    colours = emoji.colour_table()[:5]
    pixels = emoji.render(rgba, colours, emoji.NO_AUGMENTATION, seeded(0))
    expected = rgba[:, :3] + (1 - rgba[:, 3:]) * colours[:, :, None, None]
    assert torch.allclose(pixels, expected * 2 - 1, atol=2e-3)


def test_render_is_a_function_of_the_generator_and_stays_in_range(pictures):
    rgba = emoji.premultiply(torch.from_numpy(pictures[:16]).permute(0, 3, 1, 2))
    colours = emoji.colour_table()[[0] * 16]
    first, again = (emoji.render(rgba, colours, emoji.Augmentation(), seeded(3)) for _ in range(2))
    other = emoji.render(rgba, colours, emoji.Augmentation(), seeded(4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.min() >= -1 and first.max() <= 1


def test_archive_and_npm_sources_agree(tmp_path, monkeypatch, pictures):
    np.savez(tmp_path / emoji.ARCHIVE, images=pictures, names=np.array([name.upper() for name in NAMES]))
    packs = tmp_path / "work" / "npm"
    packs.mkdir(parents=True)
    names, members = {}, {}
    for index, name in enumerate(NAMES):
        # A variation selector in the name list, which the pictures' file names leave out in half of the cases.
        names[chr(0x1F300 + index) + "\ufe0f"] = {"name": name}
        stream = io.BytesIO()
        Image.fromarray(pictures[index]).save(stream, "PNG")
        members[f"package/img/google/64/{0x1F300 + index:04x}{'-fe0f' if index % 2 else ''}.png"] = stream.getvalue()
    _pack(packs, emoji.NAME_PACKAGE, {"package/data-by-emoji.json": json.dumps(names).encode()})
    _pack(packs, emoji.PICTURE_PACKAGE, members)
    monkeypatch.setattr(emoji.shutil, "which", lambda _: None)
    fetched = emoji.load_pictures(None, tmp_path / "work")
    assert torch.equal(fetched, emoji.load_pictures(tmp_path, tmp_path))
    assert fetched.shape == (len(NAMES), 4, 64, 64)


def test_missing_sources_are_named(tmp_path, monkeypatch, pictures):
    with pytest.raises(FileNotFoundError, match=emoji.ARCHIVE):
        emoji.load_pictures(tmp_path, tmp_path)
    monkeypatch.setattr(emoji.shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match="npm is not installed"):
        emoji.load_pictures(None, tmp_path)
    np.savez(tmp_path / emoji.ARCHIVE, images=pictures[:1], names=np.array([NAMES[0]]))
    with pytest.raises(ValueError, match=f"lacks {len(NAMES) - 1} names"):
        emoji.load_pictures(tmp_path, tmp_path)


def _pack(folder, package, files):
    with tarfile.open(folder / f"{package.replace('@', '-')}.tgz", "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
