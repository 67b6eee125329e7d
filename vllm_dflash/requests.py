"""What one request says about drafting: by its sampling parameters, and by `vllm_xargs` of the OpenAI API, which are
`SamplingParams.extra_args` in Python:

{"dflash": false}            no drafts for this request
{"dflash_max_draft": 3}      at most so many drafted tokens per cycle
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_dflash.draft_sampling import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

_SWITCH, _LIMIT = "dflash", "dflash_max_draft"


def draft_limit(extra_args: Mapping[str, Any] | None) -> int | None:
    """Most drafted tokens per cycle that a request asks for; None where it leaves that open.

    Raises:
        ValueError: a value that means nothing, or an unknown key of ours; says what can be given.
    """
    ours = {key: value for key, value in (extra_args or {}).items() if key.startswith(_SWITCH)}
    unknown = ours.keys() - {_SWITCH, _LIMIT}
    if unknown:
        raise ValueError(f"vllm_xargs has no {sorted(unknown)[0]!r}; there are '{_SWITCH}' and '{_LIMIT}'.")
    # A JSON false arrives as 0, because the field's type knows no booleans.
    if ours.get(_SWITCH, True) not in (True, False):
        raise ValueError(f"vllm_xargs '{_SWITCH}' is {ours[_SWITCH]!r}; give true or false.")
    limit = ours.get(_LIMIT)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise ValueError(f"vllm_xargs '{_LIMIT}' is {limit!r}; give a whole number of tokens, 0 for no drafts.")
    return limit if ours.get(_SWITCH, True) else 0


def draft_sampling(params: SamplingParams | None) -> Sampling:
    """What a request's drafts follow of its sampling parameters; a request without any is greedy."""
    if params is None:
        return Sampling(temperature=0.0)
    return Sampling(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
