"""Texts in, texts out: prompts a caller writes, and what a member answers them with."""

import numpy as np
import torch

from evogrpo.agents.learning.learner import Learner
from evogrpo.agents.members.members import TextRequest
from evogrpo.agents.members.tokens.language_settings import LanguageSettings
from evogrpo.data import Rollout, SamplingBatch
from evogrpo.envs.prompts.templates import Tokenizer, check_messages, tokenize
from evogrpo.randomness import generator


def text_rows(asked: TextRequest, tokenizer: Tokenizer, learner: Learner, settings: LanguageSettings) -> SamplingBatch:
    """Return rows in which a member answers texts or conversations, `n` times each, prompt by prompt.

    Raises:
        ValueError: If the prompts are no list of texts or of conversations, or a number is out of range.
    """
    prompts, n, temperature = asked.prompts, asked.n, asked.temperature
    if isinstance(prompts, str) or any(isinstance(prompt, dict) for prompt in prompts):
        raise ValueError("prompts must be a list of texts or of conversations: put a single one into a list")
    most = settings.max_output_tokens if asked.max_output_tokens is None else asked.max_output_tokens
    for name, number in (("n", n), ("max_output_tokens", most)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0, and 0 takes what is most likely, got {temperature}")
    plain = [prompt if isinstance(prompt, str) else check_messages(prompt, "a prompt") for prompt in prompts]
    ids = tokenize(iter([(prompt, {}) for prompt in plain]), tokenizer, "generate")
    count = len(ids) * n
    rng = generator(settings.seed, "generate", learner.index, asked.calls)
    return SamplingBatch(
        prompts=tuple(tuple(prompt) for prompt in ids),
        prompt_ids=torch.arange(len(ids)).repeat_interleave(n),
        member_ids=torch.full((count,), learner.slot),
        temperature=torch.full((count,), float(temperature)),
        uniforms=torch.from_numpy(rng.random((count, most), dtype=np.float32)),
        min_new_tokens=min(settings.min_output_tokens, most),
        options=settings.sampling_options,
    )


def texts_of(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """Return the texts of a rollout's rows, special tokens left out."""
    return [
        str(tokenizer.decode(tokens[present].tolist(), skip_special_tokens=True))
        for tokens, present in zip(rollout.actions, rollout.present, strict=True)
    ]
