"""Settings and fixtures of all tests. vLLM and triton read the environment at import, so it is set first."""

from __future__ import annotations

import os

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines live in this process, where tests can look at them
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread for each of the processes that share the tests: threads that wait for each other would spin.
    ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402  (after the environment)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
from engines import Engine  # noqa: E402
from tiny_models import write_tiny_drafter, write_tiny_target  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent
DRAFTER = REPOSITORY / "examples" / "drafters" / "smollm2-135m-b8"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded demo target."""
    from vllm_dflash.targets import target_folder

    return target_folder("smollm2")


@pytest.fixture(scope="session")
def drafter() -> Path:
    """The shipped drafter for it."""
    return DRAFTER


@pytest.fixture(scope="session")
def engine() -> Iterator[Callable[..., Engine]]:
    """Engines by their arguments, each started once in the session."""
    started: dict[Any, Engine] = {}

    def get(target: Path, drafter: Path | None = None, **arguments: Any) -> Engine:
        key = (str(target), str(drafter), repr(sorted(arguments.items())))
        if key not in started:
            started[key] = Engine(target, drafter, **arguments)
        return started[key]

    yield get
    started.clear()


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 target of 4 layers, hidden size 64, vocabulary 128, with random weights."""
    return write_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of 3 layers for `tiny_target`, whose K-norm weights differ between layers."""
    return write_tiny_drafter(tmp_path_factory.mktemp("tiny") / "drafter")


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2: Path) -> list[list[int]]:
    """Twenty word problems in SmolLM2's chat format, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    instruction = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question + instruction}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in WORD_PROBLEMS
    ]


WORD_PROBLEMS = [
    f"{name} buys {count} {things} for ${price} each and pays with a ${note} note. How much change does {name} get?"
    for name, count, things, price, note in [
        ("Mia", 4, "apples", 2, 20),
        ("Ben", 7, "pencils", 1, 10),
        ("Ada", 3, "books", 12, 50),
        ("Leo", 6, "tickets", 8, 100),
        ("Ivy", 9, "stamps", 3, 50),
        ("Max", 2, "shirts", 15, 50),
        ("Zoe", 8, "cookies", 2, 20),
        ("Sam", 5, "cups", 6, 50),
        ("Eva", 10, "eggs", 1, 20),
        ("Tim", 3, "games", 25, 100),
    ]
] + [
    f"A {vehicle} drives {speed} miles per hour for {hours} hours and then {extra} miles more. How far does it go?"
    for vehicle, speed, hours, extra in [
        ("train", 60, 3, 20),
        ("bus", 45, 2, 15),
        ("car", 70, 4, 5),
        ("truck", 50, 5, 35),
        ("van", 40, 6, 10),
        ("taxi", 30, 2, 12),
        ("tram", 20, 3, 4),
        ("coach", 55, 4, 30),
        ("jeep", 35, 2, 25),
        ("bike", 12, 3, 6),
    ]
]


@pytest.fixture(autouse=True)
def bfloat16_in_the_interpreter(request) -> None:
    """Kernels that are interpreted compute bfloat16 as a GPU does."""
    if request.path.parent.name == "kernels" and os.environ.get("TRITON_INTERPRET") == "1":
        import triton_interpreter

        triton_interpreter.install()


@pytest.fixture(autouse=True)
def one_thread(request) -> Iterator[None]:
    """Training tests run on one thread: on their tensors, two would mostly wait for each other."""
    num_threads = torch.get_num_threads()
    if request.path.parent.name == "training":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
