"""Constructor arguments of agents, precision on accelerators, start from a PEFT adapter."""

import json
import warnings
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from gymnasium.spaces import Box, Discrete
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from evogrpo import GRPO, HyperparameterConfig, MultiAgentGRPO, Objective
from evogrpo.algorithms.checkpointing import population_state, restore_population
from evogrpo.config.network import NetworkConfig
from evogrpo.testing.samplers import different_members
from tests.causal_families import family_model
from tests.tiny_models import EOS, VOCABULARY, tiny_model
from tests.tiny_training import (
    graded,
    randomise_adapter,
    shared_model,
    tiny_agent,
    tiny_env,
    tiny_options,
)


@pytest.fixture
def accelerators() -> Iterator[None]:
    """Reset accelerate's process-wide state after the test."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"clip_coeff": 0.1}, "unknown argument 'clip_coeff': did you mean 'clip_coef'"),
        (
            {"actor_network": torch.nn.Linear(2, 2)},
            "actor_network must be a transformers model .*got Linear",
        ),
        ({"pad_token_id": None}, "pad_token_id must be given"),
        ({"eos_token_ids": (1, VOCABULARY)}, rf"eos_token_ids .*0 to {VOCABULARY - 1}\), got"),
        ({"min_output_tokens": 7}, r"min_output_tokens must be at most max_output_tokens = 6"),
        ({"max_episode_tokens": 5}, "max_episode_tokens must be at least max_output_tokens = 6"),
        (
            {"lora_config": LoraConfig(target_modules="all-linear", lora_dropout=0.1)},
            "lora_dropout",
        ),
        ({"network": NetworkConfig()}, "network is for small networks"),
        ({"objective": Objective(kl_estimator="full"), "beta": 0.1}, "kl_estimator='full'"),
        (
            {"hp_config": {"lr": (1e-5, 1e-4)}, "lr": 0.5},
            r"must start in its range \[1e-05, 0.0001\], got 0.5",
        ),
        (
            {"hp_config": {"loss_type": ["grpo", "dapo"]}, "loss_type": "cispo"},
            "choices .*got 'cispo'",
        ),
    ],
)
def test_invalid_arguments_raise(options, rule):
    if "hp_config" in options:
        options = options | {"hp_config": HyperparameterConfig(**options["hp_config"])}
    with pytest.raises(ValueError, match=rule):
        tiny_agent(**options)


def test_eos_token_ids_and_pad_token_id_are_used():
    model = tiny_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="eos_token_ids must be given"):
        tiny_agent(actor_network=model)
    assert tiny_agent().members.bank.end_ids.tolist() == [EOS]
    assert tiny_agent(eos_token_ids=5).members.bank.end_ids.tolist() == [5]
    agent = tiny_agent(actor_network=model, eos_token_ids=(5, 7), pad_token_id=9)
    ids, masks = agent.get_action([{"input_ids": torch.tensor([[8, 9]])}] * 6)
    ends = 0
    for rows, mask in zip(ids, masks, strict=True):
        for tokens, counted in zip(rows[:, 2:], mask[:, 1:], strict=True):
            assert not {5, 7} & set(tokens[counted][:-1].tolist())
            assert set(tokens[~counted].tolist()) <= {9}
            ends += int(counted.sum()) < 6
    assert ends > 0  # some completions ended
    held = tiny_agent(actor_network=model, eos_token_ids=(5, 7), min_output_tokens=6)
    _, masks = held.get_action([{"input_ids": torch.tensor([[8, 9]])}] * 6)
    assert all(bool(mask[:, 1:].all()) for mask in masks)


def test_a_default_outside_the_search_space_moves_to_the_nearest_value():
    space = HyperparameterConfig(lr=(1e-3, 1e-2), batch_size=[4, 16], clip_high=(0.3, 0.4))
    options = {name: value for name, value in tiny_options().items() if name != "lr"}
    first = GRPO.population(2, actor_network=shared_model(), hp_config=space, **options)[0]
    assert (first.lr, first.batch_size, first.clip_high) == (1e-3, 16, None)


def train(agent: GRPO) -> torch.Tensor:
    randomise_adapter(agent)
    ids, masks = tiny_agent().get_action(tiny_env().reset()[0])
    agent.learn((ids, masks, graded(ids)))
    return agent.state()["exp_avg"]


def test_an_accelerator_sets_the_precision_until_unwrapped(accelerators, tmp_path):
    exact = train(tiny_agent())
    plain = tiny_agent(accelerator=Accelerator(cpu=True))
    assert plain.device == torch.device("cpu")
    assert torch.equal(train(plain), exact)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    agent = tiny_agent(accelerator=accelerator)
    mixed = train(agent)
    assert 0 < float((mixed - exact).norm()) < 0.1 * float(exact.norm())  # bfloat16 keeps 8 bits
    assert agent.state()["adapter"].dtype == shared_model().dtype == torch.float32
    assert torch.equal(train(agent.clone()), mixed)
    assert torch.equal(train(agent.clone(wrap=False)), exact)
    agent.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", accelerator=accelerator, actor_network=shared_model())
    assert torch.equal(train(loaded), mixed)
    agent.unwrap_models()
    assert torch.equal(train(agent), exact)


def test_invalid_accelerators_raise(accelerators, monkeypatch):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="device='cpu'"):
        tiny_agent(accelerator=accelerator, device="cpu")
    for state in (AcceleratorState, PartialState):
        monkeypatch.setitem(state._shared_state, "num_processes", 2)
    assert accelerator.num_processes == 2
    with pytest.raises(ValueError, match="accelerator"):
        tiny_agent(accelerator=accelerator)


DEVICES = [
    "gpu",
    "cuda:99",
    "meta",
    pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_an_unavailable_device_raises_for_all_agents(device, tmp_path):
    seen = Box(-1.0, 1.0, (2,))
    done = Discrete(2)
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


IDS = torch.tensor([[3, 4, 5, 60]])


def starting(folder, **options):
    arguments = {**tiny_options(**options), "adapter": folder}
    del arguments["lora_config"]
    return {"actor_network": shared_model(), **arguments}


@pytest.fixture
def trained(tmp_path):
    """Return an adapter saved by PEFT, with dropout, rsLoRA and random weights, and its logits."""
    config = LoraConfig(
        r=2, lora_alpha=3, target_modules=["q_proj", "up_proj"], lora_dropout=0.1, use_rslora=True
    )
    model = get_peft_model(tiny_model(), config)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.copy_(
                    0.3
                    * torch.randn(values.shape, generator=torch.Generator().manual_seed(len(name)))
                )
        logits = model.eval()(input_ids=IDS).logits
    model.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained", logits


def test_members_start_from_the_adapter(trained, tmp_path):
    """New founders as well, also after a resume."""
    folder, logits = trained
    changed(folder, init_lora_weights="gaussian")  # which leaves the base unchanged
    population = GRPO.population(2, **starting(folder))
    assert population[0].members.bank.lora_config.r == 2
    with pytest.raises(ValueError, match="lora_config"):  # which the adapter defines
        tiny_agent(adapter=folder)
    for agent in (*population, population[1].clone()):
        torch.testing.assert_close(agent.get_policy()(IDS), logits, rtol=1e-4, atol=1e-4)
    tensors, record = population_state(population)
    again = restore_population(GRPO, dict(tensors), record, shared_model(), tmp_path)
    for members in (population.members, again.members):
        state = members.bank.state(1)
        members.bank.load_state(1, state | {"adapter": torch.zeros_like(state["adapter"])})
        members.bank.inherit([0, None])
        torch.testing.assert_close(members.policy(1)(IDS), logits, rtol=1e-4, atol=1e-4)


def test_an_export_with_modules_named_by_weight_is_accepted(tmp_path):
    model = family_model("beam")
    bank = different_members(model, 1)
    tensors, config = bank.peft_files(0)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes(config)
    agent = GRPO(actor_network=model, pad_token_id=0, adapter=tmp_path)
    assert torch.equal(agent.state()["adapter"], bank.state(0)["adapter"])


def changed(folder, **changes):
    record = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(record | changes))


def rewritten(folder, change):
    """Replace the matrices of an adapter, given as (name, values)."""
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(dict(change(list(weights.items()))), folder / "adapter_model.safetensors")


def halved(folder, name):
    file = folder / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (
            lambda folder: (folder / "adapter_model.safetensors").unlink(),
            "has no adapter_model.safetensors",
        ),
        (
            lambda folder: halved(folder, "adapter_model.safetensors"),
            "cannot be read .SafetensorError",
        ),
        (lambda folder: halved(folder, "adapter_config.json"), "cannot be read .JSONDecodeError"),
        (lambda folder: changed(folder, use_dora=True), "got use_dora=True"),
        (lambda folder: changed(folder, from_the_future=True), "from_the_future"),
        (lambda folder: changed(folder, init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (
            lambda folder: changed(folder, init_lora_weights="pissa_niter_4"),
            "init_lora_weights='pissa_niter_4'",
        ),
        (
            lambda folder: changed(folder, target_modules=["k_proj"]),
            "belongs to another base model",
        ),
        (
            lambda folder: rewritten(folder, lambda items: items[1:]),
            "belongs to another base model",
        ),
        (
            lambda folder: rewritten(
                folder, lambda items: [(k, v[:, :1].clone()) for k, v in items]
            ),
            "of shape",
        ),
        (
            lambda folder: rewritten(folder, lambda items: [(k, v * torch.nan) for k, v in items]),
            "not finite",
        ),
    ],
)
def test_invalid_adapters_raise(damage, rule, trained):
    damage(trained[0])
    with pytest.raises(ValueError, match=rule):
        GRPO(**starting(trained[0]))


def test_a_seed_of_torch_is_not_ignored_in_silence():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        with pytest.warns(UserWarning, match="seed=7"):
            tiny_agent()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tiny_agent(seed=3)
