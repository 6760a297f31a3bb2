"""The reference pages cover every key, metric, command and public name."""

import inspect
import re
from importlib import import_module

import pytest

from docs.generate import commands, configuration, keywords, metrics, names
from docs.generate.pages import PAGES as GENERATED
from evogrpo.cli.main import make_parser
from evogrpo.reporting.records import StepReport
from evogrpo.training.configuration.reading import _sections
from tests.docs.test_links import PAGES, ROOT

SECTIONS = configuration.sections()


@pytest.mark.parametrize(
    "section", SECTIONS, ids=lambda section: f"{section.path}: {section.title}"
)
def test_every_key_has_a_description_and_a_type(section):
    for key in configuration.keys(section):
        assert key.description, (
            f"{key.path} has no description: give {section.record.__name__} an entry for it"
        )
        assert key.kind


def test_all_keys_of_configurations_are_listed():
    listed = set()
    for section in SECTIONS:
        listed.update(key.path for key in configuration.keys(section))
    prefixes = {section.path for section in SECTIONS}
    for section_path, keys in _sections():
        for key in keys:
            path = f"{section_path}.{key}".removeprefix(".")
            assert path in listed | prefixes | {"auto", "run_id", "search_space"}, path


def test_keyword_arguments_follow_from_the_records_of_settings():
    assert keywords.FILE.read_text(encoding="utf-8") == keywords.module(), (
        "Run `python -m docs.generate.keywords`."
    )


def test_every_recorded_number_is_defined(any_stored_run):
    steps = [report for report in any_stored_run.reports if isinstance(report, StepReport)]
    found = set()
    for step in steps:
        for member in step.learned.values():
            found.update(member.metrics)
    assert len(found) > 20
    assert [name for name in sorted(found) if metrics.definition(name) is None] == []


def test_every_command_and_option_is_listed():
    page = commands.page()
    (choice,) = [
        each
        for each in make_parser()._actions
        if hasattr(each, "choices") and isinstance(each.choices, dict)
    ]
    assert len(choice.choices) > 10
    for name, parser in choice.choices.items():
        assert f"## evogrpo {name}\n" in page
        for action in parser._actions:
            assert action.help, f"evogrpo {name}: {action.dest} says nothing of itself"
            assert action.dest in commands._EVERYWHERE or all(
                f"`{option}" in page for option in action.option_strings
            )


@pytest.mark.parametrize("package", names.PACKAGES)
def test_every_public_name_is_described_once(package):
    page = names.page(package)
    for name, home in names.described(package):
        assert f":: {home}.{name}\n" in f"{page}\n"
        value = getattr(import_module(home), name)
        assert inspect.getdoc(value) if names._is_code(value) else names._text_below(name, home), (
            name
        )
    for name in names.elsewhere(package):
        assert f":: {package}.{name}\n" not in f"{page}\n"


WRITTEN = {str(page.relative_to(ROOT)): page for page in PAGES}


@pytest.mark.parametrize("name", [*WRITTEN, *GENERATED])
def test_angle_brackets_are_in_code(name):
    """Browsers hide `<tag>` outside of code."""
    if name in WRITTEN:
        listed = WRITTEN[name].read_text(encoding="utf-8")
    else:
        listed = GENERATED[name]()
    plain = re.sub(
        r"^```.*?^```|`[^`]*`|<!--.*?-->|<https?:[^>]*>", "", listed, flags=re.DOTALL | re.MULTILINE
    )
    assert re.findall(r"</?[A-Za-z][^>]*>", plain) == []
