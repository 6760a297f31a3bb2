"""Small environments with known best policies; each isolates one ability of an agent.

All are Gymnasium environments (checked by `gymnasium.utils.env_checker`), so they can be trained on as well. A probe's
`best` is the mean return of the best policy, its `chance` that of acting uniformly at random.
"""

import random
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class ConstantReward(gymnasium.Env):
    """One step with reward 1 for any action: every advantage must be 0."""

    best = chance = 1.0

    def __init__(self):
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, True, False, {}


class Match(gymnasium.Env):
    """One step: a random target is observed; the reward is the closeness of the action to it, at most `best`."""

    best = 1.0

    def __init__(self):
        self.target = np.zeros(1)

    def draw(self):
        raise NotImplementedError

    def show(self):
        raise NotImplementedError

    def closeness(self, action):
        raise NotImplementedError

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = self.draw()
        return self.show(), {}

    def step(self, action):
        return self.show(), float(self.closeness(action)), True, False, {}


class MatchDiscrete(Match):
    """Discrete(3), observed one-hot; `start` is the first action of the space."""

    chance = 1 / 3

    def __init__(self, start=0):
        super().__init__()
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(3, start=start)

    def draw(self):
        return int(self.np_random.integers(3))

    def show(self):
        return np.eye(3, dtype=np.float32)[self.target]

    def closeness(self, action):
        assert self.action_space.contains(action)
        return action - self.action_space.start == self.target


class MatchMultiDiscrete(Match):
    """MultiDiscrete([3, 2]) with start 1; the reward is the fraction of components that match."""

    chance = (1 / 3 + 1 / 2) / 2

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0.0, 1.0, (5,), np.float32)
        self.action_space = spaces.MultiDiscrete([3, 2], start=[1, 1])

    def draw(self):
        return self.np_random.integers([3, 2])

    def show(self):
        first, second = self.target
        return np.concatenate([np.eye(3)[first], np.eye(2)[second]]).astype(np.float32)

    def closeness(self, action):
        assert self.action_space.contains(action)
        return (action - 1 == self.target).mean()


class MatchMultiBinary(Match):
    """MultiBinary(3); the reward is the fraction of bits that match."""

    chance = 0.5

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.MultiBinary(3)
        self.action_space = spaces.MultiBinary(3)

    def draw(self):
        return self.np_random.integers(2, size=3, dtype=np.int8)

    def show(self):
        return self.target.copy()

    def closeness(self, action):
        assert self.action_space.contains(action)
        return (action == self.target).mean()


class MatchBox(Match):
    """Box([-1, -2], [1, 2]); the reward falls with the distance in units of the bounds."""

    chance = 1 - 2 / 3  # the mean distance of two uniform points of [-1, 1] is 2/3

    def __init__(self):
        super().__init__()
        self.bound = np.array([1.0, 2.0], np.float32)
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Box(-self.bound, self.bound, dtype=np.float32)

    def draw(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def show(self):
        return self.target.copy()

    def closeness(self, action):
        assert self.action_space.contains(action)  # not without clipping at the boundary
        return 1 - np.abs(action / self.bound - self.target).mean()


class MatchImage(Match):
    """The bright half of a grey 16 x 16 image (channels last, uint8)."""

    chance = 0.5

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (16, 16, 1), np.uint8)
        self.action_space = spaces.Discrete(2)

    def draw(self):
        return int(self.np_random.integers(2))

    def show(self):
        image = np.full((16, 16, 1), 20, np.uint8)
        image[:, 8 * self.target : 8 * self.target + 8] = 230
        return image

    def closeness(self, action):
        return action == self.target


class MatchDict(Match):
    """A Dict of a category and the sign of a number; both are needed to choose one of four actions."""

    chance = 0.25

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict(which=spaces.Discrete(2), number=spaces.Box(-1.0, 1.0, (1,), np.float32))
        self.action_space = spaces.Discrete(4)

    def draw(self):
        return int(self.np_random.integers(2)), float(self.np_random.choice([-0.5, 0.5]))

    def show(self):
        which, number = self.target
        return {"which": which, "number": np.array([number], np.float32)}

    def closeness(self, action):
        which, number = self.target
        return action == 2 * which + (number > 0)


class MatchTuple(MatchDict):
    """`MatchDict` with a Tuple inside a Tuple."""

    def __init__(self):
        super().__init__()
        which, number = self.observation_space["which"], self.observation_space["number"]
        self.observation_space = spaces.Tuple([which, spaces.Tuple([number])])

    def show(self):
        observed = super().show()
        return observed["which"], (observed["number"],)


class DelayedCredit(gymnasium.Env):
    """Two steps: the first action must match the observation; the second step pays for the first."""

    best, chance = 1.0, 0.5

    def __init__(self):
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.target, self.first = 0, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target, self.first = int(self.np_random.integers(2)), None
        return np.array([2 * self.target - 1, -1], np.float32), {}

    def step(self, action):
        if self.first is None:
            self.first = int(action)
            return np.array([0, 1], np.float32), 0.0, False, False, {}
        return np.zeros(2, np.float32), float(self.first == self.target), True, False, {}


class Masked(gymnasium.Env):
    """Three steps with four actions, some of them illegal; the reward is 1 for the highest legal action.

    At the end no action is legal, and the mask says so.
    """

    best, chance = 3.0, None

    def __init__(self):
        self.observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(4)
        self.mask, self.steps = np.ones(4, np.int8), 0

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
            return np.zeros(4, np.float32), reward, True, False, {"action_mask": np.zeros(4, np.int8)}
        seen, infos = self.draw()
        return seen, reward, False, False, infos


class NoisyWalk(gymnasium.Env):
    """A noisy walk that terminates at a random step; observations are noisy as well."""

    def __init__(self):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Discrete(2)
        self.place = 0.0

    def show(self):
        return np.array([self.place, *self.np_random.normal(size=2)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = float(self.np_random.normal())
        return self.show(), {}

    def step(self, action):
        self.place += 2.0 * int(action) - 1.0 + 0.1 * self.np_random.normal()
        return self.show(), self.place, bool(self.np_random.random() < 0.1), False, {}


class Slow(DelayedCredit):
    """`DelayedCredit` whose steps take `seconds`."""

    def __init__(self, seconds=0.001):
        super().__init__()
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


class Endless(gymnasium.Env):
    """Never ends and has no time limit; the reward of a step is its action."""

    def __init__(self):
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), float(action), False, False, {}


class RunningMean(NoisyWalk):
    """Shows its position less the mean of all positions so far; reset does not clear the mean."""

    def __init__(self):
        super().__init__()
        self.count, self.mean = 0, 0.0

    def show(self):
        self.count += 1
        self.mean += (self.place - self.mean) / self.count
        return np.array([self.place - self.mean, 0.0, 0.0])


class GlobalNoise(DelayedCredit):
    """Rewards with noise from the global generator of "numpy" or "python", which the reset seed does not control."""

    def __init__(self, source="numpy"):
        super().__init__()
        self.draw = {"numpy": np.random.random, "python": random.random}[source]

    def step(self, action):
        seen, reward, terminated, truncated, infos = super().step(action)
        return seen, reward + self.draw(), terminated, truncated, infos


class SeededGlobals(GlobalNoise):
    """Seeds the global generator at reset: deterministic unless another environment is stepped in between."""

    def reset(self, *, seed=None, options=None):
        np.random.seed(seed)  # noqa: NPY002
        return super().reset(seed=seed)


PROBES = [
    ConstantReward,
    MatchDiscrete,
    MatchMultiDiscrete,
    MatchMultiBinary,
    MatchBox,
    MatchImage,
    MatchDict,
    MatchTuple,
    DelayedCredit,
    Masked,
    NoisyWalk,
]
