"""The command line: `vllm-dflash demo` and `vllm-dflash target`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import sys

from vllm_dflash import __version__


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        print(f"vllm-dflash: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
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
    return parser


def _demo(options: argparse.Namespace) -> int:
    from vllm_dflash.demo import run_demo

    return run_demo(options.model, options.draft_model, options.num_speculative_tokens, options.max_tokens)


def _target(options: argparse.Namespace) -> None:
    from vllm_dflash.targets import target_folder

    print(target_folder(options.name))


if __name__ == "__main__":
    sys.exit(main())
