"""Fitness by greedy and sampled evaluation, and by training rewards; costs and resumption."""

import warnings
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from rich.console import Console

from evogrpo import GymnasiumGroups, Objective
from evogrpo.algorithms.evaluation import evaluate_questions, measure_fitness
from evogrpo.evolution import Fitness, FitnessConfig
from evogrpo.members.requests import EvaluationRequest
from evogrpo.reporting.records import GenerationReport, StepReport
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.display import RunDisplay
from evogrpo.training.evolve import Run
from evogrpo.training.forecast import work_rows
from evogrpo.training.reports import generation_curves
from tests.envs import joint_probes
from tests.tiny_steps import cart_pole, start_run, step_population, step_run
from tests.tiny_teams import team_env, team_population
from tests.tiny_training import (
    finish,
    random_population,
    randomise_adapter,
    tiny_env,
    tiny_population,
)


def language():
    return random_population(3).members, tiny_env()


def networks():
    env = cart_pole()
    return step_population(3, env).members, env


def teams():
    env = team_env(joint_probes.Masked, validation_size=6, test_size=4)
    return team_population(3, env, policies="shared", hp_config=None, group_size=4).members, env


KINDS = {"language": language, "networks": networks, "teams": teams}


def validation(questions, slots, answers=None):
    return EvaluationRequest(
        split="validation", questions=tuple(questions), slots=slots, answers=answers
    )


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_evaluations_depend_on_weights_and_question_only(kind):
    members, env = KINDS[kind]()
    complete, spent = evaluate_questions(members, env, validation(range(6), (0, 1, 2), answers=3))
    again, _ = evaluate_questions(members, env, validation((4, 1), (2,), answers=3))
    np.testing.assert_array_equal(again[0], complete[2, [4, 1]])
    parts = [
        evaluate_questions(members, env, validation((number,), (0, 1, 2), answers=3))
        for number in range(6)
    ]
    assert tuple(np.sum([tokens for _, tokens in parts], axis=0)) == spent
    members.inherit([1, 1, 1])
    rewards, tokens = evaluate_questions(members, env, validation(range(4), (0, 1, 2), answers=4))
    assert (rewards == rewards[0]).all()
    assert len(set(tokens)) == 1


def test_sampled_evaluations_use_the_policys_distribution_and_count_steps():
    members, env = networks()
    greedy, _ = evaluate_questions(members, env, validation(range(4), (0,)))
    few, steps = evaluate_questions(members, env, validation(range(4), (0,), answers=1))
    many, _ = evaluate_questions(members, env, validation(range(4), (0,), answers=40))
    assert not np.array_equal(few, many)
    assert not np.array_equal(few, greedy)
    assert 15 < many.mean() < 30  # an untrained policy falls after about twenty steps
    assert steps == tuple(few.sum(axis=1).astype(int))  # CartPole rewards every step with 1


def test_tokens_of_evaluations_count_prompts_once():
    members, env = language()
    rollouts = []
    wrapped = members.sampler.sample
    questions = validation((0, 1, 2), (1, 2), answers=2)
    opened = env.make_batch("validation", questions.questions)

    class Listening:
        def sample(self, rows, *, base=False, on_finished=None):
            rollouts.append(wrapped(rows, base=base))
            return rollouts[-1]

        def sync(self, slots):
            pass

    members.sample_with(Listening())
    _, tokens = evaluate_questions(members, env, questions)
    lengths = rollouts[0].present.sum(1).reshape(2, 6).sum(1).tolist()
    assert list(tokens) == [length + sum(map(len, opened.prompts)) for length in lengths]


@pytest.mark.parametrize("old", [True, False])
def test_a_sampler_with_other_weights_is_warned_of_once(old):
    population = random_population(1)
    other = random_population(1)
    randomise_adapter(other[0], seed=int(old))  # seed 0 gives the weights of `population`

    class Engine:
        def sample(self, rows, *, base=False, on_finished=None):
            return replace(other.members.sampler.sample(rows, base=base), exact=False)

        def sync(self, slots):
            pass

    population.members.sample_with(Engine())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        finish(
            start_run(
                population,
                tiny_env(),
                None,
                generations=1,
                steps_per_generation=2,
                samples_per_step=8,
            )
        )
    assert sum("Sampler.sync" in str(each.message) for each in caught) == old


class Choice(gymnasium.Env):
    """One step: the second action pays one more than the first, on top of the start's reward."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.luck = self.np_random.uniform(-1, 1)
        return np.array([self.luck], np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action) + self.luck, True, False, {}


@pytest.fixture(scope="module")
def unequal():
    """Return members of which only the first was trained."""
    env = GymnasiumGroups(Choice, validation_size=40)
    population = step_population(3, env, lr=0.1)
    for step in range(6):
        population.learn(
            population.collect(env, step=step, samples_per_step=16, starts_per_step=4).experience,
            step=step,
        )
    population.members.inherit([0, None, None])
    return population.members, env


@pytest.mark.parametrize("rival", [None, 1e6])
def test_races_evaluate_prefixes_and_the_leader_completely(unequal, rival):
    members, env = unequal
    if rival is None:
        best = None
    else:
        best = Fitness.from_scores(np.linspace(rival, rival + 1, 40).tolist())
    config = FitnessConfig(sampled=True, racing=True)
    found, tokens = measure_fitness(
        members, [0, 1, 2], env, "validation", config=config, rival=best
    )
    complete, _ = measure_fitness(
        members, [0, 1, 2], env, "validation", config=replace(config, racing=False)
    )
    counts = {slot: len(fitness.scores) for slot, fitness in found.items()}
    for slot, fitness in found.items():
        assert fitness.scores == complete[slot].scores[: counts[slot]]
        assert tokens[slot] == counts[slot]
    assert max(counts[1], counts[2]) < 40
    assert counts[0] == (max(counts[1], counts[2]) if rival == 1e6 else 40)
    gap = np.subtract(found[2].scores, found[0].scores[: counts[2]]).mean()
    assert found[2].mean == pytest.approx(found[0].mean + gap)


def rewards_by_member(reports):
    """Return every member's mean reward in each learning step, by generation and index."""
    found = {}
    for report in reports:
        if isinstance(report, StepReport):
            for member in report.learned.values():
                found.setdefault((report.generation, member.index), []).append(member.reward)
    return found


def test_rollout_fitness_is_the_mean_reward_of_the_last_half_of_the_steps():
    run = step_run(
        None, fitness="rollouts", steps_per_generation=3, generations=2, samples_per_step=16
    )
    reports = finish(run)
    earned = rewards_by_member(reports)
    members = []
    for report in reports:
        if isinstance(report, GenerationReport):
            members.extend(report.members)
    assert len(members) == 6
    for member in members:
        last = earned[member.generation, member.index][1:]
        assert member.fitness == pytest.approx(sum(last) / len(last), rel=1e-6)
        assert (member.questions, member.evaluation.tokens) == (0, 0)
        assert member.measured.keys() == {"rollouts"}


def test_members_of_different_group_sizes_are_paired_by_common_starts():
    run = step_run(None, fitness="rollouts", generations=1, samples_per_step=16)
    run.population[0].group_size = 2
    run.population[1].group_size = 8
    finish(run)
    many, few = (agent.fitness for agent in run.population.agents[:2])
    assert len(many.scores) == 4 * len(few.scores) == 8
    assert few.by_key.keys() < many.by_key.keys()


def test_rollout_fitness_evaluates_only_the_test():
    env = cart_pole()
    run = step_run(
        None,
        fitness="rollouts",
        env=env,
        generations=2,
        samples_per_step=8,
        options={"hp_config": None},
    )
    reports = finish(run)
    first = next(report for report in reports if isinstance(report, StepReport))
    rewards = [member.reward for member in first.learned.values()]
    assert run.result.baseline.mean == pytest.approx(sum(rewards) / len(rewards))
    assert run.result.evaluation == run.result.test.cost
    assert run.result.test.cost.tokens > 0


@pytest.mark.parametrize(("fitness", "budget"), [("rollouts", 1), ("validation", 150)])
def test_a_step_limit_within_a_generation_works(fitness, budget):
    sizes = {"samples_per_step": 8, "steps_per_generation": 4, "generations": None}
    run = step_run(None, fitness=fitness, max_timesteps=budget, options={"group_size": 8}, **sizes)
    finish(run)
    assert run.result.complete
    assert run.result.timesteps >= budget
    assert run.result.best is not None


class Doors(gymnasium.Env):
    """One of two doors is right, without a hint; several may be tried."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, tries):
        self.tries = tries

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.right = int(self.np_random.integers(2))
        self.left_over = self.tries
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left_over -= 1
        found = action == self.right
        return np.zeros(1, np.float32), float(found), bool(found or not self.left_over), False, {}


@pytest.mark.parametrize(
    ("tries", "fitness", "warnings_expected"), [(12, {}, 1), (12, {"sampled": True}, 0)]
)
def test_a_large_gap_between_greedy_and_training_rewards_warns_once(
    tries, fitness, warnings_expected, recwarn
):
    env = GymnasiumGroups(lambda: Doors(tries), validation_size=40, test_size=2)
    finish(
        step_run(
            None,
            size=2,
            env=env,
            fitness=fitness,
            samples_per_step=32,
            generations=2,
            options={"hp_config": None},
        )
    )
    assert (
        sum("with greedy answers to validation questions" in str(each.message) for each in recwarn)
        == warnings_expected
    )


def test_costs_of_evaluations_add_up(tmp_path):
    run = step_run(tmp_path / "run", fitness={"sampled": True})
    reports = finish(run)
    generations = [report for report in reports if isinstance(report, GenerationReport)]
    spent = 0
    for report in generations:
        each = [member.evaluation.tokens for member in report.members]
        assert min(each) > 0
        total = report.evaluation.tokens
        # The first total includes that of the untrained network.
        assert sum(each) == total - spent or spent == 0
        spent = total
    curves = generation_curves(generations[-1].members, [])
    for member in generations[-1].members:
        assert curves[f"evaluation_cost/slot_{member.slot}"] == member.evaluation.tokens
        assert curves[f"measured_rollouts/slot_{member.slot}"] == member.measured["rollouts"].mean
    assert run.result.evaluation.tokens == spent + run.result.test.cost.tokens
    state = run.run_state
    assert state.spent(evaluations=True)["timesteps"] == state.timesteps + spent  # without the test


def test_limits_that_count_evaluations_reserve_room_for_them():
    limits = {
        "generations": None,
        "max_timesteps": 6000,
        "test_questions": 0,
        "samples_per_step": 16,
    }
    plain = step_run(None, count_evaluations=False, **limits)
    counting = step_run(None, count_evaluations=True, **limits)
    for run in (plain, counting):
        finish(run)
    assert plain.run_state.timesteps >= 6000
    spent = counting.run_state.spent(evaluations=True)["timesteps"]
    assert spent == counting.run_state.timesteps + counting.run_state.evaluation_tokens
    # Episodes grow, so that the forecast may be exceeded a little.
    assert 6000 - 2 * counting.run_state.latest_timesteps < spent < 6600
    assert "would exceed max_timesteps" in counting.result.reason
    assert counting.result.best is not None
    assert RunDisplay(Console(), counting).fraction() == min(1.0, spent / 6000)


def test_a_continued_run_takes_further_steps_although_evaluations_count():
    run = Run(step_run(None, generations=None, max_timesteps=4000, count_evaluations=True)).finish()
    before = run.result.steps
    state = run.trainer.run_state
    spent = state.spent(evaluations=True)["timesteps"]
    assert state.evaluation_tokens > 1500
    run.learn(1500)
    assert run.result.steps > before
    assert state.spent(evaluations=True)["timesteps"] - spent < 2000


@pytest.mark.parametrize(
    ("fitness", "evaluations"),
    [("rollouts", 0), ("validation", 16 + 2 * 3 * 16)],
)
@pytest.mark.parametrize("answers", [1, 3])
def test_the_plan_counts_the_answers_to_held_out_questions(fitness, evaluations, answers):
    held_out = {"validation_size": 16, "test_size": 10}
    config = parse_config(
        {
            "task": {"env": "CartPole-v1", **held_out},
            "population": {"size": 3},
            "schedule": {"generations": 2, "steps_per_generation": 4, "samples_per_step": 16},
            "strategy": "fixed",
            "fitness": {"by": fitness, "answers": answers, "sampled": answers > 1},
        }
    )
    steps = work_rows(config, cart_pole(**held_out), "episodes")["steps"]
    assert steps.endswith(f"Evaluations: {answers * (evaluations + 2 * 10)} episodes")


def test_discarded_groups_of_dynamic_sampling_count():
    population = tiny_population(2, objective=Objective(dynamic_sampling=2))
    constant = tiny_env(
        reward_fn=lambda completion, answer, question: float(question.startswith(("1", "2", "3")))
    )
    collected = population.collect(constant, step=0, samples_per_step=16, starts_per_step=8)
    starts = constant.make_batch("train", collected.starts[:4]).questions
    expected = {
        index: float(question.startswith(("1", "2", "3"))) for index, question in enumerate(starts)
    }
    assert collected.group_rewards == {0: expected, 1: expected}
