"""Texts that end a completion, found in its tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MARGIN = 4
"""Tokens at the start of a text that may be decoded differently without those before: a character
has at most 4 bytes, and some tokenizers drop a leading space.
"""


@dataclass(frozen=True, kw_only=True)
class StopStrings:
    """Stop strings of completions, with the tokenizer that decodes them.

    Attributes:
        texts: A completion ends with the first token after which its text contains one of these.
            Special tokens are part of the text.
        tokenizer: A transformers tokenizer.
    """

    texts: tuple[str, ...]
    tokenizer: Any = field(repr=False)

    def unwritable(self) -> list[str]:
        """Return the texts that the tokens of the tokenizer cannot spell."""
        found = []
        for text in self.texts:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if text not in self._decode(ids):
                found.append(text)
        return found

    def _decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens."""
        text: str = self.tokenizer.decode(
            list(tokens), clean_up_tokenization_spaces=False, skip_special_tokens=False
        )
        return text

    def first_unchecked(self, checked: int) -> int:
        """Return the first token to pass to `end_of`.

        Args:
            checked: Number of tokens of a completion that contain no stop string.
        """
        # A token has at least one byte.
        longest = max(len(text.encode()) for text in self.texts)
        return max(0, checked - longest - MARGIN)

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to the end of the first stop string; None if none."""

        def has_stop(count: int) -> bool:
            """Return True if the first `count` tokens contain a stop string."""
            text = self._decode(tokens[:count])
            return any(stop in text for stop in self.texts)

        if not has_stop(len(tokens)):
            return None
        # Bisection: if some number of tokens contains a stop string, so does every larger one.
        return bisect_left(range(len(tokens)), True, key=has_stop)
