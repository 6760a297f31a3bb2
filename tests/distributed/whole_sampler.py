"""Sampler with a base model of its own."""

from collections.abc import Sequence

from evogrpo.algorithms.population import Population
from evogrpo.members.bank import FinishedCallback
from evogrpo.members.language.bank import AdapterBank
from evogrpo.records import Rollout, SamplingBatch
from tests.tiny_models import PAD, tiny_model


class WholeSampler:
    """Samples from a whole base with copies of the members' weights, as the bank would."""

    def __init__(self, population: Population, architecture: str = "llama") -> None:
        self._bank: AdapterBank = population.members.banks["default"]
        self._copy = AdapterBank(
            tiny_model(architecture),
            size=self._bank.size,
            pad_token_id=PAD,
            eos_token_ids=self._bank.end_ids.tolist(),
            lora_config=self._bank.lora_config,
        )

    def sync(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._copy.load_state(slot, self._bank.state(slot))

    def sample(
        self,
        rows: SamplingBatch,
        *,
        base: bool = False,
        on_finished: FinishedCallback | None = None,
    ) -> Rollout:
        return self._copy.sample(rows, base=base, on_finished=on_finished)
