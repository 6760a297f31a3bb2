"""Settings of members that are language models."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from evogrpo.hyperparameters import finite_number, refuse_unknown, whole_number
from evogrpo.objective import Objective, Optimizer
from evogrpo.records import SamplingOptions


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """Settings of a language-model population that do not evolve and that a checkpoint stores.

    Attributes:
        pad_token_id: Token used for padding.
        eos_token_ids: Tokens that end a completion.
        max_output_tokens: Most tokens of a completion; of a conversation, of each of its turns.
        min_output_tokens: Ends of sequence are ruled out for that many first tokens of a completion or turn, while
            sampling and learning.
        max_episode_tokens: Most tokens of a conversation, said and heard together: it goes on while a whole further
            turn fits. None = as many as the model's context takes.
        top_k: Completions are drawn from so many of the most likely tokens; 0 = all. See `SamplingOptions`, like the
            next three.
        top_p: From the most likely tokens that together have this probability; 1 = all.
        min_p: From tokens at least this many times as likely as the most likely one; 0 = all.
        repetition_penalty: Makes tokens that are there already less likely, in greedy answers too; 1 = none.
        objective: The loss.
        optimizer: AdamW settings.
        seed: Root of every random stream.
        calc_position_embeddings: Whether positions, counted without padding, are passed to the model.
        reduce_memory_peak: Whether log-probabilities are computed over a few hundred tokens' logits at a time.
        micro_batch_tokens: Most tokens in one forward pass with gradients.
    """

    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    max_output_tokens: int = 128
    min_output_tokens: int = 0
    max_episode_tokens: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 0
    calc_position_embeddings: bool = True
    reduce_memory_peak: bool = True
    micro_batch_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.max_output_tokens < 1:
            raise ValueError(f"max_output_tokens must be at least 1, got {self.max_output_tokens}")
        if not 0 <= self.min_output_tokens <= self.max_output_tokens:
            raise ValueError(
                f"min_output_tokens must lie in [0, max_output_tokens = {self.max_output_tokens}], "
                f"got {self.min_output_tokens}"
            )
        if self.max_episode_tokens is not None and self.max_episode_tokens < self.max_output_tokens:
            raise ValueError(
                f"max_episode_tokens must be at least max_output_tokens = {self.max_output_tokens}, so that a first "
                f"turn fits, got {self.max_episode_tokens}"
            )
        buffer = self.objective.overlong_buffer
        if buffer is not None and buffer > self.max_output_tokens:
            raise ValueError(
                f"overlong_buffer must be at most max_output_tokens = {self.max_output_tokens}, got {buffer}"
            )
        whole_number("top_k", self.top_k)
        for name in ("top_p", "min_p", "repetition_penalty"):
            finite_number(name, getattr(self, name))
        _ = self.sampling_options  # refuses what is out of range
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1, got {self.micro_batch_tokens}")

    @property
    def sampling_options(self) -> SamplingOptions:
        """From how much of the distribution completions are drawn."""
        return SamplingOptions(
            top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, repetition_penalty=self.repetition_penalty
        )

    @property
    def max_actions(self) -> int:
        """The most actions of a row that is learnt from; without `max_episode_tokens` those of a single turn."""
        return self.max_episode_tokens or self.max_output_tokens

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned; raises ValueError for an unknown name or a refused value."""
        refuse_unknown("setting", values, cls.__dataclass_fields__)
        plain = dict(values)
        plain["eos_token_ids"] = tuple(plain["eos_token_ids"])
        plain["objective"] = Objective(**plain["objective"])
        plain["optimizer"] = Optimizer(**plain["optimizer"])
        return cls(**plain)
