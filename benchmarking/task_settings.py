"""Study: which way of training copes best with rewards of unknown use, for equal samples?

    pip install optuna
    # all missing runs; a stopped study continues
    python benchmarking/task_settings.py run
    python benchmarking/task_settings.py run --tasks mountaincar --arms drawn halving --seeds 0 1
    # tables of the recorded runs
    python benchmarking/task_settings.py table
    # a short trial
    python benchmarking/task_settings.py run --budget 0.05 --results /tmp/try

`task_settings_protocol.md` describes the comparison. Each run is one line of
`task_settings_results/TASK.jsonl`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.classic.intervals import stratified_bootstrap  # the path is set above
from benchmarking.records import provenance, run_study
from evogrpo import GRPO, GymnasiumGroups, HyperparameterConfig, RLParameter, evolve
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.config.task_settings import NO_SETTINGS
from evogrpo.evolution import (
    Choice,
    Fixed,
    History,
    Narrowing,
    Plan,
    RandomSearch,
    Stateless,
    Strategy,
    SuccessiveHalving,
    Tournament,
    TruncationPBT,
)
from evogrpo.evolution.founders import random_founder
from evogrpo.evolution.selection import ranked_by_chance

RESULTS = Path(__file__).with_name("task_settings_results")
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of a task's budget at which curves are read. Runs end with the last."""
MEMBERS = 4
EPISODES = 64
"""Of all members in a learning step."""
DRAWS = 20
"""Drawn settings among which the best fixed ones are searched, half a budget each."""

# ---- reward components


def speed(observation: Any, action: Any, reward: float, info: Any) -> float:
    """Return ten times the speed of the car, at most 0.7."""
    return 10 * abs(float(observation[1]))


def height(observation: Any, action: Any, reward: float, info: Any) -> float:
    """Return the height of the car, from -1 to 1."""
    return math.sin(3 * float(observation[0]))


def idle(observation: Any, action: Any, reward: float, info: Any) -> float:
    """Return 1 for the action without torque or push."""
    return float(action == 1)


def effort(observation: Any, action: Any, reward: float, info: Any) -> float:
    """Return the square of the action."""
    return float(np.square(action).sum())


def tip(observation: Any, action: Any, reward: float, info: Any) -> float:
    """Return the height of the free end of Acrobot, from -1 to 1."""
    cosine1, sine1, cosine2, sine2 = (float(value) for value in observation[:4])
    return (-cosine1 - (cosine1 * cosine2 - sine1 * sine2)) / 2


def spin(observation: Any, action: Any, reward: float, info: Any) -> float:
    """Return how fast Acrobot's joints turn, about 0 to 1."""
    return (abs(float(observation[4])) + abs(float(observation[5]))) / 10


def upright(observation: Any, action: Any, reward: float, info: Any) -> float:
    """Return the height of the pendulum, from -1 to 1."""
    return float(observation[0])


def turning(observation: Any, action: Any, reward: float, info: Any) -> float:
    """Return how fast the pendulum turns, from 0 to 1."""
    return abs(float(observation[2])) / 8


class UprightOnly(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reward 1 while the pendulum is within 26 degrees of upright, otherwise 0."""

    def step(self, action: Any) -> Any:
        """Replace the reward."""
        observation, _, ended, truncated, info = self.env.step(action)
        return observation, float(observation[0] > 0.9), ended, truncated, info


# ---- tasks and arms


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of the study.

    Attributes:
        env: Id of the environment.
        rewards: Reward components of unknown use, by name.
        budget: Environment steps in which one agent with good settings is done.
        floor: Metric that counts as 0.
        solved: Metric that counts as 1.
        wrappers: Of the environment; they make the metric its reward.
    """

    env: str
    rewards: Mapping[str, Any]
    budget: int
    floor: float
    solved: float
    wrappers: tuple[Any, ...] = ()

    @property
    def space(self) -> HyperparameterConfig:
        """Return what is unknown: the weight of each component, from -1 to 1."""
        weights = {name: RLParameter(min=-1, max=1) for name in self.rewards}
        return HyperparameterConfig(reward_weights=weights)

    def normalised(self, score: np.ndarray) -> np.ndarray:
        """Return scores on the scale from floor (0) to solved (1)."""
        return (score - self.floor) / (self.solved - self.floor)


TASKS: dict[str, Task] = {
    "mountaincar": Task(
        env="MountainCar-v0",
        rewards={"speed": speed, "height": height, "idle": idle},
        budget=200_000,
        floor=-200.0,
        solved=-126.0,
    ),
    "acrobot": Task(
        env="Acrobot-v1",
        rewards={"tip": tip, "spin": spin, "idle": idle},
        budget=300_000,
        floor=-500.0,
        solved=-80.0,
    ),
    "pendulum": Task(
        env="Pendulum-v1",
        rewards={"upright": upright, "turning": turning, "effort": effort},
        budget=150_000,
        floor=0.0,
        solved=150.0,
        wrappers=(UprightOnly,),
    ),
    "continuous mountaincar": Task(
        env="MountainCarContinuous-v0",
        rewards={"speed": speed, "height": height, "effort": effort},
        budget=400_000,
        floor=0.0,
        solved=93.0,
    ),
}


class HalvingAtFixedTimes(Stateless):
    """Keep the better half after every generation, whether the members differ or not."""

    mutates = False

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Retire failed members and the worse half, and lengthen the next generation."""
        first = history.generations[0]
        last = history.last
        count = math.ceil(len(first.members) / 2**last.number)
        survivors = ranked_by_chance(last, rng)[: max(1, count)]
        choices = []
        for slot in range(history.capacity):
            if slot in survivors:
                choices.append(Choice(parent=slot, reason="kept"))
            else:
                choices.append(Choice(parent=None, reason="stopped"))
        steps = first.steps_per_generation * len(first.members) // len(survivors)
        return Plan.from_choices(history, choices, steps_per_generation=steps)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to spend the environment steps.

    Attributes:
        first: Weights of the first member: "zero", "one", "drawn", or "found", the best fixed ones.
            Those of other members are drawn.
        strategy: Rule of selection and mutation.
        members: Number of members.
    """

    first: str = "zero"
    strategy: Callable[[], Strategy] = Fixed
    members: int = MEMBERS


ARMS: dict[str, Arm] = {
    "metric alone": Arm(members=1),
    "all ones": Arm(first="one", members=1),
    "drawn": Arm(first="drawn", members=1),
    "random search": Arm(strategy=RandomSearch),
    "halving": Arm(strategy=SuccessiveHalving),
    "halving, first drawn": Arm(first="drawn", strategy=SuccessiveHalving),
    "halving at fixed times": Arm(strategy=HalvingAtFixedTimes),
    "tournament": Arm(strategy=Tournament),
    "narrowing": Arm(strategy=Narrowing),
    "PBT": Arm(strategy=TruncationPBT),
    "Optuna": Arm(first="drawn", members=1),
    "best fixed": Arm(first="found", members=1),
}

# ---- one run


@dataclass
class Curve:
    """Test scores of the member that would be handed over, by share of the budget.

    Attributes:
        budget: Samples at share 1, e.g. environment steps.
        shares: Where the curve is read.
        scores: Score by share.
        learning_steps: Learning steps by share.
        seconds: Processor time by share, without tests.
    """

    budget: float
    shares: Sequence[float] = SHARES
    scores: dict[float, float] = field(default_factory=dict)
    learning_steps: dict[float, int] = field(default_factory=dict)
    seconds: dict[float, float] = field(default_factory=dict)

    def advance(
        self, spent: float, score: Callable[[], float], learning_steps: int, seconds: float
    ) -> None:
        """Read the curve at all shares that lie before `spent`."""
        for share in self.shares:
            if share * self.budget < spent and share not in self.scores:
                self.scores[share] = score()
                self.learning_steps[share] = learning_steps
                self.seconds[share] = round(seconds, 2)

    def record(self) -> dict[str, list[float]]:
        """Return the values of all shares in order, for the record of a run."""
        return {
            "scores": list(self.scores.values()),
            "learning_steps": list(self.learning_steps.values()),
            "seconds": list(self.seconds.values()),
        }


def make_run(
    task: Task, arm: Arm, weights: Mapping[str, float], seed: int, budget: int, starts: int
) -> tuple[Any, Any]:
    """Return the environment, and a run that ends with the budget."""
    env = GymnasiumGroups(
        task.env,
        wrappers=task.wrappers,
        rewards=task.rewards,
        seed=starts,
        validation_size=32,
        test_size=100,
    )
    settings = {f"reward_weights.{name}": value for name, value in weights.items()}
    episodes = EPISODES // arm.members
    population = GRPO.population(
        arm.members,
        observation_space=env.observation_space,
        action_space=env.action_space,
        hp_config=task.space if arm.members > 1 else None,
        task_settings=settings,
        samples_per_step=episodes,
        group_size=8,
        target_kl=DEFAULT_TARGET_KL,
        seed=seed,
    )
    run = evolve(
        population,
        env,
        strategy=arm.strategy(),
        steps_per_generation=4,
        samples_per_step=episodes,
        max_timesteps=budget,
        count_evaluations=True,
        test_questions=0,
        progress=False,
    )
    return env, run


def test_score(run: Any, env: Any) -> float:
    """Return the mean score of the run's best member on the test split, answered greedily."""
    from evogrpo.evolution.fitness import GREEDY_EVALUATION
    from evogrpo.interruption import NEVER
    from evogrpo.training.evaluation import evaluate_states

    best = run.trainer.run_state.best
    settings = NO_SETTINGS if best is None else best.member.hyperparameters.task_settings
    fitness, _ = evaluate_states(
        run.population.members,
        [(settings, None if best is None else best.state)],
        env,
        questions=env.size("test"),
        config=GREEDY_EVALUATION,
        stop=NEVER,
    )
    return float(np.mean(fitness[0].scores))


def spent(run: Any) -> int:
    """Return the environment steps of everything so far."""
    return int(run.trainer.run_state.spent(evaluations=True)["timesteps"])


def drawn_weights(task: Task, seed: int) -> dict[str, float]:
    """Return weights drawn from the whole space, the same for all arms with this seed."""
    founder = random_founder(task.space, Hyperparameters(), np.random.default_rng(seed))
    settings = founder.task_settings
    return {name: float(settings[f"reward_weights.{name}"]) for name in task.rewards}


def follow(run: Any, curve: Curve, spent: Callable[[], float], score: Callable[[], float]) -> None:
    """Train to the end, and read the curve on the way.

    Args:
        run: The run.
        curve: Filled.
        spent: Returns the samples so far, evaluations included.
        score: Returns the test score of the run's best member.
    """
    training = 0.0
    handed_over = score()
    best = None
    steps = 0
    began = time.process_time()
    for _ in run:
        training += time.process_time() - began
        state = run.trainer.run_state
        curve.advance(spent(), lambda: handed_over, steps, training)  # noqa: B023
        steps = state.step
        if state.best is not best:
            best = state.best
            handed_over = score()
        began = time.process_time()
    curve.advance(math.inf, lambda: handed_over, steps, training)


def run_one(name: str, arm_name: str, seed: int, share: float, results: Path) -> dict[str, Any]:
    """Do one run in its own process; return its record."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    task = TASKS[name]
    arm = ARMS[arm_name]
    budget = share * task.budget
    curve = Curve(budget)
    if arm_name == "Optuna":
        best = with_optuna(task, seed, curve)
    else:
        weights = {
            "zero": dict.fromkeys(task.rewards, 0.0),
            "one": dict.fromkeys(task.rewards, 1.0),
            "drawn": drawn_weights(task, seed),
        }.get(arm.first)
        if weights is None:
            weights = best_fixed(name, budget, results)
        env, run = make_run(task, arm, weights, seed, int(SHARES[-1] * budget), seed)
        follow(run, curve, lambda: spent(run), lambda: test_score(run, env))
        best = dict(run.best.hyperparameters.task_settings)
    return {
        "task": name,
        "arm": arm_name,
        "seed": seed,
        **curve.record(),
        "best": best,
        "commit": provenance()["commit"],
    }


def best_fixed(name: str, budget: float, results: Path) -> dict[str, float]:
    """Return the best of drawn weights, by validation after half a budget each.

    The result is stored, and searched once per task.
    """
    path = results / f"{name} best fixed.json"
    if not path.exists():
        task = TASKS[name]
        tried = []
        for draw in range(DRAWS):
            weights = drawn_weights(task, 500 + draw)
            _, run = make_run(task, ARMS["drawn"], weights, 500 + draw, int(budget / 2), 500)
            run.finish()
            fitness = run.trainer.run_state.best.fitness.mean
            tried.append({"fitness": fitness, "weights": weights})
        tried.sort(key=lambda each: -float(each["fitness"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tried, indent=1) + "\n", encoding="utf-8")
    found: dict[str, float] = json.loads(path.read_text("utf-8"))[0]["weights"]
    return found


def with_optuna(task: Task, seed: int, curve: Curve) -> dict[str, float]:
    """Let Optuna's TPE propose weights and Hyperband stop single agents.

    The first trial has the metric alone. The longest takes the task's budget. The best one counts.

    Source: Akiba et al. (KDD 2019); Li et al., Hyperband (JMLR 2018).
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    longest = int(curve.budget)
    total = int(SHARES[-1] * curve.budget)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.HyperbandPruner(
            min_resource=max(1, longest // 9), max_resource=longest, reduction_factor=3
        ),
    )
    study.enqueue_trial(dict.fromkeys(task.rewards, 0.0))
    used = 0
    learning_steps = 0
    training = 0.0
    handed_over: tuple[float, float, dict[str, float]] | None = None
    trials = 0
    while used < total:
        trial = study.ask()
        weights = {key: trial.suggest_float(key, -1.0, 1.0) for key in task.rewards}
        limit = min(longest, total - used)
        env, run = make_run(task, ARMS["drawn"], weights, 1000 * seed + trials, limit, seed)
        trials += 1
        pruned = False
        began = time.process_time()
        for generation in run:
            trial.report(generation.best.fitness, spent(run))
            if trial.should_prune():
                pruned = True
                break
        training += time.process_time() - began
        before = task.floor if handed_over is None else handed_over[1]
        used += spent(run)
        curve.advance(used, lambda: before, learning_steps, training)  # noqa: B023
        learning_steps += run.trainer.run_state.step
        best = run.trainer.run_state.best
        if best is None:  # the rest of the budget was less than one generation
            break
        fitness = best.fitness.mean
        if handed_over is None or fitness > handed_over[0]:
            handed_over = fitness, test_score(run, env), weights
        state = optuna.trial.TrialState.PRUNED if pruned else None
        study.tell(trial, None if pruned else fitness, state=state)
    assert handed_over is not None
    score = handed_over[1]
    curve.advance(math.inf, lambda: score, learning_steps, training)
    return handed_over[2]


def run_text(run: Mapping[str, Any]) -> str:
    """Return the scores and the time of a run."""
    scores = " ".join(f"{score:.3g}" for score in run["scores"])
    return f"{scores} in {run['seconds'][-1]:.0f} s"


# ---- tables


def tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of all tasks as Markdown, and one per task: arms and shares of the budget."""
    parts = [_mean_of_tasks(runs)]
    for name, task in TASKS.items():
        of_task = [run for run in runs if run["task"] == name]
        if of_task:
            title = f"**{name}**, {task.budget // 1000} k environment steps = 1"
            parts.append(f"{title}\n\n{_table(task, of_task)}")
    return "\n\n".join(parts)


def _mean_of_tasks(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean scores over tasks, of seeds with all runs, and how many runs failed."""
    arms = [arm for arm in ARMS if any(run["arm"] == arm for run in runs)]
    tasks = [task for task in TASKS if any(run["task"] == task for run in runs)]
    counts = Counter(run["seed"] for run in runs)
    seeds = sorted(seed for seed in counts if counts[seed] == len(arms) * len(tasks))
    if not seeds:
        return "No seed has all runs."
    rows = [
        ["arm", *(f"{share:g}" for share in SHARES), "runs below 0.5"],
        ["---"] * (len(SHARES) + 2),
    ]
    for arm in arms:
        scores = {}
        for task in tasks:
            group = [
                run["scores"]
                for run in runs
                if (run["task"], run["arm"]) == (task, arm) and run["seed"] in seeds
            ]
            scores[task] = TASKS[task].normalised(np.array(group))
        cells = []
        for column in range(len(SHARES)):
            of_share = {task: values[:, column].tolist() for task, values in scores.items()}
            interval = stratified_bootstrap(of_share, lambda values: float(np.mean(values)))
            cells.append(str(interval) if len(seeds) >= 5 else f"{interval.value:.2f}")
        last = np.concatenate([values[:, -1] for values in scores.values()])
        rows.append([arm, *cells, f"{(last < 0.5).sum()} of {len(last)}"])
    title = f"**{len(tasks)} tasks**, seeds {', '.join(map(str, seeds))}"
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _table(task: Task, runs: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        ["arm", *(f"{share:g}" for share in SHARES), "learning steps", "processor time"],
        ["---"] * (len(SHARES) + 3),
    ]
    for arm in ARMS:
        group = [run for run in runs if run["arm"] == arm]
        if not group:
            continue
        scores = task.normalised(np.array([run["scores"] for run in group]))
        cells = [_cell(list(of_share)) for of_share in scores.T]
        steps = np.mean([run["learning_steps"][-1] for run in group])
        seconds = np.mean([run["seconds"][-1] for run in group])
        rows.append([arm, *cells, f"{steps:.0f}", f"{seconds:.0f} s"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(scores: Sequence[float]) -> str:
    if len(scores) < 5:  # too few for an interval
        return " ".join(f"{score:.2f}" for score in scores)
    interval = stratified_bootstrap({"": scores}, lambda values: float(np.mean(values)))
    return str(interval)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_study(
        words,
        description=__doc__,
        tasks=TASKS,
        arms=ARMS,
        seeds=range(10),
        results=RESULTS,
        run=run_one,
        text=run_text,
        tables=tables,
    )


if __name__ == "__main__":
    main()
