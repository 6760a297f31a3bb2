"""Conversations token by token."""

from hypothesis import given
from hypothesis import strategies as st

from evogrpo.data import Conversation, single_turn_conversations

parts = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=7)


@given(turns=parts)
def test_tokens_are_completions_and_replies_in_turns(turns):
    conversation = Conversation(row=0, start=0, completions=tuple(turns[::2]), replies=tuple(turns[1::2]))
    assert conversation.turns == tuple(turns)
    assert conversation.tokens == sum(turns, ())
    own = [token for token, said in zip(conversation.tokens, conversation.sampled, strict=True) if said]
    assert own == [token for part in turns[::2] for token in part]


def test_single_turn_conversations_are_numbered_in_order():
    one, other = single_turn_conversations([4, 0], [[7, 8], []])
    assert (one.row, one.start, one.completions, one.replies) == (0, 4, ((7, 8),), ())
    assert (other.row, other.start, other.tokens) == (1, 0, ())
