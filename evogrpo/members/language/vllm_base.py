"""Base class of samplers for vLLM: adapters in files, sampling parameters, checked completions."""

import shutil
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from evogrpo.members.bank import FinishedCallback
from evogrpo.members.language.bank import AdapterBank
from evogrpo.members.language.compatibility import is_quantised, vocabulary_of
from evogrpo.members.language.peft_files import CONFIG, TENSORS
from evogrpo.members.language.vllm_server import SUPPORTED_SERVERS, Choice, VLLMError
from evogrpo.records import Batch, Rollout, SamplingBatch, TokenInputs
from evogrpo.text import expand_user

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as the largest rank."""
# Prompt, completions, their length and the temperature of the check at the start. It detects an
# engine that reports raw log-probabilities, those of temperature 1.
PROBE = tuple(range(32, 40))
PROBE_ROWS = 8
PROBE_TOKENS = 16
PROBE_TEMPERATURE = 2.0
# Largest mean difference between log-probabilities of vLLM and trainer, in nats, by the precision
# of the base.
EXACT_DIFFERENCE = 0.05
HALF_PRECISION_DIFFERENCE = 0.5


def largest_rank(rank: int | None) -> int:
    """Return the smallest limit on LoRA ranks that vLLM accepts for a rank.

    Args:
        rank: LoRA rank of the members; None if they train all weights.

    Raises:
        ValueError: If vLLM does not support the rank, or members train all weights.
    """
    if rank is None:
        raise ValueError(
            "vLLM samples LoRA adapters only. Leave out full_finetuning, or the sampler."
        )
    if rank > LORA_RANKS[-1]:
        raise ValueError(
            f"vLLM supports LoRA ranks up to {LORA_RANKS[-1]}, got {rank}. Use a smaller rank."
        )
    return next(each for each in LORA_RANKS if each >= rank)


def served_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the precision in which vLLM serves a base model and its adapters."""
    if is_quantised(model):
        # A quantised base computes in bfloat16, and vLLM serves the plain model.
        return torch.bfloat16
    return next(model.parameters()).dtype


class VLLMBase:
    """Connection of members to engines of vLLM; see `evogrpo.members.bank.Sampler`.

    Changed adapters are written to a new folder and have a new name, so cached prefixes of old
    weights are never used.

    Args:
        adapters_dir: Folder for adapters.

    Raises:
        ValueError: If it is no path.
    """

    def __init__(self, adapters_dir: str | Path) -> None:
        # A folder and names of its own: several runs may share servers and adapters_dir.
        self._id = uuid.uuid4().hex[:12]
        self._adapters_dir = expand_user(adapters_dir, "adapters_dir").absolute()
        self._bank: AdapterBank | None = None
        # By slot: the bank's change counter of the newest adapter that vLLM has.
        self._versions: dict[int, int] = {}
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def connect(self, bank: AdapterBank) -> None:
        """Check that vLLM has a bank's base model, and load its adapters. Called on all ranks."""
        raise NotImplementedError

    def _connected(self) -> AdapterBank:
        """Return the bank of the members, or raise ValueError."""
        if self._bank is None:
            raise ValueError("The sampler has no members. Pass it to population.sample_with.")
        return self._bank

    # ---- adapters

    @property
    def _folder(self) -> Path:
        return self._adapters_dir / f"evogrpo-{self._id}"

    def _name(self, slot: int, version: int) -> str:
        """Return the name of an adapter in vLLM, and of its folder."""
        return f"evogrpo-{self._id}-{slot}-{version}"

    def _changed(self, slots: Sequence[int]) -> list[int]:
        """Return the slots whose weights have changed since vLLM got their adapter."""
        bank = self._connected()
        return [slot for slot in slots if self._versions.get(slot) != bank.changes[slot]]

    def _write(self, slot: int) -> Path:
        """Write a member in PEFT's format to the folder of its current version."""
        # The folder has a new name for every version, as names of adapters do.
        bank = self._connected()
        dtype = served_dtype(bank.base.model)
        tensors, config = bank.peft_files(slot)
        folder = self._folder / self._name(slot, bank.changes[slot])
        folder.mkdir(parents=True, exist_ok=True)
        # vLLM computes in this precision, so the files need no more digits.
        rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        save_file(rounded, folder / TENSORS)
        (folder / CONFIG).write_bytes(config)
        return folder

    def _keep_current(self, slots: Sequence[int]) -> None:
        """Record the versions of these slots, and remove the files of their old adapters."""
        bank = self._connected()
        for slot in slots:
            if slot in self._versions:
                old = self._folder / self._name(slot, self._versions[slot])
                shutil.rmtree(old, ignore_errors=True)
            self._versions[slot] = bank.changes[slot]

    # ---- check of the base model

    def _difference(self, sample: Callable[[SamplingBatch], Rollout]) -> str | None:
        """Return how vLLM's log-probabilities differ from the trainer's, if by more than rounding.

        Args:
            sample: Samples from the base model in vLLM. All ranks score what rank 0 gets.
        """
        # 1. Sample.
        bank = self._connected()
        vocabulary = vocabulary_of(bank.base.model)
        prompt = tuple(token % vocabulary for token in PROBE)
        zeros = torch.zeros(PROBE_ROWS, dtype=torch.long)
        rows = SamplingBatch(
            prompts=(prompt,),
            prompt_ids=zeros,
            member_ids=zeros,
            temperature=torch.full((PROBE_ROWS,), PROBE_TEMPERATURE),
            max_new_tokens=PROBE_TOKENS,
        )
        rollout = bank.processes.gather_results(lambda: sample(rows))[0]
        # 2. Score the same tokens.
        device = bank.base.device
        present = rollout.present.to(device)
        zeros = zeros.to(device)
        batch = Batch(
            inputs=TokenInputs(
                prompts=rows.prompts,
                prompt_ids=zeros,
                temperature=rows.temperature.to(device),
                min_new_tokens=0,
            ),
            actions=rollout.actions.to(device),
            present=present,
            action_mask=present,
            rewards=torch.zeros(PROBE_ROWS, device=device),
            group_ids=zeros,
            member_ids=zeros,
        )
        scored = bank.log_probs(batch, base=True).cpu()
        # 3. Compare.
        differences = (rollout.log_probs - scored)[rollout.present]
        difference = float(differences.abs().mean())
        largest = HALF_PRECISION_DIFFERENCE
        precision = ""
        if bank.base.exact and not is_quantised(bank.base.model):
            largest = EXACT_DIFFERENCE
            precision = " in float32"
        if difference <= largest:
            return None
        return (
            f"with log-probabilities that differ from those of the trainer's base model by"
            f" {difference:.3g} nats on average. Serve the same model{precision}"
        )

    # ---- completions

    def _prompts(self, rows: SamplingBatch, numbers: Sequence[int]) -> list[list[int]]:
        """Return the token ids before the completions of these rows."""
        prompts = []
        for row in numbers:
            tokens = list(rows.prompts[rows.prompt_ids[row]])
            if rows.history is not None:
                tokens += rows.history[row]
            prompts.append(tokens)
        return prompts

    def _parameters(self, rows: SamplingBatch, temperature: float) -> dict[str, Any]:
        """Return vLLM's sampling parameters of rows with one temperature."""
        options = rows.options
        parameters = {
            "max_tokens": rows.max_new_tokens,
            "min_tokens": min(rows.min_new_tokens, rows.max_new_tokens),
            "temperature": temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
            "min_p": options.min_p,
            "repetition_penalty": options.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,  # only the trainer's end tokens count
            "stop_token_ids": self._connected().end_ids.tolist(),
            "logprobs": 0,  # of the sampled tokens only
        }
        if rows.stop_strings is not None:
            parameters["stop"] = list(rows.stop_strings.texts)
            # Stop strings may be special tokens.
            parameters["skip_special_tokens"] = False
        return parameters

    def _check(
        self,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        rows: SamplingBatch,
        source: str,
    ) -> None:
        """Check completions of prompts, and cut them after their stop strings.

        Args:
            choices: One completion for each prompt.
            prompts: Token ids of the prompts.
            rows: What was requested.
            source: Name of the engine in messages.

        Raises:
            VLLMError: If a completion is invalid.
        """
        bank = self._connected()
        ends = bank.end_ids.tolist()
        vocabulary = vocabulary_of(bank.base.model)
        longest = rows.max_new_tokens
        shortest = min(rows.min_new_tokens, longest)
        for choice, prompt in zip(choices, prompts, strict=True):
            if choice.prompt_token_ids not in (None, prompt):
                raise VLLMError(
                    f"{source} returned the completions in another order than the prompts."
                    f" {SUPPORTED_SERVERS}"
                )
            # `_finish` also cuts the completion, and sets its finish reason.
            if not _finish(choice, rows, ends, vocabulary):
                tokens = choice.token_ids
                places = [place for place, token in enumerate(tokens) if token in ends]
                raise VLLMError(
                    f"{source} returned a completion of {len(tokens)} tokens,"
                    f" {len(choice.logprobs.token_logprobs)} log-probabilities and end tokens at"
                    f" {places}, but {shortest} to {longest} tokens up to the first end token were"
                    " requested. Check its --max-model-len."
                )


class Completions:
    """Completions of a batch, added in any order.

    Args:
        rows: The batch.
        pad_id: Token after the end of a completion.
        on_finished: Called with added completions; see `Sampler.sample`.
    """

    def __init__(
        self, rows: SamplingBatch, pad_id: int, on_finished: FinishedCallback | None
    ) -> None:
        self._rows = rows
        self._on_finished = on_finished
        self._counter = rows.stop.progress("writing", len(rows), "completions")
        self._actions = torch.full((len(rows), rows.max_new_tokens), pad_id)
        self._log_probs = torch.zeros(len(rows), rows.max_new_tokens, dtype=torch.float32)
        self._lengths = torch.zeros(len(rows), dtype=torch.long)
        self._stopped = torch.zeros(len(rows), dtype=torch.bool)

    def add(self, numbers: Sequence[int], choices: Sequence[Choice]) -> None:
        """Add the completions of some rows, which were checked."""
        for row, choice in zip(numbers, choices, strict=True):
            length = len(choice.token_ids)
            self._lengths[row] = length
            self._stopped[row] = choice.finish_reason == "stop"
            self._actions[row, :length] = torch.tensor(choice.token_ids)
            # A greedy token is certain.
            if self._rows.temperature[row]:
                values = torch.tensor(choice.logprobs.token_logprobs)
                self._log_probs[row, :length] = values.clamp(max=0.0)
        self._counter.add(len(numbers))
        if self._on_finished is not None:
            self._on_finished(numbers, [choice.token_ids for choice in choices])

    def rollout(self) -> Rollout:
        """Return the completions; rows without an end token or stop string are truncated."""
        present = torch.arange(self._actions.shape[1]) < self._lengths[:, None]
        return Rollout(
            actions=self._actions,
            present=present,
            log_probs=self._log_probs,
            truncated=~self._stopped,
            exact=False,
        )


def _finish(choice: Choice, rows: SamplingBatch, ends: Sequence[int], vocabulary: int) -> bool:
    """Cut a completion after its first stop string, and set its finish reason.

    Returns:
        False if the completion is invalid. It must end with its only end token or with a stop
        string, or have the maximum length.
    """
    # 1. Compare tokens and log-probabilities.
    tokens = choice.token_ids
    values = choice.logprobs.token_logprobs
    if len(values) != len(tokens) or max(tokens) >= vocabulary:
        return False
    # 2. Find the stop string. The server decodes completions together with their prompts, so it may
    #    find one that the tokens of the completion alone do not show.
    stopped = False
    if rows.stop_strings is not None:
        stopped = choice.finish_reason == "stop"
        end = rows.stop_strings.end_of(tokens)
        if end is not None:
            stopped = True
            tokens = tokens[:end]
            choice.token_ids = tokens
            choice.logprobs.token_logprobs = values[:end]
    # 3. Find the end token.
    longest = rows.max_new_tokens
    places = [place for place, token in enumerate(tokens) if token in ends]
    choice.finish_reason = "length"
    if places or stopped:
        choice.finish_reason = "stop"
    if places:
        # The first end token is the last token, and enough tokens come before it.
        first_end = places[0]
        is_last = first_end == len(tokens) - 1
        shortest = min(rows.min_new_tokens, longest)
        return is_last and shortest <= first_end < longest
    return stopped or len(tokens) == longest
