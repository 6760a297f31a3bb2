"""MPE2's speaker_listener, tag and adversary: random actions, GRPO and independent PPO, at equal environment steps.

    python benchmarking/mpe2_games.py [--games speaker_listener tag adversary] [--seeds 0 1 2]

Each method trains one policy for every kind of agent (`policies="prefix"`), two tanh layers of 64, for the same number
of joint environment steps on its own training seeds; in tag and adversary both sides learn at the same time, each from
its own reward. Then both sides of all methods play against each other on the same held-out starts, acting greedily (the
random policy acts randomly): predators against prey of the same method would measure neither. Printed is what one
listener, one predator and one good agent earn in an episode of 25 steps, mean and standard error over seeds. Trained
policies are stored in `--runs`, one file per method, game and seed, and are not trained again.

PPO is that of simple_spread.py, after CleanRL's single file (Huang et al. 2022), with a policy and a critic for each
kind of agent.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from simple_spread import PPO_SETTINGS, ActorCritic, gae, ppo_loss
from torch import Tensor, nn

from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.data import SampledActions
from evogrpo.envs.control.conversion import ActionNoise
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import PolicyMapping, PolicySpec, map_policies
from evogrpo.randomness import generator

CYCLES = 25
TEST_STARTS = 128
EPISODES = 64  # joint episodes in a learning step of GRPO
PPO_ENVS, PPO_STEPS = 32, 50  # joint environments side by side, and steps of each in a rollout of PPO
METHODS = ("random", "grpo", "ppo")


@dataclass(frozen=True, kw_only=True)
class Game:
    """A game of MPE2.

    Attributes:
        module: Its module.
        joint_steps: Number of joint training steps.
        measured: Name of the agent whose return is reported.
        rivals: Policies of both sides; all policies are on one side if the game is cooperative.
        grpo: Settings of `MultiAgentGRPO`.
    """

    module: str
    joint_steps: int
    measured: str
    rivals: tuple[str, ...] = ()
    grpo: Mapping[str, Any] = field(default_factory=dict)


_COMPETING = {"credit": "agent", "lr": 3e-3, "group_size": 8, "update_epochs": 4, "batch_size": 1024, "gamma": 0.95}
GAMES = {
    "speaker_listener": Game(
        module="simple_speaker_listener_v4",
        joint_steps=400_000,
        measured="listener_0",
        grpo={"lr": 6e-3, "group_size": 4, "update_epochs": 8, "batch_size": 1024, "gamma": 0.85, "entropy_coef": 0.01},
    ),
    "tag": Game(
        module="simple_tag_v3",
        joint_steps=50_000,
        measured="adversary_0",
        rivals=("adversary", "agent"),
        grpo=_COMPETING,
    ),
    "adversary": Game(
        module="simple_adversary_v3",
        joint_steps=50_000,
        measured="agent_0",
        rivals=("agent", "adversary"),
        grpo=_COMPETING,
    ),
}


class Random:
    """Acts uniformly at random."""

    def __init__(self, spec: PolicySpec) -> None:
        self._count = spec.action_space.n  # type: ignore[attr-defined]  # all of these are Discrete

    def act(self, observations: NDArray[np.float32], member_ids: object, **options: Any) -> SampledActions:
        """Choose an action for each observation; see `evogrpo.data.Actor`."""
        draws = options["uniforms"][:, 0]
        actions = np.minimum((draws * self._count).astype(np.int64), self._count - 1)
        return SampledActions(actions=actions, log_probs=np.full(len(draws), -np.log(self._count), np.float32))


class Greedy:
    """Takes the most likely action of another actor and ignores the random numbers."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def act(self, observations: NDArray[np.float32], member_ids: object, **options: Any) -> SampledActions:
        """Choose an action for each observation; see `evogrpo.data.Actor`."""
        return self._actor.act(observations, np.zeros(len(observations), np.int64), **{**options, "uniforms": None})


def make_env(game: Game, seed: int) -> PettingZooGroups:
    """Return the game with the training starts of this seed."""
    make = import_module(f"mpe2.{game.module}").parallel_env
    return PettingZooGroups(
        make, env_kwargs={"max_cycles": CYCLES}, test_size=TEST_STARTS, seed=seed, score=game.measured
    )


def mapping_of(env: PettingZooGroups) -> PolicyMapping:
    """Return one policy for every kind of agent."""
    return map_policies(env.observation_spaces, env.action_spaces, "prefix")


def train_grpo(game: Game, seed: int, path: Path) -> None:
    """Train one member of MultiAgentGRPO and store it."""
    env, spent, step = make_env(game, seed), 0, 0
    population = MultiAgentGRPO.population(
        1, env.observation_spaces, env.action_spaces, policies="prefix", seed=seed, **game.grpo
    )
    while spent + EPISODES * CYCLES <= game.joint_steps:
        block = EPISODES // game.grpo["group_size"]
        collected = population.collect(env, step=step, samples_per_step=EPISODES, block=block)
        population.learn(collected.experience, step=step)
        spent, step = spent + EPISODES * CYCLES, step + 1
    population[0].save_checkpoint(path)


class Rollouts:
    """Joint environments side by side, reset on training seeds as their episodes end."""

    def __init__(self, game: Game, env: PettingZooGroups) -> None:
        make = import_module(f"mpe2.{game.module}").parallel_env
        self._envs = [make(max_cycles=CYCLES) for _ in range(PPO_ENVS)]
        self._seeds: Iterator[int] = (env.reset_seed("train", start) for start in range(env.size("train")))
        self._roles = mapping_of(env).specs
        self._shown = [each.reset(seed=next(self._seeds))[0] for each in self._envs]

    def seen(self, spec: str) -> NDArray[np.float32]:
        """Return the observations of the spec's agents in all environments, `[environments x agents, ...]`."""
        return np.stack([shown[agent] for shown in self._shown for agent in self._roles[spec].agents])

    def step(self, actions: Mapping[str, NDArray[np.int64]]) -> dict[str, tuple[NDArray[np.float32], ...]]:
        """Step all environments; return rewards and whether the episode was over, for each spec's rows."""
        brought: dict[str, list[tuple[float, float]]] = {spec: [] for spec in self._roles}
        rows = {spec: chosen.reshape(PPO_ENVS, -1) for spec, chosen in actions.items()}
        for place, env in enumerate(self._envs):
            chosen = {
                agent: int(rows[name][place, number])
                for name, spec in self._roles.items()
                for number, agent in enumerate(spec.agents)
            }
            shown, earned, *_ = env.step(chosen)
            for name, spec in self._roles.items():
                brought[name] += [(earned[agent], float(not env.agents)) for agent in spec.agents]
            self._shown[place] = shown if env.agents else env.reset(seed=next(self._seeds))[0]
        return {spec: tuple(np.array(own, np.float32).T.copy()) for spec, own in brought.items()}


def train_ppo(game: Game, seed: int, path: Path) -> None:
    """Train independent PPO, with separate weights for every kind of agent, and store it."""
    env = make_env(game, seed)
    rollouts, specs = Rollouts(game, env), mapping_of(env).specs
    models = actor_critics(specs, seed)
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=PPO_SETTINGS["lr"], eps=1e-5) for name, model in models.items()
    }
    rng, updates = generator(seed, "ppo"), game.joint_steps // (PPO_ENVS * PPO_STEPS)
    for update in range(updates):
        columns: dict[str, dict[str, list[Tensor]]] = {name: {} for name in specs}
        for _ in range(PPO_STEPS):
            actions = {}
            for name, model in models.items():
                seen = rollouts.seen(name)
                acted = model.act(seen, None, uniforms=rng.random((len(seen), 1), dtype=np.float32))
                with torch.no_grad():
                    value = model.critic(torch.from_numpy(seen))[:, 0].numpy()
                actions[name] = acted.actions
                _note(columns[name], seen=seen, action=acted.actions, log_prob=acted.log_probs, value=value)
            for name, (reward, over) in rollouts.step(actions).items():
                _note(columns[name], reward=reward, over=over)
        for name, model in models.items():
            optimizers[name].param_groups[0]["lr"] = PPO_SETTINGS["lr"] * (1 - update / updates)
            _learn(model, optimizers[name], columns[name], torch.from_numpy(rollouts.seen(name)), rng)
    weights = {f"{name}/{part}": value for name, model in models.items() for part, value in model.state_dict().items()}
    save_file(weights, path)


def actor_critics(specs: Mapping[str, PolicySpec], seed: int) -> dict[str, ActorCritic]:
    """Create the networks of PPO, by spec."""
    return {
        name: ActorCritic(spec.observation_space.shape[0], int(spec.action_space.n), seed + 1000 * number)  # type: ignore[index,attr-defined]
        for number, (name, spec) in enumerate(specs.items())
    }


def _note(columns: dict[str, list[Tensor]], **values: NDArray[Any]) -> None:
    for name, value in values.items():
        columns.setdefault(name, []).append(torch.from_numpy(value))


def _learn(
    model: ActorCritic,
    optimizer: torch.optim.Optimizer,
    columns: Mapping[str, list[Tensor]],
    after: Tensor,
    rng: np.random.Generator,
) -> None:
    table = {name: torch.stack(values) for name, values in columns.items()}
    with torch.no_grad():
        table["advantage"] = gae(table, model.critic(after)[:, 0])
    table["return"] = table["advantage"] + table["value"]
    flat = {name: values.flatten(0, 1) for name, values in table.items()}
    for _ in range(PPO_SETTINGS["epochs"]):
        for rows in torch.from_numpy(rng.permutation(len(flat["value"]))).chunk(PPO_SETTINGS["minibatches"]):
            optimizer.zero_grad()
            ppo_loss(model, {name: values[rows] for name, values in flat.items()}).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def actors(method: str, env: PettingZooGroups, path: Path) -> dict[str, Any]:
    """Return the actor of every kind of agent."""
    specs = mapping_of(env).specs
    if method == "random":
        return {name: Random(spec) for name, spec in specs.items()}
    if method == "grpo":
        policies = MultiAgentGRPO.load(path).members.policies
        return {name: Greedy(policies[name]) for name in specs}
    models = actor_critics(specs, 0)
    weights = load_file(path)
    for name, model in models.items():
        model.load_state_dict({part: weights[f"{name}/{part}"] for part in model.state_dict()})
    return {name: Greedy(model) for name, model in models.items()}


def measure(game: Game, seed: int, paths: Mapping[str, Path]) -> dict[str, float]:
    """Return the measured agent's mean return on the held-out starts, by method or by pair of methods."""
    env = make_env(game, seed)
    acting = {method: actors(method, env, path) for method, path in paths.items()}
    found = {}
    for one, other in product(acting, acting) if game.rivals else zip(acting, acting, strict=True):
        draws = ActionNoise(seed, "test", streams=[(0,)], rows=[TEST_STARTS], width_of=lambda agent: 1)
        playing = acting[one]
        if game.rivals:
            playing = {game.rivals[0]: acting[one][game.rivals[0]], game.rivals[1]: acting[other][game.rivals[1]]}
        played = env.open("test", range(TEST_STARTS)).play(
            playing, mapping_of(env), range(TEST_STARTS), [0] * TEST_STARTS, uniforms=draws
        )
        found[f"{one} against {other}" if game.rivals else one] = float(env.scores(played).mean())
    return found


def cell(values: list[float]) -> str:
    """Format a mean with its standard error over seeds."""
    error = f" ± {np.std(values, ddof=1) / np.sqrt(len(values)):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{error}"


def table(name: str, results: Mapping[int, Mapping[str, float]]) -> str:
    """Return a Markdown table of the returns."""
    game = GAMES[name]
    head = f"{name}, {game.joint_steps:,} joint steps, seeds {', '.join(map(str, results))}: {game.measured}'s return"
    if not game.rivals:
        rows = [f"| {method} | {cell([each[method] for each in results.values()])} |" for method in METHODS]
        return "\n".join([head, "", "| method | return |", "|---|---|", *rows])
    one, other = game.rivals
    rows = [
        f"| {method} | "
        + " | ".join(cell([each[f"{method} against {rival}"] for each in results.values()]) for rival in METHODS)
        + " |"
        for method in METHODS
    ]
    columns = " | ".join(f"{rival} {other}" for rival in METHODS)
    return "\n".join([head, "", f"| {one} | {columns} |", "|---|---|---|---|", *rows])


def run(name: str, seed: int, folder: Path) -> dict[str, float]:
    """Train what is missing, and let all methods play against each other."""
    game, paths = GAMES[name], {"random": folder}
    for method, train, kind in (("grpo", train_grpo, ""), ("ppo", train_ppo, ".safetensors")):
        path = paths[method] = folder / f"{name}-{game.joint_steps}-{method}-{seed}{kind}"
        if not path.exists():
            began = time.perf_counter()
            train(game, seed, path)
            print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)
    result = folder / f"{name}-{game.joint_steps}-{seed}.json"
    if not result.exists():
        result.write_text(json.dumps(measure(game, seed, paths)))
    found: dict[str, float] = json.loads(result.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", default=list(GAMES), choices=list(GAMES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/mpe2_games"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.runs.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[int, dict[str, float]]] = {}
    for seed in args.seeds:
        for name in args.games:
            results.setdefault(name, {})[seed] = run(name, seed, args.runs)
            print(f"seed {seed} {name}: {results[name][seed]}", flush=True)
    for name, found in results.items():
        print(f"\n{table(name, found)}")


if __name__ == "__main__":
    main()
