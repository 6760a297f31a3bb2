"""What other libraries call things: a name of theirs is answered with the one that it has here."""

from collections.abc import Iterable, Mapping

_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate", "lr_actor", "actor_lr", "LR"),
    "clip_coef": ("epsilon", "eps_clip", "clip_range", "cliprange", "clip_ratio", "clip_epsilon", "pg_clip"),
    "clip_low": ("epsilon_low", "clip_ratio_low", "pg_clip_low"),
    "clip_high": ("epsilon_high", "clip_ratio_high", "pg_clip_high"),
    "group_size": ("num_generations", "num_return_sequences", "num_return_sequences_in_group", "n_samples"),
    "beta": ("kl_coef", "kl_loss_coef", "init_kl_coef", "kl_beta"),
    "update_epochs": ("num_iterations", "ppo_epochs", "n_epochs", "num_epochs"),
    "max_grad_norm": ("grad_clip", "gradient_clip", "clip_grad", "clip_grad_norm"),
    "batch_size": ("per_device_train_batch_size", "mini_batch_size", "ppo_mini_batch_size", "BATCH_SIZE"),
    "entropy_coef": ("ent_coef", "entropy_loss_coef", "entropy_coeff"),
    "gamma": ("discount", "discount_factor"),
    "advantage": ("adv_estimator",),
    "max_output_tokens": ("max_completion_length", "max_new_tokens", "response_length", "max_response_length"),
    "min_output_tokens": ("min_new_tokens",),
    "max_episode_tokens": ("max_model_len", "max_seq_length", "max_length"),
    "micro_batch_tokens": ("micro_batch_size_per_gpu", "micro_batch_size"),
    "samples_per_step": ("generation_batch_size", "rollout_batch_size"),
    "observation_spaces": ("observation_space",),
    "action_spaces": ("action_space",),
    "size": (
        "pop_size",
        "num_agents",
        "n_agents",
        "num_members",
        "population_size",
        "POP_SIZE",
        "POPULATION_SIZE",
        "tournament_size",
        "TOURN_SIZE",
    ),
    "elitism": ("ELITISM",),
    "probability": ("mut_p", "MUT_P", "rl_hp", "RL_HP_MUT", "mutation_probability"),
    "mutation": ("mutations",),
    "actor_network": ("model", "base_model", "actor"),
    "network": ("net_config", "network_config", "policy_kwargs"),
    "optimizer": ("cosine_lr_schedule_config", "lr_scheduler_type", "optim"),
    "hp_config": ("hyperparameter_config", "HP_CONFIG"),
    "lora_config": ("peft_config",),
    "factor": ("grow_factor", "shrink_factor"),
    "min": ("low", "minimum"),
    "max": ("high", "maximum"),
    "choices": ("values",),
    "strategy": ("tournament", "selection"),
    "generations": ("num_generations", "max_generations"),
    "steps_per_generation": ("evo_steps", "EVO_STEPS"),
    "target_fitness": ("target", "TARGET_SCORE"),
    "objective": ("loss", "loss_config"),
}
_NO_COUNTERPART: Mapping[str, str] = {
    "INIT_HP": "give its entries by name, such as lr and group_size",
    "dtype": "a hyperparameter's name says whether it is whole: leave it out",
    "eval_loop": "fitness is measured on a whole split: leave it out",
    "tokenizer": "an agent reads token ids: give pad_token_id, and the tokenizer to the environment",
    "ref_model": "the reference is the model without adapters: leave it out, or see reference of Objective",
    "use_vllm": "for an engine of your own see Population.sample_with",
}
"""What is to be said of names that mean nothing here."""


def counterpart(name: str, valid: Iterable[str]) -> str | None:
    """Return which of the valid names means what another library calls `name`; None if none does."""
    return next((own for own in valid if name in _ELSEWHERE.get(own, ())), None)


def remark(name: str) -> str | None:
    """Return what to do about a name of another library that has no counterpart; None if it is not known."""
    return _NO_COUNTERPART.get(name)
