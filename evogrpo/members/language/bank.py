"""Bank of language models: one frozen base, and an adapter or all weights per member."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

import torch
from peft import LoraConfig
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.distributed import Processes
from evogrpo.functional.log_probs import chunked_log_probs
from evogrpo.learn_reports import UpdateReport
from evogrpo.members.bank import LossFunction, PolicyVersion, RepeatStep, Update
from evogrpo.members.devices import DEFAULT_MICRO_BATCH_TOKENS, memory_errors
from evogrpo.members.language.causal_model import CausalModel
from evogrpo.members.language.compatibility import check_causal_class, check_token_ids
from evogrpo.members.language.fsdp import layers_of, run_on_all_ranks
from evogrpo.members.language.full_finetuning import AllWeights, choose_trained, transformers_files
from evogrpo.members.language.loading import loadable_name
from evogrpo.members.language.member_policy import MemberPolicy
from evogrpo.members.language.micro_batches import (
    MicroBatch,
    MicroBatchPass,
    distinct_prefixes,
    plan_micro_batches,
    scoring_slots,
    used_columns,
)
from evogrpo.members.language.peft_files import CONFIG, TENSORS, StoredAdapter, peft_files
from evogrpo.members.language.sampling import AdapterSampler
from evogrpo.members.language.sizing import activation_room, learning_bytes
from evogrpo.records import Batch, TokenInputs, positions_in_turn

NO_GRAD_FACTOR = 4
"""Size of micro-batches without gradient, relative to those with: they store no activations."""
REDUCED_LOGITS_ROWS = 256
"""Tokens whose logits exist at once with `reduce_memory_peak`."""
NO_LIMIT = 1 << 30
"""The same without `reduce_memory_peak`."""
T = TypeVar("T")


class AdapterBank(AdapterSampler):
    """PolicyBank and Sampler of language models: adapters of all members on one frozen base.

    Without `lora_config`, each member has all weights of the model instead, and its own passes.
    Weights and AdamW moments of a member are rows of matrices `[p, k]`, so cloning a member copies
    rows. Gradients exist only until their optimizer step. The base is never changed and can be
    shared with other banks.

    Args:
        model: A causal language model of transformers, on its device and in its dtype.
        size: Number of members.
        pad_token_id: Token used for padding.
        eos_token_ids: Tokens that end a completion.
        lora_config: LoRA configuration; None = that of `initial_adapter`, or members train all
            weights if there is none.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial adapters.
        micro_batch_tokens: Maximum tokens, padding included, of a forward pass with gradients.
            Halved when out of memory.
        reduce_memory_peak: Compute logits in chunks of 256 tokens instead of a whole micro-batch at
            once. Results agree up to rounding.
        gradient_checkpointing: Compute layers again in backward passes instead of storing their
            activations. "auto" does so where these do not fit into memory by estimate, and after a
            single row was out of memory.
        explicit_positions: Pass position ids, counted without padding, to the model.
        autocast: Returns the context manager of forward passes, for mixed precision.
        own_reference: Store one reference per member for the KL term, instead of using the base.
            Takes as much memory as the adapters. See `mix_reference`.
        initial_adapter: Adapter that every member starts from; brings its own lora_config.
        like: Bank over the same model with the same adapters; its compatibility checks are not
            repeated.

    Raises:
        ValueError: If the model is not supported or an argument is invalid.

    Attributes:
        micro_batch_tokens: As passed, halved when out of memory.
        logits_rows: Maximum tokens whose logits exist at once.
        gradient_checkpointing: As passed; True after a single row was out of memory.
        activation_room: Estimated bytes that activations may take.
        processes: Ranks that divide the micro-batches among them; this process alone at first. All
            ranks must call the same methods with equal batches.
    """

    # A token depends on the tokens before it, so a completion cannot be split.
    rows_are_transitions = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        size: int,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        lora_config: LoraConfig | None = None,
        optimizer: Optimizer | None = None,
        seed: int = 0,
        micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS,
        reduce_memory_peak: bool = True,
        gradient_checkpointing: bool | Literal["auto"] = "auto",
        explicit_positions: bool = True,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        own_reference: bool = False,
        initial_adapter: StoredAdapter | None = None,
        like: "AdapterBank | None" = None,
    ) -> None:
        # 1. Check the arguments.
        if initial_adapter is not None and lora_config not in (None, initial_adapter.lora_config):
            raise ValueError("An adapter brings its own lora_config. Leave lora_config out.")
        if initial_adapter is not None:
            lora_config = initial_adapter.lora_config
        if not eos_token_ids:
            raise ValueError("eos_token_ids must contain at least one token, got none.")
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1, got {micro_batch_tokens}.")
        check_causal_class(model)
        check_token_ids(model, [pad_token_id], "pad_token_id")
        check_token_ids(model, eos_token_ids, "eos_token_ids")

        # 2. Build train states and the base model. Its compatibility checks run the model, so with
        # a sharded base all ranks run them together.
        def build() -> CausalModel:
            """Initialise the train states, and return the base model."""
            trained = choose_trained(model, lora_config) if like is None else like.trained
            # Zero-argument `super` does not work in a nested function.
            super(AdapterBank, self).__init__(
                model,
                size,
                trained,
                lora_config,
                optimizer or Optimizer(),
                seed=seed,
                own_reference=own_reference,
                initial_adapter=initial_adapter,
            )
            if like is not None:
                return copy(like.base)
            return CausalModel(
                model, pad_token_id, changed=trained.modules, explicit_positions=explicit_positions
            )

        # A bank like another one repeats no check, so other ranks need not take part.
        self.base = run_on_all_ranks(model, build) if like is None else build()
        # 3. Models of the members that train all weights, and the settings of the passes.
        self.base.autocast = autocast
        self._own_passes = {}
        for version, models in self.member_models.items():
            self._own_passes[version] = [self.base.with_model(each) for each in models]
        self.end_ids = torch.tensor(sorted(set(eos_token_ids)), device=self.base.device)
        self.micro_batch_tokens = micro_batch_tokens
        self.logits_rows = REDUCED_LOGITS_ROWS if reduce_memory_peak else NO_LIMIT
        # A model without a list of layers is refused here.
        if gradient_checkpointing is True:
            layers_of(model)
        self.gradient_checkpointing = gradient_checkpointing
        self.activation_room = activation_room(self)
        self.processes = Processes()

    # ---- scoring and learning

    def log_probs(self, batch: Batch, *, base: bool = False) -> Tensor:
        """Return `[n, t]` log-probabilities of the actions in nats, without gradient.

        0 where masked.

        Args:
            batch: Rows of any members, in any order.
            base: Use the base model instead of the members' policies.
        """
        return self._score(batch, "base" if base else "weights")[0]

    def entropies(self, batch: Batch) -> Tensor:
        """Return `[n, t]` entropies of the sampling distributions in nats, without gradient.

        0 where masked.
        """
        return self._score(batch, "weights")[1]

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under members' own references, or under the base.

        Under the base, all members share the forward pass of a prompt.
        """
        return self._score(batch, "base" if self.reference is None else "reference")[0]

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
        repeats: dict[int, RepeatStep] | None = None,
    ) -> Update:
        """Take one AdamW step for every slot in `hyperparameters`.

        Gradients of micro-batches are summed. A member without rows steps with a zero gradient. A
        member takes no step, and its report has a norm of NaN, if its gradient is not finite or one
        completion alone is out of memory.

        Args:
            batch: Rows of these members.
            loss_fn: Weighted losses of rows, given their numbers, log_probs and entropies; their
                sum is minimised.
            hyperparameters: Hyperparameters by slot; `lr` and `max_grad_norm` are used.
            entropy_gradient: Make entropies differentiable; costs a second product with the
                vocabulary.
            repeats: Filled with functions that repeat the step of a slot, with the gradient that
                this step has.
        """
        reports: dict[int, UpdateReport] = {}
        log_probs = torch.zeros(batch.actions.shape, device=batch.actions.device)
        entropies = torch.zeros_like(log_probs)
        scores = (log_probs, entropies)
        with self.base.working():
            # Members that are left after running out of memory are repeated in smaller parts. A
            # single row raises at most once, so the loop ends.
            while len(reports) < len(hyperparameters):
                waiting = [slot for slot in sorted(hyperparameters) if slot not in reports]
                steps = self.gradients(
                    batch, waiting, loss_fn, scores, entropy_gradient=entropy_gradient
                )
                try:
                    for slot, gradient, loss in steps:
                        # A kept gradient of all weights would be as large as the model.
                        if repeats is not None and self.lora_config is not None:
                            # The step overwrites its gradient.
                            repeats[slot] = partial(self._repeat, slot, gradient.clone(), loss)
                        reports[slot] = self.step(slot, gradient, hyperparameters[slot], loss)
                except torch.OutOfMemoryError as error:
                    self._halve(error)
        return Update(reports=reports, log_probs=log_probs, entropies=entropies)

    def _repeat(
        self, slot: int, gradient: Tensor, loss: float, hyperparameters: Hyperparameters
    ) -> UpdateReport:
        """Take the AdamW step of a slot with a gradient that was kept."""
        with self.base.working():
            return self.step(slot, gradient.clone(), hyperparameters, loss)

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return the tokens of one pass over the batch, by slot; shared prompts count once."""
        inputs: TokenInputs = batch.inputs
        lengths = batch.present.sum(1).tolist()
        return self.tokens_of(inputs.prompts, inputs.prompt_ids, batch.member_ids, lengths)

    def tokens_of(
        self,
        prompts: Sequence[Sequence[int]],
        prompt_ids: Tensor,
        member_ids: Tensor,
        lengths: Sequence[int],
    ) -> dict[int, int]:
        """Return the tokens of rows with completions of these lengths, by slot; see `cost`."""
        tokens: dict[int, int] = {}
        pairs, pair_of_row = distinct_prefixes(member_ids.cpu(), prompt_ids.cpu())
        if not self.base.shares_prefix:
            # Every row runs its own copy of the prompt.
            pairs = [pairs[number] for number in pair_of_row.tolist()]
        for slot, prompt in pairs:
            length = len(prompts[prompt])
            tokens[slot] = tokens.get(slot, 0) + length
        for slot, length in zip(member_ids.tolist(), lengths, strict=True):
            tokens[slot] += length
        return tokens

    # ---- forward and backward passes, in micro-batches

    @torch.no_grad()
    def _score(self, batch: Batch, policy: PolicyVersion) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, t]` in nats, without gradient.

        0 where masked.
        """
        log_probs = torch.zeros(batch.actions.shape, device=batch.actions.device)
        entropies = torch.zeros_like(log_probs)
        # Shown while scoring takes long.
        counter = batch.stop.progress("scoring", len(batch), "completions")

        def write(part: MicroBatch, scores: tuple[Tensor, Tensor]) -> None:
            """Write the scores of a micro-batch to its rows."""
            for values, new in zip((log_probs, entropies), scores, strict=True):
                values[part.rows] = new.to(values.device)
            counter.add(len(part.rows))

        def compute() -> tuple[Tensor, Tensor]:
            """Score all micro-batches."""
            parts = self._plan(batch, NO_GRAD_FACTOR * self.micro_batch_tokens, policy)
            # 1. In one process, one micro-batch after the other.
            if self.processes.size == 1:
                for part in parts:
                    write(part, self._forward(batch, part, policy))
                return log_probs, entropies
            # 2. On several ranks, each computes its own micro-batches, and all exchange the scores.
            score_own_parts = partial(self._score_own_parts, batch, parts, policy)
            for share in self.processes.gather_results(score_own_parts):
                for number, scores in share.items():
                    write(parts[number], scores)
            return log_probs, entropies

        with self.base.working():
            return self._in_smaller_parts(compute)

    def _score_own_parts(
        self, batch: Batch, parts: Sequence[MicroBatch], policy: PolicyVersion
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the scores of this rank's micro-batches by number, without repeated ones."""
        scores = {}
        with self.base.in_lockstep():
            for number, is_mine in self._own_parts(len(parts)):
                log_probs, entropies = self._forward(batch, parts[number], policy)
                if is_mine:
                    scores[number] = (log_probs.cpu(), entropies.cpu())
        return scores

    def _own_parts(self, parts: int) -> list[tuple[int, bool]]:
        """Return the numbers of this rank's micro-batches, assigned round robin.

        In lockstep, a rank without a micro-batch in the last round repeats the last one, marked
        with False.
        """
        numbers = []
        for first in range(0, parts, self.processes.size):
            number = first + self.processes.rank
            if number < parts:
                numbers.append((number, True))
            elif self.base.lockstep:
                numbers.append((parts - 1, False))
        return numbers

    def _in_smaller_parts(self, compute: Callable[[], T]) -> T:
        """Return the result of a pass over all rows.

        After running out of memory, smaller micro-batches repeat all of it.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                if self.micro_batch_tokens == 1:
                    raise
                self._halve(error)

    def _halve(self, error: torch.OutOfMemoryError) -> None:
        """Halve the size of micro-batches after running out of memory, on all ranks or on none."""
        if self.processes.size > 1 and not self.processes.raised_on_all_ranks(error):
            raise error
        self.micro_batch_tokens = max(1, self.micro_batch_tokens // 2)

    def gradients(
        self,
        batch: Batch,
        slots: Sequence[int],
        loss_fn: LossFunction,
        scores: tuple[Tensor, Tensor],
        *,
        entropy_gradient: bool,
    ) -> Iterator[tuple[int, Tensor, float]]:
        """Yield each member's slot, gradient `[k]` and loss after its last micro-batch.

        Rows are sorted by member, so in one process only a few gradients exist at a time. A
        gradient is NaN if a single completion of the member is out of memory. On several ranks,
        each micro-batch is computed on one rank; the sums in rank order are bit-equal on all ranks.

        Args:
            batch: Rows of any members.
            slots: Members to compute gradients of.
            loss_fn: Weighted losses of rows.
            scores: Log-probabilities and entropies `[n, t]`, written for the rows of these members.
            entropy_gradient: Make entropies differentiable.

        Raises:
            torch.OutOfMemoryError: If a micro-batch of several rows is out of memory.
        """
        # 1. Plan the micro-batches. One that this rank only repeats gets the factor 0.
        parts = self._plan(batch, self.micro_batch_tokens, "weights", slots)
        own_parts = self._own_parts(len(parts))
        factors = [(parts[number], float(is_mine)) for number, is_mine in own_parts]
        own_gradients = self._own_gradients(
            batch, slots, factors, loss_fn, scores, entropy_gradient=entropy_gradient
        )
        if self.processes.size == 1:
            yield from own_gradients
            return
        # 2. Compute this rank's gradients; exchange scores and losses.
        gradients = dict[int, Tensor]()

        def compute_own_parts() -> tuple[dict[int, list[Tensor]], dict[int, float]]:
            """Return the scores of this rank's micro-batches, without repeated ones, and losses."""
            losses = {}
            with self.base.in_lockstep():
                for slot, gradient, loss in own_gradients:
                    gradients[slot] = gradient
                    losses[slot] = loss
            own_scores = {}
            for number, is_mine in own_parts:
                if is_mine:
                    rows = parts[number].rows
                    own_scores[number] = [values[rows].cpu() for values in scores]
            return own_scores, losses

        shares = self.processes.gather_results(compute_own_parts)
        # 3. Sum the gradients over ranks; write the scores of all ranks.
        totals = {}
        for slot in slots:
            totals[slot] = self.processes.all_reduce(gradients.pop(slot))
        for scores_of_rank, _ in shares:
            for number, computed in scores_of_rank.items():
                rows = parts[number].rows
                for values, part in zip(scores, computed, strict=True):
                    values[rows] = part.to(values.device)
        for slot, gradient in totals.items():
            loss = sum(losses[slot] for _, losses in shares)
            yield slot, gradient, loss

    def _own_gradients(
        self,
        batch: Batch,
        slots: Sequence[int],
        parts: Sequence[tuple[MicroBatch, float]],
        loss_fn: LossFunction,
        scores: tuple[Tensor, Tensor],
        *,
        entropy_gradient: bool,
    ) -> Iterator[tuple[int, Tensor, float]]:
        """Yield the gradients of this rank's micro-batches, with their factors; see `gradients`."""
        # 1. Note the members of each micro-batch, and the last micro-batch of each member.
        member_ids = batch.member_ids
        members = []
        last: dict[int, int] = {}
        for number, (part, _) in enumerate(parts):
            slots_of_part = member_ids[part.run].unique().tolist()
            members.append(slots_of_part)
            last |= dict.fromkeys(slots_of_part, number)
        losses = dict.fromkeys(slots, 0.0)
        gradients = dict[int, Tensor]()
        # Backward passes accumulate into buffers that this object points gradients to.
        trained = self._views["weights"]
        try:
            # 2. Members without rows have a zero gradient: AdamW's moments still move their
            #    weights.
            for slot in slots:
                if slot not in last:
                    yield slot, torch.zeros_like(self.weights[slot]), 0.0
            # 3. Backward: accumulate into the gradients of the members present.
            for number, (part, factor) in enumerate(parts):
                present = members[number]
                for slot in present:
                    if slot not in gradients:
                        gradients[slot] = torch.zeros_like(self.weights[slot])
                        trained.gather_gradient(slot, gradients[slot])
                try:
                    loss = self._backward(
                        batch, part, factor, loss_fn, scores, entropy_gradient=entropy_gradient
                    )
                    row_losses = loss.tolist()
                except torch.OutOfMemoryError:
                    if len(part.run) > 1 or self.base.lockstep:
                        raise
                    # Repeat this row once, with less memory.
                    if self.gradient_checkpointing == "auto":
                        self.gradient_checkpointing = True
                        raise
                    row_losses = [0.0] * len(part.rows)
                    # Only this member fails.
                    gradients[int(member_ids[part.run])].fill_(float("nan"))
                for slot, value in zip(member_ids[part.rows].tolist(), row_losses, strict=True):
                    losses[slot] += value
                for slot in present:
                    if last[slot] == number:
                        trained.gather_gradient(slot, None)
                        yield slot, gradients.pop(slot), losses[slot]
        finally:
            for slot in gradients:
                trained.gather_gradient(slot, None)

    @memory_errors()
    def _backward(
        self,
        batch: Batch,
        part: MicroBatch,
        factor: float,
        loss_fn: LossFunction,
        scores: tuple[Tensor, Tensor],
        *,
        entropy_gradient: bool,
    ) -> Tensor:
        """Add a micro-batch to the gradients, write its scores, and return its losses.

        The graph is in local variables only, so that it is freed before the next forward pass,
        after an error too.
        """
        computed = self._forward(batch, part, "weights", entropy_gradient=entropy_gradient)
        loss = factor * loss_fn(part.rows, *computed)
        loss.sum().backward()
        for values, new in zip(scores, computed, strict=True):
            values[part.rows] = new.detach()
        return loss.detach()

    def _plan(
        self, batch: Batch, budget: int, policy: PolicyVersion, slots: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """Plan micro-batches of the rows of these slots; None = of all rows."""
        split = partial(self.split_passes, policy)
        return plan_micro_batches(batch, budget, policy, slots, split, self.processes.size)

    @memory_errors()
    def _forward(
        self,
        whole: Batch,
        part: MicroBatch,
        policy: PolicyVersion,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, t]` of a micro-batch, by one forward pass."""
        passed = self._pass(whole, part, policy)
        model = passed.model
        with model.autocast():
            log_probs, entropies = chunked_log_probs(
                passed.hidden,
                model.head,
                passed.actions,
                passed.temperature,
                passed.early,
                self.end_ids,
                self.logits_rows,
                entropy_gradient=entropy_gradient,
                weight=model.head_matrix(passed.hidden),
                train_head=model is not self.base and torch.is_grad_enabled(),
            )
        width = whole.actions.shape[1]
        return passed.scatter(log_probs, width), passed.scatter(entropies, width)

    def _pass(self, whole: Batch, part: MicroBatch, policy: PolicyVersion) -> MicroBatchPass:
        """Run a micro-batch up to the vocabulary head."""
        if self.base.lockstep:
            self.processes.check_stop(whole.stop)
        whole.stop.check()
        # 1. Drop columns after the last action.
        batch = whole.select(part.run)
        inputs: TokenInputs = batch.inputs
        used = int(used_columns(batch.action_mask).max())
        # In lockstep, all ranks must run equally many passes. A micro-batch whose rows have one
        # action needs no pass on top of the prompts, so it gets a second column.
        if self.base.lockstep:
            used = min(max(used, 2), batch.action_mask.shape[1])
        mask = batch.action_mask[:, :used]
        # True where an end of sequence was forbidden.
        early = torch.zeros_like(mask)
        if inputs.min_new_tokens:
            early = positions_in_turn(batch.chosen[:, :used]) < inputs.min_new_tokens
        # 2. Hidden states `[k, used, h]` that predict the actions.
        members = scoring_slots(batch, policy)
        pairs, pair_of_row = distinct_prefixes(members, inputs.prompt_ids.to(members.device))
        prompts = [inputs.prompts[prompt] for _, prompt in pairs]
        slots = [slot for slot, _ in pairs]
        fed = batch.actions[:, : used - 1]
        present = batch.present[:, : used - 1]
        temperature = inputs.temperature.to(mask.device)[:, None].expand(mask.shape)
        model = self.model_of(policy, slots[0])
        # Padded tokens of the pass: prompts run once, or once for each row.
        copies = len(prompts) if model.shares_prefix else len(batch)
        prompt_tokens = max(map(len, prompts)) * copies
        model.recomputes_layers = self._recomputes_layers(used * len(batch) + prompt_tokens)
        make_hook = self.hook_factory(policy)
        with model.autocast():
            hidden = model.hidden(prompts, slots, pair_of_row, fed, present, members, make_hook)
        return MicroBatchPass(
            model=model,
            mask=mask,
            hidden=hidden[mask],
            actions=batch.actions[:, :used][mask],
            temperature=temperature[mask],
            early=early[mask],
            run_as=part.run_as,
        )

    def _recomputes_layers(self, tokens: int) -> bool:
        """Return True if a pass of this many tokens should not store its activations."""
        if not torch.is_grad_enabled():
            return False
        if self.gradient_checkpointing != "auto":
            return self.gradient_checkpointing
        model = self.base.model
        precision = next(model.parameters()).element_size()
        needed = learning_bytes(model, tokens, min(tokens, self.logits_rows), precision)
        return needed > self.activation_room

    # ---- whole distributions

    def distributions(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return what determines the next-token distributions, `[n, t, ...]`, without gradient.

        These are the hidden states before the vocabulary head. Members that train the head have
        log-probabilities of the whole vocabulary.

        Args:
            batch: Rows of any members, in any order.
            reference: Not supported.
        """
        assert not reference, "LanguageSettings refuses kl_estimator 'full'"

        def read(passed: MicroBatchPass, part: MicroBatch) -> Tensor:
            """Return what determines the distributions, `[c, ...]`."""
            if passed.model is self.base:
                return passed.hidden
            return passed.log_softmax(passed.hidden, self.end_ids)

        return self._read(batch, read)

    def divergences(self, batch: Batch, before: Tensor) -> Tensor:
        """Return exact KL(before || policy) `[n, t]` over the vocabulary, without gradient.

        Args:
            batch: Rows of any members, in any order.
            before: Result of `distributions` for these rows, under earlier weights.
        """

        def read(passed: MicroBatchPass, part: MicroBatch) -> Tensor:
            """Return the divergences `[c]`, in chunks that fit into memory."""
            used = passed.mask.shape[1]
            earlier = before[part.run, :used][passed.mask]
            found = []
            for start in range(0, len(earlier), self.logits_rows):
                rows = slice(start, start + self.logits_rows)
                first = earlier[rows]
                if passed.model is self.base:
                    first = passed.log_softmax(first, self.end_ids, rows)
                second = passed.log_softmax(passed.hidden[rows], self.end_ids, rows)
                # KL(p || q) = sum over the vocabulary of p (log p - log q).
                found.append((first.exp() * (first - second)).sum(1))
            return torch.cat(found)

        return self._read(batch, read)

    @torch.no_grad()
    def _read(self, batch: Batch, read: Callable[[MicroBatchPass, MicroBatch], Tensor]) -> Tensor:
        """Return values `[n, t, ...]` computed from forward passes, 0 where masked.

        With several ranks, each of them computes all of the few rows.
        """

        @self.processes.shared_errors()
        @memory_errors()
        def compute() -> Tensor:
            """Return the values of all micro-batches."""
            found: Tensor | None = None
            with self.base.in_lockstep():
                for part in self._plan(batch, self.micro_batch_tokens, "weights"):
                    passed = self._pass(batch, part, "weights")
                    values = passed.scatter(read(passed, part), batch.actions.shape[1])
                    if found is None:
                        found = values.new_zeros(len(batch), *values.shape[1:])
                    found[part.rows] = values
            assert found is not None
            return found

        with self.base.working():
            return self._in_smaller_parts(compute)

    # ---- export

    def files(self, slot: int) -> dict[str, bytes | Callable[[], bytes]]:
        """Return a member as a PEFT adapter, or as a model of transformers: contents by file name.

        A function returns the content when it is called, so that files need not be in memory
        together.
        """
        if isinstance(self.trained, AllWeights):
            model = self.member_models["weights"][slot]
            return {**transformers_files(model, self.end_ids.tolist())}
        tensors, config = self.peft_files(slot)
        return {TENSORS: lambda: save(tensors, metadata={"format": "pt"}), CONFIG: config}

    def peft_files(self, slot: int) -> tuple[dict[str, Tensor], bytes]:
        """Return a member in PEFT's format: tensors by name, and bytes of adapter_config.json."""
        assert self.lora_config is not None
        config = replace(self.lora_config, base_model_name_or_path=loadable_name(self.base.model))
        return peft_files(self.targets, config, self.weights[slot])

    def policy(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return one member as a module; it reads the weights of the bank."""
        return MemberPolicy(self, slot, base=base)
