"""``jetspec-jax serve``: OpenAI's API over HTTP."""

import argparse
from typing import Any

from jetspec_jax.async_llm import AsyncLLM
from jetspec_jax.cli.options import ALGORITHM, MODELS, PROCESSES, add_target_place
from jetspec_jax.cli.process import on_signals
from jetspec_jax.cli.server_options import ENGINE, SERVER
from jetspec_jax.cli.settings import model_arguments
from jetspec_jax.demo import DEMO
from jetspec_jax.device.processes import is_first
from jetspec_jax.serve.settings import ServeSettings

# Model options with the server's defaults.
_OF_ENGINE = {option.field for option in ENGINE.options}


def add_serve_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``jetspec-jax``."""
    parser = commands.add_parser("serve", help="serve OpenAI's API", description=_serve.__doc__)
    parser.set_defaults(run=_serve)
    add_target_place(parser)
    SERVER.add(parser)
    ENGINE.add(parser)
    MODELS.add(parser, [option.field for option in MODELS.options if option.field not in _OF_ENGINE])
    ALGORITHM.add(parser)
    PROCESSES.add(parser)


def _serve(arguments: argparse.Namespace) -> int:
    """Serves completions and chats over HTTP, with OpenAI's API and vLLM's additions.

    If several processes share the models, the first one serves, and the others end with it.
    """
    settings = ServeSettings(**SERVER.given(arguments))
    try:
        from jetspec_jax.serve.running import Stopping, run
    except ImportError as error:
        raise ImportError(f'the server needs {error.name}: pip install "jetspec-jax[serve]"') from error
    given = model_arguments(arguments) | ENGINE.given(arguments)
    stopping = Stopping(follows=not is_first())
    on_signals(stopping)
    if not is_first():
        AsyncLLM(**given).follow()
        return 0
    run(lambda: AsyncLLM(**given), settings, str(arguments.target or DEMO), stopping)
    return 0
