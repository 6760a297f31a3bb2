"""StackedBank: learning against torch.optim.AdamW and finite differences, references."""

import pytest
import torch
from gymnasium import spaces

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.network import NetworkConfig
from evogrpo.config.optimizer import Optimizer
from tests.oracles.torch_members import TorchMember
from tests.policy_banks import assert_gradients_agree, assert_weights_agree
from tests.tiny_networks import CASES, Case, acted_batch

SIZE = 4
LRS = (1e-2, 3e-3, 2e-2, 5e-3)
MAX_NORMS = (0.5, 1e6, 0.02, 1e6)
EPOCHS = (3, 1, 4, 2)
DIFFERENT = (
    NetworkConfig(hidden=(8, 6), activation="relu"),
    NetworkConfig(hidden=(7,)),
    NetworkConfig(hidden=(8, 6)),
)
SPACES = {
    "discrete": spaces.Discrete(4),
    "several": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(3),
    "parts": spaces.Dict(
        {
            "move": spaces.Discrete(3, start=2),
            "turn": spaces.Box(-2.0, 4.0, (2,)),
            "keys": spaces.MultiBinary(2),
            "gears": spaces.MultiDiscrete([2, 3]),
            "aim": spaces.Box(-float("inf"), float("inf"), (1,)),
        }
    ),
    "box": spaces.Box(torch.tensor([-2.0, -3.0]).numpy(), torch.tensor([4.0, torch.inf]).numpy()),
}


def surrogate(log_probs, old, advantages, entropies, clip, entropy_coef):
    ratio = (log_probs - old).exp()
    return (
        -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        - entropy_coef * entropies
    )


@pytest.mark.parametrize("architectures", [(), DIFFERENT], ids=["together", "different"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_learning_matches_separate_torch_optimizers(space, architectures):
    """Members differ in learning rate, clip norm, clip coefficient, rows and epochs."""
    case = Case(actions=space, architectures=architectures)
    settings = Optimizer(weight_decay=0.05, betas=(0.8, 0.95), eps=1e-6, warmup_steps=2)
    bank = case.bank(SIZE, optimizer=settings)
    clips = torch.tensor([0.2, 0.1, 0.3, 0.2])
    coefs = torch.tensor([0.01, 0.0, 0.1, 0.02])
    hyperparameters = [
        Hyperparameters(lr=lr, max_grad_norm=norm) for lr, norm in zip(LRS, MAX_NORMS, strict=True)
    ]
    oracles = [TorchMember(bank, slot, 3, space) for slot in range(SIZE)]
    optimizers = [
        torch.optim.AdamW(
            member.ordered(), lr=1.0, betas=settings.betas, eps=settings.eps, weight_decay=0.05
        )
        for member in oracles
    ]
    steps = [0] * SIZE
    clipped = set()
    for seed in range(2):
        batch = acted_batch(case, bank, range(SIZE), seed=seed, groups=(2, 3, 7))
        old = batch.sampler_log_probs + 0.3 * torch.sin(5.0 * batch.sampler_log_probs)
        advantages = torch.cos(2.0 * batch.rewards)[:, None]
        for epoch in range(max(EPOCHS)):
            learning = [slot for slot in range(SIZE) if epoch < EPOCHS[slot]]
            part = batch.select_members(learning)
            kept = torch.isin(batch.member_ids, torch.tensor(learning))

            def loss_fn(
                rows, log_probs, entropies, part=part, old=old[kept], advantages=advantages[kept]
            ):
                slots = part.member_ids[rows]
                values = surrogate(
                    log_probs,
                    old[rows],
                    advantages[rows],
                    entropies,
                    clips[slots][:, None],
                    coefs[slots][:, None],
                )
                return torch.where(part.action_mask[rows], values, 0.0).sum(1)

            named = {slot: hyperparameters[slot] for slot in learning}
            reports = bank.update(part, loss_fn, named, entropy_gradient=True).reports
            for slot in learning:
                mask = batch.member_ids == slot
                log_probs, entropies = oracles[slot].log_probs_and_entropies(
                    batch.inputs.observations[mask],
                    batch.actions[mask],
                    batch.inputs.temperature[mask],
                )
                values = surrogate(
                    log_probs,
                    old[mask],
                    advantages[mask],
                    entropies,
                    float(clips[slot]),
                    float(coefs[slot]),
                )
                loss = values[batch.action_mask[mask]].sum()
                optimizers[slot].zero_grad()
                loss.backward()
                norm = float(
                    torch.nn.utils.clip_grad_norm_(oracles[slot].parameters(), MAX_NORMS[slot])
                )
                optimizers[slot].param_groups[0]["lr"] = LRS[slot] * min(1.0, steps[slot] / 2)
                optimizers[slot].step()
                steps[slot] += 1
                assert reports[slot].grad_norm == pytest.approx(norm, rel=1e-3)
                assert reports[slot].loss == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-4)
                assert reports[slot].step == steps[slot]
                clipped.add(norm > MAX_NORMS[slot])
    for slot in range(SIZE):
        state = bank.state(slot)
        assert_weights_agree(
            state["weights"], oracles[slot].flat(), steps=steps[slot], lr=LRS[slot]
        )
        assert int(state["step"]) == steps[slot]
    assert clipped == {True, False}, "the test needs gradients on both sides of the bound"


@pytest.mark.parametrize("name", ["architectures", "images", "module"])
def test_gradients_match_finite_differences(name):
    """For all kinds of observations and networks, along a direction."""
    case = CASES[name]
    bank = case.bank(2, std=0.3)
    batch = acted_batch(case, bank, [0, 1])
    direction = torch.sin(
        torch.arange(batch.action_mask.numel()).view(batch.action_mask.shape) + 0.3
    )

    def loss_fn(rows, log_probs, entropies):
        return (direction[rows] * (log_probs + 0.5 * entropies)).sum(1)

    def value(slot):
        mask = batch.member_ids == slot
        scored = bank.log_probs(batch) + 0.5 * bank.entropies(batch)
        return float((direction * scored).double()[mask].sum())

    still = Hyperparameters(lr=1e-30, max_grad_norm=1e6)
    bank.update(batch, loss_fn, {0: still, 1: still}, entropy_gradient=True)
    for slot in range(2):
        state = bank.state(slot)
        # After the first step the first moment is a tenth of the gradient: betas[0] is 0.9.
        gradient = state["exp_avg"].double() / 0.1
        along = torch.cos(torch.arange(len(gradient)) * 1.7).double() / len(gradient) ** 0.5
        ends = []
        for sign in (1, -1):
            moved = state["weights"] + (sign * 1e-2 * along).float()
            bank.load_state(slot, state | {"weights": moved})
            ends.append(value(slot))
        bank.load_state(slot, state)
        slope = (ends[0] - ends[1]) / 2e-2
        assert slope == pytest.approx(
            float(gradient @ along), rel=2e-2, abs=2e-3 * float(gradient.norm())
        )


@pytest.mark.parametrize("name", ["some alike", "images"])
def test_any_split_into_passes_gives_the_same_gradient(name):
    case = CASES[name]
    undivided = case.bank(3, memory=1 << 40)
    batch = acted_batch(case, undivided, range(3))
    passes = 27
    needed = (
        4
        * max(stack.network.values_per_observation for stack in undivided.stacks)
        * int(batch.action_mask.sum())
    )
    split = case.bank(3, memory=-(-needed // passes))
    calls = []

    def loss_fn(rows, log_probs, entropies):
        calls[-1].append(rows)
        return (batch.rewards[rows][:, None] * log_probs).sum(1)

    named = dict.fromkeys(range(3), Hyperparameters(lr=1e-3, max_grad_norm=1e6))
    reports = []
    for bank in (undivided, split):
        calls.append([])
        reports.append(bank.update(batch, loss_fn, named).reports)
    assert [len(rows) for rows in calls] == [1, passes]
    assert sorted(torch.cat(calls[1]).tolist()) == list(range(len(batch)))
    torch.testing.assert_close(
        split.log_probs(batch), undivided.log_probs(batch), rtol=1e-4, atol=1e-3
    )
    for slot in range(3):
        assert reports[0][slot].grad_norm == pytest.approx(reports[1][slot].grad_norm, rel=1e-3)
        one = undivided.state(slot)["exp_avg"]
        other = split.state(slot)["exp_avg"]
        assert_gradients_agree(one, other)


def test_flattened_actions_have_equal_log_probs_and_costs():
    """The cost is the number of environment steps."""
    for case in CASES.values():
        bank = case.bank(3)
        batch = acted_batch(case, bank, range(3))
        flat = batch.flatten_actions()
        scored = bank.log_probs(flat)
        torch.testing.assert_close(
            scored[:, 0], bank.log_probs(batch)[batch.action_mask], rtol=1e-4, atol=1e-4
        )
        expected = {
            slot: int(batch.action_mask[batch.member_ids == slot].sum()) for slot in range(3)
        }
        assert bank.cost(batch) == bank.cost(flat) == expected
        assert bank.cost(batch.select_members([2])) == {2: expected[2]}


def test_default_reference_is_the_initial_policy():
    case = CASES["architectures"]
    bank = case.bank(3)
    fresh = Case(actions=case.actions, masked=True).bank(3, std=0.0)
    batch = acted_batch(case, bank, range(3))
    torch.testing.assert_close(
        bank.reference_log_probs(batch), fresh.log_probs(batch), rtol=1e-5, atol=1e-5
    )
