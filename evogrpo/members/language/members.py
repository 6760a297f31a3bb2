"""LanguageMembers: language models on one frozen base, with an adapter or all weights each."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from evogrpo.arrays import FloatArray
from evogrpo.chat_templates import end_of_turn_ids
from evogrpo.config.agent import LanguageSettings
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.config.task_settings import TaskSettings
from evogrpo.distributed import Processes
from evogrpo.envs.protocol import GroupEnvironment, PromptBatch, Scores, Split, make_batch_for
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.templates import check_messages, tokenize
from evogrpo.interruption import Stop
from evogrpo.members.bank import Sampler
from evogrpo.members.devices import (
    DEFAULT_MICRO_BATCH_TOKENS,
    autocast_context,
    check_stored_size,
    choose_device,
)
from evogrpo.members.language.bank import AdapterBank
from evogrpo.members.language.compatibility import (
    check_context,
    check_token_ids,
    end_ids_of,
    is_quantised,
    vocabulary_of,
)
from evogrpo.members.language.conversations import rewarded_batch, sample_conversations
from evogrpo.members.language.fsdp import NEEDS_SAMPLER, sharded_over
from evogrpo.members.language.full_finetuning import choose_trained
from evogrpo.members.language.loading import fingerprint, load_named_base, load_tokenizer
from evogrpo.members.language.lora import lora_from_json, lora_to_json
from evogrpo.members.language.own_loop import Experiences, as_batch, as_completions, prompt_rows
from evogrpo.members.language.peft_files import StoredAdapter
from evogrpo.members.language.sizing import size_for_memory
from evogrpo.members.language.vllm_base import VLLMBase
from evogrpo.members.members import BankMembers, CheckpointFiles, SavedMembers, check_not_nan
from evogrpo.members.requests import (
    HELD_OUT,
    EvaluationRequest,
    Learner,
    RolloutBatch,
    SamplingRequest,
)
from evogrpo.members.space_json import space_from_json, space_to_json
from evogrpo.randomness import generator
from evogrpo.records import (
    DEFAULT_POLICY,
    Conversation,
    Experience,
    Rollout,
    SamplingBatch,
    unpadded,
)
from evogrpo.spaces import CompletionSpace
from evogrpo.stop_strings import StopStrings
from evogrpo.storage.checkpoint import CheckpointError
from evogrpo.text import class_name, shown
from evogrpo.validation import validate, whole_between
from evogrpo.warnings import warn, warn_of_literal_newline

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import LoraConfig
    from transformers import PreTrainedModel


class LanguageMembers(BankMembers):
    """Members that are language models over one frozen base; see `evogrpo.members.members.Members`.

    Args:
        model: The base model; moved to the device if one is given.
        size: Number of members.
        settings: Settings that do not evolve.
        hp_config: The search space; None = nothing evolves.
        lora_config: LoRA settings; None = members train all weights.
        source: Name that the base was loaded by; the model's own name by default.
        device: Device of the base; None = where it is.
        autocast: Returns the autocast context of forward passes.
        base_fingerprint: Fingerprint of the base, if known; None = compute it.
        observation_space: Observation space, if given.
        action_space: Action space, if given.
        initial_adapter: Adapter that members start from, and its lora_config; None = new ones.
        like: A bank with the same base and adapters, whose compatibility checks are not repeated.
        end_ids: Tokens that end a completion; None = those of the settings, or of the model and the
            action space.

    Attributes:
        settings: As given, with `micro_batch_tokens` set.
        bank: Weights and optimizers.
        sampler: Generates completions: the bank, or an external engine.
        initial_adapter: As given.
        source: As given.
        fingerprint: Fingerprint of the base.
    """

    kind = "language"
    step_based = False
    identity = ("fingerprint", "lora_config")
    """Keys of `checkpoint_record` that must be equal to load a saved member into an existing one.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        size: int,
        settings: LanguageSettings,
        hp_config: HyperparameterConfig | None,
        *,
        lora_config: "LoraConfig | None",
        source: str | None,
        device: str | torch.device | None = None,
        autocast: Callable[[], AbstractContextManager[None]],
        base_fingerprint: str | None = None,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        initial_adapter: StoredAdapter | None,
        like: AdapterBank | None = None,
        end_ids: Sequence[int] | None = None,
    ) -> None:
        # 1. Move the base model to the device, if one is given. A sharded or quantised one cannot
        #    be moved.
        immovable = sharded_over(model) > 1 or is_quantised(model)
        if device is not None and not immovable:
            model.to(device)  # type: ignore[arg-type]  # torch accepts a device or its name
        elif device is not None and torch.device(device).type != model.device.type:
            raise ValueError(
                f"A sharded or quantised base stays on {model.device.type}, where it was loaded."
                f" Load it with load_base(..., device={str(device)!r})."
            )
        # 2. Choose the tokens that end a completion.
        ends: Collection[int] = end_ids or settings.eos_token_ids or ()
        if not ends:
            ends = end_ids_of(model) | self._end_ids_in(action_space, model)
        if not ends:
            raise ValueError(
                "eos_token_ids must be given: neither the model's configuration nor the action"
                " space has a token that ends a completion."
            )
        # 3. Build the bank. On CUDA, the default size of micro-batches depends on the memory that
        #    members leave.
        self.hp_config = hp_config
        self.observation_space = observation_space
        self.action_space = action_space
        self.initial_adapter = initial_adapter
        self.bank = AdapterBank(
            model,
            size=size,
            pad_token_id=settings.pad_token_id,
            eos_token_ids=tuple(ends),
            lora_config=lora_config,
            optimizer=settings.optimizer,
            seed=settings.seed,
            micro_batch_tokens=settings.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS,
            reduce_memory_peak=settings.reduce_memory_peak,
            gradient_checkpointing=settings.gradient_checkpointing,
            explicit_positions=settings.calc_position_embeddings,
            autocast=autocast,
            own_reference=settings.objective.reference == "snapshot",
            initial_adapter=initial_adapter,
            like=like,
        )
        super().__init__({DEFAULT_POLICY: self.bank})
        self.device = self.bank.base.device
        if settings.micro_batch_tokens is None and self.device.type == "cuda":
            self.bank.micro_batch_tokens = size_for_memory(self.bank)
        self.settings = replace(settings, micro_batch_tokens=self.bank.micro_batch_tokens)
        # 4. Set the sampler, which has loaded no weights yet, and the identity of the base model.
        self.sampler: Sampler = self.bank
        self._loaded: list[int] | None = None
        name = getattr(model, "name_or_path", "")
        self.source = source or str(name or type(model).__name__)
        self.fingerprint = base_fingerprint or fingerprint(model)

    @property
    def processes(self) -> Processes:
        """Ranks that divide sampling, evaluation and micro-batches; this process alone at first."""
        return self.bank.processes

    @processes.setter
    def processes(self, processes: Processes) -> None:
        # All ranks must plan the same micro-batches, also where the default follows from the memory
        # of a rank's GPU.
        sizes = (self.bank.micro_batch_tokens, self.settings.micro_batch_tokens)
        sizes_of_ranks = processes.all_gather(sizes)
        current, initial = zip(*sizes_of_ranks, strict=True)
        self.bank.micro_batch_tokens = min(current)
        self.settings = replace(self.settings, micro_batch_tokens=min(initial))
        self.bank.processes = processes

    def new_member(self, *, wrap: bool = True) -> "LanguageMembers":
        """Return one new member over the same base, without an external sampler.

        Args:
            wrap: Keep the accelerator's mixed precision.
        """
        return LanguageMembers(
            self.bank.base.model,
            1,
            self.settings,
            self.hp_config,
            lora_config=self.bank.lora_config,
            initial_adapter=self.initial_adapter,
            source=self.source,
            autocast=self.bank.base.autocast if wrap else nullcontext,
            base_fingerprint=self.fingerprint,
            observation_space=self.observation_space,
            action_space=self.action_space,
            like=self.bank,
            end_ids=self.bank.end_ids.tolist(),
        )

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not in the settings."""
        return {
            "lora_config": self.bank.lora_config,
            "full_finetuning": self.bank.lora_config is None,
            "observation_space": self.observation_space,
            "action_space": self.action_space,
        }

    # ---- in environments

    def sample_with(self, sampler: Sampler) -> None:
        """Generate completions with an external engine. Called on all ranks.

        Raises:
            ValueError: If the engine lacks a method of `Sampler`.
        """
        for name in ("sample", "sync"):
            if not callable(getattr(sampler, name, None)):
                raise ValueError(
                    f"A sampler must have the methods sample and sync, got {shown(sampler)}."
                )
        if isinstance(sampler, VLLMBase):
            sampler.connect(self.bank)
        self.sampler = sampler
        self._loaded = None

    def check(self, env: Any) -> None:
        """Raise ValueError for environments without prompts, unknown tokens and long prompts.

        Warn of stop strings that completions cannot or will hardly contain.
        """
        batch = self._make_batch(env, "train", [0])
        if self._stop_strings is not None:
            unwritable = self._stop_strings.unwritable()
            if unwritable:
                warn(
                    f"stop_strings: the tokenizer has no tokens for {shown(unwritable)}, so"
                    " completions never end with them."
                )
            for text in self._stop_strings.texts:
                warn_of_literal_newline("stop_strings", text)
        # Environments may have the largest token and the length of the longest prompt of all their
        # prompts as attributes. Otherwise those of this batch are checked.
        largest = getattr(env, "largest_token", max(map(max, batch.prompts)))
        longest = getattr(env, "longest_prompt", max(map(len, batch.prompts)))
        check_token_ids(self.bank.base.model, [largest], "tokens of prompts")
        check_context(self.bank.base.context, longest + self.settings.max_output_tokens)

    @staticmethod
    def _end_ids_in(space: object, model: "PreTrainedModel") -> set[int]:
        """Return the tokens of the vocabulary that end a turn in an action space."""
        if not isinstance(space, CompletionSpace):
            return set()
        # A tokenizer may have more tokens than the model's vocabulary.
        return {token for token in space.end_ids if token < vocabulary_of(model)}

    def _make_batch(
        self,
        env: Any,
        split: Split,
        starts: Sequence[int],
        settings: Sequence[TaskSettings] = (),
    ) -> PromptBatch:
        """Make a batch of these starts.

        From then on, completions also end with the tokens that end a turn in the environment, and
        stop strings are decoded by its tokenizer.
        """
        batch = make_batch_for(env, split, starts, settings)
        if not isinstance(batch, PromptBatch):
            raise ValueError(
                f"Language models need an environment of prompts, but {class_name(env)} is played"
                " step by step. Use HuggingFaceGym, or train small networks: pass its"
                " observation_space and action_space."
            )
        space = getattr(env, "action_space", None)
        self._stop_strings = self._stop_strings_in(space)
        if self.settings.eos_token_ids is None:
            ends = self._end_ids_in(space, self.bank.base.model)
            ends.update(self.bank.end_ids.tolist())
            self.bank.end_ids = torch.tensor(sorted(ends), device=self.device)
        return batch

    def _stop_strings_in(self, space: object, tokenizer: Any = None) -> StopStrings | None:
        """Return the stop strings, decoded by a tokenizer, or else by that of an action space.

        None if the settings have none.
        """
        texts = self.settings.stop_strings
        if texts is None:
            return None
        if tokenizer is None:
            tokenizer = getattr(space, "tokenizer", None) or self._tokenizer
        return StopStrings(texts=texts, tokenizer=tokenizer)

    @cached_property
    def _stop_strings(self) -> StopStrings | None:
        """Stop strings; None if the settings have none."""
        # Replaced with every batch of an environment.
        return self._stop_strings_in(self.action_space)

    def sample(
        self, env: GroupEnvironment, starts: Sequence[int], request: SamplingRequest
    ) -> RolloutBatch:
        """Sample one completion or conversation for each requested row, and reward it.

        Row r, token t of a turn uses number `[r, t]` of the stream (seed, purpose, step, index,
        number); from the second turn on, the turn's number is appended to the purpose.

        Args:
            env: Provides prompts and rewards.
            starts: Training prompts.
            request: The rows.
        """
        # 1. Sample.
        prompts = self._make_batch(env, "train", starts, request.settings)

        def uniforms(turn: int) -> Tensor:
            drawn = self._draw(request.purpose, turn, request.streams, request.counts)
            return drawn[request.row_ids]  # this rank's rows

        rows, rollout, conversations = self._sample_rows(prompts, request, uniforms)
        # 2. Reward.
        began = time.monotonic()
        scores = self._score(prompts, conversations, request.stop)
        scoring_seconds = time.monotonic() - began
        # 3. Build the batch to learn from.
        batch = rewarded_batch(self.settings, rows, rollout, scores, group_ids=request.group_ids)
        return RolloutBatch(
            experience={DEFAULT_POLICY: batch},
            scores=replace(scores, step_rewards=None),
            member_ids=request.member_ids,
            start_ids=request.start_ids,
            truncated=rollout.truncated,
            tokens=self.bank.cost(batch),
            questions=tuple(prompts.questions),
            scoring_seconds=scoring_seconds,
        )

    def evaluate(
        self, env: GroupEnvironment, request: EvaluationRequest
    ) -> tuple[FloatArray, tuple[int, ...]]:
        """Complete held-out prompts greedily, or sampled at temperature 1.

        Token t of answer a to a question uses number `[a, t]` of the stream (seed, purpose,
        question); from the second turn on, the turn's number is appended to the purpose. External
        samplers draw their own random numbers.
        """
        prompts = self._make_batch(env, request.split, request.starts, request.start_settings)

        def uniforms(turn: int) -> Tensor:
            # Greedy rows ignore their numbers, but the width is the maximum length.
            if request.answers is None:
                rows = len(request.slots) * request.rows_per_slot
                return torch.zeros(rows, self.settings.max_output_tokens)
            # All slots use the same random numbers.
            counts = [request.answers_per_question] * len(request.questions)
            drawn = self._draw(HELD_OUT, turn, request.streams, counts)
            return drawn.repeat(len(request.slots), 1)

        rows, rollout, conversations = self._sample_rows(
            prompts, request, uniforms, base=request.base
        )
        lengths = rollout.present.sum(1).tolist()
        costs = self.bank.tokens_of(rows.prompts, rows.prompt_ids, rows.member_ids, lengths)
        rewards = self._score(prompts, conversations, request.stop).rewards
        return rewards, tuple(costs[slot] for slot in request.slots)

    def _draw(
        self, purpose: str, turn: int, streams: Sequence[tuple[int, ...]], counts: Sequence[int]
    ) -> Tensor:
        """Return uniforms `[sum(counts), max_output_tokens]`: `counts[i]` rows of stream i."""
        name = purpose if not turn else f"{purpose} turn {turn}"
        length = self.settings.max_output_tokens
        parts = []
        for stream, count in zip(streams, counts, strict=True):
            rng = generator(self.settings.seed, name, *stream)
            parts.append(rng.random((count, length), dtype=np.float32))
        return torch.from_numpy(np.concatenate(parts))

    def _sample_rows(
        self,
        prompts: PromptBatch,
        request: SamplingRequest | EvaluationRequest,
        uniforms: Callable[[int], Tensor],
        *,
        base: bool = False,
    ) -> tuple[SamplingBatch, Rollout, tuple[Conversation, ...]]:
        """Sample completions or conversations within the settings' limits and the model's context.

        Args:
            prompts: One prompt per start.
            request: Start, slot and temperature of each row.
            uniforms: Returns the random numbers `[n, t]` of a turn, from 0.
            base: Sample from the untrained base model.
        """
        # 1. Describe the first turn of each row.
        rows = SamplingBatch(
            prompts=tuple(tuple(map(int, prompt)) for prompt in prompts.prompts),
            prompt_ids=request.start_ids,
            member_ids=request.member_ids,
            temperature=request.temperature,
            uniforms=uniforms(0),
            min_new_tokens=self.settings.min_output_tokens,
            options=self.settings.sampling_options,
            stop_strings=self._stop_strings,
            stop=request.stop,
        )
        # 2. Sample all turns.
        rollout, conversations = sample_conversations(
            self.sampler,
            prompts,
            rows,
            uniforms=uniforms,
            max_tokens=self.settings.max_episode_tokens,
            context=self.bank.base.context,
            device=self.device,
            base=base,
        )
        if self.sampler is not self.bank and rollout.actions.numel():
            extremes = [int(each) for each in rollout.actions.aminmax()]
            check_token_ids(self.bank.base.model, extremes, "tokens of the sampler")
        return rows, rollout, conversations

    def _score(
        self, prompts: PromptBatch, conversations: Sequence[Conversation], stop: Stop
    ) -> Scores:
        """Score conversations, and count them as progress."""
        stop.progress("rewarding", len(conversations), "completions")
        if isinstance(prompts, SingleTurnBatch):  # a user's own batch need not accept `stop`
            return prompts.score(conversations, stop)
        return prompts.score(conversations)

    def prepare_sampling(self) -> None:
        """Load changed weights into the sampler. Called on all ranks before they sample.

        Raises:
            ValueError: If the base is sharded and there is no external sampler.
        """
        if self.bank.base.lockstep and self.sampler is self.bank:
            raise ValueError(NEEDS_SAMPLER)
        self.sampler.sync(self.changed_slots)
        self._loaded = list(self.bank.changes)

    @property
    def changed_slots(self) -> list[int]:
        """Slots whose weights have changed since the sampler last loaded them; initially all."""
        if self._loaded is None:
            return list(range(self.size))
        # The bank counts the changes of each slot.
        counts = zip(self.bank.changes, self._loaded, strict=True)
        return [slot for slot, (count, loaded) in enumerate(counts) if count != loaded]

    def _synced_sampler(self) -> Sampler:
        """Return the sampler with current weights, for a call that one rank may make alone."""
        if self.processes.size > 1 and self.sampler is not self.bank:
            raise ValueError(
                "A member with an external sampler acts on its own in a single process only, got "
                f"{self.processes.size}. Use population.collect, or a clone."
            )
        self.prepare_sampling()
        return self.sampler

    # ---- in a caller's own loop

    def act(
        self,
        learner: Learner,
        observations: Sequence[Mapping[str, Tensor]],
        *,
        training: bool,
        action_mask: Any = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Complete prompts, in AgileRL's shapes; see `GRPO.get_action`."""
        if action_mask is not None:
            raise ValueError("action_mask is for small networks. Leave it out.")
        rows = prompt_rows(observations, learner, self.settings, training=training)
        rows = replace(rows, stop_strings=self._stop_strings)
        rollout = self._synced_sampler().sample(rows)
        check_not_nan(rollout.log_probs, learner.index)
        return as_completions(rows.prompts, rollout, self.settings.pad_token_id)

    def generate(
        self,
        learner: Learner,
        prompts: Sequence[Any],
        *,
        tokenizer: Any,
        n: int,
        temperature: float,
        max_output_tokens: int | None,
        calls: int,
        base: bool,
    ) -> list[str]:
        """Complete texts; see `GRPO.generate`.

        Random numbers depend on the number of `calls` so far.
        """
        # 1. Check the arguments.
        single = isinstance(prompts, str) or not hasattr(prompts, "__len__")
        if single or any(isinstance(prompt, dict) for prompt in prompts):
            raise ValueError(
                f"prompts must be a list of texts or conversations, got {shown(prompts)}. Put a"
                " single one in a list."
            )
        settings = self.settings
        n = whole_between("n", n, 1)
        length = settings.max_output_tokens
        if max_output_tokens is not None:
            length = whole_between("max_output_tokens", max_output_tokens, 1)
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0, got {temperature}.")
        if not len(prompts):
            return []
        # 2. Tokenize the prompts: texts, or conversations by the chat template.
        tokenizer = tokenizer or self._tokenizer
        plain = list[tuple[Any, dict[str, Any]]]()
        for prompt in prompts:
            if isinstance(prompt, str):
                plain.append((prompt, {}))
            else:
                plain.append((check_messages(prompt, "a prompt"), {}))
        ids = tokenize(plain, tokenizer, "generate")
        # 3. Sample `n` completions of each, prompt by prompt.
        count = len(ids) * n
        rng = generator(settings.seed, "generate", learner.index, calls)
        rows = SamplingBatch(
            prompts=tuple(tuple(prompt) for prompt in ids),
            prompt_ids=torch.arange(len(ids)).repeat_interleave(n),
            member_ids=torch.full((count,), learner.slot),
            temperature=torch.full((count,), float(temperature)),
            uniforms=torch.from_numpy(rng.random((count, length), dtype=np.float32)),
            min_new_tokens=min(settings.min_output_tokens, length),
            options=settings.sampling_options,
            stop_strings=self._stop_strings_in(None, tokenizer),
        )
        rollout = self._synced_sampler().sample(rows, base=base)
        check_not_nan(rollout.log_probs, learner.index)
        # 4. Decode. The tokenizer may name further tokens that end a turn.
        ends: Collection[int] = ()
        if settings.eos_token_ids is None:
            ends = end_of_turn_ids(tokenizer, {})
        texts = []
        for tokens in unpadded(rollout.actions, rollout.present):
            text_ids = list(takewhile(lambda token: token not in ends, tokens))
            texts.append(str(tokenizer.decode(text_ids, skip_special_tokens=True)))
        return texts

    @cached_property
    def _tokenizer(self) -> Any:
        # Loaded at the first call of `generate` without a tokenizer.
        return load_tokenizer(self.bank.base.model)

    def experience(
        self, learner: Learner, experiences: Experiences
    ) -> tuple[Experience, tuple[()]]:
        """Convert `(completion_ids, action_masks, rewards)` to a batch.

        The second value is for small networks.
        """
        # 1. Convert and check the tokens.
        self.settings.objective.check_own_loop("dynamic_sampling", "overlong_buffer")
        hyperparameters = learner.hyperparameters
        shortest = self.settings.min_output_tokens
        batch = as_batch(experiences, learner.slot, hyperparameters, shortest, self.device)
        extremes = [int(batch.actions.max()), int(batch.actions.min())]
        check_token_ids(self.bank.base.model, extremes, "completion_ids")
        # 2. A completion whose last token does not end it was truncated.
        last = batch.present.sum(1, keepdim=True).clamp(min=1) - 1
        last_tokens = batch.actions.gather(1, last)
        ended = torch.isin(last_tokens, self.bank.end_ids.to(self.device))
        if self._stop_strings is not None:
            for row, tokens in enumerate(unpadded(batch.actions, batch.present)):
                if self._stop_strings.end_of(tokens) is not None:
                    ended[row] = True
        mask = batch.action_mask
        if self.settings.objective.mask_truncated:
            mask = mask & ended
        batch = replace(batch, action_mask=mask, truncated=~ended[:, 0])
        return {DEFAULT_POLICY: batch}, ()

    # ---- the network

    def policy(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a module `policy(input_ids, attention_mask)` that returns logits `[n, t, v]`."""
        return self.bank.policy(slot, base=base)

    def unwrap(self) -> None:
        """Stop using the accelerator's precision."""
        self.bank.base.autocast = nullcontext

    # ---- checkpoints

    def checkpoint_record(self) -> dict[str, Any]:
        """Return the identity of the base model, LoRA settings and settings of the bank.

        Also the spaces; those of a kind that checkpoints cannot store are left out.
        """
        stored: dict[str, Any] = {}
        for name in ("observation_space", "action_space"):
            if getattr(self, name) is not None:
                with suppress(ValueError):
                    stored[name] = space_to_json(getattr(self, name))
        return {
            **stored,
            "lora_config": lora_to_json(self.bank.lora_config),
            "source": self.source,
            "fingerprint": self.fingerprint,
            "micro_batch_tokens": self.bank.micro_batch_tokens,
            "end_ids": self.bank.end_ids.tolist(),
        }

    def journal_fields(self) -> dict[str, Any]:
        """Return the size of micro-batches."""
        return {"micro_batch_tokens": self.settings.micro_batch_tokens}

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return the adapter that members start from."""
        if self.initial_adapter is None:
            return {}
        return dict(self.initial_adapter.tensors)

    def files(self, slot: int) -> CheckpointFiles:
        """Return the member as a PEFT adapter or a model of transformers."""
        return self.bank.files(slot)

    @classmethod
    def from_checkpoint(
        cls,
        saved: SavedMembers,
        *,
        actor_network: "PreTrainedModel | None",
        device: torch.device | str | None,
        accelerator: "Accelerator | None",
    ) -> Self:
        """Build the members of a checkpoint; see `Members.from_checkpoint`.

        The default base model is the one named in the record. Paths in records are never followed.
        """
        # 1. Load the base model if it was not passed, and check that it is the same one.
        record = saved.record
        source = str(record["source"])
        model = actor_network
        if model is None:
            model = load_named_base(source)
        actual = fingerprint(model)
        if record["fingerprint"] != actual:
            raise CheckpointError(
                f"{saved.folder} was trained on the base model {source!r} with fingerprint"
                f" {record['fingerprint']}, but the model passed has {actual}. Pass the same base"
                " model."
            )
        # 2. Check the size of what members train before it is allocated, as the record may name a
        #    huge rank.
        lora = lora_from_json(record["lora_config"])
        outline = choose_trained(model, lora, outline=True)
        check_stored_size(4 * saved.size * outline.size, saved.tensor_bytes)
        # 3. Build the members. Their micro-batches may be smaller than in the settings: they are
        #    halved if memory runs out.
        stored_spaces: dict[str, Any] = {}
        for name in ("observation_space", "action_space"):
            if name in record:
                stored_spaces[name] = space_from_json(record[name], saved.tensor_bytes)
        initial_adapter = None
        if lora is not None and saved.shared_tensors:
            initial_adapter = StoredAdapter(lora_config=lora, tensors=saved.shared_tensors)
        members = cls(
            model,
            saved.size,
            validate(LanguageSettings, record["settings"]),
            saved.hp_config,
            base_fingerprint=actual,
            lora_config=lora,
            initial_adapter=initial_adapter,
            source=source,
            device=choose_device(accelerator, device),
            autocast=autocast_context(accelerator),
            **stored_spaces,
            end_ids=[whole_between("end_ids", token, 0) for token in record["end_ids"]],
        )
        members.bank.micro_batch_tokens = whole_between(
            "micro_batch_tokens", record["micro_batch_tokens"], 1
        )
        return members
