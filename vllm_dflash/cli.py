"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from vllm_dflash import __version__

#: Commands with a module of their own: name, module of vllm_dflash, what it does.
_COMMANDS = (
    ("doctor", "doctor.command", "say whether a drafter works, and if not, why"),
    ("parity", "parity.command", "compare text with and without drafts, and say of each difference what it is"),
    ("prepare", "training.prepare", "rows of text to token ids with a mask of what the target wrote"),
    ("regenerate", "training.regenerate", "have the target answer prompts, for a drafter to learn from"),
    ("train", "training.train", "train a drafter"),
    ("eval", "training.evaluate", "measure a drafter's acceptance length"),
    ("export", "training.export", "write a checkpoint or drafter in another format, with a model card"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser(given).parse_args(given)
        return int(options.run(options) or 0)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        extra = "cpu] or vllm-dflash[cuda" if package == "vllm" else "train"
        print(
            f"vllm-dflash: '{_command(given)}' needs {package}, which is not installed; it comes with "
            f"vllm-dflash[{extra}].",
            file=sys.stderr,
        )
        return 1
    except (ValueError, RuntimeError, OSError) as error:
        print(f"vllm-dflash: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-dflash", description="DFlash speculative decoding for vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-dflash {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="answer a few questions with and without DFlash and compare")
    demo.add_argument("--model", help="target; default: the embedded SmolLM2-135M-Instruct")
    demo.add_argument("--draft-model", help="drafter; default: the one in examples/drafters")
    demo.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=3,
        metavar="K",
        help="tokens to draft per cycle; default 3, because a CPU verifies few tokens for the price of one",
    )
    demo.add_argument("--max-tokens", type=int, default=64, help="tokens per answer (default 64)")
    demo.set_defaults(run=_demo)

    target = commands.add_parser("target", help="print the folder of a demo target, making it on first use")
    target.add_argument("name", nargs="?", default="smollm2", help="which target (default smollm2)")
    target.set_defaults(run=_target)
    for name, module, purpose in _COMMANDS:
        _add_command(commands, name, module, purpose, with_flags=name == _command(arguments))
    return parser


def _command(arguments: Sequence[str]) -> str | None:
    """The command among the arguments; no flag before it takes a value."""
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _add_command(commands: Any, name: str, module: str, purpose: str, with_flags: bool) -> None:
    """Add a command; its flags, which import torch, only where it is the one that was called."""
    parser = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
    if with_flags:
        command = importlib.import_module(f"vllm_dflash.{module}")
        command.add_arguments(parser)
        parser.set_defaults(run=command.run)


def _demo(options: argparse.Namespace) -> int:
    from vllm_dflash.demo import run_demo

    return run_demo(options.model, options.draft_model, options.num_speculative_tokens, options.max_tokens)


def _target(options: argparse.Namespace) -> None:
    from vllm_dflash.targets import target_folder

    print(target_folder(options.name))


if __name__ == "__main__":
    sys.exit(main())
