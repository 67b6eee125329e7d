"""A row of the contract."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One name in a module of vLLM and what must be true of it; without more, that it exists.

    Lists of names are separated by spaces. `self` is never among the parameters.
    """

    name: str  # a class, a method (Class.method), a function, a constant
    used_by: str  # our files, separated by commas
    signature: str | None = None  # all parameters in order: vLLM calls ours in its place
    call: str | None = None  # what we pass: by position before "*", by keyword after it
    returns: str | None = None  # the return annotation
    fields: str = ""  # of a dataclass
    members: str = ""  # methods, properties, class attributes
    lacks: str = ""  # members that the class does not define itself
    bases: str = ""  # classes that it derives from
    sets: str = ""  # attributes that the method assigns to self
    contains: str = ""  # code in the source, parts separated by ";"; `_` is any expression, `f(...)` any call of f
    value: object = None  # of a constant
