"""Conformance suites of `GroupEnvironment`, one for each kind of batch that it makes.

`PromptEnvironmentTestCase` is for environments that make a `PromptBatch`,
`PlayedEnvironmentTestCase` for those that make a `StartBatch`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.arrays import Float32Array, FloatArray, IntArray
from evogrpo.envs.control.action_noise import ActionNoise
from evogrpo.envs.control.conversion import mask_sizes, masks_of_parts
from evogrpo.envs.control.policy_mapping import PolicyMapping, map_policies, single_agent
from evogrpo.envs.protocol import (
    SPLITS,
    GroupEnvironment,
    PromptBatch,
    Scores,
    Split,
    SupportsFingerprint,
)
from evogrpo.randomness import generator
from evogrpo.records import Conversation, SampledActions
from evogrpo.spaces import flatten, leaf_spaces

MAX_STARTS = 24  # starts of each split


class GroupEnvironmentTestCase(ABC):
    """Tests of starts and of the order in which they are selected.

    Implement `make_env` and `identities`.

    The tests of a class share one environment. Some compare it with another, new one.
    """

    _env: GroupEnvironment | None = None

    @abstractmethod
    def make_env(self, seed: int = 0) -> GroupEnvironment:
        """Build the environment, with at least 2 starts in every split and 8 in training."""

    @abstractmethod
    def identities(self, batch: Any) -> list[Hashable]:
        """Return one value for each start of a batch, different for different starts."""

    @pytest.fixture
    def env(self) -> GroupEnvironment:
        """Return the environment that the tests of this class share."""
        cls = type(self)
        if cls._env is None:
            cls._env = self.make_env()
        return cls._env

    @classmethod
    def teardown_class(cls) -> None:
        """Close the environment."""
        env = cls._env
        cls._env = None
        if env is not None and hasattr(env, "close"):
            env.close()

    def sample_starts(self, env: GroupEnvironment, split: Split) -> range:
        """Return some starts of a split."""
        return range(min(env.size(split), MAX_STARTS))

    # ---- spaces, starts and their order

    def test_spaces_and_split_sizes(self, env: Any) -> None:
        assert isinstance(env.observation_space, gymnasium.Space)
        assert isinstance(env.action_space, gymnasium.Space)
        assert all(env.size(split) >= 2 for split in SPLITS)
        assert env.size("train") >= 8

    def test_smaller_counts_select_a_prefix_of_the_starts(self, env: Any) -> None:
        for step in (3, 0, 1):
            starts = env.select_starts(step, 7, 7)
            assert all(0 <= start < env.size("train") for start in starts)
            for count in (5, 1, 7):
                assert env.select_starts(step, count, 7) == starts[:count]

    def test_selected_starts_do_not_depend_on_earlier_calls(self, env: Any) -> None:
        fresh = self.make_env()
        expected = fresh.select_starts(2, 4, 4)
        for step in range(4):
            env.select_starts(step, 3, 4)
        env.make_batch("validation", [0])
        assert env.select_starts(2, 4, 4) == expected

    def test_a_pass_repeats_no_start(self, env: Any) -> None:
        count = min(env.size("train"), 64)
        taken: list[int] = []
        for step in range(count // 4):
            taken += env.select_starts(step, 4, 4)
        assert len(set(taken)) == len(taken)

    def test_seeds_change_the_order_and_the_fingerprint(self, env: Any) -> None:
        others: list[Any] = [self.make_env(seed) for seed in (1, 2)]
        starts = {each.select_starts(0, 8, 8) for each in (env, *others)}
        assert len(starts) > 1
        if isinstance(env, SupportsFingerprint):
            fingerprint = dict(env.fingerprint())
            assert all(dict(each.fingerprint()) != fingerprint for each in others)

    def test_equal_environments_have_equal_fingerprints(self, env: Any) -> None:
        env.make_batch("validation", [0])  # must not change it
        if not isinstance(env, SupportsFingerprint):
            pytest.skip("the environment has no fingerprint()")
        fingerprint = dict(env.fingerprint())
        assert fingerprint
        texts = (*fingerprint, *fingerprint.values())
        assert all(isinstance(text, str) for text in texts)
        equal = self.make_env()
        assert isinstance(equal, SupportsFingerprint)
        assert dict(env.fingerprint()) == dict(equal.fingerprint()) == fingerprint

    def test_batches_are_reproducible(self, env: Any) -> None:
        fresh = self.make_env()
        for split in SPLITS:
            starts = self.sample_starts(env, split)
            first = self.identities(env.make_batch(split, starts))
            assert self.identities(env.make_batch(split, starts)) == first
            assert self.identities(fresh.make_batch(split, starts)) == first
            repeated = self.identities(env.make_batch(split, [1, 0, 1]))
            assert repeated == [first[1], first[0], first[1]]

    def test_splits_share_no_start(self, env: Any) -> None:
        everything: list[Hashable] = []
        for split in SPLITS:
            batch = env.make_batch(split, self.sample_starts(env, split))
            everything += self.identities(batch)
        assert len(set(everything)) == len(everything)

    @pytest.mark.parametrize(("split", "start"), [("train", -1), ("test", "size"), ("dev", 0)])
    def test_invalid_starts_raise(self, env: Any, split: Any, start: Any) -> None:
        with pytest.raises(ValueError, match=split):
            env.make_batch(split, [env.size(split) if start == "size" else start])


# ---- conversations


class PromptEnvironmentTestCase(GroupEnvironmentTestCase):
    """Tests of environments that make a `PromptBatch`. Implement `make_env` and `complete`."""

    @abstractmethod
    def complete(self, env: Any, rng: np.random.Generator) -> Sequence[int]:
        """Return token ids of a random completion, with or without a final EOS.

        With several turns, some completions must lead to a reply.
        """

    def identities(self, batch: Any) -> list[Hashable]:
        """Return the prompts."""
        return [tuple(prompt) for prompt in batch.prompts]

    def converse(
        self, env: Any, batch: PromptBatch, start_of_row: Sequence[int], rows: Sequence[int]
    ) -> dict[int, Conversation]:
        """Return completed conversations by row; a completion depends on its row and turn only.

        Args:
            env: The environment.
            batch: A batch of the environment.
            start_of_row: Position of each row's start in the batch.
            rows: Rows to complete together.
        """
        found = dict[int, Conversation]()
        active = list(rows)
        for turn in range(batch.max_turns):
            # 1. One completion in each conversation that goes on.
            for row in active:
                rng = generator(0, "say", row, turn)
                completion = tuple(map(int, self.complete(env, rng)))
                if turn == 0:
                    found[row] = Conversation(
                        row=row, start=start_of_row[row], completions=(completion,)
                    )
                else:
                    completions = (*found[row].completions, completion)
                    found[row] = replace(found[row], completions=completions)
            if turn + 1 == batch.max_turns or not active:
                break
            # 2. Replies of the environment. A conversation without one has ended.
            replies = batch.respond([found[row] for row in active])
            assert len(replies) == len(active)
            pairs = list(zip(active, replies, strict=True))
            active = []
            for row, reply in pairs:
                if reply is not None:
                    active.append(row)
                    all_replies = (*found[row].replies, tuple(reply))
                    found[row] = replace(found[row], replies=all_replies)
        return found

    def conversations(self, env: Any) -> tuple[PromptBatch, list[Conversation]]:
        """Make a batch of 4 starts, and complete 3 conversations for each."""
        batch = env.make_batch("train", range(4))
        start_of_row = np.repeat(range(4), 3).tolist()
        found = self.converse(env, batch, start_of_row, range(12))
        return batch, [found[row] for row in range(12)]

    def test_prompts_are_token_ids_and_questions_text(self, env: Any) -> None:
        starts = self.sample_starts(env, "train")
        batch = env.make_batch("train", starts)
        assert isinstance(batch, PromptBatch)
        assert len(batch.prompts) == len(batch.questions) == len(starts)
        for prompt in batch.prompts:
            assert len(prompt) > 0
            assert all(isinstance(token, int) for token in prompt)
            assert tuple(prompt) in env.observation_space
        assert all(isinstance(question, str) and question for question in batch.questions)

    def test_replies_are_token_ids_while_turns_remain(self, env: Any) -> None:
        batch, conversations = self.conversations(env)
        assert batch.max_turns >= 1
        replied: list[Sequence[int]] = []
        for conversation in conversations:
            replied += conversation.replies
        for reply in replied:
            assert len(reply) > 0
            assert all(isinstance(token, int) for token in reply)
        if batch.max_turns == 1:
            assert list(batch.respond(conversations)) == [None] * len(conversations)
        else:
            assert replied, "the test needs completions that lead to a reply"

    def test_replies_depend_on_their_conversation_alone(self, env: Any) -> None:
        start_of_row = [0, 1, 2, 3, 0, 1]
        batch = env.make_batch("train", range(4))
        together = self.converse(env, batch, start_of_row, range(6))
        batch = env.make_batch("train", range(4))
        for row in (5, 3, 0, 4, 1, 2):
            alone = self.converse(env, batch, start_of_row, [row])
            assert alone[row] == together[row]

    def test_scores_have_one_entry_for_each_conversation(self, env: Any) -> None:
        batch, conversations = self.conversations(env)
        self.check_scores(batch.score(conversations), conversations)

    def test_conversations_that_end_with_a_reply_are_scored(self, env: Any) -> None:
        batch, conversations = self.conversations(env)
        ended = []
        for each in conversations:
            if each.replies:
                each = replace(each, completions=each.completions[: len(each.replies)])  # noqa: PLW2901
            ended.append(each)
        self.check_scores(batch.score(ended), ended)

    def test_scores_depend_on_their_conversation_alone(self, env: Any) -> None:
        batch, conversations = self.conversations(env)
        together = self.rows(batch.score(conversations))
        order = [7, 2, 11, 0]
        some = batch.score([conversations[row] for row in order])
        assert self.rows(some) == [together[row] for row in order]
        one = batch.score([conversations[5]])
        assert self.rows(one) == [together[5]]

    @staticmethod
    def check_scores(scores: Scores, conversations: Sequence[Conversation]) -> None:
        """Check the shapes and the sums of components and step rewards."""
        # 1. One reward and one text for each conversation.
        n = len(conversations)
        assert scores.rewards.shape == (n,)
        assert scores.rewards.dtype == np.float64
        assert len(scores.completions) == n
        assert all(isinstance(text, str) for text in scores.completions)
        # 2. A reward is the weighted sum of its components, NaN ones left out.
        parts = np.stack(list(scores.components.values()), axis=1)
        assert scores.weights.shape == parts.shape == (n, len(scores.components))
        total = np.nansum(scores.weights * parts, axis=1)
        applies = ~np.isnan(scores.rewards)
        np.testing.assert_allclose(scores.rewards[applies], total[applies])
        # 3. Step rewards stand at tokens of the conversation, and their sum is the reward.
        if scores.step_rewards is not None:
            lengths = [len(conversation.tokens) for conversation in conversations]
            assert scores.step_rewards.shape == (n, max(1, *lengths))
            for row, length in enumerate(lengths):
                assert np.isnan(scores.step_rewards[row, length:]).all()
            np.testing.assert_allclose(
                np.nansum(scores.step_rewards, axis=1)[applies], scores.rewards[applies]
            )

    @staticmethod
    def rows(scores: Scores) -> list[Hashable]:
        """Return the scores row by row."""
        values = np.stack([scores.rewards, *scores.components.values()], axis=1)
        steps: list[Any] = [None] * len(values)
        if scores.step_rewards is not None:
            steps = []
            for row in scores.step_rewards:
                given = np.flatnonzero(~np.isnan(row))
                # Without the padding, whose width depends on the other rows.
                steps.append((given.tolist(), row[given].tolist()))
        return [
            (row.tobytes(), text, str(steps_of_row))
            for row, text, steps_of_row in zip(values, scores.completions, steps, strict=True)
        ]


# ---- episodes


class PseudoRandomActor:
    """Actor that maps observation, member and random numbers of a row to a pseudo-random action.

    Args:
        space: The action space.

    Attributes:
        rows: Number of rows of each call.
    """

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        self.space = space
        self.rows: list[int] = []

    def act(
        self,
        observations: Any,
        member_ids: IntArray,
        *,
        uniforms: Float32Array | None,
        temperature: Float32Array | None,
        action_mask: Any,
        base: bool,
    ) -> SampledActions:
        """Choose one action for each observation; equal rows get equal actions."""
        assert (np.diff(member_ids) >= 0).all()
        assert member_ids.dtype == np.int64
        m = len(member_ids)
        self.rows.append(m)
        # Different factors, so that permuted observations or random numbers give another sum.
        total = np.zeros(m)
        for column in _columns(observations).T:
            total = total * 3.7 + column
        if uniforms is not None:
            for column in uniforms.T:
                total = total * 1.3 + column
        total += 0.37 * member_ids + 0.5 * base
        if temperature is not None:
            total += temperature
        # The digits of a sine behind the third one look random.
        mixed = np.modf(np.abs(np.sin(total)) * 1000)[0]
        return SampledActions(
            actions=self.choose(mixed, m, action_mask), log_probs=-mixed.astype(np.float32)
        )

    def choose(self, mixed: FloatArray, m: int, mask: Any) -> NDArray[Any]:
        """Return the actions for numbers `[m]` in [0, 1)."""
        space: Any = self.space
        if isinstance(space, spaces.Dict | spaces.Tuple):
            parts = []
            pairs = zip(leaf_spaces(space), masks_of_parts(space, mask), strict=True)
            for leaf, mask_of_leaf in pairs:
                chosen = PseudoRandomActor(leaf).choose(mixed, m, mask_of_leaf)
                parts.append(chosen.reshape(m, -1))
            return np.concatenate(parts, axis=1).astype(np.float32)
        expanded = mixed.reshape(m, *[1] * len(space.shape))
        actions: NDArray[Any]
        # A mask has the flags of all components of a Discrete or MultiDiscrete space side by side.
        if mask is not None:
            ends = np.cumsum(mask_sizes(self.space))[:-1]
            actions = np.empty((m, len(ends) + 1))
            for column, legal in enumerate(np.split(mask, ends, axis=1)):
                places = (mixed * legal.sum(1)).astype(int)
                for number, place in enumerate(places):
                    legal_actions = np.flatnonzero(legal[number])
                    actions[number, column] = legal_actions[place]
            return actions.reshape(m, *space.shape).astype(space.dtype)
        if isinstance(self.space, spaces.Discrete):
            actions = mixed * space.n
        elif isinstance(self.space, spaces.MultiDiscrete):
            actions = expanded * space.nvec
        elif isinstance(self.space, spaces.MultiBinary):
            bits = (mixed > 0.5)[:, None]
            actions = np.broadcast_to(bits, (m, *space.shape))
        else:  # beyond the bounds, to test clipping
            actions = (2.4 * expanded - 1.2) * space.high
        return actions.astype(space.dtype)


def _columns(observations: Any) -> FloatArray:
    """Return observations `[m, ...]`, or dicts and tuples of them, as columns `[m, d]`."""
    if isinstance(observations, dict):
        observations = tuple(observations.values())
    if isinstance(observations, tuple):
        return np.concatenate([_columns(part) for part in observations], axis=1)
    return np.asarray(observations.reshape(len(observations), -1), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class PlayedRow:
    """Episode of one row, without padding.

    Attributes:
        first: First observation.
        steps: Observations, actions and rewards of all steps, as bytes.
    """

    first: Hashable
    steps: Hashable


class PlayedEnvironmentTestCase(GroupEnvironmentTestCase):
    """Tests of environments that make a `StartBatch`, for a single agent or several.

    Implement `make_env`.

    An episode depends on its start, random numbers and actions only.
    """

    def mapping(self, env: Any) -> PolicyMapping:
        """Return the mapping from agents to policies: one policy for each agent."""
        if hasattr(env, "observation_spaces"):
            return map_policies(env.observation_spaces, env.action_spaces, "independent")
        return single_agent(env.observation_space, env.action_space)

    def play(
        self,
        env: Any,
        starts: Sequence[int],
        start_of_row: Sequence[int],
        members: Sequence[int],
        *,
        greedy: bool,
    ) -> list[PlayedRow]:
        """Play one episode for each row; the rows of a member are next to each other.

        Args:
            env: The environment.
            starts: Training starts of the batch.
            start_of_row: Position of each row's start in `starts`.
            members: Member of each row. Its row r uses the random numbers of (member, r),
                regardless of other members.
            greedy: Take the most likely actions instead of sampling.
        """
        # 1. Play the episodes; the random numbers of each member are a stream of their own.
        names = list(dict.fromkeys(members))
        counts = [members.count(name) for name in names]
        noise = ActionNoise(
            0, "sample", streams=[(name,) for name in names], rows=counts, width_of=lambda agent: 1
        )
        mapping = self.mapping(env)
        actors = {
            name: PseudoRandomActor(spec.action_space) for name, spec in mapping.specs.items()
        }
        uniforms = None if greedy else noise
        batch = env.make_batch("train", starts)
        played = batch.play(actors, mapping, start_of_row, members, uniforms=uniforms)
        # 2. Collect the values of each row without padding, as bytes, which compare exactly.
        parts: list[list[Any]] = [[] for _ in members]
        first_of: list[list[Any]] = [[] for _ in members]
        for policy, episodes in played.episodes.items():
            spec = mapping.specs[policy]
            leaves = flatten(spec.observation_space, episodes.observations)
            rewards = (episodes.own_rewards, episodes.team_rewards)
            columns = (*leaves, episodes.actions, episodes.log_probs, *rewards)
            for number, row in enumerate(episodes.rows.tolist()):
                present = episodes.present[number]
                if not present.any():
                    continue
                agent = episodes.agents[number]
                values = [column[number][present].tobytes() for column in columns]
                terminated = bool(episodes.terminated[number])
                truncated = bool(episodes.truncated[number])
                steps = tuple(np.flatnonzero(present).tolist())
                parts[row].append((agent, steps, *values, terminated, truncated))
                # Agents that act right after the reset see the first observation.
                if present[0]:
                    first = [leaf[number, 0].tobytes() for leaf in leaves]
                    first_of[row].append((agent, *first))
        earned = [tuple(sorted(returns.items())) for returns in played.returns]
        return [
            PlayedRow(first=tuple(first_of[row]), steps=(*parts[row], earned[row]))
            for row in range(len(members))
        ]

    def identities(self, batch: Any) -> list[Hashable]:
        """Return the reset seeds."""
        return list(batch.seeds)

    def groups(
        self, env: Any, members: Sequence[int], *, starts: int = 3, greedy: bool = False
    ) -> list[PlayedRow]:
        """Play groups of 4; rows are ordered by member, start and place in the group."""
        start_of_row = np.repeat(range(starts), 4).tolist() * len(members)
        member_of_row = np.repeat(members, 4 * starts).tolist()
        return self.play(env, range(starts), start_of_row, member_of_row, greedy=greedy)

    def test_episodes_do_not_depend_on_other_members(self, env: Any) -> None:
        together = self.groups(env, (0, 3, 5))
        # 3 groups of 4 rows for each member.
        for number, member in enumerate((0, 3, 5)):
            first = 12 * number
            assert self.groups(env, (member,)) == together[first : first + 12]

    def test_episodes_do_not_depend_on_later_rows_of_the_member(self, env: Any) -> None:
        alone = self.groups(env, (2,), starts=2)
        assert alone == self.groups(env, (2,))[:8]

    def test_episodes_do_not_depend_on_the_position_of_their_start(self, env: Any) -> None:
        rows = [0, 0, 1, 1]
        moved = [2, 2, 0, 0]  # starts 4 and 6 in the second batch
        one = self.play(env, [4, 6], rows, [1] * 4, greedy=False)
        other = self.play(env, [6, 5, 4], moved, [1] * 4, greedy=False)
        assert one == other

    def test_play_is_reproducible(self, env: Any) -> None:
        fresh = self.make_env()
        for greedy in (False, True):
            played = self.groups(env, (0, 1), greedy=greedy)
            assert self.groups(env, (0, 1), greedy=greedy) == played
            assert self.groups(fresh, (0, 1), greedy=greedy) == played

    def test_a_group_starts_in_one_state(self, env: Any) -> None:
        played = self.groups(env, (0, 1))
        for first in range(0, len(played), 4):
            group = played[first : first + 4]
            assert len({row.first for row in group}) == 1
        assert len({row.steps for row in played}) > 1
