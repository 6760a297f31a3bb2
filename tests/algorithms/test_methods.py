"""AgileRL's methods of agents: acting, learning, saving, cloning, mutation, texts, experiences."""

import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo import GRPO, Objective, Population
from evogrpo.compat.agilerl import NetworkGroup
from evogrpo.config.agent import STEPWISE
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution import Mutation
from evogrpo.members.language.own_loop import as_batch, as_completions
from evogrpo.records import Rollout
from tests.rounding import LOG_PROB
from tests.tiny_models import EOS, PAD, tiny_model
from tests.tiny_steps import played, step_agent
from tests.tiny_training import (
    SPACE,
    equal_states,
    graded,
    learn_fixed_batch,
    peft_twin,
    random_agent,
    random_population,
    randomise_adapter,
    shared_model,
    shared_tokenizer,
    state_of,
    tiny_agent,
    tiny_env,
    tiny_population,
)


@pytest.fixture
def agent() -> GRPO:
    """Return an agent with random adapters after one learning step."""
    agent = random_agent(hp_config=SPACE, update_epochs=2)
    learn_fixed_batch(agent)
    return agent


def test_training_actions_are_groups_after_their_prompts(agent):
    prompts = tiny_env().reset()[0]
    ids, masks = agent.get_action(prompts)
    assert len(ids) == len(masks) == 3
    for prompt, rows, mask in zip(prompts, ids, masks, strict=True):
        length = prompt["input_ids"].shape[1]
        assert mask.shape == (4, rows.shape[1] - 1)
        assert mask.dtype == torch.bool
        assert torch.equal(rows[:, :length], prompt["input_ids"].expand(4, -1))
        assert not mask[:, : length - 1].any()
        for tokens, counted in zip(
            rows[:, length:].tolist(), mask[:, length - 1 :].tolist(), strict=True
        ):
            count = sum(counted)
            assert counted == [True] * count + [False] * (len(counted) - count)
            assert EOS not in tokens[: count - 1]
            assert count == 6 or tokens[count - 1] == EOS
            assert tokens[count:] == [PAD] * (len(tokens) - count)


def test_training_actions_differ_between_calls_and_repeat_with_the_seed():
    prompts = tiny_env().reset()[0]
    one = tiny_agent(seed=3)
    other = tiny_agent(seed=3)
    third = tiny_agent(seed=4)
    actions = []
    for each in (one, one, other, third):
        ids, _ = each.get_action(prompts)
        actions.append([rows.tolist() for rows in ids])
    first, *others = actions
    assert [first == actions for actions in others] == [False, True, False]


def test_other_actions_are_one_greedy_row(agent):
    prompts = tiny_env().reset()[0]
    steps = agent.steps
    member = peft_twin(agent)
    ids, masks = agent.get_action(prompts, training=False)
    assert agent.steps == steps  # no random stream was used
    for prompt, rows, mask in zip(prompts, ids, masks, strict=True):
        assert rows.shape[0] == mask.shape[0] == 1
        expected = prompt["input_ids"][0].tolist()
        while len(expected) < rows.shape[1] and expected[-1] != EOS:
            expected.append(int(member.probabilities(expected, temperature=1.0).argmax()))
        assert rows[0, : len(expected)].tolist() == expected
    agent.set_training_mode(False)
    # Padding on the left is ignored.
    padding = torch.full((1, 2), PAD)
    padded = []
    for prompt in prompts:
        input_ids = torch.cat([padding, prompt["input_ids"]], 1)
        mask = torch.cat([padding, prompt["attention_mask"]], 1)
        padded.append({"input_ids": input_ids, "attention_mask": mask})
    for rows, expected in zip(agent.get_action(padded)[0], ids, strict=True):
        assert rows.tolist() == expected.tolist()
    agent.set_training_mode(True)
    assert agent.get_action(prompts)[0][0].shape[0] == agent.group_size


@pytest.mark.parametrize(
    ("prompts", "rule"),
    [
        ([], "at least one prompt"),
        (torch.tensor([[3, 4]]), "list of at least one prompt"),
        ([{"attention_mask": torch.ones(1, 2)}], "mapping with input_ids"),
        (
            [{"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 3)}],
            "as long as input_ids",
        ),
        (
            [{"input_ids": torch.tensor([[3, 4], [5, 6]])}],
            r"input_ids must have shape .* got \[2, 2\]",
        ),
        ([{"input_ids": torch.tensor(3)}], r"input_ids must have shape .* got \[\]"),
        (
            [{"input_ids": torch.tensor([3, 4]), "attention_mask": torch.ones(2, 1)}],
            "attention_mask must have shape",
        ),
        ([{"input_ids": torch.tensor([[3]]), "attention_mask": torch.zeros(1, 1)}], "no tokens"),
        ([{"input_ids": torch.tensor([[3, 64]])}], "tokens of prompts .* got 64"),
    ],
)
def test_invalid_prompts_raise(agent, prompts, rule):
    with pytest.raises(ValueError, match=rule):
        agent.get_action(prompts)


def test_a_manual_loop_learns():
    env = tiny_env(reward_fn=lambda completion, answer, question: completion.count("e") / 6)
    agent = tiny_agent(group_size=8, lr=2e-2, max_grad_norm=1.0)
    before = agent.test(env)
    prompts, _ = env.reset()
    earned = []
    for _ in range(12):
        ids, masks = agent.get_action(prompts)
        prompts, rewards, *_ = env.step(ids)
        agent.learn((ids, masks, rewards))
        earned.append(float(rewards.mean()))
    assert np.mean(earned[-3:]) > np.mean(earned[:3]) + 0.2
    assert agent.test(env) > before + 0.2


def test_a_manual_loop_masks_truncated_completions():
    changed = []
    for shortest in (24, 0):  # with 24, all completions are truncated
        lengths = {"min_output_tokens": shortest, "max_output_tokens": 24}
        agent = tiny_agent(group_size=8, objective=Objective(mask_truncated=True), **lengths)
        ids, masks = agent.get_action(tiny_env(data_batch_size=2).reset()[0])
        before = state_of(agent)
        report = agent.learn((ids, masks, graded(ids)))
        changed.append(not torch.equal(before["adapter"], state_of(agent)["adapter"]))
        assert (report.metrics["completions/clipped_ratio"] == 1) == (shortest == 24)
    assert changed == [False, True]


@pytest.mark.parametrize("settings", [{"dynamic_sampling": 2}, {"overlong_buffer": 2}])
def test_a_manual_loop_refuses_settings_that_act_while_collecting(settings):
    agent = tiny_agent(objective=Objective(**settings))
    with pytest.raises(ValueError, match=f"{next(iter(settings))} .*learn"):
        learn_fixed_batch(agent)
    agent = step_agent(group_size=4, objective=replace(STEPWISE, mask_truncated=True))
    with pytest.raises(ValueError, match=r"mask_truncated .*learn"):
        agent.learn(played(agent))


def test_save_and_load_round_trip(agent, tmp_path):
    agent.save_checkpoint(tmp_path / "agent")
    agent.parent = 5
    agent.born = 2
    agent.temperature = 0.8
    with pytest.raises(ValueError, match="replace=True"):
        agent.save_checkpoint(tmp_path / "agent")
    agent.save_checkpoint(tmp_path / "agent", replace=True)
    loaded = GRPO.load(tmp_path / "agent", actor_network=tiny_model())
    assert equal_states(loaded.state(), agent.state())
    one = dict(GRPO.inspect_attributes(loaded))
    other = dict(GRPO.inspect_attributes(agent))
    configs = [
        each.pop("lora_config").to_dict() | {"task_type": "CAUSAL_LM"} for each in (one, other)
    ]
    assert configs[0] == configs[1]
    assert dict(one.pop("hp_config")) == dict(other.pop("hp_config"))
    assert one == other
    learn_fixed_batch(agent)
    learn_fixed_batch(loaded)
    assert equal_states(loaded.state(), agent.state())


def test_agents_have_spaces_preprocessing_and_devices():
    box = gymnasium.spaces.Box(-1.0, 1.0, (3, 2))
    discrete = gymnasium.spaces.Discrete(5)
    env = tiny_env()
    agent = tiny_agent(observation_space=box, action_space=discrete).clone()
    assert (agent.observation_space, agent.action_space) == (box, discrete)
    assert (GRPO.get_state_dim(box), GRPO.get_state_dim(env.observation_space)) == (
        (3, 2),
        (len(env.tokenizer),),
    )
    assert (GRPO.get_action_dim(discrete), GRPO.get_action_dim(env.action_space)) == (
        5,
        len(env.tokenizer),
    )
    assert torch.equal(
        agent.preprocess_observation(np.full((3, 2), 0.5)), torch.full((1, 3, 2), 0.5)
    )
    with pytest.raises(ValueError, match="observation_space"):
        tiny_agent().preprocess_observation(np.zeros(3))
    nested = {"a": [torch.ones(2), (torch.zeros(1), "text")]}
    tensor, mapping, number = agent.to_device(torch.arange(3), nested, 7)
    assert torch.equal(tensor, torch.arange(3))
    assert torch.equal(mapping["a"][0], torch.ones(2))
    assert (type(mapping["a"][1]), mapping["a"][1][1], number) == (tuple, "text", 7)


def test_returns_the_mean_greedy_reward_on_held_out_questions(agent):
    seen = []

    def recorded(completion, answer, question):
        seen.append(question)
        return float(len(completion))

    env = tiny_env(reward_fn=recorded)
    before = agent.state()
    steps = agent.steps
    scores = []
    for split, loop in (("validation", 1), ("validation", 3), ("test", 1)):
        scores.append(agent.test(env, split=split, loop=loop))
        rows = env.make_batch(split, range(env.size(split))).rows
        assert set(seen) == {row["question"] for row in rows}
        assert len(seen) == loop * len(rows)
        seen.clear()
    assert scores[0] == scores[1] == agent.test(env)
    assert equal_states(agent.state(), before)
    assert agent.steps == steps
    for loop in (0, 1.5):
        with pytest.raises(ValueError, match="loop must be"):
            agent.test(env, loop=loop)


def test_a_clone_is_equal_and_independent():
    """The clone of a member leaves the population."""
    population = tiny_population(3, hp_config=SPACE)
    randomise_adapter(population[1])
    member = population[1]
    learn_fixed_batch(member)
    clone = member.clone(index=7)
    other = member.clone()
    assert (clone.slot, clone.index, clone.members.banks["default"].size) == (0, 7, 1)
    assert (other.index, other.hyperparameters, other.steps) == (
        1,
        member.hyperparameters,
        member.steps,
    )
    before = [each.state() for each in population]
    assert equal_states(clone.state(), before[1])
    learn_fixed_batch(other)
    other.lr = 0.5
    assert all(
        equal_states(each.state(), kept) for each, kept in zip(population, before, strict=True)
    )
    assert member.lr == clone.lr != 0.5
    learn_fixed_batch(member)
    assert equal_states(member.state(), other.state())
    assert not equal_states(member.state(), before[1])


def test_copy_attributes_excludes_weights_slot_and_index(agent):
    other = tiny_agent(index=9)
    called = []
    weights = other.state()
    agent.register_init_hook(lambda: called.append(1))
    agent.parent = 4
    agent.born = 2
    agent.lr = 0.25
    agent.failed = "for a reason"
    agent.set_training_mode(False)
    assert GRPO.copy_attributes(agent, other) is other
    for name in ("parent", "born", "hyperparameters", "fitness", "failed", "training", "steps"):
        assert getattr(other, name) == getattr(agent, name)
    assert (other.index, other.slot) == (9, 0)
    assert equal_states(other.state(), weights)
    other.register_init_hook(lambda: called.append(2))  # hooks are copied as well
    agent.mutated()
    other.mutated()
    assert called == [1, 1, 2]


def test_evolvable_attributes_are_weights_and_optimizer(agent):
    everything = agent.evolvable_attributes()
    state = agent.state()
    assert set(everything) == {"actor", "optimizer", "running_stats"}
    assert equal_states(
        everything["actor"] | everything["optimizer"] | everything["running_stats"], state
    )
    networks = agent.evolvable_attributes(networks_only=True)
    assert set(networks) == {"actor"}
    networks["actor"]["adapter"].zero_()
    assert equal_states(agent.state(), state)  # copies


def test_inspect_attributes_returns_constructor_arguments_and_state(agent):
    arguments = GRPO.inspect_attributes(agent, input_args_only=True)
    assert arguments["lr"] == agent.lr
    assert arguments["max_output_tokens"] == 6
    rebuilt = GRPO(actor_network=shared_model(), **arguments)
    assert GRPO.inspect_attributes(rebuilt, input_args_only=True) == arguments
    everything = GRPO.inspect_attributes(agent)
    names = "slot parent born fitness failed retired training steps"
    assert set(everything) - set(arguments) == set(names.split())
    assert everything["steps"] == 2  # one get_action, one learn
    assert not any(
        isinstance(value, torch.Tensor | torch.nn.Module) for value in everything.values()
    )


def test_a_population_is_a_sequence_of_agents_on_one_bank():
    options = {"actor_network": shared_model(), "pad_token_id": PAD, "hp_config": SPACE}
    population = GRPO.population(4, None, None, **options, lr=2e-3, group_size=4, index=10)
    assert isinstance(population, Population)
    assert [member.index for member in population] == [10, 11, 12, 13]
    assert [member.slot for member in population] == [0, 1, 2, 3]
    assert population[1:3] == [population[1], population[2]]
    assert population[-1] is population[3]
    assert len({id(member.members.banks["default"]) for member in population}) == 1
    assert (population[0].lr, population[0].group_size) == (2e-3, 4)
    assert len({member.lr for member in population}) == 4
    assert all(
        1e-4 <= member.lr <= 3e-2 and member.group_size in (2, 4, 8) for member in population
    )
    # Fixed hyperparameters are equal.
    assert all(member.temperature == 1.0 for member in population)
    with pytest.raises(ValueError, match="fitness"):
        _ = population.best


def test_members_can_be_wrapped():
    class Tagged:
        def __init__(self, agent, tag="none"):
            self.agent = agent
            self.tag = tag

    population = tiny_population(2, wrapper_cls=Tagged, wrapper_kwargs={"tag": "mine"})
    assert [(type(member), member.tag) for member in population] == [(Tagged, "mine")] * 2
    assert [member.agent for member in population] == population.agents
    population.evaluate(tiny_env())
    assert population.best is population[population.best.agent.slot]
    assert tiny_population(1, wrapper_cls=Tagged)[0].tag == "none"


def test_mutation_changes_evolving_hyperparameters_and_runs_hooks(agent):
    called = []
    agent.register_init_hook(lambda: called.append("first"))
    agent.register_init_hook(lambda: called.append("second"))
    before = agent.hyperparameters
    changes = agent.mutate(np.random.default_rng(1), Mutation(probability=1.0))
    assert set(changes) == {"lr", "clip_coef", "group_size"}
    for name, (old, new) in changes.items():
        assert (old, new) == (getattr(before, name), getattr(agent, name))
        assert old != new
    assert called == ["first", "second"]
    with pytest.raises(ValueError, match="hp_config"):
        tiny_agent().mutate(np.random.default_rng(0))


def test_evaluation_network_is_registered(agent):
    ids = torch.tensor([[8, 9, 10]])
    env = tiny_env()
    logits = agent.get_policy()(ids)
    score = agent.test(env)
    agent.register_network_group(NetworkGroup(eval_network="base"))
    torch.testing.assert_close(
        agent.get_policy()(ids), shared_model()(ids).logits, rtol=LOG_PROB, atol=LOG_PROB
    )
    fresh = tiny_agent()
    assert agent.test(env) == fresh.test(env)
    agent.register_network_group(NetworkGroup(eval_network="actor"))
    assert torch.equal(agent.get_policy()(ids), logits)
    assert agent.test(env) == score
    assert not torch.equal(logits, fresh.get_policy()(ids))
    agent.recompile()
    assert torch.equal(agent.get_policy()(ids), logits)
    with pytest.raises(ValueError, match="did you mean 'actor'"):
        agent.register_network_group(NetworkGroup(eval_network="actr"))
    with pytest.raises(ValueError, match="must be a NetworkGroup"):
        agent.register_network_group("actor")


TEXTS = ["1+2=", "30+4=", "a"]


def one_by_one(agent, text, tokens):
    """Greedy decoding by whole passes over one growing row."""
    tokenizer = shared_tokenizer()
    ids = tokenizer(text)["input_ids"]
    written = []
    while len(written) < tokens and 1 not in written:
        written.append(int(agent.get_policy()(torch.tensor([[*ids, *written]]))[0, -1].argmax()))
    return tokenizer.decode(written, skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_returns_nan_writes_nothing(temperature):
    agent = tiny_agent()
    state = agent.state()
    agent.load_state({**state, "adapter": state["adapter"] * math.nan})
    with pytest.raises(ValueError, match="NaN"):
        agent.generate(["1+1="], shared_tokenizer(), temperature=temperature)
    prompt = {"input_ids": torch.tensor([[5, 6]])}
    with pytest.raises(ValueError, match="NaN"):
        agent.get_action([prompt], training=temperature > 0)


def test_texts_are_continued_greedily():
    population = random_population(2)
    answers = [agent.generate(TEXTS, shared_tokenizer()) for agent in population]
    for agent, answer in zip(population, answers, strict=True):
        assert answer == [one_by_one(agent, text, 6) for text in TEXTS]
    assert answers[0] != answers[1]
    agent = population[0]
    tokenizer = shared_tokenizer()
    assert agent.generate(TEXTS[:1], tokenizer, max_output_tokens=2) == [
        one_by_one(agent, TEXTS[0], 2)
    ]
    conversation = [{"role": "user", "content": "1+2="}]
    # The template formats the conversation.
    assert agent.generate([conversation], tokenizer) == agent.generate(["u:1+2=\na:"], tokenizer)
    assert agent.generate([]) == []


def test_sampled_texts_are_ordered_by_prompt_and_differ_between_calls():
    agent = tiny_agent()
    same = tiny_agent()
    for each in (agent, same):
        randomise_adapter(each, std=0.02)
    before = agent.state()
    tokenizer = shared_tokenizer()
    drawn = [agent.generate(TEXTS, tokenizer, n=4, temperature=1.0) for _ in range(2)]
    assert [len(texts) for texts in drawn] == [12, 12]
    assert drawn[0] != drawn[1]
    assert len(set(drawn[0][:4])) > 1
    assert agent.generate(TEXTS, tokenizer, n=2, temperature=0.0)[::2] == agent.generate(
        TEXTS, tokenizer
    )
    assert same.generate(TEXTS, tokenizer, n=4, temperature=1.0) == drawn[0]
    assert agent.steps == 0
    assert equal_states(agent.state(), before)


def test_the_tokenizer_is_loaded_from_the_bases_source(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    base = type(tiny_model()).from_pretrained(tmp_path / "base")
    agent = GRPO(actor_network=base, pad_token_id=0, max_output_tokens=4)
    with pytest.raises(ValueError, match=r"base model .* cannot be loaded"):
        agent.generate(TEXTS)
    shared_tokenizer().save_pretrained(tmp_path / "base")
    assert agent.generate(TEXTS) == agent.generate(TEXTS, shared_tokenizer())


@pytest.mark.parametrize(
    ("prompts", "options", "rule"),
    [
        ("1+2=", {}, "prompts"),
        (["1", [{"role": "user", "content": "1"}]], {}, "generate"),
        ([""], {}, "generate"),
        (["1" * 200], {}, "the model's context is 128"),
        (["1"], {"n": 0}, "n must be at least 1"),
    ],
)
def test_invalid_arguments_raise(prompts, options, rule):
    with pytest.raises(ValueError, match=rule):
        tiny_agent().generate(prompts, shared_tokenizer(), **options)
    with pytest.raises(ValueError, match="generate"):
        step_agent().generate(TEXTS)


H = Hyperparameters(temperature=0.5)
CPU = torch.device("cpu")


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=2), min_size=1, max_size=3),
    prompt_lengths=st.lists(st.integers(1, 4), min_size=3, max_size=3),
)
def test_completions_round_trip(lengths, prompt_lengths):
    prompts = [tuple(range(10, 10 + size)) for size in prompt_lengths[: len(lengths)]]
    counts = torch.tensor(lengths).flatten()
    present = torch.arange(5) < counts[:, None]
    actions = torch.where(present, 20 + torch.arange(5 * len(counts)).view(-1, 5) % 40, PAD)
    rollout = Rollout(
        actions=actions,
        present=present,
        log_probs=torch.zeros(actions.shape),
        truncated=counts == 5,
    )
    ids, masks = as_completions(prompts, rollout, PAD)
    rewards = torch.arange(len(counts)).float().view(-1, 2)
    batch = as_batch((ids, masks, rewards), 3, H, 0, CPU)

    width = int(counts.max())
    assert batch.inputs.prompts == tuple(prompts)
    assert torch.equal(batch.present, present[:, :width])
    assert torch.equal(batch.action_mask, batch.present)
    assert torch.equal(batch.actions[batch.present], actions[present])
    assert batch.rewards.tolist() == list(range(len(counts)))
    assert (
        batch.group_ids.tolist()
        == batch.inputs.prompt_ids.tolist()
        == [n // 2 for n in range(len(counts))]
    )
    assert batch.member_ids.tolist() == [3] * len(counts)
    assert batch.inputs.temperature.tolist() == [0.5] * len(counts)
    assert batch.sampler_log_probs is None


def test_tokens_between_counted_ones_are_context():
    """Tokens after the last counted one are padding.

    A prompt ends at the first counted token of any of its rows.
    """
    ids = [
        torch.tensor([[8, 9, 21, 22, 23, 24, 25, 0], [8, 9, 31, 32, 33, 34, 0, 0]]),
        torch.tensor([[8, 10, 21], [8, 30, 31]]),
    ]
    masks = [
        torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 0, 0, 0]]).bool(),
        torch.tensor([[0, 1], [1, 1]]),  # numbers will do
    ]
    batch = as_batch((ids, masks, [[0, 1], [2, float("nan")]]), 0, H, 2, CPU)
    assert batch.inputs.prompts == ((8, 9), (8,))
    assert batch.actions[:, :5].tolist()[:2] == [[21, 22, 23, 24, 25], [31, 32, 33, 34, 0]]
    assert batch.present.sum(1).tolist() == [5, 3, 2, 2]
    assert batch.action_mask.int()[:, :5].tolist() == [
        [1, 1, 0, 0, 1], [1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [1, 1, 0, 0, 0]
    ]  # fmt: skip
    assert batch.rewards[:3].tolist() == [0.0, 1.0, 2.0]
    assert bool(batch.rewards[3].isnan())
    assert batch.inputs.min_new_tokens == 2


IDS = torch.tensor([[8, 9, 20], [8, 9, 21]])
MASK = torch.tensor([[0, 1], [0, 1]]).bool()


def test_masks_that_count_prompts_are_named():
    rewards = torch.tensor([[0.0, 1.0]], requires_grad=True)
    with pytest.warns(UserWarning, match="action_masks count all tokens"):
        tiny_agent().learn(([IDS], [torch.ones_like(MASK)], rewards))


@pytest.mark.parametrize(
    ("experiences", "rule"),
    [
        (([IDS], [MASK]), "got 2 parts"),
        (None, "got None"),
        (([IDS], [MASK], [[0.0, 1.0, 2.0]]), "completion_ids\\[0\\] must be \\[3, P \\+ C\\]"),
        (([IDS], [torch.ones(2, 3).bool()], [[0.0, 1.0]]), "one token shorter"),
        (([IDS], [torch.zeros(2, 2).bool()], [[0.0, 1.0]]), "action_masks"),
        (
            ([torch.tensor([[8, 9, 20], [8, 7, 21]])], [MASK], [[0.0, 1.0]]),
            "begin with the same prompt",
        ),
        (([IDS[:1]], [MASK[:1]], [[0.0]]), "at least 2 completions"),
        (([IDS.float()], [MASK], [[0.0, 1.0]]), "completion_ids.*float32"),
        (([IDS], [MASK * 0.5], [[0.0, 1.0]]), "action_masks.*0 and 1"),
        (([], [], torch.ones(0, 2)), "at least one prompt"),
        (([IDS + 60], [MASK], [[0.0, 1.0]]), "completion_ids must be in the vocabulary"),
        (([IDS], [MASK], [[0.0, math.inf]]), "rewards"),
    ],
)
def test_invalid_experiences_raise_before_learning(experiences, rule):
    agent = tiny_agent()
    before = agent.state()
    with pytest.raises(ValueError, match=rule):
        agent.learn(experiences)
    with pytest.raises(ValueError, match="no_grad"), torch.no_grad():
        agent.learn(([IDS], [MASK], [[0.0, 1.0]]))
    assert equal_states(agent.state(), before)
    assert agent.steps == 0
