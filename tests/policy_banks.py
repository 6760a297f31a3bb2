"""Conformance suite of `PolicyBank`, and bounds on rounding errors after optimizer steps."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.functional.advantages import group_advantages
from evogrpo.functional.losses import kl_estimate, loss_weights, policy_loss
from evogrpo.learn_reports import UpdateReport
from evogrpo.members.bank import INITIAL_RUNNING_STATS, RUNNING_STATS, LossFunction, PolicyBank
from evogrpo.records import Batch

SIZE = 3
HYPERPARAMETERS = (
    Hyperparameters(lr=1e-2, max_grad_norm=0.5),
    Hyperparameters(lr=3e-3, max_grad_norm=1e6),
    Hyperparameters(lr=2e-2, max_grad_norm=0.05),
)
CLIPS = (0.2, 0.1, 0.3)

GRADIENT_ERROR = 1e-4
"""Rounding error of a gradient relative to its norm: about 40 float32 products, and sums that
partly cancel.
"""
MOMENT_STEPS = 10
"""Number of optimizer steps after which AdamW's first moment has forgotten a gradient: 1 / (1 -
0.9).
"""


def assert_gradients_agree(
    one: Tensor, other: Tensor, *, steps: int = 1, label: str = "gradients"
) -> None:
    """Check that gradients, or their averages over `steps` optimizer steps, agree up to rounding.

    The bound is relative to the norm: an element near 0 whose terms cancel has any relative error.
    """
    assert one.shape == other.shape, label
    assert torch.equal(one.isfinite(), other.isfinite()), label
    error = float((one.double() - other.double()).norm())
    size = float(other.double().norm())
    bound = GRADIENT_ERROR * min(max(steps, 1), MOMENT_STEPS)
    assert error <= bound * size, (
        f"{label} differ by {error / (size or 1.0):.1e} of their norm, more than {bound:.1e}"
    )


def assert_weights_agree(
    one: Tensor, other: Tensor, *, steps: int, lr: float, label: str = "weights"
) -> None:
    """Check that weights agree up to rounding after `steps` optimizer steps of AdamW.

    AdamW divides an element g by its own size, so an element near 0 moves by a random part of lr.
    If gradients are off by d of their root mean square s, an element of size x = |g| / s is off by
    min(2, 2 d / x) of a step. The mean square of that over normally distributed elements is at most
    8 d.
    """
    error = float((one.double() - other.double()).norm())
    bound = (8.0 * GRADIENT_ERROR) ** 0.5 * steps * lr * one.numel() ** 0.5
    assert error <= bound, f"{label} differ by {error:.1e}, more than {bound:.1e}"


def assert_states_agree(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], *, lr: float
) -> None:
    """Check that two train states agree up to rounding after equal steps from an equal start.

    Args:
        one: Train state; with several policies the keys are "policy/name".
        other: Train state of the same kind.
        lr: Largest learning rate of the steps.
    """
    assert one.keys() == other.keys()
    for name, values in one.items():
        policy, _, last = name.rpartition("/")
        steps = int(other[f"{policy}/step" if policy else "step"])
        if last in ("exp_avg", "exp_avg_sq"):  # the relative error of a square is twice as large
            assert_gradients_agree(
                values, other[name], steps=steps * (2 if last == "exp_avg_sq" else 1), label=name
            )
        elif last in ("adapter", "weights", "reference"):
            assert_weights_agree(values, other[name], steps=steps, lr=lr, label=name)
        elif values.is_floating_point():
            torch.testing.assert_close(values, other[name], rtol=1e-3, atol=1e-5, msg=name)
        else:
            assert torch.equal(values, other[name]), name


def same_state(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return True if two train states are bit-equal; NaN equals NaN."""
    return set(one) == set(other) and all(
        torch.equal(one[name].nan_to_num(7.5), other[name].nan_to_num(7.5)) for name in one
    )


class PolicyBankTestCase(ABC):
    """Tests of a `PolicyBank`. Implement `make_bank` and `act`.

    Members of the banks under test must differ, and have different numbers of rows.

    Attributes:
        own_reference: The banks under test store one reference per member.
    """

    own_reference = False

    @abstractmethod
    def make_bank(self, size: int) -> PolicyBank:
        """Build a bank of `size` different members."""

    @abstractmethod
    def act(
        self,
        bank: PolicyBank,
        members: Sequence[int],
        *,
        seed: int = 0,
        nudge: float = 0.0,
        equal_shapes: bool = False,
        base: bool = False,
    ) -> Batch:
        """Sample a batch in which slot i has the settings and uniforms of member `members[i]`.

        Args:
            bank: The bank.
            members: Number of the member in each slot.
            seed: Seed of the uniforms.
            nudge: Added to every uniform.
            equal_shapes: Make the shape of the batch independent of the sampled actions.
            base: Act with the untrained base.

        Returns:
            The batch, with rewards that are a function of the actions.
        """

    # ---- building blocks

    def bank_of(self, *states: dict[str, Tensor]) -> PolicyBank:
        """Build a bank of members with these train states."""
        bank = self.make_bank(len(states))
        for slot, state in enumerate(states):
            bank.load_state(slot, state)
        return bank

    def states(self, bank: PolicyBank) -> list[dict[str, Tensor]]:
        """Return the train states of all members."""
        return [bank.state(slot) for slot in range(bank.size)]

    def clear_seed(self, bank: PolicyBank) -> int:
        """Return a seed whose uniforms are at least 1e-5 away from action boundaries."""
        for seed in range(50):
            low = self.act(bank, range(bank.size), seed=seed, nudge=-1e-05)
            high = self.act(bank, range(bank.size), seed=seed, nudge=1e-05)
            if low.actions.is_floating_point() or torch.equal(low.actions, high.actions):
                return seed
        raise AssertionError("no uniforms are far from all boundaries")

    def loss(self, batch: Batch, clips: Sequence[float] = CLIPS) -> LossFunction:
        """Return a clipped off-policy GRPO loss with KL, with one clip coefficient per slot."""
        advantages = group_advantages(batch.rewards, batch.group_ids)[:, None]
        weights = loss_weights("grpo", None, batch.action_mask, batch.member_ids)
        assert batch.sampler_log_probs is not None
        # A function of each action's log-probability, so it does not depend on the other rows of
        # the batch.
        old = batch.sampler_log_probs + 0.4 * torch.sin(
            1000.0 * batch.sampler_log_probs.round(decimals=2)
        )
        clip = torch.tensor([clips[slot] for slot in batch.member_ids.tolist()])[:, None]

        def loss(rows: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
            arguments = log_probs, old[rows], advantages[rows], batch.action_mask[rows]
            surrogate = policy_loss("grpo", *arguments, clip_low=clip[rows], clip_high=clip[rows])
            return (
                weights[rows] * (surrogate + 0.1 * kl_estimate("k3", log_probs, old[rows]))
            ).sum(1)

        return loss

    def learn(
        self,
        bank: PolicyBank,
        batch: Batch,
        hyperparameters: Sequence[Hyperparameters] = HYPERPARAMETERS,
    ) -> dict[int, UpdateReport]:
        """Take one optimizer step for all members."""
        return bank.update(
            batch, self.loss(batch), dict(enumerate(hyperparameters[: bank.size]))
        ).reports

    @staticmethod
    def alone(batch: Batch, slot: int) -> Batch:
        """Return one member's rows as the batch of a bank in which it is slot 0."""
        rows = batch.select_members([slot])
        return replace(rows, member_ids=torch.zeros_like(rows.member_ids))

    # ---- all members together equal each member alone

    def test_acting_together_equals_acting_alone(self) -> None:
        bank = self.make_bank(SIZE)
        seed = self.clear_seed(bank)
        together = self.act(bank, range(SIZE), seed=seed)
        sizes = [len(together.select_members([slot])) for slot in range(SIZE)]
        assert len(set(sizes)) == SIZE, "the test needs different numbers of rows"
        for slot in range(SIZE):
            separate = self.act(self.bank_of(bank.state(slot)), [slot], seed=seed)
            rows = together.select_members([slot])
            if rows.actions.is_floating_point():
                torch.testing.assert_close(rows.actions, separate.actions, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(rows.actions, separate.actions)
            assert torch.equal(rows.present, separate.present)
            assert rows.sampler_log_probs is not None
            assert separate.sampler_log_probs is not None
            torch.testing.assert_close(
                rows.sampler_log_probs, separate.sampler_log_probs, rtol=1e-4, atol=1e-4
            )

    def test_log_probs_and_entropies_together_equal_those_alone(self) -> None:
        bank = self.make_bank(SIZE)
        batch = self.act(bank, range(SIZE))
        entropies = bank.entropies(batch)
        assert entropies.shape == batch.action_mask.shape
        assert not entropies[~batch.action_mask].any()
        assert bool((entropies[batch.action_mask] != 0).all())
        together = (bank.log_probs(batch), bank.reference_log_probs(batch), entropies)
        for slot in range(SIZE):
            rows = self.alone(batch, slot)
            single_bank = self.bank_of(bank.state(slot))
            alone = (
                single_bank.log_probs(rows),
                single_bank.reference_log_probs(rows),
                single_bank.entropies(rows),
            )
            for all_members, one in zip(together, alone, strict=True):
                torch.testing.assert_close(
                    all_members[batch.member_ids == slot], one, rtol=1e-4, atol=1e-4
                )

    def test_learning_together_equals_learning_alone(self) -> None:
        bank = self.make_bank(SIZE)
        separate = [self.bank_of(state) for state in self.states(bank)]
        start = self.states(bank)
        clipped = []
        for seed in range(2):
            batch = self.act(bank, range(SIZE), seed=seed)
            reports = self.learn(bank, batch)
            assert sorted(reports) == list(range(SIZE))
            for slot in range(SIZE):
                rows = self.alone(batch, slot)
                report = (
                    separate[slot]
                    .update(rows, self.loss(rows, CLIPS[slot:]), {0: HYPERPARAMETERS[slot]})
                    .reports[0]
                )
                assert report.grad_norm == pytest.approx(reports[slot].grad_norm, rel=1e-3)
                assert report.loss == pytest.approx(reports[slot].loss, rel=1e-3, abs=1e-5)
                assert report.lr == reports[slot].lr == HYPERPARAMETERS[slot].lr
                assert report.step == reports[slot].step == seed + 1
                assert_states_agree(
                    bank.state(slot), separate[slot].state(0), lr=HYPERPARAMETERS[slot].lr
                )
                clipped.append(report.grad_norm > HYPERPARAMETERS[slot].max_grad_norm)
        assert 0 < sum(clipped) < len(clipped), (
            "the test needs gradients on both sides of the bound"
        )
        for slot in range(SIZE):
            assert not same_state(bank.state(slot), start[slot])

    # ---- members do not affect each other

    @pytest.mark.parametrize("changed_slot", [0, SIZE - 1])
    def test_nan_of_one_member_never_reaches_another(self, changed_slot: int) -> None:
        clean = self.make_bank(SIZE)
        dirty = self.make_bank(SIZE)
        state = dirty.state(changed_slot)
        nan = {
            name: torch.full_like(v, torch.nan) if v.is_floating_point() else v
            for name, v in state.items()
        }
        dirty.load_state(changed_slot, nan)
        rest = [slot for slot in range(SIZE) if slot != changed_slot]
        batch = self.act(clean, range(SIZE), equal_shapes=True)
        other = self.act(dirty, range(SIZE), equal_shapes=True)
        for name in ("actions", "sampler_log_probs"):
            assert torch.equal(
                *(getattr(each.select_members(rest), name) for each in (batch, other))
            )
        unchanged = torch.isin(batch.member_ids, torch.tensor(rest))
        assert torch.equal(clean.log_probs(batch)[unchanged], dirty.log_probs(batch)[unchanged])
        reports = [self.learn(bank, batch) for bank in (clean, dirty)]
        for slot in rest:
            assert reports[0][slot] == reports[1][slot]
            assert same_state(clean.state(slot), dirty.state(slot))
        assert not reports[1][changed_slot].grad_norm < torch.inf
        assert same_state(dirty.state(changed_slot), nan)

    def test_rewards_and_hyperparameters_of_one_member_never_change_another(self) -> None:
        one = self.make_bank(SIZE)
        other = self.make_bank(SIZE)
        batch = self.act(one, range(SIZE))
        changed = replace(
            batch, rewards=torch.where(batch.member_ids == 1, -3.0 * batch.rewards, batch.rewards)
        )
        wild = (HYPERPARAMETERS[0], Hyperparameters(lr=0.5, max_grad_norm=1e-3), HYPERPARAMETERS[2])
        one_reports = self.learn(one, batch)
        other_reports = other.update(
            changed, self.loss(changed, (CLIPS[0], 0.9, CLIPS[2])), dict(enumerate(wild))
        ).reports
        for slot in (0, 2):
            assert one_reports[slot] == other_reports[slot]
            assert same_state(one.state(slot), other.state(slot))
        assert not same_state(one.state(1), other.state(1))

    def test_a_loss_that_is_not_finite_fails_its_member_only(self) -> None:
        one = self.make_bank(SIZE)
        other = self.make_bank(SIZE)
        batch = self.act(one, range(SIZE))
        before = other.state(1)
        good = self.loss(batch)

        def bad(rows: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
            return good(rows, log_probs, entropies) * torch.where(
                batch.member_ids[rows] == 1, torch.nan, 1.0
            )

        expected = self.learn(one, batch)
        got = other.update(batch, bad, dict(enumerate(HYPERPARAMETERS))).reports
        assert not got[1].grad_norm < torch.inf
        assert same_state(other.state(1), before)
        for slot in (0, 2):
            assert expected[slot] == got[slot]
            assert same_state(one.state(slot), other.state(slot))
        # The failure leaves no trace: the next step is the usual one.
        assert self.learn(other, batch)[1] == expected[1]
        assert same_state(one.state(1), other.state(1))

    # ---- members that take a step

    def test_a_member_without_hyperparameters_is_unchanged(self) -> None:
        bank = self.make_bank(SIZE)
        before = bank.state(1)
        batch = self.act(bank, range(SIZE))
        reports = bank.update(
            batch, self.loss(batch), {0: HYPERPARAMETERS[0], 2: HYPERPARAMETERS[2]}
        ).reports
        assert sorted(reports) == [0, 2]
        assert same_state(bank.state(1), before)

    def test_members_without_rows_step_with_a_zero_gradient(self) -> None:
        bank = self.make_bank(SIZE)
        batch = self.act(bank, range(SIZE))
        self.learn(bank, batch)
        for part in (batch.select_members([0, 2]), batch.select(torch.zeros(0, dtype=torch.long))):
            before = bank.state(1)
            reports = bank.update(part, self.loss(batch), dict(enumerate(HYPERPARAMETERS))).reports
            assert (reports[1].grad_norm, reports[1].loss) == (0.0, 0.0)
            # Its weights still change, because the first moment is not 0.
            assert not same_state(bank.state(1), before)
            assert (reports[0].grad_norm > 0) == (len(part) > 0)

    # ---- rows

    def test_the_order_of_rows_does_not_matter(self) -> None:
        bank = self.make_bank(SIZE)
        shuffled = self.make_bank(SIZE)
        batch = self.act(bank, range(SIZE))
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
        mixed = batch.select(order)
        torch.testing.assert_close(
            bank.log_probs(mixed), bank.log_probs(batch)[order], rtol=1e-4, atol=1e-4
        )
        reports = self.learn(bank, batch)
        again = self.learn(shuffled, mixed)
        for slot in range(SIZE):
            assert reports[slot].grad_norm == pytest.approx(again[slot].grad_norm, rel=1e-3)
            assert_states_agree(bank.state(slot), shuffled.state(slot), lr=HYPERPARAMETERS[slot].lr)

    def test_log_probs_equal_those_of_sampling_and_are_zero_where_masked(self) -> None:
        bank = self.make_bank(SIZE)
        batch = self.act(bank, range(SIZE))
        assert batch.sampler_log_probs is not None
        torch.testing.assert_close(
            bank.log_probs(batch), batch.sampler_log_probs, rtol=1e-4, atol=1e-4
        )
        mask = batch.action_mask.clone()
        mask[::2, 0] = False
        mask[1] = False
        part = bank.log_probs(replace(batch, action_mask=mask))
        assert torch.equal(part[~mask], torch.zeros(int((~mask).sum())))
        torch.testing.assert_close(part[mask], bank.log_probs(batch)[mask], rtol=1e-4, atol=1e-4)

    def test_divergences_compare_whole_distributions_with_earlier_ones(self) -> None:
        bank = self.make_bank(SIZE)
        batch = self.act(bank, range(SIZE))
        before = bank.distributions(batch)
        assert bank.divergences(batch, before).abs().max() < 1e-5
        self.learn(bank, batch)
        divergences = bank.divergences(batch, before)
        mask = batch.action_mask
        assert torch.equal(divergences[~mask], torch.zeros(int((~mask).sum())))
        assert bool((divergences[mask] > -1e-6).all())
        for slot in range(SIZE):
            own = batch.member_ids == slot
            alone = self.bank_of(bank.state(slot)).divergences(self.alone(batch, slot), before[own])
            torch.testing.assert_close(divergences[own], alone, rtol=1e-3, atol=1e-6)
            assert float(divergences[own][mask[own]].mean()) > 0

    @pytest.mark.parametrize("differentiable", [True, False])
    def test_the_loss_gets_entropies_with_or_without_a_gradient(self, differentiable: bool) -> None:
        bank = self.make_bank(SIZE)
        batch = self.act(bank, range(SIZE))
        scored = bank.entropies(batch)

        def loss(rows: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
            torch.testing.assert_close(entropies.detach(), scored[rows], rtol=1e-4, atol=1e-5)
            assert entropies.requires_grad is differentiable
            return -(entropies + 0.0 * log_probs).sum(1)

        steps = dict.fromkeys(range(SIZE), Hyperparameters(lr=1e-4))
        update = bank.update(batch, loss, steps, entropy_gradient=differentiable)
        torch.testing.assert_close(update.entropies, scored, rtol=1e-4, atol=1e-5)
        after = bank.entropies(batch)
        for slot, report in update.reports.items():
            rows_of_slot = batch.member_ids == slot
            assert (report.grad_norm > 0) is differentiable
            assert bool(after[rows_of_slot].sum() > scored[rows_of_slot].sum()) is differentiable

    # ---- reference and base

    def test_the_base_is_the_same_for_all_members_and_never_changes(self) -> None:
        bank = self.make_bank(SIZE)
        batch = self.act(bank, range(SIZE), base=True)
        scored = bank.log_probs(batch, base=True)
        assert batch.sampler_log_probs is not None
        torch.testing.assert_close(scored, batch.sampler_log_probs, rtol=1e-4, atol=1e-4)
        differ = not torch.allclose(scored, bank.log_probs(batch), atol=1e-2)
        assert differ, "the test needs members that differ from the base"
        others = replace(batch, member_ids=(batch.member_ids + 1) % SIZE)
        torch.testing.assert_close(bank.log_probs(others, base=True), scored, rtol=1e-5, atol=1e-5)
        self.learn(bank, batch)
        bank.inherit([1, 1, None])
        assert torch.equal(bank.log_probs(batch, base=True), scored)
        assert torch.equal(self.act(bank, range(SIZE), base=True).actions, batch.actions)

    def test_the_reference_is_the_members_own_or_the_base(self) -> None:
        bank = self.make_bank(SIZE)
        batch = self.act(bank, range(SIZE))
        base = bank.log_probs(batch, base=True)
        before = bank.reference_log_probs(batch)
        if not self.own_reference:
            with pytest.raises(ValueError, match="reference"):
                bank.mix_reference(0, 0.5)
            self.learn(bank, batch)
            assert torch.equal(bank.reference_log_probs(batch), base)
            return
        for slot in (0, 1):
            bank.mix_reference(slot, 1.0)
        kept = bank.log_probs(batch)
        rows_by_slot = [batch.member_ids == slot for slot in range(SIZE)]
        self.learn(bank, batch)
        bank.mix_reference(0, 0.5)
        bank.mix_reference(1, 1.0)
        moved = bank.reference_log_probs(batch)
        now = bank.log_probs(batch)
        torch.testing.assert_close(
            moved[rows_by_slot[1]], now[rows_by_slot[1]], rtol=1e-5, atol=1e-5
        )
        assert torch.equal(moved[rows_by_slot[2]], before[rows_by_slot[2]])
        for end in (kept, now):  # half-way between them
            assert not torch.allclose(moved[rows_by_slot[0]], end[rows_by_slot[0]], atol=1e-6)
        bank.mix_reference(0, 0.0)
        assert torch.equal(bank.reference_log_probs(batch)[rows_by_slot[0]], moved[rows_by_slot[0]])
        assert torch.equal(bank.log_probs(batch, base=True), base)

    # ---- inheritance

    def test_none_is_a_new_member(self) -> None:
        bank = self.make_bank(SIZE)
        fresh = self.make_bank(SIZE)
        fresh.inherit([None] * SIZE)
        self.learn(bank, self.act(bank, range(SIZE)))
        before = self.states(bank)
        bank.inherit([2, None, 0])
        assert same_state(bank.state(0), before[2])
        assert same_state(bank.state(1), fresh.state(1))
        assert same_state(bank.state(2), before[0])

    def test_running_statistics_are_inherited_and_saved(self) -> None:
        bank = self.make_bank(SIZE)
        birth = torch.tensor([INITIAL_RUNNING_STATS] * SIZE, dtype=torch.float64)
        assert torch.equal(bank.running_stats, birth)
        bank.running_stats[:] += torch.arange(SIZE * len(RUNNING_STATS)).view(SIZE, -1)
        values = bank.running_stats.clone()
        bank.inherit([2, None, 0])
        assert torch.equal(bank.running_stats, torch.stack([values[2], birth[1], values[0]]))
        assert torch.equal(self.bank_of(*self.states(bank)).running_stats, bank.running_stats)

    # ---- states

    def test_a_train_state_can_be_saved_and_loaded(self) -> None:
        bank = self.make_bank(SIZE)
        self.learn(bank, self.act(bank, range(SIZE)))
        again = self.bank_of(*self.states(bank))
        batch = self.act(bank, range(SIZE), seed=1)
        assert torch.equal(bank.log_probs(batch), again.log_probs(batch))
        assert self.learn(bank, batch) == self.learn(again, batch)
        for slot in range(SIZE):
            assert same_state(bank.state(slot), again.state(slot))

    def test_a_loaded_train_state_is_copied(self) -> None:
        bank = self.make_bank(SIZE)
        state = bank.state(0)
        bank.load_state(1, state)
        for values in state.values():
            values.zero_()
        assert same_state(bank.state(1), bank.state(0))

    def test_an_invalid_train_state_raises_and_changes_nothing(self) -> None:
        bank = self.make_bank(SIZE)
        self.learn(bank, self.act(bank, range(SIZE)))
        before = self.states(bank)
        state = self.make_bank(SIZE).state(2)
        invalid = [state | {"extra": torch.zeros(1)}]
        for name, values in state.items():
            invalid.append({other: tensor for other, tensor in state.items() if other != name})
            invalid += [
                state | {name: torch.cat([values.view(-1)] * 3)},
                state | {name: values.to(torch.complex64)},
            ]
        for each in invalid:
            with pytest.raises(ValueError, match="state"):
                bank.load_state(0, each)
        for slot in range(SIZE):
            assert same_state(bank.state(slot), before[slot])
