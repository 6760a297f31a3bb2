"""Agents that sample with truncation learn the whole distribution."""

import pytest
import torch

from evogrpo import GRPO, Objective
from evogrpo.training.configuration.reading import parse_config
from tests.tiny_training import equal_states, graded, randomise_adapter, state_of, tiny_agent, tiny_env, tiny_population

NARROW = {"top_k": 4, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}


def test_old_log_probs_are_the_trainers_and_the_correction_uses_the_truncated_ones():
    gaps = {}
    for name, options in (("narrow", NARROW), ("whole", {})):
        objective = Objective(importance_correction="token_truncate") if options else Objective()
        population = tiny_population(2, objective=objective, **options)
        for agent in population:
            randomise_adapter(agent, agent.slot)
        batch = population.collect(tiny_env(), step=0, samples_per_step=8, block=4).experience["default"]
        assert batch.exact is (name == "whole")
        trainer = population.members.banks["default"].log_probs(batch)
        gaps[name] = (batch.sampler_log_probs - trainer)[batch.action_mask]
        reports = population.learn({"default": batch}, step=0)
        assert all(report.failed is None for report in reports.values())
        if name == "narrow":
            assert reports[0].metrics["sampling/importance_sampling_ratio/min"] < 0.9
    assert float(gaps["whole"].abs().max()) < 1e-4
    assert float(gaps["narrow"].max()) > 0.1, "what was drawn from has more on fewer tokens"


@pytest.mark.parametrize("name", NARROW)
def test_options_apply_in_a_manual_loop(name):
    prompts = tiny_env().reset()[0]
    completions = []
    for options in ({name: NARROW[name] if name != "min_p" else 0.3}, {}):
        agent = tiny_agent(seed=3, temperature=2.0, group_size=8, **options)
        ids, masks = agent.get_action(prompts)
        assert agent.learn((ids, masks, graded(ids))).failed is None
        completions.append([row.tolist() for rows in ids for row in rows])
    assert completions[0] != completions[1]


def test_neutral_options_change_nothing():
    states = []
    for options in ({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1}, {}):
        agent = tiny_agent(**options)
        ids, masks = agent.get_action(tiny_env().reset()[0])
        agent.learn((ids, masks, graded(ids)))
        states.append(state_of(agent))
    assert equal_states(*states)


def test_options_are_saved_and_configurable(tmp_path):
    agent = tiny_agent(**NARROW)
    agent.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", actor_network=agent.members.bank.base.model)
    assert loaded.members.settings == agent.members.settings
    values = {"model": "smollm2-135m", "task": {"name": "two_digit_sums"}, "schedule": {"generations": 1}}
    config = parse_config(values | {"agent": dict(NARROW)})
    assert {name: config.agent.settings()[name] for name in NARROW} == NARROW
    assert parse_config(config.to_json()) == config


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_k": -1}, "top_k must be at least 0, got -1: 0 keeps all"),
        ({"top_p": 0.0}, "top_p must lie in"),
        ({"top_p": "0.9"}, "top_p must be a number"),
        ({"min_p": 1.0}, "min_p must lie in"),
        ({"repetition_penalty": torch.inf}, "repetition_penalty must be finite"),
    ],
)
def test_invalid_options_raise(options, rule):
    with pytest.raises(ValueError, match=rule):
        tiny_agent(**options)
