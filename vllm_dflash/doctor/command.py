"""`vllm-dflash doctor`: say whether a drafter works with its target, and if not, why and what to do.

Exit code 0: healthy. 1: something is wrong, or cannot be read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_dflash.atomic import write_atomically
from vllm_dflash.doctor.checkpoint import load_checkpoint
from vllm_dflash.doctor.diagnosis import Diagnosis, diagnose, from_findings
from vllm_dflash.doctor.finding import Finding
from vllm_dflash.doctor.fix import write_repaired
from vllm_dflash.doctor.probe import ProbeSource
from vllm_dflash.doctor.prompts import (
    Question,
    Rendering,
    dataset_name,
    knows_thinking,
    questions,
    refuse_random_tokens,
)
from vllm_dflash.doctor.report import Circumstances, print_report, report_json
from vllm_dflash.doctor.settings import Pair, TargetFacts, check_settings, rope_theta_of
from vllm_dflash.doctor.subject import Subject
from vllm_dflash.doctor.tokens import check_tokenizer
from vllm_dflash.training.chat import load_tokenizer
from vllm_dflash.training.pretrained import drafter_folder, read_json
from vllm_dflash.training.target_features import embedding_scale, load_target, load_target_config, target_shape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    shown = "(default %(default)s)"
    parser.add_argument("--model", help="target; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--draft", required=True, help="drafter: a folder or Hub name")
    parser.add_argument("--num-speculative-tokens", type=int, metavar="K", help="default: the whole block")
    parser.add_argument("--prompts", metavar="FILE", help="rows with prompts; default: a few built-in questions")
    parser.add_argument("--num-prompts", type=int, default=8, metavar="N", help=f"how many {shown}")
    parser.add_argument("--max-tokens", type=int, default=48, help=f"tokens per answer {shown}")
    parser.add_argument(
        "--chat-template",
        default="target",
        metavar="target|none|FILE",
        help=f"how prompts are rendered, as they will be when serving {shown}",
    )
    parser.add_argument("--thinking", choices=("on", "off"), help="enable_thinking of the template; default: its own")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--json", metavar="FILE", help="write everything that was found")
    parser.add_argument("--fix", metavar="FOLDER", help="write a repaired copy, where config.json is all that is wrong")


def run(options: argparse.Namespace) -> int:
    """Check, probe, print; 0 where the drafter is healthy."""
    model = options.model or _embedded_target()
    _check_options(options)
    examination = Examination(model, options)
    found = examination.diagnosis()
    print_report(found, examination.circumstances)
    if options.json:
        text = json.dumps(report_json(found, examination.circumstances), indent=2) + "\n"
        write_atomically(Path(options.json), lambda temporary: temporary.write_text(text))
    if options.fix and not found.is_healthy:
        _fix(options.fix, found, examination)
    return 0 if found.is_healthy else 1


class Examination:
    """One drafter and its target, read step by step: settings first, then tensors, then the target itself.

    Args:
        source: probes of the target made before, for several drafters of one target.
    """

    def __init__(self, model: str, options: argparse.Namespace, source: ProbeSource | None = None) -> None:
        self.model, self.options, self._source = model, options, source
        self.folder = drafter_folder(options.draft)
        self.raw = read_json(self.folder / "config.json")
        self.tokenizer = source.tokenizer if source else load_tokenizer(model)
        self.rendering = rendering_of(options)
        self.asked: list[Question] = list(source.asked) if source else questions(options.prompts, options.num_prompts)
        refuse_random_tokens(self.asked, self.tokenizer)
        self.num_drafted: int | None = options.num_speculative_tokens

    def diagnosis(self) -> Diagnosis:
        """Everything in order, ended early by what makes the rest impossible."""
        text_config = load_target_config(self.model).get_text_config()
        theta = rope_theta_of(text_config)
        facts = TargetFacts(target_shape(self.model, text_config), theta, len(self.tokenizer))
        pair = Pair(self.raw, self.options.draft, facts, self.options.num_speculative_tokens)
        config, findings = check_settings(pair)
        findings += self._tokenizer_findings()
        if config is None or (early := from_findings(findings)) is not None:
            early = from_findings(findings)
            assert early is not None
            return early
        self.num_drafted, _ = config.resolve_num_speculative_tokens(self.options.num_speculative_tokens)
        tensors, damage = load_checkpoint(self.folder, config)
        findings += damage
        early = from_findings(findings)
        if early is not None and (not tensors or early.name in ("not-finite", "checkpoint")):
            return early
        subject = Subject(self.folder, self.raw, config, tensors, self.num_drafted, theta, embedding_scale(text_config))
        return diagnose(subject, self.source, self.rendering, findings)

    @property
    def source(self) -> ProbeSource:
        """The target, loaded when it is needed first."""
        if self._source is None:
            target = load_target(self.model, _device(self.options.device))
            self._source = ProbeSource(target, self.tokenizer, self.asked, self.options.max_tokens)
        return self._source

    @property
    def circumstances(self) -> Circumstances:
        """What the numbers depend on."""
        thinking = {True: "on", False: "off", None: "as the template does by itself"}[self.rendering.thinking]
        return Circumstances(
            target=self.model,
            drafter=self.options.draft,
            num_drafted=self.num_drafted,
            template=self.rendering.label,
            thinking=thinking if knows_thinking(self.tokenizer) else "the template has no such mode",
            dataset=dataset_name(self.options.prompts),
            num_prompts=len(self.asked),
            max_tokens=self.options.max_tokens,
            dtype="float32" if _device(self.options.device).type == "cpu" else "bfloat16",
        )

    def _tokenizer_findings(self) -> list[Finding]:
        return check_tokenizer(self.folder, self.options.draft, self.model, self.tokenizer.get_vocab())


def rendering_of(options: argparse.Namespace) -> Rendering:
    """How the flags ask for prompts to be rendered.

    Raises:
        ValueError: the template is no file.
    """
    thinking = None if options.thinking is None else options.thinking == "on"
    if options.chat_template in ("target", "none"):
        return Rendering(options.chat_template, thinking)
    file = Path(options.chat_template)
    if not file.is_file():
        raise ValueError(f"--chat-template '{file}' is no file; give target, none or a Jinja template.")
    return Rendering(file.read_text(), thinking, file.name)


def _check_options(options: argparse.Namespace) -> None:
    if options.num_prompts < 2 or options.max_tokens < 8:
        raise ValueError(
            f"--num-prompts {options.num_prompts} and --max-tokens {options.max_tokens} are too few to tell anything; "
            f"give at least 2 prompts and 8 tokens."
        )
    if options.json and not Path(options.json).resolve().parent.is_dir():
        raise ValueError(f"'{options.json}' cannot be written: its folder does not exist; make it first.")
    if options.fix and Path(options.fix).exists():
        raise ValueError(f"'{options.fix}' exists already; give --fix a new folder.")


def _fix(folder: str, found: Diagnosis, examination: Examination) -> None:
    if found.edits is None:
        print(f"--fix: nothing was written to '{folder}', because the repair is more than a change of config.json.")
        return
    write_repaired(examination.folder, examination.raw, found.edits, Path(folder))
    print(f"The repaired drafter is in '{folder}'.")


def _embedded_target() -> str:
    from vllm_dflash.targets import target_folder

    return str(target_folder("smollm2"))


def _device(name: str | None) -> Any:
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
