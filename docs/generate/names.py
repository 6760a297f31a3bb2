"""Public names of a package, as input of Sphinx's autodoc."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from docs.generate.docstrings import as_markup

PACKAGES = (
    "evogrpo",
    "evogrpo.config.hyperparameters",
    "evogrpo.config.optimizer",
    "evogrpo.config.search_space",
    "evogrpo.functional.loss_types",
    "evogrpo.config.objective",
    "evogrpo.evolution",
    "evogrpo.evolution.strategies",
    "evogrpo.records",
    "evogrpo.storage.checkpoint",
    "evogrpo.cli",
)
"""Packages and modules with an `__all__`, in page order; a name is described on the first."""

INTERFACES = {
    "evogrpo.training.evolve": ("Run",),
    "evogrpo.reporting.records": (
        *("GenerationReport", "MemberReport", "BaselineReport", "TestReport"),
        *("StepReport", "MemberStep", "Example", "Estimate", "EvaluationCost"),
        *("Result", "BestMember"),
    ),
    "evogrpo.reporting.report": ("RunReport",),
    "evogrpo.reporting.data_frames": ("RunFrames",),
    "evogrpo.learn_reports": ("LearnReport", "UpdateReport"),
    "evogrpo.training.schedule": ("Schedule",),
    "evogrpo.algorithms.agent": ("Agent",),
    "evogrpo.compat.translation": ("Imported",),
    "evogrpo.config.agent": (
        "LanguageOptions",
        "NetworkOptions",
        "TeamOptions",
        "AgentOptions",
        "Seeded",
    ),
    "evogrpo.algorithms.factory": ("CommonOptions", "Options", "MultiAgentOptions"),
    "evogrpo.envs.text.prompt_settings": ("PromptOptions",),
    "evogrpo.members.language.loading": ("load_base", "BaseModel"),
    "evogrpo.members.bank": ("Sampler", "PolicyBank"),
    "evogrpo.envs.protocol": (
        *("GroupEnvironment", "PromptBatch", "Scores", "SPLITS", "Split", "shuffled_starts"),
        *("SupportsDate", "SupportsFingerprint", "SupportsPreflight", "SupportsProgress"),
    ),
    "evogrpo.envs.text.datasets": ("Filtered",),
    "evogrpo.envs.text.reward_functions": ("RewardError",),
    "evogrpo.envs.text.tasks": ("TASKS", "Task"),
    "evogrpo.members.members": ("Members", "BankMembers", "SavedMembers"),
    "evogrpo.members.requests": (
        *("Learner", "SamplingRequest", "RolloutBatch", "EvaluationRequest"),
    ),
    "evogrpo.members.language.members": ("LanguageMembers",),
    "evogrpo.members.networks.members": ("NetworkMembers",),
}  # fmt: skip
"""Types that are reached through public names or implemented by users, by module."""


_FOREIGN = (
    "Generic",
    "Protocol",
    "Mapping",
    "Sequence",
    "dict",
    "Iterator",
    "object",
    "Exception",
    "ValueError",
)
"""Base classes whose methods are not repeated in their subclasses."""


def described(package: str) -> Iterator[tuple[str, str]]:
    """Yield names and modules of this package's page, without those of earlier packages."""
    before: set[int] = set()
    for each in PACKAGES[: PACKAGES.index(package)]:
        module = import_module(each)
        before |= {id(getattr(module, name)) for name in module.__all__}
    module = import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if id(value) not in before or not _is_code(value):
            yield name, package


def elsewhere(package: str) -> list[str]:
    """Return the names of a package that an earlier page describes."""
    described_here = {name for name, _ in described(package)}
    return [name for name in import_module(package).__all__ if name not in described_here]


def page(package: str) -> str:
    """Return the reStructuredText for names of a package, or for those of "interfaces" only."""
    if package == "interfaces":
        return "\n\n".join(
            _entry(name, module) for module, names in INTERFACES.items() for name in names
        )
    return "\n\n".join(_entry(name, home) for name, home in described(package))


def _entry(name: str, home: str) -> str:
    value = getattr(import_module(home), name)
    full = f"{home}.{name}"
    if inspect.isclass(value):
        # Docstrings of records describe their fields.
        inherited = (
            ""
            if dataclasses.is_dataclass(value)
            else f"   :inherited-members: {', '.join(_FOREIGN)}\n"
        )
        return f".. autoclass:: {full}\n   :members:\n{inherited}"
    if inspect.isfunction(value):
        return f".. autofunction:: {full}"
    text = "\n".join(f"   {line}".rstrip() for line in as_markup(_text_below(name, home)))
    return f".. py:data:: {full}\n\n{text}"


def _text_below(name: str, home: str) -> Sequence[str]:
    """Return the text below an assignment, in the module or where it is imported from."""
    while True:
        file = Path(import_module(home).__file__ or "")
        # The stub of the package says where its names come from.
        stub = file.with_suffix(".pyi")
        tree = ast.parse((stub if stub.exists() else file).read_text(encoding="utf-8"))
        for node, after in pairwise([*tree.body, ast.Pass()]):
            if _assigned(node) == name:
                text = after.value if isinstance(after, ast.Expr) else None
                return (
                    inspect.cleandoc(text.value).splitlines()
                    if isinstance(text, ast.Constant)
                    else ()
                )
        homes = (
            each.module
            for each in ast.walk(tree)
            if isinstance(each, ast.ImportFrom) and _imports(each, name)
        )
        home = next(homes) or ""


def _assigned(node: ast.stmt) -> str | None:
    for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
        if isinstance(target, ast.Name):
            return target.id
    return None


def _imports(node: ast.ImportFrom, name: str) -> bool:
    return any(alias.name == name for alias in node.names)


def _is_code(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)
