"""MPE2 simple_spread: random policy, GRPO with several agents, independent PPO, equal steps.

    python benchmarking/simple_spread.py [--seeds 0 1 2] [--joint-steps 100000] [--methods random
    grpo ppo]

Three agents cover three landmarks and avoid collisions. All methods act in the same environment
(`mpe2.simple_spread_v3.parallel_env(**ENV_KWARGS)`), with one policy for all agents. The policy
gets the agent's identity as input and has two tanh layers of 64. Each method is trained for the
same number of joint environment steps (one step of all three agents) on its own training seeds, and
then plays the same held-out starts greedily and by sampling. Prints the sum of all agents' rewards
over an episode of 25 steps: the mean over seeds with its 95 % bootstrap interval. Recorded runs are
not repeated.

PPO follows CleanRL's single file (Huang et al. 2022): generalised advantage estimation with a
critic, annealed step size; every agent learns from its own reward, or with `--ppo-credit team` from
the mean of all.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpe2 import simple_spread_v3
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Categorical

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.envs.control.action_noise import ActionNoise
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import PolicyMapping, map_policies
from evogrpo.randomness import generator
from evogrpo.records import SampledActions

ENV_KWARGS = {
    "N": 3,
    "local_ratio": 0.5,
    "max_cycles": 25,
    "continuous_actions": False,
    "dynamic_rescaling": True,
}
GRPO_SETTINGS = {"lr": 3e-3, "group_size": 8, "update_epochs": 4, "batch_size": 1024, "gamma": 0.95}
GRPO_EPISODES = 64  # joint episodes per learning step
PPO_SETTINGS = {
    "lr": 5e-3,
    "gamma": 0.95,
    "lam": 0.95,
    "clip": 0.2,
    "epochs": 4,
    "minibatches": 4,
    "entropy": 0.01,
}
# joint environments side by side, and steps of each per update
PPO_ENVS = 32
PPO_STEPS = 50
TEST_STARTS = 128


class Random:
    """Acts uniformly at random."""

    def act(
        self, observations: NDArray[np.float32], member_ids: object, **options: Any
    ) -> SampledActions:
        """Choose an action for each observation; see `evogrpo.records.Actor`."""
        uniforms = options["uniforms"]
        draws = np.zeros(len(observations)) if uniforms is None else uniforms[:, 0]
        actions = (draws * 5).astype(np.int64)
        return SampledActions(
            actions=actions, log_probs=np.full(len(draws), -np.log(5), np.float32)
        )


class ActorCritic(nn.Module):
    """Policy and critic of PPO without common layers, as in CleanRL."""

    def __init__(self, inputs: int, actions: int, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(int(generator(seed, "ppo weights").integers(2**31)))

        def layer(rows: int, columns: int, gain: float) -> nn.Linear:
            linear = nn.Linear(rows, columns)
            nn.init.orthogonal_(linear.weight, gain, generator=random)
            nn.init.zeros_(linear.bias)
            return linear

        def network(outputs: int, gain: float) -> nn.Sequential:
            first = layer(inputs, 64, 2**0.5)
            second = layer(64, 64, 2**0.5)
            return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer(64, outputs, gain))

        self.policy = network(actions, 0.01)
        self.critic = network(1, 1.0)

    @torch.no_grad()
    def act(
        self, observations: NDArray[np.float32], member_ids: object, **options: Any
    ) -> SampledActions:
        """Choose an action for each observation; see `evogrpo.records.Actor`."""
        log_probs = torch.log_softmax(self.policy(torch.from_numpy(observations)), 1)
        uniforms = options["uniforms"]
        if uniforms is None:
            chosen = log_probs.argmax(1)
        else:
            chosen = (log_probs.exp().cumsum(1)[:, :-1] <= torch.from_numpy(uniforms[:, :1])).sum(1)
        return SampledActions(
            actions=chosen.numpy(), log_probs=log_probs.gather(1, chosen[:, None])[:, 0].numpy()
        )


def make_env(seed: int) -> PettingZooGroups:
    """Return the environment with the training starts of this seed.

    Held-out starts are the same for all methods.
    """
    return PettingZooGroups(
        simple_spread_v3.parallel_env, env_kwargs=ENV_KWARGS, test_size=TEST_STARTS, seed=seed
    )


def mapping_of(env: PettingZooGroups) -> PolicyMapping:
    return map_policies(env.observation_spaces, env.action_spaces, "shared", agent_ids=True)


def measure(actor: Any, env: PettingZooGroups, seed: int) -> dict[str, float]:
    """Return the mean sum of rewards on the held-out starts, greedily and by sampling."""
    found = {}
    for mode in ("greedy", "sampled"):
        draws = ActionNoise(
            seed, "test", streams=[(0,)], rows=[TEST_STARTS], width_of=lambda agent: 1
        )
        played = env.make_batch("test", range(TEST_STARTS)).play(
            {"shared": actor},
            mapping_of(env),
            range(TEST_STARTS),
            [0] * TEST_STARTS,
            uniforms=draws if mode == "sampled" else None,
        )
        found[mode] = float(env.scores(played).mean())
    return found


def train_grpo(seed: int, joint_steps: int) -> tuple[Any, PettingZooGroups, int]:
    """Train one member of MultiAgentGRPO under team credit."""
    env = make_env(seed)
    spent = 0
    step = 0
    population = MultiAgentGRPO.population(
        1,
        env.observation_spaces,
        env.action_spaces,
        policies="shared",
        agent_ids=True,
        seed=seed,
        **GRPO_SETTINGS,
    )
    per_step = GRPO_EPISODES * ENV_KWARGS["max_cycles"]
    while spent + per_step <= joint_steps:
        collected = population.collect(
            env, step=step, samples_per_step=GRPO_EPISODES, starts_per_step=GRPO_EPISODES // 8
        )
        population.learn(collected.experience, step=step)
        spent = spent + per_step
        step = step + 1
    return population.members.banks["shared"], env, spent


class PPORollouts:
    """Parallel environments that are reset on training seeds when their episodes end.

    Args:
        env: Source of the seeds and spaces.
        credit: "agent": each agent's own reward; "team": the mean of all.
    """

    def __init__(self, env: PettingZooGroups, credit: str) -> None:
        self._envs = [simple_spread_v3.parallel_env(**ENV_KWARGS) for _ in range(PPO_ENVS)]
        self._seeds: Iterator[int] = (
            env.reset_seed("train", start) for start in range(env.size("train"))
        )
        self._agents = env.agents
        self._team = credit == "team"
        self._flags = np.eye(len(env.agents), dtype=np.float32)
        self.seen = np.concatenate(
            [self._shown(each.reset(seed=next(self._seeds))[0]) for each in self._envs]
        )

    def _shown(self, observations: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        return np.concatenate(
            [np.stack([observations[agent] for agent in self._agents]), self._flags], axis=1
        )

    def step(self, actions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Step all environments.

        Return rewards and episode ends (1 or 0), per agent of every environment.
        """
        rewards = []
        over = []
        shown = []
        for env, chosen in zip(self._envs, actions.reshape(PPO_ENVS, -1), strict=True):
            seen, earned, *_ = env.step(dict(zip(self._agents, chosen.tolist(), strict=True)))
            agent_rewards = np.array([earned[agent] for agent in self._agents], dtype=np.float32)
            rewards.append(
                np.full_like(agent_rewards, agent_rewards.mean()) if self._team else agent_rewards
            )
            over.append(np.full_like(agent_rewards, float(not env.agents)))
            shown.append(self._shown(seen if env.agents else env.reset(seed=next(self._seeds))[0]))
        self.seen = np.concatenate(shown)
        return np.concatenate(rewards), np.concatenate(over)


def train_ppo(
    seed: int, joint_steps: int, credit: str
) -> tuple[ActorCritic, PettingZooGroups, int]:
    """Train independent PPO with common weights, as CleanRL's ppo.py does."""
    env = make_env(seed)
    p = PPO_SETTINGS
    rollouts = PPORollouts(env, credit)
    model = ActorCritic(rollouts.seen.shape[1], 5, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=p["lr"], eps=1e-5)
    rng = generator(seed, "ppo")
    updates = joint_steps // (PPO_ENVS * PPO_STEPS)
    agents = len(rollouts.seen)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = p["lr"] * (1 - update / updates)
        columns: dict[str, list[Tensor]] = {
            name: [] for name in ("seen", "action", "log_prob", "value", "reward", "over")
        }
        for _ in range(PPO_STEPS):
            acted = model.act(
                rollouts.seen, None, uniforms=rng.random((agents, 1), dtype=np.float32)
            )
            with torch.no_grad():
                columns["value"].append(model.critic(torch.from_numpy(rollouts.seen))[:, 0])
            for name, value in (
                ("seen", rollouts.seen),
                ("action", acted.actions),
                ("log_prob", acted.log_probs),
            ):
                columns[name].append(torch.from_numpy(value))
            for name, value in zip(("reward", "over"), rollouts.step(acted.actions), strict=True):
                columns[name].append(torch.from_numpy(value))
        table = {name: torch.stack(values) for name, values in columns.items()}
        with torch.no_grad():
            table["advantage"] = gae(table, model.critic(torch.from_numpy(rollouts.seen))[:, 0])
        table["return"] = table["advantage"] + table["value"]
        flat = {name: values.flatten(0, 1) for name, values in table.items()}
        for _ in range(p["epochs"]):
            for rows in torch.from_numpy(rng.permutation(agents * PPO_STEPS)).chunk(
                p["minibatches"]
            ):
                optimizer.zero_grad()
                ppo_loss(model, {name: values[rows] for name, values in flat.items()}).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
    return model, env, updates * PPO_ENVS * PPO_STEPS


def gae(table: Mapping[str, Tensor], next_values: Tensor) -> Tensor:
    """Return generalised advantage estimates `[t, agents]` (Schulman et al. 2016)."""
    discount = PPO_SETTINGS["gamma"]
    result = torch.zeros_like(table["value"])
    carried = torch.zeros_like(next_values)
    for t in reversed(range(len(result))):
        alive = 1 - table["over"][t]
        delta = table["reward"][t] + discount * next_values * alive - table["value"][t]
        carried = delta + discount * PPO_SETTINGS["lam"] * alive * carried
        result[t], next_values = carried, table["value"][t]
    return result


def ppo_loss(model: ActorCritic, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the clipped loss of one minibatch (Schulman et al. 2017)."""
    policy = Categorical(logits=model.policy(rows["seen"]))
    ratio = (policy.log_prob(rows["action"]) - rows["log_prob"]).exp()
    advantage = (rows["advantage"] - rows["advantage"].mean()) / (rows["advantage"].std() + 1e-8)
    clip = PPO_SETTINGS["clip"]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    errors = (model.critic(rows["seen"])[:, 0] - rows["return"]).square().mean()
    return 0.25 * errors - surrogate - PPO_SETTINGS["entropy"] * policy.entropy().mean()


def run(method: str, seed: int, joint_steps: int, credit: str) -> dict[str, Any]:
    """Train and measure one method with one seed."""
    began = time.perf_counter()
    if method == "grpo":
        actor, env, spent = train_grpo(seed, joint_steps)
    elif method == "ppo":
        actor, env, spent = train_ppo(seed, joint_steps, credit)
    else:
        actor = Random()
        env = make_env(seed)
        spent = 0
    seconds = time.perf_counter() - began
    return {"joint_steps": spent, "seconds": seconds, **measure(actor, env, seed)}


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean."""
    rng = generator(0, "bootstrap")
    means = values[rng.integers(len(values), size=(10_000, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table of the returns of each method."""
    lines = [
        "| method | seeds | joint steps | greedy | sampled | seconds a seed |",
        "|---|---|---|---|---|---|",
    ]
    for method, seeds in results.items():
        rows = list(seeds.values())
        cells = []
        for mode in ("greedy", "sampled"):
            values = np.array([row[mode] for row in rows])
            low, high = interval(values)
            cells.append(f"{values.mean():.1f} [{low:.1f}, {high:.1f}]")
        seconds = np.mean([row["seconds"] for row in rows])
        lines.append(
            f"| {method} | {len(rows)} | {rows[0]['joint_steps']:,} | {cells[0]} | {cells[1]} |"
            f" {seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--joint-steps", type=int, default=100_000)
    parser.add_argument(
        "--methods", nargs="+", default=["random", "grpo", "ppo"], choices=["random", "grpo", "ppo"]
    )
    parser.add_argument("--ppo-credit", default="agent", choices=["agent", "team"])
    parser.add_argument("--runs", type=Path, default=Path("runs/simple_spread"))
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    args.runs.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for method in args.methods:
            name = f"ppo ({args.ppo_credit} reward)" if method == "ppo" else method
            file = args.runs / f"{name.replace(' ', '-')}-{args.joint_steps}-{seed}.json"
            if not file.exists():
                write_record(file, run(method, seed, args.joint_steps, args.ppo_credit))
            results.setdefault(name, {})[str(seed)] = json.loads(file.read_text())
            print(f"seed {seed} {name}: done", flush=True)
    print(f"\nsimple_spread_v3 with {ENV_KWARGS}\n\n{table(results)}")


if __name__ == "__main__":
    main()
