"""The command ``python -m train``."""

import argparse
import platform
import sys
import sysconfig
from pathlib import Path

from train.corpus import build_manifest
from train.demo import make_pair
from train.recipes import DEMO
from train.stages import OutOfTime

CORPUS_VERSION = "3.12.1"
ORIGIN = f"https://www.python.org/ftp/python/{CORPUS_VERSION}/Python-{CORPUS_VERSION}.tar.xz"


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; 0 also when a time limit ended it cleanly."""
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="train the demo pair: tokenizer, target, draft head")
    demo.add_argument("--work", type=Path, required=True, help="folder for everything made")
    demo.add_argument(
        "--corpus",
        type=Path,
        help=f"Lib folder of CPython {CORPUS_VERSION}; default: this Python's",
    )
    demo.add_argument("--minutes", type=float, help="stop cleanly after this; run again to go on")

    manifest = commands.add_parser("manifest", help="list a corpus, with hashes and splits")
    manifest.add_argument("--corpus", type=Path, required=True)
    manifest.add_argument("--out", type=Path, required=True)

    args = parser.parse_args(arguments)
    if args.command == "manifest":
        name = f"CPython {CORPUS_VERSION} standard library (Lib)"
        build_manifest(args.corpus, name=name, origin=ORIGIN).write(args.out)
        return 0
    try:
        make_pair(DEMO, args.work, args.corpus or own_library(), minutes=args.minutes)
    except OutOfTime as stop:
        print(stop)
        return 0
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"the pair is in {args.work / 'demo'}")
    return 0


def own_library() -> Path:
    """The running Python's standard library.

    Raises:
        ValueError: It is another version than the corpus.
    """
    if platform.python_version() != CORPUS_VERSION:
        raise ValueError(
            f"the corpus is the standard library of CPython {CORPUS_VERSION} and this is "
            f"{platform.python_version()}; unpack {ORIGIN} and name its Lib folder with --corpus"
        )
    return Path(sysconfig.get_path("stdlib"))


if __name__ == "__main__":
    sys.exit(main())
