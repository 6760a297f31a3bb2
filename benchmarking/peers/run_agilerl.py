"""Time AgileRL's GRPO on the fixed work; runs inside AgileRL's own environment.

AgileRL trains the agents of a population one after another, each through `get_action` and `learn`;
so does this runner.
"""

from __future__ import annotations

import workload

# before torch is imported, which reads the number of threads
arguments = workload.parse_arguments(__doc__)
work = arguments.work

import torch  # noqa: E402
from agilerl.algorithms import GRPO  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase  # noqa: E402


def create_agent(tokenizer: PreTrainedTokenizerBase) -> GRPO:
    """Return an agent with AgileRL's defaults and the settings of the fixed work.

    Without `--defaults`, two settings are cheaper with the same result: the base is the reference,
    without its own adapter, and old log-probs come from the update's own forward pass.
    """
    cheaper = (
        {}
        if arguments.defaults
        else {"use_separate_reference_adapter": False, "old_logprobs_source": "trainer"}
    )
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.precision)
    )
    # AgileRL's language-model extra installs liger-kernel, whose Triton kernels cannot run on a
    # CPU. This attribute marks a model as already patched, which keeps them out.
    setattr(model, "_agilerl_liger_patched", True)  # noqa: B010
    return GRPO(
        actor_network=model,
        pad_token_id=tokenizer.convert_tokens_to_ids(work.pad_token),
        pad_token=work.pad_token,
        batch_size=len(work.prompts),
        group_size=workload.GROUP_SIZE,
        micro_batch_size_per_gpu=arguments.micro_batch,
        mini_batch_size=workload.SAMPLES_PER_STEP,
        beta=workload.BETA,
        lr=workload.LEARNING_RATE,
        clip_coef=workload.CLIP_COEF,
        max_grad_norm=workload.MAX_GRAD_NORM,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_output_tokens=work.completion_tokens,
        max_output_tokens=work.completion_tokens,
        lora_config=LoraConfig(
            r=workload.LORA_RANK,
            lora_alpha=workload.LORA_ALPHA,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        gradient_checkpointing=False,
        use_liger_loss=False,
        device="cpu",
        seed=0,
        **cheaper,
    )


def learning_step(agent: GRPO, tokenizer: PreTrainedTokenizerBase) -> None:
    """Take one learning step of one agent: sample, decode, reward, update."""
    prompts = tokenizer(list(work.prompts), return_tensors="pt")
    workload.check_tokens("a prompt", prompts["input_ids"].shape[1], work.prompt_tokens)
    # Groups repeated here are sampled in one batch; get_action would sample each prompt in a batch
    # of its own.
    if arguments.defaults:
        each = [
            {key: tensor[row : row + 1] for key, tensor in prompts.items()}
            for row in range(len(work.prompts))
        ]
        action = agent.get_action(each, training=True)
    else:
        rows = {
            key: tensor.repeat_interleave(workload.GROUP_SIZE, dim=0)
            for key, tensor in prompts.items()
        }
        action = agent.get_action([rows], training=True, repeat_prompts=False)
    token_ids = action[0]
    action_masks = action[1]
    workload.check_tokens(
        "a step",
        int(sum(mask.sum() for mask in action_masks)),
        workload.SAMPLES_PER_STEP * work.completion_tokens,
    )
    completions = tokenizer.batch_decode(
        torch.cat(token_ids)[:, work.prompt_tokens :], skip_special_tokens=True
    )
    rewards = torch.tensor([workload.reward(completion) for completion in completions])
    agent.learn((token_ids, action_masks, rewards.view(len(work.prompts), workload.GROUP_SIZE)))


def main() -> None:
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    agents = [create_agent(tokenizer)]
    agents.extend(agents[0].clone(index) for index in range(1, arguments.agents))
    step_seconds = []
    for _ in range(arguments.steps + 1):
        start = arguments.seconds()
        for agent in agents:
            learning_step(agent, tokenizer)
        step_seconds.append(arguments.seconds() - start)
    settings: dict[str, object] = {
        "reference": "an adapter of its own" if arguments.defaults else "adapters switched off",
        "trained_parameters": sum(
            p.numel() for p in agents[0].actor.parameters() if p.requires_grad
        ),
    }
    workload.write_report(
        arguments, step_seconds, ["agilerl", "transformers", "peft", "torch"], settings
    )


if __name__ == "__main__":
    main()
