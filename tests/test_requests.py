"""What a request may say about drafting."""

from __future__ import annotations

import pytest

from vllm_dflash.requests import draft_limit


@pytest.mark.parametrize(
    ("extra_args", "limit"),
    [
        (None, None),
        ({}, None),
        ({"other": "x"}, None),
        ({"dflash": True}, None),
        ({"dflash": False}, 0),
        ({"dflash": 0}, 0),  # how a JSON false arrives
        ({"dflash_max_draft": 2}, 2),
        ({"dflash_max_draft": 0}, 0),
        ({"dflash": False, "dflash_max_draft": 2}, 0),
    ],
)
def test_limits(extra_args, limit):
    assert draft_limit(extra_args) == limit


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"dflash": "off"}, "'dflash' is 'off'; give true or false"),
        ({"dflash": 2}, "'dflash' is 2; give true or false"),
        ({"dflash_max_draft": -1}, "'dflash_max_draft' is -1; give a whole number"),
        ({"dflash_max_draft": 1.5}, "is 1.5; give a whole number"),
        ({"dflash_max_draft": True}, "is True; give a whole number"),
        ({"dflash_max_drafts": 2}, "has no 'dflash_max_drafts'; there are 'dflash' and 'dflash_max_draft'"),
    ],
)
def test_values_without_meaning_are_refused(extra_args, message):
    with pytest.raises(ValueError, match=message):
        draft_limit(extra_args)
