"""Token maps: sizes, colours, legends, errors."""

import numpy as np
import pytest
from foredraft.decoding.heatmap import ANCHORS, CATEGORIES, KINDS, MISSING, colour, render
from foredraft.decoding.trace import PARTS, Trace
from foredraft.decoding.types import ACCEPTED, BONUS, RECOVERED, SOURCES
from PIL import Image


def make_trace(**changes):
    """Two rows of four tokens, three rounds of 3, 1 and 4 tokens."""
    values = {
        "method": "sjd",
        "seed": 1,
        "exact": True,
        "grid": (2, 4),
        "batch": 1,
        "rounds": 3,
        "target_forwards": 3,
        "draft_forwards": 0,
        "drafted": 12,
        "judged": 8,
        "accepted": 5,
        "seconds": 1.0,
        "parts": dict.fromkeys(PARTS, 0.1),
        "min_margin": 0.1,
        "relaxation_per_token": 0.0,
        "complete": True,
        "round": [[0, 0, 0, 1], [2, 2, 2, 2]],
        "run": [[3, 3, 3, 1], [4, 4, 4, 4]],
        "source": [[ACCEPTED, ACCEPTED, RECOVERED, RECOVERED], [ACCEPTED, ACCEPTED, ACCEPTED, BONUS]],
        "probability": [[1.0, 0.1, 0.01, 0.001], [0.5, 0.5, 0.5, 1.0]],
    }
    return Trace(**{**values, **changes})


def cells(picture, trace):
    """The colour in the middle of every cell: [H, W, 3]."""
    height, width = trace.grid
    size = picture.width // width
    pixels = np.asarray(picture)
    return pixels[size // 2 :: size, size // 2 :: size][:height, :width]


@pytest.mark.parametrize("kind", KINDS)
def test_map_fills_its_cells(kind):
    trace = make_trace()
    picture = render(trace, kind=kind, legend=False)
    assert picture.mode == "RGB" and picture.size == (512, 256)
    assert len(np.unique(cells(picture, trace).reshape(-1, 3), axis=0)) > 1


def test_long_side_is_at_least_512_in_whole_cells():
    trace = make_trace(grid=(1, 3), round=[[0, 1, 1]], run=[[1, 2, 2]], source=[[3, 0, 1]], probability=[[1, 1, 1]])
    assert render(trace, legend=False).size == (3 * 171, 171)


def test_runs_are_coloured_by_length():
    drawn = cells(render(make_trace(), legend=False), make_trace())
    assert (drawn[1] == ANCHORS[-1]).all()  # the longest run
    assert (drawn[0, 3] == ANCHORS[0]).all()  # a run of one
    assert (drawn[0, :3] == np.round(colour(np.array(2 / 3)))).all()


def test_a_shared_scale_tones_the_map_down():
    drawn = cells(render(make_trace(), legend=False, top=7), make_trace())
    assert (drawn[1] == np.round(colour(np.array(0.5)))).all()


def test_sources_have_their_own_colours():
    trace = make_trace()
    drawn = cells(render(trace, kind="source", legend=False), trace)
    assert (drawn == CATEGORIES[np.array(trace.source)]).all()
    assert len(CATEGORIES) == len(SOURCES)


def test_probability_is_logarithmic():
    drawn = cells(render(make_trace(), kind="probability", legend=False), make_trace())
    want = colour(1 - np.array([0.0, 1, 2, 3]) / 3)
    assert np.abs(drawn[0].astype(float) - want).max() <= 1


def test_tokens_never_decoded_are_grey():
    trace = make_trace(
        complete=False,
        round=[[0, 0, 0, -1], [-1] * 4],
        run=[[3, 3, 3, -1], [-1] * 4],
        source=[[0, 0, 1, -1], [-1] * 4],
        probability=[[1.0, 0.1, 0.01, -1.0], [-1.0] * 4],
    )
    for kind in KINDS:
        drawn = cells(render(trace, kind=kind, legend=False), trace)
        assert (drawn[1] == MISSING).all() and (drawn[0, 3] == MISSING).all() and not (drawn[0, 0] == MISSING).all()
        render(trace, kind=kind)


def test_opacity_goes_from_picture_to_map():
    trace, image = make_trace(), Image.new("RGB", (64, 32), (200, 0, 0))
    image.putpixel((0, 0), (0, 0, 0))
    only_map = render(trace, image, opacity=1.0, legend=False)
    assert np.array_equal(np.asarray(only_map), np.asarray(render(trace, legend=False)))
    ground = np.asarray(render(trace, image, opacity=0.0, legend=False))
    assert (ground[..., 0] == ground[..., 1]).all()  # the picture is shown in grey
    half = cells(render(trace, image, opacity=0.5, legend=False), trace)
    assert not np.array_equal(half, cells(only_map, trace))


@pytest.mark.parametrize("kind", KINDS)
def test_legend_stands_beside_the_map(kind):
    trace = make_trace()
    bare, full = render(trace, kind=kind, legend=False), render(trace, kind=kind)
    assert full.width > bare.width + 80 and full.height >= bare.height
    assert np.array_equal(np.asarray(full)[16 : 16 + bare.height, 16 : 16 + bare.width], np.asarray(bare))
    panel = np.asarray(full)[:, bare.width + 32 :]
    assert (panel < 128).any()  # something is written there
    edge = np.asarray(full)[:, -4:]
    assert (edge == 255).all()  # and not cut off


def test_colours_rise_in_lightness():
    light = colour(np.linspace(0, 1, 50)) @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(light) > 0).all()


def test_unknown_kind_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'probability'"):
        render(make_trace(), kind="probabilty")
    with pytest.raises(ValueError, match="opacity"):
        render(make_trace(), opacity=2.0)
