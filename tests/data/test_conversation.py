"""Conversations token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.data.rollout import Conversation, single_turn_conversations

parts = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=7)


@given(turns=parts)
def test_tokens_are_what_was_said_and_heard_in_turns(turns):
    transcript = Conversation(row=0, start=0, completions=tuple(turns[::2]), replies=tuple(turns[1::2]))
    assert transcript.turns == tuple(turns)
    assert transcript.tokens == sum(turns, ())
    own = [token for token, said in zip(transcript.tokens, transcript.sampled, strict=True) if said]
    assert own == [token for part in turns[::2] for token in part]


@pytest.mark.parametrize(("said", "heard"), [(0, 0), (0, 1), (1, 2), (3, 1)])
def test_who_does_not_take_turns_is_refused(said, heard):
    with pytest.raises(ValueError, match=f"take turns.*got {said} completions and {heard} replies"):
        Conversation(row=0, start=0, completions=((1,),) * said, replies=((2,),) * heard)


def test_one_turn_each():
    one, other = single_turn_conversations([4, 0], [[7, 8], []])
    assert (one.row, one.start, one.completions, one.replies) == (0, 4, ((7, 8),), ())
    assert (other.row, other.start, other.tokens) == (1, 0, ())
    with pytest.raises(ValueError, match="2 starts for 1 completions"):
        single_turn_conversations([0, 1], [[1]])
