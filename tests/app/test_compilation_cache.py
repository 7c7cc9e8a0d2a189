"""Compiled programs in a folder: who may choose it, and that a later run reads them."""

import contextlib
import logging
import os

import jax
import jax.numpy as jnp
import platformdirs
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jetspec_jax import LLM, SamplingParams, enable_compilation_cache
from jetspec_jax.cli import command as cli
from tests.decode.tiny import TINY, random_head, random_target

HIT = "/jax/compilation_cache/cache_hits"
SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)


def settings():
    return tuple(getattr(jax.config, name) for name in SETTINGS)


def folder_in_use():
    return settings()[1]


@pytest.fixture(autouse=True)
def jax_settings():
    before = settings()
    assert before[1] == os.environ["PYTEST_COMPILED_PROGRAMS"], "tests never write to the user's cache folder"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    yield
    for name, value in zip(SETTINGS, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def users_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name, appauthor: tmp_path / name)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return tmp_path / "jetspec_jax" / "compiled"


@contextlib.contextmanager
def events():
    """The names of JAX's monitoring events inside the block."""
    seen = []

    def listen(event, **_):
        seen.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_listener(listen)


def skip_where_programs_cannot_be_read_back(folder):
    """Some CPUs seem to XLA to lack what it has just compiled for (jax-ml/jax#38445)."""
    enable_compilation_cache(folder)
    with events() as seen:
        for _ in range(2):
            jax.jit(lambda x: jnp.sin(x) + 1)(jnp.arange(3.0)).block_until_ready()
            jax.clear_caches()
    if HIT not in seen:
        pytest.skip("this machine cannot read back what it compiled")


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry:UserWarning")
def test_a_later_run_reads_what_an_earlier_one_compiled(tmp_path):
    skip_where_programs_cannot_be_read_back(tmp_path / "probe")
    target, head = random_target(TINY, 0), random_head(TINY, 0)
    folder = tmp_path / "not" / "there yet"
    runs = []
    for _ in range(2):
        # What a process holds in memory is gone; what it put into the folder is not.
        jax.clear_caches()
        llm = LLM(target, head, budget=16, compilation_cache=str(folder))
        with events() as seen:
            runs.append((llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12)), seen.count(HIT)))
    (first, hits_before), (second, hits_after) = runs
    assert {"jit__decode", "jit_prefill", "jit_insert"} <= {
        file.name.split("-")[0] for file in folder.iterdir()
    }
    assert hits_before == 0
    assert hits_after >= 3
    assert second == first


def test_the_command_takes_a_folder(tmp_path):
    # An empty prompt is refused only when the models are loaded and the stores made.
    assert cli.main(["generate", "--compilation-cache", str(tmp_path / "folder"), ""]) == 2
    assert folder_in_use() == str(tmp_path / "folder")


def test_the_default_is_the_users_cache_folder(users_folder):
    enable_compilation_cache()
    assert folder_in_use() == str(users_folder)
    assert users_folder.is_dir()


def test_by_default_nothing_changes_on_a_cpu(users_folder, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    enable_compilation_cache()
    assert folder_in_use() is None
    assert not users_folder.exists()


def test_by_default_the_users_own_settings_stay(users_folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    enable_compilation_cache()
    assert folder_in_use() == str(tmp_path / "theirs")
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    enable_compilation_cache()
    assert settings()[:2] == (False, None)
    assert not users_folder.exists()


def test_a_named_folder_is_used_in_any_case(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    for name in ("first", "second"):
        enable_compilation_cache(tmp_path / name)
        assert settings()[:2] == (True, str(tmp_path / name))
        jax.jit(lambda x: x * 3)(jnp.arange(7)).block_until_ready()
        jax.clear_caches()
        assert any((tmp_path / name).iterdir())


def test_off_changes_nothing(users_folder):
    before = settings()
    enable_compilation_cache("off")
    assert settings() == before


def test_a_folder_that_cannot_be_written_is_one_line_of_the_log(tmp_path, caplog):
    (tmp_path / "file").touch()
    before = settings()
    with caplog.at_level(logging.WARNING, "jetspec_jax"):
        enable_compilation_cache(tmp_path / "file" / "folder")
    [record] = caplog.records
    assert record.getMessage() == (
        f"compiled programs are not kept: cannot write to {tmp_path / 'file' / 'folder'}: Not a directory"
    )
    assert settings() == before
