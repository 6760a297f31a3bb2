"""Constructor arguments of agents, and precision set by an accelerator."""

from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from gymnasium.spaces import Box, Discrete
from peft import LoraConfig

from evogrpo import GRPO, HyperparameterConfig, MultiAgentGRPO, Objective, RLParameter
from evogrpo.config.hyperparameters import Optimizer
from evogrpo.testing.policy_banks import assert_gradients_agree
from tests.tiny_models import EOS, VOCABULARY, tiny_model
from tests.tiny_training import (
    equal_states,
    graded,
    randomise_adapter,
    shared_model,
    state_of,
    tiny_agent,
    tiny_env,
    tiny_options,
    tiny_population,
)


@pytest.fixture
def accelerators() -> Iterator[None]:
    """Reset accelerate's process-wide state after the test."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("make", [tiny_agent, lambda **options: tiny_population(2, **options)])
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"clip_coeff": 0.1}, "unknown argument 'clip_coeff': did you mean 'clip_coef'"),
        ({"group_sise": 4}, "did you mean 'group_size'"),
        ({"actor_network": None}, "actor_network must be a transformers model .*got NoneType"),
        ({"actor_network": torch.nn.Linear(2, 2)}, "actor_network must be a transformers model .*got Linear"),
        ({"actor_network": "smollm2-135m"}, "load_base"),
        ({"pad_token_id": None}, "pad_token_id must be given"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"lr": float("nan")}, "lr must be finite"),
        ({"clip_coef": 1.0}, r"clip_coef must be below 1"),
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"beta": -0.1}, "beta must be at least 0"),
        ({"temperature": 0.0}, "temperature must"),
        ({"update_epochs": 0}, "update_epochs must be at least 1"),
        ({"batch_size": 2.5}, "batch_size must be an integer"),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1"),
        ({"min_output_tokens": 7}, r"min_output_tokens must lie in \[0, max_output_tokens = 6\]"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens must be at least 1"),
        ({"micro_batch_tokens": "auto"}, "micro_batch_tokens"),
        ({"lora_config": LoraConfig(target_modules="all-linear", lora_dropout=0.1)}, "lora_dropout"),
        ({"lora_config": LoraConfig(target_modules=["nothing"])}, "matches no module"),
    ],
)
def test_invalid_arguments_raise(make, options, rule):
    with pytest.raises(ValueError, match=rule):
        make(**options)


def test_a_population_requires_a_member():
    with pytest.raises(ValueError, match="size"):
        tiny_population(0)


def test_a_model_without_eos_requires_eos_token_ids():
    model = tiny_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="eos_token_ids must be given"):
        tiny_agent(actor_network=model)
    agent = tiny_agent(actor_network=model, eos_token_ids=(5, 7))
    assert agent.members.settings.eos_token_ids == (5, 7)
    ids, masks = agent.get_action([{"input_ids": torch.tensor([[8, 9]])}] * 6)
    ends = 0
    for rows, mask in zip(ids, masks, strict=True):
        for tokens, counted in zip(rows[:, 2:].tolist(), mask[:, 1:].tolist(), strict=True):
            sampled = tokens[: sum(counted)]
            assert not {5, 7} & set(sampled[:-1])
            ends += len(sampled) < 6
    assert ends > 0  # some completions ended


def test_the_models_eos_is_the_default():
    assert tiny_agent().members.settings.eos_token_ids == (EOS,)


def test_min_output_tokens_delays_the_end():
    prompts = tiny_env().reset()[0]
    free, held = tiny_agent(seed=2, temperature=2.0), tiny_agent(seed=2, temperature=2.0, min_output_tokens=6)
    assert any(EOS in rows[:, -6:] for rows in free.get_action(prompts)[0])
    ids, masks = held.get_action(prompts)
    assert all(bool(mask[:, -6:].all()) for mask in masks)
    before = state_of(held)
    held.learn((ids, masks, graded(ids)))
    assert not equal_states(state_of(held), before)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma2"])
def test_agents_learn_on_other_architectures(architecture):
    agent = GRPO(**tiny_options(actor_network=tiny_model(architecture), beta=0.1))
    ids, masks = agent.get_action(tiny_env().reset()[0])
    report = agent.learn((ids, masks, graded(ids)))
    assert report.failed is None
    assert int(state_of(agent)["step"]) == 1
    assert agent.clone().test(tiny_env()) == agent.test(tiny_env())


def test_settings_reach_the_bank():
    optimizer = Optimizer(betas=(0.5, 0.6), eps=1e-4, weight_decay=0.3, warmup_steps=3)
    agent = tiny_agent(optimizer=optimizer, lr=0.4)
    randomise_adapter(agent)
    before = state_of(agent)["adapter"]
    ids, masks = agent.get_action(tiny_env().reset()[0])
    report = agent.learn((ids, masks, graded(ids)))
    after = state_of(agent)
    gradient = after["exp_avg"] / 0.5
    assert report.lr == 0.0, "the first of three steps of warm-up"
    assert torch.equal(after["adapter"], before)
    report = agent.learn((ids, masks, graded(ids)))
    assert report.lr == pytest.approx(0.4 / 3)
    # The first moment divided by its bias correction is the gradient, which is the same twice.
    expected = before * (1 - 0.4 / 3 * 0.3) - 0.4 / 3 * gradient / (gradient.abs() + 1e-4)
    torch.testing.assert_close(state_of(agent)["adapter"], expected, rtol=1e-4, atol=1e-5)


def test_memory_settings_change_no_result():
    results = []
    for options in (
        {"micro_batch_tokens": 10_000, "reduce_memory_peak": False},
        {"micro_batch_tokens": 10_000, "reduce_memory_peak": True},
        {"micro_batch_tokens": 8, "reduce_memory_peak": True},
    ):
        agent = tiny_agent(**options)
        randomise_adapter(agent)
        ids, masks = agent.get_action(tiny_env().reset()[0])
        agent.learn((ids, masks, graded(ids)))
        results.append(state_of(agent)["exp_avg"])
    for other in results[1:]:
        assert_gradients_agree(other, results[0])


@pytest.mark.parametrize(
    ("parameter", "value", "rule"),
    [
        ({"lr": RLParameter(min=1e-5, max=1e-4, scale="log")}, {"lr": 0.5}, r"range \[1e-05, 0.0001\], got 0.5"),
        ({"group_size": RLParameter(choices=[4, 16])}, {"group_size": 8}, r"choices \[4, 16\], got 8"),
        ({"loss_type": RLParameter(choices=["grpo", "dapo"])}, {"loss_type": "cispo"}, "choices .*got 'cispo'"),
        ({"clip_high": RLParameter(min=0.2, max=0.4)}, {"clip_high": 0.1}, "range .*got 0.1"),
    ],
)
def test_hyperparameters_start_inside_the_search_space(parameter, value, rule):
    with pytest.raises(ValueError, match=f"must start in its {rule}"):
        tiny_population(2, hp_config=HyperparameterConfig(**parameter), **value)


def test_a_default_outside_the_search_space_moves_to_the_nearest_value():
    space = HyperparameterConfig(
        lr=RLParameter(min=1e-3, max=1e-2),
        batch_size=RLParameter(choices=[4, 16]),
        clip_high=RLParameter(min=0.3, max=0.4),
    )
    options = {name: value for name, value in tiny_options().items() if name != "lr"}
    first = GRPO.population(2, actor_network=shared_model(), hp_config=space, **options)[0]
    assert (first.lr, first.batch_size, first.clip_high) == (1e-3, 16, None)


def test_an_unknown_objective_raises():
    with pytest.raises(ValueError, match="loss_type"):
        Objective(loss_type="ppo")


def train(agent: GRPO) -> torch.Tensor:
    randomise_adapter(agent)
    ids, masks = tiny_agent().get_action(tiny_env().reset()[0])
    agent.learn((ids, masks, graded(ids)))
    return state_of(agent)["exp_avg"]


def test_an_accelerator_in_full_precision_changes_nothing(accelerators):
    agent = tiny_agent(accelerator=Accelerator(cpu=True))
    assert agent.device == torch.device("cpu")
    assert torch.equal(train(agent), train(tiny_agent()))


def test_an_accelerator_sets_the_precision_until_unwrapped(accelerators):
    agent = tiny_agent(accelerator=Accelerator(cpu=True, mixed_precision="bf16"))
    exact, mixed = train(tiny_agent()), train(agent)
    assert not torch.equal(mixed, exact)
    assert float((mixed - exact).norm()) < 0.1 * float(exact.norm())  # bfloat16 keeps 8 bits
    assert state_of(agent)["adapter"].dtype == torch.float32
    assert shared_model().dtype == torch.float32
    assert torch.equal(train(agent.clone()), mixed)
    assert torch.equal(train(agent.clone(wrap=False)), exact)
    agent.unwrap_models()
    assert torch.equal(train(agent), exact)


def test_load_accepts_an_accelerator(accelerators, tmp_path):
    agent = tiny_agent()
    agent.save_checkpoint(tmp_path / "agent")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    loaded = GRPO.load(tmp_path / "agent", accelerator=accelerator, actor_network=shared_model())
    assert not torch.equal(train(loaded), train(agent))


DEVICES = ["gpu", "cuda:99", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_an_unavailable_device_raises_for_all_agents(device, tmp_path):
    seen, done = Box(-1.0, 1.0, (2,)), Discrete(2)
    agent = tiny_agent()
    agent.save_checkpoint(tmp_path / "agent")
    for make in (
        lambda: tiny_agent(device=device),
        lambda: GRPO(seen, done, device=device),
        lambda: MultiAgentGRPO({"a": seen}, {"a": done}, device=device),
        lambda: GRPO.load(tmp_path / "agent", device=device, actor_network=shared_model()),
    ):
        with pytest.raises(ValueError, match=f"device '{device}' is not available"):
            make()


@pytest.mark.parametrize("tokens", [(VOCABULARY,), (-1,), (1, VOCABULARY)])
def test_token_ids_beyond_the_vocabulary_raise(tokens):
    with pytest.raises(ValueError, match=rf"eos_token_ids must be in the vocabulary .*0 to {VOCABULARY - 1}\), got"):
        tiny_agent(eos_token_ids=tokens)
    with pytest.raises(ValueError, match="pad_token_id"):
        tiny_agent(pad_token_id=tokens[-1])


def test_eos_token_ids_may_be_an_integer():
    assert tiny_agent(eos_token_ids=5).members.settings.eos_token_ids == (5,)


def test_a_tokenizer_larger_than_the_vocabulary_raises_on_use():
    agent = tiny_agent(group_size=2)
    beyond = {"input_ids": torch.tensor([[3, VOCABULARY, 4]]), "attention_mask": torch.ones(1, 3)}
    with pytest.raises(ValueError, match=rf"tokens of prompts .* got {VOCABULARY}"):
        agent.get_action([beyond])
    ids, masks = torch.tensor([[3, 4, VOCABULARY]] * 2), torch.tensor([[False, True]] * 2)
    with pytest.raises(ValueError, match=f"completion_ids must be in the vocabulary .* got {VOCABULARY}"):
        agent.learn(([ids], [masks], torch.tensor([[1.0, 0.0]])))


def test_a_single_agent_raises_in_several_processes(accelerators, monkeypatch):
    accelerator = Accelerator(cpu=True)
    for state in (AcceleratorState, PartialState):
        monkeypatch.setitem(state._shared_state, "num_processes", 2)
    assert accelerator.num_processes == 2
    with pytest.raises(ValueError, match="accelerator"):
        tiny_agent(accelerator=accelerator)


def test_accelerator_and_device_exclude_each_other(accelerators):
    with pytest.raises(ValueError, match="device='cpu'"):
        tiny_agent(accelerator=Accelerator(cpu=True), device="cpu")


def test_pad_token_id_is_used():
    agent = tiny_agent(pad_token_id=5, group_size=8, temperature=3.0)
    prompts = [{"input_ids": torch.tensor([[8, 9]])}] * 4
    ids, masks = agent.get_action(prompts)
    filled = torch.cat([rows[:, 2:][~mask[:, 1:]] for rows, mask in zip(ids, masks, strict=True)])
    assert filled.tolist() == [5] * len(filled)
    assert len(filled) > 0
