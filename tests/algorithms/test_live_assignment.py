"""Assigned attributes are validated like constructor arguments, and unknown names raise."""

import pytest

from evogrpo import (
    GRPO,
    HyperparameterConfig,
    Hyperparameters,
    MultiAgentGRPO,
    Objective,
    Population,
    RLParameter,
    Tournament,
)
from evogrpo.synonyms import counterpart
from tests.tiny_steps import step_agent
from tests.tiny_training import shared_model, tiny_agent, tiny_options, tiny_population

# Constructor arguments, the assignment, and the constructor's error.
TOGETHER = [
    ({"gamma": 0.9}, ("loss_type", "gspo"), "gamma.*gspo"),
    ({"loss_type": "gmpo"}, ("gamma", 0.5), "gamma below 1 .*'gmpo'"),
    ({"objective": Objective(delta=1.5)}, ("clip_high", 0.6), "delta"),
    ({"objective": Objective(delta=1.5)}, ("clip_coef", 0.5), "delta"),
    ({"objective": Objective(dual_clip=3.0)}, ("loss_type", "sapo"), "dual_clip"),
    ({"objective": Objective(advantage="rloo", reward_norm="batch")}, ("advantage", "outcome"), "reward_norm"),
    ({"objective": Objective(kl_placement="reward")}, ("loss_type", "luspo"), "in-reward KL"),
    ({}, ("lr", float("nan")), "lr must be finite"),
    ({}, ("group_size", 1), "group_size must be at least 2"),
    ({}, ("update_epochs", True), "update_epochs must be an integer"),
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
    if not isinstance(value, bool) and value == value and value != 1:
        with pytest.raises(ValueError, match=rule):
            agent.hyperparameters = Hyperparameters(**{**before.to_json(), name: value})


def test_values_that_evolution_may_reach_are_checked():
    space = HyperparameterConfig(loss_type=RLParameter(choices=["grpo", "gspo"]))
    agent = tiny_agent(hp_config=space)
    with pytest.raises(ValueError, match=r"gamma.*gspo"):
        agent.gamma = 0.9


def test_losses_of_whole_completions_are_refused_for_networks():
    agent = step_agent()
    for name, value in (("loss_type", "gspo"), ("loss_type", "grpo"), ("advantage", "gdpo")):
        with pytest.raises(ValueError, match=r"advantage|loss_type"):
            setattr(agent, name, value)
    agent.loss_type = "cispo"
    assert agent.loss_type == "cispo"


def test_a_member_may_have_a_value_that_the_population_may_not():
    population = tiny_population(2, beta=0.1, objective=Objective(kl_target=0.1))
    population[1].beta = 0.0  # without effect on this one alone
    with pytest.raises(ValueError, match=r"kl_target.*beta"):
        tiny_population(2, objective=Objective(kl_target=0.1))


@pytest.mark.parametrize("record", [None, {"lr": 0.1}, "lr"])
def test_hyperparameters_must_be_a_record(record):
    with pytest.raises(ValueError, match="hyperparameters must be a Hyperparameters record"):
        tiny_agent().hyperparameters = record


MISNOMERS = ["learning_rate", "num_generations", "epsilon", "num_iterations", "kl_coef", "ent_coef", "epsilon_high"]


@pytest.mark.parametrize("name", MISNOMERS)
def test_names_of_other_libraries_are_translated(name):
    own = counterpart(name, Hyperparameters.__dataclass_fields__)
    for agent in (tiny_agent(), step_agent()):
        with pytest.raises(AttributeError, match=name):
            setattr(agent, name, 1.0)
    with pytest.raises(ValueError, match=f"unknown argument '{name}': it is called '{own}' here"):
        tiny_agent(**{name: 1.0})
    with pytest.raises(ValueError, match=f"unknown hyperparameter '{name}': it is called '{own}' here"):
        HyperparameterConfig(**{name: RLParameter(min=0.1, max=0.2)})


@pytest.mark.parametrize("name", ["clip_coef_", "groupsize", "LR", "temprature", "anything"])
def test_unknown_attributes_cannot_be_set(name):
    for thing in (tiny_agent(), step_agent(), tiny_population(2), Tournament(), Objective(), Hyperparameters()):
        with pytest.raises(AttributeError):
            setattr(thing, name, 1)
        assert not hasattr(thing, name)
    assert not any("__dict__" in vars(kind) for kind in (GRPO, MultiAgentGRPO, Population))


def test_subclasses_may_set_attributes_of_their_own():
    class Curious(GRPO):
        def __init__(self, *spaces, curiosity=0.5, **options):
            super().__init__(*spaces, **options)
            self.curiosity = curiosity

    agent = Curious(actor_network=shared_model(), curiosity=0.7, **tiny_options())
    agent.seen = 3
    assert (agent.curiosity, agent.seen) == (0.7, 3)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda: tiny_agent(INIT_HP={"LR": 1}), "'INIT_HP'"),
        (lambda: tiny_agent(max_completion_length=9), "it is called 'max_output_tokens' here"),
        (lambda: tiny_agent(per_device_train_batch_size=9), "it is called 'batch_size' here"),
        (lambda: GRPO.population(pop_size=9), "it is called 'size' here"),
        (lambda: GRPO.population(num_agents=9), "it is called 'size' here"),
        (lambda: tiny_agent(actor_netwrk=None), "did you mean 'actor_network'"),
        (lambda: MultiAgentGRPO(observation_space={}), "it is called 'observation_spaces' here"),
    ],
)
def test_calls_of_other_libraries_are_explained(call, answer):
    with pytest.raises(ValueError, match=answer):
        call()
