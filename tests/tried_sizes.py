"""Sizes of micro-batches that are tried where memory alone decides, so small that tiny work is split by them."""

import math
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from evogrpo.policies.tokens import sizing


def room_for(tokens: int) -> AbstractContextManager[Any]:
    """Let trials take the largest power of two that there is room for, from 16 on."""
    return patch.multiple(sizing, LEAST=16, PIECE=4, FASTER=math.inf, _room=lambda *_: tokens)
