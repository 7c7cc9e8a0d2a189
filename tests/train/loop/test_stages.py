"""Work folders and the settings that they were made with."""

import json

import pytest

from train.loop.stages import claim


def test_a_folder_of_an_earlier_version_goes_on(tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"mesh": {"data": -1, "fsdp": 2}}))
    claim(tmp_path, {"mesh": {"data": -1, "fsdp": 2, "expert": 1, "tensor": 1}})
    with pytest.raises(ValueError, match=r"\(mesh\.tensor: 1 there, 2 here\)"):
        claim(tmp_path, {"mesh": {"data": -1, "fsdp": 2, "expert": 1, "tensor": 2}})
