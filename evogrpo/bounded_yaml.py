"""YAML of strangers: a few lines never grow into gigabytes, and no number into one that nothing can hold."""

from typing import Any

import yaml

MOST_VALUES, MOST_DEPTH, MOST_DIGITS = 100_000, 100, 300


class BoundedLoader(yaml.SafeLoader):
    """A safe loader that refuses, before anything is built, what aliases blow up, what holds itself, and huge numbers.

    An alias counts as much as what it stands for: whoever walks through the values walks through them all.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth, self._sizes = 0, dict[int, int]()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, and count the values in it."""
        mark = self.peek_event().start_mark
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"it is nested more than {MOST_DEPTH} levels deep", mark)
        alias = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "the alias stands for something that it is in", mark)
        if not alias:
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in _children(node))
        if self._sizes[id(node)] > MOST_VALUES:
            why = f"there are more than {MOST_VALUES:,} values, what aliases stand for counted each time"
            raise yaml.composer.ComposerError(None, None, why, mark)
        return node  # type: ignore[no-any-return]

    def construct_yaml_int(self, node: Any) -> int:
        """Read a whole number, if it is one that a float can stand for."""
        if len(node.value) > MOST_DIGITS:
            why = f"a whole number has at most {MOST_DIGITS} digits, got {len(node.value):,}"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)
        return int(super().construct_yaml_int(node))


BoundedLoader.add_constructor("tag:yaml.org,2002:int", BoundedLoader.construct_yaml_int)


def bounded_yaml(text: str, where: str, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """Parse YAML.

    Args:
        text: The YAML.
        where: What it is, for messages: a file name, say.
        loader: Reads it.

    Raises:
        ValueError: If it is not YAML, or more than is bearable; with the line.
    """
    try:
        return yaml.load(text, loader)  # noqa: S506 (a subclass of SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{where}{place}: {getattr(error, 'problem', None) or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # What yaml itself raises for values that are not what they are tagged as, or look like: dates, say.
        raise ValueError(f"{where}: a value is not what it is tagged as, or looks like ({error!s:.200})") from error


def _children(node: Any) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
