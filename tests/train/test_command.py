"""``python -m train``: commands of earlier versions."""

import pytest

from train.command import REPLACED, main


@pytest.mark.parametrize("gone", REPLACED)
def test_what_went_is_refused_with_what_replaced_it(gone, capsys):
    with pytest.raises(SystemExit) as ended:
        main([gone, "--work", "x"])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(f"python -m train: {gone!r} was removed: {REPLACED[gone]}")
