"""Banks against separate PEFT and plain models with PyTorch's AdamW, one row a pass."""

import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.members.language.peft_files import peft_files
from evogrpo.testing.samplers import different_members
from tests.oracles.peft_members import PeftMember, PlainMember
from tests.oracles.slow_advantages import outcome
from tests.oracles.slow_losses import member_loss
from tests.policy_banks import MOMENT_STEPS, assert_gradients_agree, assert_weights_agree
from tests.tiny_batches import CLIPS, full_members, grpo_loss, lora, off_policy, sampled_batch
from tests.tiny_models import ARCHITECTURES, DISTINCT, EOS, tiny_model

MIN_NEW_TOKENS = 2
END_IDS = (EOS, 9)
LORA_CONFIGS = {
    "regex": lora(target_modules=r".*\.1\.(self_attn\.[qv]_proj|mlp\.gate_proj)"),
    "all-linear": lora(),
    "excluded list": lora(
        exclude_modules=["o_proj", "up_proj"], use_rslora=True, r=4, lora_alpha=3
    ),
    "list and excluded": lora(
        target_modules=["q_proj", "v_proj"], exclude_modules=r".*layers\.0\..*"
    ),
}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *((architecture, "all-linear") for architecture in ARCHITECTURES),
        *(("llama", name) for name in LORA_CONFIGS if name != "all-linear"),
    ],
)
def test_exported_member_matches_peft(architecture, name, tmp_path):
    model = tiny_model(architecture)
    lora_config = LORA_CONFIGS[name]
    folder = tmp_path
    bank = different_members(model, 2, lora_config=lora_config)
    tensors, config = bank.peft_files(1)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(config)
    fresh = tiny_model(model.config.model_type).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT warns about GPT-2's transposed weights
        loaded = PeftModel.from_pretrained(fresh, folder).eval()
    assert {
        name.removesuffix(".lora_A.default")
        for name, _ in loaded.named_modules()
        if name.endswith("A.default")
    } == {f"base_model.model.{target.name}" for target in bank.targets}
    batch = sampled_batch(bank, tokens=4)
    rows = batch.select_members([1])
    scored = bank.log_probs(rows)
    for row in range(len(rows)):
        prompt = rows.inputs.prompts[int(rows.inputs.prompt_ids[row])]
        completion = rows.actions[row][rows.present[row]]
        with torch.no_grad():
            logits = loaded(input_ids=torch.tensor([[*prompt, *completion.tolist()]])).logits[
                0, len(prompt) - 1 : -1
            ]
        expected = (
            (logits / rows.inputs.temperature[row])
            .log_softmax(1)
            .gather(1, completion[:, None])[:, 0]
        )
        torch.testing.assert_close(scored[row][rows.present[row]], expected, rtol=1e-4, atol=1e-4)
    assert float((scored - bank.reference_log_probs(rows)).abs().max()) > 0.1, (
        "the adapters must matter"
    )


def reference_step(member, batch, old, slot, beta):
    """Return the oracle's loss of one member's rows, ready for backward."""
    rows = (batch.member_ids == slot).nonzero()[:, 0].tolist()
    advantages = outcome(batch.rewards[rows].tolist(), batch.group_ids[rows].tolist(), 1e-4)
    new = []
    behaviour = []
    divergence = 0.0
    for row in rows:
        mask = batch.action_mask[row]
        prompt = batch.inputs.prompts[int(batch.inputs.prompt_ids[row])]
        settings = {
            "temperature": float(batch.inputs.temperature[row]),
            "min_new_tokens": MIN_NEW_TOKENS,
        }
        new.append(member.log_probs(prompt, batch.actions[row][mask].tolist(), **settings).double())
        behaviour.append(old[row][mask].double())
        difference = behaviour[-1] - new[-1]
        divergence = divergence + (difference.exp() - difference - 1).mean() / len(rows)
    per_action = [[value] * len(values) for value, values in zip(advantages, new, strict=True)]
    lists = [list(values) for values in new], [values.tolist() for values in behaviour], per_action
    clips = {"clip_low": CLIPS[slot], "clip_high": CLIPS[slot]}
    return member_loss("grpo", "seq-mean-token-mean", *lists, **clips) + beta * divergence


@pytest.mark.parametrize(
    ("architecture", "full"),
    [
        *((architecture, False) for architecture in DISTINCT),
        *((name, True) for name in (*DISTINCT, "qwen2")),
    ],
)
def test_members_equal_separate_training_loops(architecture, full):
    """Compare losses, gradients, moments and weights over two steps of the bank's rollouts."""
    settings = Optimizer(weight_decay=0.05, betas=(0.9, 0.99), eps=1e-6)
    hyperparameters = {
        0: Hyperparameters(lr=5e-3, max_grad_norm=0.5),
        1: Hyperparameters(lr=1e-3, max_grad_norm=1e6),
        2: Hyperparameters(lr=1e-2, max_grad_norm=0.05),
    }
    make = full_members if full else different_members
    bank = make(
        tiny_model(architecture),
        3,
        optimizer=settings,
        eos_token_ids=END_IDS,
        micro_batch_tokens=60,
    )
    members = [PlainMember(bank, slot) if full else peft_member(bank, slot) for slot in range(3)]
    optimizers = [
        torch.optim.AdamW(
            member.parameters.values(),
            lr=hyperparameters[slot].lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        for slot, member in enumerate(members)
    ]
    for step in range(2):
        batch = sampled_batch(bank, seed=step, tokens=4, min_new_tokens=MIN_NEW_TOKENS)
        old = off_policy(batch.sampler_log_probs)
        reports = bank.update(batch, grpo_loss(batch, beta=0.1), hyperparameters).reports
        for slot, (member, optimizer) in enumerate(zip(members, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = reference_step(member, batch, old, slot, beta=0.1)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(
                member.parameters.values(), hyperparameters[slot].max_grad_norm
            )
            assert reports[slot].loss == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-4)
            assert reports[slot].grad_norm == pytest.approx(float(norm), rel=1e-3)
            if step == 0:  # the first moment, which started at zero, is the clipped gradient
                compare(bank, slot, member, lambda p: (1 - settings.betas[0]) * p.grad, "exp_avg")
            optimizer.step()
            states = optimizer.state
            compare(bank, slot, member, lambda p, states=states: states[p]["exp_avg"], "exp_avg")
            compare(
                bank, slot, member, lambda p, states=states: states[p]["exp_avg_sq"], "exp_avg_sq"
            )
            compare(
                bank,
                slot,
                member,
                lambda p: p,
                "weights" if full else "adapter",
                lr=hyperparameters[slot].lr,
            )


def peft_member(bank, slot):
    return PeftMember(bank.base.model, lora(), bank.peft_files(slot)[0], END_IDS)


def compare(bank, slot, member, read, name, lr=None):
    """Compare one vector of a member's state with the oracle's parameters, as `read` gives them."""
    state = bank.state(slot)
    if bank.lora_config is None:
        pairs = {"all weights": (state[name], member.flat(read))}
    else:
        tensors, _ = peft_files(bank.targets, bank.lora_config, state[name])
        pairs = {key: (got, read(member.parameters[key]).detach()) for key, got in tensors.items()}
    for key, (got, expected) in pairs.items():
        if lr is None:
            # A single tensor may be far smaller than the whole gradient.
            assert_gradients_agree(got, expected, steps=MOMENT_STEPS, label=f"{name} of {key}")
        else:
            assert_weights_agree(
                got, expected, steps=int(state["step"]), lr=lr, label=f"{name} of {key}"
            )
