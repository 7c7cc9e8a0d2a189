"""The options of the commands in one table: each names the Python argument that it sets.

An option that is not given is not passed on, so defaults are Python's and stand there alone.
"""

import argparse
import inspect
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jetspec_jax.checkpoint.pairs import PAIR_NAMES
from jetspec_jax.checkpoint.source import DTYPES
from jetspec_jax.cli.parser import accept_formerly
from jetspec_jax.config import IGNORE_OPTION
from jetspec_jax.decode.settings import DEFAULT_BUDGET
from jetspec_jax.device.groups import say_unused
from jetspec_jax.device.joining import join_processes
from jetspec_jax.device.mesh import make_mesh
from jetspec_jax.device.peers import say_apart
from jetspec_jax.engine.size import MAX_SLOTS
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.tree import DEFAULT_ALGORITHM, algorithm_names, get_algorithm
from pallas_kernels.tree_attention import implementations


def comma_separated(text: str) -> list[int]:
    """The integers of a list such as ``1,2,3``.

    Raises:
        argparse.ArgumentTypeError: It is no such list.
    """
    if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        raise argparse.ArgumentTypeError(f"expected token ids as in 1,2,3, not {text!r}")
    return [int(number) for number in text.split(",")]


def token_biases(text: str) -> dict[int, float]:
    """The biases of a list such as ``5=-1.5,7=2``.

    Raises:
        argparse.ArgumentTypeError: It is no such list.
    """
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected biases as in 5=-1.5,7=2, not {text!r}") from None


class Open:
    """Python's None on a command line, where nothing given stands for nothing said."""


def integer_or_none(text: str) -> int | type[Open]:
    """An integer, or the word ``none``.

    Raises:
        argparse.ArgumentTypeError: It is neither.
    """
    if text == "none":
        return Open
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer or none, not {text!r}") from None


def json_object(text: str) -> dict[str, Any]:
    """The mapping of a JSON object.

    Raises:
        argparse.ArgumentTypeError: It is no JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, not {text!r}")
    return value


class OneOfSeveralNames(argparse.Action):
    """Stores the value of an option that has several names, or a place too, and takes only one of these."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Stores it.

        Raises:
            argparse.ArgumentError: It has another value already.
        """
        before = getattr(namespace, self.dest, None)
        if before not in (None, values, parser.get_default(self.dest)):
            raise argparse.ArgumentError(self, f"expected one of {before!r} and {values!r}, not both")
        setattr(namespace, self.dest, values)


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        field: The Python argument.
        help: What it does; the default is added where Python has one that can be shown.
        type: Makes a value of its text.
        flag: Its name where that is not the field's.
        other_names: More names that the help shows.
        former_names: Names that are taken all the same, and that the help does not show.
        metavar: What stands for its value in the help.
        recurs: Whether it may be given several times, for a list of values.
        words: Values that a shell may offer.
        unset: What happens without it, where Python's default is None and the help should say so.
        is_flag: Whether it takes no value, where Python's default does not say so.
    """

    field: str
    help: str
    type: Callable[[str], Any] = str
    flag: str = ""
    other_names: tuple[str, ...] = ()
    former_names: tuple[str, ...] = ()
    metavar: str | None = None
    recurs: bool = False
    words: Sequence[str] = ()
    unset: str = ""
    is_flag: bool = False

    @property
    def name(self) -> str:
        """As it is typed."""
        return self.flag or f"--{self.field.replace('_', '-')}"

    @property
    def dest(self) -> str:
        """Its attribute among the parsed arguments: its name, or its field where it has several names."""
        return self.field if self.other_names else self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Group:
    """Options that belong together.

    Attributes:
        title: Above them in the help.
        python: What takes their values as arguments; None for those of the command line alone.
        options: The options.
    """

    title: str
    python: Callable[..., Any] | None
    options: tuple[Option, ...]

    def add(
        self, parser: argparse.ArgumentParser, only: Collection[str] | None = None, **defaults: Any
    ) -> None:
        """Adds the options to a command.

        Args:
            parser: Of the command.
            only: Fields of those to add; None adds all.
            **defaults: By field, for commands that have their own.
        """
        section = parser.add_argument_group(self.title)
        known = {} if self.python is None else inspect.signature(self.python).parameters
        for option in self.options:
            if only is not None and option.field not in only:
                continue
            usual = known[option.field].default if option.field in known else None
            default = defaults.get(option.field)
            settings: dict[str, Any] = {"dest": option.dest, "default": default, "help": option.help}
            if option.is_flag or isinstance(usual, bool):
                settings["action"] = "store_false" if option.name.startswith("--no-") else "store_true"
            else:
                settings |= {"type": option.type, "metavar": option.metavar}
                once = OneOfSeveralNames if option.other_names else "store"
                settings["action"] = "append" if option.recurs else once
                shown = next(own for own in (default, usual, option.unset) if own not in (None, ...))
                if shown not in ("", (), []):
                    settings["help"] += f" (default: {shown})"
            added = section.add_argument(option.name, *option.other_names, **settings)
            accept_formerly(parser, added, *option.former_names)

    def given(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """The values that were given, by field."""
        values = {option.field: getattr(arguments, option.dest, None) for option in self.options}
        said = {field: value for field, value in values.items() if value is not None}
        return {field: None if value is Open else value for field, value in said.items()}


SAMPLING = Group(
    "sampling",
    SamplingParams,
    (
        Option("temperature", "0 is greedy", float, metavar="T"),
        Option("top_k", "keep the K likeliest tokens", int, metavar="K"),
        Option("top_p", "keep the likeliest tokens up to this probability", float, metavar="P"),
        Option("min_p", "keep tokens at least P times as likely as the likeliest", float, metavar="P"),
        Option("seed", "seed of the sampling noise", int, unset="drawn"),
        Option("max_tokens", "most tokens; none goes on to the context's end", integer_or_none, metavar="N"),
        Option("n", "completions of each prompt", int, flag="-n", metavar="N"),
        Option("stop", "string that ends the text; may recur", metavar="TEXT", recurs=True),
        Option("stop_token_ids", "tokens that end the output, as in 1,2,3", comma_separated, metavar="IDS"),
        Option("ignore_eos", "do not stop at the target's end-of-sequence tokens"),
        Option("include_stop_str_in_output", "keep in the text what stopped it"),
        Option("skip_special_tokens", "write special tokens too", flag="--no-skip-special-tokens"),
        Option("presence_penalty", "of tokens that the output has, -2 to 2", float, metavar="P"),
        Option("frequency_penalty", "of tokens for each time that the output has them", float, metavar="P"),
        Option("repetition_penalty", "of tokens in prompt or output; 1 is none", float, metavar="P"),
        Option("min_tokens", "tokens before which nothing ends the output", int, metavar="N"),
        Option("logit_bias", "added to logits, as in 5=-1.5,7=2", token_biases, metavar="ID=BIAS,..."),
        Option("bad_words", "word that the output must not have; may recur", metavar="TEXT", recurs=True),
        Option(
            "allowed_token_ids", "the only tokens to choose from, as in 1,2,3", comma_separated, metavar="IDS"
        ),
        Option("logprobs", "with --json: likeliest tokens to tell with each token, 0..20", int, metavar="K"),
        Option("prompt_logprobs", "likewise with each token of the prompt", int, metavar="K"),
    ),
)

STRUCTURED = Group(
    "the form of the output",
    StructuredOutputsParams,
    (
        Option("json", "JSON of this schema", Path, flag="--json-schema", metavar="FILE"),
        Option("regex", "text that this regular expression matches", metavar="REGEX"),
        Option("choice", "one of some texts; may recur", metavar="TEXT", recurs=True),
        Option("grammar", "text of this grammar, in Lark's form or in GBNF", Path, metavar="FILE"),
        Option("json_object", "any JSON object"),
        Option("disable_any_whitespace", "of JSON: without spaces and line breaks between its parts"),
    ),
)

MODELS = Group(
    "models and trees",
    LLM,
    (
        Option(
            "target",
            f"folder, GGUF file or hub id of the target, or a pair: {PAIR_NAMES}",
            flag="--model",
            other_names=("--target",),
            metavar="PATH_OR_ID",
            unset="the embedded demo",
        ),
        Option(
            "draft_head",
            "likewise of its draft head",
            metavar="PATH_OR_ID",
            unset="a pair's own; else plain decoding",
        ),
        Option(
            "budget",
            "most nodes of a tree, 1..256",
            int,
            metavar="N",
            unset=f"{DEFAULT_BUDGET}; plain decoding on a CPU, unless an option of a tree is given",
        ),
        Option("width", "most children of a node", int, metavar="N", unset="all candidates"),
        Option(
            "candidates",
            "tokens of a draft row that are looked at",
            int,
            metavar="N",
            unset="the algorithm's",
        ),
        Option("depth", "largest depth of a tree", int, metavar="N", unset="all that the head drafts"),
        Option(
            "algorithm",
            f"how trees are built: {', '.join(algorithm_names())}",
            metavar="NAME",
            unset=f"{DEFAULT_ALGORITHM}; of a server on a GPU auto",
            words=algorithm_names(),
        ),
        Option("dtype", f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}", metavar="TYPE", words=DTYPES),
        Option(
            "capacity",
            "tokens of prompt and output that a slot holds",
            int,
            flag="--max-model-len",
            former_names=("--capacity",),
            metavar="N",
            unset="1024, or what is needed",
        ),
        Option(
            "max_slots",
            "most prompts that decode at the same time, with each copy",
            int,
            flag="--max-num-seqs",
            former_names=("--max-slots",),
            metavar="N",
            unset=str(MAX_SLOTS),
        ),
        Option(
            "tensor_parallel_size",
            "devices that share each model, or each expert",
            int,
            former_names=("--tensor-parallel",),
            metavar="N",
        ),
        Option(
            "expert_parallel_size",
            "groups of whole experts; times --tensor-parallel-size devices share all else",
            int,
            former_names=("--expert-parallel",),
            metavar="N",
        ),
        Option(
            "data_parallel_size",
            "copies of the models, each on devices of its own",
            int,
            former_names=("--data-parallel",),
            metavar="N",
        ),
        Option(
            "implementation",
            f"of tree attention: {' or '.join(implementations())}",
            metavar="NAME",
            unset="the best",
            words=implementations(),
        ),
        Option(
            "ignore_config_keys",
            "unknown key of a config.json that has no effect; not for keys that are understood; may recur",
            flag=IGNORE_OPTION,
            metavar="KEY",
            recurs=True,
        ),
        Option("allow_nonfinite", "read weights that are NaN or infinite all the same"),
        Option(
            "tokenizer",
            "folder, GGUF file or hub id whose tokenizer to use",
            metavar="PATH_OR_ID",
            unset="the target's",
        ),
        Option(
            "chat_template",
            "file or Jinja text of a chat template; what has braces is a text",
            metavar="FILE_OR_TEXT",
            unset="the tokenizer's",
        ),
        Option(
            "compilation_cache",
            "where compiled programs are kept; auto is the user's cache folder, on a GPU",
            metavar="DIR|auto|off",
        ),
    ),
)

#: Those of the models that say how many devices decode; copies last.
PARALLEL = ("tensor_parallel_size", "expert_parallel_size", "data_parallel_size")

ALGORITHM = Group(
    "the tree algorithm",
    get_algorithm,
    (
        Option(
            "options",
            "option of the algorithm, its value in JSON, as beta=2.0; may recur",
            flag="--algorithm-option",
            metavar="NAME=VALUE",
            recurs=True,
        ),
        Option("profile", "JSON table of measured acceptance, for its algorithms", Path, metavar="FILE"),
    ),
)

ROUTING = Group(
    "what the tree algorithm is told",
    None,
    (
        Option("task", "what is asked for: math, code, chat, reasoning, ...", metavar="WORD"),
        Option("mode", "how it is answered: reasoning, cot, ...", metavar="WORD"),
    ),
)

PROMPT = Group(
    "the prompt, which is standard input where no option gives one",
    None,
    (
        Option(
            "prompt_file",
            "text file with one prompt, or JSON lines (.jsonl) with one in each; may recur",
            Path,
            metavar="FILE",
            recurs=True,
        ),
        Option("token_ids", "token ids of the prompt, as in 1,2,3", comma_separated, metavar="IDS"),
        Option("chat", "take the prompt for what a user says, and answer it", is_flag=True),
    ),
)

CHAT = Group(
    "chats",
    LLM.chat,
    (
        Option(
            "chat_template_kwargs",
            "told to the chat template, as '{\"enable_thinking\": false}'",
            json_object,
            metavar="JSON",
        ),
        Option(
            "add_generation_prompt",
            "leave out what begins an answer: a last message of the assistant is continued",
            flag="--no-add-generation-prompt",
            is_flag=True,
        ),
        Option(
            "continue_final_message",
            "continue the last message, an assistant's, which then has no end mark",
            is_flag=True,
        ),
    ),
)


#: One of several processes, each started by a command line that is the same but for its number.
PROCESSES = Group(
    "several processes, which share the models; all are given the same command",
    join_processes,
    (
        Option("coordinator", "where they meet: an address of the first process", metavar="HOST:PORT"),
        Option("processes", "how many there are", int, metavar="N"),
        Option("process", "which of them this is, from 0", int, metavar="I"),
        Option("distributed", "take all that from a cluster that JAX knows, as Slurm's", is_flag=True),
    ),
)

#: What a command that decodes is told.
GROUPS = (PROMPT, CHAT, SAMPLING, STRUCTURED, MODELS, ALGORITHM, ROUTING, PROCESSES)


def join_as_told(arguments: argparse.Namespace) -> None:
    """Meets the other processes of a command, if it has any; before anything uses devices.

    Raises:
        ValueError: The options do not go together.
    """
    given = PROCESSES.given(arguments)
    if given.pop("distributed", False):
        if given:
            raise ValueError("--distributed takes the place of --coordinator, --processes and --process")
        join_processes()
    elif given:
        missing = [option.name for option in PROCESSES.options[:3] if option.field not in given]
        if missing:
            raise ValueError(
                f"--coordinator, --processes and --process belong together; add {', '.join(missing)}"
            )
        join_processes(**given)


def add_target_option(parser: argparse.ArgumentParser, help: str, **settings: Any) -> None:
    """Adds the option that names a target, to commands for which it means something of their own."""
    [target] = (option for option in MODELS.options if option.field == "target")
    names = target.name, *target.other_names
    given = {"dest": target.dest, "metavar": target.metavar, "action": OneOfSeveralNames}
    parser.add_argument(*names, **given, help=help, **settings)


def add_target_place(parser: argparse.ArgumentParser) -> None:
    """Lets the target also be named by the first word of a command that has the option for it."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODEL",
        action=OneOfSeveralNames,
        default=argparse.SUPPRESS,  # which leaves the option's value alone
        help="the target, as --model names it",
    )


def add_ignore_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that every command has which reads the config of a checkpoint."""
    MODELS.add(parser, ["ignore_config_keys"], ignore_config_keys=[])


def parallel_sizes(arguments: argparse.Namespace) -> dict[str, int]:
    """The sizes of the options `PARALLEL` that were given, for `jetspec_jax.device.groups.meshes_for`."""
    return {field: value for field, value in MODELS.given(arguments).items() if field in PARALLEL}


def parallel_mesh(arguments: argparse.Namespace) -> Mesh | None:
    """The mesh of a command that has the options `PARALLEL` but for copies; says how many devices it leaves.

    Returns:
        A mesh, also of one device, where an option is given, and None where none is.

    Raises:
        ValueError: A size is below 1, or there are too few devices.
    """
    sizes = parallel_sizes(arguments)
    if not sizes:
        return None
    tensor, expert = (sizes.get(field, 1) for field in PARALLEL[:-1])
    mesh = make_mesh(tensor, expert)
    say_unused((mesh,))
    say_apart((mesh,))
    return mesh


def add_allow_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that every command has which reads weights for a person to look at."""
    MODELS.add(parser, ["allow_nonfinite"], allow_nonfinite=False)


def parse_option(text: str, form: str = "NAME=VALUE") -> tuple[str, Any]:
    """Name and value of an ``--algorithm-option``.

    Args:
        text: What was given.
        form: What errors say it must look like.

    Raises:
        ValueError: It has no name, or its value is no JSON.
    """
    name, _, value = text.partition("=")
    try:
        if not name:
            raise ValueError("no name")
        return name, json.loads(value)
    except ValueError as error:
        raise ValueError(f"--algorithm-option takes {form} with a JSON value, not {text!r}") from error
