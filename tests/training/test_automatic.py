"""Automatic search spaces and strategies of configurations."""

import gymnasium
import numpy as np
import pytest

from evogrpo import GRPO, GymnasiumGroups, Objective, evolve
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, HYPERPARAMETER_NAMES
from evogrpo.config.network import ArchitectureLimits
from evogrpo.config.search_space import (
    DEFAULT_SEARCHED,
    LANGUAGE_RANGES,
    NETWORK_RANGES,
    HyperparameterConfig,
    RLParameter,
)
from evogrpo.evolution import RandomSearch, SuccessiveHalving, Tournament, spread_founders
from evogrpo.evolution.strategies import default_strategy
from evogrpo.training.configuration.reading import parse_config
from tests.tiny_models import tiny_model

QUESTIONS = {
    "task": {"dataset": {"train": "sums.jsonl"}, "reward": "r.py:f", "form": "trl"},
    "population": {"size": 4},
}
PLAY = {"task": {"env": "CartPole-v1"}, "schedule": {"generations": 1}, "population": {"size": 4}}
SPACES = (gymnasium.spaces.Box(-1, 1, (3,), np.float32), gymnasium.spaces.Discrete(2))


BOTH = pytest.mark.parametrize("values", [QUESTIONS, PLAY], ids=["questions", "play"])


def founders_of(config, size):
    rng = np.random.default_rng(0)
    samples = config.schedule.samples_per_step
    return spread_founders(config.hyperparameters, config.search_space, size, rng, samples)


@BOTH
def test_a_missing_learning_rate_is_calibrated(values):
    config = parse_config(values)
    assert config == parse_config({**values, "hyperparameters": {"lr": "auto"}})
    assert config.hyperparameters.target_kl == DEFAULT_TARGET_KL
    targets = [founder.target_kl for founder in founders_of(config, 8)]
    assert len(set(targets)) == 8
    assert max(targets) / min(targets) <= 4**2  # KL grows with the square of the learning rate


@BOTH
def test_given_and_evolving_learning_rates_are_not_calibrated(values):
    for given, target_kl in (({"lr": 3e-4}, None), ({"lr": 3e-4, "target_kl": 0.02}, 0.02)):
        config = parse_config({**values, "hyperparameters": given})
        assert (config.hyperparameters.lr, config.hyperparameters.target_kl) == (3e-4, target_kl)
        assert not {"lr", "target_kl"} & set(config.search_space)
    assert (
        parse_config({**values, "search_space": {"lr": "auto"}}).hyperparameters.target_kl is None
    )
    with pytest.raises(ValueError, match="lr"):
        parse_config({**values, "search_space": {"lr": "auto"}, "hyperparameters": {"lr": "auto"}})


def test_a_dataset_and_a_reward_suffice():
    single = parse_config({"task": QUESTIONS["task"]})
    assert (single.population.size, dict(single.search_space)) == (1, {})
    assert single.hyperparameters.target_kl == DEFAULT_TARGET_KL
    config = parse_config(QUESTIONS)
    assert set(config.search_space) == set(DEFAULT_SEARCHED)
    assert config.search_space["target_kl"] == LANGUAGE_RANGES["target_kl"]
    assert config.model == "smollm2-135m"
    assert config.schedule.generations == 10


@BOTH
def test_the_search_space_defaults_to_auto_and_explicit_values_are_fixed(values):
    assert parse_config({**values, "search_space": "auto"}) == parse_config(values)
    given = parse_config({**values, "hyperparameters": {"lr": 3e-4, "group_size": 4}})
    assert set(given.search_space) == {"clip_coef", "update_epochs"}
    assert not parse_config({**values, "search_space": {}}).search_space
    explicit = parse_config({**values, "search_space": {"beta": {"choices": [0, 0.1]}}})
    assert list(explicit.search_space) == ["beta"]


def strategy_of(values, **changes):
    config = parse_config({**values, "schedule": {"generations": 3}, **changes})
    assert parse_config(config.to_json()) == config
    return config.strategy


class TestDefaultStrategy:
    @pytest.mark.parametrize(
        "changes", [{}, {"search_space": {"clip_coef": "auto"}}], ids=["nothing", "search_space"]
    )
    def test_networks_are_halved_and_language_models_hold_tournaments(self, changes):
        assert strategy_of(PLAY, **changes) == SuccessiveHalving()
        assert strategy_of(QUESTIONS, **changes) == Tournament()

    def test_task_settings_of_language_models_are_halved(self):
        weights = {"search_space": {"reward_weights": {"f": {"choices": [0, 1]}}}}
        assert strategy_of(QUESTIONS, **weights) == SuccessiveHalving()

    def test_new_texts_need_a_strategy_that_mutates(self):
        space = HyperparameterConfig(task={"style": RLParameter(choices=["a"], proposed=True)})
        strategy = default_strategy(4, space, networks=False, evolve_network=False)
        assert strategy == Tournament()

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"strategy": "random_search"}, RandomSearch()),
            ({"fitness": "rollouts"}, SuccessiveHalving()),
            ({"population": {"size": 1}}, Tournament()),
            ({"agent": {"evolve_network": {}}}, Tournament()),  # halving does not mutate
        ],
    )
    def test_other_settings(self, changes, expected):
        assert strategy_of(PLAY, **changes) == expected

    def test_evolve_has_the_same_defaults(self):
        env = GymnasiumGroups("CartPole-v1")

        def default(**options):
            spaces = env.observation_space, env.action_space
            return evolve(
                GRPO.population(4, *spaces, **options), env, generations=1
            ).trainer.strategy

        assert default() == SuccessiveHalving()
        assert default(evolve_network=ArchitectureLimits()) == Tournament()


@pytest.mark.parametrize("section", ["hyperparameters", "search_space"])
@pytest.mark.parametrize(
    ("values", "ranges"),
    [(QUESTIONS, LANGUAGE_RANGES), (PLAY, NETWORK_RANGES)],
    ids=["questions", "play"],
)
def test_any_hyperparameter_may_be_auto_in_either_section(values, ranges, section):
    for name in HYPERPARAMETER_NAMES:
        config = parse_config({**values, "search_space": {}, section: {name: "auto"}})
        calibrated = (section, name) == ("hyperparameters", "lr")
        assert dict(config.search_space) == ({} if calibrated else {name: ranges[name]})


def test_ineffective_hyperparameters_do_not_evolve():
    # One optimizer step per rollout clips nothing.
    once = {"update_epochs": 1, "batch_size": 64, "lr": 1e-4}
    assert "clip_coef" not in parse_config({**QUESTIONS, "hyperparameters": once}).search_space
    # A soft gate instead of a clip.
    soft = {"agent": {"objective": {"loss_type": "sapo"}}, "hyperparameters": {"lr": 1e-4}}
    assert "clip_coef" not in parse_config({**QUESTIONS, **soft}).search_space
    indivisible = {
        "schedule": {"generations": 1, "samples_per_step": 34},
        "hyperparameters": {"batch_size": 8},
    }
    with pytest.raises(ValueError, match="group_size must divide"):
        parse_config({**QUESTIONS, **indivisible})


def test_populations_search_missing_hyperparameters():
    members = GRPO.population(4, *SPACES, hp_config="auto", lr=1e-3, samples_per_step=32)
    assert set(members.space) == {"clip_coef", "group_size", "update_epochs"}
    assert {agent.hyperparameters.lr for agent in members} == {1e-3}
    assert len({agent.hyperparameters.update_epochs for agent in members}) > 1
    # Without samples per step, group_size cannot evolve.
    assert "group_size" not in GRPO.population(2, *SPACES, hp_config="auto").space
    language = {
        "actor_network": tiny_model(),
        "pad_token_id": 0,
        "hp_config": "auto",
        "samples_per_step": 16,
    }
    assert GRPO.population(2, **language).space["update_epochs"] == LANGUAGE_RANGES["update_epochs"]
    assert (
        "clip_coef"
        not in GRPO.population(2, **language, lr=1e-4, objective=Objective(loss_type="sapo")).space
    )
    # The objective is valid beside the other options only.
    long = {"max_output_tokens": 512, "objective": Objective(overlong_buffer=200)}
    assert "clip_coef" in GRPO.population(2, **language, **long, lr=1e-4).space
    with pytest.raises(ValueError, match="hp_config must be"):
        GRPO(*SPACES, hp_config="auto")  # a single agent evolves nothing
    with pytest.raises(ValueError, match="hp_config must be"):
        GRPO.population(2, *SPACES, hp_config="automatic")
