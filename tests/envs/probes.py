"""Small environments with known best policies; each isolates one ability of an agent.

All are Gymnasium environments, so they can be trained on as well. `best` is the mean return of the
best policy.
"""

import os
import random
import signal
import sys
import time

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple


class ConstantReward(gymnasium.Env):
    """One step with reward 1 for any action: every advantage must be 0."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)
    best = 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, True, False, {}


class Match(gymnasium.Env):
    """One step: a random target is observed.

    The reward is the closeness of the action to it, at most `best`.

    Subclasses define how to `draw` a target, to `observe` it, and the `closeness` of an action to
    it.
    """

    best = 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = self.draw()
        return self.observe(), {}

    def step(self, action):
        return self.observe(), float(self.closeness(action)), True, False, {}


class MatchDiscrete(Match):
    """Discrete(3), observed one-hot; `start` is the first action of the space."""

    observation_space = Box(0.0, 1.0, (3,), np.float32)

    def __init__(self, start=0):
        self.action_space = Discrete(3, start=start)

    def draw(self):
        return int(self.np_random.integers(3))

    def observe(self):
        return np.eye(3, dtype=np.float32)[self.target]

    def closeness(self, action):
        assert self.action_space.contains(action)
        return action - self.action_space.start == self.target


class MatchMultiDiscrete(Match):
    """MultiDiscrete([3, 2]) with start 1; the reward is the fraction of components that match."""

    observation_space = Box(0.0, 1.0, (5,), np.float32)
    action_space = MultiDiscrete([3, 2], start=[1, 1])

    def draw(self):
        return self.np_random.integers([3, 2])

    def observe(self):
        first, second = self.target
        return np.concatenate([np.eye(3)[first], np.eye(2)[second]]).astype(np.float32)

    def closeness(self, action):
        assert self.action_space.contains(action)
        return (action - 1 == self.target).mean()


class MatchMultiBinary(Match):
    """MultiBinary(3); the reward is the fraction of bits that match."""

    observation_space = MultiBinary(3)
    action_space = MultiBinary(3)

    def draw(self):
        return self.np_random.integers(2, size=3, dtype=np.int8)

    def observe(self):
        return self.target.copy()

    def closeness(self, action):
        assert self.action_space.contains(action)
        return (action == self.target).mean()


class MatchBox(Match):
    """Box([-1, -2], [1, 2]); the reward falls with the distance in units of the bounds."""

    bound = np.array([1.0, 2.0], np.float32)
    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Box(-bound, bound, dtype=np.float32)

    def draw(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def observe(self):
        return self.target.copy()

    def closeness(self, action):
        assert self.action_space.contains(action)  # not without clipping at the boundary
        return 1 - np.abs(action / self.bound - self.target).mean()


class MatchImage(Match):
    """The bright half of a grey 16 x 16 image (channels last, uint8)."""

    observation_space = Box(0, 255, (16, 16, 1), np.uint8)
    action_space = Discrete(2)

    def draw(self):
        return int(self.np_random.integers(2))

    def observe(self):
        image = np.full((16, 16, 1), 20, np.uint8)
        image[:, 8 * self.target : 8 * self.target + 8] = 230
        return image

    def closeness(self, action):
        return action == self.target


class MatchDict(Match):
    """A Dict of a category and the sign of a number; both determine the right action of four."""

    observation_space = Dict(which=Discrete(2), number=Box(-1.0, 1.0, (1,), np.float32))
    action_space = Discrete(4)

    def draw(self):
        return int(self.np_random.integers(2)), float(self.np_random.choice([-0.5, 0.5]))

    def observe(self):
        which, number = self.target
        return {"which": which, "number": np.array([number], np.float32)}

    def closeness(self, action):
        which, number = self.target
        return action == 2 * which + (number > 0)


class MatchTuple(MatchDict):
    """`MatchDict` with a Tuple inside a Tuple."""

    observation_space = Tuple([Discrete(2), Tuple([Box(-1.0, 1.0, (1,), np.float32)])])

    def observe(self):
        observed = super().observe()
        return observed["which"], (observed["number"],)


class DelayedCredit(gymnasium.Env):
    """Two steps: the first action must match the observation; the second step pays for it."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)
    best = 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = int(self.np_random.integers(2))
        self.first = None
        return np.array([2 * self.target - 1, -1], np.float32), {}

    def step(self, action):
        if self.first is None:
            self.first = int(action)
            return np.array([0, 1], np.float32), 0.0, False, False, {}
        return np.zeros(2, np.float32), float(self.first == self.target), True, False, {}


class Masked(gymnasium.Env):
    """Three steps with four actions, some of them illegal.

    The reward is 1 for the highest legal action.

    At the end no action is legal, and the mask says so.
    """

    observation_space = Box(0.0, 1.0, (4,), np.float32)
    action_space = Discrete(4)
    best = 3.0

    def draw(self):
        self.mask = self.np_random.integers(2, size=4, dtype=np.int8)
        self.mask[self.np_random.integers(4)] = 1
        return self.mask.astype(np.float32), {"action_mask": self.mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.draw()

    def step(self, action):
        if not self.mask[action]:
            raise ValueError(f"action {action} is illegal")
        reward = float(action == np.flatnonzero(self.mask)[-1])
        self.steps += 1
        if self.steps == 3:
            return (
                np.zeros(4, np.float32),
                reward,
                True,
                False,
                {"action_mask": np.zeros(4, np.int8)},
            )
        seen, infos = self.draw()
        return seen, reward, False, False, infos


class NoisyWalk(gymnasium.Env):
    """A noisy walk that terminates at a random step; observations are noisy as well."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    action_space = Discrete(2)

    def observe(self):
        return np.array([self.place, *self.np_random.normal(size=2)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = float(self.np_random.normal())
        return self.observe(), {}

    def step(self, action):
        self.place += 2.0 * int(action) - 1.0 + 0.1 * self.np_random.normal()
        return self.observe(), self.place, bool(self.np_random.random() < 0.1), False, {}


class Slow(DelayedCredit):
    """`DelayedCredit` whose steps take `seconds`."""

    def __init__(self, seconds=0.001):
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


class Endless(gymnasium.Env):
    """Never ends and has no time limit; the reward of a step is its action."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), float(action), False, False, {}


class RunningMean(NoisyWalk):
    """Shows its position less the mean of all positions so far; reset does not clear the mean."""

    count = 0
    mean = 0.0

    def observe(self):
        self.count += 1
        self.mean += (self.place - self.mean) / self.count
        return np.array([self.place - self.mean, 0.0, 0.0])


class GlobalNoise(DelayedCredit):
    """Rewards with noise from a global generator, which the reset seed does not control."""

    def __init__(self, source="numpy"):
        self.noise = {"numpy": np.random.random, "python": random.random}[source]

    def step(self, action):
        seen, reward, terminated, truncated, infos = super().step(action)
        return seen, reward + self.noise(), terminated, truncated, infos


class SeededGlobals(GlobalNoise):
    """Seeds the global generator at reset: deterministic unless another environment steps too."""

    def reset(self, *, seed=None, options=None):
        np.random.seed(seed)  # noqa: NPY002
        return super().reset(seed=seed)


class Odd(gymnasium.Env):
    """Three steps of reward 1 each; options change one property.

    Args:
        space: Observation space.
        sees: Observation, or the value of all its entries.
        options: `reward` and `actions` (space); `ends`, a function of "the episode is over" that
            gives `terminated`; `infos` of which reset draws one; `broken`, a list of "step",
            "close" or "die"; `reset` and `step`, functions of what these methods return otherwise.
    """

    def __init__(self, space=None, sees=0.0, **options):
        self.observation_space = space or Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = options.get("actions", Discrete(2))
        self.sees = sees
        self.steps = 0
        self.episodes = 0
        self.options = {"reward": 1.0, "ends": bool, "infos": ({},), "broken": ()} | options

    def observe(self):
        if np.ndim(self.sees) == 0:
            return np.full(self.observation_space.shape, self.sees)
        return self.sees

    def reset(self, *, seed=None, options=None):
        assert options is None  # as in a single environment, also where resets are masked
        super().reset(seed=seed)
        self.steps, self.episodes = 0, self.episodes + 1
        infos = self.options["infos"]
        result = self.observe(), infos[int(self.np_random.integers(len(infos)))]
        if "reset" in self.options:
            return self.options["reset"](*result)
        return result

    def step(self, action):
        if "step" in self.options["broken"]:
            raise RuntimeError("a step failed")
        if "die" in self.options["broken"]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        over = self.options["ends"](self.steps == 3)
        result = self.observe(), self.options["reward"], over, False, self.options["infos"][0]
        if "step" in self.options:
            return self.options["step"](*result)
        return result

    def close(self):
        if "close" in self.options["broken"]:
            raise RuntimeError("a close failed")


class MaskMethod(Masked):
    """`Masked` in the form of sb3-contrib; without legal actions at the end the method raises."""

    def draw(self):
        seen, _ = super().draw()
        return seen, {}

    def step(self, action):
        seen, reward, terminated, truncated, _ = super().step(action)
        return seen, reward, terminated, truncated, {}

    def action_masks(self):
        assert self.steps < 3
        return self.mask.astype(bool)


class MaskInObservation(Masked):
    """`Masked` in the form of RLlib."""

    observation_space = Dict(
        observations=Masked.observation_space, action_mask=Box(0.0, 1.0, (4,), np.float32)
    )

    def draw(self):
        seen, infos = super().draw()
        return {"observations": seen, "action_mask": infos["action_mask"].astype(np.float32)}, {}

    def step(self, action):
        seen, reward, terminated, truncated, _ = super().step(action)
        if terminated:
            seen = {"observations": seen, "action_mask": np.zeros(4, np.float32)}
        return seen, reward, terminated, truncated, {}


class Forks(Odd):
    """Forks in its second step.

    The child process goes on as `ending` says: it returns, exits or raises; "" = no fork.

    The reward of a step is its number.
    """

    def __init__(self, ending):
        super().__init__()
        self.ending = ending

    def step(self, action):
        seen, _, *rest = super().step(action)
        if self.ending and self.steps == 2:
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            elif self.ending == "exit":
                sys.exit(0)
            elif self.ending == "raise":
                raise RuntimeError("the child fails")
            self.ending = ""
        return seen, float(self.steps), *rest


class EpisodeLengths(Odd):
    """Episode n has n steps, as a reset does not clear their number."""

    def step(self, action):
        seen, reward, *_ = super().step(action)
        return seen, reward, self.steps >= self.episodes, False, {}


def endless(**attributes):
    """Return an environment without a time limit, with attributes."""
    env = Odd(ends=lambda over: False)
    vars(env).update(attributes)
    return env


class Times(gymnasium.RewardWrapper):
    """Multiplies the reward."""

    def __init__(self, env, factor=2.0):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward


class Plus(gymnasium.RewardWrapper):
    """Adds 1 to the reward."""

    def reward(self, reward):
        return reward + 1
