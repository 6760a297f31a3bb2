"""Assigned attributes, names of other libraries, and options of sampling."""

import gymnasium
import pytest

from evogrpo import (
    GRPO,
    HyperparameterConfig,
    Hyperparameters,
    MultiAgentGRPO,
    Objective,
    Tournament,
    train,
)
from evogrpo.algorithms.factory import Options
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.synonyms import counterpart
from tests.tiny_steps import cart_pole, step_agent, step_population
from tests.tiny_training import random_population, tiny_agent, tiny_env, tiny_population

# Constructor arguments, the assignment, and the constructor's error.
TOGETHER = [
    ({"gamma": 0.9}, ("loss_type", "gspo"), "gamma.*gspo"),
    ({"loss_type": "gmpo"}, ("gamma", 0.5), "gamma.*'gmpo'"),
    ({"objective": Objective(delta=1.5)}, ("clip_high", 0.6), "delta"),
    (
        {"objective": Objective(advantage="rloo", reward_norm="batch")},
        ("advantage", "outcome"),
        "reward_norm",
    ),
    ({}, ("lr", float("nan")), "lr must be finite"),
    ({}, ("group_size", 1), "group_size must be at least 2"),
]


@pytest.mark.parametrize(("options", "change", "rule"), TOGETHER)
def test_assignment_refuses_what_the_constructor_refuses(options, change, rule):
    name, value = change
    agent = tiny_agent(**options)
    before = agent.hyperparameters
    with pytest.raises(ValueError, match=rule):
        setattr(agent, name, value)
    assert agent.hyperparameters is before
    with pytest.raises(ValueError, match=rule):
        tiny_agent(**options | {name: value})
    if len(options) == 1:  # a record has checked single values itself
        with pytest.raises(ValueError, match=rule):
            agent.hyperparameters = Hyperparameters(**{**before.to_json(), name: value})


def test_other_assignments_that_do_not_fit_raise():
    agent = tiny_agent(hp_config=HyperparameterConfig(loss_type=["grpo", "gspo"]))
    network = step_agent()
    with pytest.raises(ValueError, match=r"gamma.*gspo"):  # which evolution may reach
        agent.gamma = 0.9
    for name, value in (("loss_type", "gspo"), ("loss_type", "grpo"), ("advantage", "gdpo")):
        with pytest.raises(ValueError, match=r"advantage|loss_type"):
            setattr(network, name, value)
    population = tiny_population(2, beta=0.1, objective=Objective(kl_target=0.1))
    population[1].beta = 0.0  # without effect on this one alone
    with pytest.raises(ValueError, match=r"kl_target.*beta"):
        tiny_population(2, objective=Objective(kl_target=0.1))
    for record in (None, {"lr": 0.1}):
        with pytest.raises(ValueError, match="hyperparameters must be a Hyperparameters record"):
            agent.hyperparameters = record


@pytest.mark.parametrize("name", ["learning_rate", "policy_kwargs", "anything"])
def test_names_of_other_libraries_are_translated_and_unknown_ones_raise(name):
    env = cart_pole()
    argument = counterpart(name, {**Options.__annotations__})
    answer = f"it is called '{argument}' here" if argument else ""
    for call in (
        lambda: tiny_agent(**{name: 1}),
        lambda: step_agent(env, **{name: 1}),
        lambda: step_population(2, env, **{name: 1}),
        lambda: MultiAgentGRPO({"a": env.observation_space}, {"a": env.action_space}, **{name: 1}),
        lambda: train("CartPole-v1", 100, **{name: 1}),
    ):
        with pytest.raises(ValueError, match=f"unknown argument.* '{name}'.*{answer}"):
            call()
    for thing in (
        tiny_agent(),
        step_agent(),
        tiny_population(2),
        Tournament(),
        Objective(),
        Hyperparameters(),
    ):
        with pytest.raises(AttributeError, match=name):
            setattr(thing, name, 1)


@pytest.mark.parametrize(
    "argument", ["MlpPolicy", gymnasium.make("CartPole-v1"), GymnasiumGroups, lambda: None]
)
@pytest.mark.parametrize("make", [GRPO, lambda *argument: GRPO.population(2, *argument)])
def test_an_environment_instead_of_spaces_raises(make, argument):
    space = gymnasium.spaces.Discrete(2)
    for arguments in ((argument, space), (space, argument)):
        with pytest.raises(
            ValueError, match=r"must be a Gymnasium space, got .*evogrpo.train\(env"
        ):
            make(*arguments)


NARROW = {"top_k": 4, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}


@pytest.mark.parametrize("name", NARROW)
def test_the_correction_is_refused_where_the_sampler_truncates(name):
    with pytest.raises(ValueError, match=f"importance_correction.* {name}={NARROW[name]}"):
        tiny_agent(
            objective=Objective(importance_correction="sequence_mask"), **{name: NARROW[name]}
        )


@pytest.mark.parametrize("options", [NARROW, {}], ids=["narrow", "whole"])
def test_ratios_compare_whole_distributions(options):
    """Weights hardly move, so every ratio is 1: the sampler's log-probabilities are not used."""
    population = random_population(
        2, lr=1e-12, batch_size=4, clip_low=0.01, clip_high=0.01, **options
    )
    batch = population.collect(
        tiny_env(), step=0, samples_per_step=8, starts_per_step=4
    ).experience["default"]
    assert batch.exact is (not options)
    trainer = population.members.banks["default"].log_probs(batch)
    gap = float((batch.sampler_log_probs - trainer)[batch.action_mask].max())
    assert gap > 0.1 if options else abs(gap) < 1e-4, (
        "a truncated distribution has more probability on fewer tokens"
    )
    for report in population.learn({"default": batch}, step=0).values():
        assert report.failed is None
        assert report.metrics["clip_ratio/region_mean"] == 0.0
        assert ("sampling/sampling_logp_difference/max" in report.metrics) is (not options)
