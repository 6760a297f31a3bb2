"""Architectures: configuration, function-preserving changes, moments, mutations, banks."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.network import ArchitectureLimits, NetworkConfig, mutate_architecture
from evogrpo.members.networks.architecture import add_layer, morph
from evogrpo.members.networks.networks import DefaultNetwork
from evogrpo.randomness import generator
from tests.policy_banks import same_state
from tests.tiny_networks import CASES, MIXED, VECTOR, Case, acted_batch, observe, stacked, tensors

HIDDEN = (7, 5)
ACTIVATIONS = ["tanh", "relu", "elu"]


def random_parameters(config, space=VECTOR, outputs=3):
    """Return a train state's random parameters."""
    network = DefaultNetwork(config, space, outputs)
    random = torch.Generator().manual_seed(0)
    parts = {}
    for name in ("weights", "exp_avg", "exp_avg_sq", "reference"):
        parts[name] = {
            key: 0.7 * torch.randn(shape, generator=random) for key, shape in network.shapes.items()
        }
    return parts


def outputs_of(parameters, config, space=VECTOR):
    network = DefaultNetwork(config, space, 3)
    rng = np.random.default_rng(1)
    seen = tensors(stacked([observe(space, rng) for _ in range(50)]), (1, 50))
    return network({name: value[None] for name, value in parameters.items()}, seen)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden": (8, 0)},
        {"hidden": "64"},
        {"activation": "gelu"},
        {"convolutions": ((8, 3),)},
        {"log_std": float("nan")},
        {"hiden": [8]},
    ],
)
def test_invalid_architectures_are_rejected(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        NetworkConfig(**fields)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", [(9, 5), (12, 11), (7, 5, 5), (7, 5, 5, 5)])
@pytest.mark.parametrize("space", [VECTOR, MIXED], ids=["vector", "images"])
def test_added_units_and_layers_preserve_the_function(activation, hidden, space):
    old = NetworkConfig(hidden=HIDDEN, activation=activation)
    new = NetworkConfig(hidden=hidden, activation=activation)
    before = random_parameters(old, space)
    after = morph(before, old, new, generator(0, "test"))
    layers = len(hidden) - len(HIDDEN)
    for name in ("weights", "reference"):
        one = outputs_of(before[name], old, space)
        other = outputs_of(after[name], new, space)
        if layers and activation == "tanh":
            # Each layer changes each value h in [-1, 1] by at most 2 %, so an output by at most 2 %
            # of sum |h W|.
            bound = 0.0205 * layers * float(before[name]["output.weight"].abs().sum(0).max())
            assert 0 < float((one - other).abs().max()) <= bound
        else:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    fresh = after["weights"]["hidden0.weight"][:, 7:]
    assert bool(fresh.any(0).all()), "a new unit without incoming weights would be dead under relu"


def test_units_with_the_largest_outgoing_weights_are_kept():
    old = NetworkConfig(hidden=(6,))
    new = NetworkConfig(hidden=(3,))
    before = random_parameters(old)
    strengths = torch.tensor([0.0, 5.0, 0.1, 3.0, 0.0, 4.0])
    rows = torch.nn.functional.normalize(before["weights"]["output.weight"], dim=1)
    before["weights"]["output.weight"] = strengths[:, None] * rows
    after = morph(before, old, new, generator(0, "test"))
    kept = [1, 3, 5]
    for name in before:
        assert torch.equal(after[name]["hidden0.weight"], before[name]["hidden0.weight"][:, kept])
        assert torch.equal(after[name]["hidden0.bias"], before[name]["hidden0.bias"][kept])
        assert torch.equal(after[name]["output.weight"], before[name]["output.weight"][kept])
        assert torch.equal(after[name]["output.bias"], before[name]["output.bias"])


def test_moments_are_kept_and_zero_for_new_weights():
    old = NetworkConfig(hidden=HIDDEN)
    new = NetworkConfig(hidden=(9, 5))
    before = random_parameters(old)
    after = morph(before, old, new, generator(0, "test"))
    for name in ("exp_avg", "exp_avg_sq"):
        one = before[name]
        other = after[name]
        assert torch.equal(other["hidden0.weight"][:, :7], one["hidden0.weight"])
        assert torch.equal(other["hidden1.weight"][:7], one["hidden1.weight"])
        assert torch.equal(other["output.weight"], one["output.weight"])
        for new_part in (
            other["hidden0.weight"][:, 7:],
            other["hidden0.bias"][7:],
            other["hidden1.weight"][7:],
        ):
            assert not new_part.any()


def test_moments_are_rescaled_with_weights():
    """With tanh the output's weights are multiplied by 4, so its gradients are divided by 4."""
    before = random_parameters(NetworkConfig(hidden=HIDDEN))
    after = add_layer(before, 2, "tanh")
    assert torch.equal(after["weights"]["output.weight"], 4 * before["weights"]["output.weight"])
    assert torch.equal(after["exp_avg"]["output.weight"], before["exp_avg"]["output.weight"] / 4)
    assert torch.equal(
        after["exp_avg_sq"]["output.weight"], before["exp_avg_sq"]["output.weight"] / 16
    )


@pytest.mark.parametrize(
    "new",
    [
        NetworkConfig(hidden=HIDDEN, convolutions=((4, 3, 1),)),
        NetworkConfig(hidden=()),
        NetworkConfig(hidden=HIDDEN, log_std=1.0),
    ],
)
def test_other_changes_are_rejected(new):
    old = NetworkConfig(hidden=HIDDEN)
    with pytest.raises(ValueError, match="hidden"):
        morph(random_parameters(old), old, new, generator(0, "test"))


def test_mutations_cover_all_kinds_within_limits():
    limits = ArchitectureLimits(
        min_layers=1, max_layers=3, min_units=8, max_units=40, unit_steps=(8, 16)
    )
    config = NetworkConfig(hidden=(16, 16))
    kinds = set()
    for number in range(300):
        changed = mutate_architecture(config, limits, generator(0, "test", number))
        layers = np.sign(len(changed.hidden) - len(config.hidden))
        units = np.sign(sum(changed.hidden) - sum(config.hidden))
        kinds.add(("layer", layers) if layers else ("units", units))
        assert limits.min_layers <= len(changed.hidden) <= limits.max_layers
        assert all(8 <= units <= 40 for units in changed.hidden)
        # A mutation changes one layer, one width or one activation.
        differing = sum(
            one != other for one, other in zip(config.hidden, changed.hidden, strict=False)
        )
        moved = (
            abs(len(config.hidden) - len(changed.hidden))
            + differing
            + (config.activation != changed.activation)
        )
        assert moved == 1
        config = changed
    # 0: the activation
    assert kinds == {
        ("layer", 1),
        ("layer", -1),
        ("units", 1),
        ("units", -1),
        ("units", 0),
    }


def test_limits_without_possible_changes_are_rejected():
    wide = NetworkConfig(hidden=(512,))
    limits = ArchitectureLimits(max_units=256)
    assert all(
        len(mutate_architecture(wide, limits, generator(0, "test", seed)).hidden) == 1
        for seed in range(30)
    )
    limits = ArchitectureLimits(
        min_layers=1, max_layers=1, min_units=8, max_units=8, activations=("tanh",)
    )
    with pytest.raises(ValueError, match="limits"):
        mutate_architecture(NetworkConfig(hidden=(8,)), limits, generator(0, "test"))


@pytest.mark.parametrize(
    "fields",
    [
        {"min_layers": 0},
        {"min_layers": 4},
        {"min_units": 300},
        {"activations": ("gelu",)},
        {"unit_steps": (0,)},
    ],
)
def test_invalid_limits_are_rejected(fields):
    with pytest.raises(ValueError, match=r"min_|activation|unit_steps"):
        ArchitectureLimits(**fields)


@pytest.mark.parametrize("name", ["discrete", "box", "some alike", "images"])
def test_rebuilding_preserves_the_function_and_other_members(name):
    case = CASES[name]
    bank = case.bank(3)
    batch = acted_batch(case, bank, range(3))
    step = Hyperparameters(lr=1e-3)
    bank.update(
        batch, lambda rows, log_probs, entropies: log_probs.sum(1), dict.fromkeys(range(3), step)
    )
    before = bank.log_probs(batch)
    states = [bank.state(slot) for slot in range(3)]
    bank.running_stats[1, 0] = 0.5
    first = bank.architecture(1).hidden
    bank.rebuild(1, NetworkConfig(hidden=(first[0] + 16, *first[1:])), generator(0, "test"))
    assert bank.architecture(1).hidden[0] == first[0] + 16
    torch.testing.assert_close(bank.log_probs(batch), before, rtol=1e-4, atol=1e-4)
    for slot in (0, 2):
        assert same_state(bank.state(slot), states[slot])
    assert int(bank.state(1)["step"]) == 1
    assert float(bank.running_stats[1, 0]) == 0.5
    reports = bank.update(
        batch, lambda rows, log_probs, entropies: log_probs.sum(1), dict.fromkeys(range(3), step)
    ).reports
    assert all(report.grad_norm > 0 and report.step == 2 for report in reports.values())


def test_train_states_contain_the_architecture():
    case = CASES["architectures"]
    bank = case.bank(3)
    again = Case(actions=case.actions, masked=True).bank(3)
    for slot in range(3):
        again.load_state(slot, bank.state(slot))
        assert again.architecture(slot) == bank.architecture(slot)
        assert same_state(again.state(slot), bank.state(slot))
    batch = acted_batch(case, bank, range(3))
    assert torch.equal(again.log_probs(batch), bank.log_probs(batch))


def test_states_with_a_wrong_architecture_are_rejected():
    bank = CASES["discrete"].bank(2)
    state = bank.state(0)
    before = bank.state(0)
    state["architecture"] = (
        Case(actions=spaces.Discrete(4), network=NetworkConfig(hidden=(9,)))
        .bank(1)
        .state(0)["architecture"]
    )
    with pytest.raises(ValueError, match=r"state 'exp_avg'|state 'weights'"):
        bank.load_state(0, state)
    for broken in (
        torch.zeros(4, dtype=torch.uint8),
        torch.tensor([34, 34], dtype=torch.uint8),
        torch.zeros(4),
    ):
        with pytest.raises(ValueError, match="architecture"):
            bank.load_state(0, before | {"architecture": broken})
    assert same_state(bank.state(0), before)


def test_states_of_another_space_or_module_are_rejected():
    bank = Case(actions=spaces.Discrete(3)).bank(1)
    with pytest.raises(ValueError, match="spaces"):
        Case(actions=spaces.Discrete(4)).bank(1).load_state(0, bank.state(0))
    other = CASES["module"].bank(1)
    with pytest.raises(ValueError, match="does not match the network of these members"):
        other.load_state(0, other.state(0) | {"architecture": bank.state(0)["architecture"]})
