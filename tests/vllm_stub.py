"""A module `vllm` of tests, with the parts of vLLM's Python interface that evogrpo uses."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import pytest
from transformers import PreTrainedModel

from evogrpo.members.language.peft_files import read_adapter
from tests.vllm_server import BASE, FakeEngine


@dataclass
class SamplingParams:
    """Sampling parameters; an unknown one raises TypeError."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    stop_token_ids: list[int]
    logprobs: int
    detokenize: bool = True
    stop: list[str] = field(default_factory=list)
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        assert self.detokenize or not self.stop, "stop strings are looked for in text"


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, its number, and the folder from which it is loaded when it is used."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    token_ids: Sequence[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """An engine over a tiny model; it sleeps and wakes up.

    Attributes:
        make_model: Returns the base model; it takes the name and dtype of the constructor.
        fault: Changes the completions of `generate`; None = none.
        engines: All engines so far.
        settings: Arguments of the constructor.
        variables: Environment of the constructor that vLLM reads.
        calls: Names of the methods called, in order.
        rows: Number of completions so far.
    """

    make_model: ClassVar[Callable[[str, str], PreTrainedModel]]
    fault: ClassVar[Callable[[CompletionOutput], object] | None] = None
    engines: ClassVar[list["LLM"]] = []

    def __init__(self, model: str, *, dtype: str, seed: int, **settings: Any) -> None:
        self.settings = {"model": model, "dtype": dtype, "seed": seed, **settings}
        assert {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        self.variables = {name: os.environ[name] for name in names}
        self.calls: list[str] = []
        self.rows = 0
        self.awake = True
        processed = settings["logprobs_mode"] == "processed_logprobs"
        self._engine = FakeEngine(type(self).make_model(model, dtype), processed=processed)
        # vLLM recognises an adapter by its number.
        self._loaded: dict[int, LoRARequest] = {}
        type(self).engines.append(self)

    def sleep(self, level: int = 1) -> None:
        assert self.awake, "an engine that sleeps is not put to sleep"
        # Level 2 loses the weights.
        assert level == 1
        self.awake = False
        self.calls.append("sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        assert not self.awake
        assert tags is None, "parts of an engine are not woken up"
        self.awake = True
        self.calls.append("wake_up")

    def generate(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        sampling_params: Sequence[SamplingParams],
        *,
        lora_request: Sequence[LoRARequest] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        assert self.awake, "an engine that sleeps has no weights"
        assert not use_tqdm
        self.calls.append("generate")
        self.rows += len(prompts)
        adapters: Sequence[LoRARequest | None] = lora_request or [None] * len(prompts)
        # 1. Rows with the same parameters and adapter are one request.
        groups: dict[tuple[str, LoRARequest | None], list[int]] = {}
        rows = zip(prompts, sampling_params, adapters, strict=True)
        for row, (_, parameters, adapter) in enumerate(rows):
            groups.setdefault((repr(parameters), adapter), []).append(row)
        # 2. Complete them.
        outputs: dict[int, RequestOutput] = {}
        for (_, adapter), numbers in groups.items():
            tokens = [prompts[row]["prompt_token_ids"] for row in numbers]
            body = {"prompt": tokens, "model": self._name_of(adapter)}
            body |= asdict(sampling_params[numbers[0]])
            if not body["stop"]:
                del body["stop"]
            choices = self._engine.complete(body)["choices"]
            for row, choice in zip(numbers, choices, strict=True):
                outputs[row] = self._output(prompts[row]["prompt_token_ids"], choice)
        return [outputs[row] for row in range(len(prompts))]

    def _output(self, prompt: list[int], choice: Mapping[str, Any]) -> RequestOutput:
        values = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        completion = CompletionOutput(
            token_ids=tuple(choice["token_ids"]),
            # vLLM may add a more likely token than the sampled one.
            logprobs=[{-1: Logprob(0.0), token: Logprob(value)} for token, value in values],
            finish_reason=choice["finish_reason"],
        )
        if type(self).fault is not None:
            type(self).fault(completion)
        return RequestOutput(prompt, [completion])

    def _name_of(self, adapter: LoRARequest | None) -> str:
        """Return the model's name of a request, whose adapter is loaded at its first use."""
        if adapter is None:
            return BASE
        assert adapter.lora_int_id >= 1
        if adapter.lora_int_id not in self._loaded:
            rank = read_adapter(adapter.lora_path).lora_config.r
            assert rank <= self.settings["max_lora_rank"]
            self._engine.load(str(adapter.lora_int_id), adapter.lora_path)
            self._loaded[adapter.lora_int_id] = adapter
        assert self._loaded[adapter.lora_int_id] == adapter, "each adapter has its own number"
        return str(adapter.lora_int_id)


def install(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[[str, str], PreTrainedModel]
) -> type[LLM]:
    """Install the module for a test, and return its engine."""
    engine = type("LLM", (LLM,), {"make_model": staticmethod(make_model), "engines": []})
    vllm = ModuleType("vllm")
    vllm.__spec__ = ModuleSpec("vllm", None)
    request = ModuleType("vllm.lora.request")
    monkeypatch.setattr(vllm, "LLM", engine, raising=False)
    monkeypatch.setattr(vllm, "SamplingParams", SamplingParams, raising=False)
    monkeypatch.setattr(request, "LoRARequest", LoRARequest, raising=False)
    for module in (vllm, ModuleType("vllm.lora"), request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return engine
