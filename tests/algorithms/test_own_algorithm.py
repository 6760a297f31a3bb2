"""A user-defined algorithm as in docs/own_algorithm.md."""

import re
from pathlib import Path

import pytest
import torch

from evogrpo import GRPO, EvolvableAlgorithm, GymnasiumGroups, HyperparameterConfig, RLParameter, evolve, resume
from evogrpo.randomness import generator
from tests.tiny_steps import cart_pole
from tests.tiny_training import equal_states, shared_model, tiny_env, tiny_options

PAGE = (Path(__file__).parents[2] / "docs" / "own_algorithm.md").read_text(encoding="utf-8")
CLASS, USE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
SPACE = HyperparameterConfig(lr=RLParameter(min=1e-3, max=1e-1, scale="log"))


def defined() -> type[EvolvableAlgorithm]:
    names: dict[str, type[EvolvableAlgorithm]] = {}
    exec(CLASS, names)  # noqa: S102 (the page is the test's subject)
    return names["Reinforce"]


Reinforce = defined()


def small(size: int, env: GymnasiumGroups, **options):
    defaults = {"group_size": 4, "lr": 1e-2}
    return Reinforce.population(size, env.observation_space, env.action_space, **(defaults | options))


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = USE.replace('"CartPole-v1"', '"CartPole-v1", max_episode_steps=20, validation_size=4, test_size=4')
    short = short.replace("steps_per_generation=5", "steps_per_generation=1")
    exec(short, {"Reinforce": Reinforce})  # noqa: S102
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()] == list("1234")


def test_a_step_is_the_policy_gradient(monkeypatch):
    """Against autograd through the agent's module: the mean of advantage times log-probability, leave-one-out."""
    env = cart_pole()
    (agent,) = population = small(1, env, max_grad_norm=1e9)
    collected = population.collect(env, step=0, samples_per_step=8, block=2)
    batch = collected.experience["default"]
    means = torch.stack([batch.rewards[(batch.group_ids == g)].mean() for g in batch.group_ids])
    expected = (batch.rewards - means) * 4 / 3  # r - (sum - r) / (n - 1), with n = 4
    bank = agent.members.banks["default"]
    log_probs = bank.log_probs(batch)
    value = -(expected[:, None] * log_probs).sum() / 8
    report = population.learn(collected.experience, step=0)[0]
    assert report.loss == pytest.approx(float(value), rel=1e-5)
    assert report.advantages == pytest.approx(expected.tolist(), abs=1e-4)
    nudged = agent.state()
    assert not equal_states(nudged, small(1, env)[0].state())


def test_members_learn_together_as_alone():
    env = cart_pole()
    together = small(3, env, hp_config=SPACE)
    experience = together.collect(env, step=0, samples_per_step=8, block=2).experience
    together.learn(experience, step=0)
    for slot, member in enumerate(together):
        alone = small(3, env, hp_config=SPACE)
        alone.agents[slot].hyperparameters = member.hyperparameters
        for other in {0, 1, 2} - {slot}:
            alone.agents[other].retired = True
        alone.learn({"default": experience["default"].select_members([slot])}, step=0)
        together, separate = member.state(), alone[slot].state()
        assert all(torch.allclose(together[name], separate[name], atol=1e-6) for name in together)


def test_clones_mutates_evolves_saves_and_resumes(tmp_path):
    env = cart_pole()
    options = {"steps_per_generation": 2, "samples_per_step": 8, "test_questions": 4, "validation_questions": 4}
    for folder, generations in (("whole", 3), ("parts", 1)):
        run = evolve(small(3, env, hp_config=SPACE), env, run_dir=tmp_path / folder, generations=generations, **options)
        assert len(list(run)) == generations
    whole = evolve(small(3, env, hp_config=SPACE), env, generations=3, **options)
    list(whole)
    again = resume(tmp_path / "parts", env, algorithm=Reinforce, generations=3)
    list(again)
    assert all(type(agent) is Reinforce for agent in again.population)
    for agent, twin in zip(whole.population, again.population, strict=True):
        assert agent.hyperparameters == twin.hyperparameters
        assert equal_states(agent.state(), twin.state())
    member = again.population[0]
    assert type(member.clone()) is Reinforce
    assert set(member.mutate(generator(0, "test"))) == {"lr"}
    member.save_checkpoint(tmp_path / "agent")
    assert equal_states(Reinforce.load(tmp_path / "agent").state(), member.state())
    with pytest.raises(ValueError, match="algorithm=Reinforce"):
        resume(tmp_path / "parts", env)
    with pytest.raises(ValueError, match="algorithm=Reinforce"):
        resume(tmp_path / "parts", env, algorithm=GRPO)


def test_trains_language_models():
    env = tiny_env()
    options = {name: value for name, value in tiny_options().items() if name not in Reinforce.unused_options}
    run = evolve(
        Reinforce.population(2, actor_network=shared_model(), hp_config=SPACE, **options),
        env,
        generations=2,
        steps_per_generation=2,
        samples_per_step=8,
        test_questions=4,
    )
    assert [report.generation for report in run] == [1, 2]
    assert run.result.test is not None


@pytest.mark.parametrize("options", [{"clip_coef": 0.1}, {"hp_config": {"clip_coef": RLParameter(min=0.1, max=0.3)}}])
def test_meaningless_settings_raise(options):
    if "hp_config" in options:
        options = {"hp_config": HyperparameterConfig(**options["hp_config"])}
    with pytest.raises(ValueError, match="clip_coef"):
        small(2, cart_pole(), **options)


def test_a_missing_learning_rule_raises():
    env = cart_pole()
    with pytest.raises(TypeError, match="learn_together"):
        EvolvableAlgorithm(env.observation_space, env.action_space)
