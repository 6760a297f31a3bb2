"""Policy sets: the policies of all members of a population, one class per kind."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from evogrpo.algorithms.policies.language import LanguagePolicySet
    from evogrpo.algorithms.policies.networks import NetworkPolicySet

    PolicySet: TypeAlias = LanguagePolicySet | NetworkPolicySet
    """Policies of all members of a population: language models, or small networks, one or several per member."""
