"""Short labels of the texts of task settings, for tables and charts."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters, Value
from evogrpo.config.task_settings import is_task_setting
from evogrpo.evolution.history import Changes
from evogrpo.text import number_text, one_line

MAX_LABEL = 16
"""Maximum number of characters of a text that is its own label."""
_MAX_NAME = 40
_MAX_ROW = 200
# Further columns of tables of members in a terminal.
_OTHER_COLUMNS = ("slot", "member", "parent", "tokens", "actions", "time")


@dataclass(frozen=True)
class SettingLabels:
    """Short names of a run's task settings, and labels of the texts that members have as values.

    The label of a text of at most `MAX_LABEL` characters in one line is the text in quotation
    marks. Others are numbered, such as `style 2`. All names and texts are untrusted; labels have no
    control characters.

    Attributes:
        by_setting: Label of each text, by setting. Choices of the search space come first, in their
            order.
        names: Names without their group, such as `digits`, where no other setting, hyperparameter
            or column of a table has the same one.
    """

    by_setting: Mapping[str, Mapping[str, str]]
    names: Mapping[str, str]

    @classmethod
    def of(
        cls, space: Mapping[str, Mapping[str, Any]], members: Iterable[Hyperparameters]
    ) -> "SettingLabels":
        """Return the labels of a run.

        Args:
            space: Fields of each parameter of the search space, by name; untrusted.
            members: Hyperparameters of all members, in order of index.
        """
        # 1. Values of each task setting.
        found: dict[str, list[object]] = {}
        for name, fields in space.items():
            if is_task_setting(name):
                choices = fields.get("choices")
                found[name] = []
                if isinstance(choices, list | tuple):
                    found[name] += choices
        for member in members:
            for name, value in member.task_settings.items():
                found.setdefault(name, []).append(value)
        # 2. Names without group, unless ambiguous.
        short = {name: name.partition(".")[2] for name in found}
        uses = Counter([*short.values(), *HYPERPARAMETER_NAMES, *_OTHER_COLUMNS])
        names = {}
        for name, without_group in short.items():
            if uses[without_group] == 1:
                names[name] = short_name(without_group)
        # 3. Labels of texts.
        by_setting = {}
        for name, values in found.items():
            texts = dict.fromkeys(value for value in values if isinstance(value, str))
            labels = {}
            for number, text in enumerate(texts, start=1):
                labels[text] = f'"{text}"'
                if one_line(text, MAX_LABEL) != text:
                    labels[text] = f"{short_name(short[name])} {number}"
            by_setting[name] = labels
        return cls(by_setting, names)

    def name(self, name: str) -> str:
        """Return the name of a hyperparameter or a task setting, without its group if clear."""
        return self.names.get(name, short_name(name))

    def text(self, name: str, value: Value) -> str:
        """Return a value of a hyperparameter or a task setting as short text."""
        if not isinstance(value, str) or not is_task_setting(name):
            return number_text(value)
        known = self.by_setting.get(name, {})
        return known.get(value) or f'"{one_line(value, MAX_LABEL)}"'

    def named(self, name: str, value: Value) -> str:
        """Return name and value as short text, such as `digits 1`, or `style 2` for a text."""
        head = f"{self.name(name)} "
        # The label of a numbered text begins with the name.
        return head + self.text(name, value).removeprefix(head)

    def changes(self, changes: Changes) -> dict[str, tuple[str, str]]:
        """Return changes of a birth with names and values as short text."""
        texts = {}
        for name, (old, new) in changes.items():
            short = self.name(name)
            first = self.text(name, old).removeprefix(f"{short} ")
            texts[short] = (first, self.text(name, new))
        return texts

    @property
    def numbered(self) -> dict[str, str]:
        """Texts with a number in place of themselves, by label."""
        texts: dict[str, str] = {}
        for labels in self.by_setting.values():
            texts |= {label: text for text, label in labels.items() if not label.startswith('"')}
        return texts

    @property
    def rows(self) -> dict[str, str]:
        """Beginnings of the texts in `numbered` as one line, by label, for a terminal."""
        return {label: one_line(text, _MAX_ROW) for label, text in self.numbered.items()}


NO_LABELS = SettingLabels({}, {})
"""Labels of a run without task settings."""


def short_name(name: str) -> str:
    """Return the name of a hyperparameter or a task setting, cut to a width that tables have."""
    return one_line(name, _MAX_NAME)


def differing_settings(members: Iterable[Hyperparameters]) -> list[str]:
    """Return the names of task settings in which members differ, sorted."""
    settings = [member.task_settings for member in members]
    names = sorted(set().union(*settings))
    differing = []
    for name in names:
        values = {each.get(name) for each in settings}
        if len(values) > 1:
            differing.append(name)
    return differing
