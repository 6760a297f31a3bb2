"""Misplaced keys are refused with the right place."""

import pytest

from evogrpo.cli import main
from evogrpo.training.configuration.reading import override, parse_config

BASE = {"task": {"env": "CartPole-v1"}, "schedule": {"generations": 1}}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("lr=1e-3", "hyperparameters.lr"),
        ("learning_rate=1e-3", "hyperparameters.lr"),
        ("schedule.learning_rate=1e-3", "hyperparameters.lr"),
        ("agent.gamma=0.9", "hyperparameters.gamma"),
        ("total_timesteps=1000", "schedule.max_timesteps"),
        ("hyperparameters.total_timesteps=1000", "schedule.max_timesteps"),
        ("generations=3", "schedule.generations"),
        ("pop_size=3", "population.size"),
        ("schedule.size=3", "population.size"),
        ("net_arch=[64]", "agent.network.hidden"),
        ("agent.net_arch=[64]", None),
        ("hyperparameters.activation_fn=tanh", "agent.network.activation"),
        ("policy_kwargs={}", "agent.network"),
        ("agent.weight_decay=0.1", "agent.optimizer.weight_decay"),
        ("loss_type=grpo", "hyperparameters.loss_type"),
        ("agent.dynamic_sampling=1", "agent.objective.dynamic_sampling"),
        ("env=CartPole-v1", "task.env"),
        ("env_id=CartPole-v1", "task.env"),
        ("n_envs=4", "task.num_envs"),
        ("max_episode_steps=100", "task.max_episode_steps"),
        ("task.seed_=1", None),
        ("agent.seed=1", "seed"),
        ("max_output_tokens=5", "agent.max_output_tokens"),
        ("agent.learning_rate_schedule=5", None),
    ],
)
def test_misplaced_keys_are_refused_with_their_place(given, place):
    with pytest.raises(ValueError, match="nknown key") as caught:
        parse_config(override(BASE, [given]))
    if place is None:
        assert "Use '" not in str(caught.value)
    else:
        assert f"Use {place!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tensorboard_log=runs", "it is called 'run_dir' here"),
        ("hyperparameters.learning_rate=1", "it is called 'lr' here"),
        ("schedule.total_timesteps=1", "it is called 'max_timesteps' here"),
        ("search_space.lr={low: 1}", "it is called 'min' here"),
    ],
)
def test_unknown_keys_get_the_usual_error(given, said):
    with pytest.raises(ValueError, match=said):
        parse_config(override(BASE, [given]))


def test_the_command_line_reports_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--env", "CartPole-v1", "learning_rate=1e-3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "'hyperparameters.lr'" in lines[0]
