"""Whether the artists of a figure overlap."""

import itertools


def boxes(artists):
    return [artist.get_window_extent() for artist in artists]


def assert_apart(found):
    assert len(found) > 1
    for one, other in itertools.combinations(found, 2):
        assert not one.overlaps(other), (one, other)
