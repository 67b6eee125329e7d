"""What our code relies on in vLLM, as one table: each name, what we use of it, and which of our files does.

test_contract.py holds it against the installed vLLM and against the source of the other release that we support.
"""

from __future__ import annotations

from vllm_contract.front_end import FRONT_END
from vllm_contract.model import MODEL
from vllm_contract.row import Row
from vllm_contract.runner import RUNNER
from vllm_contract.scheduling import SCHEDULING

__all__ = ["CONTRACT", "Row"]

#: By module of vLLM; each module is in one part alone.
CONTRACT: dict[str, tuple[Row, ...]] = FRONT_END | MODEL | RUNNER | SCHEDULING
assert len(CONTRACT) == sum(map(len, (FRONT_END, MODEL, RUNNER, SCHEDULING))), "a module of vLLM is in two parts"
