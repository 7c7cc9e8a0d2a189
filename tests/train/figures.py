"""Figures that a module saves, and whether their artists overlap."""

import itertools


def saved_figures(monkeypatch, module, *, drawn=True):
    """A list that gets every figure that the module saves; it is quicker where they are not drawn."""
    saved, save = [], module.save
    monkeypatch.setattr(
        module, "save", lambda figure, path: (drawn and save(figure, path), saved.append(figure))
    )
    return saved


def assert_apart(found):
    assert len(found) > 1
    for one, other in itertools.combinations(found, 2):
        assert not one.overlaps(other), (one, other)
