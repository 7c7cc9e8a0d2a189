"""The commands' options, in tables: each option names the Python argument that it sets.

Options that are not given are not passed on, so all defaults are those of the Python functions.
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

from jetspec_jax.checkpoint.chat_template import TEMPLATES
from jetspec_jax.checkpoint.pairs import PAIR_NAMES
from jetspec_jax.checkpoint.source import DTYPES, MXFP4_WORDS
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

#: The pages of the documentation, which a wheel does not have.
DOCS = "https://github.com/jetspec/jetspec_jax/blob/main/docs"
#: How to make a draft head for a target without one.
HEAD_GUIDE = f"{DOCS}/your-model.md"
YES_OR_NO = ("yes", "no")


def comma_separated(text: str) -> list[int]:
    """Parses integers like ``1,2,3``; raises argparse.ArgumentTypeError for another form."""
    if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        raise argparse.ArgumentTypeError(f"expected token ids as in 1,2,3, not {text!r}")
    return [int(number) for number in text.split(",")]


def token_biases(text: str) -> dict[int, float]:
    """Parses biases like ``5=-1.5,7=2``; raises argparse.ArgumentTypeError for another form."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        biases = {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected biases as in 5=-1.5,7=2, not {text!r}") from None
    if len(biases) < len(pairs):
        raise argparse.ArgumentTypeError(f"expected each token once, not {text!r}")
    return biases


class Open:
    """The value None given on a command line, as opposed to an option that is not given."""


def integer_or_none(text: str) -> int | type[Open]:
    """Parses an integer or the word ``none``; raises argparse.ArgumentTypeError for anything else."""
    if text == "none":
        return Open
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer or none, not {text!r}") from None


def json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object; raises argparse.ArgumentTypeError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, not {text!r}")
    return value


def yes_or_no(text: str) -> bool:
    """Parses one of `YES_OR_NO`; raises argparse.ArgumentTypeError for anything else."""
    if text not in YES_OR_NO:
        raise argparse.ArgumentTypeError(f"expected yes or no, not {text!r}")
    return text == "yes"


class OneOfSeveralNames(argparse.Action):
    """Stores the value of an option with several names, or with a positional form; only one may be given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """As in the base class."""
        before = getattr(namespace, self.dest, None)
        if before not in (None, values, parser.get_default(self.dest)):
            raise argparse.ArgumentError(self, f"expected one of {before!r} and {values!r}, not both")
        setattr(namespace, self.dest, values)


@dataclass(frozen=True)
class Option:
    """An option.

    The ``field`` is the Python argument. A default of Python's, or ``unset`` if that is None, is added to the
    ``help``, which lacks former names. ``words`` are for a shell's completion. Whether an option is a flag
    follows from Python's default, if there is one. The ``metavar`` of integers is "N".
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
        """The option as typed."""
        return self.flag or f"--{self.field.replace('_', '-')}"

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments: the option's name, or its field if it has several names."""
        return self.field if self.other_names else self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Group:
    """A group of options.

    ``python`` takes the values as arguments; None if only the command line has the options.
    """

    title: str
    python: Callable[..., Any] | None
    options: tuple[Option, ...]

    def add(
        self, parser: argparse.ArgumentParser, only: Collection[str] | None = None, **defaults: Any
    ) -> None:
        """Adds the options, or ``only`` some fields; the command's ``defaults`` replace Python's."""
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
                metavar = option.metavar or ("N" if option.type is int else None)
                settings |= {"type": option.type, "metavar": metavar}
                once = OneOfSeveralNames if option.other_names else "store"
                settings["action"] = "append" if option.recurs else once
                shown = next(value for value in (default, usual, option.unset) if value not in (None, ...))
                if shown not in ("", (), []):
                    words = ", ".join(shown) if isinstance(shown, tuple | list) else shown
                    settings["help"] += f" (default: {words})"
            added = section.add_argument(option.name, *option.other_names, **settings)
            accept_formerly(parser, added, *option.former_names)

    def given(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """The given values by field."""
        values = {option.field: getattr(arguments, option.dest, None) for option in self.options}
        return {
            field: None if value is Open else value for field, value in values.items() if value is not None
        }


SAMPLING = Group(
    "sampling",
    SamplingParams,
    (
        Option("temperature", "0 is greedy", float, metavar="T"),
        Option("top_k", "keep the K likeliest tokens", int, metavar="K"),
        Option("top_p", "keep the likeliest tokens up to this probability", float, metavar="P"),
        Option("min_p", "keep tokens at least P times as likely as the likeliest", float, metavar="P"),
        Option("seed", "seed of the sampling noise", int, unset="drawn"),
        Option("max_tokens", "most tokens; none means up to the context's end", integer_or_none, metavar="N"),
        Option("n", "completions of each prompt", int, flag="-n"),
        Option("stop", "string that ends the text; repeatable", metavar="TEXT", recurs=True),
        Option("stop_token_ids", "tokens that end the output, like 1,2,3", comma_separated, metavar="IDS"),
        Option("ignore_eos", "do not stop at the target's end-of-sequence tokens"),
        Option("include_stop_str_in_output", "keep the stop string in the text"),
        Option("skip_special_tokens", "write special tokens too", flag="--no-skip-special-tokens"),
        Option("presence_penalty", "penalty of tokens in the output, -2 to 2", float, metavar="P"),
        Option(
            "frequency_penalty", "penalty of tokens for each occurrence in the output", float, metavar="P"
        ),
        Option("repetition_penalty", "penalty of tokens in prompt or output; 1 is none", float, metavar="P"),
        Option("min_tokens", "least tokens before the output may end", int),
        Option("logit_bias", "biases added to logits, like 5=-1.5,7=2", token_biases, metavar="ID=BIAS,..."),
        Option("bad_words", "word that the output must not contain; repeatable", metavar="TEXT", recurs=True),
        Option("allowed_token_ids", "the only allowed tokens, like 1,2,3", comma_separated, metavar="IDS"),
        Option(
            "logprobs",
            "with --json: number of likeliest tokens reported with each token, 0..20",
            int,
            metavar="K",
        ),
        Option("prompt_logprobs", "the same for each token of the prompt", int, metavar="K"),
    ),
)

STRUCTURED = Group(
    "the form of the output",
    StructuredOutputsParams,
    (
        Option("json", "JSON of this schema", Path, flag="--json-schema", metavar="FILE"),
        Option("regex", "text that this regular expression matches", metavar="REGEX"),
        Option("choice", "one of several texts; repeatable", metavar="TEXT", recurs=True),
        Option("grammar", "text of this grammar, in Lark's form or in GBNF", Path, metavar="FILE"),
        Option("json_object", "any JSON object"),
        Option("disable_any_whitespace", "JSON without spaces and line breaks between its parts"),
        Option(
            "disable_additional_properties",
            "allow keys that a schema does not list",
            flag="--no-disable-additional-properties",
        ),
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
            "folder or hub id of its draft head",
            metavar="PATH_OR_ID",
            unset="a pair's own; else plain decoding",
        ),
        Option(
            "budget",
            "most nodes of a tree, 1..256",
            int,
            unset=f"{DEFAULT_BUDGET}; plain decoding on a CPU, unless an option of a tree is given",
        ),
        Option("width", "most children of a node", int, unset="the candidates, else the algorithm's"),
        Option(
            "candidates",
            "candidates per draft row",
            int,
            unset="the width, else the algorithm's; more with a selector",
        ),
        Option("depth", "largest depth of a tree", int, unset="the head's draft depth"),
        Option(
            "algorithm",
            f"algorithm that builds trees: {', '.join(algorithm_names())}",
            metavar="NAME",
            unset=f"{DEFAULT_ALGORITHM}; of a server on a GPU auto",
            words=algorithm_names(),
        ),
        Option("dtype", f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}", metavar="TYPE", words=DTYPES),
        Option(
            "capacity",
            "tokens per slot, prompt and output together",
            int,
            flag="--max-model-len",
            former_names=("--capacity",),
            unset="1024, or what is needed",
        ),
        Option(
            "max_slots",
            "most prompts that decode at once, per copy",
            int,
            flag="--max-num-seqs",
            former_names=("--max-slots",),
            unset=str(MAX_SLOTS),
        ),
        Option(
            "tensor_parallel_size",
            "devices that share each model, or each expert",
            int,
            former_names=("--tensor-parallel",),
        ),
        Option(
            "expert_parallel_size",
            "groups of whole experts; times --tensor-parallel-size devices share all else",
            int,
            former_names=("--expert-parallel",),
        ),
        Option(
            "data_parallel_size",
            "copies of the models, each on other devices",
            int,
            former_names=("--data-parallel",),
        ),
        Option(
            "implementation",
            f"implementation of tree attention: {' or '.join(implementations())}",
            metavar="NAME",
            unset="the best",
            words=implementations(),
        ),
        Option(
            "ignore_config_keys",
            "unknown key of a config.json to ignore, if it has no effect; repeatable",
            flag=IGNORE_OPTION,
            metavar="KEY",
            recurs=True,
        ),
        Option("allow_nonfinite", "allow weights that are NaN or infinite"),
        Option(
            "mxfp4",
            f"experts in MXFP4 stay so on the device or are widened: {', '.join(MXFP4_WORDS)}",
            metavar="WORD",
            words=MXFP4_WORDS,
        ),
        Option(
            "fp8_activations",
            "quantise activations in FP8 where weights are: yes or no",
            yes_or_no,
            metavar="WORD",
            words=YES_OR_NO,
            unset="yes in 16-bit types",
        ),
        Option(
            "tokenizer",
            "folder, GGUF file or hub id of the tokenizer",
            metavar="PATH_OR_ID",
            unset="the target's",
        ),
        Option(
            "chat_template",
            f"file or Jinja text (with braces) of a chat template, or {' or '.join(TEMPLATES)}",
            metavar="FILE_OR_TEXT",
            unset="the tokenizer's",
        ),
        Option(
            "compilation_cache",
            "folder for compiled programs; auto is the user's cache folder, on a GPU",
            metavar="DIR|auto|off",
        ),
    ),
)

#: The model options that set numbers of devices, with copies last.
PARALLEL = ("tensor_parallel_size", "expert_parallel_size", "data_parallel_size")

ALGORITHM = Group(
    "the tree algorithm",
    get_algorithm,
    (
        Option(
            "options",
            "option of the algorithm, its value in JSON, like beta=2.0; repeatable",
            flag="--algorithm-option",
            metavar="NAME=VALUE",
            recurs=True,
        ),
        Option(
            "profile", "JSON table of measured acceptance, for algorithms that read one", Path, metavar="FILE"
        ),
    ),
)

ROUTING = Group(
    "hints for the tree algorithm",
    None,
    (
        Option("task", "the prompt's task: math, code, chat, reasoning, ...", metavar="WORD"),
        Option("mode", "the answer's mode: reasoning, cot, ...", metavar="WORD"),
    ),
)

PROMPT = Group(
    "the prompt (default: standard input)",
    None,
    (
        Option(
            "prompt_file",
            "text file with one prompt, or JSON lines (.jsonl) with one per line; repeatable",
            Path,
            metavar="FILE",
            recurs=True,
        ),
        Option("token_ids", "token ids of the prompt, like 1,2,3", comma_separated, metavar="IDS"),
        Option("chat", "answer the prompt as a user's message", is_flag=True),
    ),
)

CHAT = Group(
    "chats",
    LLM.chat,
    (
        Option(
            "chat_template_kwargs",
            "arguments of the chat template, like '{\"enable_thinking\": false}'",
            json_object,
            metavar="JSON",
        ),
        Option(
            "add_generation_prompt",
            "omit the start of an answer: continue a last message of the assistant",
            flag="--no-add-generation-prompt",
            is_flag=True,
        ),
        Option(
            "continue_final_message",
            "continue the last message, which must be the assistant's, without its end mark",
            is_flag=True,
        ),
    ),
)


#: One of several processes, which are started by the same command line, each with its number.
PROCESSES = Group(
    "several processes that share the models, all started by the same command",
    join_processes,
    (
        Option(
            "coordinator", "address of the first process, at which all processes connect", metavar="HOST:PORT"
        ),
        Option("processes", "number of processes", int),
        Option("process", "number of this process, from 0", int, metavar="I"),
        Option("distributed", "read these from a cluster that JAX supports, like Slurm's", is_flag=True),
    ),
)

#: The options of commands that decode.
GROUPS = (PROMPT, CHAT, SAMPLING, STRUCTURED, MODELS, ALGORITHM, ROUTING, PROCESSES)


def join_as_told(arguments: argparse.Namespace) -> None:
    """Connects to the command's other processes, if there are any. Must run before devices are used."""
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
    """Adds the option that names a target, with the command's own help text."""
    [target] = (option for option in MODELS.options if option.field == "target")
    names = target.name, *target.other_names
    given = {"dest": target.dest, "metavar": target.metavar, "action": OneOfSeveralNames}
    parser.add_argument(*names, **given, help=help, **settings)


def add_target_place(parser: argparse.ArgumentParser) -> None:
    """Adds the target as a positional argument, in addition to its option."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODEL",
        action=OneOfSeveralNames,
        default=argparse.SUPPRESS,  # keeps the option's value
        help="the target, like --model",
    )


def add_ignore_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option of commands that read a checkpoint's config."""
    MODELS.add(parser, ["ignore_config_keys"], ignore_config_keys=[])


def parallel_sizes(arguments: argparse.Namespace) -> dict[str, int]:
    """The given values of `PARALLEL`, for `jetspec_jax.device.groups.meshes_for`."""
    return {field: value for field, value in MODELS.given(arguments).items() if field in PARALLEL}


def parallel_mesh(arguments: argparse.Namespace) -> Mesh | None:
    """The mesh of a command with `PARALLEL` but copies, None without options; reports unused devices."""
    sizes = parallel_sizes(arguments)
    if not sizes:
        return None
    tensor, expert = (sizes.get(field, 1) for field in PARALLEL[:-1])
    mesh = make_mesh(tensor, expert)
    say_unused((mesh,))
    say_apart((mesh,))
    return mesh


def parse_option(text: str, form: str = "NAME=VALUE") -> tuple[str, Any]:
    """The name and the value of an ``--algorithm-option``; errors show the expected ``form``."""
    name, _, value = text.partition("=")
    try:
        if not name:
            raise ValueError("no name")
        return name, json.loads(value)
    except ValueError as error:
        raise ValueError(f"--algorithm-option takes {form} with a JSON value, not {text!r}") from error
