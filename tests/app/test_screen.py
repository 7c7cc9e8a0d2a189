"""Foreign text on a terminal: nothing in it controls the terminal."""

import io

from jetspec_jax import cli
from jetspec_jax.arguments import printable
from jetspec_jax.cli.screen import on_screen
from jetspec_jax.serve.errors import ApiError


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_messages_are_printable():
    odd = "\x00\x1b\x7f\x85\x9b\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ud800"
    assert printable(odd).isprintable()
    assert printable(odd).isascii()
    assert printable("a\tb\né 日本 🙂") == "a\tb\né 日本 🙂"
    assert ApiError(400, f"no {odd}").message.isprintable()


def test_an_error_of_the_command_is_printable(capsys, tmp_path):
    assert cli.main(["info", str(tmp_path / "a\x1b]0;b\x07\u202ec\x9b")]) == 2
    said = capsys.readouterr().err
    assert said.removesuffix("\n").isprintable()
    assert "a\\x1b]0;b\\x07\\u202ec\\x9b" in said


def test_a_text_controls_no_terminal(monkeypatch):
    text = "a\tb\n\x1b[2J\r\x08\x7f\x9b31m é \u200f"
    assert on_screen(text) == text
    monkeypatch.setattr("sys.stdout", Terminal())
    assert on_screen(text) == "a\tb\n\\x1b[2J\\x0d\\x08\\x7f\\x9b31m é \u200f"
