"""Members that start from a PEFT adapter."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from evogrpo import GRPO
from evogrpo.algorithms.checkpointing import population_state, restore_population
from evogrpo.testing.samplers import different_members
from tests.causal_families import family_model
from tests.tiny_models import tiny_model
from tests.tiny_training import equal_states, shared_model, state_of, tiny_agent, tiny_options

IDS = torch.tensor([[3, 4, 5, 60]])


def starting(folder, **options):
    arguments = {**tiny_options(**options), "adapter": folder}
    del arguments["lora_config"]
    return {"actor_network": shared_model(), **arguments}


@pytest.fixture
def trained(tmp_path):
    """Return an adapter saved by PEFT, with dropout, rsLoRA and random weights, and its logits."""
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "up_proj"], lora_dropout=0.1, use_rslora=True)
    model = get_peft_model(tiny_model(), config)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.copy_(0.3 * torch.randn(values.shape, generator=torch.Generator().manual_seed(len(name))))
        logits = model.eval()(input_ids=IDS).logits
    model.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained", logits


def test_every_member_starts_from_the_adapter(trained):
    folder, logits = trained
    population = GRPO.population(2, **starting(folder, lr=1e-3))
    for agent in population:
        torch.testing.assert_close(agent.get_policy()(IDS), logits, rtol=1e-4, atol=1e-4)
    assert population[0].members.bank.lora_config.r == 2
    alone = population[1].clone()
    torch.testing.assert_close(alone.get_policy()(IDS), logits, rtol=1e-4, atol=1e-4)


def test_new_founders_start_from_the_adapter_also_after_a_resume(trained, tmp_path):
    folder, logits = trained
    population = GRPO.population(2, **starting(folder))
    tensors, record = population_state(population)
    again = restore_population(GRPO, dict(tensors), record, shared_model(), tmp_path)
    for members in (population.members, again.members):
        state = members.bank.state(1)
        members.bank.load_state(1, state | {"adapter": torch.zeros_like(state["adapter"])})
        members.bank.inherit([0, None])
        torch.testing.assert_close(members.policy(1)(IDS), logits, rtol=1e-4, atol=1e-4)


def test_agents_save_and_load(trained, tmp_path):
    agent = GRPO(**starting(trained[0]))
    agent.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", actor_network=shared_model())
    assert equal_states(state_of(loaded), state_of(agent))
    agent.load_checkpoint(tmp_path / "agent")
    again = GRPO(**starting(tmp_path / "agent"))  # a checkpoint is an adapter folder
    assert torch.equal(state_of(again)["adapter"], state_of(agent)["adapter"])


def test_an_export_with_modules_named_by_weight_is_accepted(tmp_path):
    model = family_model("beam")
    bank = different_members(model, 1)
    tensors, config = bank.peft_files(0)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes(config)
    agent = GRPO(actor_network=model, pad_token_id=0, adapter=tmp_path)
    assert torch.equal(state_of(agent)["adapter"], bank.state(0)["adapter"])


def changed(folder, **changes):
    record = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(record | changes))


def without_a_matrix(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    weights.popitem()
    save_file(weights, folder / "adapter_model.safetensors")


def of_another_width(folder):
    weights = {
        name: values[:, :1].contiguous() for name, values in load_file(folder / "adapter_model.safetensors").items()
    }
    save_file(weights, folder / "adapter_model.safetensors")


def diverged(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: values * torch.nan for name, values in weights.items()}, folder / "adapter_model.safetensors")


def halved(folder, name):
    file = folder / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: halved(folder, "adapter_model.safetensors"), "cannot be read .SafetensorError"),
        (lambda folder: halved(folder, "adapter_config.json"), "cannot be read .JSONDecodeError"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "cannot be read"),
        (lambda folder: changed(folder, peft_type="IA3"), "peft_type"),
        (lambda folder: changed(folder, use_dora=True), "got use_dora=True"),
        (lambda folder: changed(folder, rank_pattern={"q_proj": 4}), "got rank_pattern"),
        (lambda folder: changed(folder, from_the_future=True), "from_the_future"),
        (lambda folder: changed(folder, target_modules=["k_proj"]), "is not in both"),
        (without_a_matrix, "7 matrices, members of this model have 8"),
        (of_another_width, "must have the shape"),
        (diverged, "not finite"),
    ],
)
def test_invalid_adapters_raise(damage, rule, trained):
    damage(trained[0])
    with pytest.raises(ValueError, match=rule):
        GRPO(**starting(trained[0]))


def test_an_adapter_defines_the_lora_config(trained):
    with pytest.raises(ValueError, match="lora_config"):
        tiny_agent(adapter=trained[0])
