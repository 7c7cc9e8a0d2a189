"""What transformers logs while it is imported."""

import logging
import subprocess
import sys

import pytest

from jetspec_jax.checkpoint.library import import_transformers


def test_the_advice_on_pytorch_alone_is_hidden(caplog, tmp_path, monkeypatch):
    says = "import logging; log = logging.getLogger('transformers').warning\n"
    says += "log('PyTorch was not found. Models will not be available.'); log('another warning')"
    (tmp_path / "transformers.py").write_text(says)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    del sys.modules["transformers"]
    import_transformers()
    logging.getLogger("transformers").warning("PyTorch was not found.")
    assert [one.message for one in caplog.records] == ["another warning", "PyTorch was not found."]


@pytest.mark.wide
def test_a_script_that_loads_the_demo_pair_says_nothing():
    # None stands for a package that is not installed.
    program = "import sys; sys.modules['torch'] = None; from jetspec_jax import LLM; LLM()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "PyTorch" not in ran.stdout + ran.stderr
