"""Train a PPO in the manner of CleanRL's single files, with their default hyperparameters, on one task.

Actor and critic are apart, two tanh layers of 64 each; the learning rate falls linearly to 0; advantages are
standardised per minibatch and the value loss is clipped. A cut-off episode counts as ended, as it does there.

Source: Huang et al., The 37 Implementation Details of Proximal Policy Optimization (ICLR blog track, 2022).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from runners import Job
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The defaults of CleanRL's `ppo.py`; `CONTINUOUS` has those of `ppo_continuous_action.py`."""

    lr: float = 2.5e-4
    envs: int = 4
    rollout: int = 128
    gamma: float = 0.99
    gae_lambda: float = 0.95
    minibatches: int = 4
    epochs: int = 4
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    max_grad_norm: float = 0.5


DISCRETE = Settings()
CONTINUOUS = Settings(lr=3e-4, envs=1, rollout=2048, minibatches=32, epochs=10, entropy=0.0)


class Agent(nn.Module):
    """A policy and a value function without common layers."""

    def __init__(self, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> None:
        super().__init__()
        inputs = int(np.prod(observations.shape))
        self.discrete = isinstance(actions, gymnasium.spaces.Discrete)
        outputs = int(actions.n) if self.discrete else int(np.prod(actions.shape))
        self.critic, self.actor = _network(inputs, 1, 1.0), _network(inputs, outputs, 0.01)
        self.log_std = nn.Parameter(torch.zeros(outputs), requires_grad=not self.discrete)

    def policy(self, observations: Tensor) -> Distribution:
        """Return the distribution of actions."""
        outputs = self.actor(observations)
        if self.discrete:
            return Categorical(logits=outputs)
        return Independent(Normal(outputs, self.log_std.exp()), 1)


def _network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def _clipped(env: wrappers.NormalizeObservation, gamma: float) -> gymnasium.Env[Any, Any]:
    """Return a continuous environment as CleanRL shows it: observations and rewards normalised and clipped to 10."""
    shown = wrappers.TransformObservation(env, lambda seen: np.clip(seen, -10, 10), env.observation_space)
    return wrappers.TransformReward(wrappers.NormalizeReward(shown, gamma=gamma), lambda r: np.clip(r, -10, 10))


class Training:
    """PPO's loop.

    Args:
        name: The environment.
        steps: What the learning rate's schedule is laid out for.
        seed: Of environments, weights and draws.
    """

    def __init__(self, name: str, steps: int, seed: int) -> None:
        torch.manual_seed(seed)  # noqa: TID251 - a file of its own in a process of its own, as CleanRL's are
        first = gymnasium.make(name)
        self._continuous = isinstance(first.action_space, gymnasium.spaces.Box)
        self.s = s = CONTINUOUS if self._continuous else DISCRETE
        made = [first, *(gymnasium.make(name) for _ in range(s.envs - 1))]
        if self._continuous:
            self._space = first.action_space
            self._normaliser = wrappers.NormalizeObservation(wrappers.ClipAction(first))
            made = [_clipped(self._normaliser, s.gamma)]
        thunks = [lambda env=env: env for env in made]
        self._envs = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP)
        self.agent = Agent(first.observation_space, first.action_space)
        trained = [parameter for parameter in self.agent.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(trained, lr=s.lr, eps=1e-5)
        self._updates, self._update = max(1, steps // (s.envs * s.rollout)), 0
        self._seen = self._tensor(self._envs.reset(seed=seed * 1000)[0])
        self._done = torch.zeros(s.envs)
        self.steps = 0

    @staticmethod
    def _tensor(values: np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.float32)

    @torch.no_grad()
    def act(self, observations: np.ndarray) -> np.ndarray:
        """Choose greedy actions, with the observation statistics of now."""
        if self._continuous:
            rms = self._normaliser.obs_rms
            observations = np.clip((observations - rms.mean) / np.sqrt(rms.var + 1e-8), -10, 10)
        outputs = self.agent.actor(self._tensor(observations))
        if self.agent.discrete:
            return outputs.argmax(1).numpy()
        return np.clip(outputs.numpy(), self._space.low, self._space.high)

    def iterate(self) -> None:
        """Collect one rollout and learn from it."""
        left = max(0.0, 1 - self._update / self._updates)
        self._optimizer.param_groups[0]["lr"] = left * self.s.lr
        columns = self._rollout()
        self._learn({name: torch.stack(values).flatten(0, 1) for name, values in columns.items()})
        self._update += 1

    @torch.no_grad()
    def _rollout(self) -> dict[str, list[Tensor]]:
        names = ("seen", "actions", "log_probs", "values", "rewards", "starts")
        columns: dict[str, list[Tensor]] = {name: [] for name in names}
        for _ in range(self.s.rollout):
            policy, value = self.agent.policy(self._seen), self.agent.critic(self._seen)[:, 0]
            actions = policy.sample()
            seen, reward, terminated, truncated, _ = self._envs.step(actions.numpy())
            row = (self._seen, actions, policy.log_prob(actions), value, self._tensor(reward), self._done)
            for name, values in zip(names, row, strict=True):
                columns[name].append(values)
            self._seen, self._done = self._tensor(seen), self._tensor(terminated | truncated)
            self.steps += self.s.envs
        after, done, advantage = self.agent.critic(self._seen)[:, 0], self._done, torch.zeros(self.s.envs)
        columns["advantages"] = []
        for t in reversed(range(self.s.rollout)):
            delta = columns["rewards"][t] + self.s.gamma * after * (1 - done) - columns["values"][t]
            advantage = delta + self.s.gamma * self.s.gae_lambda * (1 - done) * advantage
            columns["advantages"].insert(0, advantage)
            after, done = columns["values"][t], columns["starts"][t]
        return columns

    def _learn(self, batch: dict[str, Tensor]) -> None:
        count, s = len(batch["values"]), self.s
        for _ in range(s.epochs):
            for rows in torch.randperm(count).split(count // s.minibatches):
                part = {name: values[rows] for name, values in batch.items()}
                loss = self._loss(**part)
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), s.max_grad_norm)
                self._optimizer.step()

    def _loss(
        self, seen: Tensor, actions: Tensor, log_probs: Tensor, values: Tensor, advantages: Tensor, **_: Tensor
    ) -> Tensor:
        s, policy = self.s, self.agent.policy(seen)
        ratio = (policy.log_prob(actions) - log_probs).exp()
        worth = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -torch.minimum(ratio * worth, ratio.clamp(1 - s.clip, 1 + s.clip) * worth).mean()
        returns, now = advantages + values, self.agent.critic(seen)[:, 0]
        clipped = values + (now - values).clamp(-s.clip, s.clip)
        value_loss = 0.5 * torch.maximum((now - returns) ** 2, (clipped - returns) ** 2).mean()
        return policy_loss + s.value * value_loss - s.entropy * policy.entropy().mean()


def main() -> None:
    job = Job.from_arguments(__doc__)
    torch.set_num_threads(job.threads)
    recorder = job.recorder("torch", "gymnasium")
    training = Training(job.task.name, job.task.steps, job.seed)
    recorder.offer(0, training.act)
    while training.steps < job.task.steps:
        training.iterate()
        recorder.offer(training.steps, training.act)
    recorder.offer(training.steps, training.act, last=True)
    recorder.write(settings=asdict(training.s))


if __name__ == "__main__":
    main()
