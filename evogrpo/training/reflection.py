"""Language models that write proposals: OpenAI-compatible endpoints, and the proposer of GEPA."""

import os
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from evogrpo.extras import require
from evogrpo.members.language.vllm_server import Server, VLLMError
from evogrpo.training.proposals import ProposalFunction
from evogrpo.validation import PositiveFloat, PositiveInt, Text, settings


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _Message


class _Answer(BaseModel):
    choices: list[_Choice]


@settings
class Reflection:
    """Language model behind an OpenAI-compatible endpoint, which writes a text for a prompt.

    Redirects are not followed, and an answer is read up to `MAX_ANSWER` bytes.

    Attributes:
        url: Address of the server, with or without `/v1`.
        model: Name of the model there.
        api_key_env: Environment variable with the key; None = no key is sent.
        max_tokens: Maximum number of tokens of an answer.
        timeout: Time limit of a call in seconds, repetitions after failures included.
    """

    url: Text
    model: Text
    api_key_env: Text | None = None
    max_tokens: PositiveInt = 2000
    timeout: PositiveFloat = 60.0

    def __post_init__(self) -> None:
        self._server()
        if self.api_key_env is not None and self.api_key_env not in os.environ:
            raise ValueError(f"api_key_env names {self.api_key_env}, which is not set. Export it.")

    def _server(self) -> Server:
        """Client of the server; raises ValueError if its settings are invalid."""
        return Server(
            self.url.rstrip("/").removesuffix("/v1"),
            self.timeout,
            key_name=self.api_key_env,
            name="server of the proposer",
        )

    def __call__(self, prompt: str) -> str:
        """Return the model's answer.

        Raises:
            VLLMError: If there is no valid answer in time.
        """
        server = self._server()
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
        }
        status, content = server.call("/v1/chat/completions", body, ended=threading.Event())
        if status != HTTPStatus.OK:
            raise VLLMError(f"{self.url} answered with status {status}: {server.shown(content)}")
        answer = server.parsed(_Answer, content)
        if not answer.choices:
            raise VLLMError(f"{self.url} returned no answer.")
        return answer.choices[0].message.content


def gepa_proposer(reflection: Callable[[str], str]) -> ProposalFunction:
    """Return the default proposer of the package `gepa`.

    Args:
        reflection: Language model that writes a text for a prompt.

    Raises:
        ImportError: If `gepa` is not installed.

    Source: GEPA (arXiv:2507.19457), `InstructionProposalSignature` of its package.
    """
    require("The proposer gepa", "gepa")
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    def model(prompt: str | list[dict[str, Any]]) -> str:
        """Return the answer of the language model to a prompt."""
        # Prompts with images are messages; completions have none.
        assert isinstance(prompt, str)
        return reflection(prompt)

    def propose(
        candidate: dict[str, str],
        reflective_dataset: dict[str, list[dict[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Return new texts by name, which the language model writes."""
        texts = {}
        for name in components_to_update:
            inputs = {
                "current_instruction_doc": candidate[name],
                "dataset_with_feedback": reflective_dataset[name],
            }
            texts[name] = InstructionProposalSignature.run(lm=model, input_dict=inputs)[
                "new_instruction"
            ]
        return texts

    return propose
