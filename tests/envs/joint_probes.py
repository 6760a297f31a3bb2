"""Small multi-agent environments with known best play; each isolates one property."""

from typing import ClassVar

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.utils import seeding
from pettingzoo import ParallelEnv
from pettingzoo.test.example_envs import generated_agents_parallel_v0


class Alike(ParallelEnv):
    """Each agent sees a one-hot target among three and chooses one of three, `steps` times.

    All earn the hits of all.

    Subclasses change `earned`, the rewards for the `hits` of all agents, or the observations.
    """

    metadata: ClassVar = {"name": "probe_v0", "render_modes": []}
    render_mode = None
    # PettingZoo asks for the same object at each call
    seen = Box(0.0, 1.0, (3,), np.float32)
    choices = Discrete(3)

    def __init__(self, agents=("red_0", "red_1", "blue_0"), steps=1):
        self.possible_agents = list(agents)
        self.steps = steps

    def observation_space(self, agent):
        return self.seen

    def action_space(self, agent):
        return self.choices

    def reset(self, seed=None, options=None):
        if seed is not None or not hasattr(self, "np_random"):
            self.np_random, _ = seeding.np_random(seed)
        self.agents = list(self.possible_agents)
        self.time = 0
        return self.observe(), {agent: {} for agent in self.agents}

    def observe(self):
        self.targets = {agent: int(self.np_random.integers(3)) for agent in self.agents}
        return {
            agent: np.eye(3, dtype=np.float32)[target] for agent, target in self.targets.items()
        }

    def earned(self, hits):
        return dict.fromkeys(hits, float(sum(hits.values())))

    def step(self, actions):
        assert set(actions) == set(self.agents)
        acted = self.agents
        rewards = self.earned(
            {agent: int(actions[agent] == self.targets[agent]) for agent in acted}
        )
        self.time += 1
        over = self.time == self.steps
        seen = self.observe()
        if over:
            self.agents = []
        return (
            seen,
            rewards,
            dict.fromkeys(acted, over),
            dict.fromkeys(acted, False),
            {agent: {} for agent in acted},
        )


class Favours(Alike):
    """Hitting the target pays the next agent: own rewards carry no signal, team rewards do."""

    def earned(self, hits):
        order = list(hits)
        return {agent: float(hits[order[position - 1]]) for position, agent in enumerate(order)}


class Contest(Alike):
    """Zero-sum: a hit costs the other agents as much, so team rewards carry no signal."""

    def earned(self, hits):
        mean = sum(hits.values()) / len(hits)
        return {agent: hit - mean for agent, hit in hits.items()}


class Remembering(Alike):
    """Rewards grow from episode to episode; reset does not clear them."""

    played = 0

    def reset(self, seed=None, options=None):
        self.played += 1
        return super().reset(seed, options)

    def earned(self, hits):
        return {agent: float(self.played) for agent in hits}


class Painted(Alike):
    """Three steps, each rendered in another shade of grey; all agents earn 1 at each step."""

    metadata: ClassVar = {"name": "painted_v0", "render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None, agents=("red_0", "red_1", "blue_0")):
        super().__init__(agents, steps=3)
        self.render_mode = render_mode

    def earned(self, hits):
        return dict.fromkeys(hits, 1.0)

    def render(self):
        return np.full((32, 48, 3), 60 * self.time, np.uint8)


def first_earns(returns):
    """Score of the first agent's rewards."""
    return next(iter(returns.values()))


class Calls(Alike):
    """Agents that see nothing must take different actions: agent i is paid for action i."""

    def observe(self):
        self.targets = {agent: position for position, agent in enumerate(self.agents)}
        return {agent: np.zeros(3, np.float32) for agent in self.agents}

    def earned(self, hits):
        return {agent: float(hit) for agent, hit in hits.items()}


class Lives(ParallelEnv):
    """Agents are born and end at known steps and earn 1 + action at each, the last included.

    old_0 lives through all five steps and is then truncated. short_0 terminates at its second step,
    or at its third if it chose 1 first. late_0 is born after the second step, on odd seeds only,
    and terminates at the fifth. At every step at which only old_0 acts, old_0 is paid ten times.
    """

    metadata: ClassVar = {"name": "lives_v0", "render_modes": []}
    render_mode = None
    seen = Box(-np.inf, np.inf, (2,), np.float32)
    choices = Discrete(2)

    def __init__(self):
        self.possible_agents = ["late_0", "old_0", "short_0"]

    def observation_space(self, agent):
        return self.seen

    def action_space(self, agent):
        return self.choices

    def reset(self, seed=None, options=None):
        self.start = 0 if seed is None else seed
        self.time = 0
        self.agents = ["old_0", "short_0"]
        self.brave = False
        return self.observe(), {agent: {} for agent in self.agents}

    def observe(self):
        return {agent: np.array([self.time, self.start % 97], np.float32) for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        acted = list(self.agents)
        if self.time == 0:
            self.brave = actions["short_0"] == 1
        factor = 10.0 if acted == ["old_0"] else 1.0
        rewards = {agent: factor * (1.0 + actions[agent]) for agent in acted}
        self.time += 1
        terminations = dict.fromkeys(acted, False)
        truncations = dict.fromkeys(acted, False)
        if "short_0" in acted and self.time == (3 if self.brave else 2):
            terminations["short_0"] = True
        if self.time == 5:
            truncations["old_0"] = True
            if "late_0" in acted:
                terminations["late_0"] = True
        if self.time == 2 and self.start % 2:
            self.agents.append("late_0")
            rewards["late_0"] = 0.0
            terminations["late_0"] = False
            truncations["late_0"] = False
        seen = self.observe()
        self.agents = [
            agent for agent in self.agents if not (terminations[agent] or truncations[agent])
        ]
        return seen, rewards, terminations, truncations, {agent: {} for agent in seen}


class Masked(Alike):
    """Two of three actions are legal, as a mask in the infos or beside the observation.

    An illegal one costs 99.
    """

    def __init__(self, beside=False, steps=3):
        super().__init__(steps=steps)
        self.beside = beside
        if beside:
            self.seen = Dict({"observation": self.seen, "action_mask": Box(0, 1, (3,), np.int8)})

    def masks(self):
        return {
            agent: {"action_mask": (np.arange(3) != self.targets[agent]).astype(np.int8)}
            for agent in self.agents
        }

    def observe(self):
        seen = super().observe()
        if not self.beside:
            return seen
        return {agent: {"observation": seen[agent], **mask} for agent, mask in self.masks().items()}

    def reset(self, seed=None, options=None):
        seen, infos = super().reset(seed, options)
        return seen, infos if self.beside else self.masks()

    def earned(self, hits):
        return {agent: 1.0 - 100.0 * hit for agent, hit in hits.items()}

    def step(self, actions):
        *result, infos = super().step(actions)
        return *result, infos if self.beside else infos | self.masks()


class Generated(generated_agents_parallel_v0.parallel_env):
    """PettingZoo's environment in which agents of random types are born and end at random.

    Spaces are equal.
    """

    def add_type(self):
        name = super().add_type()
        # The original draws new sizes at every reset; networks need fixed sizes.
        self._obs_spaces[name] = Box(0, 1, (4,), seed=self.rng_seed)
        self._act_spaces[name] = Discrete(3)
        return name

    def step(self, actions):
        self.num_steps += 1  # missing in the original, so that its episodes never end
        return super().step(actions)
