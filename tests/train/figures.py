"""Figures that a module saves, and whether their artists overlap."""

import itertools


def saved_figures(monkeypatch, module):
    """A list that gets every figure, drawn, once the module has saved it."""
    saved, save = [], module.save
    monkeypatch.setattr(module, "save", lambda figure, path: (save(figure, path), saved.append(figure)))
    return saved


def boxes(artists):
    return [artist.get_window_extent() for artist in artists]


def assert_apart(found):
    assert len(found) > 1
    for one, other in itertools.combinations(found, 2):
        assert not one.overlaps(other), (one, other)
