"""Sampler for vLLM in the trainer's process: both share a GPU, and vLLM sleeps during learning."""

import importlib
import importlib.util
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from evogrpo.extras import MissingPackageError
from evogrpo.members.bank import FinishedCallback
from evogrpo.members.language.bank import AdapterBank
from evogrpo.members.language.loading import loadable_name
from evogrpo.members.language.vllm_base import (
    Completions,
    VLLMBase,
    largest_rank,
    served_dtype,
)
from evogrpo.members.language.vllm_server import Choice, VLLMError
from evogrpo.records import Rollout, SamplingBatch
from evogrpo.text import class_name, one_line
from evogrpo.validation import finite_number, whole_between

SLEEP_LEVEL = 1
"""vLLM keeps its weights in the memory of the CPU while it sleeps, and drops its KV cache."""


class ColocatedVLLMSampler(VLLMBase):
    """Samples completions with vLLM in this process, on the GPU of the trainer.

    vLLM wakes up for each call of `sample` and sleeps afterwards, so that its memory is free for
    learning. With several ranks, each has an engine on its own GPU and samples its share of the
    rows. `Population.sample_with` starts the engine.

    Args:
        gpu_memory_utilization: Fraction of the GPU's memory that vLLM may use while it samples, for
            its copy of the base model, the adapters and the KV cache. The rest must hold what the
            trainer keeps: base model, members and optimizer moments.
        max_model_len: Maximum tokens of a prompt with its completion; None = the model's context.
            The KV cache must hold one such row.
        adapters_dir: Folder for adapters; None = that of temporary files.

    Raises:
        MissingPackageError: If vllm is not installed.
        ValueError: If an argument is invalid.
    """

    def __init__(
        self,
        *,
        gpu_memory_utilization: float = 0.3,
        max_model_len: int | None = None,
        adapters_dir: str | Path | None = None,
    ) -> None:
        fraction = finite_number("gpu_memory_utilization", gpu_memory_utilization)
        if not 0 < fraction <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {fraction}."
            )
        if max_model_len is not None:
            max_model_len = whole_between("max_model_len", max_model_len, 1)
        if importlib.util.find_spec("vllm") is None:
            raise MissingPackageError(
                "vllm_colocate requires vllm, which is not installed. Install a version that works"
                " with the installed transformers, or use a vLLM server:"
                " sampler: {vllm: URL, adapters_dir: FOLDER}."
            )
        super().__init__(tempfile.gettempdir() if adapters_dir is None else adapters_dir)
        self._options = {"gpu_memory_utilization": fraction, "max_model_len": max_model_len}
        self._engine: Any = None
        # By slot: the LoRARequest of its newest adapter. vLLM loads it when it is first used.
        self._adapters: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    def connect(self, bank: AdapterBank) -> None:
        """Start vLLM with a bank's base model, and check its log-probabilities.

        Raises:
            VLLMError: If vLLM does not start, or has another model.
            ValueError: If members train all weights, or the base model has no files.
        """
        largest_rank(bank.trained.rank)
        self._bank = bank
        self._versions = {}
        # 1. Start the engine of each rank. It sleeps until it is used.
        with bank.processes.shared_errors(), _torchrun_variables(bank):
            self._engine = self._start(bank)
        # 2. Compare the base model with the trainer's.
        difference = self._difference(lambda rows: self.sample(rows, base=True))
        if difference is not None:
            raise VLLMError(f"vLLM samples {difference}.")
        # 3. Write the adapters.
        self.sync(range(bank.size))

    def _start(self, bank: AdapterBank) -> Any:
        """Return a new engine with the base model, on the GPU of this rank; it sleeps."""
        model = loadable_name(bank.base.model)
        if model is None:
            raise ValueError(
                "vLLM loads the base model itself, but its source is unknown. Load it with"
                " evogrpo.load_base from a hub id or a folder."
            )
        torch.cuda.empty_cache()  # does nothing without CUDA
        with _reported("start"):
            engine = importlib.import_module("vllm").LLM(
                model=model,
                dtype=str(served_dtype(bank.base.model)).removeprefix("torch."),
                # Ranks must not draw the same random numbers.
                seed=(bank.seed + bank.processes.rank) % 2**32,
                enable_lora=True,
                max_loras=bank.size,
                max_lora_rank=largest_rank(bank.trained.rank),
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                enable_sleep_mode=True,
                # In this process, on the GPU that LOCAL_RANK names.
                distributed_executor_backend="external_launcher",
                **self._options,
            )
            engine.sleep(level=SLEEP_LEVEL)
        return engine

    def sync(self, slots: Sequence[int]) -> None:
        """Write the adapters of these slots, if their weights have changed.

        vLLM sleeps, so it loads them when it samples.
        """
        bank = self._connected()
        changed = self._changed(slots)
        with bank.processes.shared_errors():
            adapter = importlib.import_module("vllm.lora.request").LoRARequest
            for slot in changed:
                folder = self._write(slot)
                # vLLM identifies an adapter by its number, so each version gets a new one.
                number = next(self._numbers)
                self._adapters[slot] = adapter(folder.name, number, str(folder))
        self._keep_current(changed)

    def sample(
        self,
        rows: SamplingBatch,
        *,
        base: bool = False,
        on_finished: FinishedCallback | None = None,
    ) -> Rollout:
        """Sample one completion per row, all at once; a stop is noticed before and afterwards.

        vLLM draws its own random numbers and ignores `rows.uniforms`. Its log-probabilities differ
        a little from the trainer's, so `Rollout.exact` is False.

        Raises:
            VLLMError: If vLLM fails, or returns invalid completions.
        """
        # 1. Describe each row.
        bank = self._connected()
        rows.stop.check()
        completions = Completions(rows, bank.base.pad_id, on_finished)
        if not len(rows):
            return completions.rollout()
        numbers = range(len(rows))
        prompts = self._prompts(rows, numbers)
        new_parameters = importlib.import_module("vllm").SamplingParams
        # Of all parameters, rows differ in the temperature only.
        by_temperature = {
            temperature: new_parameters(
                **self._parameters(rows, temperature), detokenize=rows.stop_strings is not None
            )
            for temperature in set(rows.temperature.tolist())
        }
        adapters = None
        if not base:
            adapters = [self._adapters[slot] for slot in rows.member_ids.tolist()]
        # 2. Wake up, sample, and sleep.
        torch.cuda.empty_cache()
        with _reported("sample"):
            self._engine.wake_up()
            try:
                outputs = self._engine.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts],
                    [by_temperature[temperature] for temperature in rows.temperature.tolist()],
                    lora_request=adapters,
                    use_tqdm=False,
                )
            finally:
                self._engine.sleep(level=SLEEP_LEVEL)
        rows.stop.check()
        # 3. Check the completions.
        choices = [_choice(number, output) for number, output in enumerate(outputs)]
        self._check(choices, prompts, rows, "vLLM")
        completions.add(numbers, choices)
        return completions.rollout()


def _choice(number: int, output: Any) -> Choice:
    """Return the completion of an output of vLLM, which has one; VLLMError if it is invalid."""
    try:
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        # Of each token, by its id: the sampled one, and more likely ones in some versions.
        scores = zip(tokens, completion.logprobs, strict=True)
        values = {
            "index": number,
            "finish_reason": completion.finish_reason,
            "token_ids": tokens,
            "prompt_token_ids": list(output.prompt_token_ids),
            "logprobs": {"token_logprobs": [score[token].logprob for token, score in scores]},
        }
        return Choice.model_validate(values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise VLLMError(f"vLLM returned an invalid completion: {one_line(error)}") from error


@contextmanager
def _reported(action: str) -> Iterator[None]:
    """Raise exceptions of vLLM as errors after which a run is saved and can be resumed."""
    try:
        yield
    except Exception as error:
        raise VLLMError(
            f"vLLM could not {action}: {class_name(error)}: {one_line(error, 500)}"
        ) from error


@contextmanager
def _torchrun_variables(bank: AdapterBank) -> Iterator[None]:
    """Set the environment variables of torchrun, which vLLM reads, and restore them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Without torchrun, this is the only process, and any free port will do.
    variables = {
        "RANK": str(bank.processes.rank),
        "WORLD_SIZE": str(bank.processes.size),
        "LOCAL_RANK": str(bank.base.device.index or 0),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(port)),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
