"""A user-defined sampler: another process that samples with transformers from PEFT adapters.

It uses the protocol only: `Sampler.sample(rows) -> Rollout` and `Sampler.sync(slots)`.
"""

import multiprocessing
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from evogrpo import Population
from evogrpo.data import Rollout, SamplingBatch, SamplingOptions
from evogrpo.models.bank import FinishedCallback
from tests.forking import start_process
from tests.tiny_models import EOS, PAD


class GenerateSampler:
    """Sample in another process in half precision, with other log-probabilities than the trainer.

    Args:
        population: Population whose adapters it samples from.
        model: Base model.
        folder: Folder for the base and the adapters, which the other process reads.
        dtype: Precision of the other process.
    """

    def __init__(self, population: Population, model: PreTrainedModel, folder: Path, dtype: str = "bfloat16") -> None:
        self._population, self._folder = population, folder
        self.loaded: list[list[int]] = []
        model.save_pretrained(folder / "base")
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = start_process(_serve, theirs, str(folder), dtype, daemon=True)

    def sync(self, slots: "list[int]") -> None:
        self.loaded.append(list(slots))
        for slot in slots:
            path = self._folder / f"slot_{slot}"
            self._population.agents[slot].save_checkpoint(path, replace=True)
            self._ask("load", slot, str(path))

    def sample(
        self, rows: SamplingBatch, *, base: bool = False, on_finished: FinishedCallback | None = None
    ) -> Rollout:
        width = rows.max_new_tokens
        actions = torch.full((len(rows), width), PAD)
        log_probs = torch.zeros(len(rows), width)
        for row in range(len(rows)):
            told = () if rows.history is None else rows.history[row]
            prompt = [*rows.prompts[int(rows.prompt_ids[row])], *told]
            slot = None if base else int(rows.member_ids[row])
            heat = float(rows.temperature[row])
            tokens, values = self._ask("sample", slot, prompt, heat, width, rows.min_new_tokens, rows.options)
            actions[row, : len(tokens)] = torch.tensor(tokens)
            log_probs[row, : len(values)] = torch.tensor(values)
        lengths = (actions != PAD).sum(1)
        present = torch.arange(width) < lengths[:, None]
        ended = ((actions == EOS) & present).any(1)
        return Rollout(actions=actions, present=present, log_probs=log_probs, truncated=~ended, exact=False)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()

    def _ask(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._pipe.recv()


def _serve(pipe: Any, folder: str, dtype: str) -> None:
    from peft import PeftModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=getattr(torch, dtype)).eval()
    model: Any = None
    while (request := pipe.recv()) is not None:
        kind, slot, *rest = request
        if kind == "load":
            name = f"slot_{slot}"
            if model is None:
                model = PeftModel.from_pretrained(base, rest[0], adapter_name=name).eval()
            else:
                if name in model.peft_config:
                    model.delete_adapter(name)
                model.load_adapter(rest[0], adapter_name=name)
            pipe.send(None)
            continue
        if slot is None:
            with model.disable_adapter():
                pipe.send(_generated(model, *rest))
        else:
            model.set_adapter(f"slot_{slot}")
            pipe.send(_generated(model, *rest))


@torch.no_grad()
def _generated(
    model: Any, prompt: "list[int]", temperature: float, most: int, least: int, options: SamplingOptions
) -> "tuple[list[int], list[float]]":
    """Return sampled tokens and their log-probabilities."""
    heat = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    narrow = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p or None} if temperature else {}
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=most,
        min_new_tokens=least or None,
        suppress_tokens=[PAD],
        pad_token_id=PAD,
        eos_token_id=EOS,
        output_scores=True,
        return_dict_in_generate=True,
        repetition_penalty=options.repetition_penalty,
        **heat,
        **narrow,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    scores = [torch.log_softmax(score[0].float(), 0) for score in output.scores]
    return tokens, [float(score[token]) if temperature else 0.0 for score, token in zip(scores, tokens, strict=True)]
